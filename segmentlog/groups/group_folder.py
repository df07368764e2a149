"""A group's files, whose locks are what coordinates its members; `groups` tells how."""

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
from segmentlog.groups.committed_offsets import CommittedPositions
from segmentlog.groups.server_group_file import (
    REMOTE_FILE,
    WORKER_PREFIX,
    DamagedRemote,
    RemoteGroup,
    WorkerState,
    is_held,
    look_at_worker,
    read_remote,
    worker_path,
    write_remote,
)
from segmentlog.policy.assignment import assign
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.storage.file_locks import is_current
from segmentlog.storage.file_operations import read_file, replace_file, write_all
from segmentlog.storage.fork_safety import LockableFd, LockableFiles, open_lockable, opened_lockable
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING, SHARED, interrupt_safe_context
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")

_BEAT_DIGITS: Final = 20
_PATTERN_CHARACTERS: Final = frozenset("*?[")


class MemberInfo(msgspec.Struct, frozen=True):
    """What a member says about itself."""

    client_id: str
    pid: int
    host: str
    topics: tuple[str, ...]
    """Names and patterns that it subscribes to."""
    strategy: str
    max_poll_interval_ms: int
    joined_ms: int
    """Wall clock."""


class MemberState(msgspec.Struct, frozen=True):
    """A live member as others see it."""

    info: MemberInfo
    polled_ms: int
    """Monotonic."""

    def is_overdue(self, now_ms: int) -> bool:
        """Whether it did not poll for longer than it said it would."""
        return now_ms - self.polled_ms > self.info.max_poll_interval_ms


class Assignment(msgspec.Struct, frozen=True):
    """Who is to read what, from one generation on."""

    generation: int = 0
    strategy: str = ""
    topics: dict[str, int] = {}
    """Partition counts of the topics that somebody reads, as it was made for."""
    members: dict[str, dict[str, list[int]]] = {}

    def of(self, member: str) -> set[TopicPartition]:
        """A member's partitions."""
        found = self.members.get(member, {})
        return {TopicPartition(topic, number) for topic, numbers in found.items() for number in numbers}


class PartitionOwner(msgspec.Struct, frozen=True):
    """Who acquired a partition, under which generation, and what the topic was called then."""

    member: str
    generation: int
    topic: str = ""


_info_decoder = msgspec.json.Decoder(MemberInfo)
_assignment_decoder = msgspec.json.Decoder(Assignment)
_owner_decoder = msgspec.json.Decoder(PartitionOwner)

Version = tuple[int, int, int]


