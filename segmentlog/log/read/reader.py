"""Reading: from an offset to the batches that hold it and what follows, up to a bound."""

from __future__ import annotations

import contextlib
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator

from segmentlog.errors import CorruptBatch, LogTruncated, OffsetOutOfRange
from segmentlog.format.batch import CONTROL, HEADER_SIZE, KAFKA_LAYOUT, TRANSACTIONAL, check_payload, decode_header
from segmentlog.format.codecs import Buffer
from segmentlog.format.names import LOG_SUFFIX, REMOTE_SUFFIX, parse_copy_name
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.scan import Around, KnownBatches, step_over
from segmentlog.format.wire_record_batch import WireRecordBatch
from segmentlog.format.wire_run import WireRun, walk
from segmentlog.log.aborted import AbortedTransactions, is_aborted
from segmentlog.log.handle import Handle
from segmentlog.log.read.checked import CheckedRuns
from segmentlog.log.recovery.opening import settle
from segmentlog.log.swap import finish_swaps
from segmentlog.log.tiering import is_remote
from segmentlog.policy.lost_ranges import is_lost
from segmentlog.records import LostRange, SegmentInfo
from segmentlog.storage import forks
from segmentlog.storage.index import SegmentIndex
from segmentlog.storage.segment import MappedSegment, segment_stem
from segmentlog.storage.state import REWRITING, LogState

SkipListener = Callable[[int, int, CorruptBatch], None]
"""Told of offsets ``[base, end)`` that were skipped because their bytes are damaged, and of the damage."""

_KEPT_SEGMENTS = 64
_KEPT_IN_PROCESS = 1024
"""Mapped segments with their indexes, three maps each: Linux lets a process have 65,530 (`vm.max_map_count`)."""
_REWRITE_WAIT_S = 0.05
_WIRE_AHEAD_BYTES = 64 << 10
"""Brought beyond what is asked for: of batches before it in the same entry of an index, and of headers."""
_CHECKED_IN_PROCESS = 1 << 20
"""Batches of which is known where they lie, 8 bytes each: 8 MB, and twice that while others' parts are in use."""


class _Segment:
    """A mapped segment with its index.

    One that was mapped while active is not used any more once it is sealed: sealing gives
    the preallocated end of the file back, and touching a mapped page that is gone kills the process.
    """

    __slots__ = ("checked", "index", "mapped", "sealed")

    def __init__(self, mapped: MappedSegment, index: SegmentIndex, sealed: bool, checked: CheckedRuns) -> None:
        self.mapped = mapped
        self.index = index
        self.sealed = sealed
        self.checked = checked


def _no_batches(position: int) -> Iterator[tuple[int, int]]:
    """For an index that is being made: it says nothing yet of what lies behind."""
    return iter(())


class _Outdated(Exception):
    """The segments are not any more what the state said that was read before: look again."""


_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


