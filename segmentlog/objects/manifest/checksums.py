"""Compare objects and local files with the checksums in the manifest. Large objects and files are read in parts."""

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
"""Larger objects are read in parts of this size: a segment of up to 2 GiB must not be held in memory."""


def verify_object(bucket: Bucket, stored: Stored, data: bytes) -> None:
    """Raise `ShippingRefused` unless the bytes of an object match its manifest entry."""
    if len(data) != stored.size_bytes:
        raise ShippingRefused(
            bucket.url, f"{stored.key}: damaged: it has {len(data)} bytes, the manifest says {stored.size_bytes}"
        )
    _check_digests(bucket, stored, xxhash.xxh3_64_hexdigest(data), hashlib.sha256(data).hexdigest())


def _check_digests(bucket: Bucket, stored: Stored, xxh3_64: str, sha256: str) -> None:
    if (xxh3_64, sha256) != (stored.xxh3_64, stored.sha256):
        raise ShippingRefused(bucket.url, f"{stored.key}: damaged: its checksums differ from those in the manifest")


def read_verified_parts(bucket: Bucket, stored: Stored) -> Iterator[Data]:
    """Yield a stored file part by part. If an object is damaged, raise `ShippingRefused` after its last part."""
    for part in stored.objects:
        yield from _read_verified_object(bucket, part)


def _read_verified_object(bucket: Bucket, stored: Stored) -> Iterator[Data]:
    xxh3_64, sha256 = xxhash.xxh3_64(), hashlib.sha256()
    for start in range(0, stored.size_bytes, PART_BYTES):
        part = bucket.get_range(stored.key, start, min(PART_BYTES, stored.size_bytes - start))
        xxh3_64.update(part)
        sha256.update(part)
        yield part
    _check_digests(bucket, stored, xxh3_64.hexdigest(), sha256.hexdigest())


def is_same_file(fs: FileSystem, path: str, stored: Stored) -> bool:
    """Return whether a local file has the size and checksums of a stored file. Raise FileNotFoundError."""
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
