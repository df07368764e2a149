"""Walking a segment batch by batch, and over damage in it.

Who comes to a batch that is damaged needs to know where the next one begins. A search for bytes that look
like one would do, if records were not allowed to hold such bytes: a value may be a piece of a segment file, and
whoever wrote it could choose its offsets. (LZ4 hides nothing: what does not shrink stands in it as it is.) So bytes
that look like a batch are none until something says so that no value can know:

    sound header    the damage is in its payload, and it says how long that is
    remnant         a length under which the damaged header's checksum holds, or that of its payload does
    index           a batch began at that byte when the index was made
    claim           the length that the damaged header says, if all of it fits together and leads on without a hole
    long run        whole batches without a hole for longer than any batch is: at its end one is out of every value

Where nothing says so, what follows up to the end of the segment is given up, and told.
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
    flaw_of,
    header_holds,
    header_with_payload,
)

_STEP: Final = 1 << 20
_FILLS: Final = (0, 2**64 - 1)

KnownBatches = Callable[[int], Iterable[tuple[int, int]]]
"""(position, base offset) of batches that are known to begin behind a position, ascending; not of all. See `Around`."""


def walk(
    view: memoryview,
    position: int,
    end_position: int,
    path: str = "",
    *,
    expected_offset: int | None = None,
    payloads: bool = False,
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of each batch in ``[position, end_position)``.

    Headers are checked, and with ``payloads`` the payloads too. With ``expected_offset``
    the first batch must start at or after it; each one must start at or after the end of
    the one before it, and epochs never go back (compaction leaves gaps, a crash leaves
    none inside a segment). Raises `CorruptBatch` at the first byte that is wrong.
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


# ---------------------------------------------------------------- over damage


class Around(msgspec.Struct, frozen=True):
    """What is known of a segment beside its bytes. What is left out costs whole batches behind damage, no safety."""

    end_offset: int | None = None
    """Where the next segment begins, or the log ends: no batch reaches beyond it."""
    batch_limit: int = MAX_RAW_SIZE
    """No payload of the log is longer."""
    known: KnownBatches = lambda position: ()
    """Of the index."""


class Resumed(NamedTuple):
    """Where a walk goes on: batches begin at ``position``, with ``offset``. At the end there is none."""

    position: int
    offset: int | None


def walk_over_damage(
    view: memoryview, position: int, end_position: int, expected_offset: int, around: Callable[[], Around] = Around
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of each batch in ``[position, end_position)`` whose header is sound.

    What is damaged is stepped over; readers tell of it. Payloads are not looked at. ``around`` is asked once
    there is damage.
    """
    window = view[:end_position]
    while position < end_position:
        header: BatchHeader | None = None
        try:
            for at, header in walk(window, position, end_position, expected_offset=expected_offset):
                yield at, header
            return
        except CorruptBatch:
            if header is not None:
                position, expected_offset = at + header.size_bytes, header.next_offset
            position, offset = step_over(window, position, expected_offset, around())
            expected_offset = expected_offset if offset is None else offset


def step_over(window: memoryview, position: int, expected_offset: int, around: Around) -> Resumed:
    """Where the batches go on behind the damaged one at ``position``, which should have ``expected_offset`` or more.

    A batch ends just in front of ``position``, and ``window`` where the segment does. What lies where it goes on may
    be damaged as well, and then has a sound batch in front of it, whose end tells the offset.
    """
    while True:
        behind = _end_of(window, position, expected_offset, around)
        if behind is None:
            return _next_certain(window, position, expected_offset, around)
        position, next_offset = behind
        if position == len(window):
            return Resumed(position, None)
        if next_offset is not None:
            expected_offset = next_offset
        following = _sound_at(window, position, expected_offset, around)
        if following is not None:
            return Resumed(position, following.base_offset)
        claimed = claimed_header(window, position)
        is_misplaced = claimed is not None and header_holds(claimed)
        if next_offset is not None and not is_misplaced:
            return Resumed(position, next_offset)


def certain_end(window: memoryview, position: int, expected_offset: int, around: Around) -> int | None:
    """Where the damaged batch at ``position`` ends, as far as anything tells; it may end in zeros."""
    found = _end_of(window, position, expected_offset, around)
    return None if found is None else found[0]


def _end_of(window: memoryview, position: int, expected_offset: int, around: Around) -> tuple[int, int | None] | None:
    """(where the damaged batch at ``position`` ends, its next offset if certain); None where nobody can tell."""
    claimed = claimed_header(window, position)
    if claimed is None:
        return None
    end_position = position + claimed.size_bytes
    fits = _has_place(claimed, expected_offset, around)
    if fits and header_holds(claimed):
        return (end_position, claimed.next_offset) if end_position <= len(window) else None
    # It does not reach into a batch that is known, and is no longer than any may be.
    at, offset = next(iter(around.known(position)), (len(window), around.end_offset))
    known = (at, offset) if at < len(window) else (len(window), around.end_offset)
    furthest = min(known[0], position + HEADER_SIZE + around.batch_limit)
    proven = _proven_end(window, position, claimed, expected_offset, furthest)
    if proven is not None:
        return proven
    is_likely = fits and end_position <= furthest and claimed.magic == MAGIC and flaw_of(claimed) is None
    if is_likely and _leads_to(window, end_position, claimed.next_offset, known, around):
        return end_position, claimed.next_offset
    return None


