"""Maintain a table with the latest row of each key of a topic, updated incrementally.

Keys are spread over buckets by their hash. An update reads the new records, reduces them to the latest record of each
key, and rewrites only the buckets of those keys. A record without a value deletes its key's row. Rows and position
change in one step: see `table_folder`.

The latest record of a key is the record with the highest offset. All records of a key are in one partition, unless
partitions were added. Then the latest records of its partitions are compared by timestamp, then by offset.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from pyspark.storagelevel import StorageLevel

from segmentlog.errors import SegmentlogError
from segmentlog.spark.pipelines.archive import write_microseconds
from segmentlog.spark.pipelines.archive_folder import OnStep
from segmentlog.spark.pipelines.json_columns import require_schema
from segmentlog.spark.pipelines.output_folders import list_data_files, spark_uri
from segmentlog.spark.pipelines.run_history import (
    AnotherHistory,
    check_resume_offset,
    find_last_mark,
    open_to_sync,
    read_ranges,
    sync_stable_records,
)
from segmentlog.spark.pipelines.table_folder import FORMAT, TableFolder, TableState
from segmentlog.spark.pipelines.table_rows import RECORD, Changes, TableRows, apply_changes, count_changes
from segmentlog.spark.spark_errors import explain_spark_errors

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from segmentlog.store import LogStore

_REBUILD: Final = "to rebuild the table from all records: --rebuild (rebuild=True)"
_BUCKET: Final = "segmentlog_bucket"
# A name that no field of a JSON object should have.
_BUCKETS_MIN: Final = 8
_BUCKETS_MAX: Final = 64
_BUCKET_BYTES: Final = 64 << 20


class NullKeys(SegmentlogError):
    """The topic has records without a key; every row of a table needs a key."""

    def __init__(self, topic: str, count: int, partition: int, offset: int) -> None:
        super().__init__(topic, count, partition, offset)
        self.topic, self.count, self.partition, self.offset = topic, count, partition, offset

    def __str__(self) -> str:
        return (
            f"{self.topic}: {self.count} records have no key (the first at {self.topic}/{self.partition} offset"
            f" {self.offset}), and a row needs a key; to leave them out: --skip-null-keys (skip_null_keys=True)"
        )


class TableReport(msgspec.Struct, frozen=True):
    """Result of one update."""

    topic: str
    path: str
    version: int
    records: int
    """Records that the update read."""
    inserted: int
    updated: int
    deleted: int
    skipped: int
    """Records left out because they have no key."""
    rows: int
    """Rows of the table after the update."""
    buckets: int
    rewritten: int
    """Buckets that the update rewrote."""
    positions: dict[int, int]
    seconds: float


@explain_spark_errors()
def update_table(
    spark: SparkSession,
    path: str,
    topic: str,
    target: str,
    *,
    json_values: bool = False,
    schema: str | None = None,
    buckets: int | None = None,
    skip_null_keys: bool = False,
    rebuild: bool = False,
    on_step: OnStep = lambda step: None,
) -> TableReport:
    """Update the table ``target`` with the new records of a topic; create it if needed.

    The table has the columns key, value, partition, offset and timestamp. ``spark.read.parquet(target)`` can read it,
    also during an update. Updates keep the newest version and the one before. A long job should read
    ``os.path.realpath(target)``, so that it stays with one version; that version exists until the second next update.

    Args:
        path: the folder of the store, or the URL of an object store that it was shipped to.
        json_values: the values are JSON objects, and their fields replace the column ``value``. If a field has the
            name of another column, that column gets the prefix ``_``.
        schema: the fields as DDL; None: the fields of a sample. Later updates use the fields of the first update.
        buckets: the number of buckets, which cannot change later. Default: 8 to 64, by the size of the topic.
        skip_null_keys: leave out records without a key instead of failing.
        rebuild: read the topic from its start.
        on_step: called with the name of each step before it.

    Raises:
        NullKeys: there are records without a key.
        AnotherHistory, RecordsGone: the topic was created again, or records were deleted before they were read; set
            ``rebuild``.
        NotJson, InvalidConfig: the sample has no JSON object, or the schema is not valid.
        SegmentlogError: ``target`` is not a table; another update is running; Spark failed.
    """
    started = time.perf_counter()
    folder = TableFolder(target)
    with open_to_sync(path) as store:
        store.topic(topic)
        with folder.writing():
            before = None if rebuild else folder.read()
            folder.sweep()
            state, ranges = plan_update(
                spark, store, topic, before, folder.path, json_values=json_values, schema=schema, buckets=buckets
            )
            if before is not None and not ranges:
                return create_report(before, folder.path, 0, Changes(), 0, 0, started)
            state = msgspec.structs.replace(state, version=folder.next_version())
            return _update(spark, store, folder, state, before, ranges, skip_null_keys, on_step, started)


def follow_table(
    update: Callable[[], TableReport],
    every_s: float,
    is_stopped: Callable[[], bool],
    on_report: Callable[[TableReport], None],
) -> None:
    """Run an update every ``every_s`` seconds until ``is_stopped()``. A slow update delays the next."""
    while not is_stopped():
        due = time.monotonic() + every_s
        on_report(update())
        while not is_stopped() and (left_s := due - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.2))


# ---------------------------------------------------------------- plan


def plan_update(
    spark: SparkSession,
    store: LogStore,
    topic: str,
    before: TableState | None,
    target: str,
    *,
    json_values: bool,
    schema: str | None,
    buckets: int | None,
) -> tuple[TableState, dict[int, tuple[int, int]]]:
    """Return (the state after an update, the offset ranges that it reads). Raises the errors of `update_table`."""
    if before is None:
        columns = require_schema(spark, store.url or store.path, topic, schema) if json_values or schema else None
        state = _create_state(store, topic, columns, buckets)
    else:
        state = before
        _check_identity(before, store, topic, json_values, schema, buckets, target)
    positions, marks, ranges = {}, dict(state.marks), {}
    for log in store.topic(topic).partitions():
        number = log.number
        start = log.log_start_offset
        if number in state.positions:
            start = check_resume_offset(
                log, state.positions[number], marks.get(number), rebuild_advice=_REBUILD, gap_advice=_REBUILD
            )
        end = sync_stable_records(log, read_only=store.read_only)
        positions[number] = max(start, end)
        if start < end:
            ranges[number] = (start, end)
            mark = find_last_mark(log, end)
            if mark is not None:
                marks[number] = mark
    return msgspec.structs.replace(state, positions=positions, marks=marks), ranges


def _create_state(store: LogStore, topic: str, columns: StructType | None, buckets: int | None) -> TableState:
    if buckets is None:
        logs = store.topic(topic).partitions()
        size_bytes = sum(segment.size_bytes for log in logs for segment in log.segments())
        buckets = min(max(size_bytes // _BUCKET_BYTES, _BUCKETS_MIN), _BUCKETS_MAX)
    return TableState(FORMAT, 0, topic, store.store_id, buckets, None if columns is None else columns.json(), {}, {})


def _check_identity(
    state: TableState,
    store: LogStore,
    topic: str,
    json_values: bool,
    schema: str | None,
    buckets: int | None,
    target: str,
) -> None:
    """Raise `AnotherHistory` for a table of another topic, and `SegmentlogError` for other columns or buckets."""
    if (state.topic, state.store_id) != (topic, store.store_id):
        other = "" if state.store_id == store.store_id else " of another store"
        raise AnotherHistory(target, f"it is the table of topic {state.topic!r}{other}", _REBUILD)
    wanted = None if schema is None else StructType.fromDDL(schema).json()
    if (json_values and state.json_schema is None) or (wanted is not None and wanted != state.json_schema):
        raise SegmentlogError(f"{target}: the table was created with other columns; {_REBUILD}")
    if buckets is not None and buckets != state.buckets:
        raise SegmentlogError(f"{target}: the table was created with {state.buckets} buckets; {_REBUILD}")


def decode_payload_schema(state: TableState) -> StructType | None:
    """Return the fields of the JSON values; None if ``value`` is a column."""
    return None if state.json_schema is None else StructType.fromJson(msgspec.json.decode(state.json_schema))


def create_report(
    state: TableState, target: str, records: int, changes: Changes, skipped: int, rewritten: int, started: float
) -> TableReport:
    """Return the report of an update that ended in this state."""
    return TableReport(
        state.topic, target, state.version, records, changes.inserted, changes.updated, changes.deleted, skipped,
        state.rows, state.buckets, rewritten, state.positions, time.perf_counter() - started,
    )  # fmt: skip


# ---------------------------------------------------------------- an update


@contextlib.contextmanager
def cached_latest_records(
    spark: SparkSession, store: LogStore, state: TableState, ranges: dict[int, tuple[int, int]]
) -> Iterator[DataFrame]:
    """Provide the latest new records by key and partition, cached during the update."""
    records = read_ranges(spark, store.url or store.path, state.topic, ranges, *RECORD) if ranges else None
    latest = TableRows(spark, decode_payload_schema(state)).latest(records).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield latest
    finally:
        latest.unpersist()


def count_by_bucket(latest: DataFrame, state: TableState, *, skip_null_keys: bool) -> tuple[dict[int, int], int]:
    """Return (number of records by bucket of their key, number of records without a key). Raises `NullKeys`."""
    bucket = F.when(F.col("key").isNotNull(), _bucket_column(state))
    groups = latest.groupBy(bucket.alias("bucket")).agg(
        F.sum("records").alias("records"), F.min(F.struct("partition", "first")).alias("first")
    )
    found = {row["bucket"]: row for row in groups.collect()}
    nameless = found.pop(None, None)
    if nameless is not None and not skip_null_keys:
        raise NullKeys(state.topic, nameless["records"], *nameless["first"])
    counts = {bucket: row["records"] for bucket, row in found.items()}
    return counts, 0 if nameless is None else nameless["records"]


def _bucket_column(state: TableState) -> Column:
    return F.expr(f"int(pmod(xxhash64(key), {state.buckets}))")


def _update(
    spark: SparkSession,
    store: LogStore,
    folder: TableFolder,
    state: TableState,
    before: TableState | None,
    ranges: dict[int, tuple[int, int]],
    skip_null_keys: bool,
    on_step: OnStep,
    started: float,
) -> TableReport:
    rows = TableRows(spark, decode_payload_schema(state))
    with cached_latest_records(spark, store, state, ranges) as latest:
        on_step("reading")
        records, skipped = count_by_bucket(latest, state, skip_null_keys=skip_null_keys)
        touched = set(records)
        paths = [] if before is None else folder.paths(before, touched)
        existing = rows.existing(paths)
        changes = latest.where("key IS NOT NULL")
        on_step("counting")
        counted = count_changes(existing, changes) if paths else None
        on_step("writing")
        if touched:
            after = rows.to_table_columns(
                apply_changes(existing, changes).withColumn(_BUCKET, _bucket_column(state)), _BUCKET
            )
            _write_buckets(spark, after, rows.names["key"], len(touched), folder.work_folder())
        _write_empty_file(spark, folder, rows, before, touched)
    on_step("building")
    state = folder.build(state, before, touched)
    on_step("publishing")
    folder.publish(state)
    on_step("sweeping")
    folder.sweep()
    if counted is None:  # no existing row could be updated or deleted
        counted = Changes(inserted=state.rows - (0 if before is None else before.rows))
    return create_report(state, folder.path, sum(records.values()) + skipped, counted, skipped, len(touched), started)


def _write_buckets(spark: SparkSession, rows: DataFrame, key: str, buckets: int, path: str) -> None:
    """Write each bucket to its own folder, as one file."""
    one_each = rows.repartition(min(buckets, 2 * spark.sparkContext.defaultParallelism), _BUCKET)
    with write_microseconds(spark):
        one_each.sortWithinPartitions(_BUCKET, key).write.partitionBy(_BUCKET).parquet(spark_uri(path))


def _write_empty_file(
    spark: SparkSession, folder: TableFolder, rows: TableRows, before: TableState | None, touched: set[int]
) -> None:
    """If the table has no rows after the update, write an empty file, which defines the columns."""
    kept = [] if before is None else [file for file in before.files if file.bucket >= 0 and file.bucket not in touched]
    if not kept and not list_data_files(folder.work_folder()):
        empty = rows.to_table_columns(rows.existing([])).coalesce(1)
        with write_microseconds(spark):
            empty.write.mode("overwrite").parquet(spark_uri(folder.work_folder()))
