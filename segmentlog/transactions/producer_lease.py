"""The lease of one instance of a named producer, and the fence that stops appends of older instances."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from segmentlog.errors import ProducerBusy, ProducerFenced, StoreClosed
from segmentlog.storage import fork_safety
from segmentlog.storage.file_locks import lock_within
from segmentlog.storage.file_operations import write_all
from segmentlog.storage.fork_safety import close_lockable
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.interrupt_safe import UNLOCK, interrupt_safe_context
from segmentlog.transactions.transaction_log import TransactionState

_FENCE: Final = struct.Struct("<qh")
_DECISION_WAIT_S = 30.0


class ProducerLease:
    """One instance of a named producer: its id and epoch, its fence, and the lease that shows that it is alive."""

    def __init__(self, fs: FileSystem, name: str, state: TransactionState, fence_fd: int, lease: tuple[int, str]):
        self.name = name
        self.state = state
        self.producer_id, self.epoch = state.producer_id, state.epoch
        self.is_unresolved = False
        """Whether a decision was interrupted. Then only the transaction log shows what was decided."""
        self._fs = fs
        self._fence_fd = fence_fd
        """Descriptor of the fence file, which is read before every append, and locked for every decision."""
        self._lease_fd, self._lease_path = lease
        self._expected_fence = _FENCE.pack(self.producer_id, self.epoch)
        fork_safety.on_fork(self, "_discard_parent_state")

    def _discard_parent_state(self) -> None:
        """Drop the descriptors in a forked child: the instance belongs to the parent."""
        self._fence_fd = self._lease_fd = -1

    def check(self) -> None:
        """Raise `ProducerFenced` if another instance has taken over."""
        if self._fence_fd < 0:
            raise StoreClosed(f"producer {self.name!r}")
        found = self._fs.pread(self._fence_fd, _FENCE.size, 0)
        if found != self._expected_fence:
            epoch = _FENCE.unpack(found)[1] if len(found) == _FENCE.size else -1
            why = "a newer instance took over, or its transaction timed out and was aborted"
            raise ProducerFenced(self.name, self.epoch, epoch, why)

    @interrupt_safe_context
    def deciding(self) -> Iterator[int]:
        """Hold the lock of the name; yield the descriptor of the fence. Raises `ProducerFenced` as `check`."""
        self.check()
        try:
            lock_fence(self._fs, self.name, self._fence_fd)
            self.check()
            yield self._fence_fd
        finally:
            if self._fence_fd >= 0:
                self._fs.flock(self._fence_fd, UNLOCK)

    def close(self) -> None:
        """Remove and unlock the lease. Idempotent."""
        if self._lease_fd >= 0:
            with failures_ignored():
                self._fs.unlink(self._lease_path)
        self._close_files()

    def __del__(self) -> None:
        # The producer was never closed: release the name, as the death of the process would.
        try:
            self._close_files()
        except Exception as error:  # a finalizer has no caller that could handle it
            if is_interrupt(error):
                raise  # Python prints it

    def _close_files(self) -> None:
        fds = self._fence_fd, self._lease_fd
        self._fence_fd = self._lease_fd = -1
        for fd in fds:
            if fd >= 0:
                close_lockable(self._fs, fd)


def lock_fence(fs: FileSystem, name: str, fd: int, wait_s: float | None = None) -> None:
    """Lock a fence file. Raises `ProducerBusy` after ``wait_s`` (default: 30 s)."""
    if not lock_within(fs, fd, _DECISION_WAIT_S if wait_s is None else wait_s):
        why = "another process has been deciding about its transaction for a long time"
        raise ProducerBusy(name, f"{why}; resume or kill that process")


def write_fence(fs: FileSystem, fd: int, producer_id: int, epoch: int) -> None:
    """Write the fence: from now on, only this producer id and epoch may append. The caller holds the lock."""
    write_all(fs, fd, [_FENCE.pack(producer_id, epoch)], 0)


def fenced_epoch(fs: FileSystem, fd: int, producer_id: int) -> int:
    """Return the epoch in the fence; -1 if the fence is for another producer id."""
    data = fs.pread(fd, _FENCE.size, 0)
    if len(data) != _FENCE.size:
        return -1
    found_id, epoch = _FENCE.unpack(data)
    return int(epoch) if found_id == producer_id else -1
