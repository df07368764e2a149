"""From a user's calls to appends: chunks fill, are sealed when they are full or have lingered, and are sent in order.

Whoever seals a chunk sends it, or leaves it to the thread that is sending the topic's chunks already.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from segmentlog.codecs import is_about_data
from segmentlog.errors import SegmentlogError, StoreClosed
from segmentlog.format.file_names import check_topic_name
from segmentlog.producing.delivery import Chunk
from segmentlog.producing.partition_dispatch import Spreader
from segmentlog.producing.producer_options import ProducerOptions
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.storage.interrupt_safe import InterruptSafeCondition
from segmentlog.topics.background_threads import Worker
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.producer_identity import ProducerIdentity

if TYPE_CHECKING:
    import threading

    from segmentlog.config import TopicConfig

_LOOK_AGAIN_S = 1.0
_SPREAD_CHUNK_MAX_BYTES = 8 << 20
"""A chunk for a thousand partitions is no larger: what may wait in memory, twice of it while one is being sent."""


class Hooks(Protocol):
    """What is done elsewhere than in the thread that sends."""

    def begun(self) -> None:
        """A chunk begins to linger; whoever takes a record is in this. May raise: then it does not begin."""

    def sealed(self, topic: str) -> None:
        """There are chunks of a topic to send, by `Pump.send_full`."""

    def told(self) -> None:
        """A chunk was sent, or failed."""


class Pump:
    """Takes a producer's records in chunks, one a topic, and sends them. Thread-safe; one lock a topic for sending."""

    def __init__(
        self, topics: Topics, identity: ProducerIdentity | None, options: ProducerOptions, *, background: bool
    ) -> None:
        self.is_closed = False
        """Takes no more records; what it has may still be sent."""
        self.chunks: dict[str, Chunk] = {}
        """By topic: the one that takes records now."""
        self.senders: dict[str, threading.Lock] = {}
        """By topic: held by whoever appends to it, so that records keep their order."""
        self.failure: Exception | None = None
        """What nobody was told of yet."""
        self._unreported: dict[str, list[Exception]] = {}
        """By topic: the failures that kept records from being appended, each until a call of the user raises it."""
        self._spreader = Spreader(topics, identity, options.partitioner, options.ack)
        self.topics = self._spreader.topics
        self._full: dict[str, deque[Chunk]] = {}
        self._all_topics = topics
        self._identity = identity
        self._linger_ns = int(options.linger_ms * 1e6)
        self._batch_size = options.batch_size
        self._mutex = fork_safety.lock(self, "_mutex")
        self._told = InterruptSafeCondition()
        self.hooks: Hooks | None = None
        """Of a producer that does not send by itself, nor waits for what is sent."""
        self._lingerer = Worker("linger", self.linger_tick) if background and options.linger_ms else None
        self._lingerer_sleeps = True
        fork_safety.on_fork(self, "_forget_sent")

    def _forget_sent(self) -> None:
        """In a forked child: what was sent before the fork is the parent's to append."""
        for known in (self.chunks, self._full, self.senders, self.topics, self._unreported):
            known.clear()
        self.failure = None
        self._told = InterruptSafeCondition()
        self._lingerer_sleeps = True

    # ------------------------------------------------------------ filling

    def begin(self, topic: str, producer: object) -> Chunk:
        """The chunk that takes records of a topic now. Raises `UnknownTopic`, `InvalidTopicName`, `StoreClosed`.

        Raises also what kept earlier records of the topic from being appended, unless another call has raised it.
        """
        with self._mutex:
            return self._begin_locked(topic, producer)

    def _begin_locked(self, topic: str, producer: object) -> Chunk:
        self._check_topic(topic)
        chunk = self.chunks.get(topic)
        if chunk is None:
            self._raise_unreported_locked(topic)
            config = self.config_of(topic)
            if self.hooks is not None:
                self.hooks.begun()
            chunk = Chunk(self, producer, topic, self._chunk_bytes(topic), self._all_topics.clock.now_ms())
            chunk.surely_fits, chunk.needs_keys = config.max_message_bytes // 4, config.compacts
            self.chunks[topic] = chunk  # last: what takes records knows what it takes
            if self._lingerer is not None:
                self._lingerer.ensure_running()
                if self._lingerer_sleeps:  # else it comes by in time: this chunk is due after those it knows of
                    self._lingerer_sleeps, self._lingerer.has_work = False, True
                    self._lingerer.wake()
        return chunk

    def _raise_unreported_locked(self, topic: str) -> None:
        """Raise what kept earlier records of a topic from being appended, unless a call has raised it."""
        if unreported := self._unreported.pop(topic, None):
            raise unreported[0]

    def _chunk_bytes(self, topic: str) -> int:
        """How much the topic's next chunk takes: enough that each partition's share is worth an append."""
        if not self._linger_ns:
            return 0
        spread_bytes = min(self._batch_size * self._spreader.spread_over.get(topic, 1), _SPREAD_CHUNK_MAX_BYTES)
        return max(self._batch_size, spread_bytes)

    def config_of(self, topic: str) -> TopicConfig:
        """The configuration of a topic that is known. Raises `UnknownTopic` once nothing has its name."""
        return self._spreader.ask(topic, lambda known: known.config)

    def partition_count(self, topic: str) -> int:
        """How many partitions it has, likewise."""
        return self._spreader.ask(topic, lambda known: known.partition_count)

    def check_topic(self, topic: str) -> None:
        """Know a topic that is to be sent to. Raises what `begin` does."""
        with self._mutex:
            self._check_topic(topic)

    def _check_topic(self, topic: str) -> None:
        if self.is_closed:
            raise StoreClosed("producer")
        if topic.__class__ is not str:
            topic = check_topic_name(topic)
        if topic not in self._full:
            check_topic_name(topic)  # what is in the store's own topics is not for everybody to write
            self.topics[topic] = self._all_topics.topic(topic)  # raises for one that does not exist
            self.senders[topic] = fork_safety.short_lived_lock()  # they are dropped with the dict
            self._full[topic] = deque()  # last: an interrupt leaves no topic that is known by half

    # ------------------------------------------------------------ sealing

    def send_sealed(self, chunk: Chunk, number: int, value: Any, key: Any) -> tuple[Chunk, int]:
        """Send a chunk that is full; the record that was added last goes to the next one if it was taken without it.

        The chunk that has the record, and its number there.
        """
        with self._mutex:
            if chunk.taken and not chunk.has_taken(number):
                late = chunk
                chunk = self._begin_locked(late.topic, late.producer)
                options, number = late.noted.get(number), chunk.number()
                if options is not None:
                    chunk.noted[number] = options
                chunk.add((number, value, key))
            if chunk.room <= 0:
                self._seal(chunk)
        if self.hooks is None:
            self.send_full(chunk.topic)
        else:
            self.hooks.sealed(chunk.topic)
        return chunk, number

    def send_whole(self, chunk: Chunk) -> None:
        """Send a chunk that was made as a whole, after what was sent before it; its caller looks for its ``error``.

        Raises what `begin` does; then the chunk is not sent.
        """
        topic = chunk.topic
        with self._mutex:
            self._check_topic(topic)
            self._raise_unreported_locked(topic)
            earlier = self.chunks.get(topic)
            if earlier is not None:
                self._seal(earlier)
            chunk.sealed = chunk.is_whole = True
            self._full[topic].append(chunk)
        self.send_full(topic)
        chunk.wait(None)
        if chunk.error is not None:
            self.note_reported(topic, chunk.error)
            if self.failure is not None and _reports(chunk.error, self.failure):
                # The caller raises it. `flush` still has to raise another failure that no call has raised.
                unreported = [error for errors in self._unreported.copy().values() for error in errors]
                self.failure = unreported[0] if unreported else None

    def _seal(self, chunk: Chunk) -> None:
        """Let a chunk go; the next record begins another one. The caller holds the mutex."""
        if not chunk.sealed:
            chunk.sealed = True
            del self.chunks[chunk.topic]
            self._full[chunk.topic].append(chunk)

    def linger_tick(self) -> float:
        """Send the chunks that have waited long enough; returns the seconds until the next one will have."""
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
                self.send_full(topic)
            else:
                self.hooks.sealed(topic)
        return pause_ns / 1e9

    def flush(self) -> None:
        """Append everything that was sent so far. Raises the first failure that nobody was told of yet."""
        with self._mutex:
            topics = list(self._full)
            for topic in topics:
                if topic in self.chunks:
                    self._seal(self.chunks[topic])
        for topic in topics:
            self.send_full(topic)
            with self.senders[topic]:
                pass  # another thread may still be sending what it took
        if self.failure is not None:
            self._unreported.clear()
            failure, self.failure = self.failure, None
            raise failure

    # ------------------------------------------------------------ sending

    def send_full(self, topic: str) -> None:
        """Send what is full, oldest first: whoever gets the topic's lock sends for all."""
        waiting = self._full[topic]
        while waiting:
            with self.senders[topic]:
                try:
                    chunk = waiting[0]  # it stays there until it is finished: an interrupt must not lose it
                except IndexError:
                    return
                was_sent = chunk.is_sent
                try:
                    with self._mutex:
                        chunk.take()
                    if chunk.values and not chunk.is_sent:
                        self._spreader.append(chunk)
                    chunk.finish(chunk.error)
                    waiting.popleft()
                except BaseException as error:
                    if was_sent or chunk.is_appended:  # no failure of it: a signal's handler has raised behind it
                        chunk.finish(chunk.error)
                        raise
                    if not isinstance(error, Exception) or is_interrupt(error):
                        # Under the same numbers it is appended once, whatever came; without numbers, who knows?
                        if self._identity is None and not chunk.is_sent:
                            why = "what was sending it was interrupted: it may or may not be appended; look in the log"
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

    def _withhold_later(self, chunk: Chunk, error: Exception) -> None:
        """Withhold what was sent after a chunk that failed from the partitions that the chunk is missing in.

        A call raises the failure later than it happens. The records that were sent by then fail as well, so that the
        user can send all of them again in their order. Seals the chunk that takes records now. The next `send` raises.

        Those records and `send` get the error of the failed chunk. If it is about a record or a key, they get a
        `SegmentlogError` with that error as its cause.
        """
        if chunk.is_whole:  # the caller of `send_many` waits for it and has sent nothing after it
            return
        missing = chunk.not_appended(error)
        reasons = {partition: reason for partition, reason in missing.items() if partition not in chunk.withheld}
        if not reasons:
            return
        told = {id(reason): _of_earlier_records(chunk.topic, reason) for reason in reasons.values()}
        fresh = {partition: told[id(reason)] for partition, reason in reasons.items()}
        with self._mutex:
            self._unreported.setdefault(chunk.topic, []).extend(told.values())
            filling = self.chunks.get(chunk.topic)
            if filling is not None:
                self._seal(filling)
            for later in self._full[chunk.topic]:
                if later is not chunk:
                    later.withheld = {**fresh, **later.withheld}
                    if chunk.sticky in fresh:  # records without a key have their order, too
                        later.sticky = chunk.sticky

    def note_reported(self, topic: str, error: Exception) -> None:
        """A call raises ``error``, which kept records of a topic from being appended: `send` need not raise it."""
        unreported = self._unreported.get(topic, [])  # without a lock: a signal's handler may call this
        for known in unreported[:]:
            if _reports(error, known):
                with contextlib.suppress(ValueError):  # another thread has removed it
                    unreported.remove(known)

    # ------------------------------------------------------------ who waits for a chunk

    def send_if_nobody_else_does(self, chunk: Chunk) -> None:
        """Somebody waits for this chunk, and no thread watches how long it lingers: send it now."""
        if self._lingerer is None or not self._lingerer.is_running:
            with self._mutex:
                self._seal(chunk)
            self.send_full(chunk.topic)

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
        if self._told.has_waiters:
            self._told.notify_all()
        if self.hooks is not None:
            self.hooks.told()

    @property
    def unsent_count(self) -> int:
        """Records that were sent and are not appended yet, as nearly as can be told while others send."""
        waiting = [
            *self.chunks.copy().values(),
            *(chunk for chunks in self._full.copy().values() for chunk in list(chunks)),
        ]
        return sum(chunk.record_count for chunk in waiting if not chunk.is_sent)

    @property
    def full_bytes(self) -> int:
        """Of the chunks that are on their way, or wait for it."""
        # One that was told of counts no more, though it may not be taken off yet: who looks then looks no second time.
        waiting = (chunk for chunks in self._full.copy().values() for chunk in list(chunks))
        return sum(chunk.size_bytes for chunk in waiting if not chunk.is_sent)

    def refuse_more(self) -> None:
        """Take no more records; those that were sent can still be flushed."""
        with self._mutex:
            self.is_closed = True

    def stop(self) -> None:
        """End the thread that watches how long chunks linger."""
        if self._lingerer is not None:
            self._lingerer.stop()


def _of_earlier_records(topic: str, error: Exception) -> Exception:
    """Return what records get that were sent after those that failed: never an error about a record or a key."""
    if not is_about_data(error):
        return error
    told = SegmentlogError(
        f"topic {topic}: earlier records were not appended ({str(error) or type(error).__name__}). So this record was"
        " not appended either. Send all of them again in their order, except a record that cannot be sent"
    )
    told.__cause__ = error
    return told


def _reports(raised: Exception, failure: Exception) -> bool:
    """Whether a call that raises the first error reports the second: it is the same, or `_of_earlier_records` of it."""
    return raised is failure or raised is failure.__cause__ or raised.__cause__ is failure
