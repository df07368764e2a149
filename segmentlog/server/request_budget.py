"""Limit the cost of a request: the size of its response, and the work that continues after its client has left.

    distinct       answers elements that request the same thing once
    AnswerBudget   limits the size of the response: an element of a few bytes in the request may take kilobytes in the
                   response
    ClientGone     ends a request whose client has left; the server still handles the client's later requests

`RequestContext` applies all three: handlers loop over a request with `distinct`, `merged_topics` and `each`, and call
`reserve_room` before they describe something.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

Element = TypeVar("Element")

CHECK_INTERVAL_S: Final = 0.1
"""Interval at which the loop over a request's elements checks, by a system call, whether the client is connected."""


class ClientGone(Exception):
    """The client has disconnected during its request, so the handler stops.

    `KafkaConnection` still handles the client's later requests, without responses.
    """

    def __init__(self) -> None:
        super().__init__("the client left while its request was in progress")


class AnswerBudget:
    """Room left in a response. Not thread-safe."""

    __slots__ = ("_bytes_left", "_elements_left")

    def __init__(self, elements: int, size_bytes: int) -> None:
        self._elements_left = elements
        self._bytes_left = size_bytes

    def take(self, elements: int, size_bytes: int) -> bool:
        """Reserve room for ``elements`` and for ``size_bytes`` of text in all of them.

        Return False, and reserve nothing, if there is too little.
        """
        if elements > self._elements_left or size_bytes > self._bytes_left:
            return False
        self._elements_left -= elements
        self._bytes_left -= size_bytes
        return True


class MergedTopic(Generic[Element]):
    """One topic of a request, merged from all entries for it.

    topic        the first entry for the topic in the request
    partitions   the requested partitions, by number or another key; the last entry if there are several for a partition
    unclear      keys of partitions whose entries differ from each other
    """

    __slots__ = ("partitions", "topic", "unclear")

    def __init__(self, topic: Element) -> None:
        self.topic = topic
        self.partitions: dict[Any, Any] = {}
        self.unclear: set[Any] = set()


def merge_topics(
    topics: Iterable[Element], parts: str, part_key: tuple[str, ...], *key: str
) -> list[MergedTopic[Element]]:  # fmt: skip
    """Return each topic once, and each of its partitions once, in the order in which the request first names them.

    ``key``: fields that identify a topic. ``parts``: field that lists its partitions. ``part_key``: fields that
    identify an element of that list; () if the list contains partition numbers.
    """
    found: dict[Hashable, MergedTopic[Element]] = {}
    key_of, parts_of, part_key_of = attrgetter(*key), attrgetter(parts), attrgetter(*part_key) if part_key else identity
    for topic in topics:
        topic_key = key_of(topic)
        merged = found.get(topic_key)
        if merged is None:
            merged = found[topic_key] = MergedTopic(topic)
        partitions = merged.partitions
        for part in parts_of(topic):
            at = part_key_of(part)
            if at in partitions and partitions[at] != part:
                merged.unclear.add(at)
            partitions[at] = part
    return list(found.values())


def identity(value: Any) -> Any:
    """Return the argument. Used as the ``key`` function for elements that are their own keys."""
    return value
