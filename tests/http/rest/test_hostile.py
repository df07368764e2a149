"""Malformed, huge, slow and truncated bodies, on plain sockets where it matters."""

import asyncio
import contextlib
import json
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from unittest import mock

import httpx
import pytest
from doors import Client
from waiting import wait_until

from segmentlog.http import large_bodies
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest.native import line_endpoints
from segmentlog.http.rest.native.native_models import AppendQuery
from segmentlog.http.rest.v3.v3_links import cluster_id_of
from segmentlog.http.serving import HttpServer
from segmentlog.http.settings import HttpLimits, HttpSettings
from segmentlog.store import LogStore

JSON = "application/vnd.kafka.json.v2+json"
BINARY = "application/vnd.kafka.binary.v2+json"


def post(client: Client, body: bytes, content_type: str = JSON) -> httpx.Response:
    """Post to topic `t`."""
    return client.post("/topics/t", content=body, headers={"content-type": content_type})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"null", 422), (b"[]", 422), (b"{}", 422), (b'{"records":{}}', 422),
        (b'{"records":[1]}', 422), (b'{"records":[{"value":NaN}]}', 400), (b'{"records":[{"value":Infinity}]}', 400),
        (b'{"records":[{"value":01}]}', 400), (b'{"records":[{"value":"\xff"}]}', 400),
        (b'{"records":[{"value":"\\ud800"}]}', 400), (b'{"records":[{"value":"\x00"}]}', 400),
        (b'{"records":[{"value":1}]} x', 400), (b'{"records":[{"value":1}', 400),
        (b'{"records":[{"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", 400),
        (b"[" * 1_000_000, 422), (b'{"a":' * 200_000, 400),
        (b'{"records":[{"value":1,"partition":-1}]}', 422), (b'{"records":[{"value":1,"partition":1.5}]}', 422),
        (b'{"records":[{"value":1,"partition":99999999999999999999}]}', 422),
        (b'{"records":[{"value":1,"partition":true}]}', 422), (b"\xef\xbb\xbf{}", 400), (b"\xff\xfe{\x00}\x00", 400),
    ],
    ids=lambda given: str(given)[:30],
)  # fmt: skip
def test_broken_bodies(store: LogStore, client: Client, body: bytes, status: int) -> None:
    """Malformed JSON and invalid content are refused as a whole, with an explanation."""
    log = store.create_topic("t").partition(0)
    answer = post(client, body)
    assert answer.status_code == status, answer.text
    assert answer.json()["message"]
    assert log.log_end_offset == 0


@pytest.mark.parametrize("value", ['"*"', '"AA"', '"AAA"', '"A A="', '"-_=="', "1", "[]", '"\\u00e9"'])
def test_broken_base64(store: LogStore, client: Client, value: str) -> None:
    """Invalid base64 is refused, and the whole request appends nothing."""
    log = store.create_topic("t").partition(0)
    assert post(client, f'{{"records":[{{"value":"AAAA"}},{{"value":{value}}}]}}'.encode(), BINARY).status_code == 422
    assert log.log_end_offset == 0


def test_numbers_and_names_are_kept(store: LogStore, client: Client) -> None:
    """The last of repeated request fields counts; values are appended unchanged."""
    log = store.create_topic("t").partition(0)
    value = b'{"a":1,"a":2,"n":1e999,"m":123456789012345678901234567890,"z":-0.0}'
    assert post(client, b'{"records":[{"value":0}],"records":[{"value":%b}]}' % value).status_code == 200
    assert [record.value for batch in log.read(0) for record in batch] == [value]


