"""Inspect one partition: each of its files, and whether the files agree."""

from __future__ import annotations

import time
from collections.abc import Iterator

from segmentlog.config import TopicConfig
from segmentlog.format.checkpoint import Checkpoint
from segmentlog.format.file_names import (
    CHECKPOINT_FILE,
    CLEANED_SUFFIX,
    CLEANER_FILE,
    DELETED_SUFFIX,
    GRANT_FILE,
    LOCK_FILE,
    LOG_SUFFIX,
    PRODUCERS_FILE,
    QUARANTINE_FOLDER,
    SEGMENT_SUFFIXES,
    STATE_FILE,
    SWAP_SUFFIX,
    TEMPORARY_SUFFIX,
    copy_name,
    deleted_since_ms,
    parse_copy_name,
    segment_name,
)
from segmentlog.inspection.finding import Finding, Tally
from segmentlog.inspection.partition_findings import PartitionFindings
from segmentlog.inspection.segment_inspection import InspectSegment, inspect_segment
from segmentlog.inspection.segments_inspection import LogInspector
from segmentlog.inspection.small_files import (
    StateReader,
    check_grant,
    find_checkpoint_flaws,
    read_checkpoint,
)
from segmentlog.policy.retention import deleted_segments
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment import list_segments, segment_stem
from segmentlog.storage.state_page import REWRITING

_ATTEMPTS = 10
_PAUSE_S = 0.02
_OLD_S = 60
"""A process that died has left a temporary file that is older than this."""
_OVERDUE_MS = 600_000


def inspect_partition(
    fs: FileSystem, folder: str, topic: str, partition: int, config: TopicConfig, tally: Tally,
    inspect: InspectSegment = inspect_segment,
) -> PartitionFindings:  # fmt: skip
    """Check one partition, also while other processes append to it. Raises OSError.

    ``inspect`` inspects a segment, or returns an earlier result for it.

    If a truncation, a recovery or retention changes the partition meanwhile, the inspected files may contradict each
    other, and the partition is inspected again. After `_ATTEMPTS` inspections, only findings that occurred in the last
    two are reported.
    """
    counts = tally.counts()
    before: set[tuple[str, int, str]] = set()
    for attempt in range(_ATTEMPTS):
        tally.reset(counts)
        tally.partitions += 1
        found = PartitionFindings(folder, topic, partition)
        inspector = _PartitionInspector(fs, found, config, tally, inspect)
        try:
            inspector.run()
        except FileNotFoundError as error:
            found.add("damage", str(error.filename or folder), "missing")
        seen = {_finding_key(finding) for finding in found.findings if finding.severity != "note"}
        if not seen or not inspector.has_changed():
            break
        if attempt == _ATTEMPTS - 1:
            _retain_only(found, before)
            break
        before = seen
        time.sleep(_PAUSE_S)
    return found


def _finding_key(finding: Finding) -> tuple[str, int, str]:
    return finding.path, finding.position, finding.what


def _retain_only(found: PartitionFindings, known: set[tuple[str, int, str]]) -> None:
    """Drop findings that are not in ``known``: they may be a result of changes during the inspection."""
    kept = [finding for finding in found.findings if finding.severity == "note" or _finding_key(finding) in known]
    if len(kept) < len(found.findings):
        found.findings[:] = kept
        what = (
            f"it changed during each of {_ATTEMPTS} inspections; findings that only the last inspection had are not"
            " reported; inspect it again"
        )
        found.add("note", found.folder, what)


