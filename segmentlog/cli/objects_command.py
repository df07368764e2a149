"""``segmentlog objects``: list, verify and garbage-collect the objects of a shipped store."""

from __future__ import annotations

import time

import click

from segmentlog.cli.common import EXIT_DAMAGE, EXIT_DONE, Progress, exit_at_once_on_signals, say
from segmentlog.cli.option_types import DURATION_S, json_option
from segmentlog.cli.table_output import show_json


@click.group()
def objects() -> None:
    """List, verify and garbage-collect the objects of a shipped store."""


@objects.command("ls")
@click.argument("url")
@json_option
def list_(url: str, as_json: bool) -> None:
    """List the manifest at URL and every object that it refers to.

    Some new records may have no object of their own: the manifest itself contains them.
    """
    with exit_at_once_on_signals():
        from segmentlog.objects.bucket.url import open_bucket
        from segmentlog.objects.manifest.garbage_collection import describe_manifest, describe_objects, stored_manifest
        from segmentlog.objects.manifest.load import require_manifest

    bucket = open_bucket(url)
    manifest, _ = require_manifest(bucket)
    count = size_bytes = 0
    for description, stored in (*describe_objects(manifest), (describe_manifest(manifest), stored_manifest(bucket))):
        if as_json:
            document = {"key": stored.key, "size_bytes": stored.size_bytes, "what": description}
            show_json(document | {"xxh3_64": stored.xxh3_64})
        else:
            click.echo(f"{stored.size_bytes:>14,}  {stored.key}  {description}")
        count, size_bytes = count + 1, size_bytes + stored.size_bytes
    ended = ", which has ended shipping" if manifest.ended else ""
    say(
        f"{count:,} objects, {size_bytes:,} bytes, {len(manifest.topics):,} topics;"
        f" manifest {manifest.sequence:,} by {manifest.owner}{ended};"
        f" {len(manifest.condemned):,} objects are marked for deletion"
    )


@objects.command()
@click.argument("url")
@json_option
def verify(url: str, as_json: bool) -> int:
    """Read the manifest at URL and every object that it refers to, and compare their checksums."""
    with exit_at_once_on_signals():
        from segmentlog.objects.bucket.url import open_bucket
        from segmentlog.objects.manifest.garbage_collection import verify as check

    with Progress("bytes", None) as progress:
        found = check(open_bucket(url), progress.advance)
    for key, why in found.problems:
        if as_json:
            show_json({"key": key, "problem": why})
        else:
            click.echo(f"{key}: {why}")
    say(f"{found.objects:,} objects, {found.size_bytes:,} bytes, {len(found.problems):,} problems")
    return EXIT_DAMAGE if found.problems else EXIT_DONE


@objects.command()
@click.argument("url")
@click.option("--grace", type=DURATION_S, default="24h", show_default=True, help="Ignore objects younger than this.")
@click.option("--dry-run", is_flag=True, help="Print what would be marked and deleted, and change nothing.")
@json_option
def gc(url: str, grace: int, dry_run: bool, as_json: bool) -> None:
    """Mark unreferenced objects at URL for deletion, and delete objects that were marked at least --grace ago.

    Shipping deletes its own objects when they are not needed any more. This command removes what killed processes left.
    """
    with exit_at_once_on_signals():
        from segmentlog.objects.bucket.url import open_bucket
        from segmentlog.objects.manifest.garbage_collection import sweep

    swept = sweep(open_bucket(url), int(time.time() * 1000), grace_ms=grace, dry_run=dry_run)
    for done, keys in (("condemned", swept.condemned), ("deleted", swept.deleted)):
        for key in keys:
            if as_json:
                show_json({"key": key, "done": done, "dry_run": dry_run})
            else:
                click.echo(f"{'marked' if done == 'condemned' else done}  {key}")
    would = "would be " if dry_run else ""
    marked, deleted = len(swept.condemned), len(swept.deleted)
    say(f"{marked:,} objects {would}marked for deletion, {deleted:,} {would}deleted ({swept.size_bytes:,} bytes)")