class Reader:
    """Reads one partition through memory maps. Thread-safe.

    Takes no lock that an append holds, unless it finds damage while a truncation is going on.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._mutex = forks.lock(self, "_mutex", "_begin_empty")
        self._begin_empty()
        self._lost: tuple[int, tuple[LostRange, ...]] = (-1, ())
        self.aborted = AbortedTransactions(handle, self._known_batches)
        _readers.add(self)

    def _begin_empty(self) -> None:
        """Begin without any. In a forked child: another thread of the parent may have been at them."""
        self._open: OrderedDict[int, _Segment] = OrderedDict()
        self._generation = -1
        self._checked_count = 0
        """Batches of which was known where they lie, when one was added to them last."""

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
        ``on_skip`` is stepped over and told. Control batches only with ``control``; with
        ``committed`` none of an aborted transaction.
        """
        handed_out = 0
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
                segment = self._segment(bases, at, log)
                for batch in self._read_segment(segment, offset, next_base, log, on_skip):
                    if batch.header.base_offset >= bound:
                        return
                    left = batch.skip_to(offset)
                    offset = batch.header.next_offset
                    if offset > bound:  # a truncation that was cut short goes through it
                        batch = batch.slice(0, bisect_left(batch.offsets, bound))
                        left = len(batch) > 0
                    attributes = batch.header.attributes
                    if attributes & CONTROL:
                        left = left and control
                    elif aborted and attributes & TRANSACTIONAL and is_aborted(aborted, batch.header):
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
            self._unmap(bases[at])
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
        self, segment: _Segment, offset: int, next_base: int, log: LogState, on_skip: SkipListener | None
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
                position, found = step_over(view, position, expected, self._around(segment, next_base))
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
                settle(handle)  # of a process that died in it
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
            segment = self._segment(bases, at, log)
            end = log.end_position if segment.mapped.base_offset == log.active_base_offset else len(segment.mapped.view)
            view = segment.mapped.upto(end)
        except (FileNotFoundError, CorruptBatch):
            return [], offset, False
        with self._mutex:
            run, next_base = segment.checked.find(log.epoch, offset)
        if run is not None and offset < run.end_offset and run.end_position <= end:
            first, stop, is_full = run.find(offset, bound, max_bytes)
        else:
            if run is not None and offset == run.end_offset and run.end_position <= end:
                position, expected = run.end_position, offset
            else:
                position, expected = segment.index.position_for_offset(offset)
            upto = bound if next_base is None else min(bound, next_base)
            if segment.mapped.ranges is not None:
                end = min(end, position + max_bytes + _WIRE_AHEAD_BYTES)
                segment.mapped.ranges.need(position, end)
            run, is_full = walk(view, position, end, expected, offset, upto, max_bytes)
            if run is None:
                return [], offset, is_full
            first, stop = 0, run.batch_count
            self._keep_checked(segment, log.epoch, run)
        return run.take(view, first, stop), run.offset_of(stop) if stop > first else offset, is_full

    def _keep_checked(self, segment: _Segment, epoch: int, run: WireRun) -> None:
        """Of all segments those used last: as many as others leave, or this one's part of all that there may be."""
        most = _CHECKED_IN_PROCESS // len(_readers)
        if self._checked_count + run.batch_count > most // 2:  # or there is no need to ask how many others have
            others = sum(reader._checked_count for reader in list(_readers) if reader is not self)
            most = max(_CHECKED_IN_PROCESS - others, most)
        with self._mutex:
            segment.checked.keep(epoch, run, most)
            count = sum(one.checked.count for one in self._open.values())
            for one in self._open.values():
                if count <= most:
                    break
                if one is not segment:
                    count -= one.checked.count
                    one.checked.clear()
            self._checked_count = count

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
                known = self._remote(bases[at]) if at + 1 < len(bases) else None
                if known is not None and known[1] < timestamp:
                    continue
                segment = self._segment(bases, at, log)
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

    # ------------------------------------------------------------ segments

    def _segment(self, bases: list[int], at: int, log: LogState) -> _Segment:
        """The segment ``bases[at]``, mapped, its index reaching up to its end (or to where the log ends now)."""
        base, sealed = bases[at], at + 1 < len(bases)
        with self._mutex:
            if log.generation != self._generation:
                self._open.clear()  # files may have been replaced
                self._generation = log.generation
            segment = before = self._open.get(base)
            if segment is not None and (segment.sealed != sealed or segment.mapped.is_retired):
                segment = None
            if segment is not None:
                self._open.move_to_end(base)
        handle = self._handle
        if segment is None:
            with handle.staying():
                index = handle.index_of(base, writable=sealed and not handle.read_only)
                mapped = MappedSegment(handle.fs, handle.folder, base, ranged=True)
                if sealed:
                    index.log_inode = mapped.inode
                index.load(sealed=sealed, limit=len(mapped.view) if sealed else log.end_position)
            handle.check_usable()  # else these may be the files of a topic that has the name since
            # Both are mapped now: no other file has the number. What was brought into the one is not in the other.
            is_same = before is not None and before.mapped.inode == mapped.inode and mapped.ranges is None
            segment = _Segment(mapped, index, sealed, before.checked if before and is_same else CheckedRuns())
            with self._mutex:
                if handle.page.log.read().generation == log.generation:
                    self._open[base] = segment
                # A reader that is alone keeps 64 GB of default segments: where it jumps to again needs no opening.
                while len(self._open) > max(_KEPT_SEGMENTS, _KEPT_IN_PROCESS // len(_readers)):
                    self._open.popitem(last=False)
        index, mapped = segment.index, segment.mapped
        if sealed:
            if not index.is_complete(len(mapped.view)):
                if mapped.ranges is not None:
                    mapped.ranges.need(index.scanned_position, len(mapped.view))
                index.catch_up(mapped.view, len(mapped.view), lambda: self._around(segment, bases[at + 1], _no_batches))
                index.complete(len(mapped.view))
        elif index.scanned_position < log.end_position:
            with contextlib.suppress(CorruptBatch):  # shorter than it should be: reading will say so
                view, end = mapped.upto(log.end_position), log.end_position
                if mapped.ranges is not None:
                    mapped.ranges.need(index.scanned_position, end)
                index.catch_up(view, end, lambda: self._around(segment, log.log_end_offset, _no_batches))
        return segment

    def _around(self, segment: _Segment, end_offset: int, known: KnownBatches | None = None) -> Around:
        base = segment.mapped.base_offset
        return self._handle.around(base, end_offset, known or segment.index.batches_behind)

    def _known_batches(self, base: int) -> KnownBatches | None:
        """What the index in memory says of a segment, if it is there: more than its file, perhaps."""
        with self._mutex:
            segment = self._open.get(base)
        return None if segment is None else segment.index.batches_behind

    def unmap_deleted(self) -> None:
        """Unmap everything once segments were deleted or replaced: the disk gets its space back though nobody reads."""
        generation = self._handle.page.log.read().generation
        if self._generation != generation:
            with self._mutex:
                self._open.clear()
                self._generation = generation

    def max_timestamp(self, base: int, log: LogState) -> int:
        """Largest timestamp of a segment; -1 when its file is missing or holds nothing."""
        bases = self._handle.segments(log)
        with contextlib.suppress(FileNotFoundError, ValueError):
            if (known := self._remote(base)) is not None:
                return known[1]
            segment = self._segment(bases, bases.index(base), log)
            if base != log.active_base_offset:
                self._unmap(base)
            return segment.index.max_timestamp if len(segment.mapped.view) else -1
        return -1

    def _remote(self, base: int) -> tuple[int, int] | None:
        """(size, largest timestamp) of a segment that lies in the object store alone, as far as nothing is brought.

        None for one that is here, or has no complete index. Raises FileNotFoundError.
        """
        handle = self._handle
        stem = segment_stem(handle.folder, base)
        with handle.staying():
            if not handle.fs.exists(stem + REMOTE_SUFFIX) or not is_remote(handle, base):
                return None
            size_bytes = handle.fs.stat(stem + LOG_SUFFIX).st_size
            index = handle.index_of(base, writable=False)
            index.load(sealed=True, limit=size_bytes)
        return (size_bytes, index.max_timestamp) if index.is_complete(size_bytes) else None

    def local_start(self) -> int:
        """The offset from which on all of the log lies here."""
        log = self._handle.page.log.read()
        bases = self._handle.segments(log)
        for at in range(len(bases) - 2, -1, -1):
            if bases[at + 1] <= log.log_start_offset:
                break
            if is_remote(self._handle, bases[at]):
                return max(bases[at + 1], log.log_start_offset)
        return log.log_start_offset

    def describe(self) -> list[SegmentInfo]:
        """The segments as `Partition.segments` tells them; one whose file is missing has no bytes."""
        log = self._handle.page.log.read()
        bases = self._handle.segments(log)
        infos = []
        for at, base in enumerate(bases):
            active = at + 1 == len(bases)
            path = segment_stem(self._handle.folder, base) + LOG_SUFFIX
            size_bytes, max_timestamp, remote = 0, -1, not active and is_remote(self._handle, base)
            with contextlib.suppress(FileNotFoundError):
                known = self._remote(base) if remote else None
                if known is not None:
                    infos.append(SegmentInfo(base, bases[at + 1], *known, False, path, True))
                    continue
                segment = self._segment(bases, at, log)
                size_bytes = log.end_position if active else len(segment.mapped.view)
                max_timestamp = segment.index.max_timestamp if size_bytes else -1
                if not active:
                    self._unmap(base)
            end_offset = log.log_end_offset if active else bases[at + 1]
            infos.append(SegmentInfo(base, end_offset, size_bytes, max_timestamp, active, path, remote))
        return infos

    def _unmap(self, base: int) -> None:
        """A reader has passed a sealed segment: unmap it once its batches are gone, so that memory stays flat."""
        with self._mutex:
            self._open.pop(base, None)
