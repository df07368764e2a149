"""The documentation is true: the tests that it refers to exist, and its examples run."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import click
import pytest

import segmentlog
from segmentlog import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PARTS = ["Start", "Guides", "Operate", "Reference", "Internals"]
EXAMPLES = [
    "concepts.md",
    "delivery.md",
    "first-steps-python.md",
    "monitoring.md",
    "retention.md",
    "schemas.md",
    "service.md",
    "table.md",
]
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@of_each_page
def test_the_tests_that_a_page_names_are_there(page: Path) -> None:
    """Files and folders are named by path, and functions by name."""
    text = page.read_text()
    for path in set(re.findall(r"`(tests/[\w/.]*)`", text)):
        assert (ROOT / path).exists(), path
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert f"def {name}(" in sources, name


@of_each_page
def test_what_a_page_links_to_is_there(page: Path) -> None:
    """Links are relative to the page."""
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


def anchors(page: str) -> set[str]:
    """Return the anchors of the headings of a page by GitHub's rule, and those of `<a id="...">`.

    The text in lower case, without punctuation, with a hyphen for each space. A repeated heading gets -1, -2...
    """
    page = re.sub(r"^ *(```+|~~~+).*?^ *\1 *$", "", page, flags=re.MULTILINE | re.DOTALL)
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', page))
    seen = Counter[str]()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", page, re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        anchor = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


@of_each_page
def test_each_anchor_that_a_page_links_to_is_a_heading(page: Path) -> None:
    """Check that a link with a # leads to a heading of its page, as GitHub and the site find it."""
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        target = page.parent / path if path else page
        assert anchor in anchors(target.read_text()), f"{path}#{anchor}"


def test_an_anchor_follows_from_its_heading() -> None:
    """Check the rule: punctuation is removed, repeated headings are numbered, code blocks have no headings."""
    page = "# A `b.c`, and *more*\n\n## Twice\n\n## Twice\n\n```sh\n# a comment\n```\n\n## [Link](x.md) - end_it\n"
    assert anchors(page) == {"a-bc-and-more", "twice", "twice-1", "link---end_it"}


@of_each_page
def test_the_commands_of_a_page_are_understood(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands, options and what they take; in each block of what is typed into a shell."""
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"^ *```(?:sh|console)\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for typed in re.findall(r"(?:^|[|;&$] *)(?:\$ )?segmentlog ([^|<>&;#]*)", line):
                words = shlex.split(typed)
                for word in words:
                    if re.fullmatch(r"[\w-]+\.\w+", word):
                        Path(word).touch()
                _parse(words)


def _parse(words: list[str]) -> None:
    """Parse a command line and do not run it. Raises `click.UsageError`."""
    command: click.Command = cli.cli
    context = command.make_context("segmentlog", words)
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None, name
        command, context = found, found.make_context(name, words, parent=context)


def test_the_manual_lists_each_page_once() -> None:
    """Check that `docs/README.md` has every page in one of five parts, and that the site has the same order."""
    manual = (ROOT / "docs" / "README.md").read_text()
    parts = re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", manual, re.MULTILINE)
    assert [name for name, _ in parts] == PARTS
    listed = {name: re.findall(r"^\| \[.*?\]\((.*?)\)", text, re.MULTILINE) for name, text in parts}
    pages = [page for part in listed.values() for page in part]
    assert sorted(page for page in pages if page.count("/") == 0) == sorted(
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"
    )
    site = re.findall(r":caption: (.*)\n(?::.*\n)*\n((?:[^`\n].*\n)*)", (ROOT / "index.md").read_text())
    assert [name for name, _ in site] == PARTS
    for name, text in site:
        shown = [line for line in text.split() if "*" not in line and line != "docs/README"]
        assert shown == [(Path("docs") / page).as_posix().replace("docs/../", "")[:-3] for page in listed[name]], name


@of_each_page
def test_a_page_of_the_manual_begins_with_its_readers(page: Path) -> None:
    """Check the promise of docs/README.md and docs/style.md: the first two lines say for whom the page is."""
    if page.parent.name != "docs" or page.name == "README.md":
        pytest.skip("not a page of the manual")
    lines = [line for line in page.read_text().splitlines()[1:] if line][:2]
    assert re.match(r"(This page is )?for [\w(]", lines[0], re.IGNORECASE), lines[0]


def test_the_readme_and_the_architecture_lead_to_the_same_files() -> None:
    """Check that each path in the README's table of changes is in the table that it links to."""
    readme = (ROOT / "README.md").read_text().partition("| to change |")[2].partition("\n\n")[0]
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Changes, and where they are made\n")[2]
    paths = re.findall(r"`([\w/]+(?:\.py|/))`", readme.partition("\n")[2])
    assert len(paths) >= 10
    for path in paths:
        assert f"`{path}" in table, path


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of a page run in their order, as a reader types them."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / name).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), names)


def test_the_reference_has_every_public_name() -> None:
    """Check that each name that the package exports has one section: exceptions in errors.md, other names in api.md."""
    named = [
        name
        for page in ("api.md", "errors.md")
        for name in re.findall(r"^### (?:segmentlog\.)?(\w+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    ]
    assert len(named) == len(set(named))
    assert set(segmentlog.__all__) <= set(named)
