"""Certificates for tests, made on the spot: an authority, servers and clients of it."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.name import _ASN1Type
from cryptography.x509.oid import NameOID


class Pair(NamedTuple):
    """Two files."""

    certificate: str
    key: str


def write_pair(folder: Path, name: str, issued: trustme.LeafCert) -> Pair:
    """Return a certificate with its chain, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return Pair(str(certificate), str(key))


def subject(*parts: tuple[x509.ObjectIdentifier, str, _ASN1Type | None]) -> x509.Name:
    """Return a name of ``count`` attributes, each a part of its own."""
    return x509.Name([x509.NameAttribute(oid, value, kind, _validate=False) for oid, value, kind in parts])


def certificate_for(name: x509.Name) -> bytes:
    """Return a self-signed certificate for a name, in DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime(2026, 1, 1)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the issuer, who is somebody else")]))
        .public_key(key.public_key())
        .serial_number(1 << 100)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )
