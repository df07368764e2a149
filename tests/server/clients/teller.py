"""Programs that tell in lines what they do."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from server.clients.driver import WAIT_S


class Teller:
    """A process that tells in lines; what it says beside goes into a file."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with open(log, "a") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.told: list[str] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.told.append(line.rstrip("\n"))

    @property
    def has_ended(self) -> bool:
        """By itself."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Stop the program like `kill -STOP`, until `go_on` or `kill`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue after `stop`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the program like `kill -9`. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._thread.join(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


Start = Callable[[Sequence[str]], Teller]


@contextmanager
def starting(log: Path) -> Iterator[Start]:
    """Yield a function that starts programs; kill them at the end, and print their stderr for a failed test."""
    started: list[Teller] = []

    def start(command: Sequence[str]) -> Teller:
        started.append(Teller(command, log))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.kill()
        print(log.read_text()[-20_000:] if log.exists() else "")
