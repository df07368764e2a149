"""Inspect the segments of a partition, and report broken bytes as damage or as a note.

Broken bytes are damage if they are before the log end. A live state page records the log end exactly: everything before
it is checked, and nothing after it. Without a live page (after a reboot, in a copy), everything below the checkpoint's
recovery point must be intact. Above the recovery point, the next open keeps the batches up to the first torn byte, so
torn bytes are reported as a note.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from segmentlog.errors import CorruptBatch, ObjectStoreError, SegmentGone, SegmentlogError
from segmentlog.format.examine import DamagedRange
from segmentlog.format.file_names import CHECKPOINT_FILE, LOG_SUFFIX, QUARANTINE_FOLDER
from segmentlog.inspection.finding import Tally
from segmentlog.inspection.partition_findings import Cut, Hole, PartitionFindings
from segmentlog.inspection.producer_inspection import ProducerInspector
from segmentlog.inspection.segment_inspection import InspectSegment, SegmentFindings, Unreadable, find_index_flaws
from segmentlog.inspection.small_files import StateReader
from segmentlog.policy.lost_ranges import skip_lost_ranges
from segmentlog.records import LostRange
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment import segment_stem

_PAUSE_S = 0.01


class LogInspector:
    """One inspection of the segments of a partition, after its checkpoint and state page were read."""

    def __init__(
        self, fs: FileSystem, found: PartitionFindings, tally: Tally, paths: Mapping[int, str], inspect: InspectSegment
    ) -> None:
        self._fs = fs
        self._folder = found.folder
        self._found = found
        self._tally = tally
        self._paths = paths
        """Paths of segments that do not have their own name: compacted copies that are not swapped in yet."""
        self._inspect_segment = inspect
        self._tail_breaks: list[Cut | Hole] = []
        self._breaks_before_intact = 0
        self._intact_after_breaks = 0

    def run(self, bases: list[int]) -> None:
        """Inspect the segments with these base offsets."""
        found, log = self._found, self._found.state.log
        checkpoint = found.checkpoint.checkpoint
        start_offset = self._read_log_start() if checkpoint or found.live else (bases[0] if bases else 0)
        if bases and bases[0] > start_offset:
            path = segment_stem(self._folder, bases[0]) + LOG_SUFFIX
            self._check_gap(path, 0, start_offset, bases[0])
        epoch = 0
        producers = ProducerInspector(self._fs, found, bases)
        for base, next_base in zip(bases, [*bases[1:], None], strict=False):
            try:
                segment = self._inspect_one(base, next_base, epoch)
            except FileNotFoundError:
                if found.live and next_base is not None and next_base <= self._read_log_start():
                    continue  # trimmed since the folder was listed
                raise
            found.segments.append(segment)
            epoch = max([epoch, *segment.epochs])
            producers.check_snapshot(base)
            is_sealed = next_base is not None and self._find_tail_position(base) is None
            producers.add_segment(segment, next_base, is_sealed=is_sealed, has_caches=base not in self._paths)
        if log is not None and found.live and log.active_base_offset not in bases:
            missing = segment_stem(self._folder, log.active_base_offset) + LOG_SUFFIX
            end_offset = max([start_offset, *(segment.end_offset for segment in found.segments)])
            self._add_hole(missing, -1, end_offset, log.log_end_offset, "missing: appends go to this segment")
        producers.finish()
        if not found.live:
            self._check_recovery_point(bases)
            self._report_torn_tail()

    def _check_recovery_point(self, bases: list[int]) -> None:
        """Report offsets that are missing between the last segment and the recovery point."""
        found, checkpoint = self._found, self._found.checkpoint.checkpoint
        if (
            checkpoint is None
            or checkpoint.recovery_segment in bases
            or max(bases, default=-1) > checkpoint.recovery_segment
        ):
            return
        missing = segment_stem(self._folder, checkpoint.recovery_segment) + LOG_SUFFIX
        ends = [segment.end_offset for segment in found.segments]
        self._check_gap(missing, -1, max([checkpoint.log_start_offset, *ends]), checkpoint.recovery_offset)

    def _read_log_start(self) -> int:
        """Return the current log start. It is read each time, because a process may trim the log meanwhile."""
        found, checkpoint = self._found, self._found.checkpoint.checkpoint
        if found.live and found.state.log is not None:
            log = StateReader(self._fs, self._folder).read().log
            return max(found.state.log.log_start_offset, log.log_start_offset if log else 0)
        return checkpoint.log_start_offset if checkpoint else 0

    def _find_tail_position(self, base: int) -> int | None:
        """Return the first position in a segment that is above the recovery point, if there is one.

        Bytes from this position on may be torn, and the next open decides which batches remain. If the state page is
        trusted, the result is None, because the page records the log end exactly.
        """
        checkpoint = self._found.checkpoint.checkpoint
        if self._found.live and self._found.state.log is not None:
            return None
        if checkpoint is None or base > checkpoint.recovery_segment:
            return 0
        return checkpoint.recovery_position if base == checkpoint.recovery_segment else None

    def _inspect_one(self, base: int, next_base: int | None, epoch: int) -> SegmentFindings:
        found, log = self._found, self._found.state.log
        end_position, end_offset, tail_from = None, next_base, self._find_tail_position(base)
        is_active = False
        if log is not None and found.live and base == log.active_base_offset:
            end_position, end_offset, is_active = log.end_position, log.log_end_offset, True
        path = self._paths.get(base) or segment_stem(self._folder, base) + LOG_SUFFIX
        try:
            segment = self._inspect_segment(
                self._fs, path, base, end_position=end_position, epoch=epoch, tally=self._tally
            )
        except (CorruptBatch, ObjectStoreError) as error:
            return self._report_unreadable_file(path, base, next_base, error)
        for position, size in segment.bad_sectors:
            found.add("damage", segment.path, "the disk cannot read these bytes", position, size)
        breaks_before = len(self._tail_breaks)
        for broken in segment.broken:
            self._judge_damage(segment, broken, end_offset, tail_from, is_active)
        if tail_from is not None:
            self._count_intact_batches(segment, breaks_before, tail_from)
        for flaw in segment.flaws:
            found.add(
                "damage", segment.path, flaw.what, flaw.position, flaw.size_bytes, flaw.base_offset, flaw.end_offset
            )
        for flaw in segment.wrong_times:
            what = (
                f"{flaw.what}: the client sent it so. Its records can be read; look-ups and retention by time use the"
                " header"
            )
            found.add("warning", segment.path, what, flaw.position, flaw.size_bytes, flaw.base_offset, flaw.end_offset)
        for batch in segment.unreadable:
            self._report_unreadable(segment, batch)
        for gap in segment.gaps:
            self._check_gap(segment.path, gap.position, gap.base_offset, gap.end_offset)
        self._check_lost(segment, tail_from)
        self._check_end(segment, end_position, end_offset, tail_from)
        if base not in self._paths:
            self._check_index(segment, next_base, end_position, tail_from)
        return segment

    def _report_unreadable(self, segment: SegmentFindings, batch: Unreadable) -> None:
        """Report an intact batch that does not decode. A recovery keeps such a batch."""
        base_offset, end_offset, count = batch.base_offset, batch.end_offset, batch.record_count
        what = (
            f"the records of this batch do not decode ({batch.reason}). Its checksum is right, so the disk returned"
            f" what was stored. Readers stop at it and can continue at offset {end_offset}; 'segmentlog repair"
            f" --drop-unreadable' removes it, and with it the {count} records that its header announces"
        )
        self._found.add("unreadable", segment.path, what, batch.position, batch.size_bytes, base_offset, end_offset)
        end_position = batch.position + batch.size_bytes
        cut = Cut(
            segment.base_offset, segment.path, batch.position, end_position, base_offset, end_offset, batch.reason,
            count,
        )  # fmt: skip
        self._found.unreadable.append(cut)

    def _report_unreadable_file(
        self, path: str, base: int, next_base: int | None, error: SegmentlogError
    ) -> SegmentFindings:
        """Report a segment that is only in the object store and cannot be read.

        `repair` cuts it out only if the object store reports that its object does not exist.
        """
        size_bytes, end_offset = self._fs.stat(path).st_size, base if next_base is None else next_base
        if isinstance(error, SegmentGone):
            self._found.add("damage", path, str(error), 0, size_bytes, base, end_offset)
            self._found.cuts.append(Cut(base, path, 0, size_bytes, base, end_offset, str(error)))
        elif isinstance(error, CorruptBatch):  # the stub is damaged, but the manifest repeats its content
            what = f"{error.found}: the segment cannot be read; 'segmentlog ship' writes the stub again"
            self._found.add("damage", error.path, what)
        else:
            self._found.add("warning", path, f"it is only in the object store, and was not checked: {error}")
        return SegmentFindings(base, path, size_bytes, size_bytes, end_offset)

    def _judge_damage(
        self,
        segment: SegmentFindings,
        broken: DamagedRange,
        end_offset: int | None,
        tail_from: int | None,
        is_active: bool,
    ) -> None:
        """Report broken bytes as damage, or remember them as part of a torn tail. Zeros at the end are a note."""
        found = self._found
        size = broken.end_position - broken.position
        if broken.blank and not is_active:
            if tail_from is None:
                what = f"{size} zeros after the last batch: preallocated space that was never truncated"
                found.add("note", segment.path, what, broken.position, size)
            return
        error = broken.error
        at = f" at byte {error.position}" if error.position != broken.position else ""
        why = f"expected {error.expected}{at}, found {error.found}"
        following = broken.following_offset if broken.following_offset is not None else end_offset
        checkpoint = found.checkpoint.checkpoint
        if following is None and checkpoint is not None and tail_from is not None and broken.position < tail_from:
            following = checkpoint.recovery_offset  # the last batches below the recovery point ended there
        cut = Cut(
            segment.base_offset, segment.path, broken.position, broken.end_position, broken.expected_offset,
            max(following if following is not None else broken.expected_offset, broken.expected_offset), why,
        )  # fmt: skip
        if tail_from is not None and broken.position >= tail_from:
            self._tail_breaks.append(cut)
            return
        found.cuts.append(cut)
        found.add("damage", segment.path, why, cut.position, size, cut.base_offset, cut.end_offset)

    def _count_intact_batches(self, segment: SegmentFindings, breaks_before: int, tail_from: int) -> None:
        """Count the intact batches that follow torn bytes, and the torn ranges that intact batches follow."""
        self._intact_after_breaks += len(segment.positions) if breaks_before else segment.count_intact_after(tail_from)
        if segment.positions:
            mine = self._tail_breaks[breaks_before:]
            followed = sum(
                isinstance(tail_break, Cut) and tail_break.position < segment.whole_position for tail_break in mine
            )
            self._breaks_before_intact = breaks_before + followed

    def _check_end(self, segment: SegmentFindings, end_position: int | None, end_offset: int | None,
                   tail_from: int | None) -> None:  # fmt: skip
        """Check that the segment reaches the next segment, the end in the state page, or the recovery point."""
        found, checkpoint = self._found, self._found.checkpoint.checkpoint
        is_active = end_position is not None
        if tail_from and checkpoint is not None:
            if segment.size_bytes < tail_from:
                what = f"{tail_from - segment.size_bytes} bytes below the recovery point are missing"
                self._add_hole(segment.path, segment.size_bytes, segment.end_offset, checkpoint.recovery_offset, what)
            elif not segment.is_boundary(tail_from):
                what = f"the recovery point, byte {tail_from}, is inside a batch"
                found.add("damage", f"{self._folder}/{CHECKPOINT_FILE}", what)
        if end_position is not None and segment.size_bytes < end_position:
            what = f"{end_position - segment.size_bytes} bytes before the end of the log are missing"
            self._add_hole(segment.path, segment.size_bytes, segment.end_offset, end_offset or 0, what)
            return
        covered = any(broken.following_offset is None and (not broken.blank or is_active) for broken in segment.broken)
        if end_offset is None or covered or segment.end_offset == end_offset:
            return
        if segment.end_offset > end_offset:
            what = f"its last batch ends at offset {segment.end_offset}, but the log continues at {end_offset}"
            found.add("damage", segment.path, what, segment.whole_position, 0, end_offset, segment.end_offset)
        elif tail_from is None:
            self._check_gap(segment.path, segment.whole_position, segment.end_offset, end_offset)
        elif skip_lost_ranges(self._lost_ranges(), segment.end_offset) < end_offset:
            what = f"offsets end at {segment.end_offset}, but the next segment begins at {end_offset}"
            self._tail_breaks.append(Hole(segment.end_offset, end_offset, what))

    def _lost_ranges(self) -> tuple[LostRange, ...]:
        checkpoint = self._found.checkpoint.checkpoint
        return tuple(sorted(checkpoint.lost_ranges, key=lambda lost: lost.base_offset)) if checkpoint else ()

    def _check_gap(self, path: str, position: int, base_offset: int, end_offset: int) -> None:
        """Report a gap in the offsets, unless lost ranges account for it. Compaction leaves no gaps."""
        # Records below the log start were deleted, and the log may start inside a lost range.
        base_offset = skip_lost_ranges(self._lost_ranges(), max(base_offset, self._read_log_start()))
        if base_offset < end_offset:
            what = "no batch has these offsets, and no lost range accounts for them"
            self._add_hole(path, position, base_offset, end_offset, what)

    def _add_hole(self, path: str, position: int, base_offset: int, end_offset: int, what: str) -> None:
        self._found.holes.append(Hole(base_offset, end_offset, what))
        self._found.add("damage", path, what, position, 0, base_offset, end_offset)

    def _check_lost(self, segment: SegmentFindings, tail_from: int | None) -> None:
        """Report batches with offsets inside lost ranges."""
        for lost in self._lost_ranges():
            at = segment.first_inside(lost.base_offset, lost.end_offset)
            if at is None:
                continue
            position, first, end = segment.positions[at], segment.base_offsets[at], segment.next_offsets[at]
            if tail_from is not None and position >= tail_from:
                what = f"in a lost range ({lost.reason}); the next open removes it"
                self._found.add("note", segment.path, what, position, 0, first, end)
            else:
                what = f"a batch in the lost range [{lost.base_offset}, {lost.end_offset}) ({lost.reason})"
                self._found.add("damage", segment.path, what, position, 0, first, end)

    def _check_index(self, segment: SegmentFindings, next_base: int | None, end_position: int | None,
                     tail_from: int | None) -> None:  # fmt: skip
        limit = end_position
        if tail_from is not None or (limit is None and next_base is None):
            limit = segment.whole_position  # a recovery rebuilds the index of the last segment
        following = segment.end_offset if next_base is None else next_base
        for pause_s in (_PAUSE_S, 0):  # twice, because an appender may be writing entries just now
            flaws = list(find_index_flaws(self._fs, segment, next_base=following, limit=limit, live=tail_from is None))
            if not flaws:
                return
            time.sleep(pause_s)
        for flaw in flaws:
            self._found.add("warning", flaw.path, flaw.what, flaw.position, flaw.size_bytes)
        self._found.bad_indexes.append(segment.base_offset)

    # ------------------------------------------------------------ the torn tail

    def _report_torn_tail(self) -> None:
        """Report all torn bytes above the recovery point as one finding: the next open removes them."""
        found = self._found
        if not self._tail_breaks:
            return
        first = self._tail_breaks[0]
        path, position, size = self._folder, -1, 0
        if isinstance(first, Cut):
            path, position, size = first.path, first.position, first.end_position - first.position
        if self._intact_after_breaks == 0:
            what = f"torn: {first.why}; the next open moves the bytes to {QUARANTINE_FOLDER}/"
            found.torn = found.add("note", path, what, position, size)
            return
        what = (
            f"broken ({first.why}), but {self._intact_after_breaks} intact batches follow above the recovery point:"
            f" the next open would move those to {QUARANTINE_FOLDER}/, too; 'segmentlog repair' keeps them"
        )
        found.torn = found.add("warning", path, what, position, size, first.base_offset)
        for tail_break in self._tail_breaks[: self._breaks_before_intact]:
            if isinstance(tail_break, Cut):
                found.cuts.append(tail_break)
            else:
                found.holes.append(tail_break)
