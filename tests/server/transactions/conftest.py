"""A broker over a store with a topic of two partitions, asked without sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.wire_client import Desk

from segmentlog.clock import Clock
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.server.broker import Broker
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore

NODES = [WorkerNode(1, "localhost", 9093), WorkerNode(2, "localhost", 9094)]
SETTINGS = ServerSettings(groups=GroupSettings(initial_rebalance_delay_ms=0, min_session_timeout_ms=1))
MakeDesk = Callable[..., Desk]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Provide the path of a store with a topic."""
    with LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()) as store:
        store.create_topic("t", 2)
    return tmp_path / "store"


@pytest.fixture
def make_desk(path: Path) -> Iterator[MakeDesk]:
    """Yield a function that creates workers, one or two, each with the store open for itself."""
    brokers: list[Broker] = []

    def make(number: int = 1, *, workers: int = 1, clock: Clock | None = None) -> Desk:
        store = opened(LogStore(path, background=False, fs=NoSyncFileSystem(), clock=clock))
        cluster = WorkerCluster("c", NODES[:workers], number)
        broker = Broker(store, cluster, SETTINGS, OpenAuthorizer(), clock)  # type: ignore[arg-type]
        brokers.append(broker)
        return Desk(broker)

    yield make
    for broker in brokers:
        broker.close()


@pytest.fixture
def desk(make_desk: MakeDesk) -> Desk:
    """Return a single worker."""
    return make_desk()
