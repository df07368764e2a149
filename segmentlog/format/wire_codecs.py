r"""The codecs of Kafka batches in the framing that clients use, which does not contain the decompressed size.

    0 none
    1 gzip      members, each followed by any number of zeros
    2 snappy    one raw block (librdkafka); or "\x82SNAPPY\0", two versions i32, then blocks, each after its size i32
                (Java)
    3 lz4       frames, of blocks, and skippable frames
    4 zstd      frames, of blocks, and skippable frames; a window of at most 128 MiB

A client's claims about sizes are not trusted. The blocks of LZ4 and Zstandard frames are counted: the codec bounds what
a block can hold. Decompression writes into a buffer of that size, or of the caller's bound if that is less. gzip stops
at the bound.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

import cramjam
import numpy as np
import xxhash

from segmentlog.format.batch_codecs import CODEC_GZIP, CODEC_LZ4, CODEC_NONE, CODEC_SNAPPY, CODEC_ZSTD

Buffer = bytes | bytearray | memoryview

WIRE_CODEC_NAMES: Final = {CODEC_NONE: "none", CODEC_GZIP: "gzip", CODEC_SNAPPY: "snappy", CODEC_LZ4: "lz4",
                           CODEC_ZSTD: "zstd"}  # fmt: skip

PADDING: Final = 16
"""Zeros after the decompressed records, so that a scan can read a number without checking for the end."""
_ZEROS: Final = bytes(PADDING)

_GZIP: Final = 16 + zlib.MAX_WBITS
_GZIP_FIRST_CHUNK: Final = 1 << 20
_GZIP_NEXT_CHUNK: Final = 256
"""Size in bytes of the first chunk that zlib gets of each gzip member after the first; each next chunk doubles.

zlib copies the bytes after a member's end. So with a large first chunk, many members would take quadratic time.
"""
_GZIP_LEVEL: Final = -1  # zlib's own choice, which is 6
_ZSTD_LEVEL: Final = 3
_XERIAL: Final = b"\x82SNAPPY\0"
_XERIAL_HEADER_SIZE: Final = 16
_XERIAL_BLOCK: Final = 32 << 10
_SNAPPY_MAX_RATIO: Final = 32
_LZ4_MAGIC: Final = 0x184D2204
_LZ4_MAX_RATIO: Final = 255
_LZ4_INDEPENDENT: Final = 0x20
_LZ4_FRAME: Final = struct.Struct("<IBBB")
"""Start of a frame without optional fields: magic, flags, block kind, checksum of these two."""
_LZ4_FRAME_SIZE_MIN: Final = _LZ4_FRAME.size + 4 + 1 + 4
_LZ4_CLIENTS_BLOCK: Final = 64 << 10
_LZ4_CLIENTS_FRAME: Final = _LZ4_FRAME.pack(_LZ4_MAGIC, 0x60, 0x40, 0x82)
_LZ4_BLOCK_KINDS: Final = (0x40, 0x50, 0x60, 0x70)
_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_BLOCK: Final = 128 << 10
_SKIPPABLE: Final = 0x184D2A50
_SIZE_LE = struct.Struct("<I")
_SIZE_BE = struct.Struct(">I")


def decompress_records(codec: int, stored: memoryview, limit_bytes: int) -> bytes:
    """Return the decompressed records of a batch, followed by `PADDING` zeros.

    Raise ValueError for bytes that are malformed in that codec, and `TooManyBytes` for more than ``limit_bytes``. The
    call allocates at most about that much memory.
    """
    if codec == CODEC_NONE:
        return b"".join((stored, _ZEROS))
    try:
        return _DECOMPRESSORS[codec](stored, limit_bytes)
    except KeyError:
        raise ValueError(f"codec {codec}") from None
    except (cramjam.DecompressionError, zlib.error, struct.error) as error:
        raise ValueError(f"{WIRE_CODEC_NAMES[codec]}: {error}") from None


def compress_records(codec: int, records: Buffer, level: int | None = None) -> Buffer:
    """Compress the records as a client would. Raises ValueError for an unknown codec.

    ``level`` is the level of gzip or zstd; None for the level that Kafka's clients use. The other codecs have no level.
    """
    if codec == CODEC_NONE:
        return records
    if codec == CODEC_GZIP:
        return zlib.compress(records, _GZIP_LEVEL if level is None else level, _GZIP)
    if codec == CODEC_SNAPPY:
        return _compress_snappy(memoryview(records))
    if codec == CODEC_LZ4:
        return _compress_lz4(memoryview(records))
    if codec == CODEC_ZSTD:
        return bytes(cramjam.zstd.compress(records, level=_ZSTD_LEVEL if level is None else level))
    raise ValueError(f"codec {codec}")


class TooManyBytes(ValueError):
    """The decompressed records would exceed the reader's limit."""


