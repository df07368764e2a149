"""``segmentlog cluster``: check the coordinator of a cluster."""

from __future__ import annotations

from contextlib import closing

import click

from segmentlog.cli.common import EXIT_DONE, EXIT_FAILED, Progress, exit_at_once_on_signals, say
from segmentlog.cli.option_types import json_option
from segmentlog.cli.table_output import show_json, show_table


@click.group()
def cluster() -> None:
    """Check the coordinator of a cluster: an object store, etcd or ZooKeeper."""


@cluster.command()
@click.argument("url")
@json_option
def check(url: str, as_json: bool) -> int:
    """Check that the coordinator at URL honours the conditions of writes, by racing 100 swaps from 10 threads.

    A cluster, and shipping, are safe only if one of several simultaneous swaps succeeds. URL names an object store, or
    etcd or ZooKeeper with a path. With TLS the schemes are etcds and zks. Needs permission to read, write, list and
    delete objects, keys or nodes. Creates two small documents, cluster-check-..., and deletes them. The exit status is
    1 if the coordinator ignores conditions, or if requests fail.

    \b
      segmentlog cluster check s3://bucket/orders
      segmentlog cluster check etcd://h1,h2,h3/orders
      segmentlog cluster check zk://h1,h2,h3/orders
    """
    with exit_at_once_on_signals():
        from segmentlog.coordination.open_engine import open_engine
        from segmentlog.coordination.swap_race import RACERS, ROUNDS, race_swaps

        engine = open_engine(url)
    with closing(engine), Progress("swaps", RACERS * ROUNDS) as progress:
        report = race_swaps(engine, progress.advance)
    if as_json:
        show_json(report._asdict() | {"ok": not report.problem})
    else:
        columns = ("swaps", "won", "lost", "unknown", "p50 ms", "p99 ms")
        shown = (report.swaps, report.won, report.lost, report.unknown, f"{report.p50_ms:.1f}", f"{report.p99_ms:.1f}")
        show_table(columns, [shown])
    if report.leftover:
        say(f"warning: {report.url}: {', '.join(report.leftover)}: cannot be deleted; delete these documents yourself")
    if report.problem:
        say(f"error: {report.url}: {report.problem}. Use another coordinator: with this one, two machines could lead")
        return EXIT_FAILED
    if report.unknown:
        say(f"warning: {report.url}: {report.unknown:,} swaps got no clear answer; that is safe, but slows a cluster")
    say(f"{report.url} honours conditional writes: it can coordinate a cluster")
    return EXIT_DONE
