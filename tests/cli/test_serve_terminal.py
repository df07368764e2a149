"""`segmentlog serve` as people see it, and as programs read its log; its workers' metrics."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.processes import WAIT_S, arguments_of, finish, started
from server.scraping import get, scrape, value
from waiting import wait_until

from segmentlog.testing.ports import free_ports

pytest.importorskip("prometheus_client")

_ERASE = "\r\x1b[2K"


class _Terminal:
    """A server with its stderr on a terminal."""

    def __init__(self, store: Path, *arguments: str, columns: int = 80, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
        self.process = subprocess.Popen(
            arguments_of(store, "serve", "--listen", "127.0.0.1:0", *arguments),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs,
            env={**os.environ, "TERM": "xterm", **environment},
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Wait until it shows something like that, once more than before."""
        ends = time.monotonic() + WAIT_S
        at = len(self.shown)
        while (found := re.compile(pattern).search(self.shown, at)) is None:
            assert select.select([self._ours], [], [], max(ends - time.monotonic(), 0))[0], self.shown
            self.shown += os.read(self._ours, 1 << 16).decode()
        return found

    def end(self) -> str:
        """Stop it; all that it has shown."""
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while block := os.read(self._ours, 1 << 16):
                self.shown += block.decode()
        assert self.process.wait(WAIT_S) == 0
        return self.shown

    def close(self) -> None:
        """However the test ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


@contextlib.contextmanager
def on_terminal(store: Path, *arguments: str, **options: Any) -> Iterator[_Terminal]:
    """Yield a server on a terminal, and close it at the end."""
    terminal = _Terminal(store, *arguments, **options)
    try:
        yield terminal
    finally:
        terminal.close()


def children_of(pid: int) -> list[int]:
    """Return the child processes in the order of their start."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_status_is_the_last_line_and_makes_room(tmp_path: Path) -> None:
    """A killed worker is reported on a line of its own; the status line follows below, and is removed at the end."""
    with on_terminal(tmp_path / "store", "--workers", "2") as terminal:
        terminal.until(r"store: listening on 127\.0\.0\.1:\d+, 2 workers \((compiled|interpreted) core\)\r\n")
        terminal.until(re.escape(_ERASE) + r"0 connections, 0 requests/s\r")
        os.kill(children_of(terminal.process.pid)[0], signal.SIGKILL)
        terminal.until(re.escape(_ERASE) + r"[-\d:, ]+ ERROR worker \d \(process \d+\) was killed by signal 9\r\n")
        terminal.until(re.escape(_ERASE) + r"0 connections, 0 requests/s\r")
        shown = terminal.end()
    assert shown.endswith(f"{_ERASE}\rstopped\r\n")
    assert "was started" in shown
    left = [line.rpartition(_ERASE)[2] for line in shown.split("\n")]
    assert all("requests/s" not in line for line in left), "nothing is left of it between the lines"


def test_a_narrow_terminal_shows_what_fits(tmp_path: Path) -> None:
    """A line that wraps could not be erased."""
    with on_terminal(tmp_path / "store", "--workers", "1", columns=12) as terminal:
        assert terminal.until(re.escape(_ERASE) + r"([^\r]*)\r")[1] == "0 connectio"
        terminal.end()


@pytest.mark.parametrize(
    ("arguments", "environment"), [(("--log-format", "json"), {}), ((), {"TERM": "dumb"})], ids=["json", "dumb"]
)
def test_who_cannot_erase_gets_no_status(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    """JSON lines and a dumb terminal get no status line, because it could not be erased."""
    with on_terminal(tmp_path / "store", "--workers", "1", *arguments, **environment) as terminal:
        terminal.until("listening on")
        time.sleep(1.5)
        assert "requests/s" not in terminal.end()


def test_a_store_that_is_not_there_yet(tmp_path: Path) -> None:
    """`segmentlog --dir data serve` creates the store."""
    arguments = ("serve", "--listen", "127.0.0.1:0", "--workers", "1")
    with started(Path("data"), *arguments, cwd=tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"data: listening on")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert (tmp_path / "data" / "store.json").exists()


def test_as_json_every_line_is_an_object(tmp_path: Path) -> None:
    """Each line from the first address to the end is an object; a dead worker is named."""
    store = tmp_path / "store"
    with started(store, "serve", "--listen", "127.0.0.1:0", "--workers", "1", "--log-format", "json") as process:
        assert process.stderr is not None
        lines = [json.loads(process.stderr.readline())]
        os.kill(children_of(process.pid)[0], signal.SIGKILL)
        lines += [json.loads(process.stderr.readline()) for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        lines += [json.loads(line) for line in process.stderr]
        assert process.wait(WAIT_S) == 0
    assert [(line["level"], line.get("worker")) for line in lines] == [
        ("info", None),
        ("error", 1),
        ("info", 1),
        ("info", None),
    ]
    assert "listening on 127.0.0.1:" in lines[0]["message"]
    assert "was killed by signal 9" in lines[1]["message"]
    assert "was started" in lines[2]["message"]
    assert lines[3]["message"] == "stopped"


def test_each_worker_tells_of_itself_and_the_first_of_the_store(tmp_path: Path) -> None:
    """Workers use the ports from the given one on."""
    store = tmp_path / "store"
    finish(store, "create", "t", "--partitions", "3")
    port = free_ports(2)
    arguments = ("serve", "--listen", "127.0.0.1:0", "--workers", "2", "--metrics", f"127.0.0.1:{port}")
    with started(store, *arguments) as process:
        assert process.stderr is not None
        assert f"(metrics: http://127.0.0.1:{port}/metrics)".encode() in process.stderr.readline()
        found = [scrape(f"127.0.0.1:{port + number}") for number in range(2)]
        assert [get(f"127.0.0.1:{port + number}", "/readyz")[0] for number in range(2)] == [200, 200]
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    workers = [dict(labels)["worker"] for one in found for name, labels in one if name == "segmentlog_build_info"]
    assert workers == ["1", "2"]
    assert [value(one, "segmentlog_partitions") for one in found] == [3, None]


def test_metrics_that_others_could_read_are_refused(tmp_path: Path) -> None:
    """The error comes before the server starts, in one line that says what to do."""
    done = finish(tmp_path / "store", "serve", "--listen", "127.0.0.1:0", "--metrics", "0.0.0.0:0")
    assert done.returncode == 1
    assert done.stderr.decode().count("\n") == 1
    assert "--metrics 0.0.0.0: other machines can reach this address" in done.stderr.decode()


def test_a_change_of_rules_is_logged_by_one_process(tmp_path: Path) -> None:
    """Changed rules, and bad files, are logged within seconds, once for two workers and the HTTP process."""
    (tmp_path / "acls").write_text("super User:ANONYMOUS\n")
    log = tmp_path / "log"

    def wait_for(text: str) -> None:
        wait_until(lambda: text in log.read_text(), lambda: log.read_text())

    with open(log, "w") as file:
        command = ("serve", "--listen", "127.0.0.1:0", "--workers", "2", "--http", "127.0.0.1:0")
        with started(tmp_path / "store", *command, "--acls", str(tmp_path / "acls"), stderr=file) as server:
            wait_for("listening on")
            (tmp_path / "acls").write_text("super User:ANONYMOUS\nallow User:ann read group:a,b\n")
            wait_for("1 rules added")
            (tmp_path / "acls").write_text("super User:ANONYMOUS\n")
            wait_for("1 removed")
            server.terminate()
            server.wait(WAIT_S)
    assert log.read_text().count("1 rules added") == 1, log.read_text()
    assert log.read_text().count("write a line for each") == 1
