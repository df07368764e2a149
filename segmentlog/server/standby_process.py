"""Processes of a server while another machine owns the store: one follows the owner, the others answer clients.

The workers answer ApiVersions, Metadata and the search for coordinators from the replica, with the addresses of the
owner's workers. They serve no records, and refuse everything else as a broker that does not lead the partition. Until
the replica is complete, their ports refuse connections.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

import segmentlog
from segmentlog.errors import ObjectStoreError, ShippingRefused, StoreFenced
from segmentlog.format.file_names import REPLICA_FILE, STORE_FILE
from segmentlog.format.server_file import ServerNode
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest.load import read_manifest
from segmentlog.objects.ownership.binding import read_binding
from segmentlog.objects.replica.replica import is_harmless
from segmentlog.objects.standby.roles import Role, find_role
from segmentlog.objects.standby.standby import Standby
from segmentlog.objects.standby.status import StandbyStatus
from segmentlog.security.listen_rules import start_listening
from segmentlog.server.addresses import cluster_id_of
from segmentlog.server.machine_cluster import standby_cluster
from segmentlog.server.owner_probe import OwnerProbe
from segmentlog.server.supervisor import HEARTBEAT_S, ServerPlan, StandbyProcesses
from segmentlog.server.worker import KafkaWorker
from segmentlog.server.worker_cluster import WorkerNode
from segmentlog.server.worker_lifecycle import StopSignal, send_heartbeats, serve_until_stopped, stop_with_supervisor
from segmentlog.storage.fs import FileSystem

logger = logging.getLogger("segmentlog.server")

_POLL_S: Final = 0.2
_LONG_S: Final = 10.0
"""A warning is logged if the object store has not answered for this long. A request fails only after a minute."""
_UNKNOWN_ROLE: Final = "the role of this machine is not known until the object store answers"
_ENDING_S: Final = 2.0
"""Time for a cycle to end after a stop signal. A cycle that takes longer ends with the process; the next start resumes
what it was doing."""


def run_standby(plan: ServerPlan, nodes: list[WorkerNode], status_fd: int, alive_fd: int) -> None:
    """Follow the owner of the store until this machine is the owner, SIGTERM, or the end of the supervisor.

    Raise `ShippingRefused` unless the folder can be a replica of the store or is the owner's.
    """
    assert plan.standby is not None
    url = plan.standby.url
    stop = stop_with_supervisor(alive_fd)
    can_create = plan.ship is not None
    probe = OwnerProbe(plan.security)
    standby = Standby(
        url, plan.path, probe=probe, fence_store=lambda: _fence_store(plan.path, url),
        nodes=tuple(ServerNode(*node) for node in nodes), can_create=can_create, settings=plan.standby.settings,
        interval_ms=plan.standby.interval_ms,
    )  # fmt: skip
    # Heartbeats begin at once: the object store may accept the connection, and answer only after minutes.
    cycles = _Cycles(standby, lambda: _first_status(plan.path, url, can_create=can_create), stop, status_fd)
    cycles.start()
    try:
        send_heartbeats(stop, status_fd, lambda: True, cycles.report)
    finally:
        cycles.join(_ENDING_S)
        if not cycles.is_alive():
            standby.close()
        probe.close()
    if cycles.failure is not None:
        raise cycles.failure


def _first_status(path: str, url: str, *, can_create: bool) -> StandbyStatus | None:
    """Return role and owner before the first cycle, which may download the whole store.

    Return None if the object store cannot be reached: the cycles report it, and try again.
    """
    bucket, fs = open_bucket(url), FileSystem()
    binding = read_binding(fs, path)
    if binding is not None and binding.topics:
        why = f"only some topics of {path} are shipped, and a standby needs all: run segmentlog ship {bucket.url} '*'"
        raise ShippingRefused(bucket.url, why)
    try:
        role = find_role(bucket, fs, path)
        found = read_manifest(bucket)
    except ObjectStoreError as error:
        logger.warning("%s: %s: %s", path, _UNKNOWN_ROLE, error)
        return None
    if role is Role.OWNER:
        return None  # its cycle is short
    if role in (Role.STANDBY, Role.WAITING) and not fs.exists(f"{path}/{REPLICA_FILE}"):
        names = sorted(name for name in fs.listdir(path) if not is_harmless(name))
        if names:
            why = f"{path} is neither a store nor empty: it contains {names[0]}; use an empty or new folder"
            raise ShippingRefused(bucket.url, why)
    if role is Role.WAITING and can_create:
        return None  # its cycle creates the store
    owner = "" if found is None else str(found[0].owner)
    return StandbyStatus(url=bucket.url, role=_ROLES.get(role, role).value, owner=owner)


_ROLES: Final = {Role.FORMER_OWNER: Role.STANDBY}
"""Roles as they are reported."""


class _Cycles(threading.Thread):
    """The thread that runs the cycles of a standby, and reports changes to the supervisor at once."""

    def __init__(
        self, standby: Standby, find_status: Callable[[], StandbyStatus | None], stop: StopSignal, status_fd: int
    ) -> None:
        super().__init__(name="segmentlog-standby", daemon=True)
        self._standby = standby
        self._find_status = find_status
        """Returns the status before the first cycle. It waits for the object store."""
        self._last: StandbyStatus | None = None
        self._began_s: float | None = time.monotonic()
        """When the thread asked for the role; None once the object store has answered, or failed."""
        self._stop_signal = stop
        self._status_fd = status_fd
        self._is_complete = False
        self.failure: BaseException | None = None

    def run(self) -> None:
        standby, stop = self._standby, self._stop_signal
        try:
            self._last = self._find_status()
            self._began_s = None
            self._send_status()
            while not stop.is_requested:
                before, self._last = self._last, standby.run_cycle()
                is_owner = self._last.role == Role.OWNER.value
                if before is None or (before.role, before.owner) != (self._last.role, self._last.owner):
                    self._send_status()
                if is_owner:
                    return
                stop.wait(standby.interval_ms / 1000)
        except BaseException as error:  # a bug: the process ends, and the supervisor starts it again
            self.failure = error
            stop.request()

    def _send_status(self) -> None:
        """Send the status to the supervisor at once, not with the next heartbeat: clients wait for the owner."""
        with contextlib.suppress(OSError):
            os.write(self._status_fd, json.dumps({"ready": True, **self.report()}).encode() + b"\n")

    def report(self) -> dict[str, object]:
        """Return the status for the supervisor; without a role until it is known. Log once if that takes long."""
        if self._began_s is not None and time.monotonic() - self._began_s >= _LONG_S:
            self._began_s = None
            logger.warning("%s: the object store does not answer; %s", self._standby.path, _UNKNOWN_ROLE)
        status = self._last
        if status is None or (status.role == Role.WAITING.value and status.error):
            return {}
        # During a takeover the folder is no replica any more.
        self._is_complete |= status.role == Role.OWNER.value or _is_replica(FileSystem(), self._standby.path)
        return {"role": status.role, "owner": status.owner, "is_complete": self._is_complete}


def _fence_store(path: str, url: str) -> None:
    """Open a former owner's store, so that its shipper finds the new owner and stops all appends."""
    with contextlib.suppress(StoreFenced), segmentlog.open(path, create=False, background=False) as store:
        store.ship(url)


