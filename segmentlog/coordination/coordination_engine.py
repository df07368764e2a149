"""The interface of a coordination engine: it keeps small documents, and replaces one if its tag is still the given one.

Safety needs nothing else: sessions, leases, watches and clocks play no part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class ConditionFailed(Exception):
    """The document has another tag. An earlier attempt of the same swap may have succeeded without an answer."""


class CoordinationEngine(Protocol):
    """An object store, etcd or ZooKeeper: it keeps documents by key below one URL. Thread-safe.

    Methods raise `CoordinatorUnreachable` if a retry can succeed, and `CoordinatorRefused` if not.
    """

    url: str
    """The URL without secrets, for messages."""

    def get(self, key: str) -> tuple[bytes, str] | None:
        """Return (latest content, its tag), or None for a missing document."""

    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> str:
        """Replace the document that has this tag, and return the new tag; with None create the document.

        Raise `ConditionFailed` if the document has another tag, or exists although the tag is None. Then this call
        changed nothing. Raise `ConditionIgnored`. After every other error the outcome is unknown: the swap may have
        taken effect, or may still do so as long as the document has this tag.
        """

    def wait_for_change(self, key: str, tag: str | None, seconds: float) -> bool:
        """Return True when the document may have another tag, or after ``seconds``: then the caller reads it.

        Return False at once if the engine cannot wait: then the caller pauses. Raise no error.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete documents that `segmentlog cluster check` has created. A missing document is not an error."""

    def close(self) -> None:
        """End all calls of `wait_for_change`, and close connections. A second call does nothing."""
