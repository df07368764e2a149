"""Searches of records find every match once, and report how far they came."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest
from seeds import seeds

from segmentlog.consuming.record_filter import RecordFilter
from segmentlog.http.console.record_search import find_record, search
from segmentlog.log.partition import Partition
from segmentlog.store import LogStore


@pytest.fixture
def logs(store: LogStore) -> list[Partition]:
    """Provide three partitions with rising timestamps, batches of several sizes and several segments."""
    store.create_topic("t", 3, {"segment.records": 40, "retention.ms": "unlimited"})
    found = store.topic("t").partitions()
    for at in range(300):
        log = found[at % 3]
        value = json.dumps({"at": at, "third": at % 3}).encode()
        headers = [[("h", b"%d" % (at % 5))]]
        if at % 4:
            log.append([value], keys=[b"k%d" % (at % 10)], timestamps=[1000 + at], headers=headers)
        else:
            log.append([value, value + b" "], timestamps=[1000 + at, 1000 + at])
    return found


def _all(logs: list[Partition]) -> list[tuple[int, int]]:
    return [(log.number, record.offset) for log in logs for batch in log.read(0) for record in batch]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("limit", [4, 50, 1000])
def test_going_on_comes_by_every_record_once(logs: list[Partition], limit: int, *, backwards: bool) -> None:
    """Continued searches return every record once, in either order of time and with any page size."""
    cursors = {log.number: log.log_end_offset if backwards else 0 for log in logs}
    seen = []
    for _ in range(1000):
        found = search(logs, cursors, RecordFilter(), limit=limit, backwards=backwards)
        assert len(found.records) <= limit
        seen += found.records
        cursors = found.cursors
        if found.is_complete:
            break
        assert found.limit
    assert sorted((record.partition, record.offset) for record in seen) == _all(logs)
    times = [record.timestamp for record in seen]
    assert times == sorted(times, reverse=backwards)


@pytest.mark.parametrize("seed", seeds("console-search"))
def test_a_search_finds_what_a_look_at_every_record_finds(logs: list[Partition], seed: int) -> None:
    """Filters by key, value, JSON path and header, alone and combined, in both directions and with little time."""
    rng = random.Random(seed)
    for _ in range(12):
        given = {
            "key": f"k{rng.randrange(12)}" if rng.random() < 0.5 else "",
            "value": str(rng.randrange(100)) if rng.random() < 0.3 else "",
            "path": f"at >= {rng.randrange(300)}" if rng.random() < 0.5 else "",
            "header": rng.choice(["h", f"h={rng.randrange(6)}", "none"]) if rng.random() < 0.3 else "",
        }
        record_filter = RecordFilter.parse(**given)
        expected = {
            (record.partition, record.offset)
            for log in logs
            for batch in log.read(0)
            for record in batch
            if (not given["key"] or record.key == given["key"].encode())
            and (not given["value"] or given["value"].encode() in (record.value or b""))
            and (not given["path"] or json.loads(record.value or b"")["at"] >= int(given["path"].split()[-1]))
            and (not given["header"] or _has(record.headers, given["header"]))
        }
        backwards = rng.random() < 0.5
        cursors = {log.number: log.log_end_offset if backwards else 0 for log in logs}
        seconds = rng.choice([0.0, 1.0])
        seen: list[tuple[int, int]] = []
        while True:
            found = search(
                logs, cursors, record_filter, limit=rng.randrange(1, 20), backwards=backwards, seconds=seconds
            )
            seen += [(record.partition, record.offset) for record in found.records]
            cursors = found.cursors
            if found.is_complete:
                break
        assert len(seen) == len(set(seen))
        assert set(seen) == expected, given


def _has(headers: object, record_filter: str) -> bool:
    name, _, value = record_filter.partition("=")
    return any(one == name and (not value or data == value.encode()) for one, data in headers)  # type: ignore[attr-defined]


def test_a_search_that_is_cut_short_says_where_it_came_to(logs: list[Partition]) -> None:
    """Every search advances, however small its budget is."""
    found = search(logs, {0: 0, 1: 0, 2: 0}, RecordFilter.parse(value="nowhere"), limit=10, seconds=0.0)
    assert not found.is_complete
    assert found.limit == "time"
    assert found.cursors[0] > 0
    found = search(logs, {0: 0, 1: 0, 2: 0}, RecordFilter.parse(value="nowhere"), limit=10, size_bytes=1)
    assert found.limit == "bytes"
    assert all(found.cursors.values())


def test_damage_is_stepped_over_and_told(tmp_path: Path) -> None:
    """Damaged batches are skipped and reported with their offsets."""
    with LogStore(tmp_path / "store") as store:
        store.create_topic("t", 1, {"compression.type": "none"})
        log = store.topic("t").partition(0)
        for at in range(5):
            log.append([b"value %d" % at])
        path = log.segments()[0].path
    data = bytearray(Path(path).read_bytes())
    data[data.index(b"value 2")] ^= 1
    Path(path).write_bytes(data)
    with LogStore(tmp_path / "store") as store:
        log = store.topic("t").partition(0)
        for backwards in (False, True):
            found = search([log], {0: 5 * backwards}, RecordFilter(), limit=10, backwards=backwards)
            assert sorted(record.offset for record in found.records) == [0, 1, 3, 4]
            assert [(one.base_offset, one.end_offset) for one in found.damage] == [(2, 3)]


def test_a_lost_range_and_trimmed_records_are_passed(logs: list[Partition]) -> None:
    """A search that starts within deleted or lost offsets continues after them."""
    log = logs[0]
    log.truncate(60)
    log.append([b"behind"])
    log.trim(20)
    found = search([log], {0: 0}, RecordFilter(), limit=1000)
    assert [record.offset for record in found.records] == [*range(20, 60), log.log_end_offset - 1]
    found = search([log], {0: log.log_end_offset}, RecordFilter(), limit=1000, backwards=True)
    assert [record.offset for record in found.records] == [log.log_end_offset - 1, *range(59, 19, -1)]
    assert find_record(log, 61) is None
    assert find_record(log, 19) is None
    assert find_record(log, 1 << 60) is None
    record = find_record(log, 59)
    assert record is not None
    assert record.offset == 59


def test_what_was_aborted_is_left_out_on_request(store: LogStore) -> None:
    """With read_committed, aborted records are omitted, and the end is the last stable offset."""
    store.create_topic("t")
    with store.producer(name="p") as producer:
        producer.send("t", b"first").result()
        with contextlib.suppress(ZeroDivisionError), producer.transaction():
            producer.send("t", b"aborted")
            producer.flush()
            raise ZeroDivisionError
    log = store.topic("t").partition(0)
    for isolation, count in (("read_uncommitted", 2), ("read_committed", 1)):
        for backwards in (False, True):
            begin = log.log_end_offset if backwards else 0
            found = search([log], {0: begin}, RecordFilter(), limit=9, backwards=backwards, isolation=isolation)  # type: ignore[arg-type]
            assert len(found.records) == count
            assert found.is_complete
