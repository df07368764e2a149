"""The compression codecs of batches. A new codec needs only an entry in `CODECS`.

The numbers are Kafka's: bits 0 to 2 of the attributes of a batch. A payload is compressed as a whole, and
decompressed into exactly the number of bytes in the header.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

import cramjam

Buffer = bytes | bytearray | memoryview


class BatchCodec(NamedTuple):
    """A compression algorithm. Its functions are thread-safe."""

    name: str
    """The value of `compression.type`."""
    number: int
    max_ratio: int
    """Largest ratio of decompressed to compressed size. Bounds what a reader allocates for a forged header."""
    levels: tuple[int, int, int] | None
    """The lowest, the highest and the default level; None for a codec without levels."""
    compress: Callable[[Buffer, int], bytes]
    """Takes the columns and a level, and returns the payload."""
    decompress: Callable[[Buffer, int], Buffer]
    """Takes a payload and its decompressed size in bytes. Raises ValueError for a malformed payload."""


_LZ4_SIZE_BYTES: Final = 4


def _compress_lz4(raw: Buffer, level: int) -> bytes:
    return bytes(cramjam.lz4.compress_block(raw, store_size=False))


def _decompress_lz4(payload: Buffer, size_bytes: int) -> memoryview:
    raw = bytearray(size_bytes)
    try:
        written = cramjam.lz4.decompress_block_into(payload, raw, output_len=size_bytes)
    except cramjam.DecompressionError as error:
        raise ValueError(str(error)) from None
    # If a block is malformed, cramjam takes its first 4 bytes for its size, and decodes the rest as the block. Other
    # readers refuse that. The buffer must have room for that size, so it is full only if the two sizes are equal. The
    # first 4 bytes of a valid block may be equal to its size, too, but its rest does not decompress to the same bytes.
    said_bytes = int.from_bytes(payload[:_LZ4_SIZE_BYTES], "little")
    if said_bytes == size_bytes == written and _is_lz4_of(payload[_LZ4_SIZE_BYTES:], raw):
        raise ValueError("lz4: a size precedes the block")
    return memoryview(raw)[:written]


def _is_lz4_of(block: Buffer, raw: bytearray) -> bool:
    """Return whether these are bytes of an LZ4 block, and it decompresses to exactly ``raw``."""
    if not block:
        return False
    found = bytearray(len(raw))
    try:
        written = cramjam.lz4.decompress_block_into(block, found, output_len=len(raw))
    except cramjam.DecompressionError:
        return False
    return bool(written == len(raw) and found == raw)


# Measured with batches of 1,024 JSON records of 80 bytes (82 kB). LZ4: 69 us, 24 kB, decompression 15 us. zstd at
# level 1: 141 us, 13 kB, decompression 53 us; at level 3: 200 us, and no smaller. zstd and Kafka have these limits.
_ZSTD_LEVELS: Final = (-131072, 22, 1)


def _compress_zstd(raw: Buffer, level: int) -> bytes:
    return bytes(cramjam.zstd.compress(raw, level=level))


def _decompress_zstd(payload: Buffer, size_bytes: int) -> memoryview:
    raw = bytearray(size_bytes)  # Not the size that the frame claims, which may be gigabytes.
    try:
        written = cramjam.zstd.decompress_into(payload, raw)
    except cramjam.DecompressionError as error:
        raise ValueError(str(error)) from None
    return memoryview(raw)[:written]


_GZIP_LEVELS: Final = (1, 9, 6)
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
"""Deflate with the largest window, between the header and the trailer of gzip."""


def _compress_gzip(raw: Buffer, level: int) -> bytes:
    return zlib.compress(raw, level, _GZIP_WINDOW)


def _decompress_gzip(payload: Buffer, size_bytes: int) -> bytes:
    member = zlib.decompressobj(_GZIP_WINDOW)
    try:
        # One byte more, so that zlib reads the trailer after the last byte, and checks its checksum.
        raw = member.decompress(payload, size_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(raw) > size_bytes or not member.eof or member.unused_data:
        raise ValueError(f"gzip: expected exactly one complete member of {size_bytes} bytes")
    return raw


def _compress_snappy(raw: Buffer, level: int) -> bytes:
    return bytes(cramjam.snappy.compress_raw(raw))


def _decompress_snappy(payload: Buffer, size_bytes: int) -> memoryview:
    raw = bytearray(size_bytes)
    try:
        written = cramjam.snappy.decompress_raw_into(payload, raw)
    except cramjam.DecompressionError as error:
        raise ValueError(str(error)) from None
    return memoryview(raw)[:written]


def _uncompressed(raw: Buffer, _: int) -> bytes:
    return bytes(raw)


def _as_it_is(raw: Buffer, _: int) -> Buffer:
    return raw


CODECS: Final = (
    BatchCodec("lz4", 3, 255, None, _compress_lz4, _decompress_lz4),
    # A block of 128 KiB takes at least 4 bytes.
    BatchCodec("zstd", 4, 1 << 16, _ZSTD_LEVELS, _compress_zstd, _decompress_zstd),
    # Deflate needs at least two bits for 258 bytes, snappy three bytes for 64.
    BatchCodec("gzip", 1, 1032, _GZIP_LEVELS, _compress_gzip, _decompress_gzip),
    BatchCodec("snappy", 2, 32, None, _compress_snappy, _decompress_snappy),
    BatchCodec("none", 0, 1, None, _uncompressed, _as_it_is),
)
"""The first codec is the default."""

CODEC_NONE: Final = 0
CODEC_GZIP: Final = 1
CODEC_SNAPPY: Final = 2
CODEC_LZ4: Final = 3
CODEC_ZSTD: Final = 4
CODEC_NAMES: Final = tuple(codec.name for codec in CODECS)

BY_NUMBER: Final = {codec.number: codec for codec in CODECS}
_BY_NAME: Final = {codec.name: codec for codec in CODECS}


class Compression(NamedTuple):
    """A codec and the level to compress with."""

    codec: BatchCodec
    level: int = 0

    def compress(self, raw: Buffer) -> bytes:
        """Return the payload of a batch with these columns."""
        return self.codec.compress(raw, self.level)


@lru_cache
def compression(name: str, level: int | None = None) -> Compression:
    """Return the compression of `compression.type` and `compression.level`. Raise ValueError for an invalid level."""
    codec = _BY_NAME[name]
    if codec.levels is None:
        if level is not None:
            raise ValueError(f"{name} has no levels")
        return Compression(codec)
    low, high, usual = codec.levels
    if level is not None and not low <= level <= high:
        raise ValueError(f"{name} has levels from {low} to {high}")
    return Compression(codec, usual if level is None else level)


def compression_of(number: int) -> Compression:
    """Return the compression for a codec number of a header, at the default level (a header contains no level)."""
    return compression(BY_NUMBER[number].name)


LZ4: Final = compression("lz4")
UNCOMPRESSED: Final = compression("none")


def codec_name(number: int) -> str:
    """Return the name of a codec for reports; also for an unknown number."""
    found = BY_NUMBER.get(number)
    return f"codec {number}" if found is None else found.name
