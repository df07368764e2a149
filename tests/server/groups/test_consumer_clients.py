"""Groups of the consumer protocol of librdkafka's clients, over a server in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from server.clients.fetching import Missing
from server.clients.java_driver import java_command
from server.groups.serving import PARTITIONS, Served, close_all, poll_until, shares
from server.groups.serving import served as served
from server.groups.serving import store as store
from waiting import wait_until

from segmentlog.records import PartitionId
from segmentlog.security.security_settings import Security
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.embedded import Server
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.server_settings import ServerSettings
from segmentlog.store import LogStore

confluent_kafka = pytest.importorskip("confluent_kafka")

_CLIENT = Path(__file__).with_name("client_process.py")


@pytest.fixture
def consumer(served: Served) -> Iterator[Callable[..., Any]]:
    """Yield a function that creates consumers of either protocol, and close them at the end."""
    made: list[Any] = []

    def make(protocol: str = "consumer", topics: str = "t", **options: Any) -> Any:
        settings = {
            "bootstrap.servers": served.address, "group.id": "g", "auto.offset.reset": "earliest",
            "enable.auto.commit": False, "reconnect.backoff.max.ms": 200, "topic.metadata.refresh.interval.ms": 1000,
            "group.protocol": protocol, **{name.replace("_", "."): value for name, value in options.items()},
        }  # fmt: skip
        if protocol == "classic":
            settings |= {"session.timeout.ms": 6000, "heartbeat.interval.ms": 200}
        made.append(confluent_kafka.Consumer(settings))
        made[-1].subscribe([topics])
        return made[-1]

    yield make
    close_all(made)


def _generation(store: LogStore) -> int:
    return store.groups.describe("g").generation


@pytest.mark.long
def test_three_and_one_is_killed(consumer: Callable[..., Any], served: Served, store: LogStore) -> None:
    """Three members share; a restart of the server moves no partition, a kill moves those of the killed member."""
    command = [sys.executable, str(_CLIENT), served.address, "g"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as third:
        try:
            assert third.stdout is not None
            assert third.stdout.readline().strip() == "assigned"
            others = [consumer(), consumer()]

            def share() -> bool:
                numbers = [tp.partition for one in others for tp in one.assignment()]
                described = store.groups.describe("g")
                return len(set(numbers)) == 2 and described.state == "Stable" and len(described.members) == 3

            poll_until(others, share)
            before = store.groups.describe("g")
            served.kill()
            served.start()
            done_s = time.monotonic() + 3
            poll_until(others, lambda: time.monotonic() > done_s)
            after = store.groups.describe("g")
            assert (after.generation, after.members) == (before.generation, before.members)
        finally:
            third.kill()
    poll_until(others, lambda: shares(others))
    assert _generation(store) > before.generation


def test_everything_is_read_once(consumer: Callable[..., Any], store: LogStore) -> None:
    """One member reads and commits, and another one takes over a part at the first one's offsets."""
    first = consumer()
    read = poll_until([first], lambda: bool(first.assignment()))
    while len(read) < 30:
        message = first.poll(5)
        assert message is not None
        assert not message.error()
        read.append(message)
    first.commit(asynchronous=False)
    second = consumer()
    read += poll_until([first, second], lambda: shares([first, second]))
    for partition in store.topic("t").partitions():
        partition.append([b"new"])
    read += poll_until([first, second], lambda: len(read_of(first, second)) == PARTITIONS)
    found = [(message.partition(), message.offset()) for message in read]
    assert len(found) == len(set(found))


def read_of(*consumers: Any) -> set[tuple[int, int]]:
    """Return the partitions that have been read to the end of eleven records."""
    return {(tp.partition, tp.offset) for one in consumers for tp in one.position(one.assignment()) if tp.offset == 11}


def test_an_expression(consumer: Callable[..., Any], store: LogStore) -> None:
    """Records of new topics are read as soon as the server has found the topics."""
    one = consumer(topics="^t.*")
    poll_until([one], lambda: shares([one]))
    store.create_topic("t2", fsync="never")
    poll_until([one], lambda: {tp.topic for tp in one.assignment()} == {"t", "t2"})


