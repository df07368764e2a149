"""Decoders of records by schema id, cached: the common part of all deserializers."""

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
"""Decodes the bytes of a record, including the head with its schema id."""


class Readers(Generic[T]):
    """Cache of one decoder for each schema id.

    ``make`` creates the decoder of a schema. Thread-safe, but two threads may create the same decoder at once.
    """

    def __init__(
        self, source: SchemaSource, make: Callable[[SchemaRecord, ParsedSchema], Decode[T]], schema_type: str | None
    ) -> None:
        self._source = source
        self._make = make
        self._type = schema_type
        self._known: dict[int, Decode[T]] = {}

    def decode_all(self, data: Sequence[bytes | None]) -> list[T | None]:
        """Decode values in order; a None value stays as it is. Raises `InvalidPayload` and the decoder's errors."""
        return [None if blob is None else self.decode(blob) for blob in data]

    def decode(self, blob: bytes) -> T:
        schema_id = decode_head(blob)
        decode = self._known.get(schema_id)
        if decode is None:
            decode = self._known[schema_id] = self._find(schema_id)
        try:
            return decode(blob)
        except RecursionError:
            raise InvalidPayload("the value is nested too deeply") from None

    def _find(self, schema_id: int) -> Decode[T]:
        try:
            record = self._source.by_id(schema_id)
        except UnknownSchema:
            raise InvalidPayload(
                f"the value was written with schema {schema_id}, which the registry does not have"
            ) from None
        if self._type is not None and record.schema_type != self._type:
            raise InvalidPayload(
                f"the value was written with schema {schema_id} of type {record.schema_type}, not {self._type}"
            )
        return self._make(record, self._source.parsed(record))
