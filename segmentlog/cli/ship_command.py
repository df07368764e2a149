"""``segmentlog ship``, ``restore`` and ``takeover``: replicate a store to an object store, and get it back."""

from __future__ import annotations

import sys
import time
from typing import IO, TYPE_CHECKING, Any

import click

from segmentlog.cli.common import (
    Progress,
    collect_signals,
    exit_at_once_on_signals,
    open_store,
    say,
)
from segmentlog.cli.offsets_file import read_offsets
from segmentlog.cli.option_types import DURATION_S, POSITION, SIZE, StartPosition, json_option
from segmentlog.cli.table_output import show_json

if TYPE_CHECKING:
    from segmentlog.format.manifest import Manifest
    from segmentlog.objects.restore.restore import Restored
    from segmentlog.objects.upload.shipper import ShipResult
    from segmentlog.store import LogStore


@click.command()
@click.argument("url", required=False)
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("-f", "--follow", is_flag=True, help="Keep shipping new records until interrupted.")
@click.option("--interval", type=DURATION_S, default="1s", show_default=True,
              help="With --follow: time between uploads.")  # fmt: skip
@click.option("--pending-bytes", "--bytes", "max_bytes", type=SIZE, metavar="SIZE",
              help="With --follow: also ship as soon as SIZE bytes are pending.")  # fmt: skip
@click.option("--max-bytes-per-second", "--limit", "limit", type=SIZE, metavar="SIZE",
              help="Limit upload bandwidth to SIZE bytes per second.")  # fmt: skip
@click.option("--stop", is_flag=True, help="Stop shipping permanently, and remove the offset grants.")
@click.option("--status", "wants_status", is_flag=True,
              help="Ship nothing: print the owner, and what a takeover would lose now.")  # fmt: skip
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
              help="With --follow: format of the log lines on stderr.")  # fmt: skip
@json_option
@click.pass_context
def ship(
    ctx: click.Context, url: str | None, topics: tuple[str, ...], follow: bool, interval: int, max_bytes: int | None,
    limit: int | None, stop: bool, wants_status: bool, log_format: str, as_json: bool,
) -> int:  # fmt: skip
    """Replicate the store to an object store at URL, and exit when everything is uploaded.

    Without topic names, ship the topics of the previous run; the first run ships all. '*' selects all topics again.
    Without URL, use the URL of the previous run. A later run uploads only what is new. Several processes can run with
    --follow; one of them ships, and another takes its place when it ends. docs/replicate.md explains takeovers and
    failures.

    \b
      segmentlog ship s3://bucket/store --follow
      segmentlog ship file:///mnt/backup/store 'orders*'
    """
    if wants_status:
        if stop or follow or topics:
            raise click.UsageError("--status cannot be combined with topic names, --follow or --stop")
        return _print_status(ctx, url, as_json)
    if follow:
        from segmentlog.server.log_format import set_up_logs

        set_up_logs(log_format)
    with collect_signals() as stopped, open_store(ctx, background=False) as store:
        if stop:
            if topics or follow:
                raise click.UsageError("--stop ends shipping of the whole store: give no topics, and no --follow")
            return _stop_shipping(store, url)
        url = url or _require_url(store)
        if not follow:
            with Progress("bytes", None) as progress:
                done = store.ship(url, topics=topics, bytes_per_s=limit, progress=progress_callback(progress))
            _print_result(done, as_json)
            return 0
        store.shipping.start(url, topics=topics, interval_ms=interval, max_bytes=max_bytes, bytes_per_s=limit)
        while not stopped:
            time.sleep(_POLL_S)
    return 0


_POLL_S = 0.2


def _print_status(ctx: click.Context, url: str | None, as_json: bool) -> int:
    with exit_at_once_on_signals():
        from segmentlog.cli.ship_status import print_ship_status, url_of_folder
        from segmentlog.objects.bucket.url import open_bucket

    folder = resolve_folder(ctx.obj)
    url = url or url_of_folder(folder)
    if url is None:
        raise click.UsageError(
            f"{folder} is not shipped: give the URL, as in segmentlog ship --status s3://bucket/path"
        )
    print_ship_status(open_bucket(url), folder, as_json=as_json)
    return 0


def _read_url(store: LogStore) -> str | None:
    """Return the URL that the store is shipped to; None if it is not shipped."""
    from segmentlog.objects.ownership.binding import read_binding
    from segmentlog.storage.fs import FileSystem

    binding = read_binding(FileSystem(), store.path)
    return None if binding is None else binding.url


def _require_url(store: LogStore) -> str:
    url = _read_url(store)
    if url is None:
        raise click.UsageError("this store was never shipped: give a URL, as in segmentlog ship s3://bucket/path")
    return url


