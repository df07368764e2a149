"""Choose the connection or request to drop at a limit: one of the address that has the most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_IPV6_NETWORK_GROUPS = 4
"""An internet provider's customer has at least an IPv6 /64, and can use each address in it."""


class ByAddress(Generic[T]):
    """Items that clients hold, such as connections or places in a queue, each with the address of its client.

    `oldest` and `newest` pick an item of the address that has most items, so that a client with many connections cannot
    drive out a client with few. Not thread-safe.
    """

    def __init__(self) -> None:
        self._networks: dict[T, str] = {}
        self._items: dict[str, dict[T, None]] = {}
        """Items of each network, in order of addition; no network is empty."""

    def __len__(self) -> int:
        return len(self._networks)

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items, in order of addition."""
        return iter(self._networks)

    def __contains__(self, item: T) -> bool:
        return item in self._networks

    def add(self, item: T, host: str) -> None:
        """Add a hashable item that is not contained yet."""
        network = network_of(host)
        self._networks[item] = network
        self._items.setdefault(network, {})[item] = None

    def discard(self, item: T) -> None:
        """Remove an item, if it is contained."""
        network = self._networks.pop(item, None)
        if network is not None:
            items = self._items[network]
            del items[item]
            if not items:
                del self._items[network]

    def count(self, host: str) -> int:
        """Return the number of items of an address."""
        return len(self._items.get(network_of(host), ()))

    def oldest(self, host: str | None = None, may_be: Callable[[T], bool] | None = None) -> T | None:
        """Return the oldest item of the address with the most items, or of ``host`` if given, or else None.

        With ``may_be``, return the oldest item for which ``may_be`` returns True. The address with the most items comes
        first, then the address with the next lower number.
        """
        if may_be is None:
            return next(iter(self._crowd(host)), None)
        crowds = sorted(self._items.values(), key=len, reverse=True) if host is None else [self._crowd(host)]
        return next((item for items in crowds for item in items if may_be(item)), None)

    def newest(self) -> T | None:
        """Return the newest item of the address with the most items; None if this object is empty."""
        return next(reversed(self._crowd(None)), None)

    def _crowd(self, host: str | None) -> dict[T, None]:
        if host is not None:
            return self._items.get(network_of(host), {})
        return max(self._items.values(), key=len, default={})


def network_of(host: str) -> str:
    """Return the network that counts as one client: an IPv4 address, or the /64 of an IPv6 address."""
    if ":" not in host:
        return host
    host = host.partition("%")[0]
    if "." in host:  # an IPv4-mapped IPv6 address
        return host.rpartition(":")[2]
    head, has_gap, tail = host.partition("::")
    groups = head.split(":") if head else []
    if has_gap:
        trailing = tail.split(":") if tail else []
        groups += ["0"] * (8 - len(groups) - len(trailing)) + trailing
    return ":".join(group.lstrip("0") or "0" for group in groups[:_IPV6_NETWORK_GROUPS])
