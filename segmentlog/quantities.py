"""Parse and format sizes, durations and times as people write them: ``64MiB``, ``7d``."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from datetime import date

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

UNLIMITED = -1
"""Kafka's value for "no limit" of a size or a duration."""
AS_RETENTION = -2
"""Kafka's value for "like the retention of all data", for the local retention of a topic with tiered storage."""
INT64_MAX = 2**63 - 1
NO_TIMESTAMP = -1
"""Kafka's value for a record without a timestamp; so no record can have the last millisecond of 1969."""
EARLIEST_MS = -62_135_596_800_000
"""The earliest timestamp of a record: year 1, the earliest time in Python, ISO 8601 and Spark."""
LATEST_MS = INT64_MAX // 1000
"""The latest timestamp of a record, in the year 294247: Spark and Arrow count microseconds in 64 bits."""
TIMESTAMPS_ACCEPTED = (
    f"milliseconds since 1970, from {EARLIEST_MS} (the year 1) to {LATEST_MS} (the year 294247), or -1 for none"
)
"""For messages."""
UNLIMITED_MS = INT64_MAX
"""Kafka's value for "no limit" of other durations: longer than the age of any record."""

# A bare letter is binary, like 64m of -Xmx and dd; kB and MB are decimal, like a disk's label.
_SIZE_UNITS = {
    **dict.fromkeys(("", "b", "byte", "bytes"), 1),
    **{"k": KIB, "kib": KIB, "kb": 10**3},
    **{"m": MIB, "mib": MIB, "mb": 10**6},
    **{"g": GIB, "gib": GIB, "gb": 10**9},
    **{"t": 1024 * GIB, "tib": 1024 * GIB, "tb": 10**12},
}
_DURATION_UNITS_MS = {
    **{"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000},
    **{"h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000},
}
_UNLIMITED_WORDS = frozenset(("-1", "unlimited", "none", "off"))
_NUMBER_AND_UNIT = re.compile(r"([0-9]+(?:_[0-9]+)*)(?:\.([0-9]+))?\s*([a-z]*)\s*")
# Longer than any valid value; keeps int() away from texts of thousands of digits.
_LONGEST_QUANTITY = 64


def parse_size(value: object) -> int:
    """Return bytes for `64MiB`, `64m`, `1.5GiB`, `10MB` (decimal), `1_000` or an int; UNLIMITED (-1) for no limit.

    "No limit" is `-1`, `unlimited`, `none` or `off`. Raises ValueError for anything else.
    """
    return _parse_quantity(value, _SIZE_UNITS, "a size such as 64MiB or 65536")


def parse_duration_ms(value: object) -> int:
    """Return milliseconds for `7d`, `1h30m`, `1.5h`, `500ms`, `500`, an int or a timedelta.

    For "no limit", the words of `parse_size`, returns UNLIMITED (-1). Raises ValueError for anything else.
    """
    if not isinstance(value, str | int):
        from datetime import timedelta  # seldom needed, and loading it would slow down every command

        if isinstance(value, timedelta):
            whole, rest = divmod(value, timedelta(milliseconds=1))
            if rest or whole < 0:
                raise ValueError(f"{value!r} is not a whole number of milliseconds, at least 0")
            return whole
    return _parse_quantity(value, _DURATION_UNITS_MS, "a time such as 7d, 1h30m or 500ms")


def milliseconds_of(moment: date) -> int:
    """Return a datetime as milliseconds since 1970, rounded down; negative before 1970. A date means its first moment.

    A datetime without a zone is local time. Near `datetime.min` and `datetime.max` local time cannot be computed, so
    UTC is used: the former is before and the latter after every other time. Raises ValueError for pandas' NaT.
    """
    from datetime import UTC, datetime, time, timedelta

    if not isinstance(moment, datetime):
        moment = datetime.combine(moment, time.min)
    if moment != moment:
        raise ValueError(f"{moment!r} is not a time")
    if moment.tzinfo is None:
        try:
            moment = moment.astimezone()
        except (ValueError, OverflowError, OSError):
            moment = moment.replace(tzinfo=UTC)
    # In integers: a float cannot hold every millisecond.
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def parse_count(value: object) -> int:
    return _parse_quantity(value, {"": 1}, "a whole number")


def _parse_quantity(value: object, units: Mapping[str, int], expected: str) -> int:
    amount = _sum_of_parts(value, units) if isinstance(value, str) else _as_integer(value)
    if amount is None or amount < UNLIMITED:
        raise ValueError(f"{value!r} is not {expected}")
    return amount


def _as_integer(value: object) -> int | None:
    if isinstance(value, bool):  # True is an int in Python, but a mistake here
        return None
    try:
        return operator.index(cast(Any, value))  # accepts numpy's integers, rejects floats
    except TypeError:
        return None


def _sum_of_parts(text: str, units: Mapping[str, int]) -> int | None:
    """Return the sum of the parts of a text such as `1h30m`, without rounding; None for an invalid text."""
    text = text.strip().lower()
    if text in _UNLIMITED_WORDS:
        return UNLIMITED
    if not text or len(text) > _LONGEST_QUANTITY:
        return None
    total = position = 0
    while position < len(text):
        part = _NUMBER_AND_UNIT.match(text, position)
        if part is None or part[3] not in units:
            return None
        if part[3] == "" and part[0] != text:
            return None  # "1 000" or "1h30": the unit of the bare number is ambiguous
        whole, decimals = part[1].replace("_", ""), part[2] or ""
        amount, fraction = divmod(int(whole + decimals) * units[part[3]], 10 ** len(decimals))
        if fraction:
            return None
        total += amount
        position = part.end()
    return total


def format_size(size_bytes: int, *, exact: bool = False) -> str:
    """Return `64MiB`, `1.3GiB`, `512B`: rounded to one decimal; if `exact`, a text that `parse_size` converts back."""
    if size_bytes == UNLIMITED:
        return "unlimited"
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    if exact:
        power = 0
        while power < len(units) - 1 and size_bytes and size_bytes % 1024 ** (power + 1) == 0:
            power += 1
        return f"{size_bytes // 1024**power}{units[power]}"
    amount, power = float(size_bytes), 0
    while power < len(units) - 1 and round(amount, 1) >= 1024:
        amount, power = amount / 1024, power + 1
    return f"{amount:.1f}".removesuffix(".0") + units[power]


def format_duration_ms(duration_ms: int) -> str:
    """Return `7d`, `1h30m`, `500ms`: exact, so that `parse_duration_ms` converts it back."""
    if duration_ms in (UNLIMITED, UNLIMITED_MS):
        return "unlimited"
    text, rest = "", duration_ms
    for unit in ("d", "h", "m", "s", "ms"):
        amount, rest = divmod(rest, _DURATION_UNITS_MS[unit])
        if amount:
            text += f"{amount}{unit}"
    return text or "0ms"


def format_time(timestamp_ms: int) -> str:
    """Return a timestamp as text, in local time with milliseconds; `-` for a record without a timestamp (-1)."""
    if timestamp_ms == NO_TIMESTAMP:
        return "-"
    from datetime import datetime  # slow to load, and few need it

    try:
        return datetime.fromtimestamp(timestamp_ms / 1000).isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):  # for example a timestamp in microseconds
        return f"{timestamp_ms} ms"
