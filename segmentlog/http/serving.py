"""The HTTP server: a listening socket, and a thread that runs the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from segmentlog.errors import SegmentlogError
from segmentlog.http.accounts import Accounts
from segmentlog.http.admission import Admission, ConnectionSlot
from segmentlog.http.app import make_app
from segmentlog.http.connection_intake import ConnectionIntake
from segmentlog.http.console import Console
from segmentlog.http.context import HttpContext
from segmentlog.http.http_connection import HttpConnection
from segmentlog.http.settings import HttpLimits, HttpSettings
from segmentlog.security.acls import Authorizer
from segmentlog.security.listen_rules import check_safe_for_passwords, check_tls_files, listen
from segmentlog.security.security_settings import Security
from segmentlog.security.tls import ServerTls
from segmentlog.security.tls_refusals import TlsRefusals
from segmentlog.security.users import Users
from segmentlog.storage import fork_safety

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from segmentlog.store import LogStore

logger = logging.getLogger("segmentlog.http")

FINISH_S: Final = 5
"""Time in seconds that a closing server waits for running requests."""
_SAMPLE_S: Final = 5.0
"""Interval at which the server samples records/s of all topics while the console is in use."""
_REMEDIES: Final = {"HTTP_REQUEST": "the client speaks HTTP without TLS. Use https:// in its URL"}
"""Remedies for failed TLS handshakes, instead of those for Kafka clients."""
_ACCEPTED_AT_ONCE: Final = 8


class HttpServer:
    """Serves HTTP from a thread of this process until it is closed. The caller closes the store.

    ``url`` is the address for clients, ``console`` the console's state.

    Raises OSError if the address is in use, `SecurityFileError` for unusable certificate or user files,
    `UnsafeListening` for a network address without protection.
    """

    def __init__(
        self,
        store: LogStore,
        host: str,
        port: int,
        *,
        settings: HttpSettings | None = None,
        security: Security | None = None,
        sock: socket.socket | None = None,
    ) -> None:
        settings = settings or HttpSettings()
        security = (security or Security()).completed_from_store(store.path)
        check_http_security(host, security)
        tls = None
        if security.tls_cert is not None and security.tls_key is not None:
            tls = ServerTls(security.tls_cert, security.tls_key, security.tls_client_ca)
        accounts = None if security.users is None else Accounts(Users(security.users), settings.limits.log_ins)
        self._accounts = accounts
        authorizer = None if security.acls is None else Authorizer(security.acls)
        self.context = HttpContext(store, settings, authorizer)
        self.console = Console(self.context)
        app = make_app(self.console, accounts, host=host, is_tls=tls is not None)
        self.store = store
        self._is_closed = self._is_forked = False
        self._socket = sock or listen(host, port)
        self._server = _Uvicorn(_config(app, settings), settings.limits, tls)
        name, real_port = host, self._socket.getsockname()[1]
        if host in ("0.0.0.0", "::"):
            name = socket.gethostname()
        self.address = f"[{name}]:{real_port}" if ":" in name else f"{name}:{real_port}"
        self.url = f"http{'s' * (tls is not None)}://{self.address}"
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="segmentlog-http", daemon=True)
        fork_safety.on_fork(self, "_forget_parent")
        self._thread.start()
        self._server.is_up.wait()
        self._check_started()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<HttpServer {self.url} of {self.store.path}>"

    def _check_started(self) -> None:
        if self._failure is not None:
            self._socket.close()
            raise SegmentlogError(f"HTTP server at {self.address}: cannot start: {self._failure}") from self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            logger.exception("the HTTP server stopped because of an error")
        finally:
            self._server.is_up.set()

    async def _serve(self) -> None:
        refreshing = asyncio.create_task(self._refresh_overviews())
        await self._server.serve(sockets=[self._socket])
        refreshing.cancel()

    async def _refresh_overviews(self) -> None:
        """Read the first overview, so that the first page need not wait; then sample rates while pages are in use."""
        await asyncio.to_thread(self.console.refresh_overview)
        while True:
            await asyncio.sleep(_SAMPLE_S)
            if self.console.overviews.is_in_use:
                await asyncio.to_thread(self.console.refresh_overview)

    def _close_in_child(self) -> None:
        """Close the inherited sockets in a forked child: it has no thread that serves them, and they would keep ports
        open."""
        self._is_forked = True
        self._socket.close()
        for slot in list(self._server.admission):
            # Close only the descriptor: closing the transport would notify the client and use the parent's loop.
            sock = getattr(slot.transport.get_extra_info("socket"), "_sock", None)
            if sock is not None:
                sock.close()

    @property
    def is_alive(self) -> bool:
        """Whether the server's thread is running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Finish running requests and stop the server. Idempotent."""
        if self._is_closed or self._is_forked:
            return
        self._is_closed = self.context.is_closing = True
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        if self._accounts is not None:
            self._accounts.close()


def check_http_security(host: str, security: Security) -> None:
    """Raise `SecurityFileError` or `UnsafeListening`, each with its remedy, for an unsafe configuration."""
    check_tls_files(security.tls_cert, security.tls_key, security.tls_client_ca)
    check_safe_for_passwords(host, security.tls_cert is not None, security.insecure)


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that reports when it is ready, installs no signal handlers, and counts connections at once."""

    def __init__(self, config: uvicorn.Config, limits: HttpLimits, tls: ServerTls | None) -> None:
        super().__init__(config)
        self._limits = limits
        self._tls = tls
        self.admission = Admission(limits.connections)
        self.is_up = fork_safety.event(self, "is_up")

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Install no signal handlers: signals belong to the caller."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen as uvicorn does, except that each connection begins as a `ConnectionIntake`."""

        def make_connection(slot: ConnectionSlot) -> HttpConnection:
            return HttpConnection(self.config, self.server_state, self._limits, slot)

        refusals = TlsRefusals(logger, remedies=_REMEDIES)

        def add() -> asyncio.Protocol:
            return ConnectionIntake(self.admission, self._tls, refusals, self._limits.head_s, make_connection)

        loop = asyncio.get_running_loop()
        self.servers = []
        for sock in sockets or ():
            # asyncio accepts up to ``backlog`` connections before it calls `add`: each takes a descriptor.
            self.servers.append(await loop.create_server(add, sock=sock, backlog=_ACCEPTED_AT_ONCE))
            sock.listen(self.config.backlog)  # the kernel's queue stays as long as uvicorn's default
        self.started = True
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop as uvicorn does, without waiting for connections in the TLS handshake."""
        established = {connection.slot for connection in self.server_state.connections}  # type: ignore[union-attr]
        for slot in list(self.admission):
            if slot not in established:
                slot.transport.abort()
        await super().shutdown(sockets)


def _config(app: ASGIApp, settings: HttpSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(settings.limits.idle_s),
        timeout_graceful_shutdown=FINISH_S,
    )
