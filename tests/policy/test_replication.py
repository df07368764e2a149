"""Each decision of replication, as a table. `tests/replication/` runs them together in a model."""

from __future__ import annotations

import pytest

from segmentlog.policy import replica_fetch
from segmentlog.policy import replication as policy
from segmentlog.policy.recovery_policy import UNKNOWN_CEILING_GAP as GAP
from segmentlog.policy.replica_fetch import (
    AnswerVerdict,
    Confirmation,
    EpochEnd,
    HighWatermark,
    LogHistory,
    ReplicaFetch,
    ReplicaId,
)
from segmentlog.policy.replication import (
    DiskEvidence,
    Duty,
    JoinProgress,
    LeaderAndIsr,
    Proposal,
    Refused,
    ReplicaRole,
    TermStart,
)
from segmentlog.records import EpochStart, LostRange

A, B, C = (ReplicaId(name, "0") for name in "abc")
B_NEW = ReplicaId("b", "1")
THREE = LeaderAndIsr(version=7, term=4, leader="a", isr=frozenset({A, B, C}), min_isr=2)
TWO = policy.replace(THREE, isr=frozenset({A, B}))
ONE = policy.replace(THREE, isr=frozenset({A}))

LOG = LogHistory(
    (EpochStart(1, 0), EpochStart(3, 100), EpochStart(4, 200)),
    (LostRange(50, 100, 3, "takeover"), LostRange(180, 200, 4, "takeover")),
    260,
)
"""Epoch 1 is [0, 50), epoch 3 is [50, 180) with a lost range at its beginning, and epoch 4 is [180, 260)."""


def _fetch(**changes: object) -> ReplicaFetch:
    return ReplicaFetch(B, 4, 4, 230, 220, 300)._replace(**changes)  # type: ignore[arg-type]


def _isr(decision: Proposal | Refused) -> str:
    """Return the ISR that is proposed, or the reason of the refusal."""
    if isinstance(decision, Refused):
        return decision.reason
    return " ".join(f"{replica.machine}{replica.incarnation}" for replica in sorted(decision.membership.isr))


def test_a_proposal_counts_until_its_version_is_passed() -> None:
    """The maximal ISR has every replica that may be in the document, until a later version is read."""
    shrink, join = policy.propose_shrink(TWO, {B}), policy.propose_join(TWO, C, [])
    assert isinstance(join, Proposal)
    assert isinstance(shrink, Refused)
    assert policy.undecided_proposals(TWO, [join]) == (join,)
    assert policy.maximal_isr(TWO, [join]) == {A, B, C}
    assert policy.undecided_proposals(join.membership, [join]) == ()
    small = policy.propose_shrink(THREE, {C})
    assert isinstance(small, Proposal)
    assert small.membership == policy.replace(TWO, version=8)
    assert policy.maximal_isr(THREE, [small]) == {A, B, C}


def test_only_synced_records_are_confirmed() -> None:
    """A replica confirms unsynced records only in the mode ``written``."""
    assert replica_fetch.confirmed_offset(10, 7, confirms_unsynced=False) == 7
    assert replica_fetch.confirmed_offset(10, 7, confirms_unsynced=True) == 10


@pytest.mark.parametrize(
    ("confirmations", "limit", "offset"),
    [
        ({A: (4, 90, 300), B: (4, 80, 200)}, 200, 80),
        ({A: (4, 70, 150), B: (4, 80, 200)}, 150, 70),
        ({A: (4, 50, 150), B: (4, 80, 200)}, 150, 60),  # it never falls
        ({A: (4, 90, 300)}, 0, 60),  # b has not fetched
        ({A: (4, 90, 300), B: (3, 80, 200)}, 0, 60),  # in this term
        ({A: (4, 90, 300), B_NEW: (4, 80, 200)}, 0, 60),  # with the incarnation of the ISR
    ],
)
def test_every_member_limits_appends_and_the_high_watermark(
    confirmations: dict[ReplicaId, tuple[int, int, int]], limit: int, offset: int
) -> None:
    """The lowest ceiling and the lowest confirmed offset count, in the leader's term."""
    reports = {replica: Confirmation(*report) for replica, report in confirmations.items()}
    assert policy.append_limit(4, {A, B}, reports) == limit
    assert policy.advance_high_watermark(60, TWO, {A, B}, reports).offset == offset


def test_the_high_watermark_waits_for_enough_members() -> None:
    """An ISR with fewer than ``min_isr`` members acknowledges nothing, and the reason says why."""
    reports = {A: Confirmation(4, 90, 300)}
    assert policy.advance_high_watermark(60, ONE, {A}, reports) == (60, "the ISR has 1 members of at least 2")
    alone = policy.replace(ONE, min_isr=1)
    assert policy.advance_high_watermark(60, alone, {A}, reports) == (90, "a has confirmed 90")
    assert policy.advance_high_watermark(60, alone, set(), reports).offset == 60


