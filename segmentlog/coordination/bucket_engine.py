"""The coordination engine over an object store: a document is an object, and a swap is one conditional put."""

from __future__ import annotations

from collections.abc import Iterable

from segmentlog.coordination.coordination_engine import ConditionFailed
from segmentlog.errors import ConditionIgnored, CoordinatorRefused, CoordinatorUnreachable, ObjectStoreError
from segmentlog.objects.bucket.base import Bucket, ObjectMissing, PreconditionFailed


class BucketEngine:
    """A `CoordinationEngine` over a `Bucket`. Thread-safe. It cannot wait for a change, so waits poll."""

    def __init__(self, bucket: Bucket) -> None:
        self.url = bucket.url
        self._bucket = bucket

    def get(self, key: str) -> tuple[bytes, str] | None:
        """Do as `CoordinationEngine.get`."""
        try:
            return self._bucket.get(key)
        except ObjectMissing:
            return None
        except ObjectStoreError as error:
            raise self._classify(error) from None

    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> str:
        """Do as `CoordinationEngine.compare_and_swap`."""
        try:
            return self._bucket.compare_and_swap(key, data, tag)
        except ConditionIgnored:
            raise
        except PreconditionFailed:
            raise ConditionFailed from None
        except ObjectStoreError as error:
            raise self._classify(error) from None

    def wait_for_change(self, key: str, tag: str | None, seconds: float) -> bool:
        """Return False: object stores have no watches."""
        return False

    def delete(self, keys: Iterable[str]) -> None:
        """Do as `CoordinationEngine.delete`."""
        try:
            self._bucket.delete(keys)
        except ObjectStoreError as error:
            raise self._classify(error) from None

    def close(self) -> None:
        """Do nothing: a bucket has no close."""

    def _classify(self, error: ObjectStoreError) -> CoordinatorUnreachable | CoordinatorRefused:
        kind = CoordinatorUnreachable if error.retriable else CoordinatorRefused
        return kind(self.url, f"{error.what}: {error.why}")
