"""``segmentlog ship``, ``restore`` and ``takeover``: a store's way to an object store and back."""

from __future__ import annotations

import sys
import time
from typing import IO, TYPE_CHECKING, Any

import click

from segmentlog.cli.common import Progress, loading, open_store, say, stoppable
from segmentlog.cli.offsets_file import read_offsets
from segmentlog.cli.option_types import DURATION_S, PLACE, SIZE, Place, json_option
from segmentlog.cli.table_output import show_json

if TYPE_CHECKING:
    from segmentlog.format.manifest import Manifest
    from segmentlog.objects.restore.restore import Restored
    from segmentlog.objects.upload.shipper import ShipResult
    from segmentlog.store import LogStore


@click.command()
@click.argument("url", required=False)
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("-f", "--follow", is_flag=True, help="Keep up with what is appended, until interrupted.")
@click.option("--interval", type=DURATION_S, default="1s", show_default=True, help="With --follow: ship so often.")
@click.option("--bytes", "max_bytes", type=SIZE, help="With --follow: ship as soon as so many are new, too.")
@click.option("--limit", type=SIZE, metavar="SIZE", help="Put at most so many bytes a second.")
@click.option("--stop", is_flag=True, help="Ship no more, for good: appends need no grants of the object store then.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
              help="With --follow: what it logs to stderr.")  # fmt: skip
@json_option
@click.pass_context
def ship(
    ctx: click.Context, url: str | None, topics: tuple[str, ...], follow: bool, interval: int, max_bytes: int | None,
    limit: int | None, stop: bool, log_format: str, as_json: bool,
) -> int:  # fmt: skip
    """Copy the store to an object store at URL, all topics or those that match, and exit once all of it lies there.

    Without URL the one it was shipped to before; without names those of the last time, '*' for all again. What is
    new is added the next time; several processes may be told to --follow, one does. See docs/replicate.md for
    takeovers, and what each failure takes.

    \b
      segmentlog ship s3://bucket/store --follow
      segmentlog ship file:///mnt/backup/store 'orders*'
    """
    if follow:
        from segmentlog.server.log_format import set_up_logs

        set_up_logs(log_format)
    with stoppable() as stopped, open_store(ctx, background=False) as store:
        if stop:
            if topics or follow:
                raise click.UsageError("--stop ends shipping of the whole store: it goes with a URL at most")
            return _end(store, url)
        url = url or _bound_url(store)
        if not follow:
            with Progress("bytes", None) as progress:
                done = store.ship(url, topics=topics, bytes_per_s=limit, progress=shown(progress))
            _tell(done, as_json)
            return 0
        store.shipping.start(url, topics=topics, interval_ms=interval, max_bytes=max_bytes, bytes_per_s=limit)
        while not stopped:
            time.sleep(_LOOK_S)
    return 0


_LOOK_S = 0.2


def _known_url(store: LogStore) -> str | None:
    """Where the store is shipped to."""
    from segmentlog.objects.ownership.binding import read_binding
    from segmentlog.storage.fs import FileSystem

    binding = read_binding(FileSystem(), store.path)
    return None if binding is None else binding.url


def _bound_url(store: LogStore) -> str:
    url = _known_url(store)
    if url is None:
        raise click.UsageError("this store was never shipped: say where to, as in segmentlog ship s3://bucket/path")
    return url


def _end(store: LogStore, wanted: str | None) -> int:
    known = _known_url(store)
    if wanted is not None and known is not None:
        from segmentlog.objects.bucket.url import open_bucket

        if open_bucket(wanted).url != known:
            raise click.UsageError(f"this store is shipped to {known}, and not to {open_bucket(wanted).url}")
    url = store.shipping.stop_permanently()
    if url is None:
        say(f"{store.path} was not shipped")
    else:
        say(f"{store.path} is not shipped any more; what lies at {url} stays there")
    return 0


def _tell(done: ShipResult, as_json: bool) -> None:
    if as_json:
        show_json({"records": done.records, "tail_bytes": done.size_bytes, "changed": done.put})
    elif done.put:
        say(f"{done.records:,} more offsets lie there; the tail was {done.size_bytes:,} bytes")
    else:
        say("there was nothing new")


