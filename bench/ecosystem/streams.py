"""Rows of a Kafka Streams application: what it gets done, and what it takes to test one."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.server.brokers import Start
from bench.server.clients import ClientFailed
from bench.server.rows import Compared, Figures, Once, Row, Side
from bench.server.wire import Client
from bench.systems import kafka_jars
from bench.systems.servers import cache_folder

_SOURCE = Path(__file__).with_name("Flow.java")
_PARTITIONS = 4
_PATIENCE_S = 180.0
_FEW = 100
_CPU = "us of server CPU a record"
_FLAGS = ("-Xmx512M", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error")


def rows() -> list[Row]:
    """All of them."""
    return [
        Row("streams/flow", "Kafka Streams, exactly_once_v2",
            (Compared("records/s", "counted by key, with a repartition and a changelog", "records/s", 1.0),
             Compared(_CPU, "the same: server CPU a record", "us", 1.0, at_least=False)),
            _flow, start=Start()),
        Row("streams/test", "a whole Streams test",
            (Compared("whole", f"server and application started, {_FEW} records counted, both ended", "s", 1.0,
                      at_least=False),
             Compared("server", "of which until the server answers", "s", 1.0, at_least=False)),
            _whole, start=None),
    ]  # fmt: skip


@functools.cache
def class_path() -> str:
    """Of the application. Raises `Unavailable`."""
    kafka_jars.check_available("javac", release=kafka_jars.STREAMS)
    jars = kafka_jars.fetch_jars(kafka_jars.STREAMS)
    source = _SOURCE.read_bytes()
    classes = cache_folder() / f"flow-{hashlib.sha256(source).hexdigest()[:16]}"
    if not classes.is_dir():
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="compiling-") as temporary:
            command = ["javac", "--release", "17", "-cp", jars, "-d", f"{temporary}/classes", str(_SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{_SOURCE.name} does not compile: {done.stderr[-2000:]}")
            Path(temporary, "classes").rename(classes)  # a folder of that name is always complete
    return f"{classes}:{jars}"


@contextmanager
def _flow(side: Side) -> Iterator[Once]:
    class_path()
    records = side.sizes.client_records
    with side.new_topic(_PARTITIONS) as topic:
        fill(side.broker.bootstrap_servers, topic.name, records)

        def once() -> Figures:
            with side.new_topic(_PARTITIONS) as out:
                before_s = side.broker.cpu_s()
                seconds = run(side.broker.bootstrap_servers, topic.name, out.name, records)
                cpu_s = side.broker.cpu_s() - before_s
                check(side.broker.bootstrap_servers, out.name, records)
            return {"records/s": records / seconds, _CPU: cpu_s / records * 1e6}

        yield once


@contextmanager
def _whole(side: Side) -> Iterator[Once]:
    """Each time with a server that has nothing yet, as a test starts it."""
    class_path()
    number = 0

    def once() -> Figures:
        nonlocal number
        number += 1
        one = Side(side.system, side.folder / str(number), side.sizes, side.start, None)
        broker = one.new_broker()
        began_s = time.perf_counter()
        try:
            ready_s = broker.start()
            with Client(broker.address) as client:
                for name in ("in", "out"):
                    client.create(name, 1, {})
                    client.leaders(name)
            fill(broker.bootstrap_servers, "in", _FEW, partitions=1)
            run(broker.bootstrap_servers, "in", "out", _FEW)
            check(broker.bootstrap_servers, "out", _FEW)
        finally:
            broker.stop()
        return {"whole": time.perf_counter() - began_s, "server": ready_s}

    yield once


def fill(bootstrap: str, topic: str, records: int, partitions: int = _PARTITIONS) -> None:
    """Write them, evenly, under some thousand words."""
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 20, "log_level": 0})
    for number in range(records):
        value = b"%04d" % (number * 7919 % 5000) + b"x" * 96
        while True:
            try:
                producer.produce(topic, value, partition=number % partitions)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(_PATIENCE_S):
        raise ClientFailed(f"{topic} is not filled")


def run(bootstrap: str, source: str, to: str, records: int) -> float:
    """Return the application, once, from its start to its end: seconds from its first record to all being committed."""
    with tempfile.TemporaryDirectory(prefix="streams-state-") as state:
        command = [
            "java", *_FLAGS, "-cp", class_path(), "Flow", bootstrap, f"flow-{time.time_ns()}", source, to, str(records),
            state,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    words = done.stdout.split()
    if done.returncode or len(words) < 2 or words[-2] != "done":
        raise ClientFailed(f"Streams: {(done.stdout + done.stderr)[-2000:]}")
    return float(words[-1])


def check(bootstrap: str, topic: str, records: int) -> None:
    """Each count comes once, and all of them are committed: as many records can be read as were to be counted."""
    consumer = Consumer({
        "bootstrap.servers": bootstrap, "group.id": "check", "isolation.level": "read_committed", "log_level": 0,
        "enable.partition.eof": True, "enable.auto.commit": False,
    })  # fmt: skip
    partitions = consumer.list_topics(topic, _PATIENCE_S).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
    ended, found = set(), 0
    ends_s = time.monotonic() + _PATIENCE_S
    while len(ended) < len(partitions) and time.monotonic() < ends_s:
        for message in consumer.consume(5000, 0.5):
            if message.error() is None:
                found += 1
            else:
                ended.add(message.partition())
    consumer.close()
    if found != records:
        raise ClientFailed(f"Streams counted {found:,} of {records:,} records")
