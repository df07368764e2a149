"""The resources of one client are bounded, and others are served.

SEGMENTLOG_SERVER_HALF_OPEN connections that begin a request and never end it
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.memory import Memory
from server.wire_client import Refused, WireClient, request_bytes
from waiting import wait_until
from wire import Sent, foreign

from segmentlog.security.security_settings import Security
from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.metadata import MetadataRequest
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.embedded import Server
from segmentlog.server.request_buffers import BufferPool, NoRoom
from segmentlog.server.server_settings import Limits, ServerSettings
from segmentlog.store import LogStore

# Both ends of each are this process's, which may have fewer descriptors than that.
HALF_OPEN = min(
    int(os.environ.get("SEGMENTLOG_SERVER_HALF_OPEN", "2000")),
    (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 2,
)
MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Provide a server with limits, over a store with topic t."""
    servers: list[Server] = []

    def make(**limits: Any) -> Server:
        store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
        if "t" not in store.topics():
            store.create_topic("t")
        server = Server(
            store, host="127.0.0.1", port=0, advertise=None, settings=ServerSettings(limits=Limits(**limits)),
            security=Security(), owns_store=False,
        )  # fmt: skip
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()


def fetching(size_bytes: int) -> FetchRequest:
    """Return a fetch of the first ``size`` bytes of topic t."""
    part = FetchPartition(0, partition_max_bytes=size_bytes)
    return FetchRequest(max_wait_ms=0, max_bytes=size_bytes, topics=[FetchTopic("t", partitions=[part])])


def producing(acks: int, batch: bytes) -> ProduceRequest:
    """Return a request that produces a batch to topic t."""
    topic = TopicProduceData("t", partition_data=[PartitionProduceData(0, batch)])
    return ProduceRequest(None, acks, 1000, [topic])


def is_served(server: Server, within_s: float = 1.0) -> bool:
    """Return whether a new client gets a response soon."""
    began = time.monotonic()
    with WireClient(server.bootstrap_servers) as client:
        client.ask(18, 0, ApiVersionsRequest())
        client.ask(3, 12, MetadataRequest(topics=None))
    return time.monotonic() - began < within_s