def run_standby_worker(
    plan: ServerPlan, sockets: list[socket.socket], nodes: list[WorkerNode], number: int, status_fd: int, alive_fd: int
) -> None:
    """Send clients to the owner of the store until SIGTERM, or until the supervisor ends."""
    stop = stop_with_supervisor(alive_fd)
    if not wait_for_replica(plan.path, stop, status_fd):
        return
    with segmentlog.open(plan.path, create=False, read_only=True, background=False) as store:
        names = (*plan.settings.allowed_hosts, *(node.host for node in nodes))
        settings = msgspec.structs.replace(plan.settings, auto_create=False, allowed_hosts=names)
        cluster_id = cluster_id_of(store.store_id)
        cluster = standby_cluster(plan.path, cluster_id, nodes)
        worker = KafkaWorker(store, sockets, cluster, settings, plan.security, plan.host)

        def status() -> dict[str, object]:
            worker.broker.cluster = standby_cluster(plan.path, cluster_id, nodes)
            return {}

        for sock in sockets:
            start_listening(sock)
        serve_until_stopped(worker, plan, number, stop, status_fd, status)


def wait_for_replica(path: str, stop: StopSignal, status_fd: int) -> bool:
    """Wait until the folder is a replica that can be opened; send heartbeats without readiness meanwhile.

    Return False if the stop was requested first.
    """
    fs, waited_s = FileSystem(), HEARTBEAT_S
    while not stop.is_requested and not _is_replica(fs, path):
        if waited_s >= HEARTBEAT_S:
            waited_s = 0.0
            with contextlib.suppress(OSError):
                os.write(status_fd, b"{}\n")
        stop.wait(_POLL_S)
        waited_s += _POLL_S
    return not stop.is_requested


def _is_replica(fs: FileSystem, path: str) -> bool:
    return fs.exists(f"{path}/{REPLICA_FILE}") and fs.exists(f"{path}/{STORE_FILE}")


STANDBY: Final = StandbyProcesses(run_standby, run_standby_worker)
"""For `Supervisor`."""