def test_static_consumers(consumer: Callable[..., Any], store: LogStore) -> None:
    """A consumer that restarts with its instance id keeps its place, and the others need not react."""
    one, other = consumer(group_instance_id="one"), consumer(group_instance_id="other")
    poll_until([one, other], lambda: shares([one, other]))
    had, before = {tp.partition for tp in one.assignment()}, _generation(store)
    one.close()
    again = consumer(group_instance_id="one")
    poll_until([again, other], lambda: shares([again, other]))
    assert {tp.partition for tp in again.assignment()} == had
    assert _generation(store) == before


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_there_and_back(consumer: Callable[..., Any], store: LogStore, strategy: str) -> None:
    """Consumers of the classic protocol are replaced one by one while the group is at work; and the other way."""

    def classic() -> Any:
        return consumer("classic", partition_assignment_strategy=strategy)

    members = [classic(), classic()]
    poll_until(members, lambda: shares(members))
    assert store.groups.describe("g").strategy == strategy
    highest = 0
    for make in (consumer, consumer, classic, classic):
        members.append(make())
        poll_until(members, lambda: shares(members))
        members.pop(0).close()
        poll_until(members, lambda: shares(members))
        assert _generation(store) > highest
        highest = _generation(store)
    poll_until(members, lambda: store.groups.describe("g").strategy == strategy)
    poll_until(members, lambda: shares(members))


class _Java:
    """A member that is Kafka's own client, in another process; it prints the records that it has read and committed."""

    def __init__(self, address: str) -> None:
        java, *words = java_command("Client", "member", address, "g", "t")
        command = [java, "-Dgroup.protocol=consumer", *words]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.told: set[tuple[int, int]] = set()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.split()
            if line.endswith("\n") and len(words) == 3:
                self.told.add((int(words[0]), int(words[1])))

    def kill(self) -> None:
        """Kill the client like `kill -9`."""
        self._process.kill()
        self._thread.join()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _need_java() -> None:
    try:
        java_command("Client")
    except Missing as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_a_commit_of_java_that_is_refused(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server refuses a commit, and the member keeps its partitions, the member reads the records again."""
    _need_java()
    refused: set[PartitionId] = set()
    real = ConsumerGroup.may_commit

    def refuse_once(self: ConsumerGroup, *args: Any, partitions: Collection[PartitionId], **options: Any) -> ErrorCode:
        error = ErrorCode.NONE if refused.issuperset(partitions) else ErrorCode.STALE_MEMBER_EPOCH
        refused.update(partitions)
        return error or real(self, *args, partitions=partitions, **options)

    monkeypatch.setattr(ConsumerGroup, "may_commit", refuse_once)
    server = Server(
        store, host="127.0.0.1", port=0, advertise=None, settings=ServerSettings(), security=Security(),
        owns_store=False,
    )  # fmt: skip
    with server:
        member = _Java(server.bootstrap_servers)
        try:
            every = {(number, offset) for number in range(PARTITIONS) for offset in range(10)}
            wait_until(lambda: member.told == every, lambda: f"only {sorted(member.told)} is committed")
        finally:
            member.kill()
    assert len(refused) == PARTITIONS


@pytest.mark.long
def test_java(served: Served, store: LogStore) -> None:
    """Three of Kafka's own clients share; when one is killed the others take its share, and all is committed."""
    _need_java()
    members = [_Java(served.address) for _ in range(3)]
    try:

        def share(count: int) -> bool:
            described = store.groups.describe("g")
            shares = [len(one.partitions) for one in described.members]
            return described.state == "Stable" and len(shares) == count and sum(shares) == PARTITIONS and all(shares)

        wait_until(lambda: share(3), "three members do not share")
        wait_until(lambda: len(set().union(*(one.told for one in members))) == 30, "not all is read")
        members[0].kill()
        wait_until(lambda: share(2), "what one had that was killed did not come to the others")
        for partition in store.topic("t").partitions():
            partition.append([b"new"])
        wait_until(
            lambda: all(one.lag == 0 for one in store.groups.describe("g").partitions),
            lambda: f"not all is committed: {store.groups.describe('g')}, {[sorted(one.told) for one in members]}",
        )
        new = {(number, 10) for number in range(PARTITIONS)}
        wait_until(lambda: new <= members[1].told | members[2].told, "what came then is not read")
    finally:
        for one in members:
            one.kill()
