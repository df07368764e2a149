"""README.md and docs/ say what is so: snippets run, the tour works, made pages and links are in step."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from segmentlog import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    README,
    (ROOT / "CONTRIBUTING.md").read_text(),
    *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))),
]
README_MAX_BYTES = 10_000

FOLLOWS = re.compile(r"\s(-f|--follow)\b")


def blocks(language: str, page: str = README) -> list[tuple[int, str]]:
    """(line in the page, text) of each fenced block of a language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [(page[: one.start()].count("\n") + 2, one[1]) for one in found]


def console_lines() -> list[str]:
    """Return the commands of the tour, in order."""
    lines = [line[2:] for _, text in blocks("console") for line in text.splitlines() if line.startswith("$ ")]
    assert len(lines) >= 6
    return lines


def is_written(line: str) -> bool:
    """Return whether the module of the segmentlog command in this line exists."""
    words = shlex.split(line.split("<")[0].rpartition("|")[2])
    home = cli._COMMANDS[words[words.index("segmentlog") + 1]][0]
    return importlib.util.find_spec(home.partition(":")[0]) is not None


@pytest.mark.parametrize(("page", "at_least"), [("README.md", 3), ("docs/python.md", 8)])
def test_python_snippets_run_in_order(page, at_least, tmp_path, monkeypatch, capsys):
    """A reader who pastes the snippets of a page into one session, top to bottom, sees no error."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    snippets = blocks("python", (ROOT / page).read_text())
    assert len(snippets) >= at_least
    for line, text in snippets:
        code = compile("\n" * (line - 1) + text, str(ROOT / page), "exec", dont_inherit=True)
        exec(code, names)
    printed = capsys.readouterr().out
    assert ("b'user-1' b'/home'" if page == "README.md" else "base_offset=900, end_offset=1001, epoch=1") in printed


def test_the_readme_is_short():
    """Newcomers read the whole README, so it stays short; details are in docs/."""
    assert len(README.encode()) <= README_MAX_BYTES


def check_server(command: str, folder: Path, environment: dict[str, str]) -> None:
    """Run the command on a free port: it must print that it listens, and end on SIGTERM."""
    told = folder / "server"
    with told.open("wb") as file:
        server = subprocess.Popen(
            [*shlex.split(command), "--listen", "127.0.0.1:0"], cwd=folder, env=environment, stderr=file
        )
    try:
        wait_for(told, b"listening on 127.0.0.1:")
        server.terminate()
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.long
def test_console_tour_works(tmp_path):
    """Each line of the tour succeeds after those before it, and the followed topic shows what was appended."""
    missing = [line for line in console_lines() if not is_written(line)]
    assert not missing, "no such commands"
    shim = tmp_path / "bin" / "segmentlog"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m segmentlog "$@"\n')
    shim.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SEGMENTLOG")}
    environment |= {"PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    followers: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for command in console_lines():
            if command == "segmentlog serve":
                check_server(command, tmp_path, environment)
                continue
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
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
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
    """Wait until the text is in the file."""
    wait_until(
        lambda: text in file.read_bytes(),
        lambda: f"{text!r} did not come; there is {file.read_bytes()[-500:]!r}",
    )


def test_made_pages_are_what_the_code_says():
    """The keys of a topic, the help of each command. To mend it: ``python docs/generate.py``."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert len(generate.PAGES) == 5
    for name, make in generate.PAGES.items():
        # Releases of click break lines at other places.
        assert (ROOT / "docs" / name).read_text().split() == make().split(), name


def test_every_file_that_a_page_names_is_there():
    """Links and paths of files lead somewhere: in the page's own terms, in the package, or from the root."""
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page):
            assert (ROOT / link).exists() or (ROOT / "docs" / link).exists(), link
        for path in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|md))`", page):
            homes = (ROOT, ROOT / "segmentlog", ROOT / "docs")
            assert any((home / path).exists() for home in homes), path


def test_the_tour_needs_no_file_that_a_machine_may_lack():
    """Its commands read only files that they create; a bare Debian has no /usr/share/dict/words."""
    for line in console_lines():
        assert not re.search(r"<|/usr/share", line), line


def test_extras_are_installed_from_a_clone():
    """In all pages, messages and help texts: on an index, `segmentlog[server]` is missing, or a stranger's."""
    folders = ("segmentlog", "pyspark_segmentlog", "bench", "docs", "tools")
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "index.md", ROOT / "Makefile"]
    endings = (".py", ".md", ".html")
    files += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in endings]
    assert len(files) > 500
    for path in files:
        text = path.read_text()
        assert not re.search(r"segmentlog\[|pip3? install [^\n`]*\bsegmentlog\b(?<!of segmentlog)", text), path
