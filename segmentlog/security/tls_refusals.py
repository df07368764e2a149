"""Logs failed TLS handshakes: each reason once, with its remedy, and again from time to time.

A client whose handshake fails tries again at once and forever. A log line for each attempt would fill the disk.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from segmentlog.storage import fork_safety

AGAIN_S: Final = 600.0
"""A reason that persists is logged again after this time, with the number of handshakes since."""
_REASONS_MAX: Final = 64
"""Most reasons that are counted separately; a client's certificate can add words to a reason."""

_DISTRUSTED: Final = (
    "the client refuses the server's certificate: it does not trust its authority, or it connected by a name that the"
    " certificate does not have. Give the client the authority's certificate (Kafka's clients: ssl.ca.location,"
    " ssl.truststore.location), and a name that is in the server's certificate (--advertise for Kafka's clients)"
)
_IN_THE_CLEAR: Final = "the client does not use TLS. Set security.protocol to SSL or SASL_SSL in a Kafka client"
_TOO_OLD: Final = (
    "the client and the server have no TLS version or cipher in common. The server accepts TLS 1.2 and newer"
)
_REMEDIES: Final = {
    "TLSV1_ALERT_UNKNOWN_CA": _DISTRUSTED,
    "SSLV3_ALERT_BAD_CERTIFICATE": _DISTRUSTED,
    "TLSV1_ALERT_BAD_CERTIFICATE": _DISTRUSTED,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _DISTRUSTED,
    "TLSV1_ALERT_CERTIFICATE_UNKNOWN": _DISTRUSTED,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": _DISTRUSTED,
    "TLSV1_ALERT_UNRECOGNIZED_NAME": _DISTRUSTED,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": (
        "the client refuses the server's certificate, because it has expired. Replace it by a renewed one; the"
        " server reads it within a second"
    ),
    "WRONG_VERSION_NUMBER": _IN_THE_CLEAR,
    "RECORD_LAYER_FAILURE": _IN_THE_CLEAR,
    "PACKET_LENGTH_TOO_LONG": _IN_THE_CLEAR,
    "UNKNOWN_PROTOCOL": _IN_THE_CLEAR,
    "HTTP_REQUEST": "the client uses HTTP. The HTTP interface has an address of its own (--http)",
    "HTTPS_PROXY_REQUEST": "the client uses HTTP. The HTTP interface has an address of its own (--http)",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": (
        "the client sent no certificate. With --tls-client-ca it needs one of that authority"
        " (ssl.certificate.location and ssl.key.location, ssl.keystore.location)"
    ),
    "CERTIFICATE_VERIFY_FAILED": (
        "the client's certificate is refused. It must be valid, and signed by the authority in --tls-client-ca"
    ),
    "UNSUPPORTED_PROTOCOL": _TOO_OLD,
    "VERSION_TOO_LOW": _TOO_OLD,
    "NO_SHARED_CIPHER": _TOO_OLD,
    "TLSV1_ALERT_PROTOCOL_VERSION": _TOO_OLD,
    "SSLV3_ALERT_HANDSHAKE_FAILURE": _TOO_OLD,
}
"""Remedies by OpenSSL's name for the reason."""


class Refusal(NamedTuple):
    """The reason of a failed handshake."""

    reason: str
    """In the words of the system or of OpenSSL; equal for all clients with the same problem."""
    remedy: str
    """Cause and remedy; empty if the client merely disconnected."""


def refusal_of(error: Exception, remedies: Mapping[str, str] = _REMEDIES) -> Refusal:
    """Return reason and remedy of a failed handshake. ``remedies`` are by OpenSSL's names for reasons."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Refusal(f"client certificate: {error.verify_message}", remedies["CERTIFICATE_VERIFY_FAILED"])
    if isinstance(error, ssl.SSLError) and error.reason:
        return Refusal(error.reason.lower().replace("_", " "), remedies.get(error.reason, ""))
    if isinstance(error, OSError) and error.strerror:
        return Refusal(error.strerror, "")
    return Refusal(str(error) or type(error).__name__, "")


class TlsRefusals:
    """Logs failed handshakes: each reason when it is new, and again after `AGAIN_S`. Thread-safe."""

    def __init__(
        self,
        logger: logging.Logger,
        again_s: float = AGAIN_S,
        clock: Callable[[], float] = time.monotonic,
        remedies: Mapping[str, str] | None = None,
    ) -> None:
        """Create a log; ``remedies`` replace some of the default ones, by OpenSSL's names for reasons."""
        self._logger = logger
        self._remedies = {**_REMEDIES, **(remedies or {})}
        self._again_s = again_s
        self._clock = clock
        self._mutex = fork_safety.lock(self, "_mutex")
        self._said: dict[str, tuple[float, int]] = {}
        """By reason: the time of the last log line, and the number of failed handshakes since."""

    def log_failure(self, host: str, error: Exception) -> None:
        """Count a failed handshake of a client, and log it if it is due."""
        found = refusal_of(error, self._remedies)
        now_s = self._clock()
        with self._mutex:
            reason = found.reason if found.reason in self._said or len(self._said) < _REASONS_MAX else ""
            last_s, count = self._said.get(reason, (float("-inf"), 0))
            is_due = now_s - last_s >= self._again_s
            self._said[reason] = (now_s, 0) if is_due else (last_s, count + 1)
        if not is_due:
            return
        more = f" ({count:,} more since the last report)" if count else ""
        why = f": {found.remedy}" if found.remedy else ""
        level = logging.WARNING if found.remedy else logging.INFO
        self._logger.log(
            level, "%s: TLS handshake failed: %s%s%s", host, found.reason, why, more,
            extra={"client_host": host, "count": count + 1},
        )  # fmt: skip
