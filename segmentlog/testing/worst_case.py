"""The worst disk that POSIX allows, on real files: a power cut takes everything that was not synced.

    disk = WorstCaseDisk(folder)                  # what is there now counts as durable
    store = LogStore(disk.path("store"), fs=disk)
    ...
    disk.power_cut()                              # whoever had files open must have let go of them
    store = LogStore(disk.path("store"), fs=disk)  # under another boot id

A real disk keeps some of what was never synced, and which part of it is luck; `CrashFS` and
`SimulatedDisk` try that luck. This one has none to try: it is what an application may count
on and nothing more, the same in every run, and needs neither root nor FUSE. So it shows
what a log promises, and is of no use for finding out how it deals with halves.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from typing import NamedTuple

from segmentlog.storage.fs import FileSystem


class _Inode(NamedTuple):
    """Which file it is, whatever it is called."""

    device: int
    number: int


def _inode(found: os.stat_result) -> _Inode:
    return _Inode(found.st_dev, found.st_ino)


class WorstCaseDisk(FileSystem):
    """A folder in which only fsync and fdatasync make anything last. Not thread-safe; for one process.

    At each sync of a file its bytes are copied, at each sync of a folder its names; `power_cut`
    builds the folder anew from the copies. A file whose name was synced and whose bytes never
    were comes back empty; one whose name was not is gone, bytes and all.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.path.abspath(os.fspath(folder))
        self.boots = 1
        self._bytes: dict[_Inode, bytes] = {}
        self._names: dict[_Inode, dict[str, _Inode]] = {}
        # Open as long as this disk has to know the file: the number of a deleted one would be given to another.
        self._held: dict[_Inode, int] = {}
        os.makedirs(self._folder, exist_ok=True)
        self._root = self._take_as_durable(self._folder)
        self.fsync = self.fdatasync = self._sync

    def path(self, name: str) -> str:
        """Path of a file or folder of that name on this disk."""
        return f"{self._folder}/{name}"

    def boot_id(self) -> str:
        """Another one after every power cut."""
        return f"worst-case-{self.boots}"

    # ------------------------------------------------------------ what is remembered

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        fd = os.open(path, flags, mode)
        if f"{os.path.abspath(path)}/".startswith(f"{self._folder}/"):  # folders that it lies in are not on this disk
            self._hold(path, _inode(os.fstat(fd)))
        return fd

    def _sync(self, fd: int) -> None:
        # No sync of the real disk: it is not the real power that is cut.
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
        # A descriptor of its own, not a duplicate: that would share the locks of the one it was made from.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if _inode(os.fstat(fd)) != inode:
            os.close(fd)
            raise RuntimeError(f"{path} was replaced while it was opened; WorstCaseDisk is for one thread")
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

    # ------------------------------------------------------------ forgetting

    def power_cut(self) -> None:
        """Put back what was synced, and nothing else; another boot begins.

        Whoever had files open has to forget them first (`Partition.abandon`), as processes do that are dead.
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
            there = f"{path}/{name}"
            if stat.S_ISDIR(os.fstat(self._held[inode]).st_mode):
                os.mkdir(there)
                self._restore(inode, there)
            else:
                with open(there, "wb") as file:
                    file.write(self._bytes.get(inode, b""))

    def close_held(self) -> None:
        """Close the descriptors that this disk keeps; call it when the disk is no longer needed."""
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
