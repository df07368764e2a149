"""Comparing two revisions: each side imports its own library, and only more than the spread counts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bench import compare
from bench.compare import TREE, Compared, CompareFailed, Missing, Side, main, print_table
from bench.measure import RowResult

_ROW = "append lists, keyed, uncompressed"


def _worktrees_in(folder: Path) -> list[str]:
    """Return the repository's worktrees below a folder.

    Other processes may add and remove worktrees elsewhere meanwhile.
    """
    command = ["git", "-C", str(TREE), "worktree", "list", "--porcelain"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if line.startswith(f"worktree {folder.resolve()}/")]


@pytest.fixture
def checkout() -> None:
    """Skip the test in a tree that came as an archive, without a repository."""
    if not (TREE / ".git").exists():
        pytest.skip("not a checkout")


def _compared(base: tuple[float, ...], now: tuple[float, ...], *, more_is_better: bool = True) -> Compared:
    return Compared("a row", "records/s" if more_is_better else "us", more_is_better, base, now)


@pytest.mark.parametrize(
    ("base", "now", "of_rate", "of_time"),
    [
        ((1.0, 1.1, 0.9), (2.0, 2.1, 1.9), "faster", "slower"),
        ((2.0, 2.1, 1.9), (1.0, 1.1, 0.9), "slower", "faster"),
        ((1.0, 1.1, 0.9), (1.0, 1.2, 1.2), "same", "same"),
        ((1.0, 1.0), (2.0, 2.0), "too few rounds", "too few rounds"),
    ],
)
def test_a_difference_counts_when_the_sides_do_not_overlap(
    base: tuple[float, ...], now: tuple[float, ...], of_rate: str, of_time: str
) -> None:
    """A higher rate or a shorter time is faster; one overlapping round makes both sides the same."""
    assert _compared(base, now).verdict == of_rate
    assert _compared(base, now, more_is_better=False).verdict == of_time


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    """The two sides of a round are divided by each other, because they ran on the same machine."""
    row = _compared((1.0, 2.0, 4.0), (2.0, 2.0, 4.0))
    assert (row.ratios, row.ratio) == ([2.0, 1.0, 1.0], 1.0)


def test_the_table_tells_what_only_one_side_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of one revision alone stand below the table."""
    print_table([_compared((1e6,) * 3, (2e6,) * 3)], [Missing("an old row", "only in base")], "v1")
    text = capsys.readouterr().out
    assert "this tree against v1" in text
    assert "2.00" in text
    assert "faster" in text
    assert "not compared: an old row: only in base" in text


def test_another_library_than_the_sides_own_is_refused(tmp_path: Path) -> None:
    """A side imports the library of its tree, and says so if anything else comes first."""
    side = Side(tmp_path / "side", TREE, TREE)
    assert _ROW in side.rows()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "segmentlog").mkdir(parents=True)
    side._library = elsewhere / "segmentlog"
    with pytest.raises(CompareFailed, match="would be measured in place of"):
        side.rows()


@pytest.mark.usefixtures("checkout")
def test_a_revision_against_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEAD and this tree are measured in turn, each from its own folder; worktree and data are gone afterwards."""
    sides: list[str] = []
    measure = Side.measure

    def noted(side: Side, name: str, scale: float) -> RowResult:
        sides.append(side.folder.name)
        return measure(side, name, scale)

    monkeypatch.setattr(Side, "measure", noted)
    assert main(["HEAD", "--rounds", "2", "--only", _ROW, "--scale", "0.01", "--dir", str(tmp_path)]) == 0
    base = "base-with-our-bench"
    assert sides == [base, "now", "now", base]
    out = capsys.readouterr().out
    assert _ROW in out
    assert "too few rounds" in out
    assert os.listdir(tmp_path) == []
    assert _worktrees_in(tmp_path) == []


@pytest.mark.usefixtures("checkout")
def test_an_interruption_removes_the_worktree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle removes the worktree and its folder."""

    def interrupted(tree: Path, *rest: object) -> None:
        assert (tree / "segmentlog").is_dir()
        assert len(_worktrees_in(tmp_path)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "_run", interrupted)
    assert main(["HEAD", "--dir", str(tmp_path)]) == 130
    assert os.listdir(tmp_path) == []
    assert _worktrees_in(tmp_path) == []


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("revision", ["no-such-revision", "--help-me", "HEAD:setup.cfg"])
def test_an_unknown_revision_is_a_clear_error(
    revision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error has its name, and no worktree is created."""
    assert main(["--dir", str(tmp_path), "--", revision]) == 2
    assert f"error: '{revision}' is no revision of the repository" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
