"""Read topics with Spark: the driver plans offset ranges, and each task reads its ranges as Arrow batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from segmentlog.errors import LogTruncated, OffsetOutOfRange, UnknownTopic
from segmentlog.format.record_batch import RecordBatch
from segmentlog.spark.arrow_batches import ArrowRows
from segmentlog.spark.offset_ranges import (
    DataLoss,
    OffsetRange,
    check_order,
    damage_logger,
    describe_lost_range,
    find_readable_start,
    find_topic_ids,
    resolve_ending_offsets,
    resolve_starting_offsets,
    select_partitions,
    split_into_tasks,
)
from segmentlog.spark.source_options import ReadOptions
from segmentlog.spark.store_opener import open_for_task, open_store

if TYPE_CHECKING:
    import pyarrow as pa

    from segmentlog.store import LogStore

logger = logging.getLogger("segmentlog")


class ReadTask(InputPartition):
    """The offset ranges of one task."""

    def __init__(self, ranges: list[OffsetRange]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


class BatchReader(DataSourceReader):
    """Reader of one batch query: it reads the records that exist when the query is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return the tasks. Runs in a Python process of the driver."""
        options = self._options
        with open_store(options.location) as store:
            partitions = select_partitions(store, options)
            ids = find_topic_ids(store, partitions)
            # Read the epochs before the ends: a loss after this line has a later epoch.
            epochs = {tp: store.open_partition(*tp).epoch for tp in partitions}
            starts, ends = (
                resolve_starting_offsets(store, partitions, options),
                resolve_ending_offsets(store, partitions, options),
            )
            check_order(store, starts, ends, options)
            ranges = [OffsetRange(*tp, starts[tp], ends[tp], ids[tp.topic], epochs[tp]) for tp in partitions]
            return plan_tasks(store, ranges, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task. Runs on an executor."""
        return read_task(self._options, self._schema, partition)


def plan_tasks(store: LogStore, ranges: list[OffsetRange], options: ReadOptions) -> list[InputPartition]:
    """Split the ranges into tasks, by the options minPartitions and maxRecordsPerPartition."""
    tasks = split_into_tasks(
        store, ranges, at_least=options.min_partitions, max_records=options.max_records_per_partition
    )
    return [ReadTask(task) for task in tasks]


def read_task(options: ReadOptions, schema: StructType, task: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task's ranges, in order. Raises `DataLoss`, `CorruptBatch`."""
    if not isinstance(task, ReadTask):  # a plan without tasks: Spark runs one task with an empty partition
        return
    with open_for_task(options.location) as store:
        for span in task.ranges:
            yield from ArrowRows(schema, options.invalid_text).convert(_read_range(store, span, options))


def _read_range(store: LogStore, span: OffsetRange, options: ReadOptions) -> Iterator[RecordBatch]:
    """Yield the records of a range that still exist. Raises `DataLoss` if some were deleted or lost.

    With failOnDataLoss = false, log a warning instead and yield the remaining records.
    """
    position = span.start
    while position < span.end:
        try:
            log = store.open_partition(span.topic, span.partition, span.topic_id)
            position = find_readable_start(log, position, fail_on_data_loss=options.fail_on_data_loss)
            reached = log.end_offset(isolation=options.isolation)
            on_skip = damage_logger(log) if options.skip_damaged else None
            for batch in log.read(position, isolation=options.isolation, on_skip=on_skip):
                if batch.base_offset >= span.end:
                    break
                if batch.next_offset > span.end:
                    inside = int(batch.offsets.searchsorted(span.end))
                    yield batch.slice(0, inside)
                    break
                yield batch
                position = batch.next_offset
            else:
                if reached < span.end:
                    _report_loss(
                        f"{span.topic}/{span.partition}: the log ends at offset {reached}, before {span.end}", options
                    )
            # Check at the end, to report records that were truncated during the read too.
            if (why := describe_lost_range(log, span)) is not None:
                _report_loss(why, options)
            return
        except (OffsetOutOfRange, LogTruncated) as error:  # deleted or truncated during the read
            _report_loss(str(error), options)
        except UnknownTopic as error:
            _report_loss(str(error), options)
            return


def _report_loss(why: str, options: ReadOptions) -> None:
    if options.fail_on_data_loss:
        raise DataLoss(why)
    logger.warning("%s; the read continues with the remaining records", why)
