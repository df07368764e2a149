"""What one request may cost: the elements and bytes of its answer, and the time after its client has left.

    once           elements that ask for the same thing become one element
    AnswerBudget   room for what the answer describes; a request is a few bytes an element, its answer may be kilobytes
    ClientGone     ends the work on a request that nobody waits for; requests behind it are done

`Call` applies all three: `Call.once`, `Call.topics_once` and `Call.each` are the loops over what a request names, and
`Call.takes_room` is asked before something is described.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

Element = TypeVar("Element")

LOOK_S: Final = 0.1
"""How often the loop over a request's elements looks whether the client is still there. A look is a system call."""


class ClientGone(Exception):
    """The client has closed its connection: nobody waits for the answer, and the rest of the request is not done.

    `Connection` does the requests that the client sent behind it, and answers none of them.
    """

    def __init__(self) -> None:
        super().__init__("it left while its request was being done")


class AnswerBudget:
    """The room that an answer has left. For one thread."""

    __slots__ = ("_bytes_left", "_elements_left")

    def __init__(self, elements: int, size_bytes: int) -> None:
        self._elements_left = elements
        self._bytes_left = size_bytes

    def take(self, elements: int, size_bytes: int) -> bool:
        """Take room for so many elements with so many bytes of text in all. False, and nothing is taken, where there
        is too little.
        """
        if elements > self._elements_left or size_bytes > self._bytes_left:
            return False
        self._elements_left -= elements
        self._bytes_left -= size_bytes
        return True


class TopicOnce(Generic[Element]):
    """One topic of a request, with everything that the request asks about it.

    topic        the first of the request's entries for it
    partitions   what is asked of each partition, by number or whatever identifies it; of several entries the last
    unclear      those of them of which different things are asked
    """

    __slots__ = ("partitions", "topic", "unclear")

    def __init__(self, topic: Element) -> None:
        self.topic = topic
        self.partitions: dict[Any, Any] = {}
        self.unclear: set[Any] = set()


def topics_once(
    topics: Iterable[Element], parts: str, part_key: tuple[str, ...], *key: str
) -> list[TopicOnce[Element]]:  # fmt: skip
    """Each topic once, and each of its partitions once, in the order in which the request first names them.

    ``key`` are the topics' fields that identify a topic. ``parts`` is the field that lists what is asked of its
    partitions, ``part_key`` are the fields of its elements that identify what is answered; () where it lists numbers.
    """
    found: dict[Hashable, TopicOnce[Element]] = {}
    key_of, parts_of, part_key_of = attrgetter(*key), attrgetter(parts), attrgetter(*part_key) if part_key else itself
    for topic in topics:
        what = key_of(topic)
        one = found.get(what)
        if one is None:
            one = found[what] = TopicOnce(topic)
        partitions = one.partitions
        for part in parts_of(topic):
            at = part_key_of(part)
            if at in partitions and partitions[at] != part:
                one.unclear.add(at)
            partitions[at] = part
    return list(found.values())


def itself(value: Any) -> Any:
    """For elements that are what they ask for."""
    return value
