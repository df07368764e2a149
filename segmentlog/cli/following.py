"""Consumers of what was named on the command line: topics, partitions, patterns of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segmentlog.cli.options import Selector, chosen_partitions, matching_topics

if TYPE_CHECKING:
    from segmentlog.consuming.consumer import Consumer
    from segmentlog.store import LogStore


def consumer_of(store: LogStore, selectors: tuple[Selector, ...], *, follow: bool, **settings: Any) -> Consumer:
    """A consumer of everything that is named; one that follows reads what fits a pattern later, too.

    Following, it also reads partitions that do not fit: see `Selector.fits`. Raises `UnknownTopic` for what names
    nothing, unless it is a pattern and may come.
    """
    wanted: list[str | tuple[str, int]] = []
    for selector in selectors:
        if selector.number is not None and not selector.has_pattern:
            matching_topics(store, (selector.topic,))  # a name that is not there gets its advice
            wanted.append((selector.topic, selector.number))
        elif follow:
            name = selector.topic
            if selector.may_come and not selector.has_pattern and name not in store.topics():
                name = f"{name[:-1]}[{name[-1]}]"  # a pattern, which may be waited for, that only this name fits
            elif not selector.has_pattern:
                matching_topics(store, (name,))
            wanted.append(name)  # partitions that are added later, too
        else:
            wanted.extend((topic.name, number) for topic, number in chosen_partitions(store, selector))
    return store.consumer(*wanted, follow=follow, **settings)
