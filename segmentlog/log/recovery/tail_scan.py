"""Find the end of a log during recovery: scan from the recovery point to the first incomplete batch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from segmentlog.errors import CorruptBatch, UnreadableBatch
from segmentlog.format.batch import BatchHeader, check_payload, decode_header
from segmentlog.format.checkpoint import Checkpoint
from segmentlog.format.decoded_batch import record_batch
from segmentlog.format.file_names import segment_name
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.scan import scan_batches
from segmentlog.log.handle import Handle
from segmentlog.policy.lost_ranges import is_lost
from segmentlog.records import LostRange
from segmentlog.storage.segment import MappedSegment


class LogTail(msgspec.Struct):
    """The result of the scan above the recovery point."""

    base: int  # base offset of the segment in which the log ends
    position: int  # byte position in that segment
    end_offset: int
    last_epoch: int
    appendable: bool  # whether the segment is complete up to that position
    torn: str  # why the scan ended; "" if it reached the end of the written bytes
    scanned_bytes: int = 0
    split: RecordBatch | None = None  # a batch that a truncation cuts in two
    gaps: tuple[LostRange, ...] = ()  # lost ranges that are not in a checkpoint
    stale: tuple[int, ...] = ()  # segments whose offsets are in other segments, or lost
    whole: tuple[tuple[int, int], ...] = ()  # (base offset, end position) of complete segments before it


def scan_tail(handle: Handle, checkpoint: Checkpoint | None, bases: Sequence[int]) -> LogTail:
    """Scan the batches above the recovery point, with checksums, to the first incomplete batch."""
    known = checkpoint or Checkpoint()
    truncate_to = -1 if known.replicated is None else known.replicated.truncate_to
    first = known.recovery_segment if checkpoint else (bases[0] if bases else 0)
    tail = LogTail(first, 0, known.recovery_offset if checkpoint else first, known.epoch, first in bases, "")
    tail.position = known.recovery_position
    for base in bases:
        if base < first:
            continue
        given_up = any(lost.base_offset < base < lost.end_offset for lost in (*known.lost_ranges, *tail.gaps))
        if tail.base < base and (base < tail.end_offset or given_up):
            # The file was deleted, and came back after a crash: its offsets are in the segment before it, or lost.
            tail.stale = (*tail.stale, base)
            continue
        if base > tail.base:
            if 0 <= truncate_to <= base:
                tail.torn = tail.torn or f"offset {truncate_to}, where the log was truncated"
                break
            if checkpoint is None and base > tail.end_offset:
                _accept_gap(handle, tail, base)
            if base != tail.end_offset and not is_lost((*known.lost_ranges, *tail.gaps), tail.end_offset, base):
                tail.torn = tail.torn or f"offset {tail.end_offset}, although the next segment begins at {base}"
                break
            if tail.base in bases:
                tail.whole = (*tail.whole, (tail.base, tail.position))
            tail.base, tail.position, tail.end_offset, tail.appendable = base, 0, base, True
        mapped = MappedSegment(handle.fs, handle.folder, base)
        if len(mapped.view) < tail.position:
            # The file lacks bytes that were durable: readers report this damage. The segment gets no more appends.
            tail.torn, tail.appendable = f"{mapped.path}, which lacks bytes below the recovery point", False
            tail.base, tail.position = base, len(mapped.view)
            break
        if not _scan_segment(mapped, tail, known):
            break
    if bases and first not in bases:
        tail.torn, tail.appendable = f"segment {segment_name(first)}, which is missing", False
    return tail


def _accept_gap(handle: Handle, tail: LogTail, base: int) -> None:
    """Without a checkpoint, accept a gap before a segment of a later epoch: an earlier crash lost that range."""
    mapped = MappedSegment(handle.fs, handle.folder, base)
    try:
        header = decode_header(mapped.view, 0, mapped.path)
    except CorruptBatch:
        return
    if header.base_offset == base and header.partition_epoch > tail.last_epoch:
        reason = "found without a checkpoint, before a later epoch"
        gap = LostRange(tail.end_offset, base, header.partition_epoch, reason, handle.clock.now_ms())
        tail.gaps = (*tail.gaps, gap)


def _scan_segment(mapped: MappedSegment, tail: LogTail, known: Checkpoint) -> bool:
    """Advance ``tail`` through one segment. Return False if the log ends in it before its written end."""
    size = len(mapped.view)
    start = tail.position
    batches = scan_batches(mapped.view, start, size, mapped.path, expected_offset=tail.end_offset, payloads=True)
    try:
        for position, header in batches:
            if (cut := _truncated_at(header, known)) is not None:
                tail.torn = f"offset {cut}, where the log was truncated"
                if cut > header.base_offset:
                    tail.split = part_below(mapped.view, position, header, cut, mapped.path)
                    tail.end_offset = cut
                return False
            tail.position = position + header.size_bytes
            tail.end_offset = header.next_offset
            tail.last_epoch = max(tail.last_epoch, header.partition_epoch)
    except CorruptBatch as error:
        if _any_after(mapped.view, tail.position):
            tail.torn = str(error)
            return False
    finally:
        tail.scanned_bytes += tail.position - start
    return True


def part_below(view: memoryview, position: int, header: BatchHeader, offset: int, path: str) -> RecordBatch:
    """Return the records below ``offset`` of the batch at byte ``position``. Raises `CorruptBatch`."""
    payload = check_payload(view, position, header, path)
    batch = record_batch(header, payload, path=path, position=position)
    try:
        return batch.slice(0, int(np.searchsorted(batch.offsets, offset)))
    except UnreadableBatch:
        return batch.slice(0, 0)


def _any_after(view: memoryview, position: int) -> bool:
    """Return whether there is a byte other than zero at or after ``position``."""
    step = 1 << 20
    return any(np.frombuffer(view[at : at + step], np.uint8).any() for at in range(position, len(view), step))


def _truncated_at(header: BatchHeader, known: Checkpoint) -> int | None:
    """Return the offset at which a truncation announced in the checkpoint cuts this batch; None if none does."""
    if known.replicated is not None and 0 <= known.replicated.truncate_to < header.next_offset:
        return max(known.replicated.truncate_to, header.base_offset)
    for lost in known.lost_ranges:
        overlaps = header.base_offset < lost.end_offset and header.next_offset > lost.base_offset
        if overlaps and header.partition_epoch < lost.epoch:
            return max(lost.base_offset, header.base_offset)
    return None
