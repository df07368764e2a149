"""Arguments of public functions: taken as a person means them, or refused by name, value and what is wanted."""

from __future__ import annotations

import operator
from typing import Any

from segmentlog.errors import InvalidConfig


def as_int(name: str, value: Any, least: int, most: int | None = None, *, wanted: str = "") -> int:
    """A whole number from ``least`` to ``most``; numpy's are whole numbers too, True and 1.0 are not.

    Raises `InvalidConfig`.
    """
    number = None
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            number = None
    if number is None or number < least or (most is not None and number > most):
        upto = f"from {least} on" if most is None else f"from {least} to {most}"
        raise InvalidConfig(name, value, wanted or f"a whole number {upto}")
    return number


def as_bool(name: str, value: Any) -> bool:
    """True or False. Raises `InvalidConfig`: "no" is true to Python, and that is seldom meant."""
    if not isinstance(value, bool):
        raise InvalidConfig(name, value, "True or False")
    return value


def as_partition(value: Any) -> int:
    """A partition's number. Raises `InvalidConfig`."""
    return as_int("partition", value, 0, wanted="a partition's number, from 0 on")
