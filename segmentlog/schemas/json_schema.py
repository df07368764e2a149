"""JSON schemas, checked against the meta-schemas of `jsonschema` and compared by `json_diff`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jsonschema
from jsonschema.validators import validator_for

from segmentlog.schemas.json_diff import incompatible_changes
from segmentlog.schemas.json_nodes import make_root, node_of
from segmentlog.schemas.registry_errors import InvalidSchema
from segmentlog.schemas.schema_kind import Dependency, ParsedSchema, decode_json, encode_json, sorted_json


class JsonSchema:
    """A parsed JSON schema of draft 3 or later; without ``$schema`` it is draft 7, as in other registries."""

    def __init__(self, text: str, dependencies: Sequence[Dependency] = ()) -> None:
        self.document: Any = decode_json(text, "JSON schema")
        if not isinstance(self.document, dict | bool):
            raise InvalidSchema("Invalid JSON schema: the schema must be an object, true or false")
        if isinstance(self.document, dict) and not isinstance(self.document.get("$schema", ""), str):
            raise InvalidSchema("Invalid JSON schema: $schema must be a string")
        self.validator = validator_for(self.document, default=jsonschema.Draft7Validator)
        try:
            self.validator.check_schema(self.document)
        except jsonschema.SchemaError as error:
            place = "/".join(["#", *map(str, error.absolute_path)])
            raise InvalidSchema(f"Invalid JSON schema: {error.message[:500]}, at {place}") from None
        self.root = make_root(self.document, dependencies)
        self.root.check_references()
        self.canonical = encode_json(self.document)

    def named_documents(self) -> list[tuple[str, Any]]:
        """Return the referenced documents with the names that references use for them."""
        return [(name, other.document) for name, other in self.root.others.items()]

    def normalized(self) -> str:
        return sorted_json(self.document)

    def formatted(self, shape: str) -> str:
        return self.canonical

    def why_unreadable(self, written: ParsedSchema) -> list[str]:
        assert isinstance(written, JsonSchema)
        try:
            changes = incompatible_changes(node_of(written.document, written.root), node_of(self.document, self.root))
        except (
            InvalidSchema,
            TypeError,
            AttributeError,
            LookupError,
        ) as error:  # drafts before 4 have keywords with other types
            return [f"{{errorType:'NOT_COMPARED', description:'{error}'}}"]
        return [
            f"{{errorType:'{kind}', description:'Found incompatible change: {kind} at path {place}'}}"
            for kind, place in changes
        ]
