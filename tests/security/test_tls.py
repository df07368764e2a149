"""TLS with generated certificates: who can connect, as which principal, and errors for unusable files."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import needs
import pytest
import trustme
from security.certificates import Pair, write_pair

from segmentlog.security import tls as tls_module
from segmentlog.security.principals import Principal
from segmentlog.security.security_errors import SecurityFileError
from segmentlog.security.tls import ServerTls, principal_of, server_context

WAIT_S = 20.0


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Return the authority that signs all certificates."""
    return trustme.CA()


@pytest.fixture
def server(tmp_path: Path, authority: trustme.CA) -> Pair:
    """Return a server's certificate and key."""
    return write_pair(tmp_path, "server", authority.issue_cert("localhost"))


@pytest.fixture
def client_ca(tmp_path: Path, authority: trustme.CA) -> str:
    """Return the file of whom clients need a certificate of."""
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return str(path)


def client_context(authority: trustme.CA) -> ssl.SSLContext:
    """Return a context of a client that checks the server, without a certificate of its own."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def connect(context: ssl.SSLContext, client: ssl.SSLContext) -> tuple[Principal | None, bytes]:
    """Open a connection and return (the client's principal, the server's certificate). Raises errors of both sides."""
    ours, theirs = socket.socketpair()
    found: list[Principal | None] = []
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            theirs.settimeout(WAIT_S)
            with context.wrap_socket(theirs, server_side=True) as wrapped:
                found.append(principal_of(wrapped))
                wrapped.sendall(b"hello")
        except OSError as error:
            errors.append(error)
        finally:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        ours.settimeout(WAIT_S)
        with client.wrap_socket(ours, server_hostname="localhost") as wrapped:
            certificate = wrapped.getpeercert(binary_form=True)
            assert wrapped.recv(5) == b"hello"
    finally:
        ours.close()
        thread.join()
    assert not errors
    return found[0], certificate or b""


def test_clients_need_no_certificate_unless_they_are_asked(server: Pair, authority: trustme.CA) -> None:
    """The connection is encrypted, and its client is anonymous."""
    assert connect(server_context(*server), client_context(authority))[0] is None


def test_a_client_is_who_its_certificate_says(server: Pair, client_ca: str, authority: trustme.CA) -> None:
    """The principal is the certificate's whole name, as in Kafka's rules."""
    client = client_context(authority)
    authority.issue_cert(
        "ann@example.org", common_name="Ann Lee", organization_name="Acme, Inc.", organization_unit_name="Eng"
    ).configure_cert(client)
    found, _ = connect(server_context(*server, client_ca), client)
    assert found == Principal("User", r"CN=Ann Lee,OU=Eng,O=Acme\, Inc.")


def test_other_certificates_and_none_are_refused(server: Pair, client_ca: str, authority: trustme.CA) -> None:
    """With a CA for clients, the handshake fails, before any byte of a request."""
    context = server_context(*server, client_ca)
    stranger = client_context(authority)
    trustme.CA().issue_cert("ann@example.org", common_name="ann").configure_cert(stranger)
    for client in (client_context(authority), stranger):
        with pytest.raises(OSError, match=r"alert|EOF|reset|closed"):
            connect(context, client)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_newer(server: Pair, authority: trustme.CA, version: ssl.TLSVersion) -> None:
    """Both work, and older ones are off."""
    client = client_context(authority)
    client.minimum_version = client.maximum_version = version
    context = server_context(*server)
    connect(context, client)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_renewed_certificate_is_taken_for_new_connections(
    tmp_path: Path, server: Pair, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    """The server need not restart, also if the two files change one after the other."""
    tls = ServerTls(*server, check_interval_s=0)
    first = connect(tls.context(), client_context(authority))[1]
    assert connect(tls.context(), client_context(authority))[1] == first
    (tmp_path / "new").mkdir()
    renewed = write_pair(tmp_path / "new", "server", authority.issue_cert("localhost"))
    os.replace(renewed.certificate, server.certificate)
    assert connect(tls.context(), client_context(authority))[1] == first, "the key is still the old one"
    assert connect(tls.context(), client_context(authority))[1] == first
    assert len(caplog.records) == 1
    assert "stays in use" in caplog.text
    os.replace(renewed.key, server.key)
    second = connect(tls.context(), client_context(authority))[1]
    assert second != first
    os.unlink(server.key)
    assert connect(tls.context(), client_context(authority))[1] == second
    assert "cannot be read" in caplog.text


def test_a_file_that_goes_while_it_is_read_anew_is_waited_for(
    server: Pair, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A renewal may delete the old file first: the previous pair stays in use meanwhile."""
    tls = ServerTls(*server, check_interval_s=0)
    context = tls.context()
    check = tls_module._check_readable

    def goes_right_after(path: str, what: str) -> None:
        check(path, what)
        if path == server.key:
            os.unlink(path)

    monkeypatch.setattr(tls_module, "_check_readable", goes_right_after)
    os.utime(server.key)
    assert tls.context() is context
    assert "stays in use" in caplog.text


