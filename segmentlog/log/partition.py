"""A partition: the log itself.

Append: `Appends`. Read: `Reader.check_position` -> `Reader.read`. Open: `open_partition`. All of
these are short files in this folder; this one says what a partition promises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from segmentlog.arguments import as_bool, as_int, as_offset, as_seconds, as_time_ms
from segmentlog.clock import Clock
from segmentlog.config import CLEANER_BUFFER_BYTES, TopicConfig
from segmentlog.errors import CorruptBatch, InvalidConfig, StoreClosed, UnknownTopic
from segmentlog.format.checkpoint import Checkpoint
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.producer_snapshot import ProducerEntry
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.wire import Buffer
from segmentlog.log.append.append_pipeline import Ack as Ack
from segmentlog.log.append.append_pipeline import AppendPipeline
from segmentlog.log.append.appender import Appender
from segmentlog.log.append.batch_encoding import RecordColumns, check_columns
from segmentlog.log.append.syncer import Syncer
from segmentlog.log.append.wait_shipped import wait_shipped
from segmentlog.log.append.wire_append import WireAppended, append_wire
from segmentlog.log.compaction.cleaner import Cleaner
from segmentlog.log.compaction.compaction_pass import Pace
from segmentlog.log.handle import Handle
from segmentlog.log.lease import CleanerLease, CleanerNote
from segmentlog.log.producer_state import ProducerStamp, ProducerStates
from segmentlog.log.read.open_segments import OpenSegments
from segmentlog.log.read.reader import Reader, SkipListener
from segmentlog.log.read.segment_catalog import SegmentCatalogs
from segmentlog.log.recovery.open_partition import find_live_page, open_partition
from segmentlog.log.retention_runner import RetentionRunner
from segmentlog.log.truncation import trim, truncate
from segmentlog.policy.lost_ranges import count_offsets
from segmentlog.records import (
    CompactionReport,
    EpochStart,
    LostRange,
    RecoveryMode,
    RecoveryReport,
    RetentionReport,
    SegmentInfo,
)
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_safe import interrupt_safe_context
from segmentlog.storage.ship_signals import ShipSignals
from segmentlog.storage.state_page import SHIPPED_WORD

logger = logging.getLogger("segmentlog")

Isolation = Literal["read_uncommitted", "read_committed"]


class Partition:
    """One partition of a topic: an ordered, append-only sequence of records. Thread-safe.

    Get one from `Topic.partition`. Any number of processes may have the same partition open,
    to append and to read.
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
        self._handle = Handle(
            fs or FileSystem(), folder, topic, number, load_config, clock or Clock(),
            read_only=read_only, read_only_why=read_only_why, recovery=recovery, load_batch_limit=load_batch_limit,
            on_open=on_open, on_roll=on_roll, ship_signals=ship_signals, holds_producer=holds_producer,
        )  # fmt: skip
        self._closed = False
        self._appender = Appender(self._handle)
        self._syncer = Syncer(self._handle)
        self._appends = AppendPipeline(self._handle, self._appender, self._syncer, background=background)
        self._open_segments = OpenSegments(self._handle)
        self._reader = Reader(self._handle, self._open_segments)
        lease, catalogs = CleanerLease(self._handle), SegmentCatalogs(self._handle, self._open_segments)
        self._retainer = RetentionRunner(self._handle, self._appender, catalogs, lease, self.trim)
        self._cleaner = Cleaner(self._handle, self._syncer, catalogs, lease)
        self.topic = topic
        self.number = number
        self.topic_id = topic_id
        """Of the topic, whatever its name is by now; empty for a partition of no store."""
        self.damage: list[tuple[int, int, CorruptBatch]] = []
        """With ``recovery="salvage"``: the offsets ``[base, end)`` that reads stepped over, and why; each once."""
        self.recovery_report: RecoveryReport = self._opened()
        """What opening found and did, as the one who opened the partition first in this process saw it."""

    def _opened(self) -> RecoveryReport:
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
        """Append records and return the offset of the first; the others follow it without a gap.

        values      a list of bytes or None
        keys        a list as long, or None when no record has one
        timestamps  milliseconds since 1970, a list or integer array as long, or datetimes; None: now. From the year 1
                    to 9223372036854775, and as near to the clock as the topic accepts; -1 is none
        headers     for each record a sequence of (name, value) pairs, or None
        ack         "durable" returns once the records are on disk, whatever the topic's fsync
                    policy; "shipped" once the object store has them, too, so that they survive this machine;
                    "written" and None once they survive this process, or as the policy says
        producer    id and epoch of an idempotent producer, and the sequence of the first record: what
                    was appended under them before is not appended again, the offset is the one it has

        All records of the call become visible at once, or none is appended. Raises
        `InvalidRecord`, `RecordTooLarge` and `DiskFull` (the log is as before, go on),
        `PartitionFailed` (an fsync failed: records of this call may or may not survive a
        power cut), `LocalError` (a limit or a right of this process, an `OSError` as well: the log is as
        before, or with its ``appended`` the records are there, and not known to be on disk: see `flush`),
        `LogTruncated` (with "durable": another process's recovery or truncation has dropped records of
        this call before they were on disk), `UnknownTopic` (deleted meanwhile), `ReadOnlyStore`; with ``producer`` also
        `ProducerFenced` and `OutOfOrderSequence`: nothing was appended. In a store that is shipped also `StoreFenced`
        and `GrantExhausted`: nothing was appended; with "shipped" `NotShipped`: the records are on disk here.
        """
        if not isinstance(ack, str | None) or ack not in _ACKS:
            raise InvalidConfig("ack", ack, "'written', 'durable' or 'shipped'")
        if producer is not None and not isinstance(producer, ProducerStamp):
            raise InvalidConfig("producer", producer, "a ProducerStamp, or None")
        columns = check_columns(values, keys, timestamps, headers)
        if self._closed or self._handle.read_only:
            self._check_appendable()
        if columns.timestamps is not None:
            self._appends.check_timestamps(columns.timestamps)
        return self._appends.columns(columns, ack, None, producer)

    def append_columns(
        self,
        columns: RecordColumns,
        ack: Ack | None = None,
        create_ms: int | None = None,
        stamp: ProducerStamp | None = None,
    ) -> int:
        """`append` of lists that were checked, also their timestamps by the topic's limits.

        Records without a timestamp get ``create_ms``, or the time.
        """
        if self._closed or self._handle.read_only:
            self._check_appendable()
        return self._appends.columns(columns, ack, create_ms, stamp)

    def append_batches(
        self, batches: Sequence[EncodedBatch], ack: Ack | None = None, producer: ProducerStamp | None = None
    ) -> int:
        """Append finished batches, encoded elsewhere under this topic's settings; the offset of the first record.

        As `append`: all at once or none, and with ``producer`` under that producer's numbers, counted
        on from batch to batch. Batches are used up by it.
        """
        self._check_appendable()
        if not batches:
            return self.log_end_offset
        return self._appends.batches(batches, ack, producer)

    def append_wire(
        self, data: Buffer, *, ack: Ack | None = None, sync: bool = True,
        transaction: Callable[[], None] | None = None, owns: Callable[[int], bool] | None = None,
        unpacking: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> WireAppended:  # fmt: skip
        """Append a record batch as a Kafka client sent it (magic 2), whatever its codec.

        It is stored as it is. Where the topic's `compression.type` names another codec, its records are recompressed.
        ``data`` is the whole batch, which is neither copied nor changed, and must not change until this returns. Its
        producer's numbers count: a batch that this producer has appended before is not appended again. Before anything
        is stored the records are decompressed and checked by the function that readers use. The largest timestamp in
        the header is corrected if it is wrong. ``unpacking`` is entered for as long as a batch that is not small is
        decompressed, checked and compressed; a server bounds there how many are checked at the same time.

        Without ``sync`` nothing waits for the disk, nobody who follows is woken, and the answer says whether the
        topic's policy wants it synced: see `sync_upto` and `wake_followers`. ``transaction`` is called under the lock
        of appends before a transactional batch is let through, and raises if it is not to be. ``owns`` is called with
        the producer id of a batch that belongs to no transaction. It returns whether the sender was assigned the id.
        Where it returns False, the batch is appended only if its producer has appended here before, under the batch's
        epoch or the one before it. ``owns`` raises `InvalidWireBatch` to refuse the batch altogether.

        Raises `InvalidWireBatch` with a reason, and with the records that are wrong (without ``transaction`` a
        transactional batch only goes where its producer has a transaction open), `RecordTooLarge` for more bytes than
        max.message.bytes, before it is recompressed or after, `InvalidRecord` for a record without a key that needs
        one or above max.decompressed.message.bytes, and what `append` raises.
        """
        self._check_appendable()
        return append_wire(
            self._handle, self._appender, self._appends, data, ack, sync=sync, transaction=transaction, owns=owns,
            unpacking=unpacking,
        )  # fmt: skip

    def wake_followers(self) -> None:
        """Tell who waits for records, in any process, that there may be some: what `append_wire` may leave to do."""
        self._handle.wake_followers()

    def aborted_transactions(self, from_offset: int, to_offset: int) -> list[tuple[int, int]]:
        """Aborted transactions with offsets in ``[from_offset, to_offset)``: (producer id, first offset), by offset.

        Of each the first offset is that of its first batch here. A reader that is told of them, and of the control
        batches (`read` with ``control``), leaves out what was aborted by itself, as Kafka's clients do.
        """
        self._check_open()
        found = [
            (first, producer_id)
            for producer_id, ranges in self._reader.aborted.look().items()
            for first, last in ranges
            if first < to_offset and last >= from_offset
        ]
        return [(producer_id, first) for first, producer_id in sorted(found)]

    def end_transaction(self, producer_id: int, epoch: int, *, committed: bool) -> int | None:
        """Write the marker that commits or aborts the producer's open transaction in this partition.

        Returns its offset; None when the producer has no transaction open here. Not on disk
        yet. For who coordinates transactions: `Producer.transaction` is for everybody else.
        """
        self._check_open()
        now_ms = self._handle.clock.now_ms()
        return self._appender.end_transaction(producer_id, epoch, committed=committed, now_ms=now_ms)

    def producer(self, producer_id: int) -> ProducerEntry | None:
        """What the log knows of a producer; None when it never appended here, or was forgotten."""
        self._check_open()
        producer_id = as_int("producer_id", producer_id, -1)
        with self._handle.translating_errors("nothing was changed"), self._known_producers() as states:
            return states.find(producer_id, self._handle.clock.now_ms())

    def producers(self) -> list[ProducerEntry]:
        """Every producer that the log knows, by id."""
        self._check_open()
        with self._handle.translating_errors("nothing was changed"), self._known_producers() as states:
            return states.all(self._handle.clock.now_ms())

    def open_transactions(self) -> list[ProducerEntry]:
        """The producers that have a transaction open here."""
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
        """fsync everything appended so far, by whatever process; returns the durable offset."""
        self._check_open()
        self._handle.check_in_place()
        return self._syncer.sync()

    def sync_upto(self, offset: int, base_offset: int | None = None) -> int:
        """fsync unless everything below ``offset`` is on disk already; returns the durable offset.

        With ``base_offset``, that of a record that was appended, raises `LogTruncated` when one from there on was
        dropped since by a recovery or a truncation.
        """
        self._check_open()
        return self._syncer.sync(offset) if base_offset is None else self._syncer.sync_records(base_offset, offset)

    def advance_recovery_point(self) -> int:
        """fsync everything, and have a recovery begin there; the base offset of the segment that it lies in.

        No segment before that is read by a recovery, or changes any more. Raises `DiskFull`, `PartitionFailed`.
        """
        self._check_open()
        with self._handle.translating_errors():
            return self._syncer.checkpoint_now()

    def wait_shipped(self, offset: int) -> None:
        """Return once everything below ``offset``, which is on disk, lies in the object store.

        Raises `NotShipped` when nobody ships, or the object store cannot be reached for two minutes; `StoreFenced`.
        """
        self._check_open()
        wait_shipped(self._handle, self.shipped_offset, offset)

    def sync_due(self, slack_ms: int = 0, now_ms: int | None = None) -> bool:
        """Whether the fsync policy wants a background fsync now (monotonic milliseconds), or within ``slack_ms``."""
        return self._appends.sync_due(slack_ms, now_ms)

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
        """Batches from exactly ``offset`` on, to the end the log has now or until ``max_bytes`` were read.

        ``durable_only`` ends at the durable offset, ``shipped_only`` at what the object store has,
        ``isolation="read_committed"`` at the last stable offset. At least one batch comes if there is one, however
        small ``max_bytes``.
        Damage raises `CorruptBatch` when it is reached; with ``on_skip`` it is stepped over,
        and ``on_skip(base_offset, end_offset, damage)`` is called for what was skipped. A batch
        whose records do not decode raises `UnreadableBatch` when a column of it is first used;
        with ``on_skip`` each batch is decoded as a whole first, and such a one is skipped, too. A
        partition that was opened with ``recovery="salvage"`` steps over it anyway, see `damage`.
        ``control`` hands out control batches too: how transactions ended (`format.control`).

        Raises at once `OffsetOutOfRange`, or `LogTruncated` when ``offset`` lies inside a lost
        range. At the very start of one it does not: who stands there missed nothing. While it reads `ObjectStoreError`
        when a segment that lies in the object store alone cannot be brought: once it can, reading goes on there.
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
            on_skip = self._note_damage
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
        """(batches as Kafka's clients wrote them, the offset behind them, whether the next such one has no room).

        For a server: from the one that holds ``offset`` on, checked once since the segment was mapped; views of the
        store's map, or small ones copied together. They reach up to ``bound`` at the most and take at most
        ``max_bytes``. None of them where the next batch is no such one, or is too large, or there is anything to be
        told: `read` does that.
        """
        self._check_open()
        return self._reader.read_wire(offset, bound, max_bytes)

    def unmap_deleted_segments(self) -> None:
        """Unmap segments that were deleted, by whatever process; a background thread does it."""
        self._open_segments.unmap_deleted()

    def _note_damage(self, base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        if any(known[:2] == (base_offset, end_offset) for known in self.damage):
            return
        self.damage.append((base_offset, end_offset, damage))
        name = self._handle.log_name
        logger.warning("%s: stepped over offsets %d to %d: %s", name, base_offset, end_offset - 1, damage)

    def end_offset(
        self, *, isolation: Isolation = "read_uncommitted", durable_only: bool = False, shipped_only: bool = False
    ) -> int:
        """Where a reader of that kind ends now."""
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
        """Where reading from ``offset`` on really begins: there, or behind the lost range that begins there.

        Raises `OffsetOutOfRange` and `LogTruncated` as `read` does.
        """
        self._check_open()
        return self._reader.check_position(as_offset("offset", offset))

    def offset_for_timestamp(self, timestamp_ms: int) -> int | None:
        """Offset of the first record whose timestamp is at or after ``timestamp_ms``; None without one.

        Raises `UnreadableBatch` when a batch that may hold it does not decode, `CorruptBatch` for damage.
        """
        self._check_open()
        return self._reader.offset_for_timestamp(as_time_ms("timestamp_ms", timestamp_ms), self.log_end_offset)

    # ------------------------------------------------------------ what it is

    @property
    def log_start_offset(self) -> int:
        """Offset of the first record that is still there."""
        return self._handle.page.log.read().log_start_offset

    @property
    def local_log_start_offset(self) -> int:
        """From here on all of the log lies on this machine; what is before it may lie in the object store alone.

        The log start offset where nothing does, see `remote.storage.enable`.
        """
        return self._open_segments.local_start()

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record gets, at least."""
        return self._handle.page.log.read().log_end_offset

    @property
    def durable_offset(self) -> int:
        """Everything below it is fsynced."""
        return self._handle.page.sync.read().durable_offset

    @property
    def shipped_offset(self) -> int:
        """Everything below it lies in the object store that the store is shipped to; 0 where nobody knows of that."""
        return self._handle.page.words[SHIPPED_WORD]

    @property
    def tiered_offset(self) -> int:
        """As `shipped_offset`, of a topic with `remote.storage.enable`; 0 of any other."""
        self._handle.refresh_config()
        return self.shipped_offset if self._handle.config.remote_storage_enable else 0

    @property
    def last_stable_offset(self) -> int:
        """Everything below it belongs to no open transaction."""
        return self._handle.page.log.read().last_stable_offset

    @property
    def epoch(self) -> int:
        """The current partition epoch; it grows when a crash or a truncation may have taken records."""
        return self._handle.page.log.read().epoch

    def epochs(self) -> list[EpochStart]:
        """The epochs, ascending, with the first offset of each."""
        return list(self._checkpoint().epochs)

    def lost_ranges(self) -> list[LostRange]:
        """The ranges of offsets that crashes and truncations took, ascending."""
        return list(self._reader.lost_ranges())

    def count_offsets(self, base_offset: int, end_offset: int) -> int:
        """Count the offsets in ``[base_offset, end_offset)`` that no lost range covers: a lag, or a size in offsets.

        Compaction, control batches and aborted transactions leave offsets without a record too, so the number of
        records may be smaller. Thread-safe. Raises OSError when the checkpoint cannot be read.
        """
        return count_offsets(self._reader.lost_ranges(), base_offset, end_offset)

    @property
    def generation(self) -> int:
        """Counts the times that segment files were removed or replaced."""
        return self._handle.page.log.read().generation

    @property
    def config(self) -> TopicConfig:
        """The topic's configuration as this partition uses it now."""
        return self._handle.config

    @property
    def folder(self) -> str:
        """Path of the partition's folder."""
        return self._handle.folder

    @property
    def sync_count(self) -> int:
        """fsyncs since the partition was last recovered, by all processes."""
        return self._handle.page.sync.read().sync_count

    def segments(self) -> list[SegmentInfo]:
        """The segments, oldest first."""
        return self._open_segments.describe()

    def max_timestamp(self, base_offset: int) -> int:
        """The largest timestamp in the segment that begins there; -1 when it holds nothing, or there is none."""
        self._check_open()
        return self._open_segments.max_timestamp(as_offset("base_offset", base_offset), self._handle.page.log.read())

    def _checkpoint(self) -> Checkpoint:
        return self._handle.ledger.last_checkpoint()

    # ------------------------------------------------------------ changing it

    def trim(self, before_offset: int) -> int:
        """Delete records below ``before_offset`` from the front; returns the new log start offset.

        Whole segments are deleted; of one that the offset lies in, the front is hidden. A
        reader in the middle of it is not disturbed. Raises `OffsetOutOfRange` beyond the end.
        """
        self._check_open()
        return trim(self._handle, as_offset("before_offset", before_offset))

    def truncate(self, offset: int) -> LostRange | None:
        """Cut the end off: delete every record at and after ``offset``; returns the range that is gone.

        The offsets are not given to other records, nor is the one at the old end: the log goes
        on behind it, in a new epoch, so that a consumer that had read any of what is gone gets
        `LogTruncated`. Durable when it returns.
        """
        self._check_open()
        return truncate(self._handle, as_offset("offset", offset))

    def roll(self) -> bool:
        """Seal the active segment and begin the next one; False when it holds nothing."""
        self._check_open()
        with self._handle.translating_errors():
            return self._appender.roll()

    def retain(self, *, dry_run: bool = False, wait_s: float = 0.0, now_ms: int | None = None) -> RetentionReport:
        """Delete the segments that the topic's configuration does not keep; with ``dry_run`` only say which.

        Background work does it, too. One thread or process at a time is at it: another one's
        call returns a report that says `busy` when it still is after ``wait_s``. A reader in
        the middle of a segment that goes is not disturbed; one that is positioned before the
        new log start gets `OffsetOutOfRange`. Raises `ReadOnlyStore`, `PartitionFailed`.
        """
        self._check_open()
        if not as_bool("dry_run", dry_run):
            self._handle.check_writable()
        now_ms = self._handle.clock.now_ms() if now_ms is None else as_time_ms("now_ms", now_ms)
        wait_s = as_seconds("wait_s", wait_s)
        with self._handle.translating_errors():
            return self._retainer.run(now_ms, dry_run=dry_run, wait_s=wait_s)

    def compact(
        self,
        *,
        dry_run: bool = False,
        wait_s: float = 0.0,
        buffer_bytes: int = CLEANER_BUFFER_BYTES,
        pace: Pace | None = None,
        now_ms: int | None = None,
    ) -> CompactionReport:
        """Keep the last `compaction.keep.last` records of each key in all sealed segments; offsets do not change.

        Background work does it too, once `min.cleanable.dirty.ratio` is reached; this does it
        whatever the ratio. ``buffer_bytes`` bounds the offset map; where the dirty section has
        more keys it takes several passes. ``pace`` is told how many bytes were read or written,
        and may wait or raise. Raises `InvalidConfig` for a topic that is not compacted,
        `CorruptBatch`, `DiskFull`, `ReadOnlyStore`: the log is whole then.
        """
        self._check_open()
        if not self._handle.config.compacts:
            wanted = "compact or delete,compact, for a topic that is to be compacted"
            raise InvalidConfig("cleanup.policy", self._handle.config.cleanup_policy, wanted)
        if pace is not None and not callable(pace):
            raise InvalidConfig("pace", pace, "a function that takes a number of bytes")
        now_ms = self._handle.clock.now_ms() if now_ms is None else as_time_ms("now_ms", now_ms)
        buffer_bytes = as_int("buffer_bytes", buffer_bytes, 1, _BUFFER_BYTES_MAX)
        dry_run, wait_s = as_bool("dry_run", dry_run), as_seconds("wait_s", wait_s)
        with self._handle.translating_errors():
            return self._cleaner.run(
                now_ms, buffer_bytes=buffer_bytes, dry_run=dry_run, wait_s=wait_s, pace=pace or _at_full_speed
            )

    def compaction_due(self, now_ms: int | None = None) -> str | None:
        """Why a compaction is worth it now, by the topic's configuration; None when it is not."""
        self._check_open()
        return self._cleaner.why_due(self._handle.clock.now_ms() if now_ms is None else now_ms)

    def dirty_ratio(self) -> float:
        """How much of what could be compacted is not, 0 to 1, in stored bytes."""
        self._check_open()
        return self._cleaner.dirt(self._handle.clock.now_ms()).ratio

    def cleaner_note(self) -> CleanerNote:
        """What the last compaction did, by whatever process, and whether the partition is left alone since."""
        return self._cleaner.read_note()

    def record_uncleanable(self, why: str) -> None:
        """For background work: tell people that compaction leaves the partition alone."""
        self._cleaner.give_up(why)

    @property
    def cleaned_offset(self) -> int:
        """Every key below it has no more records below it than `compaction.keep.last`; 0 before any compaction."""
        return self._cleaner.compacted().cleaned_offset

    @property
    def compacted_below(self) -> int:
        """Compaction may have removed records below it, and none above: what a view of the past has to know."""
        return self._cleaner.compacted().begun_offset

    # ------------------------------------------------------------ closing

    def close(self) -> None:
        """fsync, and leave the partition so that the next open has nothing to do. Idempotent."""
        handle = self._handle
        if self._closed and handle.lock_fd < 0 and handle.state_fd < 0:
            return  # else it was interrupted on its way
        self._closed = True
        try:
            # Deleted meanwhile: nothing is left to sync.
            needs_sync = self._appender.appended and not handle.is_moved and handle.is_in_place()
            if needs_sync and handle.failed is None and not handle.page.failed:
                try:
                    self._appends.close_cleanly()
                except (UnknownTopic, FileNotFoundError):
                    if handle.is_in_place() and not handle.is_moved:  # else it was deleted or renamed since that look
                        raise
        finally:
            with handle.append_mutex, handle.sync_mutex:
                handle.close_files()

    @property
    def handle(self) -> Handle:
        """For the store's own rooms: the shared page, and what followers watch."""
        return self._handle

    @property
    def is_stale(self) -> bool:
        """Whether the topic was deleted or renamed since, or has a life now that a read-only look did not see then.

        The store opens another one in its place.
        """
        handle = self._handle
        return handle.is_moved or (handle.is_snapshot and find_live_page(handle) is not None)

    @property
    def failed(self) -> str | None:
        """Why the partition refuses appends; None while it does not."""
        return self._handle.failed or ("an fsync failed" if self._handle.page.failed else None)

    def abandon(self) -> None:
        """Close without fsync or checkpoint: the topic was deleted."""
        self._closed = True
        with self._handle.append_mutex, self._handle.sync_mutex:
            self._handle.close_files()

    def _check_appendable(self) -> None:
        self._check_open()
        self._handle.check_writable()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"partition {self._handle.log_name}")


def _at_full_speed(size_bytes: int) -> None:
    pass


_BUFFER_BYTES_MAX = 1 << 40
_ACKS = (None, "written", "durable", "shipped")
