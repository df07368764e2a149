"""The manifest that lies there, and puts of the next one: all that was shipped is what it refers to.

condemn   what nothing refers to any more is named in it, with the time since when
put       in the place of the one that was read or put last
learn     after a put of which nobody knows whether it took effect: which one lies there
delete    what was condemned long ago
"""

from __future__ import annotations

import enum
from collections.abc import Set
from typing import Final

from msgspec.structs import replace

from segmentlog.errors import ShippingRefused, StoreFenced
from segmentlog.format.manifest import MANIFEST_KEY, Condemned, Manifest, Owner, encode_manifest
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.manifest.load import read_manifest
from segmentlog.objects.ownership.binding import Binding, read_binding
from segmentlog.objects.ownership.claim import compare, fence
from segmentlog.objects.upload.manifest_builder import said
from segmentlog.topics.topic_registry import Topics

_ENDED: Final = "shipping was ended ('segmentlog ship --stop') while this process was at it: it ships no more"


class Learnt(enum.Enum):
    """Which manifest lies there, as against the one that was known last."""

    NOTHING = enum.auto()
    """None, as before."""
    SAME = enum.auto()
    """The one of an owner who had ended: it is not ours yet."""
    PUT = enum.auto()
    """One that was put here, whatever was answered then."""
    SWEPT = enum.auto()
    """It says what the last one said; somebody has condemned objects."""
    EARLIER = enum.auto()
    """One of an earlier process of this very store, arriving late."""


class Root:
    """As one shipper knows it. For one thread at a time."""

    def __init__(self, topics: Topics, bucket: Bucket) -> None:
        self._topics = topics
        self._bucket = bucket
        self.manifest: Manifest | None = None
        """The one that was put last, or was found; None before the first."""
        self.unopened: set[Where] = set()
        """Partitions that could not be compared with the one that was found last."""
        self._tag: str | None = None
        self._keys: dict[str, frozenset[str]] = {}
        """By nonce, all that the last manifests refer to."""
        self._tried: dict[str, Manifest] = {}
        """By nonce: puts of whose outcome nothing is known, and what each said."""
        self._deleted: set[str] = set()
        """Of what the manifest condemns."""

    @property
    def is_uncertain(self) -> bool:
        """Whether something was put, and nobody knows whether it took effect."""
        return bool(self._tried)

    def begin(self, manifest: Manifest, tag: str, unopened: set[Where]) -> None:
        """Go on from what an earlier process has put."""
        self.manifest, self._tag, self.unopened = manifest, tag, unopened

    # ------------------------------------------------------------ which objects

    def settled(self) -> Set[str]:
        """Keys of objects of which the manifest says what becomes of them: it refers to them, or condemns them."""
        return self._keys_of(self.manifest) | self.condemned() if self.manifest else frozenset()

    def condemned(self) -> Set[str]:
        """Keys of those that nothing refers to."""
        return {one.key for one in self.manifest.condemned} if self.manifest else frozenset()

    def condemn(self, manifest: Manifest, orphans: Set[str], kept: Set[str], now_ms: int) -> Manifest:
        """The next manifest, with what nothing refers to any more from it on.

        ``orphans`` are objects that none ever referred to; ``kept`` of them are of use still.
        """
        before = self.manifest
        known = {one.key: one for one in before.condemned if one.key not in self._deleted} if before else {}
        kept = self._keys_of(manifest) | kept
        gone = self._keys_of(before) if before else frozenset()
        for key in sorted((gone | orphans) - kept):
            known.setdefault(key, Condemned(key, now_ms))
        return replace(manifest, condemned=tuple(one for key, one in known.items() if key not in kept))

    def _keys_of(self, manifest: Manifest) -> frozenset[str]:
        """All that it refers to."""
        found = self._keys.get(manifest.nonce)
        if found is None:
            found = frozenset(stored.key for stored in manifest.objects())
            last = self.manifest.nonce if self.manifest else ""
            self._keys = {nonce: keys for nonce, keys in self._keys.items() if nonce == last}
            self._keys[manifest.nonce] = found
        return found

    def delete_condemned(self, now_ms: int, grace_ms: int) -> None:
        """Delete what was condemned so long ago. It is struck off the list with the next put."""
        condemned = self.manifest.condemned if self.manifest else ()
        due = [one.key for one in condemned if now_ms - one.since_ms >= grace_ms]
        due = [key for key in due if key not in self._deleted]
        if due:
            self._bucket.delete(due)
            self._deleted.update(due)

    # ------------------------------------------------------------ putting, and what became of it

    def put(self, manifest: Manifest) -> None:
        """Put it in the place of the last one.

        Raises `ObjectStoreError`, also `ObjectChanged`: then it is to be learnt what became of it.
        """
        self._tried[manifest.nonce] = manifest
        tag = self._bucket.swap(MANIFEST_KEY, encode_manifest(manifest), self._tag)
        self._go_on_from(manifest, tag)

    def learn(self, binding: Binding, owner: Owner) -> Learnt:
        """Find out what lies there.

        Raises `StoreFenced` or `ShippingRefused` where this owner, as the store is bound, may not go on from it, and
        where somebody here has ended shipping; `ObjectStoreError` where nothing is known yet.
        """
        bound = read_binding(self._topics.fs, self._topics.path)
        if bound is None or bound.owner_id != binding.owner_id:  # before anybody is fenced for another's sake
            raise ShippingRefused(self._bucket.url, _ENDED)
        found = read_manifest(self._bucket)
        if found is None:
            if self.manifest is not None:
                raise ShippingRefused(self._bucket.url, "the manifest is gone, which nobody here has deleted")
            return Learnt.NOTHING
        manifest, tag = found
        if manifest.store_id != self._topics.store_id:
            raise ShippingRefused(self._bucket.url, f"another store is shipped there, by {manifest.owner}")
        if (manifest.owner.epoch, manifest.owner.id) != (owner.epoch, owner.id):
            if self.manifest is not None and manifest.nonce == self.manifest.nonce:
                return Learnt.SAME
            fence(self._topics, binding, manifest.owner)
            raise StoreFenced(f"store {self._topics.path}", str(manifest.owner))
        if manifest.ended and (self.manifest is None or not self.manifest.ended):
            raise ShippingRefused(self._bucket.url, _ENDED)
        if manifest.nonce in self._tried:
            self._go_on_from(self._tried[manifest.nonce], tag)
            return Learnt.PUT
        if self.manifest is not None and said(manifest) == said(self.manifest):
            self._go_on_from(manifest, tag)
            return Learnt.SWEPT
        self.unopened = compare(self._topics, self._bucket, manifest)  # then it says nothing that is not so here
        self._go_on_from(manifest, tag)
        return Learnt.EARLIER

    def _go_on_from(self, manifest: Manifest, tag: str) -> None:
        """It lies there."""
        if tag != self._tag:  # else a put that was sent may still take effect
            self._tried.clear()
        self.manifest, self._tag = manifest, tag
        self._deleted &= {one.key for one in manifest.condemned}
