"""``segmentlog spark aggregate``: aggregate the records of a topic in windows of event time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import click

from segmentlog.cli.common import EXIT_DONE
from segmentlog.cli.spark_command import (
    Names,
    check_incremental,
    check_topic,
    incremental_options,
    open_run,
    require_spark,
    spark_session,
)
from segmentlog.cli.spark_sql import show_rows

if TYPE_CHECKING:
    from segmentlog.spark.pipelines.aggregate import Windows


@click.command()
@click.argument("topic")
@click.option("--window", "length", required=True, metavar="TIME", help="Length of a window, such as 1h.")
@click.option("--slide", metavar="TIME", help="Time between window starts; default: the length.")
@click.option("--agg", "aggregates", multiple=True, default=("count",), metavar="AGGREGATE",
              help="count, sum(X), avg(X), min(X), max(X), p50(X), p99.9(X) ...; X is a column or SQL expression."
              " 'avg(X) AS NAME' names it.  [default: count]")  # fmt: skip
@click.option("--key", "keys", type=Names(), default=(), metavar="COLUMN,...", help="Group windows by these columns.")
@click.option("--where", metavar="SQL", help="Aggregate only these rows, such as 'dep_delay is not null'.")
@click.option("--time", metavar="COLUMN",
              help="Event time: a time, milliseconds since 1970 or ISO 8601; default: the record's"
                   " timestamp.")  # fmt: skip
@click.option("--schema", metavar="DDL", help="Fields of the values; default: those of the first and last records.")
@click.option(
    "--strict", is_flag=True, help="Fail at a value that is not a JSON object, instead of using a row of nulls."
)
@click.option("--from", "start", default="earliest", show_default=True, metavar="PLACE",
              help='earliest, latest, or offsets by topic and partition: {"t": {"0": 23}}.')  # fmt: skip
@click.option("--limit", type=click.IntRange(1), metavar="ROWS",
              help="Print at most this many windows.  [default: 100; with --json all]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option("--to", metavar="TOPIC", help="Write the windows to a topic instead of printing them.")
@click.option(
    "--create", type=click.IntRange(1), metavar="PARTITIONS", help="Create the topic --to if it does not exist."
)
@click.option("--mode", type=click.Choice(["append", "update"]), default="append", show_default=True,
              help="With --checkpoint: write a window once when it is complete (append), or at each change"
                   " (update).")  # fmt: skip
@click.option("--watermark", default="10m", show_default=True, metavar="TIME",
              help="With --checkpoint: count records that are at most this much older than the latest.")  # fmt: skip
@incremental_options
@click.pass_context
def aggregate(
    ctx: click.Context,
    topic: str,
    length: str,
    slide: str | None,
    aggregates: tuple[str, ...],
    keys: tuple[str, ...],
    where: str | None,
    time: str | None,
    schema: str | None,
    strict: bool,
    start: str,
    limit: int | None,
    as_json: bool,
    to: str | None,
    create: int | None,
    mode: str,
    watermark: str,
    checkpoint: str | None,
    follow: bool,
    every: str,
) -> int:
    """Aggregate the JSON values of TOPIC in windows of time: count, sum, average, percentiles.

    Prints the windows, or writes them to the topic --to, one record each: its key is a JSON object with the columns of
    --key and window_start; its value adds window_end and the aggregates; its timestamp is window_start. Runs as one
    job, or with --checkpoint on the records since the last run.

    \b
      segmentlog spark aggregate flights --window 1h --key carrier --agg count --agg 'p99(dep_delay)'
      segmentlog spark aggregate flights --window 1h --to hourly --create 1 --checkpoint hourly.checkpoint --follow
    """
    check_incremental(checkpoint, follow)
    _check_target(to, checkpoint, create, mode, prints=as_json or limit is not None)
    require_spark()
    windows = _windows(aggregates, length, slide, keys, time, where, watermark)
    check_topic(ctx, topic)
    if to is not None and create is None:
        check_topic(ctx, to, to_write=True)
    with spark_session(ctx) as spark:
        from segmentlog.spark.pipelines import aggregate as pipeline

        if to is None:
            rows = pipeline.aggregate(spark, ctx.obj, topic, windows, schema=schema, start=start, strict=strict)
            show_rows(rows, as_json=as_json, limit=limit)
            return EXIT_DONE
        with open_run(checkpoint, follow, every) as run:
            report = pipeline.aggregate_to(
                spark, ctx.obj, topic, windows, to, schema=schema, start=start, strict=strict, create=create,
                mode=cast("Literal['append', 'update']", mode), incremental=run.incremental,
            )  # fmt: skip
            return run.finish(report, f"aggregated to {to}")


def _check_target(to: str | None, checkpoint: str | None, create: int | None, mode: str, *, prints: bool) -> None:
    """Raise UsageError for options that do not fit the output."""
    if to is None and (checkpoint is not None or create is not None):
        raise click.UsageError("--checkpoint and --create need --to TOPIC")
    if to is not None and prints:
        raise click.UsageError("--to excludes --json and --limit, which print the windows")
    if mode == "update" and checkpoint is None:
        raise click.UsageError("--mode update needs --checkpoint DIR")


def _windows(
    aggregates: tuple[str, ...],
    length: str,
    slide: str | None,
    keys: tuple[str, ...],
    time: str | None,
    where: str | None,
    watermark: str,
) -> Windows:
    from segmentlog.spark.pipelines.aggregate import InvalidAggregation, Windows, parse_aggregate

    try:
        parsed = tuple(map(parse_aggregate, aggregates))
    except InvalidAggregation as error:
        raise click.UsageError(str(error)) from None
    return Windows(parsed, length, slide, keys, time, where, watermark)
