"""A replica: a read-only store that keeps up with one that is shipped, for readers of any process beside it.

    DIR/@replica           what it is a replica of; locked by the process that keeps it up
    DIR/@replica-status    how far it is
    DIR/TOPIC/N/...        as in any store; state pages show what was brought
    DIR/store.json         last of all, the first time: from here on it is a store

Killed and run again it keeps what it finds whole, and what readers see never goes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final

import msgspec

from segmentlog.arguments import as_bool, as_int, as_patterns
from segmentlog.clock import Clock
from segmentlog.errors import ShippingRefused
from segmentlog.format.file_names import FORMAT_VERSION, REPLICA_FILE, REPLICA_STATUS_FILE, STORE_FILE
from segmentlog.format.manifest import Manifest
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.bucket.upload_pool import PARALLEL
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.replica.downloads import WholeFiles
from segmentlog.objects.replica.mirror import Mirror, MirrorStatus
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import make_folders_durably, read_file, replace_file
from segmentlog.storage.fork_safety import LockableFd, close_lockable, open_lockable, opened_lockable
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING
from segmentlog.topics.background_threads import BackgroundThread

_INTERVAL_MAX_MS: Final = 3_600_000
_STATUS_S: Final = 2.0
"""So often others are told how far it is when nothing is new."""
_STALE_S: Final = 15.0
"""Nobody keeps it up who has not said so for so long, and for ten intervals."""
_CLOSING_S: Final = 30.0

Progress = Callable[[int, int], None]
"""Told (partitions that are shown, partitions in all)."""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """How far a replica is.

    ``sequence`` of the manifest that it shows, and wall clocks in ms: when the owner put that, when it was last seen
    that there is no newer one. ``lag_records``: offsets that lie in the object store and are not shown yet;
    ``lag_s``: for how long nobody knows of nothing newer. ``error``: what keeps it from keeping up, empty when nothing.
    """

    url: str
    sequence: int
    shipped_ms: int
    looked_ms: int
    lag_records: int
    lag_s: float
    size_bytes: int
    error: str


class _Told(msgspec.Struct, frozen=True):
    """What the status file says."""

    status: MirrorStatus
    interval_ms: int
    told_ms: int


class Replica:
    """Keeps the folder ``path`` equal to the store that is shipped to ``url``, or to the topics of it that match.

    With ``threads`` a thread does so every ``interval_ms``, otherwise `turn`. Thread-safe; one process at a time.
    Raises `ShippingRefused` (nothing was shipped there; the folder holds something else, or another process keeps it
    up), `InvalidConfig`, `ObjectStoreError`.
    """

    def __init__(
        self,
        url: str,
        path: str | os.PathLike[str],
        *,
        topics: Iterable[str] = (),
        interval_ms: int = 1000,
        threads: bool = True,
        parallel: int = PARALLEL,
        bucket: Bucket | None = None,
        fs: FileSystem | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._interval_ms = as_int("interval_ms", interval_ms, 1, _INTERVAL_MAX_MS)
        threads, wanted = as_bool("threads", threads), as_patterns("topics", topics)
        self.path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        self._fs, self._clock = fs or FileSystem(), clock or Clock()
        self._bucket = bucket or open_bucket(url)
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._told_s = 0.0
        self._lock: LockableFd | None = self._begin(wanted)
        self._mirror = Mirror(
            self._bucket, self.path, WholeFiles(self._bucket, self._fs),
            wanted=wanted, parallel=parallel, fs=self._fs, clock=self._clock,
        )  # fmt: skip
        fork_safety.on_fork(self, "_forget")
        self._worker = BackgroundThread("replica", self._tick) if threads else None
        if self._worker is not None:
            self._worker.ensure_running()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Replica of {self._bucket.url} in {self.path}>"

    def _forget(self) -> None:
        """In a forked child: the parent keeps it up."""
        self._lock = None

    # ------------------------------------------------------------ the folder

    def _begin(self, topics: tuple[str, ...]) -> LockableFd:
        """See that the folder is one for this replica, and lock it."""
        fs, mark = self._fs, f"{self.path}/{REPLICA_FILE}"
        manifest, _ = require_manifest(self._bucket)
        wanted = {"url": self._bucket.url, "store_id": manifest.store_id, "topics": list(topics)}
        make_folders_durably(fs, self.path)
        if not fs.exists(mark):
            if fs.exists(f"{self.path}/{STORE_FILE}"):
                raise ShippingRefused(self._bucket.url, f"{self.path} is a store; a replica wants a folder of its own")
            if names := [name for name in fs.listdir(self.path) if not _is_harmless(name)]:
                why = f"{self.path} is not empty (it holds {names[0]}); a replica wants a folder of its own"
                raise ShippingRefused(self._bucket.url, why)
            replace_file(fs, mark, json.dumps(wanted).encode() + b"\n")
        fd = open_lockable(fs, mark, os.O_RDWR)
        try:
            try:
                fs.flock(fd, EXCLUSIVE | NON_BLOCKING)
            except BlockingIOError:
                why = f"another process keeps {self.path} up; one is enough, any number may read it"
                raise ShippingRefused(self._bucket.url, why) from None
            found = json.loads(read_file(fs, mark) or b"{}")
            if found != wanted:
                raise ShippingRefused(self._bucket.url, f"{self.path} is a replica of something else: {found}")
        except BaseException:
            close_lockable(fs, fd)
            raise
        return fd

    def _make_store(self, manifest: Manifest) -> None:
        path = f"{self.path}/{STORE_FILE}"
        if self._fs.exists(path):
            return
        document = {"format": FORMAT_VERSION, "store_id": manifest.store_id, "created_ms": manifest.shipped_ms}
        replace_file(self._fs, path, json.dumps(document, indent=2).encode() + b"\n")

    # ------------------------------------------------------------ keeping up

    def turn(self, progress: Progress | None = None) -> bool:
        """Show what lies there now; False when there was nothing new. From then on the folder is a store.

        Raises `ObjectStoreError`, `ShippingRefused` (damage there, or another store), `DiskFull`: what is shown stays,
        and the next turn goes on.
        """
        with self._mutex:
            if self._lock is None:
                raise ShippingRefused(self._bucket.url, f"this replica in {self.path} is closed, or its parent's")
            try:
                changed = self._mirror.turn(progress)
                if self._mirror.manifest is not None:
                    self._make_store(self._mirror.manifest)
            except Exception:
                self._tell(at_once=True)
                raise
            self._tell(at_once=changed)
            return changed

    def _tick(self) -> float:
        began_s = time.monotonic()
        self.turn()
        return max(began_s + self._interval_ms / 1000 - time.monotonic(), 0.0)

    def _tell(self, *, at_once: bool) -> None:
        """Have others know how far it is."""
        now_s = time.monotonic()
        if not at_once and now_s - self._told_s < _STATUS_S:
            return
        self._told_s = now_s
        told = _Told(self._mirror.status, self._interval_ms, self._clock.now_ms())
        with contextlib.suppress(OSError):  # the disk is full: it is told when it is not
            replace_file(self._fs, f"{self.path}/{REPLICA_STATUS_FILE}", msgspec.json.encode(told) + b"\n",
                         sync_folder=False)  # fmt: skip

    @property
    def status(self) -> ReplicaStatus:
        """How far it is."""
        return _status(self._bucket.url, self._mirror.status, self._clock.now_ms())

    def close(self) -> None:
        """Keep it up no longer; readers see what was shown last. Idempotent."""
        if self._worker is not None:
            self._worker.ask_to_stop()
            self._worker.join(_CLOSING_S)
        with self._mutex:
            lock, self._lock = self._lock, None
            if lock is not None:
                self._mirror.close()
                close_lockable(self._fs, lock)


def end_replica(fs: FileSystem, path: str, url: str, before_end: Callable[[], None]) -> None:
    """Have a folder be no replica any more, and no store, if it is one of ``url``. Killed, it is done again.

    ``before_end`` is called when it is no store, and a replica still. Raises `ShippingRefused`.
    """
    mark = f"{path}/{REPLICA_FILE}"
    if not fs.exists(mark):
        return
    with opened_lockable(fs, mark, os.O_RDWR) as fd:
        try:
            fs.flock(fd, EXCLUSIVE | NON_BLOCKING)
        except BlockingIOError:
            raise ShippingRefused(url, f"a process keeps {path} up as a replica; end it first") from None
        found = json.loads(read_file(fs, mark) or b"{}")
        if found.get("url") != url:
            raise ShippingRefused(url, f"{path} is a replica of something else: {found}")
        for name in (STORE_FILE, REPLICA_STATUS_FILE):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(f"{path}/{name}")
        fs.sync_folder(path)
        before_end()
        fs.unlink(mark)
        fs.sync_folder(path)


def _is_harmless(name: str) -> bool:
    """Hidden, an empty disk's, or what a process was killed at that had just begun."""
    return name.startswith((".", REPLICA_FILE)) or name == "lost+found"


