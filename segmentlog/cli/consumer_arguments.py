"""Create consumers for the topics, partitions and patterns of a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segmentlog.cli.common import say
from segmentlog.cli.option_types import Selector, match_partitions, require_topic, suggest_topic

if TYPE_CHECKING:
    from segmentlog.consuming.consumer import Consumer
    from segmentlog.store import LogStore


def create_consumer(store: LogStore, selectors: tuple[Selector, ...], *, follow: bool, **settings: Any) -> Consumer:
    """Return a consumer of the topics and partitions that match the selectors.

    With ``follow``, it also reads matching topics that are created later. It may return records of partitions that do
    not match: the caller must filter them with `Selector.fits`. Raises `UnknownTopic` for a name that does not exist;
    with ``follow``, it waits for the topic instead, and the library logs a warning.
    """
    sources: list[str | tuple[str, int]] = []
    for selector in selectors:
        is_awaited = follow and not selector.has_pattern and selector.topic not in store.topics(internal=True)
        if is_awaited and (question := suggest_topic(store, selector.topic)):
            say(f"topic {selector.topic!r} does not exist: {question}")
        if selector.number is not None and not selector.has_pattern:
            if not follow:
                require_topic(store, selector.topic)  # raises UnknownTopic with advice
            sources.append((selector.topic, selector.number))
        elif follow:
            sources.append(selector.topic)  # includes partitions that are added later
        else:
            sources.extend((topic.name, number) for topic, number in match_partitions(store, selector))
    return store.consumer(*sources, follow=follow, **settings)
