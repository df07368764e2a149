"""Compaction case by case: which records stay, which are removed and when, and what other processes see."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from leftovers import opened
from logs import NOW_MS, FakeClock, Kept, NoSyncFileSystem, contents, log_files, open_log, tree_bytes, values
from seeds import seeds
from wire import CODECS, Sent, foreign

from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidConfig, LogTruncated
from segmentlog.format.batch import LOG_APPEND_TIME
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.inspection.store_inspection import Tally
from segmentlog.log.handle import Handle
from segmentlog.log.lease import CleanerLease
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.storage.file_operations import link_over
from segmentlog.storage.fs import FileSystem
from segmentlog.testing import FaultyFileSystem, SimulatedDisk
from segmentlog.testing.simulated_disk import CrashPoint


@pytest.fixture
def clock() -> FakeClock:
    """Return a clock for all processes of a test."""
    return FakeClock()


class Logs:
    """Opens the partition of a test, again and again, and puts records into it."""

    def __init__(self, folder: Path, clock: FakeClock, *, as_kafka: bool = False) -> None:
        self.folder, self.clock, self.as_kafka = folder, clock, as_kafka
        self.settings: dict[str, Any] = {"cleanup_policy": "compact"}
        self._codecs = cycle(CODECS.values())

    def open(self, fs: FileSystem | None = None, **settings: Any) -> Partition:
        self.settings |= settings
        return open_log(self.folder, fs=fs, clock=self.clock, **self.settings)

    def put(self, log: Partition, *records: str, roll: bool = True) -> None:
        """Append each record ``key=value``, or ``key!`` for a tombstone, by itself; then seal the segment."""
        for record in records:
            key, _, value = record.partition("=")
            is_tombstone = record.endswith("!")
            one = (key[:-1] if is_tombstone else key).encode() or None, None if is_tombstone else value.encode()
            if self.as_kafka:
                log.append_wire(foreign([Sent(*one, self.clock.now_ms())], next(self._codecs)))
            else:
                log.append([one[1]], keys=[one[0]])
        if roll:
            assert log.roll()

    def findings(self) -> list[Any]:
        config = TopicConfig.from_mapping(self.settings)
        found = inspect_partition(FileSystem(), str(self.folder), "t", 0, config, Tally())
        return [finding for finding in found.findings if finding.severity != "note"]


@pytest.fixture(params=["columns", "kafka"])
def logs(tmp_path: Path, clock: FakeClock, request: pytest.FixtureRequest) -> Logs:
    """Return the partition of the test; `put` appends batches of the library, or of Kafka's clients."""
    return Logs(tmp_path / "t" / "0", clock, as_kafka=request.param == "kafka")


def shown(log: Partition, start: int | None = None) -> list[str]:
    """Return every record as ``offset:key=value``."""
    return [
        f"{one.offset}:{(one.key or b'').decode()}{'!' if one.value is None else '=' + one.value.decode()}"
        for one in contents(log, start)
    ]


@pytest.mark.parametrize("codec", ["none", "lz4", "gzip", "snappy"])
def test_the_last_record_of_each_key_stays_at_its_offset(logs: Logs, codec: str) -> None:
    """This holds with keep_last 1 for any codec; the active segment stays unchanged."""
    log = logs.open(compression_type=codec)
    logs.put(log, "a=1", "b=1", "a=2")
    logs.put(log, "a=3", "c=1", roll=False)
    report = log.compact()
    assert shown(log) == ["1:b=1", "2:a=2", "3:a=3", "4:c=1"]
    assert (report.records_before, report.records_after, report.passes) == (3, 2, 1)
    assert report.cleaned_offset == log.cleaned_offset == 3
    assert log.log_end_offset == 5
    assert not logs.findings()


def test_the_last_three_of_each_key(logs: Logs) -> None:
    """With keep_last 3, over several passes; a tombstone counts, and removes all earlier records of its key."""
    log = logs.open(compaction_keep_last=3)
    logs.put(log, "a=1", "a=2", "a=3", "a=4", "b=1")
    log.compact()
    assert shown(log) == ["1:a=2", "2:a=3", "3:a=4", "4:b=1"]
    logs.put(log, "a=5", "b!", "b=2", "b=3")
    log.compact()
    assert shown(log) == ["2:a=3", "3:a=4", "5:a=5", "6:b!", "7:b=2", "8:b=3"]
    logs.put(log, "b=4", "b=5")
    log.compact()
    assert shown(log) == ["2:a=3", "3:a=4", "5:a=5", "8:b=3", "9:b=4", "10:b=5"]


