"""Which records somebody is looking for: by key, value, JSON path and header."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from segmentlog.http.console.json_path import JsonPath
from segmentlog.http.console.showing import key_bytes
from segmentlog.records import Record

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch


class Filter(msgspec.Struct, frozen=True):
    """All of it has to fit; what is None fits everything."""

    key: bytes | None = None
    value: bytes | None = None
    """What the value has somewhere in it."""
    path: JsonPath | None = None
    header: tuple[str, bytes | None] | None = None
    """A header's name, and maybe its value."""

    @classmethod
    def parse(cls, *, key: str = "", value: str = "", path: str = "", header: str = "") -> Filter:
        """As people type it; empty is everything. Raises `InvalidConfig`."""
        name, equals, wanted = header.partition("=")
        return cls(
            key_bytes(key) if key else None,
            value.encode(errors="surrogateescape") if value else None,
            JsonPath.parse(path) if path.strip() else None,
            (name.strip(), wanted.strip().encode(errors="surrogateescape") if equals else None) if header else None,
        )

    @property
    def is_open(self) -> bool:
        """Whether every record fits."""
        return self.key is None and self.value is None and self.path is None and self.header is None

    def records(self, batch: RecordBatch) -> Iterable[Record]:
        """Those of a batch that fit."""
        if self.is_open:
            return batch.records()
        return (_record_at(batch, at) for at in self._fitting(batch))

    def _fitting(self, batch: RecordBatch) -> Iterable[int]:
        """Which records of a batch fit, by their place in it; what is costly to ask is asked as one goes on."""
        chosen: Iterable[int] = range(len(batch))
        if self.key is not None:
            if not batch.has_keys:
                return ()
            keys, key = batch.keys, self.key
            chosen = [at for at in chosen if keys[at] == key]
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
            values, path = batch.values, self.path
            return (at for at in chosen if path.matches(values[at]))
        return chosen


def _record_at(batch: RecordBatch, at: int) -> Record:
    """One record of the columns, which the batch keeps once they are decoded."""
    return Record(
        batch.topic, batch.partition, int(batch.offsets[at]), int(batch.timestamps[at]), batch.keys[at],
        batch.values[at], batch.headers[at], batch.epoch,
    )  # fmt: skip
