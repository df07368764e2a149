"""Lock, list, fsync and checksum the folders that pipelines write to."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Final

import xxhash

from segmentlog.errors import SegmentlogError
from segmentlog.storage.file_locks import is_current
from segmentlog.storage.fork_safety import opened_lockable
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING
from segmentlog.storage.untrusted_folder import is_plain_file, open_plain

_PART_BYTES: Final = 1 << 20


def resolve_mounted_folder(text: str, why: str) -> str:
    """Return the absolute path of a folder. Raises `SegmentlogError`, with the reason ``why``, for ``s3://`` URLs."""
    if text.startswith("file:"):
        text = "/" + text.removeprefix("file:").lstrip("/")
    if re.match("[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise SegmentlogError(f"{text}: the folder must be on a file system that is mounted on this machine: {why}")
    return os.path.abspath(text)


def spark_uri(path: str) -> str:
    """Return a path as a URI of the local file system, independent of Spark's default file system."""
    return f"file://{path}"


def spark_uris(paths: Iterable[str]) -> list[str]:
    """Return paths as URIs to read, with ``*`` and other glob characters escaped."""
    return [spark_uri(re.sub(r"([*?\[\]{}\\])", r"\\\1", path)) for path in paths]


@contextlib.contextmanager
def hold_lock(path: str, holder: str) -> Iterator[None]:
    """Lock the file ``path`` inside the block. The kernel releases the lock of a process that dies.

    Raises `SegmentlogError` at once if another process has locked the file. Its message calls that process
    ``holder``, such as "another archiver".
    """
    fs = FileSystem()
    is_plain_file(path)
    while True:
        with opened_lockable(fs, path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as fd:
            try:
                fs.flock(fd, EXCLUSIVE | NON_BLOCKING)
            except BlockingIOError:
                raise SegmentlogError(f"{holder} is running ({path} is locked); wait until it has finished") from None
            if not is_current(fs, fd, path):
                continue  # the previous holder has deleted the file
            yield
            return


def list_data_files(folder: str) -> list[str]:
    """Return the sorted relative paths of the data files in a folder that Spark has written."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(("_", "."))]
        found += [
            os.path.relpath(os.path.join(parent, name), folder) for name in names if not name.startswith(("_", "."))
        ]
    return sorted(found)


def sync_file(fs: FileSystem, path: str) -> None:
    """Fsync a file that another process has written."""
    fd = fs.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fs.fsync(fd)
    finally:
        fs.close(fd)


def sync_folders(fs: FileSystem, paths: Iterable[str]) -> None:
    """Fsync these folders, so that the names in them are durable."""
    for path in sorted(set(paths)):
        fs.sync_folder(path)


def compute_checksum(path: str) -> str:
    """Return XXH3-128 of a file's bytes, as 32 hexadecimal digits.

    Raises `UntrustedPath` if it is not a regular file.
    """
    digest = xxhash.xxh3_128()
    with open(open_plain(FileSystem(), path), "rb") as file:
        while part := file.read(_PART_BYTES):
            digest.update(part)
    return digest.hexdigest()
