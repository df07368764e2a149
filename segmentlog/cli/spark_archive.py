"""``segmentlog spark archive`` and ``segmentlog spark restore``: a topic's history as Parquet files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import click

from segmentlog.cli.common import EXIT_DAMAGE, StopRequested, describe_stop, find_exit_status, say
from segmentlog.cli.option_types import POSITION, StartPosition, complete_topic, json_option
from segmentlog.cli.spark_command import KeyValue, cancel_jobs_on_signals, check_topic, require_spark, spark_session
from segmentlog.cli.table_output import show_json, show_table
from segmentlog.quantities import format_size

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from segmentlog.spark.pipelines.archive import ArchiveReport
    from segmentlog.spark.pipelines.archive_folder import OnStep
    from segmentlog.spark.pipelines.archive_restore import RestoreReport

T = TypeVar("T")

_STOPPABLE: Final = ("writing", "verifying", "noting the intent", "staging", "appending", "counting", "building")
# A job that ends before one of these steps leaves nothing half done.


def cancellable(spark: SparkSession, work: Callable[[OnStep, list[int]], T]) -> tuple[T | None, list[int]]:
    """Call ``work(on_step, signals)``. A signal cancels its Spark jobs. Return (result, received signals).

    The result is None if a signal ended the work.
    """
    from segmentlog.spark.spark_errors import SparkFailed

    last_step = ""

    def on_step(step: str) -> None:
        nonlocal last_step
        if stopped and step in _STOPPABLE:
            raise StopRequested
        if step != last_step and sys.stderr.isatty():
            say(f"{step} ...")
        last_step = step

    with cancel_jobs_on_signals(spark) as stopped:
        try:
            return work(on_step, stopped), stopped
        except StopRequested:
            return None, stopped
        except SparkFailed:
            if not stopped:
                raise
            return None, stopped


@click.command()
@click.argument("topic", shell_complete=complete_topic)
@click.argument("folder", metavar="DIR")
@click.option("--trim", is_flag=True, help="Afterwards delete the archived and verified records from the log.")
@click.option("--upto", type=POSITION, metavar="PLACE",
              help="Archive only records below this offset, or before this time.")  # fmt: skip
@click.option("--allow-gaps", is_flag=True, help="Continue although records were deleted before they were archived.")
@json_option
@click.pass_context
def archive(
    ctx: click.Context,
    topic: str,
    folder: str,
    trim: bool,
    upto: StartPosition | None,
    allow_gaps: bool,
    as_json: bool,
) -> int:
    """Archive the sealed segments of TOPIC in DIR as Parquet by date; each run adds the new ones.

    Records count as archived once the count and checksum of the written files match the log. DIR can be read with
    spark.read.parquet at any time. The active segment is not archived until it is full or old enough (segment.ms).
    """
    if upto is not None and upto.kind not in ("offset", "time"):
        raise click.UsageError("--upto: give an offset, or a time such as 2026-07-31 or -7d")
    check_topic(ctx, topic)
    require_spark()
    from segmentlog.spark.pipelines.archive import archive as archive_topic
    from segmentlog.spark.pipelines.archive_folder import ArchiveDamaged, ArchiveFolder

    ArchiveFolder(folder)  # report a wrong folder before Spark starts
    with spark_session(ctx) as spark:
        work = partial(
            archive_topic,
            spark,
            ctx.obj,
            topic,
            folder,
            trim=trim,
            upto=upto.number if upto and upto.kind == "offset" else None,
            upto_ms=upto.number if upto and upto.kind == "time" else None,
            allow_gaps=allow_gaps,
        )
        try:
            report, stopped = cancellable(spark, lambda on_step, _: work(on_step=on_step))
        except ArchiveDamaged as error:
            say(f"error: {error}")
            return EXIT_DAMAGE
    if report is None:
        say(f"nothing was archived{describe_stop(stopped)}")
        return find_exit_status(stopped)
    _show_archive(report, as_json)
    return 0


def _show_archive(report: ArchiveReport, as_json: bool) -> None:
    if as_json:
        show_json(report)
    elif partitions := sorted({*report.ranges, *report.trimmed}):
        rows = []
        for number in partitions:
            start, end = report.ranges.get(number, (None, None))
            gap = report.gaps.get(number)
            begins = report.trimmed.get(number)
            cells = "-" if gap is None else f"{gap[0]} to {gap[1] - 1}", None if begins is None else begins[1]
            rows.append((number, start, end, *cells))
        show_table(("partition", "from", "to", "gap", "log start"), rows)
    if report.finished is not None:
        say(f"finished run {report.finished}, which was interrupted")
    if report.run is None:
        say("nothing new to archive" + (f"; trimmed {_trimmed(report):,} offsets" if report.trimmed else ""))
        return
    say(
        f"{report.records:,} records archived and verified in {report.seconds:.1f} s: {report.files} files,"
        f" {format_size(report.size_bytes)}, in {report.folder}"
        + (f"; trimmed {_trimmed(report):,} offsets" if report.trimmed else "")
    )


def _trimmed(report: ArchiveReport) -> int:
    return sum(end - start for start, end in report.trimmed.values())


@click.command()
@click.argument("folder", metavar="DIR")
@click.argument("topic")
@click.option("-c", "--config", "pairs", type=KeyValue(), multiple=True, metavar="KEY=VALUE",
              help="Setting of the created topic (default: retention.ms is -1).")  # fmt: skip
@json_option
@click.pass_context
def restore(ctx: click.Context, folder: str, topic: str, pairs: tuple[tuple[str, str], ...], as_json: bool) -> int:
    """Restore the archive in DIR to TOPIC, each record at its original offset.

    TOPIC is created if it does not exist. Otherwise it must be empty, or hold the beginning of the archive from an
    interrupted restore, which then continues. The count and checksum of the topic are compared with the archive.
    """
    require_spark()
    from segmentlog.spark.pipelines.archive_folder import ArchiveDamaged, ArchiveFolder
    from segmentlog.spark.pipelines.archive_restore import RestoredWrong
    from segmentlog.spark.pipelines.archive_restore import restore as restore_topic

    try:
        ArchiveFolder(folder).existing()
    except ArchiveDamaged as error:  # reported before Spark starts
        say(f"error: {error}")
        return EXIT_DAMAGE
    with spark_session(ctx) as spark:
        work = partial(restore_topic, spark, ctx.obj, folder, topic, config=dict(pairs))
        try:
            report, stopped = cancellable(spark, lambda on_step, _: work(on_step=on_step))
        except (ArchiveDamaged, RestoredWrong) as error:
            say(f"error: {error}")
            return EXIT_DAMAGE
    if report is None:
        say(f"the restore is incomplete{describe_stop(stopped)}; run the same command to continue it")
        return find_exit_status(stopped)
    _show_restoration(report, as_json)
    return 0


def _show_restoration(report: RestoreReport, as_json: bool) -> None:
    if as_json:
        show_json(report)
    else:
        show_table(("partition", "log start", "log end"), [(n, *one) for n, one in sorted(report.ranges.items())])
    for note in report.notes:
        say(note)
    earlier = f" ({report.already_there:,} existed already)" if report.already_there else ""
    say(
        f"{report.records:,} records restored to {report.topic} in {report.seconds:.1f} s{earlier};"
        f" {report.verified:,} verified against the archive"
    )
