"""Inspect a topic in several processes: most of the work is in segments, which are independent of each other.

    list_segment_jobs -> split -> inspect_job, in any process -> KnownSegments -> inspect_store

Results are packed for transport. A result is used only if the file still has the bytes that were inspected. Every other
segment is inspected again, in this process. So the findings equal those of a single process, and a failure in another
process costs only time.
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
    """A segment to inspect."""

    path: str
    base_offset: int
    end_position: int | None
    """The log end in the active segment; None for the whole file."""
    size_bytes: int


class SegmentResult(msgspec.Struct, frozen=True):
    """The result of inspecting a segment."""

    path: str
    end_position: int | None
    stamp: Stamp
    records: int
    packed: bytes


# ---------------------------------------------------------------- the work, divided


def list_segment_jobs(fs: FileSystem, path: str, topic: str) -> list[SegmentJob]:
    """Return the segments of a topic that exist. Raises OSError.

    If other processes append, apply retention or compact, the list may be out of date when the inspection runs.
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


def split_jobs(jobs: Sequence[SegmentJob], workers: int) -> list[list[SegmentJob]]:
    """Split jobs into shares of similar size, the largest first.

    A share has at least 64 MiB, unless workers would stay idle. A smaller share would not be worth its start, which
    costs as much as inspecting a few megabytes.
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
    """Inspect one segment. Return None after an error; the requesting process then inspects the segment itself."""
    tally = Tally()
    try:
        # Before the first byte is read: a write in between must make the stamp outdated.
        stamp = fs.stamp(job.path)
        found = inspect_segment(fs, job.path, job.base_offset, end_position=job.end_position, epoch=0, tally=tally)
    except (OSError, SegmentlogError) as error:
        if is_interrupt(error):
            raise
        return None
    return SegmentResult(job.path, job.end_position, stamp, tally.records, pack(found))


class KnownSegments:
    """An `InspectSegment` that returns results from other processes."""

    def __init__(self, results: Iterable[SegmentResult]) -> None:
        self._results = {segment.path: segment for segment in results}
        self.inspected_locally = 0
        """The number of segments without a result that is still valid."""

    def __call__(
        self, fs: FileSystem, path: str, base: int, *, end_position: int | None, epoch: int, tally: Tally
    ) -> SegmentFindings:
        """Return what `inspect_segment` would find. Raises OSError."""
        result = self._results.get(path)
        if result is not None and result.end_position == end_position and result.stamp == fs.stamp(path):
            found = unpack(result.packed)
            # The other process did not know the epochs of earlier segments. They matter if an epoch decreases, which is
            # damage.
            if min(found.epochs, default=epoch) >= epoch:
                tally.segments += 1
                tally.batches += len(found.positions)
                tally.records += result.records
                tally.add_bytes(found.end_position)
                return found
        self.inspected_locally += 1
        return inspect_segment(fs, path, base, end_position=end_position, epoch=epoch, tally=tally)


# ---------------------------------------------------------------- packed

_COLUMNS = ("positions", "base_offsets", "next_offsets", "timestamps_before")
_TRACKED_FIELDS = len(Tracked.__struct_fields__) - 1


def pack(found: SegmentFindings) -> bytes:
    """Pack findings. A batch takes less than one byte, and a batch with a producer takes ten.

    A pickle would take 32 bytes for a batch, and about 72 for a batch with a producer.
    """
    batches = _pack_table([np.frombuffer(getattr(found, name), np.int64) for name in _COLUMNS])
    rows = [msgspec.structs.astuple(batch)[:-1] for batch in found.tracked]
    tracked = _pack_table(np.array(rows, np.int64).reshape(len(rows), _TRACKED_FIELDS).T)
    markers = {number: batch.marker for number, batch in enumerate(found.tracked) if batch.marker is not None}
    rest = msgspec.structs.replace(found, tracked=[], **{name: array("q") for name in _COLUMNS})
    return pickle.dumps((rest, batches, tracked, markers))


def unpack(data: bytes) -> SegmentFindings:
    """Return packed findings as a new object."""
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
    """Compress a table of numbers that grow slowly.

    Take the differences, then store all their first bytes, all their second bytes, and so on: most are zero, and LZ4
    removes them.
    """
    differences = np.diff(np.asarray(columns, np.int64), axis=1, prepend=0)
    by_byte = np.ascontiguousarray(differences).view(np.uint8).reshape(-1, 8).T.tobytes()
    return bytes(cramjam.lz4.compress_block(by_byte))


def _unpack_table(data: bytes, rows: int) -> npt.NDArray[np.int64]:
    by_byte = np.frombuffer(memoryview(cramjam.lz4.decompress_block(data)), np.uint8).reshape(8, -1)
    differences = np.ascontiguousarray(by_byte.T).view(np.int64).reshape(rows, -1)
    sums: npt.NDArray[np.int64] = np.cumsum(differences, axis=1)
    return sums
