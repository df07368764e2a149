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
from typing import Final

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
_LZ4_FRAME: Final = struct.Struct("<IBBBI")
"""Start of a frame without optional fields: magic, flags, block kind, checksum of these two; size of the block."""
_LZ4_FRAME_SIZE_MIN: Final = _LZ4_FRAME.size + 1 + 4
_LZ4_BLOCK_KINDS: Final = (0x40, 0x50, 0x60, 0x70)
_LZ4_END_MARK: Final = bytes(4)
_LZ4_REST_SIZE_MAX: Final = 12
"""Bytes after the block: its checksum, the end mark and the checksum of what it decompresses to."""
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
        # Levels from 1 on are cramjam's slow mode: 3.5 times as long for a fifth less.
        return bytes(cramjam.lz4.compress(records, level=0))
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


def _unlz4(stored: memoryview, limit_bytes: int) -> bytes:
    raw = _unlz4_block(stored, limit_bytes)
    if raw is not None:
        return raw
    room = min(lz4_bound(stored, limit_bytes), _LZ4_MAX_RATIO * len(stored))
    return _into(cramjam.lz4.decompress_into, stored, room, limit_bytes)


def _unlz4_block(stored: memoryview, limit_bytes: int) -> bytes | None:
    """Decompress a frame with exactly one block: clients send such a frame for up to 64 KiB of records.

    16 KiB take 4 us; the frame decoder takes 31 us. Return None for any other input, valid or not: the frame decoder
    handles it.
    """
    if len(stored) < _LZ4_FRAME_SIZE_MIN:
        return None
    magic, flags, kind, check, size = _LZ4_FRAME.unpack_from(stored)
    # Only version 1, and no optional fields except the checksums.
    if magic != _LZ4_MAGIC or flags & 0xCB != 0x40 or kind not in _LZ4_BLOCK_KINDS:
        return None
    is_compressed, end = not size >> 31, _LZ4_FRAME.size + (size & 0x7FFFFFFF)
    block, rest = stored[_LZ4_FRAME.size : end], bytes(stored[end : end + _LZ4_REST_SIZE_MAX + 1])
    block_checksum = rest[:4] if flags & 0x10 else b""
    content_checksum = rest[-4:] if flags & 0x04 else b""
    if not block or rest != block_checksum + _LZ4_END_MARK + content_checksum or check != _xxh32(stored[4:6])[1]:
        return None
    if block_checksum and block_checksum != _xxh32(block):
        return None
    room_bytes = min(1 << (8 + 2 * (kind >> 4)), limit_bytes)
    records: Buffer = block
    if is_compressed:
        # The decoder also writes after the end of the records, so the padding cannot be part of this buffer.
        room = bytearray(min(room_bytes, _LZ4_MAX_RATIO * len(block)))
        # If a block is malformed, cramjam takes its first 4 bytes for a size, and decodes the rest as the block. That
        # fails for certain only if the size is larger than the buffer. The frame decoder handles all other blocks.
        if int.from_bytes(block[:4], "little") <= len(room):
            return None
        try:
            records = memoryview(room)[: cramjam.lz4.decompress_block_into(block, room, len(room))]
        except cramjam.DecompressionError:
            return None
    if len(records) > room_bytes or (content_checksum and content_checksum != _xxh32(records)):
        return None
    return b"".join((records, _ZEROS))


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