def _too_much(limit_bytes: int) -> ValueError:
    return TooManyBytes(f"the records take more than {limit_bytes} bytes when decompressed")


def _gunzip(stored: memoryview, limit_bytes: int) -> bytes:
    """Decompress the members, and skip zeros after each of them, as gzip(1) does."""
    parts: list[bytes] = []
    position, left, chunk = 0, limit_bytes, _GZIP_FIRST_CHUNK
    while True:
        member = zlib.decompressobj(_GZIP)
        while not member.eof:
            if position >= len(stored):
                raise ValueError("gzip: the data are truncated")
            raw = member.decompress(stored[position : position + chunk], left + 1)
            if len(raw) > left:
                raise _too_much(limit_bytes)
            parts.append(raw)
            left -= len(raw)
            position = min(position + chunk, len(stored)) - len(member.unused_data)
            chunk *= 2
        position = _skip_zeros(stored, position)
        if position >= len(stored):
            parts.append(_ZEROS)
            return b"".join(parts)
        chunk = _GZIP_NEXT_CHUNK


def _skip_zeros(stored: memoryview, position: int) -> int:
    """Return the first position from ``position`` on with a byte other than zero, or the end."""
    width = 64
    while position < len(stored) and not stored[position]:
        zeros = bytes(stored[position : position + width])
        position += len(zeros) - len(zeros.lstrip(b"\0"))
        width *= 2
    return position


def _unsnappy(stored: memoryview, limit_bytes: int) -> bytes:
    if bytes(stored[: len(_XERIAL)]) != _XERIAL:
        return b"".join((*_snappy_blocks([stored], limit_bytes), _ZEROS))
    blocks, position = [], _XERIAL_HEADER_SIZE
    while position < len(stored):
        (size,) = _SIZE_BE.unpack_from(stored, position)
        position += _SIZE_BE.size
        if not 0 < size <= len(stored) - position:
            raise ValueError(f"snappy: a block claims {size} bytes, but {len(stored) - position} follow")
        blocks.append(stored[position : position + size])
        position += size
    return b"".join((*_snappy_blocks(blocks, limit_bytes), _ZEROS))


def _snappy_blocks(blocks: list[memoryview], limit_bytes: int) -> list[bytes]:
    parts = []
    for block in blocks:
        size = int(cramjam.snappy.decompress_raw_len(block))
        if size > limit_bytes:
            raise _too_much(limit_bytes)
        if size > _SNAPPY_MAX_RATIO * len(block):
            raise ValueError(f"snappy: a block of {len(block)} bytes claims {size} bytes decompressed")
        limit_bytes -= size
        parts.append(bytes(cramjam.snappy.decompress_raw(block)))
    return parts


def _compress_snappy(records: memoryview) -> bytes:
    """Compress in Java's framing, which every client can read."""
    parts = [_XERIAL, _SIZE_BE.pack(1), _SIZE_BE.pack(1)]
    for start in range(0, len(records), _XERIAL_BLOCK):
        block = bytes(cramjam.snappy.compress_raw(records[start : start + _XERIAL_BLOCK]))
        parts += (_SIZE_BE.pack(len(block)), block)
    return b"".join(parts)


def _compress_lz4(records: memoryview) -> bytes:
    """Compress into a frame as Kafka's clients write it: independent blocks of 64 KiB, and no checksums."""
    parts: list[Buffer] = [_LZ4_CLIENTS_FRAME]
    for start in range(0, len(records), _LZ4_CLIENTS_BLOCK):
        raw = records[start : start + _LZ4_CLIENTS_BLOCK]
        block = memoryview(cramjam.lz4.compress_block(raw, store_size=False))
        is_smaller = len(block) < len(raw)
        parts.append(_SIZE_LE.pack(len(block) if is_smaller else len(raw) | 1 << 31))
        parts.append(block if is_smaller else raw)
    parts.append(_SIZE_LE.pack(0))
    return b"".join(parts)


