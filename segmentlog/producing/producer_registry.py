"""The producers of a store: closed with it, also those that were dropped with records yet to append."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from segmentlog.log.partition import Partition
from segmentlog.producing.async_sender import QueueingProducer
from segmentlog.producing.producer import Producer
from segmentlog.producing.producer_options import ProducerOptions as ProducerOptions
from segmentlog.producing.serializing_producer import SerializingProducer
from segmentlog.storage import fork_safety
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.transaction_coordinator import Transactions
from segmentlog.weak_sets import members_of

P = TypeVar("P", bound=Producer[Any, Any])


class Producers:
    """Makes them, and closes them. Thread-safe."""

    def __init__(self, topics: Topics, transactions: Transactions, make_positions: Callable[[], Partition]) -> None:
        self._topics = topics
        self._transactions = transactions
        self._make_positions = make_positions
        self._there: weakref.WeakSet[Producer[Any, Any]] = weakref.WeakSet()
        self._dropped: deque[Producer[Any, Any]] = deque()
        """Those that were dropped with records yet to append: no finalizer can wait for a lock."""
        fork_safety.on_fork(self, "_forget_dropped")

    def _forget_dropped(self) -> None:
        """In a forked child: their records are the parent's to append."""
        self._dropped.clear()

    def make(self, options: ProducerOptions) -> Producer[Any, Any]:
        """A producer of these topics."""
        is_plain = options.serializer is None and options.key_serializer is None and options.carrier is None
        made: type[Producer[Any, Any]] = Producer if is_plain else SerializingProducer
        return self._keep(made, options, background=self._topics.background.has_threads)

    def make_queueing(self, options: ProducerOptions) -> QueueingProducer:
        """One that leaves sending to others: an asynchronous one's."""
        return self._keep(QueueingProducer, options, background=False)

    def _keep(self, made: type[P], options: ProducerOptions, *, background: bool) -> P:
        producer = made(
            self._topics, self._transactions, self._make_positions, options, on_dropped=self._dropped.append,
            background=background,
        )  # fmt: skip
        if isinstance(producer, SerializingProducer):
            producer.serializer, producer.key_serializer = options.serializer, options.key_serializer
            producer.carrier = options.carrier
        self._there.add(producer)
        return producer

    @property
    def unsent_count(self) -> int:
        """Records that they have yet to append."""
        return sum(producer.unsent_count for producer in members_of(self._there))

    def close_dropped(self) -> None:
        """Append what dropped ones left."""
        while self._dropped:
            self._dropped.popleft().close()

    def close(self) -> Exception | None:
        """Flush and close them all; the first error, with a note of what was left unsent."""
        first: Exception | None = None
        for producer in [*members_of(self._there), *self._dropped]:
            unsent_count = producer.unsent_count
            try:
                producer.close()
            except Exception as error:
                name = f"producer {producer.name!r}" if producer.name else "a producer without a name"
                error.add_note(f"when the store was closed, with {unsent_count} records of {name} yet to append")
                first = first or error
        self._dropped.clear()
        return first
