"""Ask the server of a store's owner whether it is alive: one ApiVersions request to each of its ports.

The request is answered before authentication. With TLS the certificate is not verified: whoever can forge an answer can
only keep this standby from taking over, as by cutting the connection of the owner to the object store.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from segmentlog.format.manifest import Manifest
from segmentlog.format.server_file import ServerNode
from segmentlog.policy.takeover_decision import ProbeResult
from segmentlog.security.security_settings import Security
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.framing import decode_response_header, frame_request
from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest, ApiVersionsResponse
from segmentlog.server.codec.primitives import MalformedMessage
from segmentlog.server.handlers.api_versions import OWNER_PROBE, owner_feature

TIMEOUT_S: Final = 1.0
_API_VERSIONS: Final = 18
_VERSION: Final = 3
_ANSWER_MAX_BYTES: Final = 1 << 16
_THREADS_MAX: Final = 16


class OwnerProbe:
    """Probes the nodes of an owner, all at the same time. Use it in one thread, and close it."""

    def __init__(self, security: Security, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._tls = None if security.tls_cert is None else _client_context(security)
        self._pool = ThreadPoolExecutor(_THREADS_MAX, "segmentlog-probe")

    def __call__(self, manifest: Manifest) -> Sequence[ProbeResult]:
        """Return what a connection to each node of the manifest's owner showed, after ``timeout_s`` at the latest."""
        owner = manifest.owner
        return list(self._pool.map(lambda node: self._probe(node, owner.id), owner.nodes))

    def _probe(self, node: ServerNode, owner_id: str) -> ProbeResult:
        ends_s = time.monotonic() + self._timeout_s
        try:
            with socket.create_connection((node.host, node.port), self._timeout_s) as plain:
                if self._tls is None:
                    return _ask(plain, owner_id, ends_s)
                with self._tls.wrap_socket(plain, server_hostname=node.host) as sock:
                    return _ask(sock, owner_id, ends_s)
        except ConnectionRefusedError:
            return ProbeResult.REFUSED
        except (OSError, MalformedMessage, ValueError):  # ssl.SSLError is an OSError
            return ProbeResult.SILENT

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


def _client_context(security: Security) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if security.tls_cert is not None and security.tls_client_ca is not None:
        context.load_cert_chain(security.tls_cert, security.tls_key)  # the owner asks its clients for a certificate
    return context


def _ask(sock: socket.socket, owner_id: str, ends_s: float) -> ProbeResult:
    request = ApiVersionsRequest(client_software_name=OWNER_PROBE, client_software_version="1")
    api = APIS[_API_VERSIONS]
    body = api.codec.encode_request(request, _VERSION)
    sock.sendall(b"".join(frame_request(api, _VERSION, 1, OWNER_PROBE, body)))
    size_bytes = int.from_bytes(_receive(sock, 4, ends_s), "big")
    if not 4 <= size_bytes <= _ANSWER_MAX_BYTES:
        return ProbeResult.SILENT
    answer = memoryview(_receive(sock, size_bytes, ends_s))
    _, at = decode_response_header(answer, api, _VERSION)
    response: ApiVersionsResponse = api.codec.decode_response(answer, at, _VERSION)
    is_owner = any(feature.name == owner_feature(owner_id) for feature in response.supported_features)
    return ProbeResult.ALIVE if is_owner else ProbeResult.SILENT


def _receive(sock: socket.socket, size_bytes: int, ends_s: float) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        sock.settimeout(max(ends_s - time.monotonic(), 0.001))
        data = sock.recv(size_bytes - len(received))
        if not data:
            raise ConnectionResetError
        received += data
    return bytes(received)
