"""From the text of a schema to something that can be compared and written by: whatever its type is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from segmentlog.schemas.registry_errors import InvalidSchema, MissingPackage
from segmentlog.schemas.schema_kind import TYPES, Dependency, ParsedSchema

TEXT_MAX: Final = 1 << 20
"""Characters of one schema."""


def parse(schema_type: str, text: str, dependencies: Sequence[Dependency] = ()) -> ParsedSchema:
    """A schema of one of `TYPES`, the ones that it refers to before the ones that refer to them.

    Raises `InvalidSchema`, and `MissingPackage` when what reads that type is not installed.
    """
    if len(text) > TEXT_MAX:
        raise InvalidSchema(f"Invalid schema: it has {len(text)} characters, more than {TEXT_MAX}")
    if not text.strip():
        raise InvalidSchema("Invalid schema: it is empty")
    parser = _parsers().get(schema_type)
    if parser is None:
        raise InvalidSchema(f"Invalid schema type {schema_type}: there are {', '.join(TYPES)}")
    try:
        return parser(text, dependencies)
    except RecursionError:
        raise InvalidSchema("Invalid schema: it is nested too deeply") from None


def _parsers() -> dict[str, Callable[[str, Sequence[Dependency]], ParsedSchema]]:
    return {"AVRO": _parse_avro, "JSON": _parse_json, "PROTOBUF": _parse_protobuf}


def _parse_avro(text: str, dependencies: Sequence[Dependency]) -> ParsedSchema:
    with_package("avro", "Avro")
    from segmentlog.schemas.avro_schema import AvroSchema

    return AvroSchema(text, dependencies)


def _parse_json(text: str, dependencies: Sequence[Dependency]) -> ParsedSchema:
    for package in ("jsonschema", "re2"):
        with_package(package, "JSON Schema")
    from segmentlog.schemas.json_schema import JsonSchema

    return JsonSchema(text, dependencies)


def _parse_protobuf(text: str, dependencies: Sequence[Dependency]) -> ParsedSchema:
    with_package("google.protobuf", "Protobuf")
    from segmentlog.schemas.proto_schema import ProtoSchema

    return ProtoSchema(text, dependencies)


def with_package(name: str, purpose: str) -> None:
    """Raise `MissingPackage` when an optional package is not there."""
    import importlib

    try:
        importlib.import_module(name)
    except ImportError:
        raise MissingPackage(_INSTALLED_AS.get(name, name), purpose) from None


_INSTALLED_AS: Final = {"google.protobuf": "protobuf", "re2": "google-re2"}
