"""One member's steps from what it has to what it is to have."""

from __future__ import annotations

import pytest

from segmentlog.policy.reconciliation import NOTHING, Holding, Stage, reconcile
from segmentlog.records import PartitionId

A, B, C = (PartitionId("t", number) for number in range(3))


def _of(*partitions: PartitionId) -> frozenset[PartitionId]:
    return frozenset(partitions)


def _revoking(epoch: int, assigned: frozenset[PartitionId], revoking: frozenset[PartitionId]) -> Holding:
    return Holding(epoch, epoch - 1, Stage.REVOKING, assigned, revoking)


@pytest.mark.parametrize(
    ("before", "target", "owned", "free", "after"),
    [
        pytest.param(Holding(7, 6, assigned=_of(A)), _of(A), None, _of(), Holding(7, 6, assigned=_of(A)), id="there"),
        pytest.param(Holding(), _of(A, B), _of(), _of(A, B), Holding(7, 0, assigned=_of(A, B)), id="all is free"),
        pytest.param(
            Holding(), _of(A, B), _of(), _of(A), Holding(7, 0, Stage.AWAITING, _of(A)), id="joins, another has some"
        ),
        pytest.param(
            Holding(5, 4, assigned=_of(A, B)), _of(A), None, _of(), _revoking(5, _of(A), _of(B)), id="is to let go"
        ),
        pytest.param(
            Holding(5, 4, assigned=_of(A, B)), _of(A, C), _of(A, B), _of(C), _revoking(5, _of(A), _of(B)),
            id="lets go before it gets another",
        ),
        pytest.param(
            Holding(5, 4, assigned=_of(A, B)), _of(A), _of(A), _of(), Holding(7, 5, assigned=_of(A)),
            id="never had what it is to let go of",
        ),
        pytest.param(
            _revoking(5, _of(A), _of(B)), _of(A), None, _of(), _revoking(5, _of(A), _of(B)), id="says nothing"
        ),
        pytest.param(
            _revoking(5, _of(A), _of(B)), _of(A), _of(A, B), _of(), _revoking(5, _of(A), _of(B)), id="has it still"
        ),
        pytest.param(
            _revoking(5, _of(A), _of(B)), _of(A, C), _of(A), _of(C), Holding(7, 5, assigned=_of(A, C)), id="has let go"
        ),
        pytest.param(
            _revoking(5, _of(A), _of(B)), _of(B), _of(A), _of(B),
            Holding(6, 5, Stage.REVOKING, _of(), _of(A)), id="the target has changed meanwhile",
        ),
        pytest.param(
            _revoking(5, _of(A), _of(B)), _of(A, B), _of(A), _of(B), Holding(7, 5, assigned=_of(A, B)),
            id="gets it back after all",
        ),
        pytest.param(
            Holding(7, 6, Stage.AWAITING, _of(A)), _of(A, B), None, _of(), Holding(7, 6, Stage.AWAITING, _of(A)),
            id="waits on",
        ),
        pytest.param(
            Holding(7, 6, Stage.AWAITING, _of(A)), _of(A, B), None, _of(B), Holding(7, 6, assigned=_of(A, B)),
            id="what it waited for is free",
        ),
        pytest.param(
            Holding(6, 5, Stage.AWAITING, _of(A)), _of(B), None, _of(B), _revoking(6, _of(), _of(A)),
            id="waited for something, and loses all",
        ),
    ],
)  # fmt: skip
def test_steps(
    before: Holding, target: frozenset[PartitionId], owned: frozenset[PartitionId] | None, free: frozenset[PartitionId],
    after: Holding,
) -> None:  # fmt: skip
    """Each row of the table is a step; the target has epoch 7."""
    assert reconcile(before, target, 7, owned, free.__contains__) == after


def test_who_waits_holds_nothing_of_it() -> None:
    """A member holds its assigned partitions, and those that it has not released yet."""
    assert Holding(assigned=_of(A)).held == _of(A)
    assert _revoking(5, _of(A), _of(B)).held == _of(A, B)
    assert Holding().held == NOTHING
