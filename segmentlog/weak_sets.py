"""Read a weak set while other threads add members."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import weakref

T = TypeVar("T")


def members_of(weak: weakref.WeakSet[T]) -> list[T]:
    """Return the members of a weak set. Other threads may add members meanwhile; these may be missing.

    `list(weak)` and `weak.copy()` are not safe: both loop in Python, and raise RuntimeError if a thread adds a member
    meanwhile.
    """
    while True:
        try:
            return list(weak)
        except RuntimeError:  # the set has grown: try again
            continue
