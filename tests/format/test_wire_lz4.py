"""LZ4 frames of independent blocks are decoded without the frame decoder. Both return the same records, or refuse."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Final

import cramjam
import lz4.block
import lz4.frame
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from seeds import seeds

from segmentlog.format import wire_codecs
from segmentlog.format.batch_codecs import CODEC_LZ4
from segmentlog.format.wire_codecs import PADDING, decompress_records

KINDS: Final = (lz4.frame.BLOCKSIZE_MAX64KB, lz4.frame.BLOCKSIZE_MAX256KB, lz4.frame.BLOCKSIZE_MAX1MB,
                lz4.frame.BLOCKSIZE_MAX4MB)  # fmt: skip
FLAGS: Final = list(product(KINDS, (False, True), (False, True), (False, True)))
"""Largest size of a block, linked blocks, checksum of each block, checksum of the content."""
PLENTY: Final = 1 << 20


def framed(raw: bytes, kind: int, linked: bool, block_checksum: bool, content_checksum: bool, level: int = 0) -> bytes:
    """Return a frame as Kafka's clients write it: without the size of its content."""
    return bytes(lz4.frame.compress(
        raw, compression_level=level, block_size=kind, block_linked=linked, block_checksum=block_checksum,
        content_checksum=content_checksum, store_size=False,
    ))  # fmt: skip


def frame_of(block: bytes, flags: int = 0x60, kind: int = 0x40, size_bits: int = 0) -> bytes:
    """Return a frame with this block and without further checksums, whatever the block holds."""
    descriptor = bytes((flags, kind))
    check = xxhash.xxh32_intdigest(descriptor) >> 8 & 0xFF
    head = (0x184D2204).to_bytes(4, "little") + descriptor + bytes((check,))
    return head + (len(block) | size_bits).to_bytes(4, "little") + block + bytes(4)


def frame_of_blocks(blocks: list[bytes], flags: int = 0x60) -> bytes:
    """Return a frame with these blocks, the second of them not compressed, without a checksum of the content."""
    parts = [frame_of(b"", flags)[:7]]
    for number, raw in enumerate(blocks):
        block = raw if number == 1 else lz4.block.compress(raw, store_size=False)
        parts += ((len(block) | (number == 1) << 31).to_bytes(4, "little"), block)
    return b"".join((*parts, bytes(4)))


def xxh32(data: bytes) -> bytes:
    """Return the checksum that a frame contains."""
    return xxhash.xxh32_intdigest(data).to_bytes(4, "little")


