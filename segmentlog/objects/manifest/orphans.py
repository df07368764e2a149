"""Objects that were put, and no manifest refers to: the next one condemns them, unless they are of use still."""

from __future__ import annotations

from collections.abc import Iterable, Set


class Orphans:
    """Of one shipper; whoever puts an object adds its name first. For one thread at a time."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    @property
    def keys(self) -> Set[str]:
        """The names of all of them."""
        return self._keys

    def add(self, keys: Iterable[str]) -> None:
        """Until a manifest says otherwise."""
        self._keys.update(keys)

    def settle(self, said: Set[str]) -> None:
        """A manifest that lies there says what becomes of these: it refers to them, or condemns them."""
        self._keys -= said
