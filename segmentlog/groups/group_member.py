"""Consumer groups without a server: the kernel's locks are the coordinator.

    @groups/<group>/             the group's name quoted, see `folder_name_of`
      lock                       flock EX to change what follows, SH to commit or to take a partition;
                                 holds the group's name
      members/<member id>        flock EX by the member for its life; 20 digits: when it polled last
                                 (monotonic ms), a newline, then JSON: `MemberInfo`
      assignment                 JSON: `Assignment`; replaced as a whole, with the next generation
      partitions/<topic id>-<n>  flock EX by the member that reads the partition; JSON: who, since which generation
      remote                     what a server knows of its clients in the group, see `groups.server_group_file`

A member is live while its file cannot be locked. A member that finds another one dead, or without a
poll for its max_poll_interval_ms, makes the next assignment. The lock of a partition gives the right
to read it: a partition moves once the old owner released the lock, or died. An owner that stopped
polling is *evicted*: its partition files are unlinked, so that its locks are on files without a
name. Its later commits are refused.

Under `lock` EX: join, leave, evict. Under SH: take a partition, commit. So each commit is either
before an eviction, or refused. A process that dies between any two steps leaves files that are not
locked, and nobody waits for them. One that is *stopped* while it holds `lock` (for some 50 us at a
commit, for an fsync at a join) holds up joining and leaving until it goes on: a lock that could be
taken from it would let it commit later what it must not.
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
    encode_beat,
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
"""How often a member looks whether the others live. With many members, each looks less often."""
_CHECK_MEMBERS: Final = 16
_SUSPECT_MS: Final = 60
"""A dying process's files are closed, which wakes the others, a moment before its locks are freed."""
_TOPICS_MS: Final = 1000
_RETRY_MS: Final = 10
_BEAT_MS: Final = 100
_CLIENT_ID_KEPT: Final = 64


