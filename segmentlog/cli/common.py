"""Helpers of all commands: open the store, handle signals, map errors to exit statuses, print progress."""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from segmentlog.errors import CorruptBatch, LogTruncated, SegmentlogError, UnreadableBatch
from segmentlog.texts import visible

if TYPE_CHECKING:
    from segmentlog.records import CompactionReport, RetentionReport
    from segmentlog.store import LogStore

_Report = TypeVar("_Report", "RetentionReport", "CompactionReport")

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_DAMAGE, EXIT_UNREADABLE = 0, 1, 2, 3, 4


def run(command: click.Command, args: Sequence[str] | None) -> int:
    """Run a command; turn its result or error into an exit status and at most one line on stderr."""
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
        say(f"error: {error.format_message()}")
        return EXIT_FAILED
    except click.Abort:
        say("stopped")
        if not sys.stdout.isatty():
            _discard_stdout()  # It may be a pipe without a reader: flushing it at exit would block forever.
        return EXIT_FAILED
    except (ReaderGone, BrokenPipeError):
        _discard_stdout()
        return EXIT_DONE
    except CorruptBatch as error:
        say(f"error: {error}")
        return find_damage_status([error])
    except (SegmentlogError, LogTruncated) as error:
        say(f"error: {error}")
        return EXIT_FAILED
    except OSError as error:
        if error.filename == _STDOUT:
            _discard_stdout()
        say(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return EXIT_FAILED


# ---------------------------------------------------------------- standard streams

_STDOUT: Final = "stdout"


class ReaderGone(Exception):
    """The reader of stdout has ended (`| head`): not a failure. Not an OSError, because click handles those."""


class _RawStdout(io.FileIO):
    """Raw stdout. Its errors have the filename "stdout", so that `run` can tell them from errors of the store."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise ReaderGone from None
        except OSError as error:
            error.filename = _STDOUT
            raise


def prepare_process() -> None:
    """Set up standard streams, signal handlers and the environment of the command's own process.

    A descriptor 0 to 2 that is closed (`>&-`) is opened on /dev/null, so that no file of the store gets its number.
    A closed stdin is opened for writing, so reads from it fail. A closed stdout is opened for reading, so writes to it
    fail. A closed stderr discards its output.
    """
    for fd, name, flags in ((0, "stdin", os.O_WRONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            if name != "stdout":
                setattr(sys, name, os.fdopen(os.dup(fd), "r" if name == "stdin" else "w", closefd=True))
    before = sys.stdout
    errors = before.errors if before else "replace"
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_RawStdout(1, "wb", closefd=False)),
        encoding=before.encoding if before else "utf-8",
        errors="backslashreplace" if errors == "strict" else errors,  # for names that a Latin-1 terminal cannot print
        line_buffering=before.line_buffering if isinstance(before, io.TextIOWrapper) else False,
    )
    global _owns_process
    _owns_process = True
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit_at_once)
    sys.unraisablehook = _redeliver_signal
    # OPENBLAS_NUM_THREADS: the linear algebra of numpy, which is not used, starts a thread per core: 0.1 s of CPU time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


_owns_process = False
"""Whether this process runs the command line, so that a signal may end it without cleanup."""


def _exit_at_once(number: int, frame: object) -> None:
    """Exit at once, without a traceback, if a signal arrives while modules load. Nothing needs cleanup yet."""
    os._exit(128 + number)


def _redeliver_signal(lost: sys.UnraisableHookArgs) -> None:
    """Deliver a signal again if its KeyboardInterrupt was raised in a finalizer or another callback.

    Python prints and drops exceptions of such callbacks, so the signal would have no effect.
    """
    raising = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    if not isinstance(lost.exc_value, KeyboardInterrupt) or not raising:
        sys.__unraisablehook__(lost)
        return
    main = threading.main_thread().ident
    assert main is not None
    with contextlib.suppress(RuntimeError):  # RuntimeError: no thread can be started, because this process is ending
        _thread.start_new_thread(_repeat_signal, (main, raising[0]))


def _repeat_signal(thread_id: int, number: int) -> None:
    """Send the signal again once the thread has left `_redeliver_signal`, in which Python would drop the exception."""
    is_in_hook = True
    while is_in_hook:
        time.sleep(_REDELIVER_S)
        frame = sys._current_frames().get(thread_id)
        while frame is not None and frame.f_code is not _redeliver_signal.__code__:
            frame = frame.f_back
        is_in_hook = frame is not None
    signal.pthread_kill(thread_id, number)


_REDELIVER_S: Final = 0.02


def end_loading() -> None:
    """Make SIGINT and SIGTERM raise KeyboardInterrupt from now on, so that commands delete their temporary files."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _exit_at_once:
            signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def exit_at_once_on_signals() -> Iterator[None]:
    """Import slow modules within this context, in which a signal ends the process at once, without cleanup."""
    raising = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if _owns_process and signal.getsignal(number) is signal.default_int_handler
    ]
    for number in raising:
        signal.signal(number, _exit_at_once)
    try:
        yield
    finally:
        for number in raising:
            signal.signal(number, signal.default_int_handler)