def test_the_ceiling_is_raised_before_it_is_reached() -> None:
    """It is raised when half a step is left."""
    assert policy.extend_ceiling(49, 100, 100) == 100
    assert policy.extend_ceiling(50, 100, 100) == 150


def test_a_new_leader_shows_its_high_watermark_once_it_has_reached_older_ones() -> None:
    """An older leader may have shown a high watermark up to the log end of the new leader."""
    start = TermStart(4, 180, 200, 300)
    assert [policy.can_show_high_watermark(offset, start) for offset in (179, 180, 250)] == [False, True, True]


def test_an_append_is_acknowledged_in_its_own_term() -> None:
    """In a later term the offset may belong to a lost range."""
    assert policy.is_acknowledged(4, 100, 4, 100)
    assert not policy.is_acknowledged(4, 100, 4, 99)
    assert not policy.is_acknowledged(3, 100, 4, 200)


def test_a_replica_lags_if_it_was_not_caught_up_for_long() -> None:
    """The leader itself never lags."""
    assert policy.lagging_replicas(THREE, {B: 1_000}, 5_000) == {C}
    assert policy.lagging_replicas(THREE, {B: 1_000, C: 4_000}, 5_001) == {B}


@pytest.mark.parametrize(
    ("membership", "removed", "isr"),
    [
        (THREE, {C}, "a0 b0"),
        (THREE, {B_NEW}, "none of the replicas is in the ISR"),
        (THREE, {A}, "the leader stays in the ISR"),
        (THREE, {B, C}, "the ISR would have 1 members of at least 2"),
        (TWO, {B}, "the ISR would have 1 members of at least 2"),
    ],
)
def test_the_isr_never_shrinks_below_its_minimum(membership: LeaderAndIsr, removed: set[ReplicaId], isr: str) -> None:
    """Nor does it lose its leader."""
    assert _isr(policy.propose_shrink(membership, removed)) == isr


@pytest.mark.parametrize(
    ("follower", "progress", "isr"),
    [
        (C, ((4, 200, 300), 150, 180, 300, 190), "a0 b0 c0"),
        (C, ((4, 179, 300), 150, 180, 300, 190), "c has confirmed 179 of 180"),  # the start of the term
        (C, ((4, 209, 300), 210, 180, 300, 190), "c has confirmed 209 of 210"),  # the high watermark
        (C, ((4, 210, 299), 210, 180, 300, 190), "c has noted the ceiling 299 of 300"),
        (C, ((4, 210, 189), 210, 180, 0, 190), "c has noted the ceiling 189 of 190"),  # a member has not fetched yet
        (C, ((3, 210, 300), 210, 180, 300, 190), "c has not fetched in term 4"),
        (C, (None, 210, 180, 300, 190), "c has not fetched in term 4"),
        (B, ((4, 210, 300), 210, 180, 300, 190), "the replica is in the ISR already"),
        (B_NEW, ((4, 210, 300), 210, 180, 300, 190), "a0 b1"),  # in place of the old incarnation
    ],
)
def test_a_follower_joins_once_it_has_everything(
    follower: ReplicaId, progress: tuple[tuple[int, int, int] | None, int, int, int, int], isr: str
) -> None:
    """Every partition counts, the last one too."""
    report, *offsets = progress
    partition = JoinProgress(Confirmation(*report) if report else None, *offsets)
    ready = JoinProgress(Confirmation(4, 1, 1), 1, 1, 1, 1)
    assert _isr(policy.propose_join(TWO, follower, [ready, partition])) == isr


@pytest.mark.parametrize(
    ("changes", "duty", "successor"),
    [
        ({}, Duty.CONTINUE, None),
        ({"newest_term": 5}, Duty.STEP_DOWN, None),
        ({"sync_ms": 5_001}, Duty.HAND_OVER, C),
        ({"is_asked": True}, Duty.HAND_OVER, C),
        ({"is_asked": True, "confirmed_offsets": {B: 9, C: 9}}, Duty.HAND_OVER, B),
        ({"is_asked": True, "confirmed_offsets": {B_NEW: 9}}, Duty.CONTINUE, None),
        ({"silence_ms": 8_001}, Duty.READ_DOCUMENT, None),
    ],
)
def test_a_leader_steps_down_or_hands_over(changes: dict[str, object], duty: Duty, successor: ReplicaId | None) -> None:
    """It hands over to the member of the ISR that has most."""
    facts = {"confirmed_offsets": {B: 8, C: 9}, "newest_term": 4, "sync_ms": 0, "silence_ms": 0} | changes
    verdict = policy.review_leadership(THREE, A, **facts)  # type: ignore[arg-type]
    assert verdict[:2] == (duty, successor)


