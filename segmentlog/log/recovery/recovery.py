"""Recovering a log whose shared state cannot be believed: after a machine's death, on a copy, after a failed fsync.

    checkpoint -> scan from the recovery point -> verdict -> cut -> begin -> checkpoint -> state page

A recovery that is cut short is done again by the next one, with the same outcome: nothing
that it does before the checkpoint is written changes where the next scan ends.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from segmentlog.errors import CorruptBatch
from segmentlog.format.batch import CODEC_MASK, BatchHeader, check_payload, decode_header, encode_batch, gap_batch
from segmentlog.format.checkpoint import Checkpoint
from segmentlog.format.names import CACHE_SUFFIXES, LOG_SUFFIX, SNAPSHOT_SUFFIX, segment_name
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.scan import walk
from segmentlog.log.files import quarantine_tail, remove_segment, truncate_file
from segmentlog.log.handle import REWRITING, Handle
from segmentlog.log.producers import stable_offset_of
from segmentlog.log.swap import finish_swaps
from segmentlog.policy.recovery import RecoveryVerdict, decide
from segmentlog.policy.retention import deleted_segments
from segmentlog.records import EpochStart, LostRange, RecoveryReport
from segmentlog.storage.belief import why_doubted
from segmentlog.storage.fs import read_file, replace_file
from segmentlog.storage.segment import MappedSegment, list_segments, segment_stem
from segmentlog.storage.state import PRODUCERS_WORD, LogState, StateDamaged, StatePage, SyncState

_GENERATION_MASK = (1 << 63) - 1
# A page of ones is read as well as any other.


class _Tail(msgspec.Struct):
    """What the scan above the recovery point found."""

    base: int  # the segment in which the log ends
    position: int  # and where in it
    end_offset: int
    last_epoch: int
    appendable: bool  # the segment is whole up to there
    torn: str  # why the scan ended, unless at the end of what was written
    scanned_bytes: int = 0
    split: RecordBatch | None = None  # a batch that a truncation cuts in two
    gaps: tuple[LostRange, ...] = ()  # lost ranges that no checkpoint told of
    stale: tuple[int, ...] = ()  # segments whose offsets stand in others
    whole: tuple[tuple[int, int], ...] = ()  # the segments before that, with the position where each ends


def recover(handle: Handle, page: StatePage, *, write: bool = True) -> RecoveryReport:
    """Find where the log ends, decide where it goes on, and make both durable.

    The caller holds both locks. With ``write=False`` nothing is changed: the page (a private
    one) then shows the log up to its recovered end. Raises OSError, DiskFull.
    """
    started_ns = time.monotonic_ns()
    checkpoint, slot_damaged = handle.checkpoint.read()
    if write:
        finish_swaps(handle, recovering=True)
    bases = list_segments(handle.fs, handle.folder)
    deleted = _deleted(bases, checkpoint)
    bases = [base for base in bases if base not in deleted]
    before = _state_before(handle, page)
    tail = _scan(handle, checkpoint, bases)
    if before is not None and checkpoint is not None:
        # Same boot: how far offsets were handed out is known exactly. Where something is lost, the old
        # end is given up with it: a consumer that had read everything stands there, and must be told.
        ceiling = before.log_end_offset + (tail.end_offset < before.log_end_offset)
        checkpoint = msgspec.structs.replace(checkpoint, offset_ceiling=ceiling, clean=False)
    seen_offset = tail.end_offset
    if bases and (checkpoint is None or slot_damaged or bases[-1] > checkpoint.offset_ceiling):
        seen_offset = max(seen_offset, bases[-1])  # a file's name was handed out, too
    verdict = decide(
        checkpoint,
        slot_damaged=slot_damaged,
        has_segments=bool(bases),
        end_offset=seen_offset,
        last_epoch=tail.last_epoch,
    )
    first = bases[0] if bases else 0
    known = checkpoint or Checkpoint(recovery_offset=first, recovery_segment=first, log_start_offset=first)
    lost = _lost_range(handle, known, tail, verdict)
    report = RecoveryReport(
        verdict=_verdict_name(checkpoint, verdict, new=not bases, failed_fsync=before is not None),
        log_start_offset=min(known.log_start_offset, verdict.resume_offset),
        log_end_offset=verdict.resume_offset,
        epoch=verdict.epoch,
        scanned_bytes=tail.scanned_bytes,
        lost=lost,
        why=verdict.why + (f"; the scan ended at {tail.torn}" if tail.torn else ""),
    )
    active_base, position = tail.base, tail.position
    is_new = checkpoint is None and not slot_damaged and not bases
    if write:
        if checkpoint is None or slot_damaged:
            # Before anything is cut or made: should this recovery die, the next one resumes at the same offset.
            known = msgspec.structs.replace(
                known,
                offset_ceiling=verdict.resume_offset,
                clean=not bases,
                boot_id=handle.fs.boot_id(),
                lost_ranges=(*known.lost_ranges, *tail.gaps),
            )
            tail.gaps = ()
            # Of a new log this is the last one as well: `_begin` syncs its name with that of the segment.
            handle.checkpoint.write(known, sync_folder=not is_new)
        keep = page.writing != REWRITING  # what a user truncates away is not wanted in quarantine either
        truncated_bytes, kept = _cut(handle, bases, tail, copy=before is not None, keep=keep)
        _make_durable(handle, tail.whole, rewrite=before is not None)
        active_base, position = _begin(handle, bases, tail, verdict.resume_offset)
        log = _log_state(handle, page, report, active_base, position)
        begun = active_base if active_base not in bases else None
        if is_new:
            bases = [active_base]
        else:
            bases = [base for base in list_segments(handle.fs, handle.folder) if base not in deleted]
        unsure = checkpoint is None or slot_damaged
        log, has_producers = _with_stable_offset(handle, log, known, bases, unsure=unsure, begun=begun)
        epochs, ranges = known.epochs, (*known.lost_ranges, *tail.gaps)
        if verdict.epoch > known.epoch:
            epochs = (*epochs, EpochStart(verdict.epoch, verdict.resume_offset))
        if lost is not None:
            ranges = with_lost_range(ranges, lost)
        recovered = Checkpoint(
            recovery_offset=verdict.resume_offset,
            recovery_segment=active_base,
            recovery_position=position,
            log_start_offset=report.log_start_offset,
            offset_ceiling=verdict.resume_offset,
            clean=True,
            boot_id=handle.fs.boot_id(),
            epochs=epochs,
            lost_ranges=ranges,
            compacted=known.compacted,
            has_producers=has_producers,
        )
        if not is_new or recovered != known:
            handle.checkpoint.write(recovered)
        # Nothing in it, and the log goes on under another name? What is known of producers must not go with it.
        is_left_empty = tail.position == 0 and tail.appendable and active_base != tail.base
        if is_left_empty and (_has_snapshot(handle, active_base) or not _has_snapshot(handle, tail.base)):
            deleted.append(tail.base)
        for base in deleted:  # not before: the checkpoint may have named it
            remove_segment(handle, base)
        report = msgspec.structs.replace(report, truncated_bytes=truncated_bytes, quarantine_path=kept)
    else:
        end_offset = max(tail.end_offset, report.log_start_offset)  # what is left may all be trimmed away
        if tail.split is not None:
            position += tail.split.header.size_bytes  # readers show of it what lies below the end
        report = msgspec.structs.replace(report, log_end_offset=end_offset)
        log = _log_state(handle, page, report, active_base, position)
        log, has_producers = _with_stable_offset(handle, log, known, bases, unsure=checkpoint is None or slot_damaged)
    _initialise_page(handle, page, log, has_producers=has_producers)
    handle.adopt(page)
    return msgspec.structs.replace(report, duration_ms=(time.monotonic_ns() - started_ns) / 1e6)


def _has_snapshot(handle: Handle, base: int) -> bool:
    """Whether a segment comes with what was known of producers: once their batches are deleted, nothing else knows."""
    with contextlib.suppress(FileNotFoundError):
        handle.fs.stat(segment_stem(handle.folder, base) + SNAPSHOT_SUFFIX)
        return True
    return False


def _deleted(bases: Sequence[int], checkpoint: Checkpoint | None) -> list[int]:
    """Segments that lie below the log start, back after a crash: no part of the log, whatever their bytes are."""
    if checkpoint is None:
        return []
    return deleted_segments(bases, checkpoint.log_start_offset, checkpoint.recovery_segment)


def _state_before(handle: Handle, page: StatePage) -> LogState | None:
    """The state in which this boot's processes left the log, when it is they who call for a recovery."""
    called_for = page.failed or page.writing == REWRITING
    if called_for and why_doubted(handle.fs, handle.folder, page, handle.state_fd) is None:
        return page.log.read()
    return None


