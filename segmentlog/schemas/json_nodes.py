"""A JSON Schema as a tree of what it demands: each node one kind of demand, ``$ref`` followed.

    {"type": ["string", "null"], "minLength": 1}      any of: a string with that, null
    {"type": "string", "enum": ["a", "b"]}            all of: a string, one of these
    {"properties": {...}}                             an object, where it is one

That is how Confluent's registry reads them (its library is everit's), and what its rules are about.
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
    """A document, and those that it refers to by a name."""

    def __init__(self, document: Any, others: dict[str, Root]) -> None:
        self.document = document
        self.others = others
        self._identities: dict[int, str] = {}

    def check_references(self) -> None:
        """Raise `InvalidSchema` for a ``$ref`` that leads nowhere."""
        for schema in _walk(self.document):
            if isinstance(schema.get("$ref"), str):
                self.follow(schema["$ref"])

    def identity_of(self, part: Any) -> str:
        """`Node.identity` of a schema that stands in the document, hashed, and made once for each.

        Some lines that refer twice to the next would else be gone through more often than anybody waits for, and be as
        many characters.
        """
        if isinstance(part, Node):
            return part.identity()
        found = self._identities.get(id(part))  # parts of the document, which stays as it is
        if found is None:
            text = node_of(part, self).identity()
            found = self._identities[id(part)] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return found

    def follow(self, reference: str) -> tuple[Root, Any]:
        """Where a ``$ref`` leads: a schema, and the document that it is in. Raises `InvalidSchema`."""
        name, _, fragment = reference.partition("#")
        if name.startswith(_METASCHEMAS):
            return self, True
        root = self._named(name)
        if root is None:
            raise InvalidSchema(f"Invalid JSON schema: unresolved $ref {reference!r}: no reference has that name")
        found = root.document if not fragment else root._at(fragment)
        if found is None:
            raise InvalidSchema(f"Invalid JSON schema: unresolved $ref {reference!r}: nothing is there")
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
    """A document whose references are known by their names, and by the ``$id`` that they have."""
    others: dict[str, Root] = {}
    for one in dependencies:
        other = Root(decode_json(one.text, "JSON schema"), others)
        others[one.name] = other
        if isinstance(other.document, dict) and isinstance(own := other.document.get("$id"), str):
            others.setdefault(own.rstrip("#"), other)
    return Root(document, others)


def _walk(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object of a document but what stands for itself, defaults say."""
    if isinstance(schema, dict):
        yield schema
        for name, inner in schema.items():
            if name not in _VALUES:
                yield from _walk(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _walk(inner)


class Node(NamedTuple):
    """One demand: its kind, the keywords that say more, and the document in which they stand."""

    kind: str
    raw: dict[str, Any]
    root: Root
    criterion: str = ""
    parts: tuple[Any, ...] = ()
    """Of a combined one: schemas of the document, or nodes."""

    def identity(self) -> str:
        """Equal for two that demand the same."""
        if self.kind != COMBINED:
            return sorted_json([self.kind, self.raw])
        return f"{self.criterion}({','.join(map(self.root.identity_of, self.parts))})"

    def child(self, raw: Any) -> Node:
        """The node of a schema that stands in this one."""
        return node_of(raw, self.root)


def node_of(raw: Any, root: Root) -> Node:
    """What a schema demands."""
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
        # Each says something only of values of its type.
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
