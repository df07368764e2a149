"""Limits on connections and log-ins apply before authentication, and one address cannot block others."""

from __future__ import annotations

import asyncio
import base64
import http.client
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trustme
from http_listener import Listener
from security.certificates import write_pair
from waiting import wait_until

from segmentlog.http.accounts import Accounts
from segmentlog.http.admission import Admission
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.serving import HttpServer
from segmentlog.http.settings import HttpLimits, HttpSettings
from segmentlog.security.security_settings import Security
from segmentlog.security.users import add_user
from segmentlog.store import LogStore

Serve = Callable[..., HttpServer]
OTHER = "127.0.0.2"
"""An address of this machine, as the source of connections."""


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Provide an exit stack that is closed after the test."""
    with ExitStack() as stack:
        yield stack


def connect(server: HttpServer, opened: ExitStack, source: str = "127.0.0.1") -> socket.socket:
    """Return a connection that says nothing."""
    host, _, port = server.address.rpartition(":")
    return opened.enter_context(socket.create_connection((host, int(port)), 20, (source, 0)))


def is_closed(sock: socket.socket) -> bool:
    """Return whether the server has closed the connection."""
    sock.settimeout(20)
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


class Web:
    """One persistent connection."""

    def __init__(self, server: HttpServer, source: str = OTHER, context: ssl.SSLContext | None = None) -> None:
        host, _, port = server.address.rpartition(":")
        options: dict[str, Any] = {"timeout": 20, "source_address": (source, 0)}
        self.connection = (
            http.client.HTTPConnection(host, int(port), **options) if context is None
            else http.client.HTTPSConnection("localhost", int(port), context=context, **options)
        )  # fmt: skip

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.connection.close()

    def get(self, path: str = "/topics", **headers: str) -> int:
        """Return the status of an answer."""
        self.connection.request("GET", path, headers=headers)
        answer = self.connection.getresponse()
        answer.read()
        return answer.status


def basic(name: str, password: str) -> str:
    """Return an `Authorization` header."""
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


@pytest.fixture
def authority() -> trustme.CA:
    """Provide the CA of the server's certificate."""
    return trustme.CA()


