"""``segmentlog apply-retention``: delete expired segments now."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from segmentlog.cli.common import (
    BusyRetry,
    PartitionErrors,
    Progress,
    collect_signals,
    describe_stop,
    open_store,
    say,
)
from segmentlog.cli.option_types import SELECTOR, Selector, json_option, match_partitions
from segmentlog.cli.table_output import show_json

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition
    from segmentlog.records import RetentionReport

_KEY = re.compile(r"\(([a-z.]+)\)$")
"""Matches the configuration key at the end of a reason."""


@click.command("apply-retention")
@click.argument("topic", type=SELECTOR, required=False, metavar="[TOPIC[/PARTITION]]")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and change nothing.")
@json_option
@click.pass_context
def apply_retention(ctx: click.Context, topic: Selector | None, dry_run: bool, as_json: bool) -> int:
    """Delete the segments of TOPIC or of all topics that retention has expired, now.

    Processes that have the store open do this by themselves. Use this command for stores that no process has open, or
    to see what is deleted and why. The files of a deleted segment are removed by the next pass after
    file.delete.delay.ms. Internal topics of the store are included only if you name them.
    """
    reports: list[RetentionReport] = []
    offsets = 0
    failures = PartitionErrors()
    with collect_signals() as stopped, open_store(ctx, read_only=dry_run, background=False) as store:
        partitions = match_partitions(store, topic)
        if not dry_run:
            store.check_writable("delete old segments")
        retry = BusyRetry(stopped)
        with Progress("partitions", len(partitions)) as progress:
            for owner, number in partitions:
                if stopped:
                    break
                name = f"{owner.name}/{number}"
                with failures.collecting(name, progress):
                    report = retry.run(partial(owner.partition(number).retain, dry_run=dry_run))
                    reports.append(report)
                    offsets += _offsets_of(owner.partition(number), report)
                    if report.busy:
                        failures.add_busy(name)
                    with progress.hidden():
                        _print_report(report, dry_run, as_json)
                progress.advance(1)
        say(_summary(reports, offsets, dry_run) + describe_stop(stopped))
    return failures.exit_status(stopped)


def _print_report(report: RetentionReport, dry_run: bool, as_json: bool) -> None:
    name = f"{report.topic}/{report.partition}"
    would = "would be " if dry_run else ""
    for segment, why in report.removed:
        if as_json:
            show_json({"partition": name, **_extent(segment), "why": why})
        else:
            extent = f"[{segment.base_offset}, {segment.end_offset})"
            click.echo(f"{name}: {extent}, {segment.size_bytes} bytes, {would}deleted: {why}")
    if as_json:
        show_json(
            {
                "partition": name,
                "log_start_offset": report.log_start_offset,
                "deleted_segments": len(report.removed),
                "deleted_bytes": report.size_bytes,
                "rolled": report.rolled,
                "busy": report.busy,
                "dry_run": dry_run,
            }
        )


def _extent(segment: Any) -> dict[str, Any]:
    return {"base_offset": segment.base_offset, "end_offset": segment.end_offset, "size_bytes": segment.size_bytes}


def _offsets_of(partition: Partition, report: RetentionReport) -> int:
    """Count the offsets of the deleted segments, without those in lost ranges."""
    return sum(partition.count_offsets(segment.base_offset, segment.end_offset) for segment, _ in report.removed)


def _summary(reports: list[RetentionReport], offsets: int, dry_run: bool) -> str:
    would = "would be " if dry_run else ""
    removed = [entry for report in reports for entry in report.removed]
    rolled = sum(report.rolled for report in reports)
    sealed = f"; {rolled:,} active segments {would}sealed" if rolled else ""
    if not removed:
        return f"nothing to delete in {len(reports):,} partitions{sealed}"
    size = sum(segment.size_bytes for segment, _ in removed)
    keys = Counter(found[1] if (found := _KEY.search(why)) else why for _, why in removed)
    whys = ", ".join(f"{count:,} by {key}" for key, count in keys.most_common())
    touched = sum(bool(report.removed) for report in reports)
    return (
        f"{len(removed):,} segments of {touched:,} partitions, {offsets:,} offsets, {size:,} bytes {would}deleted:"
        f" {whys}{sealed}"
    )
