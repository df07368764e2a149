"""``segmentlog spark table``: keep a topic as a table, up to date."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from segmentlog.cli.common import EXIT_DONE, describe_stop, find_exit_status, say
from segmentlog.cli.option_types import DURATION_MS, complete_topic, json_option
from segmentlog.cli.spark_archive import cancellable
from segmentlog.cli.spark_command import check_topic, require_spark, spark_session
from segmentlog.cli.table_output import show_json

if TYPE_CHECKING:
    from segmentlog.spark.pipelines.archive_folder import OnStep
    from segmentlog.spark.pipelines.latest_rows import TableReport


@click.command()
@click.argument("topic", shell_complete=complete_topic)
@click.argument("path")
@click.option("--format", "shape", type=click.Choice(["parquet", "delta"]), default="parquet", show_default=True,
              help="Format of the table; delta needs Delta Lake.")  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Keep updating the table.")
@click.option("--every", "every_ms", type=DURATION_MS, default="10s", show_default=True, metavar="TIME",
              help="With --follow: time between updates.")  # fmt: skip
@click.option("--json-values", is_flag=True, help="Use the fields of JSON object values as columns.")
@click.option("--schema", metavar="DDL", help="The fields, such as 'id long, name string'; default: from a sample.")
@click.option("--buckets", type=click.IntRange(1), metavar="N",
              help="Number of files. An update rewrites those that change. (8 to 64, by size)")  # fmt: skip
@click.option("--skip-null-keys", is_flag=True, help="Skip records without a key instead of failing.")
@click.option("--rebuild", is_flag=True, help="Rebuild the table from all records of the topic.")
@json_option
@click.pass_context
def table(
    ctx: click.Context,
    topic: str,
    path: str,
    shape: str,
    follow: bool,
    every_ms: int,
    json_values: bool,
    schema: str | None,
    buckets: int | None,
    skip_null_keys: bool,
    rebuild: bool,
    as_json: bool,
) -> int:
    """Keep the latest row of each key of TOPIC as a table at PATH; each run reads the new records only.

    A record without a value deletes the row of its key. spark.read.parquet(PATH) reads the table as of one version,
    even during an update.
    """
    if shape == "delta" and buckets is not None:
        raise click.UsageError("--buckets is for Parquet: Delta manages its own files")
    reports: list[TableReport] = []

    def show(report: TableReport) -> None:
        if as_json and (report.records or not reports):
            show_json(report)
        if report.records or not reports:
            say(_summary(report))
        reports.append(report)

    check_topic(ctx, topic)
    require_spark()
    from segmentlog.spark.pipelines.latest_rows import follow_table, update_table
    from segmentlog.spark.pipelines.table_delta import update_delta

    with spark_session(ctx) as spark:
        update = partial(update_table, buckets=buckets) if shape == "parquet" else update_delta
        run = partial(
            update, spark, ctx.obj, topic, path, json_values=json_values, schema=schema, skip_null_keys=skip_null_keys
        )

        def work(on_step: OnStep, stopped: list[int]) -> None:
            if not follow:
                show(run(rebuild=rebuild, on_step=on_step))
                return
            follow_table(
                lambda: run(rebuild=rebuild and not reports, on_step=on_step),
                every_ms / 1000,
                lambda: bool(stopped),
                show,
            )

        _, stopped = cancellable(spark, work)
    if follow:
        return EXIT_DONE
    if not reports:
        say(f"the table is unchanged{describe_stop(stopped)}")
    return find_exit_status(stopped)


def _summary(report: TableReport) -> str:
    """Describe an update in one line."""
    left_out = f"; {report.skipped:,} records without a key skipped" if report.skipped else ""
    return (
        f"version {report.version}: {report.records:,} records read in {report.seconds:.1f} s,"
        f" {report.inserted:,} rows inserted, {report.updated:,} updated, {report.deleted:,} deleted;"
        f" {report.rows:,} rows{left_out}"
    )
