"""Parse start positions as people write them: the beginning, an offset, a time, the last few records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from segmentlog.quantities import EARLIEST_MS, milliseconds_of, parse_duration_ms

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition


class StartPosition(NamedTuple):
    """A position in a partition as people write it. `resolve_position` converts it to an offset."""

    kind: Literal["earliest", "latest", "offset", "last", "time"]
    number: int = 0
    """The offset, the number of records before the end, or milliseconds since 1970; 0 for earliest and latest."""


def parse_start_position(text: str, now_ms: int) -> StartPosition:
    """Parse `earliest`, `latest`, an offset, `-10` (the last ten records) or a time.

    A time is `2026-07-31T12:00` (local without a zone), `-1h` (an hour ago) or `@1785456000000` (milliseconds since
    1970). Raises ValueError.
    """
    text = text.strip()
    if text in ("earliest", "latest"):
        return StartPosition(text)  # type: ignore[arg-type]
    if text.isascii() and text.isdecimal() and len(text) < 20:
        return StartPosition("offset", int(text))
    sign, rest = text[:1], text[1:]
    digits = rest.removeprefix("-") if sign == "@" else rest
    plain = digits.isascii() and digits.isdecimal() and len(digits) < 20
    if sign == "-" and plain:
        return StartPosition("last", int(rest))
    if sign == "@" and plain:
        return StartPosition("time", max(int(rest), EARLIEST_MS))
    try:
        if sign == "-":
            return StartPosition("time", max(now_ms - parse_duration_ms(rest), EARLIEST_MS))
        from datetime import datetime

        return StartPosition("time", milliseconds_of(datetime.fromisoformat(text)))
    except ValueError:
        raise ValueError(
            f"{text!r} is not an offset or a time. Give earliest, latest, an offset, -N (the last N), or a time such as"
            " 2026-07-31T12:00, -1h (an hour ago) or @1785456000000 (milliseconds since 1970)"
        ) from None


def resolve_position(start: StartPosition, log: Partition, end_offset: int | None = None) -> int:
    """Return the offset of a start position, which may be outside the log. ``end_offset``: use it as the log end."""
    end = log.log_end_offset if end_offset is None else end_offset
    if start.kind == "earliest":
        return log.log_start_offset
    if start.kind == "latest":
        return end
    if start.kind == "last":
        from segmentlog.consuming.cursor import offset_of_last

        return offset_of_last(log, start.number, end)
    if start.kind == "time":
        found = log.offset_for_timestamp(start.number)
        return end if found is None else min(found, end)
    return start.number
