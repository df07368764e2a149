"""Find the offset at which a run continues, and check that the topic is still the one that earlier runs read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import functions as F

import segmentlog
from segmentlog.errors import LogTruncated, SegmentlogError
from segmentlog.objects.bucket.url import is_url
from segmentlog.spark.store_opener import StoreLocation, open_store, resolve_location

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

    from segmentlog.log.partition import Partition
    from segmentlog.store import LogStore

_MARK_SCAN_OFFSETS: Final = 1000
# Offsets to scan for the mark. A range gets a mark only if its last 1,000 offsets have a record.


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A record that an earlier run has read: its offset, and its timestamp in milliseconds since 1970."""

    offset: int
    timestamp: int


class AnotherHistory(SegmentlogError):
    """The topic has the same name as the topic that an earlier run read, but other records."""

    def __init__(self, log: str, why: str, advice: str) -> None:
        super().__init__(log, why, advice)
        self.log, self.why, self.advice = log, why, advice

    def __str__(self) -> str:
        return f"{self.log}: {self.why}; {self.advice}"


class RecordsGone(SegmentlogError):
    """Offsets ``[position, end_offset)`` were deleted or lost before they were read."""

    def __init__(self, log: str, position: int, end_offset: int, why: str, advice: str) -> None:
        super().__init__(log, position, end_offset, why, advice)
        self.log, self.position, self.end_offset, self.why, self.advice = (
            log,
            position,
            end_offset,
            why,
            advice,
        )

    def __str__(self) -> str:
        return f"{self.log}: offsets {self.position} to {self.end_offset - 1} are gone: {self.why}; {self.advice}"


def open_to_sync(path: str) -> LogStore:
    """Open a store for `sync_stable_records`, which fsyncs records before a pipeline reads them.

    A store on a read-only disk or in an object store is opened read-only. Raises `StoreVersionError`.
    """
    if is_url(place := resolve_location(path)):
        return open_store(StoreLocation(place))
    return segmentlog.open(place, create=False, background=False)


def sync_stable_records(log: Partition, upto: int | None = None, *, read_only: bool = False) -> int:
    """Fsync the records before the last stable offset or ``upto``, and return the end of the durable records.

    With ``read_only``, fsync nothing: the end may then be lower. Crashes and aborts cannot remove records before the
    end, so a copy of them stays valid.
    """
    end = log.last_stable_offset if upto is None else min(upto, log.last_stable_offset)
    if not read_only and log.durable_offset < end:
        log.sync_upto(end)
    return min(end, log.durable_offset)


def check_resume_offset(
    log: Partition, position: int, mark: Mark | None, *, rebuild_advice: str, gap_advice: str
) -> int:
    """Return the offset at which a run continues after an earlier run that read up to ``position``.

    Raises `AnotherHistory`, with the remedy ``rebuild_advice``, if the log is not the log that the earlier run read.
    Raises `RecordsGone`, with the remedy ``gap_advice``, if the log no longer has the record at ``position``.
    """
    name = f"{log.topic}/{log.number}"
    if position > log.log_end_offset:
        why = f"it ends at offset {log.log_end_offset}, and an earlier run read it up to {position}: it is another log"
        raise AnotherHistory(name, why, rebuild_advice)
    if mark is not None and not _has_record(log, mark):
        why = f"offset {mark.offset} holds another record than before: the topic was created again"
        raise AnotherHistory(name, why, rebuild_advice)
    if position < log.log_start_offset:
        raise RecordsGone(name, position, log.log_start_offset, "retention or a trim deleted them", gap_advice)
    try:
        return log.check_position(position)
    except LogTruncated as error:
        why = f"the log lost [{error.lost.base_offset}, {error.lost.end_offset}) ({error.lost.reason})"
        raise RecordsGone(name, position, error.lost.end_offset, why, gap_advice) from None


def find_last_mark(log: Partition, end: int) -> Mark | None:
    """Return the last record before ``end``; None if the last `_MARK_SCAN_OFFSETS` offsets have no record."""
    try:
        begin = max(log.log_start_offset, end - _MARK_SCAN_OFFSETS)
        found = None
        for batch in log.read(begin, isolation="read_committed") if begin < end else ():
            inside = int(batch.offsets.searchsorted(end))
            if inside:
                found = Mark(int(batch.offsets[inside - 1]), int(batch.timestamps[inside - 1]))
            if batch.next_offset >= end:
                break
        return found
    except LogTruncated:
        return None


def _has_record(log: Partition, mark: Mark) -> bool:
    """Return False if another record has the offset of ``mark``, so that the log is not the log of the earlier run.

    Return True if the record exists, or if retention or compaction may have deleted it.
    """
    if not log.log_start_offset <= mark.offset < log.log_end_offset:
        return True
    try:
        for batch in log.read(mark.offset, max_bytes=1):
            if len(batch) and int(batch.offsets[0]) == mark.offset:
                return int(batch.timestamps[0]) == mark.timestamp
            return True
    except LogTruncated:
        pass
    return True


def read_ranges(
    spark: SparkSession,
    path: str,
    topic: str,
    ranges: Mapping[int, tuple[int, int]],
    *columns: str,
    milliseconds: bool = False,
) -> DataFrame:
    """Read these columns of the data source for the records in ``ranges``: ``{partition: (start, end)}``.

    With ``milliseconds`` the timestamp is a bigint of milliseconds, which can hold any timestamp; Spark's type cannot.
    """
    from pyspark.sql.types import LongType, StructField

    from segmentlog.spark.schema import source_schema

    starts = {str(number): start for number, (start, _) in sorted(ranges.items())}
    ends = {str(number): end for number, (_, end) in sorted(ranges.items())}
    everything = source_schema(include_headers=True)
    fields = [everything[name] for name in columns]
    if milliseconds:
        fields = [StructField("timestamp", LongType()) if field.name == "timestamp" else field for field in fields]
    return (
        spark.read.format("segmentlog")
        .schema(type(everything)(fields))  # the only way to prune columns
        .option("path", resolve_location(path))
        .option("assign", json.dumps({topic: sorted(ranges)}))
        .option("startingOffsets", json.dumps({topic: starts}))
        .option("endingOffsets", json.dumps({topic: ends}))
        .load()
    )


def number_by_partition(numbers: Mapping[int, int]) -> Column:
    """Return a column that maps each row's ``partition`` to its value in ``numbers``."""
    pairs = [F.lit(number) for pair in sorted(numbers.items()) for number in pair]
    return F.create_map(*pairs)[F.col("partition")]
