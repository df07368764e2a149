"""Deliberate mistakes: each replaces a function of `segmentlog.policy`, and the model must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from unittest import mock

from msgspec.structs import replace
from replication.cluster_model import Setting
from replication.explorer import NEWEST, NONE, TAKEOVER, Focus

from segmentlog.policy import replica_fetch
from segmentlog.policy import replication as policy
from segmentlog.policy.replica_fetch import (
    AnswerVerdict,
    Confirmation,
    FetchVerdict,
    LogHistory,
    ReplicaFetch,
    ReplicaId,
)
from segmentlog.policy.replication import (
    Advance,
    JoinProgress,
    LeaderAndIsr,
    Proposal,
    Refused,
    ReplicaRole,
    RoleVerdict,
    TermStart,
)

real = {name: getattr(module, name) for module in (policy, replica_fetch) for name in dir(module)}


def shrinks_early(membership: LeaderAndIsr, proposals: Iterable[Proposal]) -> frozenset[ReplicaId]:
    """R4: a proposal to shrink counts before its swap has succeeded."""
    return membership.isr.intersection(*(proposal.membership.isr for proposal in proposals))


def joins_late(membership: LeaderAndIsr, proposals: Iterable[Proposal]) -> frozenset[ReplicaId]:
    """R5: a follower counts once the document has it, and not before."""
    return membership.isr


def forgets_late_swaps(membership: LeaderAndIsr, proposals: Iterable[Proposal]) -> tuple[Proposal, ...]:
    """R2: a proposal that the document does not show yet is taken for failed."""
    return ()


def confirms_unsynced(log_end_offset: int, durable_offset: int, *, confirms_unsynced: bool) -> int:
    """Confirm records that a power cut takes back, without a new incarnation after it."""
    return log_end_offset


def continues_at_log_end(membership: LeaderAndIsr, history: LogHistory, offset_ceiling: int, step: int) -> TermStart:
    """R6: a new leader ignores its ceiling."""
    end = history.log_end_offset
    return TermStart(membership.term, end, end, max(offset_ceiling, end + step))


def forces_without_gap(membership: LeaderAndIsr, *arguments: Any) -> TermStart:
    """R11: a forced leader trusts the ceiling that it has noted."""
    start: TermStart = real["begin_term"](replace(membership, forced_term=0), *arguments)
    return start


def ignores_ceilings(term: int, members: Iterable[ReplicaId], confirmations: Mapping[ReplicaId, Confirmation]) -> int:
    """R1: the leader appends below its own ceiling, whatever the others have noted."""
    return max(confirmation.offset_ceiling for confirmation in confirmations.values())


def shrinks_below_min(membership: LeaderAndIsr, removed: Any) -> Proposal | Refused:
    """R4: the ISR may become smaller than ``min_isr``."""
    proposal: Proposal | Refused = real["propose_shrink"](replace(membership, min_isr=0), removed)
    if isinstance(proposal, Proposal):
        return Proposal(replace(proposal.membership, min_isr=membership.min_isr), proposal.reason)
    return proposal


def ignores_incarnations(
    offset: int, membership: LeaderAndIsr, members: Iterable[ReplicaId], confirmations: Mapping[ReplicaId, Confirmation]
) -> Advance:
    """R2: a confirmation counts for the machine, whatever its incarnation."""
    newest = sorted(confirmations.items(), key=lambda item: item[1].confirmed_offset)
    by_machine = {replica.machine: report for replica, report in newest}
    present = {member: by_machine[member.machine] for member in members if member.machine in by_machine}
    advance: Advance = real["advance_high_watermark"](offset, membership, members, present)
    return advance


def keeps_incarnation(found: policy.DiskEvidence) -> str | None:
    """R8: a machine that lost confirmed records comes back as if nothing was lost."""
    return None


def joins_before_term_start(
    membership: LeaderAndIsr, follower: ReplicaId, partitions: Iterable[JoinProgress]
) -> Proposal | Refused:
    """R5: a follower joins at the high watermark, which a new leader does not know yet."""
    earlier = [progress._replace(term_start_offset=0) for progress in partitions]
    proposal: Proposal | Refused = real["propose_join"](membership, follower, earlier)
    return proposal


def joins_without_ceiling(
    membership: LeaderAndIsr, follower: ReplicaId, partitions: Iterable[JoinProgress]
) -> Proposal | Refused:
    """R5: a follower joins before it has noted the ceiling."""
    unlimited = [progress._replace(append_limit=0, term_next_offset=0) for progress in partitions]
    proposal: Proposal | Refused = real["propose_join"](membership, follower, unlimited)
    return proposal


def counts_diverging(term: int, history: LogHistory, fetch: ReplicaFetch, known: Confirmation | None) -> FetchVerdict:
    """R2: a fetch from a log that differs confirms what that log has."""
    verdict: FetchVerdict = real["review_fetch"](term, history, fetch, known)
    if verdict.divergence is None:
        return verdict
    return verdict._replace(confirmation=Confirmation(term, fetch.confirmed_offset, fetch.offset_ceiling))


def truncates_late(replica: ReplicaId, term: int, history: LogHistory, fetch: ReplicaFetch) -> bool:
    """R10: an answer of the term truncates a log that has changed since the question."""
    return (replica, term) == (fetch.replica, fetch.term)


def truncates_to_high_watermark(
    replica: ReplicaId, term: int, history: LogHistory, known: policy.HighWatermark, *others: Any
) -> AnswerVerdict:
    """R10: a follower whose log differs keeps what is below its high watermark (Kafka before KIP-101)."""
    verdict: AnswerVerdict = real["review_answer"](replica, term, history, known, *others)
    return verdict if verdict.truncate_to is None else verdict._replace(truncate_to=known.offset)


def leads_again(
    replica: ReplicaId, term: int, membership: LeaderAndIsr, *, is_leading: bool, candidate_term: int
) -> RoleVerdict:
    """R7: a leader that was restarted continues its term, where its log ends."""
    verdict: RoleVerdict = real["decide_role"](
        replica, term, membership, is_leading=is_leading, candidate_term=candidate_term
    )
    return verdict._replace(role=ReplicaRole.SUCCEED) if verdict.role is ReplicaRole.STAND else verdict


def reads_old_document(known: LeaderAndIsr | None, read: LeaderAndIsr) -> LeaderAndIsr:
    """R2: a late read of the document replaces a newer one."""
    return read


def leads_outside_isr(membership: LeaderAndIsr, replica: ReplicaId, **options: bool) -> Proposal | Refused:
    """R6: a machine outside the ISR takes over."""
    wider = replace(membership, isr=membership.isr | {replica})
    proposal: Proposal | Refused = real["propose_takeover"](wider, replica, **options)
    return proposal


def acknowledges_by_offset(append_term: int, end_offset: int, term: int, high_watermark: int) -> bool:
    """R3: an append is acknowledged when any leader's high watermark passes its offset."""
    return end_offset <= high_watermark


