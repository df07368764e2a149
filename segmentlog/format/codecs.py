"""Every codec that a batch may be compressed with, once. One more is one more entry of `CODECS`.

Numbers are Kafka's, as bits 0 to 2 of a batch's attributes have them. A payload is compressed whole, and decompressed
into exactly as many bytes as the header says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import cramjam

Buffer = bytes | bytearray | memoryview


class Codec(NamedTuple):
    """One way to compress. Its functions are safe to call from any thread."""

    name: str
    """As `compression.type` has it."""
    number: int
    max_ratio: int
    """How many times as large as its payload a batch may be: what a reader allocates for a forged header."""
    compress: Callable[[Buffer], bytes]
    decompress: Callable[[Buffer, int], Buffer]
    """Of a payload and how many bytes it has decompressed. Raises ValueError for a payload that is none."""


def _compress_lz4(raw: Buffer) -> bytes:
    return bytes(cramjam.lz4.compress_block(raw, store_size=False))


def _decompress_lz4(payload: Buffer, size_bytes: int) -> memoryview:
    raw = bytearray(size_bytes)
    try:
        written = cramjam.lz4.decompress_block_into(payload, raw, output_len=size_bytes)
    except cramjam.DecompressionError as error:
        raise ValueError(str(error)) from None
    return memoryview(raw)[:written]


# Of JSON records of 80 bytes in batches of 1,024 (82 kB) here: LZ4 69 us and 24 kB, back 15 us; zstd at level 1 141 us
# and 13 kB, back 53 us; at level 3 200 us for no less.
_ZSTD_LEVEL: Final = 1


def _compress_zstd(raw: Buffer) -> bytes:
    return bytes(cramjam.zstd.compress(raw, level=_ZSTD_LEVEL))


def _decompress_zstd(payload: Buffer, size_bytes: int) -> memoryview:
    raw = bytearray(size_bytes)  # into a buffer: a frame may claim gigabytes
    try:
        written = cramjam.zstd.decompress_into(payload, raw)
    except cramjam.DecompressionError as error:
        raise ValueError(str(error)) from None
    return memoryview(raw)[:written]


def _as_it_is(raw: Buffer, size_bytes: int = 0) -> Any:
    return raw


CODECS: Final = (
    Codec("lz4", 3, 255, _compress_lz4, _decompress_lz4),
    Codec("zstd", 4, 1 << 16, _compress_zstd, _decompress_zstd),  # a block of 128 KiB takes 4 bytes at the least
    Codec("none", 0, 1, _as_it_is, _as_it_is),
)
"""The first one is the default."""

CODEC_NONE: Final = 0
CODEC_LZ4: Final = 3
CODEC_ZSTD: Final = 4
CODEC_NAMES: Final = tuple(codec.name for codec in CODECS)

BY_NUMBER: Final = {codec.number: codec for codec in CODECS}
_BY_NAME: Final = {codec.name: codec for codec in CODECS}


def codec_number(name: str) -> int:
    """Of a `compression.type`."""
    return _BY_NAME[name].number


def codec_name(number: int) -> str:
    """For people."""
    found = BY_NUMBER.get(number)
    return f"codec {number}" if found is None else found.name
