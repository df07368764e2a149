"""A group whose members are clients of a server: what the server writes down of it, and when it is theirs.

    @groups/@server-<n>          flock EX by the n-th worker of a server for as long as it may coordinate groups;
                                 20 digits: when it was last seen alive (monotonic ms), a newline, JSON: `Worker`
    @groups/<group>/remote       16 hex digits: XXH3-64 of what follows; a newline; JSON: `RemoteGroup`

The file is replaced durably before a client is told what is in it, so a worker that was killed goes on from it: the
same generation, the same members, nobody has to join again.

A group has members of one kind. It is *held* by clients of the server when its file says so, and
- the lock of the worker that wrote it is taken, or
- it is no longer since that worker was seen alive than the longest session timeout of its members.
So nobody slips in while a server is started again, and one that is gone for good keeps nobody out for longer than its
members could have waited for it. Who takes such a group over writes into the file that it is held no more.

Both kinds look at each other, and say that they have come, under the group's `lock`.
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
REMOTE_FILE: Final = "remote"
BEAT_DIGITS: Final = 20
_HASH_DIGITS: Final = 16


class RemoteConsumer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a member has beside that in a group of the consumer protocol, whose server assigns. Partitions are numbers
    by topic id."""

    epoch: int = 0
    previous_epoch: int = 0
    stage: str = "settled"
    """"revoking" (it has not said yet that it let go of some partitions) or "awaiting" (it lacks some that others have
    still)."""
    rack_id: str | None = None
    topics: tuple[str, ...] = ()
    """Names that it subscribes to."""
    regex: str = ""
    matched: tuple[str, ...] = ()
    """Topics that the expression matched."""
    assignor: str | None = None
    assigned: dict[str, list[int]] = {}
    revoking: dict[str, list[int]] = {}
    target: dict[str, list[int]] = {}
    is_classic: bool = False
    """Whether it speaks the classic protocol."""


class RemoteMember(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client of the server in the generation that the file tells of."""

    id: str
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int = 0
    rebalance_timeout_ms: int = 0
    protocols: tuple[tuple[str, bytes], ...] = ()
    """Ways to assign that it offers, the best first, each with what only clients understand."""
    assignment: bytes = b""
    """What only clients understand, from their leader."""
    topics: tuple[str, ...] = ()
    """What it subscribes to, for people; empty when the server cannot tell."""
    partitions: dict[str, list[int]] = {}
    """What it reads, for people; empty when the server cannot tell."""
    consumer: RemoteConsumer | None = None


class RemoteGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group as its server knew it when it last told its members something of it."""

    held: bool = False
    """Whether it has members, or clients that are about to be."""
    state: str = "Empty"
    """"PreparingRebalance" (members were to join anew), "CompletingRebalance" (not assigned yet), "Reconciling"
    (partitions change hands) or "Stable"."""
    generation: int = 0
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: tuple[RemoteMember, ...] = ()
    session_timeout_ms: int = 0
    """The longest of a member."""
    is_consumer: bool = False
    """Whether it is a group of the consumer protocol."""
    topics: dict[str, tuple[str, int]] = {}
    """Id and partition count of the topics that it was assigned by, by name; of the consumer protocol alone."""
    worker: int = 0
    """Whose lock and signs of life count."""
    alive_ms: int = 0
    """Monotonic, in the time of ``boot_id``: when this was written."""
    boot_id: str = ""

    @property
    def described(self) -> str:
        """Who holds it, for people."""
        count = len(self.members)
        return f"{count} {'member' if count == 1 else 'members'}" if count else "clients that are joining"


class Worker(msgspec.Struct, frozen=True):
    """A process of a server that coordinates groups."""

    pid: int
    host: str
    boot_id: str


class WorkerState(msgspec.Struct, frozen=True):
    """A worker as others see it."""

    is_alive: bool
    worker: Worker
    alive_ms: int
    """Monotonic, in the time of its boot id."""


class DamagedRemote(ValueError):
    """The file holds something else than was written to it."""


_decoder = msgspec.json.Decoder(RemoteGroup)
_worker_decoder = msgspec.json.Decoder(Worker)


def encode_remote(group: RemoteGroup) -> bytes:
    """The file's bytes."""
    text = msgspec.json.encode(group) + b"\n"
    return b"%016x\n" % xxhash.xxh3_64_intdigest(text) + text


def decode_remote(data: bytes) -> RemoteGroup:
    """What `encode_remote` was given. Raises `DamagedRemote`."""
    text = data[_HASH_DIGITS + 1 :]
    if data[: _HASH_DIGITS + 1] != b"%016x\n" % xxhash.xxh3_64_intdigest(text):
        raise DamagedRemote("its checksum is another")
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedRemote(str(error)) from error


def read_remote(fs: FileSystem, group_path: str) -> RemoteGroup | None:
    """What a group's folder says of its clients; None when it never had any. Raises `DamagedRemote`."""
    try:
        return decode_remote(read_file(fs, f"{group_path}/{REMOTE_FILE}"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_remote(fs: FileSystem, group_path: str, group: RemoteGroup) -> None:
    """Put it there durably. Raises DiskFull, OSError, `DiskFailed`."""
    replace_file(fs, f"{group_path}/{REMOTE_FILE}", encode_remote(group))


def worker_path(groups_path: str, number: int) -> str:
    """Of the file that a worker locks; no group's folder is called like that, for "@" is quoted there."""
    return f"{groups_path}/{WORKER_PREFIX}{number}"


def look_at_worker(fs: FileSystem, path: str) -> WorkerState | None:
    """A worker's state; None when there never was one, or nobody can tell what it was. Reads only."""
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
        return WorkerState(is_alive, _worker_decoder.decode(text[BEAT_DIGITS:]), int(text[:BEAT_DIGITS]))
    except (ValueError, msgspec.DecodeError):
        # Being made by one that has the lock, or torn by a power cut.
        return WorkerState(True, Worker(0, "", ""), 0) if is_alive else None


def silence_ms(group: RemoteGroup, worker: WorkerState | None, boot_id: str, now_ms: int) -> int:
    """How long nobody has seen the group's worker alive, at the least. ``now_ms`` is monotonic, since boot."""
    seen = [group.alive_ms] if group.boot_id == boot_id else []
    if worker is not None and worker.worker.boot_id == boot_id:
        seen.append(worker.alive_ms)
    # Before this boot: at least as long as the machine is up. Its clocks say nothing about how long it was down.
    return now_ms - max(seen, default=0)


def is_held(group: RemoteGroup, worker: WorkerState | None, boot_id: str, now_ms: int) -> bool:
    """Whether the group is its clients', by the rule that this file begins with."""
    if not group.held:
        return False
    if worker is not None and worker.is_alive:
        return True
    return silence_ms(group, worker, boot_id, now_ms) <= group.session_timeout_ms
