"""One worker: an open store and the connections to it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from segmentlog.security.acls import Authorizer, OpenAuthorizer
from segmentlog.security.listen_rules import mechanisms_for
from segmentlog.security.security_settings import Security
from segmentlog.security.tls import ServerTls
from segmentlog.security.users import Users
from segmentlog.server.broker import Broker
from segmentlog.server.dispatch import Dispatcher
from segmentlog.server.listener import ConnectionSecurity, KafkaListener
from segmentlog.server.sasl_session import SaslSession
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster

if TYPE_CHECKING:
    from segmentlog.store import LogStore


class KafkaWorker:
    """Serves a store on listening sockets. The caller closes the store."""

    def __init__(
        self,
        store: LogStore,
        sockets: Sequence[socket.socket],
        cluster: WorkerCluster,
        settings: ServerSettings,
        security: Security,
        host: str,
    ) -> None:
        authorizer = OpenAuthorizer() if security.acls is None else Authorizer(security.acls)
        self.broker = Broker(store, cluster, settings, authorizer)
        door, users = _connection_security(security, host)
        # Each of these calls reads its file again if the file has changed.
        self._refreshers: list[Callable[[], object]] = [authorizer.refresh]
        if users is not None:
            self._refreshers.append(users.version)
        if door.tls is not None:
            self._refreshers.append(door.tls.context)
        self.listener = KafkaListener(
            sockets,
            door,
            settings.limits,
            self.broker.buffers,
            Dispatcher(self.broker).handle,
            self.broker.meter,
            self.broker.purgatory.recheck_grown,
        )

    def start(self) -> None:
        """Start to serve, in threads."""
        self.listener.start()
        if not self.broker.cluster.is_standby:
            self.broker.resume_groups()

    def refresh(self) -> None:
        """Reload the files of users, ACLs and certificates if they changed, so that the change is logged even if no
        client connects.
        """
        for refresh in self._refreshers:
            refresh()

    def is_healthy(self, patience_s: float) -> bool:
        """Return whether the locks that requests need are free within ``patience_s`` seconds each."""
        return self.listener.is_healthy(patience_s) and self.broker.is_healthy(patience_s)

    def problems(self) -> list[str]:
        """Return the reasons why this worker is not ready for clients; an empty list if it is ready."""
        found = [] if self.listener.is_open else ["no connections are accepted"]
        store = self.broker.store
        if store.is_closed:
            return [*found, "the store is closed"]
        # Failed shipping is no reason: it is retried, and clients may connect meanwhile. With acks_all=shipped, produce
        # requests wait for it.
        problems = {name: why for name, why in store.health().items() if name.partition(" ")[0] != "ship"}
        return found + [f"{name}: {why}" for name, why in problems.items()]

    def close(self, timeout_s: float) -> None:
        """Finish requests in progress, and close all connections."""
        self.broker.stop_waiting()
        self.listener.close(timeout_s)
        self.broker.close()


def _connection_security(security: Security, host: str) -> tuple[ConnectionSecurity, Users | None]:
    tls = None
    if security.tls_cert is not None and security.tls_key is not None:
        tls = ServerTls(security.tls_cert, security.tls_key, security.tls_client_ca)
    if security.users is None:
        return ConnectionSecurity(tls), None
    mechanisms = mechanisms_for(host, tls is not None, security.insecure)
    users = Users(security.users)
    return ConnectionSecurity(tls, partial(SaslSession, users, mechanisms)), users
