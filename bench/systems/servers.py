"""What the systems with a server of their own share: a free port, a process with a log file, a cache of what is built.

server = Server(["nats-server", "-c", str(config)], folder / "server.log")
server.wait_until(lambda: answers(port), seconds=20)
server.stop()
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path


class ServerFailed(RuntimeError):
    """A server ended or did not answer; carries the end of what it logged."""


class Server:
    """A process that was started here. What it prints goes to the end of ``log_path``."""

    def __init__(self, command: Sequence[str], log_path: Path) -> None:
        self._name = Path(command[0]).name
        self._log_path = log_path
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, answers: Callable[[], bool], seconds: float) -> None:
        """Ask ``answers`` again and again until it is true. Raises `ServerFailed`, and kills the server, otherwise."""
        deadline = time.monotonic() + seconds
        while self.is_running and time.monotonic() < deadline:
            if answers():
                return
            time.sleep(0.01)
        state = "does not answer" if self.is_running else f"ended with {self._process.returncode}"
        self.kill()
        said = self._log_path.read_text(errors="replace")[-2000:]
        raise ServerFailed(f"{self._name} {state}; the end of {self._log_path.name}: {said}")

    def stop(self, seconds: float = 30) -> None:
        """Let it end by itself (SIGTERM); one that takes longer is killed."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


def is_listening(port: int) -> bool:
    """Whether a server accepts connections on that port of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def cache_folder() -> Path:
    """Where jars and programs are kept between runs: $SEGMENTLOG_BENCH_CACHE, or below ~/.cache."""
    given = os.environ.get("SEGMENTLOG_BENCH_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "segmentlog-bench"
