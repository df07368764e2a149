"""A worker of Kafka Connect in distributed mode, and what it is asked by REST."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server.clients.java_driver import MOVED, java_command
from server.clients.teller import Start, Teller

from segmentlog.testing.ports import free_ports

_INTERNAL = ("config", "offset", "status")


class ConnectWorker:
    """It keeps its port and its settings when it is started again."""

    def __init__(
        self, address: str, start: Start, properties: Path, settings: Mapping[str, object], memory: str = "256m"
    ) -> None:
        self._start, self._properties, self._memory = start, properties, memory
        self.name = f"127.0.0.1:{free_ports()}"
        """As others call it: where it listens."""
        all_settings = {
            "bootstrap.servers": address, "group.id": "workers", "listeners": f"http://{self.name}",
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.storage.StringConverter",
            "offset.flush.interval.ms": 200, "scheduled.rebalance.max.delay.ms": 0,
            "session.timeout.ms": 2000, "heartbeat.interval.ms": 300, "rebalance.timeout.ms": 5000,
            "consumer.session.timeout.ms": 2000, "consumer.heartbeat.interval.ms": 300,
            "reconnect.backoff.max.ms": 200, "plugin.discovery": "service_load",
            **{f"{what}.storage.topic": f"connect-{what}" for what in _INTERNAL},
            **{f"{what}.storage.replication.factor": 1 for what in _INTERNAL},
            "offset.storage.partitions": 1, "status.storage.partitions": 1, **settings,
        }  # fmt: skip
        properties.write_text("".join(f"{name}={value}\n" for name, value in all_settings.items()))
        self.process: Teller | None = None

    def start(self) -> None:
        """Start the worker, which answers some seconds later."""
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        self.process = self._start(java_command(main, self._properties, memory=self._memory, more=[MOVED]))

    def kill(self) -> None:
        """Kill the worker like `kill -9`."""
        assert self.process is not None
        self.process.kill()

    def answers(self) -> bool:
        """Return whether the worker answers."""
        return self.ask("/connectors") is not None

    def configure(self, name: str, settings: Mapping[str, object]) -> bool:
        """Make or change a connector; False where that has to be tried again."""
        body = json.dumps({"tasks.max": "1", **{key: str(value) for key, value in settings.items()}})
        return self.ask(f"/connectors/{name}/config", body) is not None

    def states(self) -> list[str]:
        """Return the states of its connectors and their tasks."""
        found = self.ask("/connectors?expand=status") or {}
        status = [one["status"] for one in found.values()]
        return [part["state"] for one in status for part in (one["connector"], *one["tasks"])]

    def workers_of(self, connector: str) -> list[str]:
        """Return the workers that run the connector's tasks."""
        found = self.ask(f"/connectors/{connector}/status") or {"tasks": []}
        return [task["worker_id"] for task in found["tasks"] if task["state"] == "RUNNING"]

    def troubles(self) -> Sequence[str]:
        """Why tasks have failed."""
        found = self.ask("/connectors?expand=status") or {}
        return [task["trace"] for one in found.values() for task in one["status"]["tasks"] if "trace" in task]

    def restart_failed(self, connector: str) -> None:
        """Restart failed tasks, as a user does once the reason is gone."""
        self.ask(f"/connectors/{connector}/restart?includeTasks=true&onlyFailed=true", "", "POST")

    def ask(self, path: str, body: str | None = None, method: str = "PUT") -> Any:
        """Return the response to a request, or None while the worker starts or rebalances."""
        request = urllib.request.Request(
            f"http://{self.name}{path}", None if body is None else body.encode(), {"Content-Type": "application/json"},
            method="GET" if body is None else method,
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            return None
