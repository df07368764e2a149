"""Read batches from an offset on, up to a bound."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

from segmentlog.errors import CorruptBatch, LogTruncated, OffsetOutOfRange, UnreadableBatch
from segmentlog.format.batch import CONTROL, HEADER_SIZE, KAFKA_LAYOUT, TRANSACTIONAL, check_payload, decode_header
from segmentlog.format.batch_codecs import Buffer
from segmentlog.format.file_names import LOG_SUFFIX, parse_copy_name
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.scan import skip_damage
from segmentlog.format.wire_record_batch import WireRecordBatch
from segmentlog.format.wire_run import scan_wire_run
from segmentlog.log.handle import Handle
from segmentlog.log.read.open_segments import OpenSegment, OpenSegments
from segmentlog.log.recovery.open_partition import finish_interrupted_append
from segmentlog.log.swap import finish_swaps
from segmentlog.log.transaction_index import AbortedTransactions, is_aborted
from segmentlog.policy.lost_ranges import is_lost
from segmentlog.records import LostRange
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.state_page import REWRITING, LogState

SkipListener = Callable[[int, int, CorruptBatch], None]
"""Called with each range of offsets ``[base, end)`` that reading skips, and with the damage or `UnreadableBatch`."""

_REWRITE_WAIT_S = 0.05
_WIRE_AHEAD_BYTES = 64 << 10
"""Bytes to download beyond the requested ones: earlier batches of the same index entry, and headers."""


class _Outdated(Exception):
    """The segments have changed since the log state was read: read it again."""


class Reader:
    """Reads one partition through memory maps. Thread-safe.

    Takes no lock that an append holds, except when it finds damage.
    """

    def __init__(self, handle: Handle, opened: OpenSegments) -> None:
        self._handle = handle
        self._opened = opened
        self._lost: tuple[int, tuple[LostRange, ...]] = (-1, ())
        self.aborted = AbortedTransactions(handle, opened.known_batches)

    # ------------------------------------------------------------ by offset

    def read(
        self,
        offset: int,
        bound: int,
        max_bytes: int | None,
        on_skip: SkipListener | None,
        *,
        control: bool = False,
        committed: bool = False,
    ) -> Iterator[RecordBatch]:
        """Yield batches from exactly ``offset`` on, up to ``bound`` or until ``max_bytes`` of batches were returned.

        At least one batch is returned if there is one. Damage raises `CorruptBatch`, or is skipped and reported to
        ``on_skip``. With ``on_skip`` each batch is decoded before it is returned, and an unreadable batch is skipped
        and reported like damage. Control batches are returned only with ``control``. With ``committed`` aborted
        transactions are left out.
        """
        handed_out, opened = 0, self._opened
        aborted = self.aborted.read_ranges() if committed else {}
        while offset < bound:
            log = self._handle.page.log.read()
            if offset < log.log_start_offset:
                raise OffsetOutOfRange(self._handle.log_name, offset, log.log_start_offset, log.log_end_offset)
            bases = self._handle.segments(log, offset)
            at = bisect_right(bases, offset) - 1
            if at < 0:  # the segments that contained the offset are deleted
                offset = self._offset_after_gap(offset, bases[0] if bases else log.log_end_offset, log, on_skip)
                continue
            next_base = bases[at + 1] if at + 1 < len(bases) else log.log_end_offset
            try:
                segment = opened.get(bases, at, log)
                for batch in self._read_segment(segment, offset, next_base, log, on_skip):
                    if batch.header.base_offset >= bound:
                        return
                    header = batch.header
                    attributes, begin, offset = header.attributes, offset, header.next_offset
                    if attributes & CONTROL and not control:
                        continue
                    if aborted and attributes & TRANSACTIONAL and is_aborted(aborted, header):
                        continue
                    try:
                        left = batch.skip_to(begin)
                        if on_skip is not None and left:
                            batch.check()
                        if offset > bound:  # an interrupted truncation cuts through the batch
                            batch = batch.slice(0, bisect_left(batch.offsets, bound))
                            left = len(batch) > 0
                    except UnreadableBatch as unreadable:
                        if on_skip is None:
                            raise
                        on_skip(max(begin, header.base_offset), min(offset, bound), unreadable)
                        continue
                    if left:
                        yield batch
                        handed_out += batch.size_bytes
                        if max_bytes is not None and handed_out >= max_bytes:
                            return
            except FileNotFoundError:
                if not self._report_missing(bases[at], offset, next_base, log, on_skip):
                    continue
            except _Outdated:
                continue
            if next_base >= log.log_end_offset:
                return
            opened.unmap(bases[at])
            offset = max(offset, next_base)

    def _offset_after_gap(self, offset: int, first_base: int, log: LogState, on_skip: SkipListener | None) -> int:
        """Return where reading continues if the first segment begins after ``offset``.

        Return ``offset`` if the log has changed, so that the caller reads its state again.
        """
        try:
            if not is_lost(self.lost_ranges(), offset, first_base):
                wanted = f"a segment file that holds offset {offset}"
                damage = CorruptBatch(self._handle.folder, 0, wanted, "none", offset)
                self._report_damage(offset, first_base, damage, log, on_skip)
        except _Outdated:
            return offset
        return first_base

    def _report_missing(
        self, base: int, offset: int, next_base: int, log: LogState, on_skip: SkipListener | None
    ) -> bool:
        """Report a missing segment file as damage.

        Return False if it was deleted meanwhile: then read the log state again.
        """
        missing = segment_stem(self._handle.folder, base) + LOG_SUFFIX
        damage = CorruptBatch(missing, 0, "a segment file", "none", offset)
        try:
            self._report_damage(offset, next_base, damage, log, on_skip)
        except _Outdated:
            return False
        return True

    def _read_segment(
        self, segment: OpenSegment, offset: int, next_base: int, log: LogState, on_skip: SkipListener | None
    ) -> Iterator[RecordBatch]:
        """Yield the verified batches of one segment that end after ``offset``."""
        mapped = segment.mapped
        active = mapped.base_offset == log.active_base_offset
        end = log.end_position if active else len(mapped.view)
        try:
            view = mapped.view_to(end)
        except CorruptBatch as error:
            view, end = mapped.view, len(mapped.view)
            short: CorruptBatch | None = error
        else:
            short = None
        position, expected = segment.index.position_for_offset(offset)
        if position >= end and expected < next_base:  # it may be the index of a segment that was replaced
            position, expected = 0, mapped.base_offset
        landed = position == 0
        topic, partition = self._handle.topic, self._handle.partition
        batch_limit, ranges = self._handle.batch_limit, mapped.ranges
        while position < end and expected < next_base:
            try:
                if ranges is not None:
                    ranges.need(position, min(position + HEADER_SIZE, end))
                header = decode_header(view, position, mapped.path)
                if not landed and header.base_offset != expected:
                    actual = f"the batch of offset {header.base_offset}"
                    raise CorruptBatch(mapped.path, position, f"the batch of offset {expected}", actual)
                landed = True
                if header.raw_size > batch_limit and self._handle.exceeds_batch_limit(header.raw_size):
                    limit = f"at most {self._handle.batch_limit} bytes (max.message.bytes)"
                    raise CorruptBatch(
                        mapped.path, position, limit, f"a header that claims {header.raw_size}", header.base_offset
                    )
                if header.next_offset > offset:
                    if ranges is not None:
                        ranges.need(position, min(position + header.size_bytes, end))
                    payload = check_payload(view, position, header, mapped.path)
                    # `record_batch`, in as few steps as possible.
                    kind = WireRecordBatch if header.attributes & KAFKA_LAYOUT else RecordBatch
                    yield kind(header, payload, topic=topic, partition=partition, path=mapped.path, position=position)
                position += header.size_bytes
                expected = header.next_offset
            except CorruptBatch as damage:
                if not landed:  # the index is wrong: walk from the start of the segment
                    position, expected, landed = 0, mapped.base_offset, True
                    continue
                if ranges is not None:
                    ranges.need(position, end)
                position, found = skip_damage(
                    view, position, expected, self._opened.segment_context(segment, next_base)
                )
                following = next_base if found is None else found
                if following > offset:
                    self._report_damage(max(expected, offset), following, damage, log, on_skip)
                expected = following
        if expected < next_base and (short or not active) and not is_lost(self.lost_ranges(), expected, next_base):
            wanted = f"batches up to offset {next_base}"
            missing = short or CorruptBatch(mapped.path, end, wanted, "the end of the file", expected)
            self._report_damage(max(expected, offset), next_base, missing, log, on_skip)

    def _report_damage(
        self, base_offset: int, end_offset: int, damage: CorruptBatch, log: LogState, on_skip: SkipListener | None
    ) -> None:
        """Raise the damage, or report the skipped offsets to the listener.

        Raises `_Outdated` if it may not be damage, because the files were replaced after ``log`` was read.
        """
        handle = self._handle
        page = handle.page
        if handle.read_only:  # a read-only handle cannot wait for the append lock
            handle.check_in_place()
            if page.writing == REWRITING or any(map(parse_copy_name, handle.fs.listdir(handle.folder))):
                time.sleep(_REWRITE_WAIT_S)
        else:
            with handle.append_locked():  # a process that replaces segments holds this lock
                finish_interrupted_append(handle)  # complete the change of a process that died
                finish_swaps(handle)
        if page.log.read().generation != log.generation:
            raise _Outdated
        if on_skip is None:
            raise damage from None
        on_skip(base_offset, end_offset, damage)

    def read_wire(self, offset: int, bound: int, max_bytes: int) -> tuple[list[Buffer], int, bool]:
        """Return (unchanged batches in Kafka's format, offset after them, whether ``max_bytes`` kept out the next
        batch).

        The first batch contains ``offset``. The batches end at the end of the segment, at ``bound``, at ``max_bytes``,
        or at the end of a run of verified batches. The list is empty if a batch of another format is next: `read`
        handles it.
        """
        log = self._handle.page.log.read()
        bases = self._handle.segments(log, offset)
        at = bisect_right(bases, offset) - 1
        if at < 0 or not log.log_start_offset <= offset < log.log_end_offset:
            return [], offset, False
        try:
            segment = self._opened.get(bases, at, log)
            mapped = segment.mapped
            end = log.end_position if mapped.base_offset == log.active_base_offset else len(mapped.view)
            view = mapped.view_to(end)
        except (FileNotFoundError, CorruptBatch):
            return [], offset, False
        run, next_base = self._opened.find_verified(segment, log.epoch, offset)
        if run is not None and offset < run.end_offset and run.end_position <= end:
            first, stop, is_full = run.find(offset, bound, max_bytes)
        else:
            if run is not None and offset == run.end_offset and run.end_position <= end:
                position, expected = run.end_position, offset
            else:
                position, expected = segment.index.position_for_offset(offset)
            upto = bound if next_base is None else min(bound, next_base)
            if mapped.ranges is not None:
                end = min(end, position + max_bytes + _WIRE_AHEAD_BYTES)
                mapped.ranges.need(position, end)
            run, is_full = scan_wire_run(view, position, end, expected, offset, upto, max_bytes)
            if run is None:
                return [], offset, is_full
            first, stop = 0, run.batch_count
            self._opened.add_verified(segment, log.epoch, run)
        return run.take(view, first, stop), run.offset_of(stop) if stop > first else offset, is_full

    # ------------------------------------------------------------ positions

    def check_position(self, offset: int) -> int:
        """Return where reading begins: at ``offset``, or after the lost range that starts there.

        Raises `OffsetOutOfRange`, or `LogTruncated` for a position *inside* a lost range: the reader has read records
        that are lost. A reader at the start of the range has read everything that was retained, and continues after it.
        """
        log = self._handle.page.log.read()
        for lost in self._lost[1] if self._lost[0] == log.epoch else self.lost_ranges():
            # A reader below the log start has read only records that are deleted anyway.
            base_offset = max(lost.base_offset, log.log_start_offset)
            if base_offset < offset < lost.end_offset:
                raise LogTruncated(self._handle.log_name, offset, lost)
            if base_offset == offset < lost.end_offset:
                if lost.end_offset > log.log_end_offset:
                    return offset  # an interrupted truncation, and no process has opened the log for writing since
                return self.check_position(lost.end_offset)
        if not log.log_start_offset <= offset <= log.log_end_offset:
            raise OffsetOutOfRange(self._handle.log_name, offset, log.log_start_offset, log.log_end_offset)
        return offset

    def lost_ranges(self) -> tuple[LostRange, ...]:
        """Return every lost range of offsets, ascending."""
        epoch = self._handle.page.log.read().epoch
        if self._lost[0] != epoch:  # a new range always comes with a new epoch
            checkpoint = self._handle.ledger.last_checkpoint()
            self._handle.check_usable()  # else it may belong to a topic that has the name now
            self._lost = (epoch, checkpoint.lost_ranges)
        return self._lost[1]

    # ------------------------------------------------------------ by time

    def offset_for_timestamp(self, timestamp: int, bound: int) -> int | None:
        """Return the offset of the first record at or after ``timestamp`` and below ``bound``; None if there is none.

        The result is the lowest such offset: timestamps need not ascend.
        """
        while True:
            with contextlib.suppress(_Outdated):
                return self._offset_for_timestamp(timestamp, bound)

    def _offset_for_timestamp(self, timestamp: int, bound: int) -> int | None:
        log = self._handle.page.log.read()
        bases = self._handle.segments(log)
        start = bisect_right(bases, log.log_start_offset) - 1
        for at in range(max(start, 0), len(bases)):
            try:
                known = self._opened.remote_size(bases[at]) if at + 1 < len(bases) else None
                if known is not None and known[1] < timestamp:
                    continue
                segment = self._opened.get(bases, at, log)
            except FileNotFoundError:
                continue
            if segment.index.max_timestamp < timestamp:
                continue
            _, offset = segment.index.position_for_timestamp(timestamp)
            next_base = bases[at + 1] if at + 1 < len(bases) else log.log_end_offset
            for batch in self._read_segment(segment, max(offset, log.log_start_offset), next_base, log, None):
                if batch.header.base_offset >= bound:
                    return None
                if batch.header.max_timestamp < timestamp or batch.header.is_control:
                    continue
                batch.skip_to(log.log_start_offset)
                late = (batch.timestamps >= timestamp).nonzero()[0]
                if len(late):
                    found = int(batch.offsets[late[0]])
                    return found if found < bound else None
        return None
