"""What people ask of consumer groups: which there are, how far they are; reset, delete, expire."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec

from segmentlog.arguments import as_bool, as_positions, as_text
from segmentlog.errors import GroupNotEmpty, InvalidConfig, SegmentlogError, UnknownTopic
from segmentlog.format.file_names import DELETED_PREFIX, GROUPS_FOLDER, folder_name_of
from segmentlog.groups.committed_offsets import CommittedOffset, CommittedPositions, encode
from segmentlog.groups.group_config_file import GroupConfigs
from segmentlog.groups.group_folder import GroupFolder
from segmentlog.groups.group_member import Member
from segmentlog.groups.server_group_file import RemoteGroup
from segmentlog.groups.server_groups import RemoteGroups
from segmentlog.policy.lost_ranges import Ranges, count_offsets
from segmentlog.records import TopicPartition
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.interrupt_safe import interrupt_safe_context
from segmentlog.topics.topic_registry import Topics

_EXPIRE_EVERY_MS = 60_000


class MemberDescription(msgspec.Struct, frozen=True):
    """A live member of a group: of this library, or a client of a server."""

    id: str
    client_id: str
    pid: int | None
    """None of a server's client."""
    host: str
    topics: tuple[str, ...]
    """Of a server's client as far as the server can tell, ``partitions`` likewise."""
    joined_ms: int | None
    idle_s: float | None
    """Since its last poll; None of a server's client."""
    partitions: tuple[TopicPartition, ...]
    """What the current assignment gives it."""
    instance_id: str | None = None
    """What a server's client calls itself, if it is to be the same member when it comes again."""


class PartitionDescription(msgspec.Struct, frozen=True):
    """How far a group is in a partition. ``committed`` and ``lag`` are None without a committed position."""

    topic: str
    partition: int
    committed: CommittedOffset | None
    log_end_offset: int | None
    """None when the partition is gone."""
    lag: int | None
    """Offsets from the committed position to the end, without those in lost ranges. Compaction and transactions leave
    offsets without a record, so fewer records may be waiting."""
    member: str
    """Who reads it; empty: nobody."""
    pending: bool
    """Whether a transaction that is not decided yet commits a position of it."""


class GroupDescription(msgspec.Struct, frozen=True):
    """A group: ``state`` is "Stable", "Rebalancing" (partitions still change hands) or "Empty" (no members)."""

    group: str
    state: str
    generation: int
    strategy: str
    members: tuple[MemberDescription, ...]
    partitions: tuple[PartitionDescription, ...]
    holder: str = ""
    """Who holds the group, when its members are clients of a server."""


class _Extent(NamedTuple):
    """How `Groups.describe` finds out how far logs reach."""

    end_of: Callable[[TopicPartition], int | None]
    lost_of: Callable[[TopicPartition], Ranges]


