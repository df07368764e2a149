"""How far a partition that is shipped to an object store may hand out offsets: the file ``grant`` in its folder.

    16 hex digits   XXH3-64 of what follows the newline
    newline
    JSON            {"ceiling": 2097152, "fenced": ""}

The ceiling is one that the manifest in the object store promises: whoever takes the store over goes on there. So none
of its offsets is handed out twice, on whatever machine. A file that is there and cannot be read grants nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash

_OFFSET_END: Final = 2**63
_HASH_BYTES: Final = 17


class Grant(msgspec.Struct, frozen=True):
    """``ceiling``: no offset at or above it is handed out. ``fenced``: who owns the log now, when that is another."""

    ceiling: int
    fenced: str = ""


class MalformedGrant(ValueError):
    """The file holds no grant: it was damaged, or is something else."""


_decoder = msgspec.json.Decoder(Grant)


def encode_grant(grant: Grant) -> bytes:
    """The bytes of the file."""
    body = msgspec.json.encode(grant)
    return f"{xxhash.xxh3_64_intdigest(body):016x}\n".encode() + body


def decode_grant(data: bytes) -> Grant:
    """What the file says. Raises `MalformedGrant`."""
    head, body = data[:_HASH_BYTES], data[_HASH_BYTES:]
    if head != f"{xxhash.xxh3_64_intdigest(body):016x}\n".encode():
        raise MalformedGrant("its checksum does not match")
    try:
        grant = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedGrant(str(error)) from None
    if not 0 <= grant.ceiling < _OFFSET_END:
        raise MalformedGrant(f"a ceiling of {grant.ceiling}")
    return grant
