"""Avro values whose few bytes say that they are many."""

import json
from typing import Any

import pytest

from segmentlog.schemas.avro_values import avro_decoder
from segmentlog.schemas.errors import InvalidPayload, InvalidSchema
from segmentlog.schemas.parsing import parse
from segmentlog.schemas.wire import encode_head

_LIST: dict[str, Any] = {"type": "record", "name": "L", "fields": [{"name": "next", "type": ["null", "L"]}]}


def _record(name: str, *types: Any) -> dict[str, Any]:
    fields = [{"name": f"f{number}", "type": kind} for number, kind in enumerate(types)]
    return {"type": "record", "name": name, "fields": fields}


@pytest.mark.parametrize(
    "items",
    [
        "null",
        {"type": "fixed", "name": "F", "size": 0},
        _record("E"),
        _record("R", "null", _record("E", "null")),
    ],
)
def test_items_without_bytes_are_not_counted_to_any_number(items: Any) -> None:
    """A list of a thousand million of them is five bytes long: nobody reads such arrays, wherever they stand."""
    array = {"type": "array", "items": items}
    for schema in (array, _record("Outer", "int", ["null", array]), {"type": "map", "values": array}):
        with pytest.raises(InvalidSchema, match="take no bytes"):
            avro_decoder(parse("AVRO", json.dumps(schema)))


@pytest.mark.parametrize("items", ["int", "string", ["null", "int"], _LIST, {"type": "array", "items": "int"}])
def test_arrays_whose_items_have_bytes_are_read(items: Any) -> None:
    """And one that says that it has more of them than there are bytes is none."""
    decode = avro_decoder(parse("AVRO", json.dumps({"type": "array", "items": items})))
    assert decode(encode_head(1) + b"\0") == []
    with pytest.raises(InvalidPayload):
        decode(encode_head(1) + b"\x80\x80\x80\x80\x20")
