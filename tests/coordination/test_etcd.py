"""etcd's JSON gateway: hostile and broken servers, servers in turn, users, TLS, interrupts."""

from __future__ import annotations

import base64
import contextlib
import http.server
import itertools
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from coordination.engine_servers import ask_etcd, etcd
from coordination.engines import engine_url
from coordination.losing_proxy import Loss, losing_proxy
from coordination.test_cluster_coordinator import FIRST, created
from msgspec.structs import replace
from waiting import wait_until

from segmentlog.coordination import etcd_gateway
from segmentlog.coordination.cluster_coordinator import Coordinator, DocumentVersion, SwapOutcome
from segmentlog.coordination.engine_url import USER_VARIABLE
from segmentlog.coordination.open_engine import open_coordinator, open_engine
from segmentlog.errors import CoordinatorRefused, CoordinatorUnreachable
from segmentlog.format.cluster_document import encode_document

HEADER = {"cluster_id": "14841639068965178418", "revision": "7"}
_EITHER = (CoordinatorUnreachable, CoordinatorRefused)
EMPTY = json.dumps({"header": HEADER}).encode()

Reply = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the next reply of its server."""

    protocol_version = "HTTP/1.1"
    server: FakeGateway

    def do_POST(self) -> None:
        """Read the request, and answer."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, json.loads(body), self.headers.get("Authorization", "")))
        self.server.reply(self)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class FakeGateway(http.server.ThreadingHTTPServer):
    """A server that answers each request with ``reply``."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.requests: list[tuple[str, Any, str]] = []
        self.port = self.server_address[1]


@contextlib.contextmanager
def gateway(reply: Reply) -> Iterator[FakeGateway]:
    """Yield a running server."""
    with FakeGateway(reply) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def answer(data: bytes, status: int = 200, size_bytes: int | None = None) -> Reply:
    """Return a reply with this body, which announces ``size_bytes``."""

    def reply(handler: Handler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data) if size_bytes is None else size_bytes))
        handler.end_headers()
        handler.wfile.write(data)
        handler.close_connection = True

    return reply


def failure(status: int, code: int, message: str) -> Reply:
    """Return an error as etcd reports it."""
    return answer(json.dumps({"error": message, "message": message, "code": code}).encode(), status)


def raw(data: bytes) -> Reply:
    """Return a reply that is not HTTP, or none at all."""

    def reply(handler: Handler) -> None:
        handler.wfile.write(data)
        handler.close_connection = True

    return reply


def found(value: str, revision: str = "7") -> bytes:
    """Return the answer of etcd to a read."""
    return json.dumps({"header": HEADER, "kvs": [{"mod_revision": revision, "value": value}]}).encode()


@pytest.mark.parametrize(
    ("reply", "error", "match"),
    [
        (answer(b"{}"), CoordinatorRefused, "form of etcd's answers"),
        (answer(b"rubbish\xff"), CoordinatorRefused, "form of etcd's answers"),
        (answer(b"[" * 100_000), CoordinatorRefused, "form of etcd's answers"),
        (answer(json.dumps({"header": HEADER, "kvs": 3}).encode()), CoordinatorRefused, "form of etcd's answers"),
        (answer(found("?")), CoordinatorRefused, "form of etcd's answers"),
        (answer(found("", "x")), CoordinatorRefused, "form of etcd's answers"),
        (answer(found("A" * 400_000)), CoordinatorRefused, "more than 262,144 bytes"),
        (answer(b"Not Found\n", 404), CoordinatorRefused, "HTTP status 404: no JSON gateway of etcd"),
        (answer(b"<html>", 502), CoordinatorUnreachable, "HTTP status 502"),
        (answer(b"", 301), CoordinatorRefused, "HTTP status 301"),
        (failure(503, 14, "etcdserver: leader changed"), CoordinatorUnreachable, "leader changed"),
        (failure(429, 8, "mvcc: database space exceeded"), CoordinatorUnreachable, "space exceeded"),
        (failure(403, 7, "etcdserver: permission denied"), CoordinatorRefused, "permission denied"),
        (failure(400, 3, "etcdserver: user name is empty"), CoordinatorRefused, "name USER:PASSWORD"),
        (failure(401, 16, "etcdserver: invalid auth token"), CoordinatorRefused, "access denied"),
        (failure(500, 2, "\x1b[2J"), CoordinatorUnreachable, r"\\x1b\[2J"),
        (answer(EMPTY, size_bytes=1000), CoordinatorUnreachable, "the connection was closed"),
        (raw(b""), CoordinatorUnreachable, "the connection was closed"),
        (raw(b"\x00\xff\r\n\r\n"), CoordinatorUnreachable, "not HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{}"), CoordinatorUnreachable, "closed"),
        (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n"), _EITHER, "closed|etcd's"),
        (raw(b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * 70_000 + b"\r\n\r\n"), CoordinatorUnreachable, "not HTTP"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_used(reply: Reply, error: Any, match: str) -> None:
    """They are errors that say whether a retry can help. A swap with such an answer is unknown."""
    with gateway(reply) as server:
        coordinator = open_coordinator(engine_url("etcd", server.port))
        with pytest.raises(error, match=match):
            coordinator.read()
        swapped = coordinator.swap(FIRST, None)
        assert (swapped.outcome, swapped.current) == (SwapOutcome.UNKNOWN, None)
        assert swapped.error is not None


def test_an_answer_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is for the whole answer, not for each byte of it."""
    monkeypatch.setattr(etcd_gateway, "REQUEST_S", 0.3)

    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(100_000):
                handler.wfile.write(b" ")
                time.sleep(0.02)

    with gateway(drip) as server, pytest.raises(CoordinatorUnreachable, match="no answer in time"):
        open_coordinator(engine_url("etcd", server.port)).read()


