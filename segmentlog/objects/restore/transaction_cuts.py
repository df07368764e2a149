"""Extend the cuts of a restore so that no transaction over several partitions is split. Without I/O.

A commit is valid in a partition that contains its marker. If a cut removes the marker, or some of the records, from one
partition, every other partition of the transaction is cut before its own marker. So no reader sees any part of the
transaction. These cuts may split other transactions, and so on, until none is split.

The transaction log records which markers belong to one transaction: each decision contains the end offset of its
records in every partition. If the decisions were compacted away, markers are grouped by time. Markers of one producer
in two partitions belong to one transaction if each is nearest in time to the other. This is a guess: if a producer
commits several times in quick succession, over different partitions, markers of two transactions may be matched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final

import msgspec

from segmentlog.format.batch import check_payload
from segmentlog.format.control import decode_marker
from segmentlog.format.decoded_batch import record_batch
from segmentlog.format.scan import scan_batches
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.restore.cut_points import Cuts
from segmentlog.transactions.transaction_log import decode_state

_NUMBER_BITS: Final = 20
_ID_LENGTH: Final = 36
_ID_DASHES: Final = 4


class TransactionEnd(msgspec.Struct, frozen=True):
    """The end of a transaction in one partition: records in ``[first_offset, offset)``, its marker at ``offset``."""

    producer_id: int
    first_offset: int
    offset: int
    timestamp_ms: int
    committed: bool


class CommitDecision(msgspec.Struct, frozen=True):
    """A committed transaction: the offset after its records, by partition."""

    producer_id: int
    ends: dict[PartitionKey, int]
    is_rest: bool = False
    """Whether the decision itself may be compacted away, so that other partitions of the transaction are unknown."""
    decided_ms: int = 0
    """Wall clock of the decision, or a little later."""

    @property
    def is_by_id(self) -> bool:
        """Whether the decision identifies topics by id. Decisions of old versions have names."""
        return all(len(topic_id) == _ID_LENGTH and topic_id.count("-") == _ID_DASHES for topic_id, _ in self.ends)


class ConsistentCuts(msgspec.Struct):
    """Cuts that split no transaction, and the transactions that they undo."""

    cuts: Cuts
    undone: dict[PartitionKey, set[int]] = {}
    """Offsets of commit markers that are not valid any more, in partitions that are not cut."""
    undecided: set[tuple[PartitionKey, int]] = set()
    """(partition, producer id) of undone transactions that have no marker in that partition."""
    committed: set[tuple[PartitionKey, int]] = set()
    """(partition, producer id) of committed transactions that have no marker in that partition."""
    producers: set[int] = set()
    """Producer ids of all undone transactions."""


class _CutTransaction(msgspec.Struct):
    """A committed transaction: its markers, and the ends of its records in partitions without a marker."""

    producer_id: int
    markers: list[tuple[PartitionKey, TransactionEnd]]
    ends: dict[PartitionKey, int]
    is_undone: bool = False
    decided_ms: int = 0

    def needed_ends(self) -> Iterator[tuple[PartitionKey, int]]:
        """Yield the end offset that each partition must have so that the transaction is whole."""
        for partition_key, marker in self.markers:
            yield partition_key, marker.offset + 1
        yield from self.ends.items()


def find_ends(data: bytes, start_offset: int) -> list[TransactionEnd]:
    """Return the transactions that end in a piece. Omit a marker at the log start: its records have been deleted."""
    view = memoryview(data)
    found = []
    for position, header in scan_batches(view, 0, len(view)):
        if header.is_control and header.base_offset > start_offset:
            marker = decode_marker(header, check_payload(view, position, header))
            if marker is not None:
                end = TransactionEnd(
                    marker.producer_id, marker.first_offset, marker.offset, header.max_timestamp, marker.committed
                )
                found.append(end)
    return found


def find_commits(data: bytes) -> list[CommitDecision]:
    """Return the commit decisions in a piece of the transaction log."""
    view = memoryview(data)
    found = []
    for position, header in scan_batches(view, 0, len(view)):
        for value in record_batch(header, check_payload(view, position, header)).values:
            state = None if value is None else decode_state(value)
            if state is None:
                continue
            if state.status in ("PrepareCommit", "CompleteCommit"):
                ends = {
                    (partition_key[0], partition_key[1]): end
                    for partition_key, end in zip(state.partitions, state.ends, strict=False)
                }
                found.append(CommitDecision(state.producer_id, ends, decided_ms=state.updated_ms))
            for marker in state.unconfirmed_markers:
                found.append(
                    CommitDecision(
                        state.producer_id, {(marker.topic_id, marker.partition): marker.offset}, is_rest=True
                    )
                )
    return found


def extend_cuts(
    cuts: Cuts, ends: Mapping[PartitionKey, Sequence[TransactionEnd]], commits: Iterable[CommitDecision],
    uncut: Collection[PartitionKey], at_ms: int | None = None,
) -> ConsistentCuts:  # fmt: skip
    """Extend ``cuts`` so that no transaction is split.

    ends   all transaction ends of each partition, in the order of offsets, also after its cut
    uncut  partitions that must not be cut; their invalid markers are returned in `ConsistentCuts.undone`
    at_ms  undo transactions that were decided after this time and lack a marker in some partition: a cut at a time
           finds only markers, not decisions
    """
    transactions = _transactions(ends, commits)
    kept = ConsistentCuts(dict(cuts))
    needed_ends: dict[PartitionKey, list[tuple[int, int]]] = defaultdict(list)  # (end offset, index of transaction)
    for index, transaction in enumerate(transactions):
        for partition_key, end_offset in transaction.needed_ends():
            needed_ends[partition_key].append((end_offset, index))
    for in_partition in needed_ends.values():
        in_partition.sort()
    to_check = [partition_key for partition_key in cuts if partition_key in needed_ends]
    for transaction in transactions:
        if at_ms is not None and transaction.ends and transaction.decided_ms > at_ms:
            transaction.is_undone = True
            to_check += _undo(transaction, kept, uncut)
    while to_check:
        partition_key = to_check.pop()
        in_partition = needed_ends[partition_key]
        while in_partition and in_partition[-1][0] > kept.cuts[partition_key]:
            transaction = transactions[in_partition.pop()[1]]
            if not transaction.is_undone:
                transaction.is_undone = True
                to_check += _undo(transaction, kept, uncut)
    _collect_undecided(transactions, kept)
    return kept


def _undo(
    transaction: _CutTransaction, kept: ConsistentCuts, uncut: Collection[PartitionKey]
) -> Iterator[PartitionKey]:
    """Cut each partition before its marker; yield the partitions whose cut has moved."""
    kept.producers.add(transaction.producer_id)
    for partition_key, marker in transaction.markers:
        if partition_key in uncut:
            kept.undone.setdefault(partition_key, set()).add(marker.offset)
        elif marker.offset < kept.cuts.get(partition_key, marker.offset + 1):
            kept.cuts[partition_key] = marker.offset
            yield partition_key


def _collect_undecided(transactions: Iterable[_CutTransaction], kept: ConsistentCuts) -> None:
    for transaction in transactions:
        for partition_key in transaction.ends:
            (kept.undecided if transaction.is_undone else kept.committed).add((partition_key, transaction.producer_id))
    kept.committed -= kept.undecided


# ---------------------------------------------------------------- which markers belong together


def _transactions(
    ends: Mapping[PartitionKey, Sequence[TransactionEnd]], commits: Iterable[CommitDecision]
) -> list[_CutTransaction]:
    by_producer: dict[int, dict[PartitionKey, list[TransactionEnd]]] = defaultdict(dict)
    for partition_key, partition_ends in ends.items():
        for end in partition_ends:
            by_producer[end.producer_id].setdefault(partition_key, []).append(end)
    found: dict[tuple[object, ...], _CutTransaction] = {}
    known: set[tuple[PartitionKey, int]] = set()
    for commit in commits:
        key = (commit.producer_id, commit.is_rest, *sorted(commit.ends.items()))
        decided_ms = min(commit.decided_ms, found[key].decided_ms if key in found else commit.decided_ms)
        transaction = found[key] = _CutTransaction(commit.producer_id, [], {}, decided_ms=decided_ms)
        for partition_key, end_offset in commit.ends.items():
            if partition_key not in ends or not end_offset:
                continue  # a deleted or omitted partition, or a partition without records
            marker = _marker_after(by_producer[commit.producer_id].get(partition_key, []), end_offset)
            if marker is None:
                transaction.ends[partition_key] = end_offset
            elif marker.first_offset < end_offset and marker.committed and not commit.is_rest:
                transaction.markers.append((partition_key, marker))
                known.add((partition_key, marker.offset))
    transactions = list(found.values())
    for producer_id, markers_of in by_producer.items():
        unknown = {
            partition_key: [end for end in markers if end.committed and (partition_key, end.offset) not in known]
            for partition_key, markers in markers_of.items()
        }
        transactions += _group_by_time(
            producer_id, {partition_key: markers for partition_key, markers in unknown.items() if markers}
        )
    return transactions


def _marker_after(markers: Sequence[TransactionEnd], end: int) -> TransactionEnd | None:
    """Return the first marker at or after the end of a transaction's records."""
    at = bisect_left(markers, end, key=lambda marker: marker.offset)
    return markers[at] if at < len(markers) else None


