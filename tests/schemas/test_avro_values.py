"""Avro values of a few bytes that would decode to very large or deep objects."""

import json
import subprocess
import sys
from typing import Any

import pytest

from segmentlog.schemas.avro_values import PlainWriter, avro_decoder
from segmentlog.schemas.registry_errors import InvalidPayload, InvalidSchema
from segmentlog.schemas.schema_id_framing import encode_head
from segmentlog.schemas.schema_parsing import parse

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
    """A schema with an array of items of zero bytes is refused: five bytes could declare a thousand million items."""
    array = {"type": "array", "items": items}
    for schema in (array, _record("Outer", "int", ["null", array]), {"type": "map", "values": array}):
        with pytest.raises(InvalidSchema, match="take no bytes"):
            avro_decoder(parse("AVRO", json.dumps(schema)))


@pytest.mark.parametrize("items", ["int", "string", ["null", "int"], _LIST, {"type": "array", "items": "int"}])
def test_arrays_whose_items_have_bytes_are_read(items: Any) -> None:
    """An array of items that take bytes is read; a count larger than the value raises `InvalidPayload`."""
    decode = avro_decoder(parse("AVRO", json.dumps({"type": "array", "items": items})))
    assert decode(encode_head(1) + b"\0") == []
    with pytest.raises(InvalidPayload):
        decode(encode_head(1) + b"\x80\x80\x80\x80\x20")


_TREE: dict[str, Any] = {
    "type": "record", "name": "T", "fields": [{"name": "of", "type": {"type": "array", "items": "T"}}]
}  # fmt: skip
_DEEP = """
import json, sys
from segmentlog.schemas.avro_values import AvroSerializer, PlainWriter, avro_decoder
from segmentlog.schemas.registry_errors import InvalidPayload
from segmentlog.schemas.schema_parsing import parse
from segmentlog.schemas.registry_records import SchemaRecord
from segmentlog.schemas.schema_id_framing import encode_head

text, one, last, field = sys.argv[1:]
parsed = parse("AVRO", text)

class Source:
    def version(self, subject, version="latest"):
        return SchemaRecord(subject, 1, 1, text)
    def parsed(self, record):
        return parsed
    register = None

value = None if field == "next" else {field: []}
for _ in range(50_000):
    value = {field: value if field == "next" else [value]}
serializer = AvroSerializer(Source(), use_latest_version=True, auto_register=False)
for go in (
    lambda: avro_decoder(parsed)(encode_head(1) + bytes.fromhex(one) * 100_000 + bytes.fromhex(last)),
    lambda: serializer.serialize("t", [value]),
    lambda: PlainWriter(parsed, 1).write(value),
):
    try:
        go()
    except InvalidPayload as error:
        assert "nested too deeply" in str(error), error
        print("refused", flush=True)
import os
os._exit(0)  # what is so deep takes long to forget
"""


@pytest.mark.parametrize(("schema", "one", "last", "field"), [(_LIST, "02", "00", "next"), (_TREE, "02", "00", "of")])
def test_deep_values_do_not_end_the_process(schema: dict[str, Any], one: str, last: str, field: str) -> None:
    """A value nested deeper than the C stack is refused, on reads and on writes, without a crash of the process."""
    done = subprocess.run(
        [sys.executable, "-c", _DEEP, json.dumps(schema), one, last, field],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"] * 3


def test_lists_of_schemas_that_contain_themselves_are_read() -> None:
    """Values of a recursive schema are written and read, up to a depth that every stack can hold."""
    value: Any = {"next": None}
    for _ in range(99):
        value = {"next": value}
    parsed = parse("AVRO", json.dumps(_LIST))
    assert avro_decoder(parsed)(PlainWriter(parsed, 1).write(value)) == value


def _tower(levels: int, leaf: Any, *, twice: bool) -> str:
    """Return the text of records that contain each other by name: the text itself is not nested."""
    records = [_record("R0", leaf)]
    records += [_record(f"R{n}", *[f"R{n - 1}"] * (2 if twice else 1)) for n in range(1, levels)]
    return json.dumps(["null", *records])


def test_records_that_double_each_other_are_refused() -> None:
    """A schema whose records double at each of 30 levels is refused: two bytes would decode to 2^30 parts."""
    parsed = parse("AVRO", _tower(30, "null", twice=True))
    with pytest.raises(InvalidSchema, match="parts: a few bytes"):
        avro_decoder(parsed)
    assert avro_decoder(parse("AVRO", _tower(8, "int", twice=True)))(encode_head(1) + b"\0") is None


def test_a_tower_of_names_is_no_deeper_than_the_stack() -> None:
    """A value of 1,000 nested records is refused, although two bytes encode it and the text of its schema is flat."""
    parsed = parse("AVRO", _tower(1_000, "null", twice=False))
    with pytest.raises(InvalidPayload, match="nested too deeply"):
        avro_decoder(parsed)(encode_head(1) + b"\xd0\x0f")


def test_unions_try_each_part_once() -> None:
    """A union converts each nested value once; without the cache the work would double with each of 40 levels."""
    schema = {"type": "record", "name": "n", "fields": [{"name": "n", "type": ["null", "n"]}]}
    value: Any = 5
    for _ in range(40):
        value = {"n": value}
    with pytest.raises(InvalidPayload, match="is not a valid n"):
        PlainWriter(parse("AVRO", json.dumps(schema)), 1).write(value)
