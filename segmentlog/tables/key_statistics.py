"""Predict what a compaction would remove, by groups of keys with the same prefix.

The rules are those of `segmentlog.log.compaction.cleaner`. A pass keeps the last ``compaction.keep.last`` records of
each key, except records before a tombstone, expired records, and tombstones after their delete horizon. An `OffsetMap`
limits memory: if it cannot hold all keys, the keys are split by hash, and the log is read again for each part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from segmentlog.config import TopicConfig
from segmentlog.errors import CorruptBatch, LogTruncated, UnreadableBatch
from segmentlog.format.batch import CONTROL
from segmentlog.format.key_hashes import Uint64Array
from segmentlog.format.record_batch import RecordBatch
from segmentlog.log.compaction.survivors import tombstones_among
from segmentlog.log.partition import Partition
from segmentlog.policy.compaction import cleanable_end
from segmentlog.policy.expiry import expiry_times
from segmentlog.policy.offset_map import OffsetMap

NO_SEPARATOR: Final = "(none)"
"""The group of keys that do not contain the separator."""
KEYLESS: Final = "(no key)"
"""The group of records without a key, from before the topic was compacted; they are kept."""
REST: Final = "(rest)"
"""The group of keys beyond the maximum number of groups."""

MAX_GROUPS: Final = 100_000
MAX_PARTS: Final = 64
# A log is read at most twice for each part: a map that is still too small grows.

GroupName = bytes | str
"""A prefix of keys, or the name of one of the groups above."""
GroupOf = Callable[[bytes], GroupName]
Flags = npt.NDArray[np.bool_]

_MIX_A: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_B: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF: Final = np.uint64(32)


class KeyGroup(msgspec.Struct):
    """Records of keys with the same prefix; bytes are uncompressed bytes of keys and values."""

    records: int = 0
    kept: int = 0
    """Records that would be kept."""
    tombstones: int = 0
    """Kept records with a null value."""
    size_bytes: int = 0
    removed_bytes: int = 0

    def add(self, other: KeyGroup) -> None:
        """Add the counts of another group."""
        for field in self.__struct_fields__:
            setattr(self, field, getattr(self, field) + getattr(other, field))


def group_by_separator(separator: bytes) -> GroupOf:
    """Return a function that maps a key to the bytes before its first ``separator``."""

    def group_of(key: bytes) -> GroupName:
        prefix, found, _ = key.partition(separator)
        return prefix if found else NO_SEPARATOR

    return group_of


def group_by_length(length: int) -> GroupOf:
    """Return a function that maps a key to its first ``length`` bytes, or to the whole key if it is shorter."""
    return lambda key: key[:length]


class KeyStatistics:
    """Counts of records by group of keys, in ``groups``. Each call of `count` adds a partition. Not thread-safe."""

    def __init__(
        self,
        group_of: GroupOf,
        *,
        buffer_bytes: int,
        pace: Callable[[int], None] = lambda size_bytes: None,
        max_groups: int = MAX_GROUPS,
    ) -> None:
        self.groups: dict[GroupName, KeyGroup] = {}
        self.unreadable: dict[tuple[int, int], UnreadableBatch] = {}
        """Batches that do not decode, by partition and offset. They are not counted; a compaction pass keeps them."""
        self._group_of = group_of
        self._buffer_bytes = buffer_bytes
        self._pace = pace
        self._max_groups = max_groups
        self._seed = int.from_bytes(os.urandom(8), "little")

    def total(self) -> KeyGroup:
        """Return the sum of all groups."""
        total = KeyGroup()
        for group in self.groups.values():
            total.add(group)
        return total

    def count(self, log: Partition, now_ms: int) -> None:
        """Count the records in the segments of a partition that a compaction pass at ``now_ms`` would read.

        Calls ``pace`` with the number of bytes read. Raises `CorruptBatch`, and the errors of ``pace``.
        """
        config = log.config
        end = _find_cleanable_end(log, config, now_ms)
        parts = [(1, 0)]
        while parts:
            modulus, number = parts.pop()
            offset_map = self._build_offset_map(log, config, end, now_ms, modulus, number, self._buffer_bytes)
            if offset_map is None and modulus < MAX_PARTS:
                parts += [(2 * modulus, number), (2 * modulus, number + modulus)]
                continue
            buffer_bytes = self._buffer_bytes
            while offset_map is None:
                buffer_bytes *= 2
                offset_map = self._build_offset_map(log, config, end, now_ms, modulus, number, buffer_bytes)
            self._count_part(log, config, end, now_ms, modulus, number, offset_map)

    def _build_offset_map(
        self, log: Partition, config: TopicConfig, end: int, now_ms: int, modulus: int, number: int, buffer_bytes: int
    ) -> OffsetMap | None:
        """Return an offset map of one part of the keys; None if a map of ``buffer_bytes`` is too small for them."""
        offset_map = OffsetMap(buffer_bytes, config.compaction_keep_last)
        for batch in self._batches(log, end):
            low, high, is_null = batch.key_identities(self._seed)
            mine = _assign_parts(low, high, modulus) == number
            if is_null is not None:
                mine &= ~is_null
            dead = tombstones_among(batch) | _find_expired(batch, config, now_ms) if offset_map.keep_last > 1 else None
            offsets = batch.offsets[mine]
            taken = offset_map.add(low[mine], high[mine], offsets, None if dead is None else dead[mine])
            if taken < len(offsets):
                return None
        offset_map.finish()
        return offset_map

    def _count_part(
        self, log: Partition, config: TopicConfig, end: int, now_ms: int, modulus: int, number: int, kept_of: OffsetMap
    ) -> None:
        for batch in self._batches(log, end):
            low, high, is_null = batch.key_identities(self._seed)
            mine = _assign_parts(low, high, modulus) == number
            kept: Flags = np.isin(batch.offsets, kept_of.kept(batch.base_offset, batch.next_offset))
            if is_null is not None:
                mine[is_null] = number == 0
                kept |= is_null
            kept &= ~_find_expired(batch, config, now_ms)
            horizon_ms = batch.header.delete_horizon_ms
            if horizon_ms is not None and horizon_ms <= now_ms:
                kept &= ~tombstones_among(batch)
            self._add_batch(batch, mine, kept)

    def _add_batch(self, batch: RecordBatch, mine: Flags, kept: Flags) -> None:
        for key, value, stays in compress(zip(batch.keys, batch.values, kept.tolist(), strict=True), mine.tolist()):
            group = self._find_group(KEYLESS if key is None else self._group_of(key))
            size = len(key or b"") + len(value or b"")
            group.records += 1
            group.size_bytes += size
            if not stays:
                group.removed_bytes += size
                continue
            group.kept += 1
            group.tombstones += value is None

    def _find_group(self, name: GroupName) -> KeyGroup:
        group = self.groups.get(name)
        if group is None:
            if len(self.groups) >= self._max_groups:
                name = REST
            group = self.groups.setdefault(name, KeyGroup())
        return group

    def _batches(self, log: Partition, end: int) -> Iterator[RecordBatch]:
        """Yield batches with records below ``end``."""
        start = log.log_start_offset
        if start >= end:
            return

        def on_skip(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
            if not isinstance(damage, UnreadableBatch):
                raise damage
            if base_offset < end:
                self.unreadable[log.number, damage.offset] = damage

        try:
            found = log.read(start, on_skip=on_skip)
        except LogTruncated as truncated:  # the log was trimmed to an offset inside a lost range
            found = log.read(truncated.lost.end_offset, on_skip=on_skip)
        for batch in found:
            if batch.base_offset >= end:
                return
            self._pace(batch.size_bytes)
            if batch.header.attributes & CONTROL:
                continue
            if batch.next_offset > end:
                batch = batch.slice(0, int(np.searchsorted(batch.offsets, np.int64(end))))
            if len(batch):
                yield batch


def _find_cleanable_end(log: Partition, config: TopicConfig, now_ms: int) -> int:
    """Return the end offset of a compaction pass, which reads neither the active segment nor too young segments."""
    dirty_offset = max(log.cleaned_offset, log.log_start_offset)
    behind = [segment for segment in log.segments() if segment.active or segment.end_offset > dirty_offset]
    return cleanable_end(config, behind, dirty_offset, log.last_stable_offset, now_ms)


def _assign_parts(low: Uint64Array, high: Uint64Array, modulus: int) -> Uint64Array:
    """Return the number of the part to which each key belongs, from 0 to ``modulus`` - 1.

    ``low`` and ``high`` are the identities of the keys; ``modulus`` is a power of two.
    """
    mixed = low * _MIX_A ^ high * _MIX_B
    mixed ^= mixed >> _HALF
    mixed *= _MIX_A
    parts: Uint64Array = (mixed >> _HALF) & np.uint64(modulus - 1)
    return parts


def _find_expired(batch: RecordBatch, config: TopicConfig, now_ms: int) -> Flags:
    ends_ms = expiry_times(batch, config.record_ttl_ms)
    return np.zeros(len(batch), np.bool_) if ends_ms is None else ends_ms <= now_ms