class Member:
    """One member of a group: joins, hears of new assignments, takes and lets go of partitions.

    Not thread-safe: the consumer sees to that. Used in a forked child it raises `StoreClosed`.
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
        """Descriptors of the files of the partitions that it holds the locks of."""
        self.topic_ids: dict[TopicPartition, str] = {}
        """Which topics' partitions those are: that had the names when they were taken."""
        if strategy not in STRATEGIES:
            raise InvalidConfig("assignment_strategy", strategy, "'sticky', 'range' or 'roundrobin'")
        self.folder = folder
        self.strategy = strategy
        self.id = ""
        self.generation = 0
        self.assigned: set[TopicPartition] = set()
        """What the current assignment gives to this member."""
        self.topics = tuple(topics)
        self._client_id = client_id
        self._max_poll_interval_ms = max_poll_interval_ms
        self._beat_ms = min(_BEAT_MS, max_poll_interval_ms // 4)
        self._monotonic_ms = monotonic_ms
        self.now_ms = now_ms
        self._fs = folder.fs
        self._seen: Version | None = None
        self._beaten_ms = self._check_at_ms = self._topics_at_ms = self._retry_at_ms = self._suspect_until_ms = 0
        self._resolved: dict[str, int] = {}

    # ------------------------------------------------------------ joining, leaving

    def join(self) -> None:
        """Become a member, under a new id.

        Raises `InvalidConfig` when the others have another strategy, `GroupInUse` when they are clients of a server.
        """
        folder, fs = self.folder, self._fs
        kept = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "_" for char in self._client_id)
        self.id = f"{kept[:_CLIENT_ID_KEPT] or 'consumer'}-{uuid.uuid4().hex}"
        self._pid = os.getpid()
        info = MemberInfo(
            self._client_id, self._pid, socket.gethostname(), self.topics, self.strategy,
            self._max_poll_interval_ms, self.now_ms(),
        )  # fmt: skip
        with folder.locked():
            now_ms = self._monotonic_ms()
            folder.take_over(now_ms)
            others = {state.info.strategy for state in folder.live_members().values() if not state.is_overdue(now_ms)}
            if others - {self.strategy}:
                found = ", ".join(map(repr, sorted(others - {self.strategy})))
                wanted = f"{found}, as the other members of group {folder.group!r} have it"
                raise InvalidConfig("assignment_strategy", self.strategy, wanted)
            path = f"{folder.members_path}/{self.id}"
            try:
                store_result(self, "_fd", open_lockable, fs, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                fs.flock(self._fd, EXCLUSIVE)
                write_all(fs, self._fd, [encode_beat(now_ms), b"\n", msgspec.json.encode(info), b"\n"], 0)
                # Before the assignment is made: what is created in between then counts as a change, and not as known.
                self._resolved = folder.resolve(self.topics)
                folder.rebalance(now_ms)
            except BaseException:
                folder.unlink(path)
                self._close_files()
                raise
        self._beaten_ms = now_ms
        self._seen = None

    def leave(self) -> None:
        """Unlock everything; the others get it. The partitions were told about already."""
        if self.is_foreign:
            return
        self.hand_over(list(self.owned.copy()))
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
        """Whether it holds no lock any more."""
        return self._fd < 0 and not any(fd >= 0 for fd in self.owned.copy().values())

    def end_membership(self) -> None:
        """Close what belonged to a membership that others have ended."""
        self.hand_over(list(self.owned.copy()))
        self._close_files()
        self.assigned = set()

    def _close_files(self) -> None:
        if self._lock_fd >= 0:
            close_lockable(self._fs, self._lock_fd, self.__dict__, "_lock_fd")
        if self._fd >= 0:
            close_lockable(self._fs, self._fd, self.__dict__, "_fd")
        self._lock_fd = self._fd = -1

    def __del__(self) -> None:
        # Nobody closed its consumer: the others must not wait for what nobody polls any more.
        if not self.is_foreign:
            for fd in (*self.owned.copy().values(), self._lock_fd, self._fd):
                if fd >= 0:
                    close_lockable(self._fs, fd)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child, and the membership the parent's."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise `StoreClosed` in a forked child: the membership is the parent's."""
        if self.is_foreign:
            raise StoreClosed.forked(f"member {self.id}")

    def _is_member(self) -> bool:
        return self._fd >= 0 and self.folder.is_current(self._fd, f"{self.folder.members_path}/{self.id}")

    # ------------------------------------------------------------ polling

    def poll(self, *, ended: bool = False) -> bool:
        """Say that this member is alive; True when there is something to do: call `refresh`, then `acquire`.

        ``ended``: a member's file was closed or removed. Costs one stat when nothing changed.
        """
        self.check_process()
        if self._fd < 0:
            return True  # it was evicted, and could not join again
        now_ms = self._monotonic_ms()
        if now_ms - self._beaten_ms >= self._beat_ms:
            self._beaten_ms = now_ms
            self._fs.pwritev(self._fd, [encode_beat(now_ms)], 0)
        if ended:
            self._suspect_until_ms = now_ms + _SUSPECT_MS
        if now_ms >= self._check_at_ms or now_ms < self._suspect_until_ms:
            self._check(now_ms)
        if self.folder.assignment_version() != self._seen or self._seen is None:
            return True
        if now_ms >= self._retry_at_ms and not self.is_settled:
            self._retry_at_ms = now_ms + _RETRY_MS
            return True
        return False

    @property
    def is_settled(self) -> bool:
        """Whether it holds everything that it is to read."""
        return self.owned.keys() == self.assigned and min(self.owned.copy().values(), default=0) >= 0

    @property
    def wait_s(self) -> float:
        """How long it may sleep before the next poll."""
        if not self.is_settled or self._monotonic_ms() < self._suspect_until_ms:
            return _RETRY_MS / 1000
        return min(_CHECK_MS, 2 * max(self._beat_ms, 1)) / 1000

    def _check(self, now_ms: int) -> None:
        """Look whether others died, stopped polling, or topics changed: then make another assignment."""
        others = [member for member in self.folder.member_ids() if member != self.id]
        self._check_at_ms = now_ms + _CHECK_MS * max(1, len(others) // _CHECK_MEMBERS)
        changed = not self._is_member()
        if not changed:
            states = map(self.folder.look_at, others)
            changed = any(state is None or state.is_overdue(now_ms) for state in states)
        if not changed and now_ms >= self._topics_at_ms:
            self._topics_at_ms = now_ms + _TOPICS_MS
            resolved = self.folder.resolve(self.topics)
            changed = resolved != self._resolved
            if changed:
                self._resolved = resolved
            assignment = self.folder.read_assignment()
            changed |= assignment is None or assignment.members.keys() != {self.id, *others}
            if assignment is not None and assignment.generation != self.generation:
                self._seen = None  # replaced within a tick of the file system's clock, by a file with the same inode
        if changed:
            with self.folder.locked():
                self.folder.rebalance(now_ms)
            self._seen = None

    def refresh(self) -> tuple[bool, list[TopicPartition]]:
        """Take over the current assignment: whether this member was evicted, and what it has to let go of.

        Evicted, it holds nothing that counts: `end_membership`, then `join` again.
        """
        for _ in range(2):
            version = self.folder.assignment_version()
            assignment = self.folder.read_assignment()
            if not self._is_member():
                return True, []
            if assignment is not None and self.id in assignment.members:
                break
            with self.folder.locked():  # lost, or made by somebody who took this member for dead
                if self._is_member():
                    self.folder.rebalance(self._monotonic_ms())
        if assignment is None or self.id not in assignment.members:
            return True, []
        assigned = assignment.of(self.id)
        # With no call in between: interrupted, it would never look at this one again.
        self._seen, self.generation, self.assigned = version, assignment.generation, assigned
        return False, sorted(self.owned.copy().keys() - self.assigned)

    def acquire(self) -> list[TopicPartition]:
        """Lock what is assigned and free; returns what is new."""
        missing = sorted(tp for tp in self.assigned if self.owned.get(tp, -1) < 0)
        if not missing:
            return []
        taken: list[TopicPartition] = []
        with self.folder.locked(exclusive=False):  # no eviction meanwhile
            if self.folder.assignment_version() != self._seen or not self._is_member():
                return []
            for tp in missing:
                try:
                    topic_id = self.folder.topics.topic(tp.topic).id
                except UnknownTopic:  # deleted or renamed: the next assignment is without it
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
                taken.append(tp)
        return taken

    def hand_over(self, partitions: Iterable[TopicPartition]) -> None:
        """Unlock partitions: others may read them now."""
        for tp in partitions:
            fd = self.owned.get(tp, -1)
            if fd >= 0:
                with failures_ignored():
                    self._fs.ftruncate(fd, 0)
                close_lockable(self._fs, fd, self.owned, tp)
            self.owned.pop(tp, None)  # only now: an interrupt must not leave a lock that nobody knows of
            self.topic_ids.pop(tp, None)

    # ------------------------------------------------------------ committing

    @interrupt_safe_context
    def committing(self, partitions: Iterable[TopicPartition]) -> Iterator[None]:
        """Within, no other member has these partitions.

        Raises `ConsumerFenced` when one of them is not this member's (any more).
        """
        self.check_process()
        folder = self.folder
        if self._lock_fd < 0:
            # Kept: nobody deletes a group with members, and an evicted one finds its partitions' files gone.
            store_result(self, "_lock_fd", open_lockable, self._fs, folder.lock_path, os.O_RDWR | os.O_CREAT)
        try:
            self._fs.flock(self._lock_fd, SHARED)
            for tp in partitions:
                fd = self.owned.get(tp, -1)
                where = PartitionId(self.topic_ids.get(tp, ""), tp.partition)
                if fd < 0 or not folder.is_current(fd, folder.partition_path(where)):
                    why = f"does not own {tp} any more" if fd >= 0 else f"does not own {tp}"
                    raise ConsumerFenced(folder.group, self.id, why)
            yield
        finally:
            if self._lock_fd >= 0:  # else it was evicted within
                self._fs.flock(self._lock_fd, UNLOCK)
