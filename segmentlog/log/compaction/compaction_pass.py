"""One pass of the cleaner: copy the records that stay, and replace segments by the copies.

    fill    add the keys of the dirty section to an offset map until the map is full (`survivors`)
    weigh   decide for each segment which records stay; if all stay, skip the next two steps
    copy    copy the records that stay to a new file (`segment_copy`)
    swap    replace the segments by the copy (`swap`), oldest segments first
    record  write into the checkpoint how far the log is compacted

If the map was too small for all keys, the pass repeats from where it ended. Segments are replaced in order of their
offsets, each durably before the next. So a crash never leaves an older record of a key without the newer record that
supersedes it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from segmentlog.config import TopicConfig
from segmentlog.errors import CorruptBatch, UnknownTopic, UnreadableBatch
from segmentlog.format.batch import HEADER_SIZE, TRANSACTIONAL, BatchHeader, check_payload
from segmentlog.format.decoded_batch import record_batch
from segmentlog.format.file_names import CLEANED_SUFFIX, SNAPSHOT_SUFFIX, copy_name
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.scan import scan_batches
from segmentlog.format.splice import Flags
from segmentlog.log.compaction.segment_copy import SegmentCopy
from segmentlog.log.compaction.survivors import Survivors, tombstones_among
from segmentlog.log.compaction.transaction_outcomes import TransactionOutcomes, stripped
from segmentlog.log.handle import Handle
from segmentlog.log.swap import swap_in
from segmentlog.policy.compaction import group_segments
from segmentlog.records import CompactionReport, LostRange, SegmentInfo
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.state_page import REWRITING

Pace = Callable[[int], None]
"""Called with the number of bytes read or written. It may wait, and may raise to end the pass."""


class CompactionPlan(NamedTuple):
    """Sealed segments to compact: below ``end_offset``, dirty from ``dirty_offset`` on, under ``config``."""

    segments: list[SegmentInfo]
    dirty_offset: int
    end_offset: int
    config: TopicConfig


class _BatchVerdict(msgspec.Struct):
    """A batch of a source segment, and which of its records stay."""

    position: int
    header: BatchHeader
    kept: Flags | None  # None: all records


class _Totals(msgspec.Struct):
    """The counts of a `CompactionReport` over all offset maps that the compaction pass has used so far."""

    records_before: int = 0
    records_after: int = 0
    tombstones_removed: int = 0
    expired: int = 0
    keyless: int = 0
    unreadable: tuple[str, ...] = ()
    segments_before: int = 0
    segments_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def add_earlier(self, before: _Totals, survivors: Survivors, *, first: bool) -> None:
        """Add the counts of the earlier offset maps to the counts of this map.

        The totals before compaction come from the first map, the totals after compaction from this map.
        """
        self.tombstones_removed += survivors.tombstone_count + before.tombstones_removed
        self.expired += survivors.expired_count + before.expired
        self.keyless += survivors.keyless_count + before.keyless
        self.unreadable = tuple(str(error) for _, error in sorted(survivors.unreadable.items()))
        self.bytes_read += before.bytes_read
        self.bytes_written += before.bytes_written
        if not first:
            self.records_before, self.bytes_before = before.records_before, before.bytes_before
            self.segments_before = before.segments_before


class CompactionPass:
    """One run of the cleaner, with as many offset maps as it needs."""

    def __init__(
        self,
        handle: Handle,
        plan: Callable[[], CompactionPlan],
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
        self._config: TopicConfig  # the plan's configuration, which is recorded with how far the log is compacted
        log = handle.page.log.read()
        self._log_start, self._epoch = log.log_start_offset, log.epoch
        self._decided: TransactionOutcomes
        self._survivors: Survivors  # a new one for each map
        self._totals = _Totals()
        self._weighed_before: dict[tuple[int, int], Flags] = {}
        """For a dry run with several maps: the records that all earlier maps keep, by segment and byte position."""
        self._unreadable: dict[int, UnreadableBatch] = {}
        """Batches whose records do not decode, by base offset."""

    def run(self) -> CompactionReport:
        """Compact up to the end of the plan. Raises what `Cleaner.run` does."""
        handle = self._handle
        started = time.monotonic()
        segments, dirty_offset, end, self._config = self._plan()
        # After the plan: all transactions below `end` are decided now.
        self._decided = TransactionOutcomes(handle, handle.page.log.read(), self._now_ms)
        if self._config.compaction_keep_last > 1:
            # An expired record decides about older records that were retained next to it, so all are checked together.
            dirty_offset = self._log_start
        passes = 0
        while dirty_offset < end or not passes:
            before, self._totals = self._totals, _Totals()
            weighed_before = self._weighed_before.copy()
            self._survivors = Survivors(
                self._config, self._now_ms, self._buffer_bytes, self._log_start, dirty_offset, end, self._decided,
                self._unreadable,
            )  # fmt: skip
            try:
                done = self._clean(segments)
            except UnreadableBatch as error:
                if error.offset in self._unreadable:
                    raise
                # Columns are not decoded beforehand. Build the map again, treating the batch as one that stays.
                self._unreadable[error.offset] = error
                self._totals, self._weighed_before = before, weighed_before
                segments, end = self._remaining(end)
                continue
            self._totals.add_earlier(before, self._survivors, first=not passes)
            passes += 1
            if not done:  # another process truncated or trimmed the log: leave the rest to the next pass
                break
            dirty_offset = max(self._survivors.map_end, dirty_offset)
            if not self._dry_run:
                self._record_progress(dirty_offset)
                segments, end = self._remaining(end)
        counts = {name: getattr(self._totals, name) for name in _Totals.__struct_fields__}
        seconds = time.monotonic() - started
        return CompactionReport(handle.topic, handle.partition, dirty_offset, passes, seconds=seconds, **counts)

    def _remaining(self, end: int) -> tuple[list[SegmentInfo], int]:
        """Return (the segments that can be compacted now, the offset at which compaction ends)."""
        plan = self._plan()
        end = min(end, plan.end_offset)  # less than before if a setting changed, or a marker was truncated
        return [segment for segment in plan.segments if segment.base_offset < end], end

    def _clean(self, segments: Sequence[SegmentInfo]) -> bool:
        """Fill one offset map and compact with it. Return False if another process trimmed or truncated the log."""
        log, survivors = self._handle.page.log.read(), self._survivors
        try:
            survivors.fill(self._batches_from(segments, survivors.dirty_offset))
            if survivors.needs_clean_section:
                survivors.add_clean_section(self._batches_from(segments, self._log_start))
            if not self._dry_run:
                # Aborted records are removed in all segments that the map may reach.
                end = segments[-1].end_offset if self._decided.any_aborted and segments else 0
                self._announce(max(survivors.map_end, survivors.dirty_offset, end))
            groups = group_segments(segments, self._config.segment_bytes, self._lost_ranges())
            return all(self._clean_group(group) for group in groups)
        except (FileNotFoundError, CorruptBatch) as error:
            page = self._handle.page
            now = page.log.read()
            is_changed = (now.log_start_offset, now.epoch) != (log.log_start_offset, log.epoch)
            if is_changed or page.writing == REWRITING:  # or the segment's batches changed after they were weighed
                return False
            if isinstance(error, CorruptBatch):
                raise
            self._handle.check_in_place()  # raises if the topic was renamed or deleted just now
            raise CorruptBatch(str(error.filename), 0, "a segment file", "none") from None

    def _announce(self, offset: int) -> None:
        """Record in the checkpoint that records below ``offset`` may be missing, before the first record is removed."""
        handle = self._handle
        with handle.sync_locked():
            handle.ledger.announce_compaction(offset)

    def _lost_ranges(self) -> Sequence[LostRange]:
        return self._handle.ledger.last_checkpoint().lost_ranges

    def _record_progress(self, cleaned_offset: int) -> None:
        """Record how far the log is compacted."""
        handle = self._handle
        with handle.sync_locked():
            handle.ledger.record_compaction(cleaned_offset, self._config.compaction_keep_last, self._survivors.due_ms)

    # ------------------------------------------------------------ reading

    def _batches(
        self, segment: SegmentInfo, from_offset: int, checked_from: int = 0
    ) -> Iterator[tuple[int, RecordBatch, memoryview]]:
        """Yield (position, batch, its payload) of a segment's batches that end after ``from_offset``.

        Checks checksums, except of payloads in batches that begin at or after ``checked_from``, if given.
        """
        mapped = self._handle.map_segment(segment.base_offset)
        view = mapped.view
        for position, header in scan_batches(view, 0, len(view), mapped.path, expected_offset=segment.base_offset):
            if header.next_offset <= from_offset:
                continue
            if checked_from and header.base_offset >= checked_from:
                start = position + HEADER_SIZE
                payload = view[start : start + header.payload_size]
            else:
                payload = check_payload(view, position, header, mapped.path)
                self._totals.bytes_read += header.size_bytes
                self._pace(header.size_bytes)
            yield position, record_batch(header, payload, path=mapped.path, position=position), payload

    def _batches_from(self, segments: Sequence[SegmentInfo], offset: int) -> Iterator[RecordBatch]:
        """Yield every batch that ends after ``offset``."""
        for segment in segments:
            if segment.end_offset > offset:
                for _, batch, _ in self._batches(segment, offset):
                    yield batch

    # ------------------------------------------------------------ segment by segment

    def _clean_group(self, group: list[SegmentInfo]) -> bool:
        """Replace adjacent segments by one copy of the records that stay, unless nothing changes.

        Return False if the segments no longer exist.
        """
        totals = self._totals
        weighed = [self._weigh(segment) for segment in group]
        before = sum(segment.size_bytes for segment in group)
        totals.segments_before += len(group)
        totals.segments_after += 1
        totals.bytes_before += before
        records = sum(
            verdict.header.record_count for batches in weighed for verdict in batches if not verdict.header.is_control
        )
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

    def _weigh(self, segment: SegmentInfo) -> list[_BatchVerdict]:
        weighed = []
        # The payload was checked when it went into the map, and is checked again before it is copied.
        for position, batch, _ in self._batches(segment, 0, checked_from=max(self._survivors.dirty_offset, 1)):
            kept = self._survivors.kept_of(batch)
            if self._dry_run:
                kept = self._with_earlier_maps((segment.base_offset, position), kept)
            weighed.append(_BatchVerdict(position, batch.header, kept))
        return weighed

    def _with_earlier_maps(self, batch_key: tuple[int, int], kept: Flags | None) -> Flags | None:
        """Exclude the records that earlier maps of a dry run would have removed: the segments still contain them."""
        before = self._weighed_before.get(batch_key)
        if before is not None:
            kept = before if kept is None else kept & before
        if kept is not None:
            self._weighed_before[batch_key] = kept
        return kept

    def _must_copy(self, segment: SegmentInfo, weighed: Sequence[_BatchVerdict]) -> bool:
        """Return whether the copy would differ: records or tombstones change, or small batches could be joined."""
        if any(verdict.kept is not None for verdict in weighed):
            return True
        if any(
            verdict.header.attributes & TRANSACTIONAL and self._decided.strips(verdict.header) for verdict in weighed
        ):
            return True
        horizons = [horizon for verdict in weighed if (horizon := verdict.header.delete_horizon_ms) is not None]
        for horizon_ms in horizons:
            if horizon_ms > self._now_ms:
                self._survivors.add_due_time(horizon_ms)
        if any(horizon_ms <= self._now_ms for horizon_ms in horizons):
            return True
        if segment.end_offset <= self._survivors.dirty_offset:
            return False
        batches = (batch for _, batch, _ in self._batches(segment, 0))
        return any(
            batch.header.delete_horizon_ms is None and self._survivors.reads(batch) and _holds_tombstone(batch)
            for batch in batches
        )

    def _copy(
        self, group: Sequence[SegmentInfo], weighed: Sequence[Sequence[_BatchVerdict]]
    ) -> tuple[SegmentCopy, bool]:
        """Write the copy and swap it in. Return (the copy, whether it replaced the segments)."""
        handle = self._handle
        base, end = group[0].base_offset, group[-1].end_offset
        index = handle.index_of(base, writable=False)
        path = None if self._dry_run else f"{handle.folder}/{copy_name(base, end, CLEANED_SUFFIX)}"
        copy = SegmentCopy(handle.fs, path, base, index, handle.batch_limit, self._config.compression)
        try:
            with copy.opened(handle.folder_locked):
                written_ns, epoch = self._copy_batches(group, weighed, copy)
                copy.finish(self._end_of(group[-1], weighed[-1]), epoch, written_ns)
        except BaseException:
            if path is not None:
                with failures_ignored(UnknownTopic), handle.folder_locked():
                    handle.fs.unlink(path)
            raise
        if path is None:
            return copy, True
        replaced = [segment.base_offset for segment in group]
        with handle.folder_locked():
            for replaced_base in replaced:  # the copy has other transactions than these snapshots
                with contextlib.suppress(FileNotFoundError):
                    handle.fs.unlink(segment_stem(handle.folder, replaced_base) + SNAPSHOT_SUFFIX)
            return copy, swap_in(handle, base, end, replaced, self._epoch, index, copy.size_bytes)

    def _end_of(self, segment: SegmentInfo, weighed: Sequence[_BatchVerdict]) -> int:
        """Return where the last batch ends. The segment itself may end later, after a lost range."""
        if weighed:
            return weighed[-1].header.next_offset
        # The segment is empty: a machine died before anything in it was on the disk.
        is_lost = any(lost.base_offset == segment.base_offset for lost in self._lost_ranges())
        return segment.base_offset if is_lost else segment.end_offset

    def _copy_batches(
        self, group: Sequence[SegmentInfo], weighed: Sequence[Sequence[_BatchVerdict]], copy: SegmentCopy
    ) -> tuple[int, int]:
        """Add the records that stay to the copy. Return (last write time of the newest source, its last epoch)."""
        handle = self._handle
        written_ns = epoch = 0
        for segment, batches in zip(group, weighed, strict=True):
            mapped = handle.map_segment(segment.base_offset)
            written_ns = max(written_ns, mapped.written_ns)
            for verdict in batches:
                header = verdict.header
                epoch = header.partition_epoch
                if not header.record_count or (verdict.kept is not None and not verdict.kept.any()):
                    if self._decided.is_protected(header):
                        copy.add_empty(header)
                    continue
                payload = check_payload(mapped.view, verdict.position, header, mapped.path)
                if self._decided.strips(header):
                    header = stripped(header)
                batch = record_batch(header, payload, path=mapped.path, position=verdict.position)
                kept, horizon_ms = self._survivors.without_old_tombstones(batch, verdict.kept)
                self._pace(2 * header.size_bytes)
                copy.add(batch, payload, kept, horizon_ms, whole=header.base_offset in self._unreadable)
        return written_ns, epoch


def _holds_tombstone(batch: RecordBatch) -> bool:
    return batch.values_may_be_null() and bool(tombstones_among(batch).any())
