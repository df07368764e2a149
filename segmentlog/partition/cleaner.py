"""Compaction of one partition: of each key only the last records stay, at their offsets.

    fill     the dirty section's keys go into an `OffsetMap`, as far as that has room
    weigh    segment by segment: which records stay? nothing to do where all of them do
    copy     what stays goes into a copy beside the segments (`rewriter`)
    swap     the copy takes their place (`swap`), oldest segments first
    note     the checkpoint says how far the log is clean

and again from there while the map was too small for all of it. Segments are replaced in
order of their offsets, each durably before the next, so that a crash never leaves an older
record of a key without the newer one that made it old.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from segmentlog.errors import CorruptBatch
from segmentlog.format.batch import CONTROL, HEADER_SIZE, BatchHeader, check_payload
from segmentlog.format.checkpoint import Compacted
from segmentlog.format.names import CLEANED_SUFFIX, copy_name, parse_copy_name
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.scan import walk
from segmentlog.format.splice import Bounds, Flags, item_bounds
from segmentlog.partition.catalog import Catalog
from segmentlog.partition.handle import Handle
from segmentlog.partition.lease import CleanerNote, Lease
from segmentlog.partition.rewriter import UNDECIDED, SegmentCopy
from segmentlog.partition.swap import finish_swaps, swap_in
from segmentlog.partition.syncer import Syncer
from segmentlog.policy.compaction import Dirt, cleanable_end, delete_horizon, group_segments, measure, why_due
from segmentlog.policy.expiry import NEVER, expiry_times
from segmentlog.policy.offset_map import OffsetMap
from segmentlog.records import CompactionReport, LostRange, SegmentInfo
from segmentlog.storage.index import SegmentIndex
from segmentlog.storage.segment import MappedSegment, segment_stem

Pace = Callable[[int], None]
"""Told how many bytes were read or written; may wait, and may raise to end the pass."""

_DUE_AGAIN_MS = 60_000
# Passes that only look for what has expired are so far apart, at least.


class _Weighed(msgspec.Struct):
    """One batch of a source segment, and what is to become of it."""

    position: int
    header: BatchHeader
    kept: Flags | None  # None: all of its records


class _Totals(msgspec.Struct):
    records_before: int = 0
    records_after: int = 0
    tombstones_removed: int = 0
    expired: int = 0
    keyless: int = 0
    segments_before: int = 0
    segments_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class _Plan(NamedTuple):
    """Sealed segments below ``end_offset``, where cleaning ends; the dirt begins at ``dirty_offset``."""

    segments: list[SegmentInfo]
    dirty_offset: int
    end_offset: int


class Cleaner:
    """Compacts one partition. One pass at a time, by the lease; thread-safe."""

    def __init__(self, handle: Handle, syncer: Syncer, catalog: Catalog, lease: Lease) -> None:
        self._handle = handle
        self._syncer = syncer
        self._catalog = catalog
        self._lease = lease

    def compacted(self) -> Compacted:
        """How far the log is clean, as the checkpoint says."""
        checkpoint, _ = self._handle.checkpoint.read()
        return checkpoint.compacted if checkpoint is not None else Compacted()

    def why_due(self, now_ms: int) -> str | None:
        """Why a pass is worth it now; None when it is not."""
        handle = self._handle
        handle.refresh_config()
        if not handle.config.compacts:
            return None
        return why_due(handle.config, self.dirt(now_ms), self.compacted().due_ms, now_ms)

    def dirt(self, now_ms: int) -> Dirt:
        """How much there is to clean."""
        plan = self._plan(now_ms)
        return measure(plan.segments, plan.dirty_offset, plan.end_offset)

    def read_note(self) -> CleanerNote:
        """What whoever held the lease wrote down last."""
        return self._lease.read_note()

    def run(
        self,
        now_ms: int,
        *,
        buffer_bytes: int,
        dry_run: bool = False,
        pace: Pace = lambda size_bytes: None,
        wait_s: float = 0.0,
    ) -> CompactionReport:
        """Clean everything that can be cleaned. With ``dry_run`` nothing is changed, but counted.

        Raises `CorruptBatch`, `DiskFull`, OSError and what ``pace`` raises: the log is whole then, and as clean
        as it came.
        """
        handle = self._handle
        handle.refresh_config()
        if dry_run:
            return _Pass(handle, self._plan, now_ms, buffer_bytes, pace, dry_run=True).run()
        handle.check_writable()
        with self._lease.hold(wait_s) as held:
            if not held:
                return CompactionReport(handle.topic, handle.partition, busy=True)
            self._tidy_up()
            # A record must not go for the sake of a newer one that a power cut could take.
            self._syncer.sync()
            with handle.sync_locked():
                self._syncer.move_recovery_point(handle.page.log.read(), handle.page.sync.read())
            report = _Pass(handle, self._plan, now_ms, buffer_bytes, pace, dry_run=False).run()
            self._lease.write_note(
                CleanerNote(
                    handle.clock.now_ms(),
                    report.seconds,
                    report.records_before,
                    report.records_after,
                    report.bytes_before,
                    report.bytes_after,
                )
            )
            return report

    def give_up(self, why: str) -> None:
        """Write down for people why the partition is not cleaned."""
        with self._lease.hold() as held:
            if held:
                self._lease.write_note(replace(self._lease.read_note(), uncleanable=why))

    def _tidy_up(self) -> None:
        """Complete or drop what a process left that died in a pass."""
        handle = self._handle
        if any(map(parse_copy_name, handle.fs.listdir(handle.folder))):
            with handle.append_locked():
                finish_swaps(handle)
            for name in handle.fs.listdir(handle.folder):
                if name.endswith(CLEANED_SUFFIX) and parse_copy_name(name):
                    with contextlib.suppress(FileNotFoundError):
                        handle.fs.unlink(f"{handle.folder}/{name}")
        handle.fs.sync_folder(handle.folder)

    def _plan(self, now_ms: int) -> _Plan:
        """What can be cleaned now, and what of it is dirty."""
        handle, catalog = self._handle, self._catalog
        config, log = handle.config, handle.page.log.read()
        compacted = self.compacted()
        dirty_offset = min(max(compacted.cleaned_offset, log.log_start_offset), log.log_end_offset)
        if compacted.keep_last != config.compaction_keep_last:
            dirty_offset = log.log_start_offset
        sealed = catalog.sealed(log)

        def behind() -> Iterator[SegmentInfo]:
            yield from (catalog.describe(one, log) for one in sealed if one.end_offset > dirty_offset)
            yield catalog.active(log)

        end = cleanable_end(config, behind(), dirty_offset, log.last_stable_offset, now_ms)
        return _Plan([catalog.describe(one, log) for one in sealed if one.base_offset < end], dirty_offset, end)


class _Pass:
    """One run of the cleaner, of as many maps as it takes."""

    def __init__(
        self,
        handle: Handle,
        plan: Callable[[int], _Plan],
        now_ms: int,
        buffer_bytes: int,
        pace: Pace,
        *,
        dry_run: bool,
    ) -> None:
        self._handle = handle
        self._plan = plan
        self._now_ms = now_ms
        self._buffer_bytes = buffer_bytes
        self._pace = pace
        self._dry_run = dry_run
        self._config = handle.config
        self._keep_last = self._config.compaction_keep_last
        self._seed = int.from_bytes(os.urandom(8), "little")
        self._horizon_ms = delete_horizon(self._config, now_ms)
        self._log_start = handle.page.log.read().log_start_offset
        self._epoch = handle.page.log.read().epoch
        self._due_ms = 0
        self._map = OffsetMap(0)
        self._dirty_offset = self._map_end = 0
        self._keyless: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._superseded: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._totals = _Totals()
        self._weighed_before: dict[tuple[int, int], Flags] = {}
        """A dry run of several maps: what the ones before it did not keep, by segment and position."""

    def run(self) -> CompactionReport:
        handle = self._handle
        started = time.monotonic()
        segments, self._dirty_offset, end = self._plan(self._now_ms)
        if self._keep_last > 1:
            # What expires decides about older records that were kept beside it: all have to be looked at together.
            self._dirty_offset = self._log_start
        passes = 0
        while self._dirty_offset < end or not passes:
            sums = self._totals
            self._totals = _Totals(bytes_read=sums.bytes_read, bytes_written=sums.bytes_written)
            self._due_ms = 0
            is_outdated = not self._clean(segments, end)
            self._merge_totals(sums, first=not passes)
            passes += 1
            if is_outdated:  # somebody truncated or trimmed the log meanwhile: the rest is for the next time
                break
            self._dirty_offset = max(self._map_end, self._dirty_offset)
            if not self._dry_run:
                self._note_progress()
                segments = [one for one in self._plan(self._now_ms).segments if one.base_offset < end]
        counts = {name: getattr(self._totals, name) for name in _Totals.__struct_fields__}
        return CompactionReport(
            handle.topic, handle.partition, self._dirty_offset, passes, seconds=time.monotonic() - started, **counts
        )

    def _clean(self, segments: Sequence[SegmentInfo], end: int) -> bool:
        """Everything that one map does; False when somebody trimmed or truncated the log meanwhile."""
        log = self._handle.page.log.read()
        try:
            self._fill_map(segments, end)
            if not self._dry_run:
                self._announce(max(self._map_end, self._dirty_offset))
            groups = group_segments(segments, self._config.segment_bytes, self._lost_ranges())
            return all(self._clean_group(group) for group in groups)
        except FileNotFoundError as error:
            now = self._handle.page.log.read()
            if (now.log_start_offset, now.epoch) != (log.log_start_offset, log.epoch):
                return False
            raise CorruptBatch(str(error.filename), 0, "a segment file", "none") from None

    def _announce(self, offset: int) -> None:
        """Write down how far records may be missing from now on, before the first of them is."""
        handle = self._handle
        with handle.sync_locked():
            checkpoint, _ = handle.checkpoint.read()
            known = checkpoint.compacted if checkpoint is not None else Compacted()
            if offset > known.begun_offset:
                handle.update_checkpoint(compacted=replace(known, begun_offset=offset))

    def _merge_totals(self, sums: _Totals, *, first: bool) -> None:
        """The sum over several maps: from what there was before the first to what there is after the last."""
        if first:
            return
        now = self._totals
        now.records_before, now.bytes_before = sums.records_before, sums.bytes_before
        now.segments_before = sums.segments_before
        now.tombstones_removed += sums.tombstones_removed
        now.expired += sums.expired

    def _lost_ranges(self) -> Sequence[LostRange]:
        checkpoint, _ = self._handle.checkpoint.read()
        return checkpoint.lost_ranges if checkpoint is not None else ()

    def _note_progress(self) -> None:
        handle = self._handle
        with handle.sync_locked():
            checkpoint, _ = handle.checkpoint.read()
            begun_offset = checkpoint.compacted.begun_offset if checkpoint is not None else 0
            begun_offset = max(begun_offset, self._dirty_offset)
            compacted = Compacted(self._dirty_offset, self._keep_last, self._due_ms, begun_offset)
            handle.update_checkpoint(compacted=compacted)

    # ------------------------------------------------------------ reading

    def _batches(
        self, segment: SegmentInfo, from_offset: int, checked_from: int = 0
    ) -> Iterator[tuple[int, RecordBatch, memoryview]]:
        """(position, batch, its payload) of a segment's batches that end behind ``from_offset``.

        Checksums and all, but for payloads of batches that begin at or behind ``checked_from``, if that is given.
        """
        handle = self._handle
        mapped = MappedSegment(handle.fs, handle.folder, segment.base_offset)
        view = mapped.view
        for position, header in walk(view, 0, len(view), mapped.path, expected_offset=segment.base_offset):
            if header.next_offset <= from_offset:
                continue
            if checked_from and header.base_offset >= checked_from:
                start = position + HEADER_SIZE
                payload = view[start : start + header.payload_size]
            else:
                payload = check_payload(view, position, header, mapped.path)
                self._totals.bytes_read += header.size_bytes
                self._pace(header.size_bytes)
            yield position, RecordBatch(header, payload, path=mapped.path, position=position), payload

    # ------------------------------------------------------------ which records stay

    def _fill_map(self, segments: Sequence[SegmentInfo], end: int) -> None:
        """Put the dirty section into the map, as far as it goes; and what the clean one holds of its keys."""
        offset_map = self._map = OffsetMap(self._buffer_bytes, self._keep_last)
        keyless = []
        self._map_end = end
        for segment in segments:
            if segment.end_offset <= self._dirty_offset:
                continue
            for _, batch, _ in self._batches(segment, self._dirty_offset):
                if batch.header.base_offset >= end:
                    break
                if batch.header.attributes & CONTROL or not batch.header.record_count:
                    continue
                low, high, is_null = batch.key_identities(self._seed)
                offsets = batch.offsets
                dead = self._dead_among(batch) if self._keep_last > 1 else None
                if is_null is not None or batch.header.base_offset < self._dirty_offset:
                    wanted = offsets >= self._dirty_offset
                    if is_null is not None:
                        keyless.append(offsets[is_null & wanted])
                        wanted &= ~is_null
                    low, high, offsets = low[wanted], high[wanted], offsets[wanted]
                    dead = None if dead is None else dead[wanted]
                taken = offset_map.add(low, high, offsets, dead)
                if taken < len(offsets):
                    self._map_end = int(offsets[taken])
                    break
            if offset_map.is_full and self._map_end < end:
                break
        offset_map.finish()
        self._keyless = np.concatenate(keyless) if keyless else np.empty(0, np.int64)
        self._totals.keyless += len(self._keyless)
        self._superseded = self._find_superseded(segments)

    def _find_superseded(self, segments: Sequence[SegmentInfo]) -> npt.NDArray[np.int64]:
        """Where several records of a key stay: the clean ones that the map leaves no place."""
        if self._keep_last == 1 or self._dirty_offset <= self._log_start:
            return np.empty(0, np.int64)
        for segment in segments:
            if segment.base_offset >= self._dirty_offset:
                break
            for _, batch, _ in self._batches(segment, self._log_start):
                if batch.header.base_offset >= self._dirty_offset:
                    break
                if batch.header.attributes & CONTROL or not batch.header.record_count:
                    continue
                low, high, is_null = batch.key_identities(self._seed)
                wanted = batch.offsets < self._dirty_offset
                if is_null is not None:
                    wanted &= ~is_null
                self._map.note_older(low[wanted], high[wanted], batch.offsets[wanted])
        return self._map.superseded()

    def _dead_among(self, batch: RecordBatch) -> Flags:
        """Tombstones and expired records: what stands before them goes, whatever `compaction.keep.last` says."""
        dead = np.fromiter((value is None for value in batch.values), np.bool_, len(batch))
        expired = self._expired_among(batch)
        return dead if expired is None else dead | expired

    def _expired_among(self, batch: RecordBatch) -> Flags | None:
        """The records whose time is over; None when there are none. Notes when the next one's is."""
        ends_ms = expiry_times(batch, self._config.record_ttl_ms)
        if ends_ms is None:
            return None
        later = ends_ms[ends_ms > self._now_ms]
        if len(later) and int(later.min()) != NEVER:
            self._note_due(int(later.min()))
        return ends_ms <= self._now_ms if len(later) < len(ends_ms) else None

    def _note_due(self, at_ms: int) -> None:
        at_ms = max(at_ms, self._now_ms + _DUE_AGAIN_MS)
        self._due_ms = at_ms if not self._due_ms else min(self._due_ms, at_ms)

    def _kept_of(self, batch: RecordBatch) -> Flags | None:
        """Which records of a batch stay, as far as keys and expiry decide; None for all."""
        header = batch.header
        if header.attributes & CONTROL or not header.record_count:
            return None
        if self._dirty_offset <= header.base_offset and header.next_offset <= self._map_end:
            kept = np.zeros(header.record_count, np.bool_)
            offsets = self._map.kept(header.base_offset, header.next_offset)
            if header.offset_deltas_size:
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
            expired &= batch.offsets < self._map_end  # others may have older records that no map has met
            self._totals.expired += int(np.count_nonzero(expired & kept))
            kept &= ~expired
        return None if kept.all() else kept

    def _kept_of_mixed(self, batch: RecordBatch) -> Flags:
        """The same of a batch that lies in the clean section, behind the map's end, or across."""
        offsets = batch.offsets
        kept: Flags = offsets >= self._map_end
        inside = (offsets >= self._dirty_offset) & ~kept
        if inside.any():
            kept |= inside & np.isin(offsets, self._map.kept(self._dirty_offset, self._map_end))
        clean = offsets < self._dirty_offset
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

    # ------------------------------------------------------------ segment by segment

    def _clean_group(self, group: list[SegmentInfo]) -> bool:
        """Replace some adjacent segments by one copy of what stays, unless that is what they are.

        False when they are not there any more.
        """
        totals = self._totals
        weighed = [self._weigh(segment) for segment in group]
        before = sum(segment.size_bytes for segment in group)
        totals.segments_before += len(group)
        totals.segments_after += 1
        totals.bytes_before += before
        records = sum(one.header.record_count for batches in weighed for one in batches)
        totals.records_before += records
        if len(group) == 1 and not self._must_copy(group[0], weighed[0]):
            totals.bytes_after += before
            totals.records_after += records
            return True
        copy, done = self._copy(group, weighed)
        totals.bytes_after += copy.size_bytes
        totals.records_after += copy.record_count
        totals.bytes_written += 0 if self._dry_run else copy.size_bytes
        return done

    def _weigh(self, segment: SegmentInfo) -> list[_Weighed]:
        weighed = []
        # What went into the map was checked on its way, and is checked again before it is copied.
        for position, batch, _ in self._batches(segment, 0, checked_from=max(self._dirty_offset, 1)):
            kept = self._kept_of(batch)
            if self._dry_run:
                kept = self._with_earlier_maps((segment.base_offset, position), kept)
            weighed.append(_Weighed(position, batch.header, kept))
        return weighed

    def _with_earlier_maps(self, place: tuple[int, int], kept: Flags | None) -> Flags | None:
        """Of a dry run: nothing was removed between its maps, so it is remembered what would have been."""
        before = self._weighed_before.get(place)
        if before is not None:
            kept = before if kept is None else kept & before
        if kept is not None:
            self._weighed_before[place] = kept
        return kept

    def _must_copy(self, segment: SegmentInfo, weighed: Sequence[_Weighed]) -> bool:
        """Whether the copy would differ: records go, or tombstones change, or small batches could be one."""
        if any(one.kept is not None for one in weighed):
            return True
        horizons = [horizon for one in weighed if (horizon := one.header.delete_horizon_ms) is not None]
        for horizon_ms in horizons:
            if horizon_ms > self._now_ms:
                self._note_due(horizon_ms)
        if any(horizon_ms <= self._now_ms for horizon_ms in horizons):
            return True
        if segment.end_offset <= self._dirty_offset:
            return False
        batches = (batch for _, batch, _ in self._batches(segment, 0))
        return any(batch.header.delete_horizon_ms is None and _holds_null(batch) for batch in batches)

    def _copy(self, group: Sequence[SegmentInfo], weighed: Sequence[Sequence[_Weighed]]) -> tuple[SegmentCopy, bool]:
        """(the copy, whether it is in place)."""
        handle = self._handle
        base, end = group[0].base_offset, group[-1].end_offset
        index = SegmentIndex(
            handle.fs,
            segment_stem(handle.folder, base),
            base,
            handle.config.index_interval_bytes,
            writable=False,
        )
        path = None if self._dry_run else f"{handle.folder}/{copy_name(base, end, CLEANED_SUFFIX)}"
        copy = SegmentCopy(handle.fs, path, base, index, handle.batch_limit, self._config.compression_type)
        try:
            written_ns, epoch = self._copy_batches(group, weighed, copy)
            copy.finish(self._end_of(group[-1], weighed[-1]), epoch, written_ns)
        except BaseException:
            copy.close()
            if path is not None:
                with contextlib.suppress(OSError):
                    handle.fs.unlink(path)
            raise
        copy.close()
        if path is None:
            return copy, True
        replaced = [one.base_offset for one in group]
        return copy, swap_in(handle, base, end, replaced, self._epoch, index, copy.size_bytes)

    @staticmethod
    def _end_of(segment: SegmentInfo, weighed: Sequence[_Weighed]) -> int:
        """Where the last batch ends; the segment's end may lie behind a lost range."""
        return weighed[-1].header.next_offset if weighed else segment.end_offset

    def _copy_batches(
        self, group: Sequence[SegmentInfo], weighed: Sequence[Sequence[_Weighed]], copy: SegmentCopy
    ) -> tuple[int, int]:
        """Hand what stays to the copy; (time the newest source was written to, its last epoch)."""
        handle = self._handle
        written_ns = epoch = 0
        for segment, batches in zip(group, weighed, strict=True):
            mapped = MappedSegment(handle.fs, handle.folder, segment.base_offset)
            written_ns = max(written_ns, mapped.written_ns)
            for one in batches:
                header = one.header
                epoch = header.partition_epoch
                if one.kept is not None and not one.kept.any():
                    continue
                payload = check_payload(mapped.view, one.position, header, mapped.path)
                batch = RecordBatch(header, payload, path=mapped.path, position=one.position)
                bounds = item_bounds(batch.values_column, header.record_count) if header.record_count else None
                kept, horizon_ms = self._without_old_tombstones(batch, one.kept, bounds)
                self._pace(2 * header.size_bytes)
                copy.add(batch, payload, kept, horizon_ms, bounds)
        return written_ns, epoch

    def _without_old_tombstones(
        self, batch: RecordBatch, kept: Flags | None, bounds: Bounds | None
    ) -> tuple[Flags | None, int | None]:
        """(which records stay now, horizon of the tombstones among them). There are none where ``bounds`` are known."""
        header = batch.header
        horizon_ms = header.delete_horizon_ms
        if header.attributes & CONTROL or (
            kept is None and header.next_offset <= self._dirty_offset and not horizon_ms
        ):
            return kept, None
        if header.next_offset > self._map_end:
            return kept, UNDECIDED  # its tombstones may have older records that no map has met
        if bounds is not None:
            return kept, None
        nulls = np.fromiter((value is None for value in batch.values), np.bool_, len(batch))
        if kept is not None:
            nulls &= kept
        if not nulls.any():
            return kept, None
        if horizon_ms is not None and horizon_ms <= self._now_ms:
            self._totals.tombstones_removed += int(np.count_nonzero(nulls))
            return ~nulls if kept is None else kept & ~nulls, None
        if horizon_ms is None:
            horizon_ms = self._horizon_ms
        self._note_due(horizon_ms)
        return kept, horizon_ms


def _holds_null(batch: RecordBatch) -> bool:
    return batch.values_may_be_null() and None in batch.values
