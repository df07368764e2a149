"""Values of whatever schema, as plain objects: for who prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from segmentlog.schemas.kinds import ParsedSchema
from segmentlog.schemas.naming import SchemaSource
from segmentlog.schemas.reading import Decode, Readers
from segmentlog.schemas.records import SchemaRecord


class AnyDeserializer:
    """Dicts, lists, numbers and texts, by the schema that each record names. Thread-safe."""

    def __init__(self, registry: SchemaSource, schema_type: Literal["AVRO", "JSON", "PROTOBUF"] | None = None) -> None:
        self._readers = Readers(registry, _make, schema_type)

    def deserialize(self, topic: str, data: Sequence[bytes | None]) -> list[Any]:
        """See `Deserializer`."""
        return self._readers.decode_all(data)


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
