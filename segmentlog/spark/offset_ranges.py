"""Which offsets are read: where reading begins and ends, what is gone from there, and how it is split among tasks."""

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

_WORTH_A_TASK: Final = 100_000
# Records. A task costs 36 ms.
_AT_MOST_A_TASK: Final = 4_000_000
# So that one that fails does not take hours with it.


class DataLoss(SegmentlogError):
    """Records that should be read are gone."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"{self.why}; to go on with what is left: .option('failOnDataLoss', 'false')"


class OffsetRange(msgspec.Struct, frozen=True, array_like=True):
    """The records ``[start, end)`` of a partition; of the topic with that id, if it is known, and of no other."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str | None = None
    epoch: int | None = None
    """Of the log when it was planned: what was lost in a later one was there."""


class Positions(msgspec.Struct, frozen=True):
    """Where a query is, and in which topics: one that is deleted and made anew has the same name and another id."""

    offsets: Offsets
    topic_ids: dict[str, str]
    """By name; without those of a checkpoint that was written when topics had no ids."""


# ---------------------------------------------------------------- which partitions


def partitions_to_read(store: LogStore, options: ReadOptions, *, all_there: bool = True) -> list[TopicPartition]:
    """The partitions that there are now of what was asked for, sorted. Raises `UnknownTopic`, if ``all_there``."""
    if options.partitions is not None:
        counts = {name: len(_all_of(store, name, must_exist=all_there)) for name in options.topics}
        missing = [tp for tp in options.partitions if tp.partition >= counts[tp.topic]]
        if missing and all_there:
            why = f"it has no partition {missing[0].partition}, only 0 to {counts[missing[0].topic] - 1}"
            raise UnknownTopic(missing[0].topic, why)
        return [tp for tp in options.partitions if tp not in missing]
    topics: Iterable[str] = options.topics
    if options.pattern is not None:
        pattern = re.compile(options.pattern)
        topics = [name for name in store.topics() if pattern.fullmatch(name)]
    found = [_all_of(store, name, must_exist=options.pattern is None and all_there) for name in topics]
    return sorted(tp for some in found for tp in some)


def _all_of(store: LogStore, name: str, *, must_exist: bool) -> list[TopicPartition]:
    try:
        return [TopicPartition(name, number) for number in range(store.topic(name).partition_count)]
    except UnknownTopic:
        if must_exist:
            if store.url is not None:  # of which only what is read was asked for
                where = without_secrets(store.url)
                raise UnknownTopic(name, f"it does not lie in {where}, or was not shipped yet") from None
            there = ", ".join(store.topics()[:20]) or "no topic at all"
            raise UnknownTopic(name, f"it does not exist in {store.path} (there is {there})") from None
        return []  # deleted since it was listed


# ---------------------------------------------------------------- where it begins and ends


def topic_ids(store: LogStore, partitions: Iterable[TopicPartition]) -> dict[str, str]:
    """Of their topics, by name. Raises `UnknownTopic`."""
    return {name: store.topic(name).id for name in sorted({tp.topic for tp in partitions})}


def end_of(store: LogStore, tp: TopicPartition, options: ReadOptions, topic_id: str | None = None) -> int:
    """Where a reader of that kind ends now. Raises `UnknownTopic`."""
    return store.open_partition(*tp, topic_id).end_offset(
        isolation=options.isolation, durable_only=options.durable_only
    )


def starting_offsets(store: LogStore, partitions: list[TopicPartition], options: ReadOptions) -> Offsets:
    """Where reading begins in each partition. Raises `InvalidConfig`, `DataLoss`."""
    return _resolve(store, partitions, options.starting, options, is_start=True)


def ending_offsets(store: LogStore, partitions: list[TopicPartition], options: ReadOptions) -> Offsets:
    """Where reading ends in each partition."""
    return _resolve(store, partitions, options.ending, options, is_start=False)


def _resolve(
    store: LogStore, partitions: list[TopicPartition], bound: Bound, options: ReadOptions, *, is_start: bool
) -> Offsets:
    given = {tp: bound.per_partition[tp.topic][tp.partition] for tp in _named(bound, partitions)}
    found = {}
    for tp in partitions:
        log = store.open_partition(*tp)
        end_offset = end_of(store, tp, options)
        if bound.at == "earliest":
            found[tp] = log.log_start_offset
        elif bound.at == "latest":
            found[tp] = end_offset
        elif bound.at == "offsets":
            found[tp] = _explicit(log, given[tp], end_offset, options)
            if not is_start:
                found[tp] = _readable_end(tp, found[tp], end_offset, options)
        else:
            timestamp_ms = bound.timestamp_ms if bound.at == "timestamp" else given[tp]
            offset = log.offset_for_timestamp(timestamp_ms)
            if offset is None and is_start and options.no_match == "error":
                accepted = (
                    f"{tp.topic}/{tp.partition} has no record at or after that time;"
                    " with startingOffsetsByTimestampStrategy = latest it is read from its end on"
                )
                raise InvalidConfig(bound.option, timestamp_ms, accepted)
            found[tp] = end_offset if offset is None else offset
            if not is_start:  # a time names no offset: what is not decided yet is not asked for by it
                found[tp] = min(found[tp], end_offset)
    return found


