"""Real clients' transactions: exactly once from topic to topic, what was aborted unseen, zombies fenced."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from server.clients.driver import WAIT_S
from server.clients.fetching import Missing
from server.clients.java_driver import java_command
from server.clients.served import Served
from waiting import wait_until

import segmentlog
from segmentlog.store import LogStore
from segmentlog.testing.pytest_plugin import ServerOfTests

COUNT = 20


def producer_of(address: str, name: str) -> Producer:
    """Return a producer of librdkafka with a transactional id."""
    producer = Producer({"bootstrap.servers": address, "transactional.id": name, "linger.ms": 0})
    producer.init_transactions(WAIT_S)
    return producer


def refusal_of(do: Callable[[], object]) -> KafkaError:
    """Return the error that a call raises, without a reference to the client."""
    try:
        do()
    except KafkaException as error:
        return error.args[0]
    raise AssertionError("it was not refused")


def consumer_of(server: ServerOfTests, group: str, protocol: str = "classic") -> Consumer:
    """Return a consumer of librdkafka without automatic commits."""
    return Consumer({
        "bootstrap.servers": server.bootstrap_servers, "group.id": group, "auto.offset.reset": "earliest",
        "enable.auto.commit": False, "isolation.level": "read_committed", "enable.partition.eof": True,
        "group.protocol": protocol, "topic.metadata.refresh.interval.ms": 100,
        **({"partition.assignment.strategy": "cooperative-sticky"} if protocol == "classic" else {}),
    })  # fmt: skip


def committed(store: LogStore, topic: str) -> list[bytes | None]:
    """Return what a consumer of the library reads."""
    log = store.topic(topic).partition(0)
    return [value for batch in log.read(0, isolation="read_committed") for value in batch.values]


def fetched(server: ServerOfTests, topic: str) -> list[bytes | None]:
    """Return what a consumer of librdkafka reads."""
    consumer = consumer_of(server, f"reader of {topic}")
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes | None] = []
    try:
        while True:
            message = consumer.poll(WAIT_S)
            assert message is not None, "the end did not come"
            if message.error() is not None:
                assert message.error().code() == KafkaError._PARTITION_EOF
                return found
            found.append(message.value())
    finally:
        consumer.close()


def taken(consumer: Consumer, most: int) -> list[Any]:
    """Return some messages."""
    found: list[Any] = []
    wait_until(lambda: found.extend(one for one in consumer.consume(most, 0.1) if one.error() is None) or found)
    return found


def test_from_topic_to_topic_exactly_once(server: ServerOfTests, store: LogStore) -> None:
    """Every other attempt is aborted and repeated; offsets and records are committed together."""
    store.create_topic("in")
    store.create_topic("out")
    store.topic("in").partition(0).append([b"%d" % number for number in range(COUNT)])
    producer, consumer = producer_of(server.bootstrap_servers, "etl"), consumer_of(server, "g")
    consumer.subscribe(["in"])
    done = attempts = 0
    while done < COUNT:
        messages = taken(consumer, 5)
        attempts += 1
        producer.begin_transaction()
        for message in messages:
            producer.produce("out", message.value() + b"!")
        behind = TopicPartition("in", 0, messages[-1].offset() + 1)
        producer.send_offsets_to_transaction([behind], consumer.consumer_group_metadata(), WAIT_S)
        if attempts % 2:
            producer.abort_transaction(WAIT_S)
            consumer.seek(TopicPartition("in", 0, messages[0].offset()))
        else:
            producer.commit_transaction(WAIT_S)
            done += len(messages)
            (where,) = consumer.committed([TopicPartition("in", 0)], WAIT_S)
            assert where.offset == done
    consumer.close()
    expected = [b"%d!" % number for number in range(COUNT)]
    assert committed(store, "out") == fetched(server, "out") == expected
    assert store.topic("out").partition(0).log_end_offset > COUNT
    assert [one.offset for one in store.group_offsets.committed("g").values()] == [COUNT]


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_position_that_is_undecided_is_waited_for(server: ServerOfTests, store: LogStore, protocol: str) -> None:
    """A member whose assignment changes meanwhile waits, too: it does not begin at the start."""
    store.create_topic("in")
    store.topic("in").partition(0).append([b"%d" % number for number in range(COUNT)])
    former, producer = consumer_of(server, "g", protocol), producer_of(server.bootstrap_servers, "etl")
    former.subscribe(["in"])
    taken(former, 1)
    producer.begin_transaction()
    producer.send_offsets_to_transaction([TopicPartition("in", 0, 15)], former.consumer_group_metadata(), WAIT_S)
    former.close()
    with closing(consumer_of(server, "g", protocol)) as member:
        member.subscribe(["in"])
        for count in (1, 2):
            store.alter_topic("in", partitions=count)
            wait_until(lambda: not member.consume(1, 0.1) and len(member.assignment()) == count)  # noqa: B023
        assert not [one for one in member.consume(100, 1.0) if one.partition() == 0]
        producer.commit_transaction(WAIT_S)
        assert taken(member, 1)[0].offset() == 15


@pytest.mark.long
def test_java_speaks_the_new_protocol(server: ServerOfTests, store: LogStore) -> None:
    """Kafka's own client has an epoch for each transaction."""
    store.create_topic("in")
    store.create_topic("out")
    store.topic("in").partition(0).append([b"%d" % number for number in range(COUNT)])
    try:
        command = java_command("Transact", server.bootstrap_servers, "java", "in", "out", COUNT)
    except Missing as error:
        pytest.skip(str(error))
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * WAIT_S)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split("\n")[:-1]
    assert told[-1] == f"committed {COUNT}"
    expected = [b"%d!" % number for number in range(COUNT)]
    assert committed(store, "out") == fetched(server, "out") == expected
    assert [one.offset for one in store.group_offsets.committed("java").values()] == [COUNT]
    assert store.transactions.states()["java"].epoch >= 2 * len(told)