class Groups:
    """The consumer groups of a store. Thread-safe; get it from `LogStore.groups`."""

    def __init__(self, topics: Topics, offsets: CommittedPositions) -> None:
        self._topics = topics
        self._fs = topics.fs
        self._clock = topics.clock
        self.positions = offsets
        self._configs = GroupConfigs(topics)
        self._expired_ms: int | None = None

    def member(
        self, group: str, topics: list[str], *, strategy: str, client_id: str, max_poll_interval_ms: int
    ) -> Member:
        """A member that has not joined yet."""
        return Member(
            self._folder(group), topics, strategy=strategy, client_id=client_id,
            max_poll_interval_ms=max_poll_interval_ms,
            monotonic_ms=self._clock.monotonic_ms, now_ms=self._clock.now_ms,
        )  # fmt: skip

    @property
    def configs(self) -> GroupConfigs:
        """What the groups that servers coordinate are configured with."""
        return self._configs

    def remote(self, worker: int) -> RemoteGroups:
        """The groups that the ``worker``-th process of a server coordinates for its clients."""
        self._topics.check_writable("coordinate consumer groups")
        return RemoteGroups(self._topics, self.positions, worker)

    def _folder(self, group: str) -> GroupFolder:
        return GroupFolder(self._topics, self.positions, group)

    # ------------------------------------------------------------ asking

    def names(self) -> list[str]:
        """Names of the groups that have committed positions or members, sorted."""
        found = set(self.positions.groups())
        for path in self._folders():
            with failures_ignored(UnicodeDecodeError):
                group = read_file(self._fs, f"{path}/lock").decode()
                if group and group not in found and self._has_members(self._folder(group)):
                    found.add(group)
        return sorted(found)

    def exists(self, group: str) -> bool:
        """Whether the group has committed positions, or has or had members. Cheaper than `names`."""
        return self._fs.is_folder(self._folder(group).path) or bool(self.positions.positions(group))

    def has_members(self, group: str) -> bool:
        """Whether somebody is at work in the group, of whatever kind. Cheaper than `describe`."""
        return self._has_members(self._folder(group))

    def _has_members(self, folder: GroupFolder) -> bool:
        return bool(folder.live_members()) or folder.remote_holder(self._clock.monotonic_ms()) is not None

    def _folders(self) -> list[str]:
        path = f"{self._topics.path}/{GROUPS_FOLDER}"
        try:
            return [f"{path}/{name}" for name in self._fs.listdir(path)]
        except FileNotFoundError:
            return []

    def describe(
        self, group: str, end_of: Callable[[TopicPartition], int | None] | None = None,
        lost_of: Callable[[TopicPartition], Ranges] | None = None,
    ) -> GroupDescription:  # fmt: skip
        """Members, assignment, positions and lag. Of a group that nobody knows: "Empty", without anything.

        Looks only, and takes no lock that a member waits for: works in a read-only store, too. ``end_of`` and
        ``lost_of`` are for callers that already know where logs end and which of their offsets are lost. Without them
        the partitions are opened; without ``lost_of`` only those where the group is not at the end.
        """
        for key, function in (("end_of", end_of), ("lost_of", lost_of)):
            if function is not None and (not callable(function) or isinstance(function, type)):
                raise InvalidConfig(key, function, "a function of a partition, or None")
        extent = _Extent(end_of or self._end_of, lost_of or self._lost_of)
        folder = self._folder(group)
        live = folder.live_members()
        assignment = folder.read_assignment()
        now_ms = self._clock.monotonic_ms()
        held_by = folder.remote_holder(now_ms)
        if held_by is not None and not live:
            return self._describe_remote(group, *held_by, extent)
        members = tuple(
            MemberDescription(
                member, state.info.client_id, state.info.pid, state.info.host, state.info.topics, state.info.joined_ms,
                max(now_ms - state.polled_ms, 0) / 1000,
                tuple(sorted(assignment.of(member))) if assignment else (),
            )
            for member, state in live.items()
        )  # fmt: skip
        assigned_to = {tp: member.id for member in members for tp in member.partitions}
        owners = self._owners(folder, live)
        if not live:
            state = "Empty"
        elif assignment is None or assignment.members.keys() != live.keys() or owners != assigned_to:
            state = "Rebalancing"
        else:
            state = "Stable"
        return GroupDescription(
            group, state, assignment.generation if assignment else 0, assignment.strategy if assignment else "",
            members, self._describe_partitions(group, assigned_to, owners, extent),
        )  # fmt: skip

    def _describe_remote(self, group: str, remote: RemoteGroup, holder: str, extent: _Extent) -> GroupDescription:
        members = tuple(
            MemberDescription(
                member.id, member.client_id, None, member.client_host, member.topics, None, None,
                tuple(sorted(TopicPartition(topic, n) for topic, of in member.partitions.items() for n in of)),
                member.instance_id,
            )
            for member in remote.members
        )  # fmt: skip
        owners = {tp: member.id for member in members for tp in member.partitions}
        state = "Stable" if remote.state == "Stable" else "Rebalancing"
        return GroupDescription(
            group, state, remote.generation, remote.protocol, members,
            self._describe_partitions(group, owners, owners, extent), holder,
        )  # fmt: skip

    def _describe_partitions(
        self, group: str, assigned: Collection[TopicPartition], owners: Mapping[TopicPartition, str], extent: _Extent
    ) -> tuple[PartitionDescription, ...]:
        committed, pending = self.positions.committed(group), self.positions.pending(group)
        return tuple(
            _describe_partition(tp, committed.get(tp), extent, owners.get(tp, ""), tp in pending)
            for tp in sorted({*committed, *assigned, *pending})
        )

    def _owners(self, folder: GroupFolder, live: Collection[str]) -> dict[TopicPartition, str]:
        """Which live member has which partition, by what the topics are called now."""
        owners = {where: owner.member for where, owner in folder.owners().items() if owner.member in live}
        names = self._topics.topic_names({where.topic_id for where in owners})
        return {
            TopicPartition(names[where.topic_id], where.partition): member
            for where, member in owners.items()
            if where.topic_id in names
        }

    def _end_of(self, tp: TopicPartition) -> int | None:
        try:
            return self._topics.topic(tp.topic).partition(tp.partition).log_end_offset
        except UnknownTopic:
            return None

    def _lost_of(self, tp: TopicPartition) -> Ranges:
        try:
            return self._topics.topic(tp.topic).partition(tp.partition).lost_ranges()
        except UnknownTopic:
            return ()

    # ------------------------------------------------------------ changing

    def reset(
        self, group: str, positions: Mapping[TopicPartition, int], *, metadata: str = "", sync: bool = True
    ) -> None:
        """Commit positions of a group that has no live members. Durable when it returns, unless ``sync`` is false.

        Raises `GroupNotEmpty`, `UnknownTopic` for a partition that there is not, `InvalidConfig` for what
        is no offset.
        """
        self._topics.check_writable("change consumer groups")
        folder_name_of(group, "group")  # raises for what is no name
        group = str(group)
        named = as_positions("positions", positions)
        metadata, sync = as_text("metadata", metadata), as_bool("sync", sync)
        topic_ids = {tp: self._topics.topic(tp.topic).partition(tp.partition).topic_id for tp in named}
        keys, values = encode(group, named, topic_ids.__getitem__, metadata=metadata, committed_ms=self._clock.now_ms())
        with self._empty(group):
            end_offset = self.positions.append(keys, values) if keys else 0
        if end_offset and sync:
            self.positions.sync(end_offset)

    def forget(self, group: str, partitions: Collection[TopicPartition]) -> int:
        """Delete the positions of some partitions; how many there were. Durable when it returns.

        Raises `GroupNotEmpty` when a member of the library subscribes to one of the topics. For clients of a server it
        is the server that knows what they read.
        """
        self._topics.check_writable("change consumer groups")
        folder = self._folder(group)
        wanted = {tp.topic for tp in partitions}
        with folder.locked():
            live = folder.live_members()
            readers = [state for state in live.values() if not wanted.isdisjoint(folder.resolve(state.info.topics))]
            if readers:
                raise GroupNotEmpty(group, len(readers))
            ids = self._topics.topic_names({where.topic_id for where in self.positions.positions(group)})
            gone = [
                where
                for where in self.positions.positions(group)
                if TopicPartition(ids.get(where.topic_id, ""), where.partition) in partitions
            ]
            end_offset = self.positions.append(*self.positions.encode_deletion(group, gone)) if gone else 0
        if end_offset:
            self.positions.sync(end_offset)
        return len(gone)

    def delete(self, group: str) -> None:
        """Forget a group without live members: its positions and its folder. Raises `GroupNotEmpty`.

        A group that there is not is refused with `InvalidConfig`.
        """
        self._topics.check_writable("change consumer groups")
        folder = self._folder(group)
        if not self.exists(group):
            raise InvalidConfig("group", group, "the name of a group that has positions or members")
        with self._empty(group):
            end_offset = self._delete_locked(folder)
        if end_offset:
            self.positions.sync(end_offset)

    def expire(self, now_ms: int | None = None, retention_ms: int = 7 * 86_400_000) -> list[str]:
        """Delete the groups without members that neither committed nor had a member for ``retention_ms``.

        By the wall clock, but not by a jump of it: `Clock.steady_ms`. An error in one group does not keep it from
        the others; the first is raised at the end.
        """
        self._topics.check_writable("change consumer groups")
        now_ms = self._clock.steady_ms() if now_ms is None else now_ms
        gone = []
        first: Exception | None = None
        for group in self.positions.all_groups():
            try:
                if self._expire_one(group, now_ms - retention_ms):
                    gone.append(group)
            except (SegmentlogError, OSError) as error:
                if is_interrupt(error):
                    raise
                first = first or error
        if first is not None:
            raise first
        return gone

    def _expire_one(self, group: str, before_ms: int) -> bool:
        folder = self._folder(group)
        if self._used_ms(folder) < before_ms and not self._has_members(folder):
            with contextlib.suppress(GroupNotEmpty), self._empty(group):
                if self._used_ms(folder) < before_ms:  # still so, under the lock
                    self._delete_locked(folder)
                    return True
        return False

    def expire_tick(self, now_ms: int, retention_ms: int) -> bool:
        """`expire`, at most once a minute; for background work. Whether it was time."""
        if self._expired_ms is not None and 0 <= now_ms - self._expired_ms < _EXPIRE_EVERY_MS:
            return False
        self._expired_ms = now_ms
        if self.positions.exists:
            self.expire(now_ms, retention_ms)
        return True

    def _used_ms(self, folder: GroupFolder) -> int:
        """When the group committed, or a member came or went, the last time."""
        used_ms = max((known.committed_ms for known in self.positions.positions(folder.group).values()), default=0)
        for version in (folder.assignment_version(), folder.remote_version()):
            if version is not None:
                used_ms = max(used_ms, version[1] // 1_000_000)
        return used_ms

    def _delete_locked(self, folder: GroupFolder) -> int:
        positions = self.positions.positions(folder.group)
        end_offset = 0
        if positions:
            end_offset = self.positions.append(*self.positions.encode_deletion(folder.group, positions))
        # Renamed first: whoever waits for its lock finds that the group has another folder now.
        gone = f"{self._topics.path}/{DELETED_PREFIX}{os.urandom(16).hex()}"
        self._fs.rename(folder.path, gone)
        with contextlib.suppress(FileNotFoundError):  # somebody sweeps it away at the same time
            self._fs.remove_tree(gone)
        return end_offset

    @interrupt_safe_context
    def _empty(self, group: str) -> Iterator[None]:
        """Keep members from joining within. Raises `GroupNotEmpty`."""
        folder = self._folder(group)
        with folder.locked():
            if live := folder.live_members():
                raise GroupNotEmpty(group, len(live))
            if held_by := folder.remote_holder(self._clock.monotonic_ms()):
                raise GroupNotEmpty(group, len(held_by[0].members), held_by[1])
            yield


def _describe_partition(
    tp: TopicPartition, committed: CommittedOffset | None, extent: _Extent, member: str, pending: bool
) -> PartitionDescription:
    end, lag = extent.end_of(tp), None
    if committed is not None and end is not None:
        is_behind = committed.offset < end
        lag = count_offsets(extent.lost_of(tp), committed.offset, end) if is_behind else 0
    return PartitionDescription(tp.topic, tp.partition, committed, end, lag, member, pending)
