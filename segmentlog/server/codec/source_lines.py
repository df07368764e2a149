"""Source text of a function: its lines, its local names, and the names of the precompiled structs that it uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_RESERVED: Final = frozenset(
    ("data", "at", "limit", "message", "version", "parts", "add", "out", "pack", "unpack_from", "end", "tag", "room")
)
_LETTERS: Final = {"16s": "u", "?": "t"}


def struct_name(verb: str, formats: list[str]) -> str:
    """Return the name of a precompiled struct's method: ``_unpack_ihq``."""
    return f"_{verb}_" + "".join(_LETTERS.get(one, one) for one in formats)


def format_of(name: str) -> str:
    """Return the format of a struct whose method has this name."""
    letters = {letter: one for one, letter in _LETTERS.items()}
    return ">" + "".join(letters.get(letter, letter) for letter in name.rpartition("_")[2])


class SourceLines:
    """The body of a function, written line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self._taken = set(_RESERVED)

    def emit(self, line: str) -> None:
        """Append a line."""
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Append ``head``, and indent the lines that are appended inside the block."""
        self.emit(head)
        self.depth += 1
        yield
        self.depth -= 1

    def name(self, wish: str) -> str:
        """Return a new local name: ``wish``, with a number after it if the function already uses ``wish``."""
        name, number = wish, 1
        while name in self._taken:
            number += 1
            name = f"{wish}_{number}"
        self._taken.add(name)
        return name


def one_of(name: str) -> str:
    """Return a name for a variable that contains one element of the array ``name``."""
    if re.search(r"(ies)$", name):
        return name[:-3] + "y"
    if name.endswith("s") and not name.endswith(("ss", "us")):
        return name[:-1]
    return f"one_of_{name}"
