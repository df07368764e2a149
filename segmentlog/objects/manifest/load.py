"""Load the manifest of a store from an object store, and check it."""

from __future__ import annotations

from segmentlog.errors import ShippingRefused
from segmentlog.format.manifest import MANIFEST_KEY, MalformedManifest, Manifest, decode_manifest
from segmentlog.objects.bucket.base import Bucket, ObjectMissing


def read_manifest(bucket: Bucket) -> tuple[Manifest, str] | None:
    """(the manifest, its tag); None where nothing was ever shipped to. Raises `ShippingRefused`, `ObjectStoreError`."""
    try:
        data, tag = bucket.get(MANIFEST_KEY)
    except ObjectMissing:
        return None
    try:
        return decode_manifest(data), tag
    except MalformedManifest as error:
        raise ShippingRefused(bucket.url, str(error)) from None


def require_manifest(bucket: Bucket) -> tuple[Manifest, str]:
    """The same. Raises `ShippingRefused` where nothing was ever shipped to."""
    found = read_manifest(bucket)
    if found is None:
        raise ShippingRefused(bucket.url, f"no store was shipped there (no {MANIFEST_KEY}); check the URL")
    return found