class _PartitionInspector:
    """One inspection of a partition."""

    def __init__(
        self, fs: FileSystem, found: PartitionFindings, config: TopicConfig, tally: Tally, inspect: InspectSegment
    ) -> None:
        self._fs = fs
        self._folder = found.folder
        self._found = found
        self._config = config
        self._tally = tally
        self._inspect_segment = inspect
        self._state = StateReader(fs, found.folder)
        self._inodes: dict[int, int] = {}
        self._copies: dict[int, range] = {}
        self._deleted: list[int] = []

    def run(self) -> None:
        found, fs = self._found, self._fs
        found.producer_expiration_ms = self._config.producer_id_expiration_ms
        found.state = state = self._state.read()
        bases = list_segments(fs, self._folder)
        copies = self._copies = self._find_pending_swaps()
        bases = sorted(
            copies.keys() | {base for base in bases if not any(base in offsets for offsets in copies.values())}
        )
        found.checkpoint = read_checkpoint(fs, f"{self._folder}/{CHECKPOINT_FILE}")
        found.live = state.log is not None and state.writing != REWRITING
        if state.log is not None and found.live:
            bases = [base for base in bases if base <= state.log.active_base_offset]
        self._deleted = self._find_deleted(bases)
        bases = [base for base in bases if base not in self._deleted]
        self._inodes = {base: self._find_inode(base) for base in bases}
        self._check_state()
        self._check_checkpoint(bases)
        paths = {
            base: f"{self._folder}/{copy_name(base, offsets.stop, SWAP_SUFFIX)}" for base, offsets in copies.items()
        }
        LogInspector(fs, found, self._tally, paths, self._inspect_segment).run(bases)
        for finding in check_grant(fs, self._folder):
            found.add(finding.severity, finding.path, finding.what)
        self._check_other_files(bases)

    def _find_deleted(self, bases: list[int]) -> list[int]:
        """Return the base offsets of the segments below the log start, which retention or a trim has deleted.

        Their bytes are not checked, because a power cut may have damaged them.
        """
        log, checkpoint = self._found.state.log, self._found.checkpoint.checkpoint
        if log is not None and self._found.live:
            # Keep the segment with the recovery point: the log may be trimmed completely and may have rolled since.
            end_base = log.active_base_offset if checkpoint is None else checkpoint.recovery_segment
            return deleted_segments(bases, log.log_start_offset, min(end_base, log.active_base_offset))
        if checkpoint is not None:
            return deleted_segments(bases, checkpoint.log_start_offset, checkpoint.recovery_segment)
        return []

    def _find_pending_swaps(self) -> dict[int, range]:
        """Return the offset ranges of compacted copies that are not swapped in yet, by base offset."""
        names = [name for name in self._fs.listdir(self._folder) if name.endswith(SWAP_SUFFIX)]
        return {offsets[0]: range(*offsets) for name in names if (offsets := parse_copy_name(name)) is not None}

    def has_changed(self) -> bool:
        """Return whether files were replaced, or the log was recovered, trimmed or truncated during the inspection."""
        state = self._state.read()
        before, after = self._found.state.log, state.log
        if (before is None) != (after is None) or state.writing == REWRITING:
            return True
        if before is not None and after is not None and before.generation != after.generation:
            return True
        if before is not None and after is not None and before.log_start_offset != after.log_start_offset:
            return True
        if (
            self._copies != self._find_pending_swaps()
        ):  # the last step of a swap removes the copy, without a new generation
            return True
        return any(self._find_inode(base) != inode for base, inode in self._inodes.items())

    def _find_inode(self, base: int) -> int:
        try:
            return self._fs.stat(segment_stem(self._folder, base) + LOG_SUFFIX).st_ino
        except FileNotFoundError:
            return -1

    # ------------------------------------------------------------ state page

    def _check_state(self) -> None:
        found, state = self._found, self._found.state
        path = self._state.path
        if state.why and state.why != "never used":
            found.add(state.severity, path, state.why)
        log, sync = state.log, state.sync
        if log is None or sync is None:
            return
        if state.failed:
            found.add("warning", path, "an fsync failed: appends are refused until the partition is reopened")
        if state.writing == REWRITING:
            found.add("note", path, "a truncation is running or was interrupted; the next open completes it")
        elif state.writing:
            time.sleep(_PAUSE_S)
            if self._state.read().log == log:
                found.add("note", path, "a process died during an append; the next append removes its bytes")
        # A transaction may have begun below the log start: its first records were deleted before it was decided.
        stable_offset = max(log.last_stable_offset, log.log_start_offset)
        in_order = (log.log_start_offset, stable_offset, log.log_end_offset, log.offset_ceiling)
        if list(in_order) != sorted(in_order) or not sync.durable_offset <= self._read_log_end():
            found.add(
                "damage", path, f"start, stable, end, ceiling {in_order}, durable {sync.durable_offset}: not in order"
            )

    def _read_log_end(self) -> int:
        log = self._state.read().log
        return log.log_end_offset if log is not None else -1

    # ------------------------------------------------------------ checkpoint

    def _check_checkpoint(self, bases: list[int]) -> None:
        found, state = self._found, self._found.state
        path = f"{self._folder}/{CHECKPOINT_FILE}"
        checkpoint = found.checkpoint.checkpoint
        in_use = bool(bases) or state.log is not None
        if found.checkpoint.missing:
            if in_use:
                found.add("damage", path, "missing: the highest assigned offset is unknown")
            return
        for position, size, why in found.checkpoint.bad_slots:
            # A power cut may leave a half-written slot, next to a valid slot of a log that was in use.
            torn = not found.live and checkpoint is not None and not checkpoint.clean
            what = f"no valid slot ({why})" + ("; damaged, or truncated by a crash" if torn else "")
            found.add("warning" if torn else "damage", path, what, position, size)
        for position, size in found.checkpoint.stray:
            found.add("warning", path, "bytes that should be zero are not zero; they are never read", position, size)
        if checkpoint is None:
            return
        for flaw in find_checkpoint_flaws(checkpoint):
            found.add("damage", path, f"it contradicts itself: {flaw}")
        if checkpoint.recovery_segment not in bases and (bases or checkpoint.recovery_offset):
            missing = segment_stem(self._folder, checkpoint.recovery_segment) + LOG_SUFFIX
            what = "missing: it contains the recovery point"
            if not found.live:
                what += "; the next open would drop everything after it, 'segmentlog repair' keeps it"
            found.add("damage", missing, what)
        if found.live:
            self._compare_with_state(path, checkpoint)

    def _compare_with_state(self, path: str, checkpoint: Checkpoint) -> None:
        """Compare the checkpoint with the state page.

        The checkpoint was read after the page, so it may contain the effects of later appends.
        """
        found = self._found
        before, after = found.state.log, self._state.read().log
        if before is None or after is None:
            return
        if checkpoint.offset_ceiling < before.log_end_offset:
            end = before.log_end_offset
            found.add("damage", path, f"offset ceiling {checkpoint.offset_ceiling} is below the log end {end}")
        if checkpoint.recovery_offset > after.log_end_offset:
            what = f"recovery point {checkpoint.recovery_offset} is after the log end {after.log_end_offset}"
            found.add("damage", path, what)
        if checkpoint.log_start_offset < before.log_start_offset:
            what = f"log start {checkpoint.log_start_offset} is below {before.log_start_offset} of the state page"
            found.add("damage", path, what)
        if checkpoint.epoch != after.epoch:
            time.sleep(_PAUSE_S)  # a recovery writes the checkpoint and the page one after the other
            again, page = read_checkpoint(self._fs, path).checkpoint, self._state.read().log
            if again is not None and page is not None and again.epoch != page.epoch:
                found.add("warning", path, f"epoch {again.epoch}, but the state page has {page.epoch}")

    # ------------------------------------------------------------ other files

    def _check_other_files(self, bases: list[int]) -> None:
        known = {CHECKPOINT_FILE, STATE_FILE, LOCK_FILE, CLEANER_FILE, GRANT_FILE, PRODUCERS_FILE, QUARANTINE_FOLDER}
        stems = {segment_name(base) for base in bases}
        deleted = {segment_name(base) for base in self._deleted}
        for name in sorted(self._fs.listdir(self._folder)):
            path = f"{self._folder}/{name}"
            stem, _, suffix = name.partition(".")
            if name == QUARANTINE_FOLDER:
                kept = self._fs.listdir(path)
                self._found.add("note", path, f"{len(kept)} files with bytes that a recovery or a repair removed")
            elif name in known or (stem in stems and suffix in _SUFFIXES):
                continue
            elif stem in deleted and suffix in _SUFFIXES:
                if name.endswith(LOG_SUFFIX):
                    what = "belongs to a deleted segment: a crash kept the file or restored it"
                    self._found.add("note", path, what)
            elif stem.isdecimal() and len(stem) == 20 and self._found.live and suffix in _SUFFIXES:
                self._check_segment_file(name, path, int(stem))
            elif name.endswith(SWAP_SUFFIX) and parse_copy_name(name):
                what = "a compaction was interrupted; the next open or compaction swaps this copy in"
                self._found.add("note", path, what)
            elif name.endswith(DELETED_SUFFIX):
                overdue_ms = time.time() * 1000 - deleted_since_ms(name) - self._config.file_delete_delay_ms
                if overdue_ms > _OVERDUE_MS:
                    self._found.add("note", path, "overdue for deletion; 'segmentlog apply-retention' deletes it")
            elif name.endswith((TEMPORARY_SUFFIX, CLEANED_SUFFIX)):
                if self._age_s(path) > _OLD_S:
                    self._found.add("note", path, "left by a process that died; it may be deleted")
            else:
                self._found.add("note", path, "not a file of this store")

    def _check_segment_file(self, name: str, path: str, base: int) -> None:
        """Report an index file, snapshot or the like whose segment has no ``.log`` file.

        Ignore files after the log end, because a roll may be creating their segment.
        """
        log = self._state.read().log
        if log is None or base > log.active_base_offset or base in list_segments(self._fs, self._folder):
            return
        if self._age_s(path) > _OLD_S:
            self._found.add("note", path, f"{segment_name(base)}{LOG_SUFFIX}, which it belongs to, is missing")

    def _age_s(self, path: str) -> float:
        try:
            return time.time() - self._fs.stat(path).st_mtime
        except FileNotFoundError:
            return 0


_SUFFIXES = frozenset(suffix[1:] for suffix in SEGMENT_SUFFIXES)


def log_sizes(fs: FileSystem, folder: str) -> Iterator[int]:
    """Yield the sizes of the segments, for the total of a progress bar."""
    for base in list_segments(fs, folder):
        try:
            yield fs.stat(segment_stem(folder, base) + LOG_SUFFIX).st_size
        except FileNotFoundError:
            continue
