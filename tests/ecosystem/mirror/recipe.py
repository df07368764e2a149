"""The steps of a page of docs/ecosystem: its files and commands, with the addresses of a test."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_PAGES = Path(__file__).parents[3] / "docs" / "ecosystem"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Recipe:
    """A part of a page, by its heading, with other addresses: ``{"localhost:9092": served.address, ...}``."""

    def __init__(self, page: str, heading: str, addresses: dict[str, str]) -> None:
        text = (_PAGES / page).read_text()
        parts = [part for part in text.split("\n## ") if part.startswith(heading)]
        assert len(parts) == 1, f"{page} has {len(parts)} parts «{heading}»"
        self._addresses = addresses
        self._blocks = _BLOCK.findall(parts[0])

    def files(self) -> list[str]:
        """Return the page's files of settings."""
        return [self._here(text) for language, text in self._blocks if language == "properties"]

    def commands(self) -> list[list[str]]:
        """Return the page's commands: script, words."""
        lines = [line for language, text in self._blocks if language == "sh" for line in text.splitlines()]
        found = [shlex.split(self._here(line).removesuffix("> /dev/null")) for line in lines]
        return [[Path(script).name, *words] for script, *words in found]

    def _here(self, text: str) -> str:
        pattern = "|".join(map(re.escape, self._addresses))
        return re.sub(pattern, lambda found: self._addresses[found[0]], text)
