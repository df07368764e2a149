"""Main function of a worker process: open the store, serve it, and report status and metrics."""

from __future__ import annotations

import socket

import segmentlog
from segmentlog.server.addresses import cluster_id_of
from segmentlog.server.machine_cluster import owner_cluster
from segmentlog.server.supervisor import ServerPlan
from segmentlog.server.worker import KafkaWorker
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.server.worker_lifecycle import serve_until_stopped, stop_with_supervisor


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

        def status() -> dict[str, object]:
            if plan.standby is not None:
                worker.broker.cluster = owner_cluster(plan.path, *identity)
            return {"new_owner": "" if plan.standby is None else worker.broker.new_owner}

        serve_until_stopped(worker, plan, number, stop, status_fd, status)
