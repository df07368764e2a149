"""Ctrl-C while the modules of a command load ends the process without output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.processes import WAIT_S, unmeasured

import segmentlog

POINTS = int(os.environ.get("SEGMENTLOG_LOADING_POINTS", "6"))
"""The signal comes at this many imports of each command, evenly spread, and at the first and last ones."""

# Raises the signal when Python looks for the n-th of our program's imports.
DRIVER = """
import runpy, signal, sys
number, at = int(sys.argv[1]), int(sys.argv[2])
sys.argv[1:] = sys.argv[3:]

class Finder:
    count, began, last = 0, False, ""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        cls.began = cls.began or name == "segmentlog.cli"
        if cls.began:
            if cls.count == at:
                signal.raise_signal(number)
            cls.count += 1
            if name == "segmentlog.store" or name.startswith("numpy"):
                cls.last = cls.count

sys.meta_path.insert(0, Finder)
try:
    runpy.run_module("segmentlog", run_name="__main__", alter_sys=True)
finally:
    print(f"imports: {Finder.last or Finder.count} {Finder.count}", file=sys.stderr)
"""


def run(store: Path, number: int, at: int, *command: str) -> tuple[int, str]:
    """(exit status, stderr) of a command that gets a signal at an import."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(number), str(at), "--dir", str(store), *command],
        env=unmeasured(), capture_output=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize("command", [("--help",), ("consume", "t"), ("produce", "t", "/dev/null"), ("topics",)])
def test_a_signal_while_modules_load_says_nothing(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Whichever module it is: no traceback, and the status that a shell gives to a process that the signal ended."""
    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("t")
    status, err = run(tmp_path / "store", signal.SIGINT, -1, *command)
    assert status == 0, err
    loading, everything = map(int, err.rpartition("imports: ")[2].split())
    assert everything > 20
    points = {1, 2, 3, loading - 1, *range(0, loading, max(loading // POINTS, 1))}
    for at in sorted(points):
        status, err = run(tmp_path / "store", signal.SIGINT, at, *command)
        assert "Traceback" not in err, (at, err)
        assert (status, err) == (128 + signal.SIGINT, ""), at
    for at in range(loading, everything, max((everything - loading) // 3, 1)):
        status, err = run(tmp_path / "store", signal.SIGINT, at, *command)
        assert "Traceback" not in err, (at, err)
        assert status in (0, 1, 128 + signal.SIGINT), "at work: it finishes what it has in hand, or is stopped"


def test_a_background_job_loads_on(tmp_path: Path) -> None:
    """A signal that a process was started to ignore stays ignored while modules load, too."""
    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("t")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(int(signal.SIGINT)), "3", "--dir", str(tmp_path / "store"), "topics"],
        env=unmeasured(), capture_output=True, timeout=WAIT_S, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_command_starts_as_the_module_does() -> None:
    """The console script has the same entry, so that it is as quiet."""
    text = (Path(__file__).parents[2] / "setup.cfg").read_text()
    assert "segmentlog = segmentlog.__main__:main" in text
