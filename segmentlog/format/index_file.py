"""The sparse index files of a segment, little-endian: caches that are rebuilt from the log if they are damaged.

``.index``, 8 bytes an entry::

    relative_offset   u32   base offset of a batch, relative to the segment's
    position          u32   where that batch starts in the segment

``.timeindex``, 16 bytes an entry, entry i belongs to entry i of the ``.index`` file::

    max_timestamp     i64   largest timestamp of all batches of the segment *before* that batch
    relative_offset   u32   the same
    check             u32   a hash of the 12 bytes above and of the position in the ``.index`` file

The first batch that starts ``index.interval.bytes`` or more after the last indexed batch gets an
entry (the batch at position 0 needs none). Sealing adds a closing entry (next offset, size of the
segment): it contains the segment's largest timestamp and shows that the index is complete. These
files are not fsynced. An entry that a crash or a bad disk damaged has a wrong ``check``; readers
ignore it and all entries after it. An entry of zeros is never valid.

The hash, modulo 2^64 except for the last step::

    x     = max_timestamp + 0x9E3779B97F4A7C15
    x     = (x ^ ((position << 32 | relative_offset) * 0xC2B2AE3D27D4EB4F)) * 0x9E3779B97F4A7C15
    check = ((x ^ x >> 32) * 0xC2B2AE3D27D4EB4F) >> 32
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

OFFSET_ENTRY: Final = np.dtype([("relative_offset", "<u4"), ("position", "<u4")])
TIME_ENTRY: Final = np.dtype([("max_timestamp", "<i8"), ("relative_offset", "<u4"), ("check", "<u4")])
MAX_RELATIVE: Final = 2**32 - 1

_MIX_A = np.uint64(0x9E3779B97F4A7C15)
_MIX_B = np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT = np.uint64(32)
_PACKED: Final = struct.Struct("<II")

Entries = npt.NDArray[np.void]


def entry_due(position: int, last_indexed_position: int, interval_bytes: int) -> bool:
    """Return whether the batch at ``position`` gets an index entry. Appends and index rebuilds both use this rule."""
    return position - last_indexed_position >= interval_bytes


def encode_entries(
    relative_offsets: npt.NDArray[np.uint32], positions: npt.NDArray[np.uint32], max_timestamps: npt.NDArray[np.int64]
) -> tuple[bytes, bytes]:
    """Return the bytes of the ``.index`` and ``.timeindex`` files with these entries."""
    count = len(positions)
    offsets = np.empty(count, OFFSET_ENTRY)
    offsets["relative_offset"], offsets["position"] = relative_offsets, positions
    times = np.empty(count, TIME_ENTRY)
    times["max_timestamp"], times["relative_offset"] = max_timestamps, relative_offsets
    times["check"] = _checks(times, offsets["position"])
    return offsets.tobytes(), times.tobytes()


def decode_entries(offset_bytes: memoryview | bytes, time_bytes: memoryview | bytes) -> tuple[Entries, Entries, bool]:
    """Return the entries of both files before the first invalid entry, and whether all entries are valid.

    The arrays are views of the bytes. Positions and relative offsets are strictly ascending;
    largest timestamps never decrease.
    """
    count = min(len(offset_bytes) // OFFSET_ENTRY.itemsize, len(time_bytes) // TIME_ENTRY.itemsize)
    offsets = np.frombuffer(offset_bytes, OFFSET_ENTRY, count)
    times = np.frombuffer(time_bytes, TIME_ENTRY, count)
    relative, positions, stamps = offsets["relative_offset"], offsets["position"], times["max_timestamp"]
    good = (times["check"] == _checks(times, positions)) & (relative == times["relative_offset"]) & (positions > 0)
    if count > 1:
        good[1:] &= (relative[1:] > relative[:-1]) & (positions[1:] > positions[:-1]) & (stamps[1:] >= stamps[:-1])
    valid = count if bool(good.all()) else int(good.argmin())
    whole = (
        valid == count
        and len(offset_bytes) == count * OFFSET_ENTRY.itemsize
        and len(time_bytes) == count * TIME_ENTRY.itemsize
    )
    return offsets[:valid], times[:valid], whole


def end_of_index(last_entry: bytes) -> int:
    """Return the position in the last entry of an ``.index`` file: the size of the segment if the index is complete."""
    return _PACKED.unpack(last_entry)[1]  # type: ignore[no-any-return]


def _checks(times: Entries, positions: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return a multiply-xor mix of each entry's three numbers, folded to 32 bits; zeros do not map to zero."""
    stamps = times["max_timestamp"].astype(np.uint64)
    place = positions.astype(np.uint64) << _SHIFT | times["relative_offset"].astype(np.uint64)
    mixed = ((stamps + _MIX_A) ^ (place * _MIX_B)) * _MIX_A
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX_B
    return (mixed >> _SHIFT).astype(np.uint32)


def pack_index(offset_bytes: bytes, time_bytes: bytes, aborted: bytes = b"") -> bytes:
    """Return the index files of a sealed segment, and its ``.txnindex`` if it has one, as one object."""
    return b"".join((_PACKED.pack(len(offset_bytes), len(time_bytes)), offset_bytes, time_bytes, aborted))


def unpack_index(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the three files that `pack_index` joined.

    Raise ValueError for bytes that `pack_index` cannot have returned.
    """
    try:
        offset_size, time_size = _PACKED.unpack_from(data)
    except struct.error:
        raise ValueError(f"an index object of {len(data)} bytes, expected at least {_PACKED.size}") from None
    times, aborted = _PACKED.size + offset_size, _PACKED.size + offset_size + time_size
    if aborted > len(data):
        raise ValueError(f"an index object of {len(data)} bytes, whose header claims at least {aborted}")
    return data[_PACKED.size : times], data[times:aborted], data[aborted:]
