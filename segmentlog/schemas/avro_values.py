"""Serializer and deserializer of Avro values, with fastavro."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import fastavro
import fastavro._read_py

from segmentlog.schemas.avro_plain_json import FromJson
from segmentlog.schemas.avro_schema import AvroSchema
from segmentlog.schemas.avro_shape import FREE_MAX
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.schemas.registry_errors import InvalidPayload, InvalidSchema
from segmentlog.schemas.registry_records import Reference, SchemaRecord
from segmentlog.schemas.schema_id_framing import HEAD_BYTES, encode_head
from segmentlog.schemas.schema_kind import ParsedSchema, decode_json
from segmentlog.schemas.schema_reader import Decode, Readers
from segmentlog.schemas.subject_strategy import SchemaSource, Strategy, WriterOptions, Writers


class AvroSerializer:
    """Writes objects as Avro, after the id of their schema, in the format of Confluent's serializers. Thread-safe.

    registry               ``store.schemas``, or a `RemoteRegistry`
    schema                 JSON, as text or parsed; None with ``use_latest_version``
    is_key                 whether the serializer writes keys: the subject then ends in ``-key``
    subject_name_strategy  "topic", "record", "topic-record"
    auto_register          register the schema at its first use; otherwise it must be registered already
    use_latest_version     write with the latest version of the subject, even if it differs from ``schema``
    normalize              normalize the schema before it is registered

    The serializer refuses an object with a field that the schema does not have, because the field would be lost.
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
        self._known: dict[int, _Writer] = {}

    def serialize(self, topic: str, values: Sequence[Any]) -> list[bytes | None]:
        """See `Serializer`."""
        record = self._writers.find(topic, self._record_name, lambda subject: self._draft)
        writer = self._known.get(record.id)
        if writer is None:
            parsed = self._source.parsed(record)
            writer = self._known[record.id] = _Writer(parsed, _for_fastavro(parsed), record.id)
        return [None if value is None else writer.write(value) for value in values]


DEPTH_MAX: Final = 200
"""Maximum nesting of lists and objects in a value whose schema contains itself."""


class _Writer:
    """Encoder of values of one schema: the schema's id, then the value as Avro."""

    def __init__(self, parsed: ParsedSchema, schema: Any, schema_id: int) -> None:
        assert isinstance(parsed, AvroSchema)
        self._schema = schema
        self._head = encode_head(schema_id)
        self._has_unlimited_depth = parsed.shape().has_unlimited_depth

    def write(self, value: Any) -> bytes:
        if self._has_unlimited_depth:
            _check_depth(value)
        out = io.BytesIO()
        out.write(self._head)
        try:
            fastavro.schemaless_writer(out, self._schema, value, strict_allow_default=True)
        except RecursionError:
            raise InvalidPayload("the value is nested too deeply") from None
        return out.getvalue()


def _check_depth(value: Any) -> None:
    """Raise `InvalidPayload` for a value that is nested too deeply.

    fastavro does not check the depth: a value deeper than the C stack crashes the process.
    """
    level = [value]
    for _ in range(DEPTH_MAX):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                inner += one.values()
            elif isinstance(one, list | tuple):
                inner += one
        if not inner:
            return
        level = inner
    raise InvalidPayload(f"the value is nested too deeply: the limit is {DEPTH_MAX} levels of lists and objects")


class PlainWriter:
    """Encoder of values of one schema, given as plain JSON in the form of `avro_plain_json`."""

    def __init__(self, parsed: ParsedSchema, schema_id: int) -> None:
        names: dict[str, Any] = {}
        schema = _for_fastavro(parsed, names)
        self._plain = FromJson(schema, names)
        self._writer = _Writer(parsed, schema, schema_id)

    def write(self, value: Any) -> bytes:
        """Convert and encode a value. Raises `InvalidPayload`, and fastavro's errors: ValueError, TypeError."""
        try:
            converted = self._plain.convert(value)
        except RecursionError:
            raise InvalidPayload("the value is nested too deeply") from None
        return self._writer.write(converted)


class AvroDeserializer:
    """Reads Avro values with the schema that each record names. Thread-safe.

    ``schema`` is the reader's schema: values written with another schema are resolved to it by Avro's rules.
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
    """Return a decoder for values of an Avro schema.

    Raises `InvalidSchema` for a schema with which a few bytes could decode to a value of unlimited size.
    """
    assert isinstance(parsed, AvroSchema)
    shape = parsed.shape()
    if shape.has_zero_byte_items:
        raise InvalidSchema(
            "an array of the schema has items that take no bytes: a few bytes could decode to a huge value"
        )
    if shape.has_too_many_parts:
        raise InvalidSchema(
            f"a record of the schema has more than {FREE_MAX} parts: a few bytes could decode to a huge value"
        )
    written = _for_fastavro(parsed)
    # fastavro's C reader recurses as deep as the value, and would overflow the C stack and crash the process. Its
    # Python reader is slower, but raises RecursionError.
    read = fastavro._read_py.schemaless_reader if shape.has_unlimited_depth else fastavro.schemaless_reader

    def decode(blob: bytes) -> Any:
        source = io.BytesIO(blob)
        source.seek(HEAD_BYTES)
        try:
            value = read(source, written, reader)
        except RecursionError:
            raise InvalidPayload("the value is nested too deeply") from None
        except (EOFError, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise InvalidPayload(f"the value does not match its schema: {error or type(error).__name__}") from error
        if source.tell() != len(blob):
            raise InvalidPayload(f"{len(blob) - source.tell()} bytes follow the value")
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
    """Return a schema without references as fastavro parses it, and its named types by name."""
    names: dict[str, Any] = {}
    return _for_fastavro(AvroSchema(text), names), names


def _record_name(text: str) -> str:
    """Return the full name of a schema's record; the name of its type if the schema has no name."""
    document = decode_json(text, "Avro schema")
    if not isinstance(document, dict):
        return document if isinstance(document, str) else ""
    name, space = document.get("name"), document.get("namespace")
    if isinstance(name, str):
        return f"{space}.{name}" if space and "." not in name else name
    return str(document.get("type", ""))
