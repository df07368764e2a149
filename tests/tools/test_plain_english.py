"""The check of plain English: what it reads, which rules a sentence breaks, and that limits only go down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import plain_english
from tools.plain_english import ENGLISH, Limits, broken_rules, problems, read, read_limits, tightened, write_limits


@pytest.mark.parametrize(
    ("sentence", "rules"),
    [
        ("Recovery reports each lost range with its offsets and the reason.", []),
        ("What was lost is reported.", ["W01"]),
        ("What was lost?", []),
        ("Of one partition.", ["W02"]),
        ("A segment is read by who asks for it.", ["W03"]),
        ("The offset is told.", ["W04"]),
        ("The writer is told to stop.", []),
        ("The object lies there.", ["W05"]),
        ("The index is created anew.", ["W06"]),
        ("The path is no folder.", ["W07"]),
        ("The path is no longer a folder.", []),
        ("Put so many bytes a second.", ["W08"]),
        ("Put so many bytes that the bucket is full.", []),
        ("The consumer goes on.", ["W09"]),
        ("The segment goes.", ["W09"]),
        ("The segment goes to the bucket.", []),
        ("Nobody waits.", ["W10"]),
        ("No process never waits.", ["W11"]),
        ("The records behind the offset.", ["W12"]),
        ("The server behind the proxy.", []),
        (" ".join(["word"] * 31), ["W13"]),
        (" ".join(["word"] * 29) + " `two words`", []),
    ],
)
def test_a_sentence_breaks_the_rules_it_should(sentence: str, rules: list[str]) -> None:
    """Each rule finds its fault, and accepts a plain sentence that is similar."""
    assert [rule.number for rule in broken_rules(sentence)] == rules


def found_in(path: Path, source: str) -> list[tuple[int, str, str]]:
    """Return the line, rule and sentence of each finding in a file with this source."""
    path.write_text(source)
    return [(finding.line, finding.rule.number, finding.sentence) for finding in read(path).findings]


def test_python_is_read_where_a_person_reads_it(tmp_path: Path) -> None:
    """Docstrings, comments, messages of exceptions, loggers and warnings, and help; each finding with its line."""
    source = '''"""Of a module.

What is read.
"""

import logging

SIZE = 1
"""Of an attribute."""
PLAIN = "Of a string that is no message."


# The first line of a comment
# is created anew.
# type: ignore[anew]
class FetchError(Exception):
    def __init__(self, offset):
        super().__init__(f"the offset {offset} is told")


@option("--size", help="Of an option.")
def read(path, logger):
    """Read.

    >>> read("Nobody")
    """
    logger.warning("nobody reads %s", path)
    future.set_exception(ValueError("who: " + path + " is told"))
    if path:
        raise FetchError("Whoever reads " f"{path}" if path else "made of it") from None
    raise OSError("made of it: {}".format(path))
'''
    assert found_in(tmp_path / "module.py", source) == [
        (1, "W02", "Of a module."),
        (3, "W01", "What is read."),
        (9, "W02", "Of an attribute."),
        (13, "W06", "The first line of a comment is created anew."),
        (18, "W04", "the offset x is told"),
        (21, "W02", "Of an option."),
        (27, "W10", "nobody reads %s"),
        (28, "W04", "who: x is told"),
        (30, "W01", "Whoever reads x"),
        (30, "W10", "Whoever reads x"),
        (30, "W06", "made of it"),
        (31, "W06", "made of it: {}"),
    ]


def test_markdown_is_read_without_its_code(tmp_path: Path) -> None:
    """The check reads paragraphs, list items and cells of tables. It skips headings and code blocks."""
    source = """# What it is

The index is created
anew. It [lies there](page.md).

- Of an item
  of two lines
