"""A server in a process of its own for real clients, and what is asked of several of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import segmentlog
from segmentlog.store import LogStore
from segmentlog.testing.ports import free_ports

_SERVER = Path(__file__).with_name("server_process.py")
WAIT_S = 30.0
_LEAVING_S = 10.0
PARTITIONS = 3


class Served:
    """A server that can be killed, and started again on the same port."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.port = free_ports()
        self._process: Any = None
        self.start()

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, str(_SERVER), self._path, str(self.port), "100"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline().strip() == self.address

    def kill(self) -> None:
        """Kill the server like `kill -9`."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        """Id of the server's process."""
        return int(self._process.pid)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store with topic ``t`` of three partitions of ten records."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", partitions=PARTITIONS, fsync="never")
        for partition in store.topic("t").partitions():
            partition.append([b"%d" % number for number in range(10)])
        yield store


@pytest.fixture
def served(store: LogStore) -> Iterator[Served]:
    """Provide the store, served."""
    served = Served(store.path)
    yield served
    served.kill()


def poll_until(consumers: list[Any], what: Callable[[], Any]) -> list[Any]:
    """Poll all of them until something is so; the records that came."""
    records = []
    ends_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < ends_s, "it did not come to it in time"
        for one in consumers:
            message = one.poll(0.02)
            if message is not None and not message.error():
                records.append(message)
    return records


def close_all(consumers: list[Any]) -> None:
    """Close librdkafka's consumers once none has partitions: one that gets some while it closes may hang."""
    left = []
    for one in consumers:
        with contextlib.suppress(RuntimeError):  # it was closed by the test
            one.unsubscribe()
            left.append(one)
    ends_s = time.monotonic() + _LEAVING_S
    while time.monotonic() < ends_s and any(one.assignment() for one in left):
        for one in left:
            one.poll(0.02)
    for one in left:
        one.close()


def shares(consumers: list[Any]) -> bool:
    """Return whether each consumer has partitions of ``t``, and all of them together have each partition once."""
    numbers = [tp.partition for one in consumers for tp in one.assignment() if tp.topic == "t"]
    return sorted(numbers) == list(range(PARTITIONS)) and all(one.assignment() for one in consumers)
