"""Each codec, and payloads that it refuses."""

from __future__ import annotations

import os
import random
from collections import Counter

import cramjam
import lz4.block
import pytest
from seeds import seeds

from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidConfig
from segmentlog.format.batch import CODEC_MASK
from segmentlog.format.batch_codecs import (
    BY_NUMBER,
    CODEC_LZ4,
    CODEC_NAMES,
    CODEC_NONE,
    CODECS,
    BatchCodec,
    codec_name,
    compression,
)

RAW = b'{"page": "/home", "user": 17}' * 400

compressing = pytest.mark.parametrize(
    "codec", [codec for codec in CODECS if codec.number != CODEC_NONE], ids=lambda codec: codec.name
)


def test_every_codec_has_a_name_and_a_number() -> None:
    """The number fits into the stored bits. The first codec is the default of a topic."""
    assert len(BY_NUMBER) == len(set(CODEC_NAMES)) == len(CODECS) == 5
    for codec in CODECS:
        assert codec.number & CODEC_MASK == codec.number
        assert compression(codec.name).codec is codec
        assert codec_name(codec.number) == codec.name
        assert TopicConfig(compression_type=codec.name).compression_type == codec.name  # type: ignore[arg-type]
    assert TopicConfig().compression.codec is CODECS[0]
    assert codec_name(7) == "codec 7"


@compressing
def test_what_is_compressed_comes_back(codec: BatchCodec) -> None:
    """Compressed bytes of any buffer type decompress to the same bytes."""
    for raw in (RAW, b"", b"x", os.urandom(5000)):
        for given in (raw, bytearray(raw), memoryview(raw)):
            packed = compression(codec.name).compress(given)
            assert isinstance(packed, bytes)
            assert bytes(codec.decompress(memoryview(packed), len(raw))) == raw
    assert len(compression(codec.name).compress(RAW)) < len(RAW) // 10


def test_lz4_with_a_size_before_the_block_is_refused() -> None:
    """The size that python-lz4 and cramjam can store before a block is not part of it: other readers refuse it."""
    codec = BY_NUMBER[CODEC_LZ4]
    for raw in (b"x", b"abcd" * 50, RAW, os.urandom(3000), bytes(70_000)):
        block = lz4.block.compress(raw, store_size=False)
        assert bytes(codec.decompress(memoryview(block), len(raw))) == raw
        with pytest.raises(ValueError, match="size precedes"):
            codec.decompress(memoryview(lz4.block.compress(raw, store_size=True)), len(raw))


@pytest.mark.parametrize("value", [0, 1, 7, 200, 255])
def test_lz4_that_begins_like_its_size_is_read(value: int) -> None:
    """The block of this many equal bytes begins with their number: one literal, then a match at offset 1."""
    raw = bytes([value]) * (0x1001F + (value << 8))
    block = lz4.block.compress(raw, store_size=False)
    assert int.from_bytes(block[:4], "little") == len(raw)
    assert bytes(BY_NUMBER[CODEC_LZ4].decompress(memoryview(block), len(raw))) == raw


@pytest.mark.parametrize("seed", seeds("lz4 blocks"))
def test_lz4_blocks_are_read_as_by_another_decoder(seed: int) -> None:
    """Valid blocks, blocks after a size, blocks with a wrong bit, and noise are read as by python-lz4."""
    rng = random.Random(seed)
    accepted: Counter[bool] = Counter()
    for _ in range(2000):
        raw = bytes(rng.choices(b"abc\0\1", k=rng.randrange(1, 200)))
        block = bytearray(lz4.block.compress(raw, store_size=False))
        match rng.randrange(4):
            case 0:
                block[:0] = (len(raw) + rng.choice((-1, 0, 0, 1))).to_bytes(4, "little")
            case 1:
                block[rng.randrange(len(block))] ^= 1 << rng.randrange(8)
            case 2:
                block = bytearray(rng.randbytes(rng.randrange(1, 12)))
        try:
            wanted = lz4.block.decompress(bytes(block), uncompressed_size=len(raw))
        except lz4.block.LZ4BlockError:
            wanted = b""
        try:
            found = bytes(BY_NUMBER[CODEC_LZ4].decompress(memoryview(block), len(raw)))
        except ValueError:
            found = b""
        # A reader refuses a batch that decompresses to another size than its header says.
        is_whole = len(wanted) == len(raw)
        assert (found == wanted) if is_whole else len(found) != len(raw), block.hex()
        accepted[is_whole] += 1
    assert min(accepted[True], accepted[False]) > 100


@compressing
def test_what_is_no_payload_is_a_value_error(codec: BatchCodec) -> None:
    """Such a payload raises ValueError or decompresses to fewer bytes than the header says, never to more."""
    packed = compression(codec.name).compress(RAW)
    broken = [b"", b"\xff" * 40, packed[:-1], packed[: len(packed) // 2], packed[1:], os.urandom(200)]
    for payload in [packed, *broken]:
        for size in (0, 1, len(RAW) - 1, len(RAW) + 1) if payload is packed else (len(RAW),):
            try:
                found = codec.decompress(memoryview(payload), size)
            except ValueError:
                continue
            assert len(found) <= size
            if payload is not packed:
                assert bytes(found) != RAW


@compressing
def test_no_payload_is_smaller_than_the_ratio_says(codec: BatchCodec) -> None:
    """The most compressible payload stays within the ratio; otherwise a reader would refuse it."""
    size = 16 << 20
    assert len(compression(codec.name).compress(bytes(size))) * codec.max_ratio >= size


def test_a_frame_that_claims_gigabytes_allocates_what_the_header_says() -> None:
    """A small Zstandard frame that claims gigabytes is decompressed into the size of the header."""
    bomb = bytes(cramjam.zstd.compress(bytes(64 << 20)))
    assert len(bomb) < 10_000
    with pytest.raises(ValueError, match="buffer"):
        compression("zstd").codec.decompress(bomb, 1000)


def test_levels_of_who_has_them() -> None:
    """A higher level takes less room.

    Other levels are refused, also by the config, and so is any level of other codecs.
    """
    raw = b"".join(b'{"page": "/%d", "user": %d}' % (number * 7919 % 1000, number) for number in range(3000))
    sizes = [len(compression("zstd", level).compress(raw)) for level in (1, 19)]
    assert sizes[1] < sizes[0] * 0.9
    assert compression("zstd") == compression("zstd", 1)
    config = TopicConfig(compression_type="zstd", compression_level=19)
    assert config.compression == compression("zstd", 19)
    assert TopicConfig.from_mapping(config.to_mapping()) == config
    assert config.replace({"compression.level": "default"}).compression == compression("zstd", 1)
    with pytest.raises(InvalidConfig, match="lz4 has no levels"):
        config.replace({"compression.type": "lz4"})
    assert len(compression("zstd", -5000).compress(raw)) > sizes[0]
    refused = [("zstd", -131073), ("zstd", 23), ("gzip", 0), ("gzip", 10), ("lz4", 1), ("snappy", 1), ("none", 1)]
    for name, level in refused:
        with pytest.raises(ValueError, match="level"):
            compression(name, level)
        with pytest.raises(InvalidConfig, match=r"compression\.level"):
            TopicConfig(compression_type=name, compression_level=level)  # type: ignore[arg-type]
