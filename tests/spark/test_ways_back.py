"""Every record that a Kafka client may send comes back from every copy that Spark makes: archive, write, import."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession
from round_trip import LARGE, LATEST_MS, OLD, Sent, all_kinds, by_partition, content, fill

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.errors import SegmentlogError
from segmentlog.spark.pipelines.archive import archive
from segmentlog.spark.pipelines.archive_folder import ArchivedFile, ArchivedRun, ArchiveFolder
from segmentlog.spark.pipelines.archive_restore import restore
from segmentlog.spark.pipelines.output_folders import compute_checksum

YEAR_1_MS = -62_135_596_800_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store with topic "all": every kind of record, and in the end a large one."""
    made = tmp_path_factory.mktemp("ways") / "store"
    with segmentlog.open(made, background=False) as store:
        fill(store, "all", [*all_kinds(), OLD, LARGE])
        for log in store.topic("all").partitions():
            log.roll()
        fill(store, "spark", all_kinds())
    return str(made)


def records(path: str, topic: str) -> list[Sent]:
    """Return the records of a topic."""
    with segmentlog.open(path, read_only=True) as store:
        return content(store, topic)


def test_an_archive_that_was_trimmed_comes_back(spark: SparkSession, path: str, tmp_path: Path) -> None:
    """Every record is restored after the log was trimmed, into a topic with the default limits."""
    copy = str(tmp_path / "store")
    shutil.copytree(path, copy)
    before = records(copy, "all")
    assert before == by_partition([*all_kinds(), OLD, LARGE])
    report = archive(spark, copy, "all", str(tmp_path / "archive"), trim=True)
    assert report.records == len(before)
    assert records(copy, "all") == []
    restored = restore(spark, copy, str(tmp_path / "archive"), "back")
    assert restored.verified == len(before)
    assert records(copy, "back") == before
    assert "max.message.bytes = " in restored.notes[0]
    # Columns of the archive: the timestamp is null where Spark's Kafka source has none, and the date is in UTC. Both
    # are null for a time that calendars do not have.
    rows = spark.read.parquet(str(tmp_path / "archive"))
    assert dict(rows.dtypes)["date"] == "date"
    found = rows.selectExpr(
        "coalesce(timestampMillis, unix_millis(timestamp)) AS ms", "string(date) AS date", "timestamp IS NULL AS far"
    ).distinct()
    assert {row.ms: (row.date, row.far) for row in found.collect()} == {
        -1: ("1969-12-31", False),
        0: ("1970-01-01", False),
        1_700_000_000_123: ("2023-11-14", False),
        LATEST_MS: (None, False),
        OLD.timestamp: (None, True),
    }


def test_an_archive_of_an_older_version_comes_back(spark: SparkSession, path: str, tmp_path: Path) -> None:
    """Its files lack `timestampMillis`, and its manifest lacks the size of the largest batch, which may be large."""
    copy, folder = str(tmp_path / "store"), str(tmp_path / "archive")
    sent = [*all_kinds()[:40], LARGE]
    with segmentlog.open(copy, background=False) as store:
        fill(store, "old", sent)
        for log in store.topic("old").partitions():
            log.roll()
    archive(spark, copy, "old", folder)
    archived = ArchiveFolder(folder)
    manifest = archived.existing()
    with archived.writing():
        runs = []
        for run_of in manifest.runs:
            files = []
            for file in run_of.files:
                name = f"{folder}/{file.path}"
                table = pyarrow.parquet.read_table(name, partitioning=None).drop_columns(["timestampMillis"])
                pyarrow.parquet.write_table(table, name)
                files.append(ArchivedFile(file.path, Path(name).stat().st_size, compute_checksum(name)))
            runs.append(ArchivedRun(run_of.id, run_of.at_ms, run_of.ranges, files))
        archived.write(msgspec.structs.replace(manifest, runs=runs))
    restore(spark, copy, folder, "back")
    assert records(copy, "back") == by_partition(sent)


