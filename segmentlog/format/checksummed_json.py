"""A JSON object whose first key is a checksum of the rest, for small objects that are replaced as a whole.

    {"xxh3_64":"<16 digits>","key":...}

The checksum is the XXH3-64 of the same text without the checksum's key: ``{"key":...}``. So every reader of JSON can
read the object, and `remove_checksum` finds each changed byte.
"""

from __future__ import annotations

from typing import Final

import xxhash

_PREFIX: Final = b'{"xxh3_64":"%s",'
_PREFIX_BYTES: Final = len(_PREFIX % (b"0" * 16))


class ChecksumMismatch(ValueError):
    """The bytes are not those that `add_checksum` returned."""


def add_checksum(text: bytes) -> bytes:
    """Return the JSON object ``text``, which must have a key and no leading spaces, with its checksum as first key."""
    return _PREFIX % xxhash.xxh3_64_hexdigest(text).encode() + text[1:]


def remove_checksum(data: bytes) -> bytes:
    """Return the text that `add_checksum` was given. Raise `ChecksumMismatch` if any byte differs."""
    text = b"{" + data[_PREFIX_BYTES:]
    if data[:_PREFIX_BYTES] != _PREFIX % xxhash.xxh3_64_hexdigest(text).encode():
        raise ChecksumMismatch("its checksum does not match")
    return text
