"""Describe, verify and garbage-collect the objects of a shipped store.

Garbage collection has two passes, a grace time apart. The first marks objects in the manifest, by a conditional put, if
the manifest does not refer to them and they are older than the grace time. The second deletes objects that have been
marked for the grace time. If the first pass marks an object that a process is just uploading, the conditional put of
that process fails. The process then reads the manifest, finds the mark, and uploads the object again under a new name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import xxhash
from msgspec.structs import replace

from segmentlog.errors import ObjectStoreError, ShippingRefused
from segmentlog.format.file_names import SHIPPED_FILES
from segmentlog.format.manifest import MANIFEST_KEY, Condemned, Manifest, Stored, encode_manifest
from segmentlog.objects.bucket.base import Bucket, ObjectMissing, PreconditionFailed
from segmentlog.objects.bucket.upload_pool import new_nonce
from segmentlog.objects.manifest.checksums import verify_object
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.manifest.object_ranges import chunk_data

GRACE_MS: Final = 24 * 3600_000
"""Younger objects may belong to a running upload, or a reader with an older manifest may still need them."""
_TRIES: Final = 50
_OUR_KEYS: Final = re.compile(
    r"(?:segments/[^/]+/\d+/\d{20}-[0-9a-f]{12}(?:\.(?:\d+|index|snapshot))?|tails/\d{20}-[0-9a-f]{12}"
    rf"|files/(?:{'|'.join(map(re.escape, SHIPPED_FILES))})-[0-9a-f]{{12}})"
)
"""The object names that `multipart.new_segment_key`, `tail_uploader` and `store_files` create."""


class ObjectsReport(msgspec.Struct, frozen=True):
    """Result of `verify`: the number of objects, their size in bytes, and (key, problem) of each damaged one."""

    objects: int
    size_bytes: int
    problems: tuple[tuple[str, str], ...]


class SweepReport(msgspec.Struct, frozen=True):
    """Result of `sweep`: the keys that the call marked and deleted, or would mark and delete without ``dry_run``."""

    condemned: tuple[str, ...]
    deleted: tuple[str, ...]
    size_bytes: int
    """Size of the deleted objects."""


def verify(bucket: Bucket, progress: Callable[[int], None] | None = None) -> ObjectsReport:
    """Read every object that the manifest refers to, and compare its checksums. Also check inline records.

    ``progress`` is called with the size of each object. Raise `ShippingRefused` if the manifest is missing.
    """
    manifest, _ = require_manifest(bucket)
    problems = [(MANIFEST_KEY, why) for why in _inline_problems(manifest)]
    size_bytes, count = stored_manifest(bucket).size_bytes, 1
    for stored in manifest.objects():
        try:
            data, _ = bucket.get(stored.key)
            verify_object(bucket, stored, data)
        except ObjectMissing:
            newer, _ = require_manifest(bucket)
            if stored in newer.objects():
                problems.append((stored.key, "missing, although the manifest refers to it"))
        except ShippingRefused as error:
            problems.append((stored.key, error.why.removeprefix(f"{stored.key}: ")))
        count, size_bytes = count + 1, size_bytes + stored.size_bytes
        if progress is not None:
            progress(stored.size_bytes)
    return ObjectsReport(count, size_bytes, tuple(problems))


def sweep(bucket: Bucket, now_ms: int, *, grace_ms: int = GRACE_MS, dry_run: bool = False) -> SweepReport:
    """Mark the objects that the manifest does not refer to, and delete those marked at least ``grace_ms`` ago.

    With ``dry_run`` only report them. Raise `ShippingRefused` if the manifest is missing, and `ObjectStoreError`.
    """
    for _ in range(_TRIES):
        manifest, tag = require_manifest(bucket)
        listed = {found.key: found for found in bucket.list()}
        referenced = {stored.key for stored in manifest.objects()} | {MANIFEST_KEY}
        known = referenced | {mark.key for mark in manifest.condemned}
        due = [
            mark.key
            for mark in manifest.condemned
            if now_ms - mark.since_ms >= grace_ms and mark.key not in referenced and mark.key in listed
        ]
        fresh = [
            key
            for key, found in listed.items()
            if key not in known and now_ms - found.modified_ms >= grace_ms and _OUR_KEYS.fullmatch(key)
        ]
        swept = SweepReport(tuple(sorted(fresh)), tuple(sorted(due)), sum(listed[key].size_bytes for key in due))
        if dry_run:
            return swept
        bucket.delete(due)
        if not fresh:
            return swept
        # Only the owner removes marks of deleted objects from the manifest. If this call deletes an object that the
        # owner has just uploaded, the mark tells the owner to upload it again.
        condemned = (*manifest.condemned, *(Condemned(key, now_ms) for key in sorted(fresh)))
        changed = replace(manifest, condemned=condemned, sequence=manifest.sequence + 1, nonce=new_nonce())
        try:
            bucket.compare_and_swap(MANIFEST_KEY, encode_manifest(changed), tag)
        except PreconditionFailed:
            continue
        return swept
    raise ObjectStoreError(bucket.url, "gc", f"the manifest changed {_TRIES} times during this call; try again")


def _inline_problems(manifest: Manifest) -> Iterator[str]:
    """Yield a problem for each piece of inline records whose checksum does not match."""
    tails = {tail.number: tail for tail in manifest.tails if tail.object is None}
    for topic in manifest.topics:
        for partition in topic.partitions:
            for chunk in partition.chunks:
                tail = tails.get(chunk.tail)
                if tail is not None and xxhash.xxh3_64_hexdigest(chunk_data(chunk, tail)) != chunk.xxh3_64:
                    place = f"{topic.name}/{partition.number} up to offset {chunk.end_offset}"
                    yield f"damaged: the checksum of the inline records of {place} does not match"


def stored_manifest(bucket: Bucket) -> Stored:
    """Return key, size and checksum of the manifest itself. Raise `ObjectStoreError`, `ObjectMissing`."""
    data, _ = bucket.get(MANIFEST_KEY)
    return Stored(MANIFEST_KEY, len(data), xxhash.xxh3_64_hexdigest(data))


def describe_manifest(manifest: Manifest) -> str:
    """Return a short description of the manifest, with the size of the records that are stored inside it."""
    inline = sum(tail.size_bytes for tail in manifest.tails if tail.object is None)
    return f"the manifest, with {inline:,} bytes of records inline" if inline else "the manifest"


def describe_objects(manifest: Manifest) -> Iterator[tuple[str, Stored]]:
    """Yield (description, object) for every object that the manifest refers to."""
    for topic in manifest.topics:
        for partition in topic.partitions:
            for segment in partition.segments:
                name = f"{topic.name}/{partition.number} [{segment.base_offset}, {segment.end_offset})"
                for number, stored in enumerate(segment.log.objects):
                    yield (f"{name} part {number}" if segment.is_in_parts else name), stored
                if segment.snapshot is not None:
                    yield f"{topic.name}/{partition.number} producers at {segment.base_offset}", segment.snapshot
            for snapshot in partition.snapshots:
                yield f"{topic.name}/{partition.number} producers at {snapshot.segment}", snapshot.object
    for tail in manifest.tails:
        if tail.object is not None:
            yield f"tail {tail.number}", tail.object
    for file in manifest.files:
        yield file.path, file.object
