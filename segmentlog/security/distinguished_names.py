"""Format the name in a certificate as Kafka does: RFC 2253, like Java's ``X500Principal.getName()``.

``CN=ann,OU=Engineering,O=Acme\\, Inc.,C=DE``: the parts are in reverse order of the certificate, and an attribute for
which RFC 2253 has no keyword is ``OID=#hex``. So ACLs written for Kafka work unchanged. This form depends on the types
of the strings, which Python's `ssl` does not return. So this module reads the name from the DER of the certificate,
after OpenSSL has verified the certificate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

_KEYWORDS: Final = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.1": "UID",
    "0.9.2342.19200300.100.1.25": "DC",
}
_ENCODINGS: Final = {
    0x0C: "utf-8",
    0x13: "ascii",  # PrintableString
    0x14: "latin-1",  # TeletexString, in common practice
    0x16: "ascii",  # IA5String
    0x1B: "ascii",  # GeneralString
    0x1E: "utf-16-be",  # BMPString
}
_ESCAPED: Final = frozenset(',=+<>#;"\\')
_VERSION: Final = 0xA0
Element = tuple[int, bytes, bytes]
"""Tag, contents, and all bytes of a DER element."""


def subject_of(certificate: bytes) -> str:
    """Return the distinguished name of a certificate's subject. Raise ValueError if the bytes are not a certificate."""
    try:
        (_, outer, _), *_ = elements(certificate)
        (_, inner, _), *_ = elements(outer)
        parts = [part for part in elements(inner) if part[0] != _VERSION]
        _, name, _ = parts[4]  # after serial number, algorithm, issuer and validity
        return name_of(name)
    except (IndexError, ValueError) as error:
        raise ValueError("not a certificate in DER") from error


def name_of(contents: bytes) -> str:
    """Return a Name, given the contents of its SEQUENCE, in the form of RFC 2253."""
    parts = ["+".join(map(_attribute, elements(part))) for _, part, _ in elements(contents)]
    return ",".join(reversed(parts))


def _attribute(element: Element) -> str:
    (_, identifier, _), (tag, value, whole) = elements(element[1])
    oid = dotted(identifier)
    keyword = _KEYWORDS.get(oid)
    if keyword is not None and tag in _ENCODINGS:
        # Some authorities sign strings that do not have their declared type, such as Latin-1 as PrintableString.
        with contextlib.suppress(UnicodeDecodeError):
            return f"{keyword}={_escape(value.decode(_ENCODINGS[tag]))}"
    return f"{keyword or oid}=#{whole.hex()}"


def _escape(text: str) -> str:
    escaped = "".join(f"\\{character}" if character in _ESCAPED else character for character in text)
    core = escaped.strip(" ")
    if not core:
        return "\\ " * len(escaped)
    before = len(escaped) - len(escaped.lstrip(" "))
    trailing = len(escaped) - len(escaped.rstrip(" "))
    return "\\ " * before + core + "\\ " * trailing


def elements(data: bytes) -> Iterator[Element]:
    """Yield the DER elements of ``data``. Raise ValueError and IndexError for invalid DER."""
    at = 0
    while at < len(data):
        began, tag, size = at, data[at], data[at + 1]
        at += 2
        if size & 0x80:
            count = size & 0x7F
            size = int.from_bytes(data[at : at + count], "big")
            at += count
        if not 0 <= size <= len(data) - at:
            raise ValueError("a DER element is truncated")
        yield tag, data[at : at + size], data[began : at + size]
        at += size


def dotted(identifier: bytes) -> str:
    """Return an object identifier's contents as text: ``2.5.4.3``."""
    numbers = []
    number = 0
    for byte in identifier:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, (first, numbers[0] - 40 * first, *numbers[1:])))
