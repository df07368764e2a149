"""Renders bytes and names as text that is safe to show in a page or a terminal.

Characters that are invisible or change the layout are escaped: control characters, marks that change the writing
direction, and bytes that are not UTF-8. The templates escape markup.
"""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from segmentlog.quantities import format_size
from segmentlog.texts import in_line, visible

LIST_CHARS: Final = 240
"""Maximum bytes of a value in a table."""
FULL_BYTES: Final = 128 << 10
"""Maximum bytes of a value on its own page."""
HEX_BYTES: Final = 16 << 10
"""Maximum bytes of a value in hexadecimal, which is four times as long on the page."""
_JSON_BYTES: Final = 4 << 20
"""Larger values are not parsed as JSON."""
_INDENTED_BYTES: Final = 8 << 20
"""JSON that would be longer than this when indented is shown without indentation: nesting multiplies its length."""
_TEXTS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string; an unclosed one extends to the end."""

View = Literal["text", "json", "hex"]


class RenderedBytes(NamedTuple):
    """Bytes as text for a page."""

    text: str
    kind: Literal["null", "empty", "text", "binary"]
    size_bytes: int
    is_truncated: bool = False


def render_bytes(data: bytes | None, most: int = LIST_CHARS, *, one_line: bool = False) -> RenderedBytes:
    """Return at most ``most`` bytes as text; bytes that are not UTF-8 are escaped."""
    if data is None:
        return RenderedBytes("null", "null", 0)
    if not data:
        return RenderedBytes("empty", "empty", 0)
    is_truncated = len(data) > most
    part = _cut(data, most) if is_truncated else data
    try:
        text, kind = part.decode(), "text"
    except UnicodeDecodeError:
        text, kind = part.decode(errors="backslashreplace"), "binary"
    text = in_line(text) if one_line else visible(text)
    return RenderedBytes(text, kind, len(data), is_truncated)  # type: ignore[arg-type]


def _cut(data: bytes, most: int) -> bytes:
    """Return the first ``most`` bytes, or up to three fewer so that no character is split."""
    part = data[:most]
    for back in range(1, 4):
        if len(part) >= back and part[-back] >= 0xC0:
            try:
                part[-back:].decode()
            except UnicodeDecodeError:
                return part[:-back]
            return part
    return part


def format_json(data: bytes) -> str | None:
    """Return JSON on indented lines; None if the data is not JSON or would become too long."""
    if len(data) > _JSON_BYTES or _indented_bytes(data) > _INDENTED_BYTES:
        return None
    try:
        return msgspec.json.format(data, indent=2).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _indented_bytes(data: bytes) -> int:
    """Return how long JSON becomes when indented.

    Each bracket and each comma starts a line, and each open bracket indents a line by two spaces. Brackets in strings
    are not counted: a string could otherwise hide the brackets after it.
    """
    marks = np.frombuffer(_TEXTS.sub(b"", data), np.uint8)
    opens, closes = (marks == ord("{")) | (marks == ord("[")), (marks == ord("}")) | (marks == ord("]"))
    depth = np.cumsum(opens, dtype=np.int64) - np.cumsum(closes, dtype=np.int64)
    lines = opens | closes | (marks == ord(","))
    return len(data) + int(np.sum(2 * np.maximum(depth[lines], 0) + 2))


class ViewOptions(NamedTuple):
    """The views that a value can be shown in, best first, and the indented JSON if one of them is JSON."""

    views: list[View]
    json: str | None = None


def find_views(data: bytes | None) -> ViewOptions:
    """Return the views that a value can be shown in."""
    if not data:
        return ViewOptions([])
    found: list[View] = ["text", "hex"] if render_bytes(data, FULL_BYTES).kind == "text" else ["hex", "text"]
    # A number or a single word is JSON, too, but the JSON view would not improve it.
    text = format_json(data) if data.lstrip()[:1] in (b"{", b"[") else None
    return ViewOptions(found if text is None else ["json", *found], text)


def render_view(data: bytes, view: View, looks: ViewOptions) -> RenderedBytes:
    """Render a value in one view, shortened to what fits on a page."""
    if view == "hex":
        return RenderedBytes(hex_dump(data[:HEX_BYTES]), "binary", len(data), len(data) > HEX_BYTES)
    text = looks.json if view == "json" else None
    if text is not None:
        return RenderedBytes(visible(text[:FULL_BYTES]), "text", len(data), len(text) > FULL_BYTES)
    return render_bytes(data, FULL_BYTES)


def hex_dump(data: bytes) -> str:
    """Return 16 bytes a line, in the format of `hexdump -C`."""
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        left, right = part[:8].hex(" "), part[8:].hex(" ")
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:08x}  {left:<23}  {right:<23}  |{text}|")
    return "\n".join(lines)


# ------------------------------------------------------------ numbers, times, command lines


def utc(timestamp_ms: int) -> str:
    """Return a time in ISO 8601 for a ``datetime`` attribute; "" for a time that cannot be represented."""
    try:
        return (
            datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        )
    except (ValueError, OverflowError, OSError):
        return ""


def seconds(amount: float) -> str:
    """Format a duration: `0.4 s`, `12 s`, `3 min`, `2.5 h`."""
    if amount < 10:
        return f"{amount:.1f} s"
    if amount < 120:
        return f"{amount:.0f} s"
    return f"{amount / 60:.0f} min" if amount < 7200 else f"{amount / 3600:.1f} h"


def rate(amount: float | None) -> str:
    """Format a number of records per second; a dash while it is unknown."""
    if amount is None:
        return "–"  # noqa: RUF001
    return f"{amount:,.1f}" if 0 < amount < 10 else f"{amount:,.0f}"


def size(size_bytes: int) -> str:
    """Format a size with a space before its unit: `64 MiB`."""
    text = format_size(size_bytes)
    number = text.rstrip("BKMGTPi")
    return f"{number} {text[len(number) :]}".rstrip()


def count(amount: int, noun: str, plural: str | None = None) -> str:
    """Format a number with its noun: `1 record`, `2 records`."""
    return f"{amount:,} {noun if amount == 1 else plural or f'{noun}s'}"


def command(*words: object) -> str:
    """Return a command line for the shell."""
    return " ".join(shlex.quote(visible(str(word))) for word in ("segmentlog", *words))
