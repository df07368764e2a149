"""Processes that use a store, as seen by the test that kills and stops them: see `delivery_process`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import delivery_checker as checker
from waiting import wait_until

PATIENCE_S = 120.0
_TESTS = Path(__file__).parent


class Nursery:
    """A process that forks the others."""

    def __init__(self, script: Path, prefix: Sequence[str] = ()) -> None:
        """Start the program ``script``. ``prefix``: the beginning of its command, for example to start it elsewhere."""
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(_TESTS), *sys.path))},
        )  # fmt: skip

    def ask(self, **order: Any) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the nursery died"
        return int(answer)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()


class Cast:
    """The processes that use one store, and their journals."""

    def __init__(self, folder: Path, seed: int, nursery: Nursery) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.nursery = nursery
        self.folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True)
        self.count = 0
        self.running: dict[int, dict[str, Any]] = {}
        self.stopped: dict[int, dict[str, Any]] = {}
        self.ending: list[int] = []
        """Processes that were asked to end; they may wait for a lock that a stopped process holds."""
        self._read: dict[str, int] = {}
        self._told: dict[str, list[checker.Event]] = {}

    def close(self) -> None:
        """Kill all processes."""
        for pid in (*self.running, *self.stopped, *self.ending):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.nursery.ask(wait=pid, timeout_s=PATIENCE_S)

    @property
    def where(self) -> str:
        return f"SEGMENTLOG_SEED={self.seed}, {self.folder}"

    def spawn(self, order: dict[str, Any], **more: Any) -> int:
        self.count += 1
        label = f"{order['job']}{self.count}"
        order = {**order, "label": label, "log": str(self.logs / label)}
        pid = self.nursery.ask(**order, seed=self.rng.randrange(1 << 30), **more)
        self.running[pid] = order
        return pid

    def end(self, pid: int) -> None:
        """Wait until the process has ended, and check that it succeeded."""
        self.running.pop(pid, None)
        self.stopped.pop(pid, None)
        status = self.nursery.ask(wait=pid, timeout_s=PATIENCE_S)
        if status == -1:
            os.kill(pid, signal.SIGKILL)
        assert status in (0, -signal.SIGKILL & 0xFF), f"a worker ended with {status}; {self.where}"

    def kill(self, pid: int) -> None:
        """Kill the process like `kill -9`."""
        os.kill(pid, signal.SIGKILL)
        self.end(pid)

    def stop(self, pid: int) -> None:
        """Stop the process until `wake`."""
        os.kill(pid, signal.SIGSTOP)
        self.stopped[pid] = self.running.pop(pid)

    def terminate(self, pid: int) -> None:
        """Ask the process to end."""
        self.running.pop(pid, None)
        os.kill(pid, signal.SIGTERM)
        self.ending.append(pid)

    def wake(self, pid: int) -> None:
        """Continue a stopped process and ask it to end: another process has its job by now."""
        self.stopped.pop(pid)
        self.terminate(pid)
        os.kill(pid, signal.SIGCONT)

    def kill_all(self) -> None:
        """Kill all processes at the same moment."""
        pids = [*self.running, *self.stopped, *self.ending]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.stopped.clear()
        self.ending.clear()
        for pid in pids:
            self.end(pid)

    def finish(self) -> None:
        """Ask all processes to end, including the stopped ones."""
        for pid in list(self.running):
            if self.rng.random() < 0.5:
                self.kill(pid)
        for pid in list(self.stopped):
            self.wake(pid)
        for pid in list(self.running):
            self.terminate(pid)
        while self.ending:
            self.end(self.ending.pop())

    def label(self, pid: int) -> str:
        return str((self.running.get(pid) or self.stopped[pid])["label"])

    def told(self, label: str, *kinds: str) -> list[checker.Event]:
        """Return the events of these kinds that a player has recorded so far."""
        path, events = self.logs / label, self._told.setdefault(label, [])
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self._read.get(label, 0))
                whole, ends, _ = file.read().rpartition(b"\n")
                self._read[label] = self._read.get(label, 0) + len(whole) + len(ends)
                events += [json.loads(line) for line in whole.splitlines()]
        return [event for event in events if event[0] in kinds]

    def until_told(self, label: str, *kinds: str) -> checker.Event:
        """Return the first of these that it writes down."""
        wait_until(lambda: self.told(label, *kinds), f"{label} has not said {kinds}; {self.where}")
        return self.told(label, *kinds)[0]

    def events(self) -> Iterator[checker.Event]:
        for log in sorted(self.logs.iterdir()):
            for line in log.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # otherwise the process was killed within the line, which is the last one
                    yield json.loads(line)
