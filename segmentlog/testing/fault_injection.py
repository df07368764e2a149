"""A file system that fails on demand.

fs = FaultyFileSystem()
fs.fail("fdatasync", errno.EIO, call=2)     # the second call from now on fails
fs.fail("pwritev", errno.ENOSPC, times=None)  # every call from now on fails, until `heal`
fs.short_writes(100)                        # pwritev writes at most 100 bytes per call
fs.room_bytes = 5000                        # after 5000 bytes the disk is full: a short write, then ENOSPC
fs.before("flock", other_process)           # calls other_process before the next call
fs.calls                                    # [("open", (path, flags, ...)), ...]
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from segmentlog.storage.fs import Buffer, FileSystem

METHODS = (
    "open", "close", "pread", "pwritev", "fdatasync", "fsync", "ftruncate", "rename", "replace", "link", "unlink",
    "rmdir", "flock", "mkdir", "listdir", "fstat", "stat", "lstat", "remove_tree", "fallocate", "set_modified",
    "advise_unneeded", "sync_folder", "map_file", "boot_id", "set_label",
)  # fmt: skip


class Died(BaseException):
    """The simulated process died before this call. A BaseException, so that no error handler catches it."""


def is_done_by_death(method: str, args: tuple[Any, ...]) -> bool:
    """Return whether the kernel makes this call when a process dies; the dead process must not repeat it."""
    return method == "close" or (method == "flock" and bool(args[1] & fcntl.LOCK_UN))


class _Fault(NamedTuple):
    first: int
    last: float
    error: BaseException
    after: bool
    """Whether the real call is made before the failure."""


class FaultyFileSystem(FileSystem):
    """The real file system, with calls that fail. Method names are those of `FileSystem`.

    Calls within other methods count, too: `sync_folder` opens, fsyncs and closes.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.room_bytes: int | None = None
        """Bytes that can be written or allocated until the disk is full; None: no limit."""
        self._counts = dict.fromkeys(METHODS, 0)
        self._faults: dict[str, list[_Fault]] = {}
        self._actions: dict[str, list[Callable[[], object]]] = {}
        self._short: int | None = None
        self._dead_from: int | None = None
        self._open_fds: set[int] = set()
        for name in METHODS:
            setattr(self, name, self._wrap(name, getattr(self, name)))

    def fail(
        self,
        method: str,
        error: int | BaseException = errno.EIO,
        *,
        call: int = 1,
        times: int | None = 1,
        after: bool = False,
    ) -> None:
        """Fail calls ``call``, ``call + 1``, ... (``times`` of them) of ``method``, counted from now.

        ``error`` is an errno or an exception. With ``after`` the real call is made before the failure.
        """
        first = self._counts[method] + call
        last = float("inf") if times is None else first + times - 1
        raised = OSError(error, os.strerror(error)) if isinstance(error, int) else error
        self._faults.setdefault(method, []).append(_Fault(first, last, raised, after))

    def die_at(self, call: int) -> None:
        """Simulate the death of the process at its ``call``-th call from now: it and all later calls raise `Died`.

        Its descriptors are closed and its locks released, as by the kernel. Memory maps remain.
        """
        self._dead_from = len(self.calls) + call

    def short_writes(self, size_bytes: int | None) -> None:
        """Limit `pwritev` to ``size_bytes`` bytes per call; None removes the limit."""
        self._short = size_bytes

    def before(self, method: str, action: Callable[[], object]) -> None:
        """Call ``action`` once, right before the next call of ``method``, to simulate another process."""
        self._actions.setdefault(method, []).append(action)

    def heal(self) -> None:
        """Remove all faults and limits."""
        self._faults.clear()
        self._actions.clear()
        self._short = self.room_bytes = self._dead_from = None

    def count(self, method: str) -> int:
        """Return how often ``method`` was called so far."""
        return self._counts[method]

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        if name == "pwritev":
            real = self._limited_write
        elif name == "fallocate":
            real = self._limited_fallocate

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args))
            self._counts[name] += 1
            if self._dead_from is not None and len(self.calls) >= self._dead_from:
                if len(self.calls) > self._dead_from and is_done_by_death(name, args):
                    return None
                self._bury()
                raise Died
            while self._actions.get(name):
                self._actions[name].pop(0)()
            fault = self._fault_of(name)
            if fault is None:
                if name == "close" and args[0] not in self._open_fds:
                    # A descriptor of the dead process. The test's own process may already use the same number.
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                if name == "close":  # before the call: after it, another thread may get the same number
                    self._open_fds.discard(args[0])
                result = real(*args, **options)
                if name == "open":
                    self._open_fds.add(result)
                return result
            if fault.after:
                result = real(*args, **options)
                if name == "open":  # the caller never gets this descriptor, so it is closed here
                    os.close(result)
            raise fault.error

        return call

    def _bury(self) -> None:
        while self._open_fds:
            os.close(self._open_fds.pop())

    def _fault_of(self, name: str) -> _Fault | None:
        count = self._counts[name]
        return next((fault for fault in self._faults.get(name, ()) if fault.first <= count <= fault.last), None)

    def _limited_write(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        data = memoryview(b"".join(buffers))
        if self.room_bytes is not None:
            if data and not self.room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[: self.room_bytes]
            self.room_bytes -= len(data)
        if self._short is not None:
            data = data[: self._short]
        return os.pwritev(fd, [data] if self._short is not None or self.room_bytes is not None else buffers, position)

    def _limited_fallocate(self, fd: int, position: int, size_bytes: int) -> None:
        if self.room_bytes is not None:
            if size_bytes > self.room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room_bytes -= size_bytes
        FileSystem.fallocate(self, fd, position, size_bytes)
