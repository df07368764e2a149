"""Every test that the documentation calls upon exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tests_that_a_page_names_are_there(page: Path) -> None:
    """Files and folders by path, functions by name."""
    text = page.read_text()
    for path in set(re.findall(r"`(tests/[\w/.]*)`", text)):
        assert (ROOT / path).exists(), path
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert f"def {name}(" in sources, name
