"""Keys of uploaded objects that no manifest lists yet. The next manifest refers to them or marks them for deletion."""

from __future__ import annotations

from collections.abc import Iterable, Set


class Orphans:
    """The set of keys that one shipper has uploaded and not published. Not thread-safe.

    Add a key before its upload starts, so that the object of an interrupted upload is marked for deletion.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()

    @property
    def keys(self) -> Set[str]:
        """All keys in the set."""
        return self._keys

    def add(self, keys: Iterable[str]) -> None:
        """Add keys of objects that are about to be uploaded."""
        self._keys.update(keys)

    def remove(self, accounted: Set[str]) -> None:
        """Remove keys that a published manifest refers to or marks for deletion."""
        self._keys -= accounted
