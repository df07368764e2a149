"""Avro schemas, parsed and compared by Apache Avro's library."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import avro.compatibility
import avro.errors
import avro.name
import avro.schema

from segmentlog.schemas.avro_canonical import PRIMITIVES, canonical_document
from segmentlog.schemas.avro_shape import AvroShape
from segmentlog.schemas.registry_errors import InvalidSchema
from segmentlog.schemas.schema_kind import Dependency, ParsedSchema, decode_json, encode_json

_WRONG = (avro.errors.AvroException, TypeError, ValueError, KeyError, AttributeError)
"""Errors that the library raises for invalid schemas."""


class AvroSchema:
    """A parsed Avro schema. It refers to other schemas by the type names that they define."""

    def __init__(self, text: str, dependencies: Sequence[Dependency] = ()) -> None:
        self.document: Any = decode_json(text, "Avro schema")
        self.dependencies: list[Any] = [decode_json(one.text, "Avro schema") for one in dependencies]
        names = avro.name.Names()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library warns about unknown logical types
            try:
                for document in self.dependencies:
                    _make(document, names)
                self.schema = _make(self.document, names)
                self.canonical = encode_json(canonical_document(self.document))
            except InvalidSchema:
                raise
            except _WRONG as error:
                raise InvalidSchema(f"Invalid Avro schema: {error}") from None

    def normalized(self) -> str:
        return encode_json(canonical_document(self.document, in_order=True))

    def formatted(self, shape: str) -> str:
        if shape == "resolved" and self.dependencies:
            return encode_json(_Resolving(self.dependencies).resolve(self.document, ""))
        return self.canonical

    def shape(self) -> AvroShape:
        """Return the limits of the schema's values: depth and size."""
        return AvroShape(self.schema)

    def why_unreadable(self, written: ParsedSchema) -> list[str]:
        assert isinstance(written, AvroSchema)
        checker = avro.compatibility.ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
        result = checker.get_compatibility(self.schema, written.schema)
        if result.compatibility is not avro.compatibility.SchemaCompatibilityType.incompatible:
            return []
        # The library returns messages and locations as separate sets, so several cannot be paired.
        kinds = "+".join(dict.fromkeys(kind.name.upper() for kind in result.incompatibilities))
        said, places = "; ".join(sorted(result.messages)), ", ".join(sorted(result.locations))
        return [f"{{errorType:'{kinds}', description:'{said}', additionalInfo:'at {places}'}}"]


def _make(document: Any, names: avro.name.Names) -> avro.schema.Schema:
    names.default_namespace = None
    if isinstance(document, str) and document not in PRIMITIVES:
        known = names.get_name(document, None)
        if known is None:
            raise InvalidSchema(f"Invalid Avro schema: unknown type {document!r}")
        return known
    return avro.schema.make_avsc_object(document, names)


class _Resolving:
    """Replaces the first use of each referenced type name in a schema by the type's definition."""

    def __init__(self, dependencies: Sequence[Any]) -> None:
        self._known: dict[str, Any] = {}
        for document in dependencies:
            for one in document if isinstance(document, list) else [document]:
                if isinstance(one, dict) and "name" in one:
                    space = one.get("namespace", "") or ""
                    full_name = one["name"] if "." in one["name"] or not space else f"{space}.{one['name']}"
                    self._known[full_name] = canonical_document(one)

    def resolve(self, schema: Any, namespace: str) -> Any:
        if isinstance(schema, str):
            full_name = schema if "." in schema or not namespace else f"{namespace}.{schema}"
            found = self._known.pop(full_name, None)
            if found is None:
                return schema
            if "namespace" not in found and "." not in found["name"] and namespace:
                found = {**found, "namespace": ""}
            return self.resolve(found, namespace)
        if isinstance(schema, list):
            return [self.resolve(branch, namespace) for branch in schema]
        space = schema.get("namespace", namespace)
        if "." in schema.get("name", ""):
            space = schema["name"].rpartition(".")[0]
        resolved = dict(schema)
        if "fields" in schema:
            fields = [{**field, "type": self.resolve(field["type"], space)} for field in schema["fields"]]
            resolved["fields"] = fields
        for inner in ("items", "values"):
            if inner in schema:
                resolved[inner] = self.resolve(schema[inner], space)
        return resolved