def _generation_after(page: StatePage) -> int:
    """One that nobody has seen: where the kernel vouches for no page, others may use this one all the while."""
    try:
        return page.log.read().generation + 1 & _GENERATION_MASK
    except StateDamaged:
        return 1


def _log_state(handle: Handle, page: StatePage, report: RecoveryReport, active_base: int, position: int) -> LogState:
    end_offset = report.log_end_offset
    return LogState(
        log_start_offset=report.log_start_offset,
        log_end_offset=end_offset,
        last_stable_offset=end_offset,
        active_base_offset=active_base,
        end_position=position,
        epoch=report.epoch,
        generation=_generation_after(page),
        appended_bytes=0,
        first_append_ms=handle.clock.now_ms() if position else 0,
        offset_ceiling=end_offset,
    )


def _with_stable_offset(
    handle: Handle, log: LogState, known: Checkpoint, bases: Sequence[int], *, unsure: bool, begun: int | None = None
) -> tuple[LogState, bool]:
    """(the state with the offset up to which every transaction is decided, whether the log has producers).

    ``unsure``: the checkpoint cannot be believed about that, and the log is asked. ``begun``: the
    segment that the recovery begins, if it does; like any other it begins with what is known of
    producers, which would be forgotten once the segments before it are deleted.
    """
    if not known.has_producers and not unsure:
        return log, False
    stable_offset, found = stable_offset_of(handle, log, bases, begun)
    return msgspec.structs.replace(log, last_stable_offset=stable_offset), known.has_producers or found


