"""Compares JSON schemas of objects and of arrays."""

from __future__ import annotations

from typing import Any

import re2

from segmentlog.schemas.json_nodes import EMPTY, FALSE, Node
from segmentlog.schemas.json_walk import JsonDiff, is_anything, is_compatible

# ---------------------------------------------------------------- objects


def compare_objects(diff: JsonDiff, original: Node, update: Node) -> None:
    _properties(diff, original, update)
    _required(diff, original, update)
    _dependencies(diff, original, update)
    diff.compare_additional(original, update, "additionalProperties", "ADDITIONAL_PROPERTIES")
    diff.compare_additional(original, update, "unevaluatedProperties", "UNEVALUATED_PROPERTIES", absent=None)
    diff.compare_limit(original.raw, update.raw, "maxProperties", "MAX_PROPERTIES")
    diff.compare_limit(original.raw, update.raw, "minProperties", "MIN_PROPERTIES")


def _is_open(node: Node) -> bool:
    """Return whether a schema accepts any additional property."""
    return (
        is_anything(node.raw.get("additionalProperties"))
        and not node.raw.get("patternProperties")
        and is_anything(node.raw.get("unevaluatedProperties"))
    )


def _additional_property_schema(node: Node, name: str) -> Any:
    """Return the schema that applies to a property outside ``properties``, or None."""
    for pattern, schema in node.raw.get("patternProperties", {}).items():
        try:
            # RE2, not `re`: a client chooses the pattern and the name, and `re` takes years for some of them.
            if re2.search(pattern, name):
                return schema
        except re2.error:  # the pattern uses syntax that RE2 does not have
            continue
    rest = node.raw.get("additionalProperties", node.raw.get("unevaluatedProperties"))
    return rest if isinstance(rest, dict) and rest else None


def _properties(diff: JsonDiff, original: Node, update: Node) -> None:
    before, after = original.raw.get("properties", {}), update.raw.get("properties", {})
    for name in [*before, *(name for name in after if name not in before)]:
        with diff.at("properties", name):
            if name not in after:
                _property_removed(diff, original.child(before[name]), update, name)
            elif name not in before:
                _property_added(diff, original, update, name)
            else:
                diff.compare(original.child(before[name]), update.child(after[name]))


def _property_removed(diff: JsonDiff, old: Node, update: Node, name: str) -> None:
    if _is_open(update):
        diff.add_difference("PROPERTY_REMOVED_FROM_OPEN_CONTENT_MODEL")
        return
    additional = _additional_property_schema(update, name)
    if additional is None:
        diff.add_difference(f"PROPERTY_{'WITH_FALSE_' if old.kind == FALSE else ''}REMOVED_FROM_CLOSED_CONTENT_MODEL")
        return
    found = diff.collect_differences(lambda: diff.compare(old, update.child(additional)))
    diff.found += found
    covered = "IS" if is_compatible(found) else "NOT"
    diff.add_difference(f"PROPERTY_REMOVED_{covered}_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL")


def _property_added(diff: JsonDiff, original: Node, update: Node, name: str) -> None:
    raw = update.raw["properties"][name]
    new, is_required = update.child(raw), name in update.raw.get("required", ())
    with_default = (isinstance(raw, dict) and "default" in raw) or "default" in new.raw
    if _is_open(original):
        if new.kind == EMPTY:
            diff.add_difference("PROPERTY_WITH_EMPTY_SCHEMA_ADDED_TO_OPEN_CONTENT_MODEL")
        elif is_required:
            diff.add_difference(
                f"REQUIRED_PROPERTY_{'WITH_DEFAULT_' if with_default else ''}ADDED_TO_OPEN_CONTENT_MODEL"
            )
        else:
            diff.add_difference("OPTIONAL_PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL")
        return
    additional = _additional_property_schema(original, name)
    if additional is not None:
        found = diff.collect_differences(lambda: diff.compare(original.child(additional), new))
        diff.found += found
        covered = "IS" if is_compatible(found) else "NOT"
        diff.add_difference(f"PROPERTY_ADDED_{covered}_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL")
    if is_required:
        diff.add_difference(f"REQUIRED_PROPERTY_{'WITH_DEFAULT_' if with_default else ''}ADDED_TO_UNOPEN_CONTENT_MODEL")
    else:
        diff.add_difference("OPTIONAL_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL")


def _required(diff: JsonDiff, original: Node, update: Node) -> None:
    before, after = original.raw.get("required", ()), update.raw.get("required", ())
    properties = update.raw.get("properties", {})
    for name in original.raw.get("properties", {}):
        if name in properties and (name in before) != (name in after):
            with diff.at("required", name):
                if name in before:
                    diff.add_difference("REQUIRED_ATTRIBUTE_REMOVED")
                else:
                    raw = properties[name]
                    with_default = (isinstance(raw, dict) and "default" in raw) or "default" in update.child(raw).raw
                    diff.add_difference(f"REQUIRED_ATTRIBUTE_{'WITH_DEFAULT_' if with_default else ''}ADDED")


