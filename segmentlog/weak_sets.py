"""Reading a weak set that other threads add to."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import weakref

T = TypeVar("T")


def members_of(weak: weakref.WeakSet[T]) -> list[T]:
    """The members of a weak set. Safe while other threads add members, which then may or may not be among them.

    `list(weak)` and `weak.copy()` are not: both loop in Python, and raise RuntimeError if a thread adds one meanwhile.
    """
    while True:
        try:
            return list(weak)
        except RuntimeError:  # it has grown: look again
            continue
