"""Avro values: written and read by fastavro."""

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
"""Lists and objects within each other, of a value that is written by a schema that contains itself."""


class _Writer:
    """Values of one schema, behind its id."""

    def __init__(self, parsed: ParsedSchema, schema: Any, schema_id: int) -> None:
        assert isinstance(parsed, AvroSchema)
        self._schema = schema
        self._head = encode_head(schema_id)
        self._is_bottomless = parsed.shape().is_bottomless

    def write(self, value: Any) -> bytes:
        if self._is_bottomless:
            _check_depth(value)
        out = io.BytesIO()
        out.write(self._head)
        try:
            fastavro.schemaless_writer(out, self._schema, value, strict_allow_default=True)
        except RecursionError:
            raise InvalidPayload("it is nested too deeply") from None
        return out.getvalue()


def _check_depth(value: Any) -> None:
    """fastavro does not: what is deeper than its stack ends the process."""
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
    raise InvalidPayload(f"it is nested too deeply: more than {DEPTH_MAX} lists and objects within each other")


class PlainWriter:
    """Values of one schema, from JSON as people write it; see `plain`."""

    def __init__(self, parsed: ParsedSchema, schema_id: int) -> None:
        names: dict[str, Any] = {}
        schema = _for_fastavro(parsed, names)
        self._plain = FromJson(schema, names)
        self._writer = _Writer(parsed, schema, schema_id)

    def write(self, value: Any) -> bytes:
        """Raises `InvalidPayload`, and what fastavro raises: ValueError, TypeError."""
        try:
            converted = self._plain.convert(value)
        except RecursionError:
            raise InvalidPayload("it is nested too deeply") from None
        return self._writer.write(converted)


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
    shape = parsed.shape()
    if shape.has_endless:
        raise InvalidSchema("an array of items that take no bytes: a few bytes could say that there are any number")
    if shape.is_multiplying:
        raise InvalidSchema(f"records of more than {FREE_MAX} parts before the first byte")
    written = _for_fastavro(parsed)
    # In C it goes as deep as the value says, until the stack ends and the process with it. In Python it is slower.
    read = fastavro._read_py.schemaless_reader if shape.is_bottomless else fastavro.schemaless_reader

    def decode(blob: bytes) -> Any:
        source = io.BytesIO(blob)
        source.seek(HEAD_BYTES)
        try:
            value = read(source, written, reader)
        except RecursionError:
            raise InvalidPayload("it is nested too deeply") from None
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
