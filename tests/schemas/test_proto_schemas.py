"""Protobuf schemas: texts and descriptors, canonical texts, and compatibility of readers with writers."""

import base64

import pytest

from segmentlog.schemas.proto_schema import ProtoSchema, indexes_of
from segmentlog.schemas.registry_errors import InvalidPayload, InvalidSchema
from segmentlog.schemas.schema_id_framing import decode_head, decode_indexes, encode_head, encode_indexes
from segmentlog.schemas.schema_kind import Dependency
from segmentlog.schemas.schema_parsing import parse

OTHER = Dependency("other.proto", 'syntax = "proto3"; package other; message O { int32 a = 1; enum E { Z = 0; } }')

# (text as written, text as stored)
TEXTS = [
    (
        """// A comment
        syntax = 'proto3'; package a.b; import "google/protobuf/timestamp.proto"; import public "other.proto";
        option java_package = "x." "y"; option optimize_for = SPEED;
        /* message No {} */
        message M {
            string s = 1 [deprecated = true, json_name = "q"]; optional int32 o = 0x2; map<string, Inner> m = 3;
            google.protobuf.Timestamp t = 4; oneof w { int32 i = 5; Inner n = 6; } repeated other.O r = 7;
            reserved 10 to 12, 20 to max; reserved "foo"; E e = 8; .other.O.E f = 9;
            message Inner { M back = 1; M.E e = 2; }
            enum E { option allow_alias = true; A = 0; B = -1; C = 0; reserved 5; }
        }
        service S { rpc F (M) returns (stream M.Inner) { option deprecated = true; } rpc G (stream M) returns (M); };
        """,
        """syntax = "proto3";
package a.b;

import "google/protobuf/timestamp.proto";
import public "other.proto";

option java_package = "x.y";
option optimize_for = SPEED;

message M {
  reserved 10 to 12, 20 to max;
  reserved "foo";
  string s = 1 [json_name = "q", deprecated = true];
  optional int32 o = 2;
  map<string, M.Inner> m = 3;
  google.protobuf.Timestamp t = 4;
  oneof w {
    int32 i = 5;
    M.Inner n = 6;
  }
  repeated other.O r = 7;
  M.E e = 8;
  other.O.E f = 9;

  message Inner {
    M back = 1;
    M.E e = 2;
  }

  enum E {
    option allow_alias = true;
    reserved 5;
    A = 0;
    B = -1;
    C = 0;
  }
}

service S {
  rpc F (M) returns (stream M.Inner) {
    option deprecated = true;
  }
  rpc G (stream M) returns (M);
}
""",
    ),
    (
        """message A { required string x = 1 [default = "h\\"\\n"]; optional group G = 2 { optional bytes b = 1
        [default = "\\x00a"]; } extensions 100 to 199; repeated int32 q = 3 [packed = true]; optional K k = 4
        [default = Z]; optional double d = 5 [default = -inf]; optional int64 o = 6 [default = 010]; enum K { Z = 1; } }
        extend A { optional int32 more = 101; }""",
        """syntax = "proto2";

message A {
  required string x = 1 [default = "h\\042\\012"];
  optional group G = 2 {
    optional bytes b = 1 [default = "\\000a"];
  }
  repeated int32 q = 3 [packed = true];
  optional A.K k = 4 [default = Z];
  optional double d = 5 [default = -inf];
  optional int64 o = 6 [default = 8];
  extensions 100 to 199;

  enum K {
    Z = 1;
  }
}

extend A {
  optional int32 more = 101;
}
""",
    ),
    (
        'edition = "2023"; package e; option features.field_presence = IMPLICIT; message A { int32 message = 1; '
        "reserved foo; message B { bytes option = 1; } B reserved = 2; }",
        None,
    ),
]


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_one_text_for_each_file(number: int) -> None:
    """Every spelling of a file, and its descriptor, has the same canonical text, which is its own canonical text."""
    written, stored = TEXTS[number]
    parsed = parse("PROTOBUF", written, [OTHER])
    assert parsed.canonical == (stored or parsed.canonical)
    assert parse("PROTOBUF", parsed.canonical, [OTHER]).canonical == parsed.canonical
    assert parse("PROTOBUF", parsed.formatted("serialized"), [OTHER]).canonical == parsed.canonical
    assert parse("PROTOBUF", parsed.normalized(), [OTHER]).normalized() == parsed.normalized()


