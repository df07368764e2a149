"""Going on with a topic where an earlier run has ended: how far it goes, and whether it still is the same history."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import functions as F

import segmentlog
from segmentlog.errors import LogTruncated, SegmentlogError
from segmentlog.objects.bucket.url import is_url
from segmentlog.spark.store_opener import Place, open_store, place_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

    from segmentlog.log.partition import Partition
    from segmentlog.store import LogStore

_LOOK_BACK: Final = 1000
# Offsets: that many without a record at the end of a range, and it is left unmarked.


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A record that was there: its offset, and its timestamp in milliseconds."""

    offset: int
    timestamp: int


class AnotherHistory(SegmentlogError):
    """The topic is not the one that an earlier run has read, though it has its name."""

    def __init__(self, log: str, why: str, advice: str) -> None:
        super().__init__(log, why, advice)
        self.log, self.why, self.advice = log, why, advice

    def __str__(self) -> str:
        return f"{self.log}: {self.why}; {self.advice}"


class RecordsGone(SegmentlogError):
    """Offsets ``[position, find_lost_range_end)`` went before they were read."""

    def __init__(self, log: str, position: int, find_lost_range_end: int, why: str, advice: str) -> None:
        super().__init__(log, position, find_lost_range_end, why, advice)
        self.log, self.position, self.find_lost_range_end, self.why, self.advice = (
            log,
            position,
            find_lost_range_end,
            why,
            advice,
        )

    def __str__(self) -> str:
        return (
            f"{self.log}: offsets {self.position} to {self.find_lost_range_end - 1} are gone: {self.why}; {self.advice}"
        )


def open_to_settle(path: str) -> LogStore:
    """The store, open to fsync what is read; read-only only where its disk is, or what was shipped lies.

    Raises `StoreVersionError`.
    """
    if is_url(place := place_of(path)):
        return open_store(Place(place))
    return segmentlog.open(place, create=False, background=False)


def settled_end(log: Partition, upto: int | None = None, *, read_only: bool = False) -> int:
    """The end of what no crash takes back and no transaction: of what may be taken elsewhere for good."""
    end = log.last_stable_offset if upto is None else min(upto, log.last_stable_offset)
    if not read_only and log.durable_offset < end:
        log.sync_upto(end)
    return min(end, log.durable_offset)


def go_on_at(log: Partition, position: int, mark: Mark | None, *, anew: str, with_gap: str) -> int:
    """Where to go on: at ``position``, or behind a lost range that begins there.

    ``anew`` and ``with_gap`` are what to do where that cannot be. Raises `AnotherHistory`, `RecordsGone`.
    """
    name = f"{log.topic}/{log.number}"
    if position > log.log_end_offset:
        why = f"it ends at offset {log.log_end_offset}, and was read up to {position}: it is not the log it was"
        raise AnotherHistory(name, why, anew)
    if mark is not None and not _is_there(log, mark):
        why = f"at offset {mark.offset} there is another record than was read there: the topic was made anew"
        raise AnotherHistory(name, why, anew)
    if position < log.log_start_offset:
        raise RecordsGone(name, position, log.log_start_offset, "retention or a trim was faster", with_gap)
    try:
        return log.check_position(position)
    except LogTruncated as error:
        why = f"the log lost [{error.lost.base_offset}, {error.lost.end_offset}) ({error.lost.reason})"
        raise RecordsGone(name, position, error.lost.end_offset, why, with_gap) from None


def last_mark(log: Partition, end: int) -> Mark | None:
    """The last record before ``end``; None when there is none near it."""
    try:
        begin = max(log.log_start_offset, end - _LOOK_BACK)
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


def _is_there(log: Partition, mark: Mark) -> bool:
    """Whether it may be; also when retention or compaction took it."""
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
    """The records of ``[start, end)`` by partition, with these columns of the data source.

    ``milliseconds``: the timestamp is a bigint of milliseconds, which holds any timestamp, and Spark's type does not.
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
        .option("path", place_of(path))
        .option("assign", json.dumps({topic: sorted(ranges)}))
        .option("startingOffsets", json.dumps({topic: starts}))
        .option("endingOffsets", json.dumps({topic: ends}))
        .load()
    )


def by_partition(numbers: Mapping[int, int]) -> Column:
    """A column: the number that belongs to the row's ``partition``."""
    pairs = [F.lit(number) for pair in sorted(numbers.items()) for number in pair]
    return F.create_map(*pairs)[F.col("partition")]