def test_a_late_read_of_the_document_changes_nothing() -> None:
    """The higher version counts."""
    newer = policy.replace(TWO, version=8)
    assert policy.newest_membership(None, THREE) == THREE
    assert policy.newest_membership(THREE, newer) == newer
    assert policy.newest_membership(newer, THREE) == newer


@pytest.mark.parametrize(
    ("replica", "term", "is_leading", "candidate_term", "role", "next_term"),
    [
        (A, 4, True, 0, ReplicaRole.LEAD, 4),
        (A, 4, False, 0, ReplicaRole.STAND, 4),  # restarted
        (A, 3, True, 0, ReplicaRole.STAND, 4),  # it led an older term, and a late swap won
        (A, 3, False, 4, ReplicaRole.SUCCEED, 4),
        (ReplicaId("a", "1"), 3, False, 4, ReplicaRole.STAND, 4),  # it lost confirmed records since
        (A, 5, True, 0, ReplicaRole.FOLLOW, 5),  # an old document
        (B, 3, True, 0, ReplicaRole.FOLLOW, 4),
        (B, 4, False, 5, ReplicaRole.FOLLOW, 4),  # its proposal has not won yet
    ],
)
def test_a_machine_that_read_the_document(
    replica: ReplicaId, term: int, is_leading: bool, candidate_term: int, role: ReplicaRole, next_term: int
) -> None:
    """It leads only a term that this process has won, and never returns to a lower term."""
    verdict = policy.decide_role(replica, term, THREE, is_leading=is_leading, candidate_term=candidate_term)
    assert verdict[:2] == (role, next_term)


def test_a_member_of_the_isr_takes_over() -> None:
    """The old leader leaves the ISR if enough members remain. A machine outside the ISR is refused."""
    proposal = policy.propose_takeover(THREE, B)
    assert isinstance(proposal, Proposal)
    assert proposal.membership == LeaderAndIsr(8, 5, "b", frozenset({B, C}), 2)
    assert _isr(policy.propose_takeover(THREE, B, is_leader_alive=True)) == "a0 b0 c0"
    assert _isr(policy.propose_takeover(TWO, B)) == "a0 b0"
    assert _isr(policy.propose_takeover(THREE, A)) == "a0 b0 c0"
    assert _isr(policy.propose_takeover(TWO, C)) == "c is not in the ISR with its present incarnation"
    assert isinstance(policy.propose_takeover(THREE, B_NEW), Refused)


def test_a_person_forces_a_leader() -> None:
    """The document keeps the forced term in later terms."""
    forced = policy.propose_forced_takeover(TWO, C).membership
    assert forced == LeaderAndIsr(8, 5, "c", frozenset({C}), 2, forced_term=5)
    later = policy.propose_takeover(forced, C)
    assert isinstance(later, Proposal)
    assert (later.membership.term, later.membership.forced_term) == (6, 5)


@pytest.mark.parametrize(
    ("term", "forced_term", "ceiling", "next_offset"),
    [
        (5, 0, 300, 300),
        (5, 0, 100, 260),
        (6, 4, 300, 300),  # the log has records of the forced term
        (5, 5, 300, 5 * GAP),
        (7, 5, 300, 7 * GAP),  # the forced leader died before it began its term
        (5, 5, 9 * GAP, 10 * GAP),
    ],
)
def test_a_new_leader_continues_at_its_ceiling(term: int, forced_term: int, ceiling: int, next_offset: int) -> None:
    """A forced leader skips all offsets that other leaders may have assigned."""
    membership = policy.replace(THREE, term=term, forced_term=forced_term)
    assert policy.begin_term(membership, LOG, ceiling, 1000) == (term, 260, next_offset, next_offset + 1000)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"machine_died": True}, None),
        ({"incarnation": ""}, "no incarnation yet"),
        ({"is_same_folder": False}, "a copy"),
        ({"is_intact": False}, "did not find every record"),
        ({"machine_died": True, "confirms_unsynced": True}, "before they are synced"),
    ],
)
def test_a_machine_that_may_lack_confirmed_records_has_a_new_incarnation(
    changes: dict[str, object], reason: str | None
) -> None:
    """A clean disk keeps its incarnation through a power cut."""
    found = policy.incarnation_change(DiskEvidence("0", True, True, False, False)._replace(**changes))  # type: ignore[arg-type]
    assert found == reason or reason in str(found)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("epoch", "end"), [(-1, (-1, 0)), (0, (-1, 0)), (1, (1, 50)), (2, (1, 50)), (3, (3, 180)), (4, (4, 260))]
)
def test_an_epoch_ends_before_the_lost_range_after_it(epoch: int, end: tuple[int, int]) -> None:
    """Records that were there before the takeover are not in the leader's log."""
    assert replica_fetch.end_of_epoch(LOG, epoch) == end


