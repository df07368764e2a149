"""Repair damaged segments: move bad bytes to quarantine, write a copy without them, rebuild the indexes."""

from __future__ import annotations

import contextlib

from segmentlog.errors import SegmentGone
from segmentlog.format.file_names import ABORTED_SUFFIX, INDEX_SUFFIX, LOG_SUFFIX, TIME_INDEX_SUFFIX, segment_name
from segmentlog.format.producer_snapshot import (
    AbortedTransaction,
    MalformedProducerFile,
    decode_aborted,
    encode_aborted,
)
from segmentlog.inspection.partition_findings import Cut
from segmentlog.inspection.segment_inspection import read_segment
from segmentlog.log.handle import Handle
from segmentlog.log.segment_removal import remove_segment
from segmentlog.log.transaction_index import read_aborted
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.segment import MappedSegment, segment_stem
from segmentlog.storage.segment_index import SegmentIndex
from segmentlog.storage.segment_stub import remove_stub


def cut_out(handle: Handle, cuts: list[Cut], *, keep_empty: bool = False) -> list[str]:
    """Replace each segment by a copy without the cuts.

    Return the files in quarantine with the bytes that were cut out.
    """
    kept: list[str] = []
    for base in dict.fromkeys(cut.segment for cut in cuts):
        path = segment_stem(handle.folder, base) + LOG_SUFFIX
        try:
            _, data, _ = read_segment(handle.fs, path)
        except SegmentGone:  # it was only in the object store, so its bytes are lost
            remove_segment(handle, base)
            handle.fs.sync_folder(handle.folder)
            continue
        whole: list[bytes] = []
        position = 0
        for cut in cuts:
            if cut.segment == base:
                kept.append(_quarantine(handle, cut, bytes(data[cut.position : cut.end_position])))
                whole.append(bytes(data[position : cut.position]))
                position = cut.end_position
        whole.append(bytes(data[position:]))
        if not whole[-1].strip(b"\0"):
            del whole[-1]  # zeros after the last cut: a sealed segment must not end with zeros
        rest = b"".join(whole)
        aborted = _aborts_among(handle, base, len(data), [cut for cut in cuts if cut.segment == base])
        if rest.strip(b"\0") or keep_empty:
            replace_file(handle.fs, path, rest)
            remove_stub(handle.fs, path)
            _rewrite_txn_index(handle, base, aborted)
        else:
            remove_segment(handle, base)
            handle.fs.sync_folder(handle.folder)
    return kept


def _aborts_among(handle: Handle, base: int, size_bytes: int, cuts: list[Cut]) -> list[AbortedTransaction]:
    """Return the aborts that only the segment's ``.txnindex`` still records, because their markers are damaged."""
    with contextlib.suppress(FileNotFoundError, MalformedProducerFile):
        size, aborted = decode_aborted(read_file(handle.fs, segment_stem(handle.folder, base) + ABORTED_SUFFIX))
        if size == size_bytes:
            return [
                gone for gone in aborted if any(cut.base_offset <= gone.last_offset < cut.end_offset for cut in cuts)
            ]
    return []


def _rewrite_txn_index(handle: Handle, base: int, cut_out: list[AbortedTransaction]) -> None:
    """Rewrite the ``.txnindex`` of a repaired segment, including the aborts whose markers were cut out."""
    path = segment_stem(handle.folder, base) + ABORTED_SUFFIX
    if not cut_out:
        with contextlib.suppress(FileNotFoundError):
            handle.fs.unlink(path)
        return
    mapped = MappedSegment(handle.fs, handle.folder, base)
    size = len(mapped.view)
    left = read_aborted(mapped, 0, size, lambda: handle.segment_context(base, None))
    aborted = sorted([*cut_out, *left], key=lambda abort: abort.last_offset)
    replace_file(handle.fs, path, encode_aborted(size, aborted))


def _quarantine(handle: Handle, cut: Cut, data: bytes) -> str:
    """Copy bytes to quarantine, durably, before they are cut out."""
    with contextlib.suppress(FileExistsError):
        handle.fs.mkdir(handle.quarantine)
        handle.fs.sync_folder(handle.folder)
    path = f"{handle.quarantine}/{segment_name(cut.segment)}-{cut.position}-{handle.clock.now_ms()}.damaged"
    replace_file(handle.fs, path, data)
    return path


def rebuild_index(handle: Handle, base: int) -> None:
    """Rebuild the index files of a segment as new files: readers may have the old ones mapped."""
    stem = segment_stem(handle.folder, base)
    for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
        with contextlib.suppress(FileNotFoundError):
            handle.fs.unlink(stem + suffix)
    log = handle.page.log.read()
    with contextlib.suppress(FileNotFoundError):  # raises if the whole segment was cut out
        mapped = MappedSegment(handle.fs, handle.folder, base)
        index = SegmentIndex(handle.fs, stem, base, handle.config.index_interval_bytes)
        active = base == log.active_base_offset
        end = log.end_position if active else len(mapped.view)
        index.catch_up(mapped.view_to(end), end)
        if not active:
            following = [found for found in handle.segments(log) if found > base]
            index.close(min(following, default=log.log_end_offset), end)
        index.flush()
