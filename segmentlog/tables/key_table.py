"""The location of the latest record of each key: sorted numpy arrays, 32 bytes per key, no Python objects.

An entry is the last record of a key in one partition::

    hash    u64    a mix of the key's 16-byte identity, see `segmentlog.format.key_hashes`; runs are sorted by it
    high    u64    upper half of the identity; together with the hash it determines the lower half
    place   u64    partition (17 bits), offset (46 bits), 1 if the record deletes the key
    time    i64    timestamp of the record, milliseconds

Entries are stored in *runs*, oldest first. New entries become a new run. The new run is merged with the run before it
if the new run has more than an eighth of the older run's entries. So ten million keys are in five or six runs, adding
one record moves few entries, and a look-up is a binary search in each run.

If a key has entries in several partitions, the entry with the latest timestamp counts; for equal timestamps, the entry
in the highest partition. All entries are kept, including tombstones, so that the result does not depend on the order in
which partitions were read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Uint64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_Number = TypeVar("_Number", np.uint64, np.int64)

OFFSET_MAX: Final = 2**46 - 1
_PARTITION_SHIFT: Final = 47
_DEAD: Final = np.uint64(1)
_ABSENT: Final = np.uint64(2**64 - 1)  # counts as a tombstone
_SMALL: Final = 1024
_RATIO: Final = 8

_WORD: Final = 2**64 - 1
_FACTORS: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Run(NamedTuple):
    """Entries in the order of their hashes, at most one per key and partition. Immutable."""

    hashes: Uint64Array
    highs: Uint64Array
    places: Uint64Array
    times: Int64Array

    def select(self, rows: Flags) -> Run:
        """Return a run of the entries whose flag in ``rows`` is set."""
        if rows.all():
            return self
        return Run(self.hashes[rows], self.highs[rows], self.places[rows], self.times[rows])

    def matches(self, hashes: Uint64Array, highs: Uint64Array) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yield pairs of arrays: indexes of requested keys, and the indexes of their entries in this run.

        A key with several entries (of several partitions) occurs in several pairs, once in each.
        """
        if not len(self.hashes):
            return
        at = np.searchsorted(self.hashes, hashes)
        last = len(self.hashes) - 1
        requested = np.flatnonzero(self.hashes[np.minimum(at, last)] == hashes)
        at = at[requested]
        while len(requested):
            hit = self.highs[at] == highs[requested]
            yield requested[hit], at[hit]
            at = at + 1  # entries of other partitions, or another key with the same hash
            more = np.flatnonzero((at <= last) & (self.hashes[np.minimum(at, last)] == hashes[requested]))
            requested, at = requested[more], at[more]


