"""Connections without threads of their own, and those that get one for a while."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme
from leftovers import opened
from logs import NoSyncFileSystem
from security.certificates import write_pair
from server.wire_client import WireClient, request_bytes
from waiting import wait_until
from wire import CODECS, Sent, foreign

from segmentlog.log.partition import Partition
from segmentlog.security.principals import ANONYMOUS
from segmentlog.security.security_settings import Security
from segmentlog.server import loop
from segmentlog.server.broker import DECOMPRESSED_MAX
from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest
from segmentlog.server.codec.generated.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.list_groups import ListGroupsRequest
from segmentlog.server.codec.generated.metadata import MetadataRequest
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.embedded import Server
from segmentlog.server.frames import MEDIUM_BYTES, FrameReader
from segmentlog.server.kafka_connection import KafkaConnection, StepResult
from segmentlog.server.request_buffers import BufferPool
from segmentlog.server.request_context import RequestContext
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.transport import PlainTransport
from segmentlog.store import LogStore

WAIT_S = 10.0
ONE = foreign([Sent(None, b"one")])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Yield a function that creates servers of a store with topics t and slow."""
    servers: list[Server] = []

    def make(security: Security | None = None) -> Server:
        store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
        store.create_topic("t")
        store.create_topic("slow")
        servers.append(
            Server(
                store, host="127.0.0.1", port=0, advertise=None, settings=ServerSettings(),
                security=security or Security(), owns_store=False,
            )
        )  # fmt: skip
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def producing(batch: bytes = ONE, topic: str = "t") -> ProduceRequest:
    """Return a request that produces a batch to a topic."""
    return ProduceRequest(None, 1, 1000, [TopicProduceData(topic, partition_data=[PartitionProduceData(0, batch)])])


def polling(offset: int, wait_ms: int = 30_000) -> FetchRequest:
    """Return a fetch from an offset of topic t that waits for ``wait_ms``."""
    part = FetchPartition(0, fetch_offset=offset, partition_max_bytes=1 << 20)
    return FetchRequest(
        max_wait_ms=wait_ms, min_bytes=1, max_bytes=1 << 20, topics=[FetchTopic("t", partitions=[part])]
    )


def base_offset(answer: Any) -> int:
    """Return the base offset of a produce response."""
    (part,) = answer.responses[0].partition_responses
    assert part.error_code == 0
    return int(part.base_offset)


def threads_of_connections() -> int:
    """Threads that serve one connection: they are called after its client."""
    return sum(thread.name == "segmentlog-127.0.0.1" for thread in threading.enumerate())


def test_many_that_ask_now_and_then_have_no_threads(serve: Callable[..., Server]) -> None:
    """Clients that produce or wait for records use no threads, either."""
    server = serve()
    clients = [WireClient(server.bootstrap_servers) for _ in range(150)]
    for number, client in enumerate(clients):
        client.ask(18, 0, ApiVersionsRequest())
        assert base_offset(client.ask(0, 9, producing())) == number
    for client in clients[:100]:
        client.send(1, 11, polling(150))
    wait_until(lambda: server.worker.broker.purgatory.waiting_count == 100)
    assert threads_of_connections() == 0
    clients[-1].ask(0, 9, producing())
    for client in clients[:100]:
        assert client.answer().responses[0].partitions[0].records
    assert threads_of_connections() == 0
    for client in clients:
        client.close()


