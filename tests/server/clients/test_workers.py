"""Each client at `segmentlog serve` with several workers, of which one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.clients.driver import WAIT_S, Driver, Sent, sorted_records, until

import segmentlog
from segmentlog.store import LogStore

_START_MS = 2_000_000_000_000
_PARTITIONS = 6
_SERVER = Path(__file__).with_name("serve_process.py")


class _Served:
    """The command, in a process of its own."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._log = log
        with open(log, "w") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(_SERVER), str(folder), "3"], stdout=subprocess.PIPE, stderr=file, text=True
            )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "it did not start"

    def workers(self) -> list[int]:
        """Their process ids."""
        pid = self._process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def stop(self) -> None:
        """As Ctrl-C; what it said, and what it was at, is shown of a test that failed."""
        for pid in self.workers():
            os.kill(pid, signal.SIGUSR1)
        self._process.terminate()
        self._process.communicate(timeout=WAIT_S)
        print(self._log.read_text())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """What is served."""
    with segmentlog.open(tmp_path / "store") as store:
        yield store


@pytest.fixture
def served(store: LogStore, tmp_path: Path) -> Iterator[_Served]:
    """By three workers."""
    served = _Served(Path(store.path), tmp_path / "served.log")
    yield served
    served.stop()


@pytest.mark.long
def test_several_brokers(kind: type[Driver], served: _Served, store: LogStore) -> None:
    """Partitions and groups are spread over workers: a client finds its way, also when one of them was killed."""
    client = kind(served.address)
    if client.has_admin:
        client.create("t", _PARTITIONS, {})
        until(lambda: store.topic("t").partition_count == _PARTITIONS)
    else:
        store.create_topic("t", partitions=_PARTITIONS)
    records = [
        Sent(number % _PARTITIONS, b"k%d" % number, b"v%d" % number, _START_MS + number)
        for number in range(2 * _PARTITIONS)
    ]
    client.write("t", records)
    assert len(client.read("t", len(records))) == len(records)
    first = client.consume("g", "t", 5)
    os.kill(served.workers()[1], signal.SIGKILL)
    client.write("t", records, idempotent=True)
    rest = client.consume("g", "t", 4 * _PARTITIONS - 5)
    read = sorted_records(first + rest)
    assert [(one.partition, one.offset) for one in read] == [
        (partition, offset) for partition in range(_PARTITIONS) for offset in range(4)
    ]
    assert sorted_records(client.read("t", len(read))) == read
    until(lambda: len(served.workers()) == 3, "the worker was not started again")
    if client.has_admin:
        assert client.lag("g", "t") == dict.fromkeys(range(_PARTITIONS), 0)
        for partition in range(_PARTITIONS):
            client.trim("t", partition, 1)
        assert len(client.read("t", 3 * _PARTITIONS)) == 3 * _PARTITIONS
        assert client.at_time("t", 1, _START_MS + 2) == 1
        client.delete("t")
        assert store.topics() == []
        if client.deletes_groups:
            client.delete_group("g")
            assert store.groups.names() == []
