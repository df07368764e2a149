"""The names in certificates, and which hosts they are for: as OpenSSL sees it."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
import trustme
from security.certificates import Pair, certificate_for, subject, write_pair

from segmentlog.security.certificate_names import alternative_names, covers, explain_uncovered_name
from segmentlog.security.tls import server_context

CASES = [
    # names, host, whether they cover it
    (("localhost",), "localhost", True),
    (("localhost",), "LOCALHOST", True),
    (("localhost",), "127.0.0.1", False),
    (("127.0.0.1",), "127.0.0.1", True),
    (("::1",), "0:0:0:0:0:0:0:1", True),
    (("::1",), "127.0.0.1", False),
    (("a.example.com", "b.example.com"), "b.example.com", True),
    (("*.example.com",), "a.example.com", True),
    (("*.example.com",), "a.b.example.com", False),
    (("*.example.com",), "example.com", False),
    (("*.example.com",), ".example.com", False),
    (("example.com",), "a.example.com", False),
    (("*.com",), "example.com", False),
    (("xn--bcher-kva.example",), "bücher.example", True),
]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Return the authority that signs all certificates."""
    return trustme.CA()


def accepts(authority: trustme.CA, own: Pair, host: str) -> bool:
    """Return whether OpenSSL, as a client that connects to that host, accepts the certificate."""
    client = ssl.create_default_context()
    authority.configure_trust(client)
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            server_context(*own).wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=host):
            return True
    except (ssl.SSLCertVerificationError, ValueError, UnicodeError):
        return False
    finally:
        ours.close()
        thread.join()


@pytest.mark.parametrize(("names", "host", "is_covered"), CASES)
def test_names_and_hosts(
    tmp_path: Path, authority: trustme.CA, names: tuple[str, ...], host: str, is_covered: bool
) -> None:
    """Each row of the table holds, and OpenSSL accepts the certificate for the same hosts."""
    assert covers(names, host) == is_covered
    if names != ("*.com",):  # OpenSSL leaves it to authorities not to issue that
        own = write_pair(tmp_path, "server", authority.issue_cert(*names))
        assert accepts(authority, own, host) == is_covered
        assert (explain_uncovered_name(own.certificate, host) is None) == is_covered


def test_the_names_are_read_in_their_order(tmp_path: Path, authority: trustme.CA) -> None:
    """DNS names and addresses of both kinds, in PEM with a chain and text around."""
    own = write_pair(tmp_path, "server", authority.issue_cert("b", "10.0.0.7", "a", "fd00::7", "*.c.example"))
    text = Path(own.certificate).read_text()
    assert alternative_names(ssl.PEM_cert_to_DER_cert(text[: text.index("-----END") + 25])) == (
        "b", "10.0.0.7", "a", "fd00::7", "*.c.example",
    )  # fmt: skip
    Path(own.certificate).write_text("Bag Attributes\n  friendlyName: é\n" + text)
    why = explain_uncovered_name(own.certificate, "elsewhere")
    assert why is not None
    assert all(word in why for word in (own.certificate, "b, 10.0.0.7", "elsewhere", "--advertise", "b:PORT"))


def test_a_certificate_without_names(tmp_path: Path) -> None:
    """It covers nothing, whatever its subject says; the message says what it lacks."""
    path = tmp_path / "cert.pem"
    path.write_text(ssl.DER_cert_to_PEM_cert(certificate_for(subject())))
    assert alternative_names(certificate_for(subject())) == ()
    assert "has no subjectAltName" in (explain_uncovered_name(str(path), "localhost") or "")


def test_what_is_no_certificate_is_reported_elsewhere(tmp_path: Path) -> None:
    """Files that are missing, empty, cut short or of another kind: loading them raises, and this says nothing."""
    path = tmp_path / "cert.pem"
    assert explain_uncovered_name(str(path), "localhost") is None
    whole = ssl.DER_cert_to_PEM_cert(certificate_for(subject()))
    for text in ("", "nothing", whole[:100], whole.replace(whole[40:60], "A" * 20)):
        path.write_text(text)
        explain_uncovered_name(str(path), "localhost")
    for size in range(0, 200, 7):
        with pytest.raises(ValueError, match="not a certificate"):
            alternative_names(certificate_for(subject())[:size])
