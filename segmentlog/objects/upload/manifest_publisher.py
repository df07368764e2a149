"""Publish the manifest by a conditional put, and resolve puts whose outcome is unknown.

mark_unreferenced   add objects that nothing refers to any more to the list of objects marked for deletion
publish             replace the manifest that was read or published last
resolve_outcome     read the manifest after a put with an unknown outcome, and find out which process put it
delete_marked       delete objects that have been marked long enough
"""

from __future__ import annotations

import enum
from collections.abc import Set
from typing import Final

from msgspec.structs import replace

from segmentlog.errors import ShippingRefused, StoreFenced
from segmentlog.format.manifest import MANIFEST_KEY, Condemned, Manifest, Owner, encode_manifest
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.manifest.load import read_manifest
from segmentlog.objects.ownership.binding import Binding, read_binding
from segmentlog.objects.ownership.claim import compare_with_local, fence
from segmentlog.objects.upload.manifest_builder import content_of
from segmentlog.topics.topic_registry import Topics

_ENDED: Final = "another command ended shipping ('segmentlog ship --stop'); this process has stopped shipping"


class PutOutcome(enum.Enum):
    """The manifest that is in the object store, compared with the last manifest that this process read or published."""

    NO_MANIFEST = enum.auto()
    """The object store still contains no manifest."""
    UNCHANGED = enum.auto()
    """The manifest is still that of an earlier owner, which ended shipping: this store's first put had no effect."""
    PUBLISHED = enum.auto()
    """The manifest is from a put of this process whose response was lost."""
    MARKED = enum.auto()
    """The manifest is the last one, in which a garbage collection has marked more objects for deletion."""
    EARLIER_PROCESS = enum.auto()
    """The manifest is from a put of an earlier process of this store, which took effect late."""


