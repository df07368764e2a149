"""Bytes and names as people can read them, with nothing in them that a page or a terminal would take for more.

What a browser would not show, or would show elsewhere than where it stands, is written as an escape: control
characters, marks that turn the direction of writing, bytes that are no UTF-8. Markup is the templates' matter: they
escape everything.
"""

from __future__ import annotations

import json
import re
import shlex
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from segmentlog.texts import in_line, visible

LIST_CHARS: Final = 240
"""Of a value in a table."""
FULL_BYTES: Final = 128 << 10
"""Of a value that is shown by itself."""
HEX_BYTES: Final = 16 << 10
"""Of one that is shown in hexadecimal: four times as long on the page."""
_JSON_BYTES: Final = 4 << 20
"""A larger value is not parsed to be shown."""
_INDENTED_BYTES: Final = 8 << 20
"""What would be longer than that with its lines indented is shown as it is: depth multiplies it."""
_TEXTS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""Texts of JSON, in one go: what is not closed goes to the end."""

View = Literal["text", "json", "hex"]


class Shown(NamedTuple):
    """Bytes, ready for a page."""

    text: str
    kind: Literal["null", "empty", "text", "binary"]
    size_bytes: int
    is_cut: bool = False


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
    text = in_line(text) if one_line else visible(text)
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


def indented(data: bytes) -> str | None:
    """JSON once more, on lines; None for what is no JSON, or would become too long."""
    if len(data) > _JSON_BYTES or _indented_bytes(data) > _INDENTED_BYTES:
        return None
    try:
        return msgspec.json.format(data, indent=2).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _indented_bytes(data: bytes) -> int:
    """So many it has when it is indented: each bracket, and each comma, begins a line, and a line has two spaces for
    each bracket that is open. Those in texts do not count, or a text could hide what comes behind it."""
    marks = np.frombuffer(_TEXTS.sub(b"", data), np.uint8)
    opens, closes = (marks == ord("{")) | (marks == ord("[")), (marks == ord("}")) | (marks == ord("]"))
    depth = np.cumsum(opens, dtype=np.int64) - np.cumsum(closes, dtype=np.int64)
    lines = opens | closes | (marks == ord(","))
    return len(data) + int(np.sum(2 * np.maximum(depth[lines], 0) + 2))


class Looks(NamedTuple):
    """How bytes may be looked at, the best first, and what was made of them to find that out."""

    views: list[View]
    json: str | None = None


def look_at(data: bytes | None) -> Looks:
    """What there is to be shown of a value."""
    if not data:
        return Looks([])
    found: list[View] = ["text", "hex"] if show(data, FULL_BYTES).kind == "text" else ["hex", "text"]
    # A number or a single word is JSON, too, and nobody wants to see that.
    text = indented(data) if data.lstrip()[:1] in (b"{", b"[") else None
    return Looks(found if text is None else ["json", *found], text)


def show_as(data: bytes, view: View, looks: Looks) -> Shown:
    """All of it, or so much as a page takes."""
    if view == "hex":
        return Shown(hex_dump(data[:HEX_BYTES]), "binary", len(data), len(data) > HEX_BYTES)
    text = looks.json if view == "json" else None
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