def test_options_of_others_are_kept_as_they_are_written() -> None:
    """Custom options, which the parser cannot interpret, are stored as written."""
    options = '(v) = -2, (w).u = "t", (f) = 1.5'
    text = f'syntax = "proto3"; option (a.b).c = {{ x: 1 y: "z" }}; message M {{ int32 i = 1 [{options}]; }}'
    try:
        parsed = parse("PROTOBUF", text)
    except InvalidSchema as error:
        pytest.skip(f"this version of protobuf wants to know them: {error}")
    assert 'option (a.b).c = { x : 1 y : "z" };' in parsed.canonical
    assert f"[{options}]" in parsed.canonical
    assert parse("PROTOBUF", parsed.canonical).canonical == parsed.canonical


@pytest.mark.parametrize(
    "text",
    [
        "", "message A {", "message {}", "message A { int32 x = 1 }", "message A { Foo x = 1; }", "nonsense",
        'syntax = "proto4";', 'syntax = "proto3"; message A { int32 x = 0; }', 'import "nowhere.proto";',
        'syntax = "proto3"; message A { int32 x = 1; int32 y = 1; }', "message A {} message A {}", "message \0 {}",
        'syntax = "proto3"; message A { oneof o { repeated int32 x = 1; } }', "enum E {}", '"', "/* open",
        'syntax = "proto3"; message A { int32 x = 99999999999; }', "message A { optional int32 a = 1 [x",
        base64.b64encode(b"\x0a\x05abcde").decode(), "message A {" * 2000,
    ],
    ids=str.__len__,
)  # fmt: skip
def test_what_is_no_schema_is_told(text: str) -> None:
    """An invalid file raises `InvalidSchema`, from the parser with a line number or from Protobuf's pool."""
    with pytest.raises(InvalidSchema):
        parse("PROTOBUF", text)


def test_a_file_that_imports_itself_is_told() -> None:
    """A file that imports itself, also through other files, raises `InvalidSchema`."""
    one = Dependency("one.proto", 'syntax = "proto3"; import "two.proto";')
    two = Dependency("two.proto", 'syntax = "proto3"; import "one.proto";')
    with pytest.raises(InvalidSchema, match="imports itself"):
        parse("PROTOBUF", 'syntax = "proto3"; import "one.proto"; message A {}', [one, two])


def message(body: str, more: str = "") -> str:
    """Return a file with one message."""
    return f'syntax = "proto3"; package p; message A {{ {body} }} {more}'


