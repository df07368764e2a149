"""Types of options and arguments: sizes, durations, places in a log, topics and partitions."""

from __future__ import annotations

import fnmatch
import math
import os
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from segmentlog.consuming.start_position import StartPosition as StartPosition
from segmentlog.consuming.start_position import parse_start_position as parse_start_position
from segmentlog.consuming.start_position import resolve_position as resolve_position
from segmentlog.errors import UnknownTopic

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from segmentlog.log.partition import Partition
    from segmentlog.store import LogStore, Topic

    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic only since click 8.3

PATTERN_CHARACTERS = frozenset("*?[")
_PARTITION_CHARACTERS = frozenset("0123456789*?[]!-")


# ---------------------------------------------------------------- sizes and times


class _Size(ParamType):
    """Option type of a size in bytes, or -1 for no limit. With ``limited``, the size must be 1 or more."""

    name = "size"

    def __init__(self, *, limited: bool = False) -> None:
        self._limited = limited

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from segmentlog.quantities import parse_size

        try:
            size_bytes = parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self._limited and size_bytes < 1:
            self.fail(f"{value!r}: a limit is required; give a size such as 100MiB", param, ctx)
        return size_bytes


class _Duration(ParamType):
    """Option type of a duration in milliseconds. A number without a unit counts units of ``bare_ms``."""

    name = "duration"

    def __init__(self, bare_ms: int = 1) -> None:
        self._bare_ms = bare_ms

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from segmentlog.quantities import parse_duration_ms

        try:
            duration_ms = parse_duration_ms(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        bare = isinstance(value, str) and re.fullmatch(r"[0-9_]+", value.strip())
        return duration_ms * self._bare_ms if bare else duration_ms


SIZE = _Size()
LIMITED_SIZE = _Size(limited=True)
DURATION_MS = _Duration()
DURATION_S = _Duration(bare_ms=1000)


class FiniteRange(click.FloatRange):
    """Option type of a finite number in a range. Rejects `nan`, which click accepts in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


# ---------------------------------------------------------------- places in a log


class _PositionType(ParamType):
    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> StartPosition:
        if isinstance(value, StartPosition):
            return value
        try:
            return parse_start_position(value, time.time_ns() // 1_000_000)
        except ValueError as error:
            self.fail(str(error), param, ctx)


POSITION = _PositionType()


# ---------------------------------------------------------------- topics and partitions


class Selector(NamedTuple):
    """``TOPIC`` or ``TOPIC/PARTITION``; both may be patterns."""

    topic: str
    partition: str = "*"
    can_match_later: bool = False
    """Whether topic or partition is a pattern, so that matches may be created later."""

    @property
    def has_pattern(self) -> bool:
        """Whether several topics may match."""
        return bool(PATTERN_CHARACTERS & set(self.topic))

    @property
    def number(self) -> int | None:
        """The number of the partition, if it is not a pattern."""
        return int(self.partition) if self.partition.isdecimal() else None

    def fits(self, topic: str, partition: int) -> bool:
        return fnmatch.fnmatchcase(topic, self.topic) and fnmatch.fnmatchcase(str(partition), self.partition)


def _has_open_bracket(pattern: str) -> bool:
    """Return whether a ``[`` has no ``]``. fnmatch would match it literally, but no topic name contains a bracket."""
    at = pattern.find("[")
    while at >= 0:
        at += 2 if pattern[at + 1 : at + 2] == "!" else 1
        end = pattern.find("]", at + 1)  # a ']' as the first character is literal
        if end < 0:
            return True
        at = pattern.find("[", end + 1)
    return False


class _SelectorType(ParamType):
    name = "topic"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Selector:
        if isinstance(value, Selector):
            return value
        topic, slash, partition = value.partition("/")
        decimal = partition.isascii() and partition.isdecimal()
        is_pattern = PATTERN_CHARACTERS & set(partition) and set(partition) <= _PARTITION_CHARACTERS
        if slash and (not topic or not (decimal or is_pattern)):
            self.fail(f"{value!r} is not TOPIC or TOPIC/PARTITION, such as clicks or clicks/0", param, ctx)
        if _has_open_bracket(topic) or _has_open_bracket(partition):
            self.fail(f"{value!r}: a '[' has no ']'; write for example 'clicks/[01]'", param, ctx)
        can_match_later = bool(PATTERN_CHARACTERS & set(value))
        if not slash:
            return Selector(topic, can_match_later=can_match_later)
        return Selector(topic, str(int(partition)) if decimal else partition, can_match_later)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return complete_topic(ctx, param, incomplete)


SELECTOR = _SelectorType()


def complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of topics from the folders that look like topics, without opening the store."""
    from click.shell_completion import CompletionItem

    folder = ctx.find_root().params.get("directory") or "."
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [
        CompletionItem(name)
        for name in names
        if name.startswith(incomplete) and os.path.exists(f"{folder}/{name}/topic.json")
    ]


def require_topic(store: LogStore, name: str, *, to_write: bool = False) -> Topic:
    """Return the topic of that name.

    Raises `UnknownTopic`, whose message suggests the closest name or the command that creates the topic.
    """
    try:
        return store.topic(name)
    except UnknownTopic as error:
        if error.topic != name:
            raise
        raise UnknownTopic(name, f"it does not exist; {_advice(store, name, to_write)}") from None


def suggest_topic(store: LogStore, name: str) -> str:
    """Return a question such as "did you mean 'clicks'?"; empty if no topic has a similar name."""
    import difflib

    close = difflib.get_close_matches(name, store.topics(), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _advice(store: LogStore, name: str, to_write: bool) -> str:
    if question := suggest_topic(store, name):
        return question
    if to_write or not store.topics():
        return f"create it with 'segmentlog create {name}'"
    return "'segmentlog topics' lists the topics"


def match_topics(store: LogStore, patterns: tuple[str, ...]) -> list[str]:
    """Return the names of matching topics, each once. Raises `UnknownTopic` for a pattern without a match."""
    found: dict[str, None] = {}
    for pattern in patterns:
        if not PATTERN_CHARACTERS & set(pattern):
            found[require_topic(store, pattern).name] = None
            continue
        names = fnmatch.filter(store.topics(), pattern)
        if not names:
            raise UnknownTopic(pattern, "no topic matches; 'segmentlog topics' lists them")
        found.update(dict.fromkeys(names))
    return list(found)


def open_partitions(store: LogStore, selector: Selector) -> list[Partition]:
    """Open and return the partitions of a selector whose topic is not a pattern. Raises `UnknownTopic`."""
    topic = require_topic(store, selector.topic)
    if selector.number is not None:
        return [topic.partition(selector.number)]
    numbers = [number for number in range(topic.partition_count) if selector.fits(topic.name, number)]
    return [topic.partition(number) for number in numbers or _raise_no_match(selector, topic.partition_count)]


def _raise_no_match(selector: Selector, count: int) -> NoReturn:
    raise UnknownTopic(selector.topic, f"no partition matches {selector.partition!r}, there are 0 to {count - 1}")


def match_partitions(store: LogStore, selector: Selector | None) -> list[tuple[Topic, int]]:
    """Return the partitions that match a selector, without opening them.

    If ``selector`` is None, returns all partitions of all topics except internal topics. Raises `UnknownTopic` for a
    topic that does not exist. A partition number is not checked: opening the partition raises `UnknownTopic`.
    """
    if selector is None:
        names = store.topics()
    elif selector.has_pattern:
        names = match_topics(store, (selector.topic,))
    else:
        topic = require_topic(store, selector.topic)
        if selector.number is not None:
            return [(topic, selector.number)]
        names = [topic.name]
    topics = {topic: topic.partition_count for topic in map(store.topic, names)}
    chosen = [
        (topic, number)
        for topic, count in topics.items()
        for number in range(count)
        if selector is None or selector.fits(topic.name, number)
    ]
    if selector is not None and not chosen:
        _raise_no_match(selector, max(topics.values()))
    return chosen


def open_only_partition(store: LogStore, selector: Selector, why: str) -> Partition:
    """Open the partition that the selector names, or the only partition of the topic.

    Raises UsageError, with the reason ``why``, if the topic has several partitions.
    """
    partitions = open_partitions(store, selector)
    if len(partitions) != 1:
        raise click.UsageError(f"{selector.topic} has {len(partitions)} partitions, but {why}: name one, such as"
                               f" {selector.topic}/0")  # fmt: skip
    return partitions[0]


json_values_option = click.option(
    "--json-values", is_flag=True, help="Like --json, but print values that are JSON as JSON and not as text."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")


skip_damaged_option = click.option(
    "--skip-damaged", is_flag=True, help="Skip damaged and unreadable batches, and print their offsets."
)
"""Use it with `segmentlog.cli.common.SkippedRanges`."""