def test_one_large_request(store: LogStore, client: Client) -> None:
    """A body of 30 MB of small records uses only a few times its size."""
    store.create_topic("t")
    record = b'{"value":"%b"}' % (b"x" * 300)
    body = b'{"records":[' + b",".join([record] * 100_000) + b"]}"
    tracemalloc.start()
    try:
        answer = post(client, body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code == 200
    assert len(answer.json()["offsets"]) == 100_000
    # The client's own copy of the body and of the answer are in it, too.
    assert peak_bytes < 8 * len(body), f"{peak_bytes / len(body):.1f} times the body"


def test_too_large(store: LogStore, serve) -> None:  # type: ignore[no-untyped-def]
    """Bodies beyond the limit are refused, with and without a declared size, and the server keeps running."""
    store.create_topic("t")
    server = serve(HttpSettings(limits=HttpLimits(request_bytes=10_000)))
    with httpx.Client(base_url=server.url) as web:
        large = b'{"records":[{"value":"%b"}]}' % (b"x" * 20_000)
        for content in (large, iter([large[:5000], large[5000:9000], large[9000:]])):
            answer = web.post("/topics/t", content=content, headers={"content-type": JSON})
            assert answer.status_code == 413
        assert (
            web.post("/topics/t", json={"records": [{"value": 1}]}, headers={"content-type": JSON}).status_code == 200
        )
        lines = web.post("/topics/t/records", content=iter([b"a\n" * 4000, b"b\n" * 4000]),
                         headers={"content-type": "text/plain"})  # fmt: skip
        assert (lines.status_code, lines.json()["appended"]["records"]) == (413, 0)


def _exchange(server: HttpServer, *pieces: bytes, pause_s: float = 0.0, ends: bool = False) -> bytes:
    """Send pieces on a connection of its own, close it with ``ends``, and return everything received."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(pause_s)
        if ends:
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        while data := sock.recv(65536):
            answer += data
        return answer


def _head(server: HttpServer, path: str, *fields: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", f"host: {server.address}", "connection: close", *fields)
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def test_truncated(store: LogStore, http_server: HttpServer) -> None:
    """A truncated request appends nothing; truncated lines append only complete chunks."""
    log = store.create_topic("t").partition(0)
    body = json.dumps({"records": [{"value": 1}] * 100}).encode()
    head = _head(http_server, "/topics/t", f"content-type: {JSON}", f"content-length: {len(body)}")
    _exchange(http_server, head, body[:-1], ends=True)
    head = _head(http_server, "/topics/t/records", "content-type: text/plain", "content-length: 100")
    _exchange(http_server, head, b"a\nb\n", ends=True)
    assert httpx.get(f"{http_server.url}/topics").status_code == 200
    assert log.log_end_offset == 0


def test_in_pieces(store: LogStore, http_server: HttpServer) -> None:
    """A body that arrives byte by byte or in chunks is one body."""
    log = store.create_topic("t").partition(0)
    body = b'{"records":[{"value":"abc"}]}'
    head = _head(http_server, "/topics/t", f"content-type: {JSON}", f"content-length: {len(body)}")
    assert b"200 OK" in _exchange(http_server, head, *(body[at : at + 1] for at in range(len(body))), pause_s=0.002)
    chunked = _head(http_server, "/topics/t", f"content-type: {JSON}", "transfer-encoding: chunked")
    pieces = [b"%x\r\n%b\r\n" % (len(body[at : at + 7]), body[at : at + 7]) for at in range(0, len(body), 7)]
    assert b"200 OK" in _exchange(http_server, chunked, *pieces, b"0\r\n\r\n", pause_s=0.01)
    assert log.log_end_offset == 2
    broken = _exchange(http_server, chunked, b"zz\r\n" + body)
    assert b" 200 " not in broken.split(b"\r\n")[0]
    assert log.log_end_offset == 2


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("size", [1, 1 << 16])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_who_would_rather_have_another_protocol(
    store: LogStore, http_server: HttpServer, protocol: str, size: int, is_chunked: bool
) -> None:
    """A request that offers HTTP/2, as Java's client sends it, is handled together with its body."""
    log = store.create_topic("t").partition(0)
    body = b"a\nb\n"
    framed = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    if is_chunked:
        framed = b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n3;x=1\r\n\nb\n\r\n0\r\nTrailer: 1\r\n\r\n"
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABk\r\n" % protocol.encode()
    head = b"POST /topics/t/records HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
    look = b"GET /topics HTTP/1.1\r\nHost: localhost\r\n"
    sent = (
        head
        + upgrade
        + framed
        + look
        + upgrade
        + b"\r\n"
        + head
        + upgrade
        + framed
        + look
        + b"Connection: close\r\n\r\n"
    )
    answers = _exchange(http_server, *(sent[at : at + size] for at in range(0, len(sent), size)))
    assert answers.count(b"HTTP/1.1 200 OK") == 4, answers
    assert answers.count(b'{"records":2,') == 2
    assert answers.count(b'["t"]') == 2
    assert [value for batch in log.read(0) for value in batch.values] == [b"a", b"b"] * 2


def test_records_are_answered_while_more_come(store: LogStore, http_server: HttpServer) -> None:
    """Version 3 sends the outcome of a record before the client sends the next record."""
    store.create_topic("t")
    cluster = httpx.get(f"{http_server.url}/v3/clusters").json()["data"][0]["cluster_id"]
    host, _, port = http_server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        path = f"/v3/clusters/{cluster}/topics/t/records"
        sock.sendall(_head(http_server, path, "content-type: application/json", "transfer-encoding: chunked"))
        received = b""
        for number in range(5):
            record = b'{"value":{"type":"JSON","data":%d}}' % number
            sock.sendall(b"%x\r\n%b\r\n" % (len(record), record))
            while received.count(b'"error_code":200') <= number:
                data = sock.recv(65536)
                assert data
                received += data
        sock.sendall(b"0\r\n\r\n")
        while data := sock.recv(65536):
            received += data
    assert received.endswith(b"0\r\n\r\n")
    assert store.topic("t").partition(0).log_end_offset == 5


def test_more_than_a_request_may_have(store: LogStore, serve: Callable[..., HttpServer]) -> None:
    """Records up to the size limit have their outcomes, and the last outcome reports the limit."""
    log = store.create_topic("t").partition(0)
    server = serve(HttpSettings(limits=HttpLimits(request_bytes=10_000)))
    cluster = httpx.get(f"{server.url}/v3/clusters").json()["data"][0]["cluster_id"]
    path = f"/v3/clusters/{cluster}/topics/t/records"
    head = _head(server, path, "content-type: application/json", "transfer-encoding: chunked")
    record = b'{"value":{"type":"JSON","data":"%b"}}' % (b"x" * 3000)
    pieces = [b"%x\r\n%b\r\n" % (len(record), record)] * 4
    answer = _exchange(server, head, *pieces, b"0\r\n\r\n", pause_s=0.2)
    assert answer.count(b'"error_code":200') == log.log_end_offset == 3
    assert answer.count(b'"error_code":413') == 1
    assert answer.endswith(b"0\r\n\r\n")


def _large_and_slow(server: HttpServer) -> socket.socket:
    """Return a sender of 50 MB, 1.2 MB of which have come."""
    host, _, port = server.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    sock.sendall(_head(server, "/topics/t", f"content-type: {JSON}", "content-length: 50000000") + b" " * 1_200_000)
    return sock


def test_slow_senders_of_large_bodies(store: LogStore, http_server: HttpServer) -> None:
    """Slow senders hold the memory of what they sent, but another large body is handled meanwhile."""
    log = store.create_topic("t").partition(0)
    socks = [_large_and_slow(http_server) for _ in range(8)]
    time.sleep(0.5)
    large = b'{"records":[{"value":"%b"}]}' % (b"x" * 500_000) + b" " * 1_000_000
    answer = httpx.post(f"{http_server.url}/topics/t", content=large, headers={"content-type": JSON}, timeout=5)
    assert (answer.status_code, log.log_end_offset) == (200, 1)
    for sock in socks:
        sock.close()


def test_a_large_body_has_a_least_rate(store: LogStore, http_server: HttpServer) -> None:
    """A body that arrives too slowly gets 408, and the connection is closed."""
    store.create_topic("t")
    with mock.patch.object(large_bodies, "_SECONDS_PER_MIB", 0.3), _large_and_slow(http_server) as sock:
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert b" 408 " in answer.split(b"\r\n")[0]


def test_room_for_large_bodies() -> None:
    """Memory for bodies is limited. A request that waits too long gets 503; the oldest holder never waits."""

    async def fill() -> None:
        large = large_bodies.LargeBodies(100)
        first, second, third = object(), object(), object()
        await large.grow(first, 60)
        await large.grow(second, 40)
        with pytest.raises(HttpProblem) as refused:
            await large.grow(third, 1)
        assert refused.value.status == 503
        await large.grow(first, 90)
        waiting = asyncio.create_task(large.grow(second, 50))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        large.release(first)
        await waiting
        await large.grow(third, 50)

    with mock.patch.object(large_bodies, "_WAIT_S", 0.1):
        asyncio.run(fill())


def _begin_endless_body(
    server: HttpServer, path: str, content_type: str, begin: bytes, size: int
) -> tuple[socket.socket, threading.Thread]:
    """Send the beginning of an endless body, and in a thread ``size`` bytes more, as fast as the server takes them."""

    def send() -> None:
        with contextlib.suppress(OSError):  # the test closes the connection while the server does not read it
            sock.sendall(b"x" * size)

    host, _, port = server.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=60)
    sock.sendall(_head(server, path, f"content-type: {content_type}", "content-length: 90000000") + begin)
    thread = threading.Thread(target=send)
    thread.start()
    return sock, thread


