"""What every part of an open partition shares: its folder, files, locks, state page and configuration."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.errors import LocalError, PartitionFailed, ReadOnlyStore, SegmentlogError, StoreFenced, UnknownTopic
from segmentlog.format.batch import MAX_RAW_SIZE
from segmentlog.format.file_names import LOCK_FILE, QUARANTINE_FOLDER, STATE_FILE
from segmentlog.format.scan import Around, KnownBatches
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
"""No version of the configuration: whoever appends looks at it every time."""
_SEALED_KEPT = 8
"""Segments that are sealed faster than they are synced are closed beyond so many."""


class Handle:
    """Files and locks of one partition in this process.

    Lock order: `append_mutex`, the append lock (flock on ``lock``), `sync_mutex`, the sync
    lock (flock on ``state``), `_open_mutex` (files that were released are opened anew). The
    mutexes keep out this process's threads, the flocks the other processes; the kernel frees
    the flocks of a process that dies. `staying` has no place in that order: many hold it at once,
    and whoever keeps them out waits for nobody.
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
        """Why it is, where the caller did not ask for it; see `ReadOnlyStore`."""
        self.recovery = recovery
        self.config = load_config()
        self._load_config = load_config
        self._load_batch_limit = load_batch_limit or (lambda: MAX_RAW_SIZE)
        self.batch_limit = self._load_batch_limit()
        """No batch of this log holds more bytes, uncompressed."""
        self._on_open = on_open
        self._on_roll = on_roll
        self.ship_signals = ship_signals
        self.holds_producer = holds_producer or (lambda _: True)
        """Whether a name may still have this producer id: then the log keeps it, however long it appends nothing."""
        self.lock_path = f"{folder}/{LOCK_FILE}"
        self.quarantine = f"{folder}/{QUARANTINE_FOLDER}"
        self.lock_fd = self.state_fd = -1
        self.is_opening = True
        """Until the partition is open: its descriptors are in use, though no mutex says so."""
        self.sealed: dict[int, SealedSegment] = {}
        """By base offset: sealed here and perhaps not synced yet; see `keep_sealed`."""
        self.ledger = Ledger(self)
        self.page = self.ledger.page
        """To be read; it is the ledger that changes it."""
        self.is_snapshot = False
        """Opened read-only when nobody had the log open: its end is where it was then."""
        self.failed: str | None = None
        self.fenced = ""
        """Who owns the log now, when that is another machine."""
        self.used = True
        """Set by whoever uses the files; the descriptor budget clears it and closes what stays unused."""
        self.config_version = 0
        self._moved = 0
        self._segments: tuple[int, list[int]] = (-1, [])
        self.closers: list[Callable[[], None]] = []
        """Called when the files are closed: whoever keeps further descriptors closes them here."""
        self.after_fork: list[Callable[[], None]] = []
        """Called in a forked child, where the parent's other threads are gone that were in the middle of something."""
        self.append_mutex = fork_safety.lock(self, "append_mutex")
        self._open_mutex = fork_safety.lock(self, "_open_mutex")
        self.sync_mutex = fork_safety.lock(self, "sync_mutex", "_close_in_child")

    def __del__(self) -> None:
        # Dropped without being closed: its descriptors go with it. Whatever thread comes by runs this, at any
        # point, so it waits for no lock; and the handle stays whole, for the thread that closes a dropped store
        # goes on with it (`LogStore.__del__`): while that one is at the files they are its own.
        try:
            if not sys.is_finalizing():
                self.close_if_idle()
        except Exception as error:  # half made, or a file system that cannot: nobody is there to be told
            if is_interrupt(error):
                raise  # Python tells it

    def resurrect(self) -> None:
        """Kept by the finalizer of its store, when the collector had cleared the weak references to it already.

        It is noted for forks once more; its locks stay what they are, for its own finalizer may hold them.
        """
        for name, method in (("append_mutex", ""), ("_open_mutex", ""), ("sync_mutex", "_close_in_child")):
            fork_safety.lock(self, name, method)

    # ------------------------------------------------------------ files

    def open_files(self) -> None:
        """Open the lock and state files, making them if need be. The state is mapped but not yet judged."""
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
        self.ledger.adopt(page)
        self.page = page
        # Read before what they speak of: who changes that changes them afterwards. And once more, though it was read:
        # the topic may have been altered, or deleted, since the files were opened.
        self._moved, version = page.moved, page.config_version
        self._take_over(version)

    def _take_over(self, version: int) -> None:
        """Go by what is on disk now. What keeps it from being read is told every time, and so is a fence."""
        self.config = self._load_config()
        granted = read_grant(self.fs, self.folder)
        self.fenced = "" if granted is None else granted.fenced
        self.config_version = _NEVER if self.fenced else version

    def check_named(self) -> None:
        """Raise `UnknownTopic` unless the name is the topic's still, by its id."""
        self.config = self._load_config()

    def ensure_open(self, outcome: str = "nothing was changed", *, appended: bool = False) -> None:
        """Reopen files that were closed while idle or in another process (after a fork). Errors are `raise_local`'s."""
        if self.lock_fd < 0 or self.state_fd < 0:
            with self._open_mutex:  # one thread may come with the append mutex, another one with the sync mutex
                if self.lock_fd < 0 or self.state_fd < 0:
                    self.check_usable()
                    try:
                        with self.folder_locked():  # opening makes files that are not there
                            self.open_files()
                    except OSError as error:
                        self.raise_local_error(error, outcome, appended=appended)
                        raise
        self.used = True

    @property
    def has_files(self) -> bool:
        """Whether it holds descriptors."""
        return self.lock_fd >= 0

    def _check_file_of(self, file_id: tuple[int, int], fd: int) -> None:
        """Raise `UnknownTopic` when another log stands there since, with files of the same names."""
        found = self.fs.fstat(fd)
        if (found.st_dev, found.st_ino) != file_id:
            raise UnknownTopic(self.topic, f"{self.folder} was replaced while it was in use")

    def close_segments(self) -> None:
        """Close what is open of segments, as `close_files`: one that was deleted takes room on the disk until then."""
        for close in self.closers:
            close()
        while self.sealed:
            self.sealed.popitem()[1].close()

    def close_files(self) -> None:
        """Close the descriptors; the mapped page stays. The caller holds both mutexes, or nobody else has them."""
        self.close_segments()
        fds = self.lock_fd, self.state_fd
        self.lock_fd = self.state_fd = -1  # first: a child forked in between must not close what has the numbers next
        for fd in fds:
            if fd >= 0:
                close_lockable(self.fs, fd)

    def _close_in_child(self) -> None:
        """In a forked child: drop the files, since a flock belongs to parent and child alike; open anew on use."""
        for begin_anew in self.after_fork:
            begin_anew()
        self.close_files()

    def close_if_idle(self) -> bool:
        """Close the descriptors of an idle partition; they are reopened on use. False when it is busy."""
        if self.is_opening:
            return False
        with try_lock(self.append_mutex) as one, try_lock(self.sync_mutex) as both:
            if not (one and both):
                return False
            self.close_files()
            return True

    def add_sealed(self, segment: SealedSegment) -> None:
        """Keep a segment open that was sealed, until it is synced. Under the append lock."""
        synced_base = self.page.sync.read().synced_base_offset
        for base in [base for base in self.sealed.copy() if base < synced_base]:
            self.drop_sealed(base)
        if len(self.sealed) < _SEALED_KEPT:
            self.sealed[segment.base_offset] = segment
        else:
            segment.close()

    def drop_sealed(self, base: int) -> None:
        """The segment is synced, or is no more what it was."""
        kept = self.sealed.pop(base, None)
        if kept is not None:
            kept.close()

    # ------------------------------------------------------------ locks

    @interrupt_safe_context
    def append_locked(self, *, by_names: bool = True) -> Iterator[None]:
        """Hold the append lock, for everything but the append itself (which does it by hand, for speed).

        `staying`, unless what is done there sees to that itself where it goes ``by_names`` of files.
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
        """Hold the sync lock, `staying`: for every write of the checkpoint, and for fsyncs (often by hand)."""
        with self.sync_mutex:
            self.ensure_open()
            try:
                self.fs.flock(self.state_fd, EXCLUSIVE)
                with self.folder_locked():
                    yield
            finally:
                self.fs.flock(self.state_fd, UNLOCK)

    # ------------------------------------------------------------ what everybody checks

    def exceeds_batch_limit(self, raw_size: int) -> bool:
        """Whether a batch claims more than any setting of the topic ever allowed: then it is not one."""
        if raw_size > self.batch_limit:
            self.batch_limit = self._load_batch_limit()  # it may have been raised since
        return raw_size > self.batch_limit

    def around(self, base: int, end_offset: int | None, known: KnownBatches | None = None) -> Around:
        """What is known of the segment ``base`` beside its bytes, for who steps over damage in it.

        Its batches end at ``end_offset`` at the latest; without ``known`` its index files are asked where they are.
        """
        batch_limit = MAX_RAW_SIZE
        with failures_ignored(SegmentlogError):
            self.exceeds_batch_limit(MAX_RAW_SIZE)  # learns of a limit that was raised since
            batch_limit = self.batch_limit
        return Around(
            end_offset, batch_limit, known or load_known_batches(self.fs, segment_stem(self.folder, base), base)
        )

    def check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyStore(self.folder, "append or change anything", self.read_only_why)

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
        except OSError as error:  # a disk that fails has its own ways to say so
            if is_interrupt(error):
                raise
            return True
        return (found.st_dev, found.st_ino) == self.page.file_id

    def check_in_place(self) -> None:
        """Raise `UnknownTopic` unless `is_in_place`, from then on in all that share the page."""
        if not self.is_in_place():
            self._tell_replaced()

    def _tell_replaced(self) -> NoReturn:
        if not self.read_only:
            self.ledger.count_move()
        raise UnknownTopic(self.topic, f"{self.folder} was deleted or replaced while it was in use")

    @interrupt_safe_context
    def folder_locked(self) -> Iterator[None]:
        """Within, the folder is this log's own and keeps its name: who renames or deletes the topic waits for the end.

        Around whatever goes by the names of files, or those of another log may stand there by then. An append that
        stays within its segment does not: it goes to the files that are open, wherever they are now. Raises
        `UnknownTopic`. For moments, and never around what calls the user's code; it may be taken within itself.
        Who only reads cannot lock where he may not write, and looks afterwards whether it was still the same folder.
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
            self._tell_replaced()

    @contextlib.contextmanager
    def translating_errors(self, outcome: str = "it was not brought to its end") -> Iterator[None]:
        """Around what changes the log: errors are told as what they are.

        A file that is not there because the folder is not there any more raises `UnknownTopic`, and what is
        this process's own affair `LocalError`. It belongs around whatever holds locks, never within: `held`
        does not hear of errors.
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

    def check_appendable(self) -> None:
        """What may keep an append out; refreshes the configuration when it was altered. Under the append lock."""
        self.check_usable()
        if self.failed is not None:
            raise PartitionFailed(self.log_name, self.failed)
        if self.page.failed:
            self.fail("an fsync failed")
        self.refresh_config()
        if self.fenced:
            raise StoreFenced(self.log_name, self.fenced)

    def refresh_config(self) -> None:
        """Take over the configuration if it was altered, by whatever process."""
        version = self.page.config_version
        if version != self.config_version:
            self._take_over(version)

    def raise_local_error(self, error: OSError, outcome: str, *, appended: bool = False) -> None:
        """Raise `LocalError` for an error that is this process's own affair; do nothing for any other."""
        if error.errno in LOCAL_ERRORS and not isinstance(error, SegmentlogError | DiskFailed):
            why, path = f"{error.strerror}; {outcome}", error.filename or self.folder
            raise LocalError(error.errno, why, path, appended=appended) from error

    def fail(self, why: str) -> None:
        """Refuse appends from now on, in every process. Raises `PartitionFailed`.

        For errors of an fsync, and of a write that may have touched the file (`DiskFailed`), and for no other.
        """
        self.failed = why
        self.ledger.mark_failed()
        raise PartitionFailed(self.log_name, why)

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
        bases = [base for base in self.list_segments() if base <= log.active_base_offset]
        self._segments = (log.generation, bases)
        return bases

    def list_segments(self) -> list[int]:
        """Base offsets of the segment files that there are, ascending. Raises `UnknownTopic` when it was moved."""
        try:
            with self.folder_locked():
                bases = list_segments(self.fs, self.folder)
        except FileNotFoundError:
            self.check_in_place()
            raise
        self.check_usable()  # else it may be the list of a topic that has the name since
        return bases

    def map_segment(self, base: int) -> MappedSegment:
        """A segment of this log, mapped, and all here. Raises FileNotFoundError, `UnknownTopic`, `ObjectStoreError`."""
        with self.folder_locked():
            mapped = MappedSegment(self.fs, self.folder, base, ranged=True)
        mapped.bring()  # that may take long: who renames the topic does not wait for it
        return mapped

    def index_of(self, base: int, *, writable: bool = True) -> SegmentIndex:
        """The index of one of its segments, nothing of it loaded yet."""
        stem, interval = segment_stem(self.folder, base), self.config.index_interval_bytes
        return SegmentIndex(self.fs, stem, base, interval, writable=writable, folder_locked=self.folder_locked)

    def announce_waiting(self, for_s: float) -> bool:
        """Ask appenders to wake followers for so long; False when the page cannot be written, and one must poll."""
        if not self.read_only:
            self.ledger.announce_waiting(for_s)
        return not self.read_only

    def wake_followers(self) -> None:
        """Rewrite a byte that followers watch, if any said that they wait."""
        waiting_until_ms = self.page.waiting_until_ms
        if waiting_until_ms and waiting_until_ms > self.clock.monotonic_ms():
            with failures_ignored():
                self.fs.pwritev(self.lock_fd, [b"\0"], 0)
