"""Create the producers and consumers of a store, with precise types for serializers and deserializers."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, overload

if TYPE_CHECKING:
    from segmentlog.codecs import Deserializer, Serializer
    from segmentlog.consuming.async_consumer import AsyncConsumer
    from segmentlog.consuming.consumer import Consumer, OffsetReset, OnBad, OnError, Rebalanced, Start
    from segmentlog.consuming.consumer_options import AsyncConsumerKeywords, ConsumerKeywords, ConsumerOptions
    from segmentlog.groups.group_admin import Groups
    from segmentlog.log.partition import Ack, Isolation, Partition
    from segmentlog.policy.assignment import Strategy
    from segmentlog.policy.partitioner import Partitioner
    from segmentlog.producing.async_producer import AsyncProducer
    from segmentlog.producing.producer import Producer
    from segmentlog.producing.producer_options import ProducerKeywords
    from segmentlog.producing.producer_registry import ProducerRegistry
    from segmentlog.topics.topic_registry import Topics
    from segmentlog.tracing import Tracing
    from segmentlog.transactions.transaction_coordinator import Transactions

Key = TypeVar("Key")
Value = TypeVar("Value")
C = TypeVar("C", bound="Consumer[Any, Any]")

MAX_UNSENT_BYTES: Final = 8 << 20
"""Default of ``max_unsent_bytes`` of an `AsyncProducer`."""


class Clients:
    """The part of `segmentlog.LogStore` that creates producers and consumers."""

    _topics: Topics
    _mutex: threading.RLock
    _producers: ProducerRegistry | None = None
    _members: weakref.WeakSet[Consumer[Any, Any]]
    """Consumers that are members of groups; they leave when the store is closed."""

    if TYPE_CHECKING:

        @property
        def transactions(self) -> Transactions: ...
        @property
        def groups(self) -> Groups: ...
        def finish_transactions(self) -> float: ...
        def _create_offsets_log(self) -> Partition: ...

    @overload
    def producer(
        self, *, serializer: None = None, key_serializer: None = None, **options: Unpack[ProducerKeywords]
    ) -> Producer: ...
    @overload
    def producer(
        self, *, serializer: Serializer[Value], key_serializer: None = None, **options: Unpack[ProducerKeywords]
    ) -> Producer[bytes | None, Value | None]: ...
    @overload
    def producer(
        self, *, serializer: None = None, key_serializer: Serializer[Key], **options: Unpack[ProducerKeywords]
    ) -> Producer[Key | None, bytes | None]: ...
    @overload
    def producer(
        self, *, serializer: Serializer[Value], key_serializer: Serializer[Key], **options: Unpack[ProducerKeywords]
    ) -> Producer[Key | None, Value | None]: ...
    def producer(
        self,
        *,
        linger_ms: float = 5,
        batch_size: int = 256 * 1024,
        partitioner: Partitioner | None = None,
        ack: Ack | None = None,
        name: str | None = None,
        enable_idempotence: bool = True,
        transaction_timeout_ms: int = 60_000,
        serializer: Serializer[Any] | None = None,
        key_serializer: Serializer[Any] | None = None,
        tracing: Tracing = "auto",
    ) -> Producer[Any, Any]:
        """Create a producer, which gathers records into batches; see `Producer`."""
        self._topics.check_writable("produce")
        from segmentlog.producing.producer_options import ProducerOptions

        options = ProducerOptions(
            linger_ms=linger_ms, batch_size=batch_size, partitioner=partitioner, ack=ack, name=name,
            enable_idempotence=enable_idempotence, transaction_timeout_ms=transaction_timeout_ms,
            serializer=serializer, key_serializer=key_serializer, tracing=tracing,
        )  # fmt: skip
        return self._all_producers().create(options)

    def _all_producers(self) -> ProducerRegistry:
        if self._producers is None:
            from segmentlog.producing.producer_registry import ProducerRegistry

            with self._mutex:
                self._producers = self._producers or ProducerRegistry(
                    self._topics, self.transactions, self._create_offsets_log
                )
        return self._producers

    @overload
    def consumer(
        self,
        *topics: str | tuple[str, int],
        deserializer: None = None,
        key_deserializer: None = None,
        **options: Unpack[ConsumerKeywords],
    ) -> Consumer: ...
    @overload
    def consumer(
        self,
        *topics: str | tuple[str, int],
        deserializer: Deserializer[Value],
        key_deserializer: None = None,
        **options: Unpack[ConsumerKeywords],
    ) -> Consumer[bytes | None, Value]: ...
    @overload
    def consumer(
        self,
        *topics: str | tuple[str, int],
        deserializer: None = None,
        key_deserializer: Deserializer[Key],
        **options: Unpack[ConsumerKeywords],
    ) -> Consumer[Key, bytes | None]: ...
    @overload
    def consumer(
        self,
        *topics: str | tuple[str, int],
        deserializer: Deserializer[Value],
        key_deserializer: Deserializer[Key],
        **options: Unpack[ConsumerKeywords],
    ) -> Consumer[Key, Value]: ...
    def consumer(
        self,
        *topics: str | tuple[str, int],
        start: Start = "earliest",
        follow: bool = False,
        isolation: Isolation = "read_uncommitted",
        durable_only: bool = False,
        shipped_only: bool = False,
        fetch_bytes: int = 1 << 20,
        skip_damaged: bool = False,
        auto_offset_reset: OffsetReset | None = None,
        group: str | None = None,
        auto_commit: bool = False,
        auto_commit_interval_ms: int = 5000,
        assignment_strategy: Strategy = "sticky",
        max_poll_interval_ms: int = 300_000,
        max_poll_records: int = 500,
        client_id: str = "",
        on_assigned: Rebalanced | None = None,
        on_revoked: Rebalanced | None = None,
        on_lost: Rebalanced | None = None,
        deserializer: Deserializer[Any] | None = None,
        key_deserializer: Deserializer[Any] | None = None,
        on_error: OnError | None = None,
        on_bad: OnBad | None = None,
    ) -> Consumer[Any, Any]:
        """Create a consumer of topics, partitions or patterns, alone or as a member of a group; see `Consumer`."""
        from segmentlog.consuming.consumer import Consumer, ConsumerOptions

        self._topics.check_open()
        options = ConsumerOptions(
            start=start, follow=follow, isolation=isolation, durable_only=durable_only,
            shipped_only=shipped_only, fetch_bytes=fetch_bytes,
            skip_damaged=skip_damaged, auto_offset_reset=auto_offset_reset, group=group, auto_commit=auto_commit,
            auto_commit_interval_ms=auto_commit_interval_ms, assignment_strategy=assignment_strategy,
            max_poll_interval_ms=max_poll_interval_ms, max_poll_records=max_poll_records, client_id=client_id,
            on_assigned=on_assigned, on_revoked=on_revoked, on_lost=on_lost,
            deserializer=deserializer, key_deserializer=key_deserializer, on_error=on_error, on_bad=on_bad,
        )  # fmt: skip
        return self._create_consumer(Consumer, topics, options)

    def _create_consumer(self, cls: type[C], topics: tuple[str | tuple[str, int], ...], options: ConsumerOptions) -> C:
        groups = None if options.group is None else self.groups
        consumer = cls(self._topics, topics, options, groups=groups, finish_transactions=self.finish_transactions)
        if groups is not None:
            self._members.add(consumer)
        return consumer

    # ------------------------------------------------------------ for asyncio

    @overload
    def aproducer(
        self, *, max_unsent_bytes: int = MAX_UNSENT_BYTES, serializer: None = None, key_serializer: None = None,
        **options: Unpack[ProducerKeywords],
    ) -> AsyncProducer: ...  # fmt: skip
    @overload
    def aproducer(
        self, *, max_unsent_bytes: int = MAX_UNSENT_BYTES, serializer: Serializer[Value], key_serializer: None = None,
        **options: Unpack[ProducerKeywords],
    ) -> AsyncProducer[bytes | None, Value | None]: ...  # fmt: skip
    @overload
    def aproducer(
        self, *, max_unsent_bytes: int = MAX_UNSENT_BYTES, serializer: None = None, key_serializer: Serializer[Key],
        **options: Unpack[ProducerKeywords],
    ) -> AsyncProducer[Key | None, bytes | None]: ...  # fmt: skip
    @overload
    def aproducer(
        self, *, max_unsent_bytes: int = MAX_UNSENT_BYTES, serializer: Serializer[Value],
        key_serializer: Serializer[Key], **options: Unpack[ProducerKeywords],
    ) -> AsyncProducer[Key | None, Value | None]: ...  # fmt: skip
    def aproducer(self, *, max_unsent_bytes: int = MAX_UNSENT_BYTES, **options: Any) -> AsyncProducer[Any, Any]:
        """Create a producer for asyncio with the options of `producer`; see `AsyncProducer`. Use ``async with``."""
        self._topics.check_writable("produce")
        from segmentlog.arguments import as_int
        from segmentlog.producing.async_producer import AsyncProducer
        from segmentlog.producing.producer_options import ProducerOptions

        max_unsent_bytes = as_int("max_unsent_bytes", max_unsent_bytes, 1, expected="a number of bytes, at least 1")
        checked = ProducerOptions(**options)
        return AsyncProducer(
            lambda: self._all_producers().create_event_loop_producer(checked), checked.linger_ms, max_unsent_bytes
        )

    @overload
    def aconsumer(
        self, *topics: str | tuple[str, int], deserializer: None = None, key_deserializer: None = None,
        **options: Unpack[AsyncConsumerKeywords],
    ) -> AsyncConsumer: ...  # fmt: skip
    @overload
    def aconsumer(
        self, *topics: str | tuple[str, int], deserializer: Deserializer[Value], key_deserializer: None = None,
        **options: Unpack[AsyncConsumerKeywords],
    ) -> AsyncConsumer[bytes | None, Value]: ...  # fmt: skip
    @overload
    def aconsumer(
        self, *topics: str | tuple[str, int], deserializer: None = None, key_deserializer: Deserializer[Key],
        **options: Unpack[AsyncConsumerKeywords],
    ) -> AsyncConsumer[Key, bytes | None]: ...  # fmt: skip
    @overload
    def aconsumer(
        self, *topics: str | tuple[str, int], deserializer: Deserializer[Value], key_deserializer: Deserializer[Key],
        **options: Unpack[AsyncConsumerKeywords],
    ) -> AsyncConsumer[Key, Value]: ...  # fmt: skip
    def aconsumer(self, *topics: str | tuple[str, int], **options: Any) -> AsyncConsumer[Any, Any]:
        """Create a consumer for asyncio with the options of `consumer`; see `AsyncConsumer`. Use ``async with``."""
        self._topics.check_open()
        from segmentlog.aio.loop_callbacks import Callbacks
        from segmentlog.consuming.async_consumer import AsyncConsumer
        from segmentlog.consuming.consumer_options import ConsumerOptions
        from segmentlog.consuming.nonblocking_consumer import NonblockingConsumer

        callbacks = Callbacks()
        for name in ("on_assigned", "on_revoked", "on_lost"):
            if callable(options.get(name)):
                options[name] = callbacks.wrap(options[name])
        checked = ConsumerOptions(**options)
        return AsyncConsumer(lambda: self._create_consumer(NonblockingConsumer, topics, checked), callbacks)
