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
"""Maximum parts of a record, with nested records expanded. No byte announces a part: few bytes can expand to many."""


def parts_of(schema: Any) -> list[Any]:
    """Return the schemas that a schema directly contains."""
    found = [field.type for field in getattr(schema, "fields", ())]
    found += getattr(schema, "schemas", ())
    return found + [inner for name in ("items", "values") if (inner := getattr(schema, name, None)) is not None]


class AvroShape:
    """Limits of one schema's values. The analysis visits each part once, however many names refer to it.

    is_bottomless      whether values can nest to any depth, or deeper than `HEIGHT_MAX`
    has_endless        whether an array has items of zero bytes: a few bytes can then declare any number of items
    is_multiplying     whether a record has more than `FREE_MAX` parts, with nested records expanded
    """

    def __init__(self, schema: Any) -> None:
        self.is_bottomless = False
        self.is_multiplying = False
        self._height: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._is_empty: dict[int, bool] = {}
        seen = list(self._parts_first(schema))
        for one in seen:
            self._note(one)
        self.is_bottomless |= max(self._height.values()) > HEIGHT_MAX
        self.has_endless = any(
            isinstance(one, avro.schema.ArraySchema) and self._is_empty.get(id(one.items), True) for one in seen
        )

    def _parts_first(self, schema: Any) -> Iterator[Any]:
        """Yield each part of a schema once, after the parts that it contains.

        The method does not recurse, because named schemas may nest deeper than the Python stack.
        """
        under_way: set[int] = {id(schema)}
        done: set[int] = set()
        todo: list[tuple[Any, Iterator[Any]]] = [(schema, iter(parts_of(schema)))]
        while todo:
            one, parts = todo[-1]
            for part in parts:
                if id(part) in under_way:
                    self.is_bottomless = True
                elif id(part) not in done:
                    under_way.add(id(part))
                    todo.append((part, iter(parts_of(part))))
                    break
            else:
                todo.pop()
                under_way.discard(id(one))
                done.add(id(one))
                yield one

    def _note(self, one: Any) -> None:
        """Record the limits of one part, from the limits of the parts that it contains.

        The limits of a part that contains itself are not known yet, so it counts as empty. Its values are finite only
        if a byte, such as a union's, ends the recursion.
        """
        key, parts = id(one), parts_of(one)
        self._height[key] = 1 + max((self._height.get(id(part), 0) for part in parts), default=0)
        if isinstance(one, avro.schema.RecordSchema):
            self._is_empty[key] = all(self._is_empty.get(id(part), True) for part in parts)
            self._free[key] = 1 + sum(self._free.get(id(part), 1) for part in parts)
            self.is_multiplying |= self._free[key] > FREE_MAX
            return
        self._is_empty[key] = one.type == "null" or (isinstance(one, avro.schema.FixedSchema) and int(one.size) == 0)
        self._free[key] = 1
