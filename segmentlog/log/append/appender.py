"""Assign offsets to encoded batches, write and publish them, under one lock.

The lock is held for assigning offsets and one `pwritev`: batches are encoded before and synced after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from msgspec.structs import replace

from segmentlog.config import OFFSET_CEILING_STEP
from segmentlog.errors import InvalidWireBatch, OffsetGrantExhausted, ProducerFenced, SegmentlogError
from segmentlog.format.control import encode_marker
from segmentlog.format.encode import EncodedBatch
from segmentlog.log.append.active_segment import ActiveSegmentWriter, Observed
from segmentlog.log.append.wait_shipped import wait_granted
from segmentlog.log.handle import Handle
from segmentlog.log.producer_state import ProducerStamp, ProducerStates
from segmentlog.log.recovery.open_partition import finish_interrupted_append
from segmentlog.policy.roll import should_roll
from segmentlog.storage.fs import DiskFailed
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.storage.interrupt_safe import EXCLUSIVE, UNLOCK, interrupt_safe_context
from segmentlog.storage.state_page import (
    CONFIG_WORD,
    FAILED_WORD,
    MOVED_WORD,
    PRODUCERS_WORD,
    WAITING_WORD,
    WRITING_WORD,
    LogState,
)

_OFFSET_MAX = 2**63 - 2
_EPOCH_MAX = 2**32 - 2
# The limits of a batch header. Only a forged or damaged log reaches them.


class ProducerAppend(Protocol):
    """The batches of one producer in a group of appends, and the result for this producer."""

    @property
    def stamp(self) -> ProducerStamp:
        """Producer id, epoch and first sequence. Never transactional: a group sets no last stable offset."""

    @property
    def batches(self) -> Sequence[EncodedBatch]:
        """The batches, encoded with the numbers of `stamp`.

        Each batch continues the sequence of the batch before it.
        """

    count: int
    """The number of records."""
    ahead: int
    """The number of records before these batches in the same write."""
    known_offset: int
    """The offset at which the same batches were appended before; -1 if they were not."""
    error: BaseException | None


class Appender:
    """Places encoded batches at the end of the log. Thread-safe; any number of processes may have one."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._writer = ActiveSegmentWriter(handle)
        self._new_bases: list[int] = []
        """Base offsets of the segments that the last append created: each still needs a producer snapshot."""
        self._states = ProducerStates(handle)
        self._wakes_followers = True
        """Whether the running append wakes followers. Protected by the append lock."""
        self.appended = False
        """Whether this process has appended since it opened the partition. If so, it must close cleanly."""
        handle.closers.append(self._writer.close_file)
        handle.after_fork.append(self._reset_after_fork)

    def place(
        self,
        batches: Sequence[EncodedBatch],
        now_ms: int,
        stamp: ProducerStamp | None = None,
        numbered: Sequence[ProducerAppend] = (),
        *,
        wakes: bool = True,
    ) -> tuple[int, int]:
        """Append the batches, all or none. Return (offset of the first record, offset after the last).

        Offsets are consecutive, also from batch to batch and from segment to segment. ``stamp`` must be the stamp that
        the batches were encoded with. Batches that the producer appended before are not appended again; their earlier
        offsets are returned.

        The batches of ``numbered`` follow ``batches``; each item has the numbers of its own producer. A producer that
        may not append gets its error in its item, and the rest is appended.

        Unless ``wakes``, the caller must wake followers with `Handle.wake_followers`, and this call does not wait until
        the object store grants more offsets.

        Raises `DiskFull`, `PartitionFailed`, `UnknownTopic`, `ProducerFenced`, `OutOfOrderSequence`,
        `OffsetGrantExhausted`, `StoreFenced`, and `ProcessLimitError` for a limit of this process. After an error the
        log is unchanged for all processes.
        """
        handle = self._handle
        exhausted = None
        with handle.append_mutex:
            if handle.lock_fd < 0:
                handle.ensure_open()
            handle.used = True
            self._wakes_followers = wakes
            flock, fd = handle.fs.flock, handle.lock_fd
            try:
                flock(fd, EXCLUSIVE)  # inside the try: an interrupt may come before it returns
                log = self._current_log()
                if numbered:
                    return self._place_numbered(log, batches, numbered, now_ms)
                if stamp is None and not handle.page.words[PRODUCERS_WORD]:
                    return self._place_locked(log, batches, now_ms)
                return self._place_tracked(log, batches, now_ms, stamp)
            except FileNotFoundError:
                handle.check_in_place()  # raises if the topic was renamed or deleted just now
                raise
            except OSError as error:
                handle.raise_local_error(error, "nothing was appended")
                raise
            except OffsetGrantExhausted as error:
                exhausted = error
            finally:
                self._wakes_followers = True
                flock(fd, UNLOCK)
        if not wait_granted(handle, exhausted.ceiling, at_once=not wakes):
            raise exhausted
        return self.place(batches, now_ms, stamp, numbered, wakes=wakes)

    def end_transaction(self, producer_id: int, epoch: int, *, committed: bool, now_ms: int) -> int | None:
        """Write the marker that decides the producer's open transaction. Return its offset, or None if none is open.

        Raises `ProducerFenced` if a newer epoch of the producer has a transaction open.
        """
        try:
            return self._end_transaction(producer_id, epoch, committed=committed, now_ms=now_ms)
        except OffsetGrantExhausted as error:
            wait_granted(self._handle, error.ceiling, at_once=True)  # wakes the shipper; the coordinator tries again
            raise

    def _end_transaction(self, producer_id: int, epoch: int, *, committed: bool, now_ms: int) -> int | None:
        handle = self._handle
        with handle.translating_errors(), handle.append_locked(by_names=False):
            log = self._current_log()
            states = self._states
            states.catch_up(log)
            first_offset = states.open_transaction(producer_id)
            if first_offset < 0:
                return None
            known = states.find(producer_id, now_ms)
            if known is not None and known.epoch > epoch:
                raise ProducerFenced(str(producer_id), epoch, known.epoch)
            marker = encode_marker(producer_id, epoch, committed=committed, first_offset=first_offset, now_ms=now_ms)
            if not committed:
                handle.ledger.count_abort()  # before publishing: a reader that sees the marker must look for aborts
            stable_offset = states.stable_offset(-1, without=producer_id)

            def record(at: int, count: int) -> None:
                states.record_end(producer_id, epoch, at, now_ms)

            offset, _ = self._place_locked(
                log, [marker], now_ms, stable_offset, lambda _: self._record_placed(log, [marker], record, now_ms)
            )
            return offset

    def require_transaction(self, producer_id: int) -> None:
        """Raise `InvalidWireBatch` unless the producer has a transaction open in this log.

        Call under the append lock.
        """
        if self._states.open_transaction(producer_id) < 0:
            why = f"producer {producer_id} has no open transaction in this partition; nothing was appended"
            raise InvalidWireBatch("transaction", why)

    def require_no_transaction(self, producer_id: int) -> None:
        """Raise `InvalidWireBatch`, as Kafka does, if the producer has a transaction open in this log.

        Call under the append lock.

        A batch outside the transaction would be visible to all readers, but withheld until the transaction ends.
        """
        if self._states.open_transaction(producer_id) >= 0:
            why = (
                f"producer {producer_id} has an open transaction in this partition, but the batch is not transactional;"
                " nothing was appended"
            )
            raise InvalidWireBatch("transaction", why)

    def require_known(self, producer_id: int, epoch: int) -> None:
        """Raise `InvalidWireBatch` unless the producer has appended to this log under ``epoch`` or the epoch before it.

        Also raises what `require_no_transaction` does. Call under the append lock.
        """
        entry = self._states.find(producer_id, self._handle.clock.now_ms())
        if entry is None or not entry.epoch <= epoch <= entry.epoch + 1:
            raise InvalidWireBatch.unassigned(producer_id)
        self.require_no_transaction(producer_id)

    @interrupt_safe_context
    def producers(self) -> Iterator[ProducerStates]:
        """Yield the producer states up to the end of the log, under the append lock."""
        with self._handle.append_locked(by_names=False):
            self._states.catch_up(self._current_log())
            yield self._states

    def _current_log(self) -> LogState:
        """Return the current log state after checking that appends are allowed. Call under the append lock."""
        handle = self._handle
        page = handle.page
        words = page.words
        if (
            handle.failed is not None
            or words[FAILED_WORD]
            or words[CONFIG_WORD] != handle.config_version
            or words[MOVED_WORD] != handle.moved
        ):
            handle.check_appendable()
        if words[WRITING_WORD]:
            with handle.folder_locked():
                finish_interrupted_append(handle)
        log = page.log.read()
        if self._writer.seen is not log:
            self._new_bases = []  # left by an interrupted append
            self._writer.catch_up(log)
        return log

    def _place_tracked(
        self, log: LogState, batches: Sequence[EncodedBatch], now_ms: int, stamp: ProducerStamp | None
    ) -> tuple[int, int]:
        """Place batches in a log that has producers."""
        states = self._states
        if states.seen is not log:
            states.catch_up(log)
        if stamp is None:
            return self._place_locked(
                log, batches, now_ms, record=lambda _: self._record_placed(log, batches, None, now_ms)
            )
        count = batches[0].last_offset_delta + 1
        if len(batches) > 1:
            count = sum(batch.last_offset_delta + 1 for batch in batches)
        known_offset = states.admit(stamp, count, now_ms)
        if known_offset is not None:
            return known_offset, known_offset + count
        if not self._handle.page.words[PRODUCERS_WORD]:
            self._record_first_producer(log, now_ms)
        # During a transaction the last stable offset does not advance: it is at most the first offset of the earliest
        # open transaction.
        stable_offset = log.last_stable_offset if stamp.transactional else None

        def record(after: LogState) -> None:
            first = log.log_end_offset
            if len(batches) == 1 and not self._new_bases:
                states.record_append(stamp, first, count, now_ms)
                states.mark_seen(after)
                return
            self._record_placed(
                log, batches, lambda at, some: states.record_append(stamp.after(at - first), at, some, now_ms), now_ms
            )

        return self._place_locked(log, batches, now_ms, stable_offset, record)

    def _place_numbered(
        self, log: LogState, batches: Sequence[EncodedBatch], numbered: Sequence[ProducerAppend], now_ms: int
    ) -> tuple[int, int]:
        """Place batches of several producers in one write, after asking for each producer whether it may append."""
        states = self._states
        if states.seen is not log:
            states.catch_up(log)
        placed = list(batches)
        stamps: list[ProducerStamp | None] = [None] * len(placed)
        ahead = sum(batch.last_offset_delta + 1 for batch in placed)
        for item in numbered:
            if self._may_append(item, now_ms):
                item.ahead = ahead
                following = item.stamp
                for batch in item.batches:
                    placed.append(batch)
                    stamps.append(following)
                    following = following.after(batch.last_offset_delta + 1)
                ahead += item.count
        if not placed:
            return log.log_end_offset, log.log_end_offset
        if not self._handle.page.words[PRODUCERS_WORD]:
            self._record_first_producer(log, now_ms)
        of_batch = iter(stamps)

        def record(offset: int, count: int) -> None:
            stamp = next(of_batch)
            if stamp is not None:
                states.record_append(stamp, offset, count, now_ms)

        return self._place_locked(
            log, placed, now_ms, record=lambda _: self._record_placed(log, placed, record, now_ms)
        )

    def _may_append(self, item: ProducerAppend, now_ms: int) -> bool:
        """Return whether the producer's batches continue its sequence, so that they can be appended.

        If not, set `error` of the item, or `known_offset` if the batches were appended before.
        """
        try:
            known_offset = self._states.admit(item.stamp, item.count, now_ms)
        except SegmentlogError as error:
            item.error = error
        except OSError as error:  # raised by the fence check of this producer, so the others can append
            if is_interrupt(error):
                raise
            try:
                self._handle.raise_local_error(error, "nothing was appended")
            except SegmentlogError as local:
                item.error = local
            else:
                item.error = error
        else:
            if known_offset is None:
                return True
            item.known_offset = known_offset
        return False

    def _record_first_producer(self, log: LogState, now_ms: int) -> None:
        """Record durably that the log has producers: from now on every recovery reads their batches.

        The snapshot at the start of the active segment keeps recovery from reading earlier segments, which may be many
        or only in the object store.
        """
        handle = self._handle
        if log.active_base_offset:
            self._states.write_snapshot(log.active_base_offset, now_ms)
        with handle.sync_locked():
            try:
                handle.ledger.record_producers()
            except DiskFailed as error:
                handle.fail(f"writing the checkpoint failed ({error})")

    def _record_placed(
        self,
        log: LogState,
        batches: Sequence[EncodedBatch],
        record: Callable[[int, int], None] | None,
        now_ms: int,
    ) -> None:
        """Call ``record`` with the offset and record count of each batch published after ``log``.

        Write a producer snapshot at the start of each new segment.
        """
        begun, self._new_bases = self._new_bases, []
        has_rolled = bool(begun)
        offset = log.log_end_offset
        for batch in batches:
            while begun and begun[0] <= offset:
                self._states.write_snapshot(begun.pop(0), now_ms)
            count = batch.last_offset_delta + 1
            if record is not None:
                record(offset, count)
            offset += count
        for base in begun:
            self._states.write_snapshot(base, now_ms)
        if has_rolled:
            self._states.drop_expired(now_ms)
        self._states.mark_seen(self._handle.page.log.read())

    def _place_locked(
        self,
        log: LogState,
        batches: Sequence[EncodedBatch],
        now_ms: int,
        stable_offset: int | None = None,
        record: Callable[[LogState], None] | None = None,
    ) -> tuple[int, int]:
        """Write and publish batches. Return (offset of the first record, offset after the last).

        ``stable_offset`` is the new last stable offset; -1 for the new log end. By default it is the new log end, or
        stays the same while a transaction is open. ``record`` is called with the new log state; `Handle.folder_locked`
        is held during that call if the append began a segment.
        """
        handle = self._handle
        size_bytes = record_count = 0
        for batch in batches:
            size_bytes += batch.size_bytes
            record_count += batch.last_offset_delta + 1
        next_offset = log.log_end_offset + record_count
        if next_offset >= log.offset_ceiling:  # >=, so that the log end is below the ceiling, too
            log = self._raise_ceiling(log, next_offset)
        rolls = should_roll(
            handle.config,
            log.end_position,
            log.log_end_offset - log.active_base_offset,
            now_ms - log.first_append_ms if log.first_append_ms else 0,
            size_bytes,
            record_count,
        )
        if not rolls and (log.end_position or len(batches) == 1):
            after = self._write_and_publish(log, batches, now_ms, next_offset, stable_offset, is_one_run=True)
            if record is not None:
                record(after)
        else:
            with handle.folder_locked():
                after = self._write_and_publish(log, batches, now_ms, next_offset, stable_offset, is_one_run=False)
                if record is not None:
                    record(after)
        return log.log_end_offset, next_offset

    def _write_and_publish(
        self,
        log: LogState,
        batches: Sequence[EncodedBatch],
        now_ms: int,
        next_offset: int,
        stable_offset: int | None,
        *,
        is_one_run: bool,
    ) -> LogState:
        """Write batches and publish the new log state. ``is_one_run``: all batches fit into the active segment."""
        handle = self._handle
        ledger = handle.ledger
        writer = self._writer
        writer.seen = None  # if this ends early, the next append checks what is open
        ledger.start_append()
        observed: list[Observed] = []
        try:
            if is_one_run:
                after = writer.write(log, batches, now_ms, observed)
            else:
                after = writer.write_and_roll(log, batches, now_ms, observed)
        except DiskFailed as error:
            handle.fail(f"a write failed ({error})")
        except OSError:
            if is_one_run:
                writer.handle_failed_write()
            raise
        if stable_offset is not None:
            after = replace(after, last_stable_offset=next_offset if stable_offset < 0 else stable_offset)
        ledger.publish(after)
        if handle.page.words[WAITING_WORD] and self._wakes_followers:
            handle.wake_followers()
        # After publishing: an index must never contain batches that were not published.
        for index, position, first, following, max_timestamp, size_bytes in observed:
            index.observe(position, first, following, max_timestamp, size_bytes)
        if writer.sealed:
            self._finish_rolls()
        writer.seen = after
        self.appended = True
        return after

    def roll(self) -> bool:
        """Seal the active segment and begin the next without appending. Return False if the active segment is empty."""
        handle = self._handle
        with handle.append_locked():
            handle.check_appendable()
            finish_interrupted_append(handle)
            log = handle.page.log.read()
            if not log.end_position:
                return False
            writer = self._writer
            if writer.seen is not log:
                self._new_bases = []
                writer.catch_up(log)
            tracked = bool(handle.page.words[PRODUCERS_WORD])
            if tracked:
                self._states.catch_up(log)
            writer.seen = None
            handle.ledger.start_append()
            try:
                after = writer.roll(log)
            except DiskFailed as error:
                handle.fail(f"an fsync failed ({error})")
            handle.ledger.publish(after)
            self._finish_rolls()
            writer.seen = after
            self.appended = True
            if tracked:
                self._record_placed(log, [], None, handle.clock.now_ms())
            return True

    def _raise_ceiling(self, log: LogState, next_offset: int) -> LogState:
        """Raise the ceiling of the reserved offsets durably, before any of them is assigned.

        One fsync reserves a million offsets.
        """
        handle = self._handle
        ceiling = next_offset + OFFSET_CEILING_STEP
        if ceiling > _OFFSET_MAX or log.epoch > _EPOCH_MAX:
            handle.fail(
                f"it has used up its numbers (offset {log.log_end_offset}, epoch {log.epoch}): create a new topic"
            )
        granted = handle.read_grant()
        if granted is not None:
            if next_offset >= granted.end_offset:
                handle.ledger.request_offsets(next_offset)
                raise OffsetGrantExhausted(handle.log_name, granted.end_offset)
            ceiling = min(ceiling, granted.end_offset)
        with handle.sync_locked():
            try:
                log = handle.ledger.reserve_offsets(log, ceiling)
            except DiskFailed as error:
                handle.fail(f"writing the checkpoint failed ({error})")
        return log

    def _finish_rolls(self) -> None:
        """Complete the sealed segments after publishing an append that rolled."""
        self._new_bases = self._writer.finish_rolls()
        self._handle.notify_rolled()

    def _reset_after_fork(self) -> None:
        """Discard state in a forked child: a thread of the parent may have been changing it during the fork."""
        self._writer.reset_after_fork()
        self._new_bases = []
        self._states = ProducerStates(self._handle)
        self.appended = False  # the parent closes what the parent appended

    def close_cleanly(self, log: LogState) -> None:
        """Cut off preallocated space and write the producer states, at a clean close. Call under the append lock."""
        self._writer.close_cleanly(log)
        if self._handle.page.words[PRODUCERS_WORD]:
            self._states.write_end_snapshot(log, self._handle.clock.now_ms())
