"""Cached topic names and partition counts, which groups of the consumer protocol need with most heartbeats."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from segmentlog.clock import Clock
from segmentlog.errors import InvalidTopicName, UnknownTopic
from segmentlog.server.groups.consumer_types import TopicShape
from segmentlog.server.topic_ids import is_visible

if TYPE_CHECKING:
    from segmentlog.store import LogStore

_LIST_MS: Final = 2_000
"""Time for which the list of all topics is cached."""


class StoreCatalog:
    """The `TopicCatalog` of a store. Thread-safe."""

    def __init__(self, store: LogStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._names: tuple[int, tuple[str, ...]] | None = None

    def shapes(self, names: Collection[str]) -> Mapping[str, TopicShape]:
        """Return id and partition count of each topic that exists. Raises OSError and errors of the store."""
        found = {}
        for name in names:
            if is_visible(name):
                try:
                    topic = self._store.topic(name)
                    found[name] = TopicShape(topic.id, topic.partition_count)
                except (UnknownTopic, InvalidTopicName):
                    pass
        return found

    def names(self) -> Collection[str]:
        """Return all topics that clients can see. Raises as `shapes` does.

        Returns the same object until the list changes, so that callers can compare by identity.
        """
        now_ms = self._clock.monotonic_ms()
        known = self._names
        if known is not None and 0 <= now_ms - known[0] < _LIST_MS:
            return known[1]
        names = tuple(name for name in self._store.topics() if is_visible(name))
        if known is not None and known[1] == names:
            names = known[1]
        self._names = (now_ms, names)
        return names