class KeyTable:
    """The entries of all keys. Not thread-safe; later additions do not change a `snapshot`.

    seed        makes hashes differ between tables
    keep_dead   keep tombstones: necessary if another partition may have an older value of the key
    small       runs with fewer entries are merged at once
    """

    def __init__(self, seed: int, *, keep_dead: bool = True, small: int = _SMALL) -> None:
        self._seed = seed
        self._keep_dead = keep_dead
        self._small = small
        self._runs: tuple[Run, ...] = ()
        self._count = 0

    def __len__(self) -> int:
        """Return the number of keys that have a value."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(column.nbytes for run in self._runs for column in run)

    def snapshot(self) -> KeyTable:
        """Return a copy with the present entries. Later changes of this table do not change the copy."""
        copy = KeyTable(self._seed, keep_dead=self._keep_dead, small=self._small)
        copy._runs, copy._count = self._runs, self._count
        return copy

    # ------------------------------------------------------------ looking up

    def find(self, low: int, high: int) -> tuple[int, int] | None:
        """Return (partition, offset) of the record with a key's value; None if it has none."""
        latest = self._find_latest(low, high)
        return None if latest is None else (latest[1] >> _PARTITION_SHIFT, (latest[1] >> 1) & OFFSET_MAX)

    def _find_latest(self, low: int, high: int) -> tuple[int, int] | None:
        """Return (time, place) of the key's latest entry; None if the key has no value."""
        needle = np.uint64(self._mix_one(low, high))
        latest: dict[int, tuple[int, int]] = {}
        for run in reversed(self._runs):
            hashes = run.hashes
            # The needle must have the same type: with a Python int, numpy would convert the whole run.
            at = int(hashes.searchsorted(needle))
            while at < len(hashes) and hashes[at] == needle:
                if int(run.highs[at]) == high:
                    place = int(run.places[at])
                    latest.setdefault(place >> _PARTITION_SHIFT, (int(run.times[at]), place))
                at += 1
            if latest and not self._keep_dead:
                break  # there is only one partition
        # A place starts with its partition, so that of equal times the highest partition wins.
        best = max(latest.values(), default=(0, 1))
        return None if best[1] & 1 else best

    def are_current(self, partition: int, low: Uint64Array, high: Uint64Array, offsets: Int64Array) -> Flags:
        """Return a flag for each record: whether it is the latest record of its key."""
        hashes = self._mix(low, high)
        # In this order, consecutive look-ups read neighbouring memory, which takes a quarter of the time.
        order = _sort_order(hashes)
        places, _ = self._find_current_places(hashes[order], high[order])
        current = np.empty(len(order), np.bool_)
        current[order] = places == _pack_places(partition, offsets, None)[order]
        return current

    def _find_current_places(self, hashes: Uint64Array, highs: Uint64Array) -> tuple[Uint64Array, Flags]:
        """Return two arrays: the place of each key's latest entry, and whether the key is in several partitions.

        The place is `_ABSENT` for a key without entries.
        """
        places = np.full(len(hashes), _ABSENT)
        mixed = np.zeros(len(hashes), np.bool_)
        for run in self._runs:
            for requested, at in run.matches(hashes, highs):
                found = run.places[at]
                if self._keep_dead:
                    before = places[requested]
                    mixed[requested] |= (before != _ABSENT) & (_unpack_partitions(before) != _unpack_partitions(found))
                places[requested] = found
        if mixed.any():
            places[mixed] = self._find_latest_places(hashes[mixed], highs[mixed])
        return places, mixed

    def _find_latest_places(self, hashes: Uint64Array, highs: Uint64Array) -> Uint64Array:
        """Return the place of the latest entry of each key, for keys with entries in several partitions."""
        found = [
            (requested, run.places[at], run.times[at], np.full(len(at), age))
            for age, run in enumerate(self._runs)
            for requested, at in run.matches(hashes, highs)
        ]
        requested, places, times, ages = (np.concatenate(column) for column in zip(*found, strict=True))
        partitions = _unpack_partitions(places)
        order = np.lexsort((ages, partitions, requested))
        order = order[_mark_last(requested[order], partitions[order])]
        order = order[np.lexsort((partitions[order], times[order], requested[order]))]
        order = order[_mark_last(requested[order])]
        return places[order]

    # ------------------------------------------------------------ changing

    def add(
        self,
        partition: int,
        low: Uint64Array,
        high: Uint64Array,
        offsets: Int64Array,
        times: Int64Array,
        dead: Flags | None = None,
    ) -> None:
        """Add records of one partition, in offset order and after all records that were added before.

        ``low`` and ``high`` are the identities of their keys; ``dead`` marks tombstones. Raises ValueError for an
        offset of more than 46 bits.
        """
        if not len(low):
            return
        if int(offsets[-1]) > OFFSET_MAX:
            raise ValueError(f"offset {offsets[-1]} does not fit into 46 bits")
        run = _create_run(self._mix(low, high), high, _pack_places(partition, offsets, dead), times)
        before, mixed = self._find_current_places(run.hashes, run.highs)
        alive = _are_live(run.places)
        self._runs = (*self._runs, run)
        contested = mixed | ((before != _ABSENT) & (_unpack_partitions(before) != np.uint64(partition)))
        if contested.any():
            alive[contested] = _are_live(self._find_current_places(run.hashes[contested], run.highs[contested])[0])
        self._count += int(np.count_nonzero(alive)) - int(np.count_nonzero(_are_live(before)))
        self._merge_newest()

    def mark_deleted(self, low: int, high: int) -> None:
        """Make the key's latest entry a tombstone, because its record does not exist in the log any more."""
        latest = self._find_latest(low, high)
        if latest is not None:
            time_ms, place = latest
            self.add(
                place >> _PARTITION_SHIFT,
                np.array([low], np.uint64),
                np.array([high], np.uint64),
                np.array([(place >> 1) & OFFSET_MAX], np.int64),
                np.array([time_ms], np.int64),
                np.ones(1, np.bool_),
            )

    def remove_below(self, partition: int, offset: int) -> None:
        """Remove the entries of a partition's records below an offset."""
        first, end = _pack_places(partition, np.array([0, offset]), None)
        kept = [run.select((run.places < first) | (run.places >= end)) for run in self._runs]
        if all(run is before for run, before in zip(kept, self._runs, strict=True)):
            return  # no run has such entries
        whole = reduce(lambda old, new: _merge_runs(old, new, drop_dead=not self._keep_dead), kept)
        self._runs = (whole,)
        self._count = self._count_live_keys(whole)

    def _merge_newest(self) -> None:
        """Merge the newest run with the run before it, while it has more than an eighth of that run's entries."""
        runs = list(self._runs)
        while len(runs) > 1 and len(runs[-2].hashes) < max(self._small, _RATIO * len(runs[-1].hashes)):
            new, old = runs.pop(), runs.pop()
            runs.append(_merge_runs(old, new, drop_dead=not runs and not self._keep_dead))
        self._runs = tuple(runs)

    def _count_live_keys(self, run: Run) -> int:
        """Return the number of keys with a value. ``run`` must hold all entries of the table."""
        counts = _are_live(run.places)
        same = run.hashes[1:] == run.hashes[:-1]
        twins = np.flatnonzero(np.append(same, False) | np.append(False, same))
        counts[twins] &= self._find_current_places(run.hashes[twins], run.highs[twins])[0] == run.places[twins]
        return int(np.count_nonzero(counts))

    # ------------------------------------------------------------ hashing

    # The identities themselves are badly distributed: all keys of up to 8 bytes have the same upper half. For each
    # `high` the mix maps `low` one to one, so equal hashes and highs mean equal keys.

    def _mix(self, low: Uint64Array, high: Uint64Array) -> Uint64Array:
        first, second, third = map(np.uint64, _FACTORS)
        mixed = high ^ np.uint64(self._seed)
        mixed *= first
        mixed ^= mixed >> np.uint64(32)
        mixed ^= low
        mixed *= second
        mixed ^= mixed >> np.uint64(29)
        mixed *= third
        mixed ^= mixed >> np.uint64(32)
        return mixed

    def _mix_one(self, low: int, high: int) -> int:
        first, second, third = _FACTORS
        mixed = (high ^ self._seed) * first & _WORD
        mixed ^= mixed >> 32 ^ low
        mixed = mixed * second & _WORD
        mixed = (mixed ^ mixed >> 29) * third & _WORD
        return mixed ^ mixed >> 32


