"""``segmentlog flush``, ``trim`` and ``truncate``: fsync, delete the oldest or the newest records."""

from __future__ import annotations

import sys

import click

from segmentlog.cli.common import open_store, say
from segmentlog.cli.option_types import (
    POSITION,
    SELECTOR,
    Selector,
    StartPosition,
    json_option,
    open_only_partition,
    open_partitions,
    resolve_position,
)
from segmentlog.cli.table_output import show_json


@click.command()
@click.argument("topic", type=SELECTOR)
@json_option
@click.pass_context
def flush(ctx: click.Context, topic: Selector, as_json: bool) -> None:
    """Fsync TOPIC (or TOPIC/PARTITION) now. Returns once all records appended before are on disk."""
    with open_store(ctx, background=False) as store:
        for partition in open_partitions(store, topic):
            unsynced = partition.log_end_offset - partition.durable_offset
            durable_offset = partition.flush()
            name = f"{partition.topic}/{partition.number}"
            if as_json:
                show_json({"partition": name, "durable_offset": durable_offset, "synced_records": unsynced})
            else:
                click.echo(
                    f"{name}: durable up to offset {durable_offset} ({unsynced} records were not durable before)"
                )


@click.command()
@click.argument("topic", type=SELECTOR)
@click.option(
    "--before",
    type=POSITION,
    required=True,
    metavar="OFFSET|TIME",
    help="Delete records before this place; also 'latest', '-1h'.",
)
@json_option
@click.pass_context
def trim(ctx: click.Context, topic: Selector, before: StartPosition, as_json: bool) -> None:
    """Delete the records of TOPIC (or TOPIC/PARTITION) before --before. The remaining records keep their offsets.

    Frees disk space only for whole segments.
    """
    with open_store(ctx, background=False) as store:
        partitions = open_partitions(store, topic)
        if before.kind == "offset" and len(partitions) > 1:
            raise click.UsageError(f"{topic.topic} has {len(partitions)} partitions, each with its own offsets:"
                                   f" name a partition, such as {topic.topic}/0")  # fmt: skip
        for partition in partitions:
            start = partition.log_start_offset
            segments = len(partition.segments())
            now_at = partition.trim(max(resolve_position(before, partition), start))
            gone = segments - len(partition.segments())
            name = f"{partition.topic}/{partition.number}"
            if as_json:
                show_json({"partition": name, "log_start_offset": now_at, "was": start, "deleted_segments": gone})
            else:
                click.echo(f"{name}: starts at offset {now_at}, was {start}; {gone} segments deleted")


@click.command()
@click.argument("topic", type=SELECTOR)
@click.option("--at", type=POSITION, required=True, metavar="OFFSET|TIME", help="Place of the first record to delete.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@click.pass_context
def truncate(ctx: click.Context, topic: Selector, at: StartPosition, yes: bool, as_json: bool) -> None:
    """Delete the newest records of TOPIC/PARTITION. New records do not reuse their offsets.

    A consumer whose position is among the deleted offsets gets an error.
    """
    with open_store(ctx, background=False) as store:
        partition = open_only_partition(store, topic, "truncate works on one")
        offset = resolve_position(at, partition)
        name = f"{partition.topic}/{partition.number}"
        count = partition.log_end_offset - offset
        if not yes and count > 0:
            if not sys.stdin.isatty():
                raise click.UsageError("this deletes records; without a terminal, add --yes")
            click.confirm(f"Delete offsets {offset} to {partition.log_end_offset - 1} of {name}?", abort=True, err=True)
        lost = partition.truncate(offset)
        if as_json:
            gone = None if lost is None else [lost.base_offset, lost.end_offset]
            show_json({"partition": name, "lost": gone, "log_end_offset": partition.log_end_offset})
        elif lost is None:
            say(f"{name}: ends at offset {offset}; there was nothing to delete")
        else:
            click.echo(
                f"{name}: offsets {lost.base_offset} to {lost.end_offset - 1} are deleted;"
                f" it continues at {partition.log_end_offset} in epoch {partition.epoch}"
            )
