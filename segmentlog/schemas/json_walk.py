"""Compares two JSON schemas side by side, and collects the changes that affect values of the first schema.

The names of changes, and which changes are compatible, come from Confluent's registry with its default policy, strict.
docs/schemas.md lists the keywords that this comparison ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from segmentlog.schemas.json_nodes import COMBINED, EMPTY, FALSE, Node
from segmentlog.schemas.registry_errors import InvalidSchema

COMPATIBLE: Final = frozenset(
    [
        "SCHEMA_REMOVED",
        "TYPE_EXTENDED",
        "MAX_LENGTH_INCREASED",
        "MAX_LENGTH_REMOVED",
        "MIN_LENGTH_DECREASED",
        "MIN_LENGTH_REMOVED",
        "PATTERN_REMOVED",
        "MAXIMUM_INCREASED",
        "MAXIMUM_REMOVED",
        "MINIMUM_DECREASED",
        "MINIMUM_REMOVED",
        "EXCLUSIVE_MAXIMUM_INCREASED",
        "EXCLUSIVE_MAXIMUM_REMOVED",
        "EXCLUSIVE_MINIMUM_DECREASED",
        "EXCLUSIVE_MINIMUM_REMOVED",
        "MULTIPLE_OF_REDUCED",
        "MULTIPLE_OF_REMOVED",
        "REQUIRED_ATTRIBUTE_WITH_DEFAULT_ADDED",
        "REQUIRED_ATTRIBUTE_REMOVED",
        "DEPENDENCY_ARRAY_NARROWED",
        "DEPENDENCY_ARRAY_REMOVED",
        "DEPENDENCY_SCHEMA_REMOVED",
        "MAX_PROPERTIES_INCREASED",
        "MAX_PROPERTIES_REMOVED",
        "MIN_PROPERTIES_DECREASED",
        "MIN_PROPERTIES_REMOVED",
        "ADDITIONAL_PROPERTIES_ADDED",
        "ADDITIONAL_PROPERTIES_EXTENDED",
        "UNEVALUATED_PROPERTIES_ADDED",
        "UNEVALUATED_PROPERTIES_EXTENDED",
        "PROPERTY_WITH_EMPTY_SCHEMA_ADDED_TO_OPEN_CONTENT_MODEL",
        "REQUIRED_PROPERTY_WITH_DEFAULT_ADDED_TO_UNOPEN_CONTENT_MODEL",
        "OPTIONAL_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL",
        "PROPERTY_WITH_FALSE_REMOVED_FROM_CLOSED_CONTENT_MODEL",
        "PROPERTY_REMOVED_FROM_OPEN_CONTENT_MODEL",
        "PROPERTY_ADDED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL",
        "PROPERTY_REMOVED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL",
        "MAX_ITEMS_INCREASED",
        "MAX_ITEMS_REMOVED",
        "MIN_ITEMS_DECREASED",
        "MIN_ITEMS_REMOVED",
        "MAX_CONTAINS_INCREASED",
        "MAX_CONTAINS_REMOVED",
        "MIN_CONTAINS_DECREASED",
        "MIN_CONTAINS_REMOVED",
        "UNIQUE_ITEMS_REMOVED",
        "ADDITIONAL_ITEMS_ADDED",
        "ADDITIONAL_ITEMS_EXTENDED",
        "UNEVALUATED_ITEMS_ADDED",
        "UNEVALUATED_ITEMS_EXTENDED",
        "ITEM_WITH_EMPTY_SCHEMA_ADDED_TO_OPEN_CONTENT_MODEL",
        "ITEM_ADDED_TO_CLOSED_CONTENT_MODEL",
        "ITEM_WITH_FALSE_REMOVED_FROM_CLOSED_CONTENT_MODEL",
        "ITEM_REMOVED_FROM_OPEN_CONTENT_MODEL",
        "ITEM_ADDED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL",
        "ITEM_REMOVED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL",
        "ENUM_ARRAY_EXTENDED",
        "COMBINED_TYPE_EXTENDED",
        "PRODUCT_TYPE_NARROWED",
        "SUM_TYPE_EXTENDED",
        "NOT_TYPE_NARROWED",
    ]
)
_NESTING: Final = frozenset({"object", "array", "not", COMBINED})
STEPS_MAX: Final = 5_000
"""Maximum pairs of schemas in one comparison: each part of a combined schema is compared with every other part."""

_CHARACTERS_MAX: Final = 32 << 20
"""Maximum characters of schema identities in one comparison: each level of nesting serializes its content again."""

Difference = tuple[str, str]
"""(kind of change, path)"""


class JsonDiff:
    """One comparison of two schemas. `compare` adds the differences to `found`."""

    def __init__(self, rules: Mapping[str, Callable[[JsonDiff, Node, Node], None]]) -> None:
        self._rules = rules
        self.found: list[Difference] = []
        self._path = ["#"]
        self._open_pairs: set[tuple[str, str]] = set()
        self._steps = 0
        self._characters = 0

    def add_difference(self, kind: str) -> None:
        self.found.append((kind, "/".join(self._path)))

    @contextmanager
    def at(self, *steps: str) -> Iterator[None]:
        """Extend the current path by steps, for the duration of the context."""
        self._path.extend(steps)
        try:
            yield
        finally:
            del self._path[-len(steps) :]

    def collect_differences(self, compare: Callable[[], None]) -> list[Difference]:
        """Call ``compare``, and return the differences that it finds, without adding them to `found`."""
        before, self.found = self.found, []
        try:
            compare()
            return self.found
        finally:
            self.found = before

    # ------------------------------------------------------------ any two schemas

    def compare(self, original: Node | None, update: Node | None) -> None:
        if original is None or update is None:
            if original is not update:
                self.add_difference("SCHEMA_ADDED" if original is None else "SCHEMA_REMOVED")
            return
        self._steps += 1
        self._check_steps()
        if original.kind not in _NESTING:
            self._compare(original, update)
            return
        pair = (
            original.identity(),
            update.identity(),
        )  # nodes are created again on each visit, so compare by identity text
        self._characters += len(pair[0]) + len(pair[1])
        self._check_steps()
        if pair in self._open_pairs:
            return  # a recursive schema: the outer comparison of this pair finds its differences
        self._open_pairs.add(pair)
        try:
            self._compare(original, update)
        finally:
            self._open_pairs.discard(pair)

    def _check_steps(self) -> None:
        if self._steps > STEPS_MAX or self._characters > _CHARACTERS_MAX:
            raise InvalidSchema("the schemas are too complex to be compared: simplify their oneOf, anyOf and $ref")

    def _compare(self, original: Node, update: Node) -> None:
        if self._matches_part(original, update):
            return
        if original.kind != update.kind:
            if original.kind != FALSE and update.kind != EMPTY:
                self.add_difference("TYPE_CHANGED")
            return
        compare = self._rules.get(original.kind)
        if compare is not None:
            compare(self, original, update)

    def _matches_part(self, original: Node, update: Node) -> bool:
        """Return whether one schema is combined (allOf, anyOf, oneOf), and the other is compatible with a part."""
        if original.kind == COMBINED and update.kind == COMBINED:
            return False
        if update.kind == COMBINED and (len(update.parts) == 1 or update.criterion != "allOf"):
            for part in update.parts:
                found = self.collect_differences(lambda part=part: self.compare(original, update.child(part)))  # type: ignore[misc]
                if is_compatible(found):
                    self.found += found
                    return True
        if original.kind == COMBINED and (len(original.parts) == 1 or original.criterion == "allOf"):
            for part in original.parts:
                found = self.collect_differences(lambda part=part: self.compare(original.child(part), update))  # type: ignore[misc]
                if is_compatible(found):
                    self.found += found
                    return True
        return False

    # ------------------------------------------------------------ one keyword

    def compare_limit(self, original: Mapping[str, Any], update: Mapping[str, Any], keyword: str, kind: str) -> None:
        """Compare a keyword that sets an upper or a lower limit."""
        before, after = original.get(keyword), update.get(keyword)
        if before == after:
            return
        with self.at(keyword):
            if before is None:
                self.add_difference(f"{kind}_ADDED")
            elif after is None:
                self.add_difference(f"{kind}_REMOVED")
            else:
                self.add_difference(f"{kind}_{'INCREASED' if after > before else 'DECREASED'}")

    def compare_additional(
        self, original: Node, update: Node, keyword: str, kind: str, *, absent: bool | None = True
    ) -> None:
        """Compare a keyword for additional content of an object or an array: true, false or a schema.

        ``absent`` is the value of a missing keyword.
        """
        before, after = original.raw.get(keyword, absent), update.raw.get(keyword, absent)
        if before is after:
            return
        with self.at(keyword):
            if (before is False) != (after is False):
                self.add_difference(f"{kind}_{'ADDED' if before is False else 'REMOVED'}")
            elif is_anything(before) != is_anything(after):
                self.add_difference(f"{kind}_{'NARROWED' if is_anything(before) else 'EXTENDED'}")
            elif not is_anything(before):
                self.compare(original.child(before), update.child(after))


def is_anything(schema: Any) -> bool:
    return schema is None or schema is True or schema == {}


def is_compatible(differences: list[Difference]) -> bool:
    return all(kind in COMPATIBLE for kind, _ in differences)
