"""The first steps in the shell: each command of the page prints what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

ROOT = Path(__file__).parents[1]
WITHIN_S = 60.0


def typed(page: str) -> Iterator[tuple[str, str]]:
    """Yield each command of the console blocks of a page, and the output that the page shows."""
    for block in re.findall(r"^```console\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            yield command, shown


def matches(shown: str, printed: str) -> bool:
    """Return whether an output is the one shown.

    `...` stands for anything; spaces at the ends of lines do not count.
    """
    pattern = ".*".join(re.escape(piece) for piece in re.sub(r"[ \n]*\.\.\.[ \n]*", "...", shown.rstrip()).split("..."))
    return re.fullmatch(pattern, re.sub(r" +$", "", printed, flags=re.MULTILINE).rstrip(), re.DOTALL) is not None


def test_dots_stand_for_anything_and_nothing_else_does() -> None:
    """Check that the comparison can fail."""
    assert matches("3 records, ...\n", "3 records, 36 bytes in 0.02 s\n")
    assert not matches("3 records, ...\n", "4 records, 36 bytes in 0.02 s\n")
    assert not matches("0 2 apples\n", "0 2 apples\n1 1 pear\n")
    assert matches("packing: Empty, ...\n\nTOPIC\n", "packing: Empty, 0 members\n\nTOPIC\n")


@pytest.mark.long
def test_the_first_steps_in_the_shell_print_what_the_page_shows(tmp_path: Path) -> None:
    """Check that each command succeeds and prints the lines below it, first stdout; the follower prints new records."""
    shim = tmp_path / "bin" / "segmentlog"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m segmentlog "$@"\n')
    shim.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SEGMENTLOG")}
    environment |= {"PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    environment["SEGMENTLOG_DIR"] = str(tmp_path / "shop")
    commands = list(typed("first-steps-shell.md"))
    assert len(commands) >= 15
    followed = tmp_path / "followed"
    follower: subprocess.Popen[bytes] | None = None
    try:
        for command, shown in commands:
            if " -f " in command:
                with followed.open("wb") as file:
                    follower = subprocess.Popen(shlex.split(command), cwd=tmp_path, env=environment, stdout=file)
                continue
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WITHIN_S
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            assert matches(shown, done.stdout + done.stderr), f"{command}\n{done.stdout}{done.stderr}"
        assert follower is not None
        wait_until(lambda: b"4 figs" in followed.read_bytes(), lambda: followed.read_bytes())
        follower.send_signal(signal.SIGINT)
        assert follower.wait(WITHIN_S) == 0
    finally:
        if follower is not None:
            follower.kill()
            follower.wait()