class GroupFolder:
    """A group's files. Thread-safe: every lock is on a descriptor of its own."""

    def __init__(self, topics: Topics, positions: CommittedPositions, group: str) -> None:
        self.topics = topics
        self.fs = topics.fs
        self._positions = positions
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
        """Hold the group's lock; makes the folder if it is not there."""
        while True:
            with opened_lockable(self.fs, self.lock_path, os.O_RDWR | os.O_CREAT, self._open_lock) as fd:
                self.fs.flock(fd, EXCLUSIVE if exclusive else SHARED)
                if self._is_made(fd):  # else it is of a group that was deleted meanwhile
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

    def _is_made(self, fd: int) -> bool:
        """Whether the group whose lock is held is there; what it lacks is made."""
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
        except FileNotFoundError:  # the folder was taken away by somebody who holds no lock
            return False

    def is_current(self, fd: int, path: str) -> bool:
        """Whether ``path`` is still the name of the open file."""
        return is_current(self.fs, fd, path)

    # ------------------------------------------------------------ members

    def member_ids(self) -> list[str]:
        """Of all member files, sorted."""
        try:
            return sorted(self.fs.listdir(self.members_path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def look_at(self, member: str) -> MemberState | None:
        """A member's state; None when it is dead. Reads only, so it works in a read-only store."""
        path = f"{self.members_path}/{member}"
        try:
            # Read-only: closing it must not look like the end of the member to whoever watches the folder.
            with opened_lockable(self.fs, path, os.O_RDONLY) as fd:
                try:
                    # Shared: two who look at the same time must not take each other for the member.
                    self.fs.flock(fd, SHARED | NON_BLOCKING)
                    return None
                except BlockingIOError:
                    text = self.fs.pread(fd, 1 << 20, 0)
        except FileNotFoundError:
            return None
        try:
            return MemberState(_info_decoder.decode(text[_BEAT_DIGITS:]), int(text[:_BEAT_DIGITS]))
        except (ValueError, msgspec.DecodeError):
            return None  # being made: its maker holds the group's lock

    def live_members(self) -> dict[str, MemberState]:
        """Those that hold the lock of their file."""
        found = {member: self.look_at(member) for member in self.member_ids()}
        return {member: state for member, state in found.items() if state is not None}

    def evict(self, member: str) -> None:
        """Take everything from a member that does not poll. The caller holds the lock."""
        # The member's own file last: whoever dies in the middle leaves it for the next one to find.
        for where, owner in self.owners().items():
            if owner.member == member:
                self.unlink(self.partition_path(where))
        self.unlink(f"{self.members_path}/{member}")

    def unlink(self, path: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.unlink(path)

    # ------------------------------------------------------------ partitions

    def partition_path(self, where: PartitionId) -> str:
        """Of the file whose lock is the right to read a partition, whatever the topic is called."""
        return f"{self.partitions_path}/{where.topic_id}-{where.partition}"

    def owners(self) -> dict[PartitionId, PartitionOwner]:
        """Who acquired which partition last; they may have let go of it since."""
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

    # ------------------------------------------------------------ clients of a server

    def read_remote(self) -> RemoteGroup | None:
        """What a server says of its clients in this group; None when there were none, or nobody can tell."""
        try:
            return read_remote(self.fs, self.path)
        except DamagedRemote as error:
            logger.warning("group %s: %s/remote is damaged, and does not count: %s", self.group, self.path, error)
            return None

    def remote_version(self) -> Version | None:
        """As `assignment_version`, of what a server wrote."""
        return self._version(f"{self.path}/{REMOTE_FILE}")

    def remote_holder(self, now_ms: int) -> tuple[RemoteGroup, str] | None:
        """The clients of a server that hold the group, and who they are, for people; None when they do not.

        While nobody can tell, because the file is damaged, a server that runs is taken to hold it. ``now_ms`` is
        monotonic.
        """
        try:
            remote = read_remote(self.fs, self.path)
        except DamagedRemote:
            found = next((state for state in self._workers() if state.is_alive), None)
            return None if found is None else (RemoteGroup(held=True), _described("somebody", found))
        if remote is None or not remote.held:
            return None
        worker = look_at_worker(self.fs, worker_path(self.groups_path, remote.worker))
        if not is_held(remote, worker, self.fs.boot_id(), now_ms):
            return None
        return remote, _described(remote.described, worker)

    def _workers(self) -> Iterator[WorkerState]:
        for name in self.fs.listdir(self.groups_path):
            if name.startswith(WORKER_PREFIX):
                state = look_at_worker(self.fs, f"{self.groups_path}/{name}")
                if state is not None:
                    yield state

    def take_over(self, now_ms: int) -> None:
        """Before a member joins: see to it that no clients of a server hold the group. The caller has the lock.

        Raises `GroupInUse`. ``now_ms`` is monotonic.
        """
        held_by = self.remote_holder(now_ms)
        if held_by is not None:
            raise GroupInUse(self.group, len(held_by[0].members), held_by[1])
        remote = self.read_remote()
        if remote is not None and remote.held:
            logger.warning("group %s: taken over from %s of a server that is gone", self.group, remote.described)
            write_remote(self.fs, self.path, RemoteGroup(generation=remote.generation, worker=remote.worker))

    # ------------------------------------------------------------ the assignment

    def assignment_version(self) -> Version | None:
        """Changes when the assignment is replaced; None when it is not there."""
        return self._version(self.assignment_path)

    def _version(self, path: str) -> Version | None:
        try:
            found = self.fs.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read_assignment(self) -> Assignment | None:
        """The current one; None when there is none that can be read."""
        try:
            return _assignment_decoder.decode(read_file(self.fs, self.assignment_path))
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def rebalance(self, now_ms: int) -> Assignment:
        """Remove the dead, evict the overdue, and publish an assignment if it differs from the current one.

        The caller holds the lock. ``now_ms`` is monotonic.
        """
        live: dict[str, MemberState] = {}
        for member in self.member_ids():
            state = self.look_at(member)
            if state is None:
                self.unlink(f"{self.members_path}/{member}")
            elif state.is_overdue(now_ms):
                late_s = (now_ms - state.polled_ms) / 1000
                logger.warning("group %s: member %s is evicted: no poll for %.1f s", self.group, member, late_s)
                self.evict(member)
            else:
                live[member] = state
        current = self.read_assignment()
        subscriptions = {member: self.resolve(state.info.topics) for member, state in live.items()}
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
        made = Assignment(generation, strategy, counts, members)
        replace_file(self.fs, self.assignment_path, msgspec.json.encode(made))
        return made

    def _generation_after(self, current: Assignment) -> int:
        remote = self.read_remote()
        return max(current.generation, remote.generation) if remote is not None else current.generation

    def last_generation(self) -> int:
        """The highest that any trace is left of, for a group whose assignment is lost."""
        committed = [position.generation for position in self._positions.positions(self.group).values()]
        remote, assignment = self.read_remote(), self.read_assignment()
        files = [found.generation for found in (remote, assignment) if found is not None]
        return max([0, *committed, *files, *(owner.generation for owner in self.owners().values())])

    def resolve(self, wanted: Iterable[str]) -> dict[str, int]:
        """The topics that names and patterns mean now, with their partition counts."""
        found: dict[str, int] = {}
        for name in wanted:
            names = fnmatch.filter(self.topics.names(), name) if is_pattern(name) else [name]
            for topic in names:
                with contextlib.suppress(UnknownTopic):  # deleted meanwhile
                    found[topic] = self.topics.read_topic_file(topic).partitions
        return found


def _described(who: str, worker: WorkerState | None) -> str:
    if worker is None:
        return f"{who} of a server that is gone, but not for long enough"
    process = f"pid {worker.worker.pid} on {worker.worker.host}"
    if not worker.is_alive:
        return f"{who} of a server that is gone ({process}), but not for long enough"
    return f"{who} of the server with {process}"


def is_pattern(name: str) -> bool:
    """Whether a subscription means every topic that matches it."""
    return not _PATTERN_CHARACTERS.isdisjoint(name)


def encode_beat(now_ms: int) -> bytes:
    """When a member polled last, as its file begins with it."""
    return b"%0*d" % (_BEAT_DIGITS, now_ms)
