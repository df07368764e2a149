"""The canonical text of an Avro schema: the output of Java's `Schema.toString`, which other registries store.

Names in their own namespace are short, a primitive type is its name, and attributes have a fixed order:

    record, error   type name namespace doc fields PROPERTIES aliases
    enum            type name namespace doc symbols default PROPERTIES aliases
    fixed           type name namespace doc size PROPERTIES aliases
    array, map      type items | values PROPERTIES
    a field         name type doc default order aliases PROPERTIES

This is not Avro's "parsing canonical form", which drops information that readers need: defaults, docs, logical types.
"""

from __future__ import annotations

from typing import Any, Final

PRIMITIVES: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_NAMED: Final = {"record": "fields", "error": "fields", "enum": "symbols", "fixed": "size"}
_RESERVED: Final = {
    "record": {"type", "name", "namespace", "doc", "fields", "aliases"},
    "error": {"type", "name", "namespace", "doc", "fields", "aliases"},
    "enum": {"type", "name", "namespace", "doc", "symbols", "default", "aliases"},
    "fixed": {"type", "name", "namespace", "doc", "size", "aliases"},
    "array": {"type", "items"},
    "map": {"type", "values"},
}
_FIELD: Final = {"name", "type", "doc", "default", "order", "aliases"}


def canonical_document(schema: Any, namespace: str = "", *, in_order: bool = False) -> Any:
    """Return a valid schema, parsed from JSON, in canonical form; ``in_order`` also sorts properties and aliases."""
    if isinstance(schema, str):
        return schema if schema in PRIMITIVES else _short(_full_name(schema, namespace), namespace)
    if isinstance(schema, list):
        return [canonical_document(branch, namespace, in_order=in_order) for branch in schema]
    kind = schema["type"]
    if kind in _NAMED:
        return _named(schema, kind, namespace, in_order)
    properties = _properties(schema, _RESERVED.get(kind, {"type"}), in_order)
    if kind == "array":
        return {"type": kind, "items": canonical_document(schema["items"], namespace, in_order=in_order)} | properties
    if kind == "map":
        return {"type": kind, "values": canonical_document(schema["values"], namespace, in_order=in_order)} | properties
    if not properties:
        return canonical_document(kind, namespace)
    return {"type": kind} | properties


def _named(schema: dict[str, Any], kind: str, namespace: str, in_order: bool) -> dict[str, Any]:
    full_name = _full_name(schema["name"], schema.get("namespace", namespace) or "")
    space, _, name = full_name.rpartition(".")
    document: dict[str, Any] = {"type": kind, "name": name}
    if space != namespace:
        document["namespace"] = space
    if schema.get("doc") is not None:
        document["doc"] = schema["doc"]
    if kind in ("record", "error"):
        document["fields"] = [_field(field, space, in_order) for field in schema["fields"]]
    else:
        document[_NAMED[kind]] = schema[_NAMED[kind]]
    if kind == "enum" and schema.get("default") is not None:
        document["default"] = schema["default"]
    document |= _properties(schema, _RESERVED[kind], in_order)
    if schema.get("aliases"):
        aliases = [_short(_full_name(alias, space), space) for alias in schema["aliases"]]
        document["aliases"] = sorted(aliases) if in_order else aliases
    return document


def _field(field: dict[str, Any], namespace: str, in_order: bool) -> dict[str, Any]:
    document = {"name": field["name"], "type": canonical_document(field["type"], namespace, in_order=in_order)}
    if field.get("doc") is not None:
        document["doc"] = field["doc"]
    if "default" in field:
        document["default"] = field["default"]
    if field.get("order", "ascending") != "ascending":
        document["order"] = field["order"]
    if field.get("aliases"):
        document["aliases"] = sorted(field["aliases"]) if in_order else field["aliases"]
    return document | _properties(field, _FIELD, in_order)


def _properties(schema: dict[str, Any], reserved: set[str], in_order: bool) -> dict[str, Any]:
    """Return the attributes that Avro does not reserve, such as logical types and user properties."""
    names = [name for name in schema if name not in reserved]
    return {name: schema[name] for name in (sorted(names) if in_order else names)}


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _short(full_name: str, namespace: str) -> str:
    space, _, name = full_name.rpartition(".")
    return name if space == namespace else full_name
