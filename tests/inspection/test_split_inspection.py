"""Results of segments inspected in other processes: packed, sent, and used only while they are valid."""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from broken import flip, log_files, make_store
from hypothesis import given
from hypothesis import strategies as st

import segmentlog
from segmentlog.errors import CorruptBatch
from segmentlog.format.control import Marker
from segmentlog.format.examine import DamagedRange
from segmentlog.inspection.finding import Finding, Tally
from segmentlog.inspection.segment_inspection import Flaw, Gap, SegmentFindings, Tracked
from segmentlog.inspection.split_inspection import (
    KnownSegments,
    SegmentJob,
    inspect_job,
    list_segment_jobs,
    pack,
    split_jobs,
    unpack,
)
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.storage.fs import FileSystem

MIB = 1 << 20
INT64 = st.integers(-(2**63), 2**63 - 1)


def known_segments(store: Path) -> KnownSegments:
    """Return the findings of every segment of topic "t"."""
    fs = FileSystem()
    looked = [inspect_job(fs, job) for job in list_segment_jobs(fs, str(store), "t")]
    return KnownSegments(one for one in looked if one is not None)


def findings(store: Path, inspect: KnownSegments) -> list[Finding]:
    """Return the findings of an inspection."""
    return list(inspect_store(str(store), "t", inspect=inspect))


# ---------------------------------------------------------------- packed


def broken_error(one: SegmentFindings) -> list[tuple[object, ...]]:
    """Return the arguments of the errors within: an error equals only itself."""
    return [broken.error.args for broken in one.broken]


@given(
    st.lists(st.tuples(INT64, INT64, INT64, INT64), max_size=20),
    st.lists(st.tuples(*[INT64] * 7, st.booleans(), st.booleans(), st.booleans()), max_size=20),
)
def test_what_is_packed_comes_back(
    batches: list[tuple[int, int, int, int]], tracked: list[tuple[int, int, int, int, int, int, int, bool, bool, bool]]
) -> None:
    """Every column, every batch of a producer, every marker and the rest survive packing, with any numbers."""
    found = SegmentFindings(
        5, "x/00000000000000000005.log", 1000, 900, 77, 800,
        gaps=[Gap(1, 2, 3)], flaws=[Flaw(1, 2, 3, 4, "odd")], unreadable=[(4096, 4096)], epochs={1: 5, 3: 50},
        max_timestamp=9,
    )  # fmt: skip
    columns = [array("q", column) for column in zip(*batches, strict=True)] or [array("q") for _ in range(4)]
    found.positions, found.base_offsets, found.next_offsets, found.timestamps_before = columns
    for *fields, has_marker in tracked:
        found.tracked.append(Tracked(*fields, Marker(1, 2, True, 3, 4) if has_marker else None))
    assert unpack(pack(found)) == found
    found.broken = [DamagedRange(10, 20, 30, None, CorruptBatch("x", 10, "this", "that", 30), blank=True)]
    again = unpack(pack(found))
    assert broken_error(again) == broken_error(found)
    assert again.broken[0].blank
    assert len(again.tracked) == len(found.tracked)  # packing leaves the packed result unchanged


# ---------------------------------------------------------------- divided


@given(st.lists(st.integers(0, 200 * MIB), max_size=60), st.integers(1, 16))
def test_shares(sizes: list[int], workers: int) -> None:
    """Every segment is in one share, each worker has a share, and the shares are of similar size."""
    jobs = [SegmentJob(f"{number}.log", 0, None, size) for number, size in enumerate(sizes)]
    shares = split_jobs(jobs, workers)
    assert sorted(job.path for share in shares for job in share) == sorted(job.path for job in jobs)
    assert len(shares) == min(len(jobs), max(workers, sum(sizes) // (64 * MIB)))
    if any(sizes):
        totals = [sum(job.size_bytes for job in share) for share in shares]
        assert totals == sorted(totals, reverse=True)
        assert totals[0] <= totals[-1] + max(sizes)


# ---------------------------------------------------------------- handed over


def test_what_is_known_is_not_read_again(tmp_path: Path) -> None:
    """Repeated requests give the same counts."""
    make_store(tmp_path / "store")
    known = known_segments(tmp_path / "store")
    for _ in range(2):
        told, alone = Tally(), Tally()
        assert list(inspect_store(str(tmp_path / "store"), "t", inspect=known, tally=told)) == []
        assert list(inspect_store(str(tmp_path / "store"), "t", tally=alone)) == []
        assert told.counts() == alone.counts()
    assert known.inspected_locally == 0


def append(folder: Path) -> None:
    """Append one record."""
    with segmentlog.open(folder.parent.parent, background=False) as store:
        store.topic("t").partition(0).append([b"more"])


def replace(folder: Path) -> None:
    """Replace the file by a copy with the same bytes and times."""
    path = log_files(folder)[1]
    shutil.copy2(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: flip(log_files(folder)[0], 50),
        lambda folder: os.truncate(log_files(folder)[1], 100),
        replace,
        append,
    ],
    ids=["flipped", "cut", "replaced", "appended"],
)
def test_what_has_changed_is_looked_at_again(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """A result for a file that was replaced or has other bytes is ignored."""
    store = tmp_path / "store"
    folder = make_store(store)
    known = known_segments(store)
    change(folder)
    assert findings(store, known) == list(inspect_store(str(store), "t"))
    assert known.inspected_locally > 0


def test_a_segment_that_is_gone_is_nobodys_finding(tmp_path: Path) -> None:
    """A job for a missing segment returns nothing and raises nothing; the requesting process inspects it itself."""
    folder = make_store(tmp_path / "store")
    fs = FileSystem()
    jobs = list_segment_jobs(fs, str(tmp_path / "store"), "t")
    log_files(folder)[1].unlink()
    assert [inspect_job(fs, job) is None for job in jobs] == [False, True, False]
