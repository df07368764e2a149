"""The file ``grant`` in the folder of a shipped partition: its offset grant.

    16 hex digits   XXH3-64 of the bytes after the newline
    newline
    JSON            {"ceiling": 2097152, "fenced": ""}

An offset grant is the end of the offsets that this machine may assign. The manifest in the object store contains at
least the same number, and a takeover resumes the log there. So no offset is assigned twice, on any machine. A file that
exists and cannot be decoded grants nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash

_OFFSET_END: Final = 2**63
_HASH_BYTES: Final = 17


class OffsetGrant(msgspec.Struct, frozen=True):
    """The end of the offsets that may be assigned, and ``fenced``: the machine that owns the log now, or empty."""

    end_offset: int = msgspec.field(name="ceiling")
    fenced: str = ""


class MalformedGrant(ValueError):
    """A ``grant`` file does not contain a valid offset grant."""


_decoder = msgspec.json.Decoder(OffsetGrant)


def encode_grant(grant: OffsetGrant) -> bytes:
    """Return the bytes of a ``grant`` file."""
    body = msgspec.json.encode(grant)
    return f"{xxhash.xxh3_64_intdigest(body):016x}\n".encode() + body


def decode_grant(data: bytes) -> OffsetGrant:
    """Decode a ``grant`` file. Raise `MalformedGrant`."""
    head, body = data[:_HASH_BYTES], data[_HASH_BYTES:]
    if head != f"{xxhash.xxh3_64_intdigest(body):016x}\n".encode():
        raise MalformedGrant("its checksum does not match")
    try:
        grant = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedGrant(str(error)) from None
    if not 0 <= grant.end_offset < _OFFSET_END:
        raise MalformedGrant(f"its end offset is {grant.end_offset}, which is not a valid offset")
    return grant
