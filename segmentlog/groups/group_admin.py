"""Administration of consumer groups: list, describe, reset, delete, expire."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec

from segmentlog.arguments import as_bool, as_positions, as_text
from segmentlog.errors import GroupNotEmpty, InvalidConfig, SegmentlogError, UnknownTopic
from segmentlog.format.file_names import DELETED_PREFIX, GROUPS_FOLDER, folder_name_of
from segmentlog.groups.committed_offsets import CommittedOffset, CommittedOffsetsView, encode
from segmentlog.groups.group_config_file import GroupConfigs
from segmentlog.groups.group_folder import GroupFolder
from segmentlog.groups.group_member import GroupMember
from segmentlog.groups.server_group_file import SavedGroup
from segmentlog.groups.server_groups import ServerGroups
from segmentlog.policy.lost_ranges import Ranges, count_offsets
from segmentlog.records import TopicPartition
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.interrupt_safe import interrupt_safe_context
from segmentlog.topics.topic_registry import Topics

_EXPIRE_INTERVAL_MS = 60_000


class MemberDescription(msgspec.Struct, frozen=True):
    """A live member of a group: a member of this library, or a client of a server."""

    id: str
    client_id: str
    pid: int | None
    """None for a client of a server."""
    host: str
    topics: tuple[str, ...]
    """Subscribed topics. If a client's metadata cannot be decoded by its server, topics and partitions are empty."""
    joined_ms: int | None
    idle_s: float | None
    """Seconds since its last poll; None for a client of a server."""
    partitions: tuple[TopicPartition, ...]
    """Partitions in the current assignment."""
    instance_id: str | None = None
    """Instance id of a static member, if a client of a server has one."""


class PartitionDescription(msgspec.Struct, frozen=True):
    """Progress of a group in a partition. ``committed`` and ``lag`` are None without a committed offset."""

    topic: str
    partition: int
    committed: CommittedOffset | None
    log_end_offset: int | None
    """None if the partition was deleted."""
    lag: int | None
    """Offsets from the committed offset to the end, without lost ranges. Compaction and transactions leave offsets
    without records, so fewer records may be waiting."""
    member: str
    """Id of the member that reads the partition; empty: no member."""
    pending: bool
    """Whether an open transaction commits an offset of the partition."""


class GroupDescription(msgspec.Struct, frozen=True):
    """A group: ``state`` is "Stable", "Rebalancing" (partitions move between members) or "Empty" (no members)."""

    group: str
    state: str
    generation: int
    strategy: str
    members: tuple[MemberDescription, ...]
    partitions: tuple[PartitionDescription, ...]
    holder: str = ""
    """Description of the holder, if the members are clients of a server."""


class _LogExtents(NamedTuple):
    """Functions by which `Groups.describe` finds log ends and lost ranges."""

    end_of: Callable[[TopicPartition], int | None]
    lost_of: Callable[[TopicPartition], Ranges]


