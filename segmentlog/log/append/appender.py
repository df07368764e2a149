"""Appending: batches that are ready get their offsets, are written and published, under one lock.

The lock is held for the assignment of offsets and one `pwritev`, nothing else: encoding is
done before, fsync after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from msgspec.structs import replace

from segmentlog.config import OFFSET_CEILING_STEP
from segmentlog.errors import GrantExhausted, InvalidWireBatch, ProducerFenced, SegmentlogError
from segmentlog.format.control import encode_marker
from segmentlog.format.encode import EncodedBatch
from segmentlog.log.append.active_segment import ActiveEnd, Observed
from segmentlog.log.append.wait_shipped import wait_granted
from segmentlog.log.handle import Handle
from segmentlog.log.producer_state import ProducerStamp, ProducerStates
from segmentlog.log.recovery.open_partition import settle
from segmentlog.policy.roll import should_roll
from segmentlog.storage.fs import DiskFailed
from segmentlog.storage.grant_file import read_grant
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.storage.interrupt_safe import EXCLUSIVE, UNLOCK, held
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
# What a batch's header holds; only a forged or damaged log gets there.


class Numbered(Protocol):
    """What one producer appends, among others; and what becomes of it."""

    @property
    def stamp(self) -> ProducerStamp:
        """Of no transaction: the log ends elsewhere for some readers behind one's batches."""

    @property
    def batches(self) -> Sequence[EncodedBatch]:
        """Encoded with the stamp, counted on from batch to batch."""

    count: int
    """Records."""
    ahead: int
    """How many records of the same write come before it."""
    known_offset: int
    """Where it was appended before, if it was."""
    error: BaseException | None


