"""Segments whose bytes lie in an object store alone: a hole in the place of the log, and the stub beside it.

    B.remote        durable, beside the whole log: it does not count yet
    B.log           a hole of the same size and time, durable, renamed over the log: from here on the stub counts
    (no B.remote)   after the log itself, or another one, was renamed over the hole

A crash between any two of these leaves the one or the other. Files are replaced and never emptied in place: whoever has
one mapped reads on in what it was. See `format.stub` for the stub, and `FileSystem.ranged` for who reads.
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
    """Where the stub of a segment's log lies."""
    return path.removesuffix(LOG_SUFFIX) + REMOTE_SUFFIX


def read_stub(fs: FileSystem, path: str) -> tuple[Stub, int] | None:
    """(where the bytes of the log at ``path`` lie, the inode of its hole); None when they are here.

    Raises FileNotFoundError when there is no such log, `CorruptBatch` for a hole whose stub is damaged, OSError.
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
        raise CorruptBatch(stub_path(path), 0, "where the segment lies in the object store", why)
    return (stub, found.st_ino) if stub.size_bytes == found.st_size else None


def is_remote(fs: FileSystem, path: str, mapped: os.stat_result) -> bool:
    """Whether a file that begins with zeros is a hole, or is not the one any more that was mapped: look once more.

    Raises `ObjectStoreError` for a hole that nobody has said how to reach.
    """
    found = read_stub(fs, path)
    if found is None:
        return fs.stat(path).st_ino != mapped.st_ino
    if fs.reach_by is None:
        stub = found[0]
        why = "the segment lies there alone, and its files are looked at by somebody who does not ask for it"
        raise ObjectStoreError(stub.url, stub.key, why, False)
    return True


# ---------------------------------------------------------------- to the object store, and back


def write_stub(fs: FileSystem, path: str, stub: Stub) -> None:
    """Durable when it returns, and not in force yet. Raises `DiskFull`, OSError."""
    replace_file(fs, stub_path(path), encode_stub(stub))


def remove_stub(fs: FileSystem, path: str) -> None:
    """The log is here, or is no more. After the log itself has its place: a hole is never without its stub."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(stub_path(path))


@contextlib.contextmanager
def prepared_hole(fs: FileSystem, path: str, size_bytes: int, modified_ns: int) -> Iterator[str]:
    """The name of a durable hole that may be renamed over the log at ``path``; it goes if it was not."""
    with opened_temporary(fs, path) as (name, fd):
        fs.ftruncate(fd, 0)
        fs.ftruncate(fd, size_bytes)
        fs.set_modified(fd, modified_ns)
        fs.fsync(fd)  # or the power could leave an empty file under the name
        try:
            yield name
        finally:
            _drop(fs, name, fd)


@contextlib.contextmanager
def prepared_log(fs: FileSystem, path: str, stub: Stub, ranges: Ranges, modified_ns: int) -> Iterator[str]:
    """The name of a durable file with the bytes that lie in the object store; it goes if it was not renamed.

    Raises `ObjectStoreError`, `SegmentGone` when the object holds others by now, `DiskFull`, OSError.
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
                    raise SegmentGone(stub.url, stored.key, "damaged: its checksum is not that of the segment it was")
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
    """Remove a prepared file unless it was put in place: somebody else's may have the name by then."""
    with failures_ignored():
        if os.path.samestat(fs.stat(name), fs.fstat(fd)):
            fs.unlink(name)
