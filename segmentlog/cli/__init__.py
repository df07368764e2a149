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
from segmentlog.cli.lazy_group import LazyGroup
from segmentlog.speedups import CORE_NAME

_COMMANDS: Final = {
    "create": ("segmentlog.cli.topics_command:create", "make a topic"),
    "topics": ("segmentlog.cli.topics_command:topics", "list the topics"),
    "details": ("segmentlog.cli.topics_command:details", "show a topic's configuration, partitions and segments"),
    "alter": ("segmentlog.cli.topics_command:alter", "change a topic's configuration while it is in use"),
    "rename": ("segmentlog.cli.topics_command:rename", "give a topic another name"),
    "delete": ("segmentlog.cli.topics_command:delete", "delete topics with everything in them"),
    "produce": ("segmentlog.cli.produce_command:produce", "append lines of a file or of stdin to a topic"),
    "consume": ("segmentlog.cli.consume_command:consume", "print the records of a topic"),
    "tail": ("segmentlog.cli.tail_command:tail", "print the last records of topics, and follow them"),
    "flush": ("segmentlog.cli.flush_trim_truncate:flush", "fsync now"),
    "trim": ("segmentlog.cli.flush_trim_truncate:trim", "delete records from the front"),
    "truncate": ("segmentlog.cli.flush_trim_truncate:truncate", "cut the end off"),
    "retain": ("segmentlog.cli.retain_command:retain", "delete the segments that retention does not keep, now"),
    "compact": ("segmentlog.cli.compact_command:compact", "keep the last records of each key, now"),
    "groups": ("segmentlog.cli.groups_command:groups", "consumer groups: list, describe, reset, delete"),
    "transactions": ("segmentlog.cli.transactions_command:transactions", "transactions of producers: list, abort"),
    "verify": ("segmentlog.cli.verify_repair:verify", "check every checksum, index and invariant"),
    "repair": ("segmentlog.cli.verify_repair:repair", "cut damage out, and keep it in quarantine"),
    "dump": ("segmentlog.cli.verify_repair:dump", "print the batches of one segment file, even of a broken one"),
    "import": ("segmentlog.cli.import_export:import_", "records from NDJSON, CSV, Parquet or a kafkaesque Redis"),
    "export": ("segmentlog.cli.import_export:export", "records to NDJSON, CSV or Parquet"),
    "spark": (
        "segmentlog.cli.spark_command:spark",
        "pipelines on Spark: import, archive, aggregate, table, sql, verify",
    ),
    "ship": ("segmentlog.cli.ship_command:ship", "copy the store to an object store, and keep up"),
    "restore": ("segmentlog.cli.ship_command:restore", "make a store anew from an object store"),
    "replica": ("segmentlog.cli.replica_command:replica", "a read-only store that keeps up with one that is shipped"),
    "takeover": ("segmentlog.cli.ship_command:takeover", "go on with a store on this machine; its owner is fenced"),
    "objects": ("segmentlog.cli.objects_command:objects", "what lies in an object store: ls, verify, gc"),
    "users": ("segmentlog.cli.users_command:users", "who may come in over Kafka's protocol: add, remove, list"),
    "serve": ("segmentlog.cli.serve_command:serve", "let Kafka's clients produce and consume"),
    "http": ("segmentlog.cli.http_command:http", "pages for people, REST and the schema registry"),
    "schemas": ("segmentlog.cli.schemas_command:schemas", "what values look like: list, show, register, check, delete"),
    "bench": ("segmentlog.cli.bench_command:bench", "measure this disk under each fsync policy"),
    "demo": ("segmentlog.cli.demo_command:demo", "watch the log at work on 336,776 real flights"),
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
