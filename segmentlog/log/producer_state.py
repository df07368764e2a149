"""Producer state of a partition: sequences, epochs and open transactions, all derived from the log.

    load           read the newest snapshot, then the headers of the batches after it
    catch_up       read the headers of what other processes have appended since
    admit          check whether a batch may be appended, or was appended before
    record_append  record what this process has appended

A process keeps the state as long as it appends. Each roll writes a snapshot, so that loading never reads more than the
last segment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

import msgspec

from segmentlog.errors import CorruptBatch, OutOfOrderSequence, ProducerFenced
from segmentlog.format.batch import TRANSACTIONAL, BatchHeader
from segmentlog.format.file_names import LOG_SUFFIX, PRODUCERS_FILE, SNAPSHOT_SUFFIX, TEMPORARY_SUFFIX
from segmentlog.format.producer_snapshot import (
    KEPT_RUNS,
    NAMED_ID_END,
    SEQUENCE_END,
    EndSnapshot,
    MalformedProducerFile,
    ProducerEntry,
    SequenceRun,
    decode_end,
    decode_snapshot,
    encode_end,
    encode_snapshot,
)
from segmentlog.format.scan import scan_past_damage
from segmentlog.log.handle import Handle
from segmentlog.storage.file_operations import read_file, replace_file, write_all
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.segment import MappedSegment, list_segments, segment_stem
from segmentlog.storage.state_page import PRODUCERS_WORD, LogState

_END_SNAPSHOT_MIN = 256
# Headers after the last snapshot that make an end snapshot worth writing: reading them takes a few milliseconds.
_RUN_END = SEQUENCE_END // 2
# A run ends before its length could be taken for a sequence that has wrapped around.


class ProducerStamp(msgspec.Struct, frozen=True, gc=False):
    """The producer id, epoch and sequence of a batch."""

    producer_id: int
    epoch: int
    sequence: int
    """Sequence of the first record, 0 to 2^31 - 1; -1 if the producer does not number its records: each append is
    new."""
    transactional: bool = False
    check: Callable[[], None] | None = None
    """Called under the append lock. Raises `ProducerFenced` if another process has taken over the producer."""

    def after(self, count: int) -> ProducerStamp:
        """Return the stamp of the batch that begins ``count`` records later."""
        if self.sequence < 0:
            return self
        return msgspec.structs.replace(self, sequence=(self.sequence + count) % SEQUENCE_END)


class ProducerStates:
    """The producers of one partition. Not thread-safe: used by the thread that holds the append lock."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._entries: dict[int, ProducerEntry] = {}
        self._open: dict[int, int] = {}
        self._held_until_ms: dict[int, int] = {}
        """By id of an idle named producer: the time until which its name is assumed to own the id, without asking the
        store."""
        self.seen: LogState | None = None
        """The log state whose batches are all included in the producer states; None before the first load."""
        self._mapped: MappedSegment | None = None
        self._unsnapshotted = 0
        """The number of headers after the last snapshot, which the next process to load must read."""

    # ------------------------------------------------------------ from the log

    def catch_up(self, log: LogState) -> None:
        """Read the headers of everything up to the end of ``log`` that was not read yet."""
        seen = self.seen
        if seen is None or seen.epoch != log.epoch or seen.active_base_offset != log.active_base_offset:
            if not self._handle.page.words[PRODUCERS_WORD]:  # the log never had a producer: nothing to read
                self._set_entries([])
                self._mapped, self._unsnapshotted, self.seen = None, 0, log
                return
            with self._handle.folder_locked():
                self.load(log, list_segments(self._handle.fs, self._handle.folder))
            return
        if seen.end_position < log.end_position:
            mapped = self._mapped
            if mapped is None or len(mapped.view) < log.end_position:
                with self._handle.folder_locked():
                    mapped = mapped or MappedSegment(self._handle.fs, self._handle.folder, log.active_base_offset)
                    mapped.view_to(log.end_position)
                self._mapped = mapped
            self._walk(mapped, seen.end_position, log.end_position, log, self._handle.clock.now_ms())
        self.seen = log

    def load(self, log: LogState, bases: list[int]) -> None:
        """Load the newest snapshot and the headers after it. The caller holds `Handle.folder_locked`."""
        handle = self._handle
        self._entries, self._open, self._mapped, self.seen = {}, {}, None, None
        bases = [base for base in bases if base <= log.active_base_offset]
        self._unsnapshotted = 0
        if self._load_end_snapshot(log):
            return
        first = 0
        for at in range(len(bases) - 1, -1, -1):
            entries = self._read_snapshot(bases[at])
            if entries is not None:
                self._set_entries(entries)
                first = at
                break
        for base in bases[first:]:
            active = base == log.active_base_offset
            try:
                mapped = MappedSegment(handle.fs, handle.folder, base)
            except FileNotFoundError:
                continue
            end = min(log.end_position if active else len(mapped.view), len(mapped.view))
            # Later than the time of the append, so that no producer expires too soon.
            self._walk(mapped, 0, end, log, mapped.written_ns // 1_000_000)
            if active:
                self._mapped = mapped
        self.seen = log

    def _set_entries(self, entries: list[ProducerEntry]) -> None:
        self._entries = {entry.producer_id: entry for entry in entries}
        self._open = {entry.producer_id: entry.transaction_offset for entry in entries if entry.transaction_offset >= 0}

    def _load_end_snapshot(self, log: LogState) -> bool:
        """Load the snapshot that the last process to close the log wrote. Return False if it does not match ``log``."""
        handle = self._handle
        try:
            left = decode_end(read_file(handle.fs, f"{handle.folder}/{PRODUCERS_FILE}"))
            mapped = MappedSegment(handle.fs, handle.folder, log.active_base_offset)
        except (FileNotFoundError, MalformedProducerFile):
            return False
        if (left.epoch, left.base_offset, left.inode) != (log.epoch, log.active_base_offset, mapped.inode):
            return False
        if left.position > log.end_position:
            return False
        self._set_entries(left.entries)
        self._walk(mapped, left.position, log.end_position, log, mapped.written_ns // 1_000_000)
        self._mapped, self.seen = mapped, log
        return True

    def write_end_snapshot(self, log: LogState, now_ms: int) -> None:
        """Write a snapshot at the end of the log if the next process would have many headers to read.

        Under the append lock.

        It is not synced: after a crash it describes an earlier end, or its checksum fails.
        """
        if self._unsnapshotted < _END_SNAPSHOT_MIN or self.seen is None:
            return
        handle = self._handle
        path = f"{handle.folder}/{PRODUCERS_FILE}"
        with failures_ignored(CorruptBatch):
            self.catch_up(log)
            inode = handle.fs.stat(segment_stem(handle.folder, log.active_base_offset) + LOG_SUFFIX).st_ino
            left = EndSnapshot(log.epoch, log.active_base_offset, inode, log.end_position, self.all(now_ms))
            fd = handle.fs.open(path + TEMPORARY_SUFFIX, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                write_all(handle.fs, fd, [encode_end(left)], 0)
            finally:
                handle.fs.close(fd)
            handle.fs.replace(path + TEMPORARY_SUFFIX, path)

    def _read_snapshot(self, base: int) -> list[ProducerEntry] | None:
        with contextlib.suppress(FileNotFoundError, MalformedProducerFile):
            return decode_snapshot(read_file(self._handle.fs, self._snapshot_path(base)))
        return None

    def _walk(self, mapped: MappedSegment, position: int, end: int, log: LogState, now_ms: int) -> None:
        """Read the headers in ``[position, end)``. Skip damaged batches, and continue after them."""
        base = mapped.base_offset
        walk = scan_past_damage(
            mapped.view_to(end), position, end, base, lambda: self._handle.segment_context(base, log.log_end_offset)
        )
        for _, header in walk:
            self.record_stored(header, now_ms)

    def _apply_header(self, header: BatchHeader, now_ms: int) -> None:
        if header.is_control:
            self._apply_end(header.producer_id, header.producer_epoch, header.base_offset, now_ms)
            return
        count = header.last_offset_delta + 1
        transactional = bool(header.attributes & TRANSACTIONAL)
        self._apply_batch(
            header.producer_id, header.producer_epoch, header.base_sequence, header.base_offset, count, transactional,
            now_ms,
        )  # fmt: skip

    # ------------------------------------------------------------ appends of this process

    def admit(self, stamp: ProducerStamp, count: int, now_ms: int) -> int | None:
        """Return None if ``count`` records may be appended; the offset of the first if they were appended before.

        Raises `ProducerFenced`, `OutOfOrderSequence`. Call `catch_up` first.
        """
        if stamp.check is not None:
            stamp.check()
        entry = self._entries.get(stamp.producer_id)
        if entry is None or self._is_expired(entry, now_ms):
            return None
        if entry.runs and entry.epoch == stamp.epoch:  # the usual case, in as few steps as possible
            last = entry.runs[-1]
            if last.sequence + last.count == stamp.sequence:
                return None
        if stamp.epoch < entry.epoch:
            raise ProducerFenced(str(stamp.producer_id), stamp.epoch, entry.epoch)
        if stamp.sequence < 0:
            return None
        if entry.restarts_sequence:
            if stamp.sequence:
                raise OutOfOrderSequence(self._handle.log_name, stamp.producer_id, 0, stamp.sequence)
            return None
        if (
            stamp.sequence == entry.next_sequence
            or not entry.runs
            or (stamp.epoch > entry.epoch and not stamp.sequence)
        ):
            return None
        if stamp.epoch == entry.epoch:
            for run in reversed(entry.runs):
                ahead = (stamp.sequence - run.sequence) % SEQUENCE_END
                if ahead + count <= run.count:
                    return run.offset + ahead
        raise OutOfOrderSequence(self._handle.log_name, stamp.producer_id, entry.next_sequence, stamp.sequence)

    def record_append(self, stamp: ProducerStamp, offset: int, count: int, now_ms: int) -> None:
        """Record batches that this process has just published."""
        self._unsnapshotted += 1
        self._apply_batch(stamp.producer_id, stamp.epoch, stamp.sequence, offset, count, stamp.transactional, now_ms)

    def record_end(self, producer_id: int, epoch: int, offset: int, now_ms: int) -> None:
        """Record a transaction marker that this process has just published at ``offset``."""
        self._unsnapshotted += 1
        self._apply_end(producer_id, epoch, offset, now_ms)

    def record_stored(self, header: BatchHeader, now_ms: int) -> None:
        """Record a batch that another machine has appended, from its header."""
        self._unsnapshotted += 1
        if header.producer_id >= 0:
            self._apply_header(header, now_ms)

    def mark_seen(self, log: LogState) -> None:
        """Record that everything up to the end of ``log`` is known."""
        if self.seen is None or self.seen.active_base_offset != log.active_base_offset:
            self._mapped = None
        self.seen = log

    def _apply_batch(
        self, producer_id: int, epoch: int, sequence: int, offset: int, count: int, transactional: bool, now_ms: int
    ) -> None:
        entry = self._entries.get(producer_id) or ProducerEntry(producer_id, epoch)
        if offset < entry.next_offset:
            return  # already recorded: an interrupt came after the batch was recorded
        runs, wraps = entry.runs, entry.wraps
        if runs and epoch == entry.epoch and not transactional and sequence + count <= SEQUENCE_END:
            last = runs[-1]  # the usual case
            joined = last.count
            if joined < _RUN_END and last.offset + joined == offset and last.sequence + joined == sequence:
                run = SequenceRun(last.sequence, last.offset, joined + count)
                runs = (run,) if len(runs) == 1 else (*runs[:-1], run)
                self._entries[producer_id] = ProducerEntry(
                    producer_id, epoch, runs, wraps, entry.transaction_offset, offset + count, now_ms
                )
                return
        if sequence >= 0:
            if sequence != entry.next_sequence and epoch != entry.epoch and sequence == 0:
                runs, wraps = (), 0  # a new epoch that starts at sequence 0
            elif runs and sequence == entry.next_sequence == 0:
                wraps += 1
            if sequence + count > SEQUENCE_END:
                wraps += 1
            runs = _with_run(runs, SequenceRun(sequence, offset, count))
        transaction_offset = entry.transaction_offset
        if transactional and transaction_offset < 0:
            transaction_offset = self._open[producer_id] = offset
        self._entries[producer_id] = ProducerEntry(
            producer_id, max(epoch, entry.epoch), runs, wraps, transaction_offset, offset + count, now_ms
        )

    def _apply_end(self, producer_id: int, epoch: int, offset: int, now_ms: int) -> None:
        entry = self._entries.get(producer_id) or ProducerEntry(producer_id, epoch)
        if offset < entry.next_offset:
            return
        self._open.pop(producer_id, None)
        runs, wraps, restarts_sequence = entry.runs, entry.wraps, entry.restarts_sequence
        if epoch > entry.epoch and producer_id >= NAMED_ID_END:
            # Forget the runs of the previous epoch. Otherwise a batch of the new epoch whose sequence is in these runs
            # would be taken for a batch that was appended before.
            runs, wraps, restarts_sequence = (), 0, True
        self._entries[producer_id] = ProducerEntry(
            producer_id, max(epoch, entry.epoch), runs, wraps, -1, offset + 1, now_ms, restarts_sequence
        )

    # ------------------------------------------------------------ what is known

    def _is_expired(self, entry: ProducerEntry, now_ms: int) -> bool:
        handle = self._handle
        expires_ms = entry.appended_ms + handle.config.producer_id_expiration_ms
        return (
            now_ms > expires_ms
            and entry.transaction_offset < 0
            # Do not trust a clock that jumped: a producer that expired too early could append its records twice.
            and handle.clock.steady_ms() > expires_ms
            and not (entry.producer_id < NAMED_ID_END and self._is_held(entry.producer_id, now_ms))
        )

    def _is_held(self, producer_id: int, now_ms: int) -> bool:
        """Return whether a name may still own the id. Asks the store at most once per producer.id.expiration.ms."""
        if now_ms < self._held_until_ms.get(producer_id, 0):
            return True
        is_held = self._handle.holds_producer(producer_id)
        if is_held:
            self._held_until_ms[producer_id] = now_ms + self._handle.config.producer_id_expiration_ms
        return is_held

    def drop_expired(self, now_ms: int) -> None:
        """Drop expired producers from memory: clients come and go, each with an id of its own."""
        self._entries = {entry.producer_id: entry for entry in self.all(now_ms)}
        self._held_until_ms = {known: ms for known, ms in self._held_until_ms.items() if known in self._entries}

    def find(self, producer_id: int, now_ms: int) -> ProducerEntry | None:
        """Return the state of a producer; None if it never appended or has expired."""
        entry = self._entries.get(producer_id)
        return None if entry is None or self._is_expired(entry, now_ms) else entry

    def all(self, now_ms: int) -> list[ProducerEntry]:
        """Return the state of every producer, by id."""
        return [found for known in sorted(self._entries) if (found := self.find(known, now_ms)) is not None]

    def open_transaction(self, producer_id: int) -> int:
        """Return the first offset of the producer's open transaction; -1 if none is open."""
        return self._open.get(producer_id, -1)

    def stable_offset(self, log_end_offset: int, without: int = -1) -> int:
        """Return the offset below which all transactions are decided, as if ``without`` had no open transaction."""
        return min(
            (offset for producer_id, offset in self._open.items() if producer_id != without), default=log_end_offset
        )

    def protected_offsets(self, now_ms: int) -> list[int]:
        """Return the offsets, ascending, whose batches compaction must keep with their producer's numbers for a reload.

        They are the end of each run, and the last offset of each producer, which may be a marker.
        """
        found = {entry.next_offset - 1 for entry in self.all(now_ms)}
        found.update(run.offset + run.count - 1 for entry in self.all(now_ms) for run in entry.runs)
        return sorted(found)

    # ------------------------------------------------------------ snapshots

    def write_snapshot(self, base: int, now_ms: int) -> None:
        """Write the producer states at the start of segment ``base``.

        The file is a cache: a full disk is not an error.
        """
        with failures_ignored():
            replace_file(self._handle.fs, self._snapshot_path(base), encode_snapshot(self.all(now_ms)))

    def _snapshot_path(self, base: int) -> str:
        return segment_stem(self._handle.folder, base) + SNAPSHOT_SUFFIX


def _with_run(runs: tuple[SequenceRun, ...], new: SequenceRun) -> tuple[SequenceRun, ...]:
    """Append a run to the last runs, extending the last run if the new run continues it."""
    if runs:
        last = runs[-1]
        follows = (last.sequence + last.count) % SEQUENCE_END == new.sequence and last.offset + last.count == new.offset
        if follows and last.count < _RUN_END:
            return (*runs[:-1], SequenceRun(last.sequence, last.offset, last.count + new.count))
    return (*runs[1 - KEPT_RUNS :], new)


def stable_offset_of(handle: Handle, log: LogState, bases: Iterable[int], begun: int | None = None) -> tuple[int, bool]:
    """Return (last stable offset of a log in recovery, whether it has any producer). ``begun`` is the base offset of a
    segment that the recovery is about to create, which gets a snapshot.
    """
    states = ProducerStates(handle)
    states.load(log, [base for base in bases if base != begun])
    if begun is not None and states._entries:
        states.write_snapshot(begun, handle.clock.now_ms())
    return states.stable_offset(log.log_end_offset), bool(states._entries)