def test_a_tombstone_goes_after_its_horizon_and_not_before(logs: Logs, clock: FakeClock) -> None:
    """Its delay begins with the first pass that keeps it; reopening the log does not change that."""
    log = logs.open(delete_retention_ms=1000)
    logs.put(log, "a=1", "b=1", "a!")
    clock.advance(5000)
    log.compact()
    assert shown(log) == ["1:b=1", "2:a!"]
    clock.advance(999)
    log.close()
    log = logs.open()
    report = log.compact()
    assert shown(log) == ["1:b=1", "2:a!"]
    assert (report.tombstones_removed, report.bytes_written) == (0, 0)
    assert log.compaction_due() is None
    clock.advance(1)
    assert log.compact(dry_run=True).tombstones_removed == 1
    assert log.compact().tombstones_removed == 1
    assert shown(log) == ["1:b=1"]
    assert log.log_end_offset == 3


def test_tombstones_make_a_pass_due(logs: Logs, clock: FakeClock) -> None:
    """Without new dirt the log is due again once a tombstone has passed its time."""
    log = logs.open(delete_retention_ms=100_000)
    assert log.compaction_due() is None
    logs.put(log, "a=1", "a!")
    assert "dirty" in (log.compaction_due() or "")
    log.compact()
    assert log.compaction_due() is None
    clock.advance(100_000)
    assert "time" in (log.compaction_due() or "")
    log.compact()
    assert shown(log) == []
    assert log.compaction_due() is None


def test_records_younger_than_the_lag_are_left_alone(logs: Logs, clock: FakeClock) -> None:
    """min.compaction.lag.ms: a segment with a record that is too young ends the cleaning."""
    log = logs.open(min_compaction_lag_ms=1000)
    logs.put(log, "a=1", "a=2")
    clock.advance(800)
    logs.put(log, "a=3", "a=4")
    log.compact()
    assert shown(log) == ["0:a=1", "1:a=2", "2:a=3", "3:a=4"]
    assert log.cleaned_offset == 0
    clock.advance(200)
    log.compact()
    assert shown(log) == ["1:a=2", "2:a=3", "3:a=4"]
    clock.advance(800)
    log.compact()
    assert shown(log) == ["3:a=4"]


