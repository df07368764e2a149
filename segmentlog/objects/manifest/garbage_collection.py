"""Looking after what lies in an object store: what it is, whether it is whole, and what nobody refers to.

Sweeping takes two turns. What no manifest refers to, and is older than the grace time, is condemned in the manifest
first, by a conditional put; it is deleted when it has been condemned for as long. A shipper whose upload was condemned
in between finds its own put refused, sees that, and uploads anew.
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
from segmentlog.objects.bucket.base import Bucket, ObjectChanged, ObjectMissing
from segmentlog.objects.bucket.upload_pool import nonce
from segmentlog.objects.manifest.checksums import check_object
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.manifest.object_ranges import chunk_data

GRACE_MS: Final = 24 * 3600_000
"""What is younger may be of an upload that is under way, or be read by somebody who has an older manifest."""
_TRIES: Final = 50
_OURS: Final = re.compile(
    r"(?:segments/[^/]+/\d+/\d{20}-[0-9a-f]{12}(?:\.(?:\d+|index|snapshot))?|tails/\d{20}-[0-9a-f]{12}"
    rf"|files/(?:{'|'.join(map(re.escape, SHIPPED_FILES))})-[0-9a-f]{{12}})"
)
"""The names of `parts.key_of` and what goes with these, of `tails` and of `store_files`."""


class Checked(msgspec.Struct, frozen=True):
    """What a look at every object found: how many, their bytes, and what is wrong with which."""

    objects: int
    size_bytes: int
    problems: tuple[tuple[str, str], ...]


class Swept(msgspec.Struct, frozen=True):
    """Keys that were condemned, and keys that were deleted, by this call; with ``dry_run`` that would be."""

    condemned: tuple[str, ...]
    deleted: tuple[str, ...]
    size_bytes: int
    """Of what was deleted."""


def verify(bucket: Bucket, progress: Callable[[int], None] | None = None) -> Checked:
    """Read the manifest and every object that it refers to, and compare checksums, those of inline records too.

    Raises `ShippingRefused` without a manifest.
    """
    manifest, _ = require_manifest(bucket)
    problems = [(MANIFEST_KEY, why) for why in _inline_problems(manifest)]
    size_bytes, count = stored_manifest(bucket).size_bytes, 1
    for stored in manifest.objects():
        try:
            data, _ = bucket.get(stored.key)
            check_object(bucket, stored, data)
        except ObjectMissing:
            newer, _ = require_manifest(bucket)
            if stored in newer.objects():
                problems.append((stored.key, "it is gone, and the manifest refers to it"))
        except ShippingRefused as error:
            problems.append((stored.key, error.why.removeprefix(f"{stored.key}: ")))
        count, size_bytes = count + 1, size_bytes + stored.size_bytes
        if progress is not None:
            progress(stored.size_bytes)
    return Checked(count, size_bytes, tuple(problems))


def sweep(bucket: Bucket, now_ms: int, *, grace_ms: int = GRACE_MS, dry_run: bool = False) -> Swept:
    """Condemn what nobody refers to, and delete what was condemned ``grace_ms`` ago.

    Raises `ShippingRefused` where nothing was shipped, `ObjectStoreError`.
    """
    for _ in range(_TRIES):
        manifest, tag = require_manifest(bucket)
        listed = {found.key: found for found in bucket.list()}
        named = {stored.key for stored in manifest.objects()} | {MANIFEST_KEY}
        known = {one.key: one for one in manifest.condemned}
        due = [one.key for one in manifest.condemned if now_ms - one.since_ms >= grace_ms and one.key not in named]
        fresh = [
            key
            for key, found in listed.items()
            if key not in named and key not in known and now_ms - found.modified_ms >= grace_ms and _is_ours(key)
        ]
        there = [key for key in due if key in listed]
        swept = Swept(tuple(sorted(fresh)), tuple(sorted(there)), sum(listed[key].size_bytes for key in there))
        if dry_run:
            return swept
        bucket.delete(there)
        if not fresh:
            return swept
        # It is the owner who strikes off what was deleted: it may have uploaded it, and not know yet.
        condemned = (*manifest.condemned, *(Condemned(key, now_ms) for key in sorted(fresh)))
        changed = replace(manifest, condemned=condemned, sequence=manifest.sequence + 1, nonce=nonce())
        try:
            bucket.swap(MANIFEST_KEY, encode_manifest(changed), tag)
        except ObjectChanged:
            continue
        return swept
    raise ObjectStoreError(bucket.url, "gc", f"the manifest changed {_TRIES} times meanwhile; try again")


def _inline_problems(manifest: Manifest) -> Iterator[str]:
    """The inline records that are not what was shipped."""
    tails = {tail.number: tail for tail in manifest.tails if tail.object is None}
    for topic in manifest.topics:
        for partition in topic.partitions:
            for chunk in partition.chunks:
                tail = tails.get(chunk.tail)
                if tail is not None and xxhash.xxh3_64_hexdigest(chunk_data(chunk, tail)) != chunk.xxh3_64:
                    where = f"{topic.name}/{partition.number} up to offset {chunk.end_offset}"
                    yield f"damaged: the inline records of {where} are not what was shipped"


def stored_manifest(bucket: Bucket) -> Stored:
    """The manifest as an object: its key, its size and its checksum. Raises `ObjectStoreError`, `ObjectMissing`."""
    data, _ = bucket.get(MANIFEST_KEY)
    return Stored(MANIFEST_KEY, len(data), xxhash.xxh3_64_hexdigest(data))


def described_manifest(manifest: Manifest) -> str:
    """What the manifest holds, for people: the newest records are in it as long as they are few."""
    inline = sum(tail.size_bytes for tail in manifest.tails if tail.object is None)
    return f"the manifest, with {inline:,} bytes of records inline" if inline else "the manifest"


def described(manifest: Manifest) -> Iterator[tuple[str, Stored]]:
    """What each object is of, for people."""
    for topic in manifest.topics:
        for partition in topic.partitions:
            for segment in partition.segments:
                what = f"{topic.name}/{partition.number} [{segment.base_offset}, {segment.end_offset})"
                for number, stored in enumerate(segment.log.objects):
                    yield (f"{what} part {number}" if segment.is_in_parts else what), stored
                if segment.snapshot is not None:
                    yield f"{topic.name}/{partition.number} producers at {segment.base_offset}", segment.snapshot
            for snapshot in partition.snapshots:
                yield f"{topic.name}/{partition.number} producers at {snapshot.segment}", snapshot.object
    for tail in manifest.tails:
        if tail.object is not None:
            yield f"tail {tail.number}", tail.object
    for file in manifest.files:
        yield file.path, file.object


def _is_ours(key: str) -> bool:
    """Whether shipping gives such names: what else lies there is nobody's business."""
    return _OURS.fullmatch(key) is not None