CHANGES = [
    # before, after, the change that breaks readers
    (message("int32 a = 1;"), message("int64 b = 1; string c = 2;"), ""),
    (message("int32 a = 1;"), message(""), ""),
    (message("int32 a = 1;"), message("sint32 a = 1;"), "FIELD_SCALAR_KIND_CHANGED"),
    (message("string a = 1;"), message("bytes a = 1;"), ""),
    (message("E a = 1; enum E { Z = 0; }"), message("int32 a = 1;"), ""),
    (message("fixed32 a = 1;"), message("sfixed32 a = 1;"), ""),
    (message("float a = 1;"), message("double a = 1;"), "FIELD_SCALAR_KIND_CHANGED"),
    (message("int32 a = 1;"), message("repeated int32 a = 1;"), "FIELD_NUMERIC_LABEL_CHANGED"),
    (message("string a = 1;"), message("repeated string a = 1;"), ""),
    (message("int32 a = 1;"), message("B a = 1;", "message B {}"), "FIELD_KIND_CHANGED"),
    (message("B a = 1;", "message B {} message C {}"), message("C a = 1;", "message B {} message C {}"),
     "FIELD_NAMED_TYPE_CHANGED"),
    (message("", "message B {}"), message(""), "MESSAGE_REMOVED"),
    (message("message B {}"), message(""), "MESSAGE_REMOVED"),
    (message(""), message("", "message B {}"), ""),
    (message("", "enum E { Z = 0; }"), message(""), ""),
    (message(""), message("").replace("package p", "package q"), "PACKAGE_CHANGED"),
    (message("map<string, int32> a = 1;"), message("map<string, int64> a = 1;"), ""),
    (message("map<string, int32> a = 1;"), message("map<string, string> a = 1;"), "FIELD_SCALAR_KIND_CHANGED"),
    (message("int32 a = 1;"), message("oneof o { int32 a = 1; string b = 2; }"), ""),
    (message("int32 a = 1; int32 b = 2;"), message("oneof o { int32 a = 1; int32 b = 2; }"),
     "MULTIPLE_FIELDS_MOVED_TO_ONEOF"),
    (message("int32 a = 1; oneof o { int32 b = 2; }"), message("oneof o { int32 a = 1; int32 b = 2; }"),
     "FIELD_MOVED_TO_EXISTING_ONEOF"),
    (message("oneof o { int32 a = 1; int32 b = 2; }"), message("oneof o { int32 a = 1; }"), "ONEOF_FIELD_REMOVED"),
    (message("oneof o { int32 a = 1; int32 b = 2; }"), message(""), ""),
    (message("oneof o { int32 a = 1; int32 b = 2; }"), message("int32 a = 1; int32 b = 2;"), ""),
    ("message A { required int32 a = 1; }", "message A { }", "REQUIRED_FIELD_REMOVED"),
    ("message A { }", "message A { required int32 a = 1; }", "REQUIRED_FIELD_ADDED"),
    (message("A next = 1; int32 v = 2;"), message("A next = 1; string v = 2;"), "FIELD_SCALAR_KIND_CHANGED"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "wrong"), CHANGES, ids=map(str, range(len(CHANGES))))
def test_changes_that_break_readers(before: str, after: str, wrong: str) -> None:
    """Each incompatible change has the name that Confluent's registry gives it."""
    problems = parse("PROTOBUF", after).why_unreadable(parse("PROTOBUF", before))
    assert bool(problems) == bool(wrong)
    if wrong:
        assert any(f"'{wrong}'" in problem for problem in problems), problems


def test_a_change_in_an_imported_file_is_found() -> None:
    """A change in an imported message is found at the field that uses the message."""
    text = 'syntax = "proto3"; import "other.proto"; message A { other.O o = 1; }'
    changed = Dependency("other.proto", OTHER.text.replace("int32 a", "string a"))
    assert parse("PROTOBUF", text, [changed]).why_unreadable(parse("PROTOBUF", text, [OTHER]))


def test_where_a_message_stands_is_written_before_it() -> None:
    """Message indexes are encoded as in Confluent's serializers: zigzag varints, one byte for the first message."""
    parsed = parse("PROTOBUF", message("message B { message C {} }", "message D {}"))
    assert isinstance(parsed, ProtoSchema)
    for name, indexes, written in (
        ("p.A", [0], b"\0"),
        ("p.A.B.C", [0, 0, 0], b"\6\0\0\0"),
        ("p.D", [1], b"\2\2"),
    ):
        assert indexes_of(parsed.find_message(name)) == indexes
        assert parsed.message(indexes).full_name == name
        assert encode_indexes(indexes) == written
        assert decode_indexes(written + b"x", 0) == (indexes, len(written))
    assert decode_indexes(encode_indexes([300, 70_000]), 0)[0] == [300, 70_000]


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"\1\0\0\0\1"])
def test_what_no_serializer_has_written_is_told(data: bytes) -> None:
    """A value that is too short, or has a wrong first byte, raises `InvalidPayload`."""
    with pytest.raises(InvalidPayload):
        decode_head(data)
    assert decode_head(encode_head(7) + b"x") == 7


@pytest.mark.parametrize("data", [b"", b"\2", b"\xff" * 11, b"\xfe\xff\x7f", b"\1"])
def test_indexes_that_lead_nowhere_are_told(data: bytes) -> None:
    """Indexes that are truncated, too long, too many or negative in number raise `InvalidPayload`."""
    with pytest.raises(InvalidPayload):
        decode_indexes(data, 0)
