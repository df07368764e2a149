"""Errors and limits of the compiled codecs, and the functions that a codec calls for rare or long values.

    string, bytes     i16 or i32 size, -1 for null; flexible versions: uvarint of the size plus 1, 0 for null
    array             i32 count, -1 for null; flexible versions: uvarint of the count plus 1, 0 for null
    uvarint           seven bits a byte, the lowest first; a set top bit means that another byte follows
    tagged fields     flexible versions, at the end of each struct: uvarint of their count, then of each field
                      uvarint of its tag, uvarint of its size in bytes, and these bytes

A compiled decoder checks the count of an array before it reads the elements. It does not check whether each string or
bytes field is complete: positions only grow, so one check at the end of the message is enough. A read after the end
raises an error, which `compiler` converts to `MalformedMessage` in one place. Valid messages pay nothing for this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from struct import error as struct_error
from typing import Any, Final, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
Records: TypeAlias = bytes | bytearray | memoryview | Sequence[bytes | bytearray | memoryview] | None
"""Value of a field of records: a buffer, a sequence of buffers, or null. A decoder returns memoryview or None."""

BUFFER_TYPES: Final = (memoryview, bytes, bytearray)
# The most frequent first.

ZERO_UUID: Final = bytes(16)

STRING_MAX_BYTES: Final = 2**15 - 1
"""Limit of a string in all versions: Kafka and its clients accept no longer strings."""

_SIZE_MAX: Final = 2**31 - 1

_pack_BB: Final = Struct("BB").pack
_pack_BBB: Final = Struct("BBB").pack
_pack_h: Final = Struct(">h").pack


class MalformedMessage(ValueError):
    """The bytes are not a message of this kind and version."""


class UnsupportedVersion(ValueError):
    """The codec does not support this version of the message."""


class NotInVersion(ValueError):
    """The message cannot be encoded: it has a value for which this version has no field."""


TRUNCATED: Final = (struct_error, IndexError, UnicodeDecodeError)
"""Raised when a decoder reads after the end of the bytes, or a string is not UTF-8."""

ELEMENTS_MAX: Final = 500_000
"""Maximum elements of all arrays of a request together. One byte of the request may become a hundred in memory."""

ARRAY_MAX: Final = 1_000_000
"""Maximum elements of one array of a response. Kafka's clients and servers have this limit since 4.4.0."""

TAGS_MAX: Final = 10_000
"""Maximum tagged fields of one struct. Kafka's clients and servers have this limit since 4.4.0."""

SHORT: Final = 128
"""Sizes below this limit are one byte as a uvarint, and have a precompiled reader."""

_READERS: Final[tuple[Callable[..., tuple[Any, ...]], ...]] = tuple(
    Struct(f"{size}s").unpack_from for size in range(SHORT)
)

TAKE: Final = _READERS
"""Reader of N bytes at index N. Twice as fast as decoding a slice of a memoryview."""

TAKE_COMPACT: Final = (_READERS[0], *_READERS[: SHORT - 1])
"""Readers of N bytes at index N + 1: flexible versions store the size plus 1."""

UVARINTS: Final = tuple(bytes((value,)) for value in range(SHORT))


def truncated() -> MalformedMessage:
    """Return the error for a decoder that has read after the end."""
    return MalformedMessage("the message is truncated")


def malformed(problem: Exception, name: str, version: int) -> MalformedMessage:
    """Return the error for an exception of `TRUNCATED`."""
    return MalformedMessage(f"{name} of version {version}: {problem}")


def unknown_version(name: str, version: int) -> UnsupportedVersion:
    """Return the error for a version that the codec does not support."""
    return UnsupportedVersion(f"{name} of version {version} is not supported")


def wrong_count(field: str, count: int) -> MalformedMessage:
    """Return the error for an array that must not be null, or whose elements would not fit into the message."""
    return MalformedMessage(f"{field} has an invalid count of {count} elements")


def wrong_size(field: str) -> MalformedMessage:
    """Return the error for a field whose content is longer or shorter than its size."""
    return MalformedMessage(f"the size of {field} does not match its content")