def _pack_places(partition: int, offsets: Int64Array, dead: Flags | None) -> Uint64Array:
    places = (offsets.astype(np.uint64) << np.uint64(1)) | np.uint64(partition << _PARTITION_SHIFT)
    return places if dead is None else places | dead.astype(np.uint64)


def _unpack_partitions(places: Uint64Array) -> Uint64Array:
    return places >> np.uint64(_PARTITION_SHIFT)


def _are_live(places: Uint64Array) -> Flags:
    live: Flags = (places & _DEAD) == 0
    return live


def _mark_last(*columns: npt.NDArray[np.generic]) -> Flags:
    """Return a flag for each row: whether it is the last of equal rows. Equal rows must follow one another."""
    last = np.ones(len(columns[0]), np.bool_)
    last[:-1] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return last


def _create_run(hashes: Uint64Array, highs: Uint64Array, places: Uint64Array, times: Int64Array) -> Run:
    """Create a run with the last record of each key from records of one partition in offset order."""
    order = _sort_order(hashes)
    sorted_hashes, sorted_highs = hashes[order], highs[order]
    last = _mark_last(sorted_hashes, sorted_highs)
    if np.any((sorted_hashes[1:] == sorted_hashes[:-1]) & (sorted_highs[1:] != sorted_highs[:-1])):
        # Two keys have the same hash, and their records alternate. This happens to a few in 10^15 pairs.
        order = np.lexsort((highs, hashes))  # stable
        last = _mark_last(hashes[order], highs[order])
    order = order[last]
    return Run(hashes[order], highs[order], places[order], times[order])


def _sort_order(hashes: Uint64Array) -> Int64Array:
    """Return the order that sorts the hashes stably, like `np.argsort`, but in a fifth of the time.

    Replaces the low bits of each hash by its index and sorts the resulting numbers, which is faster.
    """
    bits = max(len(hashes) - 1, 1).bit_length()
    index_mask = np.uint64((1 << bits) - 1)
    packed = (hashes & ~index_mask) | np.arange(len(hashes), dtype=np.uint64)
    packed.sort()
    order = (packed & index_mask).astype(np.int64)
    in_order = hashes[order]
    if np.any(in_order[1:] < in_order[:-1]):  # hashes differ only in bits that the index has replaced
        order = np.argsort(hashes, kind="stable")
    return order


def _merge_runs(old: Run, new: Run, *, drop_dead: bool) -> Run:
    """Merge two runs; of entries with the same key and partition, keep the newer one."""
    kept = np.ones(len(old.hashes), np.bool_)
    for requested, at in old.matches(new.hashes, new.highs):
        same = _unpack_partitions(new.places[requested]) == _unpack_partitions(old.places[at])
        kept[at[same]] = False
    if drop_dead:
        kept &= _are_live(old.places)
        new = new.select(_are_live(new.places))
    old = old.select(kept)
    is_new = np.zeros(len(old.hashes) + len(new.hashes), np.bool_)
    is_new[np.searchsorted(old.hashes, new.hashes) + np.arange(len(new.hashes))] = True
    is_old = ~is_new

    def interleave(older: npt.NDArray[_Number], newer: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        column = np.empty(len(is_new), older.dtype)
        column[is_old], column[is_new] = older, newer
        return column

    return Run(
        interleave(old.hashes, new.hashes),
        interleave(old.highs, new.highs),
        interleave(old.places, new.places),
        interleave(old.times, new.times),
    )
