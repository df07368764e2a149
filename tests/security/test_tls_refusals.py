"""Handshakes that fail: what the log says of each kind of client, and how often."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
import trustme
from security.certificates import Pair, write_pair
from waiting import wait_until

import segmentlog
from segmentlog.security.tls_refusals import TlsRefusals
from segmentlog.server.embedded import Server
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker import Security
from segmentlog.store import LogStore
from segmentlog.testing.ports import free_ports

WAIT_S = 20.0
Logged = Callable[[], list[str]]


@pytest.fixture
def authority() -> trustme.CA:
    """Return the authority that signs all certificates."""
    return trustme.CA()


@pytest.fixture
def own(tmp_path: Path, authority: trustme.CA) -> Pair:
    """Return the server's."""
    return write_pair(tmp_path, "server", authority.issue_cert("localhost"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide an empty store."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        yield store


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """Return the lines about handshakes so far."""
    caplog.set_level(logging.INFO, "segmentlog.server")
    return lambda: [record.getMessage() for record in caplog.records if "TLS handshake" in record.getMessage()]


def served(store: LogStore, own: Pair, advertise: str | None = "localhost:9092", **more: Any) -> Server:
    """Return a server with TLS."""
    return Server(
        store, host="127.0.0.1", port=0, advertise=advertise, settings=ServerSettings(),
        security=Security(tls_cert=own.certificate, tls_key=own.key, **more), owns_store=False,
    )  # fmt: skip


def port_of(server: Server) -> int:
    """Return the port on which the server listens, which may differ from the advertised one."""
    return int(server.worker.listener._sockets[0].getsockname()[1])


def connect(server: Server, context: ssl.SSLContext, name: str = "localhost") -> None:
    """Try to connect once; either side may fail."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port_of(server)), WAIT_S) as sock,
        context.wrap_socket(sock, server_hostname=name) as wrapped,
    ):
        wrapped.sendall(b"\0\0\0\4abcd")
        wrapped.recv(1)


def send(server: Server, data: bytes) -> None:
    """Send what a client without TLS sends."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port_of(server)), WAIT_S) as sock:
        sock.sendall(data)
        sock.recv(1)


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """Return a client that knows the authority."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_each_reason_is_logged_once_with_a_remedy(
    store: LogStore, own: Pair, authority: trustme.CA, logged: Logged
) -> None:
    """Ten tries of each of four clients are four lines: no trust, another name, no TLS, and HTTP."""
    with served(store, own) as server:
        for _ in range(10):
            connect(server, ssl.create_default_context())
            connect(server, trusting(authority), "elsewhere.example")
            send(server, b"\0\0\0\x20\0\x12\0\3\0\0\0\1" + b"a" * 24)
            send(server, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        wait_until(lambda: len(logged()) >= 4)
    lines = logged()
    assert len(lines) == 4, lines
    assert sum("does not trust its authority" in line and "--advertise" in line for line in lines) == 2
    assert sum("does not speak TLS" in line for line in lines) == 1
    assert sum("speaks HTTP" in line for line in lines) == 1


def test_clients_with_certificates_that_do_not_fit(
    store: LogStore, own: Pair, authority: trustme.CA, tmp_path: Path, logged: Logged
) -> None:
    """With --tls-client-ca, clients without a certificate or with one of another CA are logged with what they need."""
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with served(store, own, tls_client_ca=str(tmp_path / "ca.pem")) as server:
        connect(server, trusting(authority))
        stranger = trusting(authority)
        trustme.CA().issue_cert("ann@x").configure_cert(stranger)
        connect(server, stranger)
        wait_until(lambda: len(logged()) >= 2)
    assert any("has no certificate" in line for line in logged())
    assert any("client certificate: " in line and "signed by an authority" in line for line in logged())


def test_who_merely_leaves_is_no_warning(
    store: LogStore, own: Pair, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """A health check that connects and leaves is information, once."""
    with served(store, own) as server:
        for _ in range(5):
            socket.create_connection(("127.0.0.1", port_of(server)), WAIT_S).close()
        wait_until(lambda: bool(logged()))
    assert [record.levelname for record in caplog.records if "TLS handshake" in record.getMessage()] == ["INFO"]


def test_a_reason_that_goes_on_is_logged_again_with_a_count(logged: Logged) -> None:
    """After ten minutes it is logged with its count; the number of reasons that are kept is bounded."""
    now_s = 0.0
    refusals = TlsRefusals(logging.getLogger("segmentlog.server"), again_s=600, clock=lambda: now_s)
    for _ in range(1000):
        refusals.report("10.0.0.7", TimeoutError("it took too long"))
    assert len(logged()) == 1
    now_s = 601.0
    refusals.report("10.0.0.8", TimeoutError("it took too long"))
    assert len(logged()) == 2
    assert "999 more" in logged()[1]
    for number in range(1000):
        refusals.report("10.0.0.9", ValueError(f"reason {number}"))
    assert len(logged()) < 100


@pytest.mark.parametrize(
    ("advertise", "warns"),
    [("localhost:9092", False), ("127.0.0.1:9092", True), ("db.example:9092", True), (None, True)],
)
def test_an_advertised_name_that_is_not_in_the_certificate(
    store: LogStore, own: Pair, caplog: pytest.LogCaptureFixture, advertise: str | None, warns: bool
) -> None:
    """The server warns at its start, naming the certificate, its names, the advertised name and what to do."""
    with served(store, own, advertise):
        pass
    found = [record.getMessage() for record in caplog.records if "subjectAltName" in record.getMessage()]
    assert len(found) == warns
    for line in found:
        host = (advertise or "127.0.0.1").partition(":")[0]
        assert all(
            word in line for word in (own.certificate, "is for localhost", host, "--advertise", "localhost:PORT")
        )


def recipe() -> list[str]:
    """Return the commands in the section on TLS of docs/server-security.md."""
    text = (Path(__file__).parent.parent.parent / "docs" / "server-security.md").read_text()
    section = text[text.index("## TLS") : text.index("## Users")]
    block = section[section.index("```sh\n") + 6 :]
    return block[: block.index("```")].replace("\\\n", "").strip().splitlines()


def test_the_recipe_as_it_is_written(tmp_path: Path) -> None:
    """openssl's certificate, the server, a produce and a consume by kcat: a record comes out, and nothing warns."""
    needs.program("kcat")
    needs.program("openssl")
    port = str(free_ports(1))
    certificate, serve, produce, consume = (line.replace("9092", port) for line in recipe())
    subprocess.run(["bash", "-c", certificate], cwd=tmp_path, check=True, capture_output=True, timeout=WAIT_S)
    words = serve.split()
    assert words[:2] == ["segmentlog", "serve"]
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(
            [sys.executable, "-m", *words, "--workers", "1"], cwd=tmp_path, stdout=log, stderr=log
        ) as server,
    ):
        try:
            wait_until(lambda: "listening on" in (tmp_path / "log").read_text() or server.poll() is not None)
            for command in (produce, consume):
                done = subprocess.run(
                    ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False
                )
                assert done.returncode == 0, (command, done.stderr, (tmp_path / "log").read_text())
        finally:
            server.terminate()
    assert done.stdout == "hello\n"
    assert "WARNING" not in (tmp_path / "log").read_text()
