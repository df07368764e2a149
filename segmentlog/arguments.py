"""Arguments of public functions: taken as a person means them, or refused by name, value and what is wanted."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from segmentlog.errors import InvalidConfig
from segmentlog.format.file_names import check_topic_name
from segmentlog.quantities import INT64_MAX
from segmentlog.records import TopicPartition


def as_int(name: str, value: Any, least: int, most: int = INT64_MAX, *, wanted: str = "") -> int:
    """A whole number from ``least`` to ``most``; numpy's are whole numbers too, True and 1.0 are not.

    Raises `InvalidConfig`.
    """
    number = None
    if not isinstance(value, bool) and type(value).__name__ not in _BOOLS:
        try:
            number = operator.index(value)
        except TypeError:
            number = None
    if number is None or not least <= number <= most:
        upto = f"from {least} on" if most == INT64_MAX else f"from {least} to {most}"
        raise InvalidConfig(name, value, wanted or f"a whole number {upto}")
    return number


_BOOLS = frozenset(("bool", "bool_"))  # and numpy's


def as_offset(name: str, value: Any) -> int:
    """A whole number, whether or not a log has it as an offset. Raises `InvalidConfig`."""
    return as_int(name, value, -INT64_MAX - 1, 1 << 128, wanted="an offset, a whole number")


def as_time_ms(name: str, value: Any) -> int:
    """Milliseconds since 1970, or before. Raises `InvalidConfig`."""
    return as_int(name, value, -INT64_MAX - 1, wanted="milliseconds since 1970, a whole number")


def as_seconds(name: str, value: Any) -> float:
    """A time to wait, 0 or longer. Raises `InvalidConfig`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise InvalidConfig(name, value, "seconds, from 0 on")
    return float(value)


def as_bool(name: str, value: Any) -> bool:
    """True or False. Raises `InvalidConfig`: "no" is true to Python, and that is seldom meant."""
    if value is True or value is False:
        return value
    if type(value).__name__ in _BOOLS:
        return bool(value)
    raise InvalidConfig(name, value, "True or False")


def as_text(name: str, value: Any, wanted: str = "a text") -> str:
    """A str that can be written down. Raises `InvalidConfig`."""
    if not isinstance(value, str):
        raise InvalidConfig(name, value, wanted)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidConfig(name, value, f"{wanted} that UTF-8 can write") from None
    return str(value)


def as_mapping(name: str, value: Any, wanted: str) -> Mapping[Any, Any]:
    """A mapping; None for an empty one. Raises `InvalidConfig`."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidConfig(name, value, wanted)
    return value


def as_patterns(name: str, value: Any) -> tuple[str, ...]:
    """Names and patterns of topics; a text is a single one. Raises `InvalidConfig`."""
    wanted = "names and patterns of topics, none for all"
    if not isinstance(value, str | Iterable) or isinstance(value, bytes):
        raise InvalidConfig(name, value, wanted)
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if not all(patterns):
        raise InvalidConfig(name, value, wanted)
    return tuple(as_text(name, pattern, wanted) for pattern in patterns)


def as_topic_partition(topic: Any, partition: Any) -> TopicPartition:
    """A partition by topic and number. Raises `InvalidTopicName`, `InvalidConfig`."""
    return TopicPartition(check_topic_name(topic, internal=True), as_partition(partition))


def as_positions(name: str, positions: Any) -> dict[TopicPartition, int]:
    """Offsets by partition, as a person gives them. Raises `InvalidConfig`, `InvalidTopicName`."""
    wanted = "a mapping of (topic, partition) to the offset to go on at"
    named = {}
    for key, offset in as_mapping(name, positions, wanted).items():
        if not isinstance(key, tuple) or len(key) != 2:
            raise InvalidConfig(name, positions, wanted)
        tp = as_topic_partition(*key)
        named[tp] = as_int(f"position of {tp}", offset, 0, wanted="an offset: a whole number from 0 on")
    return named


def as_partition(value: Any) -> int:
    """A number, whether or not a topic has such a partition. Raises `InvalidConfig`."""
    return as_int("partition", value, 0, 1 << 128, wanted="a partition's number, from 0 on")
