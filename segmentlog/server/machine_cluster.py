"""Brokers that clients get from a machine with a standby: those of the owner, and of the former owner for a while."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from segmentlog.clock import Clock
from segmentlog.format.server_file import ServerNode
from segmentlog.objects.standby.status import read_standby_status
from segmentlog.server.worker_cluster import STANDBY_ID, WorkerCluster, WorkerNode
from segmentlog.storage.fs import FileSystem


def owner_cluster(path: str, cluster_id: str, nodes: Sequence[WorkerNode], own_id: int) -> WorkerCluster:
    """Return the cluster of the owner with the workers ``nodes``; after a takeover with those of the former owner."""
    status = read_standby_status(FileSystem(), path)
    is_recent = status is not None and status.is_takeover_recent(Clock().now_ms())
    former = _worker_nodes(status.former_nodes) if status is not None and is_recent else []
    return WorkerCluster(cluster_id, nodes, own_id, former)


def standby_cluster(path: str, cluster_id: str, own_nodes: Sequence[WorkerNode]) -> WorkerCluster:
    """Return the cluster with the owner's workers, as far as the process that follows the owner knows them.

    After a takeover, this machine may be the former owner: the cluster has its workers ``own_nodes``, too.
    """
    status = read_standby_status(FileSystem(), path)
    if status is None:
        return WorkerCluster(cluster_id, (), STANDBY_ID)
    is_recent = status.is_takeover_recent(Clock().now_ms())
    return WorkerCluster(cluster_id, _worker_nodes(status.nodes), STANDBY_ID, own_nodes if is_recent else ())


def _worker_nodes(nodes: Iterable[ServerNode]) -> list[WorkerNode]:
    return [WorkerNode(node.node_id, node.host, node.port) for node in nodes]
