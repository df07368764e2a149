"""Producing: records gathered into batches, spread over partitions, and told where they went.

`Producer.send` only appends to lists. When a chunk of them is full, or has lingered long
enough, whoever notices sends it: partitions for all keys at once, one append a partition.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from segmentlog.arguments import as_bool, as_int, as_partition
from segmentlog.errors import (
    InvalidConfig,
    InvalidRecord,
    ProducerFenced,
    RecordTooLarge,
    SegmentlogError,
    StoreClosed,
    TransactionAborted,
    UnknownTopic,
)
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.names import OFFSETS_TOPIC, check_topic_name
from segmentlog.log.append.encoding import Columns, check_columns, check_items, check_size, require_a_key
from segmentlog.policy.partitioner import HashPartitioner, Partitioner
from segmentlog.producing.delivery import Chunk, Deliveries, Delivery, Options
from segmentlog.storage import forks
from segmentlog.storage.locks import News
from segmentlog.topics.topics import Topics
from segmentlog.topics.workers import Worker
from segmentlog.transactions.identity import Identity
from segmentlog.transactions.transactions import Transactions

if TYPE_CHECKING:
    import threading

    from segmentlog.log.partition import Ack, Partition
    from segmentlog.topics.topics import Topic

NOTE_MAX_BYTES = 4096

_RECORD_OVERHEAD = 24
"""Bytes that a record counts beyond its value, so that empty ones fill a chunk too."""

_LOOK_AGAIN_S = 1.0
_SPREAD_CHUNK_MAX_BYTES = 8 << 20
"""A chunk for a thousand partitions is no larger: what may wait in memory, twice of it while one is being sent."""


class CommitsPositions(Protocol):
    """A member of a group, as a transaction needs it; `Consumer` is one."""

    def committing(
        self, positions: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> contextlib.AbstractContextManager[tuple[list[bytes | None], list[bytes | None]]]:
        """Keys and values to append within the context, while nobody else can take the partitions."""


class Producer:
    """Sends records to topics. Thread-safe: `send` takes no lock unless it fills a chunk; one lock a topic for sending.

    linger_ms    how long a record may wait for others to share its batch
    batch_size   bytes of records after which a chunk is sent at once; where the last one was spread over many
                 partitions, so many for each of them, up to 8 MiB
    partitioner  where a record goes that names no partition: by its key (murmur2, as Kafka's
                 clients do), without a key to one partition a chunk, in turn
    ack          "durable": a record counts as delivered once it is on disk
    name         a *named* producer counts on where its last instance stopped (`last_sequence`), and
                 fences that one, should it still run: `ProducerFenced` is what it gets
    enable_idempotence      give every batch a number, so that none is ever appended twice
    transaction_timeout_ms  a transaction that is open for longer is aborted by others

    Records of one thread keep their order in each partition. A record that is not given a
    timestamp gets the time at which its chunk was begun, at most ``linger_ms`` before it is
    sent. What fails is raised by `Delivery.result`, and once more by `flush` or `close`, so
    that nothing is lost in silence.
    """

    def __init__(
        self,
        topics: Topics,
        transactions: Transactions,
        make_positions: Callable[[], Partition],
        *,
        on_dropped: Callable[[Producer], None],
        linger_ms: float = 5,
        batch_size: int = 256 * 1024,
        partitioner: Partitioner | None = None,
        ack: Ack | None = None,
        name: str | None = None,
        enable_idempotence: bool = True,
        transaction_timeout_ms: int = 60_000,
        background: bool = True,
    ) -> None:
        if isinstance(linger_ms, bool) or not isinstance(linger_ms, int | float) or not 0 <= linger_ms <= 3_600_000:
            raise InvalidConfig("linger_ms", linger_ms, "milliseconds from 0 to 3,600,000")
        batch_size = as_int("batch_size", batch_size, 1, 1 << 30, wanted="bytes from 1 to 1 GiB")
        if not isinstance(ack, str | None) or ack not in (None, "written", "durable"):
            raise InvalidConfig("ack", ack, "'written' or 'durable'")
        transaction_timeout_ms = as_int("transaction_timeout_ms", transaction_timeout_ms, 1, 86_400_000)
        enable_idempotence = as_bool("enable_idempotence", enable_idempotence)
        if partitioner is not None and not callable(getattr(partitioner, "partitions", None)):
            raise InvalidConfig("partitioner", partitioner, "an object with a method `partitions`, or None")
        if name is not None and not enable_idempotence:
            raise InvalidConfig("enable_idempotence", enable_idempotence, "True for a producer with a name")
        self._all_topics = topics
        self._make_positions = make_positions
        self._on_dropped = on_dropped
        self._identity = Identity(topics, transactions, name, transaction_timeout_ms) if enable_idempotence else None
        self._linger_ns = int(linger_ms * 1e6)
        self._batch_size = batch_size
        self._partitioner = partitioner or HashPartitioner()
        self._ack: Ack | None = ack
        self._mutex = forks.lock(self, "_mutex")
        self._told = News()
        self._sticky: dict[str, int] = {}
        self._spread: dict[str, int] = {}
        self._closed = self._ended = False
        self._made_in = forks.generation()
        self._forget_sent()
        forks.on_fork(self, "_forget_sent")
        self._lingerer = Worker("linger", self.linger_tick) if background and linger_ms else None

    def _forget_sent(self) -> None:
        """Nothing was sent yet. In a forked child: what was, before the fork, is the parent's to append."""
        self._chunks: dict[str, Chunk] = {}
        self._full: dict[str, deque[Chunk]] = {}
        self._senders: dict[str, threading.Lock] = {}
        self._topics: dict[str, Topic] = {}
        self._failure: Exception | None = None
        self._told = News()
        self._lingerer_sleeps = True

    def __enter__(self) -> Producer:
        if self._closed:
            raise StoreClosed("producer")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------ sending

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
        timestamp: int | datetime | None = None,
        partition: int | None = None,
    ) -> Delivery:
        """Send one record; returns at once, unless it is the one that fills a chunk.

        ``timestamp`` is in milliseconds since 1970, or a datetime (a naive one is local time).

        Raises `InvalidRecord` for wrong types, `RecordTooLarge` and `UnknownTopic`; what fails
        later is in the `Delivery`.
        """
        if value.__class__ is not bytes or (key is not None and key.__class__ is not bytes):
            value, key = _as_bytes("values", value), _as_bytes("keys", key)
        try:
            chunk = self._chunks[topic]
        except (KeyError, TypeError):  # none yet, or what is no name
            chunk = self._begin(check_topic_name(topic))
        size_bytes = _RECORD_OVERHEAD if value is None else _RECORD_OVERHEAD + len(value)
        options = None
        if headers is not None or timestamp is not None or partition is not None:
            options = _checked_options(headers, timestamp, partition)
            if partition is not None and partition >= self._topics[topic].partition_count:
                raise _no_partition(topic, partition, self._topics[topic].partition_count)
        # What is wrong with a record is told here: further on it would fail those that share its batch.
        if key is None and chunk.needs_keys:
            raise require_a_key(0)
        if (
            size_bytes > chunk.surely_fits
            or (key is not None and len(key) > chunk.surely_fits)
            or (headers is not None and _header_bytes(options) > chunk.surely_fits)
        ):
            self._check_size(topic, value, key, options)
        number = chunk.number()
        if options is not None:
            chunk.noted[number] = options
        chunk.add((number, value, key))
        chunk.room = room = chunk.room - size_bytes
        if room <= 0 or chunk.sealed:
            return self._send_sealed(chunk, number, value, key)
        return Delivery(chunk, number)

    def _check_size(self, topic: str, value: bytes | None, key: bytes | None, options: Options | None) -> None:
        """Raise `RecordTooLarge` for a record that no batch of the topic holds."""
        headers = options[0] if options is not None else None
        columns = Columns([value], None if key is None else [key], None, None if headers is None else [headers])
        with self._mutex:
            self._check_topic(topic)
        check_size(columns, self._topics[topic].config)

    def _send_sealed(self, chunk: Chunk, number: int, value: bytes | None, key: bytes | None) -> Delivery:
        """Seal a chunk that is full, or go on to the next one when it was taken without this record; send."""
        with self._mutex:
            if chunk.taken and not chunk.has_taken(number):
                late = chunk
                chunk = self._begin_locked(late.topic)
                options, number = late.noted.get(number), chunk.number()
                if options is not None:
                    chunk.noted[number] = options
                chunk.add((number, value, key))
            if chunk.room <= 0:
                self._seal(chunk)
        self._send_full(chunk.topic)
        return Delivery(chunk, number)

    def _seal(self, chunk: Chunk) -> None:
        """Let a chunk go; the next record begins another one. The caller holds the mutex."""
        if not chunk.sealed:
            chunk.sealed = True
            del self._chunks[chunk.topic]
            self._full[chunk.topic].append(chunk)

    def send_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None = None,
        *,
        headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None = None,
        timestamps: Sequence[int | datetime] | npt.NDArray[Any] | None = None,
        partition: int | None = None,
    ) -> Deliveries:
        """Send a list of records at once, after what was sent before them; returns when they are appended.

        The fast path: no work in Python for each record. Raises what `Partition.append` raises; what
        goes to one partition is appended whole or not at all, whatever became of the others.
        """
        columns = check_columns(values, keys, timestamps, headers)
        check_items(columns)
        with self._mutex:
            self._check_topic(topic)
            earlier = self._chunks.get(topic)
            if earlier is not None:
                self._seal(earlier)
            chunk = Chunk(self, topic, 0)
            chunk.sealed = True
            chunk.values = list(columns.values)
            chunk.keys = [] if columns.keys is None else list(columns.keys)
            chunk.all_headers = columns.headers
            chunk.all_timestamps = columns.timestamps
            chunk.all_partition = None if partition is None else as_partition(partition)
            self._full[topic].append(chunk)
        self._send_full(topic)
        chunk.wait(None)
        if chunk.error is not None:
            if self._failure is chunk.error:  # told now; an earlier one's failure is still to be
                self._failure = None
            raise chunk.error
        return Deliveries(chunk)

    def send_encoded(self, topic: str, partition: int, batches: Sequence[EncodedBatch]) -> int:
        """Append finished batches that were encoded elsewhere, behind what was sent before; the first one's offset.

        All of them at once, or none; they are used up by it. Raises what `Partition.append` raises.
        """
        with self._mutex:
            self._check_topic(topic)
        self.flush()
        log = self._all_topics.open_partition(topic, partition)
        with self._senders[topic]:
            if self._identity is None:
                return log.append_batches(batches, self._ack)
            try:
                with self._identity.sending(topic, [partition]):
                    return self._identity.append_batches(log, batches, self._ack)
            except Exception as error:
                self._identity.note_failure(error)
                raise

    def _begin(self, topic: str) -> Chunk:
        """The chunk that takes records of a topic now."""
        with self._mutex:
            return self._begin_locked(topic)

    def _begin_locked(self, topic: str) -> Chunk:
        self._check_topic(topic)
        chunk = self._chunks.get(topic)
        if chunk is None:
            chunk = self._chunks[topic] = Chunk(self, topic, self._chunk_bytes(topic))
            config = self._topics[topic].config
            chunk.surely_fits, chunk.needs_keys = config.max_message_bytes // 4, config.compacts
            if self._lingerer is not None:
                self._lingerer.ensure_running()
                if self._lingerer_sleeps:  # else it comes by in time: this chunk is due after those it knows of
                    self._lingerer_sleeps, self._lingerer.has_work = False, True
                    self._lingerer.wake()
        return chunk

    def _chunk_bytes(self, topic: str) -> int:
        """How much the topic's next chunk takes: enough that each partition's share is worth an append."""
        if not self._linger_ns:
            return 0
        spread_bytes = min(self._batch_size * self._spread.get(topic, 1), _SPREAD_CHUNK_MAX_BYTES)
        return max(self._batch_size, spread_bytes)

    def _check_topic(self, topic: str) -> None:
        if self._closed:
            raise StoreClosed("producer")
        if topic.__class__ is not str:
            topic = check_topic_name(topic)
        if topic not in self._full:
            check_topic_name(topic)  # what is in the store's own topics is not for everybody to write
            self._topics[topic] = self._all_topics.topic(topic)  # raises for one that does not exist
            self._senders[topic] = forks.lock_of_a_moment()  # they are dropped with the dict
            self._full[topic] = deque()  # last: an interrupt leaves no topic that is known by half

    def _send_full(self, topic: str) -> None:
        """Send what is full, oldest first: whoever gets the topic's lock sends for all."""
        waiting = self._full[topic]
        while waiting:
            with self._senders[topic]:
                try:
                    chunk = waiting[0]  # it stays there until it is finished: an interrupt must not lose it
                except IndexError:
                    return
                try:
                    with self._mutex:
                        chunk.take()
                    if chunk.values and not chunk.is_sent:
                        self._send(chunk)
                    chunk.finish(chunk.error)
                    waiting.popleft()
                except Exception as error:
                    if not chunk.is_sent:
                        chunk.finish(error)
                    if waiting and waiting[0] is chunk:
                        waiting.popleft()
                    if self._failure is None:
                        self._failure = error
                    if self._identity is not None:
                        self._identity.note_failure(error)
                    if not isinstance(error, SegmentlogError | OSError):
                        raise
                except BaseException:
                    # Under the same numbers it is appended once, whatever was interrupted; without numbers, who knows?
                    if self._identity is None and not chunk.is_sent:
                        why = "what was sending it was interrupted: it may or may not be appended; look in the log"
                        chunk.finish(SegmentlogError(why))
                    raise

    # ------------------------------------------------------------ where records go

    def _send(self, chunk: Chunk) -> None:
        """Append a chunk's records to their partitions."""
        topic = self._topics[chunk.topic]
        partitions, count = chunk.given_places()
        if partitions is None:  # else it was interrupted: what is in its place already is not to go elsewhere
            try:
                count = topic.partition_count  # it may have grown
            except UnknownTopic:  # or been deleted and made anew: records are sent to names
                topic = self._topics[chunk.topic] = self._all_topics.topic(chunk.topic)
                count = topic.partition_count
            partitions = self._partitions_of(chunk, count)
        total = len(partitions)
        counts = np.bincount(partitions, minlength=count)
        numbers = counts.nonzero()[0].tolist()
        self._spread[chunk.topic] = len(numbers)
        if len(numbers) <= 1:
            chunk.placed(partitions, None)
            rows_of: dict[int, list[int] | None] = dict.fromkeys(numbers)
        else:
            order = np.argsort(partitions, kind="stable")
            starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
            ranks = np.empty(total, np.int64)
            ranks[order] = np.arange(total) - np.repeat(starts, counts)
            chunk.placed(partitions, ranks)
            rows_of = {number: order[starts[number] : starts[number] + counts[number]].tolist() for number in numbers}
        if self._identity is None or not self._identity.has_transactions:
            self._append_all(topic, chunk, rows_of)
        else:
            with self._identity.sending(chunk.topic, numbers):
                self._append_all(topic, chunk, rows_of)

    def _append_all(self, topic: Topic, chunk: Chunk, rows_of: dict[int, list[int] | None]) -> None:
        first: Exception | None = None
        for number, rows in rows_of.items():
            try:
                log = chunk.logs[number] = topic.partition(number)
                if number not in chunk.base_offsets:
                    chunk.base_offsets[number] = self._append(log, chunk, rows)
            except RecordTooLarge as error:
                index = error.index if rows is None else rows[error.index]
                first = first or RecordTooLarge(error.size_bytes, error.limit_bytes, index)
            except (SegmentlogError, OSError) as error:
                first = first or error
        if first is not None:
            raise first

    def _append(self, log: Partition, chunk: Chunk, rows: list[int] | None) -> int:
        values, keys = chunk.values, chunk.keys
        timestamps, headers = chunk.timestamp_column(), chunk.header_column()
        if rows is not None:
            values = list(map(values.__getitem__, rows))
            keys = list(map(keys.__getitem__, rows)) if keys else keys
            timestamps = None if timestamps is None else timestamps[rows]
            headers = None if headers is None else list(map(headers.__getitem__, rows))
        columns = Columns(values, keys or None, timestamps, headers)
        if self._identity is not None:
            return self._identity.append(log, columns, self._ack, chunk.begun_ms)
        return log.append_columns(columns, self._ack, chunk.begun_ms)

    def _partitions_of(self, chunk: Chunk, count: int) -> npt.NDArray[np.int32]:
        """The partition of each record: as it says, else by its key, else the one whose turn it is."""
        sticky = self._sticky.get(chunk.topic, -1) + 1
        if sticky >= count:
            sticky = 0
        self._sticky[chunk.topic] = sticky
        total = len(chunk.values)
        if chunk.all_partition is not None:
            if chunk.all_partition >= count:
                raise _no_partition(chunk.topic, chunk.all_partition, count)
            return np.full(total, chunk.all_partition, np.int32)
        if count == 1 or not chunk.keys:
            partitions = np.full(total, sticky, np.int32)
        else:
            partitions = self._partitioner.partitions(chunk.keys, count, sticky)
        for row, number in chunk.partitions.items():
            if number >= count:
                raise _no_partition(chunk.topic, number, count)
            partitions[row] = number
        return partitions

    # ------------------------------------------------------------ lingering, flushing, closing

    def linger_tick(self) -> float:
        """Send the chunks that have waited long enough; returns the seconds until the next one will have."""
        now_ns = time.monotonic_ns()
        due: list[str] = []
        pause_ns = 3600 * 10**9
        with self._mutex:
            for topic, chunk in list(self._chunks.items()):
                rest_ns = chunk.begun_ns + self._linger_ns - now_ns
                if rest_ns <= 0:
                    due.append(topic)
                    self._seal(chunk)
                else:
                    pause_ns = min(pause_ns, rest_ns)
            self._lingerer_sleeps = not self._chunks
            if self._lingerer is not None:
                self._lingerer.has_work = not self._lingerer_sleeps
        for topic in due:
            self._send_full(topic)
        return pause_ns / 1e9

    def send_if_nobody_else_does(self, chunk: Chunk) -> None:
        """Somebody waits for this chunk, and no thread watches how long it lingers: send it now."""
        if self._lingerer is None or not self._lingerer.is_running:
            with self._mutex:
                self._seal(chunk)
            self._send_full(chunk.topic)

    def wait_for(self, chunk: Chunk, timeout_s: float | None) -> bool:
        """Wait for a chunk to be sent; False when it was not in time."""
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _LOOK_AGAIN_S if ends_s is None else min(ends_s - time.monotonic(), _LOOK_AGAIN_S)
            if self._told.wait_for(lambda: chunk.is_sent, left_s):
                return True
            if ends_s is not None and time.monotonic() >= ends_s:
                return False
            self.send_if_nobody_else_does(chunk)  # the thread that was to do it may have come to an end

    def tell_waiting(self) -> None:
        """A chunk was sent, or failed."""
        if self._told.anybody:
            self._told.tell()

    def flush(self) -> None:
        """Append everything that was sent so far. Raises the first failure that nobody was told of yet.

        With ``ack="durable"`` it is on disk when this returns.
        """
        with self._mutex:
            topics = list(self._full)
            for topic in topics:
                if topic in self._chunks:
                    self._seal(self._chunks[topic])
        for topic in topics:
            self._send_full(topic)
            with self._senders[topic]:
                pass  # another thread may still be sending what it took
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

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
        log = self._all_topics.topic(topic).partition(partition)
        return -1 if self._identity is None else self._identity.last_number(log)

    def note_resume(self, topic: str, partitions: int) -> int:
        """How many partitions a topic had when this name first asked, for who spreads records over them by counting."""
        return self._idempotent("note_resume").note_resume(topic, partitions)

    @property
    def last_note(self) -> str | None:
        """The note of the last transaction that was committed under this name, by whatever instance; None without."""
        return None if self._identity is None else self._identity.last_note

    @contextlib.contextmanager
    def transaction(self, note: str | None = None) -> Iterator[Producer]:
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
            with contextlib.suppress(SegmentlogError, OSError):  # the first reason is the one to tell
                self.abort_transaction()
            raise
        self.commit_transaction(note)

    def begin_transaction(self) -> None:
        """Begin a transaction by hand; `transaction` is the easier way."""
        identity = self._idempotent("a transaction")
        if self._closed:
            raise StoreClosed("producer")
        identity.prepare()
        self.flush()
        identity.begin()

    def commit_transaction(self, note: str | None = None) -> None:
        """Send what is left, and commit: durable when it returns. See `transaction` for what it raises."""
        identity = self._idempotent("a transaction")
        identity.check_open()
        _check_note(note)
        try:
            self.flush()
            identity.sync_data()
        except (SegmentlogError, OSError) as error:
            if isinstance(error, ProducerFenced):
                identity.drop()
                raise
            with contextlib.suppress(
                SegmentlogError, OSError
            ):  # a full disk, say: what is not decided is not committed
                self.abort_transaction()
            raise TransactionAborted(identity.label, str(error)) from error
        identity.commit(note)

    def abort_transaction(self) -> None:
        """Take back everything that was sent in the transaction."""
        identity = self._idempotent("a transaction")
        identity.check_open()
        with contextlib.suppress(SegmentlogError, OSError):
            self.flush()  # so that nothing of it comes later
        identity.abort()

    def commit_positions(
        self, consumer: CommitsPositions, positions: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> None:
        """Commit a group member's positions with the transaction: consume, transform and produce, exactly once.

        ``positions`` are offsets by (topic, partition); default: behind the last record handed
        out, of every partition. Raises `ConsumerFenced` when one belongs to another member by now.
        """
        identity = self._idempotent("a transaction")
        identity.check_open()
        with consumer.committing(positions, metadata=metadata) as (keys, values):
            if keys:
                log = self._make_positions()
                with identity.sending(OFFSETS_TOPIC, [0]):
                    identity.append(log, Columns(values, keys, None, None), None, None)

    def _idempotent(self, what: str) -> Identity:
        if self._identity is None:
            raise InvalidConfig("enable_idempotence", False, f"True for {what}")
        return self._identity

    @property
    def unsent_count(self) -> int:
        """Records that were sent and are not appended yet, as nearly as can be told while others send."""
        waiting = [*self._chunks.values(), *(chunk for chunks in self._full.values() for chunk in chunks)]
        return sum(chunk.record_count for chunk in waiting if not chunk.is_sent)

    def __del__(self) -> None:
        # Whatever thread comes by runs this, at any point and with any lock held: the store flushes it, later.
        if getattr(self, "_ended", True) or self._made_in != forks.generation():
            return
        unsent_count = self.unsent_count
        if unsent_count:
            self._on_dropped(self)
            text = f"a producer was dropped before {unsent_count} of its records were appended: flush or close it"
            warnings.warn(text, ResourceWarning, stacklevel=1, source=self)

    def close(self) -> None:
        """Flush, and take no more records. An open transaction is aborted. Idempotent."""
        if self._ended:
            return
        with self._mutex:
            self._closed = True  # before the flush: a chunk begun after it would be sent by nobody
        try:
            self.flush()
            if self._identity is not None and self._identity.in_transaction:
                self._identity.abort()
        finally:
            if self._lingerer is not None:
                self._lingerer.stop()
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


def _no_partition(topic: str, number: int, count: int) -> UnknownTopic:
    return UnknownTopic(topic, f"it has no partition {number}, only 0 to {count - 1}")


def _as_bytes(column: str, blob: Any) -> bytes | None:
    if blob is None or isinstance(blob, bytes):
        return blob
    if isinstance(blob, bytearray | memoryview):
        return bytes(blob)
    hint = " (encode it first: .encode())" if isinstance(blob, str) else ""
    raise InvalidRecord(column, 0, type(blob).__name__, f"bytes or None{hint}")
