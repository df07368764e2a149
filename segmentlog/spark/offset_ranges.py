"""Resolve the offset ranges of a read, check them for data loss, and split them into tasks."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from segmentlog.errors import CorruptBatch, InvalidConfig, LogTruncated, OffsetOutOfRange, SegmentlogError, UnknownTopic
from segmentlog.format.file_names import check_topic_name, is_topic_id
from segmentlog.log.partition import Partition
from segmentlog.log.read.reader import SkipListener
from segmentlog.objects.bucket.error_messages import without_secrets
from segmentlog.records import TopicPartition
from segmentlog.spark.source_options import EARLIEST, LATEST, Bound, ReadOptions
from segmentlog.store import LogStore

logger = logging.getLogger("segmentlog")

Offsets = dict[TopicPartition, int]

_MIN_TASK_RECORDS: Final = 100_000
# Records. Starting a task costs 36 ms: fewer records are not worth a task of their own.
_MAX_TASK_RECORDS: Final = 4_000_000
# Records. Spark repeats a failed task from its start: the limit keeps that from costing hours.


class DataLoss(SegmentlogError):
    """Records that the read asked for are no longer in the store."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"{self.why}; to continue with the remaining records: .option('failOnDataLoss', 'false')"


class OffsetRange(msgspec.Struct, frozen=True, array_like=True):
    """The records ``[start, end)`` of a partition.

    With a ``topic_id``, only the topic with that id is read, not another topic of the same name.
    """

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str | None = None
    epoch: int | None = None
    """Leader epoch of the log when the read was planned. Records lost in a later epoch existed at that time."""


class Positions(msgspec.Struct, frozen=True):
    """The next offsets of a query, and the ids of its topics.

    A topic that is deleted and created again has the same name and another id.
    """

    offsets: Offsets
    topic_ids: dict[str, str]
    """Topic ids by topic name. Empty if the checkpoint was written before topics had ids."""


# ---------------------------------------------------------------- partitions


def select_partitions(store: LogStore, options: ReadOptions, *, must_exist: bool = True) -> list[TopicPartition]:
    """Return the existing partitions that the options select, sorted.

    Raise `UnknownTopic` if ``must_exist`` is true, and a topic or partition that the options name does not exist.
    """
    if options.partitions is not None:
        counts = {name: len(_list_partitions(store, name, must_exist=must_exist)) for name in options.topics}
        missing = [tp for tp in options.partitions if tp.partition >= counts[tp.topic]]
        if missing and must_exist:
            why = f"it has no partition {missing[0].partition}, only 0 to {counts[missing[0].topic] - 1}"
            raise UnknownTopic(missing[0].topic, why)
        return [tp for tp in options.partitions if tp not in missing]
    topics: Iterable[str] = options.topics
    if options.pattern is not None:
        pattern = re.compile(options.pattern)
        topics = [name for name in store.topics() if pattern.fullmatch(name)]
    found = [_list_partitions(store, name, must_exist=options.pattern is None and must_exist) for name in topics]
    return sorted(tp for some in found for tp in some)


def _list_partitions(store: LogStore, name: str, *, must_exist: bool) -> list[TopicPartition]:
    try:
        return [TopicPartition(name, number) for number in range(store.topic(name).partition_count)]
    except UnknownTopic:
        if must_exist:
            if store.url is not None:  # opened with `only_topics`: it cannot list the others
                where = without_secrets(store.url)
                raise UnknownTopic(name, f"it does not exist in {where}, or was not shipped yet") from None
            there = ", ".join(store.topics()[:20]) or "none"
            raise UnknownTopic(name, f"it does not exist in {store.path} (existing topics: {there})") from None
        return []  # deleted since `store.topics()` listed it


# ---------------------------------------------------------------- start and end offsets


def find_topic_ids(store: LogStore, partitions: Iterable[TopicPartition]) -> dict[str, str]:
    """Return the ids of the partitions' topics, by name. Raises `UnknownTopic`."""
    return {name: store.topic(name).id for name in sorted({tp.topic for tp in partitions})}


