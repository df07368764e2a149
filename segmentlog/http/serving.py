"""The door itself: a port, and a thread with an event loop that answers there."""

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
from segmentlog.http.admission import Admission, Place
from segmentlog.http.app import make_app
from segmentlog.http.connection_intake import Arrival
from segmentlog.http.console import Console
from segmentlog.http.context import Site
from segmentlog.http.http_connection import Connection
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
"""How long a door that closes waits for what is in flight."""
_REMEDIES: Final = {"HTTP_REQUEST": "the client speaks HTTP without TLS. Use https:// in its URL"}
"""For handshakes that fail, in place of what helps Kafka's clients."""
_ACCEPTED_AT_ONCE: Final = 8


class HttpServer:
    """Answers over HTTP until it is closed, from a thread of this process; the store stays its caller's.

    ``url`` is where, ``pages`` what people see there. Raises OSError for an address that is taken, `SecurityFileError`
    for files that cannot be used, `UnsafeListening` for an address beyond this machine that nothing protects.
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
        security = (security or Security()).with_store_files(store.path)
        check_http_security(host, security)
        tls = None
        if security.tls_cert is not None and security.tls_key is not None:
            tls = ServerTls(security.tls_cert, security.tls_key, security.tls_client_ca)
        accounts = None if security.users is None else Accounts(Users(security.users), settings.limits.log_ins)
        self._accounts = accounts
        authorizer = None if security.acls is None else Authorizer(security.acls)
        self.site = Site(store, settings, authorizer)
        self.pages = Console(self.site)
        app = make_app(self.pages, accounts, host=host, is_tls=tls is not None)
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
            raise SegmentlogError(f"the HTTP server did not start: {self._failure}") from self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            logger.exception("the HTTP server has ended")
        finally:
            self._server.is_up.set()

    async def _serve(self) -> None:
        """Answer, and look at the store meanwhile: whoever comes first need not wait for that."""
        looking = asyncio.create_task(asyncio.to_thread(self.pages.look_ahead))
        await self._server.serve(sockets=[self._socket])
        await looking

    def _forget_parent(self) -> None:
        """In a forked child, where no thread answers anybody: its copies must not outlive the parent's."""
        self._is_forked = True
        self._socket.close()
        for place in list(self._server.admission):
            # The socket itself: its transport's close would tell the other end, and the loop, which is not there.
            sock = getattr(place.transport.get_extra_info("socket"), "_sock", None)
            if sock is not None:
                sock.close()

    @property
    def is_well(self) -> bool:
        """Whether its thread lives."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Finish what is in flight, and answer nobody any more. Idempotent."""
        if self._is_closed or self._is_forked:
            return
        self._is_closed = self.site.is_closing = True
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        if self._accounts is not None:
            self._accounts.close()


def check_http_security(host: str, security: Security) -> None:
    """Raises `SecurityFileError` and `UnsafeListening`, each of which says what to do."""
    check_tls_files(security.tls_cert, security.tls_key, security.tls_client_ca)
    check_safe_for_passwords(host, security.tls_cert is not None, security.insecure)


class _Uvicorn(uvicorn.Server):
    """Says when it is up, leaves signals to the program, and counts connections before it knows what they are."""

    def __init__(self, config: uvicorn.Config, limits: HttpLimits, tls: ServerTls | None) -> None:
        super().__init__(config)
        self._limits = limits
        self._tls = tls
        self.admission = Admission(limits.connections)
        self.is_up = fork_safety.event(self, "is_up")

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """They are its caller's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but that each connection is an `Arrival` first."""

        def make(place: Place) -> Connection:
            return Connection(self.config, self.server_state, self._limits, place)

        refusals = TlsRefusals(logger, remedies=_REMEDIES)

        def arrive() -> asyncio.Protocol:
            return Arrival(self.admission, self._tls, refusals, self._limits.head_s, make)

        loop = asyncio.get_running_loop()
        self.servers = []
        for sock in sockets or ():
            # So many are accepted before the first of them is counted: each takes a descriptor.
            self.servers.append(await loop.create_server(arrive, sock=sock, backlog=_ACCEPTED_AT_ONCE))
            sock.listen(self.config.backlog)  # the kernel keeps as many as before
        self.started = True
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; who is in the handshake is not waited for."""
        known = {connection.place for connection in self.server_state.connections}  # type: ignore[union-attr]
        for place in list(self.admission):
            if place not in known:
                place.transport.abort()
        await super().shutdown(sockets)


def _config(app: ASGIApp, settings: HttpSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
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
