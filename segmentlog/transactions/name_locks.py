"""The folders of producers' names: who may decide about a name, and which instance of it lives."""

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
from segmentlog.transactions.producer_lease import Registration, lock_fence, write_fence
from segmentlog.transactions.transaction_log import TransactionState


class Names:
    """The names of producers in one store, as files and their locks. Thread-safe."""

    def __init__(self, topics: Topics) -> None:
        self._fs = topics.fs
        self._read_only = topics.read_only
        self._folder = f"{topics.path}/{PRODUCERS_FOLDER}"

    @interrupt_safe_context
    def locked(self, name: str, *, wait_s: float | None = None) -> Iterator[int]:
        """Hold the lock under which everything about a name is decided; the descriptor of its fence.

        Raises `ProducerBusy` when somebody holds it for longer than ``wait_s``, or half a minute.
        """
        path = f"{self._folder_of(name)}/fence"
        while True:
            with opened_lockable(self._fs, path, os.O_RDWR | os.O_CREAT, self._open_fence) as fd:
                lock_fence(self._fs, name, fd, wait_s)
                if is_current(self._fs, fd, path):  # else the name was forgotten: others lock another file by now
                    yield fd
                    return

    def _open_fence(self, fs: LockableFiles, path: str, flags: int) -> LockableFd:
        while True:
            for folder in (self._folder, os.path.dirname(path)):
                with contextlib.suppress(FileExistsError):
                    self._fs.mkdir(folder)
            try:
                return open_lockable(fs, path, flags)
            except FileNotFoundError:  # an anonymous one's, which another process has just forgotten
                pass

    def become_instance(
        self, name: str, state: TransactionState, fence_fd: int, write_down: Callable[[], None]
    ) -> Registration:
        """Be the instance of a name that the state is of; ``write_down`` makes that durable. Under the name's lock."""
        files: list[int] = []
        path = self._lease_path(name, state)
        try:
            files.extend(starmap(open_lockable, ((self._fs, path, os.O_RDWR | os.O_CREAT),)))
            self._fs.flock(files[0], EXCLUSIVE)
            write_fence(self._fs, fence_fd, state.producer_id, state.epoch)
            write_down()
            files.extend(starmap(open_lockable, ((self._fs, f"{self._folder_of(name)}/fence", os.O_RDWR),)))
            return Registration(self._fs, name, state, files[1], (files[0], path))
        except BaseException:
            for fd in files:
                close_lockable(self._fs, fd)
            raise

    def has_file(self, path: object) -> bool:
        """Return whether ``path`` is the folder of all names, or in it."""
        return isinstance(path, str) and f"{path}/".startswith(f"{self._folder}/")

    def _folder_of(self, name: str) -> str:
        return f"{self._folder}/{folder_name_of(name, 'name')}"

    def _lease_path(self, name: str, state: TransactionState) -> str:
        return f"{self._folder_of(name)}/lease-{state.producer_id}-{state.epoch}"

    def is_alive(self, name: str, state: TransactionState) -> bool:
        """Whether the instance that the state is of still has its lease; a dead one's is removed."""
        path = self._lease_path(name, state)
        try:
            with opened_lockable(self._fs, path, os.O_RDONLY) as fd:  # also in the read-only store of another user
                # Shared: two who look at the same time must not take each other for the instance.
                self._fs.flock(fd, SHARED | NON_BLOCKING)
        except FileNotFoundError:
            return False
        except (PermissionError, BlockingIOError):
            return True  # locked; or nobody can tell, and what lives is not to be aborted
        if not self._read_only:
            with failures_ignored():
                self._fs.unlink(path)
        return False

    def remove(self, name: str) -> None:
        """Remove the folder of a name that nobody has; under its lock."""
        with failures_ignored():
            self._fs.remove_tree(self._folder_of(name))
