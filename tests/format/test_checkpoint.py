"""A checkpoint is read from the newest valid slot; an invalid slot is never trusted."""

from __future__ import annotations

import struct

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.format.checkpoint import (
    SLOT_SIZE,
    Checkpoint,
    MalformedCheckpoint,
    decode_checkpoint,
    decode_slot,
    encode_slot,
)
from segmentlog.records import EpochStart, LostRange

numbers = st.integers(0, 2**63 - 1)
lost_ranges = st.builds(LostRange, numbers, numbers, numbers, st.text(max_size=20), numbers)
checkpoints = st.builds(
    Checkpoint,
    recovery_offset=numbers,
    recovery_segment=numbers,
    recovery_position=numbers,
    log_start_offset=numbers,
    offset_ceiling=numbers,
    clean=st.booleans(),
    boot_id=st.text(max_size=40),
    epochs=st.lists(st.builds(EpochStart, numbers, numbers), min_size=1, max_size=4).map(tuple),
    lost_ranges=st.lists(lost_ranges, max_size=3).map(tuple),
).map(
    lambda one: msgspec.structs.replace(
        one,
        recovery_offset=max(one.recovery_offset, one.recovery_segment),
        recovery_segment=min(one.recovery_offset, one.recovery_segment),
    )
)
OLD = Checkpoint(recovery_offset=5, offset_ceiling=1000, boot_id="boot")
NEW = Checkpoint(recovery_offset=7, offset_ceiling=2000, boot_id="boot")


def both(first: bytes, second: bytes, slot_size: int = SLOT_SIZE) -> bytes:
    """Return a checkpoint file of these two slots."""
    return first.ljust(slot_size, b"\0") + second.ljust(slot_size, b"\0")


def forge(body: bytes) -> bytes:
    """Return a slot of any body, with the checksum that belongs to it."""
    prefix = struct.pack("<4sIQ", b"SLC\x01", len(body), 1)
    return prefix + struct.pack("<Q", xxhash.xxh3_64_intdigest(prefix + body)) + body


@given(checkpoint=checkpoints, sequence=st.integers(0, 2**64 - 1), padding=st.integers(0, 300))
def test_a_slot_comes_back(checkpoint, sequence, padding):
    """Every field and the sequence number are decoded, with any spare room in the slot."""
    assert decode_slot(encode_slot(checkpoint, sequence) + bytes(padding)) == (sequence, checkpoint)


@given(first=checkpoints, second=checkpoints, sequence=st.integers(0, 2**40), swap=st.booleans())
def test_the_newer_slot_counts(first, second, sequence, swap):
    """The valid slot with the higher sequence number is the checkpoint, in either order."""
    old, new = encode_slot(first, sequence), encode_slot(second, sequence + 1)
    data = both(new, old, 8192) if swap else both(old, new, 8192)
    assert decode_checkpoint(data) == (sequence + 1, second, False)


def test_a_segment_behind_the_recovery_point_is_no_checkpoint():
    """The recovery offset is in the recovery segment, or begins it."""
    assert decode_slot(encode_slot(Checkpoint(recovery_offset=7, recovery_segment=7), 1))
    with pytest.raises(MalformedCheckpoint, match="recovery offset 7 is before the recovery segment 8"):
        decode_slot(encode_slot(Checkpoint(recovery_offset=7, recovery_segment=8), 1))


def test_a_flip_of_any_byte_of_a_slot_is_detected():
    """Whichever byte of a slot changes, it is malformed: no field of it is ever believed."""
    slot = bytearray(encode_slot(NEW, 9))
    for position in range(len(slot)):
        for bits in (0x01, 0x80, 0xFF):
            slot[position] ^= bits
            with pytest.raises(MalformedCheckpoint):
                decode_slot(bytes(slot))
            slot[position] ^= bits


