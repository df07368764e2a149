"""Serve metrics and health of a worker over HTTP: ``/metrics``, ``/healthz``, ``/readyz``.

For Prometheus and for orchestrators, without authentication. Responses contain names of topics and groups, but no
record data. So the server listens on loopback by default. It rejects requests for foreign host names, and requests from
pages of other sites (`security.cross_site`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Final

from segmentlog import __version__
from segmentlog.errors import SegmentlogError
from segmentlog.security.address_limits import ByAddress
from segmentlog.security.cross_site import is_cross_site, is_own_name, names_of_machine
from segmentlog.server.telemetry.store_metrics import StoreTelemetry
from segmentlog.storage import fork_safety

if TYPE_CHECKING:
    from email.message import Message

    from segmentlog.server.worker import KafkaWorker

logger = logging.getLogger("segmentlog.server")

_HEAD_BYTES_MAX: Final = 8 << 10
_PATIENCE_S: Final = 5.0
"""Time for a request to arrive, and for the client to read the response each time that the socket buffer is full."""
_CONNECTIONS_MAX: Final = 8
"""Maximum number of connections. Above it, the server closes the oldest of the address that has the most. Prometheus
sends a request about every ten seconds."""
_THREADS_MAX: Final = 2 * _CONNECTIONS_MAX
"""Maximum number of threads. It includes threads that have not ended yet after their connection was closed."""
_NO_THREAD_S: Final = 1.0
"""Time to wait for one of these threads to end."""
_LOCK_PATIENCE_S: Final = 1.0
"""Time for which a lock that requests need may be held before the process counts as stuck."""
_TEXT: Final = "text/plain; charset=utf-8"
_HEALTH: Final = frozenset(("/healthz", "/readyz"))
_METRICS_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """HTTP server of the metrics, in threads, until it is closed. With ``is_first`` it also has the metrics of the
    whole store.

    The caller must have checked that the address is safe (`security.listen_rules.check_safe_for_metrics`). Raise
    OSError for an address in use, and SegmentlogError if prometheus-client is missing.
    """

    def __init__(self, worker: KafkaWorker, host: str, port: int, is_first: bool) -> None:
        try:
            # Imported on demand: it takes 0.1 s.
            from segmentlog.server.telemetry.worker_metrics import WorkerTelemetry
        except ImportError as error:
            needed = "metrics need prometheus-client: pip install '.[server]' in a clone of segmentlog"
            raise SegmentlogError(f"{needed} ({error})") from None
        self._worker = worker
        self._own = WorkerTelemetry(worker, __version__)
        self._of_store = StoreTelemetry(worker.broker.store, worker.broker.clock) if is_first else None
        advertised = [node.host for node in worker.broker.cluster.nodes]
        self._names = names_of_machine(host, (*worker.broker.settings.allowed_hosts, *advertised))
        try:
            self._http = _Http((host, port), self)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen: {error.strerror or error}", f"{host}:{port}") from None
        self.host = host
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, name="segmentlog-metrics", daemon=True
        )
        self._thread.start()
        self._is_forked = False
        fork_safety.on_fork(self, "_abandon_copies")

    def _abandon_copies(self) -> None:
        """Close the sockets in a forked child: it has no threads for them, and must not keep the connections open."""
        self._is_forked = True
        self._http.abandon()

    @property
    def address(self) -> str:
        """HOST:PORT of the endpoint."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def close(self) -> None:
        """Stop serving."""
        if self._is_forked:
            return
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    # ------------------------------------------------------------ responses

    def refusal(self, path: str, headers: Message) -> tuple[HTTPStatus, str, str] | None:
        """Return the response that rejects the request if a web page may have made a browser send it, else None.

        Requests for health may use any host name, because load balancers use names of their own. With a foreign name,
        the response omits why the server is unhealthy.
        """
        host, is_misnamed = headers.get("Host"), False
        if host is not None and not is_own_name(host, self._names):
            if path not in _HEALTH:
                why = f"{host!r} is not a name of this machine; add it with --allowed-host\n"
                return HTTPStatus.MISDIRECTED_REQUEST, _TEXT, why
            is_misnamed = True
        if is_cross_site(headers.get("Sec-Fetch-Site"), headers.get("Origin"), host or ""):
            return HTTPStatus.FORBIDDEN, _TEXT, "pages of other sites may not request this\n"
        if is_misnamed and (verdict := self.answer(path)[0]) is not HTTPStatus.OK:
            return verdict, _TEXT, "not healthy; request this by a name of this machine to see the reason\n"
        return None

    def answer(self, path: str) -> tuple[HTTPStatus, str, str]:
        """Return (status, content type, body) for a path."""
        if path == "/metrics":
            text = self._own.text()
            return HTTPStatus.OK, _METRICS_TEXT, text + (self._of_store.text() if self._of_store is not None else "")
        if path == "/healthz":
            return _verdict(
                [] if self._worker.is_healthy(_LOCK_PATIENCE_S) else ["a lock that every request needs is stuck"]
            )
        if path == "/readyz":
            return _verdict(self._worker.problems())
        return HTTPStatus.NOT_FOUND, _TEXT, "not found; try /metrics, /healthz or /readyz\n"