def _leads_to(window: memoryview, position: int, offset: int, known: tuple[int, int | None], around: Around) -> bool:
    """Whether batches without a hole lead from ``position`` and ``offset`` to what is known, or for long enough."""
    start = position
    for at, next_offset in chain(((position, offset),), _run(window, position, offset, around, exactly=True)):
        if at >= known[0]:
            return (at, next_offset) == known
        if at - start > HEADER_SIZE + around.batch_limit:
            return True
    return False


def _proven_end(
    window: memoryview, position: int, claimed: BatchHeader, expected_offset: int, furthest: int
) -> tuple[int, int | None] | None:
    """The end of the damaged batch that one of its two checksums confirms, up to ``furthest``; as `_end_of` has it.

    Tried are the end that it claims, and each place where a batch may begin: the one behind it is among them.
    """
    start = position + HEADER_SIZE
    # Of a header that was overwritten nothing is left to go by: a value may be made to have the checksum 0.
    is_remnant = claimed.magic == MAGIC or claimed.base_offset == expected_offset
    if not is_remnant or claimed.payload_checksum in _FILLS or furthest <= start:
        return None
    said = start + claimed.payload_size
    # Of a batch of Kafka's the hash begins behind its first bytes; the bit that says so may be what is damaged.
    digests = (start, xxhash.xxh3_64()), (start + PLACE_SIZE, xxhash.xxh3_64())
    done = start
    for end_position in _merged(_magics(window, start + 1, furthest), sorted({min(said, furthest), furthest})):
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
    """Both, ascending."""
    for position in found:
        while others and others[0] < position:
            yield others.pop(0)
        if others and others[0] == position:
            others.pop(0)
        yield position
    yield from others


def _next_certain(window: memoryview, position: int, expected_offset: int, around: Around) -> Resumed:
    """The first batch behind ``position`` that is certain to be one, wherever the damaged one ends."""
    for at, offset in around.known(position):
        if at >= len(window):
            break
        following = _sound_at(window, at, expected_offset, around)
        if following is not None and following.base_offset == offset:
            return Resumed(at, offset)
    length = HEADER_SIZE + around.batch_limit
    met: set[int] = set()
    for start in _magics(window, position + 1, len(window) - length):
        if start in met:
            continue
        for at, offset in _run(window, start, expected_offset, around):
            if at in met:
                break  # of a run that began before this one, and was too short
            met.add(at)
            if at - start > length and at < len(window):
                return Resumed(at, offset)
    return Resumed(len(window), None)


def _run(
    window: memoryview, position: int, expected_offset: int, around: Around, *, exactly: bool = False
) -> Iterator[tuple[int, int]]:
    """(end, next offset) of each of the whole batches from ``position`` on that follow each other without a hole.

    The first one begins at ``expected_offset`` or above, or ``exactly`` there; epochs do not go back.
    """
    epoch = 0
    while position < len(window):
        header = _sound_at(window, position, expected_offset, around)
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


def _has_place(header: BatchHeader, expected_offset: int, around: Around) -> bool:
    return expected_offset <= header.base_offset and (
        around.end_offset is None or header.next_offset <= around.end_offset
    )


def _sound_at(window: memoryview, position: int, expected_offset: int, around: Around) -> BatchHeader | None:
    """The header at ``position``, if it is sound, ends within the window and has its place there."""
    try:
        header = decode_header(window, position)
    except CorruptBatch:
        return None
    return header if _has_place(header, expected_offset, around) else None


def _magics(window: memoryview, start: int, end: int) -> Iterator[int]:
    """Positions in ``[start, end)`` at which the magic of a batch stands."""
    for position in range(start, end, _STEP):
        chunk = bytes(window[position : min(position + _STEP, end) + len(MAGIC) - 1])
        found = chunk.find(MAGIC)
        while found >= 0:
            yield position + found
            found = chunk.find(MAGIC, found + 1)


def looks_like_batch(source: memoryview, start: int, end: int) -> int | None:
    """Position of the first bytes at or after ``start`` that look like a whole batch; they may be a value's.

    For a person who looks at bytes of which nothing is known, and for nothing else.
    """
    window = source[:end]
    for position in _magics(window, start, end):
        try:
            check_payload(window, position, decode_header(window, position))
        except CorruptBatch:
            continue
        return position
    return None
