"""Output for people: progress bars and tables on a terminal only; help, versions, completion, questions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from broken import flip, make_store
from cli.processes import arguments_of, finish, on_terminal, shell

import segmentlog
from segmentlog.speedups import CORE_NAME

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CURSOR = re.compile(r"\x1b\[\??[0-9;]*[A-HJKSTfhlsu]")
MANY = 100_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with long and short topic names, and a topic of several segments."""
    path = tmp_path_factory.mktemp("terminal") / "store"
    with segmentlog.open(path) as opened:
        topic = opened.create_topic("clicks", partitions=3, segment_records=100, retention_ms=7 * 86_400_000)
        for number in range(3):
            for begin in range(0, 500, 50):
                topic.partition(number).append([b"%d" % one for one in range(begin, begin + 50)])
        opened.create_topic("a-rather-long-name.of-a-topic_that-a-person-might-still-choose")
        opened.create_topic("empty", segment_bytes=123_456_789, cleanup_policy="compact", fsync="always")
        opened.create_topic("large").partition(0).append([b"%d" % one for one in range(MANY)])
    return path


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    """Return a file of some size."""
    path = tmp_path / "numbers"
    path.write_bytes(b"".join(b"%d\n" % one for one in range(MANY)))
    return str(path)


def plain(shown: str) -> list[str]:
    """Return the lines of a terminal without what moves its cursor and colours it."""
    return CURSOR.sub("", COLOUR.sub("", shown)).replace("\r", "").split("\n")


# ---------------------------------------------------------------- progress


def test_produce_draws_a_bar_on_a_terminal_only(tmp_path: Path, numbers: str) -> None:
    """The bar is drawn on stderr and removed at the end: only the summary remains. Files get no bar."""
    store = tmp_path / "store"
    finish(store, "create", "t")
    status, shown = on_terminal(store, "produce", "t", numbers, streams="err")
    assert status == 0
    assert CURSOR.search(shown), "nothing was drawn"
    assert "bytes" in shown
    assert "━" in shown
    assert f"{MANY:,} records" in plain(shown)[-2]
    done = finish(store, "produce", "t", numbers)
    err = done.stderr.decode()
    assert (done.returncode, done.stdout) == (0, b"")
    assert "\x1b" not in err
    assert err.count("\n") == 1
    assert err.startswith(f"{MANY:,} records, ")


@pytest.mark.parametrize("command", [("consume", "large"), ("verify", "large")])
def test_reading_draws_a_bar_on_a_terminal_only(store: Path, command: tuple[str, ...]) -> None:
    """If results go elsewhere, a bar is drawn on stderr, unless stderr is a file."""
    status, shown = on_terminal(store, *command, streams="err")
    assert status == 0
    assert CURSOR.search(shown), "nothing was drawn"
    assert "━" in shown
    done = finish(store, *command)
    assert done.returncode == 0
    assert b"\x1b" not in done.stderr + done.stdout[-1000:]
    assert done.stderr.count(b"\n") == (1 if command[0] == "consume" else 2)


def test_findings_go_to_stdout_though_a_bar_is_drawn(tmp_path: Path) -> None:
    """The bar has stderr; what verify finds is not printed there with it."""
    make_store(tmp_path / "store")
    flip(min((tmp_path / "store").glob("t/0/*.log")), 70)
    status, shown = on_terminal(tmp_path / "store", "verify", streams="err")
    assert status == 3
    assert "━" in shown
    assert [line for line in plain(shown) if "damage: " in line and "segmentlog repair" not in line] == []
    assert b"damage:" in finish(tmp_path / "store", "verify").stdout


def test_records_on_a_terminal_are_not_mixed_with_a_bar(store: Path) -> None:
    """If the records are printed on the terminal, no bar is drawn."""
    status, shown = on_terminal(store, "consume", "-n", "5", "clicks/0", streams="out err")
    assert status == 0
    assert "\x1b" not in shown
    assert plain(shown)[:5] == [f"{one} {one}" for one in range(5)]


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["topics", "details clicks", "details empty", "details --all empty",
                                     "details --sizes clicks"])  # fmt: skip
def test_tables_fit_the_terminal(store: Path, command: str, columns: int) -> None:
    """No line of a table is wider than the terminal, and no cell is truncated."""
    status, shown = on_terminal(store, *command.split(), streams="out", columns=columns)
    assert status == 0
    lines = plain(shown)
    tables = [line for line in lines if str(store) not in line]
    assert max(map(len, tables)) <= columns, max(tables, key=len)
    assert "…" not in shown
    if command == "topics":
        first_cells = "".join(line.split()[0] for line in lines if line.split())
        assert "a-rather-long-name.of-a-topic_that-a-person-might-still-choose" in first_cells, "on one line or two"
        assert f"{MANY:,}" in shown, "digits in groups, for people"


def test_tables_in_a_file_are_plain(store: Path) -> None:
    """Columns are aligned, one row per line, without digit groups, frames and colours, whatever the width is."""
    lines = finish(store, "topics").stdout.decode().splitlines()
    assert lines[0].split() == ["TOPIC", "PARTITIONS", "OFFSETS"]
    assert [line.split() for line in lines[1:]] == [
        ["a-rather-long-name.of-a-topic_that-a-person-might-still-choose", "1", "0"],
        ["clicks", "3", "1500"],
        ["empty", "1", "0"],
        ["large", "1", str(MANY)],
    ]
    assert len({len(line) for line in lines}) == 1
    assert b"\x1b" not in finish(store, "describe", "clicks").stdout


