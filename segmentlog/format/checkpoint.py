"""The checkpoint of a partition: what must be on disk before an offset is handed out.

    magic          4s    "SLC" and the format version, 1
    body_size      u32
    sequence       u64   of two slots the valid one with the higher sequence counts
    checksum       u64   XXH3-64 of the 16 bytes above and the body
    -------------- 24 bytes, then the body: MessagePack of `Checkpoint`, fields in order

The file holds two such slots, each ``SLOT_SIZE`` bytes or a multiple of it; a write goes
to the slot that does not hold the newest one, and is fsynced before it counts. A write
cut short by a crash leaves the other slot.
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
    """How far compaction has come.

    cleaned_offset  every key below it has at most ``keep_last`` records below it
    keep_last       `compaction.keep.last` of that pass
    due_ms          wall clock from when on a pass may drop more without new records; 0 for never
    begun_offset    a pass has begun to remove records below it
    """

    cleaned_offset: int = 0
    keep_last: int = 1
    due_ms: int = 0
    begun_offset: int = 0


RESTORED: Final = "restored"
"""The boot id in the checkpoint of a log that was restored from an object store and not recovered since."""


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """What is durable about a partition.

    recovery_offset      everything below it is fsynced; recovery scans from here
    recovery_segment     base offset of the segment which that offset lies in, or starts
    recovery_position    byte in that segment
    log_start_offset     records below it were deleted
    offset_ceiling       no offset at or above it was ever handed out
    clean                nothing was appended since: the log ends at recovery_offset
    boot_id              of the machine when it was written; `RESTORED` in a log that a restore made
    epochs, lost_ranges  histories, ascending
    compacted            how far compaction has come; a checkpoint without it is of a log that never was
    has_producers        a batch with a producer id may be in the log
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

    @property
    def epoch(self) -> int:
        """The current partition epoch."""
        return self.epochs[-1].epoch

    @property
    def is_restored(self) -> bool:
        """Whether the log was restored from an object store, and no process has recovered it since."""
        return self.boot_id == RESTORED


def point_at(base: int) -> dict[str, int]:
    """The fields of a recovery point at the start of a segment."""
    return {"recovery_offset": base, "recovery_segment": base, "recovery_position": 0}


class MalformedCheckpoint(ValueError):
    """A slot that holds no checkpoint: never written, cut short, or damaged."""


_decoder = msgspec.msgpack.Decoder(Checkpoint)


def encode_slot(checkpoint: Checkpoint, sequence: int) -> bytes:
    """The bytes of one slot, without padding."""
    body = msgspec.msgpack.encode(checkpoint)
    prefix = _PREFIX.pack(MAGIC, len(body), sequence)
    return prefix + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(prefix + body)) + body


def slot_size(slot: bytes) -> int:
    """Bytes of a valid slot that count: what is behind them is padding."""
    return _BODY_POSITION + int(_PREFIX.unpack_from(slot)[1])


def decode_slot(slot: bytes) -> tuple[int, Checkpoint]:
    """(sequence, checkpoint). Raises `MalformedCheckpoint`."""
    if len(slot) < _BODY_POSITION:
        raise MalformedCheckpoint(f"{len(slot)} bytes are no slot")
    magic, body_size, sequence = _PREFIX.unpack_from(slot)
    if magic != MAGIC:
        raise MalformedCheckpoint(f"magic {magic!r}")
    body = slot[_BODY_POSITION : _BODY_POSITION + body_size]
    (checksum,) = _CHECKSUM.unpack_from(slot, _PREFIX.size)
    if len(body) != body_size or xxhash.xxh3_64_intdigest(slot[: _PREFIX.size] + body) != checksum:
        raise MalformedCheckpoint("checksum does not match")
    try:
        checkpoint = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedCheckpoint(str(error)) from None
    if not checkpoint.epochs:
        raise MalformedCheckpoint("no epoch")
    if wrong := [number for number in _numbers_of(checkpoint) if not 0 <= number <= _NUMBER_MAX]:
        raise MalformedCheckpoint(f"an offset, a position or an epoch of {wrong[0]}")
    if checkpoint.recovery_segment > checkpoint.recovery_offset:
        where = f"offset {checkpoint.recovery_offset}, which lies before it"
        raise MalformedCheckpoint(f"segment {checkpoint.recovery_segment} to recover from, at {where}")
    return sequence, checkpoint


def _numbers_of(checkpoint: Checkpoint) -> Iterator[int]:
    """Those that a log computes with: none may be negative, or too large for the state page and for headers."""
    yield from (checkpoint.recovery_offset, checkpoint.recovery_segment, checkpoint.recovery_position)
    yield from (checkpoint.log_start_offset, checkpoint.offset_ceiling)
    yield from (checkpoint.compacted.cleaned_offset, checkpoint.compacted.due_ms)
    yield checkpoint.compacted.begun_offset
    for entry in checkpoint.epochs:
        yield from (entry.epoch, entry.start_offset)
    for lost in checkpoint.lost_ranges:
        yield from (lost.base_offset, lost.end_offset, lost.epoch)


def decode_checkpoint(data: bytes) -> tuple[int, Checkpoint | None, bool]:
    """(sequence, checkpoint, damaged) of a checkpoint file's bytes; None when neither slot is valid.

    ``damaged`` says that one slot is not valid. Whether that was the newer one cannot be
    told, so the ceiling of the slot that is left may be too low. A blank slot is damaged
    too: the file is made with both slots filled, so zeros are a write that was lost.
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
