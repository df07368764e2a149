"""Decide which parts of a log to upload next, and compute its next manifest entry. Pure: values in, decisions out.

The manifest entry of a partition describes the state of the whole log at one moment: its segments, and the chunks after
them. A newer entry replaces it only if the newer entry ends at the same offset or later, or at the log end after a
truncation. So records that were reported as shipped stay in the object store while local segments are compacted,
truncated or merged, until the replacement is uploaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from segmentlog.format.checkpoint import Compacted
from segmentlog.format.manifest import Chunk, ShippedPartition, ShippedSegment, Snapshot
from segmentlog.records import EpochStart, LostRange

GRANT_MIN: Final = 1 << 20
"""Smallest number of offsets that an offset grant covers after the log end."""
_GRANT_S: Final = 120
"""A grant covers the appends of this many seconds, if they need more offsets than `GRANT_MIN`.

The grant is extended when half of it is used.
"""
TAIL_BYTES: Final = 128 << 20
"""Upper limit for data shipped as chunks in one cycle. Older data waits for the upload of its whole segment."""
SEALED_PIECE_BYTES: Final = 4 << 20
"""Ship at most this much of a sealed segment as a chunk. More would be uploaded twice: the segment follows soon."""
INLINE_BYTES: Final = 8 << 10
"""Largest tail that is stored in the manifest, which saves a request.

The inline tails that the manifest already contains must not exceed this size in total.
"""
_FINAL_PARTS: Final = 64
"""A chunk of at least this fraction (1/64) of its segment is not merged into a larger chunk any more."""
_FINAL_MIN_BYTES: Final = 64 << 10
_WASTE_MIN_BYTES: Final = 256 << 10
_LIVE_PARTS: Final = 4
"""If chunks use less than this fraction (1/4) of a tail, it is emptied: they are uploaded again in the next tail."""


class LocalSegment(msgspec.Struct, frozen=True):
    """A segment file: offsets ``[base_offset, end_offset)``, and the number of its bytes that are on disk.

    A sealed segment ends where the next one begins. ``stamp`` identifies the file by its inode, and a sealed segment
    also by size and modification time. (These two are 0 for the active segment.)
    """

    base_offset: int
    end_offset: int
    size_bytes: int
    sealed: bool
    stamp: tuple[int, int, int] = (0, 0, 0)
    remote: str = ""
    """Key of the object with the bytes of an evicted segment, to which the manifest must refer; empty for a local
    segment.
    """


class LocalLog(msgspec.Struct, frozen=True):
    """Snapshot of the part of a partition's log that is on the local disk."""

    number: int
    log_start_offset: int
    end_offset: int
    epochs: tuple[EpochStart, ...]
    lost_ranges: tuple[LostRange, ...]
    compacted: Compacted
    has_producers: bool
    generation: int
    """Grows whenever segment files are removed or replaced."""
    segments: tuple[LocalSegment, ...]
    markers_end_offset: int = -1
    """Between ``end_offset`` and this offset only transaction markers were appended, which are not on disk; or -1."""

    @property
    def version(self) -> tuple[int, int]:
        """(epoch, generation): while it is the same, no byte that was on disk has changed."""
        return self.epochs[-1].epoch, self.generation


class Piece(msgspec.Struct, frozen=True):
    """Bytes ``[position, position + size_bytes)`` of a segment file, to be uploaded as a chunk."""

    segment: int
    position: int
    size_bytes: int
    base_offset: int
    end_offset: int


