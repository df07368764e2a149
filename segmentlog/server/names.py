"""Topics by name and by id: what clients ask for, and what the store calls it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from segmentlog.errors import UnknownTopic
from segmentlog.format.names import INTERNAL_TOPICS

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


class TopicIds:
    """The names of topics that clients know by id. Thread-safe."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._names: dict[bytes, tuple[str, str]] = {}

    def name_of(self, topic_id: bytes) -> str | None:
        """What the topic is called now; None when there is none with this id that clients may know of."""
        known = self._names.get(topic_id)
        if known is not None:
            name, text = known
            try:
                if self._store.topic(name).id == text:
                    return name
            except UnknownTopic:
                pass
            self._names.pop(topic_id, None)
        text = str(uuid.UUID(bytes=topic_id))
        name = self._store.topic_names([text]).get(text, "")
        if not name or not is_visible(name):
            return None
        self._names[topic_id] = (name, text)
        return name
