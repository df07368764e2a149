"""Clients that people have: Java's ProducerPerformance, and confluent-kafka, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from bench.systems import kafka_jars
from bench.systems.base import Unavailable

RECORD_BYTES = 100
_PATIENCE_S = 600.0
_SUMMARY = re.compile(r"^(\d+) records sent, ([\d.]+) records/sec")


class Run(msgspec.Struct, frozen=True):
    """Of one client: when it sent its first record and when the last one was acknowledged, on one clock for all."""

    records: int
    began_s: float
    ended_s: float


class ClientFailed(RuntimeError):
    """A client ended with an error; carries what it said."""


def rate(runs: Sequence[Run]) -> float:
    """Return the records a second of all clients, from the first one's first record to the last one's last answer."""
    seconds = max(run.ended_s for run in runs) - min(run.began_s for run in runs)
    return sum(run.records for run in runs) / seconds


def check_java() -> None:
    """Raise `Unavailable` if the Java clients are not available."""
    kafka_jars.check_available(release=kafka_jars.SERVER)


def check_confluent() -> None:
    """Raise `Unavailable` if confluent-kafka is not available."""
    if importlib.util.find_spec("confluent_kafka") is None:
        raise Unavailable("the package confluent-kafka is not installed: pip install confluent-kafka")


def java_producers(count: int, bootstrap: str, topic: str, records: int) -> list[Run]:
    """``count`` of ProducerPerformance at once, with Kafka's defaults and acks=1.

    Each says how long it took itself, without the start of its JVM.
    """
    class_path = kafka_jars.fetch_jars(kafka_jars.SERVER)
    command = [
        "java", "-Xmx256M", "-cp", class_path, "org.apache.kafka.tools.ProducerPerformance",
        "--topic", topic, "--num-records", str(records), "--record-size", str(RECORD_BYTES), "--throughput", "-1",
        "--bootstrap-server", bootstrap, "--command-property", "acks=1",
    ]  # fmt: skip
    return _together([_Java(command) for _ in range(count)])


def confluent_producers(count: int, bootstrap: str, topic: str, records: int) -> list[Run]:
    """``count`` of confluent-kafka's producers at once, with librdkafka's defaults and acks=1."""
    return _together([_Confluent(bootstrap, topic, records) for _ in range(count)])


def confluent_latency(bootstrap: str, topic: str, samples: int) -> list[float]:
    """Milliseconds from ``produce`` with linger 0 to the record that a consumer in the same process has."""
    command = [sys.executable, "-m", "bench.server.confluent", "latency", bootstrap, topic, str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    if done.returncode:
        raise ClientFailed(f"confluent-kafka: {done.stderr[-2000:]}")
    return [float(one) for one in json.loads(done.stdout)]


class _Started:
    """A client's process, and the thread that reads what it says."""

    def __init__(self, command: Sequence[str]) -> None:
        self._name = " ".join(command)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._said: list[str] = []
        self.run: Run | None = None
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for reader in self._readers:
            reader.start()

    def finish(self) -> Run:
        """Wait for its end."""
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for reader in self._readers:
            reader.join()
        if self._process.returncode or self.run is None:
            raise ClientFailed(f"{self._name}: {''.join(self._said)[-2000:]}")
        return self.run

    def let_go(self) -> None:
        """Let the client begin, if it waits for that."""

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(line)
            self._hear(line)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._said.extend(self._process.stderr)

    def _hear(self, line: str) -> None: ...


class _Java(_Started):
    def _hear(self, line: str) -> None:
        found = _SUMMARY.match(line)
        # Reports on the way begin alike; what comes last has all of them.
        if found and "99.9th" in line:
            now_s, records = time.monotonic(), int(found[1])
            self.run = Run(records, now_s - records / float(found[2]), now_s)


class _Confluent(_Started):
    def __init__(self, bootstrap: str, topic: str, records: int) -> None:
        self._is_ready = threading.Event()
        super().__init__(
            [sys.executable, "-m", "bench.server.confluent", "produce", bootstrap, topic, str(records),
             str(RECORD_BYTES)]
        )  # fmt: skip

    def let_go(self) -> None:
        self._is_ready.wait(30)
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def _hear(self, line: str) -> None:
        if line.startswith("ready"):
            self._is_ready.set()
        else:
            self.run = msgspec.json.decode(line, type=Run)


def _together(started: Sequence[_Started]) -> list[Run]:
    for one in started:
        one.let_go()
    return [one.finish() for one in started]
