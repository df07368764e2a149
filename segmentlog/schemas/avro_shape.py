"""Limits of an Avro schema's values: how deeply they nest, and how much a few bytes can decode to.

fastavro's C code does not limit its recursion: a value that nests deeper than the C stack crashes the process. This
module therefore analyses the schema first: a schema that contains itself has values of unlimited depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import avro.schema

HEIGHT_MAX: Final = 200
"""Maximum nesting of schemas, with names resolved. A schema that nests deeper counts as recursive."""
FREE_MAX: Final = 10_000
"""Maximum parts of a record, with nested records expanded. A part may take no byte, so a short value can have many."""


def parts_of(schema: Any) -> list[Any]:
    """Return the schemas that a schema directly contains."""
    found = [field.type for field in getattr(schema, "fields", ())]
    found += getattr(schema, "schemas", ())
    return found + [inner for name in ("items", "values") if (inner := getattr(schema, name, None)) is not None]


class AvroShape:
    """Limits of one schema's values. The analysis visits each part once, however many names refer to it.

    has_unlimited_depth   whether values can nest to any depth, or deeper than `HEIGHT_MAX`
    has_zero_byte_items   whether an array has items of zero bytes: a few bytes can then declare any number of items
    has_too_many_parts    whether a record has more than `FREE_MAX` parts, with nested records expanded
    """

    def __init__(self, schema: Any) -> None:
        self.has_unlimited_depth = False
        self.has_too_many_parts = False
        self._height: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._is_empty: dict[int, bool] = {}
        seen = list(self._parts_first(schema))
        for part in seen:
            self._add_limits(part)
        self.has_unlimited_depth |= max(self._height.values()) > HEIGHT_MAX
        self.has_zero_byte_items = any(
            isinstance(part, avro.schema.ArraySchema) and self._is_empty.get(id(part.items), True) for part in seen
        )

    def _parts_first(self, schema: Any) -> Iterator[Any]:
        """Yield each part of a schema once, after the parts that it contains.

        The method does not recurse, because named schemas may nest deeper than the Python stack.
        """
        under_way: set[int] = {id(schema)}
        done: set[int] = set()
        todo: list[tuple[Any, Iterator[Any]]] = [(schema, iter(parts_of(schema)))]
        while todo:
            container, parts = todo[-1]
            for part in parts:
                if id(part) in under_way:
                    self.has_unlimited_depth = True
                elif id(part) not in done:
                    under_way.add(id(part))
                    todo.append((part, iter(parts_of(part))))
                    break
            else:
                todo.pop()
                under_way.discard(id(container))
                done.add(id(container))
                yield container

    def _add_limits(self, part: Any) -> None:
        """Record the limits of one part, from the limits of the parts that it contains.

        A part that contains itself has no limits yet, so it counts as empty. This is safe: values of the part are
        finite only if the recursion passes a union, an array or a map, and each of these takes a byte.
        """
        key, parts = id(part), parts_of(part)
        self._height[key] = 1 + max((self._height.get(id(inner), 0) for inner in parts), default=0)
        if isinstance(part, avro.schema.RecordSchema):
            self._is_empty[key] = all(self._is_empty.get(id(inner), True) for inner in parts)
            self._free[key] = 1 + sum(self._free.get(id(inner), 1) for inner in parts)
            self.has_too_many_parts |= self._free[key] > FREE_MAX
            return
        self._is_empty[key] = part.type == "null" or (isinstance(part, avro.schema.FixedSchema) and int(part.size) == 0)
        self._free[key] = 1
