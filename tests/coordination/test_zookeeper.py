"""ZooKeeper: users, TLS, servers that are not ZooKeeper, and servers that cannot be reached."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from coordination.engine_servers import zookeeper
from coordination.engines import engine_url
from coordination.test_cluster_coordinator import FIRST, created
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from kazoo.client import KazooClient
from kazoo.security import make_acl
from waiting import PATIENCE_S, wait_until

from segmentlog.coordination import zookeeper_engine
from segmentlog.coordination.cluster_coordinator import Coordinator, SwapOutcome
from segmentlog.coordination.engine_url import USER_VARIABLE
from segmentlog.coordination.open_engine import open_coordinator, open_engine
from segmentlog.errors import CoordinatorRefused, CoordinatorUnreachable
from segmentlog.testing.ports import free_ports


def test_users_and_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Other users can neither read nor change the document, nor delete it. No log has a password."""
    caplog.set_level(logging.DEBUG)
    with zookeeper(tmp_path) as servers:
        url = engine_url("zookeeper", servers[0].port, place="a/orders")
        monkeypatch.setenv(USER_VARIABLE, "machine:pass/word")
        with contextlib.closing(open_coordinator(url)) as coordinator:
            first = created(coordinator)
            monkeypatch.delenv(USER_VARIABLE)
            for other in (url, url.replace("//", "//machine:wrong-pass@")):
                with contextlib.closing(open_engine(other)) as engine:
                    for call in (
                        lambda engine=engine: engine.get("cluster.json"),
                        lambda engine=engine: engine.compare_and_swap("cluster.json", b"", "0"),
                        lambda engine=engine: engine.compare_and_swap("new.json", b"", None),
                        lambda engine=engine: engine.delete(["cluster.json"]),
                    ):
                        with pytest.raises(CoordinatorRefused, match="access denied") as caught:
                            call()
                        assert "pass" not in str(caught.value)
            assert coordinator.read() == first
    assert "word" not in caplog.text
    assert "pass" not in caplog.text


def test_missing_nodes_above_the_document_are_created(tmp_path: Path) -> None:
    """Existing nodes are used, also those in which this user can create nothing."""
    with zookeeper(tmp_path) as servers:
        admin = KazooClient(f"127.0.0.1:{servers[0].port}")
        admin.start(timeout=PATIENCE_S)
        admin.create("/fixed/orders", makepath=True)
        admin.set_acls("/fixed", [make_acl("world", "anyone", read=True)])
        admin.stop()
        admin.close()
        for place in ("a", "a/b", "fixed/orders", "fixed/orders/x", "fixed/orders/x/y/z"):
            with contextlib.closing(open_coordinator(engine_url("zookeeper", servers[0].port, place=place))) as made:
                created(made)
        for place in ("fixed", "fixed/other", "fixed/other/x"):
            with contextlib.closing(open_coordinator(engine_url("zookeeper", servers[0].port, place=place))) as refused:
                error = refused.swap(FIRST, None).error
                assert type(error) is CoordinatorRefused
                assert "access denied" in str(error)


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificates of both sides are checked, and the host name."""
    authority, stranger = trustme.CA(), trustme.CA()
    paths = {}
    for name, blob in {
        "ca": authority.cert_pem, "stranger": stranger.cert_pem,
        "server": authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem,
        "client": authority.issue_cert("client").private_key_and_cert_chain_pem,
    }.items():  # fmt: skip
        paths[name] = tmp_path / f"{name}.pem"
        blob.write_to_path(paths[name])
    key = load_pem_private_key(paths["server"].read_bytes(), None)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())  # the only form that ZooKeeper reads
    chain = paths["server"].read_bytes()
    paths["server"].write_bytes(pem + chain[chain.index(b"-----BEGIN CERT") :])
    port = free_ports()
    settings = (
        f"secureClientPort={port}", "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.keyStore.type=PEM", "ssl.trustStore.type=PEM", f"ssl.keyStore.location={paths['server']}",
        f"ssl.trustStore.location={paths['ca']}", "ssl.clientAuth=need",
    )  # fmt: skip
    with zookeeper(tmp_path, *settings):
        url = engine_url("zookeeper", port).replace("zk:", "zks:")
        client = f"cert={paths['client']}&key={paths['client']}"
        with contextlib.closing(open_coordinator(f"{url}?cacert={paths['ca']}&{client}")) as coordinator:
            created(coordinator)
        monkeypatch.setattr(zookeeper_engine, "REQUEST_S", 0.3)
        for wrong, match in (
            (f"{url}?cacert={paths['stranger']}&{client}", "certificate verify failed"),
            (f"{url}?cacert={paths['ca']}&{client}".replace("127.0.0.1", "localhost"), "Hostname mismatch"),
            (f"{url}?cacert={paths['ca']}", "Connection dropped"),
        ):
            with contextlib.closing(open_coordinator(wrong)) as coordinator:
                wait_until(lambda coordinator=coordinator, match=match: match in reason(coordinator))


def reason(coordinator: Coordinator) -> str:
    """Return why a read fails."""
    with pytest.raises(CoordinatorUnreachable) as caught:
        coordinator.read()
    return str(caught.value)


def test_no_server_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """kazoo tries again until the time is over; then the error has its last reason."""
    monkeypatch.setattr(zookeeper_engine, "REQUEST_S", 0.3)
    with contextlib.closing(open_coordinator(engine_url("zookeeper", free_ports(), free_ports()))) as coordinator:
        with pytest.raises(CoordinatorUnreachable, match=r"no server can be reached: .*Connection refused"):
            coordinator.read()
        swapped = coordinator.swap(FIRST, None)
        assert (swapped.outcome, type(swapped.error)) == (SwapOutcome.UNKNOWN, CoordinatorUnreachable)
        assert coordinator._engine.wait_for_change("cluster.json", "0", 0.1) is False
    with pytest.raises(CoordinatorUnreachable, match="closed"):
        coordinator.read()


@contextlib.contextmanager
def talking(data: bytes) -> Iterator[int]:
    """Yield the port of a server that answers everything with the same bytes."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.settimeout(60)
                    with contextlib.suppress(OSError):
                        client.recv(1000)
                        client.sendall(data)
                        client.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "data",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x04abcd", b"\xff\xff\xff\xff", b"\x00" * 64],
)
def test_a_server_that_is_not_zookeeper(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, again and again, and closing works."""
    monkeypatch.setattr(zookeeper_engine, "REQUEST_S", 0.3)
    with talking(data) as port, contextlib.closing(open_coordinator(engine_url("zookeeper", port))) as coordinator:
        for _ in range(2):
            with pytest.raises(CoordinatorUnreachable, match="no server can be reached"):
                coordinator.read()