class Groups:
    """The consumer groups of a store. Thread-safe; get it from `LogStore.groups`."""

    def __init__(self, topics: Topics, committed_offsets: CommittedOffsetsView) -> None:
        self._topics = topics
        self._fs = topics.fs
        self._clock = topics.clock
        self.committed_offsets = committed_offsets
        self._configs = GroupConfigs(topics)
        self._last_expiry_ms: int | None = None

    def member(
        self, group: str, topics: list[str], *, strategy: str, client_id: str, max_poll_interval_ms: int
    ) -> GroupMember:
        """Return a member that has not joined yet."""
        return GroupMember(
            self._folder(group), topics, strategy=strategy, client_id=client_id,
            max_poll_interval_ms=max_poll_interval_ms,
            monotonic_ms=self._clock.monotonic_ms, now_ms=self._clock.now_ms,
        )  # fmt: skip

    @property
    def configs(self) -> GroupConfigs:
        """Configurations of groups whose members are clients of a server."""
        return self._configs

    def server_groups(self, worker: int) -> ServerGroups:
        """Return the groups that worker number ``worker`` of a server coordinates for its clients."""
        self._topics.check_writable("coordinate consumer groups")
        return ServerGroups(self._topics, self.committed_offsets, worker)

    def _folder(self, group: str) -> GroupFolder:
        return GroupFolder(self._topics, self.committed_offsets, group)

    # ------------------------------------------------------------ queries

    def names(self) -> list[str]:
        """Return the sorted names of the groups that have committed offsets or members."""
        found = set(self.committed_offsets.groups())
        for path in self._folders():
            with failures_ignored(UnicodeDecodeError):
                group = read_file(self._fs, f"{path}/lock").decode()
                if group and group not in found and self._has_members(self._folder(group)):
                    found.add(group)
        return sorted(found)

    def exists(self, group: str) -> bool:
        """Return whether the group has committed offsets, or has or had members. Cheaper than `names`."""
        return self._fs.is_folder(self._folder(group).path) or bool(self.committed_offsets.by_topic_id(group))

    def has_members(self, group: str) -> bool:
        """Return whether the group has live members of either kind. Cheaper than `describe`."""
        return self._has_members(self._folder(group))

    def _has_members(self, folder: GroupFolder) -> bool:
        return bool(folder.live_members()) or folder.client_holder(self._clock.monotonic_ms()) is not None

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
        """Return members, assignment, committed offsets and lag. An unknown group is "Empty", with no partitions.

        Takes no lock that members wait for, and works in a read-only store. A caller that already has the log end
        offsets and lost ranges passes functions that return them: ``end_of`` and ``lost_of``. Without ``end_of`` the
        call opens all partitions. Without ``lost_of`` it opens those in which the group has not reached the log end.
        """
        for key, function in (("end_of", end_of), ("lost_of", lost_of)):
            if function is not None and (not callable(function) or isinstance(function, type)):
                raise InvalidConfig(key, function, "a function that takes a partition, or None")
        extent = _LogExtents(end_of or self._end_of, lost_of or self._lost_of)
        folder = self._folder(group)
        live = folder.live_members()
        assignment = folder.read_assignment()
        now_ms = self._clock.monotonic_ms()
        held_by = folder.client_holder(now_ms)
        if held_by is not None and not live:
            return self._describe_server_group(group, *held_by, extent)
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

    def _describe_server_group(
        self, group: str, saved: SavedGroup, holder: str, extent: _LogExtents
    ) -> GroupDescription:
        members = tuple(
            MemberDescription(
                member.id,
                member.client_id,
                None,
                member.client_host,
                member.topics,
                None,
                None,
                tuple(sorted(TopicPartition(topic, n) for topic, of in member.partitions.items() for n in of)),
                member.instance_id,
            )
            for member in saved.members
        )
        owners = {tp: member.id for member in members for tp in member.partitions}
        state = "Stable" if saved.state == "Stable" else "Rebalancing"
        return GroupDescription(
            group, state, saved.generation, saved.protocol, members,
            self._describe_partitions(group, owners, owners, extent), holder,
        )  # fmt: skip

    def _describe_partitions(
        self,
        group: str,
        assigned: Collection[TopicPartition],
        owners: Mapping[TopicPartition, str],
        extent: _LogExtents,
    ) -> tuple[PartitionDescription, ...]:
        committed, pending = self.committed_offsets.committed(group), self.committed_offsets.pending(group)
        return tuple(
            _describe_partition(tp, committed.get(tp), extent, owners.get(tp, ""), tp in pending)
            for tp in sorted({*committed, *assigned, *pending})
        )

    def _owners(self, folder: GroupFolder, live: Collection[str]) -> dict[TopicPartition, str]:
        """Return the live member that has each partition, by the current names of the topics."""
        owners = {partition: owner.member for partition, owner in folder.owners().items() if owner.member in live}
        names = self._topics.topic_names({partition.topic_id for partition in owners})
        return {
            TopicPartition(names[partition.topic_id], partition.partition): member
            for partition, member in owners.items()
            if partition.topic_id in names
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

    # ------------------------------------------------------------ changes

    def reset(
        self, group: str, positions: Mapping[TopicPartition, int], *, metadata: str = "", sync: bool = True
    ) -> None:
        """Commit offsets of a group without live members. Durable when it returns, unless ``sync`` is false.

        Raises `GroupNotEmpty`, `UnknownTopic` for a partition that does not exist, `InvalidConfig` for an invalid
        offset.
        """
        self._topics.check_writable("change consumer groups")
        folder_name_of(group, "group")  # raises for an invalid name
        group = str(group)
        named = as_positions("positions", positions)
        metadata, sync = as_text("metadata", metadata), as_bool("sync", sync)
        topic_ids = {tp: self._topics.topic(tp.topic).partition(tp.partition).topic_id for tp in named}
        keys, values = encode(group, named, topic_ids.__getitem__, metadata=metadata, committed_ms=self._clock.now_ms())
        with self._empty(group):
            end_offset = self.committed_offsets.append(keys, values) if keys else 0
        if end_offset and sync:
            self.committed_offsets.sync(end_offset)

    def delete_offsets(self, group: str, partitions: Collection[TopicPartition]) -> int:
        """Delete a group's committed offsets in some partitions; return how many were deleted. Durable when it returns.

        Raises `GroupNotEmpty` if a member of the library subscribes to one of the topics. Does not check for clients of
        a server: only the server knows their subscriptions.
        """
        self._topics.check_writable("change consumer groups")
        folder = self._folder(group)
        wanted = {tp.topic for tp in partitions}
        with folder.locked():
            live = folder.live_members()
            readers = [
                state for state in live.values() if not wanted.isdisjoint(folder.resolve_topics(state.info.topics))
            ]
            if readers:
                raise GroupNotEmpty(group, len(readers))
            ids = self._topics.topic_names(
                {partition.topic_id for partition in self.committed_offsets.by_topic_id(group)}
            )
            gone = [
                partition
                for partition in self.committed_offsets.by_topic_id(group)
                if TopicPartition(ids.get(partition.topic_id, ""), partition.partition) in partitions
            ]
            end_offset = (
                self.committed_offsets.append(*self.committed_offsets.encode_deletion(group, gone)) if gone else 0
            )
        if end_offset:
            self.committed_offsets.sync(end_offset)
        return len(gone)

    forget = delete_offsets
    """Former name of `delete_offsets`."""

    def delete(self, group: str) -> None:
        """Delete a group without live members: its committed offsets and its folder.

        Raises `GroupNotEmpty`, and `InvalidConfig` if the group does not exist.
        """
        self._topics.check_writable("change consumer groups")
        folder = self._folder(group)
        if not self.exists(group):
            raise InvalidConfig("group", group, "no group of this name has committed offsets or members")
        with self._empty(group):
            end_offset = self._delete_locked(folder)
        if end_offset:
            self.committed_offsets.sync(end_offset)

    def expire(self, now_ms: int | None = None, retention_ms: int = 7 * 86_400_000) -> list[str]:
        """Delete groups without members that have neither committed nor had a member for ``retention_ms``.

        Return their names. Uses the wall clock, corrected for jumps (`Clock.steady_ms`). If a group cannot be expired,
        the others still are, and the first error is raised at the end.
        """
        self._topics.check_writable("change consumer groups")
        now_ms = self._clock.steady_ms() if now_ms is None else now_ms
        gone = []
        first: Exception | None = None
        for group in self.committed_offsets.groups_with_any_offset():
            try:
                if self._expire_group(group, now_ms - retention_ms):
                    gone.append(group)
            except (SegmentlogError, OSError) as error:
                if is_interrupt(error):
                    raise
                first = first or error
        if first is not None:
            raise first
        return gone

    def _expire_group(self, group: str, before_ms: int) -> bool:
        folder = self._folder(group)
        if self._used_ms(folder) < before_ms and not self._has_members(folder):
            with contextlib.suppress(GroupNotEmpty), self._empty(group):
                if self._used_ms(folder) < before_ms:  # check again under the lock
                    self._delete_locked(folder)
                    return True
        return False

    def expire_if_due(self, now_ms: int, retention_ms: int) -> bool:
        """Call `expire` at most once a minute, for background work. Return whether it was due."""
        if self._last_expiry_ms is not None and 0 <= now_ms - self._last_expiry_ms < _EXPIRE_INTERVAL_MS:
            return False
        self._last_expiry_ms = now_ms
        if self.committed_offsets.exists:
            self.expire(now_ms, retention_ms)
        return True

    def _used_ms(self, folder: GroupFolder) -> int:
        """Return the time of the group's last commit, or of the last join or leave of a member."""
        used_ms = max(
            (known.committed_ms for known in self.committed_offsets.by_topic_id(folder.group).values()), default=0
        )
        for version in (folder.assignment_version(), folder.saved_group_version()):
            if version is not None:
                used_ms = max(used_ms, version[1] // 1_000_000)
        return used_ms

    def _delete_locked(self, folder: GroupFolder) -> int:
        positions = self.committed_offsets.by_topic_id(folder.group)
        end_offset = 0
        if positions:
            end_offset = self.committed_offsets.append(*self.committed_offsets.encode_deletion(folder.group, positions))
        # Rename the folder first: a process that waits for the lock then finds that the lock's file is no longer at its
        # path.
        gone = f"{self._topics.path}/{DELETED_PREFIX}{os.urandom(16).hex()}"
        self._fs.rename(folder.path, gone)
        with contextlib.suppress(FileNotFoundError):  # the sweeper of deleted folders may be removing it, too
            self._fs.remove_tree(gone)
        return end_offset

    @interrupt_safe_context
    def _empty(self, group: str) -> Iterator[None]:
        """Prevent members from joining within the block. Raises `GroupNotEmpty`."""
        folder = self._folder(group)
        with folder.locked():
            if live := folder.live_members():
                raise GroupNotEmpty(group, len(live))
            if held_by := folder.client_holder(self._clock.monotonic_ms()):
                raise GroupNotEmpty(group, len(held_by[0].members), held_by[1])
            yield


def _describe_partition(
    tp: TopicPartition, committed: CommittedOffset | None, extent: _LogExtents, member: str, pending: bool
) -> PartitionDescription:
    end, lag = extent.end_of(tp), None
    if committed is not None and end is not None:
        is_behind = committed.offset < end
        lag = count_offsets(extent.lost_of(tp), committed.offset, end) if is_behind else 0
    return PartitionDescription(tp.topic, tp.partition, committed, end, lag, member, pending)