def test_an_archive_is_verified_by_what_restores_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that a restore would refuse or change are not archived, and the log is not trimmed."""
    copy = str(tmp_path / "store")
    with segmentlog.open(copy, background=False) as store:
        fill(store, "t", [Sent(0, 5, b"k", b"v", ())])
        store.topic("t").partition(0).roll()

    def refuse(config: object, batches: object) -> Iterator[object]:
        raise SegmentlogError("restoring refuses this record")
        yield

    def lose(config: object, batches: object) -> Iterator[object]:
        yield from ()

    for replaced, error in ((refuse, "restoring refuses this record"), (lose, "t/0: 0 records were written")):
        with monkeypatch.context() as patched:
            patched.setattr("segmentlog.spark.pipelines.archived_rows._simulate_task", replaced)
            with pytest.raises(SegmentlogError, match=error):
                archive(spark, copy, "t", str(tmp_path / "archive"), trim=True)
        assert len(records(copy, "t")) == 1
    assert archive(spark, copy, "t", str(tmp_path / "archive"), trim=True).records == 1
    assert records(copy, "t") == []


def test_what_was_read_can_be_written(spark: SparkSession, path: str) -> None:
    """A copy of a topic by the data source, with the types that it shows by itself, and in milliseconds."""
    with segmentlog.open(path) as store:
        for topic in ("copy-types", "copy-milliseconds"):
            fill(store, topic, [])
    reader = spark.read.format("segmentlog").option("path", path)
    types = reader.option("subscribe", "spark").option("includeHeaders", "true").load()
    schema = (
        "key binary, value binary, partition int, timestamp bigint, headers array<struct<key string, value binary>>"
    )
    milliseconds = reader.option("subscribe", "all").schema(schema).load().where(f"timestamp <= {LATEST_MS}")
    for rows, topic in ((types, "copy-types"), (milliseconds, "copy-milliseconds")):
        rows.coalesce(1).write.format("segmentlog").mode("append").option("path", path).option("topic", topic).option(
            "allowNullValues", "true"
        ).save()
    assert records(path, "copy-types") == records(path, "spark")
    assert records(path, "copy-milliseconds") == [one for one in records(path, "all") if one != OLD]


def test_a_timestamp_of_an_older_version_is_null(spark: SparkSession, path: str) -> None:
    """A timestamp that Spark's type cannot hold is null, so queries still read the other records."""
    reader = spark.read.format("segmentlog").option("path", path).option("subscribe", "all")
    rows = reader.schema("value binary, timestamp timestamp").load()
    found = rows.selectExpr("value", "unix_millis(timestamp) AS ms").collect()
    sent = [*all_kinds(), OLD, LARGE]
    assert sorted(row.ms for row in found if row.ms is not None) == sorted(one.timestamp for one in sent if one != OLD)
    assert [bytes(row.value) for row in found if row.ms is None] == [OLD.value]


def test_times_before_1970_survive_spark(spark: SparkSession, path: str, tmp_path: Path) -> None:
    """Written by Spark, archived, restored: the first millisecond of the year 1, and others before 1970."""
    with segmentlog.open(path) as store:
        fill(store, "early", [])
    stamps = [YEAR_1_MS, -86_400_001, -86_400_000, -2]
    rows = spark.createDataFrame(
        [(b"v", 0, stamp) for stamp in stamps], "value binary, partition int, timestamp bigint"
    )
    rows.coalesce(1).write.format("segmentlog").mode("append").save(path=path, topic="early")
    assert [one.timestamp for one in records(path, "early")] == stamps
    with segmentlog.open(path) as store:
        store.topic("early").partition(0).roll()
    archive(spark, path, "early", str(tmp_path / "archive"), trim=True)
    restore(spark, path, str(tmp_path / "archive"), "early-back")
    assert [one.timestamp for one in records(path, "early-back")] == stamps
    days = sorted(folder.name for folder in (tmp_path / "archive").glob("date=*"))
    assert days == ["date=0001-01-01", "date=1969-12-30", "date=1969-12-31"]


def test_an_export_is_imported_by_spark(
    spark: SparkSession, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`spark import parquet` takes what `segmentlog export` wrote: values, keys and timestamps."""
    file = str(tmp_path / "out.parquet")
    with segmentlog.open(path) as store:
        store.create_topic("imported", 1, max_message_bytes="32MiB", retention_ms=-1)
    assert run(cli, ["--dir", path, "export", "spark", file]) == 0
    columns = ["--key", "key", "--value", "value", "--timestamp", "timestamp", "--tombstones"]
    assert run(cli, ["--dir", path, "spark", "import", "parquet", file, "imported", *columns]) == 0, capsys.readouterr()
    found = sorted((repr(one.key), repr(one.value), one.timestamp) for one in records(path, "imported"))
    assert found == sorted((repr(one.key), repr(one.value), one.timestamp) for one in records(path, "spark"))
