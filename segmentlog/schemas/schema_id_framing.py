"""Format of the first bytes of a record, which name the schema that the record was written with.

magic       u8    0
schema id   u32   big-endian
indexes           Protobuf only: path of the message in its file, as zigzag varints: the count, then each index;
                  a single 0 means the first message of the file
payload
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from segmentlog.schemas.registry_errors import InvalidPayload

_HEAD: Final = struct.Struct(">BI")
HEAD_BYTES: Final = _HEAD.size
MAGIC: Final = 0
_VARINT_BYTES_MAX: Final = 10
_INDEXES_MAX: Final = 100


def encode_head(schema_id: int) -> bytes:
    return _HEAD.pack(MAGIC, schema_id)


def decode_head(data: bytes) -> int:
    """Return the id of the schema. Raises `InvalidPayload` for bytes that do not come from a serializer."""
    if len(data) < HEAD_BYTES:
        raise InvalidPayload(f"the value has {len(data)} bytes, too few to start with a schema id")
    magic, schema_id = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise InvalidPayload(f"the first byte is {magic}, not 0: the value does not start with a schema id")
    return int(schema_id)


def encode_indexes(indexes: Sequence[int]) -> bytes:
    if list(indexes) == [0]:
        return b"\0"
    return b"".join(_varint(2 * number) for number in (len(indexes), *indexes))


def decode_indexes(data: bytes, position: int = HEAD_BYTES) -> tuple[list[int], int]:
    """Return (indexes, position of the payload). Raises `InvalidPayload`."""
    count, position = _read_varint(data, position)
    if count == 0:
        return [0], position
    if not 0 < count <= _INDEXES_MAX:
        raise InvalidPayload(f"the value has {count} message indexes; at most {_INDEXES_MAX} are possible")
    indexes = []
    for _ in range(count):
        index, position = _read_varint(data, position)
        indexes.append(index)
    return indexes, position


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    number = 0
    for shift in range(_VARINT_BYTES_MAX):
        if position >= len(data):
            raise InvalidPayload("the value ends within its message indexes")
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), position
    raise InvalidPayload(f"a message index has more than {_VARINT_BYTES_MAX} bytes")
