"""Write to topics with Spark: tasks stage encoded batches, and the driver publishes all in one transaction.

A query that restarts after a crash may write a published micro-batch again. The note of each transaction holds the id
of its micro-batch, so the second write is recognised and skipped. See `segmentlog.staging.staging`.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

import segmentlog
from segmentlog.errors import SegmentlogError
from segmentlog.spark.arrow_records import convert_rows
from segmentlog.spark.source_options import WriteOptions
from segmentlog.spark.store_opener import StoreLocation, open_store
from segmentlog.staging.staged_files import Staged
from segmentlog.staging.staging import Stager, publish
from segmentlog.staging.staging_folder import StagingFolder, sweep_abandoned
from segmentlog.storage.fs import FileSystem

if TYPE_CHECKING:
    import pyarrow as pa

_QUERY_ID = "sql.streaming.queryId"
_RUN_ID = "spark.jobGroup.id"
# Spark stores the id of the query's run in this property, to cancel its jobs.


class TaskCommitMessage(WriterCommitMessage):
    """Commit message of one task: its staged files, with the job and run that they belong to."""

    def __init__(self, staged: Staged, job: str, run: str) -> None:
        self.staged = staged
        self.job = job
        self.run = run


class BatchWriter(DataSourceArrowWriter):
    """Writer of one DataFrame: all of its rows become visible at once, or none does."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._job = f"spark-job-{uuid.uuid4()}"
        with open_store(StoreLocation(options.path)) as store:
            if options.topic is not None:
                store.topic(options.topic)
        sweep_abandoned(FileSystem(), options.path)
        # The driver creates the folder, not the tasks: a task that Spark has given up may start after its removal.
        self._folder().create()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task. Runs on an executor."""
        return TaskCommitMessage(_stage(self._options, self._folder(), 0, iterator), self._job, "")

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish the staged batches of all tasks. Runs in a Python process of the driver."""
        options = self._options
        try:
            if options.app_id is None:
                _publish(options, _task_messages(messages), None, None)
            else:
                assert options.app_version is not None
                _publish(options, _task_messages(messages), f"spark-app-{options.app_id}", options.app_version)
        finally:
            with contextlib.suppress(OSError):  # an error would make Spark write the published rows again
                self._folder().remove()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the staged files of the job."""
        self._folder().remove()

    def _folder(self) -> StagingFolder:
        return StagingFolder(FileSystem(), self._options.path, self._job)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writer of a streaming query: it appends each micro-batch exactly once."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task. Runs on an executor."""
        context = TaskContext.get()
        query, run = (context.getLocalProperty(name) if context else None for name in (_QUERY_ID, _RUN_ID))
        if not query or not run:
            raise SegmentlogError("Spark passed no query id to the task: use this sink with df.writeStream only")
        job = f"spark-{query}"
        folder = StagingFolder(FileSystem(), self._options.path, job)
        return TaskCommitMessage(_stage(self._options, folder, folder.claim(run), iterator), job, run)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Publish the micro-batch unless it is published already. Runs in a Python process of the driver."""
        done = _task_messages(messages)
        if not done:  # a micro-batch without tasks has no rows
            return
        folder = StagingFolder(FileSystem(), self._options.path, done[0].job)
        folder.check(done[0].run)
        _publish(self._options, done, done[0].job, batchId)
        folder.clear(done[0].run)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Delete the staged files of the micro-batch."""
        fs = FileSystem()
        for task in _task_messages(messages):
            StagingFolder(fs, self._options.path, task.job).discard(task.staged)


def _task_messages(messages: Sequence[WriterCommitMessage | None]) -> list[TaskCommitMessage]:
    return [message for message in messages if isinstance(message, TaskCommitMessage)]


def _stage(options: WriteOptions, folder: StagingFolder, run: int, rows: Iterator[pa.RecordBatch]) -> Staged:
    context = TaskContext.get()
    task = context.partitionId() if context else 0
    fs = FileSystem()
    with open_store(StoreLocation(options.path)) as store:
        stager = Stager(store.topic, fs, folder.file_for(run, task), task, allow_null_values=options.allow_null_values)
        try:
            for batch in rows:
                for topic, records, size_bytes, partitions in convert_rows(batch, options.topic):
                    stager.add(topic, records, size_bytes, partitions)
            return stager.finish()
        except BaseException:
            stager.discard()
            raise


def _publish(options: WriteOptions, done: list[TaskCommitMessage], name: str | None, version: int | None) -> None:
    """Append the staged batches in one transaction.

    With a producer ``name``, skip the write if its last transaction has this version or a newer one.
    """
    fs = FileSystem()
    with (
        segmentlog.open(options.path, create=False, background=False) as store,
        store.producer(name=name, linger_ms=0, transaction_timeout_ms=options.transaction_timeout_ms) as producer,
    ):
        last = producer.last_note
        if version is not None and last is not None and version <= int(last):
            return
        with producer.transaction(note=None if version is None else str(version)):
            publish(producer, fs, [task.staged for task in done])
