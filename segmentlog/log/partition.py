"""A partition of a topic: append and read records, and what is known about the log.

`AppendPipeline` appends, `Reader` reads, `open_partition` opens and recovers the log. The maintenance methods of a
partition are in `segmentlog.log.partition_maintenance`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from segmentlog.arguments import as_bool, as_int, as_offset, as_time_ms
from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.errors import CorruptBatch, InvalidConfig, UnknownTopic
from segmentlog.format.checkpoint import Checkpoint
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.producer_snapshot import ProducerEntry
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.wire import Buffer
from segmentlog.log.append.append_pipeline import Ack as Ack
from segmentlog.log.append.append_pipeline import AppendPipeline
from segmentlog.log.append.appender import Appender
from segmentlog.log.append.batch_encoding import CheckedColumns, check_columns
from segmentlog.log.append.syncer import Syncer
from segmentlog.log.append.wait_shipped import wait_shipped
from segmentlog.log.append.wire_append import WireAppended, append_wire
from segmentlog.log.handle import Handle
from segmentlog.log.partition_maintenance import PartitionMaintenance
from segmentlog.log.producer_state import ProducerStamp, ProducerStates
from segmentlog.log.read.open_segments import OpenSegments
from segmentlog.log.read.reader import Reader, SkipListener
from segmentlog.log.recovery.open_partition import find_live_page, open_partition
from segmentlog.policy.lost_ranges import count_offsets
from segmentlog.records import (
    EpochStart,
    LostRange,
    RecoveryMode,
    RecoveryReport,
    SegmentInfo,
)
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_safe import interrupt_safe_context
from segmentlog.storage.ship_signals import ShipSignals
from segmentlog.storage.state_page import SHIPPED_WORD

logger = logging.getLogger("segmentlog")

Isolation = Literal["read_uncommitted", "read_committed"]


class Partition(PartitionMaintenance):
    """One partition of a topic: an ordered, append-only sequence of records. Thread-safe.

    `Topic.partition` returns it. Any number of processes may have the same partition open, to append and to read.
    """

    def __init__(
        self,
        folder: str,
        topic: str,
        number: int,
        load_config: Callable[[], TopicConfig],
        *,
        topic_id: str = "",
        fs: FileSystem | None = None,
        clock: Clock | None = None,
        read_only: bool = False,
        read_only_why: str = "",
        background: bool = False,
        recovery: RecoveryMode = "tail",
        load_batch_limit: Callable[[], int] | None = None,
        on_open: Callable[[Handle], None] | None = None,
        on_roll: Callable[[Handle], None] | None = None,
        ship_signals: ShipSignals | None = None,
        holds_producer: Callable[[int], bool] | None = None,
    ) -> None:
        handle = Handle(
            fs or FileSystem(), folder, topic, number, load_config, clock or Clock(),
            read_only=read_only, read_only_why=read_only_why, recovery=recovery, load_batch_limit=load_batch_limit,
            on_open=on_open, on_roll=on_roll, ship_signals=ship_signals, holds_producer=holds_producer,
        )  # fmt: skip
        super().__init__(handle, Appender(handle), Syncer(handle), OpenSegments(handle))
        self._pipeline = AppendPipeline(handle, self._appender, self._syncer, background=background)
        self._reader = Reader(handle, self._open_segments)
        self.topic = topic
        self.number = number
        self.topic_id = topic_id
        """The id of the topic, which survives a rename; "" if the partition does not belong to a store."""
        self.damage: list[tuple[int, int, CorruptBatch]] = []
        """With ``recovery="salvage"``: each range of offsets ``[base, end)`` that reads skipped, once, with the damage.
        """
        self.recovery_report: RecoveryReport = self._open_log()
        """What the first open in this process found and did."""

    def _open_log(self) -> RecoveryReport:
        handle = self._handle
        try:
            report = open_partition(handle)
        except BaseException as error:
            handle.close_files()
            if isinstance(error, OSError):
                handle.raise_local_error(error, "the partition was not opened")
            raise
        handle.is_opening = False
        return report

    def __repr__(self) -> str:
        return f"<Partition {self.topic}/{self.number} [{self.log_start_offset}, {self.log_end_offset})>"

    # ------------------------------------------------------------ appending

    def append(
        self,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None = None,
        timestamps: Sequence[int] | Any | None = None,
        headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None = None,
        ack: Ack | None = None,
        producer: ProducerStamp | None = None,
    ) -> int:
        """Append records and return the offset of the first. The others follow without a gap.

            values      a list of bytes or None
            keys        a list of equal length, or None if no record has a key
            timestamps  a list or integer array of equal length, milliseconds since 1970, or datetimes; None: now. From
                        the year 1 to 9223372036854775, and as close to the clock as the topic requires; -1 means no
                        timestamp
            headers     for each record a sequence of (name, value) pairs, or None
            ack         "durable" returns once the records are on disk, whatever the topic's fsync policy. "shipped"
                        returns once the object store has them, too, so that they survive the loss of this machine.
                        "written" and None return once the records survive the death of this process; the
                        topic's fsync policy may require a sync before that
            producer    id and epoch of an idempotent producer, and the sequence of the first record. Records that the
                        producer appended before are not appended again; their earlier offset is returned

        All records of the call become visible at once, or none is appended.

        Raises without having appended anything: `InvalidRecord`, `RecordTooLarge`, `DiskFull`, `UnknownTopic` (the
        topic was deleted), `ReadOnlyStore`; with ``producer`` `ProducerFenced`, `OutOfOrderSequence`; in a shipped
        store `StoreFenced`, `OffsetGrantExhausted`.

        Raises `PartitionFailed` if an fsync failed: records of this call may or may not survive a power cut. Raises
        `ProcessLimitError` (also an `OSError`) for a limit or a missing right of this process. If its ``appended`` is
        true, the records are appended but may not be on disk: see `flush`. Otherwise the log is unchanged. Raises
        `LogTruncated` with "durable" if another process's recovery or truncation dropped records of this call before
        they were on disk. Raises `ShipUnconfirmed` with "shipped": the records are on the local disk.
        """
        if not isinstance(ack, str | None) or ack not in _ACKS:
            raise InvalidConfig("ack", ack, "'written', 'durable' or 'shipped'")
        if producer is not None and not isinstance(producer, ProducerStamp):
            raise InvalidConfig("producer", producer, "a ProducerStamp, or None")
        columns = check_columns(values, keys, timestamps, headers)
        if self._closed or self._handle.read_only:
            self._check_appendable()
        if columns.timestamps is not None:
            self._pipeline.check_timestamps(columns.timestamps)
        return self._pipeline.append_columns(columns, ack, None, producer)

    def append_columns(
        self,
        columns: CheckedColumns,
        ack: Ack | None = None,
        create_ms: int | None = None,
        stamp: ProducerStamp | None = None,
    ) -> int:
        """Append lists whose items and timestamps the caller has checked, as `append` does.

        Records without a timestamp get ``create_ms``, or the current time.
        """
        if self._closed or self._handle.read_only:
            self._check_appendable()
        return self._pipeline.append_columns(columns, ack, create_ms, stamp)

    def append_batches(
        self, batches: Sequence[EncodedBatch], ack: Ack | None = None, producer: ProducerStamp | None = None
    ) -> int:
        """Append batches that were encoded under this topic's settings. Return the offset of the first record.

        As with `append`, all are appended or none. With ``producer`` the sequence of that producer continues from
        batch to batch. The call consumes the batches: do not use them again.
        """
        self._check_appendable()
        if not batches:
            return self.log_end_offset
        return self._pipeline.append_batches(batches, ack, producer)

    def append_wire(
        self, data: Buffer, *, ack: Ack | None = None, sync: bool = True,
        transaction: Callable[[], None] | None = None, owns: Callable[[int], bool] | None = None,
        unpacking: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> WireAppended:  # fmt: skip
        """Append a record batch of a Kafka client (magic 2), whatever its codec.

        The batch is stored unchanged. Only if the topic's `compression.type` names another codec, its records are
        recompressed. ``data`` is the whole batch. It is neither copied nor changed, and must not change until this call
        returns. The producer's numbers count: a batch that the producer has appended before is not appended again.
        Before anything is stored, the function that readers use decompresses and checks the records. A wrong largest
        timestamp in the header is corrected. ``unpacking`` is a context, entered while a batch that is not small is
        decompressed, checked and compressed; a server uses it to limit how many batches are checked at the same time.

        With ``sync=False`` the call does not wait for the disk and wakes no follower, and the result says whether the
        topic's policy requires a sync: see `sync_upto` and `wake_followers`. ``transaction`` is called under the append
        lock before a transactional batch is accepted, and raises to refuse it. ``owns`` is called with the producer id
        of a batch outside a transaction, and returns whether the sender was assigned the id. If it returns False, the
        batch is appended only if its producer has appended here before, under the batch's epoch or the one before it.
        ``owns`` raises `InvalidWireBatch` to refuse the batch altogether.

        Raises `InvalidWireBatch` with a reason and the wrong records. Without ``transaction``, a transactional batch
        requires an open transaction of its producer. Raises `RecordTooLarge` for more bytes than max.message.bytes,
        before or after recompression. Raises `InvalidRecord` for a record that lacks a required key or exceeds
        max.decompressed.message.bytes, and what `append` raises.
        """
        self._check_appendable()
        return append_wire(
            self._handle, self._appender, self._pipeline, data, ack, sync=sync, transaction=transaction, owns=owns,
            unpacking=unpacking,
        )  # fmt: skip

    def wake_followers(self) -> None:
        """Wake waiting followers in all processes. Call it after `append_wire` with ``sync=False``."""
        self._handle.wake_followers()

    def aborted_transactions(self, from_offset: int, to_offset: int) -> list[tuple[int, int]]:
        """Return (producer id, first offset) of each aborted transaction with offsets in ``[from_offset, to_offset)``.

        The first offset of a transaction is that of its first batch in this partition. The list is sorted by it. With
        this list and the control batches (`read` with ``control``) a reader can skip aborted records itself, as Kafka's
        clients do.
        """
        self._check_open()
        found = [
            (first, producer_id)
            for producer_id, ranges in self._reader.aborted.read_ranges().items()
            for first, last in ranges
            if first < to_offset and last >= from_offset
        ]
        return [(producer_id, first) for first, producer_id in sorted(found)]

    def end_transaction(self, producer_id: int, epoch: int, *, committed: bool) -> int | None:
        """Write the marker that commits or aborts the producer's open transaction in this partition.

        Return the marker's offset, or None if the producer has no open transaction in this partition. The marker is not
        synced. For transaction coordinators; programs use `Producer.transaction`.
        """
        self._check_open()
        now_ms = self._handle.clock.now_ms()
        return self._appender.end_transaction(producer_id, epoch, committed=committed, now_ms=now_ms)

    def producer(self, producer_id: int) -> ProducerEntry | None:
        """Return the state of a producer in this partition; None if it never appended to the partition, or has
        expired.
        """
        self._check_open()
        producer_id = as_int("producer_id", producer_id, -1)
        with self._handle.translating_errors("nothing was changed"), self._known_producers() as states:
            return states.find(producer_id, self._handle.clock.now_ms())

    def producers(self) -> list[ProducerEntry]:
        """Return every producer that the log knows, by id."""
        self._check_open()
        with self._handle.translating_errors("nothing was changed"), self._known_producers() as states:
            return states.all(self._handle.clock.now_ms())

    def open_transactions(self) -> list[ProducerEntry]:
        """Return the producers that have an open transaction in this partition."""
        self._check_open()
        if self.last_stable_offset >= self.log_end_offset:
            return []
        return [entry for entry in self.producers() if entry.transaction_offset >= 0]

    @interrupt_safe_context
    def _known_producers(self) -> Iterator[ProducerStates]:
        handle = self._handle
        if not handle.read_only:
            with self._appender.producers() as states:
                yield states
            return
        states = ProducerStates(handle)
        log = handle.page.log.read()
        states.load(log, list(handle.segments(log)))
        yield states

    def flush(self) -> int:
        """Sync everything that any process has appended. Return the durable offset."""
        self._check_open()
        self._handle.check_in_place()
        return self._syncer.sync()

    def sync_upto(self, offset: int, base_offset: int | None = None) -> int:
        """Sync unless everything below ``offset`` is durable. Return the durable offset.

        ``base_offset`` is the offset of an appended record. Raises `LogTruncated` if a recovery or a truncation has
        dropped a record in ``[base_offset, offset)`` since then.
        """
        self._check_open()
        return self._syncer.sync(offset) if base_offset is None else self._syncer.sync_records(base_offset, offset)

    def wait_shipped(self, offset: int) -> None:
        """Return once everything below ``offset``, which must be on disk, is in the object store.

        Raises `ShipUnconfirmed` if no process ships the store, or if the upload takes more than two minutes;
        `StoreFenced`.
        """
        self._check_open()
        wait_shipped(self._handle, self.shipped_offset, offset)

    def sync_due(self, slack_ms: int = 0, now_ms: int | None = None) -> bool:
        """Return whether the policy requires a background fsync at ``now_ms`` (monotonic), or within ``slack_ms``."""
        return self._pipeline.sync_due(slack_ms, now_ms)

    # ------------------------------------------------------------ reading

    def read(
        self,
        offset: int,
        max_bytes: int | None = None,
        *,
        isolation: Isolation = "read_uncommitted",
        durable_only: bool = False,
        shipped_only: bool = False,
        on_skip: SkipListener | None = None,
        control: bool = False,
    ) -> Iterator[RecordBatch]:
        """Yield batches from exactly ``offset`` on, to the current end of the log or until ``max_bytes`` were read.

        ``durable_only`` ends at the durable offset, ``shipped_only`` at the end of the records in the object store,
        ``isolation="read_committed"`` at the last stable offset. At least one batch is returned if there is one,
        however small ``max_bytes`` is. ``control`` also returns control batches, which say how transactions ended
        (`format.control`).

        Damage raises `CorruptBatch` when the reader reaches it. With ``on_skip`` it is skipped, and
        ``on_skip(base_offset, end_offset, damage)`` is called for the skipped offsets. A batch whose records do not
        decode raises `UnreadableBatch` on the first access to a column. With ``on_skip`` each batch is decoded first,
        and an unreadable batch is skipped, too. A partition opened with ``recovery="salvage"`` always skips damage, see
        `damage`.

        Raises `OffsetOutOfRange` at once, and `LogTruncated` if ``offset`` is inside a lost range. At the first offset
        of a lost range it does not raise: a reader positioned at that offset has missed no record. While reading, it
        raises `ObjectStoreError` if a segment that is only in the object store cannot be downloaded. The caller can
        read again from the same offset later.
        """
        if self._closed or self._handle.is_moved:
            self._check_open()
            self._handle.check_usable()
        if offset.__class__ is not int:
            offset = as_offset("offset", offset)
        if max_bytes is not None and max_bytes.__class__ is not int:
            max_bytes = as_int("max_bytes", max_bytes, 1)
        control = as_bool("control", control)
        if on_skip is None and self._handle.recovery == "salvage":
            on_skip = self._record_damage
        bound = self.end_offset(isolation=isolation, durable_only=durable_only, shipped_only=shipped_only)
        return self._reader.read(
            self._reader.check_position(offset),
            bound,
            max_bytes,
            on_skip,
            control=control,
            committed=isolation == "read_committed",
        )

    def read_wire(self, offset: int, bound: int, max_bytes: int) -> tuple[list[Buffer], int, bool]:
        """Return (batches in Kafka's format, offset after them, whether ``max_bytes`` kept out another such batch).

        For servers. The first batch contains ``offset``. Each batch is verified once for each mapping of its segment,
        and returned as a view of the mapping or as a small copy. The batches end at ``bound`` and take at most
        ``max_bytes``. The list is empty if the next batch has another format, exceeds ``max_bytes`` or is damaged:
        then call `read`.
        """
        self._check_open()
        return self._reader.read_wire(offset, bound, max_bytes)

    def _record_damage(self, base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        if any(known[:2] == (base_offset, end_offset) for known in self.damage):
            return
        self.damage.append((base_offset, end_offset, damage))
        name = self._handle.log_name
        logger.warning("%s: reading skipped offsets %d to %d: %s", name, base_offset, end_offset - 1, damage)

    def end_offset(
        self, *, isolation: Isolation = "read_uncommitted", durable_only: bool = False, shipped_only: bool = False
    ) -> int:
        """Return the offset at which a reader with these options ends now."""
        durable_only = as_bool("durable_only", durable_only)
        log = self._handle.page.log.read()
        if isolation == "read_uncommitted":
            bound = log.log_end_offset
        elif isolation == "read_committed":
            bound = log.last_stable_offset
        else:
            raise InvalidConfig("isolation", isolation, "'read_uncommitted' or 'read_committed'")
        if shipped_only:
            bound = min(bound, self.shipped_offset)
        return min(bound, self.durable_offset) if durable_only else bound

    def check_position(self, offset: int) -> int:
        """Return the offset where reading from ``offset`` begins: ``offset``, or the end of a lost range that begins at
        it.

        Raises `OffsetOutOfRange` and `LogTruncated` as `read` does.
        """
        self._check_open()
        return self._reader.check_position(as_offset("offset", offset))

    def offset_for_timestamp(self, timestamp_ms: int) -> int | None:
        """Return the offset of the first record at or after ``timestamp_ms``; None if there is none.

        Raises `UnreadableBatch` if a batch that may contain it does not decode, `CorruptBatch` for damage.
        """
        self._check_open()
        return self._reader.offset_for_timestamp(as_time_ms("timestamp_ms", timestamp_ms), self.log_end_offset)

    # ------------------------------------------------------------ state of the log

    @property
    def log_start_offset(self) -> int:
        """Offset of the first record that still exists."""
        return self._handle.page.log.read().log_start_offset

    @property
    def local_log_start_offset(self) -> int:
        """From this offset on, the whole log is on the local disk. Earlier segments may be only in the object store. It
        equals the log start offset unless the topic has `remote.storage.enable`.
        """
        return self._open_segments.local_start()

    @property
    def log_end_offset(self) -> int:
        """Offset after the last published record. The next record gets this offset or a higher one."""
        return self._handle.page.log.read().log_end_offset

    @property
    def durable_offset(self) -> int:
        """Everything below this offset is synced to disk."""
        return self._handle.page.sync.read().durable_offset

    @property
    def shipped_offset(self) -> int:
        """Everything below this offset is in the object store to which the store is shipped; 0 if no upload is
        recorded.
        """
        return self._handle.page.words[SHIPPED_WORD]

    @property
    def tiered_offset(self) -> int:
        """The `shipped_offset` if the topic has `remote.storage.enable`, otherwise 0."""
        self._handle.refresh_config()
        return self.shipped_offset if self._handle.config.remote_storage_enable else 0

    @property
    def last_stable_offset(self) -> int:
        """Records below it belong to no open transaction."""
        return self._handle.page.log.read().last_stable_offset

    @property
    def epoch(self) -> int:
        """The current partition epoch. It grows when a crash or a truncation may have removed records."""
        return self._handle.page.log.read().epoch

    def epochs(self) -> list[EpochStart]:
        """Return the epochs, ascending, with the first offset of each."""
        return list(self._checkpoint().epochs)

    def lost_ranges(self) -> list[LostRange]:
        """Return the ranges of offsets lost by crashes and truncations, ascending."""
        return list(self._reader.lost_ranges())

    def count_offsets(self, base_offset: int, end_offset: int) -> int:
        """Count the offsets in ``[base_offset, end_offset)`` that no lost range covers: a lag, or a size in offsets.

        The number of records may be smaller: compaction, control batches and aborted transactions leave offsets without
        a record, too. Thread-safe. Raises OSError when the checkpoint cannot be read.
        """
        return count_offsets(self._reader.lost_ranges(), base_offset, end_offset)

    @property
    def generation(self) -> int:
        """The number of times that segment files were removed or replaced."""
        return self._handle.page.log.read().generation

    @property
    def config(self) -> TopicConfig:
        """The topic's configuration that this partition uses now."""
        return self._handle.config

    @property
    def folder(self) -> str:
        """Path of the partition's folder."""
        return self._handle.folder

    @property
    def sync_count(self) -> int:
        """The number of fsyncs by all processes since the partition was last recovered."""
        return self._handle.page.sync.read().sync_count

    def segments(self) -> list[SegmentInfo]:
        """Return the segments, oldest first."""
        return self._open_segments.describe()

    def max_timestamp(self, base_offset: int) -> int:
        """Return the largest timestamp in the segment that begins at ``base_offset``; -1 if it is empty or missing."""
        self._check_open()
        return self._open_segments.max_timestamp(as_offset("base_offset", base_offset), self._handle.page.log.read())

    def _checkpoint(self) -> Checkpoint:
        return self._handle.ledger.last_checkpoint()

    # ------------------------------------------------------------ closing

    def close(self) -> None:
        """Sync, and leave the partition so that the next open has nothing to do. Idempotent."""
        handle = self._handle
        if self._closed and handle.lock_fd < 0 and handle.state_fd < 0:
            return  # else an earlier close was interrupted
        self._closed = True
        try:
            # Deleted meanwhile: there is nothing to sync.
            has_appended = self._appender.appended and not handle.is_moved and handle.is_in_place()
            if has_appended and handle.failed is None and not handle.page.failed:
                try:
                    self._pipeline.close_cleanly()
                except (UnknownTopic, FileNotFoundError):
                    # else it was deleted or renamed since the check above
                    if handle.is_in_place() and not handle.is_moved:
                        raise
        finally:
            with handle.append_mutex, handle.sync_mutex:
                handle.close_files()

    @property
    def handle(self) -> Handle:
        """The shared state page and what followers watch. Internal to this package."""
        return self._handle

    @property
    def is_stale(self) -> bool:
        """Whether the store must open the partition again. True if the topic was deleted or renamed, or if this is a
        read-only snapshot and a process has opened the log since.
        """
        handle = self._handle
        return handle.is_moved or (handle.is_snapshot and find_live_page(handle) is not None)

    @property
    def failed(self) -> str | None:
        """Why the partition refuses appends; None if it accepts them."""
        return self._handle.failed or ("an fsync failed" if self._handle.page.failed else None)

    def abandon(self) -> None:
        """Close without fsync or checkpoint: the topic was deleted."""
        self._closed = True
        with self._handle.append_mutex, self._handle.sync_mutex:
            self._handle.close_files()

    def _check_appendable(self) -> None:
        self._check_open()
        self._handle.check_writable()


_ACKS = (None, "written", "durable", "shipped")
