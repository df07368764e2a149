"""What the documentation says: tests that it calls upon exist, its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import segmentlog

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tests_that_a_page_names_are_there(page: Path) -> None:
    """Files and folders by path, functions by name."""
    text = page.read_text()
    for path in set(re.findall(r"`(tests/[\w/.]*)`", text)):
        assert (ROOT / path).exists(), path
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert f"def {name}(" in sources, name


@pytest.mark.parametrize("name", ["delivery.md", "retention.md", "table.md"])
def test_the_examples_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as somebody types them who reads the page."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / name).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), names)


def test_the_reference_has_every_public_name() -> None:
    """What the package exports, each once; `make docs` puts its docstring there."""
    named = re.findall(
        r"^\.\. auto\w+:: (?:segmentlog\.[\w.]+\.)?(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE
    )
    assert len(named) == len(set(named))
    assert set(segmentlog.__all__) <= set(named)