@pytest.mark.parametrize("kind", ["lines", "v3", "v2", "registry", "zstd"])
def test_what_is_kept_of_a_body_has_a_bound_for_all_of_them(
    store: LogStore, serve: Callable[..., HttpServer], kind: str
) -> None:
    """All requests together hold at most the size of some of the largest bodies; the oldest may exceed the limit."""
    store.create_topic("t")
    server = serve(HttpSettings(limits=HttpLimits(request_bytes=100 << 20)))
    large = server.context.large_bodies
    large._limit_bytes = 8 << 20
    cluster = cluster_id_of(store.store_id)
    path, content_type, begin = {
        "lines": ("/topics/t/records", "text/plain", b""),
        "v3": (f"/v3/clusters/{cluster}/topics/t/records", "application/json", b'{"value":{"type":"STRING","data":"'),
        "v2": ("/topics/t", BINARY, b'{"records":[{"value":"'),
        "registry": ("/subjects/s/versions", "application/json", b'{"schema":"'),
        "zstd": ("/topics/t/records", "text/plain\r\ncontent-encoding: zstd", b""),
    }[kind]
    senders = [_begin_endless_body(server, path, content_type, begin, 4 << 20) for _ in range(6)]
    try:
        # Each body first reserves over 2 MiB; the next one waits if less than that is left.
        wait_until(lambda: large.reserved_bytes >= 5 << 20)
        # The oldest holder may exceed the limit.
        assert large.reserved_bytes <= (8 << 20) + (6 << 20)
    finally:
        for sock, thread in senders:
            sock.shutdown(socket.SHUT_RDWR)
            sock.close()
            thread.join()
    wait_until(lambda: not large.reserved_bytes)
    assert store.topic("t").partition(0).log_end_offset == 0