def shows_at_once(offset: int, start: TermStart) -> bool:
    """I4: a new leader shows the high watermark that it knew as a follower."""
    return True


MISTAKES: Final[dict[str, tuple[str, Callable[..., Any]]]] = {
    function.__name__: (name, function)
    for name, function in (
        ("maximal_isr", shrinks_early),
        ("maximal_isr", joins_late),
        ("undecided_proposals", forgets_late_swaps),
        ("confirmed_offset", confirms_unsynced),
        ("begin_term", continues_at_log_end),
        ("begin_term", forces_without_gap),
        ("append_limit", ignores_ceilings),
        ("propose_shrink", shrinks_below_min),
        ("advance_high_watermark", ignores_incarnations),
        ("incarnation_change", keeps_incarnation),
        ("propose_join", joins_before_term_start),
        ("propose_join", joins_without_ceiling),
        ("review_fetch", counts_diverging),
        ("is_current_answer", truncates_late),
        ("review_answer", truncates_to_high_watermark),
        ("decide_role", leads_again),
        ("newest_membership", reads_old_document),
        ("propose_takeover", leads_outside_isr),
        ("is_acknowledged", acknowledges_by_offset),
        ("can_show_high_watermark", shows_at_once),
    )
}
"""Each mistake, with the name of the function that it replaces."""


def made(name: str) -> Any:
    """Return a context manager in which a mistake replaces its function."""
    replaced, function = MISTAKES[name]
    return mock.patch.object(replica_fetch if hasattr(replica_fetch, replaced) else policy, replaced, function)


FOCUS: Final[dict[str, Focus]] = {
    "forces_without_gap": Focus(
        Setting(machines=2, min_isr=1, isr=1, forced=1),
        {"force": 0.1, "raise the ceiling": 2, "append": 2, "fetch": 0.3},
    ),
    "ignores_incarnations": Focus(
        Setting(confirms_unsynced=True, cuts=1),
        {"sync": 0, "append": 0.3, "join": 5, "deliver": 3},
        (
            *(("append", (0,)), ("fetch", (2,)), ("deliver", ("request", 0)), ("deliver", ("answer", 2))),
            *(("fetch", (2,)), ("deliver", ("request", 0)), ("cut the power", (2,)), ("start", (2,))),
        ),
    ),
    "reads_old_document": Focus(
        Setting(machines=2, min_isr=1, isr=1), {"request a read": 0.5, "read": 0.05, "join": 5, "deliver": 3}
    ),
    "truncates_late": Focus(
        Setting(machines=2, isr=2, terms=2, copies=1),
        {NEWEST: 0.9, NONE: 10, "deliver": 5, "sync": 2, "advance the high watermark": 2},
        (*TAKEOVER, ("fetch", (0,)), ("deliver", ("request", 1)), ("deliver a copy", ("answer", 0))),
    ),
    "joins_without_ceiling": Focus(
        Setting(machines=2, min_isr=1, isr=1, terms=2),
        {"stand": 0.2, "join": 3, "deliver": 2, "append": 3, "raise the ceiling": 3, "sync": 0.1},
    ),
    "joins_before_term_start": Focus(Setting(min_isr=1, isr=2, terms=2), {"join": 5, "deliver": 3}, TAKEOVER),
}
"""Mixed runs find some of these once in some thousand, others not at all. Runs that concern the rule find them soon."""