@pytest.mark.parametrize("command", ["topics", "details clicks", "verify", "produce clicks /dev/null"])
def test_no_color_is_respected(tmp_path: Path, store: Path, command: str) -> None:
    """$NO_COLOR takes all colours away, bold aside, and so does TERM=dumb."""
    colours = re.compile(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|9[0-7]|38|48)[0-9;]*m")
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        status, shown = on_terminal(store, *command.split(), streams="out err", **environment)
        assert status == 0
        assert not colours.search(shown), repr(shown)


# ---------------------------------------------------------------- questions


@pytest.mark.parametrize("command", ["delete t", "truncate t --at 1"])
def test_what_deletes_asks_first(tmp_path: Path, command: str) -> None:
    """On a terminal, deleting commands ask, with no as default; without a terminal they need --yes."""
    store = tmp_path / "store"
    with segmentlog.open(store) as opened:
        opened.create_topic("t").partition(0).append([b"a", b"b"])
    done = shell(
        f'printf "\\n" | "$PYTHON" -c "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"'
        f' "$PYTHON" -m segmentlog --dir "$STORE" {command}',
        STORE=store,
    )
    assert b"[y/N]" in done.stdout
    assert done.returncode == 1
    refused = finish(store, *command.split())
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"--yes" in refused.stderr
    with segmentlog.open(store, read_only=True) as opened:
        assert opened.topic("t").partition(0).log_end_offset == 2
    assert finish(store, *command.split(), "--yes").returncode == 0
    with segmentlog.open(store, read_only=True) as opened:
        left = [record.value for topic in opened.topics() for record in opened.consumer(topic)]
    assert left == ([] if command.startswith("delete") else [b"a"])


# ---------------------------------------------------------------- help


def test_version_and_help(tmp_path: Path) -> None:
    """--version names the version and the core; -h and --help say the same, for the program and each command."""
    store = tmp_path / "store"
    version = finish(store, "--version")
    assert (version.returncode, version.stdout) == (
        0,
        f"segmentlog, version {segmentlog.__version__} ({CORE_NAME})\n".encode(),
    )
    short, long = finish(store, "-h"), finish(store, "--help")
    assert short.stdout == long.stdout
    assert b"create words --page-size 4096" in short.stdout
    commands = re.findall(r"^  ([a-z]+)  +\S", short.stdout.decode().partition("Commands:")[2], re.MULTILINE)
    assert {"create", "topics", "describe", "alter", "delete", "rename", "produce", "consume", "tail", "flush", "trim",
            "truncate", "verify", "repair", "dump", "import", "export", "bench"} <= set(commands)  # fmt: skip
    for name in commands:
        from segmentlog.cli import cli

        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert command.help, name
    assert not store.exists()


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_a_script_for_completion_is_printed(kind: str) -> None:
    """The script is click's: `_SEGMENTLOG_COMPLETE=bash_source segmentlog`."""
    program = Path(sys.executable).with_name("segmentlog")
    environment = {**os.environ, "_SEGMENTLOG_COMPLETE": f"{kind}_source"}
    done = subprocess.run([program], env=environment, capture_output=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    assert b"_SEGMENTLOG_COMPLETE=" + kind.encode() + b"_complete" in done.stdout.replace(b" ", b"") or (
        kind.encode() + b"_complete" in done.stdout
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [("segmentlog --dir STORE con", ["consume"]), ("segmentlog --dir STORE tail cl", ["clicks"]),
     ("segmentlog --dir STORE details l", ["large"]), ("segmentlog --dir /nowhere details l", [])],
)  # fmt: skip
def test_commands_and_topics_are_completed(store: Path, words: str, expected: list[str]) -> None:
    """Names come from the folder on the command line; without a store, completion is silent."""
    program = Path(sys.executable).with_name("segmentlog")
    line = words.replace("STORE", str(store))
    environment = {
        **os.environ,
        "_SEGMENTLOG_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    done = subprocess.run([program], env=environment, capture_output=True, timeout=20, check=False, text=True)
    assert [one.partition(",")[2] for one in done.stdout.split()] == expected
    assert done.stderr == ""


# ---------------------------------------------------------------- the three lines


def test_the_three_lines_work_as_they_stand(tmp_path: Path) -> None:
    """kafkaesque's own example, with the name changed, with the words of this system or some others."""
    words = Path("/usr/share/dict/words")
    if not words.exists():
        words = tmp_path / "words"
        words.write_bytes("".join(f"wörd{number}\n" for number in range(10_000)).encode())
    script = f"""set -e
        python -m segmentlog create words --page-size 4096
        python -m segmentlog produce --batch-size 1024 words < {words}
        python -m segmentlog consume --fetch-size 512 words"""
    environment = {name: value for name, value in os.environ.items() if name != "SEGMENTLOG_DIR"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = [b"%d %b" % (offset, word) for offset, word in enumerate(words.read_bytes().splitlines())]
    assert done.stdout.splitlines() == expected
    assert (tmp_path / "segmentlog-data" / "words" / "topic.json").exists()
    assert arguments_of(tmp_path, "x")[1:3] == ["-m", "segmentlog"]
