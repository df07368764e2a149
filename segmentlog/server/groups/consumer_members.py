"""Members of a group of the consumer protocol, their current partitions, and their target assignment.

`consumer_heartbeat` and `consumer_group` handle the requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from segmentlog.groups.server_group_file import SavedConsumerState, SavedGroup, SavedMember
from segmentlog.policy.assignment import assign
from segmentlog.policy.reconciliation import Holding, Stage
from segmentlog.policy.topic_pattern import TopicPattern
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import GroupSettings, GroupState, metadata_size_bytes
from segmentlog.server.groups.consumer_types import (
    ASSIGNORS,
    ClassicProtocolState,
    ConsumerMember,
    Ownership,
    TopicCatalog,
    TopicShape,
    by_topic,
    partition_set,
)
from segmentlog.server.groups.members import Answer
from segmentlog.server.groups.subscriptions import CONSUMER

TOPIC_CHECK_MS: Final = 1_000
"""Minimum time between two checks, at a group's heartbeats, whether its topics have changed."""
_PATTERNS_MAX: Final = 100


class ConsumerMembers:
    """The members of a group of the consumer protocol, and the owner of each partition."""

    protocol_type: Final = CONSUMER

    def __init__(self, settings: GroupSettings, catalog: TopicCatalog) -> None:
        self.generation = 0
        """The group's epoch. It is also the epoch of the target assignment, which is computed with it."""
        self.assignor = next(iter(ASSIGNORS))
        self.members: dict[str, ConsumerMember] = {}
        self.answers: list[tuple[object, Answer]] = []
        self.is_changed = False
        self.expired_ids: list[str] = []
        """Ids of expired members, to be logged."""
        self._settings = settings
        self._catalog = catalog
        self._static: dict[str, str] = {}
        self._owners: dict[PartitionId, Ownership] = {}
        self._shapes: dict[str, TopicShape] = {}
        """The topics for which the target assignment was computed."""
        self._topics_checked_ms: int | None = None
        self._matches: dict[str, tuple[Collection[str], list[str]]] = {}
        """By regular expression: the list of topics that was searched, and the topics that match."""
        self._patterns: dict[str, TopicPattern] = {}
        self._is_dead = False
        self._earliest_due_ms: int | None = None
        """No member expires before this time, so heartbeats before it need not check all members."""

    def configure(self, settings: GroupSettings) -> None:
        """Change the settings. Sessions that are already running keep their deadlines."""
        self._settings = settings

    @property
    def state(self) -> GroupState:
        """Return the state of the group."""
        if self._is_dead:
            return GroupState.DEAD
        if not self.members:
            return GroupState.EMPTY
        if all(
            member.holding.stage is Stage.SETTLED and member.holding.epoch == self.generation for member in self.all()
        ):
            return GroupState.STABLE
        return GroupState.RECONCILING

    @property
    def is_empty(self) -> bool:
        """Return whether the group exists and has no members."""
        return not self.members and not self._is_dead

    @property
    def is_idle(self) -> bool:
        """Return whether the group can be dropped from memory."""
        return not self.members

    @property
    def should_downgrade(self) -> bool:
        """Return whether the group must return to the classic protocol: only members of that protocol remain."""
        return (
            bool(self.members)
            and self._settings.may_downgrade
            and all(member.classic is not None for member in self.all())
        )

    def all(self) -> Collection[ConsumerMember]:
        """Return the members."""
        return self.members.values()

    @property
    def subscribed_topics(self) -> set[str]:
        """Return the topics that any member subscribes to."""
        return {name for member in self.all() for name in member.subscribed}

    def names_of(self, partitions: Collection[PartitionId]) -> dict[str, list[int]]:
        """Convert partitions by topic id to partitions by topic name. Omit topics that no member subscribes to."""
        names = {shape.id: name for name, shape in self._shapes.items()}
        return {names[topic_id]: numbers for topic_id, numbers in by_topic(partitions).items() if topic_id in names}

    def ids_of(self, partitions: Mapping[str, Collection[int]]) -> frozenset[PartitionId]:
        """Convert partitions by topic name to partitions with topic ids. Omit topics that no member subscribes to."""
        known = {name: shape.id for name, shape in self._shapes.items()}
        return partition_set({known[name]: numbers for name, numbers in partitions.items() if name in known})

    # ------------------------------------------------------------ checks

    def _member_error(self, member_id: str, instance_id: str | None) -> ErrorCode:
        if instance_id is not None:
            known = self._static.get(instance_id)
            if known is not None and known != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
            if known is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE if member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    def _is_full(self, known: str, metadata_bytes: int) -> bool:
        """Return whether a limit forbids a member with metadata of this size.

        ``known`` is the member's id if the group already counts it; empty for a new member.
        """
        if known not in self.members and len(self.members) >= self._settings.max_size:
            return True
        others_bytes = sum(_member_size_bytes(member) for member in self.all() if member.id != known)
        return others_bytes + metadata_bytes > self._settings.group_bytes

    # ------------------------------------------------------------ changing a member

    def _track_deadline(self, member: ConsumerMember) -> None:
        """Update the earliest deadline of the group after the member's deadline has changed."""
        due_ms = member.due_ms
        if self._earliest_due_ms is None or due_ms < self._earliest_due_ms:
            self._earliest_due_ms = due_ms

    def _set_holding(self, member: ConsumerMember, holding: Holding) -> None:
        if holding == member.holding:
            return
        for partition in member.holding.held - holding.held:
            del self._owners[partition]
        # A partition that the member has released and receives again counts as received now.
        regained = holding.assigned & member.holding.revoking
        for partition in (holding.held - member.holding.held) | regained:
            assert self._is_free_for(member, partition), "a partition has one owner"
            self._owners[partition] = Ownership(member.id, self.generation)
        member.holding = holding
        self.is_changed = True

    def _is_free_for(self, member: ConsumerMember, partition: PartitionId) -> bool:
        owner = self._owners.get(partition)
        return owner is None or owner.member_id == member.id

    def _has_held_since(self, member: ConsumerMember, partition: PartitionId, epoch: int) -> bool:
        """Return whether the member holds the partition, and has held it without interruption since this epoch."""
        owner = self._owners.get(partition)
        return owner is not None and owner.member_id == member.id and owner.since_epoch <= epoch

    def _add(self, member: ConsumerMember) -> None:
        self.members[member.id] = member
        if member.instance_id is not None:
            self._static[member.instance_id] = member.id

    def _remove(self, member: ConsumerMember) -> None:
        self._set_holding(member, Holding())
        del self.members[member.id]
        if member.instance_id is not None:
            del self._static[member.instance_id]
        self.is_changed = True

    def _replace_static_member(self, old: ConsumerMember, member_id: str) -> ConsumerMember:
        """Change the process of a static member. The new process may have another id, and keeps the partitions."""
        assigned, target = old.holding.assigned, old.target
        self._remove(old)
        member = ConsumerMember(member_id, old.instance_id, target=target)
        member.topics, member.regex, member.matched = old.topics, old.regex, old.matched
        member.assignor, member.rack_id = old.assignor, old.rack_id
        self._add(member)
        self._set_holding(member, Holding(assigned=assigned))
        return member

    # ------------------------------------------------------------ target assignment

    def _topics_changed(self, now_ms: int, *, at_once: bool = False) -> bool:
        """Read the subscribed topics, unless the last check was a moment ago. Return whether they have changed."""
        if not at_once and self._topics_checked_ms is not None and now_ms - self._topics_checked_ms < TOPIC_CHECK_MS:
            return False
        shapes = dict(self._catalog.shapes(self.subscribed_topics))
        self._topics_checked_ms = now_ms
        if shapes == self._shapes:
            return False
        self._shapes = shapes
        return True

    def _matching(self, regex: str) -> list[str]:
        """Return the topics that an expression matches. Raises `BadPattern`."""
        names = self._catalog.names()
        seen, found = self._matches.get(regex, (None, []))
        if seen is not names:
            pattern = self._patterns.get(regex) or TopicPattern(regex)
            found = pattern.matching(names)
            if len(self._matches) >= _PATTERNS_MAX:
                self._matches.clear()
                self._patterns.clear()
            self._patterns[regex], self._matches[regex] = pattern, (names, found)
        return found

    def _start_epoch(self) -> None:
        """Start a new epoch and compute its target assignment."""
        self.generation += 1
        self.is_changed = True
        votes: dict[str, int] = {}
        for member in self.all():
            if member.assignor is not None:
                votes[member.assignor] = votes.get(member.assignor, 0) + 1
        self.assignor = max(votes, key=votes.__getitem__, default=next(iter(ASSIGNORS)))
        counts = {shape.id: shape.partition_count for shape in self._shapes.values()}
        members = {
            member.id: [self._shapes[name].id for name in member.subscribed if name in self._shapes]
            for member in self.all()
        }
        previous = {member.id: [TopicPartition(*partition) for partition in member.target] for member in self.all()}
        # Pass topic ids to the assignment strategies, which accept any string as a topic name.
        found = assign(ASSIGNORS[self.assignor], members, counts, previous)
        for member in self.all():
            target = frozenset(PartitionId(*partition) for partition in found[member.id])
            if target != member.target:
                member.target = target

    # ------------------------------------------------------------ snapshots

    def snapshot(self) -> SavedGroup:
        """Return the state to save: all that clients know, or are about to receive."""
        sessions = [self._session_ms(member) for member in self.all()]
        since = self._earlier_epochs()
        return SavedGroup(
            held=bool(self.members), state=self.state.value, generation=self.generation,
            protocol_type=self.protocol_type, protocol=self.assignor, session_timeout_ms=max(sessions, default=0),
            is_consumer=True, topics={name: (of.id, of.partition_count) for name, of in sorted(self._shapes.items())},
            members=tuple(self._saved(member, since.get(member.id, {})) for member in self.all()),
        )  # fmt: skip

    def _session_ms(self, member: ConsumerMember) -> int:
        classic = member.classic
        return classic.session_timeout_ms if classic else self._settings.consumer_session_timeout_ms

    def _earlier_epochs(self) -> dict[str, dict[int, set[PartitionId]]]:
        """Return the partitions that members received before the group's current epoch, by member id and epoch."""
        found: dict[str, dict[int, set[PartitionId]]] = {}
        for partition, owner in self._owners.items():
            if owner.since_epoch != self.generation:
                found.setdefault(owner.member_id, {}).setdefault(owner.since_epoch, set()).add(partition)
        return found

    def _saved(self, member: ConsumerMember, since: Mapping[int, Collection[PartitionId]]) -> SavedMember:
        holding = member.holding
        return SavedMember(
            member.id, member.instance_id, member.client_id, member.client_host, self._session_ms(member),
            member.rebalance_timeout_ms, member.classic.protocols if member.classic else (),
            topics=tuple(sorted(member.subscribed)), partitions=self.names_of(holding.assigned),
            consumer=SavedConsumerState(
                holding.epoch, holding.previous_epoch, holding.stage, member.rack_id, member.topics, member.regex,
                member.matched, member.assignor, by_topic(holding.assigned), by_topic(holding.revoking),
                by_topic(member.target), member.classic is not None,
                {epoch: by_topic(partitions) for epoch, partitions in since.items()},
            ),
        )  # fmt: skip

    def restore(self, saved: SavedGroup, now_ms: int) -> None:
        """Continue from a snapshot, in a new group. All sessions start again; no member has to rejoin."""
        self.generation = saved.generation
        self.assignor = saved.protocol if saved.protocol in ASSIGNORS else self.assignor
        self._shapes = {name: TopicShape(*shape) for name, shape in saved.topics.items()}
        for saved_member in saved.members:
            known = saved_member.consumer or SavedConsumerState()
            member = ConsumerMember(
                saved_member.id,
                saved_member.instance_id,
                known.rack_id,
                saved_member.client_id,
                saved_member.client_host,
                saved_member.rebalance_timeout_ms,
                known.topics,
                known.regex,
                known.matched,
                known.assignor,
                target=partition_set(known.target),
                deadline_ms=now_ms + saved_member.session_timeout_ms,
                classic=ClassicProtocolState(saved_member.session_timeout_ms, saved_member.protocols)
                if known.is_classic
                else None,
            )
            self._add(member)
            assigned, revoking = partition_set(known.assigned), partition_set(known.revoking)
            self._set_holding(
                member, Holding(known.epoch, known.previous_epoch, Stage(known.stage), assigned, revoking)
            )
            for epoch, partitions in known.since.items():
                self._owners.update(dict.fromkeys(partition_set(partitions), Ownership(member.id, epoch)))
            if revoking and member.classic is None:
                member.revoked_by_ms = now_ms + member.rebalance_timeout_ms
            self._track_deadline(member)
        self.is_changed = False

    def raise_generation(self, generation: int) -> None:
        """Raise the group's epoch to this number, which the group had under another coordinator or protocol. Never
        lower it.
        """
        self.generation = max(self.generation, generation)

    def end(self) -> None:
        """Mark the group as dead, because it was deleted or has moved."""
        self.members, self._static, self._owners, self._is_dead = {}, {}, {}, True


def _member_size_bytes(member: ConsumerMember) -> int:
    said = sum(map(len, (*member.topics, *member.matched, member.regex, member.rack_id or "")))
    return said + (metadata_size_bytes(member.classic.protocols) if member.classic else 0)