def _status(url: str, status: MirrorStatus, now_ms: int) -> ReplicaStatus:
    lag_s = max(now_ms - status.looked_ms, 0) / 1000 if status.looked_ms else -1.0
    return ReplicaStatus(
        url, status.sequence, status.shipped_ms, status.looked_ms, status.behind, lag_s, status.size_bytes, status.error
    )


def replica_status(path: str, *, fs: FileSystem | None = None, clock: Clock | None = None) -> ReplicaStatus | None:
    """How far the replica in the folder ``path`` is, as its process told last; None when it is none.

    ``error`` also says when nobody has kept it up for a while.
    """
    fs, now_ms = fs or FileSystem(), (clock or Clock()).now_ms()
    try:
        url = str(json.loads(read_file(fs, f"{path}/{REPLICA_FILE}"))["url"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        url = ""
    try:
        told = msgspec.json.decode(read_file(fs, f"{path}/{REPLICA_STATUS_FILE}"), type=_Told)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _status(url, MirrorStatus(error="it was never brought up to date"), now_ms)
    status = told.status
    silent_s = (now_ms - told.told_ms) / 1000
    if silent_s > max(_STALE_S, 10 * told.interval_ms / 1000):
        why = f"nobody has kept it up for {silent_s:.0f} s: run 'segmentlog replica {url} {path}'"
        status = msgspec.structs.replace(status, error=f"{why} ({status.error})" if status.error else why)
    return _status(url, status, now_ms)
