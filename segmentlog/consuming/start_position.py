"""Places in a log, as people say them: the beginning, an offset, a time, the last few."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from segmentlog.quantities import EARLIEST_MS, milliseconds_of, parse_duration_ms

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition


class Place(NamedTuple):
    """Where in a partition, as a person says it; `resolve` makes an offset of it."""

    kind: Literal["earliest", "latest", "offset", "last", "time"]
    number: int = 0
    """The offset, how many records before the end, or milliseconds since 1970."""


def parse_place(text: str, now_ms: int) -> Place:
    """`earliest`, `latest`, an offset, `-10` (the last ten), a time: `2026-07-31T12:00`, `-1h`, `@1785456000000`.

    A time without a zone is local time. Raises ValueError.
    """
    text = text.strip()
    if text in ("earliest", "latest"):
        return Place(text)  # type: ignore[arg-type]
    if text.isascii() and text.isdecimal() and len(text) < 20:
        return Place("offset", int(text))
    sign, rest = text[:1], text[1:]
    digits = rest.removeprefix("-") if sign == "@" else rest
    plain = digits.isascii() and digits.isdecimal() and len(digits) < 20
    if sign == "-" and plain:
        return Place("last", int(rest))
    if sign == "@" and plain:
        return Place("time", max(int(rest), EARLIEST_MS))
    try:
        if sign == "-":
            return Place("time", max(now_ms - parse_duration_ms(rest), EARLIEST_MS))
        from datetime import datetime

        return Place("time", milliseconds_of(datetime.fromisoformat(text)))
    except ValueError:
        raise ValueError(
            f"{text!r} is not a place: earliest, latest, an offset, -N (the last N), or a time such as"
            " 2026-07-31T12:00, -1h (an hour ago) or @1785456000000 (milliseconds since 1970)"
        ) from None


def resolve(place: Place, log: Partition, end_offset: int | None = None) -> int:
    """The offset of a place in a partition; ``end_offset`` is what counts as its end. May lie outside the log."""
    end = log.log_end_offset if end_offset is None else end_offset
    if place.kind == "earliest":
        return log.log_start_offset
    if place.kind == "latest":
        return end
    if place.kind == "last":
        from segmentlog.consuming.cursor import offset_of_last

        return offset_of_last(log, place.number, end)
    if place.kind == "time":
        found = log.offset_for_timestamp(place.number)
        return end if found is None else min(found, end)
    return place.number
