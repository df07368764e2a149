"""Kafka's own clients in a game: a JVM that is killed and stopped as the other players are."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any

_END_S = 20.0
PROJECT = Path(__file__).with_name("java")
_STRATEGIES = {
    "range": "RangeAssignor",
    "roundrobin": "RoundRobinAssignor",
    "cooperative-sticky": "CooperativeStickyAssignor",
}


class JavaPlayers:
    """A plain producer, one with transactions, a member of the group and a reader, in one process."""

    def __init__(self, command: list[str], logs: Path, shared: dict[str, Any]) -> None:
        self._command = command
        self._logs = logs
        self._shared = shared
        self._count = 0
        self.protocol = "classic"
        self.label = ""
        self.process: subprocess.Popen[str] | None = None

    def start(self, seed: int) -> None:
        """Start the players under a new label."""
        self._count += 1
        self.label = f"java{self._count}"
        shared = self._shared
        strategy = _STRATEGIES[shared["strategy"]]
        words = [
            shared["address"], self.label, self._logs / self.label, shared["sizes"], shared["session_ms"],
            shared["transaction_timeout_ms"], shared["group"], f"org.apache.kafka.clients.consumer.{strategy}", seed,
        ]  # fmt: skip
        with open(self._logs.parent / "java.log", "a") as log:
            self.process = subprocess.Popen(
                [*self._command, *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
            )
        self.be(self.protocol)

    def be(self, protocol: str) -> None:
        """Become a member by this protocol; "off": leave the group."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.protocol = protocol
        self.process.stdin.write(f"{protocol}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Well, or else as `kill`."""
        if self.process is not None:
            self.be("end")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
            self.kill()

    def kill(self) -> None:
        """Kill the players like `kill -9`. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
