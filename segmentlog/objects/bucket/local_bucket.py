"""A folder that serves as an object store, for example on another disk or on a network file system.

Each object is a file. A put writes a temporary file, syncs and renames it, and then syncs its folder and those parent
folders that this process has not synced yet. A conditional put takes turns with other processes (`file_swap`), and no
process that is stopped or killed keeps others from their turns. The tag is a checksum of the content.
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
from segmentlog.objects.bucket.base import Data, ObjectInfo, ObjectMissing, PreconditionFailed
from segmentlog.objects.bucket.file_swap import remove_file, swap_file
from segmentlog.objects.bucket.rate_limit import RateLimiter
from segmentlog.storage.file_operations import make_folders_durably, read_file, replace_file
from segmentlog.storage.fs import FileSystem, opened

_RESERVED_SUFFIXES: Final = (TEMPORARY_SUFFIX, FILE_LOCK_SUFFIX)
_LASTING: Final = frozenset((
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL,
))  # fmt: skip
"""Errors that a retry cannot fix: they last until a person changes something."""


class LocalBucket:
    """A `Bucket` in a folder, which the first put creates. Thread-safe."""

    def __init__(self, path: str, fs: FileSystem | None = None, *, limiter: RateLimiter | None = None) -> None:
        self._limiter = limiter or RateLimiter()
        self.url = "file://" + quote(os.fsencode(path))
        self._path = path
        self._fs = fs or FileSystem()
        self._synced: set[str] = set()
        """Folders whose directory entries this process has synced."""
        self._is_checked = False

    def __repr__(self) -> str:
        return f"LocalBucket({self._path!r})"

    def get(self, key: str) -> tuple[bytes, str]:
        """Implement `Bucket.get`. The tag is a checksum."""
        with self._translating_errors(key, "read"):
            data = read_file(self._fs, self._file(key))
        return data, _tag(data)

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        """Implement `Bucket.get_range`."""
        with self._translating_errors(key, "read"), opened(self._fs, self._file(key), os.O_RDONLY | os.O_CLOEXEC) as fd:
            parts = []
            while size_bytes and (part := self._fs.pread(fd, size_bytes, start)):
                parts.append(part)
                start, size_bytes = start + len(part), size_bytes - len(part)
        if size_bytes:
            raise ObjectStoreError(self.url, key, f"the object is {size_bytes} bytes shorter than expected", False)
        return b"".join(parts)

    def put(self, key: str, data: Data) -> None:
        """Implement `Bucket.put`. The object is on disk when this call returns."""
        path = self._file(key)
        self._limiter.wait(len(data))
        with self._translating_errors(key, "written"):
            self._create_folder(os.path.dirname(path))
            replace_file(self._fs, path, cast("bytes", data))

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        """Implement `Bucket.compare_and_swap`."""
        path = self._file(key)
        with self._translating_errors(key, "written"):
            self._create_folder(os.path.dirname(path))
            if not swap_file(self._fs, path, cast("bytes", data), lambda: self._tag_of(path) == tag):
                raise PreconditionFailed(self.url, key)
        return _tag(data)

    def _tag_of(self, path: str) -> str | None:
        try:
            return _tag(read_file(self._fs, path))
        except FileNotFoundError:
            return None

    def delete(self, keys: Iterable[str]) -> None:
        """Implement `Bucket.delete`; remove the lock or the turns of `compare_and_swap`, too."""
        for key in keys:
            path = self._file(key)
            with contextlib.suppress(ObjectMissing), self._translating_errors(key, "deleted"):
                remove_file(self._fs, path)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Implement `Bucket.list`. Leave out turns of `compare_and_swap`, and files that are being written."""
        with self._translating_errors(prefix or "/", "listed"):
            yield from self._list("", prefix)

    def _list(self, below: str, prefix: str) -> Iterator[ObjectInfo]:
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
                elif key.startswith(prefix) and not name.endswith(_RESERVED_SUFFIXES):
                    found = self._fs.stat(f"{self._path}/{key}")
                    yield ObjectInfo(key, found.st_size, found.st_mtime_ns // 1_000_000)
            except FileNotFoundError:  # deleted meanwhile
                continue

    def _file(self, key: str) -> str:
        why = check_relative_path(key)
        if not why and key.endswith(_RESERVED_SUFFIXES):
            why = "this suffix is reserved for temporary files and locks"
        if why:
            raise ObjectStoreError(self.url, repr(key), f"not a valid object name: {why}", False)
        return f"{self._path}/{key}"

    def _create_folder(self, folder: str) -> None:
        """Create a folder and its parents durably.

        Also sync folders that exist: the process that created them may have died before its sync.
        """
        self._refuse_store_folder()
        if self._path not in self._synced:
            make_folders_durably(self._fs, self._path)
            self._synced.add(self._path)
        missing: list[str] = []
        while folder not in self._synced:
            missing.append(folder)
            folder = os.path.dirname(folder)
        for created in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(created)
            self._fs.sync_folder(os.path.dirname(created))
            self._synced.add(created)

    def _refuse_store_folder(self) -> None:
        """Raise `ObjectStoreError` if this folder is a store or inside one: objects would look like topics."""
        if self._is_checked:
            return
        place = self._path
        while True:
            if self._fs.exists(f"{place}/{STORE_FILE}"):
                why = f"{place} is a segmentlog store; choose a folder outside it"
                raise ObjectStoreError(self.url, "put", why, False)
            if place == os.path.dirname(place):
                break
            place = os.path.dirname(place)
        self._is_checked = True

    @contextlib.contextmanager
    def _translating_errors(self, key: str, done: str) -> Iterator[None]:
        try:
            yield
        except DiskFull as error:
            raise ObjectStoreError(self.url, key, "the disk is full; free some space and try again") from error
        except OSError as error:
            if isinstance(error, FileNotFoundError) and done != "written":
                raise ObjectMissing(self.url, key) from None
            if isinstance(error, FileNotFoundError):  # another process deleted the folder
                self._synced.clear()
            why = f"it cannot be {done}: {error.strerror or error}"
            raise ObjectStoreError(self.url, key, why, error.errno not in _LASTING) from error


def _tag(data: Data) -> str:
    return xxhash.xxh3_128_hexdigest(data)
