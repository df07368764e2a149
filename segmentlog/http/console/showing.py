"""Bytes and names as people can read them, with nothing in them that a page or a terminal would take for more.

What a browser would not show, or would show elsewhere than where it stands, is written as an escape: control
characters, marks that turn the direction of writing, bytes that are no UTF-8. Markup is the templates' matter: they
escape everything.
"""

from __future__ import annotations

import json
import shlex
import unicodedata
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

import msgspec

LIST_CHARS: Final = 240
"""Of a value in a table."""
FULL_BYTES: Final = 128 << 10
"""Of a value that is shown by itself."""
HEX_BYTES: Final = 16 << 10
"""Of one that is shown in hexadecimal: four times as long on the page."""
_JSON_BYTES: Final = 4 << 20
"""A larger value is not parsed to be shown."""

View = Literal["text", "json", "hex"]


class Shown(NamedTuple):
    """Bytes, ready for a page."""

    text: str
    kind: Literal["null", "empty", "text", "binary"]
    size_bytes: int
    is_cut: bool = False


def visible(text: str) -> str:
    """The text with escapes for whatever would not be seen, or would move what stands around it."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character in "\n\t" or (character.isprintable() and unicodedata.category(character) != "Cf"):
        return character
    if character == " " or unicodedata.category(character) == "Zs":
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was no UTF-8, as Python keeps it
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def show(data: bytes | None, most: int = LIST_CHARS, *, one_line: bool = False) -> Shown:
    """Bytes as text where they are UTF-8, else with escapes; at most so many bytes of them."""
    if data is None:
        return Shown("null", "null", 0)
    if not data:
        return Shown("empty", "empty", 0)
    is_cut = len(data) > most
    part = _cut(data, most) if is_cut else data
    try:
        text, kind = part.decode(), "text"
    except UnicodeDecodeError:
        text, kind = part.decode(errors="backslashreplace"), "binary"
    text = visible(text)
    if one_line:
        text = text.replace("\n", "\\n").replace("\t", "\\t")
    return Shown(text, kind, len(data), is_cut)  # type: ignore[arg-type]


def _cut(data: bytes, most: int) -> bytes:
    """The front of it, not in the middle of a character."""
    part = data[:most]
    for back in range(1, 4):
        if len(part) >= back and part[-back] >= 0xC0:
            try:
                part[-back:].decode()
            except UnicodeDecodeError:
                return part[:-back]
            return part
    return part


def as_json(data: bytes | None) -> str | None:
    """It again, indented; None for what is no JSON, or too large to be worth it."""
    if not data or len(data) > _JSON_BYTES:
        return None
    try:
        return msgspec.json.format(data, indent=2).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def views(data: bytes | None) -> list[View]:
    """How it may be looked at, the best first."""
    if not data:
        return []
    found: list[View] = ["text", "hex"] if show(data, FULL_BYTES).kind == "text" else ["hex", "text"]
    # A number or a single word is JSON, too, and nobody wants to see that.
    if data.lstrip()[:1] in (b"{", b"[") and as_json(data) is not None:
        found.insert(0, "json")
    return found


def show_as(data: bytes, view: View) -> Shown:
    """All of it, or so much as a page takes."""
    if view == "hex":
        return Shown(hex_dump(data[:HEX_BYTES]), "binary", len(data), len(data) > HEX_BYTES)
    text = as_json(data) if view == "json" else None
    if text is not None:
        return Shown(visible(text[:FULL_BYTES]), "text", len(data), len(text) > FULL_BYTES)
    return show(data, FULL_BYTES)


def hex_dump(data: bytes) -> str:
    """16 bytes a line, as `hexdump -C` has them."""
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        left, right = part[:8].hex(" "), part[8:].hex(" ")
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:08x}  {left:<23}  {right:<23}  |{text}|")
    return "\n".join(lines)


def key_bytes(text: str) -> bytes:
    """The key that somebody types: a text, or bytes as ``0x00ff``."""
    if text[:2] in ("0x", "0X") and len(text) % 2 == 0:
        try:
            return bytes.fromhex(text[2:])
        except ValueError:
            pass
    return text.encode(errors="surrogateescape")


# ------------------------------------------------------------ numbers, times, command lines


def utc(timestamp_ms: int) -> str:
    """ISO 8601, for the ``datetime`` of an element; empty for none."""
    try:
        return (
            datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        )
    except (ValueError, OverflowError, OSError):
        return ""


def seconds(amount: float) -> str:
    """`0.4 s`, `12 s`, `3 min`, `2.5 h`."""
    if amount < 10:
        return f"{amount:.1f} s"
    if amount < 120:
        return f"{amount:.0f} s"
    return f"{amount / 60:.0f} min" if amount < 7200 else f"{amount / 3600:.1f} h"


def rate(amount: float | None) -> str:
    """Records a second; a dash while nobody knows."""
    if amount is None:
        return "–"  # noqa: RUF001
    return f"{amount:,.1f}" if 0 < amount < 10 else f"{amount:,.0f}"


def command(*words: object) -> str:
    """A line for the shell."""
    return " ".join(shlex.quote(visible(str(word))) for word in ("segmentlog", *words))


def to_script(value: object) -> str:
    """JSON for an element's attribute or an event."""
    return json.dumps(value, separators=(",", ":"))