class Appender:
    """Places finished batches at the end of the log. Thread-safe; any number of processes have one."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._end = ActiveEnd(handle)
        self._begun: list[int] = []
        """Segments that the last append began, where a snapshot of the states belongs."""
        self._states = ProducerStates(handle)
        self._wakes = True
        """Whether the append in hand tells those who follow; under the append lock."""
        self.appended = False
        """Whether this process appended since it opened the partition: it then owes a clean close."""
        handle.closers.append(self._end.close_file)
        handle.after_fork.append(self._begin_anew)

    def place(
        self,
        batches: Sequence[EncodedBatch],
        now_ms: int,
        stamp: ProducerStamp | None = None,
        numbered: Sequence[Numbered] = (),
        *,
        wakes: bool = True,
    ) -> tuple[int, int]:
        """Append the batches, all or none: (offset of the first record, offset after the last).

        Their offsets are consecutive, across batches and segments. With a ``stamp``, the one
        that they were encoded with, batches that were appended before are not appended again:
        the offsets are those that they have. Behind the ``batches`` go those that are ``numbered``, each by a
        producer of its own; whichever may not be appended is told so and left out. Unless it ``wakes``, its caller
        does, with `Handle.wake_followers`; and it never waits for the object store to grant more offsets. Raises
        `DiskFull`, `PartitionFailed`, `UnknownTopic`, `ProducerFenced`, `OutOfOrderSequence`, `GrantExhausted`,
        `StoreFenced`, and `LocalError` for what is this process's own affair: the log is as before then, here and for
        everybody else.
        """
        handle = self._handle
        exhausted = None
        with handle.append_mutex:
            if handle.lock_fd < 0:
                handle.ensure_open()
            handle.used = True
            self._wakes = wakes
            flock, fd = handle.fs.flock, handle.lock_fd
            try:
                flock(fd, EXCLUSIVE)  # inside: an interrupt may come before it has returned
                log = self._look()
                if numbered:
                    return self._place_numbered(log, batches, numbered, now_ms)
                if stamp is None and not handle.page.words[PRODUCERS_WORD]:
                    return self._place_locked(log, batches, now_ms)
                return self._place_tracked(log, batches, now_ms, stamp)
            except FileNotFoundError:
                handle.check_in_place()  # renamed or deleted a moment ago
                raise
            except OSError as error:
                handle.raise_local(error, "nothing was appended")
                raise
            except GrantExhausted as error:
                exhausted = error
            finally:
                self._wakes = True
                flock(fd, UNLOCK)
        if not wait_granted(handle, exhausted.ceiling, at_once=not wakes):
            raise exhausted
        return self.place(batches, now_ms, stamp, numbered, wakes=wakes)

    def end_transaction(self, producer_id: int, epoch: int, *, committed: bool, now_ms: int) -> int | None:
        """Write the marker that decides the producer's open transaction; its offset, or None when none is open.

        Raises `ProducerFenced` when a newer epoch of the producer has one open.
        """
        handle = self._handle
        with handle.telling(), handle.append_locked(by_names=False):
            log = self._look()
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
                handle.ledger.count_abort()  # before it is published: who reads behind it must know
            stable_offset = states.stable_offset(-1, without=producer_id)

            def note(at: int, count: int) -> None:
                states.ended(producer_id, epoch, at, now_ms)

            offset, _ = self._place_locked(
                log, [marker], now_ms, stable_offset, lambda _: self._take_note(log, [marker], note, now_ms)
            )
            return offset

    def require_transaction(self, producer_id: int) -> None:
        """Raise `InvalidWireBatch` unless the producer has a transaction open here. Under the append lock."""
        if self._states.open_transaction(producer_id) < 0:
            why = f"producer {producer_id} has no transaction open in this partition"
            raise InvalidWireBatch("transaction", why)

    def require_no_transaction(self, producer_id: int) -> None:
        """Raise `InvalidWireBatch` if the producer has a transaction open here, as Kafka does. Under the append lock.

        What it wrote in between would be seen by everybody, and held back with the transaction until that ends.
        """
        if self._states.open_transaction(producer_id) >= 0:
            why = f"producer {producer_id} has a transaction open in this partition, and the batch is of none"
            raise InvalidWireBatch("transaction", why)

    def require_known(self, producer_id: int, epoch: int) -> None:
        """Raise `InvalidWireBatch` unless the producer has appended here, under this epoch or the one before.

        Also raises what `require_no_transaction` does. Under the append lock.
        """
        entry = self._states.find(producer_id, self._handle.clock.now_ms())
        if entry is None or not entry.epoch <= epoch <= entry.epoch + 1:
            raise InvalidWireBatch.unassigned(producer_id)
        self.require_no_transaction(producer_id)

    @held
    def producers(self) -> Iterator[ProducerStates]:
        """What is known of producers up to the end of the log, under the append lock."""
        with self._handle.append_locked(by_names=False):
            self._states.catch_up(self._look())
            yield self._states

    def _look(self) -> LogState:
        """The state of the log, once nothing keeps it from being appended to. Under the append lock."""
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
            with handle.staying():
                settle(handle)
        log = page.log.read()
        if self._end.seen is not log:
            self._begun = []  # of an append that was interrupted
            self._end.catch_up(log)
        return log

    def _place_tracked(
        self, log: LogState, batches: Sequence[EncodedBatch], now_ms: int, stamp: ProducerStamp | None
    ) -> tuple[int, int]:
        """`_place_locked` in a log that has producers."""
        states = self._states
        if states.seen is not log:
            states.catch_up(log)
        if stamp is None:
            return self._place_locked(log, batches, now_ms, note=lambda _: self._take_note(log, batches, None, now_ms))
        count = batches[0].last_offset_delta + 1
        if len(batches) > 1:
            count = sum(batch.last_offset_delta + 1 for batch in batches)
        known_offset = states.admit(stamp, count, now_ms)
        if known_offset is not None:
            return known_offset, known_offset + count
        if not self._handle.page.words[PRODUCERS_WORD]:
            self._note_producers(log, now_ms)
        # In a transaction: it ends before this transaction's first batch, or an earlier one's.
        stable_offset = log.last_stable_offset if stamp.transactional else None

        def note(after: LogState) -> None:
            first = log.log_end_offset
            if len(batches) == 1 and not self._begun:
                states.applied(stamp, first, count, now_ms)
                states.reached(after)
                return
            self._take_note(
                log, batches, lambda at, some: states.applied(stamp.after(at - first), at, some, now_ms), now_ms
            )

        return self._place_locked(log, batches, now_ms, stable_offset, note)

    def _place_numbered(
        self, log: LogState, batches: Sequence[EncodedBatch], numbered: Sequence[Numbered], now_ms: int
    ) -> tuple[int, int]:
        """`_place_tracked` for several producers: one write, and each is asked for itself before that."""
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
            self._note_producers(log, now_ms)
        of_batch = iter(stamps)

        def note(offset: int, count: int) -> None:
            stamp = next(of_batch)
            if stamp is not None:
                states.applied(stamp, offset, count, now_ms)

        return self._place_locked(log, placed, now_ms, note=lambda _: self._take_note(log, placed, note, now_ms))

    def _may_append(self, item: Numbered, now_ms: int) -> bool:
        """Whether a producer's batches come next; else it knows why not, or where they are already."""
        try:
            known_offset = self._states.admit(item.stamp, item.count, now_ms)
        except SegmentlogError as error:
            item.error = error
        except OSError as error:  # of its fence: no affair of the others
            if is_interrupt(error):
                raise
            try:
                self._handle.raise_local(error, "nothing was appended")
            except SegmentlogError as local:
                item.error = local
            else:
                item.error = error
        else:
            if known_offset is None:
                return True
            item.known_offset = known_offset
        return False

    def _note_producers(self, log: LogState, now_ms: int) -> None:
        """Write down that the log has producers, durably: from then on every recovery looks for them.

        It looks no further back than here: what lies before may be much, and in an object store alone.
        """
        handle = self._handle
        if log.active_base_offset:
            self._states.write_snapshot(log.active_base_offset, now_ms)
        with handle.sync_locked():
            try:
                handle.ledger.note_producers()
            except DiskFailed as error:
                handle.fail(f"writing the checkpoint failed ({error})")

    def _take_note(
        self,
        log: LogState,
        batches: Sequence[EncodedBatch],
        note: Callable[[int, int], None] | None,
        now_ms: int,
    ) -> None:
        """Tell ``note`` the offset and length of each batch that was published behind ``log``.

        And leave a snapshot of the states where a segment was begun.
        """
        begun, self._begun = self._begun, []
        has_rolled = bool(begun)
        offset = log.log_end_offset
        for batch in batches:
            while begun and begun[0] <= offset:
                self._states.write_snapshot(begun.pop(0), now_ms)
            count = batch.last_offset_delta + 1
            if note is not None:
                note(offset, count)
            offset += count
        for base in begun:
            self._states.write_snapshot(base, now_ms)
        if has_rolled:
            self._states.forget_expired(now_ms)
        self._states.reached(self._handle.page.log.read())

    def _place_locked(
        self,
        log: LogState,
        batches: Sequence[EncodedBatch],
        now_ms: int,
        stable_offset: int | None = None,
        note: Callable[[LogState], None] | None = None,
    ) -> tuple[int, int]:
        """Write and publish; ``stable_offset`` is the last stable one after that, -1 the new end.

        ``note`` is told the state after that, while the folder still stays where a segment was begun in it.
        """
        handle = self._handle
        size_bytes = record_count = 0
        for batch in batches:
            size_bytes += batch.size_bytes
            record_count += batch.last_offset_delta + 1
        next_offset = log.log_end_offset + record_count
        if next_offset >= log.offset_ceiling:  # so that a position at the log end lies below the ceiling, too
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
            if note is not None:
                note(after)
        else:
            with handle.staying():
                after = self._write_and_publish(log, batches, now_ms, next_offset, stable_offset, is_one_run=False)
                if note is not None:
                    note(after)
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
        """The rest of `_place_locked`; ``is_one_run``: no segment begins in it."""
        handle = self._handle
        ledger = handle.ledger
        end = self._end
        end.seen = None  # whatever ends this early: the next one looks for itself what is open here
        ledger.begin_append()
        observed: list[Observed] = []
        try:
            if is_one_run:
                after = end.write(log, batches, now_ms, observed)
            else:
                after = end.write_and_roll(log, batches, now_ms, observed)
        except DiskFailed as error:
            handle.fail(f"a write failed ({error})")
        except OSError:
            if is_one_run:
                end.note_failed_write()
            raise
        if stable_offset is not None:
            after = replace(after, last_stable_offset=next_offset if stable_offset < 0 else stable_offset)
        ledger.publish(after)
        if handle.page.words[WAITING_WORD] and self._wakes:
            handle.wake_followers()
        # Only now: an index must not know of batches that were never published.
        for index, position, first, following, max_timestamp, size_bytes in observed:
            index.observe(position, first, following, max_timestamp, size_bytes)
        if end.sealed:
            self._close_rolled()
        end.seen = after
        self.appended = True
        return after

    def roll(self) -> bool:
        """Seal the active segment and begin the next, though nothing is appended; False when it is empty."""
        handle = self._handle
        with handle.append_locked():
            handle.check_appendable()
            settle(handle)
            log = handle.page.log.read()
            if not log.end_position:
                return False
            end = self._end
            if end.seen is not log:
                self._begun = []
                end.catch_up(log)
            tracked = bool(handle.page.words[PRODUCERS_WORD])
            if tracked:
                self._states.catch_up(log)
            end.seen = None
            handle.ledger.begin_append()
            try:
                after = end.roll(log)
            except DiskFailed as error:
                handle.fail(f"an fsync failed ({error})")
            handle.ledger.publish(after)
            self._close_rolled()
            end.seen = after
            self.appended = True
            if tracked:
                self._take_note(log, [], None, handle.clock.now_ms())
            return True

    def _raise_ceiling(self, log: LogState, next_offset: int) -> LogState:
        """Reserve offsets durably before any of them is handed out: one fsync for a million records."""
        handle = self._handle
        ceiling = next_offset + OFFSET_CEILING_STEP
        if ceiling > _OFFSET_MAX or log.epoch > _EPOCH_MAX:
            handle.fail(
                f"it has used up its numbers (offset {log.log_end_offset}, epoch {log.epoch}): make a new topic"
            )
        granted = read_grant(handle.fs, handle.folder)
        if granted is not None:
            if next_offset >= granted.end_offset:
                handle.ledger.want_offsets(next_offset)
                raise GrantExhausted(handle.log_name, granted.end_offset)
            ceiling = min(ceiling, granted.end_offset)
        with handle.sync_locked():
            try:
                log = handle.ledger.reserve_offsets(log, ceiling)
            except DiskFailed as error:
                handle.fail(f"writing the checkpoint failed ({error})")
        return log

    def _close_rolled(self) -> None:
        """After an append that rolled is published."""
        self._begun = self._end.leave_sealed()
        self._handle.rolled()

    def _begin_anew(self) -> None:
        """In a forked child: nothing of what a thread of the parent was in the middle of."""
        self._end.begin_anew()
        self._begun = []
        self._states = ProducerStates(self._handle)
        self.appended = False  # the clean close of what the parent appended is the parent's

    def leave_cleanly(self, log: LogState) -> None:
        """Give back the space ahead of the end, and leave what is known, at a clean close. Under the append lock."""
        self._end.close_cleanly(log)
        if self._handle.page.words[PRODUCERS_WORD]:
            self._states.leave(log, self._handle.clock.now_ms())
