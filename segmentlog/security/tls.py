"""TLS contexts of a server. After a renewal of the files, new connections use the new files."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable
from typing import Final

from segmentlog.security.certificate_names import names_in
from segmentlog.security.distinguished_names import subject_of
from segmentlog.security.principals import Principal
from segmentlog.security.security_errors import SecurityFileError
from segmentlog.security.watched_file import CHECK_INTERVAL_S, reloads
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_safe import try_lock

logger = logging.getLogger("segmentlog.server")

_RECENT_NS: Final = 2_000_000_000


def server_context(cert_path: str, key_path: str, client_ca_path: str | None = None) -> ssl.SSLContext:
    """Return a server's TLS context, for TLS 1.2 or newer. With a CA, clients must have a certificate signed by it.

    Raise `SecurityFileError`, which names the unusable file and the reason.
    """
    for path, what in ((cert_path, "certificate"), (key_path, "key"), (client_ca_path, "CA's certificate")):
        if path is not None:
            _check_readable(path, what)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    _load_own(context, cert_path, key_path)
    if client_ca_path is not None:
        try:
            context.load_verify_locations(cafile=client_ca_path)
        except (ssl.SSLError, OSError):
            raise SecurityFileError(client_ca_path, "it contains no certificate in PEM format") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class ServerTls:
    """TLS context for new connections, reloaded when one of its files changes. Thread-safe.

    The constructor raises `SecurityFileError` for unusable files. If they become unusable later, the previous
    certificate stays in use, and an error is logged.
    """

    def __init__(
        self,
        cert_path: str,
        key_path: str,
        client_ca_path: str | None = None,
        *,
        check_interval_s: float = CHECK_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = (cert_path, key_path, client_ca_path)
        self._check_interval_s = check_interval_s
        self._clock = clock
        self._mutex = fork_safety.lock(self, "_mutex")
        self._complaint = ""
        self._versions, self._is_old = self._versions_on_disk()
        self._context = server_context(*self._paths)
        self._next_check_s = clock() + check_interval_s

    @property
    def requires_certificates(self) -> bool:
        """Whether clients authenticate with TLS certificates."""
        return self._paths[2] is not None

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection."""
        if self._clock() >= self._next_check_s:
            with try_lock(self._mutex) as is_mine:
                if is_mine:
                    self._refresh()
        return self._context

    def _refresh(self) -> None:
        self._next_check_s = self._clock() + self._check_interval_s
        versions, is_old = self._versions_on_disk()
        if versions == self._versions and self._is_old:
            return
        is_changed = versions != self._versions
        try:
            # A new context instead of new files in the old one, which running handshakes use.
            self._context = server_context(*self._paths)
        except SecurityFileError as error:
            # Certificate and key are two files: while they are renewed, one may be older than the other.
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.error("TLS files cannot be used, so the previous certificate stays in use: %s", error)
            return
        self._versions, self._is_old, self._complaint = versions, is_old, ""
        if is_changed:
            cert, _, client_ca = self._paths
            names = ", ".join(names_in(cert)) or "no name"
            clients = f"; client certificates are verified by {client_ca}" if client_ca is not None else ""
            reloads.info("%s or its key changed and was reloaded: the certificate is for %s%s", cert, names, clients)

    def _versions_on_disk(self) -> tuple[list[tuple[int, int, int]], bool]:
        versions = []
        for path in self._paths:
            try:
                found = os.stat(path) if path is not None else None
            except OSError:  # reported when the file is read
                found = None
            versions.append((found.st_ino, found.st_mtime_ns, found.st_size) if found is not None else (0, 0, 0))
        newest_ns = max(modified_ns for _, modified_ns, _ in versions)
        return versions, time.time_ns() - newest_ns > _RECENT_NS


def principal_of(connection: ssl.SSLSocket | ssl.SSLObject) -> Principal | None:
    """Return the client's identity from its verified certificate; None if it has none.

    As in Kafka by default, this is the whole distinguished name: ``User:CN=ann,OU=Engineering,O=Acme,C=DE``.
    """
    certificate = connection.getpeercert(binary_form=True)
    return Principal("User", subject_of(certificate)) if certificate else None


def _check_readable(path: str, what: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise SecurityFileError(path, f"the {what} cannot be read: {error.strerror}") from None


def _no_passphrase() -> str:
    """Raise an error, because OpenSSL would otherwise ask for the passphrase on the terminal."""
    raise _Encrypted


class _Encrypted(Exception):
    pass


def _load_own(context: ssl.SSLContext, cert_path: str, key_path: str) -> None:
    try:
        context.load_cert_chain(cert_path, key_path, password=_no_passphrase)
    except _Encrypted:
        raise SecurityFileError(key_path, "the key is encrypted; use 'openssl pkey' to decrypt it") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SecurityFileError(key_path, f"the key does not belong to the certificate {cert_path}") from None
        raise SecurityFileError(
            cert_path, f"the certificate, or the key {key_path}, is not valid PEM: {error.reason or error}"
        ) from None
    except OSError as error:  # deleted a moment ago: the files are being renewed
        raise SecurityFileError(
            cert_path, f"the certificate, or the key {key_path}, cannot be read: {error.strerror}"
        ) from None
