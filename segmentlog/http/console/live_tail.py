"""A live tail: what was appended since the last look, or some of it where it is too much to read.

A look costs the same whatever is appended: of each partition at most the newest few records are read, and the rest is
counted by its offsets. So nobody who looks on slows down who appends, and the page has time to show what it gets.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from segmentlog.consuming.record_filter import DecodeValue, RecordFilter
from segmentlog.errors import CorruptBatch, OffsetOutOfRange
from segmentlog.http.console.formatting import LIST_CHARS, show, utc
from segmentlog.http.console.record_search import readable_from
from segmentlog.texts import visible

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition
    from segmentlog.records import Record

EVERY_S: Final = 0.5
RECORDS: Final = 50
"""Of all partitions, in one look."""
_READ_BYTES: Final = 4 << 20
"""In one look, of what is read to filter it."""
_FILTERED: Final = 2000
"""Records that a filter looks at of each partition, in one look."""


class Look(msgspec.Struct):
    """What one look found."""

    records: list[dict[str, Any]]
    appended: int
    """Offsets that were passed since the look before."""
    skipped: int
    """Of them those that nobody looked at."""
    rate: float
    """Appended a second."""
    position: str
    """Where the next look goes on, as an event's id."""

    def text(self) -> str:
        """The data of an event."""
        return msgspec.json.encode(self).decode()


class Tail:
    """Positions in some partitions, and what comes behind them. For one thread at a time."""

    def __init__(self, logs: Sequence[Partition], wanted: RecordFilter, position: str = "") -> None:
        self._logs = logs
        self._wanted = wanted
        given = parse_position(position)
        self._at = {log.number: min(given.get(log.number, log.log_end_offset), log.log_end_offset) for log in logs}
        self._looked_s = time.monotonic()

    @property
    def position(self) -> str:
        """Where it is, in all partitions."""
        return ",".join(f"{number}:{offset}" for number, offset in self._at.items())

    def decode_by(self, decode: DecodeValue | None) -> None:
        """Set what decodes values for the filter from the next look on."""
        self._wanted = msgspec.structs.replace(self._wanted, decode=decode)

    def look(self) -> Look | None:
        """What came since; None for nothing."""
        now_s = time.monotonic()
        records: list[Record] = []
        appended = looked_at = 0
        busy = [log for log in self._logs if log.log_end_offset > self._at[log.number]]
        for log in busy:
            before, end = self._at[log.number], log.log_end_offset
            appended += end - before
            looked_at += self._read(log, end, max(RECORDS // len(busy), 1), records)
        if not busy:
            self._looked_s = now_s
            return None
        seconds = max(now_s - self._looked_s, 0.001)
        self._looked_s = now_s
        records.sort(key=lambda record: record.timestamp)
        shown = [describe(record) for record in records[-RECORDS:]]
        skipped = appended - looked_at + max(len(records) - RECORDS, 0)
        return Look(shown, appended, skipped, appended / seconds, self.position)

    def _read(self, log: Partition, end: int, most: int, records: list[Record]) -> int:
        """Read the newest of what is new, and pass all of it; how many offsets were looked at."""
        begin = max(self._at[log.number], end - (most if self._wanted.matches_all else _FILTERED))
        self._at[log.number] = end
        found: list[Record] = []
        upto, size_bytes = begin, 0
        # Damage is told where records are searched, and by the page about it.
        with contextlib.suppress(OffsetOutOfRange, CorruptBatch):  # the former: retention was faster
            for batch in log.read(readable_from(log, begin), on_skip=lambda *_: None):
                if batch.base_offset >= end:
                    upto = end
                    break
                found.extend(record for record in self._wanted.records(batch) if record.offset < end)
                upto = min(batch.next_offset, end)
                size_bytes += batch.raw_size_bytes
                if upto == end or size_bytes > _READ_BYTES:
                    break
        records.extend(found[-most:])
        return upto - begin - max(len(found) - most, 0)


def parse_position(text: str) -> dict[int, int]:
    """Offsets by partition, of an event's id; whatever else it says is nothing."""
    found = {}
    for part in text.split(",") if len(text) < 1 << 16 else ():
        number, _, offset = part.partition(":")
        if number.isdecimal() and offset.isdecimal() and len(number) < 8 and len(offset) < 20:
            found[int(number)] = int(offset)
    return found


def describe(record: Record) -> dict[str, Any]:
    """A record for the page, as little of it as fits in a line."""
    key, value = show(record.key, 80, one_line=True), show(record.value, LIST_CHARS, one_line=True)
    return {
        "partition": record.partition,
        "offset": record.offset,
        "time": utc(record.timestamp),
        "key": key.text,
        "key_kind": key.kind,
        "value": value.text + ("…" if value.is_cut else ""),
        "value_kind": value.kind,
        "size": value.size_bytes,
        "headers": ", ".join(visible(name) for name, _ in record.headers[:8]),
    }
