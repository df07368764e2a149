"""What was put of a partition, and still stands: it is what the files here hold.

segments    by the stamps of their files; by their bytes where a stamp is not known, or is another one
chunks      by their bytes, which are compared once in a version of the log
snapshots   of producers, where a segment begins
staged      chunks that are held back: they lie there, and no manifest speaks of them yet
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import xxhash

from segmentlog.format.manifest import Chunk, ShippedPartition, ShippedSegment, Snapshot
from segmentlog.objects.local.partition_snapshot import LocalPartition, Replaced
from segmentlog.objects.manifest.orphans import Orphans
from segmentlog.policy.upload_policy import LocalLog, LocalSegment

Uploaded = tuple[tuple[int, int, int], ShippedSegment]
"""The stamp of a file that was uploaded, and what the manifest is to say of it."""


class Standing:
    """Of one partition; what stands no more becomes an orphan. ``before``: of the same one, as it was opened before."""

    def __init__(self, local: LocalPartition, orphans: Orphans, before: Standing | None = None) -> None:
        self._local = local
        self._orphans = orphans
        self.uploaded: dict[int, Uploaded] = {} if before is None else before.uploaded
        """By base offset."""
        self.snapshots: dict[int, Snapshot] = {} if before is None else before.snapshots
        """By the segment that begins there."""
        self.staged: tuple[Chunk, ...] | None = None if before is None else before.staged
        """Instead of the manifest's chunks."""
        self._same: set[Chunk] = set()
        """Chunks that hold what the files held in the ``_compared`` version of the log."""
        self._compared: tuple[int, int] | None = None

    # ------------------------------------------------------------ segments

    def segments(self, log: LocalLog, there: ShippedPartition | None) -> dict[int, ShippedSegment]:
        """The segments that lie there as their files are here, by base offset."""
        shipped = {segment.base_offset: segment for segment in (there.segments if there else ())}
        found: dict[int, ShippedSegment] = {}
        for segment in log.segments:
            if not segment.sealed:
                continue
            known = self.uploaded.get(segment.base_offset)
            if segment.remote:
                there_now = (known[1] if known is not None else None, shipped.get(segment.base_offset))
                of_stub = [one for one in there_now if one is not None and one.log.key == segment.remote]
                if of_stub:
                    found[segment.base_offset] = of_stub[0]
                    self.uploaded[segment.base_offset] = (segment.stamp, of_stub[0])
                continue
            if known is None and segment.base_offset in shipped:
                # Of an earlier process: its stamp is not known, so the bytes are compared.
                candidate = shipped[segment.base_offset]
                if self._is_same(log, segment, candidate):
                    known = self.uploaded[segment.base_offset] = (segment.stamp, candidate)
            elif (
                known is not None and known[0] != segment.stamp and known[0][1:] == segment.stamp[1:]
                and self._is_same(log, segment, known[1])
            ):  # fmt: skip
                known = self.uploaded[segment.base_offset] = (segment.stamp, known[1])  # it was away, and came back
            if known is not None and known[0] == segment.stamp:
                found[segment.base_offset] = known[1]
        bases = {segment.base_offset for segment in log.segments}
        for base in [base for base in self.uploaded if base not in bases]:
            self.forget_upload(base)
        return found

    def strays(self, log: LocalLog, there: ShippedPartition | None) -> list[LocalSegment]:
        """Segments that lie in an object alone of which neither the manifest nor anybody here knows."""
        known = {segment.log.key for segment in (there.segments if there else ())}
        known |= {one.log.key for _, one in self.uploaded.values()}
        return [segment for segment in log.segments if segment.remote and segment.remote not in known]

    def note_uploaded(self, base: int, uploaded: Uploaded) -> None:
        """A segment lies there now."""
        self.uploaded[base] = uploaded

    def forget_upload(self, base: int) -> None:
        """What was uploaded is not what a file here is any more; it goes once no manifest refers to it."""
        known = self.uploaded.pop(base, None)
        if known is not None:
            self._orphans.add(stored.key for stored in known[1].objects)

    def forget_uploads(self) -> None:
        """The partition is gone."""
        for base in self.uploaded.copy():
            self.forget_upload(base)

    def _is_same(self, log: LocalLog, segment: LocalSegment, shipped: ShippedSegment) -> bool:
        """Whether a file here is what was uploaded once."""
        if (segment.end_offset, segment.size_bytes) != (shipped.end_offset, shipped.log.size_bytes):
            return False
        position = 0
        try:
            for one in shipped.log.objects:
                data = self._local.read(log, segment.base_offset, position, one.size_bytes)
                if xxhash.xxh3_64_hexdigest(data) != one.xxh3_64:
                    return False
                position += one.size_bytes
        except Replaced:
            return False
        return True

    # ------------------------------------------------------------ chunks

    def same_chunks(self, log: LocalLog, chunks: Iterable[Chunk]) -> set[Chunk]:
        """Which chunks that lie there hold what the files hold."""
        known = self._same if self._compared == log.version else set()
        self._compared = log.version
        self._same = {chunk for chunk in chunks if chunk in known or self._local.holds(chunk)}
        return self._same

    def note_put(self, log: LocalLog, chunks: Iterable[Chunk]) -> None:
        """What was put is what the files held: it needs no comparing, as long as no file is another one."""
        if self._compared == log.version:
            self._same.update(chunks)

    def stage(self, chunks: tuple[Chunk, ...]) -> None:
        """They lie there, and are held back."""
        self.staged = chunks

    def unstage(self) -> None:
        """The manifest speaks of them; or they are to be put anew."""
        self.staged = None

    # ------------------------------------------------------------ snapshots

    def note_snapshot(self, snapshot: Snapshot) -> None:
        """It lies there now."""
        self.snapshots[snapshot.segment] = snapshot

    def add_snapshots(self, there: ShippedPartition | None) -> None:
        """Those that the manifest refers to are of use as well."""
        self.snapshots = {one.segment: one for one in (there.snapshots if there else ())} | self.snapshots

    def keep_snapshots(self, there: ShippedPartition) -> None:
        """Those that the manifest refers to are of use, and no others."""
        self.snapshots = {one.segment: one for one in there.snapshots}

    # ------------------------------------------------------------ what somebody swept

    def forget_keys(self, gone: Set[str]) -> None:
        """Nothing of these objects lies there any more. Chunks that are held back are put anew, wherever they lie."""
        self.uploaded = {
            base: one for base, one in self.uploaded.items() if not any(it.key in gone for it in one[1].objects)
        }
        self.snapshots = {base: one for base, one in self.snapshots.items() if one.object.key not in gone}
        self.unstage()