@click.command()
@click.argument("url")
@click.argument("folder", type=click.Path(file_okay=False))
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--at", type=PLACE, metavar="TIME", help="As it was then: 2026-07-31T12:00, -1h, @1785456000000.")
@click.option(
    "--offsets",
    type=click.File("rb"),
    metavar="FILE",
    help="Partitions in it end there: lines of TOPIC PARTITION OFFSET, or JSON as kafka-delete-records.sh takes it.",
)
@json_option
def restore(
    url: str, folder: str, topics: tuple[str, ...], at: Place | None, offsets: IO[bytes] | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Make the store that was shipped to URL anew in FOLDER, or of it the topics that match.

    Offsets, epochs, lost ranges, timestamps, producers' numbers, committed positions and configurations are what they
    were. Every byte is checked. Killed and run again it goes on. Nothing is changed at URL: to go on shipping from
    FOLDER it has to be taken over instead.

    With --at each partition ends in front of the first record, or end of a transaction, that is later; with --offsets
    at the offset that the file says, if it does. Other partitions are cut, too, where a transaction would be torn
    otherwise; positions behind a cut are put at it. Offsets that are left out are lost: none is used again. Killed,
    it goes on with the same options only: say --at as a date then, and not as -1h.

    \b
      segmentlog restore s3://bucket/store ./copy --at 2026-07-31T12:00
      segmentlog restore s3://bucket/store ./copy --offsets offsets.txt
    """
    if at is not None and offsets is not None:
        raise click.UsageError("--at and --offsets exclude each other")
    if at is not None and at.kind != "time":
        raise click.UsageError("--at: give a time, as in 2026-07-31T12:00, -1h or @1785456000000")
    wanted = None if offsets is None else read_offsets(offsets)
    with loading():
        from segmentlog.objects.bucket.url import open_bucket
        from segmentlog.objects.restore.restore import restore as bring

    with Progress("bytes", None) as progress:
        done = bring(
            open_bucket(url), absolute(folder), topics,
            at=None if at is None else at.number, offsets=wanted, progress=shown(progress),
        )  # fmt: skip
    _tell_restored(done, folder, as_json)
    _tell_gaps(done, topics)


def _tell_gaps(done: Restored, wanted: tuple[str, ...]) -> None:
    """Report once, here, what the first process that opens each partition would otherwise report as news."""
    from segmentlog.objects.local.partition_snapshot import is_selected

    gaps = [
        part.end_offset < part.offset_grant
        for topic in done.manifest.topics
        if is_selected(topic.name, wanted)
        for part in topic.partitions
    ]
    if any(gaps):
        say(
            f"{sum(gaps):,} partitions resume after a gap in the offsets, because the owner of the store may have"
            " assigned those; 'segmentlog details TOPIC' shows each gap as a lost range, once something has written"
            " to the partition"
        )


@click.command()
@click.argument("url")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--force", is_flag=True,
              help="Take over although the owner has ended shipping with 'ship --stop'. Offsets that it has assigned"
                   " since are then assigned a second time, to other records. Asks first.")  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="With --force: do not ask.")
@json_option
def takeover(url: str, folder: str, force: bool, yes: bool, as_json: bool) -> None:
    """Become the owner of the store that is shipped to URL, and restore it in FOLDER.

    Whoever owned it until now is fenced: it appends nothing any more. Offsets go on behind all that it may have handed
    out, in a new epoch, and consumers are told what was lost. Killed and run again it goes on.
    """
    with loading():
        import segmentlog
        from segmentlog.objects.bucket.url import open_bucket
        from segmentlog.objects.manifest.load import require_manifest
        from segmentlog.objects.takeover import take_over

    bucket = open_bucket(url)
    force = force and _wants_offsets_twice(require_manifest(bucket)[0], url, folder, yes)
    with Progress("bytes", None) as progress:
        done = take_over(bucket, absolute(folder), force=force, progress=shown(progress))
    with segmentlog.open(folder, create=False, background=False) as store:
        for topic in store.topics(internal=True):
            store.topic(topic).partitions()  # each goes on in its new epoch
        store.ship(url)
    _tell_restored(done, folder, as_json)
    _tell_gaps(done, ())


def _wants_offsets_twice(manifest: Manifest, url: str, folder: str, yes: bool) -> bool:
    """Ask whether to take over from an owner that has ended shipping; False where it has not, so nothing is forced."""
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
                "takeover --force may assign offsets twice; add --yes where no terminal can be asked"
            )
        click.confirm("Take over and assign these offsets again?", abort=True, err=True)
    return True


def absolute(folder: str) -> str:
    """The path of a folder; `~` is one's home."""
    import os

    return os.path.abspath(os.path.expanduser(folder))


def shown(progress: Progress) -> Any:
    """What is to be told (done, in all), shown as a bar."""
    seen = 0

    def show(done: int, whole: int) -> None:
        nonlocal seen
        progress.expect(whole)
        progress.advance(done - seen)
        seen = done

    return show


def _tell_restored(done: Restored, folder: str, as_json: bool) -> None:
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
        further = "" if cut.wanted_offset == cut.offset else ", to keep transactions together"
        say(f"{cut.topic}/{cut.partition}: offsets {cut.offset} to {cut.end_offset - 1} are left out{further}")
    kept = f", of which {done.kept_bytes:,} were there" if done.kept_bytes else ""
    say(f"{folder}: {done.topics:,} topics, {done.partitions:,} partitions, {done.size_bytes:,} bytes{kept}")
