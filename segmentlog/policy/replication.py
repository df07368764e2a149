"""Decide who leads a replicated store, which replicas are in sync, and what counts as replicated. Pure.

A store has one leader and followers. A small document in a coordination engine names the leader, its term and the
in-sync replicas (ISR). A machine changes the document only by a conditional swap: it succeeds if the version is still
the one that the machine read. `docs/replication-model.md` explains the rules R1-R11 and how they are tested.

    R1  append_limit, extend_ceiling           R6   propose_takeover, begin_term
    R2  maximal_isr, advance_high_watermark    R7   decide_role
    R3  is_acknowledged                        R8   incarnation_change
    R4  propose_shrink                         R9   decide_role; replica_fetch.review_fetch
    R5  propose_join                           R10  replica_fetch.review_answer
                                               R11  propose_forced_takeover, begin_term

The term of the document is the leader epoch of the records. A function that refuses returns `Refused` with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from segmentlog.policy.recovery_policy import UNKNOWN_CEILING_GAP
from segmentlog.policy.replica_fetch import Confirmation, LogHistory, ReplicaId

SLOW_SYNC_MS: Final = 5_000
"""A leader whose fsync takes longer hands over to a machine with a faster disk."""
SILENCE_MS: Final = 8_000
"""A leader reads the document again if no follower has fetched for this long: another machine may lead by now."""
REPLICA_LAG_MS: Final = 4_000
"""A leader removes a replica from the ISR if it was not caught up for this long (Kafka: replica.lag.time.max.ms)."""


class LeaderAndIsr(msgspec.Struct, frozen=True):
    """The membership of a store: the part of the cluster document that these decisions need (Kafka: LeaderAndIsr).

    ``forced_term`` is the newest term that a person forced, or 0. It stays in the document in later terms, because a
    follower may miss the forced term itself.
    """

    version: int
    term: int
    leader: str | None
    isr: frozenset[ReplicaId]
    min_isr: int
    forced_term: int = 0


class Proposal(NamedTuple):
    """A swap of the document from version ``membership.version - 1`` to ``membership``."""

    membership: LeaderAndIsr
    reason: str


class Refused(NamedTuple):
    """A change that must not be proposed now."""

    reason: str


class Advance(NamedTuple):
    """The high watermark after a decision. The reason names what limits it."""

    offset: int
    reason: str


class ReplicaRole(StrEnum):
    """The role of a machine after it has read the document."""

    LEAD = "lead"
    """Continue to lead, with the membership as read."""
    SUCCEED = "succeed"
    """Begin to lead: `begin_term`."""
    STAND = "stand"
    """The document names the machine, but this process has not won that term: take a new term first."""
    FOLLOW = "follow"


class RoleVerdict(NamedTuple):
    """ReplicaRole and term of a machine. A higher term than before must be on disk before anything else happens."""

    role: ReplicaRole
    term: int
    reason: str


class TermStart(NamedTuple):
    """Where a new leader continues. It must note term, ceiling and lost range on disk before its first append.

    log_end_offset  the end of its log when the term began; ``[log_end_offset, next_offset)`` is a lost range
    next_offset     the first offset of the term
    """

    term: int
    log_end_offset: int
    next_offset: int
    offset_ceiling: int


class JoinProgress(NamedTuple):
    """A partition of a follower that wants to join the ISR, beside the leader's."""

    confirmation: Confirmation | None
    high_watermark: int
    term_start_offset: int
    """`TermStart.log_end_offset` of the leader's term."""
    append_limit: int
    term_next_offset: int
    """`TermStart.next_offset` of the leader's term. Earlier leaders may have assigned any offset below it."""


class Duty(StrEnum):
    """The next action of a leader."""

    CONTINUE = "continue"
    READ_DOCUMENT = "read the document"
    HAND_OVER = "hand over"
    STEP_DOWN = "step down"


class DutyVerdict(NamedTuple):
    """A leader's next duty, and to which replica it hands over."""

    duty: Duty
    successor: ReplicaId | None
    reason: str


