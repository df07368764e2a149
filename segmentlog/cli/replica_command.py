"""``segmentlog replica``: a local, read-only store that follows a shipped store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from segmentlog.cli.common import Progress, collect_signals, exit_at_once_on_signals, say
from segmentlog.cli.option_types import DURATION_S, json_option
from segmentlog.cli.ship_command import progress_callback, resolve_folder
from segmentlog.cli.table_output import show_json

if TYPE_CHECKING:
    from segmentlog.objects.replica.replica import Replica, ReplicaStatus

_POLL_S: Final = 0.2


@click.command()
@click.argument("url")
@click.argument("folder", type=click.Path(file_okay=False))
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--interval", type=DURATION_S, default="1s", show_default=True, help="Time between refreshes.")
@click.option("--once", is_flag=True, help="Download the current state once and exit.")
@click.option("--status", is_flag=True,
              help="Print how far the replica in FOLDER has followed; exit 1 if it does not follow.")  # fmt: skip
@json_option
def replica(
    url: str, folder: str, topics: tuple[str, ...], interval: int, once: bool, status: bool, as_json: bool
) -> int:
    """Keep a read-only copy in FOLDER of the store that is shipped to URL: all topics, or those that match TOPIC.

    Any process can open FOLDER as a store and follow it. Offsets, epochs, lost ranges, transactions and committed
    offsets equal those of the shipped store. No process can append to the replica. The command runs until it is
    interrupted; run it again to continue.

    \b
      segmentlog replica s3://bucket/store ./copy
      segmentlog replica s3://bucket/store ./copy --status
    """
    with exit_at_once_on_signals():
        from segmentlog.objects.bucket.url import open_bucket
        from segmentlog.objects.replica.replica import Replica, replica_status

    path = resolve_folder(folder)
    if status:
        found = replica_status(path)
        if found is None or found.url != open_bucket(url).url:
            raise click.UsageError(f"{folder} is not a replica of {url}")
        _print_status(found, folder, as_json)
        return 1 if found.error else 0
    with collect_signals() as stopped, Replica(url, path, topics=topics, interval_ms=interval, threads=False) as copy:
        with Progress("partitions", None) as progress:
            copy.refresh(progress_callback(progress))
        _print_status(copy.status, folder, as_json)
        if not once:
            _follow(copy, interval, stopped)
    return 0


def _follow(copy: Replica, interval: int, stopped: list[int]) -> None:
    """Refresh the replica until a signal arrives. Print an error once, and print when it no longer occurs."""
    from segmentlog.errors import SegmentlogError

    last_error, due_s = "", time.monotonic() + interval / 1000
    while not stopped:
        time.sleep(max(min(due_s - time.monotonic(), _POLL_S), 0))
        if time.monotonic() < due_s:
            continue
        due_s = time.monotonic() + interval / 1000
        try:
            copy.refresh()
        except (SegmentlogError, OSError) as error:
            if str(error) != last_error:
                last_error = str(error)
                say(f"error: {last_error}; trying again")
            continue
        if last_error:
            last_error = ""
            say("up to date again")


def _print_status(status: ReplicaStatus, folder: str, as_json: bool) -> None:
    if as_json:
        show_json({
            "folder": folder,
            "url": status.url,
            "sequence": status.sequence,
            "shipped_ms": status.shipped_ms,
            "looked_ms": status.looked_ms,
            "lag_records": status.lag_records,
            "lag_s": round(status.lag_s, 3),
            "size_bytes": status.size_bytes,
            "error": status.error,
        })  # fmt: skip
        return
    behind, ago_s = f"{status.lag_records:,} offsets behind", max(status.lag_s, 0)
    say(f"{folder}: {status.size_bytes:,} bytes, {behind} as of {ago_s:.1f} s ago")
    if status.error:
        say(f"error: {status.error}")
