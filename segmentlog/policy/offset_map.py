"""The offset map of compaction: the last records of millions of keys, in a bounded amount of memory.

Like Kafka's cleaner, the map needs 24 bytes an entry: three arrays (low and high half of the key's identity,
offset). It finds equal keys by sorting instead of probing a hash table:

    add      append entries, including duplicates, at the speed of a copy
    full     sort (39 bits of hash, index) packed into one u64 per entry; neighbours with equal
             identities are one key: only its last entries stay, in offset order
    finish   sort and remove duplicates a last time
    find     search a directory of the sorted hashes, which the first call builds

numpy sorts plain u64 in 10 to 13 ns an item. An indirect sort takes 60 to 140 ns, a vectorised
open-addressing table 125 to 185 (one to four million items). Entries stay in offset order, so the
surviving offsets of a batch are a slice of one array.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from segmentlog.format.key_hashes import Uint64Array

ENTRY_BYTES: Final = 42
"""24 bytes for the entry, 18 bytes of work space for sorting and for `OffsetMap.find`."""

_MIX_A: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_B: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT: Final = np.uint64(32)
_ONE: Final = np.uint64(1)
_BLOCK: Final = 1 << 14
# Arrays of this many items stay in the cache, and need no new memory.
_FEW: Final = 3
_WORTHWHILE: Final = 8
# The map is full when removing duplicates frees less than this part of it.

Offsets = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_Indices = npt.NDArray[np.intp]


class OffsetMap:
    """Collects entries, and retains the last ``keep_last`` of each key. Not thread-safe.

    The map takes ``buffer_bytes`` and a few megabytes, and has room for at least one entry. With
    ``keep_last`` above 1 an entry may be *dead* (a tombstone, an expired record): a dead entry
    stays, and all earlier entries of its key are removed.
    """

    def __init__(self, buffer_bytes: int, keep_last: int = 1) -> None:
        extra = 0 if keep_last == 1 else 1 + 12 + 12 * keep_last
        self.capacity = max(buffer_bytes // (ENTRY_BYTES + extra), 1)
        self.keep_last = keep_last
        self.count = 0
        self.added = 0
        """Number of entries added so far, including duplicates."""
        self.is_full = False
        # Only reserved: the kernel allocates a page when it is first written.
        self._low = np.empty(self.capacity, np.uint64)
        self._high = np.empty(self.capacity, np.uint64)
        self._offsets = np.empty(self.capacity, np.int64)
        self._dead = np.empty(self.capacity if keep_last > 1 else 0, np.bool_)
        self._sorted = np.empty(self.capacity, np.uint64)
        self._is_indexed = False
        self._index_bits = 1
        self._directory: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self._directory_shift = np.uint64(63)
        self._run_of: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._run_counts: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._run_is_dead: Flags = np.empty(0, np.bool_)
        self._older: list[tuple[npt.NDArray[np.int32], Offsets]] = []

    # ------------------------------------------------------------ filling

    def add(self, low: Uint64Array, high: Uint64Array, offsets: Offsets, dead: Flags | None = None) -> int:
        """Add entries in offset order, with offsets above all earlier offsets. Return how many of the entries fit."""
        total = len(offsets)
        taken = 0
        while taken < total and not self.is_full:
            if self.count == self.capacity:
                self._remove_duplicates()
                self.is_full = self.capacity - self.count < max(self.capacity // _WORTHWHILE, 1)
                continue
            part = slice(taken, taken + min(total - taken, self.capacity - self.count))
            into = slice(self.count, self.count + part.stop - part.start)
            self._low[into], self._high[into], self._offsets[into] = low[part], high[part], offsets[part]
            if self.keep_last > 1:
                self._dead[into] = False if dead is None else dead[part]
            taken, self.count = part.stop, into.stop
        self.added += taken
        return taken

    def finish(self) -> None:
        """Remove the last duplicates. Call this after the last `add`, and before `kept` and `find`."""
        self._remove_duplicates()

    def _index(self) -> None:
        """Build the directory that `find` searches. Called late, because many compactions never call `find`.

        With ``keep_last`` above 1, also count the entries of each key, and find the keys with a dead entry.
        """
        order, same = self._ordered()
        count = self.count
        bits = max(count.bit_length(), 1)
        self._directory_shift = np.uint64(64 - bits)
        self._directory = np.zeros((1 << bits) + 1, np.uint32)
        buckets = (self._sorted[:count] >> self._directory_shift).astype(np.intp)
        np.cumsum(np.bincount(buckets, minlength=1 << bits), out=self._directory[1:])
        if self.keep_last > 1:
            self._run_of = np.empty(count, np.int32)
            runs = np.cumsum(np.concatenate(([0], ~same))).astype(np.int32) if count else np.empty(0, np.int32)
            self._run_of[order] = runs
            self._run_counts = np.bincount(runs).astype(np.int32)
            self._run_is_dead = np.zeros(len(self._run_counts), np.bool_)
            self._run_is_dead[runs[self._dead[order]]] = True
        self._is_indexed = True

    def _remove_duplicates(self) -> None:
        count = self.count
        if count < 2:
            return
        kept = np.ones(count, np.bool_)
        if self.keep_last > 1 or not self._mark_older(kept):
            order, same = self._ordered()
            kept[order] = self._last_of_runs(order, same)
        if kept.all():
            return
        left = int(np.count_nonzero(kept))
        self._low[:left] = self._low[:count][kept]
        self._high[:left] = self._high[:count][kept]
        self._offsets[:left] = self._offsets[:count][kept]
        if self.keep_last > 1:
            self._dead[:left] = self._dead[:count][kept]
        self.count = left

    def _mark_older(self, kept: Flags) -> bool:
        """Unmark each entry that a later entry of its key replaces. Return False, with no change, if hashes collide."""
        self._sort()
        for _, order, pairs, equal in self._pairs():
            if not equal.all():
                kept[:] = True
                return False
            kept[order[pairs]] = False
        return True

    def _last_of_runs(self, order: _Indices, same: Flags) -> Flags:
        """Return for each entry in ``order`` whether it stays.

        It must be among the last of its key, with no dead entry after it.
        """
        count = len(order)
        places = np.arange(count)
        starts = np.flatnonzero(np.concatenate(([True], ~same)))
        runs = np.cumsum(np.concatenate(([0], ~same)))
        ends = np.append(starts[1:], count)
        last: Flags = ends[runs] - places <= self.keep_last
        if self.keep_last > 1:
            last_dead = np.maximum.reduceat(np.where(self._dead[order], places, -1), starts)
            last &= places >= last_dead[runs]
        return last

    def _sort(self) -> None:
        """Sort packed (hash, index of the entry), so that the entries of a key are adjacent and in offset order."""
        count = self.count
        self._index_bits = max((count - 1).bit_length(), 1)
        bits = np.uint64(self._index_bits)
        packed = self._sorted[:count]
        for start in range(0, count, _BLOCK):
            part = slice(start, min(start + _BLOCK, count))
            mixed = _mix(self._low[part], self._high[part])
            mixed >>= bits
            mixed <<= bits
            mixed |= np.arange(part.start, part.stop, dtype=np.uint64)
            packed[part] = mixed
        packed.sort()

    def _pairs(self) -> Iterator[tuple[int, _Indices, _Indices, Flags]]:
        """Yield pairs of neighbours with equal hashes, for each block of the array that `_sort` filled.

        Yield (start of the block, its entries and the next one, indices of entries whose hash equals the next
        entry's, whether each of these pairs has equal keys).
        """
        count, bits = self.count, np.uint64(self._index_bits)
        packed = self._sorted[:count]
        mask = (_ONE << bits) - _ONE
        for start in range(0, count - 1, _BLOCK):
            block = packed[start : start + _BLOCK + 1]
            order = (block & mask).view(np.intp)
            alike = block[:-1] ^ block[1:]
            alike >>= bits
            pairs = np.flatnonzero(alike == 0)
            if len(pairs) * _FEW < len(order):
                yield start, order, pairs, self._are_equal(order[pairs], order[pairs + 1])
            else:  # most entries are in two pairs: fetch each entry once
                low, high = self._low.take(order), self._high.take(order)
                yield start, order, pairs, ((low[1:] == low[:-1]) & (high[1:] == high[:-1]))[pairs]

    def _ordered(self) -> tuple[_Indices, Flags]:
        """Return the entries grouped by key, in offset order, and whether each has the same key as the next."""
        self._sort()
        count, bits = self.count, np.uint64(self._index_bits)
        same = np.zeros(max(count - 1, 0), np.bool_)
        clashes = False
        for start, _, pairs, equal in self._pairs():
            same[pairs[equal] + start] = True
            clashes = clashes or not equal.all()
        order = (self._sorted[:count] & ((_ONE << bits) - _ONE)).view(np.intp)
        if clashes:
            self._part_clashes(self._sorted[:count] >> bits, order, same)
        return order, same

    def _part_clashes(self, hashes: Uint64Array, order: _Indices, same: Flags) -> None:
        """Separate interleaved entries of different keys with equal hashes: sort them by their whole identities."""
        alike = hashes[1:] == hashes[:-1]
        runs = np.cumsum(np.concatenate(([0], ~alike)))
        mixed = np.unique(runs[:-1][alike & ~same])
        places = np.flatnonzero(np.isin(runs, mixed))
        entries = order[places]
        low, high = self._low[entries], self._high[entries]
        order[places] = entries[np.lexsort((entries, high, low, runs[places]))]
        pairs = places[:-1][np.diff(places) == 1]
        same[pairs] = self._are_equal(order[pairs], order[pairs + 1])

    def _are_equal(self, entries: _Indices, others: _Indices) -> Flags:
        """Return for each pair of entries whether their keys are equal."""
        equal: Flags = self._low.take(entries) == self._low.take(others)
        equal &= self._high.take(entries) == self._high.take(others)
        return equal

    # ------------------------------------------------------------ asking

    def kept(self, base_offset: int, end_offset: int) -> Offsets:
        """Return the offsets in ``[base_offset, end_offset)`` of the entries that the map retains, ascending."""
        offsets = self._offsets[: self.count]
        first, last = np.searchsorted(offsets, np.array((base_offset, end_offset), np.int64))
        return offsets[first:last]

    def find(self, low: Uint64Array, high: Uint64Array) -> _Indices:
        """Return for each key the index of one of its entries, or -1."""
        found = np.full(len(low), -1, np.intp)
        if not self.count:
            return found
        if not self._is_indexed:
            self._index()
        buckets = (_mix(low, high) >> self._directory_shift).astype(np.intp)
        at, end = self._directory[buckets].astype(np.intp), self._directory[buckets + 1].astype(np.intp)
        mask = (_ONE << np.uint64(self._index_bits)) - _ONE
        asking = np.flatnonzero(at < end)
        while len(asking):
            entries = (self._sorted[at[asking]] & mask).astype(np.intp)
            equal = (self._low.take(entries) == low[asking]) & (self._high.take(entries) == high[asking])
            found[asking[equal]] = entries[equal]
            asking = asking[~equal]
            at[asking] += 1
            asking = asking[at[asking] < end[asking]]
        return found

    # ------------------------------------------------------------ older versions, if several are kept

    def add_older(self, low: Uint64Array, high: Uint64Array, offsets: Offsets) -> None:
        """Add records for `superseded`, in offset order. Their offsets must be below the offsets of all entries."""
        found = self.find(low, high)
        known = np.flatnonzero(found >= 0)
        if len(known):
            self._older.append((self._run_of[found[known]], offsets[known]))

    def superseded(self) -> Offsets:
        """Return the offsets of the records given to `add_older` that newer records replace, ascending."""
        if not self._older:
            return np.empty(0, np.int64)
        runs = np.concatenate([older_runs for older_runs, _ in self._older])
        offsets = np.concatenate([older_offsets for _, older_offsets in self._older])
        self._older.clear()
        order = np.lexsort((offsets, runs))
        ordered = runs[order]
        ends = np.searchsorted(ordered, ordered, "right")
        newer = ends - np.arange(len(order)) - 1 + self._run_counts[ordered]
        gone = (newer >= self.keep_last) | self._run_is_dead[ordered]
        return np.sort(offsets[order[gone]])


def _mix(low: Uint64Array, high: Uint64Array) -> Uint64Array:
    """Hash an identity, which may be the key itself, to 64 bits whose upper bits are well distributed."""
    mixed = high * _MIX_A
    mixed ^= low
    mixed *= _MIX_B
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX_A
    return mixed
