"""How long pages of the console take: ``python -m bench.console``.

A store with so many topics (``--topics``, several times; 1,000 and 10,000 by default), a few of them with records and
groups, one of them appended to all the while by another thread, and a door on this machine that is asked for one page
after the other over one connection. Of each page the first time, the median and the slowest in a hundred are shown.
What a browser does with it is not in it.

Beside the pages: one look at all topics, which the list of topics is made of, and how many records a second a search
looks at that finds nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import httpx

import segmentlog
from bench.arguments import existing_folder, one_or_more
from segmentlog.clock import Clock
from segmentlog.http.console.topic_overview import OverviewCache
from segmentlog.http.serving import HttpServer
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore

_BUSY = "topic-00000"
_GROUPS = 20
_APPEND_EVERY_S = 0.005
_PAGES = {
    "topics": "/",
    "topics, by size": "/?sort=size&dir=desc",
    "topics, filtered": "/?q=99",
    "one topic": f"/topics/{_BUSY}",
    "one partition": f"/topics/{_BUSY}/partitions/0",
    "newest 50 records": f"/topics/{_BUSY}/records",
    "50 records by time": f"/topics/{_BUSY}/records?at=time&where=-1h",
    "one record": f"/topics/{_BUSY}/records/0/50",
    "groups": "/groups",
    "one group": "/groups/group?group=group-0",
    "transactions": "/transactions",
    "damage": "/damage",
}
_NOTHING = f"/topics/{_BUSY}/records?at=start&path=nothing+%3D+1"


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=one_or_more, action="append", help="how many (default 1,000 and 10,000)")
    parser.add_argument("--records", type=one_or_more, default=200_000, help="of the busy topic (default 200,000)")
    parser.add_argument("--times", type=one_or_more, default=100, help="each page is asked for (default 100)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    for count in options.topics or (1_000, 10_000):
        folder = tempfile.mkdtemp(prefix="segmentlog-console-", dir=options.dir)
        try:
            with segmentlog.open(folder) as store:
                print(f"making {count:,} topics ...", file=sys.stderr, end="\r", flush=True)
                fill(store, count, options.records)
                for figure in measure(store, options.times):
                    show({"topics": count, **figure}, as_json=options.json)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def fill(store: LogStore, count: int, records: int) -> None:
    """Make the topics: all with a record, the first with all of them."""
    for at in range(count):
        store.create_topic(f"topic-{at:05}", 2 if at else 4, fsync="never").partition(0).append([b"first"])
    partitions = store.topic(_BUSY).partitions()
    for begin in range(0, records, 1000):
        values = [
            json.dumps({"at": at, "user": {"id": at % 1000}}).encode()
            for at in range(begin, min(begin + 1000, records))
        ]
        partitions[begin // 1000 % 4].append(values, keys=[b"user-%d" % (at % 1000) for at in range(len(values))])
    for at in range(_GROUPS):
        store.groups.reset(f"group-{at}", {TopicPartition(_BUSY, number): 0 for number in range(4)})
    with store.producer(name="etl") as producer, producer.transaction():
        producer.send(_BUSY, b"{}")


def measure(store: LogStore, times: int) -> Iterator[dict[str, object]]:
    """Yield the time of each page in milliseconds, and the other figures."""
    overviews = OverviewCache(store, Clock())
    overviews.refresh()  # the first one opens files
    looks = []
    for _ in range(5):
        overviews.invalidate()
        began_s = time.perf_counter()
        overviews.refresh()
        looks.append((time.perf_counter() - began_s) * 1000)
    yield {"what": "a look at all", "median_ms": statistics.median(looks)}
    ended = threading.Event()
    appender = threading.Thread(target=_append, args=(store, ended))
    appender.start()
    try:
        with (
            HttpServer(store, "127.0.0.1", 0) as server,
            httpx.Client(base_url=f"{server.url}/ui", timeout=120) as client,
        ):
            for name, path in _PAGES.items():
                took = [_ask(client, path)[0] for _ in range(times)]
                yield {
                    "what": name, "first_ms": took[0], "median_ms": statistics.median(took),
                    "p99_ms": sorted(took)[int(len(took) * 0.99)],
                }  # fmt: skip
            yield {"what": "records searched a second", "per_s": _search(client)}
    finally:
        ended.set()
        appender.join()


def _append(store: LogStore, ended: threading.Event) -> None:
    log = store.topic(_BUSY).partition(0)
    while not ended.wait(_APPEND_EVERY_S):
        log.append([b'{"at": -1}'])


def _ask(client: httpx.Client, path: str) -> tuple[float, str]:
    began_s = time.perf_counter()
    answer = client.get(path)
    took_ms = (time.perf_counter() - began_s) * 1000
    assert answer.status_code == 200, answer.text
    return took_ms, answer.text


def _search(client: httpx.Client) -> float:
    began_s = time.perf_counter()
    _, text = _ask(client, _NOTHING)
    count = int(text.partition("Examined ")[2].partition(" records")[0].replace(",", ""))
    return count / (time.perf_counter() - began_s)


def show(figure: dict[str, object], *, as_json: bool) -> None:
    """One line."""
    if as_json:
        print(json.dumps(figure), flush=True)
        return
    words = [f"{figure['topics']:>7,}", f"{figure['what']:28}"]
    for name in ("first_ms", "median_ms", "p99_ms"):
        if name in figure:
            words.append(f"{name.removesuffix('_ms')} {figure[name]:>9,.1f} ms")
    words += [f"{figure['per_s']:>14,.0f}"] if "per_s" in figure else []
    print("  ".join(words), flush=True)


if __name__ == "__main__":
    sys.exit(main())
