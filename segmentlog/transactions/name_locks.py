"""Lock files of producer names: the lock for decisions about a name, and the leases of its instances."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import starmap

from segmentlog.format.file_names import PRODUCERS_FOLDER, folder_name_of
from segmentlog.storage.file_locks import is_current
from segmentlog.storage.fork_safety import LockableFd, LockableFiles, close_lockable, open_lockable, opened_lockable
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING, SHARED, interrupt_safe_context
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.producer_lease import ProducerLease, lock_fence, write_fence
from segmentlog.transactions.transaction_log import TransactionState


class NameLocks:
    """The names of producers in a store, as folders with lock files. Thread-safe."""

    def __init__(self, topics: Topics) -> None:
        self._fs = topics.fs
        self._read_only = topics.read_only
        self._folder = f"{topics.path}/{PRODUCERS_FOLDER}"

    @interrupt_safe_context
    def locked(self, name: str, *, wait_s: float | None = None) -> Iterator[int]:
        """Hold the lock for decisions about a name. Yield the descriptor of its fence file.

        Raises `ProducerBusy` if another process holds it for longer than ``wait_s`` (default: 30 s).
        """
        path = f"{self._folder_of(name)}/fence"
        while True:
            with opened_lockable(self._fs, path, os.O_RDWR | os.O_CREAT, self._open_fence) as fd:
                lock_fence(self._fs, name, fd, wait_s)
                if is_current(self._fs, fd, path):  # else the name was deleted, and others lock a new file
                    yield fd
                    return

    def _open_fence(self, fs: LockableFiles, path: str, flags: int) -> LockableFd:
        while True:
            for folder in (self._folder, os.path.dirname(path)):
                with contextlib.suppress(FileExistsError):
                    self._fs.mkdir(folder)
            try:
                return open_lockable(fs, path, flags)
            except FileNotFoundError:  # an anonymous name, which another process has just deleted
                pass

    def create_lease(
        self, name: str, state: TransactionState, fence_fd: int, save_state: Callable[[], None]
    ) -> ProducerLease:
        """Create the lease and the fence of an instance. The caller holds the name's lock.

        ``save_state`` must save ``state`` durably. It is called after the fence is written.
        """
        files: list[int] = []
        path = self._lease_path(name, state)
        try:
            files.extend(starmap(open_lockable, ((self._fs, path, os.O_RDWR | os.O_CREAT),)))
            self._fs.flock(files[0], EXCLUSIVE)
            write_fence(self._fs, fence_fd, state.producer_id, state.epoch)
            save_state()
            files.extend(starmap(open_lockable, ((self._fs, f"{self._folder_of(name)}/fence", os.O_RDWR),)))
            return ProducerLease(self._fs, name, state, files[1], (files[0], path))
        except BaseException:
            for fd in files:
                close_lockable(self._fs, fd)
            raise

    def contains_path(self, path: object) -> bool:
        """Return whether ``path`` is the folder of all producer names, or a path inside it."""
        return isinstance(path, str) and f"{path}/".startswith(f"{self._folder}/")

    def _folder_of(self, name: str) -> str:
        return f"{self._folder}/{folder_name_of(name, 'name')}"

    def _lease_path(self, name: str, state: TransactionState) -> str:
        return f"{self._folder_of(name)}/lease-{state.producer_id}-{state.epoch}"

    def is_alive(self, name: str, state: TransactionState) -> bool:
        """Return whether the instance in ``state`` holds its lease. Removes the lease file of a dead instance."""
        path = self._lease_path(name, state)
        try:
            with opened_lockable(self._fs, path, os.O_RDONLY) as fd:  # works in another user's read-only store, too
                # Use a shared lock: with an exclusive lock, each of two processes that check at the same time would
                # mistake the other for the instance.
                self._fs.flock(fd, SHARED | NON_BLOCKING)
        except FileNotFoundError:
            return False
        except (PermissionError, BlockingIOError):
            return True  # locked or not readable: the instance may be alive, so its transaction must not be aborted
        if not self._read_only:
            with failures_ignored():
                self._fs.unlink(path)
        return False

    def remove(self, name: str) -> None:
        """Remove the folder of an unused name. The caller holds the name's lock."""
        with failures_ignored():
            self._fs.remove_tree(self._folder_of(name))
