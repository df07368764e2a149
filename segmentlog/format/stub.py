"""The stub of an evicted segment: the file ``<segment>.remote`` beside its log, which names the objects with its bytes.

    16 hex digits   XXH3-64 of the bytes after the newline
    newline
    JSON            {"url": "s3://bucket/store", "stored": {"key": "segments/...", "size_bytes": 67108864,
                     "xxh3_64": "...", "sha256": "..."}, "evicted_ms": 1700000000000}

``stored`` is the entry in the manifest (`format.manifest`); a large segment has parts.

The log of an evicted segment keeps its name, size and modification time, and is a hole: all zeros. The stub is valid
only if the log beside it has that size and begins with zeros, as no batch does. So a stub that is written before its
log becomes a hole is not valid yet, and any file that replaces the hole makes it invalid.
"""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash

from segmentlog.format.manifest import Stored

PROBE_BYTES: Final = 8
"""No batch begins with this many zero bytes, because it begins with its magic."""
_HASH_BYTES: Final = 17


class Stub(msgspec.Struct, frozen=True):
    """The content of a stub: the store's URL, the object with the segment's bytes, and the time of the eviction.

    The object may consist of parts.
    """

    url: str
    stored: Stored
    evicted_ms: int

    @property
    def key(self) -> str:
        """Key of the object, or the common prefix of the keys of its parts."""
        return self.stored.key

    @property
    def size_bytes(self) -> int:
        """Size of the segment."""
        return self.stored.size_bytes


class MalformedStub(ValueError):
    """A ``.remote`` file is not a valid stub."""


_decoder = msgspec.json.Decoder(Stub)


def encode_stub(stub: Stub) -> bytes:
    """Return the bytes of a ``.remote`` file."""
    body = msgspec.json.encode(stub)
    return f"{xxhash.xxh3_64_intdigest(body):016x}\n".encode() + body


def decode_stub(data: bytes) -> Stub:
    """Decode the file. Raise `MalformedStub`."""
    head, body = data[:_HASH_BYTES], data[_HASH_BYTES:]
    if head != f"{xxhash.xxh3_64_intdigest(body):016x}\n".encode():
        raise MalformedStub("its checksum does not match")
    try:
        stub = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedStub(str(error)) from None
    if stub.size_bytes <= 0 or not stub.key or not stub.url:
        raise MalformedStub("it names no object")
    if sum(one.size_bytes for one in stub.stored.objects) != stub.size_bytes:
        raise MalformedStub("the sizes of its parts do not add up to the size of the segment")
    return stub
