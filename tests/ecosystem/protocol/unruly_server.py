"""A server that is killed, stopped and sabotaged; clients reach it through a proxy, which outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from delivery_cast import PATIENCE_S
from ecosystem.protocol.unruly_proxy import UnrulyProxy
from waiting import wait_until

_SERVER = Path(__file__).with_name("server_process.py")
_TESTS = Path(__file__).parents[2]
WORKERS = 3


class UnrulyServer:
    """The command, in a process of its own, which may be started again."""

    def __init__(self, path: Path, folder: Path, session_ms: int, sabotage: str = "") -> None:
        self.proxy = UnrulyProxy(WORKERS + 1)
        self.address = f"127.0.0.1:{self.proxy.port}"
        self.full = folder / "full"
        self.log = folder / "served.log"
        self.pids: list[int] = []
        self._told = {
            "path": str(path), "port": self.proxy.port, "workers": WORKERS, "full": str(self.full),
            "session_ms": session_ms, "sabotage": sabotage,
        }  # fmt: skip
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the server, and wait until every worker serves."""
        self.pids = []
        with open(self.log, "a") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_SERVER), json.dumps(self._told)], stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(_TESTS), *sys.path))},
            )  # fmt: skip
        assert self._process.stdout is not None
        self.proxy.targets = [int(word) for word in self._process.stdout.readline().split()]
        assert self.proxy.targets, f"it did not start: {self.log.read_text()[-2000:]}"
        self._thread = threading.Thread(target=self._listen, args=(self._process,))
        self._thread.start()
        wait_until(lambda: self.pids, "it did not serve in time")

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.pids = [int(word) for word in line.split()]

    def kill_worker(self, pid: int) -> None:
        """Kill a worker, and wait for its successor."""
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in self.pids, "the worker was not started again")

    def kill(self) -> None:
        """Kill all processes like `kill -9`; the workers first, so that none of them ends cleanly."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)  # or it would start others
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._wait()

    def _wait(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._thread is not None
        self._process.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)  # the last of the workers has let go of the pipe
        self._process.stdout.close()
        self._process = None

    def close(self) -> None:
        """Interrupt the server like Ctrl-C, if it runs."""
        if self._process is not None:
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self._process.terminate()
            self._wait()
        self.proxy.close()
