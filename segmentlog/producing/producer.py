"""Producing: records gathered into batches, spread over partitions, and told where they went.

`Producer.send` only appends to lists. When a chunk of them is full, or has lingered long
enough, whoever notices sends it: partitions for all keys at once, one append a partition.
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
from segmentlog.producing.accumulator import Pump
from segmentlog.producing.delivery import Chunk, Deliveries, Delivery, Options
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
"""Bytes that a record counts beyond its value, so that empty ones fill a chunk too."""

_passed_ms: ContextVar[int | None] = ContextVar("passed_ms", default=None)


@contextlib.contextmanager
def passed_at(now_ms: int | None) -> Iterator[None]:
    """Within it, sends check timestamps by the time ``now_ms``, milliseconds since 1970; None: the time of each call.

    A caller that buffers records takes the time when the program passes a record, and sends the record later.
    """
    token = _passed_ms.set(now_ms)
    try:
        yield
    finally:
        _passed_ms.reset(token)


class CommitsPositions(Protocol):
    """A member of a group, as a transaction needs it; `Consumer` is one."""

    def committing(
        self, positions: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> contextlib.AbstractContextManager[tuple[list[bytes | None], list[bytes | None]]]:
        """Keys and values to append within the context, while nobody else can take the partitions."""


class Producer(Generic[K, V]):
    """Sends records to topics. Thread-safe: `send` takes no lock unless it fills a chunk; one lock a topic for sending.

    linger_ms    how long a record may wait for others to share its batch
    batch_size   bytes of records after which a chunk is sent at once; where the last one was spread over many
                 partitions, so many for each of them, up to 8 MiB
    partitioner  where a record goes that names no partition: by its key (murmur2, as Kafka's
                 clients do), without a key to one partition a chunk, in turn
    ack          "durable": a record counts as delivered once it is on disk; "shipped": once the object store has it
    name         a *named* producer counts on where its last instance stopped (`last_sequence`), and
                 fences that one, should it still run: `ProducerFenced` is what it gets
    serializer, key_serializer  make bytes of values and keys (`segmentlog.codecs`)
    tracing      whether records carry the OpenTelemetry span they are sent in, in their headers: `segmentlog.tracing`
    enable_idempotence      give every batch a number, so that none is ever appended twice
    transaction_timeout_ms  a transaction that is open for longer is aborted by others

    Records of one thread keep their order in each partition. A record that is not given a timestamp gets the time at
    which its chunk was begun, at most ``linger_ms`` before it is sent. The producer checks a given timestamp by the
    topic's limits once, when it is called. It appends an accepted record however long the record waits after that.
    What fails is raised by `Delivery.result`, and once more by `flush` or `close`, so that nothing is lost in silence.

    When a partition does not take a batch, on a full disk for example, the producer does not append what was sent to
    that partition after it, up to the moment when the caller learns of the failure. Those records fail with the same
    error, or with a `SegmentlogError` that has it as ``__cause__`` if it is about another record. So records that
    failed can be sent again in their order: no record that was sent after them is in the partition before them.
    """

    _delivery: type[Delivery] = Delivery
    """What `send` returns."""

    def __init__(
        self,
        topics: Topics,
        transactions: Transactions,
        make_positions: Callable[[], Partition],
        options: ProducerOptions,
        *,
        on_dropped: Callable[[Producer[Any, Any]], None],
        background: bool,
    ) -> None:
        self._topics = topics
        self._make_positions = make_positions
        self._on_dropped = on_dropped
        self._ack = options.ack
        self._identity = None
        if options.enable_idempotence:
            self._identity = ProducerIdentity(topics, transactions, options.name, options.transaction_timeout_ms)
        self._pump = Pump(topics, self._identity, options, background=background)
        self._chunks = self._pump.chunks  # one look-up less for each record
        self._ended = False
        self._made_in = fork_safety.generation()

    def __enter__(self) -> Producer[K, V]:
        if self._pump.is_closed:
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
        """Send one record; returns at once, unless it is the one that fills a chunk.

        ``timestamp`` is in milliseconds since 1970, or a datetime (a naive one is local time).

        Raises `InvalidRecord` for wrong types, `RecordTooLarge` and `UnknownTopic`; what fails
        later is in the `Delivery`. Raises what kept earlier records of the topic from being appended, unless `flush`,
        a `Delivery` or an earlier `send` has raised it: then this record is not sent.
        """
        if value.__class__ is not bytes or (key is not None and key.__class__ is not bytes):
            value, key = cast("V", _as_bytes("values", value)), cast("K", _as_bytes("keys", key))
        try:
            chunk = self._chunks[topic]
        except (KeyError, TypeError):  # none yet, or what is no name
            chunk = self._pump.begin(check_topic_name(topic), self)
        size_bytes = RECORD_OVERHEAD if value is None else RECORD_OVERHEAD + len(value)  # type: ignore[arg-type]
        options = None
        if headers is not None or timestamp is not None or partition is not None:
            options = _checked_options(headers, timestamp, partition)
            if options[1] is not None:
                self._check_timestamps(topic, np.array([options[1]]))
            if partition is not None:
                try:
                    count = self._pump.topics[topic].partition_count
                except UnknownTopic:  # another one may have the name by now
                    count = self._pump.partition_count(topic)
                if partition >= count:
                    raise no_partition(topic, partition, count)
        # What is wrong with a record is told here: further on it would fail those that share its batch.
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
            chunk.noted[number] = options
        chunk.add((number, value, key))
        chunk.room = room = chunk.room - size_bytes
        if room <= 0 or chunk.sealed:
            chunk, number = self._pump.send_sealed(chunk, number, value, key)
        return self._delivery(chunk, number)

    def _check_size(self, topic: str, value: Any, key: Any, options: Options | None) -> None:
        """Raise `RecordTooLarge` for a record that no batch of the topic holds."""
        headers = options[0] if options is not None else None
        columns = CheckedColumns([value], None if key is None else [key], None, None if headers is None else [headers])
        self._pump.check_topic(topic)
        check_size(columns, self._pump.config_of(topic))

    def now_ms(self) -> int:
        """Return the time of the store's wall clock, milliseconds since 1970."""
        return self._topics.clock.now_ms()

    def _check_timestamps(self, topic: str, timestamps: Int64Array) -> None:
        """Raise `InvalidRecord` for records that the topic refuses for their distance from the clock."""
        passed_ms = _passed_ms.get()
        check_timestamps(timestamps, self._pump.config_of(topic), self.now_ms() if passed_ms is None else passed_ms)

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
        """Send a list of records at once, after what was sent before them; returns when they are appended.

        The fast path: no work in Python for each record. Raises `InvalidRecord` for a timestamp that the topic does not
        accept, before any record of the list is appended, and what `Partition.append` raises. A partition gets its
        records whole or not at all, whatever became of the others. Raises also what kept earlier records of the topic
        from being appended, as `send` does: then no record of the list is sent.
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
        """`send_many` that returns what kept a partition from its records: other partitions may have theirs.

        The deliveries say which. Values and keys are bytes, also in a producer with a serializer. Raises
        `InvalidRecord`, `UnknownTopic`, `StoreClosed` and what kept earlier records of the topic from being appended,
        as `send` does, before anything is sent.
        """
        columns = check_columns(values, keys, timestamps, headers)
        check_items(columns)
        if columns.timestamps is not None:
            self._pump.check_topic(topic)
            self._check_timestamps(topic, columns.timestamps)
        chunk = Chunk(self._pump, self, topic, 0, self.now_ms())
        chunk.values = list(columns.values)
        chunk.keys = [] if columns.keys is None else list(columns.keys)
        chunk.all_headers = columns.headers
        chunk.all_timestamps = columns.timestamps
        chunk.all_partition = None if partition is None else as_partition(partition)
        self._pump.send_whole(chunk)
        return Deliveries(chunk), chunk.error

    def send_encoded(self, topic: str, partition: int, batches: Sequence[EncodedBatch]) -> int:
        """Append finished batches that were encoded elsewhere, behind what was sent before; the first one's offset.

        All of them at once, or none; they are used up by it. Raises what `Partition.append` raises.
        """
        self._pump.check_topic(topic)
        self.flush()
        log = self._topics.open_partition(topic, partition)
        with self._pump.senders[topic]:
            if self._identity is None:
                return log.append_batches(batches, self._ack)
            try:
                with self._identity.sending(topic, [partition]):
                    return self._identity.append_batches(log, batches, self._ack)
            except Exception as error:
                self._identity.fail_transaction(error)
                raise

    def flush(self) -> None:
        """Append everything that was sent so far. Raises the first failure that nobody was told of yet.

        With ``ack="durable"`` it is on disk when this returns.
        """
        self._pump.flush()

    # ------------------------------------------------------------ names and transactions

    @property
    def name(self) -> str | None:
        """The name that it was given."""
        return None if self._identity is None else self._identity.name

    def last_sequence(self, topic: str, partition: int = 0) -> int:
        """The number of the last record that this producer appended to a partition; -1 before the first.

        Records are numbered from 0 on, a partition each, whatever instance of a name appended
        them: one more than this is how many there are. Records of aborted transactions count.
        """
        log = self._topics.topic(topic).partition(partition)
        return -1 if self._identity is None else self._identity.last_number(log)

    def note_resume(self, topic: str, partitions: int) -> int:
        """How many partitions a topic had when this name first asked, for who spreads records over them by counting."""
        return self._idempotent("note_resume").note_resume(topic, partitions)

    @property
    def last_note(self) -> str | None:
        """The note of the last transaction that was committed under this name, by whatever instance; None without."""
        return None if self._identity is None else self._identity.last_note

    @contextlib.contextmanager
    def transaction(self, note: str | None = None) -> Iterator[Producer[K, V]]:
        """What is sent within, to any topics, is there for ``read_committed`` readers all at once, or never.

        ``note`` is a text that is kept with the decision: it is `last_note` if and only if this was
        committed. So who does a transaction again after a crash can see that it need not.

        Committed at the end, durably; left by an exception it is aborted, and the exception
        goes on. Raises `TransactionAborted` when something that was sent could not be appended,
        `ProducerFenced` when another instance took over or it took longer than
        ``transaction_timeout_ms``. Sends of other threads belong to it, too.
        """
        _check_note(note)
        self.begin_transaction()
        try:
            yield self
        except BaseException:
            self._abort_quietly()
            raise
        try:
            self.commit_transaction(note)
        except BaseException:
            self._abort_quietly()  # interrupted before it was decided, say: what is sent next is none of it
            raise

    def _abort_quietly(self) -> None:
        """Abort, if there is anything to abort still; the first reason is the one to tell."""
        with failures_ignored(SegmentlogError):
            self.abort_transaction()

    def begin_transaction(self) -> None:
        """Begin a transaction by hand; `transaction` is the easier way."""
        identity = self._idempotent("a transaction")
        if self._pump.is_closed:
            raise StoreClosed("producer")
        identity.prepare_transaction()
        self.flush()
        identity.begin_transaction()

    def commit_transaction(self, note: str | None = None) -> None:
        """Send what is left, and commit: durable, or as ``ack`` says shipped, when it returns.

        See `transaction` for what it raises.
        """
        identity = self._idempotent("a transaction")
        identity.check_open()
        _check_note(note)
        try:
            self.flush()
            identity.sync_data()
        except (SegmentlogError, OSError) as error:
            if is_interrupt(error):
                raise
            if isinstance(error, ProducerFenced):
                identity.discard_transaction()
                raise
            # A full disk, say: what is not decided is not committed.
            with failures_ignored(SegmentlogError):
                self.abort_transaction()
            raise TransactionAborted(identity.label, str(error)) from error
        identity.commit(note)
        if self._ack == "shipped":
            identity.wait_shipped()

    def abort_transaction(self) -> None:
        """Take back everything that was sent in the transaction."""
        identity = self._idempotent("a transaction")
        identity.check_open()
        with failures_ignored(Exception):
            self.flush()  # so that nothing of it comes later
        identity.abort()

    def commit_positions(
        self, consumer: CommitsPositions, positions: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> None:
        """Commit a group member's positions with the transaction: consume, transform and produce, exactly once.

        ``positions`` are offsets by (topic, partition); default: behind the last record handed
        out, of every partition. Raises `ConsumerFenced` when one belongs to another member by now. What kept them from
        being part of the transaction keeps that from being committed.
        """
        identity = self._idempotent("a transaction")
        identity.check_open()
        try:
            with consumer.committing(positions, metadata=metadata) as (keys, values):
                if keys:
                    log = self._make_positions()
                    with identity.sending(OFFSETS_TOPIC, [0]):
                        identity.append_positions(log, CheckedColumns(values, keys, None, None))
        except Exception as error:
            if not isinstance(error, InvalidConfig):  # what is no position may be given anew
                identity.fail_transaction(error)
            raise

    def _idempotent(self, what: str) -> ProducerIdentity:
        if self._identity is None:
            raise InvalidConfig("enable_idempotence", False, f"True for {what}")
        return self._identity

    @property
    def unsent_count(self) -> int:
        """Records that were sent and are not appended yet, as nearly as can be told while others send."""
        return self._pump.unsent_count

    def linger_tick(self) -> float:
        """Send the chunks that have waited long enough; returns the seconds until the next one will have."""
        return self._pump.linger_tick()

    def __del__(self) -> None:
        # Whatever thread comes by runs this, at any point and with any lock held: the store flushes it, later.
        if getattr(self, "_ended", True) or self._made_in != fork_safety.generation():
            return
        unsent_count = self.unsent_count
        if unsent_count:
            self._on_dropped(self)
            text = f"a producer was dropped before {unsent_count} of its records were appended: flush or close it"
            warnings.warn(text, ResourceWarning, stacklevel=1, source=self)

    def close(self) -> None:
        """Flush, and take no more records. An open transaction is aborted. Idempotent; interrupted, call it again."""
        if self._ended:
            return
        self._pump.refuse_more()  # before the flush: a chunk begun after it would be sent by nobody
        try:
            self.flush()
            if self._identity is not None and self._identity.in_transaction:
                self._identity.abort()
        except Exception:
            self._end()
            raise
        self._end()  # not after an interrupt: what is unsent is its own to append, under its name

    def _end(self) -> None:
        self._pump.stop()
        if self._identity is not None:
            self._identity.close()
        self._ended = True


def _checked_options(headers: Any, timestamp: int | datetime | None, partition: int | None) -> Options:
    """Raises `InvalidRecord`, `InvalidConfig`."""
    from segmentlog.format.columns import as_timestamps, check_headers

    return (
        None if headers is None else check_headers([headers])[0],
        None if timestamp is None else int(as_timestamps([timestamp], 1)[0]),
        None if partition is None else as_partition(partition),
    )


def _header_bytes(options: Options | None) -> int:
    headers = options[0] if options is not None else None
    return sum(len(name) * 4 + len(blob or b"") + 8 for name, blob in headers or ())


def _check_note(note: object) -> None:
    if note is not None and (not isinstance(note, str) or len(note.encode(errors="surrogatepass")) > NOTE_MAX_BYTES):
        raise InvalidConfig("note", note, f"text of at most {NOTE_MAX_BYTES} bytes")


def _as_bytes(column: str, blob: Any) -> bytes | None:
    if blob is None or isinstance(blob, bytes):
        return blob
    if isinstance(blob, bytearray | memoryview):
        return bytes(blob)
    hint = " (encode it first: .encode())" if isinstance(blob, str) else ""
    raise InvalidRecord(column, 0, type(blob).__name__, f"bytes or None{hint}")
