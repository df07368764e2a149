"""Load the manifest of a store from an object store, and check it."""

from __future__ import annotations

from segmentlog.errors import ShippingRefused
from segmentlog.format.manifest import MANIFEST_KEY, MalformedManifest, Manifest, decode_manifest
from segmentlog.objects.bucket.base import Bucket, ObjectMissing


def read_manifest(bucket: Bucket) -> tuple[Manifest, str] | None:
    """Return (manifest, its tag), or None before the first manifest. Raise `ShippingRefused`, `ObjectStoreError`."""
    try:
        data, tag = bucket.get(MANIFEST_KEY)
    except ObjectMissing:
        return None
    try:
        return decode_manifest(data), tag
    except MalformedManifest as error:
        raise ShippingRefused(bucket.url, str(error)) from None


def require_manifest(bucket: Bucket) -> tuple[Manifest, str]:
    """Return (manifest, its tag), as `read_manifest` does. Raise `ShippingRefused` if the manifest is missing."""
    found = read_manifest(bucket)
    if found is None:
        raise ShippingRefused(bucket.url, f"no store was shipped to this URL (no {MANIFEST_KEY}); check the URL")
    return found
