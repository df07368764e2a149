"""The cycle of a standby: refresh the replica, probe the owner, decide, take over.

    standby = Standby(url, folder, probe=..., fence_store=...)
    while (status := standby.run_cycle()).role != "owner":
        wait()

Each cycle continues from the folder and the manifest, so that it may be the first one after a crash at any point.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from typing import Final

from msgspec.structs import replace

from segmentlog.arguments import as_int
from segmentlog.clock import Clock
from segmentlog.errors import ObjectStoreError, SegmentlogError
from segmentlog.format.file_names import STORE_FILE
from segmentlog.format.manifest import Manifest
from segmentlog.format.server_file import ServerNode
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.bucket.upload_pool import PARALLEL
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest.load import read_manifest, require_manifest
from segmentlog.objects.ownership.binding import Binding, read_binding, remove_binding
from segmentlog.objects.replica.replica import Replica
from segmentlog.objects.standby.former_owner import link_former_segments, set_aside_former_store
from segmentlog.objects.standby.roles import Role, can_take_effect, find_role
from segmentlog.objects.standby.status import StandbyStatus, read_standby_status, write_standby_status
from segmentlog.objects.takeover import take_over
from segmentlog.policy.takeover_decision import OwnerWatch, ProbeResult, TakeoverSettings
from segmentlog.storage.fs import FileSystem
from segmentlog.topics.store_file import create_beside_machine_files

logger = logging.getLogger("segmentlog")

_INTERVAL_MAX_MS: Final = 60_000
_FIRST: Final = "this machine is the first one: its store is not shipped to this URL yet"

Probe = Callable[[Manifest], Collection[ProbeResult]]
"""Connects to each node of the manifest's owner, and returns what each connection showed."""


