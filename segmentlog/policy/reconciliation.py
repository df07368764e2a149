"""How a member of a group comes from what it has to what it is to have. Pure: values in, values out.

    SETTLED ──another target──▶ REVOKING ──it has let go──▶ SETTLED, or AWAITING ──others have let go──▶ SETTLED
       └─────────────────────nothing to let go of─────────────▲

A partition is held by one member at a time: by whom it is assigned to, or by whom is still to say that it has let go of
it. To be assigned one a member has to come by when nobody else holds it. The rules are those of KIP-848.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Final

import msgspec

from segmentlog.records import PartitionId

NOTHING: Final[frozenset[PartitionId]] = frozenset()


class Stage(StrEnum):
    """Of a member on its way."""

    SETTLED = "settled"
    REVOKING = "revoking"
    """It is to let go of partitions, and to say that it has."""
    AWAITING = "awaiting"
    """It lacks partitions that others hold still."""


class Holding(msgspec.Struct, frozen=True):
    """What a member has."""

    epoch: int = 0
    previous_epoch: int = 0
    """The answer that brought ``epoch`` may have been lost."""
    stage: Stage = Stage.SETTLED
    assigned: frozenset[PartitionId] = NOTHING
    revoking: frozenset[PartitionId] = NOTHING

    @property
    def held(self) -> frozenset[PartitionId]:
        """What nobody else may be given."""
        return self.assigned | self.revoking

    def in_epoch(self, epoch: int) -> Holding:
        """The same in another epoch."""
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
    """The next step of a member that has been heard of.

    target, target_epoch  what it is to have, and since which epoch
    owned                 what it says that it has; None: it does not say
    is_free               whether no other member holds a partition
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
    free = frozenset(where for where in lacking if is_free(where))
    stage = Stage.SETTLED if len(free) == len(lacking) else Stage.AWAITING
    settled = holding.in_epoch(target_epoch)  # in one step: the epoch before is the one that the member knows
    return msgspec.structs.replace(settled, stage=stage, assigned=kept | free, revoking=NOTHING)
