"""Consumers of what was named on the command line: topics, partitions, patterns of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segmentlog.cli.common import say
from segmentlog.cli.option_types import Selector, chosen_partitions, existing_topic, meant_instead

if TYPE_CHECKING:
    from segmentlog.consuming.consumer import Consumer
    from segmentlog.store import LogStore


def consumer_of(store: LogStore, selectors: tuple[Selector, ...], *, follow: bool, **settings: Any) -> Consumer:
    """A consumer of everything that is named; one that follows reads what fits a pattern later, too.

    Following, it also reads partitions that do not fit: see `Selector.fits`. Raises `UnknownTopic` for what names
    nothing, unless it follows: then it waits, and the library logs a warning.
    """
    wanted: list[str | tuple[str, int]] = []
    for selector in selectors:
        is_awaited = follow and not selector.has_pattern and selector.topic not in store.topics(internal=True)
        if is_awaited and (question := meant_instead(store, selector.topic)):
            say(f"topic {selector.topic!r} does not exist: {question}")
        if selector.number is not None and not selector.has_pattern:
            if not follow:
                existing_topic(store, selector.topic)  # a name that does not exist gets its advice
            wanted.append((selector.topic, selector.number))
        elif follow:
            wanted.append(selector.topic)  # partitions that are added later, too
        else:
            wanted.extend((topic.name, number) for topic, number in chosen_partitions(store, selector))
    return store.consumer(*wanted, follow=follow, **settings)