@pytest.mark.parametrize(
    "said", [b"\0\0", b"\x06\x40\0\0", b"\x06\x40\0\0" + bytes(100), b"\0\0\x10\0\0\x03", b"\0\0\xf0\0" + bytes(9)]
)
@pytest.mark.long
def test_half_open_connections_take_next_to_nothing(make_server: MakeServer, said: bytes) -> None:
    """Connections that send half a length, or only a part of a request, take less than 50 KiB and no thread each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        server = make_server(patience_s=60.0)
        assert is_served(server)
        memory, threads = Memory(), threading.active_count()
        clients = [WireClient(server.bootstrap_servers) for _ in range(HALF_OPEN)]
        for client in clients:
            client.raw(said)
        wait_until(lambda: server.worker.listener.connection_count == HALF_OPEN)
        assert is_served(server)
        assert threading.active_count() < threads + 20
        print(f"{memory.peak() >> 10:,} KiB for {HALF_OPEN:,} connections")
        assert memory.peak() < HALF_OPEN * (50 << 10) + (16 << 20)
        for client in clients:
            client.close()
        wait_until(lambda: not server.worker.listener.connection_count)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_sends_the_slowest_makes_room(make_server: MakeServer) -> None:
    """Large requests that never end use up the bound: they are cut off, the oldest first, and a good one is taken."""
    server = make_server(buffered_bytes=4 << 20)
    clients = [WireClient(server.bootstrap_servers) for _ in range(8)]
    for client in clients:
        client.raw((50 << 20).to_bytes(4, "big"))
        client.raw(bytes(300 << 10))
    time.sleep(1.2)
    assert server.worker.broker.buffers.used_bytes <= 4 << 20
    batch = foreign([Sent(b"k", os.urandom(900_000))])
    with WireClient(server.bootstrap_servers) as good:
        answer = good.ask(
            0,
            7,
            producing(1, batch),
        )
        assert answer.responses[0].partition_responses[0].error_code == 0
    for client in clients:
        client.close()
    wait_until(lambda: not server.worker.broker.buffers.used_bytes)


def test_a_buffer_too_many_waits_its_patience() -> None:
    """While all connections are being served, none is closed for another: the last request is rejected."""
    pool = BufferPool(bound_bytes=128 << 10)
    first = pool.lease(lambda: None)
    first.grow(100 << 10, 0, 0.0)
    first.complete()
    second = pool.lease(lambda: None)
    with pytest.raises(NoRoom):
        second.grow(1, 0, 0.0)
    first.give_back()
    first.give_back()
    second.grow(1, 0, 0.0)
    second.give_back()
    assert pool.used_bytes == 0


@pytest.mark.parametrize("size", [101 << 20, 2**31 - 1, -1])
def test_too_large_a_request_ends_its_connection(make_server: MakeServer, size: int) -> None:
    """The connection ends before memory is allocated for the request."""
    server = make_server()
    with WireClient(server.bootstrap_servers) as client:
        client.raw(size.to_bytes(4, "big", signed=True))
        assert client.is_closed_by_peer()
    assert is_served(server)


def test_connections_are_counted(make_server: MakeServer) -> None:
    """The limits count all connections, and those of an address: one more is closed at once, until another one ends."""
    server = make_server(connections=3)
    clients = [WireClient(server.bootstrap_servers) for _ in range(3)]
    for client in clients:
        client.ask(18, 0, ApiVersionsRequest())
    with WireClient(server.bootstrap_servers) as late:
        assert late.is_closed_by_peer()
    clients.pop().close()
    wait_until(lambda: server.worker.listener.connection_count == 2)
    assert is_served(server)
    for client in clients:
        client.close()


@pytest.mark.parametrize("said", [b"", b"\0", b"\0\0\1\0", b"\0\1\0\0" + bytes(1000)])
def test_who_says_nothing_or_stops_in_the_middle_is_cut_off(make_server: MakeServer, said: bytes) -> None:
    """The limits are the idle time, and the patience for a request that has begun."""
    server = make_server(idle_s=0.3, patience_s=0.3)
    with WireClient(server.bootstrap_servers) as client:
        client.raw(said)
        began = time.monotonic()
        assert client.is_closed_by_peer()
        assert time.monotonic() - began > 0.1


@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_who_sends_byte_by_byte_is_cut_off(make_server: MakeServer, size: int) -> None:
    """Something always comes, and the request does not: a small one, and a large one."""
    server = make_server(idle_s=0.3, patience_s=0.3)
    with WireClient(server.bootstrap_servers) as client:
        client.raw(size.to_bytes(4, "big"))
        ends = time.monotonic() + 5
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < ends:
                client.raw(b"\0")
                time.sleep(0.02)
        assert time.monotonic() < ends


def filled(server: Server, size_bytes: int) -> None:
    """Append records to topic t through the library."""
    partition = server.store.open_partition("t", 0)
    for _ in range(size_bytes >> 20):
        partition.append([os.urandom(1 << 10) for _ in range(1 << 10)])


def test_who_never_reads_is_cut_off(make_server: MakeServer) -> None:
    """A client that does not read its fetches is disconnected.

    Its memory is limited, and others are served meanwhile.
    """
    server = make_server(patience_s=0.5)
    filled(server, 8 << 20)
    fetch = fetching(8 << 20)
    memory = Memory()
    client = WireClient(server.bootstrap_servers, receive_buffer=4096)
    client.raw(request_bytes(1, 11, fetch) * 50)
    assert is_served(server)
    wait_until(lambda: not server.worker.listener.connection_count)
    assert memory.peak() < 100 << 20
    client.close()


def test_answers_that_wait_are_bounded_in_bytes(make_server: MakeServer) -> None:
    """Behind an answer that waits for the disk no more requests are read than their answers may take."""
    server = make_server(answered_bytes=1 << 20)
    filled(server, 4 << 20)
    gate, asked = threading.Event(), [0]
    durability = server.worker.broker.fsync_waiter
    when_durable, handle = durability.when_durable, server.worker.listener._handle

    def held(*args: Any) -> None:
        threading.Thread(target=lambda: (gate.wait(10), when_durable(*args))).start()

    def counted(*args: Any) -> Any:
        asked[0] += 1
        return handle(*args)

    durability.when_durable = held  # type: ignore[method-assign]
    server.worker.listener._handle = counted
    fetch = fetching(1 << 20)
    batch = foreign([Sent(b"k", b"v")])
    with WireClient(server.bootstrap_servers) as client:
        client.send(
            0,
            7,
            producing(-1, batch),
        )
        for _ in range(20):
            client.send(1, 11, fetch)
        time.sleep(0.3)
        assert asked[0] <= 4
        gate.set()
        assert client.answer().responses[0].partition_responses[0].error_code == 0
        for _ in range(20):
            assert client.answer().responses[0].partitions[0].error_code == 0
    assert asked[0] == 21


def test_a_thousand_connections_leave_nothing(make_server: MakeServer) -> None:
    """Clients that close, or reset the connection during a request or an answer, leave no thread and no descriptor."""
    server = make_server()
    assert is_served(server)
    wait_until(lambda: not server.worker.listener.connection_count)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(1000):
        with WireClient(server.bootstrap_servers) as client:
            if number % 3 == 0:
                client.ask(18, 0, ApiVersionsRequest())
            elif number % 3 == 1:
                client.raw(request_bytes(18, 0, ApiVersionsRequest())[:-1])
            else:
                client.raw(request_bytes(3, 4, MetadataRequest(topics=None)) * 20)
    wait_until(lambda: not server.worker.listener.connection_count)
    wait_until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == before)


def test_a_server_that_stops_waits_for_nobody_who_goes_on_asking(make_server: MakeServer) -> None:
    """The server answers the requests that have arrived; a client that never stops sending does not delay its end."""
    server = make_server()
    is_stopped = threading.Event()

    def ask_on() -> None:
        with WireClient(server.bootstrap_servers) as client:
            try:
                while not is_stopped.is_set():
                    client.ask(18, 0, ApiVersionsRequest())
            except (Refused, OSError):
                pass

    threads = [threading.Thread(target=ask_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    server.close(timeout_s=3_600)  # for unfinished work: longer than the test may take
    is_stopped.set()
    for thread in threads:
        thread.join()
    assert server.worker.listener.connection_count == 0
