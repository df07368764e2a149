"""``segmentlog replica``: a read-only store that keeps up with one that is shipped."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from segmentlog.cli.common import Progress, loading, say, stoppable
from segmentlog.cli.option_types import DURATION_S, json_option
from segmentlog.cli.ship_command import absolute, shown
from segmentlog.cli.table_output import show_json

if TYPE_CHECKING:
    from segmentlog.objects.replica.replica import Replica, ReplicaStatus

_LOOK_S: Final = 0.2


@click.command()
@click.argument("url")
@click.argument("folder", type=click.Path(file_okay=False))
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--interval", type=DURATION_S, default="1s", show_default=True, help="Look for what is new so often.")
@click.option("--once", is_flag=True, help="Bring what lies there now, and exit.")
@click.option("--status", is_flag=True, help="Only tell how far the replica in FOLDER is; exit 1 if it is not kept up.")
@json_option
def replica(
    url: str, folder: str, topics: tuple[str, ...], interval: int, once: bool, status: bool, as_json: bool
) -> int:
    """Keep in FOLDER a read-only store equal to the one that is shipped to URL, all topics or those that match.

    Whoever opens FOLDER reads it as any other store, and follows it: offsets, epochs, lost ranges, transactions and
    committed positions are the owner's. Nothing is appended to it. Until interrupted; run again it goes on.

    \b
      segmentlog replica s3://bucket/store ./copy
      segmentlog replica s3://bucket/store ./copy --status
    """
    with loading():
        from segmentlog.objects.bucket.url import open_bucket
        from segmentlog.objects.replica.replica import Replica, replica_status

    path = absolute(folder)
    if status:
        found = replica_status(path)
        if found is None or found.url != open_bucket(url).url:
            raise click.UsageError(f"{folder} is no replica of {url}")
        _tell(found, folder, as_json)
        return 1 if found.error else 0
    with stoppable() as stopped, Replica(url, path, topics=topics, interval_ms=interval, threads=False) as kept:
        with Progress("partitions", None) as progress:
            kept.turn(shown(progress))
        _tell(kept.status, folder, as_json)
        if not once:
            _follow(kept, interval, stopped)
    return 0


def _follow(kept: Replica, interval: int, stopped: list[int]) -> None:
    """Turn by turn; an error is told once, and when it is over."""
    from segmentlog.errors import SegmentlogError

    said, due_s = "", time.monotonic() + interval / 1000
    while not stopped:
        time.sleep(max(min(due_s - time.monotonic(), _LOOK_S), 0))
        if time.monotonic() < due_s:
            continue
        due_s = time.monotonic() + interval / 1000
        try:
            kept.turn()
        except (SegmentlogError, OSError) as error:
            if str(error) != said:
                said = str(error)
                say(f"error: {said}; trying again")
            continue
        if said:
            said = ""
            say("up to date again")


def _tell(status: ReplicaStatus, folder: str, as_json: bool) -> None:
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
