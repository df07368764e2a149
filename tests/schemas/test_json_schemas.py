"""JSON schemas: compatibility by Confluent's rules, and the check of values."""

import json
from typing import Any

import pytest

from segmentlog.schemas.json_values import checker
from segmentlog.schemas.registry_errors import InvalidPayload, InvalidSchema
from segmentlog.schemas.schema_kind import Dependency
from segmentlog.schemas.schema_parsing import parse

STR, INT, NUM = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def obj(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return an object schema that accepts additional properties."""
    return {"type": "object", "properties": properties, **more}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return an object schema that refuses additional properties."""
    return obj(properties, additionalProperties=False, **more)


CHANGES: list[tuple[Any, Any, str]] = [
    # before, after, the change that breaks readers
    (STR, STR, ""),
    (STR, NUM, "TYPE_CHANGED"),
    (INT, NUM, ""),
    (NUM, INT, "TYPE_NARROWED"),
    (STR, {}, ""),
    (STR, True, ""),
    (True, STR, "TYPE_CHANGED"),
    (False, STR, ""),
    ({**STR, "maxLength": 5}, {**STR, "maxLength": 6}, ""),
    ({**STR, "maxLength": 5}, {**STR, "maxLength": 4}, "MAX_LENGTH_DECREASED"),
    (STR, {**STR, "minLength": 1}, "MIN_LENGTH_ADDED"),
    ({**STR, "pattern": "a"}, {**STR, "pattern": "b"}, "PATTERN_CHANGED"),
    ({**STR, "pattern": "a"}, STR, ""),
    ({**NUM, "minimum": 1}, {**NUM, "minimum": 2}, "MINIMUM_INCREASED"),
    ({**NUM, "exclusiveMaximum": 1}, {**NUM, "exclusiveMaximum": 2}, ""),
    ({**NUM, "multipleOf": 2}, {**NUM, "multipleOf": 4}, "MULTIPLE_OF_EXPANDED"),
    ({**NUM, "multipleOf": 4}, {**NUM, "multipleOf": 2}, ""),
    ({**NUM, "multipleOf": 4}, {**NUM, "multipleOf": 3}, "MULTIPLE_OF_CHANGED"),
    ({**STR, "enum": ["a"]}, {**STR, "enum": ["a", "b"]}, ""),
    ({"enum": ["a", "b"]}, {"enum": ["a"]}, "ENUM_ARRAY_NARROWED"),
    ({"const": 1}, {"const": 2}, "ENUM_ARRAY_CHANGED"),
    ({**STR, "enum": ["a"]}, STR, ""),
    (STR, {"type": ["string", "null"]}, ""),
    ({"type": ["string", "null"]}, STR, "TYPE_CHANGED"),
    ({"type": ["string", "null"]}, {"type": ["string", "null", "integer"]}, ""),
    ({"type": ["string", "null", "integer"]}, {"type": ["string", "null"]}, "SUM_TYPE_NARROWED"),
    ({"oneOf": [STR, NUM]}, {"oneOf": [NUM, STR, {"type": "null"}]}, ""),
    ({"oneOf": [STR, NUM]}, {"oneOf": [STR, {"type": "boolean"}]}, "COMBINED_TYPE_SUBSCHEMAS_CHANGED"),
    ({"oneOf": [STR, NUM]}, {"anyOf": [STR, NUM]}, ""),
    ({"anyOf": [STR, NUM]}, {"oneOf": [STR, NUM]}, "COMBINED_TYPE_CHANGED"),
    ({"allOf": [obj({"a": STR}), obj({"b": STR})]}, {"allOf": [obj({"a": STR})]}, ""),
    ({"allOf": [obj({"a": STR})]}, {"allOf": [obj({"a": STR}), obj({"b": STR})]}, "PRODUCT_TYPE_EXTENDED"),
    ({"not": STR}, {"not": {**STR, "minLength": 3}}, ""),
    ({"not": {**STR, "minLength": 3}}, {"not": STR}, "NOT_TYPE_EXTENDED"),
    # Open: data may already have other properties of any type. Closed: data cannot have other properties.
    (obj({"a": STR}), obj({"a": STR, "b": INT}), "OPTIONAL_PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL"),
    (obj({"a": STR}), obj({"a": STR, "b": {}}), ""),
    (obj({"a": STR}), obj({"a": STR, "b": INT}, required=["b"]), "REQUIRED_PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL"),
    (obj({"a": STR, "b": INT}), obj({"a": STR}), ""),
    (closed({"a": STR}), closed({"a": STR, "b": INT}), ""),
    (closed({"a": STR}), closed({"a": STR, "b": INT}, required=["b"]),
     "REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL"),
    (closed({"a": STR}), closed({"a": STR, "b": {**INT, "default": 0}}, required=["b"]), ""),
    (closed({"a": STR, "b": INT}), closed({"a": STR}), "PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL"),
    (closed({"a": STR, "b": False}), closed({"a": STR}), ""),
    (obj({"a": STR}, additionalProperties=INT), obj({"a": STR, "b": INT}, additionalProperties=INT), ""),
    (obj({"a": STR}, additionalProperties=INT), obj({"a": STR, "b": STR}, additionalProperties=INT),
     "PROPERTY_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL"),
    (obj({"x1": INT}, patternProperties={"^x": NUM}), obj({}, patternProperties={"^x": NUM}), ""),
    (obj({}), closed({}), "ADDITIONAL_PROPERTIES_REMOVED"),
    (closed({}), obj({}), ""),
    (obj({}, additionalProperties=INT), obj({}, additionalProperties=NUM), ""),
    (obj({}), obj({}, additionalProperties=NUM), "ADDITIONAL_PROPERTIES_NARROWED"),
    (obj({"a": STR}), obj({"a": STR}, required=["a"]), "REQUIRED_ATTRIBUTE_ADDED"),
    (obj({"a": STR}, required=["a"]), obj({"a": STR}), ""),
    (obj({"a": STR}), obj({"a": {**STR, "default": ""}}, required=["a"]), ""),
    (obj({"a": INT}), obj({"a": STR}), "TYPE_CHANGED"),
    (obj({}, dependencies={"a": ["b"]}), obj({}, dependencies={"a": ["b", "c"]}), "DEPENDENCY_ARRAY_EXTENDED"),
    (obj({}, dependentRequired={"a": ["b"]}), obj({}), ""),
    (obj({}, maxProperties=2), obj({}, maxProperties=1), "MAX_PROPERTIES_DECREASED"),
    ({"type": "array", "items": INT}, {"type": "array", "items": NUM}, ""),
    ({"type": "array", "items": NUM}, {"type": "array", "items": INT}, "TYPE_NARROWED"),
    ({"type": "array"}, {"type": "array", "items": INT}, "SCHEMA_ADDED"),
    ({"type": "array"}, {"type": "array", "uniqueItems": True}, "UNIQUE_ITEMS_ADDED"),
    ({"type": "array", "maxItems": 3}, {"type": "array", "maxItems": 2}, "MAX_ITEMS_DECREASED"),
    ({"type": "array", "items": [STR], "additionalItems": False},
     {"type": "array", "items": [STR, INT], "additionalItems": False}, ""),
    ({"type": "array", "items": [STR, INT], "additionalItems": False},
     {"type": "array", "items": [STR], "additionalItems": False}, "ITEM_REMOVED_FROM_CLOSED_CONTENT_MODEL"),
    ({"type": "array", "items": [STR]}, {"type": "array", "items": [STR, INT]}, "ITEM_ADDED_TO_OPEN_CONTENT_MODEL"),
    ({"type": "array", "prefixItems": [STR], "items": INT},
     {"type": "array", "prefixItems": [STR, INT], "items": INT}, ""),
    (obj({"a": {"$ref": "#/definitions/s"}}, definitions={"s": STR}), obj({"a": STR}), ""),
    (obj({"a": {"$ref": "#/$defs/s"}}, **{"$defs": {"s": STR}}), obj({"a": INT}), "TYPE_CHANGED"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "wrong"), CHANGES, ids=map(str, range(len(CHANGES))))
def test_changes_that_break_readers(before: Any, after: Any, wrong: str) -> None:
    """Each incompatible change has the name that Confluent's registry gives it; a compatible change has none."""
    problems = parse("JSON", json.dumps(after)).why_unreadable(parse("JSON", json.dumps(before)))
    assert bool(problems) == bool(wrong)
    if wrong:
        assert any(f"'{wrong}'" in problem for problem in problems), problems


def test_a_schema_that_holds_itself_is_compared() -> None:
    """The comparison of a recursive schema ends, and finds its changes."""

    def tree(value: Any) -> str:
        node = closed({"v": value, "kids": {"type": "array", "items": {"$ref": "#/definitions/node"}}})
        return json.dumps({"$ref": "#/definitions/node", "definitions": {"node": node}})

    one, other = parse("JSON", tree(INT)), parse("JSON", tree(NUM))
    assert other.why_unreadable(one) == []
    assert one.why_unreadable(other) != []


def test_what_takes_too_long_is_not_compatible() -> None:
    """Schemas that would take too long to compare count as incompatible, with the error NOT_COMPARED."""

    def deep(depth: int, leaf: str) -> Any:
        return {"oneOf": [{**STR, "pattern": leaf}]} if not depth else {
            "oneOf": [obj({f"p{at}": deep(depth - 1, f"{leaf}{at}")}) for at in range(5)]
        }  # fmt: skip

    problems = parse("JSON", json.dumps(deep(4, "a"))).why_unreadable(parse("JSON", json.dumps(deep(4, "b"))))
    assert problems


@pytest.mark.parametrize(
    "text",
    [
        "", "5", "[]", '"string"', '{"type":"text"}', '{"properties":5}', '{"$ref":"#/nowhere"}',
        '{"$ref":"other.json"}', '{"minLength":"x"}', '{"properties":{"a":{"$ref":"http://example.com/a.json"}}}',
    ],
)  # fmt: skip
def test_what_is_no_schema_is_told(text: str) -> None:
    """A schema that violates its meta-schema, or has a missing reference, is invalid; no reference is downloaded."""
    with pytest.raises(InvalidSchema):
        parse("JSON", text)


def test_a_reference_that_leads_to_itself_is_told() -> None:
    """A ``$ref`` to itself has no target, so the schema is not compared."""
    loop = parse("JSON", '{"$ref":"#/definitions/a","definitions":{"a":{"$ref":"#/definitions/a"}}}')
    assert "leads to itself" in loop.why_unreadable(parse("JSON", '{"type":"string"}'))[0]


def test_values_are_checked_through_references() -> None:
    """References by name and by ``$id`` are checked in values; the error has the path of the mismatch."""
    page = Dependency("page.json", json.dumps({"$id": "http://x/page.json", "type": "string", "pattern": "^/"}))
    for reference in ("page.json", "http://x/page.json"):
        parsed = parse("JSON", json.dumps(closed({"p": {"$ref": reference}})), [page])
        check = checker(parsed)
        check({"p": "/a"})
        with pytest.raises(InvalidPayload, match="at #/p"):
            check({"p": "a"})
        with pytest.raises(InvalidPayload):
            check({"q": 1})


# ---------------------------------------------------------------- schemas that could take very long


def _doubling(levels: int, leaf: Any, **more: Any) -> dict[str, Any]:
    """Return a schema with few definitions, where each refers twice to the next."""
    lines: dict[str, Any] = {f"d{n}": {"allOf": [{"$ref": f"#/definitions/d{n + 1}"}] * 2} for n in range(levels)}
    return {"definitions": {**lines, f"d{levels}": leaf}, "$ref": "#/definitions/d0", **more}


def _checker(document: Any) -> Any:
    return checker(parse("JSON", json.dumps(document)))


_EVIL = "^(a+)+$"
_DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.mark.parametrize(
    "document",
    [
        {"properties": {"a": {"pattern": _EVIL}}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "properties": {"a": {**_DRAFT, "pattern": _EVIL}}},
        {"additionalProperties": {"not": {"not": {"pattern": _EVIL}}}},
    ],
)
def test_no_pattern_keeps_the_process_busy(document: Any) -> None:
    """A pattern that would take `re` years is matched fast, in every draft."""
    check = _checker(document)
    check({"a": "a" * 64})
    with pytest.raises(InvalidPayload, match="the value does not match its schema"):
        check({"a": "a" * 64 + "!"})


@pytest.mark.parametrize("rest", [False, {"type": "null"}])
def test_no_pattern_of_names_keeps_the_process_busy(rest: Any) -> None:
    """A slow pattern in patternProperties is matched fast, and still separates additional properties."""
    check = _checker({"patternProperties": {_EVIL: {"type": "integer"}}, "additionalProperties": rest})
    check({"a" * 64: 1})
    for value in ({"a" * 64 + "!": 1}, {"a" * 64: "text"}):
        with pytest.raises(InvalidPayload, match="the value does not match its schema"):
            check(value)


def test_patterns_are_those_of_json_schema() -> None:
    """Unicode escapes work; a pattern that RE2 does not accept raises an error, so no value is half checked."""
    check = _checker({"pattern": r"^[\u00e0-\u00ff]+\\u0041$"})
    check("\u00e9\\u0041")
    with pytest.raises(InvalidPayload, match="does not match"):
        check("eA")
    with pytest.raises(InvalidPayload, match="RE2 does not accept"):
        _checker({"pattern": "^(?=a)b"})("ab")
    both = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "patternProperties": {_EVIL: True}, "unevaluatedProperties": False,
    }  # fmt: skip
    with pytest.raises(InvalidPayload, match="cannot be checked"):
        _checker(both)({"a" * 40 + "!": 1})


