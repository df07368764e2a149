"""Reading topics with Spark: the driver plans ranges of offsets, each task reads its own as Arrow batches."""

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
    ending_offsets,
    lost_since,
    partitions_to_read,
    readable_start,
    split,
    starting_offsets,
    step_over,
    topic_ids,
)
from segmentlog.spark.source_options import ReadOptions
from segmentlog.spark.store_opener import open_store, opened_for_task

if TYPE_CHECKING:
    import pyarrow as pa

    from segmentlog.store import LogStore

logger = logging.getLogger("segmentlog")


class ReadTask(InputPartition):
    """What one task reads."""

    def __init__(self, ranges: list[OffsetRange]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


class BatchReader(DataSourceReader):
    """One reading of what is there when it is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """The tasks. In a process of the driver's."""
        options = self._options
        with open_store(options.place) as store:
            partitions = partitions_to_read(store, options)
            ids = topic_ids(store, partitions)
            epochs = {tp: store.open_partition(*tp).epoch for tp in partitions}  # before the ends that are of them
            starts, ends = starting_offsets(store, partitions, options), ending_offsets(store, partitions, options)
            check_order(store, starts, ends, options)
            ranges = [OffsetRange(*tp, starts[tp], ends[tp], ids[tp.topic], epochs[tp]) for tp in partitions]
            return plan(store, ranges, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. On an executor."""
        return read_task(self._options, self._schema, partition)


def plan(store: LogStore, ranges: list[OffsetRange], options: ReadOptions) -> list[InputPartition]:
    """The ranges as tasks."""
    tasks = split(store, ranges, at_least=options.min_partitions, max_records=options.max_records_per_partition)
    return [ReadTask(task) for task in tasks]


def read_task(options: ReadOptions, schema: StructType, task: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a task's ranges, in their order. Raises `DataLoss`, `CorruptBatch`."""
    if not isinstance(task, ReadTask):  # nothing was planned: Spark asks for the rows of nothing
        return
    with opened_for_task(options.place) as store:
        for span in task.ranges:
            yield from ArrowRows(schema, options.invalid_text).of(_read_range(store, span, options))


def _read_range(store: LogStore, span: OffsetRange, options: ReadOptions) -> Iterator[RecordBatch]:
    """The records of ``[start, end)`` that are still there. Raises `DataLoss` when some are not, unless it is fine."""
    position = span.start
    while position < span.end:
        try:
            log = store.open_partition(span.topic, span.partition, span.topic_id)
            position = readable_start(log, position, fail_on_data_loss=options.fail_on_data_loss)
            reached = log.end_offset(isolation=options.isolation)
            on_skip = step_over(log) if options.skip_damaged else None
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
                    _tell_loss(
                        f"{span.topic}/{span.partition}: the log ends at offset {reached}, before {span.end}", options
                    )
            # In the end, so that what was cut off while it was read is told, too.
            if (why := lost_since(log, span)) is not None:
                _tell_loss(why, options)
            return
        except (OffsetOutOfRange, LogTruncated) as error:  # while it was read
            _tell_loss(str(error), options)
        except UnknownTopic as error:
            _tell_loss(str(error), options)
            return


def _tell_loss(why: str, options: ReadOptions) -> None:
    if options.fail_on_data_loss:
        raise DataLoss(why)
    logger.warning("%s; reading goes on with what is there", why)
