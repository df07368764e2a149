"""Decide which records a compaction keeps, with the offset map.

The log has three parts, in order of offsets, as in `segmentlog.policy.compaction`:

- the clean section, up to ``dirty_offset``
- the section whose keys are in the map, up to ``map_end``
- the rest, which no map has covered yet
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from segmentlog.config import TopicConfig
from segmentlog.errors import UnreadableBatch
from segmentlog.format.batch import CONTROL, BatchHeader
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.splice import Flags
from segmentlog.format.wire_record_batch import WireRecordBatch
from segmentlog.log.compaction.transaction_outcomes import TransactionOutcomes
from segmentlog.policy.compaction import delete_horizon
from segmentlog.policy.expiry import NEVER, expiry_times
from segmentlog.policy.offset_map import OffsetMap

UNDECIDED = -1
"""Placeholder for a delete horizon: the records may include tombstones, but those get no horizon in this pass."""

_NOWHERE = 2**63
_DUE_AGAIN_MS = 60_000
# Minimum time between passes that only look for expired records.


class Survivors:
    """Decides on every record, with one offset map. Call `fill` first."""

    def __init__(
        self,
        config: TopicConfig,
        now_ms: int,
        buffer_bytes: int,
        log_start_offset: int,
        dirty_offset: int,
        end: int,
        decided: TransactionOutcomes,
        unreadable: dict[int, UnreadableBatch],
    ) -> None:
        self.decided = decided
        self.dirty_offset = dirty_offset
        self.map_end = end
        """Records below this offset have their keys in the map, or are in the clean section."""
        self.due_ms = 0
        """When a record that is kept now may be removed; 0 for never."""
        self.expired_count = self.tombstone_count = 0
        """Records removed because they expired, and tombstones removed after their delete horizon."""
        self.unreadable = unreadable
        """Batches whose records do not decode, by base offset: they stay. `reads` adds to them."""
        self._config = config
        self._now_ms = now_ms
        self._log_start = log_start_offset
        self._keep_last = config.compaction_keep_last
        self._horizon_ms = delete_horizon(config, now_ms)
        self._seed = int.from_bytes(os.urandom(8), "little")
        self._map = OffsetMap(buffer_bytes, self._keep_last)
        self._keyless: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._superseded: npt.NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def keyless_count(self) -> int:
        """The number of records without a key: they stay."""
        return len(self._keyless)

    # ------------------------------------------------------------ the map

    def fill(self, batches: Iterator[RecordBatch]) -> None:
        """Add the keys of the batches from ``dirty_offset`` on to the map until it is full. Set `map_end`."""
        keyless = []
        for batch in batches:
            if batch.header.base_offset >= self.map_end:
                break
            if self._holds_nothing(batch.header) or not self.reads(batch):
                continue
            low, high, is_null = batch.key_identities(self._seed)
            offsets = batch.offsets
            dead = self._dead_among(batch) if self._keep_last > 1 else None
            if is_null is not None or batch.header.base_offset < self.dirty_offset:
                wanted = offsets >= self.dirty_offset
                if is_null is not None:
                    keyless.append(offsets[is_null & wanted])
                    wanted &= ~is_null
                low, high, offsets = low[wanted], high[wanted], offsets[wanted]
                dead = None if dead is None else dead[wanted]
            taken = self._map.add(low, high, offsets, dead)
            if taken < len(offsets):
                self.map_end = int(offsets[taken])
                break
        self._map.finish()
        self._keyless = np.concatenate(keyless) if keyless else self._keyless

    @property
    def needs_clean_section(self) -> bool:
        """Whether `add_clean_section` must be called: if several records of a key stay, clean records count, too."""
        return self._keep_last > 1 and self.dirty_offset > self._log_start

    def add_clean_section(self, batches: Iterator[RecordBatch]) -> None:
        """Find the records below ``dirty_offset`` that are superseded, given the keys in the map."""
        for batch in batches:
            if batch.header.base_offset >= self.dirty_offset:
                break
            if self._holds_nothing(batch.header) or not self.reads(batch):
                continue
            low, high, is_null = batch.key_identities(self._seed)
            wanted = batch.offsets < self.dirty_offset
            if is_null is not None:
                wanted &= ~is_null
            self._map.add_older(low[wanted], high[wanted], batch.offsets[wanted])
        self._superseded = self._map.superseded()

    def _holds_nothing(self, header: BatchHeader) -> bool:
        """Return whether no record of the batch supersedes another: the batch is empty, or it was aborted."""
        return bool(header.attributes & CONTROL) or not header.record_count or self.decided.is_aborted(header)

    def reads(self, batch: RecordBatch) -> bool:
        """Return whether a batch's records can be read. For a batch of columns the answer may be wrong.

        Decodes a batch in Kafka's format, because a client encoded it. Columns were encoded by this package, and are
        not decoded: if a column does not decode later, `CompactionPass` records the batch and begins again.
        """
        offset = batch.header.base_offset
        if offset in self.unreadable:
            return False
        if not isinstance(batch, WireRecordBatch):
            return True
        try:
            batch.check()
        except UnreadableBatch as error:
            self.unreadable[offset] = error
            return False
        return True

    @property
    def _unreadable_from(self) -> int:
        return min(self.unreadable, default=_NOWHERE)

    def _dead_among(self, batch: RecordBatch) -> Flags:
        """Return the tombstones and expired records.

        Compaction removes all older records of their keys, whatever `compaction.keep.last` is.
        """
        dead = tombstones_among(batch)
        expired = self._expired_among(batch)
        return dead if expired is None else dead | expired

    def _expired_among(self, batch: RecordBatch) -> Flags | None:
        """Return the records that have expired; None if there are none. Also store when the next record expires."""
        ends_ms = expiry_times(batch, self._config.record_ttl_ms)
        if ends_ms is None:
            return None
        later = ends_ms[ends_ms > self._now_ms]
        if len(later) and int(later.min()) != NEVER:
            self.add_due_time(int(later.min()))
        return ends_ms <= self._now_ms if len(later) < len(ends_ms) else None

    def add_due_time(self, at_ms: int) -> None:
        """Record that a kept record may be removed at ``at_ms``, or after the minimum time between passes."""
        at_ms = max(at_ms, self._now_ms + _DUE_AGAIN_MS)
        self.due_ms = at_ms if not self.due_ms else min(self.due_ms, at_ms)

    # ------------------------------------------------------------ verdicts

    def kept_of(self, batch: RecordBatch) -> Flags | None:
        """Return which records of a batch stay, as far as keys and expiry decide; None for all."""
        header = batch.header
        if header.attributes & CONTROL:
            goes = self.decided.may_drop_marker(header, batch.payload, self.dirty_offset)
            return np.zeros(header.record_count, np.bool_) if goes else None
        if not header.record_count:
            return None
        if self.decided.is_aborted(header):
            return np.zeros(header.record_count, np.bool_)
        if not self.reads(batch):
            return None
        if self.dirty_offset <= header.base_offset and header.next_offset <= self.map_end:
            kept = np.zeros(header.record_count, np.bool_)
            offsets = self._map.kept(header.base_offset, header.next_offset)
            if batch.has_gaps:
                kept[np.searchsorted(batch.offsets, offsets)] = True
            else:
                kept[offsets - header.base_offset] = True
        else:
            kept = self._kept_of_mixed(batch)
        if len(self._keyless):
            kept |= np.isin(batch.offsets, self._keyless)
        if header.base_offset < self._log_start:
            kept &= batch.offsets >= self._log_start
        expired = self._expired_among(batch)
        if expired is not None:
            # Keep an expired record after the end of the map: older records of its key may not be in any map yet.
            expired &= batch.offsets < self.map_end
            self.expired_count += int(np.count_nonzero(expired & kept))
            kept &= ~expired
        return None if kept.all() else kept

    def _kept_of_mixed(self, batch: RecordBatch) -> Flags:
        """Decide as `kept_of` by keys, for a batch in the clean section, after `map_end`, or across either border."""
        offsets = batch.offsets
        kept: Flags = offsets >= self.map_end
        inside = (offsets >= self.dirty_offset) & ~kept
        if inside.any():
            kept |= inside & np.isin(offsets, self._map.kept(self.dirty_offset, self.map_end))
        clean = offsets < self.dirty_offset
        if not clean.any():
            return kept
        if self._keep_last > 1:
            first, last = np.searchsorted(self._superseded, np.array((offsets[0], offsets[-1] + 1), np.int64))
            return kept | (clean & ~np.isin(offsets, self._superseded[first:last]))
        low, high, is_null = batch.key_identities(self._seed)
        stays = self._map.find(low, high) < 0
        if is_null is not None:
            stays |= is_null
        return kept | (clean & stays)

    def without_old_tombstones(self, batch: RecordBatch, kept: Flags | None) -> tuple[Flags | None, int | None]:
        """Return (which records stay, delete horizon of the tombstones among them)."""
        header = batch.header
        horizon_ms = header.delete_horizon_ms
        if header.attributes & CONTROL or (kept is None and header.next_offset <= self.dirty_offset and not horizon_ms):
            return kept, None
        if not self.reads(batch):
            return kept, None
        if header.next_offset > self.map_end:
            return kept, UNDECIDED  # older records of its keys may not be in any map yet
        if not batch.values_may_be_null():
            return kept, None
        nulls = tombstones_among(batch)
        if kept is not None:
            nulls &= kept
        if not nulls.any():
            return kept, None
        # Keep tombstones after an unreadable batch: it may contain the record that they delete.
        if horizon_ms is not None and horizon_ms <= self._now_ms and header.base_offset < self._unreadable_from:
            self.tombstone_count += int(np.count_nonzero(nulls))
            return ~nulls if kept is None else kept & ~nulls, None
        if horizon_ms is None:
            horizon_ms = self._horizon_ms
        self.add_due_time(horizon_ms)
        return kept, horizon_ms


def tombstones_among(batch: RecordBatch) -> Flags:
    """Return the records with a null value. Without a key such a record deletes nothing, and is not a tombstone."""
    pairs = zip(batch.keys, batch.values, strict=True)
    return np.fromiter((value is None and key is not None for key, value in pairs), np.bool_, len(batch))
