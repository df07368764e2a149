"""Convert and check arguments of public functions. Errors name the argument, its value and the accepted values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from segmentlog.errors import InvalidConfig
from segmentlog.format.file_names import check_topic_name
from segmentlog.quantities import INT64_MAX
from segmentlog.records import TopicPartition


def as_int(name: str, value: Any, least: int, most: int = INT64_MAX, *, expected: str = "") -> int:
    """Return a whole number from ``least`` to ``most``. Accepts numpy's integers, but not True or 1.0.

    Raises `InvalidConfig`.
    """
    number = None
    if not isinstance(value, bool) and type(value).__name__ not in _BOOLS:
        try:
            number = operator.index(value)
        except TypeError:
            number = None
    if number is None or not least <= number <= most:
        upto = f"of at least {least}" if most == INT64_MAX else f"from {least} to {most}"
        raise InvalidConfig(name, value, expected or f"a whole number {upto}")
    return number


_BOOLS = frozenset(("bool", "bool_"))  # bool_ is numpy's


def as_offset(name: str, value: Any) -> int:
    """Return a whole number, even if no log can have this offset. Raises `InvalidConfig`."""
    return as_int(name, value, -INT64_MAX - 1, 1 << 128, expected="an offset, a whole number")


def as_time_ms(name: str, value: Any) -> int:
    """Return milliseconds since 1970, which may be negative. Raises `InvalidConfig`."""
    return as_int(name, value, -INT64_MAX - 1, expected="milliseconds since 1970, a whole number")


def as_seconds(name: str, value: Any) -> float:
    """Return a time to wait in seconds, at least 0. Raises `InvalidConfig`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise InvalidConfig(name, value, "a number of seconds, at least 0")
    return float(value)


def as_bool(name: str, value: Any) -> bool:
    """Return True or False. Raises `InvalidConfig` for other values: in Python, even the text "no" is true."""
    if value is True or value is False:
        return value
    if type(value).__name__ in _BOOLS:
        return bool(value)
    raise InvalidConfig(name, value, "True or False")


def as_text(name: str, value: Any, expected: str = "a text") -> str:
    """Return a str that UTF-8 can encode. Raises `InvalidConfig`."""
    if not isinstance(value, str):
        raise InvalidConfig(name, value, expected)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidConfig(name, value, f"{expected} that UTF-8 can encode") from None
    return str(value)


def as_mapping(name: str, value: Any, expected: str) -> Mapping[Any, Any]:
    """Return a mapping; an empty one for None. Raises `InvalidConfig`."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidConfig(name, value, expected)
    return value


def as_patterns(name: str, value: Any) -> tuple[str, ...]:
    """Return names and patterns of topics. A str is one name or pattern. Raises `InvalidConfig`."""
    expected = "names and patterns of topics, empty for all"
    if not isinstance(value, str | Iterable) or isinstance(value, bytes):
        raise InvalidConfig(name, value, expected)
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if not all(patterns):
        raise InvalidConfig(name, value, expected)
    return tuple(as_text(name, pattern, expected) for pattern in patterns)


def as_topic_partition(topic: Any, partition: Any) -> TopicPartition:
    """Return a partition by topic and number. Raises `InvalidTopicName`, `InvalidConfig`."""
    return TopicPartition(check_topic_name(topic, internal=True), as_partition(partition))


def as_positions(name: str, positions: Any) -> dict[TopicPartition, int]:
    """Return offsets by partition. Raises `InvalidConfig`, `InvalidTopicName`."""
    expected = "a mapping of (topic, partition) to the offset to resume at"
    offsets = {}
    for key, offset in as_mapping(name, positions, expected).items():
        if not isinstance(key, tuple) or len(key) != 2:
            raise InvalidConfig(name, positions, expected)
        tp = as_topic_partition(*key)
        offsets[tp] = as_int(f"offset of {tp}", offset, 0, expected="an offset: a whole number of at least 0")
    return offsets


def as_partition(value: Any) -> int:
    """Return a partition number, even if the topic has no such partition. Raises `InvalidConfig`."""
    return as_int("partition", value, 0, 1 << 128, expected="the number of a partition, at least 0")
