"""Random tests take a fixed seed, those that found something, and a fresh one; or the one that was asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import seeds

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset SEGMENTLOG_SEED, and make the fresh seed 5000."""
    monkeypatch.delenv("SEGMENTLOG_SEED", raising=False)
    monkeypatch.setenv("SEGMENTLOG_FRESH_SEED", "5000")
    monkeypatch.setitem(seeds.FOUND, "test", (12, 7))  # type: ignore[misc]


def test_every_run_has_old_seeds_and_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget is shared among them; in an endless series those that found something come first."""
    assert seeds.every_seed("test") == [1, 12, 7, 5000]
    assert seeds.every_seed("another", range(3)) == [0, 1, 2, 5000]
    assert [one.id for one in seeds.seeds("test")] == ["1", "12", "7", "fresh"]
    assert (seeds.share(200, "test"), seeds.share(3, "test")) == (50, 1)
    assert list(islice(seeds.endless("test"), 6)) == [12, 7, 1, 5000, 2, 5001]
    always, more = seeds.jobs("test", "ab", (1, 3))
    assert always == [(12, "a", 1), (7, "a", 3), (1, "a", 1), (5000, "b", 3)]
    assert list(islice(more, 4)) == [(1, "a", 3), (5000, "b", 1), (1, "b", 1), (5000, "a", 3)]
    monkeypatch.setenv("SEGMENTLOG_FRESH_SEED", "5003")
    always, _ = seeds.jobs("test", "ab", (1, 3))
    assert always == [(12, "b", 3), (7, "a", 1), (1, "a", 1), (5003, "b", 3)]


def test_a_seed_that_is_asked_for_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEGMENTLOG_SEED repeats the failed run, and no other."""
    monkeypatch.setenv("SEGMENTLOG_SEED", "42")
    assert seeds.every_seed("test") == [42]
    assert seeds.fresh_seed() == 42
    assert seeds.share(200, "test") == 200
    always, more = seeds.jobs("test", "ab")
    assert (always, list(more)) == ([(42, "a"), (42, "b")], [])


FAILING = """
import pytest
from hypothesis import given, settings, strategies as st
from seeds import seeds

@pytest.mark.parametrize("seed", seeds("kills"))
def test_luck(seed):
    assert seed == 1

@settings(max_examples=5)
@given(st.integers())
def test_examples(number):
    print("tried", number)
    assert number < 2**200
"""


@pytest.mark.long
def test_a_failure_names_its_seed(tmp_path: Path) -> None:
    """This also holds in CI and with many processes; Hypothesis gets the fresh seed, so its examples vary."""

    def run(*options: str, **environment: str) -> str:
        (tmp_path / "test_failing.py").write_text(FAILING)
        (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SEGMENTLOG", "PYTEST"))}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rP", "--rootdir", str(tmp_path), "-c",
             # In the shared folder it would first delete the files of earlier runs, which takes minutes.
             os.devnull, "--basetemp", str(tmp_path / "temporary"), "-o", f"pythonpath={ROOT / 'tests'}",
             *options, str(tmp_path)],
            capture_output=True, text=True, check=False, cwd=tmp_path,
            env={**inherited, "CI": "true", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **environment},
        )  # fmt: skip
        return done.stdout + done.stderr

    said = run("-n", "2")
    (told,) = set(re.findall(r"random tests: fixed seeds, and (\d+)", said))
    assert f"SEGMENTLOG_SEED={told} pytest test_failing.py::test_luck" in said, said
    assert "test_luck[fresh]" in said
    tried = [re.findall(r"tried (-?\d+)", one) for one in (said, *(run(SEGMENTLOG_SEED="3") for _ in range(2)))]
    assert tried[0] != tried[1] == tried[2]
