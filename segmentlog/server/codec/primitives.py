"""Errors and limits of the compiled codecs, and the functions that they call for rare or long values.

    string, bytes     i16 or i32 size, -1 for null; flexible versions: uvarint of the size plus 1, 0 for null
    array             i32 count, -1 for null; flexible versions: uvarint of the count plus 1, 0 for null
    uvarint           seven bits a byte, the lowest first; the top bit says that another byte follows
    tagged fields     flexible versions, at the end of each struct: uvarint of their count, then of each field
                      uvarint of its tag, uvarint of its size in bytes, and these bytes

A compiled decoder checks the count of an array before it reads the elements. It does not check whether a string or a
bytes field is complete: positions only grow, so one check at the end of the message is enough. A read behind the end
raises, and `compiler` turns that into `MalformedMessage` in one place, at no cost to correct messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from struct import error as struct_error
from typing import Any, Final, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
Records: TypeAlias = bytes | bytearray | memoryview | Sequence[bytes | bytearray | memoryview] | None
"""What a field of records takes: a buffer, several that follow each other, or null. Decoded: memoryview or None."""

BUFFER_TYPES: Final = (memoryview, bytes, bytearray)
# The likeliest first.

ZERO_UUID: Final = bytes(16)

STRING_MAX_BYTES: Final = 2**15 - 1
"""Of a string in any version: Kafka and its clients take none that is longer."""

_SIZE_MAX: Final = 2**31 - 1

_pack_BB: Final = Struct("BB").pack
_pack_BBB: Final = Struct("BBB").pack
_pack_h: Final = Struct(">h").pack


class MalformedMessage(ValueError):
    """Bytes that are no message of this kind and version."""


class UnknownVersion(ValueError):
    """A version of a message that the codec does not have."""


class NotInVersion(ValueError):
    """A message cannot be encoded: it says what this version of it has no words for."""


TRUNCATED: Final = (struct_error, IndexError, UnicodeDecodeError)
"""What reading behind the end of the bytes raises, or a string of bytes that are no UTF-8."""

ELEMENTS_MAX: Final = 500_000
"""Elements of all arrays of a request together: what a byte each could make would take a hundred times its memory."""

ARRAY_MAX: Final = 1_000_000
"""Elements of one array of a response. Clients and servers of Kafka refuse more since 4.4.0."""

TAGS_MAX: Final = 10_000
"""Tagged fields of one struct. Clients and servers of Kafka refuse more since 4.4.0."""

SHORT: Final = 128
"""Below it a size is one byte as an uvarint, and there is a precompiled reader for it."""

_READERS: Final[tuple[Callable[..., tuple[Any, ...]], ...]] = tuple(
    Struct(f"{size}s").unpack_from for size in range(SHORT)
)

TAKE: Final = _READERS
"""By size: reads so many bytes. Twice as fast as a slice of a memoryview that is then decoded."""

TAKE_COMPACT: Final = (_READERS[0], *_READERS[: SHORT - 1])
"""The same by size plus 1, as flexible versions have it."""

UVARINTS: Final = tuple(bytes((value,)) for value in range(SHORT))


def truncated() -> MalformedMessage:
    """What to raise when a decoder has gone too far."""
    return MalformedMessage("the message is cut short")


def malformed(problem: Exception, name: str, version: int) -> MalformedMessage:
    """What to raise for one of `TRUNCATED`."""
    return MalformedMessage(f"{name} of version {version}: {problem}")


def unknown_version(name: str, version: int) -> UnknownVersion:
    """What to raise for a version that a message does not have, or not yet."""
    return UnknownVersion(f"{name} of version {version}")


def wrong_count(field: str, count: int) -> MalformedMessage:
    """What to raise for an array that is null and must not be, or has more elements than there is room for."""
    return MalformedMessage(f"{field} of {count} elements")


def wrong_size(field: str) -> MalformedMessage:
    """What to raise for a field whose bytes are more or fewer than it says."""
    return MalformedMessage(f"{field} is not as long as it says")


def null_value(field: str) -> NotInVersion:
    """What to raise for None in a field that may not be null in this version."""
    return NotInVersion(f"{field} is None, which this version cannot say")


def not_in_version(field: str) -> NotInVersion:
    """What to raise for a value of a field that this version does not have."""
    return NotInVersion(f"this version has no {field}")


def long_uvarint(data: memoryview, at: int, first: int) -> tuple[int, int]:
    """(value, position behind it) of an uvarint whose first byte says that more follow, the next of them at ``at``."""
    second = data[at]
    if second < 0x80:  # what most are, and those below
        return first & 0x7F | second << 7, at + 1
    third = data[at + 1]
    if third < 0x80:
        return first & 0x7F | (second & 0x7F) << 7 | third << 14, at + 2
    value = first & 0x7F
    for shift in (7, 14, 21, 28):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > _SIZE_MAX:
                break
            return value, at
    raise MalformedMessage("a size or count beyond 31 bits")


def long_tag_count(data: memoryview, at: int, first: int) -> tuple[int, int]:
    """Return (count, position behind it) of tagged fields, as `long_uvarint`; `MalformedMessage` for too many."""
    count, at = long_uvarint(data, at, first)
    if count > TAGS_MAX:
        raise MalformedMessage(f"{count} tagged fields, where {TAGS_MAX} are the most")
    return count, at


def uvarint(value: int) -> bytes:
    """The bytes of an uvarint."""
    if value < 1 << 7:
        return UVARINTS[value]
    if value < 1 << 14:
        return _pack_BB(value & 0x7F | 0x80, value >> 7)
    if value < 1 << 21:
        return _pack_BBB(value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14)
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def long_bytes(data: memoryview, at: int, size: int) -> tuple[bytes, int]:
    """(bytes, position behind them) for sizes that `TAKE` does not have: longer ones, and null."""
    if size < 0:
        raise MalformedMessage("null where null may not be")
    return bytes(data[at : at + size]), at + size


def long_nullable_bytes(data: memoryview, at: int, size: int) -> tuple[bytes | None, int]:
    """The same where null may be."""
    return (None, at) if size < 0 else long_bytes(data, at, size)


def long_string(data: memoryview, at: int, size: int) -> tuple[str, int]:
    """The same for a string."""
    value, at = long_bytes(data, at, size)
    return value.decode(), at


def long_nullable_string(data: memoryview, at: int, size: int) -> tuple[str | None, int]:
    """The same for a string where null may be."""
    return (None, at) if size < 0 else long_string(data, at, size)


def long_compact_bytes(data: memoryview, at: int, first: int) -> tuple[bytes, int]:
    """The same for `TAKE_COMPACT`, with the first byte of the size plus 1."""
    size, at = long_uvarint(data, at, first) if first >= SHORT else (first, at)
    return long_bytes(data, at, size - 1)


def long_compact_nullable_bytes(data: memoryview, at: int, first: int) -> tuple[bytes | None, int]:
    """The same where null may be."""
    return long_compact_bytes(data, at, first) if first else (None, at)


def long_compact_string(data: memoryview, at: int, first: int) -> tuple[str, int]:
    """The same for a string: one as long as versions can say that are not flexible, in which others may be told it."""
    value, at = long_compact_bytes(data, at, first)
    if len(value) > STRING_MAX_BYTES:
        raise MalformedMessage(f"a string of {len(value)} bytes, where {STRING_MAX_BYTES} is the most")
    return value.decode(), at


def long_compact_nullable_string(data: memoryview, at: int, first: int) -> tuple[str | None, int]:
    """The same for a string where null may be."""
    return long_compact_string(data, at, first) if first else (None, at)


def write_string(value: str | None) -> bytes:
    """A string with its size before it."""
    if value is None:
        return _pack_h(-1)
    encoded = value.encode()
    return _pack_h(len(encoded)) + encoded


def next_tag(data: memoryview, at: int) -> tuple[int, int, int]:
    """(tag, position of its bytes, position behind them)."""
    tag, size = data[at], data[at + 1]
    at += 2
    if tag >= SHORT or size >= SHORT:
        tag, at = data[at - 2], at - 1
        if tag >= SHORT:
            tag, at = long_uvarint(data, at, tag)
        size = data[at]
        at += 1
        if size >= SHORT:
            size, at = long_uvarint(data, at, size)
    if at + size > len(data):
        raise truncated()
    return tag, at, at + size


def skip_tags(data: memoryview, at: int, first: int) -> int:
    """The position behind tagged fields of which none is known; ``first`` is the first byte of their count."""
    count, at = long_tag_count(data, at, first) if first >= SHORT else (first, at)
    for _ in range(count):
        at = next_tag(data, at)[2]
    return at


def tagged_fields(fields: list[tuple[int, bytes]]) -> bytes:
    """The bytes of tagged fields, which come by ascending tag."""
    parts = [uvarint(len(fields))]
    for tag, encoded in fields:
        parts += (uvarint(tag), uvarint(len(encoded)), encoded)
    return b"".join(parts)