def as_frame(stored: bytes, limit_bytes: int) -> bytes | None:
    """Decode by the frame decoder alone; None where it refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_codecs, "_unlz4_blocks", lambda _stored, _limit: None)
        try:
            return decompress_records(CODEC_LZ4, memoryview(stored), limit_bytes)
        except ValueError:
            return None


def check_same(stored: bytes, limit_bytes: int = PLENTY) -> bytes | None:
    """Decode in both ways, which must agree, and return the records; None where they are refused."""
    wanted = as_frame(stored, limit_bytes)
    try:
        found = decompress_records(CODEC_LZ4, memoryview(stored), limit_bytes)
    except ValueError:
        found = None
    assert found == wanted
    if found is None:
        return None
    assert found[-PADDING:] == bytes(PADDING)
    return found[:-PADDING]


def is_fast(stored: bytes, limit_bytes: int = PLENTY) -> bool:
    """Return whether the frame decoder is not needed."""
    return wire_codecs._unlz4_blocks(memoryview(stored), limit_bytes) is not None


def like_records(size: int) -> bytes:
    """Return bytes that compress about as records do."""
    made = b"".join(b"\xc8\x01\0%c%c\x10key %5d value %d" % (n & 127, n & 127, n, n * n) for n in range(size // 20 + 1))
    return made[:size]


@pytest.mark.parametrize(("kind", "linked", "block_checksum", "content_checksum"), FLAGS)
def test_frames_of_every_kind(kind: int, linked: bool, block_checksum: bool, content_checksum: bool) -> None:
    """A frame of one block or of independent blocks does not need the frame decoder, and the bound is exact."""
    # Four bytes that no decoder can take for a size come first.
    lengths = () if linked else (65_537, 700_000)
    several = [b"\xff" * 4 + like_records(length) for length in lengths]
    for raw in (like_records(16_000), random.Random(1).randbytes(9_000), like_records(65_536), *several):
        stored = framed(raw, kind, linked, block_checksum, content_checksum)
        assert is_fast(stored)
        assert check_same(stored) == raw
        assert check_same(stored, len(raw)) == raw
        assert check_same(stored, len(raw) - 1) is None
        assert not is_fast(stored, len(raw) - 1)
    for raw in (b"", b"a", b"\0" * 300, like_records(65_537), like_records(700_000), bytes(PLENTY)):
        assert check_same(framed(raw, kind, linked, block_checksum, content_checksum)) == raw


def test_what_kafkas_clients_write() -> None:
    """Flags 0x60 are those of Kafka's Java clients and librdkafka."""
    raw = like_records(16_000)
    stored = frame_of(lz4.block.compress(raw, store_size=False))
    assert stored[4] == 0x60
    assert is_fast(stored)
    assert check_same(stored) == raw


def test_what_the_store_writes() -> None:
    """Some versions of cramjam add the size of the content, which the frame decoder needs to read."""
    raw = like_records(16_000)
    assert check_same(bytes(cramjam.lz4.compress(raw, level=0))) == raw


def strange_frames() -> Iterator[tuple[str, bytes]]:
    """Yield frames at the limits of the format, right and wrong."""
    raw = like_records(3_000)
    block = lz4.block.compress(raw, store_size=False)
    good = frame_of(block)
    skippable = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    yield "a size, then a block", frame_of(len(raw).to_bytes(4, "little") + block)
    yield "a size of the buffer, then a block", frame_of((1 << 16).to_bytes(4, "little") + block)
    yield "a larger size, then a block", frame_of((1 << 17).to_bytes(4, "little") + block)
    yield "a negative size, then a block", frame_of(b"\xff\xff\xff\xff" + block)
    yield "skippable frame first", skippable + good
    yield "skippable frame last", good + skippable
    yield "two frames", good + good
    yield "an empty frame first", frame_of(b"")[:11] + good
    yield "an empty frame last", good + frame_of(b"")[:11]
    yield "a byte after the frame", good + b"\0"
    yield "zeros after the frame", good + bytes(9)
    yield "no end mark", good[:-4]
    yield "half an end mark", good[:-2]
    yield "an empty frame", frame_of(b"")[:11]
    yield "two end marks", frame_of(b"")
    yield "an empty block, not compressed", frame_of(b"", size_bits=1 << 31)
    yield "a block of no bytes", frame_of(b"\0")
    yield "a block of no bytes, with more bytes", frame_of(b"\0\0\0\0")
    yield "not compressed", frame_of(raw, size_bits=1 << 31)
    yield "not compressed, of the largest size", frame_of(like_records(1 << 16), size_bits=1 << 31)
    yield "not compressed, larger", frame_of(like_records((1 << 16) + 1), size_bits=1 << 31)
    yield "larger than announced", frame_of(lz4.block.compress(like_records((1 << 16) + 1), store_size=False))
    yield "zeros larger than announced", frame_of(lz4.block.compress(bytes((1 << 16) + 1), store_size=False))
    yield "full and short blocks", frame_of_blocks([like_records(1 << 16), raw, raw[:1], like_records(1 << 16)])
    yield "a second block larger than announced", frame_of_blocks([raw, like_records((1 << 16) + 1)])
    yield "blocks that say that they are linked", frame_of_blocks([raw, raw], flags=0x40)
    yield "two blocks, one empty", frame_of_blocks([raw, b""])
    yield "two blocks and a checksum", frame_of_blocks([raw, raw], flags=0x64) + xxh32(raw + raw)
    yield "two blocks and a wrong checksum", frame_of_blocks([raw, raw], flags=0x64) + xxh32(raw)
    yield "a thousand blocks of one byte", frame_of_blocks([b"a"] * 1000)
    yield "the best ratio", frame_of(lz4.block.compress(bytes(1 << 16), store_size=False))
    yield "the best ratio of 4 MiB", frame_of(lz4.block.compress(bytes(PLENTY), store_size=False), kind=0x70)
    yield "a size of 2 GiB", good[:7] + b"\xff\xff\xff\x7f" + good[11:]
    yield "a size of 2 GiB, not compressed", good[:7] + b"\xff\xff\xff\xff" + good[11:]
    for flags in (0x00, 0x20, 0x61, 0x62, 0x64, 0x68, 0x70, 0x74, 0x80, 0xA0, 0xE0):
        yield f"flags {flags:#x}", frame_of(block, flags)
    for kind in (0x00, 0x30, 0x41, 0x48, 0x80, 0xC0, 0xF0):
        yield f"kind {kind:#x}", frame_of(block, kind=kind)
    yield "a wrong checksum of the header", good[:6] + bytes((good[6] ^ 1,)) + good[7:]
    for at in (0, 1):
        stored = framed(raw, 4, False, not at, bool(at))
        yield f"a wrong checksum {at}", stored[:-1] + bytes((stored[-1] ^ 1,))
        stored = framed(raw, 4, False, True, True)
        place = len(stored) - 12 * (1 - at) - at
        yield f"a wrong checksum {at} of two", stored[:place] + bytes((stored[place] ^ 1,)) + stored[place + 1 :]


