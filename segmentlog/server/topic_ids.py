"""Convert topic names, ids and epochs between the store's form and the protocol's."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from segmentlog.errors import UnknownTopic
from segmentlog.format.file_names import INTERNAL_TOPICS

if TYPE_CHECKING:
    from segmentlog.store import LogStore


def wire_id(topic_id: str) -> bytes:
    """Return a topic id in the protocol's form, 16 bytes."""
    return uuid.UUID(topic_id).bytes


def wire_epoch(epoch: int) -> int:
    """Return an epoch in the protocol's form: its lower 31 bits, as in the batches that are sent."""
    return epoch & 0x7FFFFFFF


def is_visible(name: str) -> bool:
    """Return whether clients can see a topic: the store's internal topics are hidden."""
    return name not in INTERNAL_TOPICS


class ForeignTopicId(UnknownTopic):
    """The name belongs to a topic with another id than the request has: the requested topic was deleted or renamed."""


class TopicIds:
    """Cache of the names of topics that clients identify by id. Thread-safe."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._names: dict[bytes, tuple[str, str]] = {}

    def lookup(self, topic_id: bytes) -> tuple[str, str] | None:
        """Return (the topic's current name, its id as text), or None if the id is not cached.

        Reads at most one file. Call `scan` for ids that are not cached.
        """
        entry = self._names.get(topic_id)
        if entry is None:
            return None
        try:
            if self._store.topic(entry[0]).id == entry[1]:
                return entry
        except UnknownTopic:
            pass
        self._names.pop(topic_id, None)
        return None

    def scan(self, topic_id: bytes) -> bool:
        """Search the files of all topics for this id and cache what they contain. Return False if no topic has it.

        A request needs at most one scan, however many ids it has: afterwards `lookup` finds every topic.
        """
        text = str(uuid.UUID(bytes=topic_id))
        for found, name in self._store.topic_names([text]).items():
            if is_visible(name):
                self._names[wire_id(found)] = (name, found)
        return topic_id in self._names
