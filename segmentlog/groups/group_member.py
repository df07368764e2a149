"""Consumer groups without a server: file locks coordinate the members.

    @groups/<group>/             the quoted name of the group, see `folder_name_of`
      lock                       flock EX (exclusive) to change the files below, SH (shared) to commit or to acquire a
                                 partition; contains the group's name
      members/<member id>        flock EX by the member for its life; 20 digits: time of its last poll
                                 (monotonic ms), a newline, then JSON: `MemberInfo`
      assignment                 JSON: `Assignment`; replaced as a whole, with the next generation
      partitions/<topic id>-<n>  flock EX by the member that reads the partition; JSON: `PartitionOwner`
      remote                     state of a group of clients of a server, see `groups.server_group_file`

A member is live while it holds the lock of its file. If a member finds that another member is dead, or has not polled
for its max_poll_interval_ms, it writes the next assignment. The lock of a partition's file is the right to read the
partition. The new owner gets the lock when the old owner releases it, or dies. An owner that no longer polls (stopped
or stuck) is *evicted*: another member unlinks its partition files, so that it holds only locks of files without a name.
Its later commits are rejected.

Joining, leaving and evicting hold `lock` EX. Acquiring and committing hold it SH. So each commit is either before an
eviction, or rejected. A process that dies between two steps leaves files without locks, which block no other process. A
process that is *stopped* while it holds `lock` (some 50 us in a commit, an fsync in a join) blocks joining and leaving
until it resumes. If other processes could break its lock, it could commit after its eviction.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import starmap
from typing import Final

import msgspec

from segmentlog.errors import ConsumerFenced, InvalidConfig, StoreClosed, UnknownTopic
from segmentlog.groups.group_folder import (
    GroupFolder,
    MemberInfo,
    PartitionOwner,
    Version,
    encode_heartbeat,
)
from segmentlog.policy.assignment import STRATEGIES
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.storage.file_operations import write_all
from segmentlog.storage.fork_safety import close_lockable, open_lockable
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.interrupt_safe import (
    EXCLUSIVE,
    NON_BLOCKING,
    SHARED,
    UNLOCK,
    interrupt_safe_context,
    store_result,
)

_CHECK_MS: Final = 250
"""How often a member checks whether the others are alive; less often in groups with many members."""
_CHECK_MEMBERS: Final = 16
_SUSPECT_MS: Final = 60
"""How long to check for a dead member after a member's file was closed. When a process dies, the kernel first closes
its files, which wakes the other members, and frees the locks a moment later.
"""
_TOPICS_MS: Final = 1000
_RETRY_MS: Final = 10
_HEARTBEAT_MS: Final = 100
_CLIENT_ID_MAX: Final = 64


class GroupMember:
    """A member of a group: joins, follows assignments, acquires and releases partitions.

    Not thread-safe: the session serializes calls. In a forked child it raises `StoreClosed`.
    """

    def __init__(
        self,
        folder: GroupFolder,
        topics: Sequence[str],
        *,
        strategy: str,
        client_id: str,
        max_poll_interval_ms: int,
        monotonic_ms: Callable[[], int],
        now_ms: Callable[[], int],
    ) -> None:
        self._pid, self._fd, self._lock_fd = os.getpid(), -1, -1
        self.owned: dict[TopicPartition, int] = {}
        """Descriptors of the partition files that the member has locked."""
        self.topic_ids: dict[TopicPartition, str] = {}
        """Ids of the topics of these partitions, as of the time when they were acquired."""
        if strategy not in STRATEGIES:
            raise InvalidConfig("assignment_strategy", strategy, "'sticky', 'range' or 'roundrobin'")
        self.folder = folder
        self.strategy = strategy
        self.id = ""
        self.generation = 0
        self.assigned: set[TopicPartition] = set()
        """Partitions in the current assignment of this member."""
        self.topics = tuple(topics)
        self._client_id = client_id
        self._max_poll_interval_ms = max_poll_interval_ms
        self._heartbeat_interval_ms = min(_HEARTBEAT_MS, max_poll_interval_ms // 4)
        self._monotonic_ms = monotonic_ms
        self.now_ms = now_ms
        self._fs = folder.fs
        self._seen: Version | None = None
        self._heartbeat_ms = self._check_at_ms = self._topics_at_ms = self._retry_at_ms = self._suspect_until_ms = 0
        self._resolved: dict[str, int] = {}

    # ------------------------------------------------------------ joining, leaving

    def join(self) -> None:
        """Join the group under a new id.

        Raises `InvalidConfig` if the other members have another strategy, `GroupInUse` if they are clients of a server.
        """
        folder, fs = self.folder, self._fs
        safe_id = "".join(
            char if char.isascii() and (char.isalnum() or char in "-_") else "_" for char in self._client_id
        )
        self.id = f"{safe_id[:_CLIENT_ID_MAX] or 'consumer'}-{uuid.uuid4().hex}"
        self._pid = os.getpid()
        info = MemberInfo(
            self._client_id,
            self._pid,
            socket.gethostname(),
            self.topics,
            self.strategy,
            self._max_poll_interval_ms,
            self.now_ms(),
        )
        with folder.locked():
            now_ms = self._monotonic_ms()
            folder.claim_for_library(now_ms)
            others = {state.info.strategy for state in folder.live_members().values() if not state.is_overdue(now_ms)}
            if others - {self.strategy}:
                found = ", ".join(map(repr, sorted(others - {self.strategy})))
                wanted = f"the other members of group {folder.group!r} use {found}"
                raise InvalidConfig("assignment_strategy", self.strategy, wanted)
            path = f"{folder.members_path}/{self.id}"
            try:
                store_result(self, "_fd", open_lockable, fs, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                fs.flock(self._fd, EXCLUSIVE)
                write_all(fs, self._fd, [encode_heartbeat(now_ms), b"\n", msgspec.json.encode(info), b"\n"], 0)
                # List the topics before the assignment is written: a topic that is created between the two must count
                # as a change.
                self._resolved = folder.resolve_topics(self.topics)
                folder.rebalance(now_ms)
            except BaseException:
                folder.unlink(path)
                self._close_files()
                raise
        self._heartbeat_ms = now_ms
        self._seen = None

    def leave(self) -> None:
        """Release all locks, so that the other members get the partitions. Does not call any listener."""
        if self.is_foreign:
            return
        self.release(list(self.owned.copy()))
        if self._fd < 0:
            return
        try:
            with self.folder.locked():
                if self._is_member():
                    self.folder.unlink(f"{self.folder.members_path}/{self.id}")
                self._close_files()
                self.folder.rebalance(self._monotonic_ms())
        finally:
            self._close_files()

    @property
    def has_left(self) -> bool:
        """Return whether the member holds no lock."""
        return self._fd < 0 and not any(fd >= 0 for fd in self.owned.copy().values())

    def end_membership(self) -> None:
        """Close this member's files, after other members have evicted it."""
        self.release(list(self.owned.copy()))
        self._close_files()
        self.assigned = set()

    def _close_files(self) -> None:
        if self._lock_fd >= 0:
            close_lockable(self._fs, self._lock_fd, self.__dict__, "_lock_fd")
        if self._fd >= 0:
            close_lockable(self._fs, self._fd, self.__dict__, "_fd")
        self._lock_fd = self._fd = -1

    def __del__(self) -> None:
        # The consumer was never closed: without this, the others would wait for partitions that no member polls.
        if not self.is_foreign:
            for fd in (*self.owned.copy().values(), self._lock_fd, self._fd):
                if fd >= 0:
                    close_lockable(self._fs, fd)

    @property
    def is_foreign(self) -> bool:
        """Return whether this is a forked child. The membership belongs to the parent."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise `StoreClosed` in a forked child: the membership belongs to the parent."""
        if self.is_foreign:
            raise StoreClosed.forked(f"member {self.id}")

    def _is_member(self) -> bool:
        return self._fd >= 0 and self.folder.is_current(self._fd, f"{self.folder.members_path}/{self.id}")

    # ------------------------------------------------------------ polling

    def poll(self, *, ended: bool = False) -> bool:
        """Send a heartbeat. Return True if there is work: the caller must call `refresh`, then `acquire`.

        ``ended``: another member's file was closed or removed, so that member may have died. The call costs one stat if
        nothing has changed.
        """
        self.check_process()
        if self._fd < 0:
            return True  # evicted, and could not join again
        now_ms = self._monotonic_ms()
        if now_ms - self._heartbeat_ms >= self._heartbeat_interval_ms:
            self._heartbeat_ms = now_ms
            self._fs.pwritev(self._fd, [encode_heartbeat(now_ms)], 0)
        if ended:
            self._suspect_until_ms = now_ms + _SUSPECT_MS
        if now_ms >= self._check_at_ms or now_ms < self._suspect_until_ms:
            self._check_group(now_ms)
        if self.folder.assignment_version() != self._seen or self._seen is None:
            return True
        if now_ms >= self._retry_at_ms and not self.is_settled:
            self._retry_at_ms = now_ms + _RETRY_MS
            return True
        return False

    @property
    def is_settled(self) -> bool:
        """Return whether the member holds the lock of every partition that it is assigned, and no others."""
        return self.owned.keys() == self.assigned and min(self.owned.copy().values(), default=0) >= 0

    @property
    def wait_s(self) -> float:
        """Return how long the consumer may sleep before the next poll, in seconds."""
        if not self.is_settled or self._monotonic_ms() < self._suspect_until_ms:
            return _RETRY_MS / 1000
        return min(_CHECK_MS, 2 * max(self._heartbeat_interval_ms, 1)) / 1000

    def _check_group(self, now_ms: int) -> None:
        """Write a new assignment if other members have died or stopped polling, or if topics have changed."""
        others = [member for member in self.folder.member_ids() if member != self.id]
        self._check_at_ms = now_ms + _CHECK_MS * max(1, len(others) // _CHECK_MEMBERS)
        changed = not self._is_member()
        if not changed:
            states = map(self.folder.read_member, others)
            changed = any(state is None or state.is_overdue(now_ms) for state in states)
        if not changed and now_ms >= self._topics_at_ms:
            self._topics_at_ms = now_ms + _TOPICS_MS
            resolved = self.folder.resolve_topics(self.topics)
            changed = resolved != self._resolved
            if changed:
                self._resolved = resolved
            assignment = self.folder.read_assignment()
            changed |= assignment is None or assignment.members.keys() != {self.id, *others}
            if assignment is not None and assignment.generation != self.generation:
                self._seen = None  # the file was replaced, but got the same inode and time stamp
        if changed:
            with self.folder.locked():
                self.folder.rebalance(now_ms)
            self._seen = None

    def refresh(self) -> tuple[bool, list[TopicPartition]]:
        """Load the current assignment. Return whether this member was evicted, and the partitions that it must release.

        After an eviction the caller must call `end_membership`, then `join`.
        """
        for _ in range(2):
            version = self.folder.assignment_version()
            assignment = self.folder.read_assignment()
            if not self._is_member():
                return True, []
            if assignment is not None and self.id in assignment.members:
                break
            with self.folder.locked():  # the assignment is lost, or its writer took this member for dead
                if self._is_member():
                    self.folder.rebalance(self._monotonic_ms())
        if assignment is None or self.id not in assignment.members:
            return True, []
        assigned = assignment.of(self.id)
        # Make no call between the three assignments. After an interrupt between them `_seen` would have the new
        # version, so the new assignment would never be applied.
        self._seen, self.generation, self.assigned = version, assignment.generation, assigned
        return False, sorted(self.owned.copy().keys() - self.assigned)

    def acquire(self) -> list[TopicPartition]:
        """Lock the assigned partitions that are free; return the new ones."""
        missing = sorted(tp for tp in self.assigned if self.owned.get(tp, -1) < 0)
        if not missing:
            return []
        acquired: list[TopicPartition] = []
        with self.folder.locked(exclusive=False):  # prevents evictions
            if self.folder.assignment_version() != self._seen or not self._is_member():
                return []
            for tp in missing:
                try:
                    topic_id = self.folder.topics.topic(tp.topic).id
                except UnknownTopic:  # deleted or renamed: the next assignment omits it
                    continue
                path = self.folder.partition_path(PartitionId(topic_id, tp.partition))
                owner = msgspec.json.encode(PartitionOwner(self.id, self.generation, tp.topic))
                fds: list[int] = []
                try:
                    fds.extend(starmap(open_lockable, ((self._fs, path, os.O_RDWR | os.O_CREAT),)))
                    self._fs.flock(fds[0], EXCLUSIVE | NON_BLOCKING)
                    self._fs.ftruncate(fds[0], 0)
                    write_all(self._fs, fds[0], [owner], 0)
                    self.topic_ids[tp] = topic_id
                    self.owned[tp] = fds.pop()
                except BlockingIOError:
                    continue
                finally:
                    for fd in fds:
                        close_lockable(self._fs, fd)
                acquired.append(tp)
        return acquired

    def release(self, partitions: Iterable[TopicPartition]) -> None:
        """Unlock partitions, so that other members may read them."""
        for tp in partitions:
            fd = self.owned.get(tp, -1)
            if fd >= 0:
                with failures_ignored():
                    self._fs.ftruncate(fd, 0)
                close_lockable(self._fs, fd, self.owned, tp)
            self.owned.pop(tp, None)  # last: an interrupt must leave every lock with an owner
            self.topic_ids.pop(tp, None)

    # ------------------------------------------------------------ committing

    @interrupt_safe_context
    def committing(self, partitions: Iterable[TopicPartition]) -> Iterator[None]:
        """Prevent other members from acquiring these partitions within the block.

        Raises `ConsumerFenced` if this member does not own all of them.
        """
        self.check_process()
        folder = self.folder
        if self._lock_fd < 0:
            # Keep the descriptor open for later commits. The file stays valid: a group with members cannot be deleted,
            # and an evicted member finds its partition files gone.
            store_result(self, "_lock_fd", open_lockable, self._fs, folder.lock_path, os.O_RDWR | os.O_CREAT)
        try:
            self._fs.flock(self._lock_fd, SHARED)
            for tp in partitions:
                fd = self.owned.get(tp, -1)
                partition = PartitionId(self.topic_ids.get(tp, ""), tp.partition)
                if fd < 0 or not folder.is_current(fd, folder.partition_path(partition)):
                    why = f"no longer owns {tp}" if fd >= 0 else f"does not own {tp}"
                    raise ConsumerFenced(folder.group, self.id, why)
            yield
        finally:
            if self._lock_fd >= 0:  # else the member was evicted within the block
                self._fs.flock(self._lock_fd, UNLOCK)