class DiskEvidence(NamedTuple):
    """Facts about the data of a starting machine."""

    incarnation: str
    """As the store recorded it; empty if the store has no record."""
    is_same_folder: bool
    """The folder is the original, on its original disk."""
    is_intact: bool
    """Recovery found every record that was synced, with a valid checksum."""
    machine_died: bool
    """The machine lost its page cache since the last append."""
    confirms_unsynced: bool
    """The store confirms records that are written but not synced (mode ``written``)."""


# ---------------------------------------------------------------- the leader: appends and the high watermark


def undecided_proposals(membership: LeaderAndIsr, proposals: Iterable[Proposal]) -> tuple[Proposal, ...]:
    """Return the proposals whose outcome is unknown: the document has not passed the version they start from."""
    return tuple(proposal for proposal in proposals if proposal.membership.version > membership.version)


def maximal_isr(membership: LeaderAndIsr, proposals: Iterable[Proposal]) -> frozenset[ReplicaId]:
    """Return every replica that may be in the document's ISR now: as last read, and in each undecided proposal (R2)."""
    return membership.isr.union(*(proposal.membership.isr for proposal in proposals))


def append_limit(term: int, members: Iterable[ReplicaId], confirmations: Mapping[ReplicaId, Confirmation]) -> int:
    """Return the end of the offsets that the leader may assign (R1): 0 until every member has reported in its term.

    ``members`` is the maximal ISR and includes the leader; so does ``confirmations``.
    """
    reported = [confirmations.get(member) for member in members]
    return min((report.offset_ceiling if report and report.term == term else 0 for report in reported), default=0)


def extend_ceiling(log_end_offset: int, offset_ceiling: int, step: int) -> int:
    """Return the ceiling that the leader notes on its own disk: the same until half a step or less is left."""
    return offset_ceiling if log_end_offset + step // 2 < offset_ceiling else log_end_offset + step


def advance_high_watermark(
    offset: int, membership: LeaderAndIsr, members: Iterable[ReplicaId], confirmations: Mapping[ReplicaId, Confirmation]
) -> Advance:
    """Return the high watermark of the leader's term (R2). It never falls; ``members`` is the maximal ISR."""
    if len(membership.isr) < membership.min_isr:
        return Advance(offset, f"the ISR has {len(membership.isr)} members of at least {membership.min_isr}")
    lowest: int | None = None
    reason = "the ISR is empty"
    for member in members:
        report = confirmations.get(member)
        if report is None or report.term != membership.term:
            return Advance(offset, f"{member.machine} has not fetched in term {membership.term}")
        if lowest is None or report.confirmed_offset < lowest:
            lowest, reason = report.confirmed_offset, f"{member.machine} has confirmed {report.confirmed_offset}"
    return Advance(offset if lowest is None else max(offset, lowest), reason)


def can_show_high_watermark(offset: int, start: TermStart) -> bool:
    """Return whether clients may see a new leader's high watermark: it has reached each that an older leader showed."""
    return offset >= start.log_end_offset


def is_acknowledged(append_term: int, end_offset: int, term: int, high_watermark: int) -> bool:
    """Return whether an append is replicated (R3): covered by the high watermark of the term that appended it."""
    return append_term == term and end_offset <= high_watermark


# ---------------------------------------------------------------- the leader: the in-sync replicas


def lagging_replicas(
    membership: LeaderAndIsr, caught_up_ms: Mapping[ReplicaId, int], now_ms: int, max_lag_ms: int = REPLICA_LAG_MS
) -> frozenset[ReplicaId]:
    """Return the followers in the ISR that were last caught up more than ``max_lag_ms`` ago, or never."""
    followers = (replica for replica in membership.isr if replica.machine != membership.leader)
    return frozenset(replica for replica in followers if now_ms - caught_up_ms.get(replica, -1 << 63) > max_lag_ms)


