"""What a process of a server does beside serving: say that it is well, and end when it is told to or left alone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping

from segmentlog.server.supervisor import BEAT_S, FINISH_S


class Stop:
    """Whether the process is to end. Not an Event: a signal handler may come while this very thread holds its lock."""

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


def stop_with_supervisor(alive_fd: int) -> Stop:
    """Asked by SIGTERM, and when the supervisor is gone; a second SIGTERM ends the process at once."""
    stop = Stop()
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

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(alive_fd, 1)  # nobody writes to it: it returns when the supervisor's end is gone
        stop.ask()
        time.sleep(FINISH_S)
        os._exit(1)

    threading.Thread(target=watch, name="segmentlog-supervisor", daemon=True).start()
    return stop


def beat(
    stop: Stop, status_fd: int, is_well: Callable[[], bool], said: Callable[[], Mapping[str, object]]
) -> None:  # fmt: skip
    """Say now and then that the process is well, and what ``said`` has, until it is to stop."""
    while not stop.is_asked:
        if is_well():
            with contextlib.suppress(OSError):
                os.write(status_fd, json.dumps({"ready": True, **said()}).encode() + b"\n")
        stop.wait(BEAT_S)
