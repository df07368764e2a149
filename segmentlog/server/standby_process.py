"""Processes of a server while another machine owns the store: one follows the owner, the others answer clients.

The workers answer ApiVersions, Metadata and the search for coordinators from the replica, with the addresses of the
owner's workers. They serve no records, and refuse everything else as a broker that does not lead the partition.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading

import msgspec

import segmentlog
from segmentlog.errors import ObjectStoreError, StoreFenced
from segmentlog.format.file_names import REPLICA_FILE, STORE_FILE
from segmentlog.format.server_file import ServerNode
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.standby.roles import Role, find_role
from segmentlog.objects.standby.standby import Standby
from segmentlog.objects.standby.status import read_standby_status
from segmentlog.server.addresses import cluster_id_of
from segmentlog.server.owner_probe import OwnerProbe
from segmentlog.server.supervisor import FINISH_S, HEARTBEAT_S, ServerPlan
from segmentlog.server.worker import KafkaWorker
from segmentlog.server.worker_cluster import STANDBY_ID, WorkerCluster, WorkerNode
from segmentlog.server.worker_lifecycle import StopSignal, send_heartbeats, stop_with_supervisor
from segmentlog.storage.fs import FileSystem

_POLL_S = 0.2
_LOCKED_OUT_S = 10.0


def run_standby(plan: ServerPlan, nodes: list[WorkerNode], status_fd: int, alive_fd: int) -> None:
    """Follow the owner of the store until this machine is the owner, SIGTERM, or the end of the supervisor.

    Raise `ShippingRefused` if the folder cannot be a replica of the store, nor the owner's.
    """
    assert plan.standby is not None
    url = plan.standby.url
    stop = stop_with_supervisor(alive_fd)
    with contextlib.suppress(ObjectStoreError):  # the cycles report it, and try again
        find_role(open_bucket(url), FileSystem(), plan.path)
    probe = OwnerProbe(plan.security)
    standby = Standby(
        url, plan.path, probe=probe, fence_store=lambda: _fence_store(plan.path, url),
        nodes=tuple(ServerNode(*node) for node in nodes), settings=plan.standby.settings,
        interval_ms=plan.standby.interval_ms,
    )  # fmt: skip
    cycles = threading.Thread(target=_run_cycles, args=(standby, stop, status_fd), name="segmentlog-standby")
    cycles.start()
    try:
        send_heartbeats(stop, status_fd, lambda: _is_working(cycles, standby), lambda: _report(standby))
    finally:
        cycles.join(FINISH_S)
        standby.close()
        probe.close()


def _run_cycles(standby: Standby, stop: StopSignal, status_fd: int) -> None:
    while not stop.is_requested:
        if standby.run_cycle().role == Role.OWNER.value:
            # At once, not with the next heartbeat: clients wait for the owner.
            with contextlib.suppress(OSError):
                os.write(status_fd, json.dumps({"ready": True, **_report(standby)}).encode() + b"\n")
            return
        stop.wait(standby.interval_ms / 1000)


def _is_working(cycles: threading.Thread, standby: Standby) -> bool:
    return cycles.is_alive() or standby.status.role == Role.OWNER.value


def _report(standby: Standby) -> dict[str, object]:
    status = standby.status
    return {"role": status.role, "owner": status.owner, "lag_records": status.lag_records}


def _fence_store(path: str, url: str) -> None:
    """Open a former owner's store, so that its shipper finds the new owner and stops all appends."""
    with contextlib.suppress(StoreFenced), segmentlog.open(path, create=False, background=False) as store:
        store.ship(url)


def run_standby_worker(
    plan: ServerPlan, sockets: list[socket.socket], number: int, status_fd: int, alive_fd: int
) -> None:
    """Send clients to the owner of the store until SIGTERM, or until the supervisor ends."""
    stop = stop_with_supervisor(alive_fd)
    _wait_for_replica(plan.path, stop, status_fd)
    if stop.is_requested:
        return
    with segmentlog.open(plan.path, create=False, read_only=True, background=False) as store:
        settings = msgspec.structs.replace(plan.settings, auto_create=False)
        cluster_id = cluster_id_of(store.store_id)
        worker = KafkaWorker(store, sockets, _owner_cluster(plan.path, cluster_id), settings, plan.security, plan.host)
        metrics = None
        if plan.metrics is not None:
            from segmentlog.server.metrics import MetricsServer

            host, port = plan.metrics
            metrics = MetricsServer(worker, host, port + number - 1 if port else 0, is_first=number == 1)
        address = None if metrics is None else metrics.address

        def status() -> dict[str, object]:
            worker.refresh()
            worker.broker.cluster = _owner_cluster(plan.path, cluster_id)
            return {
                "connections": worker.listener.connection_count,
                "metrics": address,
                **worker.broker.meter.totals(),
            }

        worker.start()
        try:
            send_heartbeats(stop, status_fd, lambda: worker.is_healthy(_LOCKED_OUT_S), status)
        finally:
            worker.close(FINISH_S)
            if metrics is not None:
                metrics.close()


def _wait_for_replica(path: str, stop: StopSignal, status_fd: int) -> None:
    """Wait until the folder is a replica that can be opened; send heartbeats without readiness meanwhile."""
    fs, waited_s = FileSystem(), HEARTBEAT_S
    while not stop.is_requested and not (fs.exists(f"{path}/{REPLICA_FILE}") and fs.exists(f"{path}/{STORE_FILE}")):
        if waited_s >= HEARTBEAT_S:
            waited_s = 0.0
            with contextlib.suppress(OSError):
                os.write(status_fd, b"{}\n")
        stop.wait(_POLL_S)
        waited_s += _POLL_S


def _owner_cluster(path: str, cluster_id: str) -> WorkerCluster:
    """Return the cluster with the owner's workers, as far as the process that follows the owner knows them."""
    status = read_standby_status(FileSystem(), path)
    nodes = () if status is None else status.nodes
    return WorkerCluster(cluster_id, [WorkerNode(node.node_id, node.host, node.port) for node in nodes], STANDBY_ID)
