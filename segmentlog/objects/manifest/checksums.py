"""What lies in an object store, compared with what the manifest says of it; what is large, part by part."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Final

import xxhash

from segmentlog.errors import ShippingRefused
from segmentlog.format.manifest import Stored
from segmentlog.objects.bucket.base import Bucket, Data
from segmentlog.storage.fs import FileSystem, opened

PART_BYTES: Final = 16 << 20
"""What is larger is not held in memory: a segment may have 2 GiB."""


def check_object(bucket: Bucket, stored: Stored, data: bytes) -> None:
    """Raise `ShippingRefused` unless an object holds what the manifest says."""
    if len(data) != stored.size_bytes:
        raise ShippingRefused(
            bucket.url, f"{stored.key}: {len(data)} bytes, and not the {stored.size_bytes} of the manifest"
        )
    _check_digests(bucket, stored, xxhash.xxh3_64_hexdigest(data), hashlib.sha256(data).hexdigest())


def _check_digests(bucket: Bucket, stored: Stored, xxh3_64: str, sha256: str) -> None:
    if (xxh3_64, sha256) != (stored.xxh3_64, stored.sha256):
        raise ShippingRefused(bucket.url, f"{stored.key}: damaged: its checksums are not those of the manifest")


def checked_parts(bucket: Bucket, stored: Stored) -> Iterator[Data]:
    """A file that lies there, part by part; raises `ShippingRefused` behind an object that is not what was shipped."""
    for one in stored.objects:
        yield from _checked_parts_of(bucket, one)


def _checked_parts_of(bucket: Bucket, stored: Stored) -> Iterator[Data]:
    xxh3_64, sha256 = xxhash.xxh3_64(), hashlib.sha256()
    for start in range(0, stored.size_bytes, PART_BYTES):
        part = bucket.get_range(stored.key, start, min(PART_BYTES, stored.size_bytes - start))
        xxh3_64.update(part)
        sha256.update(part)
        yield part
    _check_digests(bucket, stored, xxh3_64.hexdigest(), sha256.hexdigest())


def is_same_file(fs: FileSystem, path: str, stored: Stored) -> bool:
    """Whether a file holds what lies there. Raises FileNotFoundError."""
    if fs.stat(path).st_size != stored.size_bytes:
        return False
    begin = 0
    with opened(fs, path, os.O_RDONLY | os.O_CLOEXEC) as fd:
        for one in stored.objects:
            found = xxhash.xxh3_64()
            end = begin + one.size_bytes
            for position in range(begin, end, PART_BYTES):
                found.update(fs.pread(fd, min(PART_BYTES, end - position), position))
            if found.hexdigest() != one.xxh3_64:
                return False
            begin = end
    return True
