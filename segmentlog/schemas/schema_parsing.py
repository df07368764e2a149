"""Parses the text of a schema of any type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from segmentlog.schemas.registry_errors import InvalidSchema, MissingPackage
from segmentlog.schemas.schema_kind import TYPES, Dependency, ParsedSchema

TEXT_MAX: Final = 1 << 20
"""Maximum length of a schema, in characters."""


def parse(schema_type: str, text: str, dependencies: Sequence[Dependency] = ()) -> ParsedSchema:
    """Parse a schema of one of `TYPES`. A dependency that refers to others must come after them.

    Raises `InvalidSchema`, and `MissingPackage` if the package that reads this type is not installed.
    """
    if len(text) > TEXT_MAX:
        raise InvalidSchema(f"Invalid schema: the text has {len(text)} characters; the limit is {TEXT_MAX}")
    if not text.strip():
        raise InvalidSchema("Invalid schema: the text is empty")
    parser = _parsers().get(schema_type)
    if parser is None:
        raise InvalidSchema(f"Invalid schema type {schema_type}: the types are {', '.join(TYPES)}")
    try:
        return parser(text, dependencies)
    except RecursionError:
        raise InvalidSchema("Invalid schema: the schema is nested too deeply") from None


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
    """Raise `MissingPackage` if an optional package is not installed."""
    import importlib

    try:
        importlib.import_module(name)
    except ImportError:
        raise MissingPackage(_INSTALLED_AS.get(name, name), purpose) from None


_INSTALLED_AS: Final = {"google.protobuf": "protobuf", "re2": "google-re2"}
