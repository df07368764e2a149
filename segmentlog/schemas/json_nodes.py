"""A JSON schema as a tree of constraints: each node is one kind of constraint, with ``$ref`` resolved.

    {"type": ["string", "null"], "minLength": 1}      a string of at least one character, or null
    {"type": "string", "enum": ["a", "b"]}            a string, and also one of these values
    {"properties": {...}}                             an object, if the value is an object

Confluent's registry reads schemas in this form (with everit's library), and its rules compare such nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from segmentlog.schemas.registry_errors import InvalidSchema
from segmentlog.schemas.schema_kind import Dependency, decode_json, sorted_json

EMPTY, FALSE, COMBINED, CONDITIONAL = "empty", "false", "combined", "conditional"
_BY_TYPE: Final = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
               "dependencies", "dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedProperties"),
    "array": ("items", "additionalItems", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains",
              "minContains", "maxContains", "unevaluatedItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip
_CRITERIA: Final = ("allOf", "anyOf", "oneOf")
_VALUES: Final = frozenset({"enum", "const", "default", "examples"})
_METASCHEMAS: Final = ("http://json-schema.org/", "https://json-schema.org/")
_REFERENCES_MAX: Final = 100


class Root:
    """A document, with the documents that it refers to by name."""

    def __init__(self, document: Any, others: dict[str, Root]) -> None:
        self.document = document
        self.others = others
        self._identities: dict[int, str] = {}

    def check_references(self) -> None:
        """Raise `InvalidSchema` for a ``$ref`` whose target does not exist."""
        for schema in _walk(self.document):
            if isinstance(schema.get("$ref"), str):
                self.follow(schema["$ref"])

    def identity_of(self, part: Any) -> str:
        """Return the hash of `Node.identity` for a schema in the document, and cache it.

        A full text of n schemas, each of which refers twice to the next, has 2^n parts. Hashes keep the text short.
        """
        if isinstance(part, Node):
            return part.identity()
        found = self._identities.get(id(part))  # ids are stable: the document keeps its parts alive
        if found is None:
            text = node_of(part, self).identity()
            found = self._identities[id(part)] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return found

    def follow(self, reference: str) -> tuple[Root, Any]:
        """Return (the document of a ``$ref``'s target, the target schema). Raises `InvalidSchema`."""
        name, _, fragment = reference.partition("#")
        if name.startswith(_METASCHEMAS):
            return self, True
        root = self._named(name)
        if root is None:
            raise InvalidSchema(
                f"Invalid JSON schema: unresolved $ref {reference!r}: the schema has no reference with that name"
            )
        found = root.document if not fragment else root._at(fragment)
        if found is None:
            raise InvalidSchema(f"Invalid JSON schema: unresolved $ref {reference!r}: its target does not exist")
        return root, found

    def _named(self, name: str) -> Root | None:
        own = self.document.get("$id", "") if isinstance(self.document, dict) else ""
        if not name or name == own.rstrip("#"):
            return self
        if name in self.others:
            return self.others[name]
        relative = f"{own.rpartition('/')[0]}/{name}"
        return self.others.get(relative)

    def _at(self, fragment: str) -> Any:
        if not fragment.startswith("/"):
            for schema in _walk(self.document):
                if fragment == schema.get("$anchor") or schema.get("$id") == f"#{fragment}":
                    return schema
            return None
        found: Any = self.document
        for step in fragment[1:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~").replace("%25", "%")
            if isinstance(found, dict) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found if isinstance(found, dict | bool) else None


def make_root(document: Any, dependencies: Sequence[Dependency]) -> Root:
    """Return a document whose ``$ref`` can name dependencies by reference name or by ``$id``."""
    others: dict[str, Root] = {}
    for one in dependencies:
        other = Root(decode_json(one.text, "JSON schema"), others)
        others[one.name] = other
        if isinstance(other.document, dict) and isinstance(own := other.document.get("$id"), str):
            others.setdefault(own.rstrip("#"), other)
    return Root(document, others)


def _walk(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a document, except literal values such as defaults."""
    if isinstance(schema, dict):
        yield schema
        for name, inner in schema.items():
            if name not in _VALUES:
                yield from _walk(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _walk(inner)


class Node(NamedTuple):
    """One constraint: its kind, its keywords, and the document that contains it."""

    kind: str
    raw: dict[str, Any]
    root: Root
    criterion: str = ""
    parts: tuple[Any, ...] = ()
    """The parts of a combined node: schemas of the document, or nodes."""

    def identity(self) -> str:
        """Return a text that is equal for nodes with the same constraint."""
        if self.kind != COMBINED:
            return sorted_json([self.kind, self.raw])
        return f"{self.criterion}({','.join(map(self.root.identity_of, self.parts))})"

    def child(self, raw: Any) -> Node:
        """Return the node of a schema inside this node."""
        return node_of(raw, self.root)


def node_of(raw: Any, root: Root) -> Node:
    """Return the constraints of a schema as one node. Raises `InvalidSchema`."""
    if isinstance(raw, Node):
        return raw
    for _ in range(_REFERENCES_MAX):
        if not isinstance(raw, dict) or not isinstance(raw.get("$ref"), str):
            break
        root, raw = root.follow(raw["$ref"])
    else:
        raise InvalidSchema("Invalid JSON schema: a $ref leads to itself")
    if raw is False:
        return Node(FALSE, {}, root)
    if not isinstance(raw, dict):
        return Node(EMPTY, {}, root)
    demands = [*_typed(raw, root)]
    for kind in ("enum", "const", "not"):
        if kind in raw:
            demands.append(Node(kind, {kind: raw[kind]}, root))
    if "if" in raw:
        demands.append(Node(CONDITIONAL, {}, root))
    demands += [Node(COMBINED, {}, root, name, tuple(raw[name])) for name in _CRITERIA if name in raw]
    if not demands:
        return Node(EMPTY, _annotations(raw), root)
    if len(demands) == 1:
        only = demands[0]
        return only._replace(raw=only.raw | _annotations(raw))
    return Node(COMBINED, _annotations(raw), root, "allOf", tuple(demands))


def _annotations(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: raw[name] for name in ("default",) if name in raw}


def _typed(raw: dict[str, Any], root: Root) -> list[Node]:
    kinds = raw.get("type")
    if kinds is None:
        # Without "type", each keyword constrains only values of its own type.
        return [_of_type(kind, raw, root) for kind, words in _BY_TYPE.items() if any(word in raw for word in words)]
    if isinstance(kinds, str):
        return [_of_type(kinds, raw, root)]
    found = tuple(_of_type(kind, raw, root) for kind in kinds)
    return [found[0]] if len(found) == 1 else [Node(COMBINED, {}, root, "anyOf", found)]


def _of_type(kind: str, raw: dict[str, Any], root: Root) -> Node:
    words = _BY_TYPE.get("number" if kind == "integer" else kind, ())
    keywords = {word: raw[word] for word in words if word in raw}
    if kind == "integer":
        return Node("number", keywords | {"integer": True}, root)
    return Node(kind, keywords, root)