def test_a_young_file_is_read_again(tmp_path: Path, server: Pair, authority: trustme.CA) -> None:
    """A second renewal within the step of a file system's clock is not missed."""
    tls = ServerTls(*server, check_interval_s=0)
    first = connect(tls.context(), client_context(authority))[1]
    (tmp_path / "new").mkdir()
    renewed = write_pair(tmp_path / "new", "server", authority.issue_cert("localhost"))
    for old, new in zip(server, renewed, strict=True):
        times = os.stat(old)
        shutil.copyfile(new, old)
        os.utime(old, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert connect(tls.context(), client_context(authority))[1] != first


def test_a_look_costs_nothing_in_between(server: Pair) -> None:
    """The context is the same object for half a second, whatever happens to the files."""
    now = [0.0]
    tls = ServerTls(*server, clock=lambda: now[0])
    context = tls.context()
    os.unlink(server.key)
    assert tls.context() is context
    assert not tls.requires_certificates


@pytest.fixture
def broken(tmp_path: Path, server: Pair, authority: trustme.CA) -> dict[str, str]:
    """Files of every kind that does not fit."""
    other = write_pair(tmp_path, "other", authority.issue_cert("localhost"))
    empty, text, secret = tmp_path / "empty", tmp_path / "text", tmp_path / "encrypted"
    empty.write_bytes(b"")
    text.write_text("no certificate at all")
    files = {
        "certificate": server.certificate, "key": server.key, "other key": other.key, "empty": str(empty),
        "text": str(text), "none": str(tmp_path / "none"), "folder": str(tmp_path),
    }  # fmt: skip
    if shutil.which("openssl"):
        subprocess.run(
            ["openssl", "pkey", "-in", server.key, "-aes256", "-passout", "pass:x", "-out", str(secret)],
            check=True, capture_output=True, timeout=WAIT_S,
        )  # fmt: skip
        files["encrypted"] = str(secret)
    return files


@pytest.mark.parametrize(
    ("certificate", "key", "client_ca", "told"),
    [
        ("none", "key", None, "certificate cannot be read: No such file"),
        ("certificate", "none", None, "key cannot be read: No such file"),
        ("certificate", "folder", None, "directory"),
        ("certificate", "other key", None, "does not belong to the certificate"),
        ("certificate", "empty", None, "PEM"),
        ("certificate", "text", None, "PEM"),
        ("text", "key", None, "PEM"),
        ("empty", "key", None, "PEM"),
        ("key", "certificate", None, "PEM"),
        ("certificate", "key", "none", "CA's certificate cannot be read"),
        ("certificate", "key", "text", "no certificate in PEM"),
        ("certificate", "key", "empty", "no certificate in PEM"),
        ("certificate", "encrypted", None, "encrypted"),
    ],
)
def test_files_that_do_not_fit_are_told(
    broken: dict[str, str], certificate: str, key: str, client_ca: str | None, told: str
) -> None:
    """The error names the file and the fault; OpenSSL does not ask for a passphrase."""
    if key not in broken:
        needs.program("openssl")
    with pytest.raises(SecurityFileError) as error:
        server_context(broken[certificate], broken[key], None if client_ca is None else broken[client_ca])
    assert told in str(error.value)
    assert "PRIVATE" not in str(error.value)


def test_a_renewed_certificate_is_logged_once_with_its_names(
    tmp_path: Path, authority: trustme.CA, server: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds for any time between the changes of the two files."""
    caplog.set_level(logging.INFO, "segmentlog.server")
    tls = ServerTls(server.certificate, server.key, check_interval_s=0)
    tls.context()
    assert not caplog.records
    write_pair(tmp_path, "server", authority.issue_cert("db.example", "10.0.0.7"))
    for _ in range(3):
        tls.context()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "db.example, 10.0.0.7" in line
    assert server.certificate in line
