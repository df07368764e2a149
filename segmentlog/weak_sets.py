"""Read a weak set that other threads add to."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import weakref

T = TypeVar("T")


def members_of(weak: weakref.WeakSet[T]) -> list[T]:
    """Return the members of a weak set. Safe while other threads add members, which may or may not be included.

    `list(weak)` and `weak.copy()` are not safe: both loop in Python, and raise RuntimeError if a thread adds a member
    meanwhile.
    """
    while True:
        try:
            return list(weak)
        except RuntimeError:  # the set has grown: try again
            continue
