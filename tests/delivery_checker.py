"""Check the end state of a store against the events that its processes recorded, in the manner of Elle.

Each process records every action before it begins and its result afterwards. An action without a result may or may
not have happened. All other events are compared with the final content of the log.

    ["send", process, txn, topic, partition, values]   begins to append; txn is "" outside of a transaction
    ["ok", process]                                    the last send is acknowledged
    ["acked", process, topic, partition, [[offset, value], ...]]    these records are; offset -1: not reported
    ["refused", process]                               no record of the last send was appended
    ["commit", process, txn], ["abort", process, txn]  begins to end a transaction
    ["committed", process, txn], ["aborted", process, txn]
    ["handed", process, isolation, topic, partition, [[offset, value], ...]]     a reader got these records
    ["trims", process, topic, partition, [[offset, value, committed], ...]]      begins to delete these records
    ["owns", process, ns, member, generation, topic, partition]                  a member of a group reads it
    ["disowns", process, ns, member, topic, partition]
    ["error", process, text]                           a failure that must not happen

Values are unique, except those of named producers, which count: ``n:<name>:<topic>:<partition>:<number>``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

Event = list[Any]
Place = tuple[str, int]
"""Topic and partition."""

Content = dict[int, str]
"""Values by offset, ascending."""


class Final(msgspec.Struct):
    """The final content of a partition: all records, and those that ``read_committed`` shows."""

    everything: Content
    committed: Content
    log_end_offset: int
    last_stable_offset: int
    log_start_offset: int = 0
    """Records before this offset were deleted."""
    lost: list[tuple[int, int]] = []
    """Ranges of offsets that a power cut took, as the log reports them."""

    def is_lost(self, offset: int) -> bool:
        return any(base <= offset < end for base, end in self.lost)


Store = Mapping[Place, Final]


class Transaction(msgspec.Struct):
    """A transaction as the events describe it."""

    values: list[tuple[Place, str]] = []
    intent: str = ""
    result: str = ""

    @property
    def verdict(self) -> str:
        """Committed, aborted or unknown. If the process died before its "commit", the transaction is aborted."""
        if self.result:
            return self.result
        return "unknown" if self.intent == "commit" else "aborted"


class History(msgspec.Struct):
    """The events of all processes, by kind."""

    transactions: dict[str, Transaction] = {}
    acknowledged: list[tuple[Place, str]] = []
    refused: list[tuple[Place, str]] = []
    sent: set[str] = set()
    orders: dict[tuple[str, Place], list[str]] = {}
    """The values that each process sent to each partition, in that order. Values that are sent again after an abort are
    left out.
    """
    placed: list[tuple[Place, int, str]] = []
    """Offsets that producers got for their records."""
    trimmed: dict[Place, list[tuple[int, str, bool]]] = {}
    """Deleted records: offsets, values, and whether they were committed."""
    handed: dict[tuple[str, str, Place], list[tuple[int, str]]] = {}
    """Records by reader, isolation and partition, in the order in which the reader got them."""
    owned: list[Event] = []
    errors: list[str] = []


def gather(events: Iterable[Event]) -> History:
    """Return the history of the events; their order counts only within a process."""
    history = History()
    last: dict[str, tuple[str, list[tuple[Place, str]]]] = {}
    for kind, process, *rest in events:
        if kind == "send":
            txn, topic, partition, values = rest
            sent = [((topic, partition), value) for value in values]
            last[process] = (txn, sent)
            history.sent.update(values)
            history.orders.setdefault((process, (topic, partition)), []).extend(values)
            if txn:
                history.transactions.setdefault(txn, Transaction()).values += sent
        elif kind in ("ok", "refused"):
            txn, sent = last[process]
            if not txn:
                (history.acknowledged if kind == "ok" else history.refused).extend(sent)
        elif kind == "acked":
            place = (rest[0], rest[1])
            history.acknowledged += [(place, value) for _, value in rest[2]]
            history.placed += [(place, offset, value) for offset, value in rest[2] if offset >= 0]
        elif kind == "trims":
            history.trimmed.setdefault((rest[0], rest[1]), []).extend((at, value, kept) for at, value, kept in rest[2])
        elif kind in ("commit", "abort"):
            history.transactions.setdefault(rest[0], Transaction()).intent = kind
        elif kind in ("committed", "aborted"):
            history.transactions.setdefault(rest[0], Transaction()).result = kind
        elif kind == "handed":
            isolation, topic, partition, records = rest
            found = history.handed.setdefault((process, isolation, (topic, partition)), [])
            found += [(offset, value) for offset, value in records]
        elif kind in ("owns", "disowns"):
            history.owned.append([kind, process, *rest])
        elif kind == "error":
            history.errors.append(f"{process}: {rest[0]}")
    return history


def check(history: History, store: Store, *, power_cut: bool = False) -> list[str]:
    """Return all contradictions between the store, the events and the guarantees.

    With ``power_cut``, a lost range may contain records that ``read_uncommitted`` readers got, or that were
    acknowledged before they were durable. Pass only events of records that were durable.
    """
    store = _with_trimmed(history, store)
    return [
        *(f"error: {error}" for error in history.errors),
        *_check_acknowledged(history, store),
        *_check_doubled(history, store),
        *_check_named(store),
        *_check_order(history, store),
        *_check_transactions(history, store),
        *_check_offsets(history, store, power_cut=power_cut),
        *_check_readers(history, store, power_cut=power_cut),
        *_check_blocked(store),
    ]


def _with_trimmed(history: History, store: Store) -> Store:
    """Return the store as if no record had been deleted. A process reads before it deletes, and deletes only records
    whose transactions have ended.
    """
    found = dict(store)
    for place, records in history.trimmed.items():
        final = store[place]
        gone = {at: (value, kept) for at, value, kept in records if at < final.log_start_offset}
        everything = {at: value for at, (value, _) in sorted(gone.items())}
        committed = {at: value for at, (value, kept) in sorted(gone.items()) if kept}
        found[place] = msgspec.structs.replace(
            final, everything={**everything, **final.everything}, committed={**committed, **final.committed}
        )
    return found


def _check_acknowledged(history: History, store: Store) -> Iterator[str]:
    """Yield each acknowledged record that is missing, and each refused record that exists."""
    values = {place: set(final.committed.values()) for place, final in store.items()}
    for place, value in history.acknowledged:
        if value not in values[place]:
            yield f"lost: {value} of {place} was acknowledged"
    for place, value in history.refused:
        if value in values[place]:
            yield f"refused: {value} is in {place}, though the producer was told that nothing was appended"


def _check_doubled(history: History, store: Store) -> Iterator[str]:
    """Yield each value that exists twice, and each that no process sent."""
    counts = Counter(value for final in store.values() for value in final.everything.values())
    for value, count in counts.items():
        if count > 1 and not value.startswith("o:"):  # values of pipelines: an aborted record and its repetition
            yield f"doubled: {value} is there {count} times"
        if value not in history.sent:
            yield f"invented: {value} was never sent"


def _check_named(store: Store) -> Iterator[str]:
    """Yield each gap or repetition in the numbers of a named producer.

    Each number exists once, in order, from 0, however often the producer was killed.
    """
    for place, final in store.items():
        numbers: dict[str, list[int]] = defaultdict(list)
        for value in final.committed.values():
            if value.startswith("n:"):
                name, _, number = value.rpartition(":")
                numbers[name].append(int(number))
        for name, found in numbers.items():
            if found != list(range(len(found))):
                at = next(at for at, number in enumerate(found) if number != at)
                yield f"miscounted: {name} in {place} goes {found[max(at - 3, 0) : at + 4]} at its {at}th"


def _check_order(history: History, store: Store) -> Iterator[str]:
    """Yield each record that is stored before an earlier one of the same process and partition.

    Named producers, which count (see above), and pipelines may send a record again.
    """
    offsets = {
        place: {value: offset for offset, value in final.everything.items() if not value.startswith(("n:", "o:"))}
        for place, final in store.items()
    }
    for (process, place), values in history.orders.items():
        known = offsets.get(place, {})
        previous, before = -1, ""
        for value in values:
            offset = known.get(value, -1)
            if 0 <= offset < previous:
                yield f"sent order: {process} sent {value} after {before} to {place}, where it lies before it"
            if offset >= 0:
                previous, before = offset, value


def _check_transactions(history: History, store: Store) -> Iterator[str]:
    """Yield each transaction that is incomplete, committed but missing, or aborted but visible."""
    visible = {(place, value) for place, final in store.items() for value in final.committed.values()}
    for txn, transaction in history.transactions.items():
        found = [one for one in transaction.values if one in visible and not one[1].startswith("o:")]
        wanted = [one for one in transaction.values if not one[1].startswith("o:")]
        if not wanted:
            continue
        verdict = transaction.verdict
        if found and verdict == "aborted":
            yield f"aborted: {txn} was aborted, and {found[:3]} of its {len(wanted)} records are visible"
        elif verdict == "committed" and len(found) < len(wanted):
            missing = [one for one in wanted if one not in visible]
            yield f"uncommitted: {txn} was committed, and {missing[:3]} of its {len(wanted)} records are not visible"
        elif found and len(found) < len(wanted):
            missing = [one for one in wanted if one not in visible]
            yield f"half: of {txn} ({verdict}) {len(found)} of {len(wanted)} records are visible, not {missing[:3]}"


def _check_offsets(history: History, store: Store, *, power_cut: bool) -> Iterator[str]:
    """Yield each offset that had two values, for any process and at any time."""
    known: dict[tuple[Place, int], str] = {}
    for place, final in store.items():
        known.update({((place), offset): value for offset, value in final.everything.items()})
    for place, offset, value in history.placed:
        found = known.setdefault((place, offset), value)
        if found != value:
            yield f"offset: a producer was told that {value} is at {offset} of {place}, where others have {found}"
    for (reader, isolation, place), records in history.handed.items():
        for offset, value in records:
            found = known.setdefault((place, offset), value)
            if found != value:
                yield f"offset: {reader} was handed {value} at {offset} of {place}, where others have {found}"
        if not power_cut:
            everything = store[place].everything
            for offset, value in records:
                if offset not in everything:
                    yield f"gone: {reader} ({isolation}) was handed {value} at {offset} of {place}, which is empty"


def _check_readers(history: History, store: Store, *, power_cut: bool) -> Iterator[str]:
    """Yield each record that a reader got out of order, missed, or got without a commit."""
    transactional = {value for one in history.transactions.values() for _, value in one.values}
    for (reader, isolation, place), records in history.handed.items():
        final = store[place]
        content = final.committed if isolation == "read_committed" else final.everything
        offsets = list(content)
        previous = -1
        for offset, value in records:
            if offset <= previous:
                yield f"order: {reader} was handed {offset} of {place} after {previous}"
            elif previous >= 0 and not power_cut:
                skipped = offsets[bisect_right(offsets, previous) : bisect_left(offsets, offset)]
                skipped = [at for at in skipped if at >= final.log_start_offset]  # the rest may be deleted by then
                if skipped:
                    over = f"over {skipped[:5]}"
                    yield f"skipped: {reader} ({isolation}) went from {previous} to {offset} of {place}, {over}"
            previous = max(previous, offset)
            if isolation == "read_committed" and content.get(offset) != value:
                if power_cut and value not in transactional and final.is_lost(offset):
                    continue
                yield f"dirty: {reader} was handed {value} at {offset} of {place}, which is not committed"


def _check_blocked(store: Store) -> Iterator[str]:
    for place, final in store.items():
        if final.last_stable_offset != final.log_end_offset:
            yield f"blocked: {place} is decided up to {final.last_stable_offset} of {final.log_end_offset}"


def check_pipeline(store: Store, source: str, target: str) -> list[str]:
    """Yield each committed record of ``source`` that does not have exactly one ``o:<partition>:<offset>:...`` in
    ``target``.
    """
    found: list[str] = []
    places: Counter[tuple[int, int]] = Counter()
    for (topic, partition), final in store.items():
        if topic != target:
            continue
        last: dict[int, int] = {}
        for offset, value in final.committed.items():
            _, number, at, _ = value.split(":", 3)
            came = (int(number), int(at))
            places[came] += 1
            if last.get(came[0], -1) >= came[1]:
                found.append(f"pipeline order: {came} comes at {offset} of {target}/{partition}, after {last[came[0]]}")
            last[came[0]] = came[1]
    wanted = {
        (partition, offset)
        for (topic, partition), final in store.items()
        if topic == source
        for offset in final.committed
    }
    found += [f"pipeline: {came} went through {count} times" for came, count in places.items() if count > 1]
    found += [f"pipeline: {came} never went through" for came in sorted(wanted - places.keys())[:5]]
    found += [f"pipeline: {came} was no committed record" for came in sorted(places.keys() - wanted)[:5]]
    return found


def check_owners(history: History, *, evictions: bool) -> list[str]:
    """Return each partition that had two members in one generation or, without evictions, at one time.

    An evicted member may consider itself the owner until it wakes up. It is fenced then: see the pipeline.
    """
    found: list[str] = []
    holders: dict[tuple[str, int, int], str] = {}
    times: dict[str, int] = {}
    intervals: dict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)
    begun: dict[tuple[str, str, int], int] = {}
    for kind, _, time_ns, member, *rest in history.owned:
        times[member] = max(time_ns, times.get(member, 0))
        if kind == "owns":
            generation, topic, partition = rest
            holder = holders.setdefault((topic, partition, generation), member)
            if holder != member:
                found.append(f"owners: {topic}/{partition} belongs to {holder} and {member} in generation {generation}")
            begun[member, topic, partition] = time_ns
        else:
            topic, partition = rest
            start = begun.pop((member, topic, partition), None)
            if start is not None:
                intervals[topic, partition].append((start, time_ns, member))
    for (member, topic, partition), start in begun.items():  # the process was killed: it was seen alive until then
        intervals[topic, partition].append((start, times[member], member))
    if not evictions:
        for (topic, partition), spans in intervals.items():
            ends, before = 0, ""
            for start, end, member in sorted(spans):
                if start < ends and member != before:
                    found.append(f"owners: {member} and {before} read {topic}/{partition} at the same time")
                if end > ends:
                    ends, before = end, member
    return found