def _dependencies(diff: JsonDiff, original: Node, update: Node) -> None:
    lists = [_dependencies_of_kind(node, "dependentRequired", list) for node in (original, update)]
    for name in dict.fromkeys([*lists[0], *lists[1]]):
        before, after = (set(names[name]) if name in names else None for names in lists)
        if before == after:
            continue
        with diff.at("dependencies", name):
            if before is None or after is None:
                diff.add_difference("DEPENDENCY_ARRAY_ADDED" if before is None else "DEPENDENCY_ARRAY_REMOVED")
            else:
                change = "EXTENDED" if after > before else "NARROWED" if after < before else "CHANGED"
                diff.add_difference(f"DEPENDENCY_ARRAY_{change}")
    schemas = [_dependencies_of_kind(node, "dependentSchemas", dict) for node in (original, update)]
    for name in dict.fromkeys([*schemas[0], *schemas[1]]):
        with diff.at("dependencies", name):
            if name not in schemas[0] or name not in schemas[1]:
                diff.add_difference(
                    "DEPENDENCY_SCHEMA_ADDED" if name not in schemas[0] else "DEPENDENCY_SCHEMA_REMOVED"
                )
            else:
                diff.compare(original.child(schemas[0][name]), update.child(schemas[1][name]))


def _dependencies_of_kind(node: Node, keyword: str, kind: type) -> dict[str, Any]:
    """Return the dependencies of one kind: lists of names, or schemas. Older drafts mix them in ``dependencies``."""
    old = {name: value for name, value in node.raw.get("dependencies", {}).items() if isinstance(value, kind)}
    return {**old, **node.raw.get(keyword, {})}


# ---------------------------------------------------------------- arrays


def compare_arrays(diff: JsonDiff, original: Node, update: Node) -> None:
    before, after = _item_schema(original), _item_schema(update)
    with diff.at("items"):
        diff.compare(None if before is None else original.child(before), None if after is None else update.child(after))
    _compare_positional_items(diff, original, update)
    diff.compare_additional(
        _with_additional_items(original), _with_additional_items(update), "additionalItems", "ADDITIONAL_ITEMS"
    )
    diff.compare_additional(original, update, "unevaluatedItems", "UNEVALUATED_ITEMS", absent=None)
    for keyword, kind in (
        ("maxItems", "MAX_ITEMS"),
        ("minItems", "MIN_ITEMS"),
        ("maxContains", "MAX_CONTAINS"),
        ("minContains", "MIN_CONTAINS"),
    ):
        diff.compare_limit(original.raw, update.raw, keyword, kind)
    if bool(original.raw.get("uniqueItems")) != bool(update.raw.get("uniqueItems")):
        with diff.at("uniqueItems"):
            diff.add_difference(f"UNIQUE_ITEMS_{'REMOVED' if original.raw.get('uniqueItems') else 'ADDED'}")


def _positional_schemas(node: Node) -> list[Any]:
    """Return the schemas of the first items, one for each position."""
    items = node.raw.get("prefixItems", node.raw.get("items"))
    return items if isinstance(items, list) else []


def _item_schema(node: Node) -> Any:
    """Return the schema of all items, or None."""
    items = node.raw.get("items")
    return None if isinstance(items, list) or "prefixItems" in node.raw else items


def _with_additional_items(node: Node) -> Node:
    """Return a node with ``items`` of draft 2020-12 under its older name, ``additionalItems``.

    The keyword has this meaning only together with ``prefixItems``.
    """
    if "prefixItems" in node.raw and "items" in node.raw:
        return node._replace(raw=node.raw | {"additionalItems": node.raw["items"]})
    return node


def _compare_positional_items(diff: JsonDiff, original: Node, update: Node) -> None:
    before, after = _positional_schemas(original), _positional_schemas(update)
    for index in range(max(len(before), len(after))):
        with diff.at("items", str(index)):
            if index < min(len(before), len(after)):
                diff.compare(original.child(before[index]), update.child(after[index]))
                continue
            removed = index < len(before)
            item = original.child(before[index]) if removed else update.child(after[index])
            rest = _with_additional_items(update if removed else original)
            more = rest.raw.get("additionalItems", rest.raw.get("unevaluatedItems"))
            if is_anything(more):
                if removed:
                    diff.add_difference("ITEM_REMOVED_FROM_OPEN_CONTENT_MODEL")
                else:
                    empty = "WITH_EMPTY_SCHEMA_" if item.kind == EMPTY else ""
                    diff.add_difference(f"ITEM_{empty}ADDED_TO_OPEN_CONTENT_MODEL")
            elif more is False:
                if removed:
                    diff.add_difference(
                        f"ITEM_{'WITH_FALSE_' if item.kind == FALSE else ''}REMOVED_FROM_CLOSED_CONTENT_MODEL"
                    )
                else:
                    diff.add_difference("ITEM_ADDED_TO_CLOSED_CONTENT_MODEL")
            else:
                pair = (item, rest.child(more)) if removed else (rest.child(more), item)
                found = diff.collect_differences(lambda pair=pair: diff.compare(*pair))  # type: ignore[misc]
                diff.found += found
                covered = "IS" if is_compatible(found) else "NOT"
                verb = "REMOVED" if removed else "ADDED"
                diff.add_difference(f"ITEM_{verb}_{covered}_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL")
