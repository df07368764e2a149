"""`segmentlog users` adds, removes and lists users without showing passwords."""

from __future__ import annotations

import io
import json
import os
import pty
import stat
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.processes import WAIT_S, finish, started
from waiting import wait_until

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.security.users import Users

Run = Callable[..., tuple[int, bytes, str]]


@pytest.fixture
def call(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command on a store of its own: (exit status, stdout, stderr)."""

    def call(*arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = run(cli, ["--dir", str(tmp_path / "store"), *arguments])
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        assert b"Traceback" not in err
        return status, out, err.decode()

    return call


def add(call: Run, name: str, password: str, *more: str) -> tuple[int, bytes, str]:
    """`users add`, with the password from stdin."""
    return call("users", "add", name, "--password-stdin", "--iterations", "4096", *more, stdin=f"{password}\n".encode())


def test_users_come_and_go(call: Run, tmp_path: Path) -> None:
    """Without a named file, users are in the store, which is created; `verify` accepts the files."""
    status, out, err = add(call, "ann", "first")
    assert (status, out) == (0, b"")
    assert "added ann" in err
    path = tmp_path / "store" / "@users.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Users(str(path)).verify("ann", "first")
    assert "new password" in add(call, "ann", "second")[2]
    assert Users(str(path)).verify("ann", "second")
    add(call, "Zoë", "third")
    assert call("users", "list")[1].decode().split()[:3] == ["USER", "MECHANISMS", "ITERATIONS"]
    rows = [json.loads(line) for line in call("users", "list", "--json")[1].splitlines()]
    assert rows == [
        {"user": name, "mechanisms": ["SCRAM-SHA-256", "SCRAM-SHA-512"], "iterations": 4096} for name in ("Zoë", "ann")
    ]
    assert call("topics")[0] == 0
    assert list(inspect_store(str(tmp_path / "store"))) == []
    assert call("users", "remove", "ann")[0] == 0
    status, _, err = call("users", "remove", "an")
    assert status == 1
    assert "no user 'an'" in err
    assert call("users", "remove", "Zoë")[0] == 0
    status, out, err = call("users", "list")
    assert (status, out) == (0, b"")
    assert "no client can log in" in err


def test_a_file_elsewhere_needs_no_store(call: Run, tmp_path: Path) -> None:
    """The file is the one of `serve --users FILE`."""
    path = str(tmp_path / "somewhere")
    assert add(call, "ann", "pw", "--users", path)[0] == 0
    assert Users(path).verify("ann", "pw")
    assert call("users", "list", "--users", path)[0] == 0
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "stdin", "status", "told"),
    [
        (("add", "ann"), b"pw\n", 2, "--password-stdin"),
        (("add", "*", "--password-stdin"), b"pw\n", 1, "not a valid user name"),
        (("add", "a\nb", "--password-stdin"), b"pw\n", 1, "not a valid user name"),
        (("add", "ann", "--password-stdin"), b"\n", 1, "empty"),
        (("add", "ann", "--password-stdin"), b"", 1, "empty"),
        (("add", "ann", "--password-stdin"), b"se\xffcret\n", 1, "not UTF-8"),
        (("add", "ann", "--password-stdin"), "se\u00a0cret\n".encode(), 1, "clients"),
        (("add", "ann", "--password-stdin"), b"secret" * 1000, 1, "4096 bytes"),
        (("add", "ann", "--password-stdin", "--iterations", "1"), b"secret\n", 1, "use 4096 to 1000000"),
        (("add", "ann", "--password-stdin", "--iterations", "0"), b"secret\n", 1, "use 4096 to 1000000"),
        (("add", "ann", "--password-stdin", "--iterations", "many"), b"secret\n", 2, "many"),
        (("remove", "ann"), b"", 1, "does not exist"),
        (("list",), b"", 1, "users add"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(
    call: Run, arguments: tuple[str, ...], stdin: bytes, status: int, told: str
) -> None:
    """The message does not contain the password."""
    found, out, err = call("users", *arguments, stdin=stdin)
    assert (found, out) == (status, b"")
    assert told in err, err
    assert "cret" not in err


def test_a_line_end_of_windows_is_none_of_the_password(call: Run, tmp_path: Path) -> None:
    """Neither the line end nor later lines belong to the password; inner spaces do."""
    call("users", "add", "ann", "--password-stdin", "--iterations", "4096", stdin=b"two words\r\nmore")
    assert Users(str(tmp_path / "store" / "@users.json")).verify("ann", "two words")


def test_a_password_is_in_no_process_list_and_on_no_screen(tmp_path: Path) -> None:
    """Asked for twice on a terminal, and not echoed."""
    ours, theirs = pty.openpty()

    def take_the_terminal() -> None:  # click asks on /dev/tty, the session's controlling terminal
        os.close(os.open(os.ttyname(theirs), os.O_RDWR))

    arguments = ("users", "add", "ann", "--iterations", "4096")
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    shown = b""
    with started(
        tmp_path / "store", *arguments, start_new_session=True, preexec_fn=take_the_terminal, **streams
    ) as process:
        for wanted, typed in (
            (b"Password for ann", b"top secret\n"),
            (b"Repeat", b"top secret\n"),
            (b"added ann", b""),
        ):
            while wanted not in shown:
                shown += os.read(ours, 1 << 16)
            wait_until(lambda: process.poll() is not None or not termios.tcgetattr(theirs)[3] & termios.ECHO)
            os.write(ours, typed)
        assert process.wait(WAIT_S) == 0
    os.close(ours)
    os.close(theirs)
    assert b"secret" not in shown
    assert Users(str(tmp_path / "store" / "@users.json")).verify("ann", "top secret")


def test_users_are_added_where_a_store_is_in_use(tmp_path: Path) -> None:
    """Another process can add users while this one has the store open."""
    with segmentlog.open(tmp_path / "store"):
        done = finish(tmp_path / "store", "users", "add", "ann", "--password-stdin", input=b"pw\n")
        assert done.returncode == 0, done.stderr
    assert Users(str(tmp_path / "store" / "@users.json")).verify("ann", "pw")
