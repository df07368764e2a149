"""Run a child process: serve, send heartbeats to the supervisor, and stop on SIGTERM or when the supervisor ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from segmentlog.server.supervisor import FINISH_S, HEARTBEAT_S, ServerPlan
from segmentlog.server.worker import KafkaWorker

_LOCKED_OUT_S: Final = 10.0
"""A worker that waits longer for a lock of its requests sends no heartbeat."""


class StopSignal:
    """A request to stop.

    This is not a `threading.Event`: a signal handler may run while its own thread holds the lock of the Event.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.is_requested = False

    def request(self) -> None:
        """Request the stop. Safe in any thread and in signal handlers."""
        self.is_requested = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"x")

    def wait(self, timeout_s: float) -> None:
        """Wait until the stop is requested, at most ``timeout_s`` seconds."""
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        poll.poll(timeout_s * 1000)


def stop_with_supervisor(alive_fd: int) -> StopSignal:
    """Return a stop signal for SIGTERM and for the end of the supervisor. A second SIGTERM ends the process at once."""
    stop = StopSignal()
    stops = 0

    def on_signal(signal_number: int, frame: object) -> None:
        nonlocal stops
        stops += 1
        stop.request()
        if stops > 1:
            os._exit(1)

    signal.signal(signal.SIGTERM, on_signal)
    # A terminal sends Ctrl-C to all processes; the supervisor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(alive_fd, 1)  # no process writes to this pipe: the read returns when the supervisor has ended
        stop.request()
        time.sleep(FINISH_S)
        os._exit(1)

    threading.Thread(target=watch, name="segmentlog-supervisor", daemon=True).start()
    return stop


def send_heartbeats(
    stop: StopSignal, status_fd: int, is_healthy: Callable[[], bool], status: Callable[[], Mapping[str, object]]
) -> None:  # fmt: skip
    """Send the process's status to the supervisor every `HEARTBEAT_S`, but only while the process is healthy."""
    while not stop.is_requested:
        if is_healthy():
            with contextlib.suppress(OSError):
                os.write(status_fd, json.dumps({"ready": True, **status()}).encode() + b"\n")
        stop.wait(HEARTBEAT_S)


def serve_until_stopped(
    worker: KafkaWorker, plan: ServerPlan, number: int, stop: StopSignal, status_fd: int,
    status: Callable[[], Mapping[str, object]],
) -> None:  # fmt: skip
    """Serve with ``worker`` until the stop is requested, with metrics if the plan has them. Then close ``worker``.

    ``status`` is called before each heartbeat, and returns what the heartbeat reports besides the worker's own figures.
    """
    metrics = None
    if plan.metrics is not None:
        from segmentlog.server.metrics import MetricsServer

        host, port = plan.metrics
        metrics = MetricsServer(worker, host, port + number - 1 if port else 0, is_first=number == 1)
    address = None if metrics is None else metrics.address

    def whole_status() -> dict[str, object]:
        worker.refresh()
        return {
            "connections": worker.listener.connection_count,
            "metrics": address,
            **status(),
            **worker.broker.meter.totals(),
        }

    worker.start()
    try:
        # No heartbeat while a lock that requests need is stuck: the supervisor then restarts the worker.
        send_heartbeats(stop, status_fd, lambda: worker.is_healthy(_LOCKED_OUT_S), whole_status)
    finally:
        worker.close(FINISH_S)
        if metrics is not None:
            metrics.close()
