"""Producers gather records into batches, append them to partitions, and report their offsets.

`Producer.send` only appends to lists. A chunk of records is sent when it is full or has lingered: the partitions of all
keys are computed at once, and each partition gets one append.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

import numpy as np
import numpy.typing as npt

from segmentlog.arguments import as_partition
from segmentlog.errors import (
    InvalidConfig,
    InvalidRecord,
    ProducerFenced,
    SegmentlogError,
    StoreClosed,
    TransactionAborted,
    UnknownTopic,
)
from segmentlog.format.columns import Int64Array
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.file_names import OFFSETS_TOPIC, check_topic_name
from segmentlog.log.append.batch_encoding import (
    CheckedColumns,
    check_columns,
    check_items,
    check_size,
    check_timestamps,
    require_a_key,
)
from segmentlog.producing.accumulator import Accumulator
from segmentlog.producing.delivery import Deliveries, Delivery, Options, ProducerChunk
from segmentlog.producing.partition_dispatch import no_partition
from segmentlog.producing.producer_options import ProducerOptions
from segmentlog.records import K, V
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.producer_identity import ProducerIdentity
from segmentlog.transactions.transaction_coordinator import Transactions

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

NOTE_MAX_BYTES = 4096

RECORD_OVERHEAD = 24
"""Bytes that each record takes of a chunk in addition to its value, so that empty records fill a chunk, too."""

_passed_ms: ContextVar[int | None] = ContextVar("passed_ms", default=None)


@contextlib.contextmanager
def passed_at(now_ms: int | None) -> Iterator[None]:
    """Within the context, check timestamps against ``now_ms`` instead of the time of the call, unless it is None.

    For callers that buffer records: ``now_ms`` is the time at which they got a record, in milliseconds since 1970.
    """
    token = _passed_ms.set(now_ms)
    try:
        yield
    finally:
        _passed_ms.reset(token)


class OffsetCommitter(Protocol):
    """A group member whose offsets a transaction can commit; `Consumer` is one."""

    def committing(
        self, positions: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> contextlib.AbstractContextManager[tuple[list[bytes | None], list[bytes | None]]]:
        """Yield keys and values of records with the offsets, to append within the context.

        Within the context, no other member can acquire the partitions.
        """


class Producer(Generic[K, V]):
    """Sends records to topics. Thread-safe: `send` takes a lock only if it fills a chunk; one send lock per topic.

    linger_ms    how long a record may wait for others to share its batch
    batch_size   bytes of records after which a chunk is sent without lingering. If the last chunk was for many
                 partitions: so many bytes for each of them, at most 8 MiB together
    partitioner  chooses the partition of a record that names none: by its key (murmur2, as Kafka's clients do), or
                 without a key one partition per chunk, in turn
    ack          "durable": a record counts as delivered once it is on disk; "shipped": once the object store has it
    name         a *named* producer continues the sequence numbers of its last instance (`last_sequence`) and fences it:
                 an old instance that still runs gets `ProducerFenced`
    serializer, key_serializer  convert values and keys to bytes (`segmentlog.codecs`)
    tracing      whether record headers carry the current OpenTelemetry span: `segmentlog.tracing`
    enable_idempotence      number every batch, so that no batch is appended twice
    transaction_timeout_ms  other processes abort a transaction that is open for longer

    Records of one thread keep their order in each partition. A record without a timestamp gets the time at which its
    chunk was started, at most ``linger_ms`` before it is sent. The producer checks a given timestamp by the topic's
    limits once, when it is called. It appends an accepted record however long the record waits after that.
    `Delivery.result` raises the error of a record; `flush` or `close` raises it once more, so that no error is lost.

    If a partition rejects a batch, for example because the disk is full, records sent to that partition after it are
    not appended until a call has raised the failure. Those records fail with the same error, or with a
    `SegmentlogError` that has it as ``__cause__`` if it is about another record. So failed records can be sent again in
    their order: no record sent after them is in the partition before them.
    """

    _delivery: type[Delivery] = Delivery
    """Class of the objects that `send` returns."""

    def __init__(
        self,
        topics: Topics,
        transactions: Transactions,
        create_offsets_log: Callable[[], Partition],
        options: ProducerOptions,
        *,
        on_dropped: Callable[[Producer[Any, Any]], None],
        background: bool,
    ) -> None:
        self._topics = topics
        self._create_offsets_log = create_offsets_log
        self._on_dropped = on_dropped
        self._ack = options.ack
        self._identity = None
        if options.enable_idempotence:
            self._identity = ProducerIdentity(topics, transactions, options.name, options.transaction_timeout_ms)
        self._accumulator = Accumulator(topics, self._identity, options, background=background)
        self._chunks = self._accumulator.chunks  # saves one lookup per record
        self._ended = False
        self._made_in = fork_safety.generation()

    def __enter__(self) -> Producer[K, V]:
        if self._accumulator.is_closed:
            raise StoreClosed("producer")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------ sending

    def send(
        self,
        topic: str,
        value: V,
        key: K | None = None,
        *,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
        timestamp: int | datetime | None = None,
        partition: int | None = None,
    ) -> Delivery:
        """Send one record. Returns at once, unless the record fills a chunk.

        ``timestamp`` is in milliseconds since 1970, or a datetime (a naive one is local time). Thread-safe.

        Raises `InvalidRecord` for wrong types, `RecordTooLarge` and `UnknownTopic`; the `Delivery` has later errors.
        Also raises the failure of earlier records of the topic, unless `flush`, a `Delivery` or an earlier `send` has
        raised it. Then this record is not sent.
        """
        if value.__class__ is not bytes or (key is not None and key.__class__ is not bytes):
            value, key = cast("V", _as_bytes("values", value)), cast("K", _as_bytes("keys", key))
        try:
            chunk = self._chunks[topic]
        except (KeyError, TypeError):  # no chunk yet, or not a topic name
            chunk = self._accumulator.open_chunk(check_topic_name(topic), self)
        size_bytes = RECORD_OVERHEAD if value is None else RECORD_OVERHEAD + len(value)  # type: ignore[arg-type]
        options = None
        if headers is not None or timestamp is not None or partition is not None:
            options = _checked_options(headers, timestamp, partition)
            if options[1] is not None:
                self._check_timestamps(topic, np.array([options[1]]))
            if partition is not None:
                try:
                    count = self._accumulator.topics[topic].partition_count
                except UnknownTopic:  # another topic may have the name now
                    count = self._accumulator.partition_count(topic)
                if partition >= count:
                    raise no_partition(topic, partition, count)
        # Check the record now: an error during the append would fail all records of its batch.
        if key is None and chunk.needs_keys:
            raise require_a_key(0)
        if (
            size_bytes > chunk.surely_fits
            or (key is not None and len(key) > chunk.surely_fits)  # type: ignore[arg-type]
            or (headers is not None and _header_bytes(options) > chunk.surely_fits)
        ):
            self._check_size(topic, value, key, options)
        number = chunk.number()
        if options is not None:
            chunk.options[number] = options
        chunk.add((number, value, key))
        chunk.room = room = chunk.room - size_bytes
        if room <= 0 or chunk.sealed:
            chunk, number = self._accumulator.send_sealed(chunk, number, value, key)
        return self._delivery(chunk, number)

    def _check_size(self, topic: str, value: Any, key: Any, options: Options | None) -> None:
        """Raise `RecordTooLarge` for a record that does not fit into a batch of the topic."""
        headers = options[0] if options is not None else None
        columns = CheckedColumns([value], None if key is None else [key], None, None if headers is None else [headers])
        self._accumulator.check_topic(topic)
        check_size(columns, self._accumulator.config_of(topic))

    def now_ms(self) -> int:
        """Return the time of the store's wall clock, milliseconds since 1970."""
        return self._topics.clock.now_ms()

    def _check_timestamps(self, topic: str, timestamps: Int64Array) -> None:
        """Raise `InvalidRecord` for records that the topic rejects because they are too far from the clock."""
        passed_ms = _passed_ms.get()
        check_timestamps(
            timestamps, self._accumulator.config_of(topic), self.now_ms() if passed_ms is None else passed_ms
        )

    def send_many(
        self,
        topic: str,
        values: Sequence[V],
        keys: Sequence[K | None] | None = None,
        *,
        headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None = None,
        timestamps: Sequence[int | datetime] | npt.NDArray[Any] | None = None,
        partition: int | None = None,
    ) -> Deliveries:
        """Send a list of records after those sent before; return when they are appended.

        This is the fastest way to send: no Python code runs per record. Thread-safe. Raises `InvalidRecord` for a
        timestamp that the topic rejects, before any record of the list is appended, and the errors of
        `Partition.append`. Each partition gets all of its records or none, independently of other partitions. Also
        raises the failure of earlier records of the topic, as `send` does; then no record of the list is sent.
        """
        deliveries, error = self.try_send_many(
            topic, values, keys, headers=headers, timestamps=timestamps, partition=partition
        )
        if error is not None:
            raise error
        return deliveries

    def try_send_many(
        self,
        topic: str,
        values: Sequence[V],
        keys: Sequence[K | None] | None = None,
        *,
        headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None = None,
        timestamps: Sequence[int | datetime] | npt.NDArray[Any] | None = None,
        partition: int | None = None,
    ) -> tuple[Deliveries, Exception | None]:
        """Send a list as `send_many` does, but return the error: records may be appended to some partitions only.

        The deliveries show to which. Values and keys must be bytes, also in a producer with a
        serializer. Raises `InvalidRecord`, `UnknownTopic`, `StoreClosed` and the failure of earlier records of the
        topic, as `send` does, before any record is sent.
        """
        columns = check_columns(values, keys, timestamps, headers)
        check_items(columns)
        if columns.timestamps is not None:
            self._accumulator.check_topic(topic)
            self._check_timestamps(topic, columns.timestamps)
        chunk = ProducerChunk(self._accumulator, self, topic, 0, self.now_ms())
        chunk.values = list(columns.values)
        chunk.keys = [] if columns.keys is None else list(columns.keys)
        chunk.all_headers = columns.headers
        chunk.all_timestamps = columns.timestamps
        chunk.all_partition = None if partition is None else as_partition(partition)
        self._accumulator.send_whole(chunk)
        return Deliveries(chunk), chunk.error

    def send_encoded(self, topic: str, partition: int, batches: Sequence[EncodedBatch]) -> int:
        """Append batches that the caller has encoded, after all records sent before. Return the first offset.

        All batches are appended, or none. The caller must not use the batches afterwards. Raises the errors of
        `Partition.append`.
        """
        self._accumulator.check_topic(topic)
        self.flush()
        log = self._topics.open_partition(topic, partition)
        with self._accumulator.senders[topic]:
            if self._identity is None:
                return log.append_batches(batches, self._ack)
            try:
                with self._identity.sending(topic, [partition]):
                    return self._identity.append_batches(log, batches, self._ack)
            except Exception as error:
                self._identity.fail_transaction(error)
                raise

    def flush(self) -> None:
        """Append all records sent so far. Raises the first failure that no call has raised yet. Thread-safe.

        With ``ack="durable"``, they are on disk when this returns.
        """
        self._accumulator.flush()

    # ------------------------------------------------------------ names and transactions

    @property
    def name(self) -> str | None:
        """Name of the producer; None for an unnamed producer."""
        return None if self._identity is None else self._identity.name

    def last_sequence(self, topic: str, partition: int = 0) -> int:
        """Return the number of the last record that this producer appended to a partition; -1 before the first.

        A name numbers its records from 0 in each partition, over all of its instances. So the result plus 1 is the
        number of its records, including those of aborted transactions.
        """
        log = self._topics.topic(topic).partition(partition)
        return -1 if self._identity is None else self._identity.last_number(log)

    def note_resume(self, topic: str, partitions: int) -> int:
        """Return the partition count that was stored for a topic under this producer name.

        The first call for a topic stores ``partitions``. `segmentlog produce --producer` distributes records over this
        number of partitions, even if partitions are added later.
        """
        return self._idempotent("note_resume").note_resume(topic, partitions)

    @property
    def last_commit_metadata(self) -> str | None:
        """Metadata of the last transaction committed under this name, by any instance; None if there is none."""
        return None if self._identity is None else self._identity.last_note

    @property
    def last_note(self) -> str | None:
        """Former name of `last_commit_metadata`."""
        return self.last_commit_metadata

    @contextlib.contextmanager
    def transaction(self, commit_metadata: str | None = None, *, note: str | None = None) -> Iterator[Producer[K, V]]:
        """Commit all records sent within the context, to any topics, or none of them.

        Readers with isolation ``read_committed`` see them after the commit. ``commit_metadata`` is a text that is
        stored with the commit: `last_commit_metadata` returns it if and only if this transaction was committed. So a
        program that restarts after a crash can see whether to repeat the transaction. ``note`` is the former name of
        the argument.

        The end of the context commits, durably. An exception aborts the transaction and is raised. Raises
        `TransactionAborted` if a record could not be appended, and `ProducerFenced` if another instance took over or
        the transaction took longer than ``transaction_timeout_ms``. Records that other threads send meanwhile belong to
        the transaction, too.
        """
        commit_metadata = checked_metadata(commit_metadata, note)
        self.begin_transaction()
        try:
            yield self
        except BaseException:
            self._abort_quietly()
            raise
        try:
            self.commit_transaction(commit_metadata)
        except BaseException:
            # For example an interrupt before the decision: later records must not belong to this transaction.
            self._abort_quietly()
            raise

    def _abort_quietly(self) -> None:
        """Abort an open transaction; ignore errors, because the caller raises an earlier one."""
        with failures_ignored(SegmentlogError):
            self.abort_transaction()

    def begin_transaction(self) -> None:
        """Begin a transaction; `transaction` is easier to use."""
        identity = self._idempotent("a transaction")
        if self._accumulator.is_closed:
            raise StoreClosed("producer")
        identity.prepare_transaction()
        self.flush()
        identity.begin_transaction()

    def commit_transaction(self, commit_metadata: str | None = None, *, note: str | None = None) -> None:
        """Send the remaining records and commit. Durable when it returns; with ``ack="shipped"``, also shipped.

        Raises the errors of `transaction`.
        """
        identity = self._idempotent("a transaction")
        identity.check_open()
        commit_metadata = checked_metadata(commit_metadata, note)
        try:
            self.flush()
            identity.sync_data()
        except (SegmentlogError, OSError) as error:
            if is_interrupt(error):
                raise
            if isinstance(error, ProducerFenced):
                identity.discard_transaction()
                raise
            # For example a full disk. The transaction was not decided, so abort it.
            with failures_ignored(SegmentlogError):
                self.abort_transaction()
            raise TransactionAborted(identity.label, str(error)) from error
        identity.commit(commit_metadata)
        if self._ack == "shipped":
            identity.wait_shipped()

    def abort_transaction(self) -> None:
        """Abort the transaction: ``read_committed`` readers never see its records."""
        identity = self._idempotent("a transaction")
        identity.check_open()
        with failures_ignored(Exception):
            self.flush()  # so that no record of the transaction is appended later
        identity.abort()

    def commit_offsets(
        self, consumer: OffsetCommitter, offsets: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> None:
        """Commit offsets of a group member with the transaction: consume, transform and produce, exactly once.

        ``offsets`` by (topic, partition); default: after the last returned record, of every partition. Raises
        `ConsumerFenced` if a partition belongs to another member now. If the offsets cannot become part of the
        transaction, the transaction cannot be committed.
        """
        identity = self._idempotent("a transaction")
        identity.check_open()
        try:
            with consumer.committing(offsets, metadata=metadata) as (keys, values):
                if keys:
                    log = self._create_offsets_log()
                    with identity.sending(OFFSETS_TOPIC, [0]):
                        identity.append_positions(log, CheckedColumns(values, keys, None, None))
        except Exception as error:
            if not isinstance(error, InvalidConfig):  # after an invalid offset the caller may retry
                identity.fail_transaction(error)
            raise

    def commit_positions(
        self, consumer: OffsetCommitter, positions: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> None:
        """Former name of `commit_offsets`."""
        self.commit_offsets(consumer, positions, metadata=metadata)

    def _idempotent(self, what: str) -> ProducerIdentity:
        if self._identity is None:
            raise InvalidConfig("enable_idempotence", False, f"it must be True to use {what}")
        return self._identity

    @property
    def unsent_count(self) -> int:
        """Number of records that were sent but are not appended yet; approximate while other threads send."""
        return self._accumulator.unsent_count

    def send_lingering(self) -> float:
        """Send the chunks that have lingered long enough; return the seconds until the next chunk is due."""
        return self._accumulator.send_lingering()

    def __del__(self) -> None:
        # Any thread may run this at any point, and may hold any lock. So the store flushes the producer later.
        if getattr(self, "_ended", True) or self._made_in != fork_safety.generation():
            return
        unsent_count = self.unsent_count
        if unsent_count:
            self._on_dropped(self)
            text = f"a producer was dropped with {unsent_count} unsent records: call flush() or close()"
            warnings.warn(text, ResourceWarning, stacklevel=1, source=self)

    def close(self) -> None:
        """Flush, abort an open transaction, and reject new records. Idempotent; call it again after an interrupt."""
        if self._ended:
            return
        self._accumulator.stop_accepting()  # before the flush: no thread would send a chunk that is started later
        try:
            self.flush()
            if self._identity is not None and self._identity.in_transaction:
                self._identity.abort()
        except Exception:
            self._end()
            raise
        self._end()  # not after an interrupt: this producer must still append its unsent records, under its name

    def _end(self) -> None:
        self._accumulator.stop()
        if self._identity is not None:
            self._identity.close()
        self._ended = True


def _checked_options(headers: Any, timestamp: int | datetime | None, partition: int | None) -> Options:
    """Return the validated options. Raises `InvalidRecord`, `InvalidConfig`."""
    from segmentlog.format.columns import as_timestamps, check_headers

    return (
        None if headers is None else check_headers([headers])[0],
        None if timestamp is None else int(as_timestamps([timestamp], 1)[0]),
        None if partition is None else as_partition(partition),
    )


def _header_bytes(options: Options | None) -> int:
    headers = options[0] if options is not None else None
    return sum(len(name) * 4 + len(blob or b"") + 8 for name, blob in headers or ())


def checked_metadata(commit_metadata: str | None, note: str | None) -> str | None:
    """Return the metadata of a commit, also if the caller gives it as ``note``. Raises `InvalidConfig`."""
    if note is not None and commit_metadata is not None:
        raise InvalidConfig("note", note, "give commit_metadata only: note is its former name")
    name, text = ("commit_metadata", commit_metadata) if note is None else ("note", note)
    if text is not None and (not isinstance(text, str) or len(text.encode(errors="surrogatepass")) > NOTE_MAX_BYTES):
        raise InvalidConfig(name, text, f"text of at most {NOTE_MAX_BYTES} bytes")
    return text


def _as_bytes(column: str, blob: Any) -> bytes | None:
    if blob is None or isinstance(blob, bytes):
        return blob
    if isinstance(blob, bytearray | memoryview):
        return bytes(blob)
    hint = " (encode it first: .encode())" if isinstance(blob, str) else ""
    raise InvalidRecord(column, 0, type(blob).__name__, f"bytes or None{hint}")
