"""What every part of an open partition shares: its folder, files, locks, state page and configuration."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import msgspec

from segmentlog.config import TopicConfig
from segmentlog.errors import PartitionFailed, ReadOnlyStore, UnknownTopic
from segmentlog.format.batch import MAX_RAW_SIZE
from segmentlog.format.checkpoint import Checkpoint
from segmentlog.format.names import CHECKPOINT_FILE, LOCK_FILE, QUARANTINE_FOLDER, STATE_FILE
from segmentlog.records import RecoveryMode
from segmentlog.storage.checkpoint import CheckpointFile
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment import list_segments
from segmentlog.storage.state import REWRITING as REWRITING
from segmentlog.storage.state import WRITING as WRITING
from segmentlog.storage.state import LogState, StatePage


class Clock:
    """The two clocks, in milliseconds. Tests hand in another one."""

    def now_ms(self) -> int:
        """Wall clock since 1970 UTC: timestamps of records."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Since boot, the same in every process: ages and deadlines."""
        return time.monotonic_ns() // 1_000_000


class Handle:
    """Files and locks of one partition in this process.

    Lock order: `append_mutex`, the append lock (flock on ``lock``), `sync_mutex`, the sync
    lock (flock on ``state``), `_open_mutex` (files that were released are opened anew). The
    mutexes keep out this process's threads, the flocks the other processes; the kernel frees
    the flocks of a process that dies.
    """

    def __init__(
        self,
        fs: FileSystem,
        folder: str,
        topic: str,
        partition: int,
        load_config: Callable[[], TopicConfig],
        clock: Clock,
        *,
        read_only: bool = False,
        recovery: RecoveryMode = "tail",
        load_batch_limit: Callable[[], int] | None = None,
        on_open: Callable[[Handle], None] | None = None,
        on_roll: Callable[[Handle], None] | None = None,
    ) -> None:
        self.fs = fs
        self.folder = folder
        self.topic = topic
        self.partition = partition
        self.log_name = f"{topic}/{partition}"
        self.clock = clock
        self.read_only = read_only
        self.recovery = recovery
        self.config = load_config()
        self._load_config = load_config
        self._load_batch_limit = load_batch_limit or (lambda: MAX_RAW_SIZE)
        self.batch_limit = self._load_batch_limit()
        """No batch of this log holds more bytes, uncompressed."""
        self._on_open = on_open
        self._on_roll = on_roll
        self.checkpoint = CheckpointFile(fs, f"{folder}/{CHECKPOINT_FILE}")
        self.lock_path = f"{folder}/{LOCK_FILE}"
        self.quarantine = f"{folder}/{QUARANTINE_FOLDER}"
        self.lock_fd = self.state_fd = -1
        self.page: StatePage = StatePage.private()
        self.is_snapshot = False
        """Opened read-only when nobody had the log open: its end is where it was then."""
        self.failed: str | None = None
        self.used = True
        """Set by whoever uses the files; the descriptor budget clears it and closes what stays unused."""
        self.config_version = 0
        self._moved = 0
        self._segments: tuple[int, list[int]] = (-1, [])
        self.closers: list[Callable[[], None]] = []
        """Called when the files are closed: whoever keeps further descriptors closes them here."""
        self.after_fork: list[Callable[[], None]] = []
        """Called in a forked child, where the parent's other threads and their locks are gone."""
        self.reset_locks()
        _live.add(self)

    # ------------------------------------------------------------ files

    def reset_locks(self) -> None:
        self.append_mutex = threading.Lock()
        self.sync_mutex = threading.Lock()
        self._open_mutex = threading.Lock()

    def open_files(self) -> None:
        """Open the lock and state files, making them if need be. The state is mapped but not yet judged."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        opened: list[int] = []
        try:
            for name in (LOCK_FILE, STATE_FILE):
                opened.append(self.fs.open(f"{self.folder}/{name}", flags, 0o666))
            if self.page.file_id is not None:
                self._check_file_of(self.page.file_id, opened[-1])
        except BaseException as error:
            for fd in opened:
                with contextlib.suppress(OSError):
                    self.fs.close(fd)
            if isinstance(error, FileNotFoundError):
                raise UnknownTopic(self.topic, f"partition {self.partition} has no folder any more") from None
            raise
        # Both at once, and only now: another thread may look without `_open_mutex`.
        self.lock_fd, self.state_fd = opened
        if self._on_open is not None:
            self._on_open(self)

    def rolled(self) -> None:
        """A segment was sealed; for whoever retains and compacts."""
        if self._on_roll is not None:
            self._on_roll(self)

    def adopt(self, page: StatePage) -> None:
        """Go on with a page that was judged to be sound. Raises `UnknownTopic` when it is not the topic's any more."""
        self.page = page
        # Read before what they speak of: who changes that changes them afterwards. And once more, though it was read:
        # the topic may have been altered, or deleted, since the files were opened.
        self._moved, version = page.moved, page.config_version
        self.config = self._load_config()
        self.config_version = version

    def ensure_open(self) -> None:
        """Reopen files that were closed while idle or in another process (after a fork)."""
        if self.lock_fd < 0 or self.state_fd < 0:
            with self._open_mutex:  # one thread may come with the append mutex, another one with the sync mutex
                if self.lock_fd < 0 or self.state_fd < 0:
                    self.check_usable()
                    self.check_in_place()  # before: opening makes files that are not there
                    self.open_files()
        self.used = True

    def _check_file_of(self, file_id: tuple[int, int], fd: int) -> None:
        """Raise `UnknownTopic` when another log stands there since, with files of the same names."""
        found = self.fs.fstat(fd)
        if (found.st_dev, found.st_ino) != file_id:
            raise UnknownTopic(self.topic, f"{self.folder} was replaced while it was in use")

    def close_files(self) -> None:
        """Close the descriptors; the mapped page stays. The caller holds both mutexes, or nobody else has them."""
        for close in self.closers:
            close()
        for fd in (self.lock_fd, self.state_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self.fs.close(fd)
        self.lock_fd = self.state_fd = -1

    def release(self) -> bool:
        """Close the descriptors of an idle partition; they are reopened on use. False when it is busy."""
        if not self.append_mutex.acquire(blocking=False):
            return False
        try:
            if not self.sync_mutex.acquire(blocking=False):
                return False
            try:
                self.close_files()
                return True
            finally:
                self.sync_mutex.release()
        finally:
            self.append_mutex.release()

    # ------------------------------------------------------------ locks

    @contextlib.contextmanager
    def append_locked(self) -> Iterator[None]:
        """Hold the append lock, for everything but the append itself (which does it by hand, for speed)."""
        self.check_writable()
        with self.append_mutex:
            self.ensure_open()
            self.fs.flock(self.lock_fd, fcntl.LOCK_EX)
            try:
                self.check_in_place()
                yield
            finally:
                self.fs.flock(self.lock_fd, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def sync_locked(self) -> Iterator[None]:
        """Hold the sync lock: for fsyncs and for every write of the checkpoint."""
        with self.sync_mutex:
            self.ensure_open()
            self.fs.flock(self.state_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                self.fs.flock(self.state_fd, fcntl.LOCK_UN)

    # ------------------------------------------------------------ what everybody checks

    def exceeds_batch_limit(self, raw_size: int) -> bool:
        """Whether a batch claims more than any setting of the topic ever allowed: then it is not one."""
        if raw_size > self.batch_limit:
            self.batch_limit = self._load_batch_limit()  # it may have been raised since
        return raw_size > self.batch_limit

    def check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyStore(self.folder, "append or change anything")

    @property
    def is_moved(self) -> bool:
        """Whether the topic was deleted or renamed under this handle."""
        moved = self.page.moved
        if moved == self._moved:
            return False
        # Not for sure: it may have got this very name just now, or was upgraded, or somebody stood at another path.
        try:
            self._load_config()
        except UnknownTopic:
            return True
        if not self.is_in_place():
            return True
        self._moved = moved
        return False

    def check_usable(self) -> None:
        """Raise `UnknownTopic` when the topic was deleted or renamed under this handle."""
        if self.page.moved != self._moved and self.is_moved:
            raise UnknownTopic(self.topic, "it was deleted or renamed while it was in use")

    def is_in_place(self) -> bool:
        """Whether the folder is still the one that was opened: not deleted by somebody, nor another one made there."""
        if self.page.file_id is None:
            return True
        try:
            found = self.fs.stat(f"{self.folder}/{STATE_FILE}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a disk that fails has its own ways to say so
            return True
        return (found.st_dev, found.st_ino) == self.page.file_id

    def check_in_place(self) -> None:
        """Raise `UnknownTopic` unless `is_in_place`, from then on in all that share the page.

        For whatever changes files by their names: those of another log may stand there now. An append
        that stays within its segment does not ask, and goes to a file that has no name any more.
        """
        if self.is_in_place():
            return
        if not self.read_only:
            self.page.count_move()
        raise UnknownTopic(self.topic, f"{self.folder} was deleted or replaced while it was in use")

    @contextlib.contextmanager
    def telling_of_moves(self) -> Iterator[None]:
        """A file that is not there because the folder is not there any more raises `UnknownTopic`."""
        try:
            yield
        except FileNotFoundError:
            self.check_in_place()
            raise

    @property
    def moved(self) -> int:
        """`StatePage.moved` when this handle was opened."""
        return self._moved

    def check_appendable(self) -> None:
        """What may keep an append out; refreshes the configuration when it was altered. Under the append lock."""
        self.check_usable()
        if self.failed is not None:
            raise PartitionFailed(self.log_name, self.failed)
        if self.page.failed:
            self.fail("an fsync failed")
        self.refresh_config()

    def refresh_config(self) -> None:
        """Take over the configuration if it was altered, by whatever process."""
        version = self.page.config_version
        if version != self.config_version:
            self.config = self._load_config()
            self.config_version = version  # once it is read: what keeps it from that is told every time

    def fail(self, why: str) -> None:
        """Refuse appends from now on, in every process. Raises `PartitionFailed`."""
        self.failed = why
        self.page.failed = 1
        raise PartitionFailed(self.log_name, why)

    def update_checkpoint(self, **changes: object) -> Checkpoint:
        """Replace fields of the checkpoint, durably. The caller holds the sync lock."""
        self.check_in_place()
        current, _ = self.checkpoint.read()
        updated = msgspec.structs.replace(current or Checkpoint(), boot_id=self.fs.boot_id(), **changes)
        self.checkpoint.write(updated)
        return updated

    def segments(self, log: LogState, offset: int | None = None) -> list[int]:
        """Base offsets of the segments as ``log`` shows them, ascending.

        With ``offset`` the list need only be right up to the segment behind the one that the
        offset lies in: whoever reads through sealed segments does not list the folder anew for
        each roll at the other end.
        """
        generation, bases = self._segments
        if generation == log.generation and bases:
            known_up_to = bases[-1]
            if known_up_to == log.active_base_offset or (offset is not None and offset < known_up_to):
                return bases
        bases = [base for base in list_segments(self.fs, self.folder) if base <= log.active_base_offset]
        self._segments = (log.generation, bases)
        return bases

    def announce_waiting(self, for_s: float) -> bool:
        """Ask appenders to wake followers for so long; False when the page cannot be written, and one must poll."""
        if self.read_only:
            return False
        until_ms = self.clock.monotonic_ms() + int(for_s * 1000)
        if not until_ms <= self.page.waiting_until_ms < until_ms + _LONGEST_WAIT_MS:  # another one's longer wait stands
            self.page.waiting_until_ms = until_ms
        return True

    def wake_followers(self) -> None:
        """Rewrite a byte that followers watch, if any said that they wait."""
        waiting_until_ms = self.page.waiting_until_ms
        if waiting_until_ms and waiting_until_ms > self.clock.monotonic_ms():
            with contextlib.suppress(OSError):
                self.fs.pwritev(self.lock_fd, [b"\0"], 0)


_LONGEST_WAIT_MS = 60_000
"""Nobody announces more: what lies further ahead is of an earlier boot."""

_live: weakref.WeakSet[Handle] = weakref.WeakSet()


def _forget_parent() -> None:
    """In a forked child: drop the descriptors, since a flock belongs to parent and child alike; open anew on use."""
    for handle in list(_live):
        handle.reset_locks()
        for reset in handle.after_fork:
            reset()
        handle.close_files()


os.register_at_fork(after_in_child=_forget_parent)
