"""The groups that one worker of a server coordinates: locks them for its clients, and saves their state.

`groups.server_group_file` describes the files. The worker makes the decisions. This module makes sure that only one
process coordinates a group.
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
from segmentlog.groups.committed_offsets import CommittedOffsetsView, encode
from segmentlog.groups.group_folder import GroupFolder, encode_heartbeat
from segmentlog.groups.server_group_file import (
    DamagedGroupFile,
    SavedGroup,
    WorkerIdentity,
    read_saved_group,
    worker_path,
    write_saved_group,
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

_LOCK_WAIT_S: Final = 0.05
"""Other processes lock a worker's file for a moment to check whether the worker is alive."""


class OffsetCommit(msgspec.Struct, frozen=True):
    """An offset to commit, with the metadata and the leader epoch that Kafka's clients send."""

    topic: str
    topic_id: str
    partition: int
    offset: int
    epoch: int = -1
    metadata: str = ""


class ServerGroups:
    """The groups of one worker of a server. Thread-safe; get it from `Groups.server_groups`.

    The caller must not make two calls for the same group at the same time.
    """

    def __init__(self, topics: Topics, committed_offsets: CommittedOffsetsView, worker: int) -> None:
        self._fd: int = -1
        self._topics = topics
        self._fs = topics.fs
        self._clock = topics.clock
        self._committed_offsets = committed_offsets
        self.worker = worker
        self._path = f"{topics.path}/{GROUPS_FOLDER}"
        self._mutex = fork_safety.lock(self, "_mutex", "_discard_parent_state")

    def _discard_parent_state(self) -> None:
        """Forget the lock in a forked child: the groups belong to the parent."""
        self._fd = -1

    # ------------------------------------------------------------ the worker's lock

    def lock_worker(self) -> bool:
        """Lock the groups of this worker; return False while another process with the same number holds the lock."""
        with self._mutex:
            if self._fd >= 0:
                return True
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(self._path)
            try:
                store_result(
                    self, "_fd", open_lockable, self._fs, worker_path(self._path, self.worker), os.O_RDWR | os.O_CREAT
                )
                if not lock_within(self._fs, self._fd, _LOCK_WAIT_S):
                    self._release_lock()
                    return False
                worker = WorkerIdentity(os.getpid(), socket.gethostname(), self._fs.boot_id())
                text = [encode_heartbeat(self._clock.monotonic_ms()), b"\n", msgspec.json.encode(worker), b"\n"]
                write_all(self._fs, self._fd, text, 0)
                self._fs.ftruncate(self._fd, sum(map(len, text)))
            except BaseException:
                self._release_lock()
                raise
            return True

    def write_heartbeat(self) -> None:
        """Write the current time into the worker's file, to show other processes that the worker is alive."""
        with self._mutex:
            if self._fd >= 0:
                self._fs.pwritev(self._fd, [encode_heartbeat(self._clock.monotonic_ms())], 0)

    def close(self) -> None:
        """Release the lock. The files of the groups stay as they are."""
        self.write_heartbeat()
        with self._mutex:
            self._release_lock()

    def _release_lock(self) -> None:
        if self._fd >= 0:
            close_lockable(self._fs, self._fd, self.__dict__, "_fd")
        self._fd = -1

    def __del__(self) -> None:
        self._release_lock()

    # ------------------------------------------------------------ group files

    def _folder(self, group: str) -> GroupFolder:
        return GroupFolder(self._topics, self._committed_offsets, group)

    def held_groups(self) -> list[str]:
        """Return the names of the groups that clients hold according to the groups' files."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for name in self._fs.listdir(self._path):
                with failures_ignored(UnicodeDecodeError, DamagedGroupFile):
                    saved = read_saved_group(self._fs, f"{self._path}/{name}")
                    if saved is not None and saved.held:
                        found.append(read_file(self._fs, f"{self._path}/{name}/lock").decode())
        return found

    def load(self, group: str) -> SavedGroup:
        """Return the last saved state of a group. If its file is damaged, return an empty group with a new generation.

        If the server had another number of workers before, another worker may have saved the group. Then save the group
        again under this worker.
        """
        folder = self._folder(group)
        try:
            saved = read_saved_group(self._fs, folder.path)
        except DamagedGroupFile as error:
            logger.warning(
                "group %s: %s/remote is damaged (%s): its members must join again; committed offsets are intact",
                group,
                folder.path,
                error,
            )
            with folder.locked():
                # Add one to the highest known generation: there may have been a later generation in which no member
                # committed.
                self.save(group, SavedGroup(generation=folder.last_generation() + 1))
            saved = read_saved_group(self._fs, folder.path)
        if saved is not None and saved.held:
            # Hold the group's lock. A member of the library may have found that the former worker is dead, and may be
            # about to write that clients no longer hold the group. Under the lock, it has written that already, or it
            # sees that this worker is alive.
            with folder.locked():
                saved = read_saved_group(self._fs, folder.path)
                if saved is not None and saved.held and saved.worker != self.worker:
                    self.save(group, saved)
        return SavedGroup() if saved is None else saved

    def claim(self, group: str, saved: SavedGroup) -> int:
        """Reserve a group without members for clients, which may then join it. Return its last generation.

        Raises `GroupInUse` if members of the library are alive.
        """
        folder = self._folder(group)
        with folder.locked():
            if live := folder.live_members():
                pids = sorted({state.info.pid for state in live.values()})
                hosts = ", ".join(sorted({state.info.host for state in live.values()}))
                what = "member" if len(live) == 1 else "members"
                which = f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))} on {hosts}"
                raise GroupInUse(group, len(live), f"{len(live)} {what} of the library ({which})")
            if folder.saved_group_version() is None:
                # The first save of this group: make its folders as durable as its file.
                self._fs.sync_folder(self._path)
                self._fs.sync_folder(self._topics.path)
            generation = max(saved.generation, folder.last_generation())
            self.save(group, msgspec.structs.replace(saved, held=True, generation=generation))
            return generation

    def save(self, group: str, saved: SavedGroup) -> None:
        """Save a group durably. The worker must call this before it answers the group's members.

        Raises DiskFull, OSError, `DiskFailed`: then call `load` to learn what the file contains.
        """
        stamped = msgspec.structs.replace(
            saved, worker=self.worker, alive_ms=self._clock.monotonic_ms(), boot_id=self._fs.boot_id()
        )
        write_saved_group(self._fs, self._folder(group).path, stamped)

    # ------------------------------------------------------------ committed offsets

    def commit_offsets(
        self,
        group: str,
        positions: Sequence[OffsetCommit],
        generation: int,
        member: str,
        stamp: ProducerStamp | None = None,
    ) -> tuple[Partition, int, int]:
        """Append offsets of a group that the caller holds. Return the log, and the range of the new records in it.

        The range is the first record's offset, and the offset after the last record. The caller must sync the range.
        With a ``stamp`` the records are part of its transaction. Raises `InvalidConfig` for an invalid offset.
        """
        keys: list[bytes | None] = []
        values: list[bytes | None] = []
        now_ms = self._clock.now_ms()
        for position in positions:
            encoded = encode(
                group, {TopicPartition(position.topic, position.partition): (position.offset, position.epoch)},
                _constant(position.topic_id), metadata=position.metadata, committed_ms=now_ms,
                generation=generation, member=member,
            )  # fmt: skip
            keys += encoded[0]
            values += encoded[1]
        log = self._committed_offsets.open_or_create_log()
        end_offset = self._committed_offsets.append(keys, values, stamp)
        return log, end_offset - len(keys), end_offset

    def commit_without_members(
        self, group: str, positions: Sequence[OffsetCommit], stamp: ProducerStamp | None = None
    ) -> tuple[Partition, int, int]:
        """Append offsets that a client commits without being a member. Return the result of `commit_offsets`.

        Raises `GroupInUse` if the group has members of the library.
        """
        folder = self._folder(group)
        with folder.locked(exclusive=False):
            if live := folder.live_members():
                raise GroupInUse(group, len(live), f"{len(live)} member{'s' if len(live) > 1 else ''} of the library")
            return self.commit_offsets(group, positions, -1, "", stamp)


def _constant(topic_id: str) -> Callable[[TopicPartition], str]:
    return lambda _: topic_id
