"""What of a log is to be shipped next, and what the manifest may say of it then. Values in, decisions out.

A partition's entry in the manifest is a log as it once was here, whole: segments, and behind them chunks. It is
replaced by a newer one only when that reaches as far, or as far as the log still does: what was acknowledged as
shipped stays there while segments are compacted, cut or merged here, until what stands for them has been uploaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from segmentlog.format.checkpoint import Compacted
from segmentlog.format.manifest import Chunk, ShippedPartition, ShippedSegment, Snapshot
from segmentlog.records import EpochStart, LostRange

WINDOW_MIN: Final = 1 << 20
"""Offsets that are promised ahead, at least."""
_WINDOW_S: Final = 120
"""As many as are appended in so long, if that is more: they are promised anew at half of it."""
TAIL_BYTES: Final = 128 << 20
"""What is shipped in chunks at a time, at most: of what is older whole segments are waited for."""
SEALED_PIECE_BYTES: Final = 4 << 20
"""Of a sealed segment at most so much goes in a chunk, lest its end waits for the upload: else it were put twice."""
INLINE_BYTES: Final = 8 << 10
"""So little is not put as a tail, but stands in the manifest: one request less. As much may stand there already."""
_FINAL_PARTS: Final = 64
"""A chunk is not written anew any more once it is such a part of its segment."""
_FINAL_MIN_BYTES: Final = 64 << 10
_WASTE_MIN_BYTES: Final = 256 << 10
_LIVE_PARTS: Final = 4
"""A tail of which less than such a part is referred to is emptied, what it holds goes into the next one."""


class LocalSegment(msgspec.Struct, frozen=True):
    """A segment file: offsets ``[base_offset, end_offset)``, and as many bytes of it as are on disk.

    A sealed one ends where the next begins. ``stamp`` tells the file from one that took its place: inode, and of a
    sealed one size and time.
    """

    base_offset: int
    end_offset: int
    size_bytes: int
    sealed: bool
    stamp: tuple[int, int, int] = (0, 0, 0)
    remote: str = ""
    """The object that holds its bytes when they are not here; its stub needs it, so the manifest is to refer to it."""


class LocalLog(msgspec.Struct, frozen=True):
    """What is on disk of a partition."""

    number: int
    log_start_offset: int
    end_offset: int
    epochs: tuple[EpochStart, ...]
    lost_ranges: tuple[LostRange, ...]
    compacted: Compacted
    has_producers: bool
    generation: int
    """Counts the times that segment files were removed or replaced."""
    segments: tuple[LocalSegment, ...]
    markers_end_offset: int = -1
    """From ``end_offset`` up to here nothing but markers of transactions was appended; they are not on disk."""

    @property
    def version(self) -> tuple[int, int]:
        """As long as it is the same no byte that was on disk has become another one."""
        return self.epochs[-1].epoch, self.generation


class Piece(msgspec.Struct, frozen=True):
    """Bytes ``[position, position + size_bytes)`` of a segment file that are to become a chunk."""

    segment: int
    position: int
    size_bytes: int
    base_offset: int
    end_offset: int


class Plan(msgspec.Struct, frozen=True):
    """What to do about a partition.

    upload   sealed segments that are to be uploaded whole, oldest first
    pieces   what is to go into the next tail
    keep     chunks that stay as they are
    segments that stay, or take the place of others
    end      the offset up to which the log is then shipped
    is_behind  that is not all that is on disk
    is_kept  what is shipped stays there until what is to take its place has been uploaded
    """

    upload: tuple[LocalSegment, ...]
    pieces: tuple[Piece, ...]
    keep: tuple[Chunk, ...]
    segments: tuple[ShippedSegment, ...]
    end_offset: int
    active_base: int
    is_behind: bool = False
    is_kept: bool = False

    @property
    def size_bytes(self) -> int:
        """Of the pieces."""
        return sum(piece.size_bytes for piece in self.pieces)


def plan(
    local: LocalLog,
    shipped: ShippedPartition | None,
    uploaded: Mapping[int, ShippedSegment],
    chunks: Iterable[Chunk] = (),
    same: Callable[[Chunk], bool] = lambda chunk: True,
    wasted: Callable[[int], bool] = lambda tail: False,
    room_bytes: int = TAIL_BYTES,
) -> Plan:
    """What comes next of a partition; ``chunks`` of it lie in tails, those of ``shipped``, or newer ones.

    ``uploaded``: by base offset, the segments in the object store that are what those files here are now. ``same``:
    whether a chunk is what the file here holds. ``wasted``: whether the tail of that number is to be emptied.
    ``room_bytes``: how much of the next tail is left; what does not fit has to wait, but for the active segment alone
    in a tail: nothing else can be done about that.
    """
    upload: list[LocalSegment] = []
    pieces: list[Piece] = []
    keep: list[Chunk] = []
    segments: list[ShippedSegment] = []
    first = reached = local.segments[0].base_offset if local.segments else local.log_start_offset
    active_base, is_whole = reached, True
    of_segment: dict[int, list[Chunk]] = {}
    torn = set[int]()
    for chunk in chunks:
        if chunk.segment in torn or not same(chunk):
            torn.add(chunk.segment)
        else:
            of_segment.setdefault(chunk.segment, []).append(chunk)
    for segment in local.segments:
        found = uploaded.get(segment.base_offset) if segment.sealed else None
        if segment.sealed and found is None:
            upload.append(segment)
        if not is_whole:
            continue  # what comes behind a hole has to wait
        active_base = segment.base_offset
        if found is not None and not keep and not pieces:
            segments.append(found)
            reached = active_base = segment.end_offset
            continue
        if segment.remote:  # never as chunks: what lies before it is waited for, and what is shipped stays so long
            is_whole = False
            continue
        kept, piece = _continued(segment, of_segment.get(segment.base_offset, []), local, wasted)
        if piece is not None and _has_to_wait(segment, piece, room_bytes):
            is_whole = False
            found_chunks = of_segment.get(segment.base_offset, [])
            before = [chunk for chunk in found_chunks if chunk.position + chunk.size_bytes <= segment.size_bytes]
            if before:
                keep += before
                reached = before[-1].end_offset
            continue
        keep += kept
        if piece is not None:
            pieces.append(piece)
            room_bytes -= piece.size_bytes
        reached = segment.end_offset
        if segment.sealed:
            active_base = segment.end_offset
    if is_whole:
        reached = local.end_offset
    # What compaction removed was replaced by records below `begun_offset`: without these it would be missing.
    if shipped is None and reached < local.compacted.begun_offset:
        return Plan(tuple(upload), (), (), (), first, first, True)
    if shipped is not None and reached < max(_needed(local, shipped), local.compacted.begun_offset):
        return Plan(
            tuple(upload), (), shipped.chunks, shipped.segments, shipped.end_offset, shipped.active_base, True, True
        )
    is_behind = reached < local.end_offset
    return Plan(tuple(upload), tuple(pieces), tuple(keep), tuple(segments), reached, active_base, is_behind)


def _has_to_wait(segment: LocalSegment, piece: Piece, room_bytes: int) -> bool:
    """For the upload of the segment, or for the next tail."""
    if segment.sealed:
        return piece.size_bytes > min(room_bytes, SEALED_PIECE_BYTES)
    return room_bytes < TAIL_BYTES and piece.size_bytes > room_bytes


def _needed(local: LocalLog, shipped: ShippedPartition) -> int:
    """How far the log has to reach that is put in the place of what is shipped: as far, unless its end was given up."""
    given_up = local.epochs[-1].epoch > shipped.epoch
    return min(shipped.end_offset, local.end_offset) if given_up else shipped.end_offset


def _continued(
    segment: LocalSegment, chunks: Sequence[Chunk], local: LocalLog, wasted: Callable[[int], bool]
) -> tuple[list[Chunk], Piece | None]:
    """(chunks of a segment that stay, what is to be shipped behind them).

    Small chunks are written anew together with what follows, as long as that is not smaller than they are: so there
    are few of them, and no byte is shipped more often than the logarithm of how many there would be.
    """
    kept = [chunk for chunk in chunks if chunk.position + chunk.size_bytes <= segment.size_bytes]
    end_offset = min(segment.end_offset, local.end_offset)
    final = max(segment.size_bytes // _FINAL_PARTS, _FINAL_MIN_BYTES)

    def missing() -> int:
        return segment.size_bytes - (kept[-1].position + kept[-1].size_bytes if kept else 0)

    emptied = next((index for index, chunk in enumerate(kept) if wasted(chunk.tail)), len(kept))
    del kept[emptied:]
    if not missing():
        return kept, None
    while kept and kept[-1].size_bytes <= missing() and kept[-1].size_bytes < final:
        kept.pop()
    position = segment.size_bytes - missing()
    base_offset = kept[-1].end_offset if kept else segment.base_offset
    return kept, Piece(segment.base_offset, position, missing(), base_offset, end_offset)


def entry(local: LocalLog, shipped: ShippedPartition | None, to_do: Plan, chunks: Iterable[Chunk],
          snapshots: Iterable[Snapshot], ceiling: int, stable_offset: int = -1,
          same: Callable[[Chunk], bool] = lambda chunk: True) -> ShippedPartition:  # fmt: skip
    """What the manifest is to say of a partition once the plan is carried out; ``chunks``: made of its pieces.

    ``stable_offset``: below it every transaction is decided there, -1 when nobody knows; then as it said before.
    ``same`` as for `plan`, of all chunks that were shipped before.
    """
    if shipped is not None and to_do.is_kept:  # with its own epochs and lost ranges: those of now are of another log
        return replace(shipped, ceiling=max(ceiling, shipped.ceiling))
    made = sorted((*to_do.keep, *chunks), key=lambda chunk: (chunk.segment, chunk.position))
    generation = shipped.generation if shipped else 0
    if shipped is not None:
        goes_on = shipped.epoch == local.epochs[-1].epoch and _continues(local, shipped, to_do, made, same)
        generation += not goes_on
    there = {chunk.segment for chunk in made} | {to_do.active_base}
    if shipped is not None and shipped.epoch == local.epochs[-1].epoch:
        stable_offset = max(stable_offset, shipped.stable_offset)
    return ShippedPartition(
        number=local.number,
        ceiling=max(ceiling, shipped.ceiling if shipped else 0),
        log_start_offset=min(local.log_start_offset, to_do.end_offset),
        end_offset=to_do.end_offset,
        generation=generation,
        epochs=tuple(epoch for epoch in local.epochs if epoch.start_offset <= to_do.end_offset) or local.epochs[:1],
        lost_ranges=tuple(lost for lost in local.lost_ranges if lost.end_offset <= to_do.end_offset),
        compacted=local.compacted,
        has_producers=local.has_producers,
        active_base=to_do.active_base,
        segments=to_do.segments,
        chunks=tuple(made),
        snapshots=tuple(snapshot for snapshot in snapshots if snapshot.segment in there),
        stable_offset=stable_offset,
        markers_end_offset=local.markers_end_offset if to_do.end_offset == local.end_offset else -1,
    )


def promise(number: int, ceiling: int, first: EpochStart) -> ShippedPartition:
    """What the manifest says of a partition of which nothing can be shipped yet: how far offsets are handed out."""
    return ShippedPartition(number, ceiling, 0, 0, 0, (first,))


def _continues(
    local: LocalLog, shipped: ShippedPartition, to_do: Plan, chunks: Sequence[Chunk], same: Callable[[Chunk], bool]
) -> bool:
    """Whether who has read what was shipped before may go on where that ended: no byte of it is another one now."""
    if to_do.end_offset < shipped.end_offset:
        return False
    if any(chunk.end_offset > local.log_start_offset and not same(chunk) for chunk in shipped.chunks):
        return False
    known = {segment.base_offset: segment.log.key for segment in to_do.segments}
    chunked = {chunk.segment for chunk in chunks}
    for segment in shipped.segments:
        there = known.get(segment.base_offset)
        if there is None and segment.base_offset in chunked:
            return False
        if there is not None and there != segment.log.key:
            return False
    return True


def ceiling_for(end_offset: int, ceiling: int, records_per_s: float) -> int:
    """The ceiling that a partition needs, whose log ends there: the same one until half of what lay ahead is used."""
    window = max(WINDOW_MIN, int(_WINDOW_S * records_per_s))
    return ceiling if end_offset + window // 2 <= ceiling else end_offset + window


def stands_inline(size_bytes: int, inline_bytes: int) -> bool:
    """Whether what is new is to stand in the manifest, where so much stands already."""
    return size_bytes <= INLINE_BYTES and inline_bytes <= INLINE_BYTES


def tails_to_move(sizes: Mapping[int, int]) -> set[int]:
    """Of the tails that stand in the manifest those that are to go into the next one; ``sizes`` by number, in bytes.

    All of them, once they are more than is put there at a time: that one is an object then.
    """
    return set(sizes) if sum(sizes.values()) > INLINE_BYTES else set()


def wasted_tails(sizes: Mapping[int, int], chunks: Iterable[Chunk]) -> set[int]:
    """Numbers of the tails that hold little beside what nobody refers to; ``sizes`` by number, in bytes."""
    live = dict.fromkeys(sizes, 0)
    for chunk in chunks:
        live[chunk.tail] = live.get(chunk.tail, 0) + chunk.size_bytes
    return {
        number for number, size in sizes.items() if size >= _WASTE_MIN_BYTES and 0 < live[number] < size // _LIVE_PARTS
    }
