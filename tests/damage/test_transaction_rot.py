"""Bit rot in a log with transactions: whatever byte goes wrong, `read_committed` never shows what was taken back.

Every SEGMENTLOG_BITROT_STEP-th byte of the segments and the state page rots here, and more of the other files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from broken import flip
from damage.rotten import STEP, AnotherBoot
from logs import FakeClock, NoSyncFileSystem, open_log

from segmentlog.config import TopicConfig
from segmentlog.format.file_names import ABORTED_SUFFIX, SNAPSHOT_SUFFIX
from segmentlog.format.producer_snapshot import NAMED_ID_END
from segmentlog.inspection.finding import Finding, Tally
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.log.repair.partition_repair import repair_partition

UNNAMED = NAMED_ID_END + 1
SETTINGS = {"segment_records": 6, "index_interval_bytes": 1}


class Sample:
    """A closed partition, and what it holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        log = open_log(folder, **SETTINGS)
        self.aborted: set[bytes | None] = set()
        for number in range(6):
            who, is_aborted = number % 2 + 1, number % 3 == 1
            for at in range(3):
                value = b"%d:%d" % (who, 3 * (number // 2) + at)
                log.append([value], producer=ProducerStamp(who, 0, 3 * (number // 2) + at, True))
                if is_aborted:
                    self.aborted.add(value)
            log.append([b"u%d" % number], producer=ProducerStamp(UNNAMED, 0, number))
            log.end_transaction(who, 0, committed=not is_aborted)
        log.roll()  # only sealed segments have a file that repeats their markers
        self.committed = committed(log)
        self.sequences = sequences(log)
        self.end_offset = log.log_end_offset
        log.close()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Return a log that was closed cleanly, with a state page of this boot."""
    return Sample(tmp_path_factory.mktemp("rot") / "0")


def committed(log: Partition) -> list[bytes | None]:
    """Return the values that readers of committed records get when they skip damage."""
    told = log.read(log.log_start_offset, isolation="read_committed", on_skip=lambda *told: None)
    return [value for batch in told for value in batch.values]


def sequences(log: Partition) -> dict[int, int]:
    """Return the next sequence of each producer."""
    return {one.producer_id: one.next_sequence for one in log.producers()}


def findings(folder: Path, fs: NoSyncFileSystem | None = None) -> list[Finding]:
    """Return all findings that are worse than a note."""
    found = inspect_partition(fs or NoSyncFileSystem(), str(folder), "t", 0, TopicConfig(), Tally())
    return [one for one in found.findings if one.severity != "note"]


def rotten(sample: Sample, suffixes: tuple[str, ...], step: int) -> Iterator[tuple[Path, int]]:
    """(file, position) with that byte wrong; in a folder that is put back as it was."""
    kept = {path: path.read_bytes() for path in sorted(sample.folder.iterdir())}
    for path, data in kept.items():
        if path.suffix not in suffixes:
            continue
        for position in range(sum(path.name.encode()) % step, len(data), step):
            flip(path, position, 1 << position % 8)
            yield path, position
            for other in sample.folder.iterdir():
                if other not in kept:
                    shutil.rmtree(other) if other.is_dir() else other.unlink()
            for other, before in kept.items():
                if not other.exists() or other.read_bytes() != before:
                    with other.open("r+b" if other.exists() else "w+b") as file:
                        file.write(before)
                        file.truncate(len(before))


def test_the_sample_is_complete_and_healthy(sample: Sample) -> None:
    """Both kinds of files exist, and verify finds nothing."""
    suffixes = {path.suffix for path in sample.folder.iterdir()}
    assert {ABORTED_SUFFIX, SNAPSHOT_SUFFIX} <= suffixes
    assert findings(sample.folder) == findings(sample.folder, AnotherBoot()) == []
    assert sample.aborted
    assert not sample.aborted & set(sample.committed)


@pytest.mark.parametrize("boot", [NoSyncFileSystem, AnotherBoot], ids=["same-boot", "restarted"])
def test_a_snapshot_or_a_list_of_aborts(sample: Sample, boot: type[NoSyncFileSystem]) -> None:
    """The file is ignored and derived from the log again: readers and the checks of appends are unchanged."""
    for path, _ in rotten(sample, (ABORTED_SUFFIX, SNAPSHOT_SUFFIX), max(STEP // 3, 1)):
        (found,) = findings(sample.folder, boot())
        assert (found.severity, found.path) == ("warning", str(path))
        for read_only in (True, False):
            log = open_log(sample.folder, fs=boot(), clock=FakeClock(), read_only=read_only, **SETTINGS)
            assert committed(log) == sample.committed
            assert sequences(log) == sample.sequences
            assert log.last_stable_offset == sample.end_offset
            log.close()


@pytest.mark.parametrize("how", ["read", "repaired"])
def test_a_segment_with_transactions(sample: Sample, how: str) -> None:
    """With any byte of a sealed segment wrong, and also after a repair, readers get no aborted record."""
    for path, position in rotten(sample, (".log",), STEP):
        (found,) = findings(sample.folder)
        assert (found.severity, found.path) == ("damage", str(path))
        log = open_log(sample.folder, **SETTINGS)
        lost = set(range(found.base_offset, found.end_offset))
        if how == "repaired":
            repair_partition(NoSyncFileSystem(), str(sample.folder), "t", 0, TopicConfig, clock=FakeClock())
            assert findings(sample.folder) == [], (path, position)
        now = committed(log)
        assert not sample.aborted & set(now), (path, position)
        assert now == [value for value in sample.committed if value in now]
        assert len(sample.committed) - len(now) <= len(lost)
        log.abandon()


def test_a_state_page_of_a_log_with_transactions(sample: Sample) -> None:
    """Either verify reports it, or readers of committed records get the same records."""
    for path, position in rotten(sample, ("",), STEP):
        if path.name != "state":
            continue
        found = findings(sample.folder)
        log = open_log(sample.folder, read_only=True, **SETTINGS)
        assert found or committed(log) == sample.committed, position
        log.close()
