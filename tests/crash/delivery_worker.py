"""The users of a store, each a process that is killed or stopped at any moment and writes down what it does.

    delivery_worker.py              a nursery: forks workers, which takes a millisecond and not 300

It reads lines of JSON: ``{"job": ..., "label": ..., "log": ..., ...}`` forks a worker and answers with its
pid; ``{"wait": pid, "timeout_s": ...}`` answers with its status once it is gone. A worker appends events, as
`delivery_checker` tells them, to the file ``log``; "*begun" and "*stopped" are for people.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

import segmentlog
from segmentlog.errors import ConsumerFenced, ProducerFenced, SegmentlogError, TransactionAborted
from segmentlog.log.aborted import AbortedTransactions
from segmentlog.log.producers import ProducerStates
from segmentlog.producing.producer import Producer
from segmentlog.records import TopicPartition
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.transactions.names import Names
from segmentlog.transactions.registration import Registration


class OneBoot(FileSystem):
    """The real file system of a machine that was started at a time of the test's choosing."""

    def __init__(self, boot: str) -> None:
        self._boot = boot

    def boot_id(self) -> str:
        return self._boot or FileSystem.boot_id(self)


class Worker:
    """One process: its store, its journal, and the topics that it may use."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.label: str = order["label"]
        self.rng = random.Random(order["seed"])
        self.topics: dict[str, int] = order["topics"]
        self.durable: bool = order.get("durable", False)
        self.timeout_ms: int = order.get("transaction_timeout_ms", 60_000)
        self.fd = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.number = 0
        self.stopping = False
        self.consumer: Any = None
        for broken in order.get("broken", ()):
            _BROKEN[broken]()
        self.store: LogStore = segmentlog.LogStore(
            order["store"], fs=OneBoot(order.get("boot", "")), background=order.get("background", False)
        )

    def say(self, kind: str, *rest: Any) -> None:
        line = json.dumps([kind, self.label, *rest]) + "\n"
        os.write(self.fd, line.encode())

    def stop(self, *_: Any) -> None:
        self.stopping = True
        if self.consumer is not None:
            self.consumer.wakeup()

    def is_told_to_stop(self) -> bool:
        return self.stopping

    def value(self) -> str:
        self.number += 1
        return f"{self.label}-{self.number}" + "." * self.rng.choice((0, 0, 100))

    def pause(self) -> None:
        time.sleep(self.rng.choice((0.0, 0.0005, 0.003)))

    def place(self) -> tuple[str, int]:
        topic = self.rng.choice(list(self.topics))
        return topic, self.rng.randrange(self.topics[topic])

    def run(self) -> None:
        self.say("*begun", self.order["job"])
        try:
            getattr(self, self.order["job"])()
            self.store.close()
        except BaseException:
            self.say("error", traceback.format_exc())
            raise
        self.say("*stopped")

    # ------------------------------------------------------------ producing

    def send(self, producer: Producer, txn: str, topic: str, partition: int, values: list[str]) -> None:
        """Send values, one by one or together, and say so before and after."""
        self.say("send", txn, topic, partition, values)
        try:
            if self.rng.random() < 0.7:
                producer.send_many(topic, [value.encode() for value in values], partition=partition)
            else:
                for value in values:
                    producer.send(topic, value.encode(), partition=partition)
                if not txn or self.rng.random() < 0.5:  # else the commit sends it
                    producer.flush()
        except ProducerFenced:
            if len(values) == 1 and not values[0].startswith("n:"):  # of several, some may have been sent before
                self.say("refused")
            raise
        self.say("ok")

    def plain(self) -> None:
        """A producer without a name."""
        with self.store.producer(linger_ms=1, ack="durable" if self.durable else None) as producer:
            while not self.stopping:
                topic, partition = self.place()
                values = [self.value() for _ in range(self.rng.choice((1, 1, 4)))]
                self.send(producer, "", topic, partition, values)
                self.pause()

    def named(self) -> None:
        """Counts, and goes on counting where its last instance was killed."""
        name = self.order["name"]
        while not self.stopping:
            ack: Any = "durable" if self.durable else None
            with contextlib.suppress(ProducerFenced), self.store.producer(name=name, linger_ms=1, ack=ack) as producer:
                last: dict[tuple[str, int], int] = {}
                while not self.stopping:
                    topic, partition = place = self.place()
                    if place not in last:
                        last[place] = producer.last_sequence(topic, partition)
                    count = self.rng.choice((1, 1, 5))
                    values = [f"n:{name}:{topic}:{partition}:{last[place] + 1 + at}" for at in range(count)]
                    self.send(producer, "", topic, partition, values)
                    last[place] += count
                    self.pause()

    def transactions(self) -> None:
        """Transactions over several topics: committed, aborted, or cut short."""
        while not self.stopping:
            linger_ms, name = self.rng.choice((0, 1)), self.order.get("name")
            with (
                contextlib.suppress(ProducerFenced),
                self.store.producer(name=name, linger_ms=linger_ms, transaction_timeout_ms=self.timeout_ms) as producer,
            ):
                for _ in range(self.rng.choice((1, 5, 50))):
                    self.transaction(producer)
                    self.pause()
                    if self.is_told_to_stop():
                        break

    def transaction(self, producer: Producer) -> None:
        txn = f"{self.label}/{self.number}"
        self.number += 1
        producer.begin_transaction()
        try:
            for _ in range(self.rng.choice((1, 2, 4))):
                topic, partition = self.place()
                self.send(producer, txn, topic, partition, [self.value() for _ in range(self.rng.choice((1, 3)))])
                self.pause()
        except ProducerFenced:
            self.say("aborted", txn)
            producer.abort_transaction()
            raise
        if self.rng.random() < 0.25:
            self.say("abort", txn)
            producer.abort_transaction()
            self.say("aborted", txn)
            return
        self.commit(producer, txn)

    def commit(self, producer: Producer, txn: str) -> None:
        self.say("commit", txn)
        try:
            producer.commit_transaction()
        except (ProducerFenced, TransactionAborted):
            self.say("aborted", txn)
            raise
        self.say("committed", txn)

    # ------------------------------------------------------------ exactly once

    def pipeline(self) -> None:
        """A member of a group: what it is given of one topic it transforms into another, exactly once."""
        source, target = self.order["source"], self.order["target"]
        while not self.stopping:
            try:
                with self.member(source) as consumer, self.pipeline_producer() as producer:
                    self.consumer = consumer
                    if not self.stopping:  # said before there was a consumer to wake up
                        self.transform(consumer, producer, target)
            except (ProducerFenced, ConsumerFenced, TransactionAborted):
                continue  # from the committed positions on, with another member and another producer
            finally:
                self.consumer = None

    @contextlib.contextmanager
    def pipeline_producer(self) -> Iterator[Producer]:
        with self.store.producer(
            name=self.order["name"], linger_ms=0, transaction_timeout_ms=self.timeout_ms
        ) as producer:
            yield producer

    def member(self, source: str) -> Any:
        def owned(partitions: list[TopicPartition]) -> None:
            for tp in partitions:
                self.say("owns", time.monotonic_ns(), consumer.member_id, consumer.generation, *tp)

        def disowned(partitions: list[TopicPartition]) -> None:
            for tp in partitions:
                self.say("disowns", time.monotonic_ns(), consumer.member_id, *tp)

        consumer = self.store.consumer(
            source, group=self.order["group"], follow=self.order["job"] != "look", isolation="read_committed",
            auto_offset_reset="earliest", durable_only=self.durable, fetch_bytes=self.rng.choice((200, 2000, 1 << 20)),
            max_poll_interval_ms=self.order.get("max_poll_interval_ms", 300_000),
            on_assigned=owned, on_revoked=disowned, on_lost=disowned,
        )  # fmt: skip
        return consumer

    def transform(self, consumer: Any, producer: Producer, target: str) -> None:
        for batch in consumer.batches():
            if self.stopping:
                return
            txn = f"{self.label}/{self.number}"
            self.number += 1
            try:
                producer.begin_transaction()
                values = [
                    f"o:{batch.partition}:{offset}:{(value or b'').decode()}"
                    for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True)
                ]
                self.send(producer, txn, target, batch.partition, values)
                self.pause()
                producer.commit_positions(consumer)
                self.pause()
                self.commit(producer, txn)
            except ConsumerFenced:
                self.say("abort", txn)
                producer.abort_transaction()
                if self.rng.random() < 0.5:
                    raise
                self.seek_back(consumer)
            except TransactionAborted:
                self.seek_back(consumer)

    @staticmethod
    def seek_back(consumer: Any) -> None:
        for tp in consumer.assignment():
            committed = consumer.committed(*tp)
            consumer.seek(*tp, "earliest" if committed is None else committed.offset)

    # ------------------------------------------------------------ reading

    def reader(self) -> None:
        """Writes down everything that it is handed."""
        isolation = self.order["isolation"]
        self.consumer = consumer = self.store.consumer(
            *self.topics, follow=True, isolation=isolation, fetch_bytes=self.rng.choice((200, 1 << 20))
        )
        with consumer:
            for batch in () if self.stopping else consumer.batches():
                records = [
                    [offset, (value or b"").decode()]
                    for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True)
                ]
                self.say("handed", isolation, batch.topic, batch.partition, records)
                if self.stopping:
                    return

    # ------------------------------------------------------------ in the end

    def look(self) -> None:
        """Settle, let the pipeline finish, see that everything works at once, and write down what is there."""
        from delivery_trial import settled

        source, target = self.order["source"], self.order["target"]
        places = {**self.topics, target: self.topics[source]}
        started_s = time.monotonic()
        final = settled(self.store, places)
        while any(len(final[source, at].committed) > len(final[target, at].committed) for at in range(places[target])):
            if time.monotonic() - started_s > self.order["patience_s"]:
                break  # the checker says what is missing
            for topic, number in final:
                self.store.topic(topic).partition(number).flush()
            with self.member(source) as consumer, self.pipeline_producer() as producer:
                self.transform(consumer, producer, target)
            final = settled(self.store, places)
        for name in ("judge", "bank", None):  # not "counter": every record counts
            with self.store.producer(name=name, linger_ms=0) as producer:
                txn = f"{self.label}/{self.number}"
                self.number += 1
                producer.begin_transaction()
                for topic in self.topics:
                    if topic != source:
                        self.send(producer, txn, topic, 0, [self.value()])
                self.commit(producer, txn)
        final = settled(self.store, places)
        taken_s = time.monotonic() - started_s
        if taken_s > self.order["patience_s"]:
            self.say("error", f"blocked: settling took {taken_s:.0f} s")
        with open(self.order["found"], "w") as file:
            json.dump([(*place, msgspec.to_builtins(one, str_keys=False)) for place, one in final.items()], file)


def _show_aborted() -> None:
    AbortedTransactions.look = lambda self: {}  # type: ignore[method-assign]


def _fence_nobody() -> None:
    Registration.check = lambda self: None  # type: ignore[method-assign]
    ProducerStates.admit = lambda self, stamp, count, now_ms: None  # type: ignore[method-assign]


def _call_everybody_dead() -> None:
    Names.is_alive = lambda self, name, state: False  # type: ignore[method-assign]


_BROKEN = {"aborts": _show_aborted, "fences": _fence_nobody, "leases": _call_everybody_dead}
"""Precautions that a worker is to go without, to see whether that is found out."""


def work(order: dict[str, Any]) -> int:
    """In the forked child: the status that it ends with."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        worker = Worker(order)
        signal.signal(signal.SIGTERM, worker.stop)
        if told:  # before there was a worker; the other way round, one that was told just now would forget it
            worker.stopping = True
        worker.run()
    except (SegmentlogError, OSError):
        traceback.print_exc()
        return 1
    return 0


def wait_for(pid: int, timeout_s: float) -> int:
    """The status that a worker ended with; -1 when it did not."""
    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0  # waited for already
        if found:
            return os.waitstatus_to_exitcode(status) & 0xFF
        time.sleep(0.001)
    os.kill(pid, signal.SIGUSR1)  # where is it?
    time.sleep(0.5)
    return -1


def main() -> None:
    """The nursery."""
    faulthandler.register(signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until a worker knows what to do about it
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(wait_for(order["wait"], order["timeout_s"]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.close(0)
                status = work(order)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
