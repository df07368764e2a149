"""Avro schemas: canonical texts, references, and compatibility of readers with writers."""

import json
from typing import Any

import pytest

from segmentlog.schemas.registry_errors import InvalidSchema
from segmentlog.schemas.schema_kind import Dependency
from segmentlog.schemas.schema_parsing import parse

# Pairs of a schema and the output of Java's Schema.toString.
CANONICAL: list[tuple[Any, Any]] = [
    ({"type": "string"}, "string"),
    ({"type": "long", "logicalType": "timestamp-millis"}, {"type": "long", "logicalType": "timestamp-millis"}),
    (
        {"fields": [], "namespace": "a.b", "doc": "d", "name": "R", "type": "record", "x": 1, "aliases": ["a.b.Q"]},
        {"type": "record", "name": "R", "namespace": "a.b", "doc": "d", "fields": [], "x": 1, "aliases": ["Q"]},
    ),
    (
        {"type": "record", "name": "a.R", "fields": [
            {"type": {"type": "fixed", "size": 2, "name": "F", "namespace": "a"}, "name": "f"},
            {"default": None, "type": ["null", "a.F", "R"], "name": "g", "order": "ascending", "doc": "e"}]},
        {"type": "record", "name": "R", "namespace": "a", "fields": [
            {"name": "f", "type": {"type": "fixed", "name": "F", "size": 2}},
            {"name": "g", "type": ["null", "F", "R"], "doc": "e", "default": None}]},
    ),
    (
        {"symbols": ["A"], "name": "E", "type": "enum", "default": "A"},
        {"type": "enum", "name": "E", "symbols": ["A"], "default": "A"},
    ),
    ({"items": {"type": "map", "values": "int"}, "type": "array"},
     {"type": "array", "items": {"type": "map", "values": "int"}}),
]  # fmt: skip


@pytest.mark.parametrize(("written", "canonical"), CANONICAL)
def test_one_text_for_each_schema(written: Any, canonical: Any) -> None:
    """The canonical text has Java's order of attributes and short names; it is its own canonical text."""
    text = parse("AVRO", json.dumps(written)).canonical
    assert text == json.dumps(canonical, separators=(",", ":"))
    assert parse("AVRO", text).canonical == text


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "5", "null", "[1]", '"unknown"', '{"type":"unknown"}', '{"type":{"type":"int"}}', '{"type":"record"}',
        '{"type":"record","name":"R","fields":[{"name":"a"}]}', '{"type":"enum","name":"E","symbols":5}',
        '{"type":"record","name":"R","fields":[{"name":"a","type":"S"}]}', '["int","int"]',
        '{"type":"fixed","name":"F","size":"x"}', '{"type":"record","name":"1","fields":[]}', "[" * 3000,
    ],
)  # fmt: skip
def test_what_is_no_schema_is_told(text: str) -> None:
    """An invalid schema raises `InvalidSchema`, for every error of the Avro library."""
    with pytest.raises(InvalidSchema):
        parse("AVRO", text)


def test_types_of_other_schemas_are_known() -> None:
    """A schema can use types that its references define; without the references it is invalid."""
    inner = '{"type":"record","name":"a.Inner","fields":[{"name":"x","type":"int"}]}'
    outer = (
        '{"type":"record","name":"b.Outer","fields":[{"name":"one","type":"a.Inner"},{"name":"two","type":"a.Inner"}]}'
    )
    parsed = parse("AVRO", outer, [Dependency("a.Inner", inner)])
    assert json.loads(parsed.formatted("resolved"))["fields"][0]["type"]["name"] == "Inner"
    assert parse("AVRO", parsed.formatted("resolved")).canonical
    assert parse("AVRO", '"a.Inner"', [Dependency("a.Inner", inner)]).canonical == '"a.Inner"'
    with pytest.raises(InvalidSchema):
        parse("AVRO", outer)


READS: list[tuple[Any, Any, str]] = [
    # reader, writer, kind of incompatibility
    ("long", "int", ""),
    ("int", "long", "TYPE_MISMATCH"),
    ("string", "bytes", ""),
    (["null", "int"], "int", ""),
    ("int", ["null", "int"], "TYPE_MISMATCH"),
    (["null", "string"], ["null", "int"], "MISSING_UNION_BRANCH"),
    ({"type": "enum", "name": "E", "symbols": ["A"]}, {"type": "enum", "name": "E", "symbols": ["A", "B"]},
     "MISSING_ENUM_SYMBOLS"),
    ({"type": "enum", "name": "E", "symbols": ["A"], "default": "A"},
     {"type": "enum", "name": "E", "symbols": ["A", "B"]}, ""),
    ({"type": "fixed", "name": "F", "size": 2}, {"type": "fixed", "name": "F", "size": 3}, "FIXED_SIZE_MISMATCH"),
    ({"type": "fixed", "name": "F", "size": 2}, {"type": "fixed", "name": "G", "size": 2}, "NAME_MISMATCH"),
    ({"type": "fixed", "name": "F", "size": 2, "aliases": ["G"]}, {"type": "fixed", "name": "G", "size": 2}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "writer", "wrong"), READS)
def test_who_reads_whom(reader: Any, writer: Any, wrong: str) -> None:
    """Readers are compatible with writers by Avro's resolution rules."""
    problems = parse("AVRO", json.dumps(reader)).why_unreadable(parse("AVRO", json.dumps(writer)))
    assert [f"errorType:'{wrong}'" in problem for problem in problems] == ([True] if wrong else [])


def test_a_schema_that_holds_itself_is_compared() -> None:
    """A removed field is found in a record that contains a list of itself."""
    node = {
        "type": "record", "name": "N",
        "fields": [{"name": "v", "type": "int"}, {"name": "next", "type": ["null", "N"]}],
    }  # fmt: skip
    wide = {**node, "fields": [{"name": "v", "type": "long"}, node["fields"][1]]}
    one, other = parse("AVRO", json.dumps(node)), parse("AVRO", json.dumps(wide))
    assert other.why_unreadable(one) == []
    assert one.why_unreadable(other) != []