def propose_shrink(membership: LeaderAndIsr, removed: AbstractSet[ReplicaId]) -> Proposal | Refused:
    """Propose to remove replicas from the ISR (R4). The result has at least ``min_isr`` members, with the leader.

    A store with fewer live replicas keeps its ISR. It acknowledges nothing meanwhile, and each member can still lead.
    """
    isr = frozenset(replica for replica in membership.isr if replica not in removed)
    if isr == membership.isr:
        return Refused("none of the replicas is in the ISR")
    if all(replica.machine != membership.leader for replica in isr):
        return Refused("the leader stays in the ISR")
    if len(isr) < membership.min_isr:
        return Refused(f"the ISR would have {len(isr)} members of at least {membership.min_isr}")
    names = ", ".join(sorted(replica.machine for replica in membership.isr - isr))
    return _proposal(membership, isr, f"{names} left the ISR")


def propose_join(
    membership: LeaderAndIsr, follower: ReplicaId, partitions: Iterable[JoinProgress]
) -> Proposal | Refused:
    """Propose to add a follower to the ISR (R5), in place of older incarnations of the same machine.

    The leader must count the follower as a member of the maximal ISR before it sends the swap.
    """
    if follower in membership.isr:
        return Refused("the replica is in the ISR already")
    for progress in partitions:
        report = progress.confirmation
        if report is None or report.term != membership.term:
            return Refused(f"{follower.machine} has not fetched in term {membership.term}")
        wanted = max(progress.high_watermark, progress.term_start_offset)
        if report.confirmed_offset < wanted:
            return Refused(f"{follower.machine} has confirmed {report.confirmed_offset} of {wanted}")
        # The limit alone is not enough: it is 0 while a member of the ISR has confirmed nothing in this term.
        ceiling = max(progress.append_limit, progress.term_next_offset)
        if report.offset_ceiling < ceiling:
            return Refused(f"{follower.machine} has noted the ceiling {report.offset_ceiling} of {ceiling}")
    others = frozenset(replica for replica in membership.isr if replica.machine != follower.machine)
    return _proposal(membership, others | {follower}, f"{follower.machine} is in sync")


def _proposal(membership: LeaderAndIsr, isr: frozenset[ReplicaId], reason: str) -> Proposal:
    return Proposal(replace(membership, version=membership.version + 1, isr=isr), reason)


def review_leadership(
    membership: LeaderAndIsr, replica: ReplicaId, confirmed_offsets: Mapping[ReplicaId, int],
    *, newest_term: int, sync_ms: int, silence_ms: int, is_asked: bool = False,
) -> DutyVerdict:  # fmt: skip
    """Decide whether a leader continues.

    ``confirmed_offsets`` has, for each follower that fetches now, the sum of its confirmed offsets over all
    partitions. ``newest_term`` is the highest term that any machine has reported. ``sync_ms`` is the time that the
    running fsync has taken, and ``silence_ms`` the time since any follower fetched. ``is_asked`` means that a person or
    Kafka's leader election asks for another leader.
    """
    if newest_term > membership.term or membership.leader != replica.machine:
        return DutyVerdict(Duty.STEP_DOWN, None, f"a machine has reported term {newest_term}")
    if is_asked or sync_ms > SLOW_SYNC_MS:
        able = [other for other in confirmed_offsets if other in membership.isr and other.machine != replica.machine]
        if able:
            successor = min(able, key=lambda other: (-confirmed_offsets[other], other.machine))
            return DutyVerdict(Duty.HAND_OVER, successor, "asked for" if is_asked else f"an fsync takes {sync_ms} ms")
    if silence_ms > SILENCE_MS and len(membership.isr) > 1:
        return DutyVerdict(Duty.READ_DOCUMENT, None, f"no follower has fetched for {silence_ms} ms")
    return DutyVerdict(Duty.CONTINUE, None, "it leads the newest term")


# ---------------------------------------------------------------- terms


def newest_membership(known: LeaderAndIsr | None, read: LeaderAndIsr) -> LeaderAndIsr:
    """Return the newer of two memberships: a read of the document may arrive after a later read."""
    return read if known is None or read.version > known.version else known