def _unlz4(stored: memoryview, limit_bytes: int) -> bytes:
    raw = _unlz4_blocks(stored, limit_bytes)
    if raw is not None:
        return raw
    room = min(lz4_bound(stored, limit_bytes), _LZ4_MAX_RATIO * len(stored))
    return _into(cramjam.lz4.decompress_into, stored, room, limit_bytes)


def _unlz4_blocks(stored: memoryview, limit_bytes: int) -> bytes | None:
    """Decompress a frame block by block, if no block depends on the one before: clients send such frames.

    16 KiB take 4 us, and the frame decoder takes 31 us; 880 KiB take 0.16 and 1.3 ms. Return None for any other input,
    valid or not: the frame decoder handles it.
    """
    if len(stored) < _LZ4_FRAME_SIZE_MIN:
        return None
    magic, flags, kind, check = _LZ4_FRAME.unpack_from(stored)
    # Only version 1, and no optional fields except the checksums.
    if magic != _LZ4_MAGIC or flags & 0xCB != 0x40 or kind not in _LZ4_BLOCK_KINDS or check != _xxh32(stored[4:6])[1]:
        return None
    blocks = _lz4_blocks(stored, flags, 1 << (8 + 2 * (kind >> 4)), limit_bytes)
    if not blocks or (len(blocks) > 1 and not flags & _LZ4_INDEPENDENT):
        return None
    # The decoder also writes after the end of the records, so the padding cannot be part of this buffer. The zeros of
    # numpy take no memory until the decoder writes there.
    room = np.zeros(sum(block.room_bytes for block in blocks), np.uint8).data
    size = 0
    for block in blocks:
        written = block.decompress_into(room[size : size + block.room_bytes])
        if written is None:
            return None
        size += written
    records = room[:size]
    if len(records) > limit_bytes or (flags & 0x04 and _xxh32(records) != stored[-4:]):
        return None
    return b"".join((records, _ZEROS))


def _lz4_blocks(stored: memoryview, flags: int, block_bytes: int, limit_bytes: int) -> list[_Lz4Block] | None:
    """Return the blocks of one frame. Return None if more than the frame follows, if a checksum of a block is wrong, or
    if there may be more than ``limit_bytes`` of records.
    """
    blocks: list[_Lz4Block] = []
    position = _LZ4_FRAME.size
    checksum_bytes = 4 if flags & 0x10 else 0
    while len(stored) >= position + 4:
        (size,) = _SIZE_LE.unpack_from(stored, position)
        position += 4
        if not size:
            return blocks if len(stored) == position + (4 if flags & 0x04 else 0) else None
        # Clients fill each block but the last. This bounds the loop for a frame of many small blocks.
        if len(blocks) * block_bytes > limit_bytes:
            return None
        data = stored[position : position + (size & 0x7FFFFFFF)]
        position += len(data) + checksum_bytes
        if not data or (checksum_bytes and stored[position - 4 : position] != _xxh32(data)):
            return None
        room_bytes = min(block_bytes, limit_bytes)
        is_compressed = not size >> 31
        blocks.append(_Lz4Block(data, is_compressed, min(room_bytes, _LZ4_MAX_RATIO * len(data))))
    return None


class _Lz4Block(NamedTuple):
    """A block of a frame. ``room_bytes`` is the most that it may decompress to."""

    data: memoryview
    is_compressed: bool
    room_bytes: int

    def decompress_into(self, room: memoryview) -> int | None:
        """Return the number of bytes written to ``room``; None if the frame decoder must handle the frame."""
        if not self.is_compressed:
            if len(self.data) > len(room):
                return None
            room[: len(self.data)] = self.data
            return len(self.data)
        try:
            written = int(cramjam.lz4.decompress_block_into(self.data, room, len(room)))
        except cramjam.DecompressionError:
            return None
        # If a block is malformed, cramjam takes its first 4 bytes for a size, and decodes the rest as the block. It
        # then writes at most that size, and not more than there is room for.
        may_be_size = int.from_bytes(self.data[:4], "little")
        return written if may_be_size > len(room) or may_be_size < written else None


