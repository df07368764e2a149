"""The asynchronous clients beside the threaded ones, on the same records: ``python -m bench.aio``.

Both sides of a row are run in turn, and the ratio is that of the same round. ``send``: a record at a time, without
waiting for its delivery, until all are appended. ``send_many``: lists of 10,000. Reading: records one by one, batches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from bench.arguments import existing_folder, one_or_more
from bench.measure import Row, Side, open_store, print_table
from bench.workload import Workload, json_records
from segmentlog.store import LogStore

_LIST_RECORDS = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=one_or_more, default=7, help="how often each side is measured (default 7)")
    parser.add_argument("--records", type=one_or_more, default=200_000, help="records of a round (default 200,000)")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-aio-", dir=options.dir))
    try:
        results = [row.measure(folder / "row", options.rounds, options.records / 200_000) for row in rows()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        for result in results:
            print(json.dumps(msgspec.to_builtins(result)))
    else:
        print_table(results, "asyncio beside threads")
    return 0


def rows() -> list[Row]:
    """Return the rows that are compared."""
    return [
        Row("send, one by one", "records/s", 0.8, at_least=True, prepare=_prepared(_asends, _sends)),
        Row("send_many, lists of 10,000", "records/s", 0.8, at_least=True, prepare=_prepared(_alists, _lists)),
        Row("records, one by one", "records/s", 0.8, at_least=True, prepare=_prepared(_areads, _reads, is_filled=True)),
        Row("batches", "records/s", 0.8, at_least=True, prepare=_prepared(_abatches, _batches, is_filled=True)),
    ]


def _prepared(
    ours: Callable[[LogStore, Workload], Awaitable[None]],
    limit: Callable[[LogStore, Workload], None],
    *,
    is_filled: bool = False,
) -> Callable[[Path, float], tuple[Side, Side | None]]:
    def prepare(folder: Path, scale: float) -> tuple[Side, Side | None]:
        work = json_records(max(int(200_000 * scale) // _LIST_RECORDS, 1), _LIST_RECORDS)
        store = open_store(folder / "store")
        log = store.create_topic("t", fsync="never").partition(0)
        if is_filled:
            for values in work.values:
                log.append(values)

        def rate(run: Callable[[], object]) -> float:
            if not is_filled:
                log.trim(log.log_end_offset)  # so that the disk does not fill up
            started = time.perf_counter()
            run()
            return work.record_count / (time.perf_counter() - started)

        async def all_of_ours() -> None:
            await ours(store, work)

        return lambda: rate(lambda: asyncio.run(all_of_ours())), lambda: rate(lambda: limit(store, work))

    return prepare


async def _asends(store: LogStore, work: Workload) -> None:
    async with store.aproducer() as producer:
        for values in work.values:
            for value in values:
                await producer.send("t", value)


def _sends(store: LogStore, work: Workload) -> None:
    with store.producer() as producer:
        for values in work.values:
            for value in values:
                producer.send("t", value)


async def _alists(store: LogStore, work: Workload) -> None:
    async with store.aproducer() as producer:
        for values in work.values:
            await producer.send_many("t", values)


def _lists(store: LogStore, work: Workload) -> None:
    with store.producer() as producer:
        for values in work.values:
            producer.send_many("t", values)


async def _areads(store: LogStore, work: Workload) -> None:
    async with store.aconsumer("t") as consumer:
        count = 0
        async for _ in consumer:
            count += 1
    assert count == work.record_count


def _reads(store: LogStore, work: Workload) -> None:
    with store.consumer("t") as consumer:
        count = 0
        for _ in consumer:
            count += 1
    assert count == work.record_count


async def _abatches(store: LogStore, work: Workload) -> None:
    async with store.aconsumer("t") as consumer:
        count = 0
        async for batch in consumer.batches():
            count += len(batch.values)
    assert count == work.record_count


def _batches(store: LogStore, work: Workload) -> None:
    with store.consumer("t") as consumer:
        count = sum(len(batch.values) for batch in consumer.batches())
    assert count == work.record_count


if __name__ == "__main__":
    sys.exit(main())
