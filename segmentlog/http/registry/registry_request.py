"""A request to the schema registry: its path, query and body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from segmentlog.http.error_responses import HttpProblem
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.schemas.registry_errors import InvalidSchema, UnknownSchema
from segmentlog.schemas.registry_records import AVRO, Reference, SchemaRecord

if TYPE_CHECKING:
    from segmentlog.schemas.registry import SchemaRegistry

_T = TypeVar("_T")
_ID_MAX = (1 << 31) - 1


class _Body(msgspec.Struct):
    schema: str | None = None
    schema_type: str | None = msgspec.field(default=None, name="schemaType")
    references: list[Reference] | None = None
    metadata: dict[str, Any] | None = None
    rule_set: dict[str, Any] | None = msgspec.field(default=None, name="ruleSet")
    id: int | None = None
    version: int | None = None


_body_decoder = msgspec.json.Decoder(_Body)
_object_decoder = msgspec.json.Decoder(dict[str, Any])


class RegistryRequest(NamedTuple):
    """One request, and the registry that answers it."""

    registry: SchemaRegistry
    path: Mapping[str, Any]
    query: Mapping[str, str]
    body: bytes

    @property
    def subject(self) -> str | None:
        """The subject in the path; None if the path has none."""
        found = self.path.get("subject")
        return None if found is None else str(found)

    @property
    def named_subject(self) -> str:
        """The subject in the path, which must have one."""
        return str(self.path["subject"])

    @property
    def version(self) -> str:
        return str(self.path["version"])

    @property
    def schema_id(self) -> int:
        """The schema id in the path. Raises `UnknownSchema` if it is not a valid id."""
        text = str(self.path["id"])
        if not (text.isascii() and text.isdecimal()) or len(text) > 10 or int(text) > _ID_MAX:
            raise UnknownSchema(text)
        return int(text)

    def flag(self, name: str) -> bool:
        """Return whether a query parameter is "true"."""
        return self.query.get(name, "").lower() == "true"

    def part(self, found: Sequence[_T]) -> list[_T]:
        """Return the part of a list that the query parameters ``offset`` and ``limit`` select."""
        offset, limit = self._count("offset", 0), self._count("limit", -1)
        return list(found[offset:]) if limit < 0 else list(found[offset : offset + limit])

    def _count(self, name: str, default: int) -> int:
        text = self.query.get(name, "")
        try:
            return int(text) if text else default
        except ValueError:
            raise HttpProblem(HTTPStatus.BAD_REQUEST, f"{name}={text!r} is not a number") from None

    def draft(self) -> Draft:
        """Return the schema in the body. Raises `InvalidSchema` if there is none."""
        body = self._decode(_body_decoder)
        if body.schema is None:
            raise InvalidSchema("Invalid schema: the request has no 'schema'")
        return Draft(
            body.schema,
            body.schema_type or AVRO,
            tuple(body.references or ()),
            body.metadata,
            body.rule_set,
            -1 if body.id is None else body.id,
            max(body.version or 0, 0),
        )

    def json_object(self) -> dict[str, Any]:
        """Return the body, a JSON object. Raise `HttpProblem` (400)."""
        return self._decode(_object_decoder)

    def _decode(self, decoder: msgspec.json.Decoder[_T]) -> _T:
        try:
            return decoder.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HttpProblem(HTTPStatus.BAD_REQUEST, f"invalid request body: {error}") from None

    def formatted(self, record: SchemaRecord) -> str:
        """Return the text of a schema in the requested format."""
        shape = self.query.get("format", "")
        return self.registry.parsed(record).formatted(shape) if shape else record.schema


def document(record: SchemaRecord, text: str) -> dict[str, Any]:
    """Return a schema as clients expect it: fields with default values are omitted."""
    found: dict[str, Any] = {"schema": text}
    if record.schema_type != AVRO:
        found["schemaType"] = record.schema_type
    if record.references:
        found["references"] = record.references
    if record.metadata:
        found["metadata"] = record.metadata
    if record.rule_set:
        found["ruleSet"] = record.rule_set
    return found


def version_document(record: SchemaRecord, text: str) -> dict[str, Any]:
    """Return a version of a subject as clients expect it."""
    names = {"subject": record.subject, "version": record.version, "id": record.id}
    return names | document(record, text) | ({"deleted": True} if record.deleted else {})