class Standby:
    """Keeps the folder ``path`` a replica of the store shipped to ``url``, until this machine has taken the store over.

    probe        connects to the owner's server
    fence_store  called if the folder is that of a former owner: must stop appends to it in all processes
    nodes        the workers of this machine's server, which the manifest names after a takeover
    can_create   create a store if nothing is shipped to ``url`` yet and the folder is empty: this machine is the first
    interval_ms  time between cycles; `run_cycle` does not wait

    Not thread-safe; one process at a time uses a folder. Raise `InvalidConfig`, `ObjectStoreError` for a wrong URL.
    """

    def __init__(
        self,
        url: str,
        path: str,
        *,
        probe: Probe,
        fence_store: Callable[[], None],
        nodes: tuple[ServerNode, ...] = (),
        can_create: bool = False,
        settings: TakeoverSettings | None = None,
        interval_ms: int = 1000,
        parallel: int = PARALLEL,
        bucket: Bucket | None = None,
        fs: FileSystem | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.path = path
        self.interval_ms = as_int("standby_interval_ms", interval_ms, 1, _INTERVAL_MAX_MS)
        self._url = url
        self._probe = probe
        self._fence_store = fence_store
        self._nodes = nodes
        self._can_create = can_create
        self._parallel = parallel
        self._bucket = bucket or open_bucket(url)
        self._fs, self._clock = fs or FileSystem(), clock or Clock()
        last = read_standby_status(self._fs, path)
        self._watch = OwnerWatch(settings or TakeoverSettings(), last.answered_owner if last is not None else "")
        self._former_nodes: tuple[ServerNode, ...] = ()
        """Addresses of the owner that this machine follows, or followed before it became the owner."""
        if last is not None:
            self._former_nodes = last.former_nodes if last.role == Role.OWNER.value else last.nodes
        self._replica: Replica | None = None
        self._abandoned: Binding | None = None
        """The binding of a takeover that this machine has begun and given up."""
        self._is_complete = False
        self._last_logged = ""
        self.status = StandbyStatus(url=self._bucket.url, role=Role.WAITING.value)

    def run_cycle(self) -> StandbyStatus:
        """Run one cycle, write the status file, and return the status.

        An error is logged when it first occurs and is reported in the status; the next cycle tries again.
        """
        status, error = self.status, ""
        try:
            status = self._run_cycle()
        except (SegmentlogError, OSError) as failure:
            error = str(failure)
            if isinstance(failure, ObjectStoreError):
                self._watch.observe_unreadable(self._now_s)
        self._log_once(error)
        self.status = self._write_status(replace(status, error=error))
        return self.status

    def _write_status(self, status: StandbyStatus) -> StandbyStatus:
        """Write the status file, always with the owner that answered last: the next process needs it."""
        status = replace(status, answered_owner=self._watch.answered_owner, written_ms=self._clock.now_ms())
        write_standby_status(self._fs, self.path, status)
        return status

    def _run_cycle(self) -> StandbyStatus:
        if self._replica is None:
            role = find_role(self._bucket, self._fs, self.path)
            if role is Role.WAITING:
                if self._can_create and create_beside_machine_files(self._fs, self.path, self._clock.now_ms()):
                    return StandbyStatus(url=self._bucket.url, role=Role.OWNER.value, reason=_FIRST)
                reason = "no store is shipped to this URL yet; start the server of the first machine with --ship"
                return StandbyStatus(url=self._bucket.url, role=role.value, reason=reason)
            if role is Role.OWNER:
                found = read_manifest(self._bucket)
                if found is None:  # nothing is shipped yet
                    return StandbyStatus(url=self._bucket.url, role=role.value, reason=_FIRST)
                return self._describe_owner(found[0], "this machine is the owner")
            if role is Role.TAKING_OVER:
                return self._take_over("an interrupted takeover is resumed")
            if role is Role.FORMER_OWNER:
                self._set_aside()
            self._start_replica()
        assert self._replica is not None
        self._replica.refresh()
        manifest = self._replica.manifest
        assert manifest is not None
        self._is_complete = True
        if self._has_taken_effect(manifest):
            return self._take_over("an earlier takeover of this machine has taken effect")
        self._watch.observe_manifest(
            self._now_s, manifest.nonce, manifest.owner.id,
            has_nodes=bool(manifest.owner.nodes), is_handed_over=manifest.is_handed_over, is_ended=manifest.ended,
        )  # fmt: skip
        self._watch.observe_probes(self._now_s, self._probe(manifest) if manifest.owner.nodes else ())
        decision = self._watch.decide(is_complete=self._is_complete)
        if decision.is_due:
            return self._take_over(decision.reason, decided_on=manifest.nonce)
        self._former_nodes = manifest.owner.nodes
        return self._describe(manifest, Role.STANDBY, decision.reason, is_blocked=decision.is_blocked)

    @property
    def _now_s(self) -> float:
        return self._clock.monotonic_ms() / 1000

    def _has_taken_effect(self, manifest: Manifest) -> bool:
        """Return whether the manifest names this machine, because of a takeover that was abandoned: its conditional put
        arrived late. Forget the abandoned takeover if its put can have no effect any more.
        """
        if self._abandoned is None:
            return False
        if not can_take_effect(self._abandoned, manifest):
            remove_binding(self._fs, self.path)
            self._abandoned = None
            return False
        return manifest.owner.id == self._abandoned.owner_id

    def _set_aside(self) -> None:
        binding = read_binding(self._fs, self.path)
        if binding is not None and not binding.fenced and self._fs.exists(f"{self.path}/{STORE_FILE}"):
            self._fence_store()
        if binding is not None:
            # This machine was the owner, and so could reach it. Write that before the binding is removed.
            self._watch.answered_owner = binding.owner_id
            self._write_status(self.status)
        set_aside_former_store(self._bucket, self._fs, self.path, self._clock)

    def _start_replica(self) -> None:
        replica = Replica(
            self._url, self.path, threads=False, parallel=self._parallel, bucket=self._bucket, fs=self._fs,
            clock=self._clock,
        )  # fmt: skip
        try:
            link_former_segments(self._fs, self.path, require_manifest(self._bucket)[0])
        except BaseException:
            replica.close()
            raise
        self._replica, self._abandoned = replica, read_binding(self._fs, self.path)

    def _take_over(self, reason: str, *, decided_on: str = "") -> StandbyStatus:
        """Take the store over. If this fails, the next cycle finds out the role again.

        If the owner ships after the manifest ``decided_on`` was read, it is not gone, and keeps the store.
        """
        logger.warning("%s: taking over the store from %s: %s", self.path, self._bucket.url, reason)
        if self._replica is not None:
            with contextlib.suppress(OSError):  # then the takeover compares these files
                self._replica.label_active_segments()
        self.close()
        self._write_status(replace(self.status, role=Role.TAKING_OVER.value, reason=reason, error=""))
        done = take_over(
            self._bucket, self.path, nodes=self._nodes, decided_on=decided_on, fs=self._fs, clock=self._clock,
            parallel=self._parallel,
        )  # fmt: skip
        logger.warning("%s: this machine is the owner of the store now", self.path)
        return self._describe_owner(done.manifest, reason)

    def _describe_owner(self, manifest: Manifest, reason: str) -> StandbyStatus:
        """Return the status of this machine as the owner. The owner counts as one that has answered this machine."""
        self._watch.answered_owner = manifest.owner.id
        return replace(self._describe(manifest, Role.OWNER, reason), former_nodes=self._former_nodes)

    def _describe(self, manifest: Manifest, role: Role, reason: str, *, is_blocked: bool = False) -> StandbyStatus:
        replica = None if self._replica is None else self._replica.status
        return StandbyStatus(
            url=self._bucket.url,
            role=role.value,
            reason=reason,
            is_blocked=is_blocked,
            store_id=manifest.store_id,
            owner=str(manifest.owner),
            owner_epoch=manifest.owner.epoch,
            nodes=manifest.owner.nodes,
            owner_since_ms=manifest.owner.since_ms,
            shipped_ms=manifest.shipped_ms,
            refreshed_ms=0 if replica is None else replica.looked_ms,
            lag_records=0 if replica is None else replica.lag_records,
        )

    def _log_once(self, error: str) -> None:
        if error and error != self._last_logged:
            logger.warning("%s: %s; trying again", self.path, error)
        elif self._last_logged and not error:
            logger.warning("%s: the standby works again", self.path)
        self._last_logged = error

    def close(self) -> None:
        """Stop following. The replica stays, and a later standby continues it. Idempotent."""
        replica, self._replica = self._replica, None
        if replica is not None:
            replica.close()