@pytest.mark.parametrize(
    ("items", "are_unique"),
    [
        ([1, 1.0], False),
        ([1, True, "1", None, False, 0, [1], [True], {"a": 1}, {"a": True}, {"a": [1]}], True),
        ([{"a": 1, "b": 2}, {"b": 2.0, "a": 1}], False),
        ([[1, [2]], [1, [2]]], False),
        ([{"a": number} for number in range(20_000)], True),
    ],
)
def test_unique_items_are_told_by_what_json_calls_equal(items: list[Any], are_unique: bool) -> None:
    """uniqueItems compares by JSON equality, in time linear in the number of items."""
    check = _checker({"uniqueItems": True})
    if are_unique:
        check(items)
    else:
        with pytest.raises(InvalidPayload, match="non-unique"):
            check(items)


@pytest.mark.parametrize(
    "more", [{}, {"$schema": "https://json-schema.org/draft/2019-09/schema", "unevaluatedProperties": False}]
)
def test_schemas_that_double_are_given_up(more: Any) -> None:
    """A schema that needs 2^40 steps raises an error after its limit; later values are checked as before."""
    check = _checker(_doubling(40, {"type": "object"}, **more))
    for _ in range(2):
        with pytest.raises(InvalidPayload, match="too many steps"):
            check({"a": 1})
    _checker(_doubling(5, {"type": "object"}))({"a": 1})


