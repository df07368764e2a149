"""aiokafka: asyncio, and an ApiVersions request of the first version there was."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.errors import CommitFailedError, for_code
from server.clients.driver import HEARTBEAT_MS, SESSION_TIMEOUT_MS, WAIT_S, Driver, Got, Sent, told

_MEMBER = Path(__file__).with_name("member.py")
_T = TypeVar("_T")


class AiokafkaDriver(Driver):
    """aiokafka."""

    name = "aiokafka"
    deletes_groups = False

    def create(self, topic: str, partitions: int, config: dict[str, str]) -> None:
        new = NewTopic(topic, partitions, 1, topic_configs=config)
        response: Any = _run(self._with_admin(lambda admin: admin.create_topics([new])))
        for _, code, message in response.topic_errors:  # it raises nothing
            if code:
                raise for_code(code)(message)

    def write(
        self, topic: str, records: Sequence[Sent], *, codec: str = "none", acks: str = "all", idempotent: bool = False
    ) -> list[tuple[int, int]]:
        async def write() -> list[tuple[int, int]]:
            producer = AIOKafkaProducer(
                bootstrap_servers=self.bootstrap, compression_type=None if codec == "none" else codec, linger_ms=20,
                acks="all" if acks == "all" else int(acks), enable_idempotence=idempotent,
            )  # fmt: skip
            await producer.start()
            try:
                futures = [
                    await producer.send(
                        topic, one.value, one.key, one.partition, one.timestamp, headers=list(one.headers)
                    )
                    for one in records
                ]
                placed = await asyncio.gather(*futures)
            finally:
                await producer.stop()
            return [(one.partition, one.offset) if one is not None else (-1, -1) for one in placed]

        return _run(write())

    def read(self, topic: str, count: int, *, committed: bool = False) -> list[Got]:
        async def read() -> list[Got]:
            consumer = self._consumer(None, isolation_level="read_committed" if committed else "read_uncommitted")
            found: list[Got] = []
            async with _started(consumer):
                wanted = [TopicPartition(topic, number) for number in await _partitions(consumer, topic)]
                consumer.assign(wanted)
                await consumer.seek_to_beginning()
                ends = await consumer.end_offsets(wanted)
                while [one for one in wanted if await consumer.position(one) < ends[one]]:
                    found += await _polled(consumer)
            return found

        return _run(read())

    def consume(self, group: str, topic: str, count: int) -> list[Got]:
        async def consume() -> list[Got]:
            consumer = self._consumer(group)
            found: list[Got] = []
            consumer.subscribe([topic], listener=_Forgetful(found))
            async with _started(consumer):
                while True:
                    found += await _polled(consumer, count - len(found))
                    if len(found) < count:
                        continue
                    if await _is_committed(consumer):
                        return list(found)  # closing revokes, too
                    found.clear()

        return _run(consume())

    def member(self, group: str, topic: str) -> list[str]:
        return [sys.executable, str(_MEMBER), self.name, self.bootstrap, group, topic]

    def run_member(self, group: str, topic: str) -> None:
        """Run a member in this process until it is killed."""

        async def live() -> None:
            consumer = self._consumer(group)
            consumer.subscribe([topic])
            async with _started(consumer):
                while True:
                    records = await _polled(consumer)
                    if records and await _is_committed(consumer):
                        for one in records:
                            print(told(one.partition, one.offset, one.value), flush=True)

        asyncio.run(live())

    def at_time(self, topic: str, partition: int, timestamp: int) -> int:
        async def look() -> int:
            wanted = TopicPartition(topic, partition)
            async with _started(self._consumer(None)) as consumer:
                found = (await consumer.offsets_for_times({wanted: timestamp}))[wanted]
                return -1 if found is None else int(found.offset)

        return _run(look())

    def lag(self, group: str, topic: str) -> dict[int, int]:
        async def look() -> dict[int, int]:
            committed = await self._with_admin(lambda admin: admin.list_consumer_group_offsets(group))
            async with _started(self._consumer(None)) as consumer:
                ends = await consumer.end_offsets([one for one in committed if one.topic == topic])
                return {one.partition: end - committed[one].offset for one, end in ends.items()}

        return _run(look())

    def trim(self, topic: str, partition: int, before_offset: int) -> None:
        wanted = {TopicPartition(topic, partition): RecordsToDelete(before_offset)}
        _run(self._with_admin(lambda admin: admin.delete_records(wanted)))

    def delete(self, topic: str) -> None:
        _run(self._with_admin(lambda admin: admin.delete_topics([topic])))

    async def _with_admin(self, what: Callable[[Any], Awaitable[_T]]) -> _T:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        try:
            return await what(admin)
        finally:
            await admin.close()

    def _consumer(self, group: str | None, **settings: Any) -> Any:
        return AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False,
            session_timeout_ms=SESSION_TIMEOUT_MS, heartbeat_interval_ms=HEARTBEAT_MS, **settings,
        )  # fmt: skip


class _Forgetful(ConsumerRebalanceListener):
    """Returns records again after a rebalance that were read and not committed."""

    def __init__(self, found: list[Got]) -> None:
        self._found = found

    def on_partitions_revoked(self, revoked: Any) -> None:
        self._found.clear()

    def on_partitions_assigned(self, assigned: Any) -> None:
        self._found.clear()


async def _is_committed(consumer: Any) -> bool:
    """Commit, and return False if a rebalance prevented it."""
    try:
        await consumer.commit()
    except CommitFailedError:
        return False
    return True


def _run(what: Awaitable[_T]) -> _T:
    async def in_time() -> _T:
        return await asyncio.wait_for(what, WAIT_S)

    return asyncio.run(in_time())


def _started(consumer: Any) -> Any:
    class Started(AsyncExitStack):
        async def __aenter__(self) -> Any:
            await consumer.start()
            self.push_async_callback(consumer.stop)
            return consumer

    return Started()


async def _partitions(consumer: Any, topic: str) -> list[int]:
    await consumer._client.force_metadata_update()
    await consumer._client.add_topic(topic)
    return sorted(consumer.partitions_for_topic(topic))


async def _polled(consumer: Any, count: int | None = None) -> list[Got]:
    batches = await consumer.getmany(timeout_ms=200, max_records=count)
    return [
        Got(one.partition, one.offset, one.key, one.value, one.timestamp, tuple(one.headers))
        for batch in batches.values()
        for one in batch
    ]
