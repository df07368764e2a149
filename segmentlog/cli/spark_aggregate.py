"""``segmentlog spark aggregate``: windows of event time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import click

from segmentlog.cli.common import EXIT_DONE
from segmentlog.cli.spark_command import (
    Names,
    check_incremental,
    check_topic,
    incremental_options,
    require_spark,
    running,
    spark_session,
)
from segmentlog.cli.spark_sql import show_rows

if TYPE_CHECKING:
    from segmentlog.spark.pipelines.aggregate import Windows


@click.command()
@click.argument("topic")
@click.option("--window", "length", required=True, metavar="TIME", help="How long a window is, such as 1h.")
@click.option("--slide", metavar="TIME", help="How often one begins; else when the last one ends.")
@click.option("--agg", "aggregates", multiple=True, default=("count",), metavar="AGGREGATE",
              help="count, sum(X), avg(X), min(X), max(X), p50(X), p99.9(X) ...; X is a column or an expression of SQL."
              " 'avg(X) AS NAME' names it.  [default: count]")  # fmt: skip
@click.option("--key", "keys", type=Names(), default=(), metavar="COLUMN,...", help="Windows by these columns.")
@click.option("--where", metavar="SQL", help="Which rows count, such as 'dep_delay is not null'.")
@click.option("--time", metavar="COLUMN",
              help="When it was: time, milliseconds since 1970 or ISO 8601; else the record's timestamp.")  # fmt: skip
@click.option("--schema", metavar="DDL", help="The fields of the values; else those of the first and last records.")
@click.option("--strict", is_flag=True, help="Fail at a value that is no JSON object, instead of a row of nulls.")
@click.option("--from", "start", default="earliest", show_default=True, metavar="PLACE",
              help='earliest, latest, or offsets by topic and partition: {"t": {"0": 23}}.')  # fmt: skip
@click.option("--limit", type=click.IntRange(1), metavar="ROWS",
              help="Print no more windows.  [default: 100; with --json all]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@click.option("--to", metavar="TOPIC", help="Write the windows to a topic instead of printing them.")
@click.option("--create", type=click.IntRange(1), metavar="PARTITIONS", help="Make the topic --to if it is not there.")
@click.option("--mode", type=click.Choice(["append", "update"]), default="append", show_default=True,
              help="With --checkpoint: write a window once, when it is complete, or whenever it changed.")  # fmt: skip
@click.option("--watermark", default="10m", show_default=True, metavar="TIME",
              help="With --checkpoint: how late a record may come, after the latest, and be counted.")  # fmt: skip
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
    """Count, add up and average what the values of TOPIC, JSON objects, say in windows of time.

    Prints the windows, or writes them --to a topic: one record each, whose key is a JSON object of --key
    and window_start, whose value has these, window_end and the aggregates, and whose timestamp is
    window_start. In one job, or with --checkpoint what is new since the last run.

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
        with running(checkpoint, follow, every) as run:
            report = pipeline.aggregate_to(
                spark, ctx.obj, topic, windows, to, schema=schema, start=start, strict=strict, create=create,
                mode=cast("Literal['append', 'update']", mode), incremental=run.incremental,
            )  # fmt: skip
            return run.done(report, f"aggregated to {to}")


def _check_target(to: str | None, checkpoint: str | None, create: int | None, mode: str, *, prints: bool) -> None:
    """Raise UsageError for options that do not go with where the windows go."""
    if to is None and (checkpoint is not None or create is not None):
        raise click.UsageError("--checkpoint and --create are for --to TOPIC, which takes the windows")
    if to is not None and prints:
        raise click.UsageError("--to writes the windows, --json and --limit print them: give one of them")
    if mode == "update" and checkpoint is None:
        raise click.UsageError("--mode update is of a query that goes on: give --checkpoint DIR")


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