def test_a_slot_cut_short_anywhere_is_detected():
    """A slot that was not written to its last byte is malformed, with or without zeros after the cut."""
    slot = encode_slot(NEW, 9)
    for size in range(len(slot)):
        with pytest.raises(MalformedCheckpoint):
            decode_slot(slot[:size])
        if slot[size:].strip(b"\0"):
            with pytest.raises(MalformedCheckpoint):
                decode_slot(slot[:size].ljust(len(slot), b"\0"))


@pytest.mark.parametrize("damage", [bytes(SLOT_SIZE), b"\xff" * SLOT_SIZE, encode_slot(NEW, 9)[:40]])
@pytest.mark.parametrize("side", [0, 1])
def test_damage_to_one_slot_leaves_the_other_and_is_told(damage, side):
    """If one slot is damaged or blank, the other one counts, and the damage is reported: it may hide a newer one."""
    slots = [encode_slot(OLD, 8), encode_slot(OLD, 8)]
    slots[side] = damage
    assert decode_checkpoint(both(*slots)) == (8, OLD, True)


@pytest.mark.parametrize("data", [b"", b"\0", bytes(2 * SLOT_SIZE), b"\xff" * 100])
def test_a_file_without_a_valid_slot_is_told(data):
    """If both slots are invalid, the file is damaged and has no checkpoint."""
    assert decode_checkpoint(data) == (0, None, True)


@pytest.mark.parametrize("size", [0, 10, 100, SLOT_SIZE - 1, SLOT_SIZE, SLOT_SIZE + 1, 2 * SLOT_SIZE - 1])
def test_a_file_that_lost_its_end_never_passes_for_whole(size):
    """A checkpoint file cut short never looks undamaged: the slot that was cut off may have been the newer one."""
    data = both(encode_slot(OLD, 8), encode_slot(NEW, 9))
    _, checkpoint, damaged = decode_checkpoint(data[:size])
    assert damaged
    assert checkpoint in (None, OLD)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x91" * 5000,
        msgspec.msgpack.encode(NEW)[:-1],
        msgspec.msgpack.encode(NEW) + b"\xc0",
        msgspec.msgpack.encode(NEW).replace(b"boot", b"bo\xfft"),
        msgspec.msgpack.encode(NEW).replace(b"\xa4boot\x91", b"\xa4boot\xdd\xff\xff\xff\xff\x91"),
        msgspec.msgpack.encode(msgspec.structs.replace(NEW, epochs=())),
        msgspec.msgpack.encode(["x"] * 9),
        msgspec.msgpack.encode({"recovery_offset": 1}),
    ],
    ids=range(10),
)
def test_a_body_that_is_no_checkpoint_is_malformed(body):
    """A slot with a right checksum and an invalid body raises MalformedCheckpoint, and no other error."""
    with pytest.raises(MalformedCheckpoint):
        decode_slot(forge(body))


@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_no_checkpoint(data):
    """Arbitrary bytes are a malformed slot; with a forged checksum they are a checkpoint or a malformed slot."""
    with pytest.raises(MalformedCheckpoint):
        decode_slot(data)
    try:
        _, checkpoint = decode_slot(forge(data))
    except MalformedCheckpoint:
        return
    assert checkpoint.epochs


@given(checkpoint=checkpoints, at=st.integers(0, 2**16), byte=st.integers(0, 255))
def test_a_mutated_body_is_a_checkpoint_or_malformed(checkpoint, at, byte):
    """One changed byte in a body with a matching checksum gives a checkpoint or MalformedCheckpoint."""
    body = bytearray(msgspec.msgpack.encode(checkpoint))
    body[at % len(body)] = byte
    try:
        _, found = decode_slot(forge(bytes(body)))
    except MalformedCheckpoint:
        return
    assert isinstance(found, Checkpoint)


def test_the_epoch_of_a_checkpoint_is_the_last_one():
    """The current epoch is the one that began last."""
    assert Checkpoint(epochs=(EpochStart(0, 0), EpochStart(4, 100))).epoch == 4
