"""What deserializers share: the schema that each record names, and what was made of it, kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from segmentlog.schemas.registry_errors import InvalidPayload, UnknownSchema
from segmentlog.schemas.registry_records import SchemaRecord
from segmentlog.schemas.schema_id_framing import decode_head
from segmentlog.schemas.schema_kind import ParsedSchema
from segmentlog.schemas.subject_strategy import SchemaSource

T = TypeVar("T")

Decode = Callable[[bytes], T]
"""From the bytes of a record, head and all."""


class Readers(Generic[T]):
    """A decoder for each id. ``make`` makes one of the schema. Thread-safe: two may make the same."""

    def __init__(
        self, source: SchemaSource, make: Callable[[SchemaRecord, ParsedSchema], Decode[T]], schema_type: str | None
    ) -> None:
        self._source = source
        self._make = make
        self._type = schema_type
        self._known: dict[int, Decode[T]] = {}

    def decode_all(self, data: Sequence[bytes | None]) -> list[T | None]:
        """As many as it is given; None of None. Raises `InvalidPayload`, and what the decoder does."""
        return [None if blob is None else self.decode(blob) for blob in data]

    def decode(self, blob: bytes) -> T:
        schema_id = decode_head(blob)
        decode = self._known.get(schema_id)
        if decode is None:
            decode = self._known[schema_id] = self._find(schema_id)
        try:
            return decode(blob)
        except RecursionError:
            raise InvalidPayload("it is nested too deeply") from None

    def _find(self, schema_id: int) -> Decode[T]:
        try:
            record = self._source.by_id(schema_id)
        except UnknownSchema:
            raise InvalidPayload(f"it was written with schema {schema_id}, which the registry does not have") from None
        if self._type is not None and record.schema_type != self._type:
            raise InvalidPayload(f"schema {schema_id}, which it was written with, is {record.schema_type}")
        return self._make(record, self._source.parsed(record))
