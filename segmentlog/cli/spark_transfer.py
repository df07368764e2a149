"""``segmentlog spark import`` and ``export``: records from and to whatever Spark reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from segmentlog.cli.spark_command import (
    KeyValue,
    Names,
    check_incremental,
    check_topic,
    incremental_options,
    running,
    spark_session,
)

if TYPE_CHECKING:
    from segmentlog.spark.pipelines.topic_transfer import Mode

MODES = click.Choice(["errorifexists", "append", "overwrite"])
_OPTION = click.option("--option", "options", type=KeyValue(), multiple=True, metavar="KEY=VALUE",
                       help="An option of the format, as in Spark's documentation.")  # fmt: skip


def _path(text: str) -> str | None:
    """``-`` is for formats that have no path."""
    return None if text == "-" else text


@click.command("import")
@click.argument("format", metavar="FORMAT")
@click.argument("source", metavar="PATH")
@click.argument("topic")
@_OPTION
@click.option("--schema", metavar="DDL", help="Of the source, such as 'id long, name string'; else what is there.")
@click.option("--key", type=Names(), default=(), metavar="COLUMN,...",
              help="The key: one column as it is, several as a JSON object of them.")  # fmt: skip
@click.option("--value", metavar="COLUMN", help="The value; else the whole row as a JSON object.")
@click.option("--timestamp", metavar="COLUMN", help="A time, milliseconds since 1970 or ISO 8601; else now.")
@click.option("--tombstones", is_flag=True, help="Let a value be null: it deletes its key from a compacted topic.")
@click.option("--create", type=click.IntRange(1), metavar="PARTITIONS", help="Make TOPIC if it is not there.")
@incremental_options
@click.pass_context
def import_(
    ctx: click.Context,
    format: str,
    source: str,
    topic: str,
    options: tuple[tuple[str, str], ...],
    schema: str | None,
    key: tuple[str, ...],
    value: str | None,
    timestamp: str | None,
    tombstones: bool,
    create: int | None,
    checkpoint: str | None,
    follow: bool,
    every: str,
) -> int:
    """Append the rows of PATH (- if the source has none, as jdbc) to TOPIC.

    FORMAT is one that Spark reads: parquet, json, csv, orc, jdbc, delta ... CSV has a header unless
    --option header=false. In one job, whose records become visible at once, or with --checkpoint what
    is new since the last run.

    \b
      segmentlog spark import parquet flights.parquet flights --key carrier,flight --timestamp time_hour --create 4
      segmentlog spark import json incoming/ events --checkpoint incoming.checkpoint --follow
    """
    check_incremental(checkpoint, follow)
    if create is None:
        check_topic(ctx, topic, to_write=True)
    with spark_session(ctx) as spark, running(checkpoint, follow, every) as run:
        from segmentlog.spark.pipelines.topic_transfer import Place, RecordShape, import_rows

        report = import_rows(
            spark,
            ctx.obj,
            topic,
            Place(format, _path(source), dict(options)),
            RecordShape(key, value, timestamp, tombstones),
            schema=schema,
            create=create,
            incremental=run.incremental,
        )
        return run.done(report, "imported")


@click.command()
@click.argument("topic")
@click.argument("format", metavar="FORMAT")
@click.argument("target", metavar="PATH")
@_OPTION
@click.option("--from", "start", default="earliest", show_default=True, metavar="PLACE",
              help='earliest, latest, or offsets by topic and partition: {"t": {"0": 23}}.')  # fmt: skip
@click.option("--text", is_flag=True, help="The key and the value as text, not as bytes.")
@click.option("--json-values", is_flag=True, help="The fields of values that are JSON objects as columns.")
@click.option("--schema", metavar="DDL", help="Which fields; else those of the first and last records.")
@click.option("--metadata", is_flag=True,
              help="With --json-values: also _key, _partition, _offset and _timestamp.")  # fmt: skip
@click.option("--strict", is_flag=True, help="With --json-values: fail at a value that is no such object.")
@click.option("--partition-by", type=Names(), default=(), metavar="COLUMN,...",
              help="Folders by these columns; date is that of the record's timestamp.")  # fmt: skip
@click.option("--mode", type=MODES, help="What to do if there is something in PATH.  [default: errorifexists]")
@incremental_options
@click.pass_context
def export(
    ctx: click.Context,
    topic: str,
    format: str,
    target: str,
    options: tuple[tuple[str, str], ...],
    start: str,
    text: bool,
    json_values: bool,
    schema: str | None,
    metadata: bool,
    strict: bool,
    partition_by: tuple[str, ...],
    mode: str | None,
    checkpoint: str | None,
    follow: bool,
    every: str,
) -> int:
    """Write the records of TOPIC to PATH (- if the sink has none, as jdbc).

    FORMAT is one that Spark writes: parquet, json, csv, orc, jdbc, delta ... The columns are key, value,
    topic, partition, offset, timestamp and headers, or with --json-values the fields of the values. CSV
    takes text only, and has a header unless --option header=false. With --checkpoint what is new since
    the last run is added, to files exactly once.

    \b
      segmentlog spark export clicks parquet clicks.parquet --partition-by date
      segmentlog spark export clicks json clicks/ --json-values --checkpoint clicks.checkpoint --follow
    """
    check_incremental(checkpoint, follow)
    if checkpoint is not None and mode not in (None, "append"):
        raise click.UsageError(f"--mode {mode} does not go with --checkpoint, which adds to what is there")
    if not json_values and (schema is not None or metadata or strict):
        raise click.UsageError("--schema, --metadata and --strict are of --json-values")
    check_topic(ctx, topic)
    with spark_session(ctx) as spark, running(checkpoint, follow, every) as run:
        from segmentlog.spark.pipelines.topic_transfer import Place, RowShape, export_records

        report = export_records(
            spark,
            ctx.obj,
            topic,
            Place(format, _path(target), dict(options)),
            RowShape(text, json_values, schema, metadata, strict),
            start=start,
            partition_by=partition_by,
            mode=cast("Mode", mode or "errorifexists"),
            incremental=run.incremental,
        )
        return run.done(report, "exported")