@pytest.fixture
def tls(tmp_path: Path, authority: trustme.CA) -> Security:
    """Provide TLS settings for `localhost`."""
    pair = write_pair(tmp_path, "server", authority.issue_cert("localhost", "127.0.0.1"))
    return Security(tls_cert=pair.certificate, tls_key=pair.key)


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """Return a client's context."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


# ------------------------------------------------------------ connections


@pytest.mark.parametrize("is_tls", [False, True])
def test_silent_connections_take_few_descriptors_and_keep_nobody_out(
    serve: Serve, tls: Security, authority: trustme.CA, opened: ExitStack, is_tls: bool
) -> None:
    """The server keeps 20 of 150 silent connections, with and without TLS, and serves other clients meanwhile."""
    limits = HttpLimits(connections=16)
    server = serve(HttpSettings(limits=limits), tls if is_tls else None)
    context = trusting(authority) if is_tls else None
    admission = server._server.admission
    before = len(os.listdir("/proc/self/fd"))
    socks = []
    most = 0
    for _ in range(150):
        socks.append(connect(server, opened))
        most = max(most, len(os.listdir("/proc/self/fd")) - before - len(socks))
    wait_until(lambda: sum(map(_is_gone, socks)) == 130)
    assert len(admission.unadmitted) == 20
    assert most < 100  # some were accepted at once, before the first of them was counted
    for source in (OTHER, "127.0.0.1"):
        with Web(server, source, context) as web:
            assert web.get() == 200
            assert len(admission.admitted) == 1
        wait_until(lambda: not admission.admitted)
    for sock in socks:
        sock.close()
    wait_until(lambda: not len(admission))


def _is_gone(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_strangers_of_one_address_make_room_for_those_of_another(serve: Serve, opened: ExitStack) -> None:
    """Many connections of one address do not displace the few of another address."""
    server = serve(HttpSettings(limits=HttpLimits(connections=8)))
    few = [connect(server, opened, OTHER) for _ in range(3)]
    wait_until(lambda: len(server._server.admission) == 3)
    many = [connect(server, opened) for _ in range(40)]
    wait_until(lambda: sum(map(_is_gone, many)) == 33)
    assert not any(map(_is_gone, few))
    assert not any(map(_is_gone, many[33:]))


def test_a_handshake_that_takes_too_long_ends(serve: Serve, tls: Security, opened: ExitStack) -> None:
    """Silent, incomplete and malformed handshakes are closed after their time-out."""
    server = serve(HttpSettings(limits=HttpLimits(head_s=0.3)), tls)
    said = (b"", b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3", b"nonsense, and no TLS at all\r\n\r\n")
    socks = [connect(server, opened) for _ in said]
    for sock, data in zip(socks, said, strict=True):
        sock.sendall(data)
    assert all(map(is_closed, socks))
    wait_until(lambda: not len(server._server.admission))


def test_closing_does_not_wait_for_handshakes(store: LogStore, tls: Security, opened: ExitStack) -> None:
    """Closing the server closes connections in the handshake at once."""
    server = HttpServer(store, "127.0.0.1", 0, security=tls)
    sock = connect(server, opened)
    wait_until(lambda: len(server._server.admission) == 1)
    server.close()
    assert is_closed(sock)


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
    serve: Serve, tls: Security, authority: trustme.CA, opened: ExitStack
) -> None:
    """Bytes in the segment that ends the handshake are not lost."""
    server = serve(security=tls)
    context = trusting(authority)
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context.minimum_version = context.maximum_version = version
        for _ in range(5):
            sock = connect(server, opened)
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    sock.sendall(outgoing.read())
                    incoming.write(sock.recv(65536))
            client.write(b"GET /topics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            sock.sendall(outgoing.read())  # the client's last word of the handshake, and the request
            answer = b""
            is_over = False
            while not is_over:
                incoming.write(sock.recv(65536))
                try:
                    while piece := client.read(65536):
                        answer += piece
                    is_over = True
                except ssl.SSLWantReadError:
                    pass
            assert answer.startswith(b"HTTP/1.1 200"), (version, answer)


def test_who_is_between_two_requests_makes_room(serve: Serve, opened: ExitStack) -> None:
    """At the limit, the oldest idle connection of the address with most connections is closed; busy ones stay."""
    server = serve(HttpSettings(limits=HttpLimits(connections=4)))
    server.context.store.create_topic("t")
    admission = server._server.admission
    with Listener(server, "/topics/t/stream") as events:
        idle = [opened.enter_context(Web(server, source)) for source in ("127.0.0.1", "127.0.0.1", OTHER)]
        for web in idle:
            assert web.get() == 200
        wait_until(lambda: len(admission.idle) == 3)
        late = opened.enter_context(Web(server, "127.0.0.3"))
        assert late.get() == 200
        assert is_closed(idle[0].connection.sock)
        for web in (*idle[1:], late):
            assert web.get() == 200
        server.context.store.topic("t").partition(0).append([b"one"])
        assert events.values(1) == ["one"]


def test_a_connection_in_the_middle_of_a_request_head_keeps_its_place(serve: Serve, opened: ExitStack) -> None:
    """It stays, also if the head began before the previous response was complete."""
    server = serve(HttpSettings(limits=HttpLimits(connections=4)))
    sock = connect(server, opened, OTHER)
    head = b"GET /topics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    sock.sendall(head + head[:10])
    answers = sock.makefile("rb")
    assert answers.readline().startswith(b"HTTP/1.1 200")
    for _ in range(4):
        assert opened.enter_context(Web(server)).get() == 200
    sock.sendall(head[10:])
    assert any(b"HTTP/1.1 200" in line for line in answers)
    wait_until(lambda: len(server._server.admission.idle) == 3)


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_client_that_still_receives_its_response_keeps_its_connection(
    serve: Serve, tls: Security, authority: trustme.CA, opened: ExitStack, is_tls: bool
) -> None:
    """A slow download is not closed to make room for other clients, although its response is complete in memory."""
    server = serve(HttpSettings(limits=HttpLimits(connections=4)), tls if is_tls else None)
    context = trusting(authority) if is_tls else None
    value = os.urandom(1 << 20) * 16
    server.context.store.create_topic("t", config={"max.message.bytes": 32 << 20}).partition(0).append([value])
    admission = server._server.admission
    slow = opened.enter_context(Web(server, context=context))
    slow.connection.request("GET", "/ui/topics/t/records/0/0/value")
    wait_until(lambda: len(admission.idle) == 1)
    for _ in range(4):
        assert opened.enter_context(Web(server, context=context)).get() == 200
    answer = slow.connection.getresponse()
    assert answer.read() == value
    assert slow.get() == 200


def test_those_at_work_leave_a_quarter_to_other_addresses(serve: Serve, opened: ExitStack) -> None:
    """Beyond its share an address gets 503; if all connections are busy, every client does."""
    server = serve(HttpSettings(limits=HttpLimits(connections=8)))
    server.context.store.create_topic("t")
    streams = [opened.enter_context(Listener(server, "/topics/t/stream")) for _ in range(6)]
    with Web(server, "127.0.0.1") as web:
        assert web.get() == 503
        assert web.get("/healthz") == 200
    others = [opened.enter_context(Web(server)) for _ in range(2)]
    for web in others:
        assert web.get() == 200
    streams.pop().close()
    wait_until(lambda: len(server._server.admission.admitted) == 7)
    with Web(server, "127.0.0.1") as web:
        assert web.get() == 200


def test_places_are_counted() -> None:
    """Connections that are added, admitted, idle and released in different orders leave no slot behind."""

    def transport() -> mock.Mock:
        return mock.Mock(**{"get_write_buffer_size.return_value": 0})

    async def try_out() -> None:
        admission = Admission(4)
        slots = [admission.add(f"10.0.0.{number % 3}", transport()) for number in range(5)]
        assert len(admission) == 5
        for slot in slots[:3]:
            slot.admit()
            slot.admit()
        one_more = admission.add("10.0.0.9", transport())
        assert [slot.transport.abort.called for slot in slots] == [False, False, False, True, False]  # type: ignore[attr-defined]
        slots[4].admit()
        with pytest.raises(HttpProblem) as refused:
            one_more.admit()
        assert refused.value.status == 503
        slots[1].mark_idle()
        slots[1].mark_idle()
        one_more.admit()
        assert slots[1].transport.abort.called  # type: ignore[attr-defined]
        one_more.mark_busy()
        for slot in (*slots, one_more, one_more):
            slot.release()
        assert not len(admission)
        assert not len(admission.idle)

    asyncio.run(try_out())


# ------------------------------------------------------------ TLS sessions


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_session_outlives_the_authority_that_it_was_made_under(
    serve: Serve, tls: Security, authority: trustme.CA, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """A resumed TLS session is refused after the client CA has changed."""
    first, second = trustme.CA(), trustme.CA()
    clients_ca = tmp_path / "clients.pem"
    first.cert_pem.write_to_path(str(clients_ca))
    server = serve(security=Security(tls_cert=tls.tls_cert, tls_key=tls.tls_key, tls_client_ca=str(clients_ca)))
    context = trusting(authority)
    context.minimum_version = context.maximum_version = version
    first.issue_cert("ann@example.org", common_name="ann").configure_cert(context)

    def ask(session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
        """Return the TLS session if the server answered."""
        host, _, port = server.address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), 20) as sock,
            context.wrap_socket(sock, server_hostname="localhost", session=session) as wrapped,
        ):
            wrapped.sendall(b"GET /topics HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = wrapped.recv(65536)
            if answer:
                assert answer.startswith(b"HTTP/1.1 200")
            return wrapped.session if answer else None

    def is_refused(session: ssl.SSLSession | None = None) -> bool:
        try:
            return ask(session) is None
        except OSError:
            return True

    session = ask()
    assert session is not None
    assert ask(session) is not None
    second.cert_pem.write_to_path(str(clients_ca))
    wait_until(is_refused)
    assert is_refused(session)


# ------------------------------------------------------------ log-ins


def test_who_tries_passwords_keeps_only_himself_waiting(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit of waiting log-ins, the newest attempt of the busiest address is refused."""
    users = str(tmp_path / "users.json")
    add_user(users, "ann", "a secret", iterations=4096)
    may_go_on = threading.Event()
    verify = Accounts.verify

    def verify_later(self: Accounts, header: str) -> Any:
        assert may_go_on.wait(20)
        return verify(self, header)

    monkeypatch.setattr(Accounts, "verify", verify_later)
    limits = HttpLimits(log_ins=1, log_ins_waiting=4)
    server = serve(HttpSettings(limits=limits), Security(users=users))
    statuses: list[tuple[str, int]] = []

    def ask(source: str, header: str) -> None:
        with Web(server, source) as web:
            statuses.append((source, web.get(authorization=header)))

    threads = [threading.Thread(target=ask, args=("127.0.0.1", basic(f"x{number}", "wrong"))) for number in range(10)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(statuses) == 6)
    assert statuses == [("127.0.0.1", 503)] * 6
    ann = threading.Thread(target=ask, args=(OTHER, basic("ann", "a secret")))
    ann.start()
    wait_until(lambda: len(statuses) == 7)  # one more of the waiting requests was admitted
    with Web(server) as web:
        assert web.get("/healthz") == 200
        assert web.get("/healthz", authorization=basic("who", "ever")) == 200
    may_go_on.set()
    for thread in (*threads, ann):
        thread.join()
    assert sorted(statuses) == [("127.0.0.1", 401)] * 3 + [("127.0.0.1", 503)] * 7 + [(OTHER, 200)]


# ---------------------------------------------------------------- handshakes that fail


def test_a_failed_handshake_is_logged_once_with_its_remedy(
    serve: Serve, tls: Security, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    """Repeated failures with the same reason are logged once, and the next client is served."""
    caplog.set_level(logging.INFO, "segmentlog.http")
    server = serve(security=tls)
    host, _, port = server.address.rpartition(":")
    address = (host, int(port))
    for _ in range(3):
        with socket.create_connection(address, 20) as sock, suppress(OSError):
            sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert sock.recv(100) == b""
        with (
            socket.create_connection(address, 20) as sock,
            pytest.raises(ssl.SSLError),
            ssl.create_default_context().wrap_socket(sock, server_hostname="localhost"),
        ):
            pass
    with Web(server, context=trusting(authority)) as good:
        assert good.get("/healthz") == 200
    failed = [text for text in caplog.messages if "TLS handshake failed" in text]
    assert len(failed) == 2
    assert any("the client speaks HTTP without TLS. Use https://" in text for text in failed)
    assert any("it does not trust its authority" in text for text in failed)
