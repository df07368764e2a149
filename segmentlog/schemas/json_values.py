"""Serializer and deserializer of JSON values, checked against a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jsonschema
import msgspec
import referencing
import referencing.exceptions
import referencing.jsonschema

from segmentlog.errors import InvalidConfig
from segmentlog.schemas.json_keywords import bounded, start_step_count
from segmentlog.schemas.json_schema import JsonSchema
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.schemas.registry_errors import InvalidPayload
from segmentlog.schemas.registry_records import Reference, SchemaRecord
from segmentlog.schemas.schema_id_framing import HEAD_BYTES, encode_head
from segmentlog.schemas.schema_kind import ParsedSchema, encode_json
from segmentlog.schemas.schema_reader import Decode, Readers
from segmentlog.schemas.subject_strategy import SchemaSource, Strategy, WriterOptions, Writers

Check = Callable[[Any], None]


class JsonSerializer:
    """Writes objects as JSON, after the id of their schema, and checks them against it. Thread-safe.

    Objects can have any type that msgspec encodes, such as dicts, Structs and dataclasses. The other options are those
    of `AvroSerializer`; the record name is the schema's title. ``validate=False`` skips the check.
    """

    def __init__(
        self,
        registry: SchemaSource,
        schema: str | Mapping[str, Any] | None = None,
        *,
        references: Sequence[Reference] = (),
        is_key: bool = False,
        subject_name_strategy: Strategy = "topic",
        auto_register: bool = True,
        use_latest_version: bool = False,
        normalize: bool = False,
        validate: bool = True,
    ) -> None:
        options = WriterOptions(is_key, subject_name_strategy, auto_register, use_latest_version, normalize)
        options.check(schema is not None)
        text = schema if isinstance(schema, str | None) else json.dumps(schema)
        self._draft = None if text is None else Draft(text, "JSON", tuple(references))
        document = {} if text is None else json.loads(text)
        self._title = str(document.get("title", "")) if isinstance(document, dict) else ""
        if not self._title and subject_name_strategy != "topic":
            raise InvalidConfig(
                "subject_name_strategy", subject_name_strategy, "use 'topic' if the schema has no title"
            )
        self._source = registry
        self._writers = Writers(registry, options)
        self._validate = validate
        self._checks: dict[int, Check] = {}

    def serialize(self, topic: str, values: Sequence[Any]) -> list[bytes | None]:
        """See `Serializer`."""
        record = self._writers.find(topic, self._title, lambda subject: self._draft)
        check = self._checks.get(record.id)
        if check is None:
            check = self._checks[record.id] = (
                checker(self._source.parsed(record)) if self._validate else (lambda value: None)
            )
        head, encode = encode_head(record.id), msgspec.json.Encoder().encode
        encoded: list[bytes | None] = []
        for value in values:
            if value is None:
                encoded.append(None)
                continue
            try:
                check(msgspec.to_builtins(value))
                encoded.append(head + encode(value))
            except RecursionError:
                raise InvalidPayload("the value is nested too deeply") from None
        return encoded


class JsonDeserializer:
    """Reads JSON values, and checks them against the schema that each record names. Thread-safe.

    ``kind`` is the type of the returned objects, as in `json_codec`; ``validate=False`` skips the check.
    """

    def __init__(self, registry: SchemaSource, kind: Any = Any, *, validate: bool = True) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._validate = validate
        self._readers = Readers(registry, self._make, "JSON")

    def deserialize(self, topic: str, data: Sequence[bytes | None]) -> list[Any]:
        """See `Deserializer`."""
        return self._readers.decode_all(data)

    def _make(self, record: SchemaRecord, parsed: ParsedSchema) -> Decode[Any]:
        return json_decoder(parsed, self._decoder, validate=self._validate)


def json_decoder(parsed: ParsedSchema, decoder: msgspec.json.Decoder[Any], *, validate: bool = True) -> Decode[Any]:
    """Return a decoder for values of a JSON schema; with ``validate`` it raises `InvalidPayload` for a mismatch."""
    check = checker(parsed) if validate else None

    def decode(blob: bytes) -> Any:
        payload = memoryview(blob)[HEAD_BYTES:]
        if check is not None:
            check(msgspec.json.decode(payload))
        return decoder.decode(payload)

    return decode


def checker(parsed: ParsedSchema) -> Check:
    """Return a function that raises `InvalidPayload` for a value that does not match a schema.

    The function never fetches a ``$ref`` over the network.
    """
    assert isinstance(parsed, JsonSchema)
    draft = referencing.jsonschema.specification_with(
        parsed.validator.META_SCHEMA.get("$schema", ""), default=referencing.jsonschema.DRAFT7
    )
    resources = [
        (name, referencing.Resource.from_contents(document, default_specification=draft))
        for name, document in parsed.named_documents()
    ]
    validator = bounded(parsed.validator)(
        parsed.document, registry=referencing.Registry().with_resources(resources)
    )  # fmt: skip
    texts = [parsed.canonical, *(encode_json(document) for _, document in parsed.named_documents())]
    has_name_patterns = any('"patternProperties"' in text for text in texts)

    def check(value: Any) -> None:
        try:
            start_step_count(value, has_name_patterns=has_name_patterns)
            error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        except referencing.exceptions.Unresolvable as unresolvable:
            raise InvalidPayload(f"the value's schema has a reference that does not exist: {unresolvable}") from None
        except RecursionError:
            raise InvalidPayload("the value or its schema is nested too deeply") from None
        if error is not None:
            place = "/".join(["#", *map(str, error.absolute_path)])
            raise InvalidPayload(f"the value does not match its schema: {error.message[:500]}, at {place}")

    return check
