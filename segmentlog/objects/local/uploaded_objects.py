"""Uploaded objects of a partition that still match its local files.

segments    matched by the stamp of the file (inode, size, time), or by content if the stamp is unknown or different
chunks      matched by content; matches stay valid until a truncation, compaction or eviction changes the log's version
snapshots   producer snapshots, by the base offset of their segment
staged      withheld chunks: uploaded, but in no manifest until all parts of their transactions are uploaded
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

import xxhash

from segmentlog.format.manifest import Chunk, ShippedPartition, ShippedSegment, Snapshot
from segmentlog.objects.local.partition_snapshot import LocalPartition, SegmentReplaced
from segmentlog.objects.manifest.object_ranges import object_ranges
from segmentlog.objects.manifest.orphans import Orphans
from segmentlog.objects.manifest.segment_labels import checksums_of
from segmentlog.policy.upload_policy import LocalLog, LocalSegment

UploadedSegment = tuple[tuple[int, int, int], ShippedSegment]
"""(stamp of the uploaded file, its manifest entry)."""


class UploadedObjects:
    """Uploaded objects of one partition that match its local files. An object that stops matching becomes an orphan.

    The objects of ``before`` are taken over: that is the previous instance if the store has reopened the partition.
    """

    def __init__(self, local: LocalPartition, orphans: Orphans, before: UploadedObjects | None = None) -> None:
        self._local = local
        self._orphans = orphans
        self.uploaded: dict[int, UploadedSegment] = {} if before is None else before.uploaded
        """By base offset."""
        self.snapshots: dict[int, Snapshot] = {} if before is None else before.snapshots
        """By the base offset of their segment."""
        self.staged: tuple[Chunk, ...] | None = None if before is None else before.staged
        """All chunks of the partition, if some are withheld: the next upload continues after these.

        Otherwise None, and the next upload continues after the manifest's chunks.
        """
        self._unchanged: set[Chunk] = set()
        """Chunks whose bytes match the segment files in version ``_compared`` of the log."""
        self._compared: tuple[int, int] | None = None

    # ------------------------------------------------------------ segments

    def matching_segments(self, log: LocalLog, entry: ShippedPartition | None) -> dict[int, ShippedSegment]:
        """Return the uploaded segments that match their local files, by base offset."""
        shipped = {segment.base_offset: segment for segment in (entry.segments if entry else ())}
        found: dict[int, ShippedSegment] = {}
        for segment in log.segments:
            if not segment.sealed:
                continue
            known = self.uploaded.get(segment.base_offset)
            if segment.remote:
                candidates = (known[1] if known is not None else None, shipped.get(segment.base_offset))
                of_stub = [candidate for candidate in candidates if candidate and candidate.log.key == segment.remote]
                if of_stub:
                    found[segment.base_offset] = of_stub[0]
                    self.uploaded[segment.base_offset] = (segment.stamp, of_stub[0])
                continue
            if known is None and segment.base_offset in shipped:
                # An earlier process uploaded it, so its stamp is unknown. Compare the content.
                candidate = shipped[segment.base_offset]
                if self._is_same(log, segment, candidate):
                    known = self.uploaded[segment.base_offset] = (segment.stamp, candidate)
            elif (
                known is not None and known[0] != segment.stamp and known[0][1:] == segment.stamp[1:]
                and self._is_same(log, segment, known[1])
            ):  # fmt: skip
                known = self.uploaded[segment.base_offset] = (segment.stamp, known[1])  # evicted and recalled since
            if known is not None and known[0] == segment.stamp:
                found[segment.base_offset] = known[1]
        bases = {segment.base_offset for segment in log.segments}
        for base in [base for base in self.uploaded if base not in bases]:
            self.discard_segment(base)
        return found

    def unreferenced_segments(self, log: LocalLog, entry: ShippedPartition | None) -> list[LocalSegment]:
        """Return evicted segments whose object is neither in the manifest nor recorded as uploaded."""
        known = {segment.log.key for segment in (entry.segments if entry else ())}
        known |= {segment.log.key for _, segment in self.uploaded.values()}
        return [segment for segment in log.segments if segment.remote and segment.remote not in known]

    def record_segment(self, base: int, uploaded: UploadedSegment) -> None:
        """Record a finished upload."""
        self.uploaded[base] = uploaded
        self._label(base, *uploaded)

    def discard_segment(self, base: int) -> None:
        """Make the objects of a segment orphans, because its file has changed."""
        known = self.uploaded.pop(base, None)
        if known is not None:
            self._orphans.add(stored.key for stored in known[1].objects)

    def discard_all_segments(self) -> None:
        """Make the objects of all segments orphans, because the partition was deleted."""
        for base in self.uploaded.copy():
            self.discard_segment(base)

    def _is_same(self, log: LocalLog, segment: LocalSegment, shipped: ShippedSegment) -> bool:
        """Return whether a local segment file has the content of an uploaded segment."""
        if (segment.end_offset, segment.size_bytes) != (shipped.end_offset, shipped.log.size_bytes):
            return False
        if self._local.has_label(segment.base_offset, checksums_of(object_ranges(shipped.log))):
            return True
        position = 0
        try:
            for part in shipped.log.objects:
                data = self._local.read(log, segment.base_offset, position, part.size_bytes)
                if xxhash.xxh3_64_hexdigest(data) != part.xxh3_64:
                    return False
                position += part.size_bytes
        except SegmentReplaced:
            return False
        self._label(segment.base_offset, segment.stamp, shipped)
        return True

    def _label(self, base: int, stamp: tuple[int, int, int], shipped: ShippedSegment) -> None:
        """Record in the file that it matches the object, for the next process that ships the store."""
        self._local.label(base, stamp, checksums_of(object_ranges(shipped.log)))

    # ------------------------------------------------------------ chunks

    def unchanged_chunks(self, log: LocalLog, chunks: Collection[Chunk]) -> set[Chunk]:
        """Return the subset of ``chunks`` whose bytes match the segment files."""
        known = self._unchanged if self._compared == log.version else set()
        self._compared = log.version
        unknown = [chunk for chunk in chunks if chunk not in known]
        self._unchanged = {chunk for chunk in chunks if chunk in known} | self._local.contained_chunks(unknown)
        return self._unchanged

    def record_chunks(self, log: LocalLog, chunks: Iterable[Chunk]) -> None:
        """Record uploaded chunks as matching: they need no comparison while the log's version stays the same."""
        if self._compared == log.version:
            self._unchanged.update(chunks)

    def stage(self, chunks: tuple[Chunk, ...]) -> None:
        """Record chunks (parts of a tail object) that are uploaded, but withheld from the next manifest."""
        self.staged = chunks

    def unstage(self) -> None:
        """Forget the staged chunks: the manifest includes them now, or they must be uploaded again."""
        self.staged = None

    # ------------------------------------------------------------ snapshots

    def record_snapshot(self, snapshot: Snapshot) -> None:
        """Record an uploaded producer snapshot."""
        self.snapshots[snapshot.segment] = snapshot

    def add_snapshots(self, entry: ShippedPartition | None) -> None:
        """Add the snapshots that the manifest refers to."""
        self.snapshots = {one.segment: one for one in (entry.snapshots if entry else ())} | self.snapshots

    def retain_snapshots(self, entry: ShippedPartition) -> None:
        """Drop all snapshots except those that the manifest refers to."""
        self.snapshots = {snapshot.segment: snapshot for snapshot in entry.snapshots}

    # ------------------------------------------------------------ deleted objects

    def drop_keys(self, deleted: Set[str]) -> None:
        """Drop objects that garbage collection deleted or marked. Staged chunks are uploaded again in any case."""
        self.uploaded = {
            base: uploaded for base, uploaded in self.uploaded.items()
            if not any(part.key in deleted for part in uploaded[1].objects)
        }  # fmt: skip
        self.snapshots = {base: one for base, one in self.snapshots.items() if one.object.key not in deleted}
        self.unstage()
