"""Topics by name and by id: what clients ask for, and what the store calls it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from segmentlog.errors import UnknownTopic
from segmentlog.format.file_names import INTERNAL_TOPICS

if TYPE_CHECKING:
    from segmentlog.store import LogStore


def wire_id(topic_id: str) -> bytes:
    """A topic's id as the protocol has it."""
    return uuid.UUID(topic_id).bytes


def wire_epoch(epoch: int) -> int:
    """A partition's epoch as the protocol has it: 31 bits, as in the batches that are sent."""
    return epoch & 0x7FFFFFFF


def is_visible(name: str) -> bool:
    """Whether clients may know of a topic: the store's own topics are hidden from them."""
    return name not in INTERNAL_TOPICS


class ForeignTopicId(UnknownTopic):
    """The name belongs to a topic with another id than the client asked for: that one was deleted, or renamed."""


class TopicIds:
    """The names of topics that clients know by id. Thread-safe."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._names: dict[bytes, tuple[str, str]] = {}

    def known(self, topic_id: bytes) -> tuple[str, str] | None:
        """Return (the topic's name now, its id as text), or None when no topic is known to have this id.

        Reads at most one file. `scan` finds topics that are not known yet.
        """
        known = self._names.get(topic_id)
        if known is None:
            return None
        try:
            if self._store.topic(known[0]).id == known[1]:
                return known
        except UnknownTopic:
            pass
        self._names.pop(topic_id, None)
        return None

    def scan(self, topic_id: bytes) -> bool:
        """Look for the topic with this id, in the files of all topics if need be; False when there is none.

        Afterwards every topic that was found is `known`: a request has to scan once only, however many ids it has.
        """
        text = str(uuid.UUID(bytes=topic_id))
        for found, name in self._store.topic_names([text]).items():
            if is_visible(name):
                self._names[wire_id(found)] = (name, found)
        return topic_id in self._names
