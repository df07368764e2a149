"""Files of a group. The locks of these files coordinate the group's members, as `group_member` describes."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from segmentlog.errors import GroupInUse, UnknownTopic
from segmentlog.format.file_names import GROUPS_FOLDER, folder_name_of
from segmentlog.groups.committed_offsets import CommittedOffsetsView
from segmentlog.groups.server_group_file import (
    SAVED_GROUP_FILE,
    WORKER_PREFIX,
    DamagedGroupFile,
    SavedGroup,
    WorkerLiveness,
    is_held,
    read_saved_group,
    read_worker_state,
    worker_path,
    write_saved_group,
)
from segmentlog.policy.assignment import assign
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.storage.file_locks import is_current
from segmentlog.storage.file_operations import read_file, replace_file, write_all
from segmentlog.storage.fork_safety import LockableFd, LockableFiles, open_lockable, opened_lockable
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING, SHARED, interrupt_safe_context
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")

_HEARTBEAT_DIGITS: Final = 20
_PATTERN_CHARACTERS: Final = frozenset("*?[")


class MemberInfo(msgspec.Struct, frozen=True):
    """Properties of a member, as stored in its file."""

    client_id: str
    pid: int
    host: str
    topics: tuple[str, ...]
    """Names and patterns that the member subscribes to."""
    strategy: str
    max_poll_interval_ms: int
    joined_ms: int
    """Time of the join, on the wall clock."""


class MemberState(msgspec.Struct, frozen=True):
    """A live member as other members see it."""

    info: MemberInfo
    polled_ms: int
    """Time of the last poll, on the monotonic clock."""

    def is_overdue(self, now_ms: int) -> bool:
        """Return whether the member's last poll is longer ago than its `max_poll_interval_ms`."""
        return now_ms - self.polled_ms > self.info.max_poll_interval_ms


class Assignment(msgspec.Struct, frozen=True):
    """The partitions of each member in one generation."""

    generation: int = 0
    strategy: str = ""
    topics: dict[str, int] = {}
    """Partition counts of the topics, at the time of the assignment."""
    members: dict[str, dict[str, list[int]]] = {}

    def of(self, member: str) -> set[TopicPartition]:
        """Return a member's partitions."""
        found = self.members.get(member, {})
        return {TopicPartition(topic, number) for topic, numbers in found.items() for number in numbers}


class PartitionOwner(msgspec.Struct, frozen=True):
    """The member that acquired a partition, its generation, and the topic's name at that time."""

    member: str
    generation: int
    topic: str = ""


_info_decoder = msgspec.json.Decoder(MemberInfo)
_assignment_decoder = msgspec.json.Decoder(Assignment)
_owner_decoder = msgspec.json.Decoder(PartitionOwner)

Version = tuple[int, int, int]


