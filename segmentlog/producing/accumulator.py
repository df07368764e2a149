"""Gather records in chunks, seal chunks that are full or have lingered, and send them in order.

The thread that seals a chunk also sends it, unless another thread is already sending chunks of the topic: then that
thread sends it, too.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from segmentlog.codecs import is_about_data
from segmentlog.errors import SegmentlogError, StoreClosed
from segmentlog.format.file_names import check_topic_name
from segmentlog.producing.delivery import ProducerChunk
from segmentlog.producing.partition_dispatch import PartitionDispatcher
from segmentlog.producing.producer_options import ProducerOptions
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.storage.interrupt_safe import InterruptSafeCondition
from segmentlog.topics.background_threads import BackgroundThread
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.producer_identity import ProducerIdentity

if TYPE_CHECKING:
    import threading

    from segmentlog.config import TopicConfig

_CHECK_S = 1.0
_SPREAD_CHUNK_MAX_BYTES = 8 << 20
"""Maximum size of a chunk for many partitions. Two such chunks can be in memory: one is sent while the next fills."""


class AccumulatorHooks(Protocol):
    """Callbacks that a producer sets if other threads send its chunks."""

    def on_chunk_started(self) -> None:
        """Prepare for a new chunk, in the thread that adds its first record. An exception prevents the chunk."""

    def on_sealed(self, topic: str) -> None:
        """Schedule a call of `Accumulator.send_queued` for the topic, one of whose chunks was sealed."""

    def on_sent(self) -> None:
        """React to a chunk that was sent or has failed."""


class Accumulator:
    """Gathers a producer's records in one chunk per topic, and sends them. Thread-safe; each topic has a send lock."""

    def __init__(
        self, topics: Topics, identity: ProducerIdentity | None, options: ProducerOptions, *, background: bool
    ) -> None:
        self.is_closed = False
        """Whether new records are rejected; records sent before can still be flushed."""
        self.chunks: dict[str, ProducerChunk] = {}
        """By topic: the chunk to which `send` adds records."""
        self.senders: dict[str, threading.Lock] = {}
        """By topic: the lock for appending, so that records keep their order."""
        self.failure: Exception | None = None
        """First failure that no call has raised yet."""
        self._unreported: dict[str, list[Exception]] = {}
        """By topic: errors because of which records were not appended, and which no call of the user has raised yet."""
        self._dispatcher = PartitionDispatcher(topics, identity, options.partitioner, options.ack)
        self.topics = self._dispatcher.topics
        self._queued: dict[str, deque[ProducerChunk]] = {}
        self._all_topics = topics
        self._identity = identity
        self._linger_ns = int(options.linger_ms * 1e6)
        self._batch_size = options.batch_size
        self._mutex = fork_safety.lock(self, "_mutex")
        self._sent = InterruptSafeCondition()
        self.hooks: AccumulatorHooks | None = None
        """Set if other threads send the chunks."""
        self._lingerer = BackgroundThread("linger", self.send_lingering) if background and options.linger_ms else None
        self._lingerer_sleeps = True
        fork_safety.on_fork(self, "_forget_sent")

    def _forget_sent(self) -> None:
        """In a forked child: forget records that were sent before the fork. The parent appends them."""
        for known in (self.chunks, self._queued, self.senders, self.topics, self._unreported):
            known.clear()
        self.failure = None
        self._sent = InterruptSafeCondition()
        self._lingerer_sleeps = True

    # ------------------------------------------------------------ filling

    def open_chunk(self, topic: str, producer: object) -> ProducerChunk:
        """Return the chunk to which records of a topic are added.

        Raises `UnknownTopic`, `InvalidTopicName`, `StoreClosed`, and the failure of earlier records of the topic if no
        call has raised it yet.
        """
        with self._mutex:
            return self._open_chunk_locked(topic, producer)

    def _open_chunk_locked(self, topic: str, producer: object) -> ProducerChunk:
        self._check_topic(topic)
        chunk = self.chunks.get(topic)
        if chunk is None:
            self._raise_unreported_locked(topic)
            config = self.config_of(topic)
            if self.hooks is not None:
                self.hooks.on_chunk_started()
            chunk = ProducerChunk(self, producer, topic, self._chunk_bytes(topic), self._all_topics.clock.now_ms())
            chunk.surely_fits, chunk.needs_keys = config.max_message_bytes // 4, config.compacts
            self.chunks[topic] = chunk  # last: from now on, `send` adds records to the chunk without a lock
            if self._lingerer is not None:
                self._lingerer.ensure_running()
                # If the thread waits for older chunks, it wakes up before this chunk is due.
                if self._lingerer_sleeps:
                    self._lingerer_sleeps, self._lingerer.has_work = False, True
                    self._lingerer.wake()
        return chunk

    def _raise_unreported_locked(self, topic: str) -> None:
        """Raise the failure of earlier records of a topic, unless a call has raised it."""
        if unreported := self._unreported.pop(topic, None):
            raise unreported[0]

    def _chunk_bytes(self, topic: str) -> int:
        """Return the size of the topic's next chunk.

        A chunk for many partitions is larger, so that each partition gets enough records for one append.
        """
        if not self._linger_ns:
            return 0
        spread_bytes = min(self._batch_size * self._dispatcher.spread_counts.get(topic, 1), _SPREAD_CHUNK_MAX_BYTES)
        return max(self._batch_size, spread_bytes)

    def config_of(self, topic: str) -> TopicConfig:
        """Return the configuration of a topic in use. Raises `UnknownTopic` if no topic has the name any more."""
        return self._dispatcher.query_topic(topic, lambda known: known.config)

    def partition_count(self, topic: str) -> int:
        """Return the number of partitions of a topic in use. Raises `UnknownTopic` as `config_of` does."""
        return self._dispatcher.query_topic(topic, lambda known: known.partition_count)

    def check_topic(self, topic: str) -> None:
        """Look up a topic before records are sent to it. Raises the errors of `open_chunk`."""
        with self._mutex:
            self._check_topic(topic)

    def _check_topic(self, topic: str) -> None:
        if self.is_closed:
            raise StoreClosed("producer")
        if topic.__class__ is not str:
            topic = check_topic_name(topic)
        if topic not in self._queued:
            check_topic_name(topic)  # rejects the store's internal topics
            self.topics[topic] = self._all_topics.topic(topic)  # raises if the topic does not exist
            self.senders[topic] = fork_safety.short_lived_lock()  # the locks are dropped with the dict
            self._queued[topic] = deque()  # last: after an interrupt the topic is either fully registered or unknown

    # ------------------------------------------------------------ sealing

    def send_sealed(self, chunk: ProducerChunk, number: int, value: Any, key: Any) -> tuple[ProducerChunk, int]:
        """Send a chunk that is full or sealed, after the caller has added a record to it.

        Another thread may have taken the chunk's records before that record was added. Then add the record to the next
        chunk. Return the chunk that has the record, and the record's number in that chunk.
        """
        with self._mutex:
            if chunk.taken and not chunk.has_taken(number):
                late = chunk
                chunk = self._open_chunk_locked(late.topic, late.producer)
                options, number = late.options.get(number), chunk.number()
                if options is not None:
                    chunk.options[number] = options
                chunk.add((number, value, key))
            if chunk.room <= 0:
                self._seal(chunk)
        if self.hooks is None:
            self.send_queued(chunk.topic)
        else:
            self.hooks.on_sealed(chunk.topic)
        return chunk, number

    def send_whole(self, chunk: ProducerChunk) -> None:
        """Send a chunk of `send_many` after all records sent before, and wait until it was sent or has failed.

        The caller must check ``chunk.error``. Raises the errors of `open_chunk` if the chunk cannot be sent at all.
        """
        topic = chunk.topic
        with self._mutex:
            self._check_topic(topic)
            self._raise_unreported_locked(topic)
            earlier = self.chunks.get(topic)
            if earlier is not None:
                self._seal(earlier)
            chunk.sealed = chunk.is_whole = True
            self._queued[topic].append(chunk)
        self.send_queued(topic)
        chunk.wait(None)
        if chunk.error is not None:
            self.mark_reported(topic, chunk.error)
            if self.failure is not None and _reports(chunk.error, self.failure):
                # The caller raises this failure. `flush` must still raise a failure that no call has raised.
                unreported = [error for errors in self._unreported.copy().values() for error in errors]
                self.failure = unreported[0] if unreported else None

    def _seal(self, chunk: ProducerChunk) -> None:
        """Seal a chunk, so that the next record starts a new chunk. The caller holds the mutex."""
        if not chunk.sealed:
            chunk.sealed = True
            del self.chunks[chunk.topic]
            self._queued[chunk.topic].append(chunk)

    def send_lingering(self) -> float:
        """Send the chunks that have lingered long enough; return the seconds until the next chunk is due."""
        now_ns = time.monotonic_ns()
        due: list[str] = []
        pause_ns = 3600 * 10**9
        with self._mutex:
            for topic, chunk in list(self.chunks.items()):
                rest_ns = chunk.begun_ns + self._linger_ns - now_ns
                if rest_ns <= 0:
                    due.append(topic)
                    self._seal(chunk)
                else:
                    pause_ns = min(pause_ns, rest_ns)
            self._lingerer_sleeps = not self.chunks
            if self._lingerer is not None:
                self._lingerer.has_work = not self._lingerer_sleeps
        for topic in due:
            if self.hooks is None:
                self.send_queued(topic)
            else:
                self.hooks.on_sealed(topic)
        return pause_ns / 1e9

    def flush(self) -> None:
        """Append all records sent so far. Raises the first failure that no call has raised yet."""
        with self._mutex:
            topics = list(self._queued)
            for topic in topics:
                if topic in self.chunks:
                    self._seal(self.chunks[topic])
        for topic in topics:
            self.send_queued(topic)
            with self.senders[topic]:
                pass  # wait for another thread that may be sending chunks of the topic
        if self.failure is not None:
            self._unreported.clear()
            failure, self.failure = self.failure, None
            raise failure

    # ------------------------------------------------------------ sending

    def send_queued(self, topic: str) -> None:
        """Send the sealed chunks of a topic, oldest first. The thread that gets the topic's lock sends all of them."""
        waiting = self._queued[topic]
        while waiting:
            with self.senders[topic]:
                try:
                    chunk = waiting[0]  # kept in the queue until it is finished: an interrupt must not lose it
                except IndexError:
                    return
                was_sent = chunk.is_sent
                try:
                    with self._mutex:
                        chunk.take()
                    if chunk.values and not chunk.is_sent:
                        self._dispatcher.append(chunk)
                    chunk.finish(chunk.error)
                    waiting.popleft()
                except BaseException as error:
                    if was_sent or chunk.is_appended:  # the chunk did not fail: a signal handler has raised
                        chunk.finish(chunk.error)
                        raise
                    if not isinstance(error, Exception) or is_interrupt(error):
                        # With sequence numbers, a retry appends the chunk exactly once; without them, the outcome is
                        # unknown.
                        if self._identity is None and not chunk.is_sent:
                            why = "sending was interrupted: the records may or may not be appended; check the log"
                            chunk.finish(SegmentlogError(why))
                        raise
                    if not chunk.is_sent:
                        self._withhold_later(chunk, error)
                        chunk.finish(error)
                    if waiting and waiting[0] is chunk:
                        waiting.popleft()
                    if self.failure is None:
                        self.failure = error
                    if self._identity is not None:
                        self._identity.fail_transaction(error)

    def _withhold_later(self, chunk: ProducerChunk, error: Exception) -> None:
        """Fail the records that were sent after a failed chunk to the same partitions.

        The program notices the failure only when a call raises it. Until then it may have sent more records. They fail,
        too, so that the program can send all of them again in their order. The current chunk is sealed, and the next
        `send` raises.

        These records, and `send`, get the error of the failed chunk. If that error is about a single record or key,
        they get a `SegmentlogError` with that error as its cause.
        """
        if chunk.is_whole:  # the caller of `send_many` waits for it and has sent nothing after it
            return
        missing = chunk.missing_partitions(error)
        reasons = {partition: reason for partition, reason in missing.items() if partition not in chunk.withheld}
        if not reasons:
            return
        errors = {id(reason): _error_of_later_records(chunk.topic, reason) for reason in reasons.values()}
        fresh = {partition: errors[id(reason)] for partition, reason in reasons.items()}
        with self._mutex:
            self._unreported.setdefault(chunk.topic, []).extend(errors.values())
            filling = self.chunks.get(chunk.topic)
            if filling is not None:
                self._seal(filling)
            for later in self._queued[chunk.topic]:
                if later is not chunk:
                    later.withheld = {**fresh, **later.withheld}
                    if chunk.sticky in fresh:  # keep the order of records without a key, too
                        later.sticky = chunk.sticky

    def mark_reported(self, topic: str, error: Exception) -> None:
        """Record that a call raises this failure, so that no later `send` raises it again."""
        unreported = self._unreported.get(topic, [])  # without a lock, because a signal handler may call this
        for known in unreported[:]:
            if _reports(error, known):
                with contextlib.suppress(ValueError):  # another thread has removed it
                    unreported.remove(known)

    # ------------------------------------------------------------ waiting for a chunk

    def send_unless_lingering(self, chunk: ProducerChunk) -> None:
        """Send a chunk now because a caller waits for it, unless a thread will send it when it has lingered."""
        if self._lingerer is None or not self._lingerer.is_running:
            with self._mutex:
                self._seal(chunk)
            self.send_queued(chunk.topic)

    def wait_for(self, chunk: ProducerChunk, timeout_s: float | None) -> bool:
        """Wait until a chunk was sent or has failed. Return False if ``timeout_s`` is exceeded."""
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _CHECK_S if ends_s is None else min(ends_s - time.monotonic(), _CHECK_S)
            if self._sent.wait_for(lambda: chunk.is_sent, left_s):
                return True
            if ends_s is not None and time.monotonic() >= ends_s:
                return False
            self.send_unless_lingering(chunk)  # the thread that should send the chunk may have ended

    def notify_waiting(self) -> None:
        """Wake the callers that wait for a chunk."""
        if self._sent.has_waiters:
            self._sent.notify_all()
        if self.hooks is not None:
            self.hooks.on_sent()

    @property
    def unsent_count(self) -> int:
        """Number of records that were sent but are not appended yet; approximate while other threads send."""
        waiting = [
            *self.chunks.copy().values(),
            *(chunk for chunks in self._queued.copy().values() for chunk in list(chunks)),
        ]
        return sum(chunk.record_count for chunk in waiting if not chunk.is_sent)

    @property
    def sealed_bytes(self) -> int:
        """Size of sealed chunks that are not sent yet, in bytes."""
        # A sent chunk does not count even if it is still queued: callers check only once per sent chunk.
        waiting = (chunk for chunks in self._queued.copy().values() for chunk in list(chunks))
        return sum(chunk.size_bytes for chunk in waiting if not chunk.is_sent)

    def stop_accepting(self) -> None:
        """Reject new records. Records that were sent before can still be flushed."""
        with self._mutex:
            self.is_closed = True

    def stop(self) -> None:
        """Stop the thread that sends chunks after they have lingered."""
        if self._lingerer is not None:
            self._lingerer.stop()


def _error_of_later_records(topic: str, error: Exception) -> Exception:
    """Return the error for records that were sent after failed records. It is never about a single record or key."""
    if not is_about_data(error):
        return error
    later = SegmentlogError(
        f"topic {topic}: earlier records were not appended ({str(error) or type(error).__name__}). So this record was"
        " not appended either. Send all of them again in their order, except a record that cannot be sent"
    )
    later.__cause__ = error
    return later


def _reports(raised: Exception, failure: Exception) -> bool:
    """Return whether ``raised`` reports ``failure``: they are the same, or one is the cause of the other."""
    return raised is failure or raised is failure.__cause__ or raised.__cause__ is failure