```sh
# What is code
```
| Of a cell | the index |
|---|---|
"""
    assert found_in(tmp_path / "page.md", source) == [
        (3, "W06", "The index is created anew."),
        (3, "W05", "It lies there."),
        (6, "W02", "Of an item of two lines"),
        (11, "W02", "Of a cell"),
    ]


def test_of_the_changelog_only_the_top_section_is_read(tmp_path: Path) -> None:
    """Entries of releases stay as they are."""
    source = "# Changelog\n\n## [Unreleased]\n\nOf today.\n\n## [0.1.0]\n\nOf old.\n"
    assert [sentence for _, _, sentence in found_in(tmp_path / "CHANGELOG.md", source)] == ["Of today."]


def test_limits_only_go_down(tmp_path: Path) -> None:
    """The check refuses a figure above its limit, and a limit that is not needed. --tighten only lowers limits."""
    path = tmp_path / "limits.cfg"
    write_limits(path, {"log": 20.0, "http": 12.0, "aio": 3.5, "gone": 1.0})
    limits = read_limits(path)
    figures: Limits = {"log": 18.91, "http": 12.01, "aio": 2.5, "new": 0.04}
    messages = list(problems(figures, limits, path))
    assert [message.split(". ")[0] for message in messages] == [
        f"gone: 0 {ENGLISH}, limit 1",
        f"http: 12.1 {ENGLISH}, limit 12",
        f"new: 0.1 {ENGLISH}, limit 0",
    ]
    assert "--tighten" in messages[0]
    assert "python tools/plain_english.py segmentlog/http" in messages[1]
    assert f"rename its line in {path}" in messages[2]
    write_limits(path, tightened(limits, figures))
    assert read_limits(path) == {"log": 19, "http": 12, "aio": 2.5}


def test_a_limit_far_above_the_figure_is_refused(tmp_path: Path) -> None:
    """A limit may be up to 1.0 findings per 1,000 words above the figure."""
    messages = list(problems({"log": 18.9, "http": 11.0}, {"log": 20.0, "http": 12.0}, tmp_path))
    assert [message.split(". ")[0] for message in messages] == [f"log: 18.9 {ENGLISH}, limit 20"]


@pytest.mark.parametrize(
    ("text", "why"), [(f"[{ENGLISH}]\nlog = many\n", "many"), ("[D401]\nlog = 1\n", "No section"), ("log\n", "header")]
)
def test_a_file_without_limits_is_refused(tmp_path: Path, text: str, why: str) -> None:
    """The message names the file and the fault."""
    path = tmp_path / "limits.cfg"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"limits\.cfg is not a limits file: (.|\n)*{why}"):
        read_limits(path)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("module.py", "def\n", "module.py must be Markdown (.md) or valid Python: invalid syntax"),
        ("page.rst", "A page of text.\n", "page.rst must be Markdown (.md) or valid Python: invalid syntax"),
        ("page.md", None, "No such file or directory"),
    ],
)
def test_the_command_names_a_file_that_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, source: str | None, message: str
) -> None:
    """The exit code is 2, so that a broken file is not taken for findings."""
    if source is not None:
        (tmp_path / name).write_text(source)
    assert plain_english.main([str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_the_command_lists_counts_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1 where something is to be done; --tighten changes the file once."""
    page, limits = tmp_path / "docs" / "page.md", tmp_path / "limits.cfg"
    page.parent.mkdir()
    page.write_text("Nobody reads this page.\n")
    limits.write_text(f"[{ENGLISH}]\nREADME+docs = 900\n")
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, list[str]]:
        return plain_english.main([*arguments]), capsys.readouterr().out.splitlines()

    assert run() == (1, ["docs/page.md:1: W10 Nobody reads this page."])
    assert run("docs") == run()
    code, lines = run("--count", "docs")
    assert code == 0
    assert lines[-2:] == ["     1  findings", f" 250.0  {ENGLISH}: README+docs"]
    assert run("--limits", "limits.cfg")[0] == 1
    assert run("--limits", "limits.cfg", "--tighten") == (0, [])
    assert read_limits(limits) == {"README+docs": 250}
    assert run("--limits", "limits.cfg")[0] == 0
    page.write_text("Nobody reads.\n")
    assert run("--limits", "limits.cfg", "--tighten") == (0, [])
    assert read_limits(limits) == {"README+docs": 250}
