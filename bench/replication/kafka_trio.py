"""Three Kafka brokers that are also the controllers (KRaft), on one machine."""

from __future__ import annotations

import subprocess
import time
import uuid
from pathlib import Path

from bench.server.wire import METADATA, Address, Client
from bench.systems import kafka_jars
from bench.systems.servers import Server, ServerFailed
from segmentlog.server.codec.generated.metadata import MetadataRequest
from segmentlog.testing.ports import free_ports

_BROKERS = 3
_START_S = 90.0


class KafkaTrio:
    """Three brokers. Each follower also syncs each batch before it confirms it, with ``flush.messages=1``."""

    def __init__(self, folder: Path, heap: str = "1G") -> None:
        self._folder = folder
        self._heap = heap
        first = free_ports(2 * _BROKERS)
        self._ports = [first + at for at in range(_BROKERS)]
        self._controllers = [first + _BROKERS + at for at in range(_BROKERS)]
        self._servers: list[Server] = []

    @property
    def address(self) -> Address:
        """Address of the first broker."""
        return "127.0.0.1", self._ports[0]

    def start(self) -> None:
        """Start all brokers, and wait until each of them knows the others."""
        class_path = kafka_jars.fetch_jars(kafka_jars.SERVER)
        cluster_id = str(uuid.uuid4())
        flags = [flag for flag in kafka_jars.JVM_FLAGS if not flag.startswith("-Xm")]
        for at in range(_BROKERS):
            folder = self._folder / f"kafka-{at + 1}"
            folder.mkdir(parents=True)
            config = folder / "server.properties"
            config.write_text("".join(f"{key}={value}\n" for key, value in self._settings(at, folder).items()))
            command = ["java", "-cp", class_path, "kafka.tools.StorageTool", "format", "-t", cluster_id,
                       "-c", str(config)]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ServerFailed(f"Kafka's folder cannot be formatted: {(done.stdout + done.stderr)[-2000:]}")
        for at in range(_BROKERS):
            folder = self._folder / f"kafka-{at + 1}"
            command = ["java", f"-Xms{self._heap}", f"-Xmx{self._heap}", *flags, "-cp", class_path, "kafka.Kafka",
                       str(folder / "server.properties")]  # fmt: skip
            self._servers.append(Server(command, folder / "server.log"))
        for server, port in zip(self._servers, self._ports, strict=True):
            server.wait_until(lambda port=port: _broker_count(port) == _BROKERS, _START_S)  # type: ignore[misc]

    def _settings(self, at: int, folder: Path) -> dict[str, str]:
        voters = ",".join(f"{number + 1}@127.0.0.1:{port}" for number, port in enumerate(self._controllers))
        return {
            "process.roles": "broker,controller",
            "node.id": str(at + 1),
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://127.0.0.1:{self._ports[at]},CONTROLLER://127.0.0.1:{self._controllers[at]}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self._ports[at]}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(folder / "data"),
            "default.replication.factor": str(_BROKERS),
            "min.insync.replicas": "2",
            "offsets.topic.replication.factor": str(_BROKERS),
            "transaction.state.log.replication.factor": str(_BROKERS),
            "log.flush.interval.messages": "1",
            "log.segment.delete.delay.ms": "500",
        }

    @property
    def process_ids(self) -> list[int]:
        """The three processes."""
        return [server.pid for server in self._servers]

    def stop(self) -> None:
        """End all brokers."""
        for server in self._servers:
            server.kill()


def _broker_count(port: int) -> int:
    try:
        with Client(("127.0.0.1", port)) as client:
            return len(client.ask(METADATA, MetadataRequest([])).brokers)
    except (OSError, EOFError):
        time.sleep(0.1)
        return 0
