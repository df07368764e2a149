"""Staging: many workers encode and write batches that no reader sees, and one commit publishes all of them.

    @staging/<job>/run-<number>-<name>              who works on the job: the highest number is the one that counts
    @staging/<job>/<run>-<task>-<random>.batches    finished batches, as `format.batch` has them, in no log yet

A task that is done again writes another file; who publishes says which files count. A run that is
new takes the next number, which fences the older ones and lets it remove what they left behind.
Nothing here is synced: what is not published is staged again after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from segmentlog.errors import DiskFull, InvalidRecord, ProducerFenced, SegmentlogError, UnknownTopic
from segmentlog.format.encode import EncodedBatch, read_encoded
from segmentlog.format.names import STAGING_FOLDER, check_topic_name, group_folder_name
from segmentlog.log.append.encoding import Columns
from segmentlog.policy.partitioner import HashPartitioner, Partitioner
from segmentlog.records import TopicPartition
from segmentlog.staging.records import ListRecords, Partitions, StagedRecords
from segmentlog.storage.forks import held_open
from segmentlog.storage.fs import NO_ROOM, FileSystem, write_all
from segmentlog.storage.locks import EXCLUSIVE, held

if TYPE_CHECKING:
    from segmentlog.producing.producer import Producer
    from segmentlog.topics.topics import Topic

STAGED_SUFFIX: Final = ".batches"
ABANDONED_AFTER_S: Final = 7 * 24 * 3600
"""Files of a job that nobody wrote to for so long are those of one that died."""
_RUN_PREFIX: Final = "run-"
_BATCH_BYTES: Final = 512 * 1024
_PENDING_BYTES: Final = 64 << 20
_PUBLISHED_AT_ONCE_BYTES: Final = 64 << 20
_REMOVE_ATTEMPTS: Final = 5


class StagedRun(msgspec.Struct, frozen=True, array_like=True):
    """Batches of one partition that lie in a file one after another."""

    topic: str
    partition: int
    position: int
    batch_count: int
    record_count: int


class Staged(msgspec.Struct, frozen=True):
    """What one task has written: a file, and what is where in it."""

    path: str
    task: int
    runs: tuple[StagedRun, ...]

    @property
    def record_count(self) -> int:
        return sum(run.record_count for run in self.runs)


# ---------------------------------------------------------------- the folder of a job


class StagingFolder:
    """The folder in which a job's tasks write; of every worker that sees the store's folder."""

    def __init__(self, fs: FileSystem, store_path: str, job: str) -> None:
        self._fs = fs
        self._job = job
        self.path = f"{store_path}/{STAGING_FOLDER}/{group_folder_name(job)}"

    def claim(self, run: str) -> int:
        """The number of a run, which becomes the newest when it is new: the older ones' files are removed then.

        Raises `ProducerFenced` when another run has become the newest since.
        """
        self.make()
        run = group_folder_name(run)  # as it is read back from the folder
        with self._locked():
            known = self._runs()
            if run not in known:
                self._remove_files()
                known[run] = max(known.values(), default=0) + 1
                self._write(f"{_RUN_PREFIX}{known[run]:010d}-{run}")
            self._check(run, known)
            return known[run]

    def check(self, run: str) -> None:
        """Raise `ProducerFenced` when another run has become the newest."""
        self._check(group_folder_name(run), self._runs())

    def _check(self, run: str, known: dict[str, int]) -> None:
        newest = max(known.values(), default=0)
        mine = known.get(run, 0)
        if mine < newest:
            raise ProducerFenced(self._job, mine, newest, "another run of the same job has started since")

    def file_for(self, run_number: int, task: int) -> str:
        """A path that no other attempt of the task uses."""
        return f"{self.path}/{run_number}-{task}-{secrets.token_hex(8)}{STAGED_SUFFIX}"

    def discard(self, staged: Staged) -> None:
        """Remove what one task has staged."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(staged.path)

    def clear(self, run: str | None = None) -> None:
        """Remove what a run has staged, and nothing that is a newer one's; None: all. Keeps who may stage."""
        with contextlib.suppress(FileNotFoundError):
            if run is None:
                self._remove_files()
            elif (number := self._runs().get(group_folder_name(run))) is not None:
                self._remove_files(f"{number}-")

    def remove(self) -> None:
        """Remove all of it: the job is done, or given up."""
        for _ in range(_REMOVE_ATTEMPTS):
            try:
                self._fs.remove_tree(self.path)
                return
            except FileNotFoundError:
                pass  # all of it, or a file that a task which was given up has just removed itself
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # or such a task has just made one
                    raise

    def make(self) -> None:
        """Make it, unless it is there."""
        for folder in (os.path.dirname(self.path), self.path):
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(folder)

    def _runs(self) -> dict[str, int]:
        runs = {}
        for name in self._fs.listdir(self.path):
            if name.startswith(_RUN_PREFIX):
                number, _, run = name.removeprefix(_RUN_PREFIX).partition("-")
                runs[run] = int(number)
        return runs

    def _remove_files(self, prefix: str = "") -> None:
        for name in self._fs.listdir(self.path):
            if name.startswith(prefix) and name.endswith(STAGED_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(f"{self.path}/{name}")

    def _write(self, name: str) -> None:
        fd = self._fs.open(f"{self.path}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._fs.close(fd)
        self._fs.sync_folder(self.path)

    @held
    def _locked(self) -> Iterator[None]:
        with held_open(self._fs, self.path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            self._fs.flock(fd, EXCLUSIVE)
            yield


def sweep_abandoned(fs: FileSystem, store_path: str, now_s: float | None = None) -> None:
    """Remove the staged files of jobs that died: those that nobody wrote to for `ABANDONED_AFTER_S`."""
    folder = f"{store_path}/{STAGING_FOLDER}"
    oldest = (time.time() if now_s is None else now_s) - ABANDONED_AFTER_S
    with contextlib.suppress(FileNotFoundError):
        for job in fs.listdir(folder):
            with contextlib.suppress(OSError):  # somebody else is at it
                names = fs.listdir(f"{folder}/{job}")
                if max((fs.stat(f"{folder}/{job}/{name}").st_mtime for name in names), default=oldest) > oldest:
                    continue
                if any(name.startswith(_RUN_PREFIX) for name in names):  # a query that may come back: so keep the fence
                    for name in names:
                        if name.endswith(STAGED_SUFFIX):
                            fs.unlink(f"{folder}/{job}/{name}")
                elif fs.stat(f"{folder}/{job}").st_mtime <= oldest:
                    fs.remove_tree(f"{folder}/{job}")


# ---------------------------------------------------------------- a task


class StagedFile:
    """The file that one task writes: batches, one after another. For one thread."""

    def __init__(self, fs: FileSystem, path: str, task: int) -> None:
        self._fs = fs
        self._path = path
        self._task = task
        self._runs: list[StagedRun] = []
        self._position = 0
        self._fd = fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, tp: TopicPartition, batch: EncodedBatch, base_offset: int = 0) -> None:
        """Write a batch, which knows the offset that it is to have, or none yet. Raises `DiskFull`."""
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
        """Close it, and say what is in it."""
        self.close()
        return Staged(self._path, self._task, tuple(self._runs))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            self._fs.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """The task failed: nothing of it is left."""
        self.close()
        with contextlib.suppress(OSError):
            self._fs.unlink(self._path)


class _Pending:
    """Records of one partition that wait to become a batch."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.size_bytes = 0


class Stager:
    """Spreads records over partitions as a producer does, and stages them as finished batches. For one thread.

    topic_of     `LogStore.topic`: how many partitions a topic has, and its settings
    path         of the file to write
    task         number of the task: batches are published in the order of tasks
    allow_null_values  take null values for topics that are not compacted, too
    """

    def __init__(
        self,
        topic_of: Callable[[str], Topic],
        fs: FileSystem,
        path: str,
        task: int,
        *,
        partitioner: Partitioner | None = None,
        allow_null_values: bool = False,
    ) -> None:
        self._topic_of = topic_of
        self._file = StagedFile(fs, path, task)
        self._task = task
        self._partitioner = partitioner or HashPartitioner()
        self._allow_null_values = allow_null_values
        self._topics: dict[str, Topic] = {}
        self._sticky: dict[str, int] = {}
        self._pending: dict[TopicPartition, _Pending] = {}
        self._pending_bytes = 0

    def add(self, topic: str, columns: Columns, size_bytes: int, partitions: Partitions | None = None) -> None:
        """Take records of about ``size_bytes``, in their order; ``partitions`` of -1 are chosen, by key.

        Those that have no timestamp get the time. Raises `InvalidRecord`, `RecordTooLarge`,
        `UnknownTopic`, `DiskFull`.
        """
        records = ListRecords(columns.stamped(time.time_ns() // 1_000_000))
        self.add_records(topic, records, size_bytes, partitions)

    def add_records(
        self, topic: str, records: StagedRecords, size_bytes: int, partitions: Partitions | None = None
    ) -> None:
        """The same for records of any kind; one kind for each topic."""
        count = self._topic(topic).partition_count
        numbers = self._partitions_of(topic, records, count, partitions)
        per_record = size_bytes / max(len(numbers), 1)
        counts = np.bincount(numbers, minlength=count)
        if int(counts.max(initial=0)) == len(numbers):
            if len(numbers):
                self._take(TopicPartition(topic, int(numbers[0])), records, size_bytes)
            return
        order = np.argsort(numbers, kind="stable")
        ends = np.cumsum(counts)
        for number in counts.nonzero()[0].tolist():
            rows = order[ends[number] - counts[number] : ends[number]]
            self._take(TopicPartition(topic, number), records.take(rows), int(per_record * len(rows)))

    def _topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            check_topic_name(name)
            topic = self._topics[name] = self._topic_of(name)
        return topic

    def _partitions_of(
        self, topic: str, records: StagedRecords, count: int, partitions: Partitions | None
    ) -> npt.NDArray[np.int32]:
        sticky = self._sticky.get(topic, self._task - 1) + 1
        self._sticky[topic] = sticky
        if partitions is not None and len(partitions):
            lowest, highest = int(partitions.min()), int(partitions.max())
            if lowest < -1 or highest >= count:
                wrong = lowest if lowest < -1 else highest
                raise UnknownTopic(topic, f"it has no partition {wrong}, only 0 to {count - 1}")
            if lowest >= 0:
                return partitions
        chosen = records.partitions(self._partitioner, count, sticky % count)
        return chosen if partitions is None else np.where(partitions < 0, chosen, partitions).astype(np.int32)

    def _take(self, tp: TopicPartition, records: StagedRecords, size_bytes: int) -> None:
        pending = self._pending.setdefault(tp, _Pending())
        pending.chunks.append(records)
        pending.size_bytes += size_bytes
        self._pending_bytes += size_bytes
        if pending.size_bytes >= _BATCH_BYTES:
            self._stage(tp)
        while self._pending_bytes > _PENDING_BYTES:
            self._stage(max(self._pending, key=lambda one: self._pending[one].size_bytes))

    def _stage(self, tp: TopicPartition) -> None:
        pending = self._pending.pop(tp)
        self._pending_bytes -= pending.size_bytes
        config = self._topics[tp.topic].config
        first, *others = pending.chunks
        records = first.followed_by(others) if others else first
        if not config.compacts and not self._allow_null_values:
            index = records.first_null_value()
            if index is not None:
                wanted = f"a value: topic {tp.topic!r} is not compacted, and a null would delete nothing"
                raise InvalidRecord("value", index, "null", wanted)
        count = len(records)
        parts = max(1, min(round(pending.size_bytes / _BATCH_BYTES), count))
        for part in range(parts):
            start, stop = count * part // parts, count * (part + 1) // parts
            for batch in records.part(start, stop).encode(config):
                self._file.write(tp, batch)

    def finish(self) -> Staged:
        """Stage what is left, and say what is in the file."""
        for tp in sorted(self._pending):
            self._stage(tp)
        return self._file.finish()

    def discard(self) -> None:
        """The task failed: nothing of it is left."""
        self._file.discard()


# ---------------------------------------------------------------- publishing


def publish(producer: Producer, fs: FileSystem, staged: Sequence[Staged]) -> int:
    """Append everything that was staged, in the order of tasks; how many records. In the producer's transaction."""
    files = sorted((one for one in staged if one.runs), key=lambda one: one.task)
    runs: dict[TopicPartition, list[tuple[str, StagedRun]]] = {}
    for one in files:
        for run in one.runs:
            runs.setdefault(TopicPartition(run.topic, run.partition), []).append((one.path, run))
    views = {one.path: map_staged(fs, one.path) for one in files}
    for tp in sorted(runs):
        batches: list[EncodedBatch] = []
        size_bytes = 0
        for path, run in runs[tp]:
            for batch in _read_run(views[path], path, run):
                batches.append(batch)
                size_bytes += batch.size_bytes
            if size_bytes >= _PUBLISHED_AT_ONCE_BYTES:
                producer.send_encoded(*tp, batches)
                batches, size_bytes = [], 0
        if batches:
            producer.send_encoded(*tp, batches)
    return sum(one.record_count for one in files)


def _read_run(view: memoryview, path: str, run: StagedRun) -> Iterator[EncodedBatch]:
    position = run.position
    for _ in range(run.batch_count):
        batch = read_encoded(view, position, path)
        position += batch.size_bytes
        yield batch


def map_staged(fs: FileSystem, path: str) -> memoryview:
    """What a task has written. Raises `SegmentlogError` where the driver does not see the file."""
    try:
        fd = fs.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        why = "it is not there: whoever publishes must see the file system that the workers write to"
        raise SegmentlogError(f"staged file {path}: {why}") from None
    try:
        return fs.map_file(fd, fs.fstat(fd).st_size)
    finally:
        fs.close(fd)
