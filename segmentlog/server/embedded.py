"""Run a Kafka server in threads of this process, for programs and tests."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from segmentlog.security.listen_rules import check_safe, check_safe_to_report, check_tls_files, listen, parse_address
from segmentlog.security.security_settings import Security
from segmentlog.server.addresses import ServerLock, cluster_id_of, warn_uncovered_names, worker_nodes
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.supervisor import FINISH_S
from segmentlog.server.worker import KafkaWorker
from segmentlog.server.worker_cluster import WorkerCluster

if TYPE_CHECKING:
    from segmentlog.server.metrics import MetricsServer
    from segmentlog.store import LogStore


class Sidecar(Protocol):
    """Another server for the same store in this process, such as HTTP. Neither server imports the other."""

    url: str

    def close(self) -> None:
        """Stop serving."""


class Server:
    """A Kafka server with one worker, in threads of this process. Close it, or use it in a ``with`` statement.

    Pass ``bootstrap_servers`` to Kafka clients.
    """

    def __init__(
        self,
        store: LogStore,
        *,
        host: str,
        port: int,
        advertise: str | None,
        settings: ServerSettings,
        security: Security,
        owns_store: bool,
        metrics: str | None = None,
        open_http: Callable[[LogStore], Sidecar] | None = None,
    ) -> None:
        security = security.completed_from_store(store.path)
        check_tls_files(security.tls_cert, security.tls_key, security.tls_client_ca)
        check_safe(host, security.tls_cert is not None, security.users is not None, security.insecure)
        advertised = None if advertise is None else parse_address(advertise, option="advertise")
        metrics_at = None if metrics is None else parse_address(metrics, option="metrics")
        if metrics_at is not None:
            check_safe_to_report(metrics_at[0], security.insecure)
        self.store = store
        self._owns_store = owns_store
        self._is_closed = False
        self._metrics: MetricsServer | None = None
        self._http: Sidecar | None = None
        self._lock = ServerLock(store.path)
        sockets: list[socket.socket] = []
        worker: KafkaWorker | None = None
        try:
            sockets.append(listen(host, port))
            nodes, self.bootstrap_servers = worker_nodes(host, sockets, advertised)
            warn_uncovered_names(security.tls_cert, nodes)
            cluster = WorkerCluster(cluster_id_of(store.store_id), nodes, nodes[0].node_id)
            worker = self.worker = KafkaWorker(store, sockets, cluster, settings, security, host)
            if metrics_at is not None:
                from segmentlog.server.metrics import MetricsServer

                self._metrics = MetricsServer(self.worker, *metrics_at, is_first=True)
            if open_http is not None:
                self._http = open_http(store)
            self._lock.write_addresses(self.bootstrap_servers, nodes)
            self.worker.start()
        except BaseException:
            if self._http is not None:
                self._http.close()
            if self._metrics is not None:
                self._metrics.close()
            if worker is not None:
                worker.close(0)
            for sock in sockets:
                sock.close()
            self._lock.release()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server {self.bootstrap_servers} of {self.store.path}>"

    @property
    def metrics_address(self) -> str | None:
        """HOST:PORT of the metrics endpoint; None if metrics were not requested."""
        return None if self._metrics is None else self._metrics.address

    @property
    def http_url(self) -> str | None:
        """``http://HOST:PORT`` of the HTTP server; None if HTTP was not requested."""
        return None if self._http is None else self._http.url

    def close(self, timeout_s: float = FINISH_S) -> None:
        """Finish requests in progress, close all connections, and close the store if the server opened it.

        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.worker.close(timeout_s)
        finally:
            try:
                if self._http is not None:
                    self._http.close()
                if self._metrics is not None:
                    self._metrics.close()
                if self._owns_store:
                    self.store.close()
            finally:
                self._lock.release()