def find_end_offset(store: LogStore, tp: TopicPartition, options: ReadOptions, topic_id: str | None = None) -> int:
    """Return the current end offset for the isolation and durability of ``options``. Raises `UnknownTopic`."""
    return store.open_partition(*tp, topic_id).end_offset(
        isolation=options.isolation, durable_only=options.durable_only
    )


def resolve_starting_offsets(store: LogStore, partitions: list[TopicPartition], options: ReadOptions) -> Offsets:
    """Return the start offset of each partition. Raises `InvalidConfig`, `DataLoss`."""
    return _resolve_bound(store, partitions, options.starting, options, is_start=True)


def resolve_ending_offsets(store: LogStore, partitions: list[TopicPartition], options: ReadOptions) -> Offsets:
    """Return the end offset of each partition. Raises `InvalidConfig`, `DataLoss`."""
    return _resolve_bound(store, partitions, options.ending, options, is_start=False)


def _resolve_bound(
    store: LogStore, partitions: list[TopicPartition], bound: Bound, options: ReadOptions, *, is_start: bool
) -> Offsets:
    _check_named(bound, partitions)
    found = {}
    for tp in partitions:
        log = store.open_partition(*tp)
        end_offset = find_end_offset(store, tp, options)
        if bound.at == "earliest":
            found[tp] = log.log_start_offset
        elif bound.at == "latest":
            found[tp] = end_offset
        elif bound.at == "offsets":
            found[tp] = _resolve_explicit(log, bound.per_partition[tp.topic][tp.partition], end_offset, options)
            if not is_start:
                found[tp] = _limit_end(tp, found[tp], end_offset, options)
        else:
            timestamp_ms = _find_given_bound(bound, tp)
            offset = log.offset_for_timestamp(timestamp_ms)
            if offset is None and is_start and options.no_match == "error":
                accepted = (
                    f"{tp.topic}/{tp.partition} has no record at or after that time;"
                    " to start at its end: startingOffsetsByTimestampStrategy = latest"
                )
                raise InvalidConfig(bound.option, timestamp_ms, accepted)
            found[tp] = end_offset if offset is None else offset
            if not is_start:  # a time does not ask for records of open transactions, as an explicit offset does
                found[tp] = min(found[tp], end_offset)
    return found


def check_order(store: LogStore, starts: Offsets, ends: Offsets, options: ReadOptions) -> None:
    """Raise `InvalidConfig` if the user's end bound is before the start bound in a partition.

    A start above the end is accepted if it has another reason: the partition's last transaction is open, or
    retention deleted the range and failOnDataLoss is false.
    """
    starting, ending = options.starting, options.ending
    for tp in sorted(starts):
        first, last = _find_given_bound(starting, tp), _find_given_bound(ending, tp)
        if (starting.at == "offsets") == (ending.at == "offsets") and min(first, last) >= 0:
            wrong = first > last
        else:
            first, last = starts[tp], ends[tp]
            wrong = last < first and options.fail_on_data_loss and last < find_end_offset(store, tp, options)
        if wrong:
            accepted = f"at or before {ending.option}: {tp.topic}/{tp.partition} would be read from {first} to {last}"
            raise InvalidConfig(starting.option, _format_bound(starting), accepted)


def _find_given_bound(bound: Bound, tp: TopicPartition) -> int:
    """Return the offset or timestamp that the user gave for the partition; -1 for "earliest" and "latest"."""
    if bound.at in ("offsets", "timestamps"):
        return bound.per_partition[tp.topic][tp.partition]
    return bound.timestamp_ms


def _format_bound(bound: Bound) -> str:
    if bound.at in ("offsets", "timestamps"):
        return json.dumps(bound.per_partition)
    return str(bound.timestamp_ms) if bound.at == "timestamp" else bound.at


