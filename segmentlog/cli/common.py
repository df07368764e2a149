"""What commands share: opening the store, exit statuses, ending quietly, printing."""

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
        say(f"error: {error.format_message()}")
        return EXIT_FAILED
    except click.Abort:
        say("stopped")
        if not sys.stdout.isatty():
            _forget_stdout()  # it may be a pipe that nobody reads: then the exit would wait for ever
        return EXIT_FAILED
    except (ReaderGone, BrokenPipeError):
        _forget_stdout()
        return EXIT_DONE
    except CorruptBatch as error:
        say(f"error: {error}")
        return status_of_damage([error])
    except (SegmentlogError, LogTruncated) as error:
        say(f"error: {error}")
        return EXIT_FAILED
    except OSError as error:
        if error.filename == _STDOUT:
            _forget_stdout()
        say(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return EXIT_FAILED


# ---------------------------------------------------------------- standard streams

_STDOUT: Final = "stdout"


class ReaderGone(Exception):
    """Whoever read stdout has seen enough (`| head`): no failure. No OSError, as click answers those itself."""


class _Results(io.FileIO):
    """Stdout, whose errors tell that it was stdout that failed, and not the store."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise ReaderGone from None
        except OSError as error:
            error.filename = _STDOUT
            raise


def prepare_process() -> None:
    """What only a process of its own may change: its standard streams, what SIGTERM does to it, how it starts.

    Descriptors 0 to 2 that are closed (`>&-`) are opened the wrong way round, as coreutils'
    stdopen does: no file of the store gets their numbers, and using them fails.
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
        io.BufferedWriter(_Results(1, "wb", closefd=False)),
        encoding=before.encoding if before else "utf-8",
        errors="backslashreplace" if errors == "strict" else errors,  # a name that a Latin-1 terminal has not
        line_buffering=before.line_buffering if isinstance(before, io.TextIOWrapper) else False,
    )
    global _quiet
    _quiet = True
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    sys.unraisablehook = _hear_again
    # numpy's linear algebra, of which nothing is used, starts a thread a core: 0.1 s of a processor.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


_quiet = False
"""Whether this process is the command line's own, so that it may be ended."""


def _leave(number: int, frame: object) -> None:
    """A signal while modules load: there is nothing to finish, and a traceback through them tells nobody anything."""
    os._exit(128 + number)


def _hear_again(lost: sys.UnraisableHookArgs) -> None:
    """Python drops an exception that ends a finalizer or another callback: who asked us to stop would wait in vain."""
    raising = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    if not isinstance(lost.exc_value, KeyboardInterrupt) or not raising:
        sys.__unraisablehook__(lost)
        return
    main = threading.main_thread().ident
    assert main is not None
    with contextlib.suppress(RuntimeError):  # no thread can be started: this process is ending
        _thread.start_new_thread(_repeat_signal, (main, raising[0]))


def _repeat_signal(thread_id: int, number: int) -> None:
    """Send the signal once more, after the thread has left the hook: an exception in the hook would be dropped, too."""
    is_in_hook = True
    while is_in_hook:
        time.sleep(_AGAIN_S)
        frame = sys._current_frames().get(thread_id)
        while frame is not None and frame.f_code is not _hear_again.__code__:
            frame = frame.f_back
        is_in_hook = frame is not None
    signal.pthread_kill(thread_id, number)


_AGAIN_S: Final = 0.02


def end_loading() -> None:
    """From here on SIGINT and SIGTERM raise KeyboardInterrupt: what a command makes for a while it deletes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Within: import what takes time. A signal ends the process as it does before a command begins."""
    raising = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if _quiet and signal.getsignal(number) is signal.default_int_handler
    ]
    for number in raising:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in raising:
            signal.signal(number, signal.default_int_handler)


def check_stdin() -> None:
    """Raises ClickException when stdin is closed."""
    if fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        raise click.ClickException("stdin is closed: name a file, or pipe something in")


