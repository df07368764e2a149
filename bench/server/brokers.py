"""A server under comparison, ours or Kafka's: its processes, from the start to the end or to SIGKILL.

Both are used as they come: the defaults of each, but for what says where and for what Kafka needs to run alone. Kafka's
heap and flags are those of its own start script.
"""

from __future__ import annotations

import abc
import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec

import segmentlog
from bench.machine import own_bytes
from bench.server.wire import Client
from bench.systems import kafka_jars
from bench.systems.base import Unavailable
from bench.systems.servers import Server, ServerFailed
from segmentlog.testing.ports import free_ports

OURS = "segmentlog"
KAFKA = "Kafka"

_START_S = 90.0
_TICKS_S = os.sysconf("SC_CLK_TCK")


class Start(msgspec.Struct, frozen=True):
    """How servers are started. Rows that agree in it share theirs.

    ``core``: all of their threads run there. ``of``: rows that have servers of their own, as they look at memory.
    """

    core: int | None = None
    of: str = ""
    kafka: tuple[tuple[str, str], ...] = ()
    """What of Kafka's settings is not as it comes."""


class Memory(msgspec.Struct, frozen=True):
    """Of the largest of a server's processes, in bytes.

    ``own`` is what no file is behind, ``pss`` and ``rss`` count pages of the log that it has mapped: with the processes
    that share them taken into account, and without.
    """

    own: int
    pss: int
    rss: int


class Broker(abc.ABC):
    """One server, with its data in ``folder``, which stays when it ends."""

    name: ClassVar[str]

    def __init__(self, folder: Path, start: Start) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._start = start
        self._server: Server | None = None
        self.port = free_ports(4)

    @classmethod
    @abc.abstractmethod
    def version(cls) -> str:
        """Return the version of the server. Raises `Unavailable` if something is missing."""

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> float:
        """Start it; returns the seconds from the start of the process to the first answers.

        Those are to ApiVersions and Metadata, with a broker in it.
        """
        self._prepare()
        if self._start.core is not None:
            check_pinning()
        pinned = [] if self._start.core is None else ["taskset", "-c", str(self._start.core)]
        began_s = time.perf_counter()
        self._server = Server([*pinned, *self._command()], self.folder / "server.log")
        self._server.wait_until(self._answers, _START_S)
        return time.perf_counter() - began_s

    def stop(self) -> None:
        """Let it end."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def kill(self) -> None:
        """SIGKILL all of its processes at once."""
        if self._server is None:
            return
        children = self.process_ids()[1:]
        self._server.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        while any(_is_there(pid) for pid in children):
            time.sleep(0.0005)
        self._server = None

    def process_ids(self) -> list[int]:
        """All of its processes, the one that was started first."""
        return [] if self._server is None else list(_with_children(self._server.pid))

    def cpu_s(self) -> float:
        """Processor time of all of them since they began."""
        return sum(map(_cpu_s, self.process_ids()))

    def memory(self) -> Memory:
        """Return the memory of the server's largest process."""
        found = [_memory(pid) for pid in self.process_ids()]
        return max(found, key=lambda one: one.rss)

    @abc.abstractmethod
    def _command(self) -> list[str]: ...

    def _prepare(self) -> None: ...  # noqa: B027 (one of the two has nothing to prepare)

    def _answers(self) -> bool:
        try:
            with Client(self.address, timeout_s=_START_S) as client:
                return client.is_ready()
        except (OSError, EOFError):
            return False


class OurBroker(Broker):
    """``segmentlog serve``, a worker a core."""

    name = OURS

    @classmethod
    def version(cls) -> str:
        return segmentlog.__version__

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "segmentlog", "--dir", str(self.store), "serve",
                "--listen", self.bootstrap_servers]  # fmt: skip


class KafkaBroker(Broker):
    """Kafka, one broker that is its own controller."""

    name = KAFKA

    @classmethod
    def version(cls) -> str:
        kafka_jars.check_available(release=kafka_jars.SERVER)
        return f"{kafka_jars.SERVER.version} (Java {kafka_jars.java_version()})"

    def _prepare(self) -> None:
        data = self.folder / "data"
        if data.exists():
            return
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self.port + 1}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self.port + 1}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(data),
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            # What a row has written is to be gone when the next one begins, and not a minute later.
            "log.segment.delete.delay.ms": "500",
            **dict(self._start.kafka),
        }
        self._config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        command = ["java", "-cp", kafka_jars.fetch_jars(kafka_jars.SERVER), "kafka.tools.StorageTool", "format",
                   "-t", str(uuid.uuid4()), "-c", str(self._config)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailed(f"Kafka's folder cannot be formatted: {(done.stdout + done.stderr)[-2000:]}")

    @property
    def _config(self) -> Path:
        return self.folder / "server.properties"

    def _command(self) -> list[str]:
        class_path = kafka_jars.fetch_jars(kafka_jars.SERVER)
        return ["java", *kafka_jars.JVM_FLAGS, "-cp", class_path, "kafka.Kafka", str(self._config)]


BROKERS: dict[str, type[Broker]] = {OURS: OurBroker, KAFKA: KafkaBroker}


def last_core() -> int:
    """Return the core that pinned servers get; the clients get the others."""
    return max(os.sched_getaffinity(0))


def check_pinning() -> None:
    """Raise `Unavailable` if a server cannot have a core to itself."""
    if shutil.which("taskset") is None:
        raise Unavailable("taskset is not installed: apt-get install util-linux")
    if len(os.sched_getaffinity(0)) < 2:
        raise Unavailable("a server pinned to a core needs another core for its clients")


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from _with_children(int(child))


def _is_there(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_S
    return 0.0


def _memory(pid: int) -> Memory:
    found = {"Rss:": 0, "Pss:": 0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, *rest = line.split()
            if name in found:
                found[name] = int(rest[0]) * 1024
    return Memory(own_bytes(pid), found["Pss:"], found["Rss:"])
