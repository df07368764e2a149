"""Decodes values of any schema type to plain objects, for printing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from segmentlog.errors import SegmentlogError
from segmentlog.schemas.registry_errors import MissingPackage
from segmentlog.schemas.registry_records import SchemaRecord
from segmentlog.schemas.schema_kind import ParsedSchema
from segmentlog.schemas.schema_reader import Decode, Readers
from segmentlog.schemas.subject_strategy import SchemaSource


class AnyDeserializer:
    """Decodes each record with the schema that it names, to dicts, lists, numbers and strings. Thread-safe."""

    def __init__(self, registry: SchemaSource, schema_type: Literal["AVRO", "JSON", "PROTOBUF"] | None = None) -> None:
        self._readers = Readers(registry, _make, schema_type)

    def deserialize(self, topic: str, data: Sequence[bytes | None]) -> list[Any]:
        """See `Deserializer`."""
        return self._readers.decode_all(data)


def document_decoder(registry: SchemaSource) -> Callable[[str, bytes], Any]:
    """Return a function that decodes a topic's value to dicts, lists, strings, numbers, booleans and None. Thread-safe.

    The function returns None for a value that is too large, that violates its schema, or whose schema is missing in the
    registry. It raises `MissingPackage` if the package that reads this schema type is not installed.
    """
    deserializer = AnyDeserializer(registry)

    def decode(topic: str, value: bytes) -> Any:
        import msgspec

        try:
            (found,) = deserializer.deserialize(topic, [value])
            return msgspec.to_builtins(found)  # converts bytes and times to their JSON form
        except MissingPackage:
            raise
        except (SegmentlogError, ValueError, TypeError, LookupError, OSError, RecursionError):
            return None

    return decode


def _make(record: SchemaRecord, parsed: ParsedSchema) -> Decode[Any]:
    match record.schema_type:
        case "AVRO":
            from segmentlog.schemas.avro_values import avro_decoder

            return avro_decoder(parsed)
        case "JSON":
            import msgspec

            from segmentlog.schemas.json_values import json_decoder

            return json_decoder(parsed, msgspec.json.Decoder(), validate=False)
        case _:
            from google.protobuf import json_format

            from segmentlog.schemas.proto_values import proto_decoder

            decode = proto_decoder(parsed)
            return lambda blob: json_format.MessageToDict(decode(blob), preserving_proto_field_name=True)