def _initialise_page(handle: Handle, page: StatePage, log: LogState, *, has_producers: bool) -> None:
    sync = SyncState(
        durable_offset=log.log_end_offset,
        synced_bytes=0,
        synced_base_offset=log.active_base_offset,
        checkpointed_bytes=0,
        synced_at_ms=handle.clock.monotonic_ms(),
        sync_count=0,
    )
    page.words[PRODUCERS_WORD] = int(has_producers)
    if has_producers:
        page.count_abort()  # readers look which ones there are now
    if handle.state_fd < 0:  # a private page
        page.initialise(handle.fs.boot_id(), handle.fs.stat(handle.folder), log, sync)
        return
    mount_id = handle.fs.mount_id(handle.state_fd)
    page.initialise(handle.fs.boot_id(), handle.fs.stat(handle.folder), log, sync, mount_id)
    handle.fs.mark(handle.state_fd)  # last: it vouches for what stands there


def _verdict_name(checkpoint: Checkpoint | None, verdict: RecoveryVerdict, *, new: bool, failed_fsync: bool) -> str:
    if failed_fsync:
        return "failed fsync"
    if checkpoint is None:
        return "new" if new and not verdict.epoch else "no checkpoint"
    return "clean" if verdict.epoch == checkpoint.epoch else "machine death"


def _lost_range(handle: Handle, known: Checkpoint, tail: _Tail, verdict: RecoveryVerdict) -> LostRange | None:
    """The range that is given up; the one that a truncation announced in the checkpoint, if it is that."""
    if verdict.resume_offset == tail.end_offset:
        return None
    for lost in known.lost_ranges:
        if (lost.base_offset, lost.end_offset) == (tail.end_offset, verdict.resume_offset):
            return lost
    return LostRange(tail.end_offset, verdict.resume_offset, verdict.epoch, verdict.why, handle.clock.now_ms())