class PartitionPlan(msgspec.Struct, frozen=True):
    """The next upload of a partition, and the content of its next entry.

    segments_to_upload  sealed segments to upload whole, oldest first
    pieces              bytes to upload in the next tail
    kept_chunks         uploaded chunks that the next entry keeps
    segments            uploaded segments that the next entry contains
    end_offset          the shipped end offset after the upload
    active_base         base offset of the active segment in the next entry
    is_incomplete       whether more is on disk than the next entry contains
    keeps_entry         whether the current entry stays, because the data to replace it is not uploaded yet
    """

    segments_to_upload: tuple[LocalSegment, ...]
    pieces: tuple[Piece, ...]
    kept_chunks: tuple[Chunk, ...]
    segments: tuple[ShippedSegment, ...]
    end_offset: int
    active_base: int
    is_incomplete: bool = False
    keeps_entry: bool = False

    @property
    def size_bytes(self) -> int:
        """Size of the pieces."""
        return sum(piece.size_bytes for piece in self.pieces)


def plan_upload(
    local: LocalLog,
    shipped: ShippedPartition | None,
    uploaded: Mapping[int, ShippedSegment],
    chunks: Iterable[Chunk] = (),
    is_unchanged: Callable[[Chunk], bool] = lambda chunk: True,
    is_wasted: Callable[[int], bool] = lambda tail: False,
    room_bytes: int = TAIL_BYTES,
) -> PartitionPlan:
    """Plan the next upload of a partition.

    shipped       its entry in the current manifest
    uploaded      uploaded segments that match their local files, by base offset
    chunks        uploaded chunks to continue from: those of ``shipped``, or newer ones
    is_unchanged  whether a chunk matches the local file
    is_wasted     whether the tail with this number is to be emptied
    room_bytes    space left in the next tail. Other data waits, except an active segment that is alone in its tail
    """
    upload: list[LocalSegment] = []
    pieces: list[Piece] = []
    kept: list[Chunk] = []
    segments: list[ShippedSegment] = []
    first = reached = local.segments[0].base_offset if local.segments else local.log_start_offset
    active_base, is_contiguous = reached, True
    of_segment: dict[int, list[Chunk]] = {}
    changed = set[int]()
    for chunk in chunks:
        if chunk.segment in changed or not is_unchanged(chunk):
            changed.add(chunk.segment)
        else:
            of_segment.setdefault(chunk.segment, []).append(chunk)
    for segment in local.segments:
        found = uploaded.get(segment.base_offset) if segment.sealed else None
        if segment.sealed and found is None:
            upload.append(segment)
        if not is_contiguous:
            continue  # data after a gap waits
        active_base = segment.base_offset
        if found is not None and not kept and not pieces:
            segments.append(found)
            reached = active_base = segment.end_offset
            continue
        if segment.remote:  # never uploaded as chunks: wait until the segments before it are uploaded
            is_contiguous = False
            continue
        continued, piece = _continue_chunks(segment, of_segment.get(segment.base_offset, []), local, is_wasted)
        if piece is not None and _has_to_wait(segment, piece, room_bytes):
            is_contiguous = False
            found_chunks = of_segment.get(segment.base_offset, [])
            before = [chunk for chunk in found_chunks if chunk.position + chunk.size_bytes <= segment.size_bytes]
            if before:
                kept += before
                reached = before[-1].end_offset
            continue
        kept += continued
        if piece is not None:
            pieces.append(piece)
            room_bytes -= piece.size_bytes
        reached = segment.end_offset
        if segment.sealed:
            active_base = segment.end_offset
    if is_contiguous:
        reached = local.end_offset
    # Compaction replaced removed records by records below `begun_offset`: an entry without these would miss keys.
    if shipped is None and reached < local.compacted.begun_offset:
        return PartitionPlan(tuple(upload), (), (), (), first, first, True)
    if shipped is not None and reached < max(_min_end_offset(local, shipped), local.compacted.begun_offset):
        return PartitionPlan(
            tuple(upload), (), shipped.chunks, shipped.segments, shipped.end_offset, shipped.active_base, True, True
        )
    is_incomplete = reached < local.end_offset
    return PartitionPlan(
        tuple(upload), tuple(pieces), tuple(kept), tuple(segments), reached, active_base, is_incomplete
    )