def test_servers_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server has a share of the time. The next request begins with the server that answered last."""
    monkeypatch.setattr(etcd_gateway, "REQUEST_S", 4.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent_socket,
        gateway(failure(503, 14, "etcdserver: no leader")) as broken,
        gateway(answer(EMPTY)) as good,
    ):
        silent = silent_socket.getsockname()[1]
        coordinator = open_coordinator(engine_url("etcd", silent, broken.port, good.port))
        wait_until(lambda: is_empty(coordinator))
        asked = len(broken.requests)
        wait_until(lambda: is_empty(coordinator))
        assert len(broken.requests) == asked
        good.reply = raw(b"")
        with pytest.raises(CoordinatorUnreachable) as caught:
            coordinator.read()
        why = str(caught.value)
        assert f":{good.port}: the connection was closed; 127.0.0.1:{silent}: no answer in time; " in why
        assert f":{broken.port}: etcdserver: no leader" in why


def is_empty(coordinator: Coordinator) -> bool:
    """Return whether a server answers in its share of the time, and that it has no document."""
    try:
        return coordinator.read() is None
    except CoordinatorUnreachable:
        return False


@pytest.mark.parametrize(
    "refusal",
    [
        failure(401, 16, "etcdserver: invalid auth token"),
        failure(400, 3, "etcdserver: revision of auth store is old"),
    ],
)
def test_a_client_logs_in_again(refusal: Reply) -> None:
    """Once for each request that is refused because of its token."""
    valid: list[str] = []

    def log_in(handler: Handler) -> None:
        valid[:] = [f"token-{len(server.requests)}"]
        answer(json.dumps({"header": HEADER, "token": valid[0]}).encode())(handler)

    def reply(handler: Handler) -> None:
        if handler.path == "/v3/auth/authenticate":
            log_in(handler)
        else:
            (answer(EMPTY) if [handler.headers["Authorization"]] == valid else refusal)(handler)

    with gateway(reply) as server:
        url = engine_url("etcd", server.port).replace("//", "//us%40er:pass%2Fword@")
        coordinator = open_coordinator(url)
        for _ in range(2):
            assert coordinator.read() is None
            assert coordinator.read() is None
            valid.clear()
        logins = [body for path, body, _ in server.requests if path == "/v3/auth/authenticate"]
        assert logins == [{"name": "us@er", "password": "pass/word"}] * 2
        server.reply = lambda handler: log_in(handler) if "authenticate" in handler.path else refusal(handler)
        with pytest.raises(CoordinatorRefused, match="access denied"):
            coordinator.read()
        server.reply = failure(400, 3, "bad password pass/word")
        with pytest.raises(CoordinatorRefused, match=r"bad password \.\.\."):
            open_coordinator(url).read()


def test_a_server_of_another_cluster_is_refused() -> None:
    """Its revisions would mean other documents. Servers of the first cluster continue to be used."""
    other = json.dumps({"header": HEADER | {"cluster_id": "1"}}).encode()
    with gateway(answer(EMPTY)) as first, gateway(answer(other)) as second:
        coordinator = open_coordinator(engine_url("etcd", first.port, second.port))
        assert coordinator.read() is None
        first.reply = failure(503, 14, "etcdserver: no leader")
        with pytest.raises(CoordinatorUnreachable, match="another etcd cluster"):
            coordinator.read()
        first.reply = answer(other)
        with pytest.raises(CoordinatorRefused, match="another etcd cluster"):
            coordinator.read()


def test_a_swap_is_repeated_at_the_next_server(tmp_path: Path) -> None:
    """The first server executes it, and its answer is lost. The second refuses it, and the nonce shows the success."""
    with etcd(tmp_path) as servers, losing_proxy("etcd", servers[0].port) as proxy:
        coordinator = open_coordinator(engine_url("etcd", proxy.port, servers[0].port))
        first = created(coordinator)
        for loss in (Loss.ANSWER, Loss.REQUEST):
            coordinator = open_coordinator(engine_url("etcd", proxy.port, servers[0].port))
            proxy.losses.append(loss)
            swapped = coordinator.swap(FIRST, first.version)
            assert (swapped.outcome, swapped.error, proxy.losses) == (SwapOutcome.SUCCEEDED, None, [])
            assert swapped.current == coordinator.read()
            first = swapped.current


@pytest.mark.parametrize(
    "reply",
    [
        answer(b'{"result":{"created":true}}\n{"result":{"canceled":true,"compact_revision":"9"}}\n'),
        answer(b'{"error":{"grpc_code":14,"message":"etcdserver: no leader"}}\n'), answer(b"rubbish\n"), answer(b""),
        answer(b'{"result":{"created":true}}\n', size_bytes=500), raw(b""), failure(401, 16, "invalid auth token"),
        answer(b"x" * 400_000),
    ],
)  # fmt: skip
def test_a_wait_without_a_watch_polls(reply: Reply) -> None:
    """A watch that ends, or that etcd refuses, only makes the wait slower."""
    first, second = (encode_document(replace(FIRST, version=number, nonce="n")) for number in (1, 2))
    reads = itertools.chain([(first, "7")] * 2, itertools.repeat((second, "8")))

    def choose(handler: Handler) -> None:
        if handler.path == "/v3/watch":
            return reply(handler)
        data, revision = next(reads)
        return answer(found(base64.b64encode(data).decode(), revision))(handler)

    with gateway(choose) as server:
        paused: list[float] = []
        coordinator = Coordinator(open_engine(engine_url("etcd", server.port)), pause=paused.append)
        current = coordinator.wait(DocumentVersion(1, "7"), 3600)
        assert current is not None
        assert current.version == (2, "8")
        assert paused == [1.0, 1.0]


def test_an_interrupt_ends_a_request() -> None:
    """An error that a signal handler raises is not taken for one of the connection."""

    def interrupt(*_: object) -> None:
        raise TimeoutError("of the handler")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            coordinator = open_coordinator(engine_url("etcd", port))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(TimeoutError, match="of the handler"):
                coordinator.read()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(TimeoutError, match="of the handler"):
                open_engine(engine_url("etcd", port)).wait_for_change("cluster.json", "7", 3600)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------- real servers with users and TLS


def test_users_and_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client logs in, also after a restart and a change of the users. Errors have no password."""
    with etcd(tmp_path) as servers:
        port = servers[0].port

        def admin(method: str, **body: object) -> None:
            ask_etcd(port, f"auth/{method}", body)

        key, end = (base64.b64encode(text).decode() for text in (b"/orders/", b"/orders0"))
        for user, role in (("root", "root"), ("us@er", "machine")):
            admin("role/add", name=role)
            admin("user/add", name=user, password="pass/word")
            admin("user/grant", user=user, role=role)
        admin("role/grant", name="machine", perm={"permType": "READWRITE", "key": key, "range_end": end})
        admin("enable")
        plain = engine_url("etcd", port)
        with pytest.raises(CoordinatorRefused, match="user name is empty; name USER:PASSWORD"):
            open_coordinator(plain).read()
        with pytest.raises(CoordinatorRefused, match="invalid user ID or password") as caught:
            open_coordinator(plain.replace("//", "//us%40er:wrong-pass@")).read()
        assert "wrong-pass" not in str(caught.value)
        monkeypatch.setenv(USER_VARIABLE, "us@er:pass/word")
        with contextlib.closing(open_coordinator(plain)) as coordinator:
            first = created(coordinator)
            servers[0].restart()
            second = coordinator.swap(FIRST, first.version).current
            assert second is not None
            token = ask_etcd(port, "auth/authenticate", {"name": "root", "password": "pass/word"})["token"]
            # It changes the revision of the users, and so ends older tokens of some kinds.
            ask_etcd(port, "auth/user/add", {"name": "another", "password": "x"}, token)
            assert coordinator.read() == second
            assert coordinator.wait(second.version, 0.02) is None
            other = open_coordinator(plain.replace("orders", "other"))
            with pytest.raises(CoordinatorRefused, match="permission denied"):
                other.read()
            swapped = other.swap(FIRST, None)
            assert (swapped.outcome, type(swapped.error)) == (SwapOutcome.UNKNOWN, CoordinatorRefused)


