"""The first steps in Python: a reader pastes each block at the prompt and sees what the page shows."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "first-steps-python.md").read_text()
WITHIN_S = 60.0
REACTION_S = 0.5
"""Time from a paste to Enter. A block must not depend on a shorter time."""


def pasted(page: str) -> Iterator[tuple[str, str]]:
    """Yield each Python block of a page, and the output in the text block after it ("" if there is none)."""
    for block in re.finditer(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", page, re.MULTILINE | re.DOTALL):
        yield block[1], block[2] or ""


class Prompt:
    """An interactive Python on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SEGMENTLOG", "PYTHON"))
        }
        # PYTHON_BASIC_REPL: releases from 3.13 on then read a paste line by line, as older releases do.
        environment |= {"PYTHONPATH": str(ROOT), "TERM": "dumb", "PYTHON_BASIC_REPL": "1", "PYTHONUNBUFFERED": "1"}
        self._terminal, theirs = pty.openpty()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-q", "-i"],
                cwd=folder,
                env=environment,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        self._count = 0

    def paste(self, block: str) -> str:
        """Paste a block, press Enter, and return what the terminal shows until the prompt accepts a statement."""
        self._count += 1
        os.write(self._terminal, block.encode())
        time.sleep(REACTION_S)
        os.write(self._terminal, f"\nprint('end', 'of', {self._count})\n".encode())
        end, shown, deadline = f"end of {self._count}\n", "", time.monotonic() + WITHIN_S
        while end not in shown:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"the prompt does not come back:\n{shown}"
            if select.select([self._terminal], [], [], left_s)[0]:
                shown += os.read(self._terminal, 65_536).decode().replace("\r\n", "\n")
        return shown

    def close(self) -> None:
        """End the interpreter."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._terminal)


@pytest.mark.long
def test_the_first_steps_in_python_can_be_pasted_at_the_prompt(tmp_path: Path) -> None:
    """Check that each block runs when it is pasted at the prompt, and prints the lines that the page shows."""
    blocks = list(pasted(PAGE))
    assert len(blocks) >= 9
    assert sum(bool(shown) for _, shown in blocks) >= 4
    prompt = Prompt(tmp_path)
    try:
        for block, expected in blocks:
            shown = prompt.paste(block)
            assert "Error" not in shown, shown
            printed = re.sub(r"^(>>> |\.\.\. )+", "", shown, flags=re.MULTILINE)
            assert expected in printed, shown
            if "orders are on disk" in block:
                assert re.search(r"^[45] orders are on disk$", printed, re.MULTILINE), shown
    finally:
        prompt.close()


@pytest.mark.long
def test_an_error_at_the_prompt_is_seen(tmp_path: Path) -> None:
    """Check that the test can fail: an empty line inside a loop ends the loop at the prompt."""
    prompt = Prompt(tmp_path)
    try:
        assert "Error" in prompt.paste("for number in range(3):\n    print(number)\n\n    print(number)\n")
        assert "7" in prompt.paste("print(3 + 4)\n")
    finally:
        prompt.close()
