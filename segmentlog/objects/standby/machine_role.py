"""Role of this machine in the shipped store, as the files in its folder show it: for metrics, `health()` and pages.

Reading it sends no request to the object store.
"""

from __future__ import annotations

from typing import Final

import msgspec

from segmentlog.errors import ShippingRefused
from segmentlog.format.file_names import REPLICA_FILE, RESTORING_FILE
from segmentlog.objects.ownership.binding import read_binding
from segmentlog.objects.standby.roles import Role
from segmentlog.objects.standby.status import STALE_S, read_standby_status
from segmentlog.storage.fs import FileSystem

FIRST_EPOCH: Final = 1
"""Epoch of the machine that shipped a store first. Every later epoch began with a takeover."""


class MachineRole(msgspec.Struct, frozen=True, kw_only=True):
    """Role of a machine, with the state of its standby.

    role              value of `roles.Role`
    owner             host and epoch of the owner; empty on the owner itself
    owner_epoch       epoch of the owner; 0 if unknown
    reason            last decision of the standby
    lag_records       offsets that are in the object store only
    lag_s             age of the standby's state; -1 without one
    last_takeover_ms  time at which the owner took the store over; 0 if unknown
    problem           reason why the standby cannot take over; empty if it can
    """

    role: str
    url: str
    owner: str = ""
    owner_epoch: int = 0
    reason: str = ""
    lag_records: int = 0
    lag_s: float = -1.0
    last_takeover_ms: int = 0
    problem: str = ""


def read_machine_role(fs: FileSystem, path: str, now_ms: int) -> MachineRole | None:
    """Return the role of the machine whose store or replica is the folder ``path``; None without a role."""
    status = read_standby_status(fs, path)
    last_takeover_ms = 0
    if status is not None and status.owner_epoch > FIRST_EPOCH:
        last_takeover_ms = status.owner_since_ms
    try:
        binding = read_binding(fs, path)
    except (ShippingRefused, OSError):
        return None
    is_incomplete = any(fs.exists(f"{path}/{name}") for name in (REPLICA_FILE, RESTORING_FILE))
    if binding is not None and not binding.topics and not is_incomplete:  # not the binding of an abandoned takeover
        role = Role.FORMER_OWNER if binding.fenced else Role.OWNER
        is_of_status = status is not None and status.owner_epoch == binding.owner_epoch
        return MachineRole(
            role=role.value, url=binding.url, owner=binding.fenced, owner_epoch=binding.owner_epoch,
            last_takeover_ms=last_takeover_ms if is_of_status else 0,
        )  # fmt: skip
    if status is None or status.role == Role.OWNER.value or not fs.exists(f"{path}/{REPLICA_FILE}"):
        return None
    silent_s = (now_ms - status.written_ms) / 1000
    problem = status.error or (status.reason if status.is_blocked else "")
    if silent_s > STALE_S:
        problem = (
            f"no process has followed the owner for {silent_s:.0f} s: run 'segmentlog serve --standby {status.url}', or"
            " remove the file @standby-status if this folder is no standby any more"
        )
    return MachineRole(
        role=status.role, url=status.url, owner=status.owner, owner_epoch=status.owner_epoch, reason=status.reason,
        lag_records=status.lag_records,
        lag_s=max(now_ms - status.refreshed_ms, 0) / 1000 if status.refreshed_ms else -1.0,
        last_takeover_ms=last_takeover_ms, problem=problem,
    )  # fmt: skip
