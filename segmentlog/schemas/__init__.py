"""Schemas of record values: registry, serializers, versions and compatibility.

Names are imported at their first use, because the packages that read schemas are optional and load slowly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from segmentlog.schemas.any_values import AnyDeserializer as AnyDeserializer
    from segmentlog.schemas.avro_values import AvroDeserializer as AvroDeserializer
    from segmentlog.schemas.avro_values import AvroSerializer as AvroSerializer
    from segmentlog.schemas.json_values import JsonDeserializer as JsonDeserializer
    from segmentlog.schemas.json_values import JsonSerializer as JsonSerializer
    from segmentlog.schemas.parsed_schemas import Draft as Draft
    from segmentlog.schemas.proto_values import ProtobufDeserializer as ProtobufDeserializer
    from segmentlog.schemas.proto_values import ProtobufSerializer as ProtobufSerializer
    from segmentlog.schemas.registry import SchemaRegistry as SchemaRegistry
    from segmentlog.schemas.registry_records import Reference as Reference
    from segmentlog.schemas.registry_records import SchemaRecord as SchemaRecord
    from segmentlog.schemas.remote_registry import RemoteRegistry as RemoteRegistry

_PLACES: Final = {
    "AnyDeserializer": "any_values",
    "AvroDeserializer": "avro_values",
    "AvroSerializer": "avro_values",
    "Draft": "parsed_schemas",
    "JsonDeserializer": "json_values",
    "JsonSerializer": "json_values",
    "ProtobufDeserializer": "proto_values",
    "ProtobufSerializer": "proto_values",
    "Reference": "registry_records",
    "RemoteRegistry": "remote_registry",
    "SchemaRecord": "registry_records",
    "SchemaRegistry": "registry",
}
_PACKAGES: Final = {
    "avro_values": ("fastavro", "Avro"),
    "json_values": ("jsonschema", "JSON Schema"),
    "proto_values": ("google.protobuf", "Protobuf"),
}


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if place in _PACKAGES:
        from segmentlog.schemas.schema_parsing import with_package

        with_package(*_PACKAGES[place])
    return getattr(importlib.import_module(f"{__name__}.{place}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
