"""The file of a group whose members are clients of a server, and the rule for when these clients hold the group.

    @groups/@server-<n>          flock EX by worker n of a server, as long as it may coordinate groups;
                                 20 digits: time of its last heartbeat (monotonic ms), a newline, JSON: `WorkerIdentity`
    @groups/<group>/remote       16 hex digits: XXH3-64 of the rest; a newline; JSON: `SavedGroup`

The file is replaced durably before the server answers a client. After a crash, a worker continues from it with the same
generation and the same members, and no member has to join again.

All members of a group are of one kind: members of the library, or clients of a server. Clients *hold* a group if
`SavedGroup.held` is true in its file, and one of these is true:

- The worker that wrote the file still holds its lock.
- The worker's last heartbeat is at most as old as the longest session time-out of a member.

So no member of the library can join while a server restarts. If the server does not return, the group is blocked only
for as long as its members could have waited for the server. The process that takes over the group then writes into the
file that clients no longer hold the group.

Both kinds check for members of the other kind, and register their own, under the group's `lock`.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec
import xxhash

from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fork_safety import opened_lockable
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_safe import NON_BLOCKING, SHARED

WORKER_PREFIX: Final = "@server-"
SAVED_GROUP_FILE: Final = "remote"
HEARTBEAT_DIGITS: Final = 20
_HASH_DIGITS: Final = 16


class SavedConsumerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State that a member has in addition to `SavedMember` if its group uses the consumer protocol.

    Partitions are numbers by topic id.
    """

    epoch: int = 0
    previous_epoch: int = 0
    stage: str = "settled"
    """Also "revoking" (the member has to release partitions) or "awaiting" (it lacks partitions that others hold)."""
    rack_id: str | None = None
    topics: tuple[str, ...] = ()
    """Names of the topics that it subscribes to."""
    regex: str = ""
    matched: tuple[str, ...] = ()
    """Topics that match the expression."""
    assignor: str | None = None
    assigned: dict[str, list[int]] = {}
    revoking: dict[str, list[int]] = {}
    target: dict[str, list[int]] = {}
    is_classic: bool = False
    """Whether the member speaks the classic protocol."""
    since: dict[int, dict[str, list[int]]] = {}
    """Partitions of ``assigned`` and ``revoking``, by the epoch in which the member received them. The member received
    all others in the group's current epoch. Earlier versions did not write this field: for their files, this is the
    safe assumption."""


