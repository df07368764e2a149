"""Log failed TLS handshakes: each reason with its remedy at its first occurrence, and then at most every 10 minutes.

A client whose handshake fails retries at once and forever, so a log line for each attempt would fill the disk.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from segmentlog.storage import fork_safety

AGAIN_S: Final = 600.0
"""Minimum time between two log lines of the same reason. The later line has the number of handshakes in between."""
_REASONS_MAX: Final = 64
"""Largest number of reasons that are counted separately. A client's certificate may add its own text to a reason."""

_DISTRUSTED: Final = (
    "the client rejects the server's certificate: it does not trust its authority, or it connected to a name that the"
    " certificate does not contain. Give the client the authority's certificate (Kafka's clients: ssl.ca.location,"
    " ssl.truststore.location), and a name that is in the server's certificate (--advertise for Kafka's clients)"
)
_IN_THE_CLEAR: Final = "the client does not speak TLS. Set security.protocol to SSL or SASL_SSL in a Kafka client"
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
        "the client rejects the server's certificate, because it has expired. Replace the file with a renewed"
        " certificate; the server reads it within a second"
    ),
    "WRONG_VERSION_NUMBER": _IN_THE_CLEAR,
    "RECORD_LAYER_FAILURE": _IN_THE_CLEAR,
    "PACKET_LENGTH_TOO_LONG": _IN_THE_CLEAR,
    "UNKNOWN_PROTOCOL": _IN_THE_CLEAR,
    "HTTP_REQUEST": "the client speaks HTTP. The HTTP interface has an address of its own (--http)",
    "HTTPS_PROXY_REQUEST": "the client speaks HTTP. The HTTP interface has an address of its own (--http)",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": (
        "the client has no certificate. With --tls-client-ca it needs one of that authority"
        " (ssl.certificate.location and ssl.key.location, ssl.keystore.location)"
    ),
    "CERTIFICATE_VERIFY_FAILED": (
        "the client's certificate is rejected. It must be signed by an authority in --tls-client-ca, and still valid"
    ),
    "UNSUPPORTED_PROTOCOL": _TOO_OLD,
    "VERSION_TOO_LOW": _TOO_OLD,
    "NO_SHARED_CIPHER": _TOO_OLD,
    "TLSV1_ALERT_PROTOCOL_VERSION": _TOO_OLD,
    "SSLV3_ALERT_HANDSHAKE_FAILURE": _TOO_OLD,
}
"""Remedies by OpenSSL's names of reasons."""


class Refusal(NamedTuple):
    """Reason of a failed handshake, with a remedy."""

    reason: str
    """Text of the operating system or OpenSSL; the same for all clients whose handshake fails for this reason."""
    remedy: str
    """Cause and remedy; empty if the client merely disconnected."""


def refusal_of(error: Exception, remedies: Mapping[str, str] = _REMEDIES) -> Refusal:
    """Return reason and remedy of a handshake's exception. ``remedies`` has OpenSSL's names of reasons as keys."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Refusal(f"client certificate: {error.verify_message}", remedies["CERTIFICATE_VERIFY_FAILED"])
    if isinstance(error, ssl.SSLError) and error.reason:
        return Refusal(error.reason.lower().replace("_", " "), remedies.get(error.reason, ""))
    if isinstance(error, OSError) and error.strerror:
        return Refusal(error.strerror, "")
    return Refusal(str(error) or type(error).__name__, "")


class TlsRefusals:
    """Logs failed handshakes: each reason when it first occurs, and again after `AGAIN_S`. Thread-safe."""

    def __init__(
        self,
        logger: logging.Logger,
        again_s: float = AGAIN_S,
        clock: Callable[[], float] = time.monotonic,
        remedies: Mapping[str, str] | None = None,
    ) -> None:
        """Use ``remedies`` instead of the default ones of the same reasons; its keys are OpenSSL's names."""
        self._logger = logger
        self._remedies = {**_REMEDIES, **(remedies or {})}
        self._again_s = again_s
        self._clock = clock
        self._mutex = fork_safety.lock(self, "_mutex")
        self._logged: dict[str, tuple[float, int]] = {}
        """For each reason: time of its last log line, and number of failed handshakes since."""

    def report(self, host: str, error: Exception) -> None:
        """Count a failed handshake of a client. Log it, unless its reason was already logged within the interval."""
        found = refusal_of(error, self._remedies)
        now_s = self._clock()
        with self._mutex:
            reason = found.reason if found.reason in self._logged or len(self._logged) < _REASONS_MAX else ""
            last_s, count = self._logged.get(reason, (float("-inf"), 0))
            is_due = now_s - last_s >= self._again_s
            self._logged[reason] = (now_s, 0) if is_due else (last_s, count + 1)
        if not is_due:
            return
        more = f" ({count:,} more since the last such line)" if count else ""
        why = f": {found.remedy}" if found.remedy else ""
        level = logging.WARNING if found.remedy else logging.INFO
        self._logger.log(
            level, "%s: TLS handshake failed: %s%s%s", host, found.reason, why, more,
            extra={"client_host": host, "count": count + 1},
        )  # fmt: skip
