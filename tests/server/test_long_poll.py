"""Long polls are woken by any append, whatever happened to the partition meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.wire_client import WireClient
from waiting import wait_until
from wire import Sent, foreign

from segmentlog.consuming import wakeup
from segmentlog.security.security_settings import Security
from segmentlog.server import long_poll
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.embedded import Server
from segmentlog.server.handlers import fetch
from segmentlog.server.server_settings import ServerSettings
from segmentlog.store import LogStore

NEVER_S = 3_600.0
"""Longer than a test may take: what returns sooner was woken."""


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make polling so rare that followers and long polls depend on being woken."""
    monkeypatch.setattr(long_poll, "RECHECK_S", NEVER_S)
    monkeypatch.setattr(fetch, "RECHECK_S", NEVER_S)  # a poll announces itself for two intervals
    monkeypatch.setattr(wakeup, "WAIT_S", NEVER_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Serve a store with topic t."""
    store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    store.create_topic("t")
    with Server(
        store, host="127.0.0.1", port=0, advertise=None, settings=ServerSettings(), security=Security(),
        owns_store=False,
    ) as made:  # fmt: skip
        yield made


def until_it_waits(server: Server) -> None:
    """Return once a long poll is under way."""
    wait_until(lambda: server.worker.broker.purgatory.waiting_count)


def polled(server: Server, client: WireClient, offset: int, meanwhile: Callable[[], Any]) -> Any:
    """Return the answer to a long poll of an hour that is under way when ``meanwhile`` is called."""
    topic = FetchTopic("t", partitions=[FetchPartition(0, fetch_offset=offset, partition_max_bytes=1 << 20)])
    client.send(1, 11, FetchRequest(max_wait_ms=int(NEVER_S * 1000), min_bytes=1, max_bytes=1 << 20, topics=[topic]))
    until_it_waits(server)
    meanwhile()
    return client.answer().responses[0].partitions[0]


@pytest.mark.usefixtures("seldom")
def test_an_append_here_or_elsewhere_wakes(server: Server) -> None:
    """Appends of this process and of another one wake it."""
    code = (
        f"import segmentlog\nwith segmentlog.open({server.store.path!r}) as s: s.open_partition('t', 0).append([b'x'])"
    )
    with WireClient(server.bootstrap_servers) as client:
        for number in range(20):
            data = polled(server, client, number, lambda: server.store.open_partition("t", 0).append([b"x"]))
            assert data.records
        assert polled(server, client, 20, lambda: subprocess.run([sys.executable, "-c", code], check=True)).records


@pytest.mark.usefixtures("seldom")
def test_a_topic_that_is_made_anew_wakes_as_the_first_did(server: Server, tmp_path: Path) -> None:
    """Its files have the same names, but are others."""
    store = server.store
    with WireClient(server.bootstrap_servers) as client:
        for number in range(3):
            assert polled(server, client, 0, lambda: store.open_partition("t", 0).append([b"x"])).records
            # The folder is still linked, so no event reports its deletion.
            os.link(store.open_partition("t", 0).handle.lock_path, tmp_path / f"lock-{number}")
            store.delete_topic("t")
            store.create_topic("t")


def test_a_topic_that_goes_while_it_is_polled_is_told(server: Server) -> None:
    """The poll is answered with an error, long before its time is up."""
    with WireClient(server.bootstrap_servers) as client:
        assert polled(server, client, 0, lambda: server.store.delete_topic("t")).error_code


def test_who_is_gone_is_not_waited_for(server: Server) -> None:
    """A client that hung up during a long poll costs its thread no longer than it takes to notice."""
    client = WireClient(server.bootstrap_servers)
    topic = FetchTopic("t", partitions=[FetchPartition(0, partition_max_bytes=1 << 20)])
    client.send(1, 11, FetchRequest(max_wait_ms=30_000, min_bytes=1, max_bytes=1 << 20, topics=[topic]))
    until_it_waits(server)
    client.close()
    ends = time.monotonic() + 60
    while server.worker.listener.connection_count and time.monotonic() < ends:
        time.sleep(0.02)
    assert not server.worker.listener.connection_count


@pytest.mark.usefixtures("seldom")
def test_a_server_that_stops_answers_who_waits(server: Server) -> None:
    """The poll is answered without records, long before its time is up."""
    thread = threading.Thread(target=server.close)
    with WireClient(server.bootstrap_servers) as client:
        assert polled(server, client, 0, thread.start).error_code == 0
        thread.join()
        assert client.is_closed_by_peer()


@pytest.mark.usefixtures("seldom")
def test_what_a_client_sends_wakes_the_librarys_followers(server: Server) -> None:
    """This holds in another process, or in another store object as here, without polling."""
    topic = TopicProduceData("t", partition_data=[PartitionProduceData(0, foreign([Sent(None, b"x")]))])
    other = opened(LogStore(server.store.path, background=False, fs=NoSyncFileSystem()))
    with WireClient(server.bootstrap_servers) as client, other.consumer("t", follow=True) as consumer:
        records = iter(consumer)
        for _ in range(5):
            found: list[bytes | None] = []
            thread = threading.Thread(target=lambda: found.append(next(records).value))  # noqa: B023
            thread.start()
            time.sleep(0.1)
            client.ask(0, 9, ProduceRequest(None, 1, 1000, [topic]))
            thread.join()
            assert found == [b"x"]