def test_a_zombie_is_fenced(server: ServerOfTests, store: LogStore) -> None:
    """Whose successor has begun commits nothing any more; the successor does."""
    store.create_topic("out")
    zombie = producer_of(server.bootstrap_servers, "etl")
    zombie.begin_transaction()
    zombie.produce("out", b"zombie")
    assert zombie.flush(WAIT_S) == 0
    successor = producer_of(server.bootstrap_servers, "etl")
    error = refusal_of(partial(zombie.commit_transaction, WAIT_S))
    assert (error.fatal(), error.code()) == (True, KafkaError._FENCED)
    successor.begin_transaction()
    successor.produce("out", b"successor")
    successor.commit_transaction(WAIT_S)
    assert committed(store, "out") == fetched(server, "out") == [b"successor"]


def test_a_name_of_the_library_is_refused(server: ServerOfTests, store: LogStore) -> None:
    """The error is fatal, so that a client does not retry forever."""
    store.producer(name="etl").close()
    producer = Producer({"bootstrap.servers": server.bootstrap_servers, "transactional.id": "etl"})
    error = refusal_of(partial(producer.init_transactions, WAIT_S))
    assert error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


def test_aiokafka(server: ServerOfTests, store: LogStore) -> None:
    """Its transactions are visible after their commit, with offsets."""
    store.create_topic("out", partitions=2)

    async def work(rounds: Sequence[bool]) -> None:
        from aiokafka import TopicPartition as Place

        producer = AIOKafkaProducer(bootstrap_servers=server.bootstrap_servers, transactional_id="aio")
        await producer.start()
        try:
            for number, is_kept in enumerate(rounds):
                await producer.begin_transaction()
                for partition in (0, 1):
                    await producer.send_and_wait("out", b"%d" % number, partition=partition)
                await producer.send_offsets_to_transaction({Place("out", 1): number + 1}, "g")
                await (producer.commit_transaction() if is_kept else producer.abort_transaction())
        finally:
            await producer.stop()

    asyncio.run(work((True, False, True, False)))
    assert committed(store, "out") == fetched(server, "out") == [b"0", b"2"]
    assert [one.offset for one in store.group_offsets.committed("g").values()] == [3]


@pytest.mark.long
def test_every_worker_is_killed_in_the_middle(tmp_path: Path) -> None:
    """The transaction survives all workers, and the remaining one commits it."""
    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("out", partitions=4)
        served = Served(tmp_path / "store", tmp_path / "served.log")
        try:
            producer = producer_of(served.address, "etl")
            producer.begin_transaction()
            for number in range(3):
                for partition in range(4):
                    producer.produce("out", b"%d" % number, partition=partition)
                assert producer.flush(WAIT_S) == 0
                victim = served.workers()[0 if number else -1]
                os.kill(victim, signal.SIGKILL)
                wait_until(lambda victim=victim: victim not in served.workers() and len(served.workers()) == 3)
            assert store.transactions.states()["etl"].status == "Ongoing"
            producer.commit_transaction(WAIT_S)
        finally:
            served.stop()
        for log in store.topic("out").partitions():
            found = [value for batch in log.read(0, isolation="read_committed") for value in batch.values]
            assert found == [b"0", b"1", b"2"]