def null_value(field: str) -> NotInVersion:
    """Return the error for None in a field that must not be null in this version."""
    return NotInVersion(f"{field} is None, but cannot be null in this version")


def not_in_version(field: str) -> NotInVersion:
    """Return the error for a value in a field that this version does not have."""
    return NotInVersion(f"{field} has a value, but this version has no such field")


def long_uvarint(data: memoryview, at: int, first: int) -> tuple[int, int]:
    """Read a uvarint of several bytes: ``first``, and those from ``at`` on. Return (value, position after it)."""
    second = data[at]
    if second < 0x80:  # the usual case, with three bytes below
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
    raise MalformedMessage("a size or count has more than 31 bits")


def long_tag_count(data: memoryview, at: int, first: int) -> tuple[int, int]:
    """Read a long count of tagged fields. Return (count, position after it). Raise `MalformedMessage` for too many."""
    count, at = long_uvarint(data, at, first)
    if count > TAGS_MAX:
        raise MalformedMessage(f"{count} tagged fields; at most {TAGS_MAX} are allowed")
    return count, at


def uvarint(value: int) -> bytes:
    """Return the bytes of a uvarint."""
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
    """Read bytes that are too long for `TAKE`; null is an error. Return (bytes, position after them)."""
    if size < 0:
        raise MalformedMessage("a field that must not be null is null")
    return bytes(data[at : at + size]), at + size


def long_nullable_bytes(data: memoryview, at: int, size: int) -> tuple[bytes | None, int]:
    """Read bytes that may be null, like `long_bytes`."""
    return (None, at) if size < 0 else long_bytes(data, at, size)


def long_string(data: memoryview, at: int, size: int) -> tuple[str, int]:
    """Read a string, like `long_bytes`."""
    value, at = long_bytes(data, at, size)
    return value.decode(), at


def long_nullable_string(data: memoryview, at: int, size: int) -> tuple[str | None, int]:
    """Read a string that may be null, like `long_bytes`."""
    return (None, at) if size < 0 else long_string(data, at, size)


def long_compact_bytes(data: memoryview, at: int, first: int) -> tuple[bytes, int]:
    """Read compact bytes, like `long_bytes`. ``first`` is the first byte of the size plus 1."""
    size, at = long_uvarint(data, at, first) if first >= SHORT else (first, at)
    return long_bytes(data, at, size - 1)


def long_compact_nullable_bytes(data: memoryview, at: int, first: int) -> tuple[bytes | None, int]:
    """Read compact bytes that may be null, like `long_compact_bytes`."""
    return long_compact_bytes(data, at, first) if first else (None, at)


def long_compact_string(data: memoryview, at: int, first: int) -> tuple[str, int]:
    """Read a compact string. Its length limit is that of older versions, because the server may send the string to a
    client of an older version.
    """
    value, at = long_compact_bytes(data, at, first)
    if len(value) > STRING_MAX_BYTES:
        raise MalformedMessage(f"a string has {len(value)} bytes; at most {STRING_MAX_BYTES} are allowed")
    return value.decode(), at


def long_compact_nullable_string(data: memoryview, at: int, first: int) -> tuple[str | None, int]:
    """Read a compact string that may be null, like `long_compact_string`."""
    return long_compact_string(data, at, first) if first else (None, at)


def write_string(value: str | None) -> bytes:
    """Return the bytes of a string with its size."""
    if value is None:
        return _pack_h(-1)
    encoded = value.encode()
    return _pack_h(len(encoded)) + encoded


def next_tag(data: memoryview, at: int) -> tuple[int, int, int]:
    """Read the head of a tagged field. Return (tag, position of its content, position after its content)."""
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
    """Skip all tagged fields, and return the position after them. ``first`` is the first byte of their count."""
    count, at = long_tag_count(data, at, first) if first >= SHORT else (first, at)
    for _ in range(count):
        at = next_tag(data, at)[2]
    return at


def tagged_fields(fields: list[tuple[int, bytes]]) -> bytes:
    """Return the bytes of tagged fields, which must be in ascending order of tags."""
    parts = [uvarint(len(fields))]
    for tag, encoded in fields:
        parts += (uvarint(tag), uvarint(len(encoded)), encoded)
    return b"".join(parts)