def test_tls(tmp_path: Path) -> None:
    """Certificates of both sides are checked. Errors name the reason."""
    authority, stranger = trustme.CA(), trustme.CA()
    paths = {}
    for name, blob in {
        "ca": authority.cert_pem, "stranger": stranger.cert_pem,
        "server": authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem,
        "client": authority.issue_cert("client").private_key_and_cert_chain_pem,
    }.items():  # fmt: skip
        paths[name] = tmp_path / f"{name}.pem"
        blob.write_to_path(paths[name])
    options = ("--cert-file", paths["server"], "--key-file", paths["server"], "--trusted-ca-file", paths["ca"])
    with etcd(tmp_path, *map(str, options), "--client-cert-auth", scheme="https") as servers:
        url = engine_url("etcd", servers[0].port).replace("etcd:", "etcds:")
        client = f"cert={paths['client']}&key={paths['client']}"
        with contextlib.closing(open_coordinator(f"{url}?cacert={paths['ca']}&{client}")) as coordinator:
            first = created(coordinator)
            assert coordinator.wait(first.version, 0.02) is None
            assert coordinator.url == url
        for query, error, match in (
            (f"?cacert={paths['stranger']}&{client}", CoordinatorRefused, "certificate is not trusted"),
            (f"?{client}", CoordinatorRefused, "certificate is not trusted"),
            (f"?cacert={paths['ca']}", CoordinatorUnreachable, str(servers[0].port)),
        ):
            with pytest.raises(error, match=match):
                open_coordinator(url + query).read()
        with pytest.raises(CoordinatorRefused, match="certificate is not trusted"):
            open_coordinator(f"{url}?cacert={paths['ca']}&{client}".replace("127.0.0.1", "localhost")).read()
        with pytest.raises((CoordinatorUnreachable, CoordinatorRefused)):
            open_coordinator(engine_url("etcd", servers[0].port)).read()