def decide_role(
    replica: ReplicaId, term: int, membership: LeaderAndIsr, *, is_leading: bool, candidate_term: int
) -> RoleVerdict:
    """Decide the role of a machine that has read the document (R6, R7, R9).

    ``term`` is the highest term that the machine knows; it is on its disk. ``is_leading`` means that this process leads
    it. ``candidate_term`` is the term that this process has proposed, or 0 if it has fetched since then.
    """
    if membership.term < term:
        return RoleVerdict(ReplicaRole.FOLLOW, term, f"the document was read before term {term}")
    if membership.leader != replica.machine:
        return RoleVerdict(ReplicaRole.FOLLOW, membership.term, f"{membership.leader} leads term {membership.term}")
    if is_leading and membership.term == term:
        return RoleVerdict(ReplicaRole.LEAD, term, f"it leads term {term}")
    if candidate_term == membership.term and replica in membership.isr:
        return RoleVerdict(ReplicaRole.SUCCEED, membership.term, f"its proposal won term {membership.term}")
    return RoleVerdict(ReplicaRole.STAND, membership.term, f"this process has not led term {membership.term}")


def propose_takeover(
    membership: LeaderAndIsr, replica: ReplicaId, *, is_leader_alive: bool = False
) -> Proposal | Refused:
    """Propose the next term with this replica as leader (R6). It must have stopped fetching before.

    The old leader leaves the ISR if enough members remain, except after a hand-over (``is_leader_alive``).
    """
    if replica not in membership.isr:
        return Refused(f"{replica.machine} is not in the ISR with its present incarnation")
    isr = frozenset(member for member in membership.isr if member == replica or member.machine != membership.leader)
    if is_leader_alive or len(isr) < membership.min_isr:
        isr = membership.isr
    return _next_term(membership, replica, isr, membership.forced_term, f"{replica.machine} takes over")


def propose_forced_takeover(membership: LeaderAndIsr, replica: ReplicaId) -> Proposal:
    """Propose a term that a person forced (R11). The ISR is this replica alone; acknowledged records may be lost."""
    isr = frozenset({replica})
    return _next_term(membership, replica, isr, membership.term + 1, f"a person made {replica.machine} the leader")


def _next_term(
    membership: LeaderAndIsr, replica: ReplicaId, isr: frozenset[ReplicaId], forced_term: int, reason: str
) -> Proposal:
    version, term = membership.version + 1, membership.term + 1
    return Proposal(LeaderAndIsr(version, term, replica.machine, isr, membership.min_isr, forced_term), reason)


def begin_term(membership: LeaderAndIsr, history: LogHistory, offset_ceiling: int, step: int) -> TermStart:
    """Return where the leader of a new term continues: at the ceiling that it has noted (R6).

    No older leader assigned an offset at or above that ceiling, because the ceiling of each ISR member limits appends.
    A forced leader was perhaps no member. It skips 2^32 offsets, and begins at 2^32 times its term at least: so it also
    skips the offsets of earlier forced leaders that it knows nothing of. If it dies before it begins the forced term,
    it skips them at the start of a later term.
    """
    next_offset = max(history.log_end_offset, offset_ceiling)
    if max(history.last_epoch, 0) < membership.forced_term:
        next_offset = max(next_offset + UNKNOWN_CEILING_GAP, membership.term * UNKNOWN_CEILING_GAP)
    return TermStart(membership.term, history.log_end_offset, next_offset, next_offset + step)


def incarnation_change(found: DiskEvidence) -> str | None:
    """Return why a starting machine needs a new incarnation (R8), or None if every confirmed record is present."""
    if not found.incarnation:
        return "the store has no incarnation yet"
    if not found.is_same_folder:
        return "the folder is a copy, or its disk was replaced"
    if not found.is_intact:
        return "recovery did not find every record that was synced"
    if found.machine_died and found.confirms_unsynced:
        return "the machine died, and the store confirms records before they are synced"
    return None