def with_lost_range(ranges: tuple[LostRange, ...], lost: LostRange) -> tuple[LostRange, ...]:
    """The ranges with one more; those that it covers are absorbed, so that ranges never overlap."""
    apart = [one for one in ranges if one.base_offset < lost.base_offset or one.end_offset > lost.end_offset]
    return (*apart, lost)


def is_lost(ranges: Sequence[LostRange], base_offset: int, end_offset: int) -> bool:
    """Whether lost ranges, one or several that touch, explain that ``[base_offset, end_offset)`` holds no record.

    Not empty: ``base_offset`` lies below ``end_offset``.
    """
    for lost in ranges:
        if lost.base_offset <= base_offset < lost.end_offset:
            base_offset = lost.end_offset
    return base_offset >= end_offset


def _accept_gap(handle: Handle, tail: _Tail, base: int) -> None:
    """Without a checkpoint: a segment of a later epoch stands behind a range that an earlier crash took."""
    mapped = MappedSegment(handle.fs, handle.folder, base)
    try:
        header = decode_header(mapped.view, 0, mapped.path)
    except CorruptBatch:
        return
    if header.base_offset == base and header.partition_epoch > tail.last_epoch:
        reason = "found without a checkpoint, before a later epoch"
        gap = LostRange(tail.end_offset, base, header.partition_epoch, reason, handle.clock.now_ms())
        tail.gaps = (*tail.gaps, gap)


def _scan(handle: Handle, checkpoint: Checkpoint | None, bases: list[int]) -> _Tail:
    """Walk the batches above the recovery point, checksums and all, to the first that is not whole."""
    known = checkpoint or Checkpoint()
    first = known.recovery_segment if checkpoint else (bases[0] if bases else 0)
    tail = _Tail(first, 0, known.recovery_offset if checkpoint else first, known.epoch, first in bases, "")
    tail.position = known.recovery_position
    for base in bases:
        if base < first:
            continue
        given_up = any(lost.base_offset < base < lost.end_offset for lost in (*known.lost_ranges, *tail.gaps))
        if tail.base < base and (base < tail.end_offset or given_up):
            # Its offsets stand in the segment before it, or were given up: a file that was deleted and came back.
            tail.stale = (*tail.stale, base)
            continue
        if base > tail.base:
            if checkpoint is None and base > tail.end_offset:
                _accept_gap(handle, tail, base)
            if base != tail.end_offset and not is_lost((*known.lost_ranges, *tail.gaps), tail.end_offset, base):
                tail.torn = tail.torn or f"offset {tail.end_offset}, where the next segment begins at {base}"
                break
            if tail.base in bases:
                tail.whole = (*tail.whole, (tail.base, tail.position))
            tail.base, tail.position, tail.end_offset, tail.appendable = base, 0, base, True
        mapped = MappedSegment(handle.fs, handle.folder, base)
        if len(mapped.view) < tail.position:
            # Shorter than what was durable: damage, which reading will report. Nothing is appended to it.
            tail.torn, tail.appendable = f"{mapped.path}, which has lost bytes below the recovery point", False
            tail.base, tail.position = base, len(mapped.view)
            break
        if not _scan_segment(mapped, tail, known):
            break
    if bases and first not in bases:
        tail.torn, tail.appendable = f"segment {segment_name(first)}, which is missing", False
    return tail


def _scan_segment(mapped: MappedSegment, tail: _Tail, known: Checkpoint) -> bool:
    """Advance ``tail`` through one segment; False when the log ends in it before its written end."""
    size = len(mapped.view)
    start = tail.position
    batches = walk(mapped.view, start, size, mapped.path, expected_offset=tail.end_offset, payloads=True)
    try:
        for position, header in batches:
            if (cut := _truncated_at(header, known)) is not None:
                tail.torn = f"offset {cut}, where the log was truncated"
                if cut > header.base_offset:
                    payload = check_payload(mapped.view, position, header, mapped.path)
                    batch = RecordBatch(header, payload, path=mapped.path, position=position)
                    tail.split = batch.slice(0, int(np.searchsorted(batch.offsets, cut)))
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


def _any_after(view: memoryview, position: int) -> bool:
    """Whether a byte other than zero lies at or after ``position``."""
    step = 1 << 20
    return any(np.frombuffer(view[at : at + step], np.uint8).any() for at in range(position, len(view), step))


