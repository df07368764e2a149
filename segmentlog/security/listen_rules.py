"""Parse the addresses that a server listens on, and refuse those that are unsafe with its security settings."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Final

from segmentlog.errors import InvalidConfig
from segmentlog.security.mechanisms import MECHANISMS, SCRAM_MECHANISMS
from segmentlog.security.security_errors import SecurityFileError, UnsafeListening

_BACKLOG: Final = 1024


def parse_address(text: str, *, option: str = "listen") -> tuple[str, int]:
    """Return host and port of ``127.0.0.1:9092``, ``[::1]:9092``, ``:9092`` (all addresses) or ``9092``.

    Raise `InvalidConfig`.
    """
    host, _, port = text.rpartition(":")
    if not host and not text.startswith(":"):
        host = "127.0.0.1"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidConfig(option, text, "an IPv6 address in brackets: [::1]:9092")
    if not port.isdecimal() or int(port) > 65535:
        raise InvalidConfig(option, text, "HOST:PORT")
    return host or "0.0.0.0", int(port)


def listen(host: str, port: int) -> socket.socket:
    """Return a non-blocking listening socket. Raise OSError, which names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if family == socket.AF_INET:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise OSError(error.errno, f"cannot listen: {why}", f"{host}:{port}") from None
    sock.setblocking(False)
    return sock


def bind_again(sock: socket.socket) -> socket.socket:
    """Close a listening socket of this process alone, and return a socket with the same address that does not listen:
    connections are refused until `start_listening`.
    """
    address, family = sock.getsockname(), sock.family
    sock.close()
    again = socket.socket(family, socket.SOCK_STREAM)
    try:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            again.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as `socket.create_server`
        again.bind(address)
        again.setblocking(False)
    except BaseException:
        again.close()
        raise
    return again


def start_listening(sock: socket.socket) -> None:
    """Accept connections on a bound socket, for all processes that have it. Harmless if it listens already."""
    sock.listen(_BACKLOG)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on ``host``.

    Raise OSError if the name cannot be resolved. An empty name means all addresses of the machine.
    """
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        return False
    try:
        found = [host] if _is_address(host) else [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    except UnicodeError:
        raise OSError(None, "not a valid host name", host) from None
    return bool(found) and all(_is_loopback_address(address) for address in found)


def check_safe(host: str, tls: bool, sasl: bool, insecure: bool) -> None:
    """Raise `UnsafeListening`, with a remedy, if the server is unprotected and other machines can reach it."""
    if tls or sasl or insecure:
        return
    try:
        if is_loopback(host):
            return
    except OSError as error:
        raise UnsafeListening(host, f"the name cannot be resolved: {error.strerror or error}") from None
    raise UnsafeListening(
        host,
        "other machines can reach this address, and could read and delete all data: use --tls-cert and --tls-key, or"
        " --users; or --insecure if the network protects it; or listen on 127.0.0.1",
    )


def check_safe_for_passwords(host: str, tls: bool, insecure: bool) -> None:
    """Raise `UnsafeListening` if passwords would be sent unencrypted to an address that other machines can reach."""
    if tls or insecure:
        return
    try:
        if is_loopback(host):
            return
    except OSError as error:
        raise UnsafeListening(host, f"the name cannot be resolved: {error.strerror or error}") from None
    raise UnsafeListening(
        host,
        "other machines can reach this address, and passwords and records would be sent unencrypted: use --tls-cert"
        " and --tls-key; or --insecure if the network protects it; or listen on 127.0.0.1",
    )


def check_safe_to_report(host: str, insecure: bool) -> None:
    """Raise `UnsafeListening` if other machines can reach metrics, which have neither encryption nor authentication."""
    try:
        if insecure or is_loopback(host):
            return
    except OSError as error:
        raise UnsafeListening(host, f"the name cannot be resolved: {error.strerror or error}", "metrics") from None
    raise UnsafeListening(
        host,
        "other machines can reach this address, and would see the names of all topics and groups: use --insecure if"
        " the network protects it; or listen on 127.0.0.1",
        "metrics",
    )


def check_tls_files(cert: str | None, key: str | None, client_ca: str | None) -> None:
    """Raise `SecurityFileError` for incomplete TLS settings, which would leave connections unencrypted."""
    if (cert is None) != (key is None):
        given, missing = ("--tls-key", "--tls-cert") if cert is None else ("--tls-cert", "--tls-key")
        raise SecurityFileError(cert or key or "", f"{given} is given without {missing}")
    if client_ca is not None and cert is None:
        raise SecurityFileError(client_ca, "--tls-client-ca needs --tls-cert and --tls-key")


def mechanisms_for(host: str, tls: bool, insecure: bool) -> tuple[str, ...]:
    """Return the SASL mechanisms to offer.

    They include PLAIN, which sends the password, only if other machines cannot read the connection.
    """
    try:
        is_private = tls or insecure or is_loopback(host)
    except OSError:
        is_private = False
    return MECHANISMS if is_private else SCRAM_MECHANISMS


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return False


def _is_loopback_address(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
