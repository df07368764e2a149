"""What a client of the registry asks: its path, its query, its body."""

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


class Call(NamedTuple):
    """One question, and who knows the answer."""

    registry: SchemaRegistry
    path: Mapping[str, Any]
    query: Mapping[str, str]
    body: bytes

    @property
    def subject(self) -> str | None:
        """The one in the path."""
        found = self.path.get("subject")
        return None if found is None else str(found)

    @property
    def named_subject(self) -> str:
        """The same, where there has to be one."""
        return str(self.path["subject"])

    @property
    def version(self) -> str:
        return str(self.path["version"])

    @property
    def schema_id(self) -> int:
        """The id in the path. Raises `UnknownSchema` for what is none."""
        text = str(self.path["id"])
        if not (text.isascii() and text.isdecimal()) or len(text) > 10 or int(text) > _ID_MAX:
            raise UnknownSchema(text)
        return int(text)

    def flag(self, name: str) -> bool:
        """Whether a parameter is set."""
        return self.query.get(name, "").lower() == "true"

    def part(self, found: Sequence[_T]) -> list[_T]:
        """As many as are asked for, by ``offset`` and ``limit``."""
        offset, limit = self._count("offset", 0), self._count("limit", -1)
        return list(found[offset:]) if limit < 0 else list(found[offset : offset + limit])

    def _count(self, name: str, default: int) -> int:
        text = self.query.get(name, "")
        try:
            return int(text) if text else default
        except ValueError:
            raise HttpProblem(HTTPStatus.BAD_REQUEST, f"{name}={text!r} is no number") from None

    def draft(self) -> Draft:
        """The schema in the body. Raises `InvalidSchema` where there is none."""
        body = self.decode(_Body)
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

    def decode(self, shape: type[_T]) -> _T:
        """The body, in a shape. Raises `HttpProblem`."""
        try:
            return msgspec.json.decode(self.body, type=shape)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HttpProblem(HTTPStatus.BAD_REQUEST, f"the body is not what it is to be: {error}") from None

    def formatted(self, record: SchemaRecord) -> str:
        """The text of a schema, in the form that is asked for."""
        shape = self.query.get("format", "")
        return self.registry.parsed(record).formatted(shape) if shape else record.schema


def document(record: SchemaRecord, text: str) -> dict[str, Any]:
    """A schema by itself, as clients expect it: nothing is said of what is as usual."""
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
    """A version of a subject."""
    names = {"subject": record.subject, "version": record.version, "id": record.id}
    return names | document(record, text) | ({"deleted": True} if record.deleted else {})