def test_what_came_together_is_answered_together(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers come in order, in far fewer pieces."""
    server = serve()
    sent: list[int] = []
    send_now = PlainTransport.send_now

    def counted(self: PlainTransport, buffers: Any) -> Any:
        sent.append(len(buffers))
        return send_now(self, buffers)

    monkeypatch.setattr(PlainTransport, "send_now", counted)
    with WireClient(server.bootstrap_servers) as client:
        together = bytearray()
        for number in range(1, 61):
            client._expected.append((number, 0, 9))
            together += request_bytes(0, 9, producing(), number)
        client.raw(together)
        assert [base_offset(client.answer()) for _ in range(60)] == list(range(60))
    assert len(sent) <= 2 + len(together) // (8 << 10)


@pytest.mark.parametrize("needs_thread", [False, True])
def test_what_was_done_is_answered_before_it_ends(serve: Callable[..., Server], needs_thread: bool) -> None:
    """A request that ends the connection takes no answer along that came before it."""
    server = serve()
    with WireClient(server.bootstrap_servers) as client:
        if needs_thread:
            client.ask(16, 4, ListGroupsRequest())
        first = client._sent + 1
        client._expected += [(first, 0, 9), (first + 1, 0, 9)]
        client.raw(
            request_bytes(0, 9, producing(), first)
            + request_bytes(0, 9, producing(), first + 1)
            + b"\0\0\0\x0a\0\0\0\x09\0\0\0\1\xff\xff"  # a Produce request that ends after its header
        )
        assert [base_offset(client.answer()) for _ in range(2)] == [0, 1]
        assert client.is_closed_by_peer()


@pytest.mark.parametrize("needs_thread", [False, True])
def test_requests_behind_one_that_nobody_waits_for_are_done(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, needs_thread: bool
) -> None:
    """A producer's last records are appended although it left while a request before them was done.

    None of the later requests is answered: a client that still reads would take that for the answer it misses.
    """
    server = serve()
    is_disconnected, found = KafkaConnection.is_disconnected, []

    def is_left_soon(connection: KafkaConnection) -> bool:
        wait_until(lambda: is_disconnected(connection))
        found.append(connection)
        return True

    monkeypatch.setattr(KafkaConnection, "is_disconnected", is_left_soon)
    monkeypatch.setattr("segmentlog.server.request_context.CHECK_INTERVAL_S", 0.0)
    described = [DescribeConfigsResource(2, name) for name in ("t", "slow")]
    first = (
        request_bytes(32, 4, DescribeConfigsRequest(described), 1) if needs_thread
        else request_bytes(3, 12, MetadataRequest(topics=None), 1)
    )  # fmt: skip
    with WireClient(server.bootstrap_servers) as client:
        last = ProduceRequest(None, 0, 1000, producing().topic_data)
        client.raw(first + request_bytes(0, 9, producing(), 2) + request_bytes(0, 9, last, 3))
        client.sock.shutdown(socket.SHUT_WR)
        received = b""
        while data := client.sock.recv(1 << 16):
            received += data
    assert received == b""
    assert len(found) == 1
    assert server.store.open_partition("t", 0).log_end_offset == 2


def test_a_client_that_left_costs_one_look_a_request(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a client is known to have left, its requests get no more work for a tenth of a second."""
    server = serve()
    asked: list[int] = []
    call_each = RequestContext.each

    def counted(call: RequestContext, elements: Any) -> Any:
        for element in call_each(call, elements):
            asked.append(call.correlation_id)
            yield element
            if call.correlation_id == 1:
                call.next_check_s = -1.0

    monkeypatch.setattr(RequestContext, "each", counted)
    monkeypatch.setattr(KafkaConnection, "is_disconnected", lambda _: True)
    with WireClient(server.bootstrap_servers) as client:
        client.raw(b"".join(request_bytes(3, 12, MetadataRequest(topics=None), number) for number in range(1, 10)))
        client.sock.shutdown(socket.SHUT_WR)
        assert client.is_closed_by_peer()
    assert set(asked) == {1}


def test_one_that_takes_long_does_not_keep_the_others_waiting(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that takes long unexpectedly is answered when it is done; its connection then continues as usual."""
    server = serve()
    append_wire, is_slow, goes_on = Partition.append_wire, threading.Event(), threading.Event()

    def slow(self: Partition, *args: Any, **options: Any) -> Any:
        if self.topic == "slow":
            is_slow.set()
            assert goes_on.wait(WAIT_S)
        return append_wire(self, *args, **options)

    monkeypatch.setattr(Partition, "append_wire", slow)
    with WireClient(server.bootstrap_servers) as one, WireClient(server.bootstrap_servers) as another:
        for _ in range(3):
            one.send(0, 9, producing(topic="slow"))
            assert is_slow.wait(WAIT_S)
            offsets = [base_offset(another.ask(0, 9, producing())) for _ in range(5)]
            assert offsets == list(range(offsets[0], offsets[0] + 5))
            assert not goes_on.is_set()
            goes_on.set()
            base_offset(one.answer())
            is_slow.clear()
            goes_on.clear()
        assert base_offset(one.ask(0, 9, producing())) == 15
        assert server.worker.is_healthy(1.0)


def test_a_batch_that_waits_for_a_place_keeps_nobody_waiting(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is small as sent and large once decompressed. Requests that need no slot are served at once."""
    monkeypatch.setattr(loop.Loop, "_replace_stuck_leader", lambda _: None)  # it has to step aside by itself
    server = serve()
    packed = foreign([Sent(b"k", b"v" * 1_000_000)], CODECS["zstd"])
    assert len(packed) < MEDIUM_BYTES
    small = [foreign([Sent(b"k", b"v" * 2000)], codec) for codec in CODECS.values()]
    places = server.worker.broker.decompression_slots
    with ExitStack() as taken, ExitStack() as clients:
        for number in range(DECOMPRESSED_MAX):
            taken.enter_context(places.slot(number, int))
        waiting = [clients.enter_context(WireClient(server.bootstrap_servers)) for _ in range(3)]
        for number, client in enumerate(waiting, 1):
            client.send(0, 9, producing(packed))
            wait_until(lambda number=number: places.waiting_count == number)
        other = clients.enter_context(WireClient(server.bootstrap_servers))
        assert [base_offset(other.ask(0, 9, producing(batch))) for batch in small] == list(range(len(small)))
        assert places.waiting_count == len(waiting)
        taken.close()
        first = len(small)
        assert sorted(base_offset(client.answer()) for client in waiting) == [first, first + 1, first + 2]
        # The thread that serves many connections has these three again.
        assert base_offset(waiting[0].ask(0, 9, producing())) == first + 3
        wait_until(lambda: threads_of_connections() == 0)


def test_answers_behind_a_long_poll(serve: Callable[..., Server]) -> None:
    """They wait for it, because order counts; a second long poll does not wait."""
    server = serve()
    with WireClient(server.bootstrap_servers) as client, WireClient(server.bootstrap_servers) as producer:
        client.send(1, 11, polling(0))
        client.send(3, 12, MetadataRequest(topics=None))
        client.send(1, 11, polling(0))
        client.sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.sock.recv(1)
        client.sock.settimeout(WAIT_S)
        producer.ask(0, 9, producing())
        assert client.answer().responses[0].partitions[0].records
        assert {topic.name for topic in client.answer().topics} == {"slow", "t"}
        assert not client.answer().responses[0].partitions[0].records, "it was answered when it came"
        client.send(1, 11, polling(1))
        producer.ask(0, 9, producing())
        assert client.answer().responses[0].partitions[0].records


def test_a_thread_for_as_long_as_it_needs_one(serve: Callable[..., Server]) -> None:
    """Requests that may block or are large are done in a thread, which ends after sixteen small requests."""
    server = serve()
    large = foreign([Sent(None, b"x" * 200_000)])
    with WireClient(server.bootstrap_servers) as client:
        for needs_thread in (
            lambda: client.ask(16, 4, ListGroupsRequest()),
            lambda: base_offset(client.ask(0, 9, producing(large))),
        ):
            needs_thread()
            assert threads_of_connections() == 1
            for _ in range(20):
                client.ask(18, 0, ApiVersionsRequest())
            wait_until(lambda: threads_of_connections() == 0)
            client.ask(18, 0, ApiVersionsRequest())
            assert threads_of_connections() == 0


def test_a_thread_in_the_middle_of_what_came_together(serve: Callable[..., Server]) -> None:
    """Responses have the order of the requests, whichever thread does them."""
    server = serve()
    large = foreign([Sent(None, b"x" * 40_000)])
    asked = [(0, 9, producing()), (16, 4, ListGroupsRequest()), (0, 9, producing()), (0, 9, producing(large)),
             (18, 0, ApiVersionsRequest()), (0, 9, producing())] * 5  # fmt: skip
    with WireClient(server.bootstrap_servers) as client:
        together = bytearray()
        for number, (key, version, body) in enumerate(asked, 1):
            client._expected.append((number, key, version))
            together += request_bytes(key, version, body, number)
        client.raw(together)
        answers = [client.answer() for _ in asked]
    offsets = [base_offset(answer) for (key, _, _), answer in zip(asked, answers, strict=True) if key == 0]
    assert offsets == list(range(len(offsets)))


@pytest.mark.parametrize("piece", [1, 3, 50])
def test_requests_in_pieces(serve: Callable[..., Server], piece: int) -> None:
    """A request may come byte by byte, and end in the middle of the next."""
    server = serve()
    with WireClient(server.bootstrap_servers) as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = bytearray()
        for number in range(1, 4):
            client._expected.append((number, 0, 9))
            data += request_bytes(0, 9, producing(), number)
        for at in range(0, len(data), piece):
            client.raw(data[at : at + piece])
        assert [base_offset(client.answer()) for _ in range(3)] == [0, 1, 2]
        assert threads_of_connections() == 0


def test_what_was_decrypted_already_is_not_waited_for(serve: Callable[..., Server], tmp_path: Path) -> None:
    """OpenSSL may have more than was taken, of which the socket says nothing."""
    authority = trustme.CA()
    pair = write_pair(tmp_path, "server", authority.issue_cert("127.0.0.1"))
    server = serve(Security(tls_cert=pair.certificate, tls_key=pair.key))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with WireClient(server.bootstrap_servers) as client:
        client.sock = context.wrap_socket(client.sock, server_hostname="127.0.0.1")
        client.ask(18, 0, ApiVersionsRequest())
        wait_until(lambda: threads_of_connections() == 0)
        for _ in range(3):
            first = client._sent + 1
            head = request_bytes(0, 9, producing(), first)
            client.raw(head[:-1])
            # As much as a TLS record holds, into a buffer of that size that has begun to fill.
            count = ((16 << 10) - 1) // len(head)
            data = bytearray(head[-1:])
            for number in range(first + 1, first + count + 1):
                data += request_bytes(0, 9, producing(), number)
            assert (16 << 10) - len(head) < len(data) <= 16 << 10
            for number in range(first, first + count + 1):
                client._expected.append((number, 0, 9))
            client._sent = first + count
            client.raw(data)
            for _ in range(count + 1):
                base_offset(client.answer())


def test_a_client_that_takes_nothing_keeps_nobody_waiting(serve: Callable[..., Server]) -> None:
    """Its responses fill the system's buffers; other clients are served."""
    server = serve()
    with WireClient(server.bootstrap_servers) as setup:
        setup.ask(0, 9, producing(foreign([Sent(None, b"x" * 60_000)])))
    with (
        WireClient(server.bootstrap_servers, receive_buffer=4096) as slow,
        WireClient(server.bootstrap_servers) as other,
    ):
        slow.sock.setblocking(False)
        request = request_bytes(1, 11, polling(0), 1)
        try:
            for _ in range(400):
                slow.sock.send(request)
        except BlockingIOError:
            pass
        for _ in range(20):
            base_offset(other.ask(0, 9, producing()))


def test_requests_of_some_size_need_no_thread(serve: Callable[..., Server]) -> None:
    """Java's batches of 16 KiB and their like: alone, with small ones, in pieces; for larger ones there is one."""
    server = serve()
    batches = [foreign([Sent(None, b"x" * size)]) for size in (16_200, 16_300, 16_384, 30_000, 100, 65_000)]
    with WireClient(server.bootstrap_servers) as client:
        client.ask(18, 0, ApiVersionsRequest())
        offsets = []
        for _ in range(3):
            for batch in batches:
                offsets.append(base_offset(client.ask(0, 9, producing(batch))))
            together = bytearray()
            for number, batch in enumerate(batches, client._sent + 1):
                client._expected.append((number, 0, 9))
                together += request_bytes(0, 9, producing(batch), number)
            client._sent += len(batches)
            for at in range(0, len(together), 23_456):
                client.raw(together[at : at + 23_456])
                time.sleep(0.002)
            offsets += [base_offset(client.answer()) for _ in batches]
        assert offsets == list(range(36))
        assert threads_of_connections() == 0
        base_offset(client.ask(0, 9, producing(foreign([Sent(None, b"x" * 65_500)]))))
        assert threads_of_connections() == 1
    sizes = {
        len(record.value or b"") for batch in server.store.open_partition("t", 0).read(0) for record in batch.records()
    }
    assert sizes == {16_200, 16_300, 16_384, 30_000, 100, 65_000, 65_500}


def connected(handle: Callable[[KafkaConnection, memoryview], Any]) -> tuple[KafkaConnection, socket.socket]:
    """Return a connection that no loop steps, and its client."""
    ours, theirs = socket.socketpair()
    transport = PlainTransport(ours, 10.0, 10.0)
    frames = FrameReader(transport, BufferPool(), limit_bytes=1 << 20, patience_s=10.0, idle_s=10.0)
    return KafkaConnection(transport, frames, handle, client_host="x", principal=ANONYMOUS, limit_bytes=1 << 20), theirs


@pytest.mark.parametrize("size", [16_384, 60_000])
def test_one_step_takes_a_request_that_is_there(size: int) -> None:
    """A request that does not fit the small buffer is not waited for again, nor are those that came with it."""
    seen: list[int] = []

    def handle(_: KafkaConnection, frame: memoryview) -> list[bytes]:
        seen.append(len(frame))
        return [b"%d" % len(frame)]

    connection, theirs = connected(handle)
    with theirs:
        for length in (size, 100):
            theirs.sendall(length.to_bytes(4, "big") + b"\0\0" + bytes(length - 2))
        assert connection.step() is StepResult.STAYS
        assert seen == [size, 100]
        assert theirs.recv(100) == b"%d100" % size
        connection.end()


def test_who_is_still_to_be_answered_has_not_left() -> None:
    """A server that stops receives nothing more.

    That does not mean that a client has left, such as one that joins a group.
    """
    connection, theirs = connected(lambda *_: None)
    with theirs:
        assert not connection.is_disconnected()
        connection.finish()
        assert not connection.is_disconnected()
        connection.end()
        assert connection.is_disconnected()
    connection, theirs = connected(lambda *_: None)
    theirs.close()
    assert connection.is_disconnected()
    connection.end()