def test_large_values_are_checked_to_their_end() -> None:
    """The step limit grows with the value: every part of a large value is checked."""
    check = _checker({"items": {"type": "object", "required": ["a"], "properties": {"a": {"enum": list(range(99))}}}})
    check([{"a": 7}] * 2_000)
    with pytest.raises(InvalidPayload, match="at #/2000/a"):
        check([{"a": 7}] * 2_000 + [{"a": 100}])


def test_schemas_that_double_are_compared_in_passing() -> None:
    """Each definition is visited once for its identity; schemas that still take too long are not compared."""
    one, other = (parse("JSON", json.dumps(_doubling(40, {"type": kind}))) for kind in ("object", "string"))
    assert one.why_unreadable(parse("JSON", json.dumps(_doubling(40, {"type": "object"})))) == []
    assert other.why_unreadable(one)


def test_long_lists_of_values_are_compared_in_passing() -> None:
    """Enums of 120,000 values are compared fast; 1 equals 1.0, but differs from true."""
    one, other = (parse("JSON", json.dumps({"enum": list(range(n, n + 120_000))})) for n in (0, 1))
    assert "ENUM_ARRAY_CHANGED" in other.why_unreadable(one)[0]
    assert parse("JSON", '{"enum":[1.0]}').why_unreadable(parse("JSON", '{"enum":[1]}')) == []
    assert "ENUM_ARRAY_CHANGED" in parse("JSON", '{"enum":[true]}').why_unreadable(parse("JSON", '{"enum":[1]}'))[0]
