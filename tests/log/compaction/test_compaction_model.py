"""A compacted partition against a plain list, through passes, retention, cuts, deaths and readers in any order.

SEGMENTLOG_MODEL_EXAMPLES  how many lives (default: few enough for CI)
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from keyed import compacted, expired
from logs import NOW_MS, FakeClock, Kept, NoSyncFileSystem, contents, machine_dies, open_log
from wire import append_either

from segmentlog.config import EXPIRES_HEADER, TopicConfig
from segmentlog.errors import OffsetOutOfRange
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.inspection.store_inspection import Tally
from segmentlog.log.partition import Partition
from segmentlog.records import CompactionReport, Headers
from segmentlog.testing.fault_injection import Died, FaultyFileSystem

EXAMPLES = int(os.environ.get("SEGMENTLOG_MODEL_EXAMPLES", "25"))

KEYS = st.sampled_from([b"", b"a", b"b", b"sixteen bytes...", b"one more than 16.", b"a long key, and longer " * 3])
VALUES = st.one_of(st.binary(max_size=6), st.binary(max_size=6), st.none(), st.just(b"long " * 60))
EXPIRY = st.none() | st.integers(1, 3000)
RECORDS = st.lists(
    st.tuples(KEYS, VALUES, st.integers(-500, 500), EXPIRY, st.booleans()), min_size=1, max_size=7
)  # fmt: skip
BUFFERS = st.one_of(st.just(10_000), st.integers(34, 300))


class FastFaults(FaultyFileSystem):
    """Faults on demand, and no waiting for the disk."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("fsync", "fdatasync"):
            setattr(self, name, self._wrap(name, lambda fd: None))


class Following:
    """A reader in a process of its own that began earlier, and the records that it has returned."""

    def __init__(self, log: Partition, start: int) -> None:
        self.start = self.position = start
        self.end = log.end_offset()
        self.batches = log.read(start)
        self.offsets: list[int] = []


