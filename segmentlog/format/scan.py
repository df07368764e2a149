"""Iterate over the batches of a segment, and skip damaged batches.

After a damaged batch the scan must find the beginning of the next batch. It cannot simply search for bytes that look
like a batch: a record's value may contain a piece of a segment file, with offsets chosen by its author. (Compression
does not prevent this: LZ4 stores incompressible bytes unchanged.) So the scan accepts a position only with evidence
that no value can forge:

    sound header    the header is intact and only the payload is damaged: the header contains the payload's size
    remnant         a payload size for which the checksum in the damaged header is right, for the header or the payload
    index           a batch began at this position when the index was written
    claim           the size in the damaged header, if all its fields agree and batches follow without a hole
    long run        intact batches without a hole over more bytes than the largest batch: no value is that long

Without such evidence, the rest of the segment counts as damaged, and readers report it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Final, NamedTuple

import msgspec
import xxhash

from segmentlog.errors import CorruptBatch
from segmentlog.format.batch import (
    HEADER_SIZE,
    MAGIC,
    MAX_RAW_SIZE,
    PLACE_SIZE,
    BatchHeader,
    check_payload,
    claimed_header,
    decode_header,
    has_valid_checksum,
    header_flaw,
    header_with_payload,
)

_STEP: Final = 1 << 20
_FILLS: Final = (0, 2**64 - 1)

KnownBatches = Callable[[int], Iterable[tuple[int, int]]]
"""Takes a position, and returns (position, base offset) of some batches that begin after it, ascending. See
`SegmentContext`."""


def scan_batches(
    view: memoryview,
    position: int,
    end_position: int,
    path: str = "",
    *,
    expected_offset: int | None = None,
    payloads: bool = False,
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of each batch in ``[position, end_position)``.

    Headers are checked, and with ``payloads`` the payloads, too. The first batch must start at or after
    ``expected_offset``, if given. Each batch must start at or after the end of the batch before it, and
    epochs must not decrease. Raise `CorruptBatch` at the first byte that is wrong.
    """
    window = view[:end_position]
    epoch = 0
    while position < end_position:
        header = decode_header(window, position, path)
        if expected_offset is not None and header.base_offset < expected_offset:
            raise CorruptBatch(
                path,
                position,
                f"a base offset of {expected_offset} or more",
                str(header.base_offset),
                header.base_offset,
            )
        if header.partition_epoch < epoch:
            raise CorruptBatch(
                path, position, f"an epoch of {epoch} or more", str(header.partition_epoch), header.base_offset
            )
        if payloads:
            check_payload(window, position, header, path)
        yield position, header
        expected_offset, epoch = header.next_offset, header.partition_epoch
        position += header.size_bytes


# ---------------------------------------------------------------- skipping damage


class SegmentContext(msgspec.Struct, frozen=True):
    """Facts about a segment from outside its bytes.

    If a fact is missing, a scan may skip intact batches after damage. But it never returns a false batch.
    """

    end_offset: int | None = None
    """Base offset of the next segment, or the log end offset: no batch extends beyond it."""
    batch_limit: int = MAX_RAW_SIZE
    """Upper limit for the payload size of the log's batches."""
    known: KnownBatches = lambda position: ()
    """Batches listed in the index."""


class ResumePoint(NamedTuple):
    """Byte position at which a scan resumes after damage, and base offset of its batch (None at the end of the
    segment).
    """

    position: int
    offset: int | None