def _stop_shipping(store: LogStore, expected: str | None) -> int:
    current = _read_url(store)
    if expected is not None and current is not None:
        from segmentlog.objects.bucket.url import open_bucket

        if open_bucket(expected).url != current:
            raise click.UsageError(f"this store is shipped to {current}, not to {open_bucket(expected).url}")
    url = store.shipping.stop_permanently()
    if url is None:
        say(f"{store.path} was not shipped")
    else:
        say(f"{store.path} is no longer shipped; the objects at {url} are kept")
    return 0


def _print_result(done: ShipResult, as_json: bool) -> None:
    if as_json:
        show_json({"records": done.records, "tail_bytes": done.size_bytes, "changed": done.put})
    elif done.put:
        say(f"shipped {done.records:,} more offsets; {done.size_bytes:,} bytes of new records")
    else:
        say("nothing new to ship")


@click.command()
@click.argument("url")
@click.argument("folder", type=click.Path(file_okay=False))
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--at", type=POSITION, metavar="TIME",
              help="Restore the state at TIME: 2026-07-31T12:00, -1h, @1785456000000.")  # fmt: skip
@click.option(
    "--offsets",
    type=click.File("rb"),
    metavar="FILE",
    help="End partitions at the offsets in FILE: lines of TOPIC PARTITION OFFSET, or JSON as for"
    " kafka-delete-records.sh.",
)
@json_option
def restore(
    url: str, folder: str, topics: tuple[str, ...], at: StartPosition | None, offsets: IO[bytes] | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Restore the store that was shipped to URL in FOLDER, all topics or those that match.

    Offsets, epochs, lost ranges, timestamps, producer ids, committed offsets and configurations are preserved, and
    every byte is checked. After an interruption, run the same command again to resume. Nothing changes at URL. To ship
    from FOLDER to the same URL, use takeover instead.

    With --at, each partition ends before the first record, or end of a transaction, that is later than the given time.
    With --offsets, partitions end at the offsets in FILE. Other partitions end earlier as well if a transaction would
    otherwise be restored in part only. Committed offsets after the end of a partition are moved to that end. The
    offsets that are left out are reported as lost, and are never used again. To resume an interrupted restore, give the
    same options; give --at as a date, not as -1h.

    \b
      segmentlog restore s3://bucket/store ./copy --at 2026-07-31T12:00
      segmentlog restore s3://bucket/store ./copy --offsets offsets.txt
    """
    if at is not None and offsets is not None:
        raise click.UsageError("--at and --offsets exclude each other: a restore ends at a time or at given offsets")
    if at is not None and at.kind != "time":
        raise click.UsageError("--at: give a time, as in 2026-07-31T12:00, -1h or @1785456000000")
    cut_offsets = None if offsets is None else read_offsets(offsets)
    with exit_at_once_on_signals():
        from segmentlog.objects.bucket.url import open_bucket
        from segmentlog.objects.restore.restore import restore as restore_store

    with Progress("bytes", None) as progress:
        done = restore_store(
            open_bucket(url), resolve_folder(folder), topics,
            at=None if at is None else at.number, offsets=cut_offsets, progress=progress_callback(progress),
        )  # fmt: skip
    _print_restored(done, folder, as_json)
    _print_gaps(done, topics)


def _print_gaps(done: Restored, patterns: tuple[str, ...]) -> None:
    """Print how many partitions resume after a gap of offsets.

    Without this, the user would learn of each gap only when a process opens the partition.
    """
    from segmentlog.policy.shipped_topics import is_selected

    gaps = [
        part.end_offset < part.offset_grant
        for topic in done.manifest.topics
        if is_selected(topic.name, patterns)
        for part in topic.partitions
    ]
    if any(gaps):
        say(
            f"{sum(gaps):,} partitions resume after a gap in the offsets, because the owner of the store may have"
            " assigned these offsets. After the first append to a partition, 'segmentlog describe TOPIC' shows its gap"
            " as a lost range"
        )


@click.command()
@click.argument("url", required=False)
@click.argument("folder", type=click.Path(file_okay=False), required=False)
@click.option("--hand-over", is_flag=True,
              help="Run on the owner: hand its store (--dir) over to a machine that waits as a standby.")  # fmt: skip
@click.option("--wait", type=DURATION_S, default="10s", show_default=True,
              help="With --hand-over: longest wait for another machine, while appends are stopped.")  # fmt: skip
@click.option("--force", is_flag=True,
              help="DANGEROUS: take over although the owner has ended shipping with 'ship --stop'. Offsets that it has"
                   " assigned since are assigned a second time, to other records. Asks first.")  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="With --force: do not ask.")
@json_option
@click.pass_context
def takeover(
    ctx: click.Context, url: str | None, folder: str | None, hand_over: bool, wait: int, force: bool, yes: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Become the owner of the store that is shipped to URL, and restore it in FOLDER.

    The previous owner is fenced: its appends fail from now on. Each log resumes after all offsets that the previous
    owner may have assigned, in a new epoch, and reports what was lost. After an interruption, run the command again to
    resume.

    With --hand-over, the owner gives the store away instead, while its server and programs run. Appends are stopped,
    the rest is shipped, and a standby takes over. No record is lost, and the new owner leaves out no offset. If no
    machine takes over in time, this machine stays the owner, and the exit status is 1.

    \b
      segmentlog takeover s3://bucket/store ./data
      segmentlog --dir /srv/data takeover --hand-over
    """
    if hand_over:
        if folder is not None or force or yes:
            raise click.UsageError("--hand-over is run on the owner: give no FOLDER, no --force and no --yes")
        _hand_over(ctx, url, wait, as_json)
        return
    if url is None or folder is None:
        raise click.UsageError("give URL and FOLDER, as in segmentlog takeover s3://bucket/path ./data; or --hand-over")
    with exit_at_once_on_signals():
        import segmentlog
        from segmentlog.objects.bucket.url import open_bucket
        from segmentlog.objects.manifest.load import require_manifest
        from segmentlog.objects.takeover import take_over

    bucket = open_bucket(url)
    force = force and _confirm_reuse(require_manifest(bucket)[0], url, folder, yes)
    with Progress("bytes", None) as progress:
        done = take_over(bucket, resolve_folder(folder), force=force, progress=progress_callback(progress))
    with segmentlog.open(folder, create=False, background=False) as store:
        for topic in store.topics(internal=True):
            store.topic(topic).partitions()  # each log resumes in its new epoch
        store.ship(url)
    _print_restored(done, folder, as_json)
    _print_gaps(done, ())


def _hand_over(ctx: click.Context, url: str | None, wait_ms: int, as_json: bool) -> None:
    with open_store(ctx, background=False) as store:
        if url is not None:
            from segmentlog.objects.bucket.url import open_bucket

            if (current := _require_url(store)) != open_bucket(url).url:
                raise click.UsageError(f"{store.path} is shipped to {current}, not to {url}")
        done = store.shipping.hand_over(wait_ms=wait_ms)
    if as_json:
        show_json({"url": done.url, "owner": done.owner, "elapsed_ms": done.elapsed_ms})
    else:
        say(f"{done.owner} owns the store now, after {done.elapsed_ms / 1000:.1f} s; this machine refuses appends")


def _confirm_reuse(manifest: Manifest, url: str, folder: str, yes: bool) -> bool:
    """Ask the user to confirm that offsets may be assigned twice; return True.

    Return False, without asking, if the owner has not ended shipping: then no offset can be assigned twice.
    """
    if not manifest.ended:
        return False
    say(
        f"warning: {manifest.owner} has ended shipping this store with 'ship --stop' and may have appended records"
        " since. A takeover assigns the offsets of those records a second time, to other records: the old store and"
        f" {folder} then hold different records under the same offsets, and a committed offset fits only one of the two"
        " stores. Nothing can merge them later. If the old store is in use, make an independent copy:"
        f" segmentlog restore {url} {folder}"
    )
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(
                "takeover --force may assign offsets twice; without a terminal to confirm it, add --yes"
            )
        click.confirm("Take over and assign these offsets again?", abort=True, err=True)
    return True


def resolve_folder(folder: str) -> str:
    """Return the absolute path of a folder; `~` is the home folder."""
    import os

    return os.path.abspath(os.path.expanduser(folder))


def progress_callback(progress: Progress) -> Any:
    """Return a callback that takes (done, total) bytes and updates the progress bar."""
    seen = 0

    def show(done: int, whole: int) -> None:
        nonlocal seen
        progress.expect(whole)
        progress.advance(done - seen)
        seen = done

    return show


def _print_restored(done: Restored, folder: str, as_json: bool) -> None:
    for warning in done.warnings:
        say(f"warning: {warning}")
    if as_json:
        show_json(
            {
                "folder": folder,
                "topics": done.topics,
                "partitions": done.partitions,
                "size_bytes": done.size_bytes,
                "kept_bytes": done.kept_bytes,
                "sequence": done.manifest.sequence,
                "shipped_ms": done.manifest.shipped_ms,
                "cuts": [
                    {"topic": cut.topic, "partition": cut.partition, "offset": cut.offset,
                     "end_offset": cut.end_offset, "wanted_offset": cut.wanted_offset}
                    for cut in done.cuts
                ],
            }
        )  # fmt: skip
        return
    for cut in done.cuts:
        reason = "" if cut.wanted_offset == cut.offset else ", to keep transactions whole"
        say(f"{cut.topic}/{cut.partition}: offsets {cut.offset} to {cut.end_offset - 1} are left out{reason}")
    kept = f", of which {done.kept_bytes:,} were already downloaded" if done.kept_bytes else ""
    say(f"{folder}: {done.topics:,} topics, {done.partitions:,} partitions, {done.size_bytes:,} bytes{kept}")
