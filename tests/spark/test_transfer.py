"""Rows go into a topic and come out again as they were, once each."""

from __future__ import annotations

import csv
import json
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.errors import InvalidConfig, SegmentlogError, UnknownTopic
from segmentlog.spark.pipelines.json_columns import NotJson
from segmentlog.spark.pipelines.pipeline_queries import Incremental
from segmentlog.spark.pipelines.topic_transfer import RecordShape, RowShape, SparkEndpoint, export_records, import_rows
from segmentlog.spark.spark_errors import SparkFailed

NOON_MS = 1_700_000_000_000
ROWS = [{"id": number, "name": None if number % 7 == 0 else f"näme, {number}"} for number in range(50)]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return the path of a store with an empty topic "t" of two partitions."""
    path = str(tmp_path / "store")
    with segmentlog.open(path, background=False) as opened:
        opened.create_topic("t", partitions=2)
    return path


def records(path: str, topic: str = "t") -> list[segmentlog.Record]:
    """Return all records of a topic, sorted by value."""
    with segmentlog.open(path, background=False) as opened:
        return sorted(opened.consumer(topic), key=lambda record: record.value or b"")


def values(path: str, topic: str = "t") -> list[dict[str, object]]:
    """Return the values as what their JSON says, by id."""
    found = [json.loads(record.value or b"") for record in records(path, topic)]
    return sorted(found, key=lambda row: int(row["id"]))


def fill(path: str, rows: list[dict[str, object]], topic: str = "t", first_ms: int = NOON_MS) -> None:
    """Append rows as JSON, a key for every second one, a minute apart."""
    with segmentlog.open(path, background=False) as opened, opened.producer() as producer:
        texts = [json.dumps(row).encode() for row in rows]
        keys = [b"k%d" % at if at % 2 else None for at in range(len(rows))]
        producer.send_many(topic, texts, keys, timestamps=[first_ms + at * 60_000 for at in range(len(rows))])


def write_rows(folder: Path, form: str, rows: list[dict[str, object]], name: str = "rows") -> None:
    """Write a file of rows without Spark."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif form == "json":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, ["id", "name"])
            writer.writeheader()
            writer.writerows(rows)


@pytest.mark.parametrize("form", ["parquet", "json", "csv"])
def test_there_and_back(spark: SparkSession, store: str, tmp_path: Path, form: str) -> None:
    """Files become records, whose JSON has every field, nulls too; exported by their fields they are the same rows."""
    write_rows(tmp_path / "in", form, ROWS)
    source = SparkEndpoint(form, str(tmp_path / "in"))
    assert import_rows(spark, store, "t", source, RecordShape(key=("id",))).rows == len(ROWS)
    assert values(store) == ROWS
    assert {(record.key or b"").decode(): json.loads(record.value or b"")["id"] for record in records(store)} == {
        str(row["id"]): row["id"] for row in ROWS
    }
    out = tmp_path / "out"
    assert export_records(spark, store, "t", SparkEndpoint(form, str(out)), RowShape(json_values=True)).rows == len(
        ROWS
    )
    reader = spark.read.option("header", "true") if form == "csv" else spark.read
    found = reader.format(form).load(str(out)).collect()
    expected = [(str(row["id"]) if form == "csv" else row["id"], row["name"]) for row in ROWS]
    assert sorted(((row["id"], row["name"]) for row in found), key=lambda row: int(row[0])) == expected


def test_records_as_they_are(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """Parquet has a record's bytes, timestamp and place; read back they are the same record."""
    blobs = [bytes([at, 255, 0]) for at in range(20)]
    with segmentlog.open(store, background=False) as opened, opened.producer() as producer:
        producer.send_many("t", blobs, blobs, timestamps=[NOON_MS + at for at in range(20)])
    place = SparkEndpoint("parquet", str(tmp_path / "out"))
    export_records(spark, store, "t", place, partition_by=("date",))
    assert [folder.name for folder in (tmp_path / "out").glob("date=*")] == ["date=2023-11-14"]
    table = pq.read_table(tmp_path / "out")
    assert set(table.column_names) == {"key", "value", "topic", "partition", "offset", "timestamp", "headers", "date"}
    assert sorted(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True)) == sorted(
        (record.partition, record.offset) for record in records(store)
    )
    import_rows(spark, store, "again", place, RecordShape(("key",), "value", "timestamp"), create=1)
    assert [(one.key, one.value, one.timestamp) for one in records(store, "again")] == [
        (one.key, one.value, one.timestamp) for one in records(store)
    ]


