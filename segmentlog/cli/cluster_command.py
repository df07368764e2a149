"""``segmentlog cluster``: check the object store that coordinates a cluster."""

from __future__ import annotations

import click

from segmentlog.cli.common import EXIT_DONE, EXIT_FAILED, Progress, exit_at_once_on_signals, say
from segmentlog.cli.option_types import json_option
from segmentlog.cli.table_output import show_json, show_table


@click.group()
def cluster() -> None:
    """Check the object store that coordinates a cluster."""


@cluster.command()
@click.argument("url")
@json_option
def check(url: str, as_json: bool) -> int:
    """Check that the object store at URL honours conditional writes, by racing 100 swaps from 10 threads.

    A cluster, and shipping, are safe only if one of several simultaneous swaps succeeds. Needs permission to read,
    write, list and delete objects. Creates two small objects, cluster-check-..., and deletes them. The exit status is 1
    if the object store ignores conditions, or if requests fail.

    \b
      segmentlog cluster check s3://bucket/orders
    """
    with exit_at_once_on_signals():
        from segmentlog.objects.bucket.url import check_scheme, open_bucket
        from segmentlog.objects.coordination.swap_race import RACERS, ROUNDS, race_swaps

    with Progress("swaps", RACERS * ROUNDS) as progress:
        report = race_swaps(open_bucket(check_scheme("url", url)), progress.advance)
    if as_json:
        show_json(report._asdict() | {"ok": not report.problem})
    else:
        columns = ("swaps", "won", "lost", "unknown", "p50 ms", "p99 ms")
        shown = (report.swaps, report.won, report.lost, report.unknown, f"{report.p50_ms:.1f}", f"{report.p99_ms:.1f}")
        show_table(columns, [shown])
    if report.leftover:
        say(f"warning: {report.url}: {', '.join(report.leftover)}: cannot be deleted; delete these objects yourself")
    if report.problem:
        say(f"error: {report.url}: {report.problem}. Use another object store: on this one, two machines could lead")
        return EXIT_FAILED
    if report.unknown:
        say(f"warning: {report.url}: {report.unknown:,} swaps got no clear answer; that is safe, but slows a cluster")
    say(f"{report.url} honours conditional writes: it can coordinate a cluster")
    return EXIT_DONE
