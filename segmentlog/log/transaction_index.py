"""Find the aborted transactions of a partition, which ``read_committed`` readers skip.

The log's markers record them. For a sealed segment a ``.txnindex`` file caches them. The first process that needs the
file writes it. The upload of the segment to an object store writes it, too. The headers of the active segment are
scanned when the state page shows another abort. In a log without aborts, a read only compares one word of the page.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import msgspec

from segmentlog.errors import CorruptBatch, UnknownTopic
from segmentlog.format.batch import BatchHeader, check_payload
from segmentlog.format.control import decode_marker
from segmentlog.format.file_names import ABORTED_SUFFIX, LOG_SUFFIX, TEMPORARY_SUFFIX
from segmentlog.format.producer_snapshot import (
    AbortedTransaction,
    MalformedProducerFile,
    decode_aborted,
    encode_aborted,
)
from segmentlog.format.scan import KnownBatches, SegmentContext, scan_past_damage
from segmentlog.log.handle import Handle
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import read_file, write_all
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.segment import MappedSegment, segment_stem
from segmentlog.storage.state_page import ABORTS_WORD, LogState

Ranges = dict[int, list[tuple[int, int]]]
"""By producer id: (first offset, last offset) of each aborted transaction. Never changed after creation."""


def is_aborted(ranges: Ranges, header: BatchHeader) -> bool:
    """Return whether a batch belongs to an aborted transaction."""
    return any(first <= header.base_offset <= last for first, last in ranges.get(header.producer_id, ()))


class SegmentAborts(msgspec.Struct):
    """The aborts found so far in one segment, in its bytes before ``position``."""

    position: int = 0
    aborted: list[AbortedTransaction] = []
    sealed: bool = False
    is_stored: bool = False
    """Whether the segment's ``.txnindex`` contains these aborts."""


class AbortedTransactions:
    """The aborted transactions of one partition. Thread-safe.

    ``known`` returns the batches of a segment that are in a reader's index, or None. A reader can resume at these
    batches after damage, so the search for aborts resumes at them, too.
    """

    def __init__(self, handle: Handle, known: Callable[[int], KnownBatches | None] = lambda base: None) -> None:
        self._handle = handle
        self._known = known
        self._mutex = fork_safety.lock(self, "_mutex", "_reset")
        self._reset()

    def _reset(self) -> None:
        """Discard everything. Also called in a forked child: another thread of the parent may have been scanning."""
        self._seen: tuple[int, int, int, int] | None = None
        self._segments: dict[int, SegmentAborts] = {}
        self._ranges: Ranges = {}

    def read_ranges(self) -> Ranges:
        """Return every abort that the log records up to its end.

        A reader that continues must keep the result: compaction may remove the aborted records, and later their
        markers, while the reader still has the old files mapped.
        """
        page = self._handle.page
        count = page.words[ABORTS_WORD]
        log = page.log.read()
        # An abort is counted before it is published. So an open transaction may be the counted abort.
        undecided = log.last_stable_offset < log.log_end_offset
        seen = (count, log.epoch, log.generation, log.log_end_offset if undecided else -1)
        if not count:
            return {}
        if seen == self._seen:
            return self._ranges
        with self._mutex:
            if self._seen is None or self._seen[1:3] != seen[1:3]:
                self._segments.clear()
            bases = self._handle.list_segments()
            for base in bases:
                if base <= log.active_base_offset:
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile: then it is not read either
                        self._scan_segment(base, log)
            try:
                self._handle.check_usable()  # after opening the files by name
            except UnknownTopic:
                self._segments.clear()
                raise
            ranges: Ranges = {}
            for known in self._segments.values():
                for gone in known.aborted:
                    ranges.setdefault(gone.producer_id, []).append((gone.first_offset, gone.last_offset))
            self._ranges, self._seen = ranges, seen
            return ranges

    def _scan_segment(self, base: int, log: LogState) -> None:
        handle = self._handle
        known = self._segments.setdefault(base, SegmentAborts())
        if known.sealed:
            return

        def context() -> SegmentContext:
            return handle.segment_context(base, log.log_end_offset, self._known(base))

        if base == log.active_base_offset:
            mapped = handle.map_segment(base)
            end = min(log.end_position, len(mapped.view))
            aborted = [*known.aborted, *read_aborted(mapped, known.position, end, context)]
            self._segments[base] = SegmentAborts(end, aborted)
            return
        found = self._segments[base] = read_sealed_aborts(handle, base, context, known)
        if not found.is_stored and not handle.read_only:
            with failures_ignored():  # the file is a cache: without it the next process scans the segment
                write_txn_index(handle, base, found)


def read_sealed_aborts(
    handle: Handle, base: int, context: Callable[[], SegmentContext], known: SegmentAborts | None = None
) -> SegmentAborts:
    """Return the aborts of a sealed segment. ``known``: the aborts that an earlier call found.

    With a ``.txnindex`` the segment itself is not read, as it may be only in the object store. Raises
    FileNotFoundError, `UnknownTopic`, `ObjectStoreError`.
    """
    stem = segment_stem(handle.folder, base)
    with handle.folder_locked():
        end = handle.fs.stat(stem + LOG_SUFFIX).st_size
        with contextlib.suppress(FileNotFoundError, MalformedProducerFile):
            size_bytes, aborted = decode_aborted(read_file(handle.fs, stem + ABORTED_SUFFIX))
            if size_bytes == end:
                return SegmentAborts(end, aborted, sealed=True, is_stored=True)
    known = known or SegmentAborts()
    mapped = handle.map_segment(base)
    end = len(mapped.view)
    return SegmentAborts(end, [*known.aborted, *read_aborted(mapped, known.position, end, context)], sealed=True)


def write_txn_index(handle: Handle, base: int, found: SegmentAborts) -> None:
    """Write the ``.txnindex`` of a sealed segment. Raises `DiskFull`, `UnknownTopic`, OSError."""
    fs, path = handle.fs, segment_stem(handle.folder, base) + ABORTED_SUFFIX
    # Write a temporary file, then rename: other processes may write the same file at the same time. A crash may spoil
    # the file: then its checksum fails, and it is written again.
    temporary = f"{path}.{os.getpid()}-{threading.get_ident()}{TEMPORARY_SUFFIX}"
    with handle.folder_locked():
        fd = fs.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(fs, fd, [encode_aborted(found.position, found.aborted)], 0)
        finally:
            fs.close(fd)
        fs.replace(temporary, path)


def read_aborted(
    mapped: MappedSegment, position: int, end: int, context: Callable[[], SegmentContext]
) -> list[AbortedTransaction]:
    """Return the aborts recorded in a segment's bytes ``[position, end)``, skipping damaged batches."""
    aborted = []
    view = mapped.view[:end]
    for at, header in scan_past_damage(view, position, end, mapped.base_offset, context):
        if header.is_control:
            with contextlib.suppress(CorruptBatch, ValueError):
                marker = decode_marker(header, check_payload(view, at, header, mapped.path))
                if marker is not None and not marker.committed:
                    aborted.append(AbortedTransaction(marker.producer_id, marker.first_offset, marker.offset))
    return aborted
