"""A group has members of one kind, clients of the server or members of the library, whichever process dies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from server.groups.clients import SETTINGS, Client
from waiting import wait_until

import segmentlog
from segmentlog.errors import GroupInUse
from segmentlog.groups.server_groups import OffsetCommit
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.coordinator import GroupCoordinator
from segmentlog.store import LogStore

_WORKER = Path(__file__).with_name("coordinator_process.py")
_MEMBER = Path(__file__).parents[2] / "groups" / "group_member.py"
_SESSION_MS = 1_500


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store with topic ``t`` of two partitions of ten records."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", partitions=2, fsync="never")
        for partition in store.topic("t").partitions():
            partition.append([b"%d" % number for number in range(10)])
        yield store


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Yield a function that starts Python scripts, and kill them at the end."""
    started: list[subprocess.Popen[str]] = []

    def start_process(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start_process
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _line(process: Any) -> str:
    return str(process.stdout.readline()).strip()


def test_clients_of_a_server_that_is_killed(store: LogStore, start: Callable[..., Any]) -> None:
    """The library is refused while the server runs and while its clients could come back, and no longer."""
    worker = start(_WORKER, store.path, "g", _SESSION_MS)
    assert _line(worker).endswith(b"work".hex())
    with pytest.raises(GroupInUse, match=f"held by 1 member of the server with pid {worker.pid} on "):
        store.consumer("t", group="g")
    worker.kill()
    worker.wait()
    with pytest.raises(GroupInUse, match=f"pid {worker.pid}"):
        store.consumer("t", group="g")
    died_s = time.monotonic()

    def join() -> Any:
        try:
            return store.consumer("t", group="g")
        except GroupInUse:
            return None

    with wait_until(join) as consumer:
        assert time.monotonic() - died_s > 0.1
        consumer.poll_group()
        assert consumer.generation > 1
        with closing(GroupCoordinator(store, settings=SETTINGS)) as coordinator:
            assert Client(coordinator, "c").join().error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_a_killed_server_that_comes_back(store: LogStore, start: Callable[..., Any]) -> None:
    """Its client continues in the same generation with the same assignment, and no other member has joined."""
    first = start(_WORKER, store.path, "g", 30_000)
    told = _line(first)
    first.kill()
    first.wait()
    with pytest.raises(GroupInUse):
        store.consumer("t", group="g")
    member, generation, _ = told.split()
    second = start(_WORKER, store.path, "g", 30_000, member, generation)
    assert _line(second) == told
    with pytest.raises(GroupInUse, match=f"pid {second.pid}"):
        store.consumer("t", group="g")


def test_members_of_the_library_that_are_killed(
    store: LogStore, start: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients are refused as long as one lives, the log names it, and they join as soon as it is dead."""
    log = tmp_path / "log"
    process = start(_MEMBER, store.path, "g", log, json.dumps({"commit_every": 1, "sync": True}))
    wait_until(lambda: log.exists() and log.read_text().count(" record ") > 1)
    with closing(GroupCoordinator(store, settings=SETTINGS)) as coordinator:
        client = Client(coordinator, "c")
        for _ in range(3):
            assert client.join().error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        told = [record.getMessage() for record in caplog.records if "refuses a client" in record.getMessage()]
        assert len(told) == 1
        assert f"process {process.pid} on" in told[0]
        process.kill()
        process.wait()
        assert client.join().error is ErrorCode.NONE
        assert client.sync().error is ErrorCode.NONE
        committed = store.group_offsets.committed("g")
        assert committed
        # The library's consumers and Kafka's clients continue at each other's offsets.
        where = [OffsetCommit("t", store.topic("t").id, number, 10) for number in range(2)]
        error, appended = coordinator.commit_offsets("g", where, member_id=client.id, generation=client.generation)
        assert error is ErrorCode.NONE
        assert appended is not None
        assert client.leave() is ErrorCode.NONE
        with store.consumer("t", group="g") as consumer:
            assert list(consumer) == []


def test_both_kinds_at_the_same_time(store: LogStore) -> None:
    """The first one has the group: exactly one of the two."""
    with closing(GroupCoordinator(store, settings=SETTINGS)) as coordinator:
        for number in range(30):
            group = f"g{number}"
            client = Client(coordinator, "c", group)
            errors: list[ErrorCode] = []
            ready = threading.Barrier(2)

            def join(client: Client = client, ready: Any = ready, errors: list[ErrorCode] = errors) -> None:
                ready.wait()
                errors.append(client.join().error)

            thread = threading.Thread(target=join)
            thread.start()
            ready.wait()
            consumer = None
            try:
                consumer = store.consumer("t", group=group)
            except GroupInUse:
                pass
            thread.join()
            assert errors == [ErrorCode.NONE if consumer is None else ErrorCode.INCONSISTENT_GROUP_PROTOCOL]
            if consumer is not None:
                consumer.close()
