"""The file system interface of one process on a simulated machine."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any

from segmentlog.storage.fs import Buffer, FileSystem
from segmentlog.testing.disk_node import Disk, Effect, SimulatedFile, do_effect, path_parts
from segmentlog.testing.fault_injection import Died, is_done_by_death

_DEVICE = 77


class SimulatedProcess(FileSystem):
    """The file system of one process of a simulated machine. Raises the errors of the system calls.

    ``fail_at`` makes one call fail, counted over all methods from 1: with an errno; with a write of
    only half the data (``"short"``); with such a write, and a full disk at the next write
    (``"full"``); or with the death of the process before the call (``"die"``).
    """

    takes_descriptors = False

    def __init__(self, disk: Disk, number: int) -> None:
        self.disk = disk
        self.number = number
        self.calls = 0
        self.fail_at: tuple[int, int | str] | None = None
        self.failed: str = ""
        """The method that `fail_at` made fail."""
        self._fds: dict[int, SimulatedFile] = {}
        self._next_fd = 1000 * number
        self._dead = self._full = False

    def _fail_if_asked(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any] | None:
        """If this is call number `fail_at`, raise its error, or write half of the data and return (result,).

        Return None if the caller must make the call normally.
        """
        if self._dead:
            if is_done_by_death(name, args):
                return (None,)
            raise Died
        if name == "pwritev" and self._full:
            self._full = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.fail_at is not None and self.calls == self.fail_at[0]:
            how = self.fail_at[1]
            self.failed = name
            if how == "die":
                self.die()
                raise Died
            if isinstance(how, int):
                raise OSError(how, os.strerror(how))
            if name == "pwritev":
                self._full = how == "full"
                data = b"".join(args[1])
                return (call(self, args[0], [data[: len(data) // 2]], args[2]),)
        return None

    def die(self) -> None:
        """End the process: the kernel closes its descriptors, which releases its locks."""
        for fd in self._fds.copy():
            self._close(fd)
        self._dead = True

    def boot_id(self) -> str:
        return f"boot-{self.disk.boot}"

    def kind_of_mount(self, path: str) -> str:
        return "simulated"

    def why_unwritable(self, path: str) -> str:
        return ""

    def disable_copy_on_write(self, fd: int) -> None:
        self._node(fd)

    def mount_id(self, fd: int) -> int:
        return self.disk.mount if self.disk.supports_mount_ids else 0

    def set_inode_mark(self, fd: int) -> None:
        self._node(fd).marked = self.disk.supports_inode_marks

    def has_inode_mark(self, fd: int) -> bool:
        return self._node(fd).marked

    def _set_label(self, fd: int, label: bytes) -> None:
        self._node(fd).label = label
        self.disk.changed()

    def label(self, fd: int) -> bytes:
        return self._node(fd).label

    def advise_unneeded(self, fd: int, position: int, size_bytes: int) -> None:
        """Do nothing: the simulated page cache keeps all pages."""

    # ------------------------------------------------------------ files

    def _node(self, fd: int) -> SimulatedFile:
        try:
            return self._fds[fd]
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def _open(self, path: str, flags: int, mode: int = 0o777) -> int:
        try:
            node = self.disk.find(path)
            if flags & os.O_CREAT and flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            folder, name = self._parent(path)
            node = self.disk.new_node(is_folder=False)
            folder.change_names({name: node})
            self.disk.changed()
        if flags & os.O_TRUNC:
            self._set_size(node, 0)
        self._next_fd += 1
        self._fds[self._next_fd] = node
        return self._next_fd

    def _parent(self, path: str) -> tuple[SimulatedFile, str]:
        parts = path_parts(path)
        folder = self.disk.find("/".join(parts[:-1]))
        return folder, parts[-1]

    def _close(self, fd: int) -> None:
        node = self._node(fd)
        del self._fds[fd]
        node.locks.pop((self.number, fd), None)

    def _pread(self, fd: int, size: int, position: int) -> bytes:
        node = self._node(fd)
        return bytes(memoryview(node.buffer)[position : min(position + size, node.size)])

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        node = self._node(fd)
        effect = Effect(position, b"".join(buffers))
        assert effect.data is not None
        do_effect(node, effect)
        node.pending.append(effect)
        self.disk.changed()
        return len(effect.data)

    def _sync(self, fd: int) -> None:
        self._node(fd).sync()
        self.disk.changed()

    _fsync = _fdatasync = _sync

    def _ftruncate(self, fd: int, size: int) -> None:
        self._set_size(self._node(fd), size)

    def _set_size(self, node: SimulatedFile, size: int) -> None:
        if size != node.size:
            effect = Effect(size, None)
            do_effect(node, effect)
            node.pending.append(effect)
            self.disk.changed()

    def _fallocate(self, fd: int, position: int, size_bytes: int) -> None:
        node = self._node(fd)
        if position + size_bytes > node.size:
            self._set_size(node, position + size_bytes)

    def _map_file(self, fd: int, size_bytes: int, *, writable: bool = False) -> memoryview:
        node = self._node(fd)
        node.fix_buffer()
        if writable and not node.mapped:
            node.mapped = True
            self.disk.pages.append(node)
        view = memoryview(node.buffer)[:size_bytes]
        return view if writable else view.toreadonly()

    # ------------------------------------------------------------ names

    def _move(self, source: str, target: str) -> None:
        node = self.disk.find(source)
        folder, name = self._parent(source)
        target_folder, target_name = self._parent(target)
        if target_folder.names.get(target_name) is node:
            return  # two names of the same file: POSIX keeps both
        if folder is target_folder:
            folder.change_names({name: None, target_name: node})
        else:
            target_folder.change_names({target_name: node})
            folder.change_names({name: None})
        self.disk.changed()

    _rename = _replace = _move

    def _unlink(self, path: str) -> None:
        self.disk.find(path)
        folder, name = self._parent(path)
        folder.change_names({name: None})
        self.disk.changed()

    def _link(self, source: str, target: str) -> None:
        node = self.disk.find(source)
        folder, name = self._parent(target)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        folder.change_names({name: node})
        self.disk.changed()

    def _set_modified(self, fd: int, modified_ns: int) -> None:
        self._node(fd)

    def _rmdir(self, path: str) -> None:
        if self.disk.find(path).names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._unlink(path)

    def _mkdir(self, path: str) -> None:
        folder, name = self._parent(path)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        folder.change_names({name: self.disk.new_node(is_folder=True)})
        self.disk.changed()

    def _lstat(self, path: str) -> os.stat_result:
        return self._stat(path)

    def _listdir(self, path: str) -> list[str]:
        return list(self.disk.find(path).names)

    def _remove_tree(self, path: str) -> None:
        self._unlink(path)

    def _fstat(self, fd: int) -> os.stat_result:
        return _stat(self._node(fd))

    def _stat(self, path: str) -> os.stat_result:
        return _stat(self.disk.find(path))

    def _flock(self, fd: int, operation: int) -> None:
        node = self._node(fd)
        holder = (self.number, fd)
        if operation & fcntl.LOCK_UN:
            node.locks.pop(holder, None)
            return
        how = operation & ~fcntl.LOCK_NB
        others = {one: theirs for one, theirs in node.locks.items() if one != holder}
        if not others or (how == fcntl.LOCK_SH and fcntl.LOCK_EX not in others.values()):
            node.locks[holder] = how
        elif operation & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        else:
            raise OSError(errno.EDEADLK, f"process {self.number} would wait forever: {others} hold the lock")


_CALLS = (
    "open", "close", "pread", "pwritev", "fdatasync", "fsync", "ftruncate", "rename", "replace", "link", "unlink",
    "rmdir", "flock", "mkdir", "listdir", "fstat", "stat", "lstat", "remove_tree", "fallocate", "map_file",
    "set_modified", "set_label",
)  # fmt: skip


def _counted(name: str) -> Callable[..., Any]:
    call = getattr(SimulatedProcess, f"_{name}")

    def counted(self: SimulatedProcess, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self._dead or self._full or self.fail_at is not None:
            found = self._fail_if_asked(name, call, args)
            if found is not None:
                return found[0]
        return call(self, *args, **options)

    return counted


for _name in _CALLS:
    setattr(SimulatedProcess, _name, _counted(_name))


_LATER_S = 4_000_000_000
# The machine has no clock: each write adds a nanosecond. Retention uses the modification time only as an upper bound.


def _stat(node: SimulatedFile) -> os.stat_result:
    kind = stat.S_IFDIR if node.is_folder else stat.S_IFREG
    fields = (kind | 0o755, node.number, _DEVICE, 1, 0, 0, node.size, *3 * (_LATER_S,))
    return os.stat_result(fields, {"st_mtime_ns": _LATER_S * 1_000_000_000 + node.version})
