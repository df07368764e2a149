"""A coordinator over an object store: the document is one object, and a swap is one conditional put."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from segmentlog.clock import Clock
from segmentlog.errors import ConditionIgnored, CoordinatorRefused, CoordinatorUnreachable, ObjectStoreError
from segmentlog.format.cluster_document import (
    CLUSTER_KEY,
    ClusterDocument,
    MalformedDocument,
    decode_document,
    encode_document,
)
from segmentlog.objects.bucket.base import Bucket, ObjectMissing, PreconditionFailed
from segmentlog.objects.bucket.upload_pool import new_nonce
from segmentlog.objects.coordination.cluster_coordinator import (
    DocumentVersion,
    SwapOutcome,
    SwapResult,
    VersionedDocument,
)

_POLL_S: Final = 1.0
"""Pause between two reads of `BucketCoordinator.wait`: on S3 a machine that waits all month pays about one dollar."""


class BucketCoordinator:
    """A `Coordinator` over a `Bucket`. Thread-safe.

    ``pause`` gets seconds, and returns true to end `wait` early: `threading.Event.wait` does both.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        key: str = CLUSTER_KEY,
        poll_s: float = _POLL_S,
        pause: Callable[[float], object] = time.sleep,
        clock: Clock | None = None,
    ) -> None:
        self.url = bucket.url
        self.key = key
        self._bucket = bucket
        self._poll_s = poll_s
        self._pause = pause
        self._clock = clock or Clock()

    def read(self) -> VersionedDocument | None:
        """Do as `Coordinator.read`."""
        try:
            data, tag = self._bucket.get(self.key)
            document = decode_document(data)
        except ObjectMissing:
            return None
        except ObjectStoreError as error:
            raise self._classify(error) from None
        except MalformedDocument as error:
            raise CoordinatorRefused(self.url, f"{self.key}: {error}") from None
        return VersionedDocument(document, DocumentVersion(document.version, tag))

    def swap(self, document: ClusterDocument, version: DocumentVersion | None) -> SwapResult:
        """Do as `Coordinator.swap`."""
        number = 1 if version is None else version.number + 1
        sent = replace(document, version=number, nonce=new_nonce())
        data = encode_document(sent)
        failure = None
        try:
            tag = self._bucket.compare_and_swap(self.key, data, None if version is None else version.tag)
            return SwapResult(SwapOutcome.SUCCEEDED, sent, VersionedDocument(sent, DocumentVersion(number, tag)))
        except ConditionIgnored:
            raise
        except PreconditionFailed:
            pass  # an earlier attempt of the client library may have succeeded: the nonce shows it
        except ObjectStoreError as error:
            failure = self._classify(error)
        found = self.resolve(sent, version)
        return found._replace(error=failure) if failure and found.outcome is SwapOutcome.UNKNOWN else found

    def resolve(self, sent: ClusterDocument, version: DocumentVersion | None) -> SwapResult:
        """Do as `Coordinator.resolve`."""
        try:
            current = self.read()
        except (CoordinatorUnreachable, CoordinatorRefused) as error:
            return SwapResult(SwapOutcome.UNKNOWN, sent, None, error)
        if current is not None and current.document.nonce == sent.nonce:
            outcome = SwapOutcome.SUCCEEDED
        elif (None if current is None else current.version) == version:
            outcome = SwapOutcome.UNKNOWN  # a request that got no answer may still arrive, and its condition holds
        else:
            outcome = SwapOutcome.LOST
        return SwapResult(outcome, sent, current)

    def wait(self, version: DocumentVersion | None, seconds: float) -> VersionedDocument | None:
        """Do as `Coordinator.wait`: read the object once a second."""
        ends_ms = self._clock.monotonic_ms() + round(seconds * 1000)
        while True:
            failure = None
            try:
                current = self.read()
            except CoordinatorUnreachable as error:
                failure = error
            else:
                if current is None and version is not None:
                    why = f"{self.key}: the cluster document is missing, and segmentlog never deletes it"
                    raise CoordinatorRefused(self.url, why)
                if current is not None and current.version != version:
                    return current
            left_s = (ends_ms - self._clock.monotonic_ms()) / 1000
            if left_s <= 0 and failure is not None:
                raise failure
            if left_s <= 0 or self._pause(min(self._poll_s, left_s)):
                return None

    def _classify(self, error: ObjectStoreError) -> CoordinatorUnreachable | CoordinatorRefused:
        kind = CoordinatorUnreachable if error.retriable else CoordinatorRefused
        return kind(self.url, f"{error.what}: {error.why}")
