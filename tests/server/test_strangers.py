"""Clients that have not authenticated get few resources, and others are served.

SEGMENTLOG_SERVER_STRANGERS connections that never authenticate
"""

from __future__ import annotations

import os
import resource
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from leftovers import opened
from logs import NoSyncFileSystem
from security.certificates import write_pair
from server.memory import Memory
from server.wire_client import Refused, WireClient, request_bytes
from waiting import wait_until

from segmentlog.security.security_settings import Security
from segmentlog.security.users import add_user
from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest
from segmentlog.server.codec.generated.metadata import MetadataRequest
from segmentlog.server.codec.generated.sasl_authenticate import SaslAuthenticateRequest
from segmentlog.server.codec.generated.sasl_handshake import SaslHandshakeRequest
from segmentlog.server.embedded import Server
from segmentlog.server.server_settings import Limits, ServerSettings
from segmentlog.store import LogStore

# Both ends of each are this process's, which may have fewer descriptors than that.
STRANGERS = min(
    int(os.environ.get("SEGMENTLOG_SERVER_STRANGERS", "2000")),
    (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 2,
)
MakeServer = Callable[..., Server]


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file with ann in it."""
    path = str(tmp_path_factory.mktemp("users") / "users.json")
    add_user(path, "ann", "secret", iterations=4096)
    return path


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Return the authority that signs the certificates."""
    return trustme.CA()


@pytest.fixture
def make_server(tmp_path: Path, users: str, authority: trustme.CA) -> Iterator[MakeServer]:
    """Yield a function that creates servers that require authentication, with or without TLS."""
    servers: list[Server] = []

    def make(*, tls: bool = False, sasl: bool = True, **limits: Any) -> Server:
        store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
        pair = write_pair(tmp_path, "server", authority.issue_cert("localhost")) if tls else None
        security = Security(
            users=users if sasl else None, tls_cert=pair and pair.certificate, tls_key=pair and pair.key
        )
        settings = ServerSettings(limits=Limits(**limits))
        servers.append(
            Server(
                store, host="127.0.0.1", port=0, advertise=None, settings=settings, security=security, owns_store=False
            )
        )
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def log_in(client: WireClient) -> WireClient:
    """Log in as ann. Raises `Refused`."""
    client.ask(18, 3, ApiVersionsRequest("test", "1"))
    assert client.ask(17, 1, SaslHandshakeRequest("PLAIN")).error_code == 0
    assert client.ask(36, 2, SaslAuthenticateRequest(b"\0ann\0secret")).error_code == 0
    return client


def is_served(client: WireClient) -> bool:
    """Return whether an authenticated client gets responses."""
    return client.ask(3, 12, MetadataRequest(topics=None)).cluster_id is not None


def encrypted(server: Server, authority: trustme.CA) -> WireClient:
    """Return a client with TLS."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    client = WireClient(server.bootstrap_servers)
    client.sock = context.wrap_socket(client.sock, server_hostname="localhost")
    return client


@pytest.mark.parametrize("key", [0, 3, 17, 18, 36])
def test_requests_of_strangers_are_small(make_server: MakeServer, key: int) -> None:
    """More than that is refused by its length; once it is known who asks, it is taken."""
    server = make_server()
    limits = Limits()
    head = (limits.unauthenticated_request_bytes + 1).to_bytes(4, "big") + key.to_bytes(2, "big") + bytes(2)
    with WireClient(server.bootstrap_servers) as client:
        client.raw(head)
        assert client.is_closed_by_peer()
    with log_in(WireClient(server.bootstrap_servers)) as client:
        client.raw(head)
        client.sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.frame()
    assert server.worker.broker.buffers.used_bytes <= 64 << 10


def test_requests_of_strangers_are_few(make_server: MakeServer) -> None:
    """A few requests are answered, and then the connection is closed; authenticated clients have no such limit."""
    server = make_server(unauthenticated_requests=5)
    with WireClient(server.bootstrap_servers) as client:
        for _ in range(5):
            assert client.ask(18, 0, ApiVersionsRequest()).error_code == 0
        with pytest.raises(Refused):
            client.ask(18, 0, ApiVersionsRequest())
    with log_in(WireClient(server.bootstrap_servers)) as client:
        for _ in range(20):
            assert is_served(client)


def say_nothing(client: WireClient) -> None:
    """Send nothing."""


def say_half_a_length(client: WireClient) -> None:
    """Send two bytes of a length."""
    client.raw(b"\0\0")


def say_byte_by_byte(client: WireClient) -> None:
    """Send a request byte by byte."""

    def send() -> None:
        try:
            client.raw((10_000).to_bytes(4, "big"))
            while True:
                client.raw(b"\0")
                time.sleep(0.02)
        except OSError:
            pass

    threading.Thread(target=send, daemon=True).start()


def ask_versions(client: WireClient) -> None:
    """Send ApiVersions requests all the time."""

    def send() -> None:
        try:
            while True:
                client.raw(request_bytes(18, 0, ApiVersionsRequest()))
                time.sleep(0.02)
        except OSError:
            pass

    threading.Thread(target=send, daemon=True).start()


def begin_to_log_in(client: WireClient) -> None:
    """Begin SCRAM, and stop in the middle."""
    client.ask(17, 1, SaslHandshakeRequest("SCRAM-SHA-256"))


@pytest.mark.parametrize("say", [say_nothing, say_half_a_length, say_byte_by_byte, ask_versions, begin_to_log_in])
def test_strangers_do_not_stay(make_server: MakeServer, say: Callable[[WireClient], None]) -> None:
    """With any of these requests, they are disconnected in time. Clients that have authenticated by then stay."""
    server = make_server(authentication_s=0.4, unauthenticated_requests=1000)
    with log_in(WireClient(server.bootstrap_servers)) as known, WireClient(server.bootstrap_servers) as client:
        say(client)
        assert client.is_closed_by_peer()
        wait_until(lambda: server.worker.listener.connection_count == 1)
        assert not server.worker.listener._guests
        assert is_served(known)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\0\1", b"\0"])
def test_a_handshake_does_not_take_for_ever(make_server: MakeServer, said: bytes, authority: trustme.CA) -> None:
    """A TLS handshake with nothing, its beginning, or a byte now and then."""
    server = make_server(tls=True, sasl=False, authentication_s=0.4)
    with encrypted(server, authority) as known, WireClient(server.bootstrap_servers) as client:
        if said == b"\0":
            client.raw(b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3")
            say_byte_by_byte(client)
        else:
            client.raw(said)
        assert client.is_closed_by_peer()
        wait_until(lambda: server.worker.listener.connection_count == 1)
        assert is_served(known)
        assert not server.worker.listener._guests


@pytest.mark.parametrize("tls", [False, True])
def test_the_oldest_stranger_makes_room(make_server: MakeServer, tls: bool, authority: trustme.CA) -> None:
    """The limit counts clients in and after the handshake, and not those that have authenticated."""
    server = make_server(tls=tls, unauthenticated_connections=3)
    connect = (lambda: encrypted(server, authority)) if tls else lambda: WireClient(server.bootstrap_servers)
    known = log_in(connect())
    strangers = [WireClient(server.bootstrap_servers) for _ in range(3)]
    wait_until(lambda: len(server.worker.listener._guests) == 3)
    late = log_in(connect())
    assert strangers[0].is_closed_by_peer()
    wait_until(lambda: server.worker.listener.connection_count == 4)
    assert len(server.worker.listener._guests) == 2
    assert is_served(known)
    assert is_served(late)
    for client in (*strangers, known, late):
        client.close()


@pytest.mark.parametrize("tls", [False, True])
def test_strangers_of_one_address_make_room_for_those_of_another(make_server: MakeServer, tls: bool) -> None:
    """With any number of one address, the few of the other stay."""
    server = make_server(tls=tls, unauthenticated_connections=8)
    listener = server.worker.listener
    few = [WireClient(server.bootstrap_servers, source="127.0.0.2") for _ in range(3)]
    wait_until(lambda: len(listener._guests) == 3)
    many = [WireClient(server.bootstrap_servers) for _ in range(20)]
    for client in many[:15]:
        assert client.is_closed_by_peer()
    wait_until(lambda: listener.connection_count == 8)
    assert not any(is_gone(client) for client in (*few, *many[15:]))
    for client in (*few, *many):
        client.close()


def is_gone(client: WireClient) -> bool:
    """Return whether the server is known to have closed the connection."""
    client.sock.setblocking(False)
    try:
        return client.sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_silent_connections_make_room_where_nobody_has_to_say_who_he_is(make_server: MakeServer) -> None:
    """Silent connections of the address with the most of them are closed.

    Clients that sent a request stay, and another connection is rejected.
    """
    server = make_server(sasl=False, connections=4)
    listener = server.worker.listener
    known = WireClient(server.bootstrap_servers, source="127.0.0.2")
    assert is_served(known)
    silent = [WireClient(server.bootstrap_servers) for _ in range(3)]
    wait_until(lambda: listener.connection_count == 4)
    others = []
    for one in silent:
        others.append(WireClient(server.bootstrap_servers, source="127.0.0.3"))
        assert is_served(others[-1])
        assert one.is_closed_by_peer()
    wait_until(lambda: listener.connection_count == 4)
    with WireClient(server.bootstrap_servers) as late:
        assert late.is_closed_by_peer()
    assert is_served(known)
    for client in (known, *silent, *others):
        client.close()


@pytest.mark.long
@pytest.mark.parametrize("tls", [False, True])
def test_thousands_of_strangers_keep_nobody_out(make_server: MakeServer, tls: bool, authority: trustme.CA) -> None:
    """More than there may be connections at all: who says who he is comes in at once, and takes no more than ever."""
    server = make_server(tls=tls, connections=STRANGERS // 2, unauthenticated_connections=STRANGERS // 4)
    connect = (lambda: encrypted(server, authority)) if tls else lambda: WireClient(server.bootstrap_servers)
    listener = server.worker.listener
    known = log_in(connect())
    memory = Memory()
    strangers = []
    for number in range(STRANGERS):
        strangers.append(WireClient(server.bootstrap_servers))
        if number % 100 == 0:
            wait_until(lambda: listener.connection_count < STRANGERS // 2)
            with log_in(connect()) as client:
                assert is_served(client)
            assert is_served(known)
    wait_until(lambda: listener.connection_count <= STRANGERS // 4 + 1)
    assert len(listener._guests) <= STRANGERS // 4
    assert memory.peak() < STRANGERS * (100 << 10) + (32 << 20)
    known.close()
    for client in strangers:
        client.close()
    wait_until(lambda: not listener.connection_count)
    assert not listener._guests