def _truncated_at(header: BatchHeader, known: Checkpoint) -> int | None:
    """The offset at which a truncation that the checkpoint announces cuts this batch off, if it does."""
    for lost in known.lost_ranges:
        overlaps = header.base_offset < lost.end_offset and header.next_offset > lost.base_offset
        if overlaps and header.partition_epoch < lost.epoch:
            return max(lost.base_offset, header.base_offset)
    return None


def _cut(handle: Handle, bases: list[int], tail: _Tail, *, copy: bool, keep: bool) -> tuple[int, str | None]:
    """Leave nothing behind the recovered end; (bytes put into quarantine, the last file of them)."""
    truncated, kept = 0, None
    for base in bases:
        if base < tail.base and base not in tail.stale:
            continue
        start = tail.position if base == tail.base else 0
        if keep:
            size, path = quarantine_tail(handle, base, start, "cut")
            truncated, kept = truncated + size, path or kept
        if base != tail.base:
            remove_segment(handle, base)
    if tail.base in bases and tail.appendable:
        if copy or tail.split is not None:
            _copy_segment(handle, tail)
        else:
            truncate_file(handle, tail.base, tail.position)
        for suffix in CACHE_SUFFIXES:
            with contextlib.suppress(FileNotFoundError):  # rebuilt from the log when next needed
                handle.fs.unlink(segment_stem(handle.folder, tail.base) + suffix)
    return truncated, kept


def _make_durable(handle: Handle, whole: Sequence[tuple[int, int]], *, rewrite: bool) -> None:
    """fsync the whole segments above the recovery point; write them anew if an fsync of theirs may have failed.

    What is behind the end of one goes: space that a crash in the middle of a roll left preallocated.
    """
    for base, position in whole:
        path = segment_stem(handle.folder, base) + LOG_SUFFIX
        if rewrite:
            replace_file(handle.fs, path, read_file(handle.fs, path)[:position])
        else:
            truncate_file(handle, base, position)


def _copy_segment(handle: Handle, tail: _Tail) -> None:
    """Put a copy of the segment up to its new end in its place.

    Readers may have the old file mapped: it must not shrink under them. And after a failed
    fsync only writing the bytes anew makes the kernel try them again.
    """
    path = segment_stem(handle.folder, tail.base) + LOG_SUFFIX
    data = read_file(handle.fs, path)[: tail.position]
    if tail.split is not None:
        data += _split_batch(tail.split, tail.end_offset)
        tail.split = None
    replace_file(handle.fs, path, data)
    tail.position = len(data)


def _split_batch(part: RecordBatch, end_offset: int) -> bytes:
    """The part of a batch that is kept, up to where the log ends now."""
    header = part.header
    if not len(part):  # compacted: what is left of it stands behind the cut
        return gap_batch(header.base_offset, end_offset, header.partition_epoch)
    batch = encode_batch(
        part.values,
        part.keys if header.keys_size else None,
        part.timestamps,
        part.headers if header.headers_size else None,
        now_ms=header.base_timestamp,
        codec=header.codec,
        offset_deltas=None if not header.offset_deltas_size
        else (part.offsets - header.base_offset).astype(np.uint32),
        attributes=header.attributes & ~CODEC_MASK,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        delete_horizon_ms=header.delete_horizon_ms,
    )  # fmt: skip
    batch.extend_to(end_offset - header.base_offset - 1)
    return bytes(batch.placed_at(header.base_offset, header.partition_epoch)) + bytes(batch.payload)


def _begin(handle: Handle, bases: list[int], tail: _Tail, resume_offset: int) -> tuple[int, int]:
    """Make the segment that takes the next append, and every name in the folder, durable: (its base, position)."""
    usable = tail.base in bases and tail.appendable
    if usable and resume_offset == tail.end_offset:
        active = (tail.base, tail.position)
    else:
        active = (resume_offset, 0)
        path = segment_stem(handle.folder, resume_offset) + LOG_SUFFIX
        handle.fs.close(handle.fs.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    handle.fs.sync_folder(handle.folder)
    return active
