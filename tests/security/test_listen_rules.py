"""Where a server listens without further ado, and where it wants to be told that this is meant."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from segmentlog.format.file_names import ACLS_FILE, USERS_FILE
from segmentlog.security.acls import Authorizer
from segmentlog.security.listen_rules import check_safe, check_tls_files, is_loopback, mechanisms_for
from segmentlog.security.mechanisms import MECHANISMS, SCRAM_MECHANISMS
from segmentlog.security.security_errors import SecurityFileError, UnsafeListening
from segmentlog.security.security_settings import Security
from segmentlog.security.users import Users


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make only a few host names resolve, independent of this machine."""
    known = {
        "localhost": ["127.0.0.1", "::1"], "broker.example.org": ["192.0.2.7"],
        "both.example.org": ["127.0.0.1", "192.0.2.7"],
    }  # fmt: skip

    def getaddrinfo(host: str, port: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_link_to_nothing_opens_no_door(tmp_path: Path) -> None:
    """Users and rules of the store that cannot be reached now are there all the same."""
    store = str(tmp_path)
    assert Security().completed_from_store(store) == Security()
    for name in (USERS_FILE, ACLS_FILE):
        (tmp_path / name).symlink_to(tmp_path / "not mounted" / name)
    found = Security().completed_from_store(store)
    assert (found.users, found.acls) == (f"{store}/{USERS_FILE}", f"{store}/{ACLS_FILE}")
    with pytest.raises(SecurityFileError, match="does not exist"):
        Users(str(found.users))
    with pytest.raises(SecurityFileError, match="does not exist"):
        Authorizer(str(found.acls))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"])
def test_loopback_needs_nothing(host: str) -> None:
    """Other machines cannot reach it."""
    check_safe(host, tls=False, sasl=False, insecure=False)
    assert is_loopback(host)
    assert mechanisms_for(host, tls=False, insecure=False) == MECHANISMS


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "[::]", "", "192.0.2.7", "10.0.0.1", "fe80::1%eth0",
     "::ffff:10.0.0.1", "broker.example.org", "both.example.org"],
)  # fmt: skip
def test_all_else_wants_protection_or_to_be_told(host: str) -> None:
    """TLS, users, or the word that the network does it; the error names all three, and loopback."""
    with pytest.raises(UnsafeListening) as error:
        check_safe(host, tls=False, sasl=False, insecure=False)
    for way_out in ("--tls-cert", "--users", "--insecure", "127.0.0.1"):
        assert way_out in str(error.value)
    for given in ("tls", "sasl", "insecure"):
        check_safe(host, **{"tls": False, "sasl": False, "insecure": False, given: True})


@pytest.mark.parametrize("host", ["nowhere.example.org", "x" * 300])
def test_a_name_that_means_nothing_is_told(host: str) -> None:
    """A host name that cannot be resolved is refused, because it may be one of a network."""
    with pytest.raises(UnsafeListening, match=r"resolved"):
        check_safe(host, tls=False, sasl=False, insecure=False)


def test_half_of_tls_is_none() -> None:
    """A certificate without a key is an error: the server must not run unencrypted."""
    check_tls_files(None, None, None)
    check_tls_files("cert", "key", None)
    check_tls_files("cert", "key", "ca")
    for files in (("cert", None, None), (None, "key", None), (None, None, "ca"), ("cert", None, "ca")):
        with pytest.raises(SecurityFileError, match="--tls-"):
            check_tls_files(*files)


def test_passwords_go_over_no_open_line() -> None:
    """PLAIN is offered with TLS, on loopback, or with --insecure."""
    assert mechanisms_for("0.0.0.0", tls=False, insecure=False) == SCRAM_MECHANISMS
    assert mechanisms_for("nowhere.example.org", tls=False, insecure=False) == SCRAM_MECHANISMS
    assert mechanisms_for("0.0.0.0", tls=True, insecure=False) == MECHANISMS
    assert mechanisms_for("0.0.0.0", tls=False, insecure=True) == MECHANISMS
