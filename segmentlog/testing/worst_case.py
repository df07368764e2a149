"""The worst disk that POSIX allows, on real files: a power cut loses everything that was not synced.

    disk = WorstCaseDisk(folder)                  # the present contents count as durable
    store = LogStore(disk.path("store"), fs=disk)
    ...
    disk.power_cut()                              # all users must have closed or abandoned their files
    store = LogStore(disk.path("store"), fs=disk)  # with another boot id

After a power cut, a real disk has a random part of the unsynced data; `CrashFS` and `SimulatedDisk` simulate this.
This disk has none of them: only the data that an application can rely on, the same in every run. It works
without root privileges or FUSE. So it shows what a log guarantees, but not how a log handles partial writes.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from typing import NamedTuple

from segmentlog.storage.fs import FileSystem


class _Inode(NamedTuple):
    """The identity of a file, independent of its name."""

    device: int
    number: int


def _inode(found: os.stat_result) -> _Inode:
    return _Inode(found.st_dev, found.st_ino)


class WorstCaseDisk(FileSystem):
    """A folder in which data survive a power cut only after fsync or fdatasync. Not thread-safe; for one process.

    Each sync of a file copies its bytes, each sync of a folder copies its names; `power_cut` rebuilds the
    folder from these copies. A file whose name was synced, but never its bytes, is empty after a power cut. A
    file whose name was not synced no longer exists.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.path.abspath(os.fspath(folder))
        self.boots = 1
        self._bytes: dict[_Inode, bytes] = {}
        self._names: dict[_Inode, dict[str, _Inode]] = {}
        # Kept open, because the inode number of a deleted file could otherwise be reused.
        self._held: dict[_Inode, int] = {}
        os.makedirs(self._folder, exist_ok=True)
        self._root = self._take_as_durable(self._folder)
        self.fsync = self.fdatasync = self._sync

    def path(self, name: str) -> str:
        """Return the path of a file or folder on this disk."""
        return f"{self._folder}/{name}"

    def boot_id(self) -> str:
        """Return the boot id, which changes at every power cut."""
        return f"worst-case-{self.boots}"

    # ------------------------------------------------------------ recording syncs

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        fd = os.open(path, flags, mode)
        if f"{os.path.abspath(path)}/".startswith(f"{self._folder}/"):  # parent folders are not on this disk
            self._hold(path, _inode(os.fstat(fd)))
        return fd

    def _sync(self, fd: int) -> None:
        # The real disk is not synced: only a simulated power cut follows.
        found = os.fstat(fd)
        inode = _inode(found)
        if inode not in self._held:
            return
        if stat.S_ISDIR(found.st_mode):
            self._names[inode] = self._names_in(self._held[inode])
        else:
            self._bytes[inode] = _content(self._held[inode])

    def _hold(self, path: str, inode: _Inode) -> None:
        if inode in self._held:
            return
        # A separate descriptor: a duplicate would share the locks of the original.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if _inode(os.fstat(fd)) != inode:
            os.close(fd)
            raise RuntimeError(f"{path} was replaced during open(): WorstCaseDisk is not thread-safe")
        self._held[inode] = fd

    def _names_in(self, folder_fd: int) -> dict[str, _Inode]:
        names = {}
        for name in os.listdir(folder_fd):
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder_fd)
            inode = _inode(os.fstat(fd))
            if self._held.setdefault(inode, fd) != fd:
                os.close(fd)
            names[name] = inode
        return names

    def _take_as_durable(self, folder: str) -> _Inode:
        root = _inode(os.stat(folder))
        self._hold(folder, root)
        waiting = [root]
        while waiting:
            inode = waiting.pop()
            fd = self._held[inode]
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                self._names[inode] = self._names_in(fd)
                waiting += self._names[inode].values()
            else:
                self._bytes[inode] = _content(fd)
        return root

    # ------------------------------------------------------------ power cuts

    def power_cut(self) -> None:
        """Restore the folder to its synced state, and start another boot.

        First abandon every object with open files (`Partition.abandon`), as if its process had been killed.
        """
        aside = tempfile.mkdtemp(prefix=f"{os.path.basename(self._folder)}-", dir=os.path.dirname(self._folder))
        self._restore(self._root, aside)
        shutil.rmtree(self._folder)
        os.rename(aside, self._folder)
        self.close_held()
        self.boots += 1
        self._root = self._take_as_durable(self._folder)

    def _restore(self, folder: _Inode, path: str) -> None:
        for name, inode in self._names.get(folder, {}).items():
            restored = f"{path}/{name}"
            if stat.S_ISDIR(os.fstat(self._held[inode]).st_mode):
                os.mkdir(restored)
                self._restore(inode, restored)
            else:
                with open(restored, "wb") as file:
                    file.write(self._bytes.get(inode, b""))

    def close_held(self) -> None:
        """Close the descriptors of this disk. Call this when the disk is no longer needed."""
        while self._held:
            os.close(self._held.popitem()[1])
        self._bytes.clear()
        self._names.clear()


def _content(fd: int) -> bytes:
    parts = []
    position = 0
    while part := os.pread(fd, 1 << 20, position):
        parts.append(part)
        position += len(part)
    return b"".join(parts)