@pytest.mark.parametrize("stored", [pytest.param(stored, id=name) for name, stored in strange_frames()])
def test_frames_at_the_limits(stored: bytes) -> None:
    """Both ways agree about every cut of such a frame, at every bound."""
    raw = check_same(stored)
    if raw:
        for limit_bytes in (0, 1, len(raw) - 1, len(raw), len(raw) + 1):
            check_same(stored, limit_bytes)
    for size in {*range(min(40, len(stored))), *range(max(0, len(stored) - 20), len(stored))}:
        check_same(stored[:size])


@given(st.binary(max_size=400), st.sampled_from(FLAGS), st.integers(1, 20), st.integers(0, 9_000))
@example(b"", FLAGS[0], 1, 0)
def test_any_records(part: bytes, flags: tuple[int, bool, bool, bool], times: int, limit_bytes: int) -> None:
    """Both ways return what was compressed, or refuse it, at any bound."""
    raw = part * times
    stored = framed(raw, *flags)
    assert check_same(stored) == raw
    assert check_same(stored, limit_bytes) == (raw if len(raw) <= limit_bytes else None)


@pytest.mark.parametrize("seed", seeds("lz4 frames"))
def test_mutated_frames(seed: int) -> None:
    """Both ways agree about frames with changed bytes, cut or extended, with and without checksums."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(1_500):
        raw = like_records(rng.choice((rng.randrange(1, 600), rng.randrange(65_530, 140_000))))
        stored = bytearray(framed(raw, *rng.choice(FLAGS), level=rng.choice((0, 9))))
        for _ in range(rng.randrange(1, 4)):
            stored[rng.randrange(7, len(stored))] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
        cut = rng.randrange(len(stored)) if not rng.randrange(8) else len(stored)
        data = bytes(stored[:cut]) + rng.choice((b"", b"", b"", bytes(4), b"\4\x22"))
        accepted += check_same(data, rng.choice((PLENTY, len(raw), len(raw) - 1, 100))) is not None
    assert accepted > 10
