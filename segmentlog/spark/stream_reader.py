"""Read topics as a stream: the driver chooses the end of each micro-batch, and tasks read its offset ranges."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

import segmentlog
from segmentlog.defaults import SHIP_INTERVAL_MS
from segmentlog.errors import LogTruncated, OffsetOutOfRange, SegmentlogError, UnknownTopic
from segmentlog.objects.bucket.url import is_url
from segmentlog.policy.fair_share import split_by_backlog
from segmentlog.policy.lost_ranges import advance, count_offsets, skip_lost_ranges
from segmentlog.records import LostRange, TopicPartition
from segmentlog.spark.batch_reader import plan_tasks, read_task
from segmentlog.spark.offset_ranges import (
    DataLoss,
    Document,
    OffsetRange,
    Offsets,
    Positions,
    damage_logger,
    decode_positions,
    encode_positions,
    find_end_offset,
    find_readable_start,
    find_topic_ids,
    resolve_starting_offsets,
    select_partitions,
)
from segmentlog.spark.source_options import ReadOptions
from segmentlog.spark.store_opener import open_store

if TYPE_CHECKING:
    import pyarrow as pa

    from segmentlog.store import LogStore

logger = logging.getLogger("segmentlog")

_COMMIT_RETRY_S: Final = 10.0
# Pause after a failed commit to the group (another consumer is in it, or the disk is full). An idle query would retry
# 50 times a second.


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one streaming query. It runs in a Python process of the driver; `read` runs on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._store: LogStore | None = None
        self._refreshed_at = 0.0
        """Time of the last refresh, in seconds of the monotonic clock; for a store in an object store only."""
        self._writable: LogStore | None = None
        """The store opened for committing offsets to the group; opened at the first commit."""
        self._last_commit: Positions | None = None
        """The positions that were committed last to the group, or whose commit failed."""
        self._retry_commit_at = 0.0
        """Time to retry a failed commit, in seconds of the monotonic clock; infinite after a success."""
        self._last_progress: float | None = None
        """Time of the last micro-batch, in seconds of the monotonic clock."""
        self._reported_losses: set[str] = set()
        self._final: Positions | None = None
        """With `Trigger.AvailableNow`: the end of the query."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None, "_writable": None}

    def _open_once(self) -> LogStore:
        if self._store is None:
            self._store = open_store(self._options.location)
            self._refreshed_at = time.monotonic()
        return self._store

    def _refresh_store(self, *, at_once: bool = False) -> LogStore:
        """Return the store; refresh it first if it is in an object store and older than the upload interval."""
        store = self._open_once()
        if is_url(self._options.path) and (at_once or time.monotonic() - self._refreshed_at >= SHIP_INTERVAL_MS / 1000):
            store.refresh_tick()
            self._refreshed_at = time.monotonic()
        return store

    # ------------------------------------------------------------ micro-batches

    def initialOffset(self) -> Document:
        """Return the start of a query without a checkpoint."""
        store = self._open_once()
        partitions = select_partitions(store, self._options)
        ids = find_topic_ids(store, partitions)
        return encode_positions(Positions(resolve_starting_offsets(store, partitions, self._options), ids))

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return a read limit that is no limit, because `latestOffset` applies the limits of the options itself."""
        return ReadAllAvailable()

    def latestOffset(self, start: Document, limit: ReadLimit) -> Document:
        """Return the end of the next micro-batch, or ``start`` to run none yet.

        Raises `DataLoss` if records or topics are gone and failOnDataLoss is true.
        """
        options = self._options
        latest = self._find_ends() if self._final is None else self._final
        known = self._check_positions(decode_positions(start), latest)
        # Spark calls this after the micro-batch that ended at `start` is done. It calls `commit` only when there is a
        # next micro-batch, so the last one would never be committed to the group.
        self._commit_to_group(known)
        starts, ends = known.offsets, latest.offsets
        begins = self._find_starts(starts, latest)
        if self._final is None and not self._is_batch_due(begins, latest):
            return start
        self._last_progress = time.monotonic()
        if options.max_offsets_per_trigger is not None:
            shares = split_by_backlog(self._backlogs(begins, latest), options.max_offsets_per_trigger)
            reached = {tp: advance(self._lost_ranges(tp, latest), begins[tp], share) for tp, share in shares.items()}
            ends = {**ends, **reached}
        if options.max_bytes_per_trigger is not None:
            ends = self._limit_bytes(begins, ends, options.max_bytes_per_trigger)
        if ends is not latest.offsets:
            ends = self._move_past_lost_ranges(begins, ends, latest)
        # Keep the positions of partitions that are gone (failOnDataLoss = false). Without them, a partition that
        # comes back would be read from its start again.
        reached = {**starts, **{tp: max(ends[tp], starts.get(tp, 0)) for tp in ends}}
        return encode_positions(Positions(reached, {**known.topic_ids, **latest.topic_ids}))

    def prepareForTriggerAvailableNow(self) -> None:
        """Limit the query to the records that exist now."""
        self._refresh_store(at_once=True)
        self._final = self._find_ends()

    def reportLatestOffset(self) -> Document:
        """Return the current end offsets, for the query's progress."""
        return encode_positions(self._find_ends())

    def _find_ends(self) -> Positions:
        """Return the end of each partition now, including partitions created since the query started."""
        store, options = self._refresh_store(), self._options
        try:
            partitions = select_partitions(store, options)
        except UnknownTopic as error:
            if options.fail_on_data_loss:
                raise DataLoss(str(error)) from None
            partitions = select_partitions(store, options, must_exist=False)
        ends, ids = {}, {}
        for tp in partitions:
            try:
                if tp.topic not in ids:
                    ids[tp.topic] = store.topic(tp.topic).id
                ends[tp] = find_end_offset(store, tp, options, ids[tp.topic])
            except UnknownTopic as error:  # deleted since they were listed
                self._report_loss(str(error))
        return Positions(ends, ids)

    def _check_positions(self, starts: Positions, latest: Positions) -> Positions:
        """Return the positions that still hold for the current topics.

        A topic that was created again under the same name is read from its first record. If a log became shorter,
        because it is an older copy, its position becomes the log end.
        Raises `DataLoss` in both cases, and for a deleted topic, if failOnDataLoss is true.
        """
        offsets, ids = dict(starts.offsets), dict(starts.topic_ids)
        if gone := sorted(set(offsets) - set(latest.offsets)):
            # Keep their positions: a topic may be restored, or renamed back.
            self._report_loss(f"{gone[0].topic}/{gone[0].partition}: it was deleted or renamed while the query read it")
        for topic, topic_id in starts.topic_ids.items():
            now = latest.topic_ids.get(topic, topic_id)
            if now != topic_id:
                why = "it is another topic of the same name: the topic that the query read was deleted or renamed"
                self._report_loss(f"{topic}: {why} (its id was {topic_id}, and is now {now})")
                ids[topic] = now
                offsets = {tp: offset for tp, offset in offsets.items() if tp.topic != topic}
        for tp, start in list(offsets.items()):
            # An explicit start may be after the end of readable records: only a start after the log end is data loss.
            if start <= latest.offsets.get(tp, start):
                continue
            log_end = self._log_end(tp, latest.topic_ids[tp.topic])
            if log_end is not None and start > log_end:
                is_known = tp.topic in starts.topic_ids
                why = f"the query is at offset {start}, and the log ends at {log_end}"
                cause = "it is an older copy" if is_known else "it was created again"
                self._report_loss(f"{tp.topic}/{tp.partition}: {why}: perhaps {cause}")
                if is_known:
                    offsets[tp] = log_end  # the query has read all that the copy holds
                else:
                    del offsets[tp]
        return Positions(offsets, ids)

    def _log_end(self, tp: TopicPartition, topic_id: str) -> int | None:
        try:
            return self._open_once().open_partition(*tp, topic_id).log_end_offset
        except UnknownTopic as error:
            self._report_loss(str(error))
            return None

    def _report_loss(self, why: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLoss(why)
        # An idle query checks again and again: log each loss once.
        if why not in self._reported_losses:
            self._reported_losses.add(why)
            logger.warning("%s; the query continues with the remaining records", why)

    def _find_starts(self, starts: Offsets, latest: Positions) -> Offsets:
        """Return the next offset of each partition; for a new partition, its log start offset."""
        begins = {}
        for tp in latest.offsets:
            known = starts.get(tp)
            topic_id = latest.topic_ids[tp.topic]
            try:
                begins[tp] = (
                    self._open_once().open_partition(*tp, topic_id).log_start_offset if known is None else known
                )
            except UnknownTopic as error:
                self._report_loss(str(error))
        return begins

    def _lost_ranges(self, tp: TopicPartition, latest: Positions) -> list[LostRange]:
        """Return the lost ranges of a partition; none if the partition is gone."""
        try:
            return self._open_once().open_partition(*tp, latest.topic_ids[tp.topic]).lost_ranges()
        except UnknownTopic as error:
            self._report_loss(str(error))
            return []

    def _backlogs(self, begins: Offsets, latest: Positions) -> Offsets:
        """Return the number of unread offsets of each partition, without lost ranges."""
        ends = latest.offsets
        return {tp: count_offsets(self._lost_ranges(tp, latest), begin, ends[tp]) for tp, begin in begins.items()}

    def _is_batch_due(self, begins: Offsets, latest: Positions) -> bool:
        least = self._options.min_offsets_per_trigger
        if least is None:
            return True
        now = time.monotonic()
        if self._last_progress is None:  # the first micro-batch does not wait
            return True
        waited_ms = (now - self._last_progress) * 1000
        available = sum(self._backlogs(begins, latest).values())
        return available >= least or waited_ms >= self._options.max_trigger_delay_ms

    def _limit_bytes(self, begins: Offsets, ends: Offsets, limit_bytes: int) -> Offsets:
        """Move ends back so that a micro-batch reads at most about ``limit_bytes`` of stored bytes.

        Each partition gets an equal share, and at least one batch.
        """
        waiting = [tp for tp in begins if ends[tp] > begins[tp]]
        each = max(1, limit_bytes // max(1, len(waiting)))
        reached = dict(ends)
        for tp in waiting:
            try:
                log = self._open_once().open_partition(*tp)
                begin = find_readable_start(log, begins[tp], fail_on_data_loss=self._options.fail_on_data_loss)
                on_skip = damage_logger(log) if self._options.skip_damaged else None
                for batch in log.read(begin, max_bytes=each, isolation=self._options.isolation, on_skip=on_skip):
                    reached[tp] = min(ends[tp], batch.next_offset)
            except (UnknownTopic, OffsetOutOfRange, LogTruncated) as error:  # deleted since it was listed or opened
                self._report_loss(str(error))
        return reached

    def _move_past_lost_ranges(self, begins: Offsets, ends: Offsets, latest: Positions) -> Offsets:
        """Move each end that is inside or at the start of a lost range to the end of that range.

        Otherwise the next micro-batch would start inside the lost range, and report it as new data loss.
        """
        reached = dict(ends)
        for tp, begin in begins.items():
            if begin < ends[tp] < latest.offsets[tp]:
                reached[tp] = min(skip_lost_ranges(self._lost_ranges(tp, latest), ends[tp]), latest.offsets[tp])
        return reached

    # ------------------------------------------------------------ reading

    def partitions(self, start: Document, end: Document) -> list[InputPartition]:
        """Return the tasks of a micro-batch."""
        store, options = self._open_once(), self._options
        starts, ends = decode_positions(start), decode_positions(end)
        ranges = []
        for tp, end_offset in sorted(ends.offsets.items()):
            topic_id, before = ends.topic_ids.get(tp.topic), starts.topic_ids.get(tp.topic)
            begin = starts.offsets.get(tp)
            if begin is not None and topic_id not in (None, before) and (before or begin > end_offset):
                begin = None  # another topic of the same name, as in `_check_positions`
            try:
                log = store.open_partition(*tp, topic_id)
                epoch = log.epoch
                begin = log.log_start_offset if begin is None else begin
                if begin < end_offset:
                    begin = find_readable_start(log, begin, fail_on_data_loss=options.fail_on_data_loss)
            except UnknownTopic as error:
                self._report_loss(str(error))
                continue
            ranges.append(OffsetRange(*tp, begin, end_offset, topic_id, epoch))
        return plan_tasks(store, ranges, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task. Runs on an executor."""
        return read_task(self._options, self._schema, partition)

    def commit(self, end: Document) -> None:
        """Commit ``end`` to the group, if the query has one. Spark never reads before ``end`` again."""
        self._commit_to_group(decode_positions(end))

    def _commit_to_group(self, done: Positions) -> None:
        group = self._options.group
        if group is None or (done == self._last_commit and time.monotonic() < self._retry_commit_at):
            return
        self._last_commit, self._retry_commit_at = done, math.inf
        try:
            if self._writable is None:
                self._writable = segmentlog.open(self._options.path, create=False, background=False)
            there = {name for name in self._writable.topics() if self._has_id(name, done.topic_ids.get(name))}
            positions = {tp: offset for tp, offset in done.offsets.items() if tp.topic in there}
            self._writable.groups.reset(group, positions, sync=False)
        except (SegmentlogError, OSError) as error:  # for monitoring only: the query itself uses its checkpoint
            self._retry_commit_at = time.monotonic() + _COMMIT_RETRY_S
            logger.warning("group %s: the query could not commit its positions, and will retry: %s", group, error)

    def _has_id(self, name: str, topic_id: str | None) -> bool:
        return topic_id is None or self._open_once().topic(name).id == topic_id

    def stop(self) -> None:
        """Close the stores at the end of the query."""
        for store in (self._store, self._writable):
            if store is not None:
                store.close()
        self._store = self._writable = None
        if isinstance(sys.exception(), EOFError):
            os._exit(0)  # Spark closed the connection: exit before its worker prints a traceback
