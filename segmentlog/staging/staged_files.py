"""Files of batches, one for each task. A list of runs records which batches belong to which partition."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import msgspec

from segmentlog.errors import DiskFull, SegmentlogError
from segmentlog.format.batch import decode_header
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.stored_batch import read_stored_batch
from segmentlog.records import TopicPartition
from segmentlog.storage.file_operations import write_all
from segmentlog.storage.fs import NO_ROOM, FileSystem
from segmentlog.storage.interrupt_check import failures_ignored


class StagedRun(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of batches of one partition in a staged file, which starts at byte ``position``."""

    topic: str
    partition: int
    position: int
    batch_count: int
    record_count: int


class Staged(msgspec.Struct, frozen=True):
    """The path of the file that one task has written, and the batches in it: their partitions and positions."""

    path: str
    task: int
    runs: tuple[StagedRun, ...]

    @property
    def record_count(self) -> int:
        return sum(run.record_count for run in self.runs)


class StagedFile:
    """The file that one task writes: a sequence of batches. Not thread-safe."""

    def __init__(self, fs: FileSystem, path: str, task: int) -> None:
        self._fs = fs
        self._path = path
        self._task = task
        self._runs: list[StagedRun] = []
        self._position = 0
        self._fd = fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, tp: TopicPartition, batch: EncodedBatch, base_offset: int = 0) -> None:
        """Write a batch, with its ``base_offset`` if the records are restored at their offsets. Raises `DiskFull`."""
        buffers = (batch.placed_at(base_offset, 0), batch.payload)
        try:
            write_all(self._fs, self._fd, buffers, self._position)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(self._path, batch.size_bytes) from error
            raise
        last = self._runs[-1] if self._runs else None
        if last is not None and (last.topic, last.partition) == tp:
            counts = last.batch_count + 1, last.record_count + batch.record_count
            self._runs[-1] = StagedRun(*tp, last.position, *counts)
        else:
            self._runs.append(StagedRun(*tp, self._position, 1, batch.record_count))
        self._position += batch.size_bytes

    def finish(self) -> Staged:
        """Close the file; return its path and its batches by partition."""
        self.close()
        return Staged(self._path, self._task, tuple(self._runs))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            self._fs.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Delete the file after a failure of the task."""
        self.close()
        with failures_ignored():
            self._fs.unlink(self._path)


def read_run(view: memoryview, path: str, run: StagedRun) -> Iterator[tuple[int, EncodedBatch]]:
    """Yield (base offset, batch) for each batch of a run. The batches are views of the file. Raises `CorruptBatch`."""
    position = run.position
    for _ in range(run.batch_count):
        base_offset = decode_header(view, position, path).base_offset
        batch = read_stored_batch(view, position, path)
        position += batch.size_bytes
        yield base_offset, batch


def map_staged(fs: FileSystem, path: str) -> memoryview:
    """Map a staged file into memory. Raises `SegmentlogError` if this process has no access to the file."""
    try:
        fd = fs.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        why = "it does not exist: the publishing process must see the file system that the workers write to"
        raise SegmentlogError(f"staged file {path}: {why}") from None
    try:
        return fs.map_file(fd, fs.fstat(fd).st_size)
    finally:
        fs.close(fd)
