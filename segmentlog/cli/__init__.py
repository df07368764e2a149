"""The command line. Thin: commands translate options and print; what they do lives below.

Each command is a module that is imported when it is called, so that ``--help`` and
``tail`` start without what they do not need.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import click

from segmentlog import __version__
from segmentlog.cli.lazy import LazyGroup
from segmentlog.speedups import CORE_NAME

_COMMANDS: Final = {
    "create": ("segmentlog.cli.topics:create", "make a topic"),
    "topics": ("segmentlog.cli.topics:topics", "list the topics"),
    "details": ("segmentlog.cli.topics:details", "show a topic's configuration, partitions and segments"),
    "alter": ("segmentlog.cli.topics:alter", "change a topic's configuration while it is in use"),
    "rename": ("segmentlog.cli.topics:rename", "give a topic another name"),
    "delete": ("segmentlog.cli.topics:delete", "delete topics with everything in them"),
    "produce": ("segmentlog.cli.produce:produce", "append lines of a file or of stdin to a topic"),
    "consume": ("segmentlog.cli.consume:consume", "print the records of a topic"),
    "tail": ("segmentlog.cli.tail:tail", "print the last records of topics, and follow them"),
    "flush": ("segmentlog.cli.maintain:flush", "fsync now"),
    "trim": ("segmentlog.cli.maintain:trim", "delete records from the front"),
    "truncate": ("segmentlog.cli.maintain:truncate", "cut the end off"),
    "retain": ("segmentlog.cli.retain:retain", "delete the segments that retention does not keep, now"),
    "compact": ("segmentlog.cli.compact:compact", "keep the last records of each key, now"),
    "groups": ("segmentlog.cli.groups:groups", "consumer groups: list, describe, reset, delete"),
    "transactions": ("segmentlog.cli.transactions:transactions", "transactions of producers: list, abort"),
    "verify": ("segmentlog.cli.inspect:verify", "check every checksum, index and invariant"),
    "repair": ("segmentlog.cli.inspect:repair", "cut damage out, and keep it in quarantine"),
    "dump": ("segmentlog.cli.inspect:dump", "print the batches of one segment file, even of a broken one"),
    "import": ("segmentlog.cli.transfer:import_", "records from NDJSON, CSV, Parquet or a kafkaesque Redis"),
    "export": ("segmentlog.cli.transfer:export", "records to NDJSON, CSV or Parquet"),
    "spark": ("segmentlog.cli.spark:spark", "pipelines on Spark: import, archive, aggregate, table, sql, verify"),
    "ship": ("segmentlog.cli.ship:ship", "copy the store to an object store, and keep up"),
    "restore": ("segmentlog.cli.ship:restore", "make a store anew from an object store"),
    "replica": ("segmentlog.cli.replica:replica", "a read-only store that keeps up with one that is shipped"),
    "takeover": ("segmentlog.cli.ship:takeover", "go on with a store on this machine; its owner is fenced"),
    "objects": ("segmentlog.cli.objects:objects", "what lies in an object store: ls, verify, gc"),
    "users": ("segmentlog.cli.users:users", "who may come in over Kafka's protocol: add, remove, list"),
    "serve": ("segmentlog.cli.serve:serve", "let Kafka's clients produce and consume"),
    "http": ("segmentlog.cli.http:http", "pages for people, REST and the schema registry"),
    "schemas": ("segmentlog.cli.schemas:schemas", "what values look like: list, show, register, check, delete"),
    "bench": ("segmentlog.cli.bench:bench", "measure this disk under each fsync policy"),
    "demo": ("segmentlog.cli.demo:demo", "watch the log at work on 336,776 real flights"),
}


@click.group(
    cls=LazyGroup, places=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option(
    "--dir",
    "directory",
    envvar="SEGMENTLOG_DIR",
    default="./segmentlog-data",
    show_default=True,
    metavar="PATH",
    help="Folder of the store, before or after the command; also $SEGMENTLOG_DIR.",
)
@click.version_option(f"{__version__} ({CORE_NAME})", prog_name="segmentlog")
@click.pass_context
def cli(ctx: click.Context, directory: str) -> None:
    """Kafka's log, embedded: append, read and follow topics in a folder, with no server.

    \b
      segmentlog create words --page-size 4096
      seq --format=word%g 9999 | segmentlog produce --batch-size 1024 words
      segmentlog consume --fetch-size 512 words
    """
    ctx.obj = directory


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with its exit status.

    0 done, 1 failed, 2 wrong usage, 3 damage, 4 no damage and an unreadable batch.
    """
    from segmentlog.cli.common import prepare_process, run

    prepare_process()
    sys.exit(run(cli, args))
