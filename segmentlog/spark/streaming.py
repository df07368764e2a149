"""Reading topics as a stream: the driver says how far each micro-batch goes, tasks read it as any other range."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

import segmentlog
from segmentlog.errors import SegmentlogError, UnknownTopic
from segmentlog.records import TopicPartition
from segmentlog.spark.options import ReadOptions
from segmentlog.spark.ranges import (
    DataLoss,
    OffsetRange,
    Offsets,
    end_of,
    from_json,
    partitions_to_read,
    readable_start,
    starting_offsets,
    step_over,
    to_json,
)
from segmentlog.spark.reading import open_store, plan, read_task
from segmentlog.workers import logger

if TYPE_CHECKING:
    import pyarrow as pa

    from segmentlog.store import LogStore

Document = dict[str, dict[str, int]]

_TELL_AGAIN_S: Final = 10.0
# Another one is at work in the group, or the disk is full: an idle query asks 50 times a second.


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of a streaming query. It lives in one process of the driver's, its `read` on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._store: LogStore | None = None
        self._writable: LogStore | None = None
        """To tell a group of; made when it is first needed."""
        self._told: Offsets | None = None
        self._told_until = 0.0
        """What a group was told last, and when it is told the same again, as it could not be."""
        self._last_progress: float | None = None
        self._final: Offsets | None = None
        """With `Trigger.AvailableNow`: where the query ends."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None, "_writable": None}

    def _open(self) -> LogStore:
        if self._store is None:
            self._store = open_store(self._options.path)
        return self._store

    # ------------------------------------------------------------ how far

    def initialOffset(self) -> Document:
        """Where a query begins that has no checkpoint."""
        store = self._open()
        return to_json(starting_offsets(store, partitions_to_read(store, self._options), self._options))

    def getDefaultReadLimit(self) -> ReadLimit:
        """None that Spark knows of: `latestOffset` does what the options say."""
        return ReadAllAvailable()

    def latestOffset(self, start: Document, limit: ReadLimit) -> Document:
        """Where the next micro-batch ends; ``start`` itself when there is to be none yet."""
        options = self._options
        starts = from_json(start)
        ends = self._ends() if self._final is None else self._final
        self._check_deleted(starts, ends)
        # Spark asks once the micro-batch that ended there is done, and calls `commit` when it has another one only.
        self._tell_group({tp: offset for tp, offset in starts.items() if tp in ends})
        begins = self._begins(starts, ends)
        if self._final is None and not self._is_worth_it(begins, ends):
            return to_json(starts)
        self._last_progress = time.monotonic()
        if options.max_offsets_per_trigger is not None:
            ends = share(begins, ends, options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            ends = self._within_bytes(begins, ends, options.max_bytes_per_trigger)
        # What is gone for good (failOnDataLoss = false) is not forgotten: it would begin anew if it came back.
        return to_json({**starts, **{tp: max(ends[tp], starts.get(tp, 0)) for tp in ends}})

    def prepareForTriggerAvailableNow(self) -> None:
        """Go no further than to what is there now."""
        self._final = self._ends()

    def reportLatestOffset(self) -> Document:
        """What is there, for the query's progress."""
        return to_json(self._ends())

    def _ends(self) -> Offsets:
        """Where each partition ends now, those included that came since the query began."""
        store, options = self._open(), self._options
        try:
            partitions = partitions_to_read(store, options)
        except UnknownTopic as error:
            if options.fail_on_data_loss:
                raise DataLoss(str(error)) from None
            partitions = partitions_to_read(store, options, all_there=False)
        return {tp: end_of(store, tp, options) for tp in partitions}

    def _check_deleted(self, starts: Offsets, ends: Offsets) -> None:
        """Raise `DataLoss` for partitions that are gone, or are others under the same name."""
        if not self._options.fail_on_data_loss:
            return
        gone = sorted(set(starts) - set(ends))
        if gone:
            raise DataLoss(f"{gone[0].topic}/{gone[0].partition}: it was deleted while the query read it")
        for tp, start in starts.items():
            # Not the end of this kind of reader, which offsets that the user gives may lie beyond.
            if start > ends[tp] and start > (log_end := self._open().open_partition(*tp).log_end_offset):
                why = f"the query is at offset {start}, and the log ends at {log_end}: it was made anew, perhaps"
                raise DataLoss(f"{tp.topic}/{tp.partition}: {why}")

    def _begins(self, starts: Offsets, ends: Offsets) -> Offsets:
        """Where reading goes on; a partition that is new begins at its first record."""
        begins = {}
        for tp in ends:
            known = starts.get(tp)
            try:
                begins[tp] = self._open().open_partition(*tp).log_start_offset if known is None else known
            except UnknownTopic as error:
                if self._options.fail_on_data_loss:
                    raise DataLoss(str(error)) from None
        return begins

    def _is_worth_it(self, begins: Offsets, ends: Offsets) -> bool:
        least = self._options.min_offsets_per_trigger
        if least is None:
            return True
        now = time.monotonic()
        if self._last_progress is None:  # the first one does not wait
            return True
        waited_ms = (now - self._last_progress) * 1000
        available = sum(max(0, ends[tp] - begins[tp]) for tp in begins)
        return available >= least or waited_ms >= self._options.max_trigger_delay_ms

    def _within_bytes(self, begins: Offsets, ends: Offsets, limit_bytes: int) -> Offsets:
        """As far as so many stored bytes go: an equal share of them each, and at least one batch."""
        waiting = [tp for tp in begins if ends[tp] > begins[tp]]
        each = max(1, limit_bytes // max(1, len(waiting)))
        reached = dict(ends)
        for tp in waiting:
            log = self._open().open_partition(*tp)
            begin = readable_start(log, begins[tp], fail_on_data_loss=self._options.fail_on_data_loss)
            on_skip = step_over(log) if self._options.skip_damaged else None
            for batch in log.read(begin, max_bytes=each, isolation=self._options.isolation, on_skip=on_skip):
                reached[tp] = min(ends[tp], batch.next_offset)
        return reached

    # ------------------------------------------------------------ reading

    def partitions(self, start: Document, end: Document) -> list[InputPartition]:
        """The tasks of a micro-batch."""
        store, options = self._open(), self._options
        starts, ends = from_json(start), from_json(end)
        ranges = []
        for tp, end_offset in sorted(ends.items()):
            try:
                log = store.open_partition(*tp)
                begin = starts.get(tp)
                begin = log.log_start_offset if begin is None else begin
                if begin < end_offset:
                    begin = readable_start(log, begin, fail_on_data_loss=options.fail_on_data_loss)
            except UnknownTopic as error:
                if options.fail_on_data_loss:
                    raise DataLoss(str(error)) from None
                continue
            ranges.append(OffsetRange(*tp, begin, end_offset))
        return plan(store, ranges, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. On an executor."""
        return read_task(self._options, self._schema, partition)

    def commit(self, end: Document) -> None:
        """Spark will not ask for anything before ``end`` again: tell the group, if there is one."""
        self._tell_group(from_json(end))

    def _tell_group(self, done: Offsets) -> None:
        group = self._options.group
        if group is None or (done == self._told and time.monotonic() < self._told_until):
            return
        self._told, self._told_until = done, math.inf
        try:
            if self._writable is None:
                self._writable = segmentlog.open(self._options.path, create=False, background=False)
            self._writable.groups.reset(group, done, sync=False)
        except (SegmentlogError, OSError) as error:  # for people to see: the query itself goes by its checkpoint
            self._told_until = time.monotonic() + _TELL_AGAIN_S
            logger.warning("group %s: the positions of the query are not told: %s", group, error)

    def stop(self) -> None:
        """The query ends."""
        for store in (self._store, self._writable):
            if store is not None:
                store.close()
        self._store = self._writable = None
        if isinstance(sys.exception(), EOFError):
            os._exit(0)  # Spark has hung up: its worker would go on to print where, for nobody


def share(begins: Mapping[TopicPartition, int], ends: Offsets, limit: int) -> Offsets:
    """At most so many offsets in all, shared among partitions in proportion to what waits in each."""
    waiting = {tp: ends[tp] - begins[tp] for tp in begins if ends[tp] > begins[tp]}
    total = sum(waiting.values())
    if total <= limit:
        return ends
    shares = {tp: count * limit // total for tp, count in waiting.items()}
    left = limit - sum(shares.values())
    for tp in sorted(waiting, key=lambda tp: shares[tp] - waiting[tp] * limit / total)[:left]:
        shares[tp] += 1
    return {tp: begins[tp] + shares[tp] if tp in shares else ends[tp] for tp in ends}
