"""Bytes and names as pages show them."""

import json

import pytest

from segmentlog.http.console import showing


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
    """Control characters and what turns the direction of writing; letters of all scripts stay."""
    assert showing.visible(text) == shown


@pytest.mark.parametrize("size", range(1, 24))
def test_a_text_is_never_cut_within_a_character(size: int) -> None:
    """What is shown is the front of what is there, and still text."""
    text = "aé日🙂" * 3
    shown = showing.show(text.encode(), size)
    assert shown.kind == "text"
    assert text.startswith(shown.text)
    assert len(shown.text.encode()) > size - 4
    assert shown.is_cut == (size < len(text.encode()))


def test_bytes_that_are_no_text_are_told_apart_from_those_that_are() -> None:
    """As are null and the empty value."""
    assert showing.show(None) == ("null", "null", 0, False)
    assert showing.show(b"") == ("empty", "empty", 0, False)
    assert showing.show(b"\xff\x00a") == ("\\xff\\x00a", "binary", 3, False)
    assert showing.show(b"null").kind == "text"
    assert showing.show(b"a\nb\tc", one_line=True).text == "a\\nb\\tc"


def test_large_values_are_cut_and_say_so() -> None:
    """In every view."""
    data = json.dumps({"text": "x" * (1 << 20)}).encode()
    assert showing.views(data) == ["json", "text", "hex"]
    for view in showing.views(data):
        shown = showing.show_as(data, view)
        assert shown.is_cut
        assert shown.size_bytes == len(data)
        assert len(shown.text) <= showing.FULL_BYTES


def test_the_best_view_comes_first() -> None:
    """JSON for what is a document, hexadecimal for what is no text."""
    assert showing.views(b'{"a": [1, 2]}')[0] == "json"
    assert showing.show_as(b'{"a":[1,2]}', "json").text == json.dumps({"a": [1, 2]}, indent=2)
    assert showing.views(b"17") == ["text", "hex"]
    assert showing.views(b"{broken") == ["text", "hex"]
    assert showing.views(b"\x00\xff") == ["hex", "text"]
    assert showing.views(b"") == showing.views(None) == []
    assert showing.show_as(b"\x00\xffabc" * 4, "hex").text.splitlines()[0] == (
        "00000000  00 ff 61 62 63 00 ff 61  62 63 00 ff 61 62 63 00  |..abc..abc..abc.|"
    )


def test_keys_are_typed_as_text_or_as_bytes() -> None:
    """``0x`` only where hexadecimal follows."""
    assert showing.key_bytes("user-1") == b"user-1"
    assert showing.key_bytes("0x00ff") == b"\x00\xff"
    assert showing.key_bytes("0xyz") == b"0xyz"
    assert showing.key_bytes("é") == "é".encode()


def test_command_lines_can_be_pasted() -> None:
    """What a name has of the shell's own characters is quoted, and nothing in it moves the cursor."""
    assert showing.command("groups", "describe", "a'; rm -rf /") == """segmentlog groups describe 'a'"'"'; rm -rf /'"""
    assert "\x1b" not in showing.command("groups", "describe", "\x1b[31m\u202e")
