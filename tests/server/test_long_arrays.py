"""Each array of each request with very many elements: answered or refused, and what that takes is bounded.

A request may have `ELEMENTS_MAX` elements; what each of them takes while it is answered is what this is about.

SEGMENTLOG_SERVER_ELEMENTS  elements of each array
"""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from codec_samples import MESSAGES
from server.hostile import Asker
from server.test_every_api import MakeBroker, make_broker
from server.wire_client import Desk, request_bytes

from segmentlog.server.api_table import SERVED
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.layouts import FieldLayout, StructLayout
from segmentlog.server.frames import BadFrame

__all__ = ["make_broker"]

ELEMENTS = int(os.environ.get("SEGMENTLOG_SERVER_ELEMENTS", "3000"))
_BYTES_PER_ELEMENT = 3000
"""With the answer; most take some 300. The most take topics that are made or described, and both have other bounds."""
_BYTES_OF_ITS_OWN = 8 << 20
"""Memory of any request, and of lookups for the first time."""

pytestmark = pytest.mark.long


def arrays(
    struct: StructLayout, version: int, before: tuple[FieldLayout, ...] = ()
) -> Iterator[tuple[FieldLayout, ...]]:
    """Yield the ways from a message to each array in it."""
    for field in struct.fields:
        if version not in field.versions:
            continue
        way = (*before, field)
        if field.is_array:
            yield way
        if field.struct is not None:
            yield from arrays(field.struct, version, way)


PATHS = [
    (key, way) for key in SERVED for way in arrays(MESSAGES[f"{APIS[key].name}Request"].struct, APIS[key].max_version)
]


class Filler(Asker):
    """Makes elements of which no two are the same."""

    def fill(self, key: int, way: tuple[FieldLayout, ...], made: Any) -> None:
        """Put the test's number of elements into the array at the end of ``way``."""
        version = APIS[key].max_version
        for field in way[:-1]:
            assert field.struct is not None
            if field.is_array:
                if not getattr(made, field.name):
                    setattr(made, field.name, [self._struct(key, field.struct, version, 1)])
                made = getattr(made, field.name)[0]
            else:
                if getattr(made, field.name) is None:
                    setattr(made, field.name, self._struct(key, field.struct, version, 1))
                made = getattr(made, field.name)
        last = way[-1]
        setattr(made, last.name, [self._distinct(key, last, version, number) for number in range(ELEMENTS)])

    def _distinct(self, key: int, field: FieldLayout, version: int, number: int) -> Any:
        if field.struct is not None:
            made = self._struct(key, field.struct, version, 0)
            for inner in field.struct.fields:
                if version in inner.versions and not inner.is_array and inner.struct is None:
                    setattr(made, inner.name, self._other(inner, getattr(made, inner.name), number))
            return made
        return self._other(field, self._one(key, field, version, 0), number)

    def _other(self, field: FieldLayout, value: Any, number: int) -> Any:
        if field.kind == "string":
            return value if "topic" in field.name and number % 2 else f"{number}"
        if field.kind == "int32" and ("partition" in field.name or "index" in field.name):
            return number
        return value


def named(one: int | tuple[FieldLayout, ...]) -> str:
    """Return a parameter, in the name of a test."""
    return APIS[one].name if isinstance(one, int) else ".".join(field.name for field in one)


@pytest.mark.parametrize(("key", "way"), PATHS, ids=named)
def test_an_array_takes_what_its_elements_do(make_broker: MakeBroker, key: int, way: tuple[FieldLayout, ...]) -> None:
    """This holds for all ways of encoding an answer."""
    broker = make_broker()
    desk, version = Desk(broker), APIS[key].max_version
    ids = [broker.store.topic(name).id for name in broker.store.topics()]
    filler = Filler(Random(f"{key} {named(way)}"), ids, extreme=0)
    request = filler.request(key, version, 1)
    filler.fill(key, way, request)
    frame = request_bytes(key, version, request)[4:]
    del request
    tracemalloc.start()
    try:
        with contextlib.suppress(BadFrame):
            desk.ask_bytes(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"{peak // ELEMENTS:,} B for an element")
    assert peak < ELEMENTS * _BYTES_PER_ELEMENT + _BYTES_OF_ITS_OWN
