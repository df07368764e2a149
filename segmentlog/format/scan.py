"""Walking a segment batch by batch, and finding the next batch behind damaged bytes."""

from __future__ import annotations

from collections.abc import Iterator

from segmentlog.errors import CorruptBatch
from segmentlog.format.batch import MAGIC, BatchHeader, check_payload, decode_header


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


def find_batch(source: memoryview, start: int, end: int, expected_offset: int) -> int | None:
    """Position of the first whole batch at or after ``start`` whose offsets come at or after ``expected_offset``.

    For getting past a damaged header, which no longer says how long its batch is: looks for
    the magic, then lets the header's and the payload's checksums decide, so that bytes of a
    record which look like a batch are only taken for one if they are one, offsets included.
    """
    step = 1 << 20
    window = source[:end]
    for position in range(start, end, step):
        chunk = bytes(window[position : position + step + len(MAGIC) - 1])
        found = chunk.find(MAGIC)
        while found >= 0:
            try:
                header = decode_header(window, position + found)
                if header.base_offset >= expected_offset:
                    check_payload(window, position + found, header)
                    return position + found
            except CorruptBatch:
                pass
            found = chunk.find(MAGIC, found + 1)
    return None
