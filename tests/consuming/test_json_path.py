"""The small language for what is in a JSON value."""

import pytest

from segmentlog.consuming.json_path import JsonPath
from segmentlog.errors import InvalidConfig

_VALUE = b"""{"user": {"id": 7, "name": "Ann O'Neil", "tags": []},
 "items": [{"price": 9.5, "sku": "A 1"}, {"price": 12}], "odd key": {"x": true}, "none": null, "text": "7"}"""


@pytest.mark.parametrize(
    "path",
    [
        "user", "user.id", "$.user.id", "$['user']['id']", 'user["id"]', "items[0].price", "items[-1].price",
        "items[*].sku",
        "$['odd key'].x", "user.id = 7", "user.id=7", "user.id = 7.0", 'user.id = "7"', "text = 7",
        "user.name ~ o'neil",
        "items[*].price > 10", "items[0].price >= 9.5", "items[0].price <= 9.5", "user.id < 8", "user.id != 8",
        'items[*].sku = "A 1"', "items[*].sku = A 1", "$['odd key'].x = true", "none = null", "user.* = 7", "$ ~ ann",
        "items ~ 9.5", "none != 1", "user.id == 7", "user.id==7", "$.user.id == 7", "@.user.id == 7", "@['user'].id",
        "items[*].sku == 'A 1'", "user.name == 'Ann O\\'Neil'", 'user.name == "Ann O\'Neil"', "$['odd key'].x == true",
        "none == null", "text == '7'",
    ],
)  # fmt: skip
def test_what_is_there_is_found(path: str) -> None:
    """A path has names, places or any place; values are compared as numbers or as text."""
    assert JsonPath.parse(path).matches(_VALUE), path


@pytest.mark.parametrize(
    "path",
    [
        "nobody", "user.nobody", "none", "items[2]", "items[0].sku.x", "user[0]", "user.id = 8", "user.id != 7",
        "user.id > 7", "user.id == 8", "user.name == 'Ann'",
        "text > 1", "user.name ~ bob", "items[*].price > 100", "$['odd key'].x = 1", "user.id = seven", "user.tags[*]",
    ],
)  # fmt: skip
def test_what_is_not_there_is_not_found(path: str) -> None:
    """Missing fields, nulls, and texts that look like numbers do not match."""
    assert not JsonPath.parse(path).matches(_VALUE), path


@pytest.mark.parametrize("value", [None, b"", b"no JSON", b"\xff\x00", b"[" * 100_000, b'{"user": '])
def test_what_is_no_json_has_nothing(value: bytes | None) -> None:
    """Any malformed value has no matches."""
    assert not JsonPath.parse("user").matches(value)


@pytest.mark.parametrize(
    "text",
    [
        "", "  ", "[", "a[", "a[x]", "= 7", "a ! b", "a > b", "a.b.", "a b", 'a = "\\x"', ".", "a" + "[0]" * 60, "a[*",
        "a === 7", "a => 7", "a =~ b", "a !== 7", "a =", "a == ", "a = 'b", 'a = "b', "a = 'b' c", "a = b'c' && d = 1",
        "a = 1 && b = 2", "a = 1 || b = 2", "a > nan", "a < inf", "a.length()", "length(a) > 1", "$..a", "a[0:2]",
        "a > " + "9" * 310, "a <= -" + "9" * 310, "a > 1e310",
        "a[?(@.b == 1)]", "a[0,1]", "a,b", "a?.b", "a ~", "$['a', 'b']",
    ],
)  # fmt: skip
def test_what_is_no_path_is_refused(text: str) -> None:
    """The error shows the form of a path."""
    with pytest.raises(InvalidConfig, match="JSON path"):
        JsonPath.parse(text)
