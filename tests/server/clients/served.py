"""`segmentlog serve` with several workers, to be killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.clients.driver import WAIT_S

import segmentlog
from segmentlog.store import LogStore

_SERVER = Path(__file__).with_name("serve_process.py")


class Served:
    """The command, in a process of its own."""

    def __init__(self, folder: Path, log: Path, port: int = 0) -> None:
        self._log = log
        self._command = [sys.executable, str(_SERVER), str(folder), "3", str(port)]
        self._has_port = bool(port)
        self._start()

    def _start(self) -> None:
        with open(self._log, "a") as file:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=file, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "it did not start: " + self._log.read_text()

    def workers(self) -> list[int]:
        """Return the process ids of the workers."""
        pid = self._process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def kill_and_restart(self) -> None:
        """Kill all of its processes as `kill -9`, and start it again at the port that it was given."""
        assert self._has_port
        children = [os.pidfd_open(pid) for pid in self.workers()]
        self._process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
        for child in children:
            assert select.select([child], [], [], WAIT_S)[0], "it does not end"
            os.close(child)
        self._process.communicate()
        self._start()

    def stop(self) -> None:
        """Interrupt the server like Ctrl-C, and print its output and stacks for a failed test."""
        for pid in self.workers():
            os.kill(pid, signal.SIGUSR1)
        self._process.terminate()
        self._process.communicate(timeout=WAIT_S)
        print(self._log.read_text())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide the served store, opened with the library."""
    with segmentlog.open(tmp_path / "store") as store:
        yield store


@pytest.fixture
def served(store: LogStore, tmp_path: Path) -> Iterator[Served]:
    """Yield a server of three workers, which tests may kill."""
    served = Served(Path(store.path), tmp_path / "served.log")
    yield served
    served.stop()
