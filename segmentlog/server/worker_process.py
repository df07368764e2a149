"""What a worker's process does beside serving: say that it is well, and end when it is told to or left alone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from typing import Final

import segmentlog
from segmentlog.server.addresses import cluster_id_of
from segmentlog.server.cluster import Cluster, Node
from segmentlog.server.supervisor import BEAT_S, FINISH_S, Plan
from segmentlog.server.worker import Worker

_LOCKED_OUT_S: Final = 10.0


def run(
    plan: Plan, sockets: list[socket.socket], nodes: list[Node], number: int, status_fd: int, alive_fd: int
) -> None:
    """Serve until SIGTERM, or until the supervisor is gone."""
    stop = _Stop()
    stops = 0

    def on_signal(signal_number: int, frame: object) -> None:
        nonlocal stops
        stops += 1
        stop.ask()
        if stops > 1:
            os._exit(1)

    signal.signal(signal.SIGTERM, on_signal)
    # Ctrl-C goes to all processes of a terminal; the supervisor says what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _watch_supervisor(alive_fd, stop)
    with segmentlog.open(plan.path, ship=plan.ship, ship_interval_ms=plan.ship_interval_ms) as store:
        cluster = Cluster(cluster_id_of(store.store_id), nodes, number)
        worker = Worker(store, sockets, cluster, plan.settings, plan.security, plan.host)
        metrics = None
        if plan.metrics is not None:
            from segmentlog.server.metrics import MetricsServer

            host, port = plan.metrics
            metrics = MetricsServer(worker, host, port + number - 1 if port else 0, is_first=number == 1)
        worker.start()
        try:
            _beat(worker, status_fd, stop, None if metrics is None else metrics.address)
        finally:
            worker.close(FINISH_S)
            if metrics is not None:
                metrics.close()


class _Stop:
    """Whether the worker is to end. Not an Event: a signal handler may come while this very thread holds its lock."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.is_asked = False

    def ask(self) -> None:
        """From any thread, and from signal handlers."""
        self.is_asked = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"x")

    def wait(self, timeout_s: float) -> None:
        """Until it is asked, or for so long."""
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        poll.poll(timeout_s * 1000)


def _watch_supervisor(alive_fd: int, stop: _Stop) -> None:
    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(alive_fd, 1)  # nobody writes to it: it returns when the supervisor's end is gone
        stop.ask()
        time.sleep(FINISH_S)
        os._exit(1)

    threading.Thread(target=watch, name="segmentlog-supervisor", daemon=True).start()


def _beat(worker: Worker, status_fd: int, stop: _Stop, metrics: str | None) -> None:
    """Say now and then that the worker is well: that nobody holds for ever what every request needs."""
    while not stop.is_asked:
        said = {
            "ready": True,
            "connections": worker.listener.connection_count,
            "metrics": metrics,
            **worker.broker.meter.totals(),
        }
        if worker.is_well(_LOCKED_OUT_S):
            with contextlib.suppress(OSError):
                os.write(status_fd, json.dumps(said).encode() + b"\n")
        stop.wait(BEAT_S)
