"""The command line in processes of its own, with pipes and pseudo terminals as a user has them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAIT_S = 120.0
"""Nothing here takes so long, also on a machine that is busy with something else."""


def arguments_of(store: Path, *arguments: str) -> list[str]:
    """Return the words that start the command line on a store."""
    return [sys.executable, "-m", "segmentlog", "--dir", str(store), *arguments]


def finish(store: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, with its output caught."""
    options.setdefault("stdin", subprocess.DEVNULL if "input" not in options else None)
    if options["stdin"] is None:
        del options["stdin"]
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    done = subprocess.run(arguments_of(store, *arguments), timeout=WAIT_S, check=False, **options)
    assert b"Traceback" not in (done.stderr or b""), done.stderr.decode()
    return done


def shell(script: str, **variables: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which ``segmentlog`` is the command line; variables reach it by the environment."""
    names = {name: str(value) for name, value in variables.items()}
    function = 'segmentlog() { "$PYTHON" -m segmentlog "$@"; }; '
    return subprocess.run(
        ["bash", "-c", function + script],
        env={**os.environ, "PYTHON": sys.executable, **names},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )


@contextlib.contextmanager
def started(store: Path, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command while the block runs; kill it afterwards if it still runs."""
    options.setdefault("stdin", subprocess.DEVNULL)
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    with subprocess.Popen(arguments_of(store, *arguments), **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def unmeasured() -> dict[str, str]:
    """Return the environment of a process to be interrupted: the tracer of coverage swallows some interrupts."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}


def stop(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGINT) -> tuple[bytes, str]:
    """Signal a process and wait for its end: what else it wrote to stdout, and stderr."""
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert b"Traceback" not in err, err.decode()
    return out or b"", err.decode()


def read_until(process: subprocess.Popen[bytes], wanted: bytes, *, of: str = "stdout") -> bytes:
    """Return the output of a process up to the first occurrence of ``wanted``."""
    fd = getattr(process, of).fileno()
    seen = b""
    ends = time.monotonic() + WAIT_S
    while wanted not in seen:
        assert select.select([fd], [], [], max(ends - time.monotonic(), 0))[0], f"only {seen!r} came"
        block = os.read(fd, 1 << 16)
        assert block, f"it ended after {seen!r}"
        seen += block
    return seen


def on_terminal(store: Path, *arguments: str, streams: str, columns: int = 80, **environment: str) -> tuple[int, str]:
    """Run a command with the named streams ("out", "err", "in") on a terminal: its status and what that showed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
    options: dict[str, Any] = {
        "stdin": theirs if "in" in streams else subprocess.DEVNULL,
        "stdout": theirs if "out" in streams else subprocess.DEVNULL,
        "stderr": theirs if "err" in streams else subprocess.DEVNULL,
    }
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    environ = {**plain, "TERM": "xterm-256color", **environment}
    try:
        with started(store, *arguments, env=environ, **options) as process:
            os.close(theirs)
            shown = b""
            # Linux answers EIO as soon as nobody holds the other end open.
            with contextlib.suppress(OSError):
                while block := os.read(ours, 1 << 16):
                    shown += block
            return process.wait(WAIT_S), shown.decode()
    finally:
        os.close(ours)
