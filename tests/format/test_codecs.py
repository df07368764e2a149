"""Each codec, and what is no payload of its."""

from __future__ import annotations

import os

import cramjam
import pytest

from segmentlog.config import TopicConfig
from segmentlog.format.batch import CODEC_MASK
from segmentlog.format.codecs import BY_NUMBER, CODEC_NAMES, CODEC_NONE, CODECS, Codec, codec_name, codec_number

RAW = b'{"page": "/home", "user": 17}' * 400

compressing = pytest.mark.parametrize(
    "codec", [codec for codec in CODECS if codec.number != CODEC_NONE], ids=lambda codec: codec.name
)


def test_every_codec_has_a_name_and_a_number() -> None:
    """Of its own, which fits where it is stored; the first is the default of a topic."""
    assert len(BY_NUMBER) == len(set(CODEC_NAMES)) == len(CODECS) >= 3
    for codec in CODECS:
        assert codec.number & CODEC_MASK == codec.number
        assert codec_number(codec.name) == codec.number
        assert codec_name(codec.number) == codec.name
        assert TopicConfig(compression_type=codec.name).compression_type == codec.name  # type: ignore[arg-type]
    assert TopicConfig().compression_type == CODECS[0].name
    assert codec_name(7) == "codec 7"


@compressing
def test_what_is_compressed_comes_back(codec: Codec) -> None:
    """Whatever the bytes come in."""
    for raw in (RAW, b"", b"x", os.urandom(5000)):
        for given in (raw, bytearray(raw), memoryview(raw)):
            packed = codec.compress(given)
            assert isinstance(packed, bytes)
            assert bytes(codec.decompress(memoryview(packed), len(raw))) == raw
    assert len(codec.compress(RAW)) < len(RAW) // 10


@compressing
def test_what_is_no_payload_is_a_value_error(codec: Codec) -> None:
    """Or comes out shorter than the header says; never longer, and nothing else is raised."""
    packed = codec.compress(RAW)
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
def test_no_payload_is_smaller_than_the_ratio_says(codec: Codec) -> None:
    """What shrinks most: else a reader would refuse what was written."""
    size = 16 << 20
    assert len(codec.compress(bytes(size))) * codec.max_ratio >= size


def test_a_frame_that_claims_gigabytes_allocates_what_the_header_says() -> None:
    """A Zstandard frame of little that is much."""
    bomb = bytes(cramjam.zstd.compress(bytes(64 << 20)))
    assert len(bomb) < 10_000
    with pytest.raises(ValueError, match="buffer"):
        BY_NUMBER[codec_number("zstd")].decompress(bomb, 1000)
