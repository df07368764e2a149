"""Jobs of processes that use a store as a library, for checks of delivery: each process records every step."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from delivery_process import Process

import segmentlog
from segmentlog.errors import ConsumerFenced, ProducerFenced, TransactionAborted
from segmentlog.producing.producer import Producer
from segmentlog.records import TopicPartition
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore


class OneBoot(FileSystem):
    """The real file system of a machine whose boot time the test chooses."""

    def __init__(self, boot: str) -> None:
        self._boot = boot

    def boot_id(self) -> str:
        return self._boot or FileSystem.boot_id(self)


class LibraryProcess(Process):
    """One process with its store, its journal, and the topics that it may use."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(order)
        self.durable: bool = order.get("durable", False)
        self.timeout_ms: int = order.get("transaction_timeout_ms", 60_000)
        self.consumer: Any = None
        self.store: LogStore = segmentlog.LogStore(
            order["store"], fs=OneBoot(order.get("boot", "")), background=order.get("background", False)
        )

    def stop(self, *_: Any) -> None:
        super().stop()
        if self.consumer is not None:
            self.consumer.wakeup()

    def close(self) -> None:
        self.store.close()

    # ------------------------------------------------------------ producing

    def send(self, producer: Producer, txn: str, topic: str, partition: int, values: list[str]) -> None:
        """Send values, one by one or together, and record it before and after."""
        self.say("send", txn, topic, partition, values)
        try:
            if self.rng.random() < 0.7:
                producer.send_many(topic, [value.encode() for value in values], partition=partition)
            else:
                for value in values:
                    producer.send(topic, value.encode(), partition=partition)
                if not txn or self.rng.random() < 0.5:  # otherwise the commit sends them
                    producer.flush()
        except ProducerFenced:
            if len(values) == 1 and not values[0].startswith("n:"):  # some of the values may have been sent before
                self.say("refused")
            raise
        self.say("ok")

    def plain(self) -> None:
        """Send values without a producer name."""
        with self.store.producer(linger_ms=1, ack="durable" if self.durable else None) as producer:
            while not self.stopping:
                topic, partition = self.place()
                values = [self.value() for _ in range(self.rng.choice((1, 1, 4)))]
                self.send(producer, "", topic, partition, values)
                self.pause()

    def named(self) -> None:
        """Send numbers under a name, and continue after the last number of the killed predecessor."""
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
        """Run transactions over several topics; commit, abort or abandon each of them."""
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
        """Copy records from one topic to another as a member of a group, exactly once."""
        source, target = self.order["source"], self.order["target"]
        while not self.stopping:
            try:
                with self.member(source) as consumer, self.pipeline_producer() as producer:
                    self.consumer = consumer
                    if not self.stopping:  # a stop before the consumer existed could not wake it up
                        self.transform(consumer, producer, target)
            except (ProducerFenced, ConsumerFenced, TransactionAborted):
                continue  # continue at the committed offsets, with another member and another producer
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
            auto_offset_reset="earliest", durable_only=self.durable,
            fetch_bytes=self.rng.choice((200, 2000, 1 << 20)),
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
                self.send(producer, txn, target, batch.partition % self.order["targets"], values)
                self.pause()
                producer.commit_offsets(consumer)
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
        """Record everything that a consumer returns."""
        isolation = self.order["isolation"]
        self.consumer = consumer = self.store.consumer(
            *self.topics,
            follow=True,
            isolation=isolation,
            fetch_bytes=self.rng.choice((200, 1 << 20)),
            auto_offset_reset=self.order.get("reset"),
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
        """Finish the transactions and the pipeline, check that all operations work at once, and record the content."""
        from delivery_trial import settled

        source, target = self.order["source"], self.order["target"]
        places = {**self.topics, target: self.topics[source]}
        started_s = time.monotonic()
        final = settled(self.store, places)
        while any(len(final[source, at].committed) > len(final[target, at].committed) for at in range(places[target])):
            if time.monotonic() - started_s > self.order["patience_s"]:
                break  # the checker reports the missing records
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
