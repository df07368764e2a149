"""The command line: commands parse options, call the library and print.

Each command has a module of its own, which is imported when the command is called. So ``--help`` and ``tail`` start
without loading numpy, servers and Spark.
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
    "create": ("segmentlog.cli.topics_command:create", "create a topic"),
    "topics": ("segmentlog.cli.topics_command:topics", "list the topics"),
    "describe": ("segmentlog.cli.topics_command:describe", "show a topic's configuration, partitions and segments"),
    "alter": (
        "segmentlog.cli.topics_command:alter",
        "change a topic's configuration or add partitions, while it is in use",
    ),
    "rename": ("segmentlog.cli.topics_command:rename", "rename a topic"),
    "delete": ("segmentlog.cli.topics_command:delete", "delete topics and all their records"),
    "produce": ("segmentlog.cli.produce_command:produce", "append the lines of a file or of stdin to a topic"),
    "consume": ("segmentlog.cli.consume_command:consume", "print the records of a topic"),
    "tail": ("segmentlog.cli.tail_command:tail", "print the last records of topics, and follow new ones"),
    "flush": ("segmentlog.cli.flush_trim_truncate:flush", "fsync a topic now"),
    "trim": ("segmentlog.cli.flush_trim_truncate:trim", "delete the oldest records of a topic"),
    "truncate": ("segmentlog.cli.flush_trim_truncate:truncate", "delete the newest records of a partition"),
    "apply-retention": ("segmentlog.cli.retain_command:apply_retention", "delete expired segments now"),
    "compact": ("segmentlog.cli.compact_command:compact", "keep only the last record of each key, now"),
    "groups": ("segmentlog.cli.groups_command:groups", "list, describe, reset and delete consumer groups"),
    "transactions": ("segmentlog.cli.transactions_command:transactions", "list and abort transactions of producers"),
    "verify": ("segmentlog.cli.verify_repair:verify", "check every checksum, index and invariant"),
    "repair": ("segmentlog.cli.verify_repair:repair", "move damaged bytes to quarantine"),
    "dump": ("segmentlog.cli.verify_repair:dump", "print the batches of one segment file, even a damaged one"),
    "import": (
        "segmentlog.cli.import_export:import_",
        "import records from NDJSON, CSV, Parquet or a kafkaesque Redis",
    ),
    "export": ("segmentlog.cli.import_export:export", "export records to NDJSON, CSV or Parquet"),
    "spark": (
        "segmentlog.cli.spark_command:spark",
        "Spark pipelines: import, archive, aggregate, table, sql, verify",
    ),
    "ship": ("segmentlog.cli.ship_command:ship", "copy the store to an object store, once or continuously"),
    "restore": ("segmentlog.cli.ship_command:restore", "recreate a store from an object store"),
    "replica": ("segmentlog.cli.replica_command:replica", "keep a read-only copy of a shipped store up to date"),
    "takeover": (
        "segmentlog.cli.ship_command:takeover",
        "continue a shipped store on this machine, and fence its owner",
    ),
    "objects": ("segmentlog.cli.objects_command:objects", "what lies in an object store: ls, verify, gc"),
    "cluster": (
        "segmentlog.cli.cluster_command:cluster",
        "check the coordinator of a cluster",
    ),
    "users": ("segmentlog.cli.users_command:users", "add, remove and list the users of the server"),
    "serve": ("segmentlog.cli.serve_command:serve", "serve Kafka clients"),
    "http": ("segmentlog.cli.http_command:http", "serve the web console, REST and the schema registry"),
    "schemas": ("segmentlog.cli.schemas_command:schemas", "list, show, register, check and delete schemas"),
    "bench": ("segmentlog.cli.bench_command:bench", "measure this disk with each fsync policy"),
    "demo": ("segmentlog.cli.demo_command:demo", "run the library on 336,776 real flights"),
}

_ALIASES: Final = {"details": "describe", "retain": "apply-retention"}
"""Former names of commands, which still work."""


@click.group(
    cls=LazyGroup,
    locations=_COMMANDS,
    aliases=_ALIASES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
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
    """Kafka's log, embedded: append, read and follow topics in a folder, without a server.

    \b
      segmentlog create words --page-size 4096
      seq --format=word%g 9999 | segmentlog produce --batch-size 1024 words
      segmentlog consume --fetch-size 512 words
    """
    ctx.obj = directory


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line, and end the process with its exit status.

    Exit statuses: 0 done, 1 failed, 2 wrong usage, 3 damage, 4 no damage but an unreadable batch.
    """
    from segmentlog.cli.common import prepare_process, run

    prepare_process()
    sys.exit(run(cli, args))
