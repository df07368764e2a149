"""Transactions over several partitions of which some are cut: no part of one is kept without the rest. Pure.

A commit counts in a partition by its marker there. Where a cut takes the marker, or some of the data, away from one
partition, every other partition is cut in front of its own: then nobody sees any part of the transaction. Others may
be torn by that, and so on, until none is.

Which markers belong together the decisions say, each of which names the end of its data in every partition. Of those
that were compacted away the time says it: a marker and the one of the same producer that is nearest to it in another
partition belong together, if each is the nearest of the other. That is a guess where one producer has committed
several times within moments, over different partitions: one may be taken for a part of another one.
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
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.restore.cut_points import Cuts
from segmentlog.transactions.transaction_log import decode_state

_NUMBER_BITS: Final = 20
_ID_LENGTH: Final = 36
_ID_DASHES: Final = 4


class End(msgspec.Struct, frozen=True):
    """The end of a transaction in one partition: data in ``[first_offset, offset)``, the marker at ``offset``."""

    producer_id: int
    first_offset: int
    offset: int
    timestamp_ms: int
    committed: bool


class Commit(msgspec.Struct, frozen=True):
    """A transaction that was committed: the offset behind its data, by partition."""

    producer_id: int
    ends: dict[Where, int]
    is_rest: bool = False
    """Its decision may be gone: all that is known is that it counts there, marker or not."""
    decided_ms: int = 0
    """Wall clock, or a little later."""

    @property
    def is_by_id(self) -> bool:
        """Whether topics go by their ids; in a store that was upgraded old decisions have names."""
        return all(len(topic_id) == _ID_LENGTH and topic_id.count("-") == _ID_DASHES for topic_id, _ in self.ends)


class Kept(msgspec.Struct):
    """What is left of the partitions, and of their transactions."""

    cuts: Cuts
    undone: dict[Where, set[int]] = {}
    """Markers of commits that do not count any more, in partitions that are not cut."""
    undecided: set[tuple[Where, int]] = set()
    """Producers whose transaction has no marker there, and is taken back elsewhere."""
    committed: set[tuple[Where, int]] = set()
    """Producers whose transaction has no marker there, and is committed as a whole."""
    producers: set[int] = set()
    """Of all transactions that are taken back."""


class _Transaction(msgspec.Struct):
    """One that was committed: its markers, and the ends of its data where it has none."""

    producer_id: int
    markers: list[tuple[Where, End]]
    ends: dict[Where, int]
    is_undone: bool = False
    decided_ms: int = 0

    def needs(self) -> Iterator[tuple[Where, int]]:
        """How far each partition has to reach."""
        for where, marker in self.markers:
            yield where, marker.offset + 1
        yield from self.ends.items()


def ends_in(data: bytes, start_offset: int) -> list[End]:
    """The markers in a segment's batches behind the log start: at it, all that they are about has been deleted."""
    view = memoryview(data)
    found = []
    for position, header in scan_batches(view, 0, len(view)):
        if header.is_control and header.base_offset > start_offset:
            marker = decode_marker(header, check_payload(view, position, header))
            if marker is not None:
                end = End(
                    marker.producer_id, marker.first_offset, marker.offset, header.max_timestamp, marker.committed
                )
                found.append(end)
    return found


def commits_in(data: bytes) -> list[Commit]:
    """The decisions to commit in a segment of the log of decisions."""
    view = memoryview(data)
    found = []
    for position, header in scan_batches(view, 0, len(view)):
        for value in record_batch(header, check_payload(view, position, header)).values:
            state = None if value is None else decode_state(value)
            if state is None:
                continue
            if state.status in ("PrepareCommit", "CompleteCommit"):
                ends = {(where[0], where[1]): end for where, end in zip(state.partitions, state.ends, strict=False)}
                found.append(Commit(state.producer_id, ends, decided_ms=state.updated_ms))
            for marker in state.unsettled:
                found.append(
                    Commit(state.producer_id, {(marker.topic_id, marker.partition): marker.offset}, is_rest=True)
                )
    return found


def keep_together(
    cuts: Cuts, ends: Mapping[Where, Sequence[End]], commits: Iterable[Commit], uncut: Collection[Where],
    at_ms: int | None = None,
) -> Kept:  # fmt: skip
    """Cut so that no transaction is torn, nor kept that was decided after ``at_ms`` and lacks a marker that says so.

    ``ends``: all that ended, of each partition in the order of offsets, behind its cut as well. ``uncut``: partitions
    that are never cut: what is to go of them is told.
    """
    transactions = _transactions(ends, commits)
    kept = Kept(dict(cuts))
    waiting: dict[Where, list[tuple[int, int]]] = defaultdict(list)
    for index, one in enumerate(transactions):
        for where, need in one.needs():
            waiting[where].append((need, index))
    for needs in waiting.values():
        needs.sort()
    to_see = [where for where in cuts if where in waiting]
    for one in transactions:
        if at_ms is not None and one.ends and one.decided_ms > at_ms:
            one.is_undone = True
            to_see += _take_back(one, kept, uncut)
    while to_see:
        where = to_see.pop()
        needs = waiting[where]
        while needs and needs[-1][0] > kept.cuts[where]:
            one = transactions[needs.pop()[1]]
            if not one.is_undone:
                one.is_undone = True
                to_see += _take_back(one, kept, uncut)
    _tell_undecided(transactions, kept)
    return kept


