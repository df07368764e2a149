"""The interface of the coordinator of a cluster: it keeps one document, and replaces it if its version is still N.

Safety needs nothing else: sessions, leases, watches and clocks play no part. During an outage of the coordinator the
leader continues to append and acknowledge. Only a change of leader or ISR waits for the end of the outage.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

from segmentlog.errors import CoordinatorRefused, CoordinatorUnreachable
from segmentlog.format.cluster_document import ClusterDocument


class DocumentVersion(NamedTuple):
    """Version of a document: its ``version`` field, and the tag that the coordinator compares."""

    number: int
    tag: str


class VersionedDocument(NamedTuple):
    """A document as the coordinator keeps it, with the version that the next swap must give."""

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
    """The document that the coordinator has now. It is None if reading failed, or before the first document."""
    error: CoordinatorUnreachable | CoordinatorRefused | None = None
    """Why the outcome is unknown, if the coordinator gave a reason."""


class Coordinator(Protocol):
    """A place that keeps the document of one cluster. Thread-safe."""

    url: str
    """The URL without secrets, for messages."""

    def read(self) -> VersionedDocument | None:
        """Return the document, or None before the first one. Raise `CoordinatorUnreachable`, `CoordinatorRefused`."""

    def swap(self, document: ClusterDocument, version: DocumentVersion | None) -> SwapResult:
        """Replace the document of this version; with None create the first.

        Set ``version`` and ``nonce`` of the new document. Read the document if the answer does not show the outcome.
        Raise `ConditionIgnored`; `MalformedDocument` if the document contradicts itself, and then nothing was sent. All
        other failures leave the outcome unknown, and `SwapResult.error` has them.
        """

    def resolve(self, sent: ClusterDocument, version: DocumentVersion | None) -> SwapResult:
        """Read the document, and return what became of an earlier swap of ``sent`` against this version."""

    def wait(self, version: DocumentVersion | None, seconds: float) -> VersionedDocument | None:
        """Wait until the document has another version, and return it; None after this number of seconds.

        Raise `CoordinatorUnreachable` if the last attempt to read failed, and `CoordinatorRefused` at once.
        """
