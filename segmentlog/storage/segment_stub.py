"""Files of an evicted segment. A *hole* (a file of zeros without disk blocks) replaces its log. A stub names the
objects that contain its bytes.

    B.remote        the stub, durable, beside the whole log: not valid yet
    B.log           a durable hole of the same size and time, renamed over the log: from here on the stub is valid
    (no B.remote)   deleted after the recalled log, or a newer log, was renamed over the hole

A crash between two of these steps leaves the state before or after a step. Files are replaced and never truncated in
place, so a reader that has mapped the log keeps its bytes. The stub's format is in `format.stub`; readers use
`FileSystem.ranged`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import xxhash

from segmentlog.errors import CorruptBatch, DiskFull, ObjectStoreError, SegmentGone
from segmentlog.format.file_names import LOG_SUFFIX, REMOTE_SUFFIX
from segmentlog.format.stub import PROBE_BYTES, MalformedStub, Stub, decode_stub, encode_stub
from segmentlog.storage.file_operations import opened_temporary, read_file, replace_file, write_all
from segmentlog.storage.fs import NO_ROOM, FileSystem, Ranges, opened
from segmentlog.storage.interrupt_check import failures_ignored

_PART_BYTES: Final = 16 << 20


def stub_path(path: str) -> str:
    """Return the path of the stub that belongs to a segment's log."""
    return path.removesuffix(LOG_SUFFIX) + REMOTE_SUFFIX


def read_stub(fs: FileSystem, path: str) -> tuple[Stub, int] | None:
    """Return (stub, inode of the hole) of an evicted segment; None for a local segment.

    Raise FileNotFoundError if the log at ``path`` does not exist, `CorruptBatch` for a hole whose stub is
    damaged, OSError.
    """
    try:
        data = read_file(fs, stub_path(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    stub: Stub | None = None
    why = ""
    try:
        stub = decode_stub(data)
    except MalformedStub as error:
        why = str(error)
    with opened(fs, path, os.O_RDONLY | os.O_CLOEXEC) as fd:
        found = fs.fstat(fd)
        if not found.st_size or any(fs.pread(fd, PROBE_BYTES, 0)):
            return None
    if stub is None:
        raise CorruptBatch(stub_path(path), 0, "the stub of an evicted segment", why)
    return (stub, found.st_ino) if stub.size_bytes == found.st_size else None


def is_evicted_or_replaced(fs: FileSystem, path: str, mapped: os.stat_result) -> bool:
    """Return whether a mapped file that begins with zeros is a hole or was replaced since. If so, the caller must open
    it again.

    Raise `ObjectStoreError` for a hole if ``fs`` has no reader for evicted segments.
    """
    found = read_stub(fs, path)
    if found is None:
        return fs.stat(path).st_ino != mapped.st_ino
    if fs.reach_by is None:
        stub = found[0]
        why = "the segment is evicted, and this process opened its files without access to the object store"
        raise ObjectStoreError(stub.url, stub.key, why, False)
    return True


# ---------------------------------------------------------------- eviction and recall


def write_stub(fs: FileSystem, path: str, stub: Stub) -> None:
    """Write a stub durably. It becomes valid when the hole replaces the log. Raise `DiskFull`, OSError."""
    replace_file(fs, stub_path(path), encode_stub(stub))


def remove_stub(fs: FileSystem, path: str) -> None:
    """Remove the stub of a log that was recalled or deleted. Call this after the recall or deletion: reading a hole
    needs it.
    """
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(stub_path(path))


@contextlib.contextmanager
def prepared_hole(fs: FileSystem, path: str, size_bytes: int, modified_ns: int) -> Iterator[str]:
    """Create a synced file of zeros (a hole) and yield its path. If the caller does not rename the file over the log at
    ``path``, it is removed.
    """
    with opened_temporary(fs, path) as (name, fd):
        fs.ftruncate(fd, 0)
        fs.ftruncate(fd, size_bytes)
        fs.set_modified(fd, modified_ns)
        fs.fsync(fd)  # otherwise a power cut could leave an empty file under the name
        try:
            yield name
        finally:
            _drop(fs, name, fd)


@contextlib.contextmanager
def prepared_log(fs: FileSystem, path: str, stub: Stub, ranges: Ranges, modified_ns: int) -> Iterator[str]:
    """Download the segment's bytes into a durable file and yield its path. If the caller does not rename it, it is
    removed.

    Raise `ObjectStoreError`, `SegmentGone` if the objects hold other bytes now, `DiskFull`, OSError.
    """
    with opened_temporary(fs, path) as (name, fd):
        try:
            fs.ftruncate(fd, 0)
            view, begins = ranges.map(), 0
            for stored in stub.stored.objects:
                digest, ends = xxhash.xxh3_64(), begins + stored.size_bytes
                for start in range(begins, ends, _PART_BYTES):
                    end = min(start + _PART_BYTES, ends)
                    ranges.need(start, end)
                    digest.update(view[start:end])
                    write_all(fs, fd, [view[start:end]], start)
                if digest.hexdigest() != stored.xxh3_64:
                    raise SegmentGone(stub.url, stored.key, "damaged: its checksum differs from the evicted segment's")
                begins = ends
            fs.set_modified(fd, modified_ns)
            fs.fsync(fd)
            yield name
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(path, stub.size_bytes) from error
            raise
        finally:
            _drop(fs, name, fd)


def _drop(fs: FileSystem, name: str, fd: int) -> None:
    """Remove a prepared file, unless it was renamed.

    After the rename, another process may have created a file of the old name.
    """
    with failures_ignored():
        if os.path.samestat(fs.stat(name), fs.fstat(fd)):
            fs.unlink(name)
