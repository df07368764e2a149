"""Reading: from an offset to the batches that hold it and what follows, up to a bound."""

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
from segmentlog.format.scan import step_over
from segmentlog.format.wire_record_batch import WireRecordBatch
from segmentlog.format.wire_run import walk
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
"""Brought beyond what is asked for: of batches before it in the same entry of an index, and of headers."""


class _Outdated(Exception):
    """The segments are not any more what the state said that was read before: look again."""


class Reader:
    """Reads one partition through memory maps. Thread-safe.

    Takes no lock that an append holds, unless it finds damage while a truncation is going on.
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
        """Batches from exactly ``offset`` up to ``bound`` or until ``max_bytes`` of batches were handed out.

        At least one batch is handed out if there is one. Damage raises `CorruptBatch`, or with
        ``on_skip`` is stepped over and told. With ``on_skip`` each batch is also decoded before it is handed out, and
        one that is unreadable is skipped and reported like damage. Control batches only with ``control``; with
        ``committed`` none of an aborted transaction.
        """
        handed_out, opened = 0, self._opened
        aborted = self.aborted.look() if committed else {}
        while offset < bound:
            log = self._handle.page.log.read()
            if offset < log.log_start_offset:
                raise OffsetOutOfRange(self._handle.log_name, offset, log.log_start_offset, log.log_end_offset)
            bases = self._handle.segments(log, offset)
            at = bisect_right(bases, offset) - 1
            if at < 0:  # the segments that held it are gone
                offset = self._behind_gap(offset, bases[0] if bases else log.log_end_offset, log, on_skip)
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
                        if offset > bound:  # a truncation that was cut short goes through it
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
                if not self._tell_gone(bases[at], offset, next_base, log, on_skip):
                    continue
            except _Outdated:
                continue
            if next_base >= log.log_end_offset:
                return
            opened.unmap(bases[at])
            offset = max(offset, next_base)

    def _behind_gap(self, offset: int, first_base: int, log: LogState, on_skip: SkipListener | None) -> int:
        """Where reading goes on when the first segment begins behind ``offset``; there, if one has to look again."""
        try:
            if not is_lost(self.lost_ranges(), offset, first_base):
                wanted = f"a segment file that holds offset {offset}"
                damage = CorruptBatch(self._handle.folder, 0, wanted, "none", offset)
                self._tell(offset, first_base, damage, log, on_skip)
        except _Outdated:
            return offset
        return first_base

    def _tell_gone(self, base: int, offset: int, next_base: int, log: LogState, on_skip: SkipListener | None) -> bool:
        """`_tell` that a segment's file is gone; False when it was deleted since, and one has to look again."""
        missing = segment_stem(self._handle.folder, base) + LOG_SUFFIX
        damage = CorruptBatch(missing, 0, "a segment file", "none", offset)
        try:
            self._tell(offset, next_base, damage, log, on_skip)
        except _Outdated:
            return False
        return True

    def _read_segment(
        self, segment: OpenSegment, offset: int, next_base: int, log: LogState, on_skip: SkipListener | None
    ) -> Iterator[RecordBatch]:
        """Batches of one segment that end behind ``offset``, checked."""
        mapped = segment.mapped
        active = mapped.base_offset == log.active_base_offset
        end = log.end_position if active else len(mapped.view)
        try:
            view = mapped.upto(end)
        except CorruptBatch as error:
            view, end = mapped.view, len(mapped.view)
            short: CorruptBatch | None = error
        else:
            short = None
        position, expected = segment.index.position_for_offset(offset)
        if position >= end and expected < next_base:  # it may be the index of a segment that was replaced since
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
                    raise CorruptBatch(mapped.path, position, f"the batch of offset {expected}", "another one")
                landed = True
                if header.raw_size > batch_limit and self._handle.exceeds_batch_limit(header.raw_size):
                    limit = f"at most {self._handle.batch_limit} bytes (max.message.bytes)"
                    raise CorruptBatch(mapped.path, position, limit, f"{header.raw_size} claimed", header.base_offset)
                if header.next_offset > offset:
                    if ranges is not None:
                        ranges.need(position, min(position + header.size_bytes, end))
                    payload = check_payload(view, position, header, mapped.path)
                    # `record_batch`, in as few steps as it takes.
                    kind = WireRecordBatch if header.attributes & KAFKA_LAYOUT else RecordBatch
                    yield kind(header, payload, topic=topic, partition=partition, path=mapped.path, position=position)
                position += header.size_bytes
                expected = header.next_offset
            except CorruptBatch as damage:
                if not landed:  # it is the index that lies: walk from the start of the segment
                    position, expected, landed = 0, mapped.base_offset, True
                    continue
                if ranges is not None:
                    ranges.need(position, end)
                position, found = step_over(view, position, expected, self._opened.around(segment, next_base))
                following = next_base if found is None else found
                if following > offset:
                    self._tell(max(expected, offset), following, damage, log, on_skip)
                expected = following
        if expected < next_base and (short or not active) and not is_lost(self.lost_ranges(), expected, next_base):
            wanted = f"batches up to offset {next_base}"
            missing = short or CorruptBatch(mapped.path, end, wanted, "the end of the file", expected)
            self._tell(max(expected, offset), next_base, missing, log, on_skip)

    def _tell(
        self, base_offset: int, end_offset: int, damage: CorruptBatch, log: LogState, on_skip: SkipListener | None
    ) -> None:
        """Raise the damage, or tell the listener what is skipped for it.

        Raises `_Outdated` when it may be none: the files were replaced since ``log`` was read.
        """
        handle = self._handle
        page = handle.page
        if handle.read_only:  # cannot wait at the lock
            handle.check_in_place()
            if page.writing == REWRITING or any(map(parse_copy_name, handle.fs.listdir(handle.folder))):
                time.sleep(_REWRITE_WAIT_S)
        else:
            with handle.append_locked():  # whoever replaces segments holds it
                finish_interrupted_append(handle)  # of a process that died in it
                finish_swaps(handle)
        if page.log.read().generation != log.generation:
            raise _Outdated
        if on_skip is None:
            raise damage from None
        on_skip(base_offset, end_offset, damage)

    def read_wire(self, offset: int, bound: int, max_bytes: int) -> tuple[list[Buffer], int, bool]:
        """(batches of Kafka's as they lie, from the one that holds ``offset`` on; the offset behind them; is it full).

        As far as one segment, ``bound`` and ``max_bytes`` go, or what was checked together before. None where something
        else comes first: `read` tells what. Full: the next batch is one of Kafka's, too, and has no room.
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
            view = mapped.upto(end)
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
            run, is_full = walk(view, position, end, expected, offset, upto, max_bytes)
            if run is None:
                return [], offset, is_full
            first, stop = 0, run.batch_count
            self._opened.add_verified(segment, log.epoch, run)
        return run.take(view, first, stop), run.offset_of(stop) if stop > first else offset, is_full

    # ------------------------------------------------------------ positions

    def check_position(self, offset: int) -> int:
        """Where reading really begins: ``offset``, or behind the lost range that starts there.

        Raises `OffsetOutOfRange`, or `LogTruncated` for a position *inside* a lost range: who
        stands there was handed records that are gone. Who stands at its start has read
        everything that was kept, and goes on where history resumes.
        """
        log = self._handle.page.log.read()
        for lost in self._lost[1] if self._lost[0] == log.epoch else self.lost_ranges():
            # Nobody below the log start can have read anything that is not gone anyway.
            base_offset = max(lost.base_offset, log.log_start_offset)
            if base_offset < offset < lost.end_offset:
                raise LogTruncated(self._handle.log_name, offset, lost)
            if base_offset == offset < lost.end_offset:
                if lost.end_offset > log.log_end_offset:
                    return offset  # a truncation was cut short, and nobody opened the log for writing since
                return self.check_position(lost.end_offset)
        if not log.log_start_offset <= offset <= log.log_end_offset:
            raise OffsetOutOfRange(self._handle.log_name, offset, log.log_start_offset, log.log_end_offset)
        return offset

    def lost_ranges(self) -> tuple[LostRange, ...]:
        """Every range of offsets that was given up, ascending."""
        epoch = self._handle.page.log.read().epoch
        if self._lost[0] != epoch:  # a range is only ever added together with an epoch
            checkpoint = self._handle.ledger.last_checkpoint()
            self._handle.check_usable()  # else it may be that of a topic that has the name since
            self._lost = (epoch, checkpoint.lost_ranges)
        return self._lost[1]

    # ------------------------------------------------------------ by time

    def offset_for_timestamp(self, timestamp: int, bound: int) -> int | None:
        """Offset of the first record at or after ``timestamp`` below ``bound``; None without one.

        First in offset order: timestamps need not ascend.
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
                known = self._opened.remote(bases[at]) if at + 1 < len(bases) else None
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
