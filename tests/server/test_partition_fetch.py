"""Responses of repeated fetches, which read nothing from the log again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logs import machine_dies, open_log
from wire import Sent, foreign

from segmentlog.format.wire_conversion import to_wire_batches
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.server.converted_batch_cache import ConvertedBatchCache
from segmentlog.server.fetch_sessions import SessionPartition
from segmentlog.server.partition_fetch import Bounds, read_batches

EVERYTHING = 1 << 30


def append(log: Partition, count: int, start: int = 0) -> None:
    """Append ``count`` batches through the library, of three records each."""
    for number in range(start, start + count):
        log.append([b"%d-%d" % (number, one) + b"v" * (number * 37 % 90) for one in range(3)], keys=[b"a", b"b", b"c"])


def there(log: Partition, offset: int = 0) -> bytes:
    """Return the bytes that Kafka's clients would read, from an independent read of all batches."""
    return b"".join(wire for batch in log.read(offset) for wire in to_wire_batches(batch))


class Fetches:
    """Fetches of one server; it counts what is looked at in the log."""

    def __init__(self) -> None:
        self.converted_batches = ConvertedBatchCache()
        self.looked: list[int] = []

    def __call__(self, log: Partition, offset: int = 0, max_bytes: int = EVERYTHING) -> bytes:
        self.looked.clear()
        bounds = Bounds(log, is_committed=False, durable_only=False)
        wanted = SessionPartition("t", bytes(16), 0, offset, max_bytes)
        data = read_batches(log, bounds, wanted, max_bytes, at_least_one=True, converted_batches=self.converted_batches)
        assert not data.error_code
        return b"".join(data.records) if isinstance(data.records, list) else bytes(data.records or b"")


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> Fetches:
    """Return the fetches of one server."""
    fetches, whole = Fetches(), Partition.read

    def counted(self: Partition, offset: int, *args: Any, **options: Any) -> Any:
        for batch in whole(self, offset, *args, **options):
            fetches.looked.append(batch.header.base_offset)
            yield batch

    monkeypatch.setattr(Partition, "read", counted)
    return fetches


def expected(log: Partition, fetch: Fetches, offset: int = 0) -> bytes:
    """`there`, without being counted."""
    found = there(log, offset)
    fetch.looked.clear()
    return found


def test_nothing_is_looked_at_twice(tmp_path: Path, fetch: Fetches) -> None:
    """Fetches begin at any batch and have any size; appended batches are read once."""
    log = open_log(tmp_path)
    append(log, 20)
    assert fetch(log) == expected(log, fetch)
    for offset in (0, 3, 30):
        assert fetch(log, offset) == expected(log, fetch, offset)
        assert fetch(log, offset)
        assert not fetch.looked
    first, second = (len(b"".join(to_wire_batches(batch))) for batch in list(log.read(0))[:2])
    assert fetch(log, 0, first + second - 1) == expected(log, fetch)[:first]
    assert fetch(log, 0, 1) == expected(log, fetch)[:first], "at least one"
    append(log, 2, 20)
    assert fetch(log) == expected(log, fetch)
    assert fetch(log)
    assert not fetch.looked
    assert fetch(log, 4) == expected(log, fetch, 4), "in the middle of a batch: from its records on"


def test_batches_of_kafkas_between(tmp_path: Path, fetch: Fetches) -> None:
    """Client batches are not converted; converted batches around them are found in the cache."""
    log = open_log(tmp_path)
    for number in range(0, 12, 2):
        append(log, 2, number)
        log.append_wire(foreign([Sent(b"k", b"%d" % number)]))
    for _ in range(3):
        assert fetch(log) == expected(log, fetch)


@pytest.mark.parametrize("how", ["compacted", "truncated", "died", "trimmed"])
def test_what_is_other_by_now_is_looked_at(tmp_path: Path, fetch: Fetches, how: str) -> None:
    """After any change of the log, a fetch returns its current content."""
    log = open_log(tmp_path, **{"cleanup.policy": "compact", "segment.bytes": "1kb"})
    append(log, 30)
    before = fetch(log)
    assert fetch(log) == before
    change: dict[str, Callable[[], object]] = {
        "compacted": log.compact,
        "truncated": lambda: log.truncate(45),
        "died": lambda: machine_dies(log),
        "trimmed": lambda: log.trim(45),
    }
    change[how]()
    if how == "died":
        log = open_log(tmp_path)
    append(log, 3, 100)
    start = log.log_start_offset
    after = fetch(log, start)
    assert after == expected(log, fetch, start)
    assert after != before
    assert fetch(log, start) == after


def test_what_was_aborted_is_told_with_the_batches_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two compactions come between the batches and the list: the aborted records and their marker are gone by then."""
    log = open_log(tmp_path, cleanup_policy="compact", fsync="never")
    for number, committed in enumerate([False, True]):
        stamp = ProducerStamp(7, 0, -1, transactional=True)
        log.append([b"%d" % number], [b"a"], producer=stamp)
        log.append([b"%d" % number], [b"b"], producer=stamp)
        log.end_transaction(7, 0, committed=committed)
        log.roll()
    looked = Partition.aborted_transactions
    passes = [log.compact, log.compact]

    def look(self: Partition, *offsets: int) -> list[tuple[int, int]]:
        while passes:
            passes.pop()()
        return looked(self, *offsets)

    monkeypatch.setattr(Partition, "aborted_transactions", look)

    def fetch() -> tuple[list[int], bytes]:
        bounds = Bounds(log, is_committed=True, durable_only=False)
        requested = SessionPartition("t", bytes(16), 0, 0, EVERYTHING)
        converted_batches = ConvertedBatchCache()
        data = read_batches(log, bounds, requested, EVERYTHING, at_least_one=True, converted_batches=converted_batches)
        records = b"".join(data.records) if isinstance(data.records, list) else bytes(data.records or b"")
        return [one.first_offset for one in data.aborted_transactions or ()], records

    first = fetch()
    assert not passes
    assert first == fetch()
    assert [batch.header.base_offset for batch in log.read(0, control=True) if batch.header.is_control] == [5]
