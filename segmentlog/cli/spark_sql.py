"""``segmentlog spark sql``: run a query in which every topic is a view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import click

from segmentlog.cli.common import EXIT_DONE, open_store, say
from segmentlog.cli.spark_command import KeyValue, PipelineRun, spark_session
from segmentlog.cli.spark_transfer import MODES
from segmentlog.cli.table_output import show_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from segmentlog.spark.pipelines.topic_transfer import Mode

_TABLE_ROWS = 100


@click.command()
@click.argument("query")
@click.option("--schema", "schemas", type=KeyValue(), multiple=True, metavar="TOPIC=DDL",
              help="Fields of a topic's values; default: those of its first and last records.")  # fmt: skip
@click.option(
    "--strict", is_flag=True, help="Fail at a value that is not a JSON object, instead of using a row of nulls."
)
@click.option("--limit", type=click.IntRange(1), metavar="ROWS",
              help="Print at most this many rows.  [default: 100; with --json all]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option("-o", "--output", metavar="PATH", help="Write the rows to a folder instead of printing them.")
@click.option("--format", metavar="FORMAT",
              help="Format of --output: parquet, csv, json, orc, delta ...; default: by its ending.")  # fmt: skip
@click.option("--mode", type=MODES, default="errorifexists", show_default=True,
              help="What to do if --output exists.")  # fmt: skip
@click.pass_context
def sql(
    ctx: click.Context,
    query: str,
    schemas: tuple[tuple[str, str], ...],
    strict: bool,
    limit: int | None,
    as_json: bool,
    output: str | None,
    format: str | None,
    mode: str,
) -> int:
    """Run QUERY, in Spark SQL, over the topics of the store.

    Each topic is a view. Its columns are the fields of JSON object values, and _key, _value, _partition, _offset,
    _timestamp and _headers. Read bytes with cast(_value AS string). Put names with other characters than letters,
    digits and _ in backticks.

    \b
      segmentlog spark sql "select carrier, avg(dep_delay) from flights group by carrier"
      segmentlog spark sql 'select _key, count(*) from `my-topic` group by _key' --json
    """
    if output is not None and (as_json or limit):
        raise click.UsageError("--output excludes --json and --limit, which print the rows")
    with open_store(ctx, read_only=True):
        pass  # fail before Spark starts if the store does not exist
    with spark_session(ctx) as spark:
        from segmentlog.spark.pipelines.topic_views import query as run_query
        from segmentlog.spark.pipelines.topic_views import save

        run = PipelineRun(None, [])
        rows = run_query(spark, ctx.obj, query, schemas=dict(schemas), strict=strict)
        if output is not None:
            return run.finish(save(rows, output, format, cast("Mode", mode)), f"written to {output}")
        show_rows(rows, as_json=as_json, limit=limit)
        return EXIT_DONE


def show_rows(rows: DataFrame, *, as_json: bool, limit: int | None) -> None:
    """Print rows as JSON or as a table, and their number."""
    from segmentlog.spark.pipelines import topic_views as pipeline

    if not rows.columns:  # for a command such as CREATE VIEW
        return
    if as_json:
        count = 0
        for (line,) in pipeline.as_json(rows if limit is None else rows.limit(limit)).toLocalIterator():
            click.echo(line)
            count += 1
        say(f"{count:,} rows")
        return
    shown = limit or _TABLE_ROWS
    found = pipeline.format_for_display(rows.limit(shown + 1)).collect()
    show_table(rows.columns, [[_cell(cell) for cell in row] for row in found[:shown]])
    more = " shown; more with --limit, all with --json or --output"
    say(f"{min(len(found), shown):,} rows{more if len(found) > shown else ''}")


def _cell(cell: Any) -> Any:
    """Return bytes as text, with escapes for what is not UTF-8."""
    return bytes(cell).decode("utf-8", "backslashreplace") if isinstance(cell, bytes | bytearray) else cell
