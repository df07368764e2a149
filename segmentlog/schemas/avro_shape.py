"""How deep the values of an Avro schema may be, and how much a few bytes of them may stand for.

What reads and writes them in C asks nobody how deep it is: a value that goes deeper than its stack ends the process.
So schemas are looked at before: one that contains itself has values of any depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import avro.schema

HEIGHT_MAX: Final = 200
"""Schemas within each other, names followed. A taller one counts as one without an end."""
FREE_MAX: Final = 10_000
"""Parts of a value that come without a byte to say that they are there: records of records of nothing."""


def parts_of(schema: Any) -> list[Any]:
    """What a schema is made of."""
    found = [field.type for field in getattr(schema, "fields", ())]
    found += getattr(schema, "schemas", ())
    return found + [inner for name in ("items", "values") if (inner := getattr(schema, name, None)) is not None]


class AvroShape:
    """Of one schema. Each part is looked at once, however often names lead to it.

    is_bottomless      whether values may be of any depth, or of more than the stack is sure to hold
    has_endless        whether some array has items that take no bytes: nothing limits how many there are
    is_multiplying     whether some record has more than `FREE_MAX` parts before its first byte
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
        """Everything in it, each once, behind what it is made of. Without recursion: names may lead far down."""
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
        """A part that leads back to where it came from is not known yet: without a byte between it has no values."""
        key, parts = id(one), parts_of(one)
        self._height[key] = 1 + max((self._height.get(id(part), 0) for part in parts), default=0)
        if isinstance(one, avro.schema.RecordSchema):
            self._is_empty[key] = all(self._is_empty.get(id(part), True) for part in parts)
            self._free[key] = 1 + sum(self._free.get(id(part), 1) for part in parts)
            self.is_multiplying |= self._free[key] > FREE_MAX
            return
        self._is_empty[key] = one.type == "null" or (isinstance(one, avro.schema.FixedSchema) and int(one.size) == 0)
        self._free[key] = 1