def check_stdin() -> None:
    """Raise ClickException if stdin is closed."""
    if fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        raise click.ClickException("stdin is closed: name a file, or pipe data in")


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, because Python flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print a line for people to stderr, so that stdout has results only."""
    with contextlib.suppress(OSError):  # OSError: stderr is closed or its disk is full, which must not fail the command
        click.echo(visible(text), err=True)


@contextlib.contextmanager
def open_store(
    ctx: click.Context, *, create: bool = False, read_only: bool = False, background: bool = True
) -> Iterator[LogStore]:
    """Open the store of ``--dir``, and close it cleanly however the command ends."""
    with exit_at_once_on_signals():
        import segmentlog.store  # loads numpy

    with segmentlog.open(ctx.obj, create=create, read_only=read_only, background=background) as store:
        yield store


def require_local_folder(ctx: click.Context) -> str:
    """Return ``--dir`` for a command that works on local stores only. Raises UsageError for a URL."""
    from segmentlog.objects.bucket.url import is_url

    folder: str = ctx.obj
    if is_url(folder):
        raise click.UsageError("--dir: a store in an object store is read-only; give a local folder")
    return folder


class StopRequested(Exception):
    """SIGINT or SIGTERM arrived; raised to end a pass between two batches."""


@contextlib.contextmanager
def collect_signals(on_signal: Any = None) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in the returned list, and call ``on_signal``, instead of ending the process.

    Loops check the list after each batch, finish that batch and report what they did. A second signal raises
    KeyboardInterrupt at once. A signal that the process was started to ignore (by nohup, or as a background job of a
    shell) stays ignored.
    """
    received: list[int] = []

    def on_signal_number(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        if on_signal is not None:
            on_signal()

    wanted = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal_number) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find_exit_status(stopped: list[int]) -> int:
    """Return the exit status of a command: 128 + the number of the signal that stopped it, or 0."""
    return 128 + stopped[0] if stopped else EXIT_DONE


def find_damage_status(errors: Iterable[Exception]) -> int:
    """Return the exit status for the damage among ``errors``; 0 if there is none."""
    damage = [error for error in errors if isinstance(error, CorruptBatch)]
    if not damage:
        return EXIT_DONE
    return EXIT_UNREADABLE if all(isinstance(error, UnreadableBatch) for error in damage) else EXIT_DAMAGE


class SkippedRanges:
    """Offsets that a command with ``--skip-damaged`` skipped."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], tuple[int, CorruptBatch]] = {}

    def add(self, partition: str, base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        """Record that offsets ``[base_offset, end_offset)`` of a partition such as t/0 were skipped. Idempotent."""
        first, _ = self._found.get((partition, end_offset), (base_offset, damage))
        self._found[partition, end_offset] = min(first, base_offset), damage

    def report(self) -> int:
        """Print the skipped offsets on stderr; return the exit status for their damage, 0 if no offset was skipped."""
        for (partition, end_offset), (base_offset, damage) in self._found.items():
            what = "unreadable" if isinstance(damage, UnreadableBatch) else "damaged"
            say(f"{partition}: skipped {what} offsets {base_offset} to {end_offset - 1} ({damage.path})")
        if len(self._found) > 1:
            say(f"{len(self._found):,} ranges of offsets were skipped")
        return find_damage_status(damage for _, damage in self._found.values())


def describe_stop(stopped: list[int]) -> str:
    """Return "; stopped by SIGINT" or the like for the end of a summary; "" if no signal stopped the command."""
    return f"; stopped by {signal.Signals(stopped[0]).name}" if stopped else ""


LEASE_WAIT_S: Final = 10.0
_ASK_EVERY_S: Final = 0.2


class BusyRetry:
    """Repeats passes over partitions that another process has locked, up to ``wait_s`` seconds in total or a signal."""

    def __init__(self, stopped: list[int], wait_s: float | None = None) -> None:
        self._stopped = stopped
        self._left_s = LEASE_WAIT_S if wait_s is None else wait_s

    def run(self, work: Callable[..., _Report]) -> _Report:
        """Call ``work(wait_s=...)`` until its report is not ``busy`` or the time is up; return the last report."""
        while True:
            before = time.monotonic()
            report = work(wait_s=min(self._left_s, _ASK_EVERY_S))
            if not report.busy:
                return report
            self._left_s -= time.monotonic() - before
            if self._left_s <= 0 or self._stopped:
                self._left_s = 0.0
                return report


class PartitionErrors:
    """Errors of partitions, each printed as it occurs. The command continues with the next partition."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []
        self._busy: list[str] = []

    @contextlib.contextmanager
    def collecting(self, name: str, progress: Progress) -> Iterator[None]:
        """Print and record an error of partition ``name`` instead of raising it."""
        try:
            yield
        except (SegmentlogError, OSError) as error:
            if isinstance(error, OSError) and error.filename == _STDOUT:
                raise
            self._errors.append(error)
            with progress.hidden():
                say(f"error: {name}: {error}")

    def add_busy(self, name: str) -> None:
        """Record a partition that another process kept locked."""
        self._busy.append(name)

    def exit_status(self, stopped: list[int]) -> int:
        """Return the exit status of the command. Print partitions that stayed locked, unless a signal stopped it."""
        if self._busy and not stopped:
            say(f"error: {', '.join(self._busy)}: locked by another process; try again when it has finished")
        has_failed = bool(self._errors or self._busy)
        status = find_damage_status(self._errors) or find_exit_status(stopped)
        return status or (EXIT_FAILED if has_failed else EXIT_DONE)


class Progress:
    """A progress bar with rate and time, on stderr. It is shown only if stderr is a terminal."""

    def __init__(self, unit: str, total: int | None, *, enabled: bool = True) -> None:
        self._unit = unit
        self._total = total
        self._is_enabled = enabled and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._is_enabled:
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
                redirect_stdout=False,  # redirected results would go to stderr, whatever stdout is
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, rate="")
        return self

    def expect(self, total: int) -> None:
        """Set the total, once it is known."""
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def advance(self, count: int) -> None:
        if self._bar is not None:
            task = self._bar.tasks[0]
            rate = f"{task.speed:,.0f}/s" if task.speed else ""
            self._bar.update(self._task, advance=count, rate=rate)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Remove the bar, so that lines can be printed in its place, and draw it again afterwards."""
        if self._bar is None:
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()
