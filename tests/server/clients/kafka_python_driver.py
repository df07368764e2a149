"""kafka-python: all of it in Python."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kafka.codec
from kafka import ConsumerRebalanceListener, KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic
from kafka.errors import CommitFailedError, RebalanceInProgressError
from server.clients.driver import HEARTBEAT_MS, SESSION_TIMEOUT_MS, WAIT_S, Driver, Got, Sent, told

_MEMBER = Path(__file__).with_name("member.py")


class KafkaPythonDriver(Driver):
    """kafka-python."""

    name = "kafka-python"
    writes_null_headers = False
    codecs = (
        "none", *(codec for codec in ("gzip", "snappy", "lz4", "zstd") if getattr(kafka.codec, f"has_{codec}")()),
    )  # fmt: skip

    def create(self, topic: str, partitions: int, config: dict[str, str]) -> None:
        with self._admin() as admin:
            admin.create_topics([NewTopic(topic, partitions, 1, topic_configs=config)])

    def write(
        self, topic: str, records: Sequence[Sent], *, codec: str = "none", acks: str = "all", idempotent: bool = False
    ) -> list[tuple[int, int]]:
        producer = KafkaProducer(
            bootstrap_servers=self.bootstrap, compression_type=None if codec == "none" else codec,
            acks="all" if acks == "all" else int(acks), linger_ms=20, enable_idempotence=idempotent,
        )  # fmt: skip
        try:
            futures = [
                producer.send(
                    topic,
                    one.value,
                    key=one.key,
                    partition=one.partition,
                    timestamp_ms=one.timestamp,
                    headers=list(one.headers),
                )
                for one in records
            ]
            placed = [future.get(WAIT_S) for future in futures]
        finally:
            producer.close()
        return [(one.partition, one.offset) for one in placed]

    def read(self, topic: str, count: int, *, committed: bool = False) -> list[Got]:
        consumer = self._consumer(None, isolation_level="read_committed" if committed else "read_uncommitted")
        found: list[Got] = []
        try:
            wanted = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic)]
            consumer.assign(wanted)
            consumer.seek_to_beginning()
            ends = consumer.end_offsets(wanted)
            ends_s = time.monotonic() + WAIT_S
            while any(consumer.position(one) < ends[one] for one in wanted):
                assert time.monotonic() < ends_s, f"the end did not come: {len(found)} records"
                found += _polled(consumer)
        finally:
            consumer.close()
        return found

    def consume(self, group: str, topic: str, count: int) -> list[Got]:
        consumer = self._consumer(group)
        found: list[Got] = []
        consumer.subscribe([topic], listener=_Forgetful(found))
        ends_s = time.monotonic() + WAIT_S
        try:
            while True:
                assert time.monotonic() < ends_s, f"{len(found)} of {count} records came"
                found += _polled(consumer, count - len(found))
                if len(found) < count:
                    continue
                if _is_committed(consumer):
                    return list(found)  # closing revokes, too
                found.clear()
        finally:
            consumer.close()
            gc.collect()  # closes a connection that it was opening just then, and forgot

    def member(self, group: str, topic: str) -> list[str]:
        return [sys.executable, str(_MEMBER), self.name, self.bootstrap, group, topic]

    def run_member(self, group: str, topic: str) -> None:
        """Run a member in this process until it is killed."""
        consumer = self._consumer(group)
        consumer.subscribe([topic])
        while True:
            records = _polled(consumer)
            if records and _is_committed(consumer):
                for one in records:
                    print(told(one.partition, one.offset, one.value), flush=True)

    def at_time(self, topic: str, partition: int, timestamp: int) -> int:
        wanted = TopicPartition(topic, partition)
        with self._consumer(None) as consumer:
            found = consumer.offsets_for_times({wanted: timestamp})[wanted]
            return -1 if found is None else found.offset

    def lag(self, group: str, topic: str) -> dict[int, int]:
        with self._admin() as admin, self._consumer(None) as consumer:
            committed = admin.list_group_offsets([group])[group]
            ends = consumer.end_offsets([one for one in committed if one.topic == topic])
            return {one.partition: end - committed[one].offset for one, end in ends.items()}

    def trim(self, topic: str, partition: int, before_offset: int) -> None:
        with self._admin() as admin:
            admin.delete_records({TopicPartition(topic, partition): before_offset})

    def delete(self, topic: str) -> None:
        with self._admin() as admin:
            admin.delete_topics([topic])

    def delete_group(self, group: str) -> None:
        with self._admin() as admin:
            admin.delete_groups([group])

    def _admin(self) -> Any:
        return _Closing(KafkaAdminClient(bootstrap_servers=self.bootstrap))

    def _consumer(self, group: str | None, **settings: Any) -> Any:
        return _Closing(KafkaConsumer(
            bootstrap_servers=self.bootstrap, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False,
            session_timeout_ms=SESSION_TIMEOUT_MS, heartbeat_interval_ms=HEARTBEAT_MS, **settings,
        ))  # fmt: skip


class _Forgetful(ConsumerRebalanceListener):  # type: ignore[misc]
    """Returns records again after a rebalance that were read and not committed."""

    def __init__(self, found: list[Got]) -> None:
        self._found = found

    def on_partitions_revoked(self, revoked: Any) -> None:
        self._found.clear()

    def on_partitions_assigned(self, assigned: Any) -> None:
        self._found.clear()


def _is_committed(consumer: Any) -> bool:
    """Commit, and return False if a rebalance prevented it."""
    try:
        consumer.commit()
    except (CommitFailedError, RebalanceInProgressError):
        return False
    return True


class _Closing:
    """A client in a ``with``."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __enter__(self) -> Any:
        return self._client

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def _polled(consumer: Any, count: int | None = None) -> list[Got]:
    return [
        Got(one.partition, one.offset, one.key, one.value, one.timestamp, tuple(one.headers))
        for batch in consumer.poll(200, max_records=count).values()
        for one in batch
    ]
