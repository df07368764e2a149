"""The standby's question to the owner: a healthy owner answers it, whatever its security and its limits."""

from __future__ import annotations

import contextlib
import socket
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
from server.wire_client import Refused, WireClient, message
from waiting import wait_until

from segmentlog.format.manifest import Manifest, Owner
from segmentlog.format.server_file import ServerNode
from segmentlog.objects.ownership.binding import Binding, folder_id, write_binding
from segmentlog.policy.takeover_decision import ProbeResult
from segmentlog.security.security_settings import Security
from segmentlog.security.users import add_user
from segmentlog.server.embedded import Server
from segmentlog.server.owner_probe import OwnerProbe
from segmentlog.server.server_settings import Limits, ServerSettings
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore

ALIVE, REFUSED, SILENT = ProbeResult.ALIVE, ProbeResult.REFUSED, ProbeResult.SILENT
MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Return a function that serves a store as the owner ``mine``."""
    servers: list[Server] = []

    def make(security: Security | None = None, host: str = "127.0.0.1", **limits: Any) -> Server:
        path = tmp_path / "store"
        store = opened(LogStore(path, background=False, fs=NoSyncFileSystem()))
        fs = FileSystem()
        write_binding(fs, str(path), Binding("file:///x", "mine", 1, folder_id(fs, str(path)), begun=True))
        settings = ServerSettings(limits=Limits(**limits))
        servers.append(
            Server(
                store, host=host, port=0, advertise=None, settings=settings, security=security or Security(),
                owns_store=False,
            )
        )  # fmt: skip
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def _manifest(*nodes: tuple[str, int], owner_id: str = "mine") -> Manifest:
    owner = Owner(1, owner_id, "m1", 0, tuple(ServerNode(number, *node) for number, node in enumerate(nodes, 1)))
    return Manifest("s", owner, 1, "n", 0, 0)


def _node(server: Server) -> tuple[str, int]:
    host, _, port = server.bootstrap_servers.rpartition(":")
    return host.strip("[]"), int(port)


def _probe(security: Security | None = None, **options: Any) -> contextlib.closing[OwnerProbe]:
    return contextlib.closing(OwnerProbe(security or Security(), **options))


def _closed_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return "127.0.0.1", sock.getsockname()[1]


def test_the_owner_answers(make_server: MakeServer) -> None:
    """The manifest's owner is alive; another owner at its address does not count; a closed port refuses."""
    node = _node(make_server())
    with _probe() as probe:
        assert list(probe(_manifest(node))) == [ALIVE]
        assert list(probe(_manifest(node, owner_id="other"))) == [SILENT]
        assert list(probe(_manifest(_closed_port()))) == [REFUSED]
        assert list(probe(_manifest(_closed_port(), _closed_port()))) == [REFUSED, REFUSED]
        assert ALIVE in probe(_manifest(_closed_port(), node))


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_ipv6_address_is_an_address(make_server: MakeServer) -> None:
    """``[::1]`` is a node as any other."""
    node = _node(make_server(host="::1"))
    assert node[0] == "::1"
    with _probe() as probe:
        assert list(probe(_manifest(node))) == [ALIVE]


@pytest.mark.parametrize("has_client_ca", [False, True])
def test_tls_and_users_do_not_stop_a_probe(make_server: MakeServer, tmp_path: Path, has_client_ca: bool) -> None:
    """The probe comes before authentication, and has the certificate of its own server as its client certificate."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    pair = write_pair(tmp_path, "server", authority.issue_cert("127.0.0.1"))
    users = str(tmp_path / "users.json")
    add_user(users, "ann", "secret", iterations=4096)
    security = Security(
        tls_cert=pair.certificate, tls_key=pair.key, users=users,
        tls_client_ca=str(tmp_path / "ca.pem") if has_client_ca else None,
    )  # fmt: skip
    node = _node(make_server(security))
    with _probe(security) as probe:
        assert list(probe(_manifest(node))) == [ALIVE]
    with _probe() as probe:  # without TLS
        assert list(probe(_manifest(node))) == [SILENT]


@pytest.mark.parametrize("limit", ["connections", "connections_per_address"])
def test_an_owner_at_its_limit_of_connections_answers_its_standby(make_server: MakeServer, limit: str) -> None:
    """A machine that has probed before keeps some connections above the limit; its other clients get none."""
    server = make_server(**{limit: 3})
    node = _node(server)
    with _probe() as probe, contextlib.ExitStack() as stack:
        assert list(probe(_manifest(node))) == [ALIVE]
        wait_until(lambda: not server.worker.listener.connection_count)
        versions = message(18, "ApiVersionsRequest")(client_software_name="x", client_software_version="1")
        for _ in range(3):
            stack.enter_context(WireClient(server.bootstrap_servers)).ask(18, 3, versions)
        for _ in range(20):
            assert list(probe(_manifest(node))) == [ALIVE]


def test_at_the_limit_a_client_from_elsewhere_is_refused(make_server: MakeServer) -> None:
    """Nothing is reserved for an address that has not probed."""
    server = make_server(connections=2)
    versions = message(18, "ApiVersionsRequest")(client_software_name="x", client_software_version="1")
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(WireClient(server.bootstrap_servers)).ask(18, 3, versions)
        with WireClient(server.bootstrap_servers) as client, pytest.raises((Refused, ConnectionError)):
            client.ask(18, 3, versions)


def test_a_probe_ends_in_time_and_a_late_answer_counts(make_server: MakeServer) -> None:
    """64 silent nodes take no longer than one. An answer that comes after the cycle is found by the next one."""
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(64)]
    with _probe(cycle_s=0.5) as probe:
        began_s = time.monotonic()
        results = probe(_manifest(*(sock.getsockname() for sock in silent)))
        assert time.monotonic() - began_s < 3
        assert list(results) == [SILENT] * 64
    for sock in silent:
        sock.close()
    node = _node(make_server())
    front = socket.create_server(("127.0.0.1", 0))

    def forward_late() -> None:
        with contextlib.suppress(OSError):
            client, _ = front.accept()
            time.sleep(1)
            with client, socket.create_connection(node) as owner:
                owner.sendall(client.recv(4096))
                client.sendall(owner.recv(65536))

    thread = threading.Thread(target=forward_late)
    thread.start()
    with _probe(cycle_s=0.3) as probe:
        manifest = _manifest(front.getsockname())
        assert list(probe(manifest)) == [SILENT]
        found = [next(iter(probe(manifest))) for _ in range(10)]
    thread.join()
    front.close()
    assert ALIVE in found
