"""Stage records: many workers write encoded batches to files, and one transaction then appends all of them to the log.

`segmentlog.staging.staging_folder` describes the folder of these files. The files are not synced: after a crash of the
machine, the job stages unpublished records again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from segmentlog.errors import InvalidRecord, UnknownTopic
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.file_names import check_topic_name
from segmentlog.policy.partitioner import HashPartitioner, Partitioner, Partitions, rows_by_partition
from segmentlog.records import TopicPartition
from segmentlog.staging.staged_files import Staged, StagedFile, StagedRun, map_staged, read_run
from segmentlog.staging.staged_records import StagedRecords
from segmentlog.storage.fs import FileSystem

if TYPE_CHECKING:
    from segmentlog.producing.producer import Producer
    from segmentlog.topics.topic_registry import Topic

_BATCH_BYTES: Final = 512 * 1024
_PENDING_BYTES: Final = 64 << 20
_PUBLISHED_AT_ONCE_BYTES: Final = 64 << 20


# ---------------------------------------------------------------- a task


class _Pending:
    """Records of one partition that are not encoded yet."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.size_bytes = 0


class Stager:
    """Assigns records to partitions as a producer does, and stages them as finished batches. Not thread-safe.

    topic_of           returns a topic by its name, usually `LogStore.topic`
    path               path of the file to write
    task               number of the task: batches are published in the order of tasks
    allow_null_values  also accept null values for topics that are not compacted
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

    def add(self, topic: str, records: StagedRecords, size_bytes: int, partitions: Partitions | None = None) -> None:
        """Stage records of about ``size_bytes``, in order.

        ``partitions`` has the partition of each record. -1 selects the partition by the record's key; None does so for
        all records. All records of a topic must be of one class.

        Raises `InvalidRecord`, `RecordTooLarge`, `UnknownTopic`, `DiskFull`.
        """
        count = self._topic(topic).partition_count
        numbers = self._partitions_of(topic, records, count, partitions)
        for number, rows in rows_by_partition(numbers).items():
            tp = TopicPartition(topic, number)
            if rows is None:
                self._take(tp, records, size_bytes)
            else:
                self._take(tp, records.take(rows), size_bytes * len(rows) // len(numbers))

    def _topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            check_topic_name(name)
            topic = self._topics[name] = self._topic_of(name)
        return topic

    def _partitions_of(
        self, topic: str, records: StagedRecords, count: int, partitions: Partitions | None
    ) -> Partitions:
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
            self._stage(max(self._pending, key=lambda tp: self._pending[tp].size_bytes))

    def _stage(self, tp: TopicPartition) -> None:
        pending = self._pending.pop(tp)
        self._pending_bytes -= pending.size_bytes
        config = self._topics[tp.topic].config
        first, *others = pending.chunks
        records = first.followed_by(others) if others else first
        if not config.compacts and not self._allow_null_values:
            index = records.first_null_value()
            if index is not None:
                expected = f"a value: topic {tp.topic!r} is not compacted, and a null would delete nothing"
                raise InvalidRecord("value", index, "null", expected)
        count = len(records)
        parts = max(1, min(round(pending.size_bytes / _BATCH_BYTES), count))
        for part in range(parts):
            start, stop = count * part // parts, count * (part + 1) // parts
            for batch in records.part(start, stop).encode(config):
                self._file.write(tp, batch)

    def finish(self) -> Staged:
        """Stage the remaining records, and close the file; return its path and its batches by partition."""
        for tp in sorted(self._pending):
            self._stage(tp)
        return self._file.finish()

    def discard(self) -> None:
        """Delete the file after a failure of the task."""
        self._file.discard()


# ---------------------------------------------------------------- publishing


def publish(producer: Producer, fs: FileSystem, staged: Sequence[Staged]) -> int:
    """Append all staged batches in the order of tasks, in the producer's transaction; return the number of records."""
    files = sorted((file for file in staged if file.runs), key=lambda file: file.task)
    runs: dict[TopicPartition, list[tuple[str, StagedRun]]] = {}
    for file in files:
        for run in file.runs:
            runs.setdefault(TopicPartition(run.topic, run.partition), []).append((file.path, run))
    views = {file.path: map_staged(fs, file.path) for file in files}
    for tp in sorted(runs):
        batches: list[EncodedBatch] = []
        size_bytes = 0
        for path, run in runs[tp]:
            for _, batch in read_run(views[path], path, run):
                batches.append(batch)
                size_bytes += batch.size_bytes
            if size_bytes >= _PUBLISHED_AT_ONCE_BYTES:
                producer.send_encoded(*tp, batches)
                batches, size_bytes = [], 0
        if batches:
            producer.send_encoded(*tp, batches)
    return sum(file.record_count for file in files)
