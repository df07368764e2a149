"""Creates the producers of a store, and closes them with it, including dropped ones with unsent records."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from segmentlog.log.partition import Partition
from segmentlog.producing.async_sender import EventLoopProducer
from segmentlog.producing.producer import Producer
from segmentlog.producing.producer_options import ProducerOptions as ProducerOptions
from segmentlog.producing.serializing_producer import SerializingProducer
from segmentlog.storage import fork_safety
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.transaction_coordinator import Transactions
from segmentlog.weak_sets import members_of

P = TypeVar("P", bound=Producer[Any, Any])


class ProducerRegistry:
    """Creates and closes the producers of a store. Thread-safe."""

    def __init__(self, topics: Topics, transactions: Transactions, create_offsets_log: Callable[[], Partition]) -> None:
        self._topics = topics
        self._transactions = transactions
        self._create_offsets_log = create_offsets_log
        self._producers: weakref.WeakSet[Producer[Any, Any]] = weakref.WeakSet()
        self._dropped: deque[Producer[Any, Any]] = deque()
        """Dropped producers with unsent records. They are closed later: a finalizer must not wait for a lock."""
        fork_safety.on_fork(self, "_forget_dropped")

    def _forget_dropped(self) -> None:
        """In a forked child: forget dropped producers. The parent appends their records."""
        self._dropped.clear()

    def create(self, options: ProducerOptions) -> Producer[Any, Any]:
        """Create a producer."""
        is_plain = options.serializer is None and options.key_serializer is None and options.carrier is None
        cls: type[Producer[Any, Any]] = Producer if is_plain else SerializingProducer
        return self._register(cls, options, background=self._topics.background.has_threads)

    def create_event_loop_producer(self, options: ProducerOptions) -> EventLoopProducer:
        """Create the inner producer of an `AsyncProducer`. Pool threads send its chunks."""
        return self._register(EventLoopProducer, options, background=False)

    def _register(self, cls: type[P], options: ProducerOptions, *, background: bool) -> P:
        producer = cls(
            self._topics, self._transactions, self._create_offsets_log, options, on_dropped=self._dropped.append,
            background=background,
        )  # fmt: skip
        if isinstance(producer, SerializingProducer):
            producer.serializer, producer.key_serializer = options.serializer, options.key_serializer
            producer.carrier = options.carrier
        self._producers.add(producer)
        return producer

    @property
    def unsent_count(self) -> int:
        """Number of records of all producers that are not appended yet."""
        return sum(producer.unsent_count for producer in members_of(self._producers))

    def close_dropped(self) -> None:
        """Append the records of dropped producers, and close the producers."""
        while self._dropped:
            self._dropped.popleft().close()

    def close(self) -> Exception | None:
        """Flush and close all producers. Return the first error, with a note on unsent records."""
        first: Exception | None = None
        for producer in [*members_of(self._producers), *self._dropped]:
            unsent_count = producer.unsent_count
            try:
                producer.close()
            except Exception as error:
                name = f"producer {producer.name!r}" if producer.name else "an unnamed producer"
                error.add_note(f"the store was closed with {unsent_count} unsent records of {name}")
                first = first or error
        self._dropped.clear()
        return first
