"""Filters of records by key, value, JSON path and header, for the console and the command line."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from segmentlog.consuming.json_path import JsonPath
from segmentlog.errors import InvalidConfig, LogTruncated
from segmentlog.records import Record

if TYPE_CHECKING:
    from segmentlog.errors import CorruptBatch
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.log.partition import Isolation, Partition
    from segmentlog.log.read.reader import SkipListener

DecodeValue = Callable[[str, bytes], Any]
"""Decodes a value of a topic to plain objects, with the schema whose id begins the value. Returns None if there is no
such schema, or the value does not match it."""

_HEADER: Final = re.compile(r"(?P<name>[^=]*?)\s*(?:==?\s*(?P<value>.*))?", re.DOTALL)
_FIRST_WIDTH: Final = 64
"""Number of offsets that a search from the end reads in its first step: matches are often near the end."""


class RecordFilter(msgspec.Struct, frozen=True):
    """Conditions that a record must all meet. A condition of None matches every record."""

    key: bytes | None = None
    value: bytes | None = None
    """Bytes that the value contains."""
    path: JsonPath | None = None
    header: tuple[str, bytes | None] | None = None
    """Name of a header, and optionally its value."""
    key_prefix: bytes | None = None
    decode: DecodeValue | None = None
    """Decodes values written with a schema, for ``path``; without it, ``path`` matches JSON only."""

    @classmethod
    def parse(
        cls, *, key: str = "", key_prefix: str = "", value: str = "", path: str = "", header: str = "",
        decode: DecodeValue | None = None,
    ) -> RecordFilter:  # fmt: skip
        """Parse texts of a form; empty texts match everything. Raises `InvalidConfig` for a bad path or header."""
        return cls(
            key_bytes(key) if key else None,
            value.encode(errors="surrogateescape") if value else None,
            JsonPath.parse(path) if path.strip() else None,
            _parse_header(header.strip()) if header.strip() else None,
            key_bytes(key_prefix) if key_prefix else None,
            decode,
        )

    @property
    def matches_all(self) -> bool:
        """Whether every record matches."""
        return (
            self.key is None and self.key_prefix is None and self.value is None and self.path is None
            and self.header is None
        )  # fmt: skip

    def records(self, batch: RecordBatch) -> Iterable[Record]:
        """Return the records of a batch that match."""
        if self.matches_all:
            return batch.records()
        return (_record_at(batch, at) for at in self._matching(batch))

    def parts(self, batch: RecordBatch) -> Iterator[RecordBatch]:
        """Yield the matching records of a batch as contiguous slices of it."""
        if self.matches_all:
            yield batch
            return
        batch.offsets, batch.timestamps, batch.headers  # noqa: B018  decode once for all slices
        begin = end = 0
        for at in self._matching(batch):
            if at > end:
                if end > begin:
                    yield batch.slice(begin, end)
                begin = at
            end = at + 1
        if end > begin:
            yield batch.slice(begin, end)

    def _matching(self, batch: RecordBatch) -> Iterable[int]:
        """Return the indexes of matching records in a batch. The path is checked lazily, because it is expensive."""
        chosen: Iterable[int] = range(len(batch))
        if self.key is not None or self.key_prefix is not None:
            if not batch.has_keys:
                return ()
            keys, key, prefix = batch.keys, self.key, self.key_prefix
            if key is not None:
                chosen = [at for at in chosen if keys[at] == key]
            if prefix is not None:
                chosen = [at for at in chosen if (found := keys[at]) is not None and found.startswith(prefix)]
        if self.header is not None:
            if not batch.has_headers:
                return ()
            name, expected = self.header
            headers = batch.headers
            chosen = [
                at
                for at in chosen
                if any(found == name and (expected is None or value == expected) for found, value in headers[at])
            ]
        if self.value is not None:
            values, part = batch.values, self.value
            chosen = [at for at in chosen if part in (values[at] or b"")]
        if self.path is not None:
            values, topic = batch.values, batch.topic
            return (at for at in chosen if self._has_path(topic, values[at]))
        return chosen

    def _has_path(self, topic: str, value: bytes | None) -> bool:
        """Decode a value by its schema, or as JSON, and return whether the path matches."""
        assert self.path is not None
        if self.decode is not None and value and value[0] == 0:  # JSON cannot start with this byte
            document = self.decode(topic, value)
            return document is not None and self.path.matches_document(document)
        return self.path.matches(value)

    def last(
        self, log: Partition, count: int, end_offset: int, isolation: Isolation = "read_uncommitted",
        on_skip: SkipListener | None = None,
    ) -> list[RecordBatch]:  # fmt: skip
        """Return the last ``count`` matching records before ``end_offset``, as slices of batches in ascending order.

        Reads backwards in growing steps, and reads the whole log if few records match. Raises the errors of
        `Partition.read`. Calls ``on_skip`` for damage as `Partition.read` does, and twice if two steps read a batch.
        """
        found: deque[RecordBatch] = deque()
        missing, high, width = count, end_offset, max(count, _FIRST_WIDTH)
        while missing > 0 and high > log.log_start_offset:
            low = max(high - width, log.log_start_offset)
            slices: deque[RecordBatch] = deque()
            record_count = 0
            for batch in batches_between(log, low, high, isolation, on_skip):
                for part in self.parts(batch):
                    slices.append(part)
                    record_count += len(part)
                    while record_count - len(slices[0]) >= missing:  # each slice keeps its batch in memory
                        record_count -= len(slices.popleft())
            for part in reversed(slices):
                found.appendleft(part.slice(max(len(part) - missing, 0)))
                missing -= len(found[0])
                if missing == 0:
                    break
            high, width = low, 2 * width
        return list(found)


def batches_between(
    log: Partition, low: int, high: int, isolation: Isolation = "read_uncommitted", on_skip: SkipListener | None = None,
) -> Iterator[RecordBatch]:  # fmt: skip
    """Yield batches with the offsets ``[low, high)``; skip lost offsets.

    Raises the errors of `Partition.read`, unless ``on_skip`` is given, which is called for damage below ``high``.
    """
    if low >= high:
        return

    def on_damage(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        if on_skip is not None and base_offset < high:
            on_skip(base_offset, end_offset, damage)

    listener = None if on_skip is None else on_damage
    begin = low
    try:
        batches = log.read(begin, isolation=isolation, on_skip=listener)
    except LogTruncated as truncated:
        begin = truncated.lost.end_offset
        if begin >= high:
            return
        batches = log.read(begin, isolation=isolation, on_skip=listener)
    for batch in batches:
        if batch.base_offset >= high:
            return
        yield batch if batch.next_offset <= high else batch.slice(0, int((batch.offsets < high).sum()))


def _parse_header(text: str) -> tuple[str, bytes | None]:
    found = _HEADER.fullmatch(text)
    if found is None or not found["name"]:
        raise InvalidConfig("header", text, "NAME or NAME=VALUE, such as trace or trace=7f00")
    value = found["value"]
    return found["name"], None if value is None else value.strip().encode(errors="surrogateescape")


def key_bytes(text: str) -> bytes:
    """Return the key that a text denotes: its UTF-8, or the bytes of ``0x00ff``."""
    if text[:2] in ("0x", "0X") and len(text) % 2 == 0:
        try:
            return bytes.fromhex(text[2:])
        except ValueError:
            pass
    return text.encode(errors="surrogateescape")


def _record_at(batch: RecordBatch, at: int) -> Record:
    """Return one record from the columns, which the batch caches once they are decoded."""
    return Record(
        batch.topic, batch.partition, int(batch.offsets[at]), int(batch.timestamps[at]), batch.keys[at],
        batch.values[at], batch.headers[at], batch.epoch,
    )  # fmt: skip
