"""Compares two JSON schemas: the rules for each kind of node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from segmentlog.schemas.json_containers import compare_arrays, compare_objects
from segmentlog.schemas.json_keywords import hashable
from segmentlog.schemas.json_nodes import COMBINED, Node
from segmentlog.schemas.json_walk import COMPATIBLE, Difference, JsonDiff, is_compatible

Change = Difference


def incompatible_changes(original: Node, update: Node) -> list[Change]:
    """Return the changes after which a schema accepts fewer values; empty if there are none.

    Raises `InvalidSchema` for schemas that take too long to compare.
    """
    diff = JsonDiff(_RULES)
    diff.compare(original, update)
    return [one for one in dict.fromkeys(diff.found) if one[0] not in COMPATIBLE]


def _strings(diff: JsonDiff, original: Node, update: Node) -> None:
    diff.compare_limit(original.raw, update.raw, "maxLength", "MAX_LENGTH")
    diff.compare_limit(original.raw, update.raw, "minLength", "MIN_LENGTH")
    before, after = original.raw.get("pattern"), update.raw.get("pattern")
    if before != after:
        with diff.at("pattern"):
            diff.add_difference(
                "PATTERN_ADDED" if before is None else "PATTERN_REMOVED" if after is None else "PATTERN_CHANGED"
            )


def _numbers(diff: JsonDiff, original: Node, update: Node) -> None:
    if original.raw.get("integer", False) != update.raw.get("integer", False):
        diff.add_difference("TYPE_EXTENDED" if original.raw.get("integer") else "TYPE_NARROWED")
    for keyword, kind in (
        ("maximum", "MAXIMUM"),
        ("minimum", "MINIMUM"),
        ("exclusiveMaximum", "EXCLUSIVE_MAXIMUM"),
        ("exclusiveMinimum", "EXCLUSIVE_MINIMUM"),
    ):
        diff.compare_limit(original.raw, update.raw, keyword, kind)
    before, after = original.raw.get("multipleOf"), update.raw.get("multipleOf")
    if before != after:
        with diff.at("multipleOf"):
            if before is None or after is None:
                diff.add_difference("MULTIPLE_OF_ADDED" if before is None else "MULTIPLE_OF_REMOVED")
            elif after % before == 0:
                diff.add_difference("MULTIPLE_OF_EXPANDED")
            else:
                diff.add_difference("MULTIPLE_OF_REDUCED" if before % after == 0 else "MULTIPLE_OF_CHANGED")


def _enums(diff: JsonDiff, original: Node, update: Node) -> None:
    before, after = set(map(hashable, original.raw["enum"])), set(map(hashable, update.raw["enum"]))
    gone, came = bool(before - after), bool(after - before)
    if gone or came:
        with diff.at("enum"):
            diff.add_difference(f"ENUM_ARRAY_{'CHANGED' if gone and came else 'NARROWED' if gone else 'EXTENDED'}")


def _consts(diff: JsonDiff, original: Node, update: Node) -> None:
    if original.raw["const"] != update.raw["const"]:
        with diff.at("const"):
            diff.add_difference("ENUM_ARRAY_CHANGED")


def _nots(diff: JsonDiff, original: Node, update: Node) -> None:
    with diff.at("not"):
        before, after = original.child(original.raw["not"]), update.child(update.raw["not"])
        # Compare in reverse: the new schema accepts the old values if its "not" accepts fewer values than before.
        narrowed = is_compatible(diff.collect_differences(lambda: diff.compare(after, before)))
        if before.identity() != after.identity():
            diff.add_difference("NOT_TYPE_NARROWED" if narrowed else "NOT_TYPE_EXTENDED")


def _combined(diff: JsonDiff, original: Node, update: Node) -> None:
    if original.criterion != update.criterion:
        alone = len(original.parts) == 1, len(update.parts) == 1
        extended = (
            update.criterion == "anyOf"
            or all(alone)
            or (alone[0] and update.criterion == "oneOf")
            or (alone[1] and original.criterion == "allOf")
        )
        diff.add_difference("COMBINED_TYPE_EXTENDED" if extended else "COMBINED_TYPE_CHANGED")
        if not extended:
            return
    before = list({part.identity(): part for part in map(original.child, original.parts)}.values())
    after = list({part.identity(): part for part in map(update.child, update.parts)}.values())
    if len(before) < len(after):
        diff.add_difference("PRODUCT_TYPE_EXTENDED" if update.criterion == "allOf" else "SUM_TYPE_EXTENDED")
    elif len(before) > len(after):
        diff.add_difference("PRODUCT_TYPE_NARROWED" if original.criterion == "allOf" else "SUM_TYPE_NARROWED")
    edges: dict[int, dict[int, list[Difference]]] = {}
    for index, part in enumerate(before):
        with diff.at(original.criterion, str(index)):
            for other, counterpart in enumerate(after):
                found = diff.collect_differences(lambda one=part, two=counterpart: diff.compare(one, two))  # type: ignore[misc]
                if is_compatible(found):
                    edges.setdefault(index, {})[other] = found
    matching = _match(edges)
    for other, index in matching.items():
        diff.found += edges[index][other]
    if len(matching) < min(len(before), len(after)):
        diff.add_difference("COMBINED_TYPE_SUBSCHEMAS_CHANGED")


def _match(edges: Mapping[int, Mapping[int, object]]) -> dict[int, int]:
    """Return a maximum matching as {right: left}, found by augmenting paths; ``edges`` is {left: {right: ...}}."""
    left_of: dict[int, int] = {}

    def place(left: int, tried: set[int]) -> bool:
        for right in edges[left]:
            if right not in tried:
                tried.add(right)
                if right not in left_of or place(left_of[right], tried):
                    left_of[right] = left
                    return True
        return False

    for left in edges:
        place(left, set())
    return left_of


_RULES: Final[dict[str, Callable[[JsonDiff, Node, Node], None]]] = {
    "string": _strings,
    "number": _numbers,
    "enum": _enums,
    "const": _consts,
    "not": _nots,
    COMBINED: _combined,
    "object": compare_objects,
    "array": compare_arrays,
}
