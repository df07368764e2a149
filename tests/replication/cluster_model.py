"""A model of a replicated store with one partition. Each decision is a call of `segmentlog.policy`.

A `Cluster` is a state: the document, the machines, the messages that are under way, and what clients have seen. It is
immutable. `successors(kind, cluster, setting)` yields each step of one kind as (key, next state). A step is one atomic
action of one machine, or the arrival or loss of one message. Messages arrive late, twice, in any order, or never.

Swaps of the document are messages too: a machine learns the outcome only by reading the document, perhaps much later.
`check` raises `Broken` for a state that violates an invariant (`docs/replication-model.md` lists them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

from segmentlog.policy import replica_fetch
from segmentlog.policy import replication as policy
from segmentlog.policy.replica_fetch import Confirmation, EpochEnd, HighWatermark, LogHistory, ReplicaFetch, ReplicaId
from segmentlog.policy.replication import DiskEvidence, JoinProgress, LeaderAndIsr, Proposal, ReplicaRole, TermStart
from segmentlog.records import EpochStart, LostRange

NAMES: Final = ("a", "b", "c")
LOST: Final = -1
"""The record number of an entry that is a lost range."""


class Broken(AssertionError):
    """An invariant does not hold."""


class Setting(NamedTuple):
    """Size of a cluster, and how often each kind of event may happen in a run."""

    machines: int = 3
    min_isr: int = 2
    isr: int = 3
    """Members of the ISR at the beginning."""
    confirms_unsynced: bool = False
    step: int = 2
    records: int = 1 << 30
    terms: int = 1 << 30
    changes: int = 1 << 30
    """Proposals to shrink the ISR or to join it."""
    cuts: int = 1 << 30
    kills: int = 1 << 30
    copies: int = 1 << 30
    """Messages that arrive twice."""
    disks: int = 0
    forced: int = 0
    fetches: int = 2
    """Fetches and answers of one follower under way at the same time."""
    is_exhaustive: bool = False
    """Leave out steps that only make the state space larger: late reads, other changes of the document."""


class Entry(NamedTuple):
    """A record, or a lost range with the term that begins after it."""

    base: int
    end: int
    term: int
    record: int


class Machine(NamedTuple):
    """A machine: what is on its disk, and then the memory of its process."""

    incarnation: int
    term: int
    log: tuple[Entry, ...]
    synced: int
    """Entries that survive a power cut."""
    ceiling: int
    known: HighWatermark
    is_up: bool = True
    membership: LeaderAndIsr | None = None
    is_leading: bool = False
    candidate_term: int = 0
    proposals: tuple[Proposal, ...] = ()
    confirmations: tuple[tuple[ReplicaId, Confirmation], ...] = ()
    start: TermStart | None = None
    waiting: tuple[Entry, ...] = ()
    """Appends with acks=all that this process has not answered."""

    @property
    def log_end_offset(self) -> int:
        return self.log[-1].end if self.log else 0


class Used(NamedTuple):
    """Events that have happened: each has a limit in the `Setting`."""

    records: int = 0
    changes: int = 0
    cuts: int = 0
    kills: int = 0
    copies: int = 0
    disks: int = 0
    lost: int = 0
    """Power cuts after which a machine has a new incarnation."""
    forced: int = 0


Message = tuple[Any, ...]
"""("request", leader, ReplicaFetch), ("swap", proposer, LeaderAndIsr), ("read", reader, LeaderAndIsr), or
("answer", follower, ReplicaFetch, EpochEnd or None, entries, ceiling, HighWatermark)"""


class Cluster(NamedTuple):
    """A state of the model."""

    document: LeaderAndIsr
    machines: tuple[Machine, ...]
    messages: tuple[Message, ...]
    assigned: tuple[tuple[int, int], ...] = ()
    """Each (offset, record) that any leader has appended."""
    acknowledged: frozenset[tuple[int, int]] = frozenset()
    """(record, term) of each record that a leader of the term has acknowledged or shown below its high watermark."""
    shown: tuple[tuple[int, int, int], ...] = ()
    """(term, lowest, highest) high watermark that clients have seen."""
    used: Used = Used()


Step = tuple[Any, Cluster]


@lru_cache(None)
def replica_id(index: int, incarnation: int) -> ReplicaId:
    """Return the identity of a machine of the model."""
    return ReplicaId(NAMES[index], str(incarnation))


@lru_cache(1 << 16)
def history(log: tuple[Entry, ...]) -> LogHistory:
    """Return the shape of a log as its checkpoint records it."""
    epochs: list[EpochStart] = []
    lost: list[LostRange] = []
    for entry in log:
        if entry.record == LOST:
            lost.append(LostRange(entry.base, entry.end, entry.term, "takeover"))
        if not epochs or epochs[-1].epoch != entry.term:
            epochs.append(EpochStart(entry.term, entry.end if entry.record == LOST else entry.base))
    return LogHistory(tuple(epochs), tuple(lost), log[-1].end if log else 0)


def first_state(setting: Setting) -> Cluster:
    """Return a cluster in term 1: machine a leads, and every member of the ISR has noted the first ceiling."""
    isr = frozenset(replica_id(index, 0) for index in range(setting.isr))
    document = LeaderAndIsr(1, 1, NAMES[0], isr, setting.min_isr)
    ceiling = setting.step
    machine = Machine(0, 1, (), 0, ceiling, HighWatermark(1, 0), membership=document)
    leader = machine._replace(
        is_leading=True,
        confirmations=tuple(sorted((replica, Confirmation(1, 0, ceiling)) for replica in isr)),
        start=TermStart(1, 0, 0, ceiling),
    )
    return Cluster(document, (leader, *[machine] * (setting.machines - 1)), ())


# ---------------------------------------------------------------- invariants


def check(cluster: Cluster, setting: Setting) -> None:
    """Raise `Broken` if the state violates I1, I2, I3, I4, I5 or I6.

    After a forced takeover, records that leaders of older terms acknowledged may be gone: that is what forcing means.
    """
    document, forced_term = cluster.document, cluster.document.forced_term
    if cluster.assigned:
        offset, record = cluster.assigned[-1]
        for other, named in cluster.assigned[:-1]:
            if other == offset:
                raise Broken(f"I1: offset {offset} names the records {named} and {record}")
    needed = {record for record, term in cluster.acknowledged if term >= forced_term}
    for index, machine in enumerate(cluster.machines):
        log = machine.log if setting.confirms_unsynced else machine.log[: machine.synced]
        on_disk = {entry.record for entry in log}
        if replica_id(index, machine.incarnation) in document.isr and not needed <= on_disk:
            raise Broken(f"I3: {NAMES[index]} is in the ISR and lacks acknowledged records {needed - on_disk} on disk")
        if machine.is_up and machine.is_leading and machine.term == document.term:
            missing = needed - {entry.record for entry in machine.log}
            if missing:
                raise Broken(f"I2: {NAMES[index]} leads term {machine.term} and lacks acknowledged records {missing}")
    able = sum(replica_id(index, machine.incarnation) in document.isr for index, machine in enumerate(cluster.machines))
    if not forced_term and able + cluster.used.disks + cluster.used.lost < document.min_isr:
        raise Broken(
            f"I6: {able} machines can lead without a loss; with {document.min_isr - 1} fewer, none may be left"
        )
    _check_shown(cluster, forced_term)
    _check_equal(cluster, forced_term)


def _check_shown(cluster: Cluster, forced_term: int) -> None:
    for position, (term, _, highest) in enumerate(cluster.shown):
        for later, lowest, _ in cluster.shown[position + 1 :]:
            if lowest < highest and term >= forced_term:
                raise Broken(f"I4: clients saw the high watermark {highest} in term {term}, and {lowest} in {later}")


def _check_equal(cluster: Cluster, forced_term: int) -> None:
    logs = [machine for machine in cluster.machines if machine.known.term >= forced_term]
    for position, machine in enumerate(logs):
        for other in logs[position + 1 :]:
            offset = min(machine.known.offset, other.known.offset)
            for left, right in zip(machine.log, other.log, strict=False):
                if left.base >= offset:
                    break
                if left != right:
                    raise Broken(f"I5: two logs differ at {left.base}, below the high watermark {offset} of both")


# ---------------------------------------------------------------- steps of a machine


def _with(cluster: Cluster, index: int, **changes: Any) -> Cluster:
    machines = cluster.machines
    changed = machines[index]._replace(**changes)
    return cluster._replace(machines=(*machines[:index], changed, *machines[index + 1 :]))


def _use(cluster: Cluster, **events: int) -> Cluster:
    used = cluster.used
    return cluster._replace(used=used._replace(**{name: getattr(used, name) + count for name, count in events.items()}))


def _send(cluster: Cluster, message: Message) -> Cluster:
    return cluster if message in cluster.messages else cluster._replace(messages=(*cluster.messages, message))


def _without(messages: tuple[Message, ...], message: Message) -> tuple[Message, ...]:
    return tuple(other for other in messages if other != message)


def _running(cluster: Cluster) -> Iterator[tuple[int, Machine]]:
    return ((index, machine) for index, machine in enumerate(cluster.machines) if machine.is_up)


def _leading(cluster: Cluster) -> Iterator[tuple[int, Machine]]:
    return ((index, machine) for index, machine in _running(cluster) if machine.is_leading)


def _durable_offset(machine: Machine) -> int:
    return machine.log[machine.synced - 1].end if machine.synced else 0


def _own_confirmation(machine: Machine, setting: Setting) -> Confirmation:
    confirmed = replica_fetch.confirmed_offset(
        machine.log_end_offset, _durable_offset(machine), confirms_unsynced=setting.confirms_unsynced
    )
    return Confirmation(machine.term, confirmed, machine.ceiling)


def _reports(
    index: int, machine: Machine, setting: Setting
) -> tuple[frozenset[ReplicaId], dict[ReplicaId, Confirmation]]:
    """Return a leader's maximal ISR, and the confirmations that it has, with its own."""
    assert machine.membership is not None
    members = policy.maximal_isr(machine.membership, machine.proposals)
    confirmations = dict(machine.confirmations)
    confirmations[replica_id(index, machine.incarnation)] = _own_confirmation(machine, setting)
    return members, confirmations


