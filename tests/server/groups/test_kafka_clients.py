"""Groups of real clients, over a server in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from server.groups.serving import PARTITIONS, WAIT_S, Served, close_all, poll_until, shares
from server.groups.serving import served as served
from server.groups.serving import store as store

from segmentlog.errors import GroupInUse
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore

confluent_kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture
def consumer(served: Served) -> Iterator[Callable[..., Any]]:
    """Yield a function that creates consumers of librdkafka, and close them at the end."""
    made: list[Any] = []

    def make(**options: Any) -> Any:
        settings = {
            "bootstrap.servers": served.address, "group.id": "g", "auto.offset.reset": "earliest",
            "enable.auto.commit": False, "session.timeout.ms": 6000, "heartbeat.interval.ms": 200,
            "reconnect.backoff.max.ms": 200, "topic.metadata.refresh.interval.ms": 1000,
            **{name.replace("_", "."): value for name, value in options.items()},
        }  # fmt: skip
        made.append(confluent_kafka.Consumer(settings))
        made[-1].subscribe(["t"])
        return made[-1]

    yield make
    close_all(made)


@pytest.mark.long
def test_three_consumers_one_dies(consumer: Callable[..., Any], served: Served, store: LogStore) -> None:
    """They share; a kill of the server changes nothing, and partitions of a departed member go to the others."""
    consumers = [consumer() for _ in range(3)]
    poll_until(consumers, lambda: shares(consumers))
    before = store.groups.describe("g")
    assert (before.state, len(before.members)) == ("Stable", 3)
    assert {tp for member in before.members for tp in member.partitions} == {
        TopicPartition("t", number) for number in range(PARTITIONS)
    }
    served.kill()
    with pytest.raises(GroupInUse, match=f"pid {served.pid}"):
        store.consumer("t", group="g")
    served.start()
    done_s = time.monotonic() + 3
    poll_until(consumers, lambda: time.monotonic() > done_s)
    after = store.groups.describe("g")
    assert (after.generation, after.members) == (before.generation, before.members)
    consumers[0].close()
    poll_until(consumers[1:], lambda: shares(consumers[1:]))
    assert store.groups.describe("g").generation > before.generation


def test_positions_are_both_kinds(consumer: Callable[..., Any], store: LogStore) -> None:
    """A client reads and commits, the library continues after it, and then a client after the library."""
    first = consumer()
    records: list[Any] = []
    while len(records) < 15:
        records += poll_until([first], lambda: bool(first.assignment()))
        message = first.poll(1.0)
        if message is not None and not message.error():
            records.append(message)
    first.commit(asynchronous=False)
    first.close()
    read = {(message.partition(), message.offset()) for message in records}
    with store.consumer("t", group="g") as library:
        rest = [(record.partition, record.offset) for record in library]
        library.commit()
    assert read.isdisjoint(rest)
    assert read | set(rest) == {(number, offset) for number in range(PARTITIONS) for offset in range(10)}
    store.topic("t").partition(1).append([b"new"])
    second = consumer()
    found: list[Any] = []
    ends_s = time.monotonic() + WAIT_S
    while not found:
        assert time.monotonic() < ends_s
        message = second.poll(0.1)
        if message is not None and not message.error():
            found.append((message.partition(), message.offset()))
    assert found == [(1, 10)]


def test_the_library_has_the_group(consumer: Callable[..., Any], store: LogStore) -> None:
    """A client gets an error, and has the group as soon as the library has left it."""
    errors: list[str] = []
    with store.consumer("t", group="g") as library:
        library.poll_group()
        client = consumer()
        ends_s = time.monotonic() + WAIT_S
        while not errors and time.monotonic() < ends_s:
            message = client.poll(0.1)
            if message is not None and message.error():
                errors.append(message.error().name())
        assert not client.assignment()
    poll_until([client], lambda: shares([client]))
    assert set(errors) == {"INCONSISTENT_GROUP_PROTOCOL"}


def test_static_consumers(consumer: Callable[..., Any], store: LogStore) -> None:
    """A consumer that restarts with its instance id keeps its place, and the others need not join again."""
    one, other = consumer(group_instance_id="one"), consumer(group_instance_id="other")
    poll_until([one, other], lambda: shares([one, other]))
    before = store.groups.describe("g").generation
    had = {tp.partition for tp in one.assignment()}
    one.close()  # a static member leaves only its connection
    again = consumer(group_instance_id="one")
    poll_until([again, other], lambda: shares([again, other]))
    assert {tp.partition for tp in again.assignment()} == had
    assert store.groups.describe("g").generation == before


def test_tools(consumer: Callable[..., Any], served: Served, store: LogStore) -> None:
    """Groups are listed, described and deleted, of whatever kind; positions of one that is empty are set."""
    admin_of = pytest.importorskip("confluent_kafka.admin")
    admin = admin_of.AdminClient({"bootstrap.servers": served.address})
    client = consumer()
    poll_until([client], lambda: shares([client]))
    with store.consumer("t", group="library") as library:
        library.poll_group()
        listed = admin.list_consumer_groups().result()
        assert {group.group_id for group in listed.valid} == {"g", "library"}
        described = {name: future.result() for name, future in admin.describe_consumer_groups(["g", "library"]).items()}
        for group in described.values():
            (member,) = group.members
            assert len(member.assignment.topic_partitions) == PARTITIONS
        with pytest.raises(confluent_kafka.KafkaException, match=r"NON_EMPTY|not empty"):
            admin.delete_consumer_groups(["library"])["library"].result()
    moved = confluent_kafka.ConsumerGroupTopicPartitions("library", [confluent_kafka.TopicPartition("t", 1, 7)])
    admin.alter_consumer_group_offsets([moved])["library"].result()
    asked = confluent_kafka.ConsumerGroupTopicPartitions("library")
    found = admin.list_consumer_group_offsets([asked])["library"].result()
    assert [(tp.partition, tp.offset) for tp in found.topic_partitions] == [(1, 7)]
    admin.delete_consumer_groups(["library"])["library"].result()
    assert store.groups.names() == ["g"]


def test_aiokafka(served: Served, store: LogStore) -> None:
    """aiokafka uses other versions of the protocol."""
    aiokafka = pytest.importorskip("aiokafka")

    async def read() -> list[tuple[int, int]]:
        consumer = aiokafka.AIOKafkaConsumer(
            "t", bootstrap_servers=served.address, group_id="aio", auto_offset_reset="earliest",
            enable_auto_commit=False,
        )  # fmt: skip
        await consumer.start()
        try:
            found = []
            while len(found) < 30:
                record = await asyncio.wait_for(consumer.getone(), WAIT_S)
                found.append((record.partition, record.offset))
            await consumer.commit()
            return found
        finally:
            await consumer.stop()

    assert len(set(asyncio.run(read()))) == 30
    committed = store.group_offsets.committed("aio")
    assert {tp.partition: one.offset for tp, one in committed.items()} == dict.fromkeys(range(PARTITIONS), 10)


def test_kafka_python(served: Served, store: LogStore) -> None:
    """Two consumers of kafka-python share."""
    kafka = pytest.importorskip("kafka")

    def make() -> Any:
        return kafka.KafkaConsumer(
            "t", bootstrap_servers=served.address, group_id="kp", auto_offset_reset="earliest",
            enable_auto_commit=False, session_timeout_ms=6000, heartbeat_interval_ms=200,
        )  # fmt: skip

    def positions() -> list[int]:
        return [one.offset for one in store.group_offsets.committed("kp").values()]

    members = [make()]
    found: set[tuple[int, int]] = set()
    ends_s = time.monotonic() + WAIT_S
    try:
        while positions() != [10] * PARTITIONS or len(members) < 2 or not all(one.assignment() for one in members):
            assert time.monotonic() < ends_s
            for one in members:
                for tp, records in one.poll(timeout_ms=50, max_records=7).items():
                    found |= {(tp.partition, record.offset) for record in records}
                # A commit that fails because of a rebalance is repeated in the next round.
                with contextlib.suppress(kafka.errors.CommitFailedError, kafka.errors.RebalanceInProgressError):
                    one.commit()
            if found and len(members) == 1:
                members.append(make())
    finally:
        for one in members:
            one.close()
    assert len(found) == 30
    assert store.groups.describe("kp").state == "Empty"