class GroupFolder:
    """The files of a group. Thread-safe: each `locked` block opens its own descriptor."""

    def __init__(self, topics: Topics, committed_offsets: CommittedOffsetsView, group: str) -> None:
        self.topics = topics
        self.fs = topics.fs
        self._committed_offsets = committed_offsets
        self.group = group
        self.groups_path = f"{topics.path}/{GROUPS_FOLDER}"
        self.path = f"{self.groups_path}/{folder_name_of(group, 'group')}"
        self.members_path = f"{self.path}/members"
        self.partitions_path = f"{self.path}/partitions"
        self.assignment_path = f"{self.path}/assignment"
        self.lock_path = f"{self.path}/lock"

    # ------------------------------------------------------------ the lock

    @interrupt_safe_context
    def locked(self, *, exclusive: bool = True) -> Iterator[None]:
        """Hold the group's lock. Creates the folder if it does not exist."""
        while True:
            with opened_lockable(self.fs, self.lock_path, os.O_RDWR | os.O_CREAT, self._open_lock) as fd:
                self.fs.flock(fd, EXCLUSIVE if exclusive else SHARED)
                if self._create_missing(fd):  # otherwise the group and its lock file were deleted meanwhile
                    yield
                    return

    def _open_lock(self, fs: LockableFiles, path: str, flags: int) -> LockableFd:
        while True:
            try:
                return open_lockable(fs, path, flags)
            except FileNotFoundError:
                for folder in (self.groups_path, self.path):
                    with contextlib.suppress(FileExistsError):
                        self.fs.mkdir(folder)

    def _create_missing(self, fd: int) -> bool:
        """Create missing folders of the group. Return False if its lock file was deleted."""
        try:
            if not self.is_current(fd, self.lock_path):
                return False
            for folder in (self.members_path, self.partitions_path):
                if not self.fs.is_folder(folder):
                    with contextlib.suppress(FileExistsError):
                        self.fs.mkdir(folder)
            if not self.fs.fstat(fd).st_size:
                write_all(self.fs, fd, [self.group.encode()], 0)
            return True
        except FileNotFoundError:  # a process without the lock has deleted the folder
            return False

    def is_current(self, fd: int, path: str) -> bool:
        """Return whether ``path`` is still the name of the open file."""
        return is_current(self.fs, fd, path)

    # ------------------------------------------------------------ members

    def member_ids(self) -> list[str]:
        """Return the ids of all members that have a file, sorted."""
        try:
            return sorted(self.fs.listdir(self.members_path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read_member(self, member: str) -> MemberState | None:
        """Return a member's state; None if it is dead. Reads only, so it works in a read-only store."""
        path = f"{self.members_path}/{member}"
        try:
            # Open it read-only: closing a writable descriptor would look to watchers as if the member had died.
            with opened_lockable(self.fs, path, os.O_RDONLY) as fd:
                try:
                    # Use a shared lock: with an exclusive lock, each of two processes that check at the same time would
                    # mistake the other for the member.
                    self.fs.flock(fd, SHARED | NON_BLOCKING)
                    return None
                except BlockingIOError:
                    text = self.fs.pread(fd, 1 << 20, 0)
        except FileNotFoundError:
            return None
        try:
            return MemberState(_info_decoder.decode(text[_HEARTBEAT_DIGITS:]), int(text[:_HEARTBEAT_DIGITS]))
        except (ValueError, msgspec.DecodeError):
            return None  # incomplete: the member is joining and holds the group's lock

    def live_members(self) -> dict[str, MemberState]:
        """Return the members that hold the lock of their file."""
        found = {member: self.read_member(member) for member in self.member_ids()}
        return {member: state for member, state in found.items() if state is not None}

    def evict(self, member: str) -> None:
        """Evict a member that does not poll: unlink the files of its partitions, then the member's own file.

        The caller holds the group's lock.
        """
        # Unlink the member's own file last: if this process dies before that, the next process finds the member and
        # evicts it again.
        for partition, owner in self.owners().items():
            if owner.member == member:
                self.unlink(self.partition_path(partition))
        self.unlink(f"{self.members_path}/{member}")

    def unlink(self, path: str) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.unlink(path)

    # ------------------------------------------------------------ partitions

    def partition_path(self, partition: PartitionId) -> str:
        """Return the path of the file whose lock is the right to read a partition. A rename of its topic keeps it."""
        return f"{self.partitions_path}/{partition.topic_id}-{partition.partition}"

    def owners(self) -> dict[PartitionId, PartitionOwner]:
        """Return the member that acquired each partition last. It may have released the partition since."""
        found = {}
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = self.fs.listdir(self.partitions_path)
        for name in names:
            topic_id, _, number = name.rpartition("-")
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError, ValueError):
                owner = _owner_decoder.decode(read_file(self.fs, f"{self.partitions_path}/{name}"))
                found[PartitionId(topic_id, int(number))] = owner
        return found

    # ------------------------------------------------------------ groups of a server

    def read_saved_group(self) -> SavedGroup | None:
        """Return the state of this group that a server saved; None if there is no such file, or it is damaged."""
        try:
            return read_saved_group(self.fs, self.path)
        except DamagedGroupFile as error:
            logger.warning("group %s: %s/remote is damaged and ignored: %s", self.group, self.path, error)
            return None

    def saved_group_version(self) -> Version | None:
        """Return a value that changes whenever the server's file is replaced; None without a file."""
        return self._version(f"{self.path}/{SAVED_GROUP_FILE}")

    def client_holder(self, now_ms: int) -> tuple[SavedGroup, str] | None:
        """Return (saved group, text that names the holder) if clients of a server hold the group, else None.

        While the file is damaged, a running server counts as the holder. ``now_ms`` is monotonic.
        """
        try:
            saved = read_saved_group(self.fs, self.path)
        except DamagedGroupFile:
            found = next((state for state in self._workers() if state.is_alive), None)
            return None if found is None else (SavedGroup(held=True), _holder_text("unknown clients", found))
        if saved is None or not saved.held:
            return None
        worker = read_worker_state(self.fs, worker_path(self.groups_path, saved.worker))
        if not is_held(saved, worker, self.fs.boot_id(), now_ms):
            return None
        return saved, _holder_text(saved.described, worker)

    def _workers(self) -> Iterator[WorkerLiveness]:
        for name in self.fs.listdir(self.groups_path):
            if name.startswith(WORKER_PREFIX):
                state = read_worker_state(self.fs, f"{self.groups_path}/{name}")
                if state is not None:
                    yield state

    def claim_for_library(self, now_ms: int) -> None:
        """Reserve the group for members of the library, before the first of them joins. The caller holds the lock.

        Raises `GroupInUse` if clients of a server hold the group. ``now_ms`` is monotonic.
        """
        held_by = self.client_holder(now_ms)
        if held_by is not None:
            raise GroupInUse(self.group, len(held_by[0].members), held_by[1])
        saved = self.read_saved_group()
        if saved is not None and saved.held:
            logger.warning("group %s: taken over from %s of a server that no longer runs", self.group, saved.described)
            write_saved_group(self.fs, self.path, SavedGroup(generation=saved.generation, worker=saved.worker))

    # ------------------------------------------------------------ the assignment

    def assignment_version(self) -> Version | None:
        """Return a value that changes whenever the assignment is replaced; None without an assignment."""
        return self._version(self.assignment_path)

    def _version(self, path: str) -> Version | None:
        try:
            found = self.fs.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read_assignment(self) -> Assignment | None:
        """Return the current assignment; None if it is missing or unreadable."""
        try:
            return _assignment_decoder.decode(read_file(self.fs, self.assignment_path))
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def rebalance(self, now_ms: int) -> Assignment:
        """Remove dead members, evict overdue ones, and write a new assignment if it differs from the current one.

        The caller holds the lock. ``now_ms`` is monotonic.
        """
        live: dict[str, MemberState] = {}
        for member in self.member_ids():
            state = self.read_member(member)
            if state is None:
                self.unlink(f"{self.members_path}/{member}")
            elif state.is_overdue(now_ms):
                late_s = (now_ms - state.polled_ms) / 1000
                logger.warning("group %s: evicted member %s: it has not polled for %.1f s", self.group, member, late_s)
                self.evict(member)
            else:
                live[member] = state
        current = self.read_assignment()
        subscriptions = {member: self.resolve_topics(state.info.topics) for member, state in live.items()}
        counts = {topic: count for topics in subscriptions.values() for topic, count in topics.items()}
        strategy = next((state.info.strategy for state in live.values()), current.strategy if current else "sticky")
        previous = {member: current.of(member) for member in live} if current else {}
        members: dict[str, dict[str, list[int]]] = {}
        for member, partitions in assign(strategy, subscriptions, counts, previous).items():
            numbers = members.setdefault(member, {})
            for tp in partitions:
                numbers.setdefault(tp.topic, []).append(tp.partition)
        if current and (current.members, current.topics, current.strategy) == (members, counts, strategy):
            return current
        generation = (self._generation_after(current) if current else self.last_generation()) + 1
        assignment = Assignment(generation, strategy, counts, members)
        replace_file(self.fs, self.assignment_path, msgspec.json.encode(assignment))
        return assignment

    def _generation_after(self, current: Assignment) -> int:
        saved = self.read_saved_group()
        return max(current.generation, saved.generation) if saved is not None else current.generation

    def last_generation(self) -> int:
        """Return the highest generation in any file of the group, for a group whose assignment was lost."""
        committed = [position.generation for position in self._committed_offsets.by_topic_id(self.group).values()]
        saved, assignment = self.read_saved_group(), self.read_assignment()
        files = [found.generation for found in (saved, assignment) if found is not None]
        return max([0, *committed, *files, *(owner.generation for owner in self.owners().values())])

    def resolve_topics(self, wanted: Iterable[str]) -> dict[str, int]:
        """Return the topics that match the names and patterns now, with their partition counts."""
        found: dict[str, int] = {}
        for name in wanted:
            names = fnmatch.filter(self.topics.names(), name) if is_pattern(name) else [name]
            for topic in names:
                with contextlib.suppress(UnknownTopic):  # deleted meanwhile
                    found[topic] = self.topics.read_topic_file(topic).partitions
        return found


def _holder_text(who: str, worker: WorkerLiveness | None) -> str:
    if worker is None:
        return f"{who} of a server that does not run, whose members may still return"
    process = f"pid {worker.worker.pid} on {worker.worker.host}"
    if not worker.is_alive:
        return f"{who} of a server that does not run ({process}), whose members may still return"
    return f"{who} of the server with {process}"


def is_pattern(name: str) -> bool:
    """Return whether a subscription is a pattern, which subscribes to every topic that matches."""
    return not _PATTERN_CHARACTERS.isdisjoint(name)


def encode_heartbeat(now_ms: int) -> bytes:
    """Return the first digits of a member's file: the time of the member's last poll."""
    return b"%0*d" % (_HEARTBEAT_DIGITS, now_ms)