def check_order(store: LogStore, starts: Offsets, ends: Offsets, options: ReadOptions) -> None:
    """Raise `InvalidConfig` for bounds of which the end comes before the start: nothing can lie between them.

    Not where a start is above the end for another reason: of a partition whose last transaction is open, or that
    retention has overtaken with failOnDataLoss = false.
    """
    starting, ending = options.starting, options.ending
    for tp in sorted(starts):
        first, last = _given(starting, tp), _given(ending, tp)
        if (starting.at == "offsets") == (ending.at == "offsets") and min(first, last) >= 0:
            wrong = first > last
        else:
            first, last = starts[tp], ends[tp]
            wrong = last < first and options.fail_on_data_loss and last < end_of(store, tp, options)
        if wrong:
            accepted = f"at or before {ending.option}: {tp.topic}/{tp.partition} would be read from {first} to {last}"
            raise InvalidConfig(starting.option, _text(starting), accepted)


def _given(bound: Bound, tp: TopicPartition) -> int:
    """The offset or time that the user named for it; -1 for words."""
    if bound.at in ("offsets", "timestamps"):
        return bound.per_partition[tp.topic][tp.partition]
    return bound.timestamp_ms


def _text(bound: Bound) -> str:
    if bound.at in ("offsets", "timestamps"):
        return json.dumps(bound.per_partition)
    return str(bound.timestamp_ms) if bound.at == "timestamp" else bound.at


def _named(bound: Bound, partitions: list[TopicPartition]) -> list[TopicPartition]:
    """The partitions, once it is sure that JSON offsets name just these."""
    if bound.at not in ("offsets", "timestamps"):
        return []
    named = {TopicPartition(topic, number) for topic, numbers in bound.per_partition.items() for number in numbers}
    if missing := sorted(set(partitions) - named):
        accepted = f"an entry for each partition that is read; {_list(missing)} missing"
        raise InvalidConfig(bound.option, json.dumps(bound.per_partition), accepted)
    if unknown := sorted(named - set(partitions)):
        accepted = f"entries for the partitions that are read; {_list(unknown)} not among them"
        raise InvalidConfig(bound.option, json.dumps(bound.per_partition), accepted)
    return partitions


def _list(partitions: list[TopicPartition]) -> str:
    names = ", ".join(f"{tp.topic}/{tp.partition}" for tp in partitions[:5])
    return f"{names}{' and more are' if len(partitions) > 5 else ' is' if len(partitions) == 1 else ' are'}"


def _explicit(log: Partition, offset: int, end_offset: int, options: ReadOptions) -> int:
    if offset == EARLIEST:
        return log.log_start_offset
    if offset == LATEST:
        return end_offset
    return readable_start(log, offset, fail_on_data_loss=options.fail_on_data_loss)


def _readable_end(tp: TopicPartition, offset: int, end_offset: int, options: ReadOptions) -> int:
    """Not beyond what a reader of that kind may see: what is not durable yet, or not decided."""
    if offset <= end_offset:
        return offset
    why = f"{tp.topic}/{tp.partition}: offset {offset} is beyond {end_offset}, where this kind of reader ends now"
    if options.fail_on_data_loss:
        raise DataLoss(why)
    logger.warning("%s; reading ends there", why)
    return end_offset


def readable_start(log: Partition, offset: int, *, fail_on_data_loss: bool) -> int:
    """Where reading from ``offset`` on really begins. Raises `DataLoss`, unless what is gone may be passed over."""
    try:
        return log.check_position(offset)
    except OffsetOutOfRange as error:
        if fail_on_data_loss:
            raise DataLoss(str(error)) from None
        logger.warning("%s; reading goes on with what is there", error)
        return error.log_start_offset if offset < error.log_start_offset else error.log_end_offset
    except LogTruncated as error:
        if fail_on_data_loss:
            raise DataLoss(str(error)) from None
        logger.warning("%s; reading goes on there", error)
        return error.lost.end_offset


