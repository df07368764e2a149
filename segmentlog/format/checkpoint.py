"""The checkpoint file of a partition: the state that must be durable before an offset is assigned.

    magic          4s    "SLC" and the format version, 1
    body_size      u32
    sequence       u64   of two valid slots, the slot with the higher sequence is current
    checksum       u64   XXH3-64 of the 16 bytes above and the body
    -------------- 24 bytes, then the body: MessagePack of `Checkpoint`, fields in order

The file has two such slots, each of ``SLOT_SIZE`` bytes or a multiple of it. A write replaces
the older slot, and is fsynced before any process relies on it. If a crash interrupts a write,
the other slot is still valid.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import msgspec
import xxhash

from segmentlog.records import EpochStart, LostRange

MAGIC: Final = b"SLC\x01"
SLOT_SIZE: Final = 4096

_NUMBER_MAX: Final = 2**63 - 1

_PREFIX = struct.Struct("<4sIQ")
_CHECKSUM = struct.Struct("<Q")
_BODY_POSITION: Final = _PREFIX.size + _CHECKSUM.size


class Compacted(msgspec.Struct, frozen=True, array_like=True):
    """Progress of compaction.

    cleaned_offset  every key below it has at most ``keep_last`` records below it
    keep_last       `compaction.keep.last` of that pass
    due_ms          wall clock from which a pass can remove more without new records; 0 for never
    begun_offset    a pass has started to remove records below it
    """

    cleaned_offset: int = 0
    keep_last: int = 1
    due_ms: int = 0
    begun_offset: int = 0


class Replicated(msgspec.Struct, frozen=True, array_like=True):
    """Marks a log whose epochs and lost ranges come from its leaders. Its own recoveries open no gap."""

    truncate_to: int = -1
    """The offset of a truncation that has begun: every record from this offset on must be removed. -1 for none."""
    is_incomplete: bool = False
    """Whether a recovery found that synced records or ranges are missing. The log must then be copied again."""


RESTORED: Final = "restored"
"""The boot id in the checkpoint of a log that was restored from an object store and has not been recovered yet."""


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """The durable state of a partition.

    recovery_offset      all records below it are fsynced; recovery scans from it
    recovery_segment     base offset of the segment that contains or begins with that offset
    recovery_position    byte in that segment
    log_start_offset     records below it were deleted
    offset_ceiling       no offset at or above it was ever assigned
    clean                no append since: the log ends at recovery_offset
    boot_id              boot id of the machine that wrote it; `RESTORED` in a log that a restore created
    epochs, lost_ranges  histories, ascending
    compacted            progress of compaction; missing in the checkpoint of a log that was never compacted
    has_producers        the log may contain a batch with a producer id
    replicated           set while the log is replicated, missing in any other checkpoint
    """

    recovery_offset: int = 0
    recovery_segment: int = 0
    recovery_position: int = 0
    log_start_offset: int = 0
    offset_ceiling: int = 0
    clean: bool = True
    boot_id: str = ""
    epochs: tuple[EpochStart, ...] = (EpochStart(0, 0),)
    lost_ranges: tuple[LostRange, ...] = ()
    compacted: Compacted = Compacted()
    has_producers: bool = False
    replicated: Replicated | None = None

    @property
    def epoch(self) -> int:
        """The current partition epoch."""
        return self.epochs[-1].epoch

    @property
    def is_restored(self) -> bool:
        """Whether the log was restored from an object store, and no process has recovered it since."""
        return self.boot_id == RESTORED


def recovery_point_at(base: int) -> dict[str, int]:
    """Return the fields of a recovery point at the start of the segment ``base``."""
    return {"recovery_offset": base, "recovery_segment": base, "recovery_position": 0}


class MalformedCheckpoint(ValueError):
    """The bytes of a slot are not a valid checkpoint: never written, incomplete, or damaged."""


_decoder = msgspec.msgpack.Decoder(Checkpoint)


def encode_slot(checkpoint: Checkpoint, sequence: int) -> bytes:
    """Return the bytes of a slot, without padding."""
    fields = msgspec.structs.astuple(checkpoint)
    # Without its last field, a checkpoint has the bytes that earlier versions wrote.
    body = msgspec.msgpack.encode(fields if checkpoint.replicated is not None else fields[:-1])
    prefix = _PREFIX.pack(MAGIC, len(body), sequence)
    return prefix + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(prefix + body)) + body


def slot_size(slot: bytes) -> int:
    """Return the bytes that a valid slot uses; the rest is padding."""
    return _BODY_POSITION + int(_PREFIX.unpack_from(slot)[1])


def decode_slot(slot: bytes) -> tuple[int, Checkpoint]:
    """Return (sequence, checkpoint). Raise `MalformedCheckpoint`."""
    if len(slot) < _BODY_POSITION:
        raise MalformedCheckpoint(f"a slot of {len(slot)} bytes, expected at least {_BODY_POSITION}")
    magic, body_size, sequence = _PREFIX.unpack_from(slot)
    if magic != MAGIC:
        raise MalformedCheckpoint(f"magic {magic!r}, expected {MAGIC!r}")
    body = slot[_BODY_POSITION : _BODY_POSITION + body_size]
    (checksum,) = _CHECKSUM.unpack_from(slot, _PREFIX.size)
    if len(body) != body_size or xxhash.xxh3_64_intdigest(slot[: _PREFIX.size] + body) != checksum:
        raise MalformedCheckpoint("the checksum does not match")
    try:
        checkpoint = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedCheckpoint(str(error)) from None
    if not checkpoint.epochs:
        raise MalformedCheckpoint("the list of epochs is empty")
    if wrong := [number for number in _numbers_of(checkpoint) if not 0 <= number <= _NUMBER_MAX]:
        raise MalformedCheckpoint(f"{wrong[0]} is not a valid offset, position or epoch")
    if checkpoint.recovery_segment > checkpoint.recovery_offset:
        raise MalformedCheckpoint(
            f"recovery offset {checkpoint.recovery_offset} is before the recovery segment {checkpoint.recovery_segment}"
        )
    return sequence, checkpoint


def _numbers_of(checkpoint: Checkpoint) -> Iterator[int]:
    """Yield the numbers that must not be negative, or too large for the state page and for headers."""
    yield from (checkpoint.recovery_offset, checkpoint.recovery_segment, checkpoint.recovery_position)
    yield from (checkpoint.log_start_offset, checkpoint.offset_ceiling)
    yield from (checkpoint.compacted.cleaned_offset, checkpoint.compacted.due_ms)
    yield checkpoint.compacted.begun_offset
    for entry in checkpoint.epochs:
        yield from (entry.epoch, entry.start_offset)
    for lost in checkpoint.lost_ranges:
        yield from (lost.base_offset, lost.end_offset, lost.epoch)


def decode_checkpoint(data: bytes) -> tuple[int, Checkpoint | None, bool]:
    """Return (sequence, checkpoint, damaged) of a checkpoint file; the checkpoint is None if no slot is valid.

    ``damaged`` is true if a slot is not valid. That slot may have been the newer, so the offset ceiling of
    the valid slot may be too low. A blank slot counts as damaged: the file is created with both slots
    filled, so zeros are a lost write.
    """
    half = len(data) // 2
    newest: tuple[int, Checkpoint | None] = (0, None)
    damaged = False
    for slot in (data[:half], data[half:]):
        try:
            sequence, checkpoint = decode_slot(slot)
        except MalformedCheckpoint:
            damaged = True
            continue
        if newest[1] is None or sequence > newest[0]:
            newest = sequence, checkpoint
    return (*newest, damaged)