def _take_back(one: _Transaction, kept: Kept, uncut: Collection[Where]) -> Iterator[Where]:
    """Cut in front of each marker; the partitions that are cut further than before."""
    kept.producers.add(one.producer_id)
    for where, marker in one.markers:
        if where in uncut:
            kept.undone.setdefault(where, set()).add(marker.offset)
        elif marker.offset < kept.cuts.get(where, marker.offset + 1):
            kept.cuts[where] = marker.offset
            yield where


def _tell_undecided(transactions: Iterable[_Transaction], kept: Kept) -> None:
    for one in transactions:
        for where in one.ends:
            (kept.undecided if one.is_undone else kept.committed).add((where, one.producer_id))
    kept.committed -= kept.undecided


# ---------------------------------------------------------------- what belongs together


def _transactions(ends: Mapping[Where, Sequence[End]], commits: Iterable[Commit]) -> list[_Transaction]:
    by_producer: dict[int, dict[Where, list[End]]] = defaultdict(dict)
    for where, found_there in ends.items():
        for end in found_there:
            by_producer[end.producer_id].setdefault(where, []).append(end)
    found: dict[tuple[object, ...], _Transaction] = {}
    known: set[tuple[Where, int]] = set()
    for commit in commits:
        key = (commit.producer_id, commit.is_rest, *sorted(commit.ends.items()))
        decided_ms = min(commit.decided_ms, found[key].decided_ms if key in found else commit.decided_ms)
        one = found[key] = _Transaction(commit.producer_id, [], {}, decided_ms=decided_ms)
        for where, end_offset in commit.ends.items():
            if where not in ends or not end_offset:
                continue  # deleted since, or not restored; or nothing was written there
            marker = _marker_behind(by_producer[commit.producer_id].get(where, []), end_offset)
            if marker is None:
                one.ends[where] = end_offset
            elif marker.first_offset < end_offset and marker.committed and not commit.is_rest:
                one.markers.append((where, marker))
                known.add((where, marker.offset))
    transactions = list(found.values())
    for producer_id, markers_of in by_producer.items():
        unknown = {
            where: [one for one in markers if one.committed and (where, one.offset) not in known]
            for where, markers in markers_of.items()
        }
        transactions += _by_time(producer_id, {where: markers for where, markers in unknown.items() if markers})
    return transactions


def _marker_behind(markers: Sequence[End], end: int) -> End | None:
    """The first at or behind the end of a transaction's data."""
    at = bisect_left(markers, end, key=lambda marker: marker.offset)
    return markers[at] if at < len(markers) else None


def _by_time(producer_id: int, markers: Mapping[Where, Sequence[End]]) -> Iterator[_Transaction]:
    """Those of which no decision is left."""
    group: dict[tuple[Where, int], tuple[Where, int]] = {}

    def first_of(member: tuple[Where, int]) -> tuple[Where, int]:
        while (following := group.get(member, member)) != member:
            member = following
        return member

    for here, there in combinations(markers, 2):
        for one, other in _nearest(markers[here], markers[there]):
            first, second = first_of((here, one.offset)), first_of((there, other.offset))
            if first != second:
                group[second] = first
    found: dict[tuple[Where, int], _Transaction] = {}
    for where, ends in markers.items():
        for end in ends:
            of_end = found.setdefault(first_of((where, end.offset)), _Transaction(producer_id, [], {}))
            of_end.markers.append((where, end))
    yield from found.values()


def _nearest(here: Sequence[End], there: Sequence[End]) -> Iterator[tuple[End, End]]:
    """Pairs of which each is the nearest of the other in time."""
    moments_here, moments_there = _moments(here), _moments(there)
    of_here = [_nearest_of(moment, moments_there) for moment in moments_here]
    of_there = [_nearest_of(moment, moments_here) for moment in moments_there]
    for index, nearest in enumerate(of_here):
        if of_there[nearest] == index:
            yield here[index], there[nearest]


def _moments(ends: Iterable[End]) -> list[int]:
    """When they were written, ascending: of those in one millisecond their number counts, too."""
    moments: list[int] = []
    for end in ends:
        moment = end.timestamp_ms << _NUMBER_BITS
        moments.append(max(moment, moments[-1] + 1) if moments else moment)
    return moments


def _nearest_of(moment: int, others: Sequence[int]) -> int:
    at = bisect_left(others, moment)
    candidates = [index for index in (at - 1, at) if 0 <= index < len(others)]
    return min(candidates, key=lambda index: abs(others[index] - moment))
