"""Shared state of an open partition: its folder, files, locks, state page and configuration."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.errors import (
    HandOverInProgress,
    PartitionFailed,
    ProcessLimitError,
    ReadOnlyStore,
    SegmentlogError,
    StoreFenced,
    UnknownTopic,
)
from segmentlog.format.batch import MAX_RAW_SIZE
from segmentlog.format.file_names import LOCK_FILE, QUARANTINE_FOLDER, REPLICA_FILE, STATE_FILE
from segmentlog.format.grant import OffsetGrant
from segmentlog.format.scan import KnownBatches, SegmentContext
from segmentlog.log.ledger import Ledger
from segmentlog.records import RecoveryMode
from segmentlog.storage import fork_safety
from segmentlog.storage.file_locks import folder_share_locked
from segmentlog.storage.fork_safety import LockableFd, LockableFiles, close_lockable, open_lockable
from segmentlog.storage.fs import LOCAL_ERRORS, DiskFailed, FileSystem
from segmentlog.storage.grant_file import read_grant
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.interrupt_safe import EXCLUSIVE, UNLOCK, interrupt_safe_context, try_lock
from segmentlog.storage.segment import MappedSegment, SealedSegment, list_segments, segment_stem
from segmentlog.storage.segment_index import SegmentIndex, load_known_batches
from segmentlog.storage.ship_signals import ShipSignals
from segmentlog.storage.state_page import LogState, StatePage

_NEVER = -1
"""A configuration version that never matches, so that each append checks the fence again."""
_SEALED_KEPT = 8
"""If more segments than this are sealed but not synced, segments sealed later are closed at once."""


class Handle:
    """Files and locks of one partition in this process.

    Lock order: `append_mutex`, the append lock (flock on ``lock``), `sync_mutex`, the sync lock (flock on ``state``),
    `_open_mutex` (to reopen files that were closed while idle). The mutexes keep out threads of this process, the
    flocks keep out other processes. The kernel releases the flocks of a process that dies. `folder_locked` has no place
    in that order: it is a shared lock, and a process that holds it exclusively waits for no other lock.
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
        read_only_why: str = "",
        recovery: RecoveryMode = "tail",
        load_batch_limit: Callable[[], int] | None = None,
        on_open: Callable[[Handle], None] | None = None,
        on_roll: Callable[[Handle], None] | None = None,
        ship_signals: ShipSignals | None = None,
        holds_producer: Callable[[int], bool] | None = None,
    ) -> None:
        self.fs = fs
        self.folder = folder
        self._topic_folder = os.path.dirname(folder) or "."
        self.topic = topic
        self.partition = partition
        self.log_name = f"{topic}/{partition}"
        self.clock = clock
        self.read_only = read_only
        self.read_only_why = read_only_why
        """Why the partition is read-only, if the caller did not ask for that; see `ReadOnlyStore`."""
        self.recovery = recovery
        self.config = load_config()
        self._load_config = load_config
        self._load_batch_limit = load_batch_limit or (lambda: MAX_RAW_SIZE)
        self.batch_limit = self._load_batch_limit()
        """No batch of this log has more bytes, uncompressed."""
        self._on_open = on_open
        self._on_roll = on_roll
        self.ship_signals = ship_signals
        self.holds_producer = holds_producer or (lambda _: True)
        """Returns whether a named producer may still own an id. If so, the log keeps the id, however long the producer
        is idle.
        """
        self.lock_path = f"{folder}/{LOCK_FILE}"
        self.quarantine = f"{folder}/{QUARANTINE_FOLDER}"
        self.lock_fd = self.state_fd = -1
        self.is_opening = True
        """True until the partition is open: until then its descriptors are in use although no mutex is held."""
        self.sealed: dict[int, SealedSegment] = {}
        """By base offset: segments sealed by this process that may not be synced yet; see `add_sealed`."""
        self.ledger = Ledger(self)
        self.page = self.ledger.page
        """The state page, for reading; only `Ledger` changes it."""
        self.is_snapshot = False
        """Whether the partition was opened read-only while no process had the log open.

        It then shows the log end of that time.
        """
        self.failed: str | None = None
        self.fenced = ""
        """The machine that owns the log now; "" if this machine owns it."""
        self.is_stopped = False
        """Whether appends are stopped for a hand-over of the store to another machine."""
        self.used = True
        """Whether the files were used since the descriptor budget last checked. The budget closes unused files."""
        self.config_version = 0
        self._moved = 0
        self._is_replaced = False
        """Whether this handle has found that its folder was deleted or replaced."""
        self._segments: tuple[int, list[int]] = (-1, [])
        self.closers: list[Callable[[], None]] = []
        """Called when the files are closed, to close further descriptors of the partition."""
        self.after_fork: list[Callable[[], None]] = []
        """Called in a forked child, to discard state that threads of the parent may have been changing."""
        self.append_mutex = fork_safety.lock(self, "append_mutex")
        self._open_mutex = fork_safety.lock(self, "_open_mutex")
        self.sync_mutex = fork_safety.lock(self, "sync_mutex", "_close_in_child")

    def __del__(self) -> None:
        # Dropped without being closed: close its descriptors. Any thread may run this at any point, so it waits for no
        # lock. The handle stays usable, because the thread that closes a dropped store (`LogStore.__del__`) continues
        # to use it. While that thread uses the files, it holds the mutexes, and this does nothing.
        try:
            if not sys.is_finalizing():
                self.close_if_idle()
        # a half-built handle, or a file system that cannot lock: no caller would get the error
        except Exception as error:
            if is_interrupt(error):
                raise  # Python prints it

    def resurrect(self) -> None:
        """Register the locks for forks again, after the finalizer of the store kept this handle.

        The garbage collector had already cleared the weak references of the registry. The lock objects stay the same,
        because the handle's own finalizer may hold them.
        """
        for name, method in (("append_mutex", ""), ("_open_mutex", ""), ("sync_mutex", "_close_in_child")):
            fork_safety.lock(self, name, method)

    # ------------------------------------------------------------ files

    def open_files(self) -> None:
        """Open the lock and state files, creating them if needed. The state page is not checked yet."""
        flags = os.O_RDWR | os.O_CREAT
        opened: list[LockableFd] = []
        try:
            for name in (LOCK_FILE, STATE_FILE):
                opened.append(open_lockable(self.fs, f"{self.folder}/{name}", flags))
            if self.page.file_id is not None:
                self._check_file_of(self.page.file_id, opened[-1])
        except BaseException as error:
            for fd in opened:
                close_lockable(self.fs, fd)
            if isinstance(error, FileNotFoundError):
                raise UnknownTopic(self.topic, f"the folder of partition {self.partition} was deleted") from None
            raise
        # Set both at once, and last: another thread may read them without `_open_mutex`.
        self.lock_fd, self.state_fd = opened
        if self._on_open is not None:
            self._on_open(self)

    def notify_rolled(self) -> None:
        """Notify retention and compaction that a segment was sealed."""
        if self._on_roll is not None:
            self._on_roll(self)

    def adopt(self, page: StatePage) -> None:
        """Use ``page``, which the caller has found valid.

        Raises `UnknownTopic` if the folder no longer belongs to the topic.
        """
        self.ledger.adopt(page)
        self.page = page
        # Read these words before the configuration, because a change of the configuration changes them afterwards. Load
        # the configuration again: the topic may have been altered or deleted since the files were opened.
        self._moved, version = page.moved, page.config_version
        self._load_settings(version)

    def _load_settings(self, version: int) -> None:
        """Load the configuration and the offset grant from disk. A fenced or stopped log loads them on every append."""
        self.config = self._load_config()
        granted = self.read_grant()
        self.fenced = "" if granted is None else granted.fenced
        signals = self.ship_signals
        has_grant = granted is not None
        self.is_stopped = signals is not None and signals.are_appends_stopped(self.topic, has_grant=has_grant)
        # After `are_appends_stopped`: a fence writes the new owner before it removes the file that stops appends.
        if signals is not None and not self.fenced:
            self.fenced = signals.read_new_owner(self.topic, has_grant=has_grant)
        self.config_version = _NEVER if self.fenced or self.is_stopped else version

    def read_grant(self) -> OffsetGrant | None:
        """Return the partition's offset grant; None if the store is unshipped. Raises `UnknownTopic`."""
        granted = read_grant(self.fs, self.folder)
        if granted is None:
            # The folder may have been moved just now. Then its file is missing under the old name, and the log still
            # is limited, or fenced.
            self.check_in_place()
        return granted

    def check_topic_name(self) -> None:
        """Raise `UnknownTopic` unless the name still belongs to the topic with this id."""
        self.config = self._load_config()

    def ensure_open(self, outcome: str = "nothing was changed", *, appended: bool = False) -> None:
        """Reopen files that were closed while idle or by a fork. Raises what `raise_local_error` does."""
        if self.lock_fd < 0 or self.state_fd < 0:
            with self._open_mutex:  # one thread may come with the append mutex, another with the sync mutex
                if self.lock_fd < 0 or self.state_fd < 0:
                    self.check_usable()
                    try:
                        with self.folder_locked():  # opening creates missing files
                            self.open_files()
                    except OSError as error:
                        self.raise_local_error(error, outcome, appended=appended)
                        raise
        self.used = True

    @property
    def has_files(self) -> bool:
        """Whether the handle holds file descriptors."""
        return self.lock_fd >= 0

    def _check_file_of(self, file_id: tuple[int, int], fd: int) -> None:
        """Raise `UnknownTopic` if the path names another file now: another log has replaced the folder."""
        found = self.fs.fstat(fd)
        if (found.st_dev, found.st_ino) != file_id:
            raise UnknownTopic(self.topic, f"{self.folder} was replaced while it was in use")

    def close_segments(self) -> None:
        """Close all open segments. A deleted segment takes disk space until it is closed."""
        for close in self.closers:
            close()
        while self.sealed:
            self.sealed.popitem()[1].close()

    def close_files(self) -> None:
        """Close the descriptors; the mapped page stays. The caller holds both mutexes, or is the only user."""
        self.close_segments()
        fds = self.lock_fd, self.state_fd
        # Set -1 before closing: a child forked in between must not close other files that reuse these numbers.
        self.lock_fd = self.state_fd = -1
        for fd in fds:
            if fd >= 0:
                close_lockable(self.fs, fd)

    def _close_in_child(self) -> None:
        """Close the files in a forked child, because a flock belongs to parent and child alike.

        They are reopened on use.
        """
        for reset in self.after_fork:
            reset()
        self.close_files()

    def close_if_idle(self) -> bool:
        """Close the descriptors if no thread uses the partition; they are reopened on use.

        Return False if it is busy.
        """
        if self.is_opening:
            return False
        with try_lock(self.append_mutex) as can_append, try_lock(self.sync_mutex) as can_sync:
            if not (can_append and can_sync):
                return False
            self.close_files()
            return True

    def add_sealed(self, segment: SealedSegment) -> None:
        """Keep a sealed segment open until it is synced. Call under the append lock."""
        synced_base = self.page.sync.read().synced_base_offset
        for base in [base for base in self.sealed.copy() if base < synced_base]:
            self.drop_sealed(base)
        if len(self.sealed) < _SEALED_KEPT:
            self.sealed[segment.base_offset] = segment
        else:
            segment.close()

    def drop_sealed(self, base: int) -> None:
        """Close a sealed segment that is synced, or was replaced."""
        kept = self.sealed.pop(base, None)
        if kept is not None:
            kept.close()

    # ------------------------------------------------------------ locks

    @interrupt_safe_context
    def append_locked(self, *, by_names: bool = True) -> Iterator[None]:
        """Hold the append lock and `folder_locked`. Appends do not use this: they take the lock directly, for speed.

        With ``by_names=False`` do not hold `folder_locked`: the caller must hold it whenever it uses a file by name.
        """
        self.check_writable()
        with self.append_mutex:
            self.ensure_open()
            try:
                self.fs.flock(self.lock_fd, EXCLUSIVE)
                if by_names:
                    with self.folder_locked():
                        yield
                else:
                    self.check_in_place()
                    yield
            finally:
                self.fs.flock(self.lock_fd, UNLOCK)

    @interrupt_safe_context
    def sync_locked(self) -> Iterator[None]:
        """Hold the sync lock and `folder_locked`, for each write of the checkpoint and for fsyncs."""
        with self.sync_mutex:
            self.ensure_open()
            try:
                self.fs.flock(self.state_fd, EXCLUSIVE)
                with self.folder_locked():
                    yield
            finally:
                self.fs.flock(self.state_fd, UNLOCK)

    # ------------------------------------------------------------ checks

    def exceeds_batch_limit(self, raw_size: int) -> bool:
        """Return whether a batch claims more bytes than any setting of the topic ever allowed, and so is damaged."""
        if raw_size > self.batch_limit:
            self.batch_limit = self._load_batch_limit()  # the limit may have been raised
        return raw_size > self.batch_limit

    def segment_context(self, base: int, end_offset: int | None, known: KnownBatches | None = None) -> SegmentContext:
        """Return what a reader must know of segment ``base`` to skip damage in it. ``end_offset`` limits the offsets of
        its batches. ``known`` looks up the positions of batches; by default the index files do.
        """
        batch_limit = MAX_RAW_SIZE
        with failures_ignored(SegmentlogError):
            self.exceeds_batch_limit(MAX_RAW_SIZE)  # loads a limit that was raised meanwhile
            batch_limit = self.batch_limit
        return SegmentContext(
            end_offset, batch_limit, known or load_known_batches(self.fs, segment_stem(self.folder, base), base)
        )

    def check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyStore(self.folder, "append or change anything", self.read_only_why)

    @property
    def is_moved(self) -> bool:
        """Whether the topic was deleted or renamed since this handle was opened."""
        if self._is_replaced:
            return True
        moved = self.page.moved
        if moved == self._moved:
            return False
        # The changed word may have another cause: the topic was renamed to this name just now, or was upgraded.
        try:
            self._load_config()
        except UnknownTopic:
            return True
        if not self.is_in_place():
            return True
        self._moved = moved
        return False

    def check_usable(self) -> None:
        """Raise `UnknownTopic` if the topic was deleted or renamed since this handle was opened."""
        if (self._is_replaced or self.page.moved != self._moved) and self.is_moved:
            raise UnknownTopic(self.topic, "it was deleted or renamed while it was in use")

    def is_in_place(self) -> bool:
        """Return whether the folder is the same as when it was opened: neither deleted nor replaced."""
        if self.page.file_id is None:
            return True
        try:
            found = self.fs.stat(f"{self.folder}/{STATE_FILE}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:  # the disk fails, which other calls report
            if is_interrupt(error):
                raise
            return True
        return (found.st_dev, found.st_ino) == self.page.file_id

    def check_in_place(self) -> None:
        """Raise `UnknownTopic` unless `is_in_place`.

        Before raising, make all handles that share the page check their folder.
        """
        if not self.is_in_place():
            self._raise_replaced()

    def _raise_replaced(self) -> NoReturn:
        # A read-only handle cannot change the page. When a replica becomes a store, no process changes the old page.
        self._is_replaced = True
        if not self.read_only:
            self.ledger.count_move()
        raise UnknownTopic(self.topic, f"{self.folder} was deleted or replaced while it was in use")

    @interrupt_safe_context
    def folder_locked(self) -> Iterator[None]:
        """Hold a shared lock on the topic folder: a process that renames or deletes the topic waits.

        Hold the lock around any access to files by name, because another log may get the folder's name. An append to
        the open segment needs no such lock: it uses open files, wherever they are now. Raises `UnknownTopic`. Hold the
        lock briefly, and never around a call of user code. Calls may be nested. A read-only handle may be unable to
        lock. It only checks that the folder is still the same, and must check again after use.
        """
        if self.read_only:
            self.check_in_place()
            yield
            return
        with folder_share_locked(self.fs, self._topic_folder, self._open_topic_folder):
            self.check_in_place()
            yield

    def _open_topic_folder(self, fs: LockableFiles, path: str, flags: int) -> LockableFd:
        try:
            return open_lockable(fs, path, flags)
        except (FileNotFoundError, NotADirectoryError):
            self._raise_replaced()

    @contextlib.contextmanager
    def translating_errors(self, outcome: str = "the operation was not completed") -> Iterator[None]:
        """Translate errors of the enclosed operation to the exceptions of the package; ``outcome`` is the text that a
        `ProcessLimitError` contains about the data.

        If the folder is gone, a missing file raises `UnknownTopic`. An error of a process limit raises
        `ProcessLimitError`. Use it around contexts that hold locks, never inside: `interrupt_safe_context` does not
        pass errors to its generator.
        """
        try:
            yield
        except FileNotFoundError:
            self.check_in_place()
            raise
        except OSError as error:
            self.raise_local_error(error, outcome)
            raise

    @property
    def moved(self) -> int:
        """`StatePage.moved` when this handle was opened."""
        return self._moved

    def check_appendable(self, *, even_stopped: bool = False) -> None:
        """Raise if appends are not allowed, and reload a changed configuration. Call under the append lock.

        ``even_stopped``: accept a log whose appends are stopped for a hand-over. Raises `UnknownTopic`,
        `PartitionFailed`, `StoreFenced`, `HandOverInProgress`.
        """
        self.check_usable()
        if self.failed is not None:
            raise PartitionFailed(self.log_name, self.failed)
        if self.page.failed:
            self.fail("an fsync failed")
        self.refresh_config()
        if self.fenced:
            raise StoreFenced(self.log_name, self.fenced)
        if self.is_stopped and not even_stopped:
            raise HandOverInProgress(self.log_name)

    def _check_not_set_aside(self) -> None:
        """Raise `UnknownTopic` unless the folder is still that of this log, or set `fenced` if it is a replica now.

        A standby that sets a former owner's store aside moves the log together with its fence. A replica of the same
        topic then has the folder's name, and no fence.
        """
        if self.is_in_place():
            return
        store = os.path.dirname(os.path.dirname(self.folder))
        if not self.fs.exists(f"{store}/{REPLICA_FILE}"):
            self._raise_replaced()
        self.fenced, self.config_version = "another machine", _NEVER

    def refresh_config(self) -> None:
        """Reload the configuration if any process has changed it."""
        version = self.page.config_version
        if version != self.config_version:
            self._load_settings(version)
            if not self.fenced and not self.read_only:
                self._check_not_set_aside()

    def raise_local_error(self, error: OSError, outcome: str, *, appended: bool = False) -> None:
        """Raise `ProcessLimitError` if ``error`` comes from a limit or a missing right of this process; ignore other
        errors.
        """
        if error.errno in LOCAL_ERRORS and not isinstance(error, SegmentlogError | DiskFailed):
            why, path = f"{error.strerror}; {outcome}", error.filename or self.folder
            raise ProcessLimitError(error.errno, why, path, appended=appended) from error

    def fail(self, why: str) -> None:
        """Refuse appends from now on, in every process, and raise `PartitionFailed`. Use it only for an error of an
        fsync, or of a write that may have changed the file (`DiskFailed`).
        """
        self.failed = why
        self.ledger.mark_failed()
        raise PartitionFailed(self.log_name, why)

    def segments(self, log: LogState, offset: int | None = None) -> list[int]:
        """Return the base offsets of the segments of ``log``, ascending.

        With ``offset`` a cached list may be returned that lacks new segments. It contains at least the segment with
        that offset and its successor. So a reader of sealed segments does not list the folder again for each roll at
        the log end.
        """
        generation, bases = self._segments
        if generation == log.generation and bases:
            known_up_to = bases[-1]
            if known_up_to == log.active_base_offset or (offset is not None and offset < known_up_to):
                return bases
        bases = [base for base in self.list_segments() if base <= log.active_base_offset]
        self._segments = (log.generation, bases)
        return bases

    def list_segments(self) -> list[int]:
        """Return the base offsets of the existing segment files, ascending.

        Raises `UnknownTopic` if the topic was moved.
        """
        try:
            with self.folder_locked():
                bases = list_segments(self.fs, self.folder)
        except FileNotFoundError:
            self.check_in_place()
            raise
        self.check_usable()  # else the files may belong to a topic that has the name now
        return bases

    def map_segment(self, base: int) -> MappedSegment:
        """Map a whole segment, downloading it if it is not local.

        Raises FileNotFoundError, `UnknownTopic`, `ObjectStoreError`.
        """
        with self.folder_locked():
            mapped = MappedSegment(self.fs, self.folder, base, ranged=True)
        mapped.download()  # the download may take long: a rename of the topic must not wait for it
        return mapped

    def index_of(self, base: int, *, writable: bool = True) -> SegmentIndex:
        """Return the index of a segment, with no entries loaded yet."""
        stem, interval = segment_stem(self.folder, base), self.config.index_interval_bytes
        return SegmentIndex(self.fs, stem, base, interval, writable=writable, folder_locked=self.folder_locked)

    def announce_waiting(self, for_s: float) -> bool:
        """Ask appenders to wake followers for the next ``for_s`` seconds. Return False if the page is read-only: the
        caller must then poll.
        """
        if not self.read_only:
            self.ledger.announce_waiting(for_s)
        return not self.read_only

    def wake_followers(self) -> None:
        """Rewrite a byte of the file that followers watch, if a follower has announced that it waits."""
        waiting_until_ms = self.page.waiting_until_ms
        if waiting_until_ms and waiting_until_ms > self.clock.monotonic_ms():
            with failures_ignored():
                self.fs.pwritev(self.lock_fd, [b"\0"], 0)
