"""Main function of a worker process: open the store, serve it, and report status and metrics."""

from __future__ import annotations

import socket
from typing import Final

import segmentlog
from segmentlog.server.addresses import cluster_id_of
from segmentlog.server.machine_cluster import owner_cluster
from segmentlog.server.supervisor import FINISH_S, ServerPlan
from segmentlog.server.worker import KafkaWorker
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.server.worker_lifecycle import send_heartbeats, stop_with_supervisor

_LOCKED_OUT_S: Final = 10.0


def run(
    plan: ServerPlan, sockets: list[socket.socket], nodes: list[WorkerNode], number: int, status_fd: int, alive_fd: int
) -> None:
    """Serve until SIGTERM, or until the supervisor ends."""
    stop = stop_with_supervisor(alive_fd)
    with segmentlog.open(plan.path, ship=plan.ship, ship_interval_ms=plan.ship_interval_ms) as store:
        if plan.ship is not None and plan.standby is not None:
            store.shipping.set_heartbeat(plan.standby.settings.heartbeat_ms)
        identity = cluster_id_of(store.store_id), nodes, nodes[number - 1].node_id
        cluster = WorkerCluster(*identity) if plan.standby is None else owner_cluster(plan.path, *identity)
        worker = KafkaWorker(store, sockets, cluster, plan.settings, plan.security, plan.host)
        metrics = None
        if plan.metrics is not None:
            from segmentlog.server.metrics import MetricsServer

            host, port = plan.metrics
            metrics = MetricsServer(worker, host, port + number - 1 if port else 0, is_first=number == 1)
        address = None if metrics is None else metrics.address

        def status() -> dict[str, object]:
            worker.refresh()
            if plan.standby is not None:
                worker.broker.cluster = owner_cluster(plan.path, *identity)
            return {
                "connections": worker.listener.connection_count,
                "metrics": address,
                "new_owner": "" if plan.standby is None else worker.broker.new_owner,
                **worker.broker.meter.totals(),
            }

        worker.start()
        try:
            # No heartbeat while a lock that requests need is stuck: the supervisor then restarts the worker.
            send_heartbeats(stop, status_fd, lambda: worker.is_healthy(_LOCKED_OUT_S), status)
        finally:
            worker.close(FINISH_S)
            if metrics is not None:
                metrics.close()
