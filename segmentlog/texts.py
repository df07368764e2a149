"""Make texts of other programs safe to print on a page or a terminal."""

from __future__ import annotations

import unicodedata


def visible(text: str) -> str:
    """Return the text with escapes for control characters and for characters that are invisible or reorder it."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible_character, text))


def in_line(text: str) -> str:
    """Return the text as `visible` does, and also escape line breaks and tabs."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _visible_character(character: str) -> str:
    if character in "\n\t" or (character.isprintable() and unicodedata.category(character) != "Cf"):
        return character
    if character == " " or unicodedata.category(character) == "Zs":
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8, as Python represents it
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
