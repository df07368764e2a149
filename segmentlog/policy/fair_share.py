"""Share a limit among partitions, so that a large backlog in one partition never starves the others.

There are two rules, for two kinds of limit:

- `split_by_backlog` splits a number of offsets in proportion to the backlogs, at least 1 for each partition.
- `Turns` is for a limit that one partition can use up: the partition that waits longest comes first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


def split_by_backlog(backlogs: Mapping[Key, int], limit: int) -> dict[Key, int]:
    """Split ``limit`` offsets (1 or more) among partitions with these backlogs; a backlog of 0 gets nothing.

    The rule of Spark's Kafka source: each partition gets ``limit`` times its part of all backlogs, rounded down, but
    at least 1. This can make the sum exceed ``limit``, by less than one offset for each partition that gets 1.
    The remainder of ``limit`` goes to the partitions with the largest fractions; Spark leaves it unused.
    """
    waiting = {key: backlog for key, backlog in backlogs.items() if backlog > 0}
    total = sum(waiting.values())
    if total <= limit:
        return waiting
    # Integers: a float would round numbers above 2^53.
    shares = {key: backlog * limit // total for key, backlog in waiting.items()}
    rounded_down = [key for key, share in shares.items() if share]
    shares = {key: max(share, 1) for key, share in shares.items()}
    # `left` is less than the number of keys in `rounded_down`. No key exceeds its backlog, because total > limit.
    left = max(limit - sum(shares.values()), 0)
    for key in sorted(rounded_down, key=lambda key: -(waiting[key] * limit % total))[:left]:
        shares[key] += 1
    return shares


class Turns(Generic[Key]):
    """Decides in which order keys (partitions) are served, if the first keys of a cycle may use up the limit.

    While a key waits, each other key is served at most once before it. Not thread-safe.
    """

    def __init__(self) -> None:
        self._since: dict[Key, int] = {}
        """For each key, the value of `_grants` when it was last served, or when it began to wait."""
        self._grants = 0

    def order(self, keys: Iterable[Key]) -> list[Key]:
        """Return the waiting ``keys``, those that wait longest first; ties keep their order.

        A key that is missing in this call is forgotten: its waiting time starts again when it returns.
        """
        self._since = {key: self._since.get(key, self._grants) for key in keys}
        return sorted(self._since, key=self._since.__getitem__)

    def record_served(self, key: Key) -> None:
        """Record that ``key`` got a part of the limit."""
        self._grants += 1
        self._since[key] = self._grants
