"""A replica: a local, read-only store that follows a shipped store, for readers in any process.

    DIR/@replica           URL, store and topics; locked by the process that refreshes the replica
    DIR/@replica-status    the manifest that the replica has reached, and its lag
    DIR/TOPIC/N/...        as in any store; the state pages contain the published offsets
    DIR/store.json         written after the first refresh: from then on the folder is a store

After a kill, the next process keeps the files that are complete. Published offsets never go back to an earlier state.
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
from segmentlog.format.file_names import (
    FORMAT_VERSION,
    REPLICA_FILE,
    REPLICA_STATUS_FILE,
    STORE_FILE,
    is_machine_file,
)
from segmentlog.format.manifest import Manifest
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.bucket.upload_pool import PARALLEL
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.replica.downloads import FullDownloader
from segmentlog.objects.replica.mirror import Mirror, MirrorStatus
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import make_folders_durably, read_file, replace_file
from segmentlog.storage.fork_safety import LockableFd, close_lockable, open_lockable, opened_lockable
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING
from segmentlog.topics.background_threads import BackgroundThread

_INTERVAL_MAX_MS: Final = 3_600_000
_STATUS_S: Final = 2.0
"""How often the status file is written if nothing is new."""
_STALE_S: Final = 15.0
"""A replica counts as abandoned if its status file is older than this, and than ten intervals."""
_CLOSING_S: Final = 30.0

Progress = Callable[[int, int], None]
"""Called with (published partitions, all partitions to publish)."""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """How far a replica has followed the store.

    sequence     of the published manifest; -1 before the first
    shipped_ms   wall-clock time at which the owner published that manifest
    looked_ms    wall-clock time of the last refresh that succeeded
    lag_records  offsets in the object store that are not published yet
    lag_s        seconds since ``looked_ms``; -1 before the first refresh
    size_bytes   size of the published logs
    error        why the replica does not follow; empty if it does
    """

    url: str
    sequence: int
    shipped_ms: int
    looked_ms: int
    lag_records: int
    lag_s: float
    size_bytes: int
    error: str


class _StatusFile(msgspec.Struct, frozen=True):
    """Content of the status file."""

    status: MirrorStatus
    interval_ms: int
    written_ms: int = msgspec.field(name="told_ms")


_status_decoder = msgspec.json.Decoder(_StatusFile)


class Replica:
    """Keeps the folder ``path`` equal to the store shipped to ``url``, or to those of its topics that match ``topics``.

    With ``threads`` a thread calls `refresh` every ``interval_ms``. Thread-safe; one process at a time can refresh a
    folder.

    Raise `ShippingRefused` if no store is shipped to the URL, the folder contains something else, or another process
    refreshes it; `InvalidConfig`, `ObjectStoreError`.
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
        threads, patterns = as_bool("threads", threads), as_patterns("topics", topics)
        self.path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        self._fs, self._clock = fs or FileSystem(), clock or Clock()
        self._bucket = bucket or open_bucket(url)
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._status_s = 0.0
        self._lock: LockableFd | None = self._lock_folder(patterns)
        self._mirror = Mirror(
            self._bucket, self.path, FullDownloader(self._bucket, self._fs),
            topic_patterns=patterns, parallel=parallel, fs=self._fs, clock=self._clock,
        )  # fmt: skip
        fork_safety.on_fork(self, "_forget_lock")
        self._worker = BackgroundThread("replica", self._run_cycle) if threads else None
        if self._worker is not None:
            self._worker.ensure_running()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Replica of {self._bucket.url} in {self.path}>"

    def _forget_lock(self) -> None:
        """Give up the lock in a forked child: the parent keeps refreshing the replica."""
        self._lock = None

    # ------------------------------------------------------------ the folder

    def _lock_folder(self, topics: tuple[str, ...]) -> LockableFd:
        """Check that the folder is empty or already this replica; mark it as this replica, and lock it."""
        fs, mark = self._fs, f"{self.path}/{REPLICA_FILE}"
        manifest, _ = require_manifest(self._bucket)
        content = {"url": self._bucket.url, "store_id": manifest.store_id, "topics": list(topics)}
        make_folders_durably(fs, self.path)
        if not fs.exists(mark):
            if fs.exists(f"{self.path}/{STORE_FILE}"):
                why = f"{self.path} is a store; choose an empty or new folder for the replica"
                raise ShippingRefused(self._bucket.url, why)
            if names := [name for name in fs.listdir(self.path) if not is_harmless(name)]:
                why = f"{self.path} is not empty (it contains {names[0]}); choose an empty or new folder"
                raise ShippingRefused(self._bucket.url, why)
            replace_file(fs, mark, json.dumps(content).encode() + b"\n")
        fd = open_lockable(fs, mark, os.O_RDWR)
        try:
            try:
                fs.flock(fd, EXCLUSIVE | NON_BLOCKING)
            except BlockingIOError:
                why = (
                    f"another process refreshes {self.path}. Only one process can; any number of processes can read it"
                )
                raise ShippingRefused(self._bucket.url, why) from None
            found = json.loads(read_file(fs, mark) or b"{}")
            if found != content:
                why = f"{self.path} is a replica of another URL, store or set of topics: {found}; choose another folder"
                raise ShippingRefused(self._bucket.url, why)
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

    # ------------------------------------------------------------ refresh

    def refresh(self, progress: Progress | None = None) -> bool:
        """Download and publish new data. Return False if there was none. The first refresh makes the folder a store.

        Raise `ShippingRefused` (damage, another store, or the replica is closed), `ObjectStoreError`, `DiskFull`. Then
        readers keep the published state, and the next refresh resumes.
        """
        with self._mutex:
            if self._lock is None:
                why = (
                    f"this process does not refresh the replica in {self.path}: it closed it, or was forked afterwards"
                )
                raise ShippingRefused(self._bucket.url, f"{why}; open the replica again")
            try:
                changed = self._mirror.refresh(progress)
                if self._mirror.manifest is not None:
                    self._make_store(self._mirror.manifest)
            except Exception:
                self._write_status(at_once=True)
                raise
            self._write_status(at_once=changed)
            return changed

    turn = refresh
    """Old name of `refresh`, kept as an alias."""

    def _run_cycle(self) -> float:
        began_s = time.monotonic()
        self.refresh()
        return max(began_s + self._interval_ms / 1000 - time.monotonic(), 0.0)

    def _write_status(self, *, at_once: bool) -> None:
        """Write the status file for other processes, at most every `_STATUS_S` unless ``at_once``."""
        now_s = time.monotonic()
        if not at_once and now_s - self._status_s < _STATUS_S:
            return
        self._status_s = now_s
        content = _StatusFile(self._mirror.status, self._interval_ms, self._clock.now_ms())
        with contextlib.suppress(OSError):  # if the disk is full, a later refresh writes it
            replace_file(self._fs, f"{self.path}/{REPLICA_STATUS_FILE}", msgspec.json.encode(content) + b"\n",
                         sync_folder=False)  # fmt: skip

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the last refresh that succeeded; None before the first."""
        return self._mirror.manifest

    @property
    def status(self) -> ReplicaStatus:
        """The manifest that the replica has reached, its lag, and the last error."""
        return _status(self._bucket.url, self._mirror.status, self._clock.now_ms())

    def label_active_segments(self) -> None:
        """Sync the active segments, and label them as equal to the manifest: a takeover then reads no segment.

        Raise OSError.
        """
        with self._mutex:
            if self._lock is not None:
                self._mirror.label_active_segments()

    def close(self) -> None:
        """Stop refreshing. Readers keep the state that was published last. Idempotent."""
        if self._worker is not None:
            self._worker.ask_to_stop()
            self._worker.join(_CLOSING_S)
        with self._mutex:
            lock, self._lock = self._lock, None
            if lock is not None:
                self._mirror.close()
                close_lockable(self._fs, lock)


def end_replica(fs: FileSystem, path: str, url: str, before_end: Callable[[], None]) -> None:
    """Turn a replica of ``url`` into a plain folder. Do nothing if the folder is not a replica.

    First delete ``store.json``, so that no process opens the folder as a store; then call ``before_end``; then delete
    the mark of the replica. After an interruption, call the function again.

    Raise `ShippingRefused` if the folder is a replica of another URL, or a process refreshes it.
    """
    mark = f"{path}/{REPLICA_FILE}"
    if not fs.exists(mark):
        return
    with opened_lockable(fs, mark, os.O_RDWR) as fd:
        try:
            fs.flock(fd, EXCLUSIVE | NON_BLOCKING)
        except BlockingIOError:
            raise ShippingRefused(url, f"a process refreshes the replica {path}; stop that process first") from None
        found = json.loads(read_file(fs, mark) or b"{}")
        if found.get("url") != url:
            raise ShippingRefused(url, f"{path} is a replica of another URL: {found}; choose another folder")
        for name in (STORE_FILE, REPLICA_STATUS_FILE):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(f"{path}/{name}")
        fs.sync_folder(path)
        before_end()
        fs.unlink(mark)
        fs.sync_folder(path)


def is_harmless(name: str) -> bool:
    """Return whether a file may be in the folder of a new replica: hidden, the machine's own, or left by a start that
    was interrupted.
    """
    return name.startswith((".", REPLICA_FILE)) or is_machine_file(name)


def _status(url: str, status: MirrorStatus, now_ms: int) -> ReplicaStatus:
    lag_s = max(now_ms - status.looked_ms, 0) / 1000 if status.looked_ms else -1.0
    return ReplicaStatus(
        url, status.sequence, status.shipped_ms, status.looked_ms, status.behind, lag_s, status.size_bytes, status.error
    )


def replica_status(path: str, *, fs: FileSystem | None = None, clock: Clock | None = None) -> ReplicaStatus | None:
    """Return the status that the refreshing process wrote to the folder ``path``; None if that is not a replica.

    If no process has refreshed the replica for a while, ``error`` says so.
    """
    fs, now_ms = fs or FileSystem(), (clock or Clock()).now_ms()
    try:
        url = str(json.loads(read_file(fs, f"{path}/{REPLICA_FILE}"))["url"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        url = ""
    try:
        file = _status_decoder.decode(read_file(fs, f"{path}/{REPLICA_STATUS_FILE}"))
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _status(url, MirrorStatus(error="the first refresh is not finished"), now_ms)
    status = file.status
    silent_s = (now_ms - file.written_ms) / 1000
    if silent_s > max(_STALE_S, 10 * file.interval_ms / 1000):
        why = f"no process has refreshed it for {silent_s:.0f} s: run 'segmentlog replica {url} {path}'"
        status = msgspec.structs.replace(status, error=f"{why} ({status.error})" if status.error else why)
    return _status(url, status, now_ms)
