"""``segmentlog spark import`` and ``export``: records from and to all formats that Spark supports."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from segmentlog.cli.spark_command import (
    KeyValue,
    Names,
    check_incremental,
    check_topic,
    incremental_options,
    open_run,
    spark_session,
)

if TYPE_CHECKING:
    from segmentlog.spark.pipelines.topic_transfer import Mode

MODES = click.Choice(["errorifexists", "append", "overwrite"])
_OPTION = click.option("--option", "options", type=KeyValue(), multiple=True, metavar="KEY=VALUE",
                       help="An option of the format; see Spark's documentation.")  # fmt: skip


def _path(text: str) -> str | None:
    """Return the path, or None for ``-``: some formats have no path."""
    return None if text == "-" else text


@click.command("import")
@click.argument("format", metavar="FORMAT")
@click.argument("source", metavar="PATH")
@click.argument("topic")
@_OPTION
@click.option(
    "--schema", metavar="DDL", help="Schema of the source, such as 'id long, name string'; default: detected."
)
@click.option("--key", type=Names(), default=(), metavar="COLUMN,...",
              help="Columns of the key: one is used unchanged, several as a JSON object.")  # fmt: skip
@click.option("--value", metavar="COLUMN", help="Column of the value; default: the whole row as a JSON object.")
@click.option(
    "--timestamp",
    metavar="COLUMN",
    help="Column of the timestamp: a time, milliseconds since 1970 or ISO 8601; default: now.",
)
@click.option("--tombstones", is_flag=True, help="Allow null values, which delete their key from a compacted topic.")
@click.option("--create", type=click.IntRange(1), metavar="PARTITIONS", help="Create TOPIC if it does not exist.")
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
    """Append the rows of PATH (- if the source has no path, such as jdbc) to TOPIC.

    FORMAT is any that Spark reads: parquet, json, csv, orc, jdbc, delta ... CSV files need a header row, unless
    --option header=false is given. Runs as one job, whose records become visible together, or with --checkpoint on the
    data since the last run.

    \b
      segmentlog spark import parquet flights.parquet flights --key carrier,flight --timestamp time_hour --create 4
      segmentlog spark import json incoming/ events --checkpoint incoming.checkpoint --follow
    """
    check_incremental(checkpoint, follow)
    if create is None:
        check_topic(ctx, topic, to_write=True)
    with spark_session(ctx) as spark, open_run(checkpoint, follow, every) as run:
        from segmentlog.spark.pipelines.topic_transfer import RecordShape, SparkEndpoint, import_rows

        report = import_rows(
            spark,
            ctx.obj,
            topic,
            SparkEndpoint(format, _path(source), dict(options)),
            RecordShape(key, value, timestamp, tombstones),
            schema=schema,
            create=create,
            incremental=run.incremental,
        )
        return run.finish(report, "imported")


@click.command()
@click.argument("topic")
@click.argument("format", metavar="FORMAT")
@click.argument("target", metavar="PATH")
@_OPTION
@click.option("--from", "start", default="earliest", show_default=True, metavar="PLACE",
              help='earliest, latest, or offsets by topic and partition: {"t": {"0": 23}}.')  # fmt: skip
@click.option("--text", is_flag=True, help="Write key and value as text, not as bytes.")
@click.option("--json-values", is_flag=True, help="Use the fields of JSON object values as columns.")
@click.option("--schema", metavar="DDL", help="The fields; default: those of the first and last records.")
@click.option("--metadata", is_flag=True,
              help="With --json-values: add _key, _partition, _offset and _timestamp.")  # fmt: skip
@click.option("--strict", is_flag=True, help="With --json-values: fail at a value that is not a JSON object.")
@click.option("--partition-by", type=Names(), default=(), metavar="COLUMN,...",
              help="Write folders by these columns; date is the date of the record's timestamp.")  # fmt: skip
@click.option("--mode", type=MODES, help="What to do if PATH exists.  [default: errorifexists]")
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
    """Write the records of TOPIC to PATH (- if the sink has no path, such as jdbc).

    FORMAT is any that Spark writes: parquet, json, csv, orc, jdbc, delta ... The columns are key, value, topic,
    partition, offset, timestamp and headers, or with --json-values the fields of the values. CSV supports text only,
    and gets a header row unless --option header=false is given. With --checkpoint, each run adds the records since the
    last run; to files it does so exactly once.

    \b
      segmentlog spark export clicks parquet clicks.parquet --partition-by date
      segmentlog spark export clicks json clicks/ --json-values --checkpoint clicks.checkpoint --follow
    """
    check_incremental(checkpoint, follow)
    if checkpoint is not None and mode not in (None, "append"):
        raise click.UsageError(f"--mode {mode} and --checkpoint exclude each other: --checkpoint appends")
    if not json_values and (schema is not None or metadata or strict):
        raise click.UsageError("--schema, --metadata and --strict need --json-values")
    check_topic(ctx, topic)
    with spark_session(ctx) as spark, open_run(checkpoint, follow, every) as run:
        from segmentlog.spark.pipelines.topic_transfer import RowShape, SparkEndpoint, export_records

        report = export_records(
            spark,
            ctx.obj,
            topic,
            SparkEndpoint(format, _path(target), dict(options)),
            RowShape(text, json_values, schema, metadata, strict),
            start=start,
            partition_by=partition_by,
            mode=cast("Mode", mode or "errorifexists"),
            incremental=run.incremental,
        )
        return run.finish(report, "exported")
