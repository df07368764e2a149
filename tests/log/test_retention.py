"""Retention, limit by limit: what is deleted, why, and what other processes see."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from logs import NOW_MS, FakeClock, contents, log_files, open_log, tree_bytes, values
from wire import Sent, foreign

from segmentlog.config import TopicConfig
from segmentlog.errors import OffsetOutOfRange
from segmentlog.inspection.finding import Tally
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.inspection.scrubber import Scrubber, ScrubTarget
from segmentlog.log.lease import CleanerLease
from segmentlog.log.partition import Partition
from segmentlog.objects.local.partition_snapshot import LocalPartition
from segmentlog.testing import FaultyFileSystem, SimulatedDisk

FOREVER = -1


class Logs:
    """Opens the partition of a test and puts segments into it."""

    def __init__(self, folder: Path, clock: FakeClock) -> None:
        self.folder, self.clock = folder, clock

    def open(self, **settings: Any) -> Partition:
        defaults = {"retention_ms": FOREVER, "file_delete_delay_ms": 0, "compression_type": "none"}
        return open_log(self.folder, clock=self.clock, **(defaults | settings))

    def fill(self, log: Partition, segments: int = 1, *, timestamp: int | None = None, sealed: bool = True) -> None:
        """Segments of two records each, whose files say they were written now."""
        for _ in range(segments):
            log.append([b"x" * 100] * 2, timestamps=None if timestamp is None else [timestamp] * 2)
            if sealed:
                log.roll()
        for file in log_files(self.folder):
            if file.stat().st_mtime > 1_750_000_000:  # the real clock's
                self.touch(file)

    def touch(self, file: Path) -> None:
        ns = self.clock.now_ms() * 1_000_000
        os.utime(file, ns=(ns, ns))


@pytest.fixture
def clock() -> FakeClock:
    """Return a clock for the test and its log."""
    return FakeClock()


@pytest.fixture
def logs(tmp_path: Path, clock: FakeClock) -> Logs:
    """Return the partition of this test."""
    return Logs(tmp_path / "t" / "0", clock)


def starts(log: Partition) -> list[int]:
    """Return the base offsets of the segments."""
    return [segment.base_offset for segment in log.segments()]


def test_without_limits_nothing_goes(logs: Logs, clock: FakeClock) -> None:
    """Segments of any age and size stay."""
    log = logs.open(retention_segments=None)
    logs.fill(log, 5)
    clock.advance(10**12)
    assert log.apply_retention().removed == ()
    assert starts(log)[0] == 0
    for policy in ("compact", "none"):
        log.close()
        log = logs.open(cleanup_policy=policy, retention_segments=1, retention_ms=1)
        assert log.apply_retention().removed == (), "retention is for topics that delete"
    log.trim(4)
    assert log.log_start_offset == 4


def test_age(logs: Logs, clock: FakeClock) -> None:
    """retention.ms counts from the newest record of a segment, and whole segments are deleted."""
    log = logs.open(retention_ms=1000)
    logs.fill(log)
    clock.advance(600)
    logs.fill(log)
    clock.advance(400)
    assert log.apply_retention().removed == (), "exactly as old is not older"
    clock.advance(1)
    report = log.apply_retention()
    assert [segment.base_offset for segment, _ in report.removed] == [0]
    assert "retention.ms" in report.removed[0][1]
    assert (report.log_start_offset, starts(log)) == (2, [2, 4])
    assert (report.topic, report.partition, report.busy, report.rolled) == ("t", 0, False, False)
    assert report.size_bytes == report.removed[0][0].size_bytes > 200


def test_an_old_segment_behind_a_young_one_stays(logs: Logs, clock: FakeClock) -> None:
    """Only segments at the front are deleted: no gap appears."""
    log = logs.open(retention_ms=1000)
    logs.fill(log)
    logs.fill(log, timestamp=NOW_MS - 10**6)
    assert log.apply_retention().removed == ()
    clock.advance(1001)
    assert len(log.apply_retention().removed) == 2


def test_timestamps_in_the_far_future_do_not_keep_a_segment_for_ever(logs: Logs, clock: FakeClock) -> None:
    """The modification time of its file limits its age."""
    log = logs.open(retention_ms=1000)
    logs.fill(log, timestamp=NOW_MS * 1000)
    logs.fill(log)
    assert log.apply_retention().removed == ()
    clock.advance(1001)
    assert len(log.apply_retention().removed) == 2


def test_records_without_a_timestamp_are_as_old_as_their_segment(logs: Logs, clock: FakeClock) -> None:
    """A Kafka client may send -1 for "none", which is not 1970."""
    log = logs.open(retention_ms=1000)
    log.append_wire(foreign([Sent(None, b"v", -1)]))
    assert log.apply_retention().removed == (), "the active segment"
    log.roll()
    logs.fill(log)
    clock.advance(1000)
    assert log.apply_retention().removed == ()
    clock.advance(1)
    assert [segment.base_offset for segment, _ in log.apply_retention().removed] == [0, 1]


def test_size(logs: Logs) -> None:
    """retention.bytes deletes the oldest segments while the rest would still be as large."""
    log = logs.open()
    logs.fill(log, 5)
    size = log.segments()[0].size_bytes
    log.close()
    log = logs.open(retention_bytes=3 * size)
    report = log.apply_retention()
    assert [segment.base_offset for segment, _ in report.removed] == [0, 2]
    assert all("retention.bytes" in why for _, why in report.removed)
    assert log.apply_retention().removed == ()
    assert starts(log) == [4, 6, 8, 10]


def test_count(logs: Logs) -> None:
    """retention.segments counts sealed segments; the active segment is additional."""
    log = logs.open(retention_segments=2)
    logs.fill(log, 5)
    logs.fill(log, sealed=False)
    report = log.apply_retention()
    assert [segment.base_offset for segment, _ in report.removed] == [0, 2, 4]
    assert all("retention.segments" in why for _, why in report.removed)
    assert starts(log) == [6, 8, 10]
    assert len(values(log)) == 6


def test_time_since_a_segment_was_sealed(logs: Logs, clock: FakeClock) -> None:
    """retention.closed.ms counts from the last write of the file, whatever timestamps records have."""
    log = logs.open(retention_closed_ms=1000)
    logs.fill(log, timestamp=NOW_MS + 10**9)
    clock.advance(500)
    logs.fill(log, timestamp=0)
    logs.fill(log, sealed=False, timestamp=0)
    clock.advance(500)
    assert log.apply_retention().removed == ()
    clock.advance(1)
    report = log.apply_retention()
    assert [segment.base_offset for segment, _ in report.removed] == [0]
    assert "retention.closed.ms" in report.removed[0][1]
    clock.advance(10**8)
    assert [segment.base_offset for segment, _ in log.apply_retention().removed] == [2]
    assert starts(log) == [4], "the active segment is not closed"


def test_a_quiet_active_segment_is_sealed_and_goes(logs: Logs, clock: FakeClock) -> None:
    """segment.ms rolls an idle active segment; retention.ms then deletes it like any other."""
    log = logs.open(segment_ms=1000, retention_ms=5000)
    logs.fill(log, sealed=False)
    clock.advance(999)
    assert not log.apply_retention().rolled
    clock.advance(1)
    report = log.apply_retention()
    assert (report.rolled, report.removed) == (True, ())
    assert starts(log) == [0, 2]
    assert not log.apply_retention().rolled, "an empty one is left as it is"
    for file in log_files(logs.folder):
        logs.touch(file)
    clock.advance(5001)
    assert len(log.apply_retention().removed) == 1
    assert (log.log_start_offset, log.log_end_offset, values(log)) == (2, 2, [])
    assert log.append([b"on"]) == 2


def test_an_active_segment_that_is_too_old_goes_at_once(logs: Logs, clock: FakeClock) -> None:
    """retention.ms is shorter than segment.ms: it is sealed for it."""
    log = logs.open(retention_ms=1000)
    logs.fill(log, 2)
    logs.fill(log, sealed=False)
    clock.advance(1001)
    report = log.apply_retention()
    assert report.rolled
    assert [segment.base_offset for segment, _ in report.removed] == [0, 2, 4]
    assert (log.log_start_offset, log.log_end_offset, starts(log)) == (6, 6, [6])
    assert log.append([b"on"]) == 6
    assert log.apply_retention().removed == ()


def test_files_are_put_aside_for_a_while(logs: Logs, clock: FakeClock) -> None:
    """file.delete.delay.ms: their names end with .deleted until then; the indexes go at once."""
    log = logs.open(retention_segments=1, file_delete_delay_ms=1000)
    logs.fill(log, 3)
    log.segments()
    report = log.apply_retention()
    put_aside = sorted(logs.folder.glob("*.deleted"))
    assert [path.name[:20] for path in put_aside] == [f"{base:020d}" for base in (0, 2)]
    assert [path.stat().st_size for path in put_aside] == [segment.size_bytes for segment, _ in report.removed]
    assert not (logs.folder / f"{0:020d}.index").exists()
    clock.advance(999)
    log.apply_retention()
    assert sorted(logs.folder.glob("*.deleted")) == put_aside
    clock.advance(1)
    log.apply_retention()
    assert not list(logs.folder.glob("*.deleted"))


def test_files_of_another_process_are_swept(logs: Logs, clock: FakeClock) -> None:
    """The process that retired the files may be dead."""
    log = logs.open(retention_segments=1, file_delete_delay_ms=1000)
    logs.fill(log, 3)
    log.apply_retention()
    log.abandon()
    clock.advance(1000)
    logs.open(retention_segments=1, file_delete_delay_ms=1000).retain()
    assert not list(logs.folder.glob("*.deleted"))


@pytest.mark.parametrize("what", ["trim", "compact"])
def test_what_else_puts_files_aside_has_them_swept(logs: Logs, clock: FakeClock, what: str) -> None:
    """A trim or a compaction retires files, although the retention process found none before."""
    config = {"cleanup_policy": "compact"} if what == "compact" else {}
    log = logs.open(file_delete_delay_ms=1000, **config)
    for number in range(4):
        log.append([b"v"], [b"k%d" % number])
        log.roll()
    log.apply_retention()
    if what == "trim":
        log.trim(3)
    else:
        log.compact()
    aside = sorted(logs.folder.glob("*.deleted"))
    assert len(aside) == 3
    clock.advance(999)
    log.apply_retention()
    assert sorted(logs.folder.glob("*.deleted")) == aside
    clock.advance(1)
    log.apply_retention()
    assert not list(logs.folder.glob("*.deleted"))


def test_without_a_delay_files_go_at_once(logs: Logs) -> None:
    """With file.delete.delay.ms of 0, files are deleted at once."""
    log = logs.open(retention_segments=1)
    logs.fill(log, 3)
    log.apply_retention()
    assert not list(logs.folder.glob("*.deleted"))
    assert len(log_files(logs.folder)) == 2


@pytest.mark.parametrize("delay_ms", [0, 1000])
def test_a_reader_in_the_middle_of_what_goes_goes_on(logs: Logs, delay_ms: int) -> None:
    """It finishes the segment, and then gets an error with the log start."""
    log = logs.open(retention_segments=1, file_delete_delay_ms=delay_ms, index_interval_bytes=1)
    other = logs.open(retention_segments=1)
    for number in range(4):
        log.append([b"%d" % number])
    log.roll()
    logs.fill(log, 3)
    readers = [log.read(0), other.read(1)]
    first = [next(batches) for batches in readers]
    log.apply_retention()
    for start, (batch, batches) in enumerate(zip(first, readers, strict=True)):
        found = [*batch.values]
        with pytest.raises(OffsetOutOfRange) as told:
            found.extend(value for more in batches for value in more.values)
        assert found == [b"%d" % number for number in range(start, 4)]
        assert told.value.log_start_offset == log.log_start_offset == 8


def test_a_position_before_the_log_start(logs: Logs) -> None:
    """Reading there raises an error in every process; the log start itself is valid."""
    log, other = logs.open(retention_segments=1), logs.open(retention_segments=1)
    logs.fill(log, 3)
    contents(other)
    log.apply_retention()
    for each in (log, other):
        with pytest.raises(OffsetOutOfRange):
            each.read(3)
        assert [one.offset for one in contents(each, 4)] == [4, 5]


def test_a_dry_run_changes_nothing(logs: Logs, clock: FakeClock) -> None:
    """No file and no state changes, and the real run does what the dry run reported."""
    log = logs.open(retention_segments=1, segment_ms=1000)
    logs.fill(log, 3)
    logs.fill(log, sealed=False)
    clock.advance(1000)
    log.segments()
    before = tree_bytes(logs.folder)
    foreseen = log.apply_retention(dry_run=True)
    assert tree_bytes(logs.folder) == before
    assert (foreseen.rolled, foreseen.log_start_offset, len(foreseen.removed)) == (True, 0, 2)
    report = log.apply_retention()
    assert report.rolled
    assert report.removed[: len(foreseen.removed)] == foreseen.removed


def test_one_process_at_a_time(logs: Logs) -> None:
    """While another process holds the lease, the report says so, and nothing is deleted."""
    log, other = logs.open(retention_segments=1), logs.open(retention_segments=1)
    logs.fill(log, 3)
    with CleanerLease(other.handle).hold() as held:
        assert held
        report = log.apply_retention()
    assert (report.busy, report.removed, report.log_start_offset) == (True, (), 0)
    assert len(log.apply_retention().removed) == 2


@pytest.mark.long
def test_a_power_cut_in_the_middle_brings_nothing_back() -> None:
    """At each call: the log is intact, and starts at the old or at the new log start."""
    config = TopicConfig.from_mapping(
        {"fsync": "never", "retention_segments": 1, "retention_ms": FOREVER, "segment_records": 2}
    )
    disk = SimulatedDisk()
    disk.make_folders("/t/0")
    disk.find("/t/0").sync()

    def opened(disk: SimulatedDisk) -> Partition:
        return Partition("/t/0", "t", 0, lambda: config, fs=disk.process(), clock=FakeClock())

    log = opened(disk)
    for number in range(9):
        log.append([b"%d" % number], ack="durable")
    points = []
    disk.on_effect = lambda: points.append((disk.point(), 0))
    assert log.apply_retention().log_start_offset == 6
    disk.on_effect = None
    points.append((disk.point(), 6))
    states = 0
    for point, said in points:
        for survivor in point.crashes(random.Random(1), 40):
            states += 1
            log = opened(survivor)
            start = log.log_start_offset
            assert start in (said, 6)
            assert [one.offset for one in contents(log)] == list(range(start, 9))
            process = survivor.process()
            again = log.apply_retention().log_start_offset
            assert again >= 6, "one segment more, perhaps: a recovery begins a new one behind the lost range"
            assert min(name for name in process.listdir("/t/0") if name.endswith(".log")) >= f"{again:020d}"
    assert states > 50


@pytest.mark.long
@pytest.mark.parametrize("start", [6, 10, 11, 15])
@pytest.mark.parametrize("synced", [0, 4, 9])
def test_a_deleted_segment_that_a_power_cut_brings_back_is_none_of_the_log(start: int, synced: int) -> None:
    """A trimmed segment that was never synced may hold any bytes. They are not read, and are not damage.

    The log may also have lost the segment after it, which showed where it ends.
    """
    config = TopicConfig.from_mapping({"fsync": "never", "segment_records": 5, "retention_ms": FOREVER,
                                       "compression_type": "none", "file_delete_delay_ms": 0})  # fmt: skip
    disk = SimulatedDisk()
    disk.make_folders("/t/0")
    disk.find("/t/0").sync()

    def opened(disk: SimulatedDisk, **options: Any) -> Partition:
        return Partition("/t/0", "t", 0, lambda: config, fs=disk.process(), clock=FakeClock(), **options)

    def check(disk: SimulatedDisk, what: str) -> None:
        found = inspect_partition(disk.process(), "/t/0", "t", 0, config, Tally())
        assert not [str(one) for one in found.findings if one.severity == "damage"], what

    log = opened(disk)
    for number in range(15):
        log.append([b"%d" % number + b"." * 400], timestamps=[1000 + number])
        if number == synced - 1:
            log.flush()
    log.trim(start)
    states = 0
    for survivor in disk.point().crashes(random.Random(1), 60):
        states += 1
        check(survivor, f"state {states}, before it is opened")
        looking = opened(survivor, read_only=True)
        found = [one.offset for one in contents(looking)]
        assert looking.offset_for_timestamp(1000) in (*found[:1], None)
        log = opened(survivor)
        assert log.log_start_offset == start
        assert [one.offset for one in contents(log)] == found
        assert found == list(range(start, max(start, found[-1] + 1 if found else 0)))
        assert log.offset_for_timestamp(1000) == (found[0] if found else None)
        bases = [segment.base_offset for segment in log.segments()]
        assert all(following > start for following in bases[1:]), "nothing that ends below the start is kept"
        check(survivor, f"state {states}, opened again")
        log.append([b"after"], timestamps=[1], ack="durable")
        assert [one.offset for one in contents(log)][:-1] == found
        scrubber = Scrubber(survivor.process(), lambda: [ScrubTarget("t", 0, "/t/0")], bytes_per_s=1 << 20)
        scrubber.scrub(0)
        scrubber.scrub(1000)
        assert not scrubber.report().findings
    assert states > 20


@pytest.mark.parametrize(("method", "delay_ms"), [("unlink", 0), ("rename", 60_000)])
def test_who_looks_while_segments_go_does_not_miss_them_for_good(tmp_path: Path, method: str, delay_ms: int) -> None:
    """A process lists the folder between the new log state and the deletion, and caches that list for a while."""
    fs = FaultyFileSystem()
    log = open_log(tmp_path, fs=fs, file_delete_delay_ms=delay_ms)
    for number in range(3):
        log.append([b"%d" % number], ack="durable")
        log.roll()
    log.append([b"3"], ack="durable")
    other = open_log(tmp_path, file_delete_delay_ms=delay_ms)
    shipped = LocalPartition(other)
    looks: list[int] = []

    def look() -> None:
        looks.append(len(other.segments()))
        shipped.snapshot()

    fs.before(method, look)
    log.trim(2)
    assert starts(other) == starts(log) == [2, 3]
    found = shipped.snapshot()
    assert found is not None, "it is never shipped again, before it rolls"
    assert [one.base_offset for one in found.segments] == [2, 3]
    assert looks


def test_earlier_names_of_methods_stay() -> None:
    """Programs that use the names of earlier versions continue to work."""
    assert Partition.retain is Partition.apply_retention
    assert Partition.let_go_of_deleted is Partition.unmap_deleted_segments
    assert Partition.move_recovery_point is Partition.advance_recovery_point
