"""One worker: a store that is open, and the connections to it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from segmentlog.server.broker import Broker
from segmentlog.server.cluster import Cluster
from segmentlog.server.dispatch import Dispatcher
from segmentlog.server.listener import Door, Listener
from segmentlog.server.security.acls import Authorizer, OpenAuthorizer
from segmentlog.server.security.listening import mechanisms_for
from segmentlog.server.security.sasl import SaslSession
from segmentlog.server.security.tls import ServerTls
from segmentlog.server.security.users import Users
from segmentlog.server.settings import ServerSettings

if TYPE_CHECKING:
    from segmentlog.store import LogStore

FINISH_S: Final = 5.0
"""How long a worker that stops waits for what is in flight."""


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """Files that say who may come in and what they may do; None: whoever reaches us, and everything."""

    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    users: str | None = None
    acls: str | None = None
    insecure: bool = False


class Worker:
    """Serves a store on sockets that listen. The store stays its caller's."""

    def __init__(
        self,
        store: LogStore,
        sockets: Sequence[socket.socket],
        cluster: Cluster,
        settings: ServerSettings,
        security: Security,
        host: str,
    ) -> None:
        authorizer = OpenAuthorizer() if security.acls is None else Authorizer(security.acls)
        self.broker = Broker(store, cluster, settings, authorizer)
        self.listener = Listener(
            sockets,
            _door(security, host),
            settings.limits,
            self.broker.buffers,
            Dispatcher(self.broker).handle,
        )

    def start(self) -> None:
        """Serve from now on, in threads."""
        self.listener.start()

    def close(self, timeout_s: float = FINISH_S) -> None:
        """Finish what is in flight, and leave."""
        self.broker.stop_waiting()
        self.listener.close(timeout_s)
        self.broker.close()


def _door(security: Security, host: str) -> Door:
    tls = None
    if security.tls_cert is not None and security.tls_key is not None:
        tls = ServerTls(security.tls_cert, security.tls_key, security.tls_client_ca)
    if security.users is None:
        return Door(tls)
    mechanisms = mechanisms_for(host, tls is not None, security.insecure)
    return Door(tls, partial(SaslSession, Users(security.users), mechanisms))