class SavedMember(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member of a server's group, with its assignment in the generation that was saved."""

    id: str
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int = 0
    rebalance_timeout_ms: int = 0
    protocols: tuple[tuple[str, bytes], ...] = ()
    """Assignment protocols that it supports, the preferred one first, each with metadata that only clients can read."""
    assignment: bytes = b""
    """The assignment by the leader, in bytes that only clients can read."""
    topics: tuple[str, ...] = ()
    """Subscribed topics, for display; empty if the server cannot decode the metadata."""
    partitions: dict[str, list[int]] = {}
    """Assigned partitions, for display; empty if the server cannot decode the assignment."""
    consumer: SavedConsumerState | None = None


class SavedGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a group when the server last answered a member of it."""

    held: bool = False
    """Whether the group has members, or clients that are joining."""
    state: str = "Empty"
    """"PreparingRebalance" (members must join again), "CompletingRebalance" (not assigned yet), "Reconciling"
    (partitions move between members) or "Stable"."""
    generation: int = 0
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: tuple[SavedMember, ...] = ()
    session_timeout_ms: int = 0
    """The longest session time-out of a member."""
    is_consumer: bool = False
    """Whether the group uses the consumer protocol."""
    topics: dict[str, tuple[str, int]] = {}
    """Id and partition count of the topics that were assigned, by name; only with the consumer protocol."""
    worker: int = 0
    """Number of the worker whose lock or heartbeat shows that clients still hold the group."""
    alive_ms: int = 0
    """Time when this state was written, on the monotonic clock of the boot ``boot_id``."""
    boot_id: str = ""

    @property
    def described(self) -> str:
        """Return the number of members as text; if there are none, clients are joining."""
        count = len(self.members)
        return f"{count} {'member' if count == 1 else 'members'}" if count else "clients that are joining"


class WorkerIdentity(msgspec.Struct, frozen=True):
    """A worker process of a server that coordinates groups."""

    pid: int
    host: str
    boot_id: str


class WorkerLiveness(msgspec.Struct, frozen=True):
    """A worker of a server as other processes see it: whether it runs, and when it last sent a heartbeat."""

    is_alive: bool
    worker: WorkerIdentity
    alive_ms: int
    """Time of the worker's last heartbeat, on the monotonic clock of the boot in ``worker.boot_id``."""


class DamagedGroupFile(ValueError):
    """The file of a group is damaged: its checksum is wrong, or its contents cannot be decoded."""


_decoder = msgspec.json.Decoder(SavedGroup)
_worker_decoder = msgspec.json.Decoder(WorkerIdentity)


def encode_saved_group(group: SavedGroup) -> bytes:
    """Return the bytes of the file."""
    text = msgspec.json.encode(group) + b"\n"
    return b"%016x\n" % xxhash.xxh3_64_intdigest(text) + text


def decode_saved_group(data: bytes) -> SavedGroup:
    """Return the group that `encode_saved_group` was called with. Raises `DamagedGroupFile`."""
    text = data[_HASH_DIGITS + 1 :]
    if data[: _HASH_DIGITS + 1] != b"%016x\n" % xxhash.xxh3_64_intdigest(text):
        raise DamagedGroupFile("its checksum does not match")
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedGroupFile(str(error)) from error


def read_saved_group(fs: FileSystem, group_path: str) -> SavedGroup | None:
    """Read a group's file; None if the group never had clients of a server. Raises `DamagedGroupFile`."""
    try:
        return decode_saved_group(read_file(fs, f"{group_path}/{SAVED_GROUP_FILE}"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_saved_group(fs: FileSystem, group_path: str, group: SavedGroup) -> None:
    """Replace a group's file durably. Raises DiskFull, OSError, `DiskFailed`."""
    replace_file(fs, f"{group_path}/{SAVED_GROUP_FILE}", encode_saved_group(group))


def worker_path(groups_path: str, number: int) -> str:
    """Return the path of the file that a worker locks. No group's folder has this name: "@" would be quoted."""
    return f"{groups_path}/{WORKER_PREFIX}{number}"


def read_worker_state(fs: FileSystem, path: str) -> WorkerLiveness | None:
    """Return a worker's state; None if there never was one, or its file is incomplete. Reads only."""
    try:
        with opened_lockable(fs, path, os.O_RDONLY) as fd:
            try:
                fs.flock(fd, SHARED | NON_BLOCKING)
                is_alive = False
            except BlockingIOError:
                is_alive = True
            text = fs.pread(fd, 1 << 16, 0)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return WorkerLiveness(is_alive, _worker_decoder.decode(text[HEARTBEAT_DIGITS:]), int(text[:HEARTBEAT_DIGITS]))
    except (ValueError, msgspec.DecodeError):
        # The worker has the lock and is writing the file, or a power cut left it incomplete.
        return WorkerLiveness(True, WorkerIdentity(0, "", ""), 0) if is_alive else None


def silence_ms(group: SavedGroup, worker: WorkerLiveness | None, boot_id: str, now_ms: int) -> int:
    """Return a lower bound of the time since the last heartbeat of the group's worker. ``now_ms`` is monotonic."""
    seen = [group.alive_ms] if group.boot_id == boot_id else []
    if worker is not None and worker.worker.boot_id == boot_id:
        seen.append(worker.alive_ms)
    # Without a heartbeat in this boot, the silence is at least the uptime. No clock shows how long the machine was off.
    return now_ms - max(seen, default=0)


def is_held(group: SavedGroup, worker: WorkerLiveness | None, boot_id: str, now_ms: int) -> bool:
    """Return whether clients hold the group, by the rule in the docstring of this module."""
    if not group.held:
        return False
    if worker is not None and worker.is_alive:
        return True
    return silence_ms(group, worker, boot_id, now_ms) <= group.session_timeout_ms
