"""Move a group member from its current assignment to its target assignment, as in KIP-848. Pure: values in, values out.

    SETTLED ──new target──▶ REVOKING ──it has revoked──▶ SETTLED, or AWAITING ──others have revoked──▶ SETTLED
       └─────────────────────nothing to revoke────────────▲

At most one member holds a partition: the member that it is assigned to, or that has yet to confirm its revocation. A
member gets a partition in a heartbeat during which no other member holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Final

import msgspec

from segmentlog.records import PartitionId

NOTHING: Final[frozenset[PartitionId]] = frozenset()


class Stage(StrEnum):
    """The state of a member between two target assignments."""

    SETTLED = "settled"
    REVOKING = "revoking"
    """The member must revoke partitions, and confirm it."""
    AWAITING = "awaiting"
    """The member waits for partitions that other members still hold."""


class Holding(msgspec.Struct, frozen=True):
    """The current assignment of a member, and its state."""

    epoch: int = 0
    previous_epoch: int = 0
    """The epoch before ``epoch``. It is still valid, because the response with ``epoch`` may have been lost."""
    stage: Stage = Stage.SETTLED
    assigned: frozenset[PartitionId] = NOTHING
    revoking: frozenset[PartitionId] = NOTHING

    @property
    def held(self) -> frozenset[PartitionId]:
        """The partitions that no other member may get."""
        return self.assigned | self.revoking

    def in_epoch(self, epoch: int) -> Holding:
        """Return the same assignment in another epoch."""
        if epoch == self.epoch:
            return self
        return msgspec.structs.replace(self, epoch=epoch, previous_epoch=self.epoch)


def reconcile(
    holding: Holding,
    target: frozenset[PartitionId],
    target_epoch: int,
    owned: Collection[PartitionId] | None,
    is_free: Callable[[PartitionId], bool],
) -> Holding:
    """Return the new assignment of a member after a heartbeat. ``holding`` is its assignment before.

    target, target_epoch  the target assignment of the member, and its epoch
    owned                 the partitions that the member reports to own; None if it reports none
    is_free               returns whether no other member holds a partition
    """
    if holding.stage is Stage.SETTLED and holding.epoch == target_epoch:
        return holding
    epoch = holding.epoch
    if holding.stage is Stage.REVOKING:
        if owned is None or not holding.revoking.isdisjoint(owned):
            return holding
        epoch = min(epoch + 1, target_epoch)
    kept = holding.assigned & target
    surplus = holding.assigned - target
    if surplus and (owned is None or not surplus.isdisjoint(owned)):
        return msgspec.structs.replace(holding.in_epoch(epoch), stage=Stage.REVOKING, assigned=kept, revoking=surplus)
    lacking = target - kept
    free = frozenset(partition for partition in lacking if is_free(partition))
    stage = Stage.SETTLED if len(free) == len(lacking) else Stage.AWAITING
    # Not from `epoch`: previous_epoch must be the epoch that the member knows, and it does not know `epoch` yet.
    settled = holding.in_epoch(target_epoch)
    return msgspec.structs.replace(settled, stage=stage, assigned=kept | free, revoking=NOTHING)
