"""Follows new records for a live page, and skips records when they arrive faster than a page can show.

Each poll reads at most the newest records of each partition and counts the others by their offsets. A poll therefore
costs the same at any rate of appends, and readers do not slow down producers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from segmentlog.consuming.record_filter import DecodeValue, RecordFilter
from segmentlog.errors import CorruptBatch, OffsetOutOfRange
from segmentlog.http.console.formatting import LIST_CHARS, render_bytes, utc
from segmentlog.http.console.record_search import readable_from
from segmentlog.texts import visible

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition
    from segmentlog.records import Record

POLL_INTERVAL_S: Final = 0.5
RECORDS: Final = 50
"""Maximum number of records in one update, of all partitions."""
_READ_BYTES: Final = 4 << 20
"""Maximum bytes that one poll reads to filter records."""
_FILTERED_MAX: Final = 2000
"""Maximum number of records of a partition that one poll filters."""


class TailUpdate(msgspec.Struct):
    """Result of one poll, sent to the page as an event."""

    records: list[dict[str, Any]]
    appended: int
    """Offsets added since the previous poll."""
    skipped: int
    """Number of appended offsets that were not read."""
    rate: float
    """Records appended per second."""
    position: str
    """Offsets to continue at, also the id of the event."""

    def text(self) -> str:
        """Return the data of the event."""
        return msgspec.json.encode(self).decode()


class LiveTail:
    """Follows some partitions from a position. Not thread-safe."""

    def __init__(self, logs: Sequence[Partition], record_filter: RecordFilter, position: str = "") -> None:
        self._logs = logs
        self._filter = record_filter
        given = parse_position(position)
        self._at = {log.number: min(given.get(log.number, log.log_end_offset), log.log_end_offset) for log in logs}
        self._polled_s = time.monotonic()

    @property
    def position(self) -> str:
        """The next offsets of all partitions, as the id of an event."""
        return ",".join(f"{number}:{offset}" for number, offset in self._at.items())

    def set_decoder(self, decode: DecodeValue | None) -> None:
        """Set the function that decodes values for the filter, from the next poll on."""
        self._filter = msgspec.structs.replace(self._filter, decode=decode)

    def poll(self) -> TailUpdate | None:
        """Return the records since the last poll; None if there are none."""
        now_s = time.monotonic()
        records: list[Record] = []
        appended = read_count = 0
        busy = [log for log in self._logs if log.log_end_offset > self._at[log.number]]
        for log in busy:
            before, end = self._at[log.number], log.log_end_offset
            appended += end - before
            read_count += self._read(log, end, max(RECORDS // len(busy), 1), records)
        if not busy:
            self._polled_s = now_s
            return None
        seconds = max(now_s - self._polled_s, 0.001)
        self._polled_s = now_s
        records.sort(key=lambda record: record.timestamp)
        shown = [describe_record(record) for record in records[-RECORDS:]]
        skipped = appended - read_count + max(len(records) - RECORDS, 0)
        return TailUpdate(shown, appended, skipped, appended / seconds, self.position)

    def _read(self, log: Partition, end: int, most: int, records: list[Record]) -> int:
        """Read the newest records up to ``end``, skip the others, and return the number of offsets read."""
        begin = max(self._at[log.number], end - (most if self._filter.matches_all else _FILTERED_MAX))
        self._at[log.number] = end
        found: list[Record] = []
        upto, size_bytes = begin, 0
        # Ignore damage here: the search page and the page about damage report it.
        with contextlib.suppress(
            OffsetOutOfRange, CorruptBatch
        ):  # out of range: retention deleted the records meanwhile
            for batch in log.read(readable_from(log, begin), on_skip=lambda *_: None):
                if batch.base_offset >= end:
                    upto = end
                    break
                found.extend(record for record in self._filter.records(batch) if record.offset < end)
                upto = min(batch.next_offset, end)
                size_bytes += batch.raw_size_bytes
                if upto == end or size_bytes > _READ_BYTES:
                    break
        records.extend(found[-most:])
        return upto - begin - max(len(found) - most, 0)


def parse_position(text: str) -> dict[int, int]:
    """Return offsets by partition from the id of an event. Ignores malformed parts."""
    found = {}
    for part in text.split(",") if len(text) < 1 << 16 else ():
        number, _, offset = part.partition(":")
        if number.isdecimal() and offset.isdecimal() and len(number) < 8 and len(offset) < 20:
            found[int(number)] = int(offset)
    return found


def describe_record(record: Record) -> dict[str, Any]:
    """Return a record for the page, shortened to one line."""
    key, value = render_bytes(record.key, 80, one_line=True), render_bytes(record.value, LIST_CHARS, one_line=True)
    return {
        "partition": record.partition,
        "offset": record.offset,
        "time": utc(record.timestamp),
        "key": key.text,
        "key_kind": key.kind,
        "value": value.text + ("…" if value.is_truncated else ""),
        "value_kind": value.kind,
        "size": value.size_bytes,
        "headers": ", ".join(visible(name) for name, _ in record.headers[:8]),
    }
