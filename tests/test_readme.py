"""README.md says what is so: its snippets run, its tour works, its tables and links are in step."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from segmentlog import cli
from segmentlog.config import _KINDS, TopicConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]

FOLLOWS = re.compile(r"\s(-f|--follow)\b")


def blocks(language: str) -> list[tuple[int, str]]:
    """(line in the page, text) of each fenced block of a language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [(README[: one.start()].count("\n") + 2, one[1]) for one in found]


def console_lines() -> list[str]:
    """What the tour has behind its prompts, in order."""
    lines = [line[2:] for _, text in blocks("console") for line in text.splitlines() if line.startswith("$ ")]
    assert len(lines) >= 6
    return lines


def is_written(line: str) -> bool:
    """Whether the module of the segmentlog command in this line is there."""
    words = shlex.split(line.split("<")[0].rpartition("|")[2])
    home = cli._COMMANDS[words[words.index("segmentlog") + 1]][0]
    return importlib.util.find_spec(home.partition(":")[0]) is not None


def test_python_snippets_run_in_order(tmp_path, monkeypatch, capsys):
    """Who pastes the snippets into one session, top to bottom, sees no error."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    snippets = blocks("python")
    assert len(snippets) >= 8
    for line, text in snippets:
        code = compile("\n" * (line - 1) + text, str(ROOT / "README.md"), "exec")
        exec(code, names)
    printed = capsys.readouterr().out
    assert "base_offset=900, end_offset=1001, epoch=1" in printed


@pytest.mark.long
def test_console_tour_works(tmp_path):
    """Each line of the tour succeeds after those before it, and the followed topic shows what was appended."""
    missing = [line for line in console_lines() if not is_written(line)]
    assert not missing, "no such commands"
    words = tmp_path / "words"
    words.write_text("".join(f"word{number}\n" for number in range(10_000)))
    shim = tmp_path / "bin" / "segmentlog"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m segmentlog "$@"\n')
    shim.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SEGMENTLOG")}
    environment |= {"PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    followers: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for line in console_lines():
            command = line.replace("/usr/share/dict/words", shlex.quote(str(words)))
            if FOLLOWS.search(command):
                output = tmp_path / f"follower{len(followers)}"
                with output.open("wb") as file:
                    process = subprocess.Popen(shlex.split(command), cwd=tmp_path, env=environment, stdout=file)
                followers.append((process, output))
                wait_for(output, b"word9999")
                continue
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert followers
        for process, output in followers:
            wait_for(output, b"hello")
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=10) == 0
    finally:
        for process, _ in followers:
            process.kill()
            process.wait()


def wait_for(file: Path, text: bytes) -> None:
    """Until the text is in the file."""
    deadline = time.monotonic() + 20
    while text not in file.read_bytes():
        assert time.monotonic() < deadline, f"{text!r} did not come; there is {file.read_bytes()[-500:]!r}"
        time.sleep(0.02)


def config_table() -> str:
    """The table of the topic config as the code has it."""
    lines = ["| key | default | takes | meaning |", "|---|---|---|---|"]
    for key, value, _, meaning in TopicConfig().describe():
        takes = _KINDS[key.replace(".", "_")].accepted.replace("|", "\\|").replace("<n>", "*n*")
        lines.append(f"| `{key}` | `{value}` | {takes} | {meaning} |")
    return "\n".join(lines)


def test_config_table_is_what_the_code_says():
    """Every key with its default, what it takes and what it means. To mend it: ``python tests/test_readme.py``."""
    _, _, rest = README.partition("<!-- config:begin -->\n")
    table, found, _ = rest.partition("\n<!-- config:end -->")
    assert found
    assert table == config_table()


def test_every_file_that_a_page_names_is_there():
    """Links and paths of files lead somewhere: in the page's own terms, in the package, or from the root."""
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page):
            assert (ROOT / link).exists() or (ROOT / "docs" / link).exists(), link
        for path in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|md))`", page):
            homes = (ROOT, ROOT / "segmentlog", ROOT / "docs")
            assert any((home / path).exists() for home in homes), path


if __name__ == "__main__":
    head, _, rest = README.partition("<!-- config:begin -->\n")
    _, _, tail = rest.partition("<!-- config:end -->")
    (ROOT / "README.md").write_text(f"{head}<!-- config:begin -->\n{config_table()}\n<!-- config:end -->{tail}")
