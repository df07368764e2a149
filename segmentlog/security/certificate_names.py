"""Read the host names of a server's certificate, and check whether it covers the advertised name.

A client connects to the address that the server advertises. It rejects a certificate whose subject alternative names do
not contain that name (RFC 6125). Python's `ssl` returns these names only for a peer's certificate, so this module reads
the extension from the DER.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from typing import Final

from segmentlog.security.distinguished_names import dotted, elements

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_EXTENSIONS: Final = 0xA3
_OCTETS: Final = 0x04
_ALTERNATIVE_NAMES: Final = "2.5.29.17"
_DNS_NAME: Final = 0x82
_IP_ADDRESS: Final = 0x87


def alternative_names(certificate: bytes) -> tuple[str, ...]:
    """Return the DNS names and IP addresses of a certificate (DER), in the order of the certificate.

    Raises ValueError when the bytes are not a certificate.
    """
    try:
        (_, outer, _), *_ = elements(certificate)
        (_, inner, _), *_ = elements(outer)
        for tag, wrapped, _ in elements(inner):
            if tag != _EXTENSIONS:
                continue
            ((_, extensions, _),) = elements(wrapped)
            for _, extension, _ in elements(extensions):
                (_, identifier, _), *_, (kind, value, _) = elements(extension)
                if dotted(identifier) == _ALTERNATIVE_NAMES and kind == _OCTETS:
                    ((_, names, _),) = elements(value)
                    return tuple(
                        _text_of(tag, name) for tag, name, _ in elements(names) if tag in (_DNS_NAME, _IP_ADDRESS)
                    )
    except (IndexError, ValueError) as error:
        raise ValueError("not a certificate in DER") from error
    return ()


def _text_of(tag: int, name: bytes) -> str:
    return name.decode("ascii") if tag == _DNS_NAME else str(ipaddress.ip_address(name))


def covers(names: tuple[str, ...], host: str) -> bool:
    """Return whether the names contain ``host``, so that clients that connect to it accept the certificate.

    A ``*`` stands for the whole first label of a DNS name. An IP address matches only an IP address.
    """
    host = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return any(_matches(name, _ascii(host)) for name in names)
    return str(address) in names


def _ascii(host: str) -> str:
    """Return a host name in the form that certificates use."""
    try:
        return host.rstrip(".").encode("idna").decode().lower()
    except UnicodeError:
        return host.lower()


def _matches(name: str, host: str) -> bool:
    name = name.rstrip(".").lower()
    if not name.startswith("*."):
        return name == host
    label, dot, rest = host.partition(".")
    return bool(label and dot) and "." in rest and rest == name[2:]


def names_in(cert_path: str) -> tuple[str, ...]:
    """Return the names of the first certificate in a PEM file; () if the file is unusable."""
    return _names_in(cert_path) or ()


def _names_in(cert_path: str) -> tuple[str, ...] | None:
    """Return the names, or None if the file has no certificate; loading the file then reports an error."""
    try:
        with open(cert_path, encoding="latin-1") as file:
            found = _PEM.search(file.read())
        return None if found is None else alternative_names(ssl.PEM_cert_to_DER_cert(found[0]))
    except (OSError, ValueError):
        return None


def explain_uncovered_name(cert_path: str, host: str) -> str | None:
    """Return why clients that connect to ``host`` will reject the certificate, with a remedy; None if they accept it.

    If the file is unreadable, return None as well; loading the file then reports an error.
    """
    names = _names_in(cert_path)
    if names is None or covers(names, host):
        return None
    coverage = f"is for {', '.join(names)}" if names else "has no subjectAltName"
    instead = f"one of its names ({names[0]}:PORT)" if names else "a name that the certificate is for"
    return (
        f"{cert_path}: the certificate {coverage}, but clients are told to connect to {host}: they will refuse it."
        f" Set --advertise to {instead}, or use a certificate that has {host} in its subjectAltName"
    )