def _check_named(bound: Bound, partitions: list[TopicPartition]) -> None:
    """Raise `InvalidConfig` unless a bound given as JSON names exactly the partitions that are read."""
    if bound.at not in ("offsets", "timestamps"):
        return
    named = {TopicPartition(topic, number) for topic, numbers in bound.per_partition.items() for number in numbers}
    if missing := sorted(set(partitions) - named):
        accepted = f"an entry for each partition that is read; {_list_names(missing)} missing"
        raise InvalidConfig(bound.option, json.dumps(bound.per_partition), accepted)
    if unknown := sorted(named - set(partitions)):
        accepted = f"entries for the partitions that are read; {_list_names(unknown)} not among them"
        raise InvalidConfig(bound.option, json.dumps(bound.per_partition), accepted)


def _list_names(partitions: list[TopicPartition]) -> str:
    names = ", ".join(f"{tp.topic}/{tp.partition}" for tp in partitions[:5])
    return f"{names}{' and more are' if len(partitions) > 5 else ' is' if len(partitions) == 1 else ' are'}"


def _resolve_explicit(log: Partition, offset: int, end_offset: int, options: ReadOptions) -> int:
    if offset == EARLIEST:
        return log.log_start_offset
    if offset == LATEST:
        return end_offset
    return find_readable_start(log, offset, fail_on_data_loss=options.fail_on_data_loss)


def _limit_end(tp: TopicPartition, offset: int, end_offset: int, options: ReadOptions) -> int:
    """Limit an explicit end offset to the end of readable records. Raises `DataLoss` if failOnDataLoss is true.

    Records after that are not durable yet, or belong to an open transaction.
    """
    if offset <= end_offset:
        return offset
    why = f"{tp.topic}/{tp.partition}: end offset {offset} is after {end_offset}, the current end of readable records"
    if options.fail_on_data_loss:
        raise DataLoss(why)
    logger.warning("%s; the read ends at %d", why, end_offset)
    return end_offset


def find_readable_start(log: Partition, offset: int, *, fail_on_data_loss: bool) -> int:
    """Return the first readable offset from ``offset`` on.

    Raises `DataLoss` if ``offset`` itself is gone and ``fail_on_data_loss`` is true; otherwise logs a warning.
    """
    try:
        return log.check_position(offset)
    except OffsetOutOfRange as error:
        if fail_on_data_loss:
            raise DataLoss(str(error)) from None
        logger.warning("%s; the read continues with the remaining records", error)
        return error.log_start_offset if offset < error.log_start_offset else error.log_end_offset
    except LogTruncated as error:
        if fail_on_data_loss:
            raise DataLoss(str(error)) from None
        logger.warning("%s; the read continues after the lost range", error)
        return error.lost.end_offset


def describe_lost_range(log: Partition, span: OffsetRange) -> str | None:
    """Describe the first records of a range that were lost after the read was planned; None if none were lost.

    A truncation by `Partition.truncate` counts as a loss too.
    """
    name = f"{span.topic}/{span.partition}"
    for lost in log.lost_ranges() if span.epoch is not None and log.epoch != span.epoch else ():
        begin, end = max(lost.base_offset, span.start), min(lost.end_offset, span.end)
        if begin < end and lost.epoch > (span.epoch or 0):
            return f"{name}: offsets {begin} to {end - 1} are gone since the read was planned ({lost.reason})"
    return None


# ---------------------------------------------------------------- tasks


