"""The door itself: a port, and a thread with an event loop that answers there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from segmentlog.errors import SegmentlogError
from segmentlog.http.accounts import Accounts
from segmentlog.http.app import make_app
from segmentlog.http.connection import Connection
from segmentlog.http.console import Console
from segmentlog.http.settings import HttpLimits, HttpSettings
from segmentlog.http.site import Site
from segmentlog.security.acls import Authorizer
from segmentlog.security.listening import check_safe_for_passwords, check_tls_files, listen
from segmentlog.security.settings import Security
from segmentlog.security.tls import ServerTls
from segmentlog.security.users import Users
from segmentlog.storage import forks

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from segmentlog.store import LogStore

logger = logging.getLogger("segmentlog.http")

FINISH_S: Final = 5
"""How long a door that closes waits for what is in flight."""


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
        security = (security or Security()).with_those_of(store.path)
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
        self._server = _Uvicorn(_config(app, settings, tls), settings.limits)
        name, real_port = host, self._socket.getsockname()[1]
        if host in ("0.0.0.0", "::"):
            name = socket.gethostname()
        self.address = f"[{name}]:{real_port}" if ":" in name else f"{name}:{real_port}"
        self.url = f"http{'s' * (tls is not None)}://{self.address}"
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="segmentlog-http", daemon=True)
        forks.on_fork(self, "_forget_parent")
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
        for connection in list(self._server.server_state.connections):
            # The socket itself: its transport's close would tell the other end, and the loop, which is not there.
            sock = getattr(connection.transport.get_extra_info("socket"), "_sock", None)
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
    """Says when it is up, and leaves signals to the program."""

    def __init__(self, config: uvicorn.Config, limits: HttpLimits) -> None:
        super().__init__(config)
        self._limits = limits
        self.is_up = forks.event(self, "is_up")

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """They are its caller's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but that who begins TLS has to come to its end."""
        limits = self._limits
        config, state = self.config, self.server_state

        def make() -> asyncio.Protocol:
            return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {} if config.ssl is None else {"ssl_handshake_timeout": limits.head_s}
        self.servers = [
            await loop.create_server(make, sock=sock, ssl=config.ssl, backlog=config.backlog, **options)
            for sock in sockets or ()
        ]
        self.started = True
        self.is_up.set()


def _config(app: ASGIApp, settings: HttpSettings, tls: ServerTls | None) -> uvicorn.Config:
    limits = settings.limits
    protocol = type("Connection", (Connection,), {"limits": limits})
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=limits.connections,
        timeout_keep_alive=int(limits.idle_s),
        timeout_graceful_shutdown=FINISH_S,
        ssl_context_factory=None if tls is None else lambda config, default: _renewed(tls),
    )


def _renewed(tls: ServerTls) -> ssl.SSLContext:
    """A context that hands each connection over to the one of the files as they are then."""

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = tls.context()

    context = tls.context()
    context.sni_callback = choose
    return context