def _limit(index: int, machine: Machine, setting: Setting) -> int:
    members, confirmations = _reports(index, machine, setting)
    return policy.append_limit(machine.term, members, confirmations)


def _sync(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for index, machine in _running(cluster):
        if machine.synced < len(machine.log):
            yield (index,), _with(cluster, index, synced=len(machine.log))


def _append(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    record = cluster.used.records
    for index, machine in _leading(cluster):
        offset = machine.log_end_offset
        if record < setting.records and offset < _limit(index, machine, setting):
            entry = Entry(offset, offset + 1, machine.term, record)
            after = _with(cluster, index, log=(*machine.log, entry), waiting=(*machine.waiting, entry))
            yield (
                (index, record, offset),
                _use(after, records=1)._replace(assigned=(*cluster.assigned, (offset, record))),
            )


def _raise_ceiling(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for index, machine in _leading(cluster):
        ceiling = policy.extend_ceiling(machine.log_end_offset, machine.ceiling, setting.step)
        if ceiling != machine.ceiling:
            yield (index, ceiling), _with(cluster, index, ceiling=ceiling)


def _advance(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for index, machine in _leading(cluster):
        assert machine.membership is not None
        assert machine.start is not None
        members, confirmations = _reports(index, machine, setting)
        offset = policy.advance_high_watermark(machine.known.offset, machine.membership, members, confirmations).offset
        if offset == machine.known.offset:
            continue
        after = _with(cluster, index, known=HighWatermark(machine.term, offset))
        below = {(entry.record, machine.term) for entry in machine.log if entry.end <= offset and entry.record != LOST}
        after = after._replace(acknowledged=cluster.acknowledged | below)
        yield (index, offset), _answer_waiting(_show(after, index), index)


def _show(cluster: Cluster, index: int) -> Cluster:
    """Show a leader's high watermark to a client, if it may be shown."""
    machine = cluster.machines[index]
    assert machine.start is not None
    offset = machine.known.offset
    if not policy.can_show_high_watermark(offset, machine.start):
        return cluster
    shown = {term: (lowest, highest) for term, lowest, highest in cluster.shown}
    lowest, highest = shown.get(machine.term, (offset, offset))
    shown[machine.term] = (min(lowest, offset), max(highest, offset))
    return cluster._replace(shown=tuple((term, *shown[term]) for term in sorted(shown)))


def _answer_waiting(cluster: Cluster, index: int) -> Cluster:
    """Acknowledge the appends of a process that count as replicated."""
    machine = cluster.machines[index]
    answered = [
        entry
        for entry in machine.waiting
        if policy.is_acknowledged(entry.term, entry.end, machine.term, machine.known.offset)
    ]
    if not answered:
        return cluster
    waiting = tuple(entry for entry in machine.waiting if entry not in answered)
    acknowledged = cluster.acknowledged | {(entry.record, entry.term) for entry in answered}
    return _with(cluster, index, waiting=waiting)._replace(acknowledged=acknowledged)


def _shrink(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for index, machine in _leading(cluster):
        assert machine.membership is not None
        for replica in sorted(machine.membership.isr):
            yield from _change(cluster, index, policy.propose_shrink(machine.membership, {replica}), setting)


def _join(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for index, machine in _leading(cluster):
        assert machine.membership is not None
        assert machine.start is not None
        limit = _limit(index, machine, setting)
        for replica, report in machine.confirmations:
            progress = JoinProgress(
                report, machine.known.offset, machine.start.log_end_offset, limit, machine.start.next_offset
            )
            yield from _change(cluster, index, policy.propose_join(machine.membership, replica, [progress]), setting)


def _change(cluster: Cluster, index: int, proposal: Proposal | policy.Refused, setting: Setting) -> Iterator[Step]:
    """Yield a leader's proposal to change the ISR: first its own maximal ISR changes, and then the swap is sent."""
    if isinstance(proposal, Proposal) and cluster.used.changes < setting.changes:
        proposals = cluster.machines[index].proposals
        if proposal not in proposals:
            after = _with(cluster, index, proposals=(*proposals, proposal))
            yield (index, proposal.reason), _use(_send(after, ("swap", index, proposal.membership)), changes=1)


def _stand(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for index, machine in _running(cluster):
        seen = machine.membership
        if machine.is_leading or machine.candidate_term or seen is None or seen.term != machine.term:
            continue
        if seen.term >= setting.terms:
            continue
        for is_leader_alive in (False,) if setting.is_exhaustive else (False, True):
            replica = replica_id(index, machine.incarnation)
            proposal = policy.propose_takeover(seen, replica, is_leader_alive=is_leader_alive)
            if isinstance(proposal, Proposal):
                after = _with(cluster, index, candidate_term=proposal.membership.term)
                yield (index, proposal.membership.term), _send(after, ("swap", index, proposal.membership))


def _force(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for index, machine in _running(cluster):
        seen = machine.membership
        if machine.is_leading or seen is None or seen.term != machine.term or cluster.used.forced >= setting.forced:
            continue
        proposal = policy.propose_forced_takeover(seen, replica_id(index, machine.incarnation))
        after = _use(_with(cluster, index, candidate_term=proposal.membership.term), forced=1)
        yield (index, proposal.membership.term), _send(after, ("swap", index, proposal.membership))


def _read(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for index, machine in _running(cluster):
        after = _learn(cluster, index, cluster.document, setting)
        if after.machines[index] != machine:
            yield (index, cluster.document.version), after


def _learn(cluster: Cluster, index: int, read: LeaderAndIsr, setting: Setting) -> Cluster:
    """Return the state after a machine has read this version of the document."""
    machine = cluster.machines[index]
    membership = policy.newest_membership(machine.membership, read)
    replica = replica_id(index, machine.incarnation)
    verdict = policy.decide_role(
        replica, machine.term, membership, is_leading=machine.is_leading, candidate_term=machine.candidate_term
    )
    if verdict.role is ReplicaRole.LEAD:
        proposals = policy.undecided_proposals(membership, machine.proposals)
        return _with(cluster, index, membership=membership, proposals=proposals)
    changes: dict[str, Any] = {"membership": membership, "term": verdict.term, "candidate_term": 0}
    changes |= {"is_leading": False, "proposals": (), "confirmations": (), "start": None}
    if verdict.role is ReplicaRole.SUCCEED:
        start = policy.begin_term(membership, history(machine.log), machine.ceiling, setting.step)
        lost = Entry(start.log_end_offset, start.next_offset, start.term, LOST)
        changes |= {"is_leading": True, "start": start, "ceiling": start.offset_ceiling}
        confirmed = _own_confirmation(machine, setting).confirmed_offset
        changes["known"] = replica_fetch.limit_high_watermark(machine.known, confirmed)
        changes["log"] = (*machine.log, lost) if lost.base < lost.end else machine.log
        return _show(_with(cluster, index, **changes), index)
    return _with(cluster, index, **changes)


def _request_read(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    if setting.is_exhaustive:
        return
    for index, _ in _running(cluster):
        message = ("read", index, cluster.document)
        if message not in cluster.messages:
            yield (index, cluster.document.version), _send(cluster, message)


def _touch_document(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    """Yield a change of an address in the document: every swap under way will fail."""
    if not setting.is_exhaustive:
        document = policy.replace(cluster.document, version=cluster.document.version + 1)
        yield (document.version,), cluster._replace(document=document)


# ---------------------------------------------------------------- messages


def _fetch(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for index, machine in _running(cluster):
        seen = machine.membership
        if machine.is_leading or machine.candidate_term or seen is None or seen.term != machine.term:
            continue
        if seen.leader in (None, NAMES[index]):
            continue
        replica = replica_id(index, machine.incarnation)
        under_way = sum(
            message[0] in ("request", "answer") and message[2].replica == replica for message in cluster.messages
        )
        if under_way >= setting.fetches:
            continue
        shape, own = history(machine.log), _own_confirmation(machine, setting)
        fetch = ReplicaFetch(
            replica, machine.term, shape.last_epoch, shape.log_end_offset, own.confirmed_offset, machine.ceiling
        )
        message = ("request", NAMES.index(str(seen.leader)), fetch)
        if message not in cluster.messages:
            yield (index, shape.log_end_offset), _send(cluster, message)


def _take_fetch(cluster: Cluster, index: int, fetch: ReplicaFetch) -> Cluster:
    machine = cluster.machines[index]
    if not machine.is_up or not machine.is_leading:
        return cluster
    confirmations = dict(machine.confirmations)
    verdict = replica_fetch.review_fetch(machine.term, history(machine.log), fetch, confirmations.get(fetch.replica))
    if verdict.newer_term is not None:
        return _with(
            cluster, index, term=verdict.newer_term, is_leading=False, proposals=(), confirmations=(), start=None
        )
    if verdict.confirmation is not None:
        confirmations[fetch.replica] = verdict.confirmation
        cluster = _with(cluster, index, confirmations=tuple(sorted(confirmations.items())))
    elif verdict.divergence is None:
        return cluster
    entries = tuple(entry for entry in machine.log if entry.base >= fetch.log_end_offset)
    reported = HighWatermark(machine.term, machine.known.offset)
    follower = NAMES.index(fetch.replica.machine)
    if verdict.divergence is not None:
        entries = ()
    return _send(cluster, ("answer", follower, fetch, verdict.divergence, entries, machine.ceiling, reported))


def _take_answer(
    cluster: Cluster, index: int, fetch: ReplicaFetch, divergence: EpochEnd | None, entries: tuple[Entry, ...],
    ceiling: int, reported: HighWatermark,
) -> Cluster:  # fmt: skip
    machine = cluster.machines[index]
    if not machine.is_up or machine.is_leading or machine.candidate_term:
        return cluster
    replica, shape = replica_id(index, machine.incarnation), history(machine.log)
    forced_term = machine.membership.forced_term if machine.membership else 0
    verdict = replica_fetch.review_answer(replica, machine.term, shape, machine.known, forced_term, fetch, divergence)
    if verdict.appends:
        if entries and entries[0].base != machine.log_end_offset:
            return cluster  # the library's append at a given offset refuses it
        log = (*machine.log, *entries)
        known = replica_fetch.learn_high_watermark(machine.known, reported, log[-1].end if log else 0)
        after = _with(cluster, index, log=log, ceiling=max(machine.ceiling, ceiling), known=known)
        return _answer_waiting(after, index)
    if verdict.truncate_to is None:
        return cluster
    log = _truncated(machine.log, verdict.truncate_to)
    return _with(cluster, index, log=log, synced=min(machine.synced, len(log)), known=_limited(machine, log))


def _truncated(log: tuple[Entry, ...], offset: int) -> tuple[Entry, ...]:
    kept = tuple(entry for entry in log if entry.end <= offset)
    following = log[len(kept)] if len(kept) < len(log) else None
    if following is not None and following.record == LOST and following.base < offset:
        return (*kept, following._replace(end=offset))
    return kept


def _limited(machine: Machine, log: tuple[Entry, ...]) -> HighWatermark:
    return replica_fetch.limit_high_watermark(machine.known, log[-1].end if log else 0)


def _deliver(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for message in cluster.messages:
        yield message, _arrive(cluster._replace(messages=_without(cluster.messages, message)), message, setting)


def _deliver_copy(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    """Yield the arrival of each message that stays under way: it arrives again later."""
    if cluster.used.copies < setting.copies:
        for message in cluster.messages:
            yield message, _use(_arrive(cluster, message, setting), copies=1)


def _arrive(cluster: Cluster, message: Message, setting: Setting) -> Cluster:
    match message:
        case ("swap", _, proposed):
            is_current = proposed.version == cluster.document.version + 1
            return cluster._replace(document=proposed) if is_current else cluster
        case ("read", index, read):
            return _learn(cluster, index, read, setting) if cluster.machines[index].is_up else cluster
        case ("request", index, fetch):
            return _take_fetch(cluster, index, fetch)
    _, index, fetch, divergence, entries, ceiling, reported = message
    return _take_answer(cluster, index, fetch, divergence, entries, ceiling, reported)


def _lose(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for message in cluster.messages:
        yield message, cluster._replace(messages=_without(cluster.messages, message))


# ---------------------------------------------------------------- faults


def _stopped(cluster: Cluster, index: int) -> Cluster:
    """Stop a process: its memory is gone, and what it has asked the engine is never answered."""
    machine = cluster.machines[index]
    kept = Machine(
        machine.incarnation, machine.term, machine.log, machine.synced, machine.ceiling, machine.known, False
    )
    messages = tuple(message for message in cluster.messages if message[:2] != ("read", index))
    return _with(cluster._replace(messages=messages), index, **kept._asdict())


def _kill(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    if cluster.used.kills < setting.kills:
        for index, _ in _running(cluster):
            yield (index,), _use(_stopped(cluster, index), kills=1)


def _cut(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    """Yield power cuts: a machine loses a part of its unsynced entries."""
    if cluster.used.cuts >= setting.cuts:
        return
    for index, machine in enumerate(cluster.machines):
        found = DiskEvidence(str(machine.incarnation), True, True, True, setting.confirms_unsynced)
        incarnation = machine.incarnation + (policy.incarnation_change(found) is not None)
        for length in (machine.synced,) if setting.is_exhaustive else range(machine.synced, len(machine.log) + 1):
            log = machine.log[:length]
            after = _with(
                _stopped(cluster, index), index,
                log=log, synced=length, incarnation=incarnation, known=_limited(machine, log),
            )  # fmt: skip
            yield (index, length), _use(after, cuts=1, lost=incarnation - machine.incarnation)


def _replace_disk(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    if cluster.used.disks < setting.disks:
        for index, machine in enumerate(cluster.machines):
            renewed = policy.incarnation_change(DiskEvidence("", True, True, False, False)) is not None
            empty = Machine(machine.incarnation + renewed, 0, (), 0, 0, HighWatermark(0, 0), False)
            yield (index,), _use(_with(_stopped(cluster, index), index, **empty._asdict()), disks=1)


def _start(cluster: Cluster, setting: Setting) -> Iterator[Step]:
    for index, machine in enumerate(cluster.machines):
        if not machine.is_up:
            yield (index,), _with(cluster, index, is_up=True)


STEPS: Final[dict[str, Callable[[Cluster, Setting], Iterator[Step]]]] = {
    "append": _append,
    "sync": _sync,
    "fetch": _fetch,
    "deliver": _deliver,
    "advance the high watermark": _advance,
    "raise the ceiling": _raise_ceiling,
    "shrink": _shrink,
    "join": _join,
    "stand": _stand,
    "read the document": _read,
    "request a read": _request_read,
    "touch the document": _touch_document,
    "deliver a copy": _deliver_copy,
    "lose": _lose,
    "kill": _kill,
    "cut the power": _cut,
    "replace the disk": _replace_disk,
    "force": _force,
    "start": _start,
}
"""The kinds of steps; each function yields the steps of its kind that are possible in a state."""


def describe(kind: str, key: Any) -> str:
    """Return a line about a step, for a trace."""
    if kind in ("deliver", "deliver a copy", "lose"):
        return f"{kind}: {describe_message(key)}"
    if kind == "touch the document":
        return f"the document becomes version {key[0]} for another reason"
    details = " ".join(str(part) for part in key[1:])
    return f"{NAMES[key[0]]}: {kind} {details}".rstrip()


def describe_message(message: Message) -> str:
    """Return a message in words."""
    kind, index, content = message[:3]
    name = NAMES[index]
    if kind == "request":
        return (
            f"fetch of {content.replica.machine} to {name}, term {content.term}, from {content.log_end_offset} after"
            f" epoch {content.last_epoch}, confirms {content.confirmed_offset}, ceiling {content.offset_ceiling}"
        )
    if kind == "answer":
        _, _, fetch, divergence, entries, ceiling, reported = message
        found = f"epoch {divergence.epoch} ends at {divergence.end_offset}" if divergence else f"{len(entries)} entries"
        return (
            f"answer to {name}, term {fetch.term}, from {fetch.log_end_offset}: {found}, ceiling {ceiling}, high"
            f" watermark {reported.offset}"
        )
    isr = " ".join(sorted(f"{replica.machine}{replica.incarnation}" for replica in content.isr))
    what = "swap by" if kind == "swap" else "read of the document by"
    return f"{what} {name}: version {content.version}, term {content.term}, leader {content.leader}, ISR {isr}"