def split_into_tasks(
    store: LogStore,
    ranges: Iterable[OffsetRange],
    *,
    at_least: int | None = None,
    max_records: int | None = None,
    cores: int | None = None,
) -> list[list[OffsetRange]]:
    """Split ranges at batch boundaries into tasks with about the same number of records.

    at_least     minimum number of tasks; default: one for each core, but only one for each `_MIN_TASK_RECORDS` records
    max_records  maximum number of records in a task; a larger batch is split
    """
    ranges = [span for span in ranges if span.end > span.start]
    total = sum(span.end - span.start for span in ranges)
    wanted = at_least or max(1, min(cores or os.cpu_count() or 1, -(-total // _MIN_TASK_RECORDS)))
    even = total // wanted if at_least else -(-total // wanted)  # rounding up could give fewer tasks than at_least
    size = max(1, min(even, max_records or _MAX_TASK_RECORDS))
    tasks: list[list[OffsetRange]] = []
    room = 0
    for span in ranges:
        log = store.open_partition(span.topic, span.partition, span.topic_id)
        start = span.start
        while start < span.end:
            if room <= 0:
                tasks.append([])
                room = size
            # A small rest joins the last task, unless the user limits the size or sets the number of tasks.
            slack = 0 if max_records or at_least else size // 8
            stop = span.end if span.end - start <= room + slack else _find_batch_start(log, start + room, start)
            stop = min(stop, start + room if max_records else span.end)  # the next batch may start after the range
            tasks[-1].append(msgspec.structs.replace(span, start=start, end=stop))
            room -= stop - start
            start = stop
            if start < span.end:
                room = 0  # the task ends at a batch boundary: its remaining room is less than a batch
    return tasks


def _find_batch_start(log: Partition, offset: int, start: int) -> int:
    """Return the base offset of the batch that contains ``offset``, or else of the next batch.

    If this base offset is at or before ``start``, return ``offset`` itself, so that a task is not empty.
    """
    try:
        for batch in log.read(offset, max_bytes=1):
            base_offset = batch.header.base_offset
            return base_offset if base_offset > start else offset
    except LogTruncated as error:
        return error.lost.end_offset
    except (OffsetOutOfRange, CorruptBatch):  # deleted meanwhile, or damaged: the task that reads the range reports it
        pass
    return offset


def damage_logger(log: Partition) -> SkipListener:
    """Return the `on_skip` callback for skipDamaged: it logs each damaged range that `Partition.read` skips."""

    def log_skipped(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        name = f"{log.topic}/{log.number}"
        logger.warning("%s: skipped offsets %d to %d: %s", name, base_offset, end_offset - 1, damage)

    return log_skipped


# ---------------------------------------------------------------- offsets in the query's checkpoint


Document = dict[str, dict[str, int | str]]

_ID: Final = "id"
# Key of the topic id, next to the keys that are partition numbers.


def encode_positions(positions: Positions) -> Document:
    """Return positions as a JSON document, sorted, because Spark compares the documents as text."""
    document: Document = {}
    for tp in sorted(positions.offsets):
        document.setdefault(tp.topic, {})[str(tp.partition)] = positions.offsets[tp]
    for topic, some in document.items():
        if topic in positions.topic_ids:
            some[_ID] = positions.topic_ids[topic]
    return document


def decode_positions(document: Mapping[str, Mapping[str, int | str]]) -> Positions:
    """Parse the positions in a query's checkpoint. Raises `SegmentlogError` if the document is damaged."""
    try:
        offsets = {
            TopicPartition(check_topic_name(topic, internal=True), _parse_number(number)): _parse_number(str(offset))
            for topic, some in document.items()
            for number, offset in some.items()
            if number != _ID
        }
        return Positions(offsets, {topic: _parse_id(some[_ID]) for topic, some in document.items() if _ID in some})
    except (ValueError, TypeError, AttributeError) as error:
        why = "restore the checkpoint from a backup, or start the query with a new one"
        raise SegmentlogError(f"the offsets in the query's checkpoint are not valid ({error}); {why}") from None


def _parse_id(topic_id: object) -> str:
    if not is_topic_id(topic_id):
        raise ValueError(f"{topic_id!r} is not a topic id")
    return str(topic_id)


def _parse_number(number: str) -> int:
    if not (number.isascii() and number.isdecimal()):
        raise ValueError(f"{number!r} is not a partition or offset")
    return int(number)
