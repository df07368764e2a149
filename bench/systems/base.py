"""What a system under comparison has to do: append, read, say what it takes, be killed and opened again.

One `System` is one log in a folder, in the process that calls it. It holds either bare values
(``keyed=False``: what stands in the log is the value, found by its offset) or full records
(``keyed=True``: offset, timestamp, key and value). A system that knows no keys or timestamps packs the
three into one value with msgpack, the quickest way to do that from Python.

Each is used the way its own documentation recommends for speed from Python, and says in
`about` which way that is.
"""

from __future__ import annotations

import abc
import collections
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Protocol, runtime_checkable

import msgspec

Sync = Literal["never", "second", "batch"]
"""When what was appended is fsynced: when the kernel likes to, once a second, before `System.append` returns."""

SYNCS: tuple[Sync, ...] = ("never", "second", "batch")


class Unavailable(RuntimeError):
    """This system is not to be had here; says how to get it."""


class System(abc.ABC):
    """A log of ``keyed`` or bare records in ``folder``, fsynced as ``sync`` says. Used by one thread."""

    name: ClassVar[str]
    about: ClassVar[str]
    """How it is used, in a few words, for the report."""
    syncs: ClassVar[tuple[Sync, ...]] = SYNCS
    """The policies that it has."""
    compresses: ClassVar[bool] = False
    """Whether it compresses what it stores, as it is used here."""
    asynchronous: ClassVar[bool] = False
    """Whether `append` may return before anything was acknowledged, unless ``sync == "batch"``."""
    reopens: ClassVar[bool] = True
    """Whether `open` finds what another process that was killed has left."""

    def __init__(self, folder: Path, sync: Sync, *, keyed: bool) -> None:
        self.folder = folder
        self.sync = sync
        self.keyed = keyed

    @classmethod
    @abc.abstractmethod
    def version(cls) -> str:
        """Return the version of the system. Raises `Unavailable` if it, or something that it needs, is missing.

        Quick, and starts nothing.
        """

    @abc.abstractmethod
    def open(self) -> None:
        """Create the log, or open the one that is there: also one whose process was killed.

        Returns when the next append would succeed. A server is started here.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back; the folder stays. A server is stopped here."""

    @abc.abstractmethod
    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        """Append these as one batch. With ``sync == "batch"`` they are on disk when it returns.

        With the others it may return before a server has acknowledged them: `flush` waits for that.
        ``keys`` are given if and only if the log is keyed.
        """

    def append_one(self, value: bytes) -> None:
        """Append one record: what a program does that has one at a time. As durable as ``sync`` says."""
        self.append([value])

    def writer(self) -> Callable[[bytes], object]:
        """Return a function that appends one record, for one more thread, with its own connection if needed.

        When the function returns, the record is as durable as ``sync`` says. `close` releases what it holds. Raises
        `NotImplementedError` with the reason if a log has one writer only.
        """
        raise NotImplementedError("it has one writer at a time")

    def flush(self) -> None:  # noqa: B027 (most have nothing to wait for)
        """Return when everything that was appended is acknowledged and can be read."""

    @abc.abstractmethod
    def scan_values(self) -> int:
        """Read the whole log from its beginning, each value as bytes; returns how many."""

    @abc.abstractmethod
    def scan_records(self) -> int:
        """Return the same, of a keyed log: each record with its offset, timestamp, key and value as Python objects."""

    @abc.abstractmethod
    def read(self, offset: int) -> bytes:
        """Return the value at that offset of a log of bare values. Offsets count the appended records from 0."""

    @abc.abstractmethod
    def end(self) -> int:
        """How many records the log holds: the offset behind the last one."""

    def compact(self) -> None:
        """Leave the last record of each key alone and give the space back, of a keyed log.

        Raises `NotImplementedError` with the reason where the system has no such thing.
        """
        raise NotImplementedError("it has no compaction")

    def kill(self) -> None:  # noqa: B027 (most have no server)
        """SIGKILL the servers that were started here. What lives in the calling process dies with that."""

    def server_ids(self) -> list[int]:
        """Return the process ids of its servers: their memory counts, too."""
        return []


@runtime_checkable
class TimesItself(Protocol):
    """What a system has, too, that does its work in another process: it would be the pipe to it that is timed.

    Each does what the method of `bench.systems.host.Hosted` does, with the same records in the same order, and
    returns records, seconds, and the microseconds of each call.
    """

    def timed_append(self, seconds: float, batch_records: int, most: int) -> tuple[int, float, list[float]]: ...

    def timed_append_from_threads(self, threads: int, seconds: float) -> tuple[int, float, list[float]]: ...

    def timed_scan(self, *, full: bool) -> tuple[int, float]: ...

    def timed_reads(self, count: int, seed: int) -> list[float]: ...


def disk_bytes(folder: Path) -> int:
    """Return the size on disk of everything below ``folder``: blocks, not lengths, as some files are sparse."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def count_all(items: Iterable[object]) -> int:
    """How many there are. Each is made, and let go, without a step of the interpreter for it.

    A loop in Python around a scan would be the same time for everybody, and bring all ratios nearer to one.
    """
    counter = itertools.count()
    collections.deque(zip(items, counter, strict=False), maxlen=0)
    return next(counter)


class Packed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A full record for systems that store one value."""

    timestamp: int
    key: bytes
    value: bytes


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(Packed).decode


def packed(values: Sequence[bytes], keys: Sequence[bytes]) -> list[bytes]:
    """Each record of a batch as one value; all have the time of the call."""
    now_ms = time.time_ns() // 1_000_000
    return [pack(Packed(now_ms, key, value)) for key, value in zip(keys, values, strict=True)]