class ManifestPublisher:
    """The last manifest that one shipper has read or published, and its puts. Not thread-safe."""

    def __init__(self, topics: Topics, bucket: Bucket) -> None:
        self._topics = topics
        self._bucket = bucket
        self.manifest: Manifest | None = None
        """The manifest that was published or read last; None before the first."""
        self.uncompared: set[PartitionKey] = set()
        """Partitions that could not be opened to compare them with the manifest that was read last."""
        self._tag: str | None = None
        self._keys: dict[str, frozenset[str]] = {}
        """For the last manifests, by nonce: the keys of the objects that the manifest refers to."""
        self._unresolved: dict[str, Manifest] = {}
        """Manifests of puts with an unknown outcome, by nonce."""
        self._deleted: set[str] = set()
        """Keys that are deleted but still marked in the manifest."""

    @property
    def is_uncertain(self) -> bool:
        """Whether the outcome of a put is unknown."""
        return bool(self._unresolved)

    def resume_from(self, manifest: Manifest, tag: str, uncompared: set[PartitionKey]) -> None:
        """Continue from a manifest of an earlier process."""
        self.manifest, self._tag, self.uncompared = manifest, tag, uncompared

    # ------------------------------------------------------------ which objects

    def accounted_keys(self) -> Set[str]:
        """Return the keys that the manifest refers to or marks for deletion."""
        return self._keys_of(self.manifest) | self.marked_keys() if self.manifest else frozenset()

    def marked_keys(self) -> Set[str]:
        """Return the keys that the manifest marks for deletion."""
        return {mark.key for mark in self.manifest.condemned} if self.manifest else frozenset()

    def mark_unreferenced(self, manifest: Manifest, orphans: Set[str], in_use: Set[str], now_ms: int) -> Manifest:
        """Return the next manifest with marks for all objects that it no longer refers to.

        ``orphans`` are objects that no manifest referred to; objects ``in_use`` are not marked.
        """
        before = self.manifest
        marks = {mark.key: mark for mark in before.condemned if mark.key not in self._deleted} if before else {}
        in_use = self._keys_of(manifest) | in_use
        gone = self._keys_of(before) if before else frozenset()
        for key in sorted((gone | orphans) - in_use):
            marks.setdefault(key, Condemned(key, now_ms))
        return replace(manifest, condemned=tuple(mark for key, mark in marks.items() if key not in in_use))

    def _keys_of(self, manifest: Manifest) -> frozenset[str]:
        """Return the keys that a manifest refers to."""
        found = self._keys.get(manifest.nonce)
        if found is None:
            found = frozenset(stored.key for stored in manifest.objects())
            last = self.manifest.nonce if self.manifest else ""
            self._keys = {nonce: keys for nonce, keys in self._keys.items() if nonce == last}
            self._keys[manifest.nonce] = found
        return found

    def delete_marked(self, now_ms: int, grace_ms: int) -> None:
        """Delete the objects that were marked at least ``grace_ms`` ago. The next manifest drops their marks."""
        marks = self.manifest.condemned if self.manifest else ()
        due = [mark.key for mark in marks if now_ms - mark.since_ms >= grace_ms]
        due = [key for key in due if key not in self._deleted]
        if due:
            self._bucket.delete(due)
            self._deleted.update(due)

    # ------------------------------------------------------------ publishing, and the outcome

    def publish(self, manifest: Manifest) -> None:
        """Replace the last manifest.

        Raise `ObjectStoreError` or its subclass `PreconditionFailed`. After either, call `resolve_outcome`.
        """
        self._unresolved[manifest.nonce] = manifest
        tag = self._bucket.compare_and_swap(MANIFEST_KEY, encode_manifest(manifest), self._tag)
        self._adopt(manifest, tag)

    def resolve_outcome(self, binding: Binding, owner: Owner) -> PutOutcome:
        """Read the manifest, and compare it with the last manifest that this process read or published.

        Raise `StoreFenced` if the manifest names another owner. Raise `ShippingRefused` if it belongs to another store,
        if it is missing, or if shipping was ended. Raise `ObjectStoreError` if it cannot be read; then the outcome of
        the put stays unknown.
        """
        bound = read_binding(self._topics.fs, self._topics.path)
        # Check this before fencing: a store that is not bound to this owner must not be fenced because of it.
        if bound is None or bound.owner_id != binding.owner_id:
            raise ShippingRefused(self._bucket.url, _ENDED)
        found = read_manifest(self._bucket)
        if found is None:
            if self.manifest is not None:
                raise ShippingRefused(
                    self._bucket.url, "the manifest is missing, and segmentlog never deletes it; check the URL and the"
                    " rules of the bucket, or end shipping ('segmentlog ship --stop') to start over"
                )  # fmt: skip
            return PutOutcome.NO_MANIFEST
        manifest, tag = found
        if manifest.store_id != self._topics.store_id:
            raise ShippingRefused(self._bucket.url, f"{manifest.owner} ships another store to this URL")
        if (manifest.owner.epoch, manifest.owner.id) != (owner.epoch, owner.id):
            if self.manifest is not None and manifest.nonce == self.manifest.nonce:
                return PutOutcome.UNCHANGED
            fence(self._topics, binding, manifest.owner)
            raise StoreFenced(f"store {self._topics.path}", str(manifest.owner))
        if manifest.ended and (self.manifest is None or not self.manifest.ended):
            raise ShippingRefused(self._bucket.url, _ENDED)
        if manifest.nonce in self._unresolved:
            self._adopt(self._unresolved[manifest.nonce], tag)
            return PutOutcome.PUBLISHED
        if self.manifest is not None and content_of(manifest) == content_of(self.manifest):
            self._adopt(manifest, tag)
            return PutOutcome.MARKED
        # This raises if the manifest contains data that this store never had.
        self.uncompared = compare_with_local(self._topics, self._bucket, manifest)
        self._adopt(manifest, tag)
        return PutOutcome.EARLIER_PROCESS

    def _adopt(self, manifest: Manifest, tag: str) -> None:
        """Record the manifest that is in the object store."""
        if tag != self._tag:  # if the tag is unchanged, an earlier put may still take effect
            self._unresolved.clear()
        self.manifest, self._tag = manifest, tag
        self._deleted &= {mark.key for mark in manifest.condemned}