class CompactionMachine(RuleBasedStateMachine):
    """``records`` is what the log must contain, ``assigned`` every record that ever got an offset."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="segmentlog-compaction-"))
        self.clock = FakeClock()
        self.records: list[Kept] = []
        self.assigned: dict[int, Kept] = {}
        self.horizons: dict[int, int] = {}
        """Tombstones that a pass may have met: before this time they must not go."""
        self.overdue: dict[int, int] = {}
        """Tombstones that a pass has kept: the first one after this time drops them."""
        self.followers: list[Following] = []
        self.start = self.end = 0
        self.has_died = False
        """In a pass, and no other has been since."""
        self.config: dict[str, Any] = {}
        self.keep_last = 1
        self.ttl_ms: int | None = None
        self.fs = FastFaults()
        self.log: Any = None  # a Partition, once `make` has run
        self.other: Any = None

    @initialize(
        segment_bytes=st.sampled_from([300, 1000, 5000]),
        interval=st.sampled_from([1, 150]),
        keep_last=st.sampled_from([1, 1, 2, 3]),
        delete_retention_ms=st.sampled_from([0, 0, 700, 5000]),
        record_ttl_ms=st.sampled_from([None, None, 1500]),
        compression_type=st.sampled_from(["none", "lz4", "zstd", "gzip", "snappy"]),
        limits=st.sampled_from(
            [{}, {"retention_segments": 3}, {"retention_bytes": 1500}, {"retention_ms": 2500}],
        ),
        file_delete_delay_ms=st.sampled_from([0, 1000]),
        drawn=RECORDS,
    )
    def make(
        self,
        keep_last: int,
        record_ttl_ms: int | None,
        limits: dict[str, int],
        interval: int,
        drawn: list[Any],
        **settings: Any,
    ) -> None:
        """Create a topic without compaction that holds records without keys."""
        self.keep_last, self.ttl_ms = keep_last, record_ttl_ms
        self.config = {
            "compaction_keep_last": keep_last,
            "record_ttl_ms": record_ttl_ms,
            "index_interval_bytes": interval,
            **settings,
        }
        self.open()
        self.append_now([(None, *rest) for _, *rest in drawn])
        self.log.close()
        policy = {"cleanup_policy": "delete,compact", "retention_ms": -1, **limits}
        self.config |= policy if limits else {"cleanup_policy": "compact"}
        self.open()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def open(self, *, lossless: bool = True) -> None:
        self.fs = FastFaults()
        self.log = open_log(self.folder, fs=self.fs, clock=self.clock, **self.config)
        self.other = open_log(self.folder, clock=self.clock, **self.config)
        if lossless:
            assert self.log.recovery_report.lost is None
            assert self.log.log_end_offset == self.end

    # ------------------------------------------------------------ what a user does

    def append_now(self, drawn: list[tuple[Any, ...]]) -> None:
        records = []
        for number, (key, value, ago_ms, expires_ms, has_header) in enumerate(drawn):
            headers: Headers = (("h", b"1"),) if has_header else ()
            if expires_ms is not None and self.ttl_ms is None:
                headers = (*headers, (EXPIRES_HEADER, b"%d" % (self.clock.now_ms() + expires_ms)))
            records.append(Kept(self.end + number, key, value, self.clock.now_ms() - ago_ms, headers))
        base_offset = append_either(
            self.log,
            [one.value for one in records],
            [one.key for one in records],
            [one.timestamp for one in records],
            [one.headers for one in records],
        )
        assert base_offset == self.end
        self.note_appended(records)

    def note_appended(self, records: list[Kept]) -> None:
        for record in records:
            assert record.offset not in self.assigned
            self.assigned[record.offset] = record
        self.records += records
        self.end = records[-1].offset + 1

    @rule(drawn=RECORDS)
    def append(self, drawn: list[tuple[Any, ...]]) -> None:
        self.append_now(drawn)

    @rule(drawn=RECORDS, ms=st.sampled_from([0, 900]))
    def append_and_roll(self, drawn: list[tuple[Any, ...]], ms: int) -> None:
        self.append_now(drawn)
        assert self.log.roll()
        self.clock.advance(ms)

    @rule(ms=st.sampled_from([1, 600, 3000]))
    def wait(self, ms: int) -> None:
        self.clock.advance(ms)

    @rule(data=st.data())
    def read_from_anywhere(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.start, self.end), "offset")
        if any(lost.base_offset < offset < lost.end_offset for lost in self.log.lost_ranges()):
            return
        for log in (self.log, self.other):
            assert contents(log, offset) == [record for record in self.records if record.offset >= offset]

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.start, self.start + (self.end - self.start) // 2), "offset")
        assert self.log.trim(offset) == offset
        self.start = offset
        self.records = [record for record in self.records if record.offset >= offset]

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(max(self.start, self.end - 10), self.end), "offset")
        self.followers.clear()  # a reader that read beyond it gets an error from `check_position`; see test_model
        lost = self.log.truncate(offset)
        if lost is not None:
            self.end = lost.end_offset
        self.records = [record for record in self.records if record.offset < offset]
        self.overdue.clear()  # the end is an earlier one, which the last pass did not see

    # ------------------------------------------------------------ compaction and retention

    def wanted(self, end_offset: int) -> list[Kept]:
        return compacted(self.records, end_offset, self.keep_last, self.clock.now_ms(), self.ttl_ms)

    @rule(buffer_bytes=BUFFERS)
    def compact(self, buffer_bytes: int) -> None:
        """Compact: the last records of each key stay, and tombstones are deleted when their delay has passed."""
        foreseen: CompactionReport = self.log.compact(buffer_bytes=buffer_bytes, dry_run=True)
        active = self.log.segments()[-1].base_offset
        before = [record for record in self.records if record.offset < active]
        now_ms = self.clock.now_ms()
        report: CompactionReport = self.log.compact(buffer_bytes=buffer_bytes)
        wanted = self.wanted(active)
        found = contents(self.log)
        tombstones = {one.offset for one in wanted if one.value is None and one.key is not None and one.offset < active}
        assert set(found) <= set(wanted)
        removed = {one.offset for one in wanted} - {one.offset for one in found}
        assert removed <= tombstones, "a record is gone that is among the last of its key"
        horizon_ms = now_ms + self.config["delete_retention_ms"]
        for offset in removed:
            assert self.horizons.get(offset, horizon_ms) <= now_ms, "a tombstone is gone before its time"
        if self.keep_last == 1 and report.passes == 1:
            late = {one for one in tombstones - removed if self.overdue.get(one, now_ms + 1) <= now_ms}
            assert not late, "a tombstone is still there after its time"
        if report.passes == 1 and not self.has_died:  # a pass that a dead process left is completed, but not counted
            assert self.keep_last > 1 or report.tombstones_removed == len(removed)
            assert (foreseen.passes, foreseen.records_after) == (1, report.records_after)
            assert report.records_after == len([one for one in found if one.offset < active])
            expired = len([one for one in found_last(before, self.keep_last) if self.is_expired(one)])
            # If several kept records have expired, the last removes the others, which are not counted.
            assert report.expired <= expired
            assert self.keep_last > 1 or report.expired == expired
        assert self.log.cleaned_offset == max(active, self.start) or not before
        for offset in tombstones - removed:
            self.horizons.setdefault(offset, horizon_ms)
            self.overdue.setdefault(offset, horizon_ms)
        self.records = found
        self.has_died = False

    def is_expired(self, record: Kept) -> bool:
        return expired(record, self.clock.now_ms(), self.ttl_ms)

    @rule(buffer_bytes=BUFFERS, call=st.integers(1, 200))
    def die_in_a_compaction(self, buffer_bytes: int, call: int) -> None:
        """Die during a compaction: the log has the records from before, or from after, or from between."""
        active = self.log.segments()[-1].base_offset
        wanted = self.wanted(active)
        before = self.records
        self.fs.die_at(call)
        try:
            self.log.compact(buffer_bytes=buffer_bytes)
        except Died:
            pass
        else:
            self.fs.heal()
            self.log.abandon()
        self.open()
        self.has_died = True
        found = contents(self.log)
        assert set(found) <= set(before)
        assert all(one.value is None for one in set(wanted) - set(found))
        self.records = found
        horizon_ms = self.clock.now_ms() + self.config["delete_retention_ms"]
        for one in found:
            if one.value is None:
                self.horizons.setdefault(one.offset, horizon_ms)
        self.compact(buffer_bytes)

    @precondition(lambda self: "delete" in self.config["cleanup_policy"])
    @rule()
    def retain(self) -> None:
        """Retention deletes what its dry run predicted, and the log begins after it."""
        foreseen = self.log.apply_retention(dry_run=True)
        segments = self.log.segments()
        report = self.log.apply_retention()
        gone = [segment.base_offset for segment, _ in report.removed]
        assert gone == [segment.base_offset for segment, _ in foreseen.removed]
        assert gone == [segment.base_offset for segment in segments][: len(gone)]
        assert self.log.log_start_offset == report.log_start_offset
        assert report.log_start_offset == (report.removed[-1][0].end_offset if gone else self.start)
        self.start = report.log_start_offset
        self.records = [record for record in self.records if record.offset >= self.start]
        left = self.log.segments()
        if (limit := self.config.get("retention_segments")) is not None:
            assert len([one for one in left if not one.active]) <= limit
        if (limit := self.config.get("retention_bytes")) is not None and len(left) > 1:
            assert sum(one.size_bytes for one in left[1:]) < limit
        deleted = list(self.folder.glob("*.deleted"))
        assert not deleted or self.config["file_delete_delay_ms"]

    # ------------------------------------------------------------ readers that go on

    @precondition(lambda self: len(self.followers) < 3)
    @rule(data=st.data())
    def begin_to_read(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.start, self.end), "offset")
        if not any(lost.base_offset <= offset < lost.end_offset for lost in self.log.lost_ranges()):
            self.followers.append(Following(self.other, offset))

    @precondition(lambda self: self.followers)
    @rule(data=st.data(), count=st.integers(1, 4))
    def read_on(self, data: st.DataObject, count: int) -> None:
        """Continue reading: the reader returns the existing records in ascending order, without gaps."""
        follower = data.draw(st.sampled_from(self.followers), "reader")
        for _ in range(count):
            try:
                batch = next(follower.batches)
            except StopIteration:
                follower.position = follower.end
                self.followers.remove(follower)
                break
            except OffsetOutOfRange:
                assert self.start > follower.position
                self.followers.remove(follower)
                return
            for record in batch.records():
                assert record.offset >= follower.position
                assert Kept(*_fields(record)) == self.assigned[record.offset]
                follower.position = record.offset + 1
                follower.offsets.append(record.offset)
        passed = {one.offset for one in self.records if follower.start <= one.offset < follower.position}
        assert passed <= set(follower.offsets), "a record that is there was passed over"

    # ------------------------------------------------------------ how processes and machines end

    @rule(cleanly=st.booleans())
    def reopen(self, cleanly: bool) -> None:
        if cleanly:
            self.log.close()
        else:
            self.log.abandon()
        self.open()

    @rule()
    def machine_dies(self) -> None:
        """Restart the machine after all of its page cache was written: no record is lost, but offsets may be."""
        self.log.abandon()
        self.other.abandon()
        self.followers.clear()
        machine_dies(self.log)
        self.open(lossless=False)
        assert self.log.log_end_offset >= self.end
        self.end = self.log.log_end_offset

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_log_is_the_list(self) -> None:
        if self.log is None:
            return
        assert (self.log.log_start_offset, self.log.log_end_offset) == (self.start, self.end)
        found = contents(self.log)
        assert found == self.records
        for record in found:
            assert self.assigned[record.offset] == record

    @invariant()
    def nothing_is_damaged(self) -> None:
        if self.log is None:
            return
        config = TopicConfig.from_mapping(self.config)
        findings = inspect_partition(NoSyncFileSystem(), str(self.folder), "t", 0, config, Tally()).findings
        assert not [finding for finding in findings if finding.severity != "note"]


def found_last(records: list[Kept], keep_last: int) -> list[Kept]:
    """Return the last records of each key, including deleted ones, and all records without a key."""
    last = [one for one in records if one.key is None]
    for key in {one.key for one in records if one.key is not None}:
        last += [one for one in records if one.key == key][-keep_last:]
    return last


def _fields(record: Any) -> tuple[Any, ...]:
    return record.offset, record.key, record.value, record.timestamp, record.headers


TestCompactionMachine = pytest.mark.long(CompactionMachine.TestCase)
TestCompactionMachine.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_model_itself() -> None:
    """The model keeps the last record of each key, respects tombstones and time, and keeps records without a key."""
    records = [
        Kept(0, b"a", b"1", NOW_MS),
        Kept(1, None, b"keyless", NOW_MS),
        Kept(2, b"a", b"2", NOW_MS),
        Kept(3, b"b", b"1", NOW_MS),
        Kept(4, b"b", None, NOW_MS),
        Kept(5, b"b", b"2", NOW_MS),
        Kept(6, b"c", b"1", NOW_MS, ((EXPIRES_HEADER, b"5"),)),
        Kept(7, b"a", b"active", NOW_MS),
    ]
    assert [one.offset for one in compacted(records, 7, 1, 10)] == [1, 2, 5, 7]
    assert [one.offset for one in compacted(records, 7, 3, 10)] == [0, 1, 2, 4, 5, 7]