class _Searched(bytearray):
    """Counts the bytes that are scanned."""

    count = 0

    def find(self, wanted: bytes, start: int, end: int | None = None) -> int:  # type: ignore[override]
        self.count += (len(self) if end is None else min(end, len(self))) - start
        return bytearray.find(self, wanted, start, len(self) if end is None else end)

    def rfind(self, wanted: bytes, start: int, end: int) -> int:  # type: ignore[override]
        self.count += min(end, len(self)) - start
        return bytearray.rfind(self, wanted, start, end)


def test_a_long_line_is_looked_through_once() -> None:
    """The pieces of a long line are scanned once, and lines after it are found."""
    sent: list[bytes] = []
    call = mock.Mock(content_type="text/plain")
    lines_in = line_endpoints.LineAppender(call, "t", AppendQuery())
    lines_in._send = lambda records: sent.extend(records.values)  # type: ignore[method-assign]
    rest = lines_in._buffer = _Searched()
    long = [b"x" * (64 << 10)] * 200
    for piece in (*long, b"\nshort\n", *long, b"\n", b"a\nb"):
        if lines_in.add(piece):
            lines_in.flush()
    lines_in.finish()
    assert [len(value) for value in sent] == [200 << 16, 5, 200 << 16, 1, 1]
    assert rest.count < 3 * 2 * (200 << 16)


def test_many_at_once(store: LogStore, http_server: HttpServer) -> None:
    """Many clients that disconnect within large bodies leave no state in the server."""
    store.create_topic("t")
    host, _, port = http_server.address.rpartition(":")
    socks = []
    for _ in range(50):
        sock = socket.create_connection((host, int(port)), timeout=20)
        sock.sendall(_head(http_server, "/topics/t", f"content-type: {JSON}", "content-length: 90000000"))
        sock.sendall(b'{"records":[{"value":"' + b"x" * 100_000)
        socks.append(sock)
    assert httpx.get(f"{http_server.url}/topics", timeout=20).json() == ["t"]
    for sock in socks:
        sock.close()
    assert httpx.get(f"{http_server.url}/topics", timeout=20).json() == ["t"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # in KiB