def _xxh32(data: Buffer) -> bytes:
    """Return the checksum of LZ4 frames: XXH32, little-endian."""
    return xxhash.xxh32_intdigest(data).to_bytes(4, "little")


def _unzstd(stored: memoryview, limit_bytes: int) -> bytes:
    return _into(cramjam.zstd.decompress_into, stored, zstd_bound(stored, limit_bytes), limit_bytes)


def _into(
    decompress_into: Callable[[memoryview, memoryview], int], stored: memoryview, room: int, limit_bytes: int
) -> bytes:
    """Decompress into a buffer of ``room`` or ``limit_bytes`` bytes, whichever is less. ``room`` is an upper bound."""
    # Not a bytearray: it writes all its zeros. The zeros of numpy take no memory until the decoder writes there.
    raw = np.zeros(min(room, limit_bytes) + PADDING, np.uint8).data
    try:
        size = int(decompress_into(stored, raw))
    except cramjam.DecompressionError as error:
        if room > limit_bytes and "whole buffer" in str(error):
            raise _too_much(limit_bytes) from None
        raise
    if size > len(raw) - PADDING:
        raise _too_much(len(raw) - PADDING)
    return bytes(raw[: size + PADDING])


def lz4_bound(stored: memoryview, limit_bytes: int) -> int:
    """Return how many bytes the blocks of LZ4 frames can decompress to, or any number above ``limit_bytes``."""
    position = room = 0
    if not stored:
        raise ValueError("lz4: the data are empty")
    while position < len(stored):
        (magic,) = _SIZE_LE.unpack_from(stored, position)
        if magic & 0xFFFFFFF0 == _SKIPPABLE:
            position += 8 + _SIZE_LE.unpack_from(stored, position + 4)[0]
            continue
        if magic != _LZ4_MAGIC or len(stored) < position + 7:
            raise ValueError("lz4: expected a frame")
        flags, kind = stored[position + 4], stored[position + 5] >> 4 & 7
        if kind < 4:
            raise ValueError(f"lz4: unknown block size {kind}")
        block = 1 << (8 + 2 * kind)
        checksum_size = 4 if flags & 0x10 else 0
        position += 7 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0)
        while (size := _SIZE_LE.unpack_from(stored, position)[0]) != 0:
            room += block
            if room > limit_bytes:
                return room
            position += 4 + (size & 0x7FFFFFFF) + checksum_size
        position += 8 if flags & 0x04 else 4
    return room


def zstd_bound(stored: memoryview, limit_bytes: int) -> int:
    """Return how many bytes the blocks of Zstandard frames can decompress to, or any number above ``limit_bytes``."""
    position = room = 0
    while position < len(stored):
        (magic,) = _SIZE_LE.unpack_from(stored, position)
        position += 4
        if magic & 0xFFFFFFF0 == _SKIPPABLE:
            position += 4 + _SIZE_LE.unpack_from(stored, position)[0]
            continue
        if magic != _ZSTD_MAGIC or position >= len(stored):
            raise ValueError("zstd: expected a frame")
        descriptor = stored[position]
        single = descriptor >> 5 & 1
        size_bytes = (single, 2, 4, 8)[descriptor >> 6]
        position += 1 + (1 - single) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
        last = False
        while not last:
            if position + 3 > len(stored):
                raise ValueError("zstd: the data are truncated")
            block = int.from_bytes(stored[position : position + 3], "little")
            last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
            room += _ZSTD_BLOCK if kind == 2 else size
            if room > limit_bytes:
                return room
            position += 3 + (1 if kind == 1 else size)
        position += 4 if descriptor & 4 else 0
    return room


_DECOMPRESSORS: Final[dict[int, Callable[[memoryview, int], bytes]]] = {
    CODEC_GZIP: _gunzip,
    CODEC_SNAPPY: _unsnappy,
    CODEC_LZ4: _unlz4,
    CODEC_ZSTD: _unzstd,
}
