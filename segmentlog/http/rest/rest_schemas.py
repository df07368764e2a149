"""Encodes and decodes keys and values by the schemas of the store's registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from segmentlog.http.rest.value_formats import SchemaSelector
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.schemas.registry_errors import InvalidPayload, InvalidSchema
from segmentlog.schemas.schema_id_framing import encode_head, encode_indexes

if TYPE_CHECKING:
    from segmentlog.schemas.any_values import AnyDeserializer
    from segmentlog.schemas.registry_records import SchemaRecord
    from segmentlog.schemas.schema_kind import ParsedSchema
    from segmentlog.store import LogStore

_TYPES: Final = {"avro": "AVRO", "jsonschema": "JSON", "protobuf": "PROTOBUF"}
_FORMATS: Final = {kind: name for name, kind in _TYPES.items()}
_ENCODERS_MAX: Final = 1000

Encode = Callable[[Any], bytes]


class StoreSchemaWriter:
    """`SchemaWriter` for one registered schema."""

    def __init__(self, record: SchemaRecord, encode: Encode) -> None:
        self.subject, self.schema_id, self.version = record.subject, record.id, record.version
        self.format = _FORMATS[record.schema_type]
        self._encode = encode

    def encode(self, data: Any) -> bytes:
        """Encode data. Raises ValueError if the schema does not allow them."""
        try:
            return self._encode(data)
        except (TypeError, OverflowError, KeyError) as error:
            raise InvalidPayload(f"the data do not match the schema: {error}") from None


class StoreSchemaCodec:
    """`SchemaCodec` for the registry of a store. Thread-safe."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._encoders: dict[tuple[str, int], Encode] = {}
        self._reader: AnyDeserializer | None = None

    def writer(self, topic: str, selector: SchemaSelector, *, is_key: bool) -> StoreSchemaWriter:
        """Implement `SchemaCodec.writer`. An empty selector means the latest version of the topic's subject."""
        registry = self._store.schemas
        subject = selector.subject or _subject(topic, selector, is_key)
        if selector.schema is not None:
            kind = _TYPES[selector.format or "avro"]
            record = registry.register(subject, Draft(selector.schema, kind))
        elif selector.schema_id is not None:
            record = registry.by_id(selector.schema_id, subject)
        else:
            record = registry.version(subject, selector.version or "latest")
        if selector.format is not None and record.schema_type != _TYPES[selector.format]:
            raise InvalidSchema(
                f"Invalid schema: schema {record.id} is {record.schema_type}, not {_TYPES[selector.format]}"
            )
        key = (record.schema, record.id)
        encode = self._encoders.get(key)
        if encode is None:
            if len(self._encoders) >= _ENCODERS_MAX:
                self._encoders.clear()
            encode = self._encoders[key] = _encoder(registry.parsed(record), record)
        return StoreSchemaWriter(record, encode)

    def read(self, data: bytes) -> Any:
        """Implement `SchemaCodec.read`."""
        if self._reader is None:
            from segmentlog.schemas.any_values import AnyDeserializer

            self._reader = AnyDeserializer(self._store.schemas)
        return self._reader.deserialize("", [data])[0]


def _subject(topic: str, selector: SchemaSelector, is_key: bool) -> str:
    if selector.strategy in (None, "TOPIC_NAME"):
        return f"{topic}-{'key' if is_key else 'value'}"
    raise InvalidSchema(
        f"Invalid schema: subject_name_strategy {selector.strategy} is not supported; set subject instead"
    )


def _encoder(parsed: ParsedSchema, record: SchemaRecord) -> Encode:
    head = encode_head(record.id)
    match record.schema_type:
        case "AVRO":
            from segmentlog.schemas.avro_values import PlainWriter

            return PlainWriter(parsed, record.id).write
        case "JSON":
            from segmentlog.schemas.json_values import checker

            check = checker(parsed)

            def encode(data: Any) -> bytes:
                check(data)
                return head + msgspec.json.encode(data)

            return encode
        case _:
            return _protobuf_encoder(parsed, head)


def _protobuf_encoder(parsed: ParsedSchema, head: bytes) -> Encode:
    """Return an encoder for the first message type of the .proto file, as the REST Proxy does."""
    from google.protobuf import json_format
    from google.protobuf.message_factory import GetMessageClass

    from segmentlog.schemas.proto_schema import ProtoSchema

    assert isinstance(parsed, ProtoSchema)
    try:
        kind = GetMessageClass(parsed.message([0]))
    except LookupError as error:
        raise InvalidSchema(f"Invalid schema: {error}") from None
    begin = head + encode_indexes([0])

    def encode(data: Any) -> bytes:
        try:
            return begin + bytes(json_format.ParseDict(data, kind()).SerializeToString())
        except (json_format.ParseError, AttributeError) as error:
            raise InvalidPayload(f"the data are not a message {kind.DESCRIPTOR.full_name}: {error}") from None

    return encode
