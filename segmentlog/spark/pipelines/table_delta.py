"""Maintain a Delta table with the latest row of each key of a topic, like `latest_rows`, but with Delta's merge.

The position is stored in the commit itself (its ``userMetadata``), so that rows and position change in one step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
from py4j.java_gateway import JavaClass

from segmentlog.errors import SegmentlogError
from segmentlog.spark.pipelines.archive_folder import OnStep
from segmentlog.spark.pipelines.latest_rows import (
    TableReport,
    cached_latest_records,
    count_by_bucket,
    create_report,
    decode_payload_schema,
    plan_update,
)
from segmentlog.spark.pipelines.run_history import open_to_sync
from segmentlog.spark.pipelines.table_folder import TableState, state_decoder
from segmentlog.spark.pipelines.table_rows import Changes, TableRows, select_latest
from segmentlog.spark.spark_errors import explain_spark_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_USER_METADATA: Final = "spark.databricks.delta.commitInfo.userMetadata"

_DELETED: Final = "segmentlog_deleted"


class DeltaNotInstalled(SegmentlogError):
    """The session has no Delta Lake."""

    def __str__(self) -> str:
        return (
            "the format delta needs Delta Lake: pip install delta-spark, and start Spark with"
            " spark.jars.packages=io.delta:delta-spark_SPARK_2.13:VERSION (SPARK is that of pyspark, such as 4.2),"
            " spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension and"
            " spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog"
            " (segmentlog spark --conf KEY=VALUE); or use a Parquet table"
        )


@explain_spark_errors()
def update_delta(
    spark: SparkSession,
    path: str,
    topic: str,
    target: str,
    *,
    json_values: bool = False,
    schema: str | None = None,
    skip_null_keys: bool = False,
    rebuild: bool = False,
    on_step: OnStep = lambda step: None,
) -> TableReport:
    """Update a Delta table, as `update_table` updates a Parquet table.

    ``target`` may be on any file system that Delta supports. Also raises `DeltaNotInstalled`.
    """
    started = time.perf_counter()
    delta = _load_delta(spark)
    is_there = bool(delta.isDeltaTable(spark, target))
    with open_to_sync(path) as store:
        before = None if rebuild or not is_there else _read_state(spark, delta, target)
        state, ranges = plan_update(
            spark, store, topic, before, target, json_values=json_values, schema=schema, buckets=None
        )
        if before is not None and not ranges:
            return _add_row_count(spark, create_report(before, target, 0, Changes(), 0, 0, started))
        rows = TableRows(spark, decode_payload_schema(state))
        with cached_latest_records(spark, store, state, ranges) as latest, _attach_state(spark, state):
            on_step("reading")
            records, skipped = count_by_bucket(latest, state, skip_null_keys=skip_null_keys)
            changes = select_latest(latest.where("key IS NOT NULL"))
            on_step("writing")
            if before is None:
                first = rows.to_table_columns(changes.where("NOT deleted")).write.format("delta").mode("overwrite")
                first.option("overwriteSchema", "true").save(target)
            else:
                _merge(
                    delta.forPath(spark, target),
                    rows,
                    rows.to_table_columns(changes.withColumnRenamed("deleted", _DELETED), _DELETED),
                )
    last = delta.forPath(spark, target).history(1).collect()[0]
    counts = [
        int(last["operationMetrics"].get(f"numTargetRows{what}", 0)) for what in ("Inserted", "Updated", "Deleted")
    ]
    if before is None:
        counts = [int(last["operationMetrics"].get("numOutputRows", 0)), 0, 0]
    state = msgspec.structs.replace(state, version=last["version"])
    report = create_report(
        state, target, sum(records.values()) + skipped, Changes(*counts), skipped, len(records), started
    )
    return _add_row_count(spark, report)


def _add_row_count(spark: SparkSession, report: TableReport) -> TableReport:
    return msgspec.structs.replace(report, rows=spark.read.format("delta").load(report.path).count())


def _load_delta(spark: SparkSession) -> Any:
    """Return the class `DeltaTable`. Raises `DeltaNotInstalled`."""
    try:
        from delta.tables import DeltaTable  # type: ignore[import-not-found]
    except ImportError:
        raise DeltaNotInstalled from None
    if not isinstance(spark._jvm.io.delta.tables.DeltaTable, JavaClass):  # type: ignore[union-attr]
        raise DeltaNotInstalled
    return DeltaTable


def _read_state(spark: SparkSession, delta: Any, target: str) -> TableState:
    """Return the state in the newest commit of segmentlog. Commits of OPTIMIZE and VACUUM do not contain a state."""
    for row in delta.forPath(spark, target).history().select("userMetadata").toLocalIterator():
        with contextlib.suppress(msgspec.MsgspecError):
            return state_decoder.decode(row["userMetadata"] or "")
    why = "no commit of the table contains the position of an update"
    raise SegmentlogError(f"{target}: {why}; to rebuild the table: --rebuild")


@contextlib.contextmanager
def _attach_state(spark: SparkSession, state: TableState) -> Iterator[None]:
    spark.conf.set(_USER_METADATA, msgspec.json.encode(state).decode())
    try:
        yield
    finally:
        spark.conf.unset(_USER_METADATA)


def _merge(table: Any, rows: TableRows, changes: Any) -> None:
    own = {name: f"`{rows.names[name]}`" for name in ("key", "partition", "offset", "timestamp")}
    mine, theirs = ({name: f"{side}.{column}" for name, column in own.items()} for side in ("s", "t"))
    newer = (
        f"CASE WHEN {mine['partition']} = {theirs['partition']} THEN {mine['offset']} > {theirs['offset']} ELSE"
        f" struct({mine['timestamp']}, {mine['offset']}) > struct({theirs['timestamp']}, {theirs['offset']}) END"
    )
    values = {f"`{name}`": f"s.`{name}`" for name in changes.columns if name != _DELETED}
    (
        table.alias("t")
        .merge(changes.alias("s"), f"{mine['key']} = {theirs['key']}")
        .whenMatchedDelete(condition=f"({newer}) AND s.{_DELETED}")
        .whenMatchedUpdate(condition=newer, set=values)
        .whenNotMatchedInsert(condition=f"NOT s.{_DELETED}", values=values)
        .execute()
    )
