"""Avro values: written and read by fastavro."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import fastavro

from segmentlog.schemas.avro_schema import AvroSchema
from segmentlog.schemas.errors import InvalidPayload, InvalidSchema
from segmentlog.schemas.kinds import ParsedSchema, decode_json
from segmentlog.schemas.library import Draft
from segmentlog.schemas.naming import SchemaSource, Strategy, WriterOptions, Writers
from segmentlog.schemas.plain import FromJson
from segmentlog.schemas.reading import Decode, Readers
from segmentlog.schemas.records import Reference, SchemaRecord
from segmentlog.schemas.wire import HEAD_BYTES, encode_head


class AvroSerializer:
    """Objects as Avro, each after the id of its schema, as Confluent's serializers write them. Thread-safe.

    registry               ``store.schemas``, or a `RemoteRegistry`
    schema                 as JSON, text or parsed; None with ``use_latest_version``
    is_key                 whether it is for keys: the subject then ends in ``-key``
    subject_name_strategy  "topic", "record", "topic-record"
    auto_register          register the schema when it is first written with; else it has to be there
    use_latest_version     write by the newest version of the subject, whatever it is
    normalize              register it normalized

    An object that has a field that the schema does not is refused: it would be lost.
    """

    def __init__(
        self,
        registry: SchemaSource,
        schema: str | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        references: Sequence[Reference] = (),
        is_key: bool = False,
        subject_name_strategy: Strategy = "topic",
        auto_register: bool = True,
        use_latest_version: bool = False,
        normalize: bool = False,
    ) -> None:
        options = WriterOptions(is_key, subject_name_strategy, auto_register, use_latest_version, normalize)
        options.check(schema is not None)
        text = schema if isinstance(schema, str | None) else json.dumps(schema)
        self._draft = None if text is None else Draft(text, references=tuple(references))
        self._record_name = "" if text is None else _record_name(text)
        self._source = registry
        self._writers = Writers(registry, options)
        self._parsed: dict[int, Any] = {}

    def serialize(self, topic: str, values: Sequence[Any]) -> list[bytes | None]:
        """See `Serializer`."""
        record = self._writers.find(topic, self._record_name, lambda subject: self._draft)
        schema = self._parsed.get(record.id)
        if schema is None:
            schema = self._parsed[record.id] = _for_fastavro(self._source.parsed(record))
        head = encode_head(record.id)
        return [None if value is None else _written(head, schema, value) for value in values]


def _written(head: bytes, schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    out.write(head)
    fastavro.schemaless_writer(out, schema, value, strict_allow_default=True)
    return out.getvalue()


class PlainWriter:
    """Values of one schema, from JSON as people write it; see `plain`."""

    def __init__(self, parsed: ParsedSchema, schema_id: int) -> None:
        assert isinstance(parsed, AvroSchema)
        names: dict[str, Any] = {}
        self._schema = _for_fastavro(parsed, names)
        self._plain = FromJson(self._schema, names)
        self._head = encode_head(schema_id)

    def write(self, value: Any) -> bytes:
        """Raises `InvalidPayload`, and what fastavro raises: ValueError, TypeError."""
        return _written(self._head, self._schema, self._plain.convert(value))


class AvroDeserializer:
    """Objects of Avro, by the schema that each record names. Thread-safe.

    ``schema`` is the reader's: what was written with another one is resolved to it, by Avro's rules.
    """

    def __init__(self, registry: SchemaSource, schema: str | Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        text = schema if isinstance(schema, str | None) else json.dumps(schema)
        self._reader = None if text is None else _for_fastavro(AvroSchema(text))
        self._readers = Readers(registry, self._make, "AVRO")

    def deserialize(self, topic: str, data: Sequence[bytes | None]) -> list[Any]:
        """See `Deserializer`."""
        return self._readers.decode_all(data)

    def _make(self, record: SchemaRecord, parsed: ParsedSchema) -> Decode[Any]:
        return avro_decoder(parsed, self._reader)


def avro_decoder(parsed: ParsedSchema, reader: Any = None) -> Decode[Any]:
    """What reads values of an Avro schema. Raises `InvalidSchema` for one whose values could be of any length."""
    assert isinstance(parsed, AvroSchema)
    if parsed.has_endless_arrays():
        raise InvalidSchema("an array of items that take no bytes: a few bytes could say that there are any number")
    written = _for_fastavro(parsed)

    def decode(blob: bytes) -> Any:
        source = io.BytesIO(blob)
        source.seek(HEAD_BYTES)
        try:
            value = fastavro.schemaless_reader(source, written, reader)
        except (EOFError, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise InvalidPayload(f"it is no value of its schema: {error or type(error).__name__}") from error
        if source.tell() != len(blob):
            raise InvalidPayload(f"{len(blob) - source.tell()} bytes are left behind the value")
        return value

    return decode


def _for_fastavro(parsed: ParsedSchema, names: dict[str, Any] | None = None) -> Any:
    assert isinstance(parsed, AvroSchema)
    names = {} if names is None else names
    try:
        for document in parsed.dependencies:
            fastavro.parse_schema(document, names)
        return fastavro.parse_schema(parsed.document, names)
    except (fastavro.schema.SchemaParseException, ValueError, KeyError, TypeError) as error:
        raise InvalidSchema(f"Invalid Avro schema: {error}") from error


def parsed_by_fastavro(text: str) -> tuple[Any, dict[str, Any]]:
    """A schema that refers to nothing else, as fastavro has it, with what it defines by names."""
    names: dict[str, Any] = {}
    return _for_fastavro(AvroSchema(text), names), names


def _record_name(text: str) -> str:
    """The whole name of what a schema describes; that of its type where it has none."""
    document = decode_json(text, "Avro schema")
    if not isinstance(document, dict):
        return document if isinstance(document, str) else ""
    name, space = document.get("name"), document.get("namespace")
    if isinstance(name, str):
        return f"{space}.{name}" if space and "." not in name else name
    return str(document.get("type", ""))
