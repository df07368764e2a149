"""Who may ship a store to an object store: the one whom the manifest names, from the folder that was bound to it.

bind       a store that was never shipped, to a place where nothing lies
claim      go on as the owner, once what lies there and what is here agree
fence      the manifest names somebody else: nothing is appended here any more
end        the owner ships no more, and is bound to nothing
"""

from __future__ import annotations

import contextlib
import logging
import platform
import uuid
from typing import NamedTuple

from msgspec.structs import replace

from segmentlog.errors import SegmentlogError, ShippingRefused, StoreFenced, UnknownTopic
from segmentlog.format.manifest import (
    MANIFEST_KEY,
    Manifest,
    Owner,
    encode_manifest,
)
from segmentlog.log import offset_grants
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.bucket.upload_pool import nonce
from segmentlog.objects.local.divergence import what_differs
from segmentlog.objects.local.partition_snapshot import open_local, topics_of
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.manifest.load import read_manifest
from segmentlog.objects.ownership.binding import (
    Binding,
    folder_id,
    read_binding,
    remove_binding,
    remove_upload_journal,
    write_binding,
)
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")


def new_owner(epoch: int, now_ms: int) -> Owner:
    """One that nobody was before."""
    return Owner(epoch, uuid.uuid4().hex, platform.node(), now_ms)


class Claimed(NamedTuple):
    """How a store is bound, as whom, the manifest and its tag if there is one; `compare` for what is ``unopened``."""

    binding: Binding
    owner: Owner
    found: tuple[Manifest, str] | None
    unopened: set[Where]


def claim(topics: Topics, bucket: Bucket, wanted: tuple[str, ...], now_ms: int) -> Claimed:
    """Be the owner of what lies there.

    A store that is bound to nothing is bound. Raises `ShippingRefused`, `StoreFenced`, `ObjectStoreError`.
    """
    fs, path = topics.fs, topics.path
    binding = read_binding(fs, path)
    if binding is not None:
        if binding.url != bucket.url:
            why = f"the store is shipped to {binding.url}; end that first ('segmentlog ship --stop')"
            raise ShippingRefused(bucket.url, why)
        if binding.folder_id != folder_id(fs, path):
            why = (
                f"{path} is a copy of a store that is shipped, or was put back from one; if it is to go on as the"
                " owner, take it over into an empty folder ('segmentlog takeover')"
            )
            raise ShippingRefused(bucket.url, why)
        if binding.fenced:
            raise StoreFenced(f"store {path}", binding.fenced)
    found = read_manifest(bucket)
    if found is None:
        if binding is not None and binding.begun:
            why = (
                "it was shipped there, and the manifest is gone; end shipping ('segmentlog ship --stop') to begin anew"
            )
            raise ShippingRefused(bucket.url, why)
        owner = new_owner(1, now_ms)
        if binding is not None:  # a manifest of that owner may still be on its way
            owner = replace(owner, epoch=binding.owner_epoch, id=binding.owner_id)
        binding = Binding(bucket.url, owner.id, owner.epoch, folder_id(fs, path), wanted)
        write_binding(fs, path, binding)
        return Claimed(binding, owner, None, set())
    manifest, _ = found
    owner = manifest.owner
    if manifest.store_id != topics.store_id:
        raise ShippingRefused(bucket.url, f"another store is shipped there, by {owner}; choose another place")
    if binding is None:
        if not manifest.ended:
            why = f"this store is shipped there by {owner}, and not from {path}; take it over ('segmentlog takeover')"
            raise ShippingRefused(bucket.url, why)
        unopened = compare(topics, bucket, manifest)
        owner = new_owner(manifest.owner.epoch + 1, now_ms)
        binding = Binding(bucket.url, owner.id, owner.epoch, folder_id(fs, path), wanted)
        write_binding(fs, path, binding)
        return Claimed(binding, owner, found, unopened)
    if (owner.epoch, owner.id) != (binding.owner_epoch, binding.owner_id):
        if owner.epoch < binding.owner_epoch:  # bound a moment ago, to what had ended: and not put yet
            owner = Owner(binding.owner_epoch, binding.owner_id, platform.node(), now_ms)
            return Claimed(binding, owner, found, compare(topics, bucket, manifest))
        fence(topics, binding, owner)
        raise StoreFenced(f"store {path}", str(owner))
    unopened = compare(topics, bucket, manifest)
    if wanted and wanted != binding.topics:
        binding = replace(binding, topics=wanted)
        write_binding(fs, path, binding)
    return Claimed(binding, owner, found, unopened)


def compare(topics: Topics, bucket: Bucket, manifest: Manifest) -> set[Where]:
    """Raise `ShippingRefused` when something lies there that this store has not, and has not given up either.

    Returns the partitions that cannot be opened now: before anything of them is shipped they are to be compared, too.
    """
    unopened: set[Where] = set()
    if manifest.store_id != topics.store_id:
        raise ShippingRefused(bucket.url, f"another store is shipped there, by {manifest.owner}")
    for topic in manifest.topics:
        for shipped in topic.partitions:
            try:
                local = open_local(topics, topics.topic_name(topic.id), shipped.number, topic.id)
            except UnknownTopic:
                continue
            except (SegmentlogError, OSError):
                unopened.add((topic.id, shipped.number))
                continue
            if local is not None and (why := what_differs(local, shipped)):
                raise ShippingRefused(bucket.url, f"{topic.name}/{shipped.number}: {why}")
    return unopened


def fence(topics: Topics, binding: Binding, owner: Owner) -> None:
    """Have nobody append to what was shipped: ``owner`` does, elsewhere."""
    for name, file in topics_of(topics, binding.topics):
        for number in range(file.partitions):
            try:
                offset_grants.fence(topics.open_partition(name, number, file.topic_id).handle, str(owner))
            except UnknownTopic:
                break
            except (SegmentlogError, OSError) as error:  # all others are: this one gets no further than its ceiling
                logger.warning("%s/%d: belongs to %s now, and cannot be fenced: %s", name, number, owner, error)
    write_binding(topics.fs, topics.path, replace(binding, fenced=str(owner)))


def end(topics: Topics, bucket: Bucket) -> bool:
    """Ship no more: whoever takes over from there is told that this store went on. False when it was not shipped.

    What lies there stays. Also for a store that was fenced: it is one of its own from then on.
    """
    binding = read_binding(topics.fs, topics.path)
    if binding is None:
        return False
    found = read_manifest(bucket)
    if found is not None:
        manifest, tag = found
        if manifest.owner.id == binding.owner_id and not manifest.ended:
            ended = replace(manifest, ended=True, sequence=manifest.sequence + 1, nonce=nonce())
            bucket.swap(MANIFEST_KEY, encode_manifest(ended), tag)
    unbind(topics)
    return True


def unbind(topics: Topics) -> None:
    """Nothing here asks for grants any more, nor is fenced."""
    for name, file in topics_of(topics, ()):
        for number in range(file.partitions):
            with contextlib.suppress(UnknownTopic):
                offset_grants.release(topics.open_partition(name, number, file.topic_id).handle)
    remove_upload_journal(topics.fs, topics.path)
    remove_binding(topics.fs, topics.path)
