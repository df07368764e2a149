"""The coordinator of a cluster keeps one document in a coordination engine, and replaces it if its version is still N.

During an outage of the engine the leader continues to append and acknowledge. Only a change of leader or ISR waits for
the end of the outage.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec.structs import replace

from segmentlog.clock import Clock
from segmentlog.coordination.coordination_engine import ConditionFailed, CoordinationEngine
from segmentlog.errors import CoordinatorRefused, CoordinatorUnreachable
from segmentlog.format.cluster_document import (
    CLUSTER_KEY,
    ClusterDocument,
    MalformedDocument,
    decode_document,
    encode_document,
)
from segmentlog.objects.bucket.upload_pool import new_nonce
from segmentlog.storage import fork_safety

_POLL_S: Final = 1.0
"""Pause between two reads of `Coordinator.wait`: on S3 a machine that waits all month pays about one dollar."""
_WATCH_S: Final = 5.0
"""Longest time without a read in `Coordinator.wait`, because a watch can end without notice."""


class DocumentVersion(NamedTuple):
    """Version of a document: its ``version`` field, and the tag that the engine compares."""

    number: int
    tag: str


class VersionedDocument(NamedTuple):
    """A document as the engine keeps it, with the version that the next swap must give."""

    document: ClusterDocument
    version: DocumentVersion


class SwapOutcome(enum.Enum):
    """Whether a swap replaced the document."""

    SUCCEEDED = "succeeded"
    """The document of this swap is the current one."""
    LOST = "lost"
    """Another document is the current one, and this swap cannot take effect later.

    It may have taken effect in between, if the version has risen by more than one.
    """
    UNKNOWN = "unknown"
    """The swap may have taken effect, or may still do so until another swap succeeds."""


class SwapResult(NamedTuple):
    """Result of a swap."""

    outcome: SwapOutcome
    sent: ClusterDocument
    """The document with the ``version`` and ``nonce`` of this swap, for `Coordinator.resolve`."""
    current: VersionedDocument | None
    """The document that the engine has now. It is None if reading failed, or before the first document."""
    error: CoordinatorUnreachable | CoordinatorRefused | None = None
    """Why the outcome is unknown, if the engine gave a reason."""


class Coordinator:
    """The document of one cluster, in a coordination engine. Thread-safe. A forked child can continue to use it.

    ``pause`` gets seconds, and returns true to end `wait` early. By default it is an event that `close` sets.
    """

    def __init__(
        self,
        engine: CoordinationEngine,
        *,
        key: str = CLUSTER_KEY,
        poll_s: float = _POLL_S,
        pause: Callable[[float], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.url = engine.url
        """The URL without secrets, for messages."""
        self.key = key
        self._engine = engine
        self._poll_s = poll_s
        self._closed = fork_safety.event(self, "_closed")
        self._pause = pause
        self._clock = clock or Clock()

    def read(self) -> VersionedDocument | None:
        """Return the document, or None before the first one. Raise `CoordinatorUnreachable`, `CoordinatorRefused`."""
        found = self._engine.get(self.key)
        if found is None:
            return None
        data, tag = found
        try:
            document = decode_document(data)
        except MalformedDocument as error:
            raise CoordinatorRefused(self.url, f"{self.key}: {error}") from None
        return VersionedDocument(document, DocumentVersion(document.version, tag))

    def swap(self, document: ClusterDocument, version: DocumentVersion | None) -> SwapResult:
        """Replace the document of this version; with None create the first.

        Set ``version`` and ``nonce`` of the new document. Read the document if the answer does not show the outcome.
        Raise `ConditionIgnored`; `MalformedDocument` if the document contradicts itself, and then nothing was sent. All
        other failures leave the outcome unknown, and `SwapResult.error` has them.
        """
        number = 1 if version is None else version.number + 1
        sent = replace(document, version=number, nonce=new_nonce())
        data = encode_document(sent)
        failure = None
        try:
            tag = self._engine.compare_and_swap(self.key, data, None if version is None else version.tag)
            return SwapResult(SwapOutcome.SUCCEEDED, sent, VersionedDocument(sent, DocumentVersion(number, tag)))
        except ConditionFailed:
            pass  # an earlier attempt of the engine may have succeeded: the nonce shows it
        except (CoordinatorUnreachable, CoordinatorRefused) as error:
            failure = error
        found = self.resolve(sent, version)
        return found._replace(error=failure) if failure and found.outcome is SwapOutcome.UNKNOWN else found

    def resolve(self, sent: ClusterDocument, version: DocumentVersion | None) -> SwapResult:
        """Read the document, and return what became of an earlier swap of ``sent`` against this version."""
        try:
            current = self.read()
        except (CoordinatorUnreachable, CoordinatorRefused) as error:
            return SwapResult(SwapOutcome.UNKNOWN, sent, None, error)
        if current is not None and current.document.nonce == sent.nonce:
            outcome = SwapOutcome.SUCCEEDED
        elif current is None or _is_before(current.version, version):
            # A request without an answer may still arrive, and its condition holds. Or this server lags.
            outcome = SwapOutcome.UNKNOWN
        else:
            outcome = SwapOutcome.LOST
        return SwapResult(outcome, sent, current)

    def wait(self, version: DocumentVersion | None, seconds: float) -> VersionedDocument | None:
        """Wait until the document has another version, and return it; None after this number of seconds, or `close`.

        Watch the document if the engine can do it, and read it at least every few seconds. Raise
        `CoordinatorUnreachable` if the last attempt to read failed, and `CoordinatorRefused` at once.
        """
        tag = None if version is None else version.tag
        ends_ms = self._clock.monotonic_ms() + round(seconds * 1000)
        while not self._closed.is_set():
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
            if left_s <= 0:
                return None
            if failure is None and self._engine.wait_for_change(self.key, tag, min(_WATCH_S, left_s)):
                continue
            if (self._pause or self._closed.wait)(min(self._poll_s, left_s)):
                return None
        return None

    def close(self) -> None:
        """End all calls of `wait`, and close the connections. No other call may follow."""
        self._closed.set()
        self._engine.close()


def _is_before(current: DocumentVersion, version: DocumentVersion | None) -> bool:
    """Return whether the document has this version, or an older one."""
    return version is not None and (current == version or current.number < version.number)