def _forget_stdout() -> None:
    """Python flushes stdout once more at exit: into nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """A line for the person at the terminal: stderr, so that stdout is results only."""
    with contextlib.suppress(OSError):  # nobody listens, or there is no room: no reason to fail
        click.echo(visible(text), err=True)


@contextlib.contextmanager
def open_store(
    ctx: click.Context, *, create: bool = False, read_only: bool = False, background: bool = True
) -> Iterator[LogStore]:
    """The store of ``--dir``, closed cleanly however the command ends."""
    with loading():
        import segmentlog.store  # which loads numpy

    with segmentlog.open(ctx.obj, create=create, read_only=read_only, background=background) as store:
        yield store


def store_folder(ctx: click.Context) -> str:
    """``--dir``, for a command that is not for stores in an object store. Raises UsageError."""
    from segmentlog.objects.bucket.url import is_url

    folder: str = ctx.obj
    if is_url(folder):
        raise click.UsageError("--dir: what was shipped to an object store is only read there; name a store's folder")
    return folder


class Stop(Exception):
    """SIGINT or SIGTERM arrived."""


@contextlib.contextmanager
def stoppable(on_signal: Any = None) -> Iterator[list[int]]:
    """Within: SIGINT and SIGTERM do not kill; they add themselves to the list, and call ``on_signal``.

    Loops look at the list after each batch, finish the batch in hand and say what was done. Who
    asks twice does not want to wait for that: the second signal interrupts. A signal that the
    process was started to ignore (nohup, a shell's background job) stays ignored.
    """
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        if on_signal is not None:
            on_signal()

    wanted = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def status_of(stopped: list[int]) -> int:
    """The exit status of a command that was to go to an end: what a shell says of a process that a signal ended."""
    return 128 + stopped[0] if stopped else EXIT_DONE


def status_of_damage(errors: Iterable[Exception]) -> int:
    """The exit status for the damage among ``errors``; 0 without any."""
    damage = [error for error in errors if isinstance(error, CorruptBatch)]
    if not damage:
        return EXIT_DONE
    return EXIT_UNREADABLE if all(isinstance(error, UnreadableBatch) for error in damage) else EXIT_DAMAGE


class Skipped:
    """Offsets that a command with ``--skip-damaged`` skipped."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], tuple[int, CorruptBatch]] = {}

    def note(self, partition: str, base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        """Note offsets ``[base_offset, end_offset)`` of a partition such as t/0. Idempotent."""
        known, _ = self._found.get((partition, end_offset), (base_offset, damage))
        self._found[partition, end_offset] = min(known, base_offset), damage

    def report(self) -> int:
        """Print the offsets on stderr; return the exit status for them, 0 without any."""
        for (partition, end_offset), (base_offset, damage) in self._found.items():
            what = "unreadable" if isinstance(damage, UnreadableBatch) else "damaged"
            say(f"{partition}: skipped {what} offsets {base_offset} to {end_offset - 1} ({damage.path})")
        if len(self._found) > 1:
            say(f"{len(self._found):,} ranges of offsets were skipped")
        return status_of_damage(damage for _, damage in self._found.values())


def stopped_by(stopped: list[int]) -> str:
    """The end of a summary."""
    return f"; stopped by {signal.Signals(stopped[0]).name}" if stopped else ""


LEASE_WAIT_S: Final = 10.0
_ASK_EVERY_S: Final = 0.2


class Patience:
    """Asks again for what another process is busy with: so long, in all, or until a signal came."""

    def __init__(self, stopped: list[int], wait_s: float | None = None) -> None:
        self._stopped = stopped
        self._left_s = LEASE_WAIT_S if wait_s is None else wait_s

    def with_(self, work: Callable[..., _Report]) -> _Report:
        """Call ``work(wait_s=...)`` until its report is not ``busy``."""
        while True:
            before = time.monotonic()
            report = work(wait_s=min(self._left_s, _ASK_EVERY_S))
            if not report.busy:
                return report
            self._left_s -= time.monotonic() - before
            if self._left_s <= 0 or self._stopped:
                self._left_s = 0.0
                return report


class Failures:
    """Partitions that a command could not do its work on: each is told, and the others have their turn."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []
        self._busy: list[str] = []

    @contextlib.contextmanager
    def noted(self, name: str, progress: Progress) -> Iterator[None]:
        """Within: an error is told as that of ``name``, and goes no further."""
        try:
            yield
        except (SegmentlogError, OSError) as error:
            if isinstance(error, OSError) and error.filename == _STDOUT:
                raise
            self._errors.append(error)
            with progress.hidden():
                say(f"error: {name}: {error}")

    def busy(self, name: str) -> None:
        """Another process had the partition, and did not let go of it in time."""
        self._busy.append(name)

    def status(self, stopped: list[int]) -> int:
        """The exit status. Tells who was busy, unless a signal ended the waiting."""
        if self._busy and not stopped:
            say(f"error: {', '.join(self._busy)}: another process is at it; try again when it is done")
        has_failed = bool(self._errors or self._busy)
        return status_of_damage(self._errors) or status_of(stopped) or (EXIT_FAILED if has_failed else EXIT_DONE)


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
                redirect_stdout=False,  # results would go to stderr, whatever stdout is
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, rate="")
        return self

    def expect(self, total: int) -> None:
        """Say how much there is to do, once it is known."""
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def advance(self, count: int) -> None:
        if self._bar is not None:
            task = self._bar.tasks[0]
            rate = f"{task.speed:,.0f}/s" if task.speed else ""
            self._bar.update(self._task, advance=count, rate=rate)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Within: no bar, so that lines may be printed where it was."""
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
