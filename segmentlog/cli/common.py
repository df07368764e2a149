"""What commands share: opening the store, exit statuses, ending quietly, printing."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from segmentlog.errors import CorruptBatch, LogTruncated, SegmentlogError

if TYPE_CHECKING:
    from segmentlog.store import LogStore

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_DAMAGE = 0, 1, 2, 3


def run(command: click.Command, args: Sequence[str] | None) -> int:
    """Run a command and turn whatever ends it into an exit status and at most one line on stderr."""
    try:
        result = command.main(args=args, prog_name="segmentlog", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else EXIT_DONE
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.UsageError as error:
        error.show()
        return EXIT_USAGE
    except click.ClickException as error:
        error.show()
        return EXIT_FAILED
    except click.Abort:
        say("stopped")
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader has seen enough (`| head`). Python flushes stdout once more at exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except CorruptBatch as error:
        say(f"error: {error}")
        return EXIT_DAMAGE
    except (SegmentlogError, LogTruncated) as error:
        say(f"error: {error}")
        return EXIT_FAILED
    except OSError as error:
        say(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return EXIT_FAILED


def say(text: str) -> None:
    """A line for the person at the terminal: stderr, so that stdout is results only."""
    with contextlib.suppress(BrokenPipeError):
        click.echo(text, err=True)


@contextlib.contextmanager
def open_store(
    ctx: click.Context, *, create: bool = False, read_only: bool = False, background: bool = True
) -> Iterator[LogStore]:
    """The store of ``--dir``, closed cleanly however the command ends."""
    import segmentlog

    with segmentlog.open(ctx.obj, create=create, read_only=read_only, background=background) as store:
        yield store


class Stop(Exception):
    """SIGINT or SIGTERM arrived."""


@contextlib.contextmanager
def stoppable(on_signal: Any = None) -> Iterator[list[int]]:
    """Within: SIGINT and SIGTERM do not kill; they add themselves to the list, and call ``on_signal``.

    Loops look at the list after each batch, finish the batch in hand and say what was done.
    """
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        if on_signal is not None:
            on_signal()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Progress:
    """A bar with rate and time on stderr, where that is a terminal; nothing anywhere else."""

    def __init__(self, unit: str, total: int | None, *, wanted: bool = True) -> None:
        self._unit = unit
        self._total = total
        self._wanted = wanted and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self._unit),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, rate="")
        return self

    def advance(self, count: int) -> None:
        if self._bar is not None:
            task = self._bar.tasks[0]
            rate = f"{task.speed:,.0f}/s" if task.speed else ""
            self._bar.update(self._task, advance=count, rate=rate)

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()
