"""Where the bytes of a sealed segment lie that is not here any more: the file ``<segment>.remote`` beside its log.

    16 hex digits   XXH3-64 of what follows the newline
    newline
    JSON            {"url": "s3://bucket/store", "stored": {"key": "segments/...", "size_bytes": 67108864,
                     "xxh3_64": "...", "sha256": "..."}, "evicted_ms": 1700000000000}

``stored`` is what the manifest says of it (`format.manifest`): a large one lies in parts.

The log keeps its name, its size and the time of its last write, and is a hole: all zeros. The stub counts only while
there is a log of that size beside it that begins with zeros, which no batch does. So a stub that is written before its
log becomes a hole does not count yet, and whatever is put in the place of the hole counts by itself.
"""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash

from segmentlog.format.manifest import Stored

PROBE_BYTES: Final = 8
"""Of so many bytes at the beginning a batch has none but zeros: it begins with its magic."""
_HASH_BYTES: Final = 17


class Stub(msgspec.Struct, frozen=True):
    """Which object holds the segment's bytes, or which ones, at which URL; ``evicted_ms``: since when."""

    url: str
    stored: Stored
    evicted_ms: int

    @property
    def key(self) -> str:
        """What the object is called, or what the names of all of them begin with."""
        return self.stored.key

    @property
    def size_bytes(self) -> int:
        """Of the segment."""
        return self.stored.size_bytes


class MalformedStub(ValueError):
    """The file is no stub: it was damaged, or is something else."""


_decoder = msgspec.json.Decoder(Stub)


def encode_stub(stub: Stub) -> bytes:
    """The bytes of the file."""
    body = msgspec.json.encode(stub)
    return f"{xxhash.xxh3_64_intdigest(body):016x}\n".encode() + body


def decode_stub(data: bytes) -> Stub:
    """What the file says. Raises `MalformedStub`."""
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
        raise MalformedStub("its parts are not as large as the segment")
    return stub