def _has_to_wait(segment: LocalSegment, piece: Piece, room_bytes: int) -> bool:
    """Return whether a piece must wait.

    A large piece of a sealed segment waits for the upload of the segment, any other piece for the next tail.
    """
    if segment.sealed:
        return piece.size_bytes > min(room_bytes, SEALED_PIECE_BYTES)
    return room_bytes < TAIL_BYTES and piece.size_bytes > room_bytes


def _min_end_offset(local: LocalLog, shipped: ShippedPartition) -> int:
    """Return the end offset that a new entry must reach: that of ``shipped``, or the log end if a newer epoch has a
    lower one.
    """
    given_up = local.epochs[-1].epoch > shipped.epoch
    return min(shipped.end_offset, local.end_offset) if given_up else shipped.end_offset


def _continue_chunks(
    segment: LocalSegment, chunks: Sequence[Chunk], local: LocalLog, is_wasted: Callable[[int], bool]
) -> tuple[list[Chunk], Piece | None]:
    """Return (chunks of a segment that stay, the piece to upload after them).

    Small last chunks are uploaded again, merged with the data after them, if that data is at least as large. So a
    segment has few chunks. Each byte is uploaded at most about log(n) times, where n is the number of chunks without
    merging.
    """
    kept = [chunk for chunk in chunks if chunk.position + chunk.size_bytes <= segment.size_bytes]
    end_offset = min(segment.end_offset, local.end_offset)
    final = max(segment.size_bytes // _FINAL_PARTS, _FINAL_MIN_BYTES)

    def missing() -> int:
        return segment.size_bytes - (kept[-1].position + kept[-1].size_bytes if kept else 0)

    emptied = next((index for index, chunk in enumerate(kept) if is_wasted(chunk.tail)), len(kept))
    del kept[emptied:]
    if not missing():
        return kept, None
    while kept and kept[-1].size_bytes <= missing() and kept[-1].size_bytes < final:
        kept.pop()
    position = segment.size_bytes - missing()
    base_offset = kept[-1].end_offset if kept else segment.base_offset
    return kept, Piece(segment.base_offset, position, missing(), base_offset, end_offset)


def manifest_entry(
    local: LocalLog, shipped: ShippedPartition | None, plan: PartitionPlan, chunks: Iterable[Chunk],
    snapshots: Iterable[Snapshot], offset_grant: int, stable_offset: int = -1,
    is_unchanged: Callable[[Chunk], bool] = lambda chunk: True,
) -> ShippedPartition:  # fmt: skip
    """Return the next manifest entry of a partition. ``chunks`` are the pieces of ``plan``, which are uploaded now.

    The markers in the entry decide every transaction below ``stable_offset``. If it is -1 (unknown), the entry keeps
    the stable offset of ``shipped``. ``is_unchanged`` returns whether a chunk of ``shipped`` matches the local file.
    """
    if shipped is not None and plan.keeps_entry:
        # Keep its epochs and lost ranges, too: the local ones are newer than the records of the entry.
        return replace(shipped, offset_grant=max(offset_grant, shipped.offset_grant))
    next_chunks = sorted((*plan.kept_chunks, *chunks), key=lambda chunk: (chunk.segment, chunk.position))
    generation = shipped.generation if shipped else 0
    if shipped is not None:
        is_same_epoch = shipped.epoch == local.epochs[-1].epoch
        generation += not (is_same_epoch and _is_extension(local, shipped, plan, next_chunks, is_unchanged))
    bases = {chunk.segment for chunk in next_chunks} | {plan.active_base}
    if shipped is not None and shipped.epoch == local.epochs[-1].epoch:
        stable_offset = max(stable_offset, shipped.stable_offset)
    return ShippedPartition(
        number=local.number,
        offset_grant=max(offset_grant, shipped.offset_grant if shipped else 0),
        log_start_offset=min(local.log_start_offset, plan.end_offset),
        end_offset=plan.end_offset,
        generation=generation,
        epochs=tuple(epoch for epoch in local.epochs if epoch.start_offset <= plan.end_offset) or local.epochs[:1],
        lost_ranges=tuple(lost for lost in local.lost_ranges if lost.end_offset <= plan.end_offset),
        compacted=local.compacted,
        has_producers=local.has_producers,
        active_base=plan.active_base,
        segments=plan.segments,
        chunks=tuple(next_chunks),
        snapshots=tuple(snapshot for snapshot in snapshots if snapshot.segment in bases),
        stable_offset=stable_offset,
        markers_end_offset=local.markers_end_offset if plan.end_offset == local.end_offset else -1,
    )


def grant_only_entry(number: int, offset_grant: int, first: EpochStart) -> ShippedPartition:
    """Return the manifest entry of a partition whose records cannot be uploaded yet: only the offset grant."""
    return ShippedPartition(number, offset_grant, 0, 0, 0, (first,))


def _is_extension(
    local: LocalLog, shipped: ShippedPartition, plan: PartitionPlan, chunks: Sequence[Chunk],
    is_unchanged: Callable[[Chunk], bool],
) -> bool:  # fmt: skip
    """Return whether the next entry only extends the current one: no byte that a reader may have read has changed."""
    if plan.end_offset < shipped.end_offset:
        return False
    keys = {segment.base_offset: segment.log.key for segment in plan.segments}
    chunked = {chunk.segment for chunk in chunks}
    # A chunk before the log start counts as long as its segment stays: readers keep the file, and only extend it.
    kept = keys.keys() | chunked
    for chunk in shipped.chunks:
        if (chunk.end_offset > local.log_start_offset or chunk.segment in kept) and not is_unchanged(chunk):
            return False
    for segment in shipped.segments:
        key = keys.get(segment.base_offset)
        if key is None and segment.base_offset in chunked:
            return False
        if key is not None and key != segment.log.key:
            return False
    return True


def is_untouched(log_end_offset: int, requested_offset: int, offset_grant: int) -> bool:
    """Return whether no append was tried since a takeover, after which the log continues at the end of the old grant.

    Such a log gets no new grant until an append requests one, because the next takeover or restore would skip all
    offsets of the grant. A partition that was just added has a grant of 0 offsets, and gets more without a request.
    """
    return requested_offset == log_end_offset == offset_grant > 0


def extend_grant(end_offset: int, offset_grant: int, records_per_s: float) -> int:
    """Return the offset grant for a log that ends at ``end_offset``.

    ``offset_grant`` stays valid until half of it is used.
    """
    window = max(GRANT_MIN, int(_GRANT_S * records_per_s))
    return offset_grant if end_offset + window // 2 <= offset_grant else end_offset + window


def fits_inline(size_bytes: int, inline_bytes: int) -> bool:
    """Return whether to store a new tail in the manifest, whose inline tails have ``inline_bytes`` in total."""
    return size_bytes <= INLINE_BYTES and inline_bytes <= INLINE_BYTES


def tails_to_move(sizes: Mapping[int, int]) -> set[int]:
    """Return the numbers of the inline tails to move into the next tail object.

    ``sizes`` has the size in bytes of each inline tail, by its number. All of them move at once, when together they
    are larger than a new inline tail may be.
    """
    return set(sizes) if sum(sizes.values()) > INLINE_BYTES else set()


def wasted_tails(sizes: Mapping[int, int], chunks: Iterable[Chunk]) -> set[int]:
    """Return the numbers of the tails of which ``chunks`` use too small a part.

    ``sizes`` has the size in bytes of each tail, by its number.
    """
    live = dict.fromkeys(sizes, 0)
    for chunk in chunks:
        live[chunk.tail] = live.get(chunk.tail, 0) + chunk.size_bytes
    return {
        number for number, size in sizes.items() if size >= _WASTE_MIN_BYTES and 0 < live[number] < size // _LIVE_PARTS
    }
