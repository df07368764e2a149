"""Headers that change the meaning of a body are applied or refused at every endpoint."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import socket
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import cramjam
import httpx
import pytest
from doors import Client
from starlette.routing import Mount, Route

from segmentlog.http import console
from segmentlog.http.console import Console
from segmentlog.http.context import HttpContext
from segmentlog.http.registry.registry_routes import routes as registry_routes
from segmentlog.http.rest.rest_routes import ENDPOINTS
from segmentlog.http.rest.v3.v3_links import cluster_id_of
from segmentlog.http.settings import HttpLimits, HttpSettings
from segmentlog.store import LogStore

LINES = b"".join(b'{"n":%d,"pad":"%032x"}\n' % (n, n * 0x9E3779B97F4A7C15) for n in range(1000))
ENCODE: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": lambda data: bytes(cramjam.zstd.compress(data)),
    "deflate": zlib.compress,
}
TEXT = "text/plain"


def every_endpoint(client: Client) -> list[tuple[str, str, str]]:
    """Return (method, path with its parameters filled in, content type) of every endpoint."""
    found = [(one.method, one.path, one.accepts[0] if one.accepts else "") for one in ENDPOINTS]
    pages = Mount("/ui", routes=console.routes(Console(client.context)))
    found += [
        (method, prefix + route.path, content_type)
        for prefix, routes, content_type in (
            ("", registry_routes(client.context), "application/json"),
            ("/ui", pages.routes, "application/x-www-form-urlencoded"),
        )
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or ()) - {"HEAD"}
    ]
    found += [("GET", "/", ""), ("GET", "/healthz", ""), ("GET", "/ui", "")]
    cluster = cluster_id_of(client.context.store.store_id)
    values = {"cluster_id": cluster, "partition": "0", "partition_id": "0", "broker_id": "1", "version": "1"}

    def filled(path: str) -> str:
        return re.sub(r"{(\w+)(:\w+)?}", lambda match: values.get(match[1], "t"), path)

    return [(method, filled(path), content_type) for method, path, content_type in found]


REFUSED: list[tuple[dict[str, str], int, str]] = [
    ({"content-encoding": "br"}, 415, "gzip, zstd, deflate"),
    ({"content-encoding": "gzip, gzip"}, 415, "gzip, zstd, deflate"),
    ({"content-encoding": "aws-chunked"}, 415, "gzip, zstd, deflate"),
    ({"content-type": "text/plain; charset=utf-16"}, 415, "charset utf-16"),
    ({"content-type": 'text/plain; a=b; Charset="ISO-8859-1"'}, 415, "charset iso-8859-1"),
    ({"content-transfer-encoding": "base64"}, 415, "Content-Transfer-Encoding"),
    ({"content-range": "bytes 0-3/10"}, 400, "Content-Range"),
    ({"expect": "a miracle"}, 417, "Expect"),
    ({"content-md5": "!"}, 400, "content-md5"),
    ({"content-digest": "unixsum=:AAAA:"}, 400, "content-digest"),
    ({"repr-digest": "sha-256=nonsense"}, 400, "repr-digest"),
    ({"digest": "crc32c=AAAA"}, 400, "digest"),
]


@pytest.mark.parametrize(("headers", "status", "words"), REFUSED, ids=lambda given: str(given))
def test_what_is_not_understood_is_refused_everywhere(
    client: Client, headers: dict[str, str], status: int, words: str
) -> None:
    """Every method of every path refuses the header and names it."""
    asked = 0
    for method, path, content_type in every_endpoint(client):
        sent = {"content-type": content_type, **headers} if content_type else headers
        answer = client.request(method, path, headers=sent, content=b"[1]")
        assert (answer.status_code, words in answer.text) == (status, True), (method, path, answer.text)
        assert answer.headers.get("accept-encoding") == (words if "content-encoding" in headers else None)
        asked += 1
    assert asked > 100


def test_a_compressed_body_is_the_body_that_was_compressed_everywhere(client: Client) -> None:
    """Every endpoint answers a compressed body as it answers the same body uncompressed."""
    client.context.store.create_topic("t")
    client.get("/ui/")  # from then on every page of the console shows the same counts
    asked = 0
    for method, path, content_type in every_endpoint(client):
        if not content_type or (method in ("GET", "DELETE") and not path.startswith("/consumers")):
            continue
        # A body that is read and is invalid for every path: it changes nothing, and each answer depends on the body.
        body = b"\xff=1" if path.startswith("/ui") else b"[1]"
        answers = []
        for coding, encode in {"identity": lambda data: data, **ENCODE}.items():
            headers = {"content-type": content_type, "content-encoding": coding}
            answer = client.request(method, path, headers=headers, content=encode(body))
            answers.append((answer.status_code, re.sub(r'"base_offset":\d+', "", answer.text)))
        assert len(set(answers)) == 1, (method, path, answers)
        asked += 1
    assert asked >= 30


@pytest.mark.parametrize("coding", [*ENCODE, "x-gzip", "GZIP"])
def test_compressed_lines_are_appended_as_lines(store: LogStore, client: Client, coding: str) -> None:
    """The decompressed lines are appended, not the compressed bytes."""
    log = store.create_topic("t").partition(0)
    body = ENCODE[coding.lower().removeprefix("x-")](LINES)
    answer = client.post("/topics/t/records", content=body, headers={"content-type": TEXT, "content-encoding": coding})
    assert (answer.status_code, answer.json()["records"]) == (200, 1000)
    assert [record.value for batch in log.read(0) for record in batch] == LINES.splitlines()


def test_gzip_of_several_members(store: LogStore, client: Client) -> None:
    """A concatenation of gzip files is valid, and an empty body is empty."""
    log = store.create_topic("t").partition(0)
    headers = {"content-type": TEXT, "content-encoding": "gzip"}
    body = b"".join(gzip.compress(b"%d\n" % number) for number in range(50))
    assert client.post("/topics/t/records", content=body, headers=headers).json()["records"] == 50
    for coding in ENCODE:
        headers["content-encoding"] = coding
        assert client.post("/topics/t/records", content=b"", headers=headers).json()["records"] == 0
    assert log.log_end_offset == 50


@pytest.mark.parametrize("coding", ENCODE)
def test_what_is_no_such_body_is_refused(store: LogStore, client: Client, coding: str) -> None:
    """Truncated, corrupt, uncompressed and trailing data get 400, and nothing is appended."""
    log = store.create_topic("t").partition(0)
    whole = ENCODE[coding](b"a\nb\n" * 5)
    broken = [whole[:end] for end in range(1, len(whole))] + [b"a\nb\n", whole + b"garbage"]
    for body in broken:
        headers = {"content-type": TEXT, "content-encoding": coding}
        answer = client.post("/topics/t/records", content=body, headers=headers)
        assert (answer.status_code, coding in answer.json()["message"]) == (400, True), (body, answer.text)
    assert log.log_end_offset == 0


def zstd_bomb(size_bytes: int) -> bytes:
    """Return a frame of blocks that each say a byte 128 Ki times: four bytes each. Nothing says how many there are."""
    count = size_bytes >> 17
    block = (128 << 10) << 3 | 1 << 1
    blocks = [struct.pack("<I", block | (number == count - 1))[:3] + b"x" for number in range(count)]
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks)


BOMBS: dict[str, Callable[[int], bytes]] = {
    "gzip": lambda size: gzip.compress(bytes(size), 9),
    "deflate": lambda size: zlib.compress(bytes(size), 9),
    "zstd": zstd_bomb,
}


@pytest.mark.parametrize("coding", BOMBS)
@pytest.mark.parametrize("path", ["/topics/t/records", "/topics/t"])
def test_a_bomb_is_refused_before_it_has_gone_off(store: LogStore, coding: str, path: str) -> None:
    """A body that decompresses beyond the limit never uses more memory than a permitted body."""
    store.create_topic("t")
    limit_bytes = 2 << 20
    bomb = BOMBS[coding](64 << 20)
    content_type = TEXT if path.endswith("records") else "application/vnd.kafka.json.v2+json"
    with Client(HttpContext(store, HttpSettings(limits=HttpLimits(request_bytes=limit_bytes)))) as client:
        tracemalloc.start()
        try:
            answer = client.post(path, content=bomb, headers={"content-type": content_type, "content-encoding": coding})
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (answer.status_code, "2,097,152 bytes" in answer.text) == (413, True)
        assert peak_bytes < 16 << 20
        assert client.context.large_bodies.reserved_bytes == 0
    assert store.topic("t").partition(0).log_end_offset == 0


def test_a_body_within_the_limit_is_taken_however_small_it_was(store: LogStore) -> None:
    """A million equal bytes are accepted if the limit allows a body of that size."""
    log = store.create_topic("t").partition(0)
    with Client(HttpContext(store, HttpSettings(limits=HttpLimits(request_bytes=2 << 20)))) as client:
        for coding, bomb in BOMBS.items():
            headers = {"content-type": TEXT, "content-encoding": coding}
            answer = client.post("/topics/t/records", content=bomb(1 << 20), headers=headers)
            assert (answer.status_code, answer.json()["records"]) == (200, 1), answer.text
        assert {len(record.value or b"") for batch in log.read(0) for record in batch} == {1 << 20}
        assert client.context.large_bodies.reserved_bytes == 0


def test_compressed_bodies_in_pieces_over_a_port(store: LogStore, serve: Any) -> None:
    """Chunks may end anywhere, and the connection continues with its next request."""
    log = store.create_topic("t").partition(0)
    with httpx.Client(base_url=serve().url, timeout=20) as web:
        for coding, encode in ENCODE.items():
            body = encode(LINES[:900])
            pieces: Iterator[bytes] = (body[at : at + 1] for at in range(len(body)))
            headers = {"content-type": TEXT, "content-encoding": coding}
            answer = web.post("/topics/t/records", content=pieces, headers=headers)
            assert answer.status_code == 200, answer.text
    values = LINES[:900].splitlines()
    assert [record.value for batch in log.read(0) for record in batch] == values * 3


def digests(body: bytes) -> list[dict[str, str]]:
    """Return each header that carries a digest of the body."""
    md5, sha256, sha512 = (
        base64.b64encode(hashlib.new(name, body).digest()).decode() for name in ("md5", "sha256", "sha512")
    )
    return [
        {"content-md5": md5},
        {"content-digest": f"sha-256=:{sha256}:"},
        {"content-digest": f"unixsum=:AAAA:, sha-512=:{sha512}:"},
        {"repr-digest": f"sha-256=:{sha256}:, sha-512=:{sha512}:"},
        {"digest": f"SHA-256={sha256},unixsum=30637"},
    ]


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_a_body_has_the_digest_that_it_is_said_to_have(store: LogStore, client: Client, coding: str) -> None:
    """The digest covers the body as sent. With a wrong digest nothing is appended."""
    log = store.create_topic("t").partition(0)
    body = gzip.compress(b"a\nb\n") if coding == "gzip" else b"a\nb\n"
    headers = {"content-type": TEXT, "content-encoding": coding}
    for said in digests(body):
        answer = client.post("/topics/t/records", content=body, headers={**headers, **said})
        assert answer.status_code == 200, (said, answer.text)
    assert log.log_end_offset == 2 * len(digests(body))
    for said in digests(body + b"c"):
        answer = client.post("/topics/t/records", content=body, headers={**headers, **said})
        assert (answer.status_code, next(iter(said)) in answer.json()["message"]) == (400, True)
    assert log.log_end_offset == 2 * len(digests(body))


def test_utf_8_may_be_named(store: LogStore, client: Client) -> None:
    """All names of UTF-8 are accepted."""
    store.create_topic("t")
    for charset in ("utf-8", "UTF-8", '"utf-8"', "us-ascii"):
        headers = {"content-type": f"{TEXT}; charset={charset}"}
        assert client.post("/topics/t/records", content="ä\n".encode(), headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "statuses"),
    [
        ("transfer-encoding: gzip, chunked", ("501", "400")),
        ("transfer-encoding: chunked, chunked", ("501", "400")),
        ("transfer-encoding: identity", ("501", "400")),
        ("content-type: text/plain\r\ncontent-type: application/json\r\ncontent-length: 4", ("400",)),
        ("host: other.example\r\ncontent-length: 4", ("400",)),
        ("content-encoding: gzip\r\ncontent-encoding: br\r\ncontent-length: 4", ("415",)),
    ],
)
def test_what_only_bare_sockets_send(store: LogStore, serve: Any, headers: str, statuses: tuple[str, ...]) -> None:
    """Unknown transfer codings and repeated headers are refused, and nothing is appended."""
    log = store.create_topic("t").partition(0)
    server = serve()
    host, _, port = server.address.rpartition(":")
    content_type = "" if "content-type" in headers else "content-type: text/plain\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(
            f"POST /topics/t/records HTTP/1.1\r\nhost: localhost\r\n{content_type}{headers}\r\n\r\n".encode()
            + (b"a\nb\n" if "content-length" in headers else b"4\r\na\nb\n\r\n0\r\n\r\n")
        )
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.split()[1].decode() in statuses, answer
    assert log.log_end_offset == 0
