"""Jobs of processes that use a server through librdkafka, for checks of delivery: they record every step."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from delivery_process import Process

Place = tuple[str, int]
_T = TypeVar("_T")
_TRY_S: Final = 0.5
"""For a call, before it is looked whether this process is to end."""
_STUCK_S: Final = 30.0
"""For a call that does not end; it was told to after `_TRY_S`."""
_LINGER_S: Final = 0.15
"""How long records that will be aborted stay visible to readers that may not see them."""
_FLYING_MAX: Final = 40
_NETWORK: Final = {
    "reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 100, "retry.backoff.ms": 20, "retry.backoff.max.ms": 100,
    "socket.timeout.ms": 2500, "topic.metadata.refresh.interval.ms": 300, "log_level": 0,
}  # fmt: skip
_SILENT: Final = logging.getLogger("librdkafka")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


def membership_of(consumer: Consumer) -> tuple[str, int]:
    """(Member id, generation) of the opaque metadata; ("", -1) of a consumer that is not a member."""
    packed = consumer.consumer_group_metadata()
    if packed is None:
        return "", -1
    assert packed.startswith(b"CGMDv2:")
    (generation,) = struct.unpack_from("=i", packed, 7)
    return packed[11:].split(b"\0")[1].decode(), generation


class ClientProcess(Process):
    """One process: a client or two, and its journal."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(order)
        self._sizes_ns = 0
        self._is_held = bool(order.get("holds"))
        self.aborts = not order.get("hurries")
        """Whether some of a pipeline's work is undone, and done again."""

    def go_on(self, *_: Any) -> None:
        """Hold no more."""
        self._is_held = False

    def sizes(self) -> dict[str, int]:
        """Return the number of partitions of each topic, which grows."""
        changed_ns = os.stat(self.order["sizes"]).st_mtime_ns
        if changed_ns != self._sizes_ns:
            with open(self.order["sizes"]) as file:
                self.topics = {topic: count for topic, count in json.load(file).items() if topic in self.topics}
            self._sizes_ns = changed_ns
        return self.topics

    def place(self) -> Place:
        self.sizes()
        return super().place()

    def pause(self) -> None:
        time.sleep(self.rng.choice((0.02, 0.05, 0.1)))

    def ask(self, do: Callable[[], _T]) -> _T:
        """Retry while the error allows it and this process need not end."""
        while True:
            try:
                return do()
            except KafkaException as error:
                if not error.args[0].retriable() or self.stopping:
                    raise
                time.sleep(0.01)

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Record an error, which ends the work of the block; the job then starts it again."""
        try:
            yield
        except (KafkaException, BufferError) as error:
            told = error.args[0]
            self.say("*met", told.name() if isinstance(told, KafkaError) else str(told))
            time.sleep(0.02)

    # ------------------------------------------------------------ producing

    def producer(self, **more: Any) -> Producer:
        settings = {**_NETWORK, "bootstrap.servers": self.order["address"], "linger.ms": 0, **more}
        return Producer({**settings, "enable.idempotence": True}, logger=_SILENT)

    def plain(self) -> None:
        """Run an idempotent producer with many records in flight."""
        while not self.stopping:
            with self.meeting():
                self.produce(self.producer(**{"message.timeout.ms": 20_000}))

    def produce(self, producer: Producer) -> None:
        acked: dict[Place, list[tuple[int, str]]] = {}
        failed: list[KafkaError] = []

        def done(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failed.append(error)
                return
            where = message.topic(), message.partition()
            offset = message.offset()
            acked.setdefault(where, []).append((-1 if offset is None else offset, message.value().decode()))

        while not failed and not (self.stopping and not len(producer)):
            if not self.stopping and len(producer) < _FLYING_MAX:
                topic, partition = self.place()
                values = [self.value() for _ in range(self.rng.choice((1, 1, 4)))]
                self.say("send", "", topic, partition, values)
                for value in values:
                    producer.produce(topic, value.encode(), partition=partition, on_delivery=done)
            producer.poll(0)
            self.pause()
            for (topic, partition), records in acked.items():
                self.say("acked", topic, partition, records)
            acked.clear()
        for error in failed[:1]:
            self.say("*failed", error.name())
        producer.purge()

    # ------------------------------------------------------------ transactions

    def instance(self, name: str) -> Producer:
        """Return a producer of a transactional id; it has fenced older ones when this returns."""
        producer = self.producer(**{
            "transactional.id": name, "transaction.timeout.ms": self.order["transaction_timeout_ms"],
        })  # fmt: skip
        self.ask(lambda: producer.init_transactions(_TRY_S))
        return producer

    def transactions(self) -> None:
        """Run transactions over several topics; abort every fourth after readers could have seen it for a while."""
        while not self.stopping:
            with self.meeting():
                producer = self.instance(self.order["name"])
                for _ in range(self.rng.choice((5, 20, 100))):
                    if self.stopping:
                        break
                    self.transaction(producer)
                    self.pause()

    def transaction(self, producer: Producer) -> None:
        self.number += 1
        txn = f"{self.label}/{self.number}"
        producer.begin_transaction()
        with self.ending_well(producer, txn):
            for _ in range(self.rng.choice((1, 2, 4))):
                self.send(producer, txn, *self.place(), [self.value() for _ in range(self.rng.choice((1, 3)))])
                producer.poll(self.rng.choice((0, 0.005)))
            if self.number % 4:
                self.commit(producer, txn)
            else:
                self.flush(producer)
                time.sleep(_LINGER_S)
                self.abort(producer, txn)

    def send(self, producer: Producer, txn: str, topic: str, partition: int, values: list[str]) -> None:
        self.say("send", txn, topic, partition, values)
        for value in values:
            producer.produce(topic, value.encode(), partition=partition)

    @contextlib.contextmanager
    def ending_well(self, producer: Producer, txn: str) -> Iterator[None]:
        """Abort a transaction that cannot be committed. After a fatal error its result stays unknown."""
        try:
            yield
        except KafkaException as error:
            if error.args[0].fatal() or not error.args[0].txn_requires_abort():
                raise
            self.say("*aborts", error.args[0].name())
            self.ask(lambda: producer.abort_transaction(_TRY_S))
            self.say("aborted", txn)

    def commit(self, producer: Producer, txn: str) -> None:
        self.say("commit", txn)
        self.ask(lambda: producer.commit_transaction(_TRY_S))
        self.say("committed", txn)

    def abort(self, producer: Producer, txn: str) -> None:
        self.say("abort", txn)
        self.ask(lambda: producer.abort_transaction(_TRY_S))
        self.say("aborted", txn)

    def fence(self) -> None:
        """Let a zombie write and commit while its successor works."""
        while not self.stopping:
            with self.meeting():
                self.outlive()
                return

    def outlive(self) -> None:
        name, (topic, partition) = self.order["name"], self.place()
        self.number += 1
        old, new = f"{self.label}/old{self.number}", f"{self.label}/new{self.number}"
        zombie = self.instance(name)
        zombie.begin_transaction()
        self.send(zombie, old, topic, partition, [self.value()])
        self.flush(zombie)
        successor = self.instance(name)
        self.say("aborted", old)
        successor.begin_transaction()
        self.send(successor, new, topic, partition, [self.value()])
        self.flush(successor)
        with contextlib.suppress(KafkaException):
            self.send(zombie, old, topic, partition, [self.value()])
            self.flush(zombie)
        try:
            self.ask(lambda: zombie.commit_transaction(_TRY_S))
            self.say("committed", old)
        except KafkaException as error:
            self.say("*fenced" if error.args[0].fatal() else "*refused", error.args[0].name())
        self.commit(successor, new)

    def flush(self, producer: Producer) -> None:
        """Wait until the broker has answered for all records."""
        while producer.flush(_TRY_S) and not self.stopping:
            pass

    # ------------------------------------------------------------ exactly once

    def pipeline(self) -> None:
        """Copy records from one topic to another as a member of a group, exactly once."""
        while not self.stopping:
            with self.meeting():
                producer = self.instance(self.order["name"])
                consumer = self.member()
                try:
                    self.transform(consumer, producer)
                finally:
                    consumer.close()

    def member(self) -> Consumer:
        """Return a member of the group, by one of the two protocols."""
        order = self.order
        settings: dict[str, Any] = {
            **_NETWORK, "bootstrap.servers": order["address"], "group.id": order["group"], "enable.auto.commit": False,
            "auto.offset.reset": "earliest", "isolation.level": "read_committed", "fetch.wait.max.ms": 100,
            "fetch.error.backoff.ms": 20, "check.crcs": True, "group.protocol": order["protocol"],
        }  # fmt: skip
        if order["protocol"] == "classic":
            settings |= {
                "session.timeout.ms": order["session_ms"], "heartbeat.interval.ms": order["session_ms"] // 5,
                "partition.assignment.strategy": order["strategy"],
            }  # fmt: skip
        consumer = Consumer(settings, logger=_SILENT)
        consumer.subscribe(
            [order["source"]],
            on_assign=lambda _, added: self.own(*membership_of(consumer), [*consumer.assignment(), *added]),
        )
        return consumer

    def own(self, member: str, generation: int, partitions: list[TopicPartition]) -> None:
        """Say what is assigned to it now: when that changes, and again in each generation in which it stays."""
        for one in partitions if generation >= 0 else ():
            self.say("owns", time.monotonic_ns(), member, generation, one.topic, one.partition)

    def transform(self, consumer: Consumer, producer: Producer) -> None:
        known = -1
        while not self.stopping:
            most = self.rng.choice((1, 5, 50)) if self.aborts else 500
            messages = [one for one in consumer.consume(most, 0.05) if one.error() is None]
            member, generation = membership_of(consumer)
            if generation != known:
                known = generation
                # In the classic protocol the generation changes before the assignment, which is still the old one.
                if self.order["protocol"] != "classic":
                    self.own(member, generation, consumer.assignment())
            if not messages:
                continue
            if generation < 0 or not member:
                return  # the group has removed it, and offsets that it commits now would not count as a member's
            metadata = consumer.consumer_group_metadata()
            self.number += 1
            txn = f"{self.label}/{self.number}"
            is_done = False
            kept = not self.aborts or self.rng.random() > 0.1
            producer.begin_transaction()
            with self.ending_well(producer, txn):
                values: dict[int, list[str]] = {}
                behind: dict[int, TopicPartition] = {}
                for one in messages:
                    values.setdefault(one.partition(), []).append(
                        f"o:{one.partition()}:{one.offset()}:{one.value().decode()}"
                    )
                    behind[one.partition()] = TopicPartition(one.topic(), one.partition(), one.offset() + 1)
                for number, some in values.items():
                    self.send(producer, txn, self.order["target"], number % self.order["targets"], some)
                if self._is_held:
                    self.hold([value for some in values.values() for value in some])
                self.hand_in(producer, list(behind.values()), metadata)
                if kept:
                    self.commit(producer, txn)
                    is_done = True
                else:
                    self.abort(producer, txn)
            if not is_done:
                self.seek_back(consumer, messages)

    @staticmethod
    def seek_back(consumer: Consumer, messages: list[Message]) -> None:
        """Seek to the first of these messages.

        Partitions that were assigned meanwhile begin at their committed offset.
        """
        first: dict[int, Message] = {}
        for one in messages:
            first.setdefault(one.partition(), one)
        assigned = {one.partition for one in consumer.assignment()}
        for number in first.keys() & assigned:
            consumer.seek(TopicPartition(first[number].topic(), number, first[number].offset()))

    def hand_in(self, producer: Producer, behind: list[TopicPartition], metadata: object) -> None:
        """Positions, as part of the transaction."""
        try:
            self.ask(partial(self._hand_in_or_die, producer, behind, metadata))
        except KafkaException as error:
            self.say("*refused", error.args[0].name())
            raise

    def _hand_in_or_die(self, producer: Producer, behind: list[TopicPartition], metadata: object) -> None:
        """librdkafka 2.15 may overlook that the coordinator is back, and then this call never times out (its issues
        5456 and 5511). A user would kill the process.
        """
        watchdog = threading.Timer(_STUCK_S, self._die)
        watchdog.daemon = True
        watchdog.start()
        try:
            producer.send_offsets_to_transaction(behind, metadata, _TRY_S)
        finally:
            watchdog.cancel()

    def _die(self) -> None:
        self.say("*stuck")
        os.kill(os.getpid(), signal.SIGKILL)

    def hold(self, values: list[str]) -> None:
        """Wait with an open transaction until the test has done its work."""
        self.say("*holding", values)
        while self._is_held and not self.stopping:
            time.sleep(0.005)

    # ------------------------------------------------------------ reading

    def reader(self) -> None:
        """Record everything that a consumer returns."""
        isolation = self.order["isolation"]
        consumer = Consumer({
            **_NETWORK, "bootstrap.servers": self.order["address"], "group.id": self.label, "enable.auto.commit": False,
            "auto.offset.reset": "earliest", "isolation.level": isolation, "fetch.wait.max.ms": 100,
            "fetch.error.backoff.ms": 20, "check.crcs": True,
        }, logger=_SILENT)  # fmt: skip
        assigned: set[Place] = set()
        try:
            while not self.stopping:
                wanted = {(topic, number) for topic, count in self.sizes().items() for number in range(count)}
                if fresh := wanted - assigned:
                    consumer.incremental_assign([TopicPartition(*where, 0) for where in sorted(fresh)])
                    assigned |= fresh
                found: dict[Place, list[tuple[int, str]]] = {}
                for one in consumer.consume(self.rng.choice((10, 500)), 0.05):
                    if one.error() is None:
                        found.setdefault((one.topic(), one.partition()), []).append(
                            (one.offset(), one.value().decode())
                        )
                for (topic, partition), records in found.items():
                    self.say("handed", isolation, topic, partition, records)
        finally:
            consumer.close()
