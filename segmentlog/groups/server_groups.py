"""What a server's worker does with the files of groups: holds them for its clients, and writes down what it knows.

The file `groups.server_group_file` describes them. What is decided is the worker's; that no two do it is seen to here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from segmentlog.errors import GroupInUse
from segmentlog.format.file_names import GROUPS_FOLDER
from segmentlog.groups.committed_offsets import CommittedPositions, encode
from segmentlog.groups.group_folder import GroupFolder, encode_beat
from segmentlog.groups.server_group_file import (
    DamagedRemote,
    RemoteGroup,
    Worker,
    read_remote,
    worker_path,
    write_remote,
)
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.records import TopicPartition
from segmentlog.storage import fork_safety
from segmentlog.storage.file_locks import lock_within
from segmentlog.storage.file_operations import read_file, write_all
from segmentlog.storage.fork_safety import close_lockable, open_lockable
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.interrupt_safe import store_result
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")

_LOOK_S: Final = 0.05
"""Others who look whether a worker lives have its lock for a moment."""


class NewPosition(msgspec.Struct, frozen=True):
    """A position to commit, with what Kafka's clients say of it."""

    topic: str
    topic_id: str
    partition: int
    offset: int
    epoch: int = -1
    metadata: str = ""


class RemoteGroups:
    """The groups of one worker of a server. Thread-safe; get it from `Groups.remote`.

    A group's own calls come one at a time: the worker sees to that.
    """

    def __init__(self, topics: Topics, positions: CommittedPositions, worker: int) -> None:
        self._fd: int = -1
        self._topics = topics
        self._fs = topics.fs
        self._clock = topics.clock
        self._positions = positions
        self.worker = worker
        self._path = f"{topics.path}/{GROUPS_FOLDER}"
        self._mutex = fork_safety.lock(self, "_mutex", "_forget_parent")

    def _forget_parent(self) -> None:
        """In a forked child: the groups are the parent's."""
        self._fd = -1

    # ------------------------------------------------------------ the worker's lock

    def begin(self) -> bool:
        """Hold the groups from now on; False while another process of the same number does."""
        with self._mutex:
            if self._fd >= 0:
                return True
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(self._path)
            try:
                store_result(
                    self, "_fd", open_lockable, self._fs, worker_path(self._path, self.worker), os.O_RDWR | os.O_CREAT
                )
                if not lock_within(self._fs, self._fd, _LOOK_S):
                    self._let_go()
                    return False
                worker = Worker(os.getpid(), socket.gethostname(), self._fs.boot_id())
                text = [encode_beat(self._clock.monotonic_ms()), b"\n", msgspec.json.encode(worker), b"\n"]
                write_all(self._fs, self._fd, text, 0)
                self._fs.ftruncate(self._fd, sum(map(len, text)))
            except BaseException:
                self._let_go()
                raise
            return True

    def beat(self) -> None:
        """Say that this worker is alive."""
        with self._mutex:
            if self._fd >= 0:
                self._fs.pwritev(self._fd, [encode_beat(self._clock.monotonic_ms())], 0)

    def close(self) -> None:
        """Hold them no more; what the files say stays."""
        self.beat()
        with self._mutex:
            self._let_go()

    def _let_go(self) -> None:
        if self._fd >= 0:
            close_lockable(self._fs, self._fd, self.__dict__, "_fd")
        self._fd = -1

    def __del__(self) -> None:
        self._let_go()

    # ------------------------------------------------------------ what is known of a group

    def _folder(self, group: str) -> GroupFolder:
        return GroupFolder(self._topics, self._positions, group)

    def held(self) -> list[str]:
        """Names of the groups whose files say that clients hold them."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for name in self._fs.listdir(self._path):
                with failures_ignored(UnicodeDecodeError, DamagedRemote):
                    remote = read_remote(self._fs, f"{self._path}/{name}")
                    if remote is not None and remote.held:
                        found.append(read_file(self._fs, f"{self._path}/{name}/lock").decode())
        return found

    def load(self, group: str) -> RemoteGroup:
        """What was saved last. A file that is damaged says nothing but that the generation has to be a new one.

        One that another worker wrote, when there were more or fewer of them, is this worker's from now on.
        """
        folder = self._folder(group)
        try:
            remote = read_remote(self._fs, folder.path)
        except DamagedRemote as error:
            logger.warning(
                "group %s: %s/remote is damaged (%s): its members have to join again; positions are not concerned",
                group, folder.path, error,
            )  # fmt: skip
            with folder.locked():
                # One more than any trace is left of: there may have been one that nobody committed in.
                self.save(group, RemoteGroup(generation=folder.last_generation() + 1))
            remote = read_remote(self._fs, folder.path)
        if remote is not None and remote.held:
            # A member of the library may have found that the former worker is gone for long enough, and be about to
            # write that it is held no more: under this lock, where it finds this worker alive, or has been before it.
            with folder.locked():
                remote = read_remote(self._fs, folder.path)
                if remote is not None and remote.held and remote.worker != self.worker:
                    self.save(group, remote)
        return RemoteGroup() if remote is None else remote

    def claim(self, group: str, remote: RemoteGroup) -> int:
        """Hold a group that has no members, so that clients may join it: the generation that it had last.

        Raises `GroupInUse` when members of the library are at work.
        """
        folder = self._folder(group)
        with folder.locked():
            if live := folder.live_members():
                pids = sorted({state.info.pid for state in live.values()})
                hosts = ", ".join(sorted({state.info.host for state in live.values()}))
                what = "member" if len(live) == 1 else "members"
                which = f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))} on {hosts}"
                raise GroupInUse(group, len(live), f"{len(live)} {what} of the library ({which})")
            if folder.remote_version() is None:
                # The first time: the names of the folders are to last as long as what is in them.
                self._fs.sync_folder(self._path)
                self._fs.sync_folder(self._topics.path)
            generation = max(remote.generation, folder.last_generation())
            self.save(group, msgspec.structs.replace(remote, held=True, generation=generation))
            return generation

    def save(self, group: str, remote: RemoteGroup) -> None:
        """Write down what members are about to be told: durable when it returns.

        Raises DiskFull, OSError, `DiskFailed`: then `load` says what is there.
        """
        stamped = msgspec.structs.replace(
            remote, worker=self.worker, alive_ms=self._clock.monotonic_ms(), boot_id=self._fs.boot_id()
        )
        write_remote(self._fs, self._folder(group).path, stamped)

    # ------------------------------------------------------------ positions

    def commit(
        self,
        group: str,
        positions: Sequence[NewPosition],
        generation: int,
        member: str,
        stamp: ProducerStamp | None = None,
    ) -> tuple[Partition, int, int]:
        """Append positions of a group that the caller holds: where they are, to be synced.

        (Log, first offset, offset behind the last one.) With a ``stamp`` they are part of a transaction. Raises
        `InvalidConfig` for what is no position.
        """
        keys: list[bytes | None] = []
        values: list[bytes | None] = []
        now_ms = self._clock.now_ms()
        for position in positions:
            some = encode(
                group, {TopicPartition(position.topic, position.partition): (position.offset, position.epoch)},
                _constant(position.topic_id), metadata=position.metadata, committed_ms=now_ms,
                generation=generation, member=member,
            )  # fmt: skip
            keys += some[0]
            values += some[1]
        log = self._positions.make_log()
        end_offset = self._positions.append(keys, values, stamp)
        return log, end_offset - len(keys), end_offset

    def commit_alone(
        self, group: str, positions: Sequence[NewPosition], stamp: ProducerStamp | None = None
    ) -> tuple[Partition, int, int]:
        """The same for who is no member, of a group that has none. Raises `GroupInUse`."""
        folder = self._folder(group)
        with folder.locked(exclusive=False):
            if live := folder.live_members():
                raise GroupInUse(group, len(live), f"{len(live)} members of the library")
            return self.commit(group, positions, -1, "", stamp)


def _constant(topic_id: str) -> Callable[[TopicPartition], str]:
    return lambda _: topic_id
