"""Bytes and names as the console shows them."""

import json
import time
import tracemalloc

import pytest

from segmentlog.http.console import formatting
from segmentlog.texts import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("größer 日本語 🙂", "größer 日本語 🙂"),
        ("\u202eevil\u202c", "\\u202eevil\\u202c"),
        ("a\u200fb\u2066c\ufeff", "a\\u200fb\\u2066c\\ufeff"),
        ("nul\0 bell\a esc\x1b[31m del\x7f", "nul\\x00 bell\\x07 esc\\x1b[31m del\\x7f"),
        ("line\nand\ttab\r", "line\nand\ttab\\x0d"),
        ("line\u2028paragraph\u2029", "line\\u2028paragraph\\u2029"),
        ("byte \udcff", "byte \\xff"),
        ("tag \U000e0041", "tag \\U000e0041"),
        ("no\u00a0break", "no\u00a0break"),
    ],
)
def test_what_would_not_be_seen_is_written_out(text: str, shown: str) -> None:
    """Control characters and direction marks are escaped; letters of all scripts are not."""
    assert visible(text) == shown


@pytest.mark.parametrize("size", range(1, 24))
def test_a_text_is_never_cut_within_a_character(size: int) -> None:
    """The truncated text is a prefix of the whole text."""
    text = "aé日🙂" * 3
    shown = formatting.render_bytes(text.encode(), size)
    assert shown.kind == "text"
    assert text.startswith(shown.text)
    assert len(shown.text.encode()) > size - 4
    assert shown.is_truncated == (size < len(text.encode()))


def test_bytes_that_are_no_text_are_told_apart_from_those_that_are() -> None:
    """Text, binary data, null and the empty value are distinguished."""
    assert formatting.render_bytes(None) == ("null", "null", 0, False)
    assert formatting.render_bytes(b"") == ("empty", "empty", 0, False)
    assert formatting.render_bytes(b"\xff\x00a") == ("\\xff\\x00a", "binary", 3, False)
    assert formatting.render_bytes(b"null").kind == "text"
    assert formatting.render_bytes(b"a\nb\tc", one_line=True).text == "a\\nb\\tc"


def test_large_values_are_cut_and_say_so() -> None:
    """Every view truncates large values and reports it."""
    data = json.dumps({"text": "x" * (1 << 20)}).encode()
    looks = formatting.find_views(data)
    assert looks.views == ["json", "text", "hex"]
    for view in looks.views:
        shown = formatting.render_view(data, view, looks)
        assert shown.is_truncated
        assert shown.size_bytes == len(data)
        assert len(shown.text) <= formatting.FULL_BYTES


def test_the_best_view_comes_first() -> None:
    """JSON comes first for documents, hexadecimal for binary data."""
    assert formatting.find_views(b'{"a": [1, 2]}').views[0] == "json"
    data = b'{"a":[1,2]}'
    assert formatting.render_view(data, "json", formatting.find_views(data)).text == json.dumps({"a": [1, 2]}, indent=2)
    assert formatting.find_views(b"17").views == ["text", "hex"]
    assert formatting.find_views(b"{broken").views == ["text", "hex"]
    assert formatting.find_views(b"\x00\xff").views == ["hex", "text"]
    assert formatting.find_views(b"").views == formatting.find_views(None).views == []
    assert formatting.render_view(b"\x00\xffabc" * 4, "hex", formatting.find_views(None)).text.splitlines()[0] == (
        "00000000  00 ff 61 62 63 00 ff 61  62 63 00 ff 61 62 63 00  |..abc..abc..abc.|"
    )


def test_command_lines_can_be_pasted() -> None:
    """Shell characters in names are quoted, and control characters are escaped."""
    assert (
        formatting.command("groups", "describe", "a'; rm -rf /") == """segmentlog groups describe 'a'"'"'; rm -rf /'"""
    )
    assert "\x1b" not in formatting.command("groups", "describe", "\x1b[31m\u202e")


def _deep(depth: int, commas: int) -> bytes:
    return b"[" * depth + b"1," * commas + b"1" + b"]" * depth


@pytest.mark.parametrize(
    "hidden",
    [b"%s", b'["]]]]]\\"]]", %s]', b'["' + b"]" * 2_000 + b'", %s]', b'["\\\\", "]", %s]'],
    ids=["plain", "escaped", "many", "backslash"],
)
def test_depth_does_not_multiply_what_is_shown(hidden: bytes) -> None:
    """60 kB of JSON that would indent to 50 MB are shown unindented, wherever strings contain brackets."""
    data = hidden % _deep(400, 30_000)
    assert len(data) < 70_000
    tracemalloc.start()
    try:
        looks = formatting.find_views(data)
        assert looks == (["text", "hex"], None)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert formatting.render_view(data, "text", looks).text == data.decode()
    assert formatting.find_views(hidden % _deep(400, 100)).views[0] == "json"


@pytest.mark.parametrize(
    "data",
    [b'{"a', b'["\\', b'["\\"' + b'\\"' * 200_000, b"[" * 100_000, b"{}" + b"]" * 9],
    ids=["name", "backslash", "quotes", "open", "closed"],
)
def test_broken_json_is_no_json(data: bytes) -> None:
    """Malformed JSON is shown as text, without taking longer."""
    began_s = time.thread_time()
    assert formatting.find_views(data).views[0] == "text"
    assert time.thread_time() - began_s < 2
