"""Kafka's own programs, in Java: its broker, its command line tools."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import NamedTuple

from server.clients.driver import bytes_of, text_of
from server.clients.java_driver import java_command
from server.clients.program import Program
from server.wire_client import WireClient, request_class
from waiting import wait_until

from segmentlog.testing.ports import free_ports

HERE = Path(__file__).parent
METADATA = 3
PATIENCE_S = 300.0
"""For what takes Java seconds on an idle machine, of which there may be four on two cores."""


class Broker:
    """Kafka, one broker that is its own controller."""

    def __init__(self, folder: Path, **settings: object) -> None:
        folder.mkdir()
        port = free_ports(2)
        controller = port + 1
        self.address = f"127.0.0.1:{port}"
        told = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": folder / "data",
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "share.coordinator.state.topic.num.partitions": 1,
            "group.initial.rebalance.delay.ms": 0,
            "group.min.session.timeout.ms": 100,
        }
        config = folder / "server.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in (told | settings).items()))
        self._log = folder / "log"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                java_command("Broker", config, memory="512m", project=HERE), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until the broker answers."""
        wait_until(self._answers, "Kafka does not start")

    def _answers(self) -> bool:
        assert self._process.poll() is None, f"Kafka ended: {self._log.read_text()[-2000:]}"
        with contextlib.suppress(OSError, EOFError), WireClient(self.address) as client:
            return bool(client.ask(METADATA, 12, request_class(METADATA)(topics=[])).brokers)
        return False

    def stop(self) -> None:
        """Kill the broker: no test needs it any more."""
        self._process.kill()
        self._process.communicate()
        print(self._log.read_text()[-5000:])


class Ran(NamedTuple):
    """The result of a command."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """All of it."""
        return self.out + self.err


SCRIPTS = {
    "connect-mirror-maker.sh": "org.apache.kafka.connect.mirror.MirrorMaker",
    "kafka-configs.sh": "org.apache.kafka.tools.ConfigCommand",
    "kafka-console-consumer.sh": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "kafka-console-producer.sh": "org.apache.kafka.tools.ConsoleProducer",
    "kafka-consumer-groups.sh": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
}
"""The class that a command of Kafka's ``bin`` calls."""


class Tools:
    """Kafka's command line tools, in one process."""

    def __init__(self) -> None:
        options = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
        self._command = java_command("Tools", memory="256m", project=HERE, options=options)
        self._program = Program(self._command, PATIENCE_S)

    def run(self, main: str, *words: object, stdin: str = "") -> Ran:
        """Return a command by its main class: of `org.apache.kafka.tools`, unless it has a package of its own."""
        name = main if main.startswith("org.") else f"org.apache.kafka.tools.{main}"
        try:
            status, out, err = self._program.ask(*(text_of(str(word).encode()) for word in (stdin, name, *words)))
        except AssertionError:  # it is killed, where it takes too long: the next test is to have one
            self._program.close()
            self._program = Program(self._command, PATIENCE_S)
            raise
        return Ran(int(status), *((bytes_of(text) or b"").decode() for text in (out, err)))

    def close(self) -> None:
        """End it."""
        self._program.close()
