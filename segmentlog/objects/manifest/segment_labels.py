"""Labels of segment files: an extended attribute that shows which bytes of the object store a local file has.

    user.segmentlog    <inode> <size> <time of the last write, ns> <hash>

The hash is the XXH3-128 of the position, size and checksum of each range of the file.

A process labels a file after it has written all bytes, or compared them with their checksums, and has synced the file.
While the label names the stamp of the file, no later process compares the file again. So a takeover, a restarted
replica and a restarted owner take as long for a large store as for a small one. A copy of the file has another inode,
and any write changes the size or the time: the label then does not count. On a file system without extended attributes
files are compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

import xxhash

from segmentlog.format.manifest import Chunk
from segmentlog.objects.manifest.object_ranges import ObjectRanges
from segmentlog.storage.file_operations import sync_data
from segmentlog.storage.fs import FileSystem, opened

Checksums = tuple[tuple[int, int, str], ...]
"""Position, size in bytes and XXH3-64 of each range of a segment file."""

_NOTHING: Final = b""


def checksums_of(ranges: ObjectRanges) -> Checksums:
    """Return the checksums of a segment file with these ranges."""
    return tuple((part.position, part.size_bytes, part.xxh3_64) for part in ranges)


def checksums_of_chunks(chunks: Iterable[Chunk]) -> Checksums:
    """Return the checksums of a segment file that consists of these chunks."""
    return tuple(sorted((chunk.position, chunk.size_bytes, chunk.xxh3_64) for chunk in chunks))


def label_file(fs: FileSystem, fd: int, checksums: Checksums) -> None:
    """Label an open segment file whose content matches ``checksums`` and is synced.

    Do nothing if the file has another size than the checksums: bytes after the last range are unknown.
    """
    found = fs.fstat(fd)
    if checksums and found.st_size == sum(checksums[-1][:2]):
        fs.set_label(fd, _label(found, checksums))


def sync_and_label(fs: FileSystem, path: str, checksums: Checksums) -> None:
    """Sync the segment file at ``path``, whose whole content matches ``checksums``, and label it.

    Raise `DiskFailed`, OSError.
    """
    with opened(fs, path, os.O_RDONLY | os.O_CLOEXEC) as fd:
        sync_data(fs, fd, path)
        label_file(fs, fd, checksums)


def has_label(fs: FileSystem, path: str, checksums: Checksums) -> bool:
    """Return whether the file at ``path`` is labelled with these checksums, and unchanged since. Raise OSError."""
    if not checksums:
        return False
    try:
        with opened(fs, path, os.O_RDONLY | os.O_CLOEXEC) as fd:
            label = fs.label(fd)
            return label != _NOTHING and label == _label(fs.fstat(fd), checksums)
    except FileNotFoundError:
        return False


def _label(found: os.stat_result, checksums: Checksums) -> bytes:
    stamp = f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"
    return f"{stamp} {xxhash.xxh3_128_hexdigest(repr(checksums).encode())}".encode()
