"""``segmentlog schemas``, and values that go in and out as JSON by their schemas."""

import json
from pathlib import Path
from typing import Any

import pytest

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run

CLICK = {
    "type": "record", "name": "Click", "fields": [
        {"name": "page", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "price", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}],
         "default": None},
        {"name": "raw", "type": ["null", "bytes", {"type": "record", "name": "Raw", "fields": []}], "default": None},
        {"name": "tags", "type": {"type": "map", "values": ["int", "string"]}, "default": {}},
    ],
}  # fmt: skip
LINES = [
    {"page": "/a", "at": "2026-07-31T12:00:00Z", "price": "12.30", "raw": "AAE=", "tags": {"a": 1, "b": "c"}},
    {"page": "/b", "at": 5},
    {"page": "/c", "at": 5, "raw": {"Raw": {}}, "price": None},
]


class Program:
    """Runs commands on one store, in this process."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capfd = capfd
        self.error = ""

    def __call__(self, *args: str, status: int = 0) -> list[str]:
        """Return the lines of stdout."""
        found = run(cli, ["--dir", str(self.folder / "store"), *args])
        out, self.error = self._capfd.readouterr()
        assert found == status, self.error
        return out.splitlines()

    def write(self, name: str, document: Any) -> str:
        """Return a file with JSON in it, or with a text."""
        path = self.folder / name
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return str(path)


@pytest.fixture
def program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Program:
    """Return the program, with a store that does not exist yet."""
    return Program(tmp_path, capfd)


def test_schemas_are_registered_shown_checked_and_deleted(program: Program) -> None:
    """Every command works as a person would use it."""
    file = program.write("click.avsc", CLICK)
    assert program("schemas", "register", "clicks-value", file) == ["1"]
    assert json.loads(program("schemas", "show", "clicks-value")[0])["name"] == "Click"
    assert program("schemas", "show", "--id", "1") == program("schemas", "show", "clicks-value", "1")
    other = program.write("other.avsc", '"int"')
    assert program("schemas", "check", "clicks-value", file) == []
    assert "TYPE_MISMATCH" in program("schemas", "check", "clicks-value", other, status=1)[0]
    assert not json.loads(program("schemas", "check", "clicks-value", other, "--json", status=1)[0])["compatible"]
    program("schemas", "register", "clicks-value", other, status=1)
    assert program("schemas", "compatibility", "clicks-value", "--set", "none") == ["NONE"]
    assert program("schemas", "register", "clicks-value", other) == ["2"]
    assert program("schemas", "compatibility", "clicks-value", "--reset") == ["BACKWARD"]
    proto = program.write("pay.proto", 'syntax = "proto3"; message Pay { int32 cents = 1; }')
    assert json.loads(program("schemas", "register", "pay-value", proto, "--json")[0])["id"] == 3
    assert [json.loads(line)["versions"] for line in program("schemas", "list", "--json")] == [[1, 2], [1]]
    assert "clicks-value" in program("schemas", "list", "cl")[1]
    program("schemas", "delete", "clicks-value", "1")
    program("schemas", "delete", "clicks-value")
    program("schemas", "delete", "clicks-value", "--permanent", "--yes")
    assert [json.loads(line)["subject"] for line in program("schemas", "list", "--deleted", "--json")] == ["pay-value"]


def test_a_schema_that_refers_to_another_one_is_registered(program: Program) -> None:
    """The options name the subject and version of the reference, and its name in the schema."""
    page = program.write("page.json", {"type": "string"})
    program("schemas", "register", "page", page)
    click = program.write("click.json", {"type": "object", "properties": {"page": {"$ref": "page.json"}}})
    program("schemas", "register", "clicks-value", click, status=1)
    assert "unresolved $ref" in program.error
    program("schemas", "register", "clicks-value", click, "-r", "page.json=page:1")
    program("schemas", "register", "clicks-value", click, "-r", "page.json", status=2)
    program("schemas", "register", "clicks-value", program.write("click.txt", "{}"), status=2)


def test_json_goes_in_as_avro_and_comes_out_as_json(program: Program) -> None:
    """`produce --avro` accepts what `consume --avro` prints: texts in base64, decimals, times, unions."""
    program("create", "clicks")
    lines = program.write("lines", "".join(json.dumps(line) + "\n" for line in LINES))
    program("produce", "clicks", lines, "--avro", status=1)
    assert "Subject 'clicks-value' not found" in program.error
    program("produce", "clicks", lines, "--avro-schema", program.write("click.avsc", CLICK))
    shown = program("consume", "clicks", "--avro", "--values")
    first = json.loads(shown[0])
    assert first == {**LINES[0], "tags": {"a": 1, "b": "c"}}
    program("produce", "clicks", program.write("again", "\n".join(shown)), "--avro")
    assert program("consume", "clicks", "--avro", "--values", "--from", "3") == shown
    assert program("consume", "clicks", "--avro", "-n", "1") == [f"0 {shown[0]}"]
    record = json.loads(program("consume", "clicks", "--avro", "--json", "-n", "1")[0])
    assert record["value"] == first
    assert record["key"] is None
    program("produce", "clicks", program.write("bad", '{"page": 7}\n'), "--avro", status=1)
    assert "record 1" in program.error


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"at": 5}', "'page' is missing"),
        ('{"page": "/", "at": 5, "more": 1}', "no field 'more'"),
        ('{"page": "/", "at": "noon"}', "'noon' is not a valid timestamp-millis"),
        ('{"page": "/", "at": 5, "raw": "?"}', "'?' does not match any of null, bytes, Raw"),
        ('{"page": "/", "at": 5, "tags": {"a": []}}', "at #/tags/a"),
        ('{"page": "/", "at": 99999999999999999999}', "is not a valid timestamp-millis"),
        ("5", "5 is not a valid Click"),
        ("{", "truncated"),
    ],
)
def test_what_fits_no_schema_is_told_with_its_place(program: Program, line: str, why: str) -> None:
    """The error names the line, and no part of it is appended."""
    program("create", "clicks")
    program("produce", "clicks", program.write("bad", line), "--avro-schema", program.write("c.avsc", CLICK), status=1)
    assert why in program.error
    assert program("consume", "clicks") == []


def test_keys_and_values_of_any_kind_are_printed(program: Program) -> None:
    """Values are decoded by the schema of their id; a value without a schema causes an error with its offset."""
    from segmentlog import schemas

    with segmentlog.open(program.folder / "store") as store:
        store.create_topic("t")
        keys = schemas.AvroSerializer(store.schemas, '"string"', is_key=True)
        values = schemas.JsonSerializer(store.schemas, {"type": "object"})
        with store.producer(serializer=values, key_serializer=keys) as producer:
            producer.send("t", {"a": [1]}, key="k")
        store.topic("t").partition(0).append([b"plain"])
    assert program("consume", "t", "--avro", "--avro-keys", "--format", r"%k %s\n", "-n", "1") == ['"k" {"a":[1]}']
    program("consume", "t", "--avro", "--from", "1", status=1)
    assert "t/0: the value at offset 1 cannot be deserialized" in program.error
