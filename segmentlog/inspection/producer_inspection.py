"""Inspect the producer ids, epochs and sequences in a log, and the files that repeat them.

The batches of each producer are checked in order of their offsets. They are compared with each other, with the aborts
in ``.txnindex``, the entries of ``.snapshot`` and the last stable offset of the state page.

A snapshot may include batches that the log no longer has: retention, compaction, a repair or a crash removed them. All
of these are below `_intact_from`. A snapshot must include every producer in the log, except expired producers without a
name.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from segmentlog.format.file_names import ABORTED_SUFFIX, CHECKPOINT_FILE, SNAPSHOT_SUFFIX, STATE_FILE
from segmentlog.format.producer_snapshot import (
    NAMED_ID_END,
    SEQUENCE_END,
    AbortedTransaction,
    MalformedProducerFile,
    ProducerEntry,
    decode_aborted,
    decode_snapshot,
)
from segmentlog.inspection.finding import Severity
from segmentlog.inspection.partition_findings import BadCache, OpenTransaction, PartitionFindings
from segmentlog.inspection.segment_inspection import SegmentFindings, Tracked
from segmentlog.policy.lost_ranges import find_containing
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment import segment_stem


class _Producer(msgspec.Struct):
    """The state of one producer, from the batches so far."""

    epoch: int
    next_offset: int = 0
    """The offset after its last batch or marker."""
    next_sequence: int = -1
    """The sequence of its next record; -1 before its first."""
    data_offset: int = -1
    """Base offset of its last batch that is not a marker."""
    open_offset: int = -1
    """Base offset of the first batch of its open transaction; -1 if none is open."""
    appended_ms: int = 0
    """Timestamp of the newest record before its last batch: that batch is not older."""


class _OpenTransaction(msgspec.Struct):
    """An open transaction that a process would load from the newest snapshot and the batches after it."""

    epoch: int
    first_offset: int


class ProducerInspector:
    """Checks the producers of a partition, segment by segment, oldest first.

    Call `check_snapshot` and `add_segment` for each segment, and `finish` after the last one.
    """

    def __init__(self, fs: FileSystem, found: PartitionFindings, bases: list[int]) -> None:
        self._fs = fs
        self._found = found
        self._bases = bases
        self._known: dict[int, _Producer] = {}
        self._open: dict[int, _OpenTransaction] = {}
        self._intact_from = max(bases[0] if bases else 0, self._find_compacted_below())
        self._snapshot_base = -1
        """Segment of the newest snapshot. A process would load the state of the producers from there on."""
        self._broken_at = -1
        """End offset of the last damage that may hide a batch or a marker."""
        self._has_tracked = False
        self._newest_ms = 0
        """The largest timestamp of the segments so far."""

    def _find_compacted_below(self) -> int:
        """Return the offset below which compaction may have removed batches, or their producer ids and sequences."""
        found = self._found
        checkpoint, active = found.checkpoint.checkpoint, self._bases[-1] if self._bases else 0
        if checkpoint is None or found.checkpoint.is_damaged:
            return active
        compacted = checkpoint.compacted
        reached = max(compacted.cleaned_offset, compacted.begun_offset)
        # An interrupted pass may have compacted any sealed segment.
        return max(reached, active) if reached else 0

    # ------------------------------------------------------------ a segment

    def check_snapshot(self, base: int) -> None:
        """Compare the producer snapshot of segment ``base``, if it has one, with the batches before it."""
        path = segment_stem(self._found.folder, base) + SNAPSHOT_SUFFIX
        try:
            entries = decode_snapshot(read_file(self._fs, path))
        except FileNotFoundError:
            return
        except MalformedProducerFile as error:
            rest = (
                "; it is ignored, and 'segmentlog repair' removes it. The log forgets producers whose batches were all"
                " deleted, if no other snapshot has them"
            )
            self._add_bad_cache(path, f"damaged ({error}){rest}", str(error))
            return
        wrong = self._describe_wrong_entry(entries, base)
        if wrong:
            gone = sum(entry.next_offset <= self._bases[0] for entry in entries)
            rest = "; 'segmentlog repair' removes it, and reads the producers from the log"
            if gone:
                rest += f". The repair forgets {gone} of them whose batches were all deleted"
            self._add_bad_cache(path, wrong + rest, wrong)
        self._found.has_producers = self._found.has_producers or bool(entries)
        self._snapshot_base = base
        self._open = {
            entry.producer_id: _OpenTransaction(entry.epoch, entry.transaction_offset)
            for entry in entries
            if entry.transaction_offset >= 0
        }

    def add_segment(
        self, segment: SegmentFindings, next_base: int | None, *, is_sealed: bool, has_caches: bool
    ) -> None:
        """Check the batches of a segment. ``next_base`` is the base offset of the next segment.

        ``is_sealed``: appends and recoveries can no longer change the segment. ``has_caches``: the segment has cache
        files. A compacted copy has them only once it is swapped in.
        """
        breaks = [broken.following_offset for broken in segment.broken if not broken.blank]
        ends = [offset if offset is not None else max(next_base or 0, segment.end_offset) for offset in breaks]
        breaks_at = sorted([*ends, *(gap.end_offset for gap in segment.gaps)])
        if ends:
            self._broken_at = max(self._broken_at, *ends)
        aborted: list[AbortedTransaction] = []
        at = 0
        for batch in segment.tracked:
            while at < len(breaks_at) and breaks_at[at] <= batch.base_offset:
                self._intact_from = max(self._intact_from, breaks_at[at])
                at += 1
            self._has_tracked = True
            self._add_batch(segment.path, batch)
            before_ms = segment.timestamps_before[bisect_left(segment.positions, batch.position)]
            self._known[batch.producer_id].appended_ms = max(before_ms, self._newest_ms)
            if batch.marker is not None and not batch.marker.committed:
                aborted.append(
                    AbortedTransaction(batch.producer_id, batch.marker.first_offset, batch.marker.offset)
                )  # fmt: skip
            elif batch.control and batch.marker is None:
                self._found.add(
                    "note", segment.path, "a control batch of a type that this version does not know", batch.position,
                    batch.size_bytes, batch.base_offset, batch.next_offset,
                )  # fmt: skip
        self._intact_from = max([self._intact_from, *breaks_at])
        if next_base is not None and segment.end_offset != next_base:
            self._intact_from = max(self._intact_from, next_base)
        self._found.has_aborts = self._found.has_aborts or bool(aborted)
        segment.tracked = []  # frees memory for the next segments
        self._newest_ms = max(self._newest_ms, segment.max_timestamp)
        if has_caches:
            self._check_aborted(segment, aborted, is_sealed=is_sealed)

    def _add_batch(self, path: str, batch: Tracked) -> None:
        known = self._known.get(batch.producer_id)
        if known is None:
            known = self._known[batch.producer_id] = _Producer(batch.epoch)
        elif self._is_intact(known.next_offset - 1) and batch.epoch < known.epoch:
            what = f"producer {batch.producer_id}: epoch {batch.epoch} comes after epoch {known.epoch}"
            self._add_flaw(path, batch, what)
        if batch.control:
            known.open_offset = -1
            self._open.pop(batch.producer_id, None)
            if batch.epoch > known.epoch and batch.producer_id >= NAMED_ID_END:
                known.next_sequence = -1  # the sequence starts at 0 again
        else:
            self._check_sequence(path, batch, known)
            count = batch.next_offset - batch.base_offset
            if batch.sequence >= 0:
                known.next_sequence = (batch.sequence + count) % SEQUENCE_END
            known.data_offset = batch.base_offset
            if batch.transactional and known.open_offset < 0:
                known.open_offset = batch.base_offset
            if batch.transactional:
                self._open.setdefault(batch.producer_id, _OpenTransaction(batch.epoch, batch.base_offset))
        known.epoch = max(known.epoch, batch.epoch)
        known.next_offset = batch.next_offset

    def _is_intact(self, offset: int) -> bool:
        """Return whether all batches that were appended from this offset on still exist unchanged."""
        return offset >= self._intact_from

    def _check_sequence(self, path: str, batch: Tracked, known: _Producer) -> None:
        if known.next_sequence < 0 or not self._is_intact(known.data_offset) or batch.sequence == known.next_sequence:
            return
        if batch.sequence == 0 and (batch.epoch > known.epoch or batch.producer_id >= NAMED_ID_END):
            return  # the sequence starts at 0 again
        what = (
            f"producer {batch.producer_id}: its sequence continues with {batch.sequence},"
            f" but {known.next_sequence} should follow"
        )
        self._add_flaw(path, batch, what)

    def _add_flaw(self, path: str, batch: Tracked, what: str) -> None:
        severity: Severity = "damage"
        if batch.producer_id >= NAMED_ID_END:
            severity, what = "warning", f"{what}; possible if the producer expired in between"
        self._found.add(severity, path, what, batch.position, batch.size_bytes, batch.base_offset, batch.next_offset)

    # ------------------------------------------------------------ cache files

    def _check_aborted(self, segment: SegmentFindings, marked: list[AbortedTransaction], *, is_sealed: bool) -> None:
        """Compare the ``.txnindex`` of a sealed segment with its markers."""
        path = segment.stem + ABORTED_SUFFIX
        try:
            size, aborted = decode_aborted(read_file(self._fs, path))
        except FileNotFoundError:
            return
        except MalformedProducerFile as error:
            rest = "; it is ignored, and rebuilt when it is needed; 'segmentlog repair' removes it"
            self._add_bad_cache(path, f"damaged ({error}){rest}", str(error))
            return
        if not is_sealed or size != segment.size_bytes:
            return  # readers ignore it, too
        wrong = ""
        if missing := set(marked) - set(aborted):
            first = min(missing, key=lambda abort: abort.last_offset)
            wrong = f"the transaction of producer {first.producer_id} that offset {first.last_offset} aborts is missing"
        elif extra := [
            abort
            for abort in aborted
            if abort not in marked and not self._is_lost_or_damaged(segment, abort.last_offset)
        ]:
            first = extra[0]
            wrong = f"nothing at offset {first.last_offset} aborts a transaction of producer {first.producer_id}"
        if wrong:
            rest = "; readers trust it until 'segmentlog repair' removes it"
            self._add_bad_cache(path, wrong + rest, wrong)

    def _is_lost_or_damaged(self, segment: SegmentFindings, offset: int) -> bool:
        """Return whether the batch at this offset is damaged now, or its offset is in a lost range."""
        checkpoint = self._found.checkpoint.checkpoint
        if checkpoint is not None and find_containing(checkpoint.lost_ranges, offset) is not None:
            return True
        return any(
            not broken.blank and broken.expected_offset <= offset
            and (broken.following_offset is None or offset < broken.following_offset)
            for broken in segment.broken
        )  # fmt: skip

    def _describe_wrong_entry(self, entries: list[ProducerEntry], base: int) -> str:
        """Return the first contradiction between a snapshot and the batches before it; "" if there is none."""
        by_id = {entry.producer_id: entry for entry in entries}
        for entry in entries:
            if why := self._describe_entry_error(entry, base):
                return f"producer {entry.producer_id}: {why}"
        for producer_id, known in self._known.items():
            idle_ms = self._newest_ms - known.appended_ms
            may_be_forgotten = producer_id >= NAMED_ID_END or idle_ms > self._found.producer_expiration_ms
            if producer_id not in by_id and not may_be_forgotten:
                return f"producer {producer_id}, whose last batch ends at offset {known.next_offset}, is missing"
        return ""

    def _describe_entry_error(self, entry: ProducerEntry, base: int) -> str:
        ends = [run.offset + run.count for run in entry.runs]
        if entry.next_offset > base or entry.transaction_offset >= entry.next_offset or max(ends, default=0) > base:
            return f"it has offsets from {base} on, where the segment begins, or contradicts itself"
        known = self._known.get(entry.producer_id)
        last_offset = entry.next_offset - 1
        if known is None:
            if self._is_intact(last_offset):
                return f"it has no batch at offset {last_offset}"
            return ""
        if known.next_offset > entry.next_offset:
            return f"its last batch ends at offset {known.next_offset}, not at {entry.next_offset}"
        is_intact = self._is_intact(last_offset)
        if is_intact and known.next_offset != entry.next_offset:
            return f"it has no batch at offset {last_offset}"
        is_named = entry.producer_id < NAMED_ID_END
        if is_named and (known.epoch > entry.epoch or (is_intact and known.epoch < entry.epoch)):
            return f"its epoch is {known.epoch}, not {entry.epoch}"
        if not is_intact:
            return ""
        if self._is_intact(known.data_offset) and known.next_sequence not in (-1, entry.next_sequence):
            return f"its next sequence is {known.next_sequence}, not {entry.next_sequence}"
        recorded, open_offset = entry.transaction_offset, known.open_offset
        # If the end of an earlier transaction was cut out, that transaction continues as far as the batches show.
        can_tell = all(offset < 0 or self._is_intact(offset) for offset in (recorded, open_offset))
        if recorded != open_offset and can_tell:
            return f"its transaction began at offset {open_offset}, not at {recorded} (-1: none is open)"
        return ""

    def _add_bad_cache(self, path: str, what: str, why: str) -> None:
        self._found.add("warning", path, what)
        self._found.bad_caches.append(BadCache(path, why))

    # ------------------------------------------------------------ the partition as a whole

    def finish(self) -> None:
        """Check open transactions, the last stable offset, and that checkpoint and state page record the producers."""
        found = self._found
        found.has_producers = found.has_producers or self._has_tracked
        found.open_transactions = [
            OpenTransaction(producer_id, opened.epoch, opened.first_offset)
            for producer_id, opened in sorted(self._open.items(), key=lambda item: item[1].first_offset)
        ]
        log = found.state.log
        end_offset = found.segments[-1].end_offset if found.segments else 0
        if log is not None and found.live:
            end_offset = log.log_end_offset
        for opened in found.open_transactions:
            who = f"producer {opened.producer_id} (epoch {opened.epoch})"
            what = f"{who} has a transaction open: these records are neither committed nor aborted yet"
            found.add("note", found.folder, what, base_offset=opened.first_offset, end_offset=end_offset)
        if found.is_unaware_of_producers:
            path = f"{found.folder}/{CHECKPOINT_FILE}"
            found.add("damage", path, "it says that the log has no producers: a recovery would ignore them")
        if log is not None and found.live:
            self._check_state()

    def _check_state(self) -> None:
        found, log = self._found, self._found.state.log
        assert log is not None
        path = f"{found.folder}/{STATE_FILE}"
        if found.has_aborts and not found.state.aborts:
            what = "it says that no transaction was aborted, but some were: readers return aborted records"
            found.add("damage", path, what)
        if self._has_tracked and not found.state.producers:
            found.add("warning", path, "it says that the log has no producers, but it has")
        if max(self._broken_at, *(hole.end_offset for hole in found.holes), -1) > self._snapshot_base:
            return  # a damaged batch may have begun or ended a transaction
        stable_offset = min((opened.first_offset for opened in found.open_transactions), default=log.log_end_offset)
        stated = log.last_stable_offset
        if stated == stable_offset or (self._bases and stated < self._bases[0]):
            return  # nothing may be left of a transaction whose batches were deleted
        if stated > stable_offset:
            what = f"last stable offset {stated}, but a transaction that began at {stable_offset} is not decided"
            found.add("damage", path, what, base_offset=stable_offset, end_offset=stated)
        else:
            what = (
                f"last stable offset {stated}, but everything below {stable_offset} is decided: readers wait needlessly"
            )
            found.add("warning", path, what)
