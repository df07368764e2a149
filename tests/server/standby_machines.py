"""Machines that serve one store, one after the other: ``segmentlog serve --standby`` on loopback, with short times."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import delivery_checker as checker
from waiting import PATIENCE_S, wait_until

import segmentlog
from segmentlog.testing.ports import free_ports

SHORT = ("--ship-interval", "100ms", "--standby-silence", "3s", "--standby-refused", "1s")
"""Long enough that an owner on a busy machine counts as alive."""


class Machine:
    """A folder, a port, and the server that runs on them, or has run."""

    host = "127.0.0.1"
    settings: tuple[str, ...] = (*SHORT, "--acks-all", "shipped")

    def __init__(self, folder: Path, name: str, url: str, *arguments: str, workers: int = 1) -> None:
        self.path = folder / name
        self.url = url
        self.port = free_ports(1 + workers)
        self.address = f"{self.host}:{self.port}"
        self.lines: list[str] = []
        self._arguments, self._workers = arguments, workers
        self.process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self, *arguments: str) -> Machine:
        self.lines.clear()
        command = [
            *self.program(), "--dir", str(self.path), "serve", "--listen", self.address,
            "--workers", str(self._workers), "--standby", self.url, *self.settings, *self._arguments, *arguments,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=self.environment()
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        return self

    def program(self) -> list[str]:
        """Return the beginning of the command."""
        return [sys.executable, "-m", "segmentlog"]

    def environment(self) -> dict[str, str] | None:
        """Return the environment of the server; None for that of the test."""
        return None

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append(line.rstrip())

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = PATIENCE_S) -> str:
        """Wait until the server has printed a line with this text, and return it."""
        return wait_until(
            lambda: next((line for line in self.lines if text in line), ""),
            lambda: f"{self.path.name} has not printed {text!r}: {self.log}", timeout_s,
        )  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """The supervisor and its child processes."""
        assert self.process is not None
        pid = self.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the server."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pause(self) -> None:
        """Stop all processes of the server, wherever they are: also while they replace the manifest."""
        self.signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Kill -9 of everything."""
        assert self.process is not None
        self.signal(signal.SIGSTOP)  # so that the supervisor starts nothing meanwhile
        self.signal(signal.SIGKILL)
        self._end()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self._end()

    def finish(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until the server has ended by itself, and return its exit status."""
        return self._end(timeout_s)

    def _end(self, timeout_s: float = PATIENCE_S) -> int:
        assert self.process is not None
        assert self._reader is not None
        status = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.process = None
        return status

    def close(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.kill()

    @property
    def status(self) -> dict[str, Any]:
        """The content of the status file."""
        found: dict[str, Any] = json.loads((self.path / "@standby-status").read_bytes())
        return found


@contextlib.contextmanager
def machines(folder: Path, *arguments: str, count: int = 2, workers: int = 1) -> Iterator[list[Machine]]:
    """Machines of one store, not started; killed at the end."""
    (folder / "bucket").mkdir(exist_ok=True)
    found = [
        Machine(folder, f"m{number}", f"file://{folder}/bucket", *arguments, workers=workers)
        for number in range(1, count + 1)
    ]
    try:
        yield found
    finally:
        for machine in found:
            machine.close()


def start_pair(owner: Machine, standby: Machine) -> None:
    """Start the owner of a new store, and its standby, and wait until the standby can take over."""
    owner.start("--ship", owner.url)
    owner.wait_for("as the owner")
    standby.start()
    standby.wait_for("as a standby of")
    wait_until(lambda: bool(standby.status["answered_owner"]))


def _logger(lines: list[str]) -> logging.Logger:
    """Return a logger that adds its messages to ``lines``."""
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.Logger("librdkafka")
    logger.addHandler(handler)
    return logger


class Load:
    """A client that produces all the time with ``acks=all``, and knows all machines of the store."""

    def __init__(self, found: list[Machine], topic: str = "t") -> None:
        self.events: list[list[Any]] = []
        self.acknowledged = 0
        self._topic = topic
        self._machines = found
        self.client_log: list[str] = []
        self._is_stopped = False
        self._producer = confluent_kafka.Producer({
            "bootstrap.servers": ",".join(machine.address for machine in found), "linger.ms": 1,
            "enable.idempotence": True, "socket.timeout.ms": 6000, "request.timeout.ms": 5000,
            "reconnect.backoff.max.ms": 200, "retry.backoff.ms": 50, "retry.backoff.max.ms": 200,
            "topic.metadata.refresh.fast.interval.ms": 50, "message.timeout.ms": 180_000,
        }, logger=_logger(self.client_log))  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._is_stopped:
            value = f"v{number}"
            number += 1
            self.events.append(["send", "p", "", self._topic, 0, [value]])
            self._producer.produce(self._topic, value.encode(), partition=0, on_delivery=self._acknowledge)
            self._producer.poll(0.005)

    def _acknowledge(self, error: Any, message: Any) -> None:
        if error is not None:
            self.events.append(["error", "p", str(error)])
            return
        self.acknowledged += 1
        self.events.append(["acked", "p", self._topic, 0, [[message.offset(), message.value().decode()]]])

    def wait_for_more(self, count: int = 20) -> None:
        """Wait until ``count`` more records are acknowledged."""
        wanted = self.acknowledged + count
        reason = f"{self.acknowledged} of {wanted}"
        wait_until(lambda: self.acknowledged >= wanted, lambda: f"{reason}: {self._describe()}")

    def _describe(self) -> str:
        """Return what happened, for the message of a failed test."""
        other = [event for event in self.events if event[0] not in ("send", "acked")]
        logs = "\n".join(f"{machine.path.name}:\n{machine.log}" for machine in self._machines)
        return f"{self.acknowledged} of {len(self.events)} acknowledged, {other[:3]}, {self.client_log[-30:]}\n{logs}"

    def wait_for_new(self) -> float:
        """Wait until a record is acknowledged that was sent from now on. Return the seconds."""
        began_s, index = time.monotonic(), len(self.events)
        sent = {event[5][0] for event in self.events[:index] if event[0] == "send"}

        def is_new() -> bool:
            return any(e[0] == "acked" and e[4][0][1] not in sent for e in self.events[index:])

        wait_until(is_new, lambda: f"nothing new since {index}: {self._describe()}", every_s=0.02)
        return time.monotonic() - began_s

    def stop(self) -> None:
        self._is_stopped = True
        self._thread.join()
        assert self._producer.flush(PATIENCE_S) == 0

    def check(self, path: Path) -> None:
        """Check that each acknowledged record is in the store once, at its offset."""
        with segmentlog.open(path, create=False, background=False) as store:
            partition = store.topic(self._topic).partition(0)
            content = {
                int(offset): value.decode()
                for batch in partition.read(0, max_bytes=1 << 30)
                for offset, value in zip(batch.offsets, batch.values, strict=True)
            }
            lost = [(one.base_offset, one.end_offset) for one in partition.lost_ranges()]
            final = checker.Final(content, content, partition.log_end_offset, partition.last_stable_offset, 0, lost)
        problems = checker.check(checker.gather(self.events), {(self._topic, 0): final})
        assert not problems, problems[:5]
        assert self.acknowledged