def test_shapes_of_a_record(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """Several columns make a JSON key; a column with parts is JSON; times are read from ISO 8601; null may delete."""
    row = {"a": 1, "b": None, "deep": {"x": [1, 2]}, "at": "2023-11-14T22:13:20.123Z"}
    write_rows(tmp_path / "in", "json", [row])
    source = SparkEndpoint("json", str(tmp_path / "in"))
    import_rows(
        spark,
        store,
        "t",
        source,
        RecordShape(("a", "b"), "deep", "at"),
        schema="a int, b int, deep struct<x:array<int>>, at string",
    )
    (record,) = records(store)
    assert (record.key, record.value, record.timestamp) == (b'{"a":1,"b":null}', b'{"x":[1,2]}', NOON_MS + 123)
    with segmentlog.open(store, background=False) as opened:
        opened.create_topic("compacted", cleanup_policy="compact")
    import_rows(spark, store, "compacted", source, RecordShape(("a",), "b", tombstones=True))
    (record,) = records(store, "compacted")
    assert (record.key, record.value) == (b"1", None)


def test_text_for_csv(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """With text, CSV takes whole records; a value that is not text raises an error with its position."""
    fill(store, ROWS[:10])
    export_records(spark, store, "t", SparkEndpoint("csv", str(tmp_path / "out")), RowShape(text=True))
    lines = [
        line
        for file in (tmp_path / "out").glob("*.csv")
        for line in csv.DictReader(file.open(newline=""), escapechar="\\")
    ]
    assert len(lines) == 10
    assert {line["topic"] for line in lines} == {"t"}
    with segmentlog.open(store, background=False) as opened, opened.producer() as producer:
        producer.send("t", b"\xff", partition=0)
    with pytest.raises(SparkFailed, match=r"^the value at t/0 offset \d+ is not UTF-8 text"):
        export_records(spark, store, "t", SparkEndpoint("csv", str(tmp_path / "more")), RowShape(text=True))
    with pytest.raises(InvalidConfig, match="--text or --json-values"):
        export_records(spark, store, "t", SparkEndpoint("csv", str(tmp_path / "more")))


def test_import_goes_on(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """With a checkpoint, a run imports only new files, each once; without new files it imports nothing."""
    source, went = SparkEndpoint("json", str(tmp_path / "in")), Incremental(str(tmp_path / "checkpoint"))
    told: list[int] = []
    write_rows(tmp_path / "in", "json", ROWS[:30], "first")
    watched = Incremental(str(tmp_path / "checkpoint"), on_rows=told.append)
    assert import_rows(spark, store, "t", source, incremental=watched).rows == 30
    assert sum(told) == 30
    assert import_rows(spark, store, "t", source, incremental=went).rows == 0
    write_rows(tmp_path / "in", "json", ROWS[30:], "second")
    assert import_rows(spark, store, "t", source, incremental=went).rows == 20
    assert values(store) == ROWS


def test_export_goes_on(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """With a checkpoint, a run adds the new records."""
    sink, went = SparkEndpoint("parquet", str(tmp_path / "out")), Incremental(str(tmp_path / "checkpoint"))
    shape = RowShape(json_values=True, schema="id long, name string")
    for begin, end in ((0, 20), (20, 20), (20, 50)):
        fill(store, ROWS[begin:end])
        assert export_records(spark, store, "t", sink, shape, incremental=went).rows == end - begin
    found = spark.read.parquet(str(tmp_path / "out")).orderBy("id").collect()
    assert [row.asDict() for row in found] == ROWS


def test_follow_until_stopped(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """A run that follows takes what arrives meanwhile, and ends when it is asked to."""
    stop = threading.Event()
    write_rows(tmp_path / "in", "json", ROWS[:30], "first")
    (tmp_path / "aside").mkdir()
    write_rows(tmp_path / "aside", "json", ROWS[30:], "second")
    seen = 0

    def on_rows(count: int) -> None:
        nonlocal seen
        seen += count
        if seen == 30:
            os.rename(tmp_path / "aside" / "second.json", tmp_path / "in" / "second.json")
        if seen == len(ROWS):
            stop.set()

    follow = Incremental(
        str(tmp_path / "checkpoint"), follow=True, every="200ms", on_rows=on_rows, is_stopped=stop.is_set
    )
    watchdog = threading.Timer(30, stop.set)
    watchdog.start()
    report = import_rows(spark, store, "t", SparkEndpoint("json", str(tmp_path / "in")), incremental=follow)
    watchdog.cancel()
    assert (report.rows, report.stopped) == (len(ROWS), True)
    assert values(store) == ROWS


def test_what_does_not_parse(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """A value that is not a JSON object is a row of nulls, or with strict the end of the job."""
    fill(store, ROWS[:3])
    with segmentlog.open(store, background=False) as opened, opened.producer() as producer:
        producer.send_many("t", [b"junk", b"\xff", b"[1]"])
    shape = RowShape(json_values=True, metadata=True, text=True)
    export_records(spark, store, "t", SparkEndpoint("json", str(tmp_path / "out")), shape)
    found = [json.loads(line) for file in (tmp_path / "out").glob("*.json") for line in file.open()]
    assert sorted(row["id"] for row in found if "id" in row) == [0, 1, 2]
    assert len(found) == 6
    assert all(row["_timestamp"].endswith("Z") for row in found)
    with pytest.raises(SparkFailed, match="Malformed records are detected"):
        export_records(
            spark, store, "t", SparkEndpoint("json", str(tmp_path / "no")), RowShape(json_values=True, strict=True)
        )


def expect_failures(cases: list[tuple[Callable[[], object], type[SegmentlogError], str]]) -> None:
    """Check that each call raises its error, in a sentence of one line."""
    for call, kind, part in cases:
        with pytest.raises(kind) as failure:
            call()
        assert part in str(failure.value)
        assert len(str(failure.value).splitlines()) == 1


def test_bad_input(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """The error is one sentence, without Java's stack; nothing is written."""
    write_rows(tmp_path / "in", "json", ROWS[:2])
    write_rows(tmp_path / "bad", "parquet", ROWS[:2])
    (tmp_path / "bad" / "rows.parquet").write_bytes(b"PAR1 no PAR1")
    good, went = SparkEndpoint("json", str(tmp_path / "in")), Incremental(str(tmp_path / "checkpoint"))
    one_file = SparkEndpoint("json", str(tmp_path / "in" / "rows.json"))
    out = SparkEndpoint("parquet", str(tmp_path / "out"))
    (tmp_path / "out").mkdir()

    def take(source: SparkEndpoint, *shape: object, topic: str = "t", **more: object) -> Callable[[], object]:
        return lambda: import_rows(spark, store, topic, source, RecordShape(*shape), **more)  # type: ignore[arg-type]

    def give(sink: SparkEndpoint, *shape: object, topic: str = "t", **more: object) -> Callable[[], object]:
        return lambda: export_records(spark, store, topic, sink, RowShape(*shape), **more)  # type: ignore[arg-type]

    expect_failures([
        (take(good, topic="nope"), UnknownTopic, "'nope'"),
        (take(good, ("nope",)), SparkFailed, "`nope` cannot be resolved"),
        (take(good, (), "name"), SparkFailed, "is null; expected a value"),
        (take(good, (), None, "name"), SparkFailed, "cannot be cast"),
        (take(good, schema="id int name"), SparkFailed, "Syntax error"),
        (take(SparkEndpoint("json", str(tmp_path / "nowhere"))), SparkFailed, "Path does not exist"),
        (take(SparkEndpoint("nosuch", "x")), SparkFailed, "nosuch"),
        (take(SparkEndpoint("parquet", str(tmp_path / "bad"))), SparkFailed, "rows.parquet"),
        (take(SparkEndpoint("jdbc"), incremental=went), SparkFailed, "does not support streamed reading"),
        (take(one_file, incremental=went), InvalidConfig, "a folder"),
        (give(out, topic="nope"), UnknownTopic, "'nope'"),
        (give(out), SparkFailed, "already exists"),
        (give(out, False, True), NotJson, "--schema"),
        (give(SparkEndpoint("nosuch", "x")), SparkFailed, "nosuch"),
        (give(out, mode="append", partition_by=("nope",)), SparkFailed, "`nope` not found"),
        (give(out, mode="append", start="yesterday"), SparkFailed, "startingOffsets = 'yesterday'"),
    ])  # fmt: skip
    assert records(store) == []


def test_command_line(spark: SparkSession, store: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command prints a summary on stderr and exits with the same statuses; the session stays open."""
    write_rows(tmp_path / "in", "csv", ROWS)

    def call(*args: str) -> tuple[int, str]:
        status = run(cli, ["--dir", store, "spark", *args])
        out, err = capfd.readouterr()
        assert out == ""
        return status, err.strip()

    status, summary = call("import", "csv", str(tmp_path / "in"), "new", "--key", "id", "--create", "3")
    assert status == 0
    assert summary.startswith("50 records imported in ")
    went = ["--checkpoint", str(tmp_path / "checkpoint")]
    status, summary = call("export", "new", "json", str(tmp_path / "out"), "--json-values", *went)
    assert (status, summary.endswith("micro-batches: 1)")) == (0, True)
    assert values(store, "new") == ROWS
    assert call("import", "csv", str(tmp_path / "nowhere"), "new")[0] == 1
    for args in (["--follow"], ["--mode", "overwrite", *went], ["--strict"], ["--option", "x"]):
        assert call("export", "new", "json", "x", *args)[0] == 2
    assert call("export", "nope", "json", "x") == (
        1, "error: topic 'nope': it does not exist; 'segmentlog topics' lists the topics"
    )  # fmt: skip
    assert spark.range(3).count() == 3


def test_timestamps_of_json(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """Times keep their microseconds in JSON, and are in UTC whatever the session's time zone."""
    at = datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
    write_rows(tmp_path / "in", "parquet", [{"id": 1, "at": at}])
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        import_rows(spark, store, "t", SparkEndpoint("parquet", str(tmp_path / "in")), RecordShape(timestamp="at"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    (record,) = records(store)
    assert json.loads(record.value or b"") == {"id": 1, "at": "2023-11-14T22:13:20.123456Z"}
    assert record.timestamp == NOON_MS + 123
