"""Serializer and deserializer of Protobuf messages."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message
from google.protobuf.message_factory import GetMessageClass

from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.schemas.proto_schema import ProtoSchema, indexes_of, is_built_in
from segmentlog.schemas.registry_errors import InvalidPayload
from segmentlog.schemas.registry_records import Reference, SchemaRecord
from segmentlog.schemas.schema_id_framing import decode_indexes, encode_head, encode_indexes
from segmentlog.schemas.schema_kind import ParsedSchema
from segmentlog.schemas.schema_reader import Decode, Readers
from segmentlog.schemas.subject_strategy import SchemaSource, Strategy, WriterOptions, Writers


class ProtobufSerializer:
    """Writes messages of one class, after the id of their schema and the message's indexes in it. Thread-safe.

    The serializer also registers the files that the message's file imports, each under its own name, except Google's
    files. The other options are those of `AvroSerializer`.
    """

    def __init__(
        self,
        registry: SchemaSource,
        message_class: type[Message],
        *,
        is_key: bool = False,
        subject_name_strategy: Strategy = "topic",
        auto_register: bool = True,
        use_latest_version: bool = False,
        normalize: bool = False,
    ) -> None:
        self._options = WriterOptions(is_key, subject_name_strategy, auto_register, use_latest_version, normalize)
        self._options.check(True)
        self._class = message_class
        self._source = registry
        self._writers = Writers(registry, self._options)
        self._heads: dict[int, bytes] = {}

    def serialize(self, topic: str, values: Sequence[Message | None]) -> list[bytes | None]:
        """See `Serializer`."""
        descriptor = self._class.DESCRIPTOR
        record = self._writers.find(topic, descriptor.full_name, self._draft)
        head = self._heads.get(record.id)
        if head is None:
            head = self._heads[record.id] = encode_head(record.id) + encode_indexes(self._place(record, descriptor))
        return [None if value is None else head + self._encode(value) for value in values]

    def _encode(self, value: Message) -> bytes:
        if not isinstance(value, self._class):
            raise TypeError(f"expected a {self._class.DESCRIPTOR.full_name}, found {type(value).__name__}")
        try:
            return bytes(value.SerializeToString())
        except EncodeError as error:
            raise InvalidPayload(str(error)) from error

    def _place(self, record: SchemaRecord, descriptor: Descriptor) -> list[int]:
        """Return the message's indexes in the registered schema.

        With ``use_latest_version`` the registered file can differ from the file of the message class.
        """
        parsed = self._source.parsed(record)
        assert isinstance(parsed, ProtoSchema)
        try:
            return indexes_of(parsed.find_message(descriptor.full_name))
        except KeyError:
            raise InvalidPayload(f"schema {record.id} has no message {descriptor.full_name}") from None

    def _draft(self, subject: str) -> Draft:
        return self._draft_of(self._class.DESCRIPTOR.file)

    def _draft_of(self, file: FileDescriptor) -> Draft:
        references = []
        for other in file.dependencies:
            if is_built_in(other.name):
                continue
            draft = self._draft_of(other)
            if self._options.auto_register:
                version = self._source.register(other.name, draft, normalize=self._options.normalize).version
            else:
                version = self._source.lookup(other.name, draft, normalize=self._options.normalize).version
            references.append(Reference(other.name, other.name, version))
        return Draft(base64.b64encode(file.serialized_pb).decode(), "PROTOBUF", tuple(references))


class ProtobufDeserializer:
    """Reads messages as ``message_class``, or as a class created from the schema that a record names. Thread-safe."""

    def __init__(self, registry: SchemaSource, message_class: type[Message] | None = None) -> None:
        self._class = message_class
        self._readers = Readers(registry, self._make, "PROTOBUF")

    def deserialize(self, topic: str, data: Sequence[bytes | None]) -> list[Any]:
        """See `Deserializer`."""
        return self._readers.decode_all(data)

    def _make(self, record: SchemaRecord, parsed: ParsedSchema) -> Decode[Message]:
        return proto_decoder(parsed, self._class)


def proto_decoder(parsed: ParsedSchema, message_class: type[Message] | None = None) -> Decode[Message]:
    """Return a decoder for messages of a Protobuf schema, as ``message_class`` or the class that the record names."""
    assert isinstance(parsed, ProtoSchema)
    classes: dict[tuple[int, ...], type[Message]] = {}

    def decode(blob: bytes) -> Message:
        indexes, position = decode_indexes(blob)
        kind = message_class or classes.get(tuple(indexes))
        if kind is None:
            try:
                kind = classes[tuple(indexes)] = GetMessageClass(parsed.message(indexes))
            except LookupError as error:
                raise InvalidPayload(str(error)) from None
        try:
            return kind.FromString(blob[position:])
        except DecodeError as error:
            raise InvalidPayload(f"the value is not a message {kind.DESCRIPTOR.full_name}: {error}") from error

    return decode