def lost_since(log: Partition, span: OffsetRange) -> str | None:
    """What of a range was there when it was planned, and was truncated, or lost in a crash, since; None: nothing."""
    name = f"{span.topic}/{span.partition}"
    for lost in log.lost_ranges() if span.epoch is not None and log.epoch != span.epoch else ():
        begin, end = max(lost.base_offset, span.start), min(lost.end_offset, span.end)
        if begin < end and lost.epoch > (span.epoch or 0):
            return f"{name}: offsets {begin} to {end - 1} are gone since the read was planned ({lost.reason})"
    return None


# ---------------------------------------------------------------- tasks


def split(
    store: LogStore,
    ranges: Iterable[OffsetRange],
    *,
    at_least: int | None = None,
    max_records: int | None = None,
    cores: int | None = None,
) -> list[list[OffsetRange]]:
    """The ranges, cut along batch boundaries and packed into tasks of about the same number of records.

    at_least     how many tasks there are to be; default: one for each core, if there is enough for them
    max_records  of a task
    """
    ranges = [span for span in ranges if span.end > span.start]
    total = sum(span.end - span.start for span in ranges)
    wanted = at_least or max(1, min(cores or os.cpu_count() or 1, -(-total // _WORTH_A_TASK)))
    even = total // wanted if at_least else -(-total // wanted)  # rounded up it would be fewer than asked for
    size = max(1, min(even, max_records or _AT_MOST_A_TASK))
    tasks: list[list[OffsetRange]] = []
    room = 0
    for span in ranges:
        log = store.open_partition(span.topic, span.partition, span.topic_id)
        start = span.start
        while start < span.end:
            if room <= 0:
                tasks.append([])
                room = size
            # What is nearly all of the rest is not worth another task, unless a task may not be larger.
            slack = 0 if max_records or at_least else size // 8
            stop = span.end if span.end - start <= room + slack else _batch_start(log, start + room, start)
            stop = min(stop, start + room if max_records else span.end)  # the next batch may begin beyond the end
            tasks[-1].append(msgspec.structs.replace(span, start=start, end=stop))
            room -= stop - start
            start = stop
            if start < span.end:
                room = 0  # up to a boundary: what is left of the room is less than a batch
    return tasks


def _batch_start(log: Partition, offset: int, start: int) -> int:
    """The boundary before ``offset``; ``offset`` itself inside a batch that reaches back to ``start``.

    Where ``offset`` is in a hole it is the boundary behind that.
    """
    try:
        for batch in log.read(offset, max_bytes=1):
            base_offset = batch.header.base_offset
            return base_offset if base_offset > start else offset
    except LogTruncated as error:
        return error.lost.end_offset
    except (OffsetOutOfRange, CorruptBatch):  # gone meanwhile, or damaged: whoever reads it tells
        pass
    return offset


def step_over(log: Partition) -> SkipListener:
    """What to give to `Partition.read` with skipDamaged: damage is told in Spark's log, and no more than that."""

    def tell(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        name = f"{log.topic}/{log.number}"
        logger.warning("%s: stepped over offsets %d to %d: %s", name, base_offset, end_offset - 1, damage)

    return tell


# ---------------------------------------------------------------- offsets as Spark keeps them


Document = dict[str, dict[str, int | str]]

_ID: Final = "id"
# Beside the numbers of a topic's partitions.


def to_json(positions: Positions) -> Document:
    """Positions as a JSON document, sorted: Spark compares them as text."""
    document: Document = {}
    for tp in sorted(positions.offsets):
        document.setdefault(tp.topic, {})[str(tp.partition)] = positions.offsets[tp]
    for topic, some in document.items():
        if topic in positions.topic_ids:
            some[_ID] = positions.topic_ids[topic]
    return document


def from_json(document: Mapping[str, Mapping[str, int | str]]) -> Positions:
    """What such a document says. Raises `SegmentlogError` for what is none: it comes from a checkpoint's files."""
    try:
        offsets = {
            TopicPartition(check_topic_name(topic, internal=True), _parse(number)): _parse(str(offset))
            for topic, some in document.items()
            for number, offset in some.items()
            if number != _ID
        }
        return Positions(offsets, {topic: _parse_id(some[_ID]) for topic, some in document.items() if _ID in some})
    except (ValueError, TypeError, AttributeError) as error:
        why = "bring it back from a backup, or begin with a new one"
        raise SegmentlogError(
            f"the query's checkpoint says where it was, and that cannot be ({error}); {why}"
        ) from None


def _parse_id(topic_id: object) -> str:
    if not is_topic_id(topic_id):
        raise ValueError(f"{topic_id!r} is no id of a topic")
    return str(topic_id)


def _parse(number: str) -> int:
    if not (number.isascii() and number.isdecimal()):
        raise ValueError(f"{number!r} is no partition or offset")
    return int(number)
