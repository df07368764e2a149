"""Apache Kafka: one broker that is its own controller, and librdkafka's Python client."""

from __future__ import annotations

import importlib.metadata
import operator
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.systems import kafka_jars
from bench.systems.base import Sync, System, Unavailable, count_all
from bench.systems.servers import Server, ServerFailed
from segmentlog.testing.ports import free_ports

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, Producer

_TOPIC = "log"
_START_S = 60.0
_ANSWER_S = 120.0
_COMPACT_S = 600.0
_APPEND_AGAIN_S = 0.5
_CONSUME_RECORDS = 10_000

# Kafka's own words for when a partition is fsynced; without them it never is, but when a segment is rolled.
_FLUSH: dict[Sync, dict[str, str]] = {
    "never": {},
    "second": {"flush.ms": "1000"},
    "batch": {"flush.messages": "1"},
}


_value_of = operator.methodcaller("value")


class Kafka(System):
    """A broker that is started here, in KRaft's combined mode; its metadata, too, is below the folder."""

    name = "Kafka"
    about = (
        "one broker, one partition; confluent-kafka with acks=all, LZ4, batches of 1 MB, linger 5 ms (1 ms where"
        " threads share a producer, 0 for a single durable record); flush.messages=1 or flush.ms=1000 for fsyncs;"
        " consume(10,000)"
    )
    compresses = True
    asynchronous = True

    def __init__(self, folder: Path, sync: Sync, *, keyed: bool) -> None:
        super().__init__(folder, sync, keyed=keyed)
        self._class_path = kafka_jars.fetch_jars()
        self._server: Server | None = None

    @classmethod
    def version(cls) -> str:
        try:
            client = importlib.metadata.version("confluent-kafka")
        except importlib.metadata.PackageNotFoundError:
            raise Unavailable("the package confluent-kafka is not installed: pip install confluent-kafka") from None
        kafka_jars.check_available()
        return f"{kafka_jars.KAFKA_VERSION} (Java {kafka_jars.java_version()}, confluent-kafka {client})"

    def open(self) -> None:
        self._data.mkdir(parents=True, exist_ok=True)
        for attempt in range(3):  # between choosing the ports and taking them, somebody else may
            try:
                self._start()
                break
            except ServerFailed:
                if attempt == 2:
                    raise
        self._failures: list[str] = []
        self._single_reader: Consumer | None = None
        self._create_topic()
        self._producer = self._new_producer(linger_ms=5)
        self._single_producer: Producer | None = None
        self._shared_producer: _SharedProducer | None = None

    def close(self) -> None:
        if self._server is None:
            return
        if self._single_reader is not None:
            self._single_reader.close()
        if self._shared_producer is not None:
            self._shared_producer.close()
        self._producer.flush(10)
        self._server.stop()
        self._server = None

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        produce, poll, delivered = self._producer.produce, self._producer.poll, self._delivered
        for value, key in zip(values, keys if keys is not None else (None,) * len(values), strict=True):
            while True:
                try:
                    produce(_TOPIC, value, key, 0, on_delivery=delivered)
                    break
                except BufferError:  # the queue is full: what is delivered meanwhile makes room
                    poll(0.1)
        poll(0)
        if self.sync == "batch":
            self.flush()

    def append_one(self, value: bytes) -> None:
        if self.sync != "batch":
            self.append([value])
            return
        # Waiting for more records would be in vain: there are none before this one is acknowledged.
        if self._single_producer is None:
            self._single_producer = self._new_producer(linger_ms=0)
        self._single_producer.produce(_TOPIC, value, None, 0, on_delivery=self._delivered)
        self._wait(self._single_producer)

    def writer(self) -> Callable[[bytes], object]:
        """One of those that share a producer, as librdkafka recommends: their records then go in one batch.

        Returns when the record is acknowledged, whatever ``sync`` is. A producer for each thread was
        tried: the broker fsyncs for each of them, one after the other.
        """
        if self._shared_producer is None:
            self._shared_producer = _SharedProducer(self._new_producer(linger_ms=1))
        return self._shared_producer.writer()

    def flush(self) -> None:
        self._wait(self._producer)

    def scan_values(self) -> int:
        count = 0
        for messages in self._scan():
            count += count_all(map(_value_of, messages))
        return count

    def scan_records(self) -> int:
        count = 0
        for messages in self._scan():
            for message in messages:
                _record = (message.offset(), message.timestamp()[1], message.key(), message.value())
            count += len(messages)
        return count

    def read(self, offset: int) -> bytes:
        from confluent_kafka import TopicPartition

        if self._single_reader is None:
            # One record is wanted: without these it would fetch megabytes behind it, and throw them away, or find
            # its queue full and wait for a second.
            few = {"queued.min.messages": 1, "fetch.message.max.bytes": 4096, "fetch.queue.backoff.ms": 0}
            self._single_reader = self._new_consumer(few)
        self._single_reader.assign([TopicPartition(_TOPIC, 0, offset)])
        message = self._single_reader.poll(_ANSWER_S)
        if message is None or message.error() or message.offset() != offset:
            raise RuntimeError(f"offset {offset} is not answered: {message and (message.error() or message.offset())}")
        value = message.value()
        assert value is not None
        return value

    def end(self) -> int:
        from confluent_kafka import TopicPartition

        consumer = self._new_consumer()
        try:
            _low, high = consumer.get_watermark_offsets(TopicPartition(_TOPIC, 0), timeout=_ANSWER_S)
        finally:
            consumer.close()
        return int(high)

    def compact(self) -> None:
        """Make the cleaner see the whole log, and wait until it has written down that it has cleaned all of it.

        It never touches the active segment. That is rolled by an append alone: the log's last record is
        appended once more, which takes nothing of what a compacted log holds.
        """
        last = self._last_message()
        # Deleted segments would lie there for another minute (file.delete.delay.ms), and the cleaner would wait
        # until half of the log is dirty.
        self._alter_topic(
            {"cleanup.policy": "compact", "segment.ms": "1", "min.cleanable.dirty.ratio": "0",
             "file.delete.delay.ms": "0"}
        )  # fmt: skip
        partition = self._data / f"{_TOPIC}-0"
        deadline, appended_s = time.monotonic() + _COMPACT_S, 0.0
        while self._cleaned_to() <= _offset(last) or any(partition.glob("*.deleted")):
            if (now := time.monotonic()) > deadline:
                raise RuntimeError(f"Kafka has cleaned no more than {self._cleaned_to()} in {_COMPACT_S} s")
            if now - appended_s > _APPEND_AGAIN_S and self._cleaned_to() <= _offset(last):
                # More than once if need be: the settings reach the log some time after they were taken.
                self._producer.produce(_TOPIC, last.value(), last.key(), 0, on_delivery=self._delivered)
                self.flush()
                appended_s = now
            time.sleep(0.02)

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()

    def server_ids(self) -> list[int]:
        return [] if self._server is None else [self._server.pid]

    # ------------------------------------------------------------ the broker

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _start(self) -> None:
        from confluent_kafka.admin import AdminClient

        port = free_ports(2)
        controller_port = port + 1
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self._data),
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            # How often it looks for partitions whose flush.ms is over: never, unless it is told.
            "log.flush.scheduler.interval.ms": "200",
            # And how long after its start it looks for the first time: 30 s, unless it is told.
            "log.initial.task.delay.ms": "200",
            # How long the cleaner sleeps when it finds nothing to do: 15 s, unless it is told.
            "log.cleaner.backoff.ms": "50",
        }
        config = self.folder / "server.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        if not (self._data / "meta.properties").exists():
            self._format(config)
        command = ["java", *kafka_jars.JVM_FLAGS, "-cp", self._class_path, "kafka.Kafka", str(config)]
        self._server = Server(command, self.folder / "server.log")
        # What it logs meanwhile, that nobody listens yet, is of no use.
        self._client: dict[str, Any] = {"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0}
        self._admin = AdminClient({**self._client, "reconnect.backoff.max.ms": 100})
        self._server.wait_until(self._answers, _START_S)

    def _format(self, config: Path) -> None:
        # StorageTool runs for a second: without the heap of a broker.
        cluster = str(uuid.uuid4())
        command = ["java", "-cp", self._class_path, "kafka.tools.StorageTool", "format", "-t", cluster, "-c",
                   str(config)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"Kafka's folder cannot be formatted: {(done.stdout + done.stderr)[-2000:]}")

    def _answers(self) -> bool:
        """Whether the broker takes part: with what is left of another one it first waits for that one's session."""
        from confluent_kafka import KafkaException

        try:
            return bool(self._admin.list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    def _create_topic(self) -> None:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

        if _TOPIC not in self._admin.list_topics(timeout=_ANSWER_S).topics:
            topic = NewTopic(_TOPIC, num_partitions=1, replication_factor=1, config=_FLUSH[self.sync])
            self._admin.create_topics([topic])[_TOPIC].result(_ANSWER_S)
        # What is there is loaded before its partition has a leader, and nothing can be appended before that.
        deadline = time.monotonic() + _ANSWER_S
        while True:
            topics = self._admin.list_topics(_TOPIC, timeout=_ANSWER_S).topics
            partition = topics[_TOPIC].partitions.get(0)
            if partition is not None and partition.leader == 1:
                try:
                    self.end()
                    return
                except KafkaException:
                    pass
            if time.monotonic() > deadline:
                raise RuntimeError(f"the partition has no leader after {_ANSWER_S} s")
            time.sleep(0.01)

    def _alter_topic(self, config: dict[str, str]) -> None:
        from confluent_kafka.admin import (  # type: ignore[attr-defined]
            AlterConfigOpType,
            ConfigEntry,
            ConfigResource,
            ResourceType,
        )

        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, _TOPIC, incremental_configs=entries)
        self._admin.incremental_alter_configs([resource])[resource].result(_ANSWER_S)

    def _cleaned_to(self) -> int:
        """Return the first offset that the cleaner has not cleaned, according to its checkpoint."""
        try:
            lines = (self._data / "cleaner-offset-checkpoint").read_text().splitlines()
        except FileNotFoundError:
            return 0
        for line in lines[2:]:  # its version, the number of lines, then: topic partition offset
            topic, _partition, offset = line.split()
            if topic == _TOPIC:
                return int(offset)
        return 0

    # ------------------------------------------------------------ its clients

    def _new_producer(self, *, linger_ms: int) -> Producer:
        from confluent_kafka import Producer

        return Producer(
            {
                **self._client,
                "acks": "all",
                "compression.type": "lz4",
                "linger.ms": linger_ms,
                "batch.size": 1_000_000,
                "queue.buffering.max.messages": 1_000_000,
            }
        )

    def _new_consumer(self, more: dict[str, Any] | None = None) -> Consumer:
        from confluent_kafka import Consumer

        return Consumer(
            {
                **self._client,
                "group.id": "bench",  # asked for, and not used: the partition is assigned here
                "enable.auto.commit": False,
                **(more or {}),
            }
        )

    def _scan(self) -> Iterator[list[Message]]:
        """All that is in the log, as the client hands it out."""
        from confluent_kafka import TopicPartition

        end = self.end()
        consumer = self._new_consumer({"queued.min.messages": 1_000_000})
        try:
            consumer.assign([TopicPartition(_TOPIC, 0, 0)])
            next_offset = 0
            while next_offset < end:
                messages = consumer.consume(_CONSUME_RECORDS, timeout=0.1)
                for message in messages:
                    if message.error():
                        raise RuntimeError(f"the consumer failed at {next_offset}: {message.error()}")
                if messages:
                    yield messages
                    next_offset = _offset(messages[-1]) + 1
        finally:
            consumer.close()

    def _last_message(self) -> Message:
        from confluent_kafka import TopicPartition

        consumer = self._new_consumer()
        try:
            consumer.assign([TopicPartition(_TOPIC, 0, self.end() - 1)])
            message = consumer.poll(_ANSWER_S)
            if message is None or message.error():
                raise RuntimeError("the last record cannot be read")
            return message
        finally:
            consumer.close()

    def _delivered(self, error: object, _message: object) -> None:
        if error is not None:
            self._failures.append(str(error))

    def _wait(self, producer: Producer) -> None:
        left = producer.flush(_ANSWER_S)
        if left or self._failures:
            raise RuntimeError(f"{left} records are not acknowledged after {_ANSWER_S} s; errors: {self._failures[:3]}")


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None, "only a record that is still to be sent has none"
    return offset


class _SharedProducer:
    """One producer of many threads, and the thread that tells them of their acknowledgements."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._is_closed = False
        self._poller = threading.Thread(target=self._poll, name="kafka-poll", daemon=True)
        self._poller.start()

    def writer(self) -> Callable[[bytes], object]:
        """Return a function for one thread that appends a record, and returns when it is acknowledged."""
        produce, is_answered, errors = self._producer.produce, threading.Event(), list[str]()

        def answered(error: object, _message: object) -> None:
            if error is not None:
                errors.append(str(error))
            is_answered.set()

        def write(value: bytes) -> None:
            is_answered.clear()
            produce(_TOPIC, value, None, 0, on_delivery=answered)
            if not is_answered.wait(_ANSWER_S) or errors:
                raise RuntimeError(f"the record is not acknowledged: {errors or f'no answer in {_ANSWER_S} s'}")

        return write

    def close(self) -> None:
        self._is_closed = True
        self._poller.join()

    def _poll(self) -> None:
        while not self._is_closed:
            self._producer.poll(0.1)