def test_a_batch_near_the_limit_is_split_for_its_offsets(logs: Logs) -> None:
    """The offsets of the survivors take room that the whole batch did not need: two batches then, none too large."""
    config = TopicConfig.from_mapping(logs.settings | {"max_message_bytes": 4000, "fsync": "never"})
    logs.folder.mkdir(parents=True)
    log = opened(
        Partition(
            str(logs.folder), "t", 0, lambda: config, fs=NoSyncFileSystem(), clock=logs.clock,
            load_batch_limit=lambda: 4000,
        )
    )  # fmt: skip
    count = 560
    keys = [b"%03d" % (number // 2 if number < 60 else number) for number in range(count)]
    log.append([b""] * count, keys=keys, timestamps=[NOW_MS] * count)
    batches = list(log.read(0))
    assert [batch.header.raw_size > 3800 for batch in batches] == [True]
    log.roll()
    log.compact()
    after = list(log.read(0))
    assert [offset for batch in after for offset in batch.offsets] == [*range(1, 60, 2), *range(60, count)]
    assert len(after) > 1
    assert all(batch.header.raw_size <= 4000 for batch in after)
    assert not logs.findings()


def test_log_append_time_stays(logs: Logs, clock: FakeClock) -> None:
    """Timestamps and their type are those of the append."""
    log = logs.open(message_timestamp_type="LogAppendTime")
    for step in range(4):
        clock.advance(10)
        log.append([b"x", b"y"], keys=[b"k%d" % (step % 3), b"other"], timestamps=[1, 2])
    log.roll()
    wanted = [one for one in contents(log) if one.offset in (2, 4, 6, 7)]
    clock.advance(1000)
    log.compact()
    assert contents(log) == wanted
    assert [one.timestamp - NOW_MS for one in wanted] == [20, 30, 40, 40]
    assert all(batch.header.attributes & LOG_APPEND_TIME for batch in log.read(0) if len(batch))


def test_records_without_a_key_stay(logs: Logs, clock: FakeClock) -> None:
    """They are from before the topic was compacted; their own expiry still applies."""
    log = logs.open(cleanup_policy="delete")
    logs.put(log, "=1", "a=1", "=2", "a=2")
    with pytest.raises(InvalidConfig, match=r"cleanup\.policy"):
        log.compact()
    log.close()
    log = logs.open(cleanup_policy="compact", record_ttl_ms=1000)
    report = log.compact()
    assert (shown(log), report.keyless) == (["0:=1", "2:=2", "3:a=2"], 2)
    clock.advance(1000)
    assert log.compact().expired == 3
    assert shown(log) == []


def test_what_expires_takes_what_is_older_along(logs: Logs, clock: FakeClock) -> None:
    """Even if the map has no room for both, an older record of the key does not reappear."""
    log = logs.open()
    logs.put(log, "a=older", "b=1", "c=1")
    log.append([b"newer"], keys=[b"a"], headers=[[("expires-at-ms", b"%d" % (NOW_MS + 10))]])
    log.roll()
    clock.advance(10)
    log.compact(buffer_bytes=34 * 2)
    assert shown(log) == ["1:b=1", "2:c=1"]


def test_small_segments_become_one(logs: Logs) -> None:
    """As many as fit into segment.bytes are merged; offsets and bytes add up, and later passes have nothing to do."""
    log = logs.open(segment_bytes=2000, compression_type="none")
    for number in range(12):
        logs.put(log, f"k{number}=" + "x" * 100)
    assert len(log.segments()) == 13
    before = contents(log)
    report = log.compact()
    assert contents(log) == before
    assert report.segments_before == 12
    assert report.segments_after == len(log_files(logs.folder)) - 1 < 4
    assert all(segment.size_bytes <= 2000 for segment in log.segments())
    log.compact()
    assert log.compact().bytes_written == 0
    assert contents(log) == before
    assert not logs.findings()


def test_segments_of_which_nothing_stays(logs: Logs) -> None:
    """Their offsets are still covered, and readers skip them from anywhere."""
    log = logs.open(segment_bytes=300)
    for _ in range(5):
        logs.put(log, "a=" + "x" * 150, "a=" + "y" * 150)
    logs.put(log, "a=last")
    log.compact()
    for start in range(12):
        assert shown(log, start) == (["10:a=last"] if start < 11 else [])
    assert not logs.findings()
    log.close()
    assert shown(logs.open()) == ["10:a=last"]


@pytest.mark.parametrize("cut", range(13))
def test_truncation_into_compacted_batches(logs: Logs, cut: int) -> None:
    """Truncation between, before and after survivors leaves exactly the records below it, and the log continues."""
    log = logs.open()
    keys = [b"a", b"b", b"a", b"c", b"a", b"d", b"a", b"a", b"e", b"a", b"f", b"a"]
    log.append([b"%d" % number for number in range(6)], keys=keys[:6])
    log.append([b"%d" % number for number in range(6, 12)], keys=keys[6:])
    log.roll()
    log.compact()
    before = contents(log)
    assert [one.offset for one in before] == [1, 3, 5, 8, 10, 11]
    lost = log.truncate(cut)
    wanted = [one for one in before if one.offset < cut]
    assert contents(log) == wanted
    for start in range(cut + 1):
        assert contents(log, start) == [one for one in wanted if one.offset >= start]
    if lost is not None:
        assert (lost.base_offset, lost.end_offset) == (cut, 13)
        if cut < 12:
            with pytest.raises(LogTruncated):
                log.read(cut + 1)
    logs.put(log, "a=again", "z=1")
    log.compact()
    assert shown(log)[-2:] == [f"{log.log_end_offset - 2}:a=again", f"{log.log_end_offset - 1}:z=1"]
    assert not logs.findings()


def test_lost_ranges_are_not_bridged(logs: Logs) -> None:
    """Segments on both sides of a lost range stay separate, and a reader inside it still gets the error."""
    log = logs.open()
    logs.put(log, "a=1", "b=1", "c=1", roll=False)
    lost = log.truncate(2)
    assert lost is not None
    logs.put(log, "a=2", "d=1")
    logs.put(log, "d=2")
    log.compact()
    assert shown(log) == ["1:b=1", "4:a=2", "6:d=2"]
    assert [segment.base_offset for segment in log.segments()][:2] == [0, lost.end_offset]
    with pytest.raises(LogTruncated) as told:
        log.read(3)
    assert told.value.lost == lost
    assert not logs.findings()


def test_a_lost_range_behind_a_segment_that_was_just_sealed(logs: Logs) -> None:
    """The log was truncated to where the segment begins: nothing of the range is covered by a copy."""
    log = logs.open()
    logs.put(log, "a=1", "b=1")
    logs.put(log, "a=2", roll=False)
    assert log.truncate(2) is not None
    logs.put(log, "c=1")
    log.compact()
    assert shown(log) == ["0:a=1", "1:b=1", "4:c=1"]
    assert not logs.findings()


def test_one_process_at_a_time(logs: Logs) -> None:
    """While another process holds the lease, a pass reports that and changes nothing."""
    log, other = logs.open(), logs.open()
    logs.put(log, "a=1", "a=2")
    with CleanerLease(other.handle).hold() as held:
        assert held
        report = log.compact()
        assert report.busy
        assert (report.passes, report.records_before) == (0, 0)
    assert shown(log) == ["0:a=1", "1:a=2"]
    assert not log.compact().busy
    assert shown(log) == ["1:a=2"]


def test_a_reader_in_another_process_goes_on(logs: Logs) -> None:
    """A reader with old segments mapped and indexed reports no damage, and its index stays right."""
    log = logs.open(segment_bytes=400, index_interval_bytes=1)
    other = logs.open()
    for number in range(20):
        logs.put(log, f"k{number % 4}=" + "x" * 60, f"once {number}=1")
    before = contents(other)
    readers: list[tuple[int, Iterator[Any]]] = [(start, other.read(start)) for start in range(0, 40, 3)]
    handed: dict[int, list[int]] = {start: next(batches).offsets.tolist() for start, batches in readers}
    log.compact()
    after = contents(log)
    for start, batches in readers:
        offsets = handed[start] + [offset for batch in batches for offset in batch.offsets.tolist()]
        assert offsets == sorted(set(offsets))
        assert set(offsets) >= {one.offset for one in after if one.offset >= start}
        assert set(offsets) <= {one.offset for one in before if one.offset >= start}
    for start in range(40):
        assert contents(other, start) == [one for one in after if one.offset >= start]
        assert other.offset_for_timestamp(NOW_MS) == after[0].offset
    other.close()
    log.close()
    assert not logs.findings()


def test_what_a_reader_does_in_the_middle_of_a_pass(logs: Logs) -> None:
    """Between any reads and writes of a pass another process reads all required records, and its appends are kept."""
    log = logs.open(segment_bytes=400)
    other = logs.open()
    for number in range(10):
        logs.put(log, f"k{number % 3}=" + "x" * 90, f"once {number}=1")
    wanted = {one for one in contents(log) if (one.key or b"").startswith(b"once") or one.offset >= 14}
    looks = 0

    def look(_: int) -> None:
        nonlocal looks
        looks += 1
        other.append([b"meanwhile"], keys=[b"m%d" % looks])
        assert wanted <= set(contents(other))

    log.compact(pace=look)
    assert looks > 20
    assert {b"m%d" % number for number in range(1, looks + 1)} <= {one.key for one in contents(log)}
    assert not logs.findings()


@pytest.mark.parametrize("disturb", ["truncate", "trim", "roll"])
@pytest.mark.parametrize("buffer_bytes", [34, 10_000])
def test_no_pass_calls_clean_what_another_process_kept_it_from_cleaning(
    tmp_path: Path, clock: FakeClock, disturb: str, buffer_bytes: int
) -> None:
    """If the log changes at any check of a pass, segments that were not replaced stay dirty for the next pass.

    A recovery, also a truncation's, deletes the copy that is being written: it cannot be swapped in.
    """
    looks = passes = 0
    while looks == passes:
        logs, passes = Logs(tmp_path / f"{passes}", clock), passes + 1
        log, other = logs.open(compression_type="none"), logs.open()
        logs.put(log, "a=1", "b=1", "a=2")
        logs.put(log, "c=1", "a=3")
        logs.put(log, "d=1", "e=1", roll=False)
        calls = 0

        def look(_: int, other: Partition = other, call: int = passes) -> None:
            nonlocal calls, looks
            calls += 1
            if calls == call:
                looks += 1
                change = {"truncate": partial(other.truncate, 6), "trim": partial(other.trim, 1), "roll": other.roll}
                change[disturb]()

        report = log.compact(pace=look, buffer_bytes=buffer_bytes)
        clean = [one.key for one in contents(log) if one.offset < report.cleaned_offset]
        assert len(clean) == len(set(clean)), f"look {passes}: {shown(log)} up to {report.cleaned_offset}"
        log.compact()
        assert [one.split(":")[1] for one in shown(log)][:3] == ["b=1", "c=1", "a=3"]
        assert not logs.findings()
        other.close()
        log.close()
    assert looks > 5


def test_what_becomes_too_young_in_the_middle_of_a_pass_is_dirty_still(tmp_path: Path, clock: FakeClock) -> None:
    """A pass with several maps reads the settings before each: segments that they exclude stay dirty."""
    logs = Logs(tmp_path, clock)
    settings: dict[str, Any] = {"cleanup_policy": "compact", "compression_type": "none", "segment_bytes": 1024}
    log = opened(Partition(str(tmp_path), "t", 0, lambda: TopicConfig.from_mapping(settings), clock=clock))
    for number, keys in enumerate(["abc", "ad", "ab"]):
        logs.put(log, *(f"{key}={number}" + "x" * 300 for key in keys))

    def alter(lag_ms: int) -> None:
        settings["min_compaction_lag_ms"] = lag_ms
        log.handle.ledger.count_config_change()
        logs.put(log, "z=", roll=False)  # the next append loads it

    steps = [partial(alter, 1000)]
    report = log.compact(pace=lambda _: steps.pop()() if steps else None, buffer_bytes=34)
    assert (report.passes, report.cleaned_offset, log.cleaned_offset) == (1, 1, 1)
    alter(0)
    log.compact()
    assert [one.split("x")[0] for one in shown(log)][:4] == ["2:c=0", "4:d=1", "5:a=2", "6:b=2"]
    assert not logs.findings()


@pytest.mark.parametrize("cut", [1, 5])
def test_a_pass_whose_segments_are_written_anew_ends_there_and_tells_of_no_damage(
    tmp_path: Path, clock: FakeClock, cut: int
) -> None:
    """At any check of a pass, another process truncates into a segment, and appends other records in their place."""
    looks = passes = 0
    while looks == passes:
        logs, passes = Logs(tmp_path / f"{passes}", clock), passes + 1
        log, other = logs.open(compression_type="none"), logs.open()
        logs.put(log, "a=1", "a=2", "b=1", "c=1")
        logs.put(log, "a=3", "d=1", "d=2", "f=1")
        calls = 0

        def look(_: int, logs: Logs = logs, other: Partition = other, call: int = passes) -> None:
            nonlocal calls, looks
            calls += 1
            if calls == call:
                looks += 1
                other.truncate(cut)
                logs.put(other, f"a={'x' * 40}", "e=1", f"b={'y' * 70}", "a=4", roll=False)

        log.compact(pace=look)
        log.roll()
        log.compact()
        ended = ["b=1", "c=1", "a=3", "d=2", "f=1"]
        if looks == passes:
            ended = ["c=1"] * (cut > 1) + ["e=1", f"b={'y' * 70}", "a=4"]
        assert [one.split(":")[1] for one in shown(log)] == ended
        assert not logs.findings()
        other.close()
        log.close()
    assert looks > 5


@pytest.mark.parametrize("seed", seeds("dry runs", (1,)))
def test_a_dry_run_changes_no_file_and_foresees_the_numbers(logs: Logs, seed: int) -> None:
    """No byte and no name changes, and the real pass then has the predicted counts."""
    log = logs.open(segment_bytes=500, delete_retention_ms=0)
    rng = random.Random(seed)
    for _ in range(15):
        logs.put(log, *(f"k{rng.randrange(4)}={rng.random()}" for _ in range(3)), f"k{rng.randrange(6)}!")
    log.flush()
    log.segments()  # makes the indexes of sealed segments, which are made when first needed
    before = tree_bytes(logs.folder)
    foreseen = log.compact(dry_run=True)
    assert tree_bytes(logs.folder) == before
    report = log.compact()
    for name in ("passes", "records_before", "records_after", "tombstones_removed", "segments_before",
                 "segments_after", "bytes_before", "bytes_after", "cleaned_offset", "keyless"):  # fmt: skip
        assert getattr(foreseen, name) == getattr(report, name), name
    assert foreseen.bytes_written == 0 < report.bytes_written


def test_keeping_fewer_cleans_the_clean_section_anew(logs: Logs) -> None:
    """After compaction.keep.last is lowered, the next pass removes records that an earlier pass kept."""
    log = logs.open(compaction_keep_last=3)
    logs.put(log, "a=1", "a=2", "a=3", "b=1")
    log.compact()
    assert len(contents(log)) == 4
    log.close()
    log = logs.open(compaction_keep_last=1)
    assert log.compaction_due() is not None
    log.compact()
    assert shown(log) == ["2:a=3", "3:b=1"]
    assert log.compaction_due() is None


def test_a_pass_goes_by_one_configuration(logs: Logs) -> None:
    """If the configuration changes and changes back at any point, progress is recorded for the one that was applied."""
    for looks in range(100):
        here = Logs(logs.folder / str(looks), logs.clock, as_kafka=logs.as_kafka)
        log = here.open(compaction_keep_last=3)
        here.put(log, "a=1", "a=2", "a=3", "b=1")
        log.compact()
        here.put(log, "c=1")
        many, few = log.handle.config, log.handle.config.replace({"compaction.keep.last": 1})
        seen = mock.PropertyMock(side_effect=[few] * looks + [many] * 1000)
        with mock.patch.object(Handle, "config", seen, create=True):
            log.compact()
        log.close()
        log = here.open(compaction_keep_last=1)
        log.compact()
        assert shown(log) == ["2:a=3", "3:b=1", "4:c=1"], looks
        if seen.call_count <= looks:
            break
    assert looks > 3


class Stop(Exception):
    """Raised by a test's pace."""


def test_a_pass_that_is_told_to_stop_leaves_the_log_whole(logs: Logs) -> None:
    """An exception from `pace` at any call ends the pass; no copy is left, and the next pass does the rest."""
    for call in range(1, 100):
        folder = Logs(logs.folder / str(call), logs.clock)
        log = folder.open(segment_bytes=300)
        for number in range(6):
            folder.put(log, f"k{number % 2}=" + "x" * 100, f"once {number}=1")
        wanted = {one for one in contents(log) if (one.key or b"").startswith(b"once") or one.offset >= 8}
        pace = mock.Mock(side_effect=[None] * (call - 1) + [Stop] + [None] * 1000)
        with contextlib.suppress(Stop):
            log.compact(pace=pace)
            break
        assert wanted <= set(contents(log))
        assert not list(folder.folder.glob("*.cleaned"))
        assert not folder.findings()
        log.compact()
        assert set(contents(log)) == wanted
    else:
        pytest.fail("a pass of so few records ends some day")


# ---------------------------------------------------------------- swapping


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_the_copy_is_copied(logs: Logs, error: int) -> None:
    """A file system that knows no links: the same log, the same files."""
    fs = FaultyFileSystem()
    fs.fail("link", error, times=None)
    log = logs.open(fs)
    for _ in range(3):
        logs.put(log, "a=1", "b=1")
    log.compact()
    assert fs.count("link") == 1
    assert shown(log) == ["4:a=1", "5:b=1"]
    assert len(log_files(logs.folder)) == 2
    assert not [path for path in logs.folder.iterdir() if path.suffix in (".swap", ".cleaned", ".tmp")]
    assert not logs.findings()


def test_link_over(tmp_path: Path) -> None:
    """The file has both names, with a hard link or a copy; other errors are raised."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new")
    for failure in (None, errno.EPERM, errno.EOPNOTSUPP):
        target.unlink(missing_ok=True)
        target.write_bytes(b"old")
        fs = FaultyFileSystem()
        if failure is not None:
            fs.fail("link", failure)
        link_over(fs, str(source), str(target))
        assert (source.read_bytes(), target.read_bytes()) == (b"new", b"new")
        assert source.samefile(target) is (failure is None)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    fs = FaultyFileSystem()
    fs.fail("link", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        link_over(fs, str(source), str(target))


def test_link_over_again_leaves_no_third_name(tmp_path: Path) -> None:
    """Both names are of the same file: a rename between two links of it would do nothing."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new")
    for _ in range(2):
        link_over(FileSystem(), str(source), str(target))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_a_swap_whose_copy_is_in_place_already_is_finished(logs: Logs) -> None:
    """After a death between the last two steps, the copy's second name is removed, and no later pass is undone."""
    log = logs.open()
    for number in range(3):
        logs.put(log, f"a={number}", f"once {number}=1")
    log.compact()
    base, end = log.segments()[0].base_offset, log.segments()[0].end_offset
    swap = logs.folder / f"{base:020d}-{end:020d}.swap"
    swap.hardlink_to(log_files(logs.folder)[0])
    logs.put(log, "a=newest")
    log.compact()
    assert not swap.exists()
    wanted = shown(log)
    assert wanted == ["1:once 0=1", "3:once 1=1", "5:once 2=1", "6:a=newest"]
    log.abandon()
    (logs.folder / "state").unlink()
    log = logs.open()
    assert shown(log) == wanted


# ---------------------------------------------------------------- what is durable before something goes


def _on(disk: SimulatedDisk, config: TopicConfig) -> Partition:
    return Partition("/t/0", "t", 0, lambda: config, fs=disk.process(), clock=FakeClock())


def _disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_folders("/t/0")
    disk.find("/t/0").sync()
    return disk


def test_the_recovery_point_does_not_pass_a_segment_that_was_sealed_and_not_synced() -> None:
    """Records were durable, and then the log was rolled: a power cut in the pass that follows harms nothing."""
    config = TopicConfig.from_mapping({"cleanup_policy": "compact", "fsync": "never"})
    disk = _disk()
    log = _on(disk, config)
    log.append([b"1", b"2"], [b"a", b"b"], ack="durable")
    log.roll()
    points = []
    disk.on_effect = lambda: points.append(disk.point())
    log.compact()
    disk.on_effect = None
    for point in points:
        for survivor in point.crashes(random.Random(1), 20):
            assert values(_on(survivor, config), 0) == [b"1", b"2"]


@pytest.mark.parametrize("call", range(1, 14))
@pytest.mark.parametrize("records", [[b"a"], [b"z"]])
def test_nothing_goes_for_the_sake_of_what_was_appended_meanwhile(call: int, records: list[bytes]) -> None:
    """Another process appends and rolls while the pass begins: only its records may be lost, not durable ones."""
    config = TopicConfig.from_mapping(
        {"cleanup_policy": "compact", "fsync": "never", "segment_bytes": 300, "compression_type": "none"}
    )
    disk = _disk()
    log, other = _on(disk, config), _on(disk, config)
    old, new = b"old" * 50, b"new" * 50
    log.append([old], [b"a"], ack="durable")
    log.roll()
    log.append([b"b"], [b"b"])

    def append() -> None:
        other.append([new], records)
        other.roll()

    _once_unlocked(disk, log, call, append)
    log.compact()
    for survivor in disk.point().crashes(random.Random(1), 30):
        found = dict(contents_of(_on(survivor, config)))
        assert found.get(b"a") in (old, new)
        assert found.get(b"b", b"b") == b"b"


@pytest.mark.parametrize("call", range(1, 14))
@pytest.mark.parametrize("sequence", [0, -1])
def test_nothing_goes_for_the_sake_of_a_transaction_that_was_ended_meanwhile(call: int, sequence: int) -> None:
    """Another process commits while the pass begins: its marker may be lost, and the transaction then aborted."""
    config = TopicConfig.from_mapping({"cleanup_policy": "compact", "fsync": "never", "compression_type": "none"})
    disk = _disk()
    log, other = _on(disk, config), _on(disk, config)
    log.append([b"old"], [b"a"], ack="durable")
    for number in range(2):
        stamp = ProducerStamp(7, 0, sequence if sequence < 0 else number, transactional=True)
        log.append([b"new"], [b"ab"[number : number + 1]], producer=stamp)
    log.roll()
    log.append([b"c"], [b"c"])
    _once_unlocked(disk, log, call, lambda: other.end_transaction(7, 0, committed=True))
    log.compact()
    for survivor in disk.point().crashes(random.Random(1), 10):
        again = _on(survivor, config)
        if again.open_transactions():
            again.end_transaction(7, 0, committed=False)
        found = {one.key: one.value for one in contents(again, isolation="read_committed")}
        assert found.get(b"a") == found.get(b"b", b"old")


def _once_unlocked(disk: SimulatedDisk, log: Partition, call: int, happens: Callable[[], object]) -> None:
    """Run an action at the given lock call of ``log``, or at the first later call at which no lock is held."""
    calls = 0
    process: Any = log.handle.fs
    real = process.flock

    def flock(fd: int, operation: int) -> None:
        nonlocal calls
        real(fd, operation)
        calls += 1
        if calls >= call and not any(disk.find(f"/t/0/{name}").locks for name in ("lock", "state")):
            process.flock = real
            happens()

    process.flock = flock


def contents_of(log: Partition) -> list[tuple[bytes | None, bytes | None]]:
    """(key, value) of every record."""
    return [(one.key, one.value) for one in contents(log)]


def test_kept_is_what_was_appended(logs: Logs) -> None:
    """Headers, timestamps, keys and values of the remaining records survive two rewrites."""
    log = logs.open(index_interval_bytes=1)
    wanted: list[Kept] = []
    for number in range(50):
        headers = (("h", b"%d" % number), ("ü", None)) if number % 3 else ()
        record = Kept(number, b"key %d" % (number % 30), b"v%d" % number, NOW_MS - number, headers)
        log.append([record.value], [record.key], [record.timestamp], [record.headers])
        wanted.append(record)
        if number % 11 == 10:
            log.roll()
            log.compact()
    log.roll()
    log.compact()
    assert contents(log) == wanted[20:]
    for start in range(51):
        assert contents(log, start) == [one for one in wanted[20:] if one.offset >= start]
    assert not logs.findings()


def test_records_as_large_as_can_be_are_compacted(logs: Logs) -> None:
    """A tombstone that fills its batch to the last byte has no room for a horizon: it stays, and so does the rest."""
    config = TopicConfig.from_mapping(logs.settings | {"max_message_bytes": 2000, "delete_retention_ms": 0})
    logs.folder.mkdir(parents=True)
    log = opened(
        Partition(
            str(logs.folder), "t", 0, lambda: config, fs=NoSyncFileSystem(), clock=logs.clock,
            load_batch_limit=lambda: 2000,
        )
    )  # fmt: skip
    key = b"k" * 1994
    log.append([None], keys=[key])
    assert [batch.header.raw_size for batch in log.read(0)] == [2000]
    log.append([None, b"v" * 1960, b""], keys=[b"a", b"b", b"c"], timestamps=[NOW_MS] * 3)
    log.roll()
    log.compact()
    assert log.compact().tombstones_removed == 1
    assert [(one.offset, one.key) for one in contents(log)] == [(0, key), (2, b"b"), (3, b"c")]
    assert not logs.findings()


def test_a_segment_in_which_nothing_reached_the_disk_leads_no_copy_into_a_lost_range() -> None:
    """A recovery that died left an empty segment before a lost range: a merged copy ends there."""
    config = TopicConfig.from_mapping({"cleanup_policy": "compact", "fsync": "never", "min_cleanable_dirty_ratio": 0})
    disk = _disk()
    log = _on(disk, config)
    log.append([b"1", b"2"], [b"a", b"a"], ack="durable")
    log.roll()
    log.close()
    in_append: list[CrashPoint] = []
    disk.on_effect = lambda: in_append.append(disk.point())
    _on(disk, config).append([b"3"], [b"b"])
    disk.on_effect = None
    in_recovery: list[CrashPoint] = []
    for point in in_append:
        for survivor in point.crashes(random.Random(1), 2):
            survivor.on_effect = lambda disk=survivor: in_recovery.append(disk.point())  # type: ignore[misc]
            _on(survivor, config)
            survivor.on_effect = None
    for point in in_recovery:
        for survivor in point.crashes(random.Random(2), 2):
            log = _on(survivor, config)
            log.append([b"4"], [b"c"], ack="durable")
            log.roll()
            log.compact()
            assert dict(contents_of(log)) | {b"b": b"3"} == {b"a": b"2", b"b": b"3", b"c": b"4"}
            found = inspect_partition(survivor.process(), "/t/0", "t", 0, config, Tally())
            assert not [str(one) for one in found.findings if one.severity == "damage"]