def _verdict(problems: list[str]) -> tuple[HTTPStatus, str, str]:
    if not problems:
        return HTTPStatus.OK, _TEXT, "ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, "".join(f"{problem}\n" for problem in problems)


class _Http(ThreadingHTTPServer):
    daemon_threads = False  # `server_close` waits for these threads: otherwise a scrape could read a closed store
    allow_reuse_address = True
    request_queue_size = 128  # with the library's 5, a connection of a burst waits for a second or more

    def __init__(self, address: tuple[str, int], owner: MetricsServer) -> None:
        self.owner = owner
        self._threads_left = threading.BoundedSemaphore(_THREADS_MAX)
        self._mutex = threading.Lock()
        self._open: ByAddress[socket.socket] = ByAddress()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Skip HTTPServer.server_bind, which looks the machine's name up in DNS.
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread. Above the limit of connections, the oldest one is closed first."""
        with self._mutex:
            self._open.add(request, str(client_address[0]))
            oldest = self._open.oldest() if len(self._open) > _CONNECTIONS_MAX else None
            if oldest is not None:
                self._open.discard(oldest)
                _shut_down(oldest)  # its thread then ends and closes it
        if not self._threads_left.acquire(timeout=_NO_THREAD_S):
            self._discard(request)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._discard(request)
            self._threads_left.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer in this connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._discard(request)
            self._threads_left.release()

    def _discard(self, request: socket.socket) -> None:
        with self._mutex:
            self._open.discard(request)

    def server_close(self) -> None:
        """Close all connections, and wait for their threads."""
        with self._mutex:
            for connection in self._open:
                _shut_down(connection)
        super().server_close()

    def abandon(self) -> None:
        """Close the copies of the sockets in a forked child, without sending anything."""
        self.socket.close()
        for connection in list(self._open):
            connection.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a client that disconnects at debug level: it is not an error of the server."""
        logger.debug("%s: metrics: closed", client_address[0], exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers one GET request. It uses only the path and the host headers of the request."""

    server: _Http
    protocol_version = "HTTP/1.0"
    server_version = f"segmentlog/{__version__}"
    sys_version = ""

    def setup(self) -> None:
        """Read the request head within limits of time and size; the library has no such limits."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(io.BytesIO(_head_of(self.connection)))
        self.connection.settimeout(_PATIENCE_S)

    def do_GET(self) -> None:
        """Answer a GET; an unexpected error is logged and sent as status 500, which Prometheus shows as a failed
        scrape.
        """
        try:
            owner = self.server.owner
            path = self.path.partition("?")[0]
            status, kind, text = owner.refusal(path, self.headers) or owner.answer(path)
        except Exception as error:
            logger.exception("metrics request failed")
            status, kind, text = HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, f"{type(error).__name__}: {error}\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log each scrape at debug level only."""
        logger.debug("%s: metrics: %s", self.client_address[0], format % args)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _head_of(connection: socket.socket) -> bytes:
    """Return the request up to the empty line, or the part that arrived within the limits of time and size."""
    ends_s = time.monotonic() + _PATIENCE_S
    head = b""
    with contextlib.suppress(OSError):
        while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES_MAX:
            connection.settimeout(max(ends_s - time.monotonic(), 0.001))
            block = connection.recv(_HEAD_BYTES_MAX - len(head))
            if not block:
                break
            head += block
        return head
    return b""