@pytest.mark.parametrize(
    ("fetch", "confirmation", "divergence", "newer_term"),
    [
        (_fetch(), (4, 220, 300), None, None),
        (_fetch(confirmed_offset=100, offset_ceiling=100), (4, 110, 250), None, None),  # late
        (_fetch(last_epoch=-1, log_end_offset=0, confirmed_offset=0), (4, 110, 300), None, None),
        (_fetch(last_epoch=3, log_end_offset=180), (4, 220, 300), None, None),
        (_fetch(last_epoch=3, log_end_offset=190), None, (3, 180), None),
        (_fetch(last_epoch=2, log_end_offset=60), None, (1, 50), None),
        (_fetch(log_end_offset=261), None, (4, 260), None),
        (_fetch(term=3), None, None, None),
        (_fetch(term=5), None, None, 5),
    ],
)
def test_a_fetch_confirms_only_what_the_leader_has(
    fetch: ReplicaFetch, confirmation: object, divergence: object, newer_term: int | None
) -> None:
    """A log that differs confirms nothing; a late fetch lowers nothing; a higher term ends the leadership."""
    verdict = replica_fetch.review_fetch(4, LOG, fetch, Confirmation(4, 110, 250))
    assert verdict[:3] == (confirmation, divergence, newer_term)
    assert verdict.reason


def test_confirmations_of_an_older_term_do_not_count() -> None:
    """Each term begins without confirmations."""
    verdict = replica_fetch.review_fetch(4, LOG, _fetch(confirmed_offset=100), Confirmation(3, 220, 400))
    assert verdict.confirmation == (4, 100, 300)


FOLLOWER = LogHistory((EpochStart(1, 0), EpochStart(3, 100)), (LostRange(50, 100, 3, "takeover"),), 190)


@pytest.mark.parametrize(
    ("known", "forced_term", "changes", "divergence", "appends", "truncate_to"),
    [
        ((3, 150), 0, {}, None, True, None),
        ((3, 150), 0, {}, (3, 180), False, 180),
        ((3, 150), 0, {}, (2, 60), False, None),  # below its high watermark
        ((3, 150), 4, {}, (2, 60), False, 50),  # a person forced a later term
        ((4, 150), 4, {}, (2, 60), False, None),
        ((3, 50), 0, {}, (1, 120), False, 50),  # its own epoch 1 ends at 50
        ((3, 0), 0, {}, (-1, 0), False, 0),
        ((3, 0), 0, {"log_end_offset": 200}, (3, 180), False, None),  # a question about another log end
        ((3, 0), 0, {"last_epoch": 1}, (3, 180), False, None),
        ((3, 0), 0, {"term": 3}, (3, 180), False, None),
        ((3, 0), 0, {"replica": B_NEW}, None, False, None),
    ],
)
def test_a_follower_truncates_only_on_a_current_answer(
    known: tuple[int, int], forced_term: int, changes: dict[str, object], divergence: tuple[int, int] | None,
    appends: bool, truncate_to: int | None,
) -> None:  # fmt: skip
    """Its known high watermark stays, except if a person forced a later term."""
    fetch = _fetch(last_epoch=3, log_end_offset=190)._replace(**changes)  # type: ignore[arg-type]
    end = EpochEnd(*divergence) if divergence else None
    verdict = replica_fetch.review_answer(B, 4, FOLLOWER, HighWatermark(*known), forced_term, fetch, end)
    assert verdict == AnswerVerdict(appends, truncate_to, verdict.reason)


def test_a_follower_learns_the_high_watermark_of_what_it_has() -> None:
    """It never falls, except with the log, and then it keeps its term."""
    known = HighWatermark(3, 150)
    assert replica_fetch.learn_high_watermark(known, HighWatermark(4, 170), 160) == (4, 160)
    assert replica_fetch.learn_high_watermark(known, HighWatermark(4, 140), 160) == known
    assert replica_fetch.limit_high_watermark(known, 160) == known
    assert replica_fetch.limit_high_watermark(known, 60) == (3, 60)


def test_an_empty_log_has_no_epoch() -> None:
    """A new follower fetches from offset 0 with epoch -1, as in Kafka."""
    assert LogHistory((), (), 0).last_epoch == -1
    assert replica_fetch.end_of_epoch(LogHistory((), (), 0), 5) == (-1, 0)
