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
"""A topic's name and a value to plain objects, by the schema whose id the value begins with; None for a value that has
no schema, or does not fit it."""

_HEADER: Final = re.compile(r"(?P<name>[^=]*?)\s*(?:==?\s*(?P<wanted>.*))?", re.DOTALL)
_FIRST_WIDTH: Final = 64
"""Offsets that a search from the end reads at first: what it looks for is often near the end."""


class Filter(msgspec.Struct, frozen=True):
    """Conditions on a record. A record must fit all of them; None fits every record."""

    key: bytes | None = None
    value: bytes | None = None
    """Bytes that the value contains."""
    path: JsonPath | None = None
    header: tuple[str, bytes | None] | None = None
    """A header's name, and maybe its value."""
    key_prefix: bytes | None = None
    decode: DecodeValue | None = None
    """Decodes values that were written by a schema, for ``path``; without it ``path`` looks into JSON only."""

    @classmethod
    def parse(
        cls, *, key: str = "", key_prefix: str = "", value: str = "", path: str = "", header: str = "",
        decode: DecodeValue | None = None,
    ) -> Filter:  # fmt: skip
        """As people fill in a form; empty is everything. Raises `InvalidConfig` for a bad path or header."""
        return cls(
            key_bytes(key) if key else None,
            value.encode(errors="surrogateescape") if value else None,
            JsonPath.parse(path) if path.strip() else None,
            _parse_header(header.strip()) if header.strip() else None,
            key_bytes(key_prefix) if key_prefix else None,
            decode,
        )

    @property
    def is_open(self) -> bool:
        """Whether every record fits."""
        return (
            self.key is None and self.key_prefix is None and self.value is None and self.path is None
            and self.header is None
        )  # fmt: skip

    def records(self, batch: RecordBatch) -> Iterable[Record]:
        """Return the records of a batch that fit."""
        if self.is_open:
            return batch.records()
        return (_record_at(batch, at) for at in self._fitting(batch))

    def parts(self, batch: RecordBatch) -> Iterator[RecordBatch]:
        """Yield the records of a batch that fit, as contiguous parts of it."""
        if self.is_open:
            yield batch
            return
        batch.offsets, batch.timestamps, batch.headers  # noqa: B018  decoded once, for all parts
        begin = end = 0
        for at in self._fitting(batch):
            if at > end:
                if end > begin:
                    yield batch.slice(begin, end)
                begin = at
            end = at + 1
        if end > begin:
            yield batch.slice(begin, end)

    def _fitting(self, batch: RecordBatch) -> Iterable[int]:
        """Which records of a batch fit, by their place in it; what is costly to ask is asked as one goes on."""
        chosen: Iterable[int] = range(len(batch))
        if self.key is not None or self.key_prefix is not None:
            if not batch.has_keys:
                return ()
            keys, key, prefix = batch.keys, self.key, self.key_prefix
            if key is not None:
                chosen = [at for at in chosen if keys[at] == key]
            if prefix is not None:
                chosen = [at for at in chosen if (one := keys[at]) is not None and one.startswith(prefix)]
        if self.header is not None:
            if not batch.has_headers:
                return ()
            name, wanted = self.header
            headers = batch.headers
            chosen = [
                at
                for at in chosen
                if any(one == name and (wanted is None or value == wanted) for one, value in headers[at])
            ]
        if self.value is not None:
            values, part = batch.values, self.value
            chosen = [at for at in chosen if part in (values[at] or b"")]
        if self.path is not None:
            values, topic = batch.values, batch.topic
            return (at for at in chosen if self._has_path(topic, values[at]))
        return chosen

    def _has_path(self, topic: str, value: bytes | None) -> bool:
        """Whether a value, decoded by the schema that it names or else as JSON, has what the path asks for."""
        assert self.path is not None
        if self.decode is not None and value and value[0] == 0:  # no JSON begins with it
            document = self.decode(topic, value)
            return document is not None and self.path.matches_document(document)
        return self.path.matches(value)

    def last(
        self, log: Partition, count: int, end_offset: int, isolation: Isolation = "read_uncommitted",
        on_skip: SkipListener | None = None,
    ) -> list[RecordBatch]:  # fmt: skip
        """The last ``count`` records before ``end_offset`` that fit, in parts of batches, ascending.

        Reads backwards, more at a time as long as too few are found: the whole log if few records fit. Raises what
        `Partition.read` does; ``on_skip`` as there, more than once for a batch that two reads reach.
        """
        found: deque[RecordBatch] = deque()
        missing, high, width = count, end_offset, max(count, _FIRST_WIDTH)
        while missing > 0 and high > log.log_start_offset:
            low = max(high - width, log.log_start_offset)
            here: deque[RecordBatch] = deque()
            count_here = 0
            for batch in batches_between(log, low, high, isolation, on_skip):
                for part in self.parts(batch):
                    here.append(part)
                    count_here += len(part)
                    while count_here - len(here[0]) >= missing:  # each part keeps its batch in memory
                        count_here -= len(here.popleft())
            for part in reversed(here):
                found.appendleft(part.slice(max(len(part) - missing, 0)))
                missing -= len(found[0])
                if missing == 0:
                    break
            high, width = low, 2 * width
        return list(found)


def batches_between(
    log: Partition, low: int, high: int, isolation: Isolation = "read_uncommitted", on_skip: SkipListener | None = None,
) -> Iterator[RecordBatch]:  # fmt: skip
    """Batches with the offsets ``[low, high)``; offsets that a crash took away are skipped.

    Raises as `Partition.read` does, except with ``on_skip``, which is called for what is skipped below ``high``.
    """
    if low >= high:
        return

    def note(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        if on_skip is not None and base_offset < high:
            on_skip(base_offset, end_offset, damage)

    listener = None if on_skip is None else note
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
        raise InvalidConfig("header", text, "NAME or NAME=VALUE, as in trace or trace=7f00")
    wanted = found["wanted"]
    return found["name"], None if wanted is None else wanted.strip().encode(errors="surrogateescape")


def key_bytes(text: str) -> bytes:
    """Return the key that a text stands for: its UTF-8, or the bytes of ``0x00ff``."""
    if text[:2] in ("0x", "0X") and len(text) % 2 == 0:
        try:
            return bytes.fromhex(text[2:])
        except ValueError:
            pass
    return text.encode(errors="surrogateescape")


def _record_at(batch: RecordBatch, at: int) -> Record:
    """One record of the columns, which the batch keeps once they are decoded."""
    return Record(
        batch.topic, batch.partition, int(batch.offsets[at]), int(batch.timestamps[at]), batch.keys[at],
        batch.values[at], batch.headers[at], batch.epoch,
    )  # fmt: skip
