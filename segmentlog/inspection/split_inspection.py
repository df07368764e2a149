"""Inspecting a topic in many places: most of the work is in its segments, and no segment needs another.

    list_segment_jobs -> split -> look, wherever that runs -> KnownSegments -> inspect_store

What was found travels packed. It is used where the very bytes lie there still that were looked
at; every other segment is looked at once more, here. So the findings are those of one process,
word for word: whatever goes wrong elsewhere costs time only.
"""

from __future__ import annotations

import heapq
import pickle
from array import array
from collections.abc import Iterable, Sequence

import cramjam
import msgspec
import numpy as np
import numpy.typing as npt

from segmentlog.errors import SegmentlogError
from segmentlog.format.file_names import LOG_SUFFIX
from segmentlog.inspection.finding import Tally
from segmentlog.inspection.segment_inspection import SegmentFindings, Tracked, inspect_segment
from segmentlog.inspection.small_files import StateReader
from segmentlog.inspection.store_inspection import list_partitions
from segmentlog.storage.fs import FileSystem, Stamp
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.storage.segment import list_segments, segment_stem

_SHARE_BYTES_MIN = 64 << 20


class SegmentJob(msgspec.Struct, frozen=True):
    """A segment that is to be looked at."""

    path: str
    base_offset: int
    end_position: int | None
    """Where the log ends in the segment that is appended to; None for all of the file."""
    size_bytes: int


class SegmentResult(msgspec.Struct, frozen=True):
    """What was found in a segment."""

    path: str
    end_position: int | None
    stamp: Stamp
    records: int
    packed: bytes


# ---------------------------------------------------------------- the work, divided


def list_segment_jobs(fs: FileSystem, path: str, topic: str) -> list[SegmentJob]:
    """The segments of a topic, as far as they are there. Raises OSError.

    A guess where others append, retain or compact: they may be others when it comes to the findings.
    """
    jobs = []
    for number in list_partitions(fs, f"{path}/{topic}")[0]:
        folder = f"{path}/{topic}/{number}"
        if not fs.is_folder(folder):
            continue
        log = StateReader(fs, folder).read().log
        for base in list_segments(fs, folder):
            file = segment_stem(folder, base) + LOG_SUFFIX
            try:
                size = fs.stat(file).st_size
            except FileNotFoundError:
                continue  # deleted since the folder was listed
            end = log.end_position if log is not None and log.active_base_offset == base else None
            jobs.append(SegmentJob(file, base, end, size if end is None else min(end, size)))
    return jobs


def split(jobs: Sequence[SegmentJob], workers: int) -> list[list[SegmentJob]]:
    """Shares of about the same size, the largest first: of 64 MiB or more, or fewer bytes so that each worker has one.

    A share has no less because beginning one costs as much as a few megabytes.
    """
    total = sum(job.size_bytes for job in jobs)
    count = min(len(jobs), max(workers, total // _SHARE_BYTES_MIN))
    shares: list[list[SegmentJob]] = [[] for _ in range(count)]
    lightest = [(0, number) for number in range(count)]
    for job in sorted(jobs, key=lambda job: -job.size_bytes):
        size, number = heapq.heappop(lightest)
        shares[number].append(job)
        heapq.heappush(lightest, (size + job.size_bytes, number))
    return sorted(shares, key=lambda share: -sum(job.size_bytes for job in share))


def inspect_job(fs: FileSystem, job: SegmentJob) -> SegmentResult | None:
    """Look at one segment; None if the file system refuses: then whoever asked shall see for himself."""
    tally = Tally()
    try:
        # Before the first byte is read: a write that comes between makes the stamp one of the past.
        stamp = fs.stamp(job.path)
        found = inspect_segment(fs, job.path, job.base_offset, end_position=job.end_position, epoch=0, tally=tally)
    except (OSError, SegmentlogError) as error:
        if is_interrupt(error):
            raise
        return None
    return SegmentResult(job.path, job.end_position, stamp, tally.records, pack(found))


class KnownSegments:
    """An `InspectSegment` that knows what was found elsewhere."""

    def __init__(self, looked: Iterable[SegmentResult]) -> None:
        self._looked = {segment.path: segment for segment in looked}
        self.inspected_here = 0
        """Segments of which nothing was known that still holds."""

    def __call__(
        self, fs: FileSystem, path: str, base: int, *, end_position: int | None, epoch: int, tally: Tally
    ) -> SegmentFindings:
        """As `inspect_segment` would find it. Raises OSError."""
        looked = self._looked.get(path)
        if looked is not None and looked.end_position == end_position and looked.stamp == fs.stamp(path):
            found = unpack(looked.packed)
            # Nobody knew the epochs of the segments before it. They matter where one goes back, which is damage.
            if min(found.epochs, default=epoch) >= epoch:
                tally.segments += 1
                tally.batches += len(found.positions)
                tally.records += looked.records
                tally.add_bytes(found.end_position)
                return found
        self.inspected_here += 1
        return inspect_segment(fs, path, base, end_position=end_position, epoch=epoch, tally=tally)


# ---------------------------------------------------------------- packed

_COLUMNS = ("positions", "base_offsets", "next_offsets", "timestamps_before")
_TRACKED_FIELDS = len(Tracked.__struct_fields__) - 1


def pack(found: SegmentFindings) -> bytes:
    """What was found, in less than a byte a batch and ten for one of a producer; a pickle has 32 and some 40 more."""
    batches = _pack_table([np.frombuffer(getattr(found, name), np.int64) for name in _COLUMNS])
    rows = [msgspec.structs.astuple(batch)[:-1] for batch in found.tracked]
    tracked = _pack_table(np.array(rows, np.int64).reshape(len(rows), _TRACKED_FIELDS).T)
    markers = {number: batch.marker for number, batch in enumerate(found.tracked) if batch.marker is not None}
    rest = msgspec.structs.replace(found, tracked=[], **{name: array("q") for name in _COLUMNS})
    return pickle.dumps((rest, batches, tracked, markers))


def unpack(data: bytes) -> SegmentFindings:
    """What was packed, as an object that nobody else has."""
    found, batches, tracked, markers = pickle.loads(data)
    for name, column in zip(_COLUMNS, _unpack_table(batches, len(_COLUMNS)), strict=True):
        setattr(found, name, array("q", column.tobytes()))
    for number, row in enumerate(_unpack_table(tracked, _TRACKED_FIELDS).T.tolist()):
        position, size, base, following, producer_id, epoch, sequence, transactional, control = row
        batch = Tracked(
            position, size, base, following, producer_id, epoch, sequence, bool(transactional), bool(control),
            markers.get(number),
        )  # fmt: skip
        found.tracked.append(batch)
    assert isinstance(found, SegmentFindings)
    return found


def _pack_table(columns: Sequence[npt.NDArray[np.int64]] | npt.NDArray[np.int64]) -> bytes:
    """Differences, and all first bytes of them, then all second ones, ...: most are zero, and LZ4 leaves them out."""
    differences = np.diff(np.asarray(columns, np.int64), axis=1, prepend=0)
    by_byte = np.ascontiguousarray(differences).view(np.uint8).reshape(-1, 8).T.tobytes()
    return bytes(cramjam.lz4.compress_block(by_byte))


def _unpack_table(data: bytes, rows: int) -> npt.NDArray[np.int64]:
    by_byte = np.frombuffer(memoryview(cramjam.lz4.decompress_block(data)), np.uint8).reshape(8, -1)
    differences = np.ascontiguousarray(by_byte.T).view(np.int64).reshape(rows, -1)
    sums: npt.NDArray[np.int64] = np.cumsum(differences, axis=1)
    return sums
