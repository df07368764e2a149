"""Tables: the latest value of each key, whatever was written, deleted, compacted or cut off meanwhile."""

from __future__ import annotations

import gc
import random
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import NOW_MS, FakeClock
from seeds import seeds

import segmentlog
from segmentlog.config import EXPIRES_HEADER
from segmentlog.errors import OffsetOutOfRange, StoreClosed, UnknownTopic
from segmentlog.format.key_hashes import identities_of, identity_of
from segmentlog.log.partition import Partition
from segmentlog.records import Record
from segmentlog.store import LogStore
from segmentlog.tables.key_table import OFFSET_MAX, KeyTable
from segmentlog.tables.table import Table

KEYS = [b"", b"a", b"a\0", b"b", b"fifteen bytes..", b"sixteen bytes...", b"x" * 40, b"x" * 41, b"\xff" * 15]
_ROLL: dict[str, Any] = {"segment_records": 4, "cleanup_policy": "compact", "fsync": "never"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide an open store with an empty topic ``users`` of one partition."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("users", fsync="never", segment_records=4)
        yield store


def _put(log: Partition, *pairs: tuple[bytes | None, bytes | None], at_ms: int = 1000) -> None:
    keys, values = zip(*pairs, strict=True)
    log.append(list(values), keys=list(keys), timestamps=[at_ms] * len(pairs))


def _expected(logs: list[Partition], limits: dict[int, int] | None = None) -> dict[bytes, bytes]:
    """Compute the table with a dict: the last record of each partition, then the latest of the partitions."""
    last: dict[bytes, dict[int, Record]] = {}
    for log in logs:
        for batch in log.read(log.log_start_offset):
            for record in batch.records():
                if record.key is not None and (limits is None or record.offset < limits[log.number]):
                    last.setdefault(record.key, {})[log.number] = record
    best = {key: max(of.values(), key=lambda one: (one.timestamp, one.partition)) for key, of in last.items()}
    return {key: record.value for key, record in best.items() if record.value is not None}


def _check(table: Table, expected: dict[bytes, bytes]) -> None:
    """Check that all ways to read a table agree."""
    assert dict(table.items()) == expected
    assert len(table) == len(expected)
    assert sorted(table) == sorted(expected)
    assert sorted(table.values()) == sorted(expected.values())
    for key in KEYS:
        assert table.get(key) == expected.get(key)
        assert (key in table) == (key in expected)


# ---------------------------------------------------------------- one topic


def test_a_topic_is_a_table(store: LogStore) -> None:
    """The last value of each key; null values delete, null keys are counted and nothing else."""
    log = store.topic("users").partition(0)
    _put(log, (b"ann", b"1"), (None, b"x"), (b"bob", b"2"), (b"ann", b"3"), (b"bob", None), (None, None))
    table = Table(store, "users")
    assert dict(table) == {b"ann": b"3"}
    assert table.keyless_count == 2
    assert table[b"ann"] == b"3"
    assert b"bob" not in table
    with pytest.raises(KeyError):
        table[b"bob"]
    assert table == {b"ann": b"3"}
    assert "users, 1 keys" in repr(table)


def test_the_whole_record_can_be_had(store: LogStore) -> None:
    """`record` tells partition, offset, timestamp and headers besides the value."""
    log = store.topic("users").partition(0)
    log.append([b"1", b"2"], keys=[b"ann", b"bob"], timestamps=[7, 8], headers=[[("trace", b"t")], None])
    table = Table(store, "users")
    assert table.record(b"ann") == Record("users", 0, 0, 7, b"ann", b"1", (("trace", b"t"),), log.epoch)
    assert table.record(b"bob") == Record("users", 0, 1, 8, b"bob", b"2", (), log.epoch)
    assert table.record(b"carl") is None


def test_keys_are_bytes(store: LogStore) -> None:
    """A text as key raises an error, because it would never be found."""
    table = Table(store, "users")
    wrong: list[Any] = ["ann", 1, None, bytearray(b"ann")]
    for key in wrong:
        for access in (table.__getitem__, table.get, table.__contains__, table.record):
            with pytest.raises(TypeError, match="keys are bytes"):
                access(key)


def test_unknown_topics_and_closed_stores(tmp_path: Path) -> None:
    """A table needs a topic when it is made, and an open store when it is used."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        with pytest.raises(UnknownTopic):
            Table(store, "nothing")
        _put(store.create_topic("users").partition(0), (b"ann", b"1"))
        store.create_topic("gone")
        table, of_deleted = Table(store, "users"), Table(store, "gone")
        assert table[b"ann"] == b"1"
        store.delete_topic("gone")
        for access in (of_deleted.refresh, of_deleted.__len__, lambda: of_deleted.get(b"a"), lambda: list(of_deleted)):
            with pytest.raises(UnknownTopic):
                access()
    accesses: list[Any] = [table.refresh, table.__len__, lambda: table[b"ann"], lambda: list(table)]
    for access in (*accesses, lambda: list(table.changes(0)), lambda: table.as_of(0)):
        with pytest.raises(StoreClosed):
            access()


def test_refresh_reads_what_is_new(store: LogStore) -> None:
    """Before a refresh, the table stays the same."""
    log = store.topic("users").partition(0)
    _put(log, (b"a", b"1"))
    table = Table(store, "users")
    _put(log, (b"a", b"2"), (b"b", b"1"), (None, b"x"))
    assert dict(table) == {b"a": b"1"}
    assert table.refresh() == 3
    assert dict(table) == {b"a": b"2", b"b": b"1"}
    assert table.refresh() == 0


def test_a_table_that_follows_is_never_behind(store: LogStore) -> None:
    """Every access first reads appended records and new partitions."""
    log = store.topic("users").partition(0)
    table = Table(store, "users", follow=True)
    for number in range(20):
        _put(log, (b"n", b"%d" % number), (b"%d" % number, b""))
        assert table[b"n"] == b"%d" % number
        assert len(table) == number + 2
        assert b"%d" % number in list(table)
    store.alter_topic("users", partitions=3)
    _put(store.topic("users").partition(2), (b"n", b"later"), at_ms=2000)
    assert table[b"n"] == b"later"
    log.trim(40)
    assert dict(table.items()) == {b"n": b"later"}


def test_durable_only_shows_what_no_crash_takes_back(store: LogStore) -> None:
    """Records are taken in once they are fsynced."""
    log = store.topic("users").partition(0)
    _put(log, (b"a", b"1"))
    table = Table(store, "users", follow=True, durable_only=True)
    assert dict(table) == {}
    log.flush()
    assert dict(table) == {b"a": b"1"}


# ---------------------------------------------------------------- against a dict

_Step = tuple[int, int, list[tuple[bytes | None, bytes | None]]]
_pairs = st.lists(
    st.tuples(st.sampled_from([*KEYS, None]), st.sampled_from([b"1", b"2", b"\xc0", None])), min_size=1, max_size=6
)
_steps = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), _pairs), max_size=8)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(steps=_steps, small_run=st.sampled_from([1, 4, 1000]), partitions=st.sampled_from([1, 3]))
def test_any_workload_makes_the_table_that_a_dict_would_be(
    tmp_path_factory: pytest.TempPathFactory, steps: list[_Step], small_run: int, partitions: int
) -> None:
    """Refreshed at every step, only at the end, or made at the end: all the same; so is each state since."""
    with segmentlog.open(tmp_path_factory.mktemp("store"), background=False) as store:
        logs = store.create_topic("users", partitions=partitions, segment_records=4, fsync="never").partitions()
        early, following, late = (Table(store, "users", follow=number == 1, small_run=small_run) for number in range(3))
        states = []
        for number, at_ms, pairs in steps:
            log = logs[number % partitions]
            _put(log, *pairs, at_ms=at_ms)
            assert early.refresh() == len(pairs)
            ends = {one.number: one.log_end_offset for one in logs}
            states.append((ends, _expected(logs)))
            _check(early, states[-1][1])
            _check(following, states[-1][1])
        late.refresh()
        for table in (late, Table(store, "users")):
            _check(table, _expected(logs))
        for ends, state in states:
            _check(late.as_of(ends), state)


@pytest.mark.parametrize("seed", seeds("merged runs", (5,)))
def test_every_run_that_is_merged_keeps_every_key(store: LogStore, seed: int) -> None:
    """Thousands of records in small steps, with updates and deletions, through runs of every size."""
    log = store.create_topic("large", fsync="never").partition(0)
    chosen = random.Random(seed)
    table = Table(store, "large", follow=True, small_run=8)
    expected: dict[bytes, bytes] = {}
    for step in range(300):
        count = chosen.choice([1, 1, 2, 10, 100])
        pairs = [
            (b"key-%d" % chosen.randrange(2000) * chosen.choice([1, 3]), chosen.choice([b"%d" % step, None]))
            for _ in range(count)
        ]
        _put(log, *pairs)
        for key, value in pairs:
            if value is None:
                expected.pop(key, None)
            else:
                expected[key] = value
        assert len(table) == len(expected)
        assert all(table.get(key) == expected.get(key) for key, _ in pairs)
    assert dict(table.items()) == expected


def test_the_latest_of_several_partitions_does_not_depend_on_when_they_are_read(store: LogStore) -> None:
    """The last record of each partition counts, then the later timestamp, then the higher partition."""
    store.create_topic("moved", partitions=3, fsync="never")
    first, second, third = store.topic("moved").partitions()
    table = Table(store, "moved", follow=True)

    def check(value: bytes | None) -> None:
        assert table.get(b"k") == value
        assert Table(store, "moved").get(b"k") == value
        assert len(table) == len(Table(store, "moved")) == (value is not None)

    _put(second, (b"k", None), at_ms=20)
    check(None)
    _put(first, (b"k", b"too old"), at_ms=10)
    check(None)
    _put(first, (b"k", b"newest"), at_ms=100)
    check(b"newest")
    _put(second, (b"k", b"between"), at_ms=50)
    check(b"newest")
    _put(first, (b"k", b"out of order"), at_ms=5)
    check(b"between")
    _put(third, (b"k", b"same time"), at_ms=50)
    check(b"same time")
    _put(third, (b"k", b"older now"), at_ms=1)
    check(b"between")


def test_a_second_partition_brings_the_tombstones_of_the_first_back(store: LogStore) -> None:
    """A topic with two partitions needs tombstones that a topic with one partition may drop."""
    log = store.topic("users").partition(0)
    _put(log, (b"k", b"1"), (b"k", None), at_ms=20)
    table = Table(store, "users")
    _put(log, (b"j", b"1"), at_ms=20)
    table.refresh()
    store.alter_topic("users", partitions=2)
    _put(store.topic("users").partition(1), (b"k", b"older"), (b"l", b"1"), at_ms=10)
    table.refresh()
    assert dict(table) == {b"j": b"1", b"l": b"1"}


# ---------------------------------------------------------------- as it was


def test_as_of_every_offset(store: LogStore) -> None:
    """The state as it was when the log ended there, in the middle of batches, too; it stays so."""
    log = store.topic("users").partition(0)
    for number in range(5):
        _put(log, *((key, None if (number + at) % 4 == 0 else b"%d" % number) for at, key in enumerate(KEYS)))
    table = Table(store, "users")
    log.trim(3)
    for offset in range(3, log.log_end_offset + 1):
        then = table.as_of(offset)
        _check(then, _expected([log], {0: offset}))
        assert then == table.as_of({0: offset})
    _put(log, (b"a", b"later"))
    assert then.refresh() == 0
    assert list(then.changes(0)) == []
    assert then.get(b"a") != b"later"


def test_as_of_what_was_not_or_is_not_told_any_more(store: LogStore) -> None:
    """Offsets outside of the log are errors, and so are partitions that are left out."""
    log = store.topic("users").partition(0)
    _put(log, (b"a", b"1"), (b"b", b"1"))
    log.trim(1)
    table = Table(store, "users")
    for offset in (-1, 0, 3):
        with pytest.raises(OffsetOutOfRange):
            table.as_of(offset)
    for offsets in ({}, {1: 1}, {0: 1, 1: 1}):
        with pytest.raises(ValueError, match="an offset for each partition"):
            table.as_of(offsets)
    store.create_topic("two", partitions=2)
    with pytest.raises(ValueError, match="0 to 1"):
        Table(store, "two").as_of(0)


def test_a_state_that_compaction_has_taken_apart_is_an_error(store: LogStore) -> None:
    """Below the cleaned offset: asking for it, and going on with a table of it that was made before."""
    log = store.create_topic("compacted", **_ROLL).partition(0)
    for number in range(8):
        _put(log, (b"a", b"%d" % number), (b"b", b"%d" % number))
    table = Table(store, "compacted")
    before, untouched = table.as_of(4), table.as_of(16)
    assert before[b"a"] == b"1"
    log.compact()
    cleaned = log.compacted_below
    assert 4 < cleaned < 16
    with pytest.raises(OffsetOutOfRange):
        table.as_of(cleaned - 1)
    before._batches.clear()
    with pytest.raises(OffsetOutOfRange):
        before.record(b"a")
    with pytest.raises(OffsetOutOfRange):
        list(before.items())
    assert table.as_of(cleaned) == _expected([log], {0: cleaned})
    assert untouched == table == {b"a": b"7", b"b": b"7"}


# ---------------------------------------------------------------- what goes


def test_what_retention_deletes_is_gone(store: LogStore) -> None:
    """A deleted key is missing at once for look-ups, and for ``len`` after the next refresh."""
    log = store.topic("users").partition(0)
    _put(log, (b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
    _put(log, (b"d", b"1"), (b"e", b"1"))
    table, other = Table(store, "users"), Table(store, "users")
    log.trim(4)
    assert dict(other.items()) == {b"e": b"1"}
    assert other.refresh() == 0
    assert len(other) == 1
    assert b"a" not in table
    assert len(table) == 1
    assert table == other == {b"e": b"1"}


def test_what_compaction_moves_is_found(store: LogStore) -> None:
    """A record that was replaced is read again; one that stays is found where it was."""
    log = store.create_topic("compacted", **_ROLL).partition(0)
    for number in range(10):
        _put(log, (b"same", b"%d" % number), (b"%d" % number, b"kept"), (b"gone", b"1"))
    _put(log, (b"gone", None))
    table = Table(store, "compacted")
    for number in range(10):
        _put(log, (b"same", b"again %d" % number), (b"9", b"last"))
    log.roll()
    log.compact()
    assert table[b"same"] == b"again 9"
    assert table == Table(store, "compacted") == _expected([log])
    assert table[b"0"] == b"kept"


def test_a_record_that_is_gone_for_good_counts_as_deleted(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key whose record no longer exists, without a newer one, counts as deleted, also for ``len``."""
    _put(store.topic("users").partition(0), (b"a", b"1"), (b"b", b"1"))
    table = Table(store, "users")
    monkeypatch.setattr(Table, "_read_record", lambda self, key, partition, offset: None)
    assert table.get(b"a") is None
    assert len(table) == 1


def test_truncation_brings_older_values_back(store: LogStore) -> None:
    """The values that the log still holds are those of the table."""
    log = store.topic("users").partition(0)
    _put(log, (b"a", b"1"), (b"b", b"1"))
    _put(log, (b"a", b"2"), (b"c", b"2"))
    tables = [Table(store, "users", follow=follow) for follow in (False, True)]
    log.truncate(2)
    tables[0].refresh()
    for table in tables:
        assert table == {b"a": b"1", b"b": b"1"}
    _put(log, (b"c", b"3"))
    log.truncate(log.log_end_offset)  # takes nothing
    tables[0].refresh()
    for table in tables:
        _check(table, {b"a": b"1", b"b": b"1", b"c": b"3"})


def test_items_while_the_log_changes(store: LogStore) -> None:
    """They are those of the beginning; appends, compaction and retention during the iteration are allowed."""
    log = store.create_topic("compacted", **_ROLL).partition(0)
    for number in range(40):
        _put(log, (b"%d" % number, b"old"))
    table = Table(store, "compacted", follow=True)
    seen = []
    for key, value in table.items():
        seen.append((key, value))
        _put(log, (b"%d" % (len(seen) % 20), b"new"))
        assert table[b"%d" % (len(seen) % 20)] == b"new"
    assert seen == [(b"%d" % number, b"old") for number in range(40)]
    for action in (log.compact, lambda: log.trim(30), lambda: log.truncate(35)):
        found = table.items().__iter__()
        first = next(found)
        action()
        assert first not in list(found)
        assert table == _expected([log])


# ---------------------------------------------------------------- changes


def test_changes_are_told_in_order_and_end_when_nothing_comes(store: LogStore) -> None:
    """Changes start at the table's state; deletions have value None; null keys are not changes."""
    log = store.topic("users").partition(0)
    _put(log, (b"before", b"1"))
    table = Table(store, "users")
    _put(log, (b"a", b"1"), (None, b"x"), (b"a", None))
    started = time.monotonic()
    found = []
    for record in table.changes(timeout_s=0.2):
        found.append((record.offset, record.key, record.value))
        assert table._sources[0].position > record.offset
        if record.offset == 3:
            _put(log, (b"b", b"1"))
    assert found == [(1, b"a", b"1"), (3, b"a", None), (4, b"b", b"1")]
    assert time.monotonic() - started >= 0.2
    assert table == {b"before": b"1", b"b": b"1"}


def test_changes_wait_for_appends_without_spinning(store: LogStore) -> None:
    """An append wakes the iteration; new partitions are followed, too."""
    table = Table(store, "users")

    def append() -> None:
        for number in range(3):
            time.sleep(0.2)
            store.alter_topic("users", partitions=1 + number)
            _put(store.topic("users").partition(number), (b"k", b"%d" % number))

    appender = threading.Thread(target=append)
    started = time.thread_time()
    appender.start()
    found = [record.partition for record in table.changes(timeout_s=1.5)]
    assert found == [0, 1, 2]
    assert time.thread_time() - started < 0.5
    appender.join()


# ---------------------------------------------------------------- memory, and the arrays alone


def test_keys_at_rest_are_no_python_objects(store: LogStore) -> None:
    """A key takes at most 40 bytes, and the number of objects does not grow with the keys."""
    count = 200_000
    log = store.topic("users").partition(0)
    store.alter_topic("users", segment_records=1_000_000)
    for first in range(0, count, 20_000):
        log.append([b"v"] * 20_000, keys=[b"user-%d" % number for number in range(first, first + 20_000)])
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        table = Table(store, "users")
        gc.collect()
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == count
    assert table.nbytes <= 40 * count
    assert allocated <= 40 * count
    assert len(gc.get_objects()) - objects < 1000


def test_two_keys_of_one_hash_are_two_keys() -> None:
    """This holds within a run and across runs; the hash is forged, because chance would not give it."""
    same = np.array([7], np.uint64)
    for keep_dead in (False, True):
        table = KeyTable(0, keep_dead=keep_dead, small=1)
        table._mix = lambda low, high: np.repeat(same, len(low))  # type: ignore[method-assign]
        table._mix_one = lambda low, high: 7  # type: ignore[method-assign]
        low, high = np.zeros(6, np.uint64), np.array([1, 2, 1, 3, 2, 1], np.uint64)
        for first in (0, 6, 100):
            dead = np.array([False] * 5 + [first == 6])
            table.add(0, low, high, np.arange(first, first + 6), np.zeros(6, np.int64), dead)
            assert len(table) == (2 if first == 6 else 3)
            found = [table.find(0, number) for number in range(5)]
            assert found == [None, None if first == 6 else (0, first + 5), (0, first + 4), (0, first + 3), None]


def test_hashes_agree_in_their_upper_bits_and_still_sort() -> None:
    """The index that is sorted with a hash takes its lower bits: where those decide, it is sorted again."""
    table = KeyTable(0, keep_dead=False)
    table._mix = lambda low, high: low  # type: ignore[method-assign]
    table._mix_one = lambda low, high: low  # type: ignore[method-assign]
    low = np.array([5, 3, 9, 3, 1], np.uint64)
    table.add(0, low, np.zeros(5, np.uint64), np.arange(5), np.zeros(5, np.int64))
    assert [table.find(number, 0) for number in (1, 3, 5, 9)] == [(0, 4), (0, 3), (0, 0), (0, 2)]
    assert len(table) == 4


def test_one_key_is_hashed_as_many_are() -> None:
    """The plain Python form and the numpy form of the mix are the same."""
    table = KeyTable(2**64 - 3)
    keys: list[bytes | None] = [b"key %d" % number * (number % 4) for number in range(100)]
    low, high, _ = identities_of(keys, 5)
    mixed = table._mix(low, high).tolist()
    assert mixed == [table._mix_one(*identity_of(key, 5)) for key in keys if key is not None]


def test_an_offset_that_does_not_fit_is_refused() -> None:
    """Offsets of more than 46 bits are refused, because they would be found as other ones."""
    one = np.ones(1, np.uint64)
    table = KeyTable(0)
    table.add(99_999, one, one, np.array([OFFSET_MAX]), np.zeros(1, np.int64))
    assert table.find(1, 1) == (99_999, OFFSET_MAX)
    with pytest.raises(ValueError, match="46 bits"):
        table.add(0, one, one, np.array([OFFSET_MAX + 1]), np.zeros(1, np.int64))


def test_records_whose_time_is_over_are_hidden(tmp_path: Path) -> None:
    """The topic's time to live or a header hides them from that moment on, before any compaction."""
    clock = FakeClock()
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        log = store.create_topic("users", cleanup_policy="compact", record_ttl_ms=1000).partition(0)
        soon = [(EXPIRES_HEADER, b"%d" % (NOW_MS + 300))]
        log.append([b"1", b"2", b"3"], keys=[b"a", b"b", b"c"], headers=[soon, None, [(EXPIRES_HEADER, b"never")]])
        table = store.table("users")
        assert dict(table.items()) == {b"a": b"1", b"b": b"2", b"c": b"3"}
        clock.advance(300)
        assert dict(table.items()) == {b"b": b"2", b"c": b"3"}
        assert table.get(b"a") is None
        assert b"b" in table
        clock.advance(700)
        assert list(table) == []
        assert table.record(b"b") is None
        log.roll()
        assert log.compact().expired == 3
        assert list(log.read(0)) == []
