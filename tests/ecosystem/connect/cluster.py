"""Two workers of Kafka Connect that share connectors, exactly once for sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from server.clients.connect_worker import ConnectWorker
from server.clients.served import Served
from server.clients.teller import Start
from waiting import wait_until

PATIENCE_S = 120.0

_SETTINGS = {
    "exactly.once.source.support": "enabled",
    "session.timeout.ms": 4000, "heartbeat.interval.ms": 500, "rebalance.timeout.ms": 8000,
    "consumer.session.timeout.ms": 4000, "consumer.heartbeat.interval.ms": 500,
    "offset.storage.partitions": 4, "status.storage.partitions": 2,
}  # fmt: skip


class Cluster:
    """The two of them."""

    def __init__(
        self, served: Served, start: Start, folder: Path, more: Mapping[str, object] | None = None, *, flaw: str = ""
    ) -> None:
        """Start the workers.

        A connector may have a flaw whose trace contains ``flaw``: a task that shows it is restarted.
        """
        self._flaw = flaw
        settings = {**_SETTINGS, **(more or {})}
        self.workers = [
            ConnectWorker(served.address, start, folder / f"{name}.properties", settings) for name in ("one", "two")
        ]
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            wait_until(worker.answers, "a worker does not answer", PATIENCE_S)

    def configure(self, name: str, settings: Mapping[str, object]) -> None:
        """Make or change a connector."""
        wait_until(lambda: any(one.configure(name, settings) for one in self.workers), f"no {name}", PATIENCE_S, 0.2)

    def wait_for_tasks(self, *connectors: str) -> None:
        """Wait until each connector has a running task at a living worker."""
        names = {one.name for one in self.workers}

        def run() -> bool:
            for trace in (trace for one in self.workers for trace in one.troubles()):
                assert self._flaw, trace
                assert self._flaw in trace, trace
                for name in connectors:
                    self.workers[0].restart_failed(name)
            return all(names & set(self.workers[0].workers_of(name)) for name in connectors)

        wait_until(run, f"not all of {connectors} run", PATIENCE_S, 0.2)

    def holder_of(self, connector: str) -> ConnectWorker:
        """Return the worker that has the connector's task."""
        self.wait_for_tasks(connector)
        found = self.workers[0].workers_of(connector)
        return next(one for one in self.workers if one.name in found)

    def kill_holder(self, connector: str, is_in_the_middle: Callable[[], bool]) -> str:
        """Kill the worker that has a task of this connector, within its work: it is stopped first, so the moment is
        certain.

        The other worker takes over its tasks before it is started again. Return the name of the killed worker.
        """
        victim = self.holder_of(connector)
        ends_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < ends_s, "it is never in the middle"
            wait_until(is_in_the_middle, "it is never in the middle", PATIENCE_S)
            assert victim.process is not None
            victim.process.stop()
            time.sleep(0.2)  # lets the server answer the requests that it has sent
            if is_in_the_middle():
                break
            victim.process.go_on()
        victim.kill()
        (other,) = (one for one in self.workers if one is not victim)

        def is_taken_over() -> bool:
            if self._flaw and any(self._flaw in trace for trace in other.troubles()):
                other.restart_failed(connector)
            return other.workers_of(connector) == [other.name]

        wait_until(is_taken_over, "its task is not taken over", PATIENCE_S, 0.2)
        victim.start()
        wait_until(victim.answers, "the worker does not come back", PATIENCE_S)
        return other.name