def _group_by_time(
    producer_id: int, markers: Mapping[PartitionKey, Sequence[TransactionEnd]]
) -> Iterator[_CutTransaction]:
    """Yield the transactions whose decisions were compacted away. Group their markers by time."""
    group: dict[tuple[PartitionKey, int], tuple[PartitionKey, int]] = {}

    def first_of(member: tuple[PartitionKey, int]) -> tuple[PartitionKey, int]:
        while (following := group.get(member, member)) != member:
            member = following
        return member

    for first_key, second_key in combinations(markers, 2):
        for first_end, second_end in _nearest(markers[first_key], markers[second_key]):
            first, second = first_of((first_key, first_end.offset)), first_of((second_key, second_end.offset))
            if first != second:
                group[second] = first
    found: dict[tuple[PartitionKey, int], _CutTransaction] = {}
    for partition_key, ends in markers.items():
        for end in ends:
            of_end = found.setdefault(first_of((partition_key, end.offset)), _CutTransaction(producer_id, [], {}))
            of_end.markers.append((partition_key, end))
    yield from found.values()


def _nearest(
    first: Sequence[TransactionEnd], second: Sequence[TransactionEnd]
) -> Iterator[tuple[TransactionEnd, TransactionEnd]]:
    """Yield the pairs of markers that are mutually nearest in time."""
    first_times, second_times = _ascending_times(first), _ascending_times(second)
    nearest_to_first = [_nearest_of(time, second_times) for time in first_times]
    nearest_to_second = [_nearest_of(time, first_times) for time in second_times]
    for index, nearest in enumerate(nearest_to_first):
        if nearest_to_second[nearest] == index:
            yield first[index], second[nearest]


def _ascending_times(ends: Iterable[TransactionEnd]) -> list[int]:
    """Return a time for each marker, strictly ascending in the order of offsets.

    The times have sub-millisecond steps, so that markers with the same or an earlier timestamp stay in order.
    """
    times: list[int] = []
    for end in ends:
        time = end.timestamp_ms << _NUMBER_BITS
        times.append(max(time, times[-1] + 1) if times else time)
    return times


def _nearest_of(time: int, others: Sequence[int]) -> int:
    at = bisect_left(others, time)
    candidates = [index for index in (at - 1, at) if 0 <= index < len(others)]
    return min(candidates, key=lambda index: abs(others[index] - time))
