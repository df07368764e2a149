"""A folder as an object store: on another disk, say, or one that is mounted over the network.

An object is a file, put by writing it beside its place, an fsync, a rename, and an fsync of its folder and of those
above that this process has not synced yet. The conditional put holds a lock on a file beside it; the tag is a checksum
of what is there. Over a network file system that lock is as good as that system's locks are.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from typing import Final, cast
from urllib.parse import quote

import xxhash

from segmentlog.errors import DiskFull, ObjectStoreError
from segmentlog.format.file_names import FILE_LOCK_SUFFIX, STORE_FILE, TEMPORARY_SUFFIX, check_relative_path
from segmentlog.objects.bucket.base import Data, Listed, ObjectChanged, ObjectMissing
from segmentlog.objects.bucket.rate_limit import Pace
from segmentlog.storage.file_locks import ProcessLock
from segmentlog.storage.file_operations import make_folders_durably, read_file, replace_file
from segmentlog.storage.fs import FileSystem, opened

_OURS: Final = (TEMPORARY_SUFFIX, FILE_LOCK_SUFFIX)
_LASTING: Final = frozenset((
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL,
))  # fmt: skip
"""What stays as it is until somebody does something about it."""


class Folder:
    """A `Bucket` below a folder, which is made when something is put there first. Thread-safe."""

    def __init__(self, path: str, fs: FileSystem | None = None, *, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self.url = "file://" + quote(os.fsencode(path))
        self._path = path
        self._fs = fs or FileSystem()
        self._synced: set[str] = set()
        """Folders whose names are durable, as far as this process has seen to it."""
        self._is_checked = False

    def __repr__(self) -> str:
        return f"Folder({self._path!r})"

    def get(self, key: str) -> tuple[bytes, str]:
        """As `Bucket.get`; the tag is a checksum."""
        with self._telling(key, "read"):
            data = read_file(self._fs, self._file(key))
        return data, _tag(data)

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        """As `Bucket.get_range`."""
        with self._telling(key, "read"), opened(self._fs, self._file(key), os.O_RDONLY | os.O_CLOEXEC) as fd:
            parts = []
            while size_bytes and (part := self._fs.pread(fd, size_bytes, start)):
                parts.append(part)
                start, size_bytes = start + len(part), size_bytes - len(part)
        if size_bytes:
            raise ObjectStoreError(self.url, key, f"it ends {size_bytes} bytes too early", False)
        return b"".join(parts)

    def put(self, key: str, data: Data) -> None:
        """As `Bucket.put`: on disk when it returns."""
        path = self._file(key)
        self._pace.wait(len(data))
        with self._telling(key, "written"):
            self._make_folder(os.path.dirname(path))
            replace_file(self._fs, path, cast("bytes", data))

    def swap(self, key: str, data: Data, tag: str | None) -> str:
        """As `Bucket.swap`."""
        path = self._file(key)
        with self._telling(key, "written"):
            self._make_folder(os.path.dirname(path))
            with ProcessLock(self._fs, path + FILE_LOCK_SUFFIX).hold():
                try:
                    there: str | None = _tag(read_file(self._fs, path))
                except FileNotFoundError:
                    there = None
                if there != tag:
                    raise ObjectChanged(self.url, key)
                replace_file(self._fs, path, cast("bytes", data))
        return _tag(data)

    def delete(self, keys: Iterable[str]) -> None:
        """As `Bucket.delete`."""
        for key in keys:
            with contextlib.suppress(ObjectMissing), self._telling(key, "deleted"):
                self._fs.unlink(self._file(key))

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """As `Bucket.list`; files that are being written, and locks, are none."""
        with self._telling(prefix or "/", "listed"):
            yield from self._list("", prefix)

    def _list(self, below: str, prefix: str) -> Iterator[Listed]:
        folder = f"{self._path}/{below}" if below else self._path
        try:
            names = self._fs.listdir(folder)
        except FileNotFoundError:
            return
        for name in names:
            key = f"{below}/{name}" if below else name
            if not (key.startswith(prefix) or prefix.startswith(key + "/")):
                continue
            try:
                if self._fs.is_folder(f"{self._path}/{key}"):
                    yield from self._list(key, prefix)
                elif key.startswith(prefix) and not name.endswith(_OURS):
                    found = self._fs.stat(f"{self._path}/{key}")
                    yield Listed(key, found.st_size, found.st_mtime_ns // 1_000_000)
            except FileNotFoundError:  # deleted meanwhile
                continue

    def _file(self, key: str) -> str:
        why = check_relative_path(key)
        if not why and key.endswith(_OURS):
            why = "such names are for what is being written"
        if why:
            raise ObjectStoreError(self.url, repr(key), f"no name of an object: {why}", False)
        return f"{self._path}/{key}"

    def _make_folder(self, folder: str) -> None:
        """Make it and those above, durably: somebody may have made them, and died before that."""
        self._check_place()
        if self._path not in self._synced:
            make_folders_durably(self._fs, self._path)
            self._synced.add(self._path)
        above: list[str] = []
        while folder not in self._synced:
            above.append(folder)
            folder = os.path.dirname(folder)
        for made in reversed(above):
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(made)
            self._fs.sync_folder(os.path.dirname(made))
            self._synced.add(made)

    def _check_place(self) -> None:
        """Refuse to put anything into a store: its topics are folders, too."""
        if self._is_checked:
            return
        place = self._path
        while True:
            if self._fs.exists(f"{place}/{STORE_FILE}"):
                raise ObjectStoreError(self.url, "put", f"{place} is a store itself; choose a folder elsewhere", False)
            if place == os.path.dirname(place):
                break
            place = os.path.dirname(place)
        self._is_checked = True

    @contextlib.contextmanager
    def _telling(self, key: str, done: str) -> Iterator[None]:
        try:
            yield
        except DiskFull as error:
            raise ObjectStoreError(self.url, key, "no room on the disk; free some space and try again") from error
        except OSError as error:
            if isinstance(error, FileNotFoundError) and done != "written":
                raise ObjectMissing(self.url, key) from None
            if isinstance(error, FileNotFoundError):  # it was there a moment ago
                self._synced.clear()
            why = f"it cannot be {done}: {error.strerror or error}"
            raise ObjectStoreError(self.url, key, why, error.errno not in _LASTING) from error


def _tag(data: Data) -> str:
    return xxhash.xxh3_128_hexdigest(data)
