"""Make the files end where the recovered log ends: remove what follows, sync what precedes.

None of these steps changes where another scan would end. So an interrupted recovery can be repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from segmentlog.errors import UnreadableBatch
from segmentlog.format.batch import CODEC_MASK
from segmentlog.format.batch_codecs import compression_of
from segmentlog.format.encode import EncodedBatch, encode_batch
from segmentlog.format.file_names import CACHE_SUFFIXES, LOG_SUFFIX
from segmentlog.format.header_edit import gap_batch
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.wire_batch import filter_wire_batch
from segmentlog.format.wire_record_batch import WireRecordBatch
from segmentlog.log.handle import Handle
from segmentlog.log.recovery.tail_scan import LogTail
from segmentlog.log.segment_removal import quarantine_tail, remove_segment
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.segment import create_segment, segment_stem, truncate_durably


def truncate_after(
    handle: Handle, bases: Sequence[int], tail: LogTail, *, copy: bool, quarantine: bool
) -> tuple[int, str | None]:
    """Remove everything after the recovered end. Return (bytes put into quarantine, path of the last file of them)."""
    truncated, kept = 0, None
    for base in bases:
        if base < tail.base and base not in tail.stale:
            continue
        start = tail.position if base == tail.base else 0
        if quarantine:
            size, path = quarantine_tail(handle, base, start, "cut")
            truncated, kept = truncated + size, path or kept
        if base != tail.base:
            remove_segment(handle, base)
    if tail.base in bases and tail.appendable:
        if copy or tail.split is not None:
            _copy_segment(handle, tail)
        else:
            truncate_durably(handle.fs, handle.folder, tail.base, tail.position)
        for suffix in CACHE_SUFFIXES:
            with contextlib.suppress(FileNotFoundError):  # rebuilt from the log on next use
                handle.fs.unlink(segment_stem(handle.folder, tail.base) + suffix)
    return truncated, kept


def make_durable(handle: Handle, whole: Sequence[tuple[int, int]], *, rewrite: bool) -> None:
    """Sync the complete segments above the recovery point. With ``rewrite`` their fsync may have failed: copy them.

    Space after the end of a segment, preallocated by an interrupted roll, is cut off.
    """
    for base, position in whole:
        path = segment_stem(handle.folder, base) + LOG_SUFFIX
        if rewrite:
            replace_file(handle.fs, path, read_file(handle.fs, path)[:position])
        else:
            truncate_durably(handle.fs, handle.folder, base, position)


def _copy_segment(handle: Handle, tail: LogTail) -> None:
    """Replace the segment by a copy up to its new end.

    Readers may have the old file mapped, so it must not shrink. And after a failed fsync, the kernel writes the bytes
    again only if they are rewritten.
    """
    path = segment_stem(handle.folder, tail.base) + LOG_SUFFIX
    data = read_file(handle.fs, path)[: tail.position]
    if tail.split is not None:
        data += split_batch(tail.split, tail.end_offset)
        tail.split = None
    replace_file(handle.fs, path, data)
    tail.position = len(data)


def split_batch(part: RecordBatch, end_offset: int) -> bytes:
    """Return the bytes of a batch's kept part, extended to the new log end.

    An unreadable batch keeps only its offsets, because the position of the cut in its bytes is unknown.
    """
    header = part.header
    if len(part):  # else the batch was compacted, and its remaining records come after the cut
        try:
            batch = _split_wire(part, end_offset) if isinstance(part, WireRecordBatch) else _split_columns(part)
        except UnreadableBatch:
            pass
        else:
            batch.extend_to(end_offset - header.base_offset - 1)
            return bytes(batch.placed_at(header.base_offset, header.partition_epoch)) + bytes(batch.payload)
    return gap_batch(header.base_offset, end_offset, header.partition_epoch)


def _split_columns(part: RecordBatch) -> EncodedBatch:
    header = part.header
    return encode_batch(
        part.values,
        part.keys if header.keys_size else None,
        part.timestamps,
        part.headers if header.headers_size else None,
        now_ms=header.base_timestamp,
        compression=compression_of(header.codec),
        offset_deltas=None if not header.offset_deltas_size
        else (part.offsets - header.base_offset).astype(np.uint32),
        attributes=header.attributes & ~CODEC_MASK,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        delete_horizon_ms=header.delete_horizon_ms,
    )  # fmt: skip


def _split_wire(part: WireRecordBatch, end_offset: int) -> EncodedBatch:
    """Cut a batch in Kafka's format, which it keeps."""
    header = part.header
    kept = np.arange(header.record_count) < len(part)
    return filter_wire_batch(
        header, part.wire_records, kept, end_offset - header.base_offset - 1, header.delete_horizon_ms
    )


def open_active_segment(handle: Handle, bases: Sequence[int], tail: LogTail, resume_offset: int) -> tuple[int, int]:
    """Choose or create the segment for the next append, and sync the folder. Return (its base offset, position)."""
    usable = tail.base in bases and tail.appendable
    if usable and resume_offset == tail.end_offset:
        active = (tail.base, tail.position)
    else:
        active = (resume_offset, 0)
        create_segment(handle.fs, handle.folder, resume_offset)
    handle.fs.sync_folder(handle.folder)
    return active
