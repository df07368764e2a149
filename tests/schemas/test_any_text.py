"""Any text sent as a schema either parses or raises `InvalidSchema`; each schema is compatible with itself."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from segmentlog.schemas.registry_errors import InvalidSchema
from segmentlog.schemas.schema_kind import ParsedSchema
from segmentlog.schemas.schema_parsing import parse

_JSON = """
type name namespace fields items values symbols size default aliases order logicalType precision scale doc record
enum fixed array map string int long null a b $ref $id $schema $defs definitions properties required
additionalProperties patternProperties object number integer oneOf anyOf allOf not const minimum maximum pattern
prefixItems additionalItems unevaluatedProperties dependencies dependentRequired #/definitions/a # ^a (a+)+$
"""
_PROTO = """
syntax = "proto3"; message A { } int32 a 1 2 b oneof map < string , > optional repeated reserved to max enum E
import "google/protobuf/any.proto" option ( ) [ ] default - . package extend extensions group service rpc stream
returns 0 proto2 required ; { } =
"""
WORDS, PROTO = _JSON.split(), _PROTO.split()
documents = some.recursive(
    some.one_of(some.none(), some.booleans(), some.integers(-2, 9), some.sampled_from(WORDS), some.text(max_size=3)),
    lambda inner: some.one_of(
        some.lists(inner, max_size=3), some.dictionaries(some.sampled_from(WORDS), inner, max_size=5)
    ),
    max_leaves=20,
)


def check(kind: str, text: str) -> ParsedSchema | None:
    """Return the parsed schema, or None for an invalid one; assert that a valid schema is compatible with itself."""
    try:
        parsed = parse(kind, text)
    except InvalidSchema:
        return None
    again = parse(kind, parsed.canonical)
    assert again.canonical == parsed.canonical
    assert parse(kind, parsed.normalized()).normalized() == parsed.normalized()
    problems = again.why_unreadable(parsed)
    assert problems == [] or "NOT_COMPARED" in problems[0]
    return parsed


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
def test_any_document(kind: str) -> None:
    """A JSON document built from words of schemas never raises another error than `InvalidSchema`."""

    @settings(max_examples=150)
    @given(document=documents)
    def run(document: Any) -> None:
        check(kind, json.dumps(document))

    run()


@settings(max_examples=150)
@given(words=some.lists(some.sampled_from(PROTO), max_size=40), spaces=some.sampled_from([" ", "\n"]))
def test_any_words_of_a_proto_file(words: list[str], spaces: str) -> None:
    """Tokens in any order raise only `InvalidSchema`, also inside a valid message."""
    check("PROTOBUF", spaces.join(words))
    check("PROTOBUF", f'syntax = "proto3"; message A {{ {spaces.join(words)} }}')


@pytest.mark.parametrize(
    "text",
    [
        '{"$schema": []}', '{"$schema": {}}',
        '{"$schema": "http://json-schema.org/draft-03/schema#", "required": true}',
        '{"$id": 5}', '{"$schema": "https://json-schema.org/draft/2020-12/schema", "$ref": "#a", "$defs": {"x":'
        ' {"$anchor": "a", "type": "string"}}}', '{"type": "object", "properties": {"$ref": {"type": "string"}}}',
        '{"enum": [{"$ref": "#/nowhere"}]}', '{"type": "string", "minLength": 1.0, "maxLength": 1e3}',
    ],
)  # fmt: skip
def test_odd_json_schemas(text: str) -> None:
    """Unusual but plausible JSON schemas raise only `InvalidSchema`."""
    check("JSON", text)