def scan_past_damage(
    view: memoryview,
    position: int,
    end_position: int,
    expected_offset: int,
    context: Callable[[], SegmentContext] = SegmentContext,
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of each batch in ``[position, end_position)`` whose header is sound.

    Damaged batches are skipped without an error; readers report them. Payloads are not checked. ``context`` is
    called only if there is damage.
    """
    window = view[:end_position]
    while position < end_position:
        header: BatchHeader | None = None
        try:
            for at, header in scan_batches(window, position, end_position, expected_offset=expected_offset):
                yield at, header
            return
        except CorruptBatch:
            if header is not None:
                position, expected_offset = at + header.size_bytes, header.next_offset
            position, offset = skip_damage(window, position, expected_offset, context())
            expected_offset = expected_offset if offset is None else offset


def skip_damage(window: memoryview, position: int, expected_offset: int, context: SegmentContext) -> ResumePoint:
    """Return where batches resume after the damaged batch at ``position``, which begins at ``expected_offset`` or
    later.

    ``position`` must be the end of a batch or of a damaged range, and ``window`` must end at the end of the segment.
    The batch at the returned position may be damaged, too. Its offset is then known from the damaged batch before it.
    """
    while True:
        end = _end_of(window, position, expected_offset, context)
        if end is None:
            return _find_next_batch(window, position, expected_offset, context)
        position, next_offset = end
        if position == len(window):
            return ResumePoint(position, None)
        if next_offset is not None:
            expected_offset = next_offset
        following = _sound_at(window, position, expected_offset, context)
        if following is not None:
            return ResumePoint(position, following.base_offset)
        claimed = claimed_header(window, position)
        is_misplaced = claimed is not None and has_valid_checksum(claimed)
        if next_offset is not None and not is_misplaced:
            return ResumePoint(position, next_offset)


def certain_end(window: memoryview, position: int, expected_offset: int, context: SegmentContext) -> int | None:
    """Return the end position of the damaged batch at ``position``, which may end in zeros; None if unknown."""
    found = _end_of(window, position, expected_offset, context)
    return None if found is None else found[0]


def _end_of(
    window: memoryview, position: int, expected_offset: int, context: SegmentContext
) -> tuple[int, int | None] | None:
    """Return (end position, next offset) of the damaged batch at ``position``; None if the end is unknown.

    The next offset is None if the evidence gives only the end position.
    """
    claimed = claimed_header(window, position)
    if claimed is None:
        return None
    end_position = position + claimed.size_bytes
    fits = _has_place(claimed, expected_offset, context)
    if fits and has_valid_checksum(claimed):
        return (end_position, claimed.next_offset) if end_position <= len(window) else None
    # The damaged batch ends before the next batch of the index, and is not longer than the limit.
    at, offset = next(iter(context.known(position)), (len(window), context.end_offset))
    known = (at, offset) if at < len(window) else (len(window), context.end_offset)
    furthest = min(known[0], position + HEADER_SIZE + context.batch_limit)
    proven = _proven_end(window, position, claimed, expected_offset, furthest)
    if proven is not None:
        return proven
    is_likely = fits and end_position <= furthest and claimed.magic == MAGIC and header_flaw(claimed) is None
    if is_likely and _leads_to(window, end_position, claimed.next_offset, known, context):
        return end_position, claimed.next_offset
    return None


def _leads_to(
    window: memoryview, position: int, offset: int, known: tuple[int, int | None], context: SegmentContext
) -> bool:
    """Return whether intact batches without a hole follow from ``position`` on, up to ``known``.

    ``known`` is the (position, offset) of a batch in the index, or of the end of the segment. A run of intact batches
    that is longer than the largest batch is also enough.
    """
    start = position
    for at, next_offset in chain(((position, offset),), _run(window, position, offset, context, exactly=True)):
        if at >= known[0]:
            return (at, next_offset) == known
        if at - start > HEADER_SIZE + context.batch_limit:
            return True
    return False


def _proven_end(
    window: memoryview, position: int, claimed: BatchHeader, expected_offset: int, furthest: int
) -> tuple[int, int | None] | None:
    """Return (end position, next offset or None) of the damaged batch if one of its checksums confirms the end.

    The end must not be after ``furthest``. Candidates are the end that the header claims, and each position with the
    magic of a batch: the next batch, if it is intact, begins at one of them.
    """
    start = position + HEADER_SIZE
    # A header that was overwritten is not evidence: a value can be crafted to have the checksum 0.
    is_remnant = claimed.magic == MAGIC or claimed.base_offset == expected_offset
    if not is_remnant or claimed.payload_checksum in _FILLS or furthest <= start:
        return None
    claimed_end = start + claimed.payload_size
    # The checksum of a Kafka batch skips its first bytes. Try both: the bit that marks a Kafka batch may be damaged.
    digests = (start, xxhash.xxh3_64()), (start + PLACE_SIZE, xxhash.xxh3_64())
    done = start
    for end_position in _merged(_magics(window, start + 1, furthest), sorted({min(claimed_end, furthest), furthest})):
        for begin, digest in digests:
            digest.update(window[max(done, begin) : max(end_position, begin)])
        done, size = end_position, end_position - start
        found = [digest.intdigest() for _, digest in digests]
        for checksum in (claimed.payload_checksum, *found):
            header = header_with_payload(window, position, size, checksum)
            if header is not None and header.base_offset >= expected_offset:
                return end_position, header.next_offset
        if claimed.payload_checksum in found:
            return end_position, None
    return None


def _merged(found: Iterator[int], others: list[int]) -> Iterator[int]:
    """Yield the positions of both arguments, ascending, each once."""
    for position in found:
        while others and others[0] < position:
            yield others.pop(0)
        if others and others[0] == position:
            others.pop(0)
        yield position
    yield from others


def _find_next_batch(window: memoryview, position: int, expected_offset: int, context: SegmentContext) -> ResumePoint:
    """Return the first position after ``position`` with evidence of a batch, for damage without a known end."""
    for at, offset in context.known(position):
        if at >= len(window):
            break
        following = _sound_at(window, at, expected_offset, context)
        if following is not None and following.base_offset == offset:
            return ResumePoint(at, offset)
    length = HEADER_SIZE + context.batch_limit
    met: set[int] = set()
    for start in _magics(window, position + 1, len(window) - length):
        if start in met:
            continue
        for at, offset in _run(window, start, expected_offset, context):
            if at in met:
                break  # part of an earlier run that was too short
            met.add(at)
            if at - start > length and at < len(window):
                return ResumePoint(at, offset)
    return ResumePoint(len(window), None)


def _run(
    window: memoryview, position: int, expected_offset: int, context: SegmentContext, *, exactly: bool = False
) -> Iterator[tuple[int, int]]:
    """Yield (end position, next offset) of each intact batch from ``position`` on, up to the first damage or hole.

    The first batch begins at or after ``expected_offset``; with ``exactly`` at that offset. Epochs do not decrease.
    """
    epoch = 0
    while position < len(window):
        header = _sound_at(window, position, expected_offset, context)
        if header is None or header.partition_epoch < epoch or (exactly and header.base_offset != expected_offset):
            return
        try:
            check_payload(window, position, header)
        except CorruptBatch:
            return
        position, expected_offset, epoch, exactly = (
            position + header.size_bytes, header.next_offset, header.partition_epoch, True,
        )  # fmt: skip
        yield position, expected_offset


def _has_place(header: BatchHeader, expected_offset: int, context: SegmentContext) -> bool:
    return expected_offset <= header.base_offset and (
        context.end_offset is None or header.next_offset <= context.end_offset
    )


def _sound_at(window: memoryview, position: int, expected_offset: int, context: SegmentContext) -> BatchHeader | None:
    """Return the header at ``position`` if it is sound, ends within the window and its offsets fit; else None."""
    try:
        header = decode_header(window, position)
    except CorruptBatch:
        return None
    return header if _has_place(header, expected_offset, context) else None


def _magics(window: memoryview, start: int, end: int) -> Iterator[int]:
    """Yield the positions in ``[start, end)`` that contain the magic of a batch."""
    for position in range(start, end, _STEP):
        chunk = bytes(window[position : min(position + _STEP, end) + len(MAGIC) - 1])
        found = chunk.find(MAGIC)
        while found >= 0:
            yield position + found
            found = chunk.find(MAGIC, found + 1)


def looks_like_batch(source: memoryview, start: int, end: int) -> int | None:
    """Return the position of the first bytes from ``start`` on that look like an intact batch, or None.

    Only for reports to people: these bytes may be part of a record's value.
    """
    window = source[:end]
    for position in _magics(window, start, end):
        try:
            check_payload(window, position, decode_header(window, position))
        except CorruptBatch:
            continue
        return position
    return None
