"""Ask the server of a store's owner whether it is alive: one ApiVersions request to each of its ports.

The server answers the request before authentication, also at its limit of connections (`listener`). With TLS the probe
does not verify the server's certificate. A forged answer needs the owner's id from the manifest, and can only keep this
standby from taking over.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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

CYCLE_S: Final = 1.0
"""Longest time that one call of a probe takes."""
TIMEOUT_S: Final = 4.0
"""Time for an answer: half of the silence after which a standby takes over by default. A call does not wait that long.
A later call reads the answer, so that a slow owner does not count as silent."""
_FIRST_S: Final = 0.25
"""Time for the node that answered last time, before all others are probed, too. A healthy owner then gets one
connection each cycle, and not one for each of its workers."""
_API_VERSIONS: Final = 18
_VERSION: Final = 3
_ANSWER_MAX_BYTES: Final = 1 << 16
_THREADS_MAX: Final = 64
"""As many as a server can have workers: all are probed at the same time."""


class OwnerProbe:
    """Probes the nodes of an owner, all at the same time. Use it in one thread, and close it."""

    def __init__(self, security: Security, *, cycle_s: float = CYCLE_S, timeout_s: float = TIMEOUT_S) -> None:
        self._cycle_s = cycle_s
        self._timeout_s = timeout_s
        self._tls = None if security.tls_cert is None else _client_context(security)
        self._pool = ThreadPoolExecutor(_THREADS_MAX, "segmentlog-probe")
        self._running: dict[tuple[ServerNode, str], Future[ProbeResult]] = {}
        """Probes that had not ended when the last call returned. The search for a host name has no time limit."""
        self._answered: ServerNode | None = None

    def __call__(self, manifest: Manifest) -> Sequence[ProbeResult]:
        """Return what a connection to each node of the manifest's owner showed, after ``cycle_s`` at the latest.

        If a node answers as the owner, the others may be left out.
        """
        ends_s = time.monotonic() + self._cycle_s
        nodes, owner_id = manifest.owner.nodes, manifest.owner.id
        running, self._running = self._running, {}
        probes: dict[ServerNode, Future[ProbeResult]] = {}

        def start(node: ServerNode) -> None:
            if node not in probes:
                probe = running.get((node, owner_id)) or self._pool.submit(self._probe, node, owner_id)
                probes[node] = probe

        start(self._answered if self._answered in nodes else nodes[0])
        is_alive = _is_any_alive(probes.values(), time.monotonic() + _FIRST_S)
        if not is_alive:
            for node in nodes:
                start(node)
            is_alive = _is_any_alive(probes.values(), ends_s)
        self._running = {(node, owner_id): probe for node, probe in probes.items() if not probe.done()}
        if is_alive:
            self._answered = next(node for node, probe in probes.items() if _result_of(probe) is ProbeResult.ALIVE)
        return [_result_of(probe) for probe in probes.values()]

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
        """Start no more probes. Threads that search for a host name may outlast the call."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _result_of(probe: Future[ProbeResult]) -> ProbeResult:
    return probe.result() if probe.done() else ProbeResult.SILENT


def _is_any_alive(probes: Iterable[Future[ProbeResult]], ends_s: float) -> bool:
    """Wait until ``ends_s`` at the latest. Return whether a node has answered as the owner."""
    left = set(probes)
    while left:
        done, left = wait(left, max(ends_s - time.monotonic(), 0), FIRST_COMPLETED)
        if any(probe.result() is ProbeResult.ALIVE for probe in done):
            return True
        if not done:
            return False
    return False


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
