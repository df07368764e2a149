"""Errors are one sentence, through all of Spark's layers: what failed, where, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import segmentlog
from segmentlog.spark.spark_errors import SparkFailed, explain_spark_errors, reason_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store with topic "t", of two partitions, and some records; tests must not change it."""
    path = str(tmp_path_factory.mktemp("bad") / "store")
    with segmentlog.open(path, background=False) as store:
        topic = store.create_topic("t", partitions=2, max_message_bytes=1000)
        topic.partition(0).append([b"fine", b"\xff\xfe"])
        topic.partition(1).append([b"fine"])
        topic.partition(1).append([b"fine"] * 5)
        topic.partition(1).trim(3)
    return path


def check_told(error: BaseException, sentence: str) -> None:
    """Check that Spark's error contains the sentence, and that `reason_of` returns one line without other text."""
    assert sentence in str(error), str(error)
    reason = reason_of(error)
    assert sentence in reason, reason
    assert reason == reason.strip()
    assert "\n" not in reason
    for noise in ("Traceback", "at org.", "SQLSTATE", "PYTHON_DATA_SOURCE", 'File "', "pyspark", "segmentlog.errors"):
        assert noise not in reason, reason


READS: list[tuple[dict[str, Any], str]] = [
    ({"path": None}, "path = None is not valid: the folder of the store"),
    ({"path": "/nowhere/at/all"}, "/nowhere/at/all: there is no such folder on host"),
    ({"path": "/tmp"}, "/tmp: "),
    ({"subscribe": None}, "set exactly one of subscribe, subscribePattern and assign"),
    ({"subscribe": "nosuch"}, "topic 'nosuch': it does not exist in "),
    ({"startingOffset": "earliest"}, "there is no such option; did you mean startingOffsets?"),
    ({"startingOffsets": "{"}, "JSON that gives offsets"),
    ({"startingOffsets": '{"t": {"0": 0}}'}, "an entry for each partition that is read; t/1 is missing"),
    ({"startingOffsets": '{"t": {"0": 0, "1": 99}}'}, "t/1: offset 99 is outside the log"),
    ({"startingOffsets": '{"t": {"0": 0, "1": 1}}'}, "t/1: offset 1 is outside the log, which holds offsets [3, 6)"),
    ({"startingTimestamp": "99999999999999"}, "t/0 has no record at or after that time"),
    ({"subscribe": None, "assign": '{"t": [7]}'}, "topic 't': it has no partition 7, only 0 to 1"),
    ({"maxOffsetsPerTrigger": "5"}, "an option of spark.readStream; leave it out of a batch read"),
    ({"schema": "value int"}, "column 'value' of the schema has type int; it must be binary or string"),
    ({"schema": "value string"}, "the value at t/0 offset 1 is not UTF-8 text; read it as binary"),
    ({"schema": "value binary, value binary"}, "the schema has column 'value' 2 times"),
    ({"kafka.bootstrap.servers": "b:9092"}, "segmentlog has no broker; set the option compatible = true"),
    ({"invalidText": "drop"}, "one of error, null, replace"),
    (
        {"startingOffsets": '{"t": {"0": 2, "1": 3}}', "endingOffsets": '{"t": {"0": 1, "1": 3}}'},
        "at or before endingOffsets: t/0 would be read from 2 to 1",
    ),
    (
        {"startingOffsets": '{"t": {"0": -1, "1": -1}}', "endingOffsets": '{"t": {"0": 1, "1": 3}}'},
        "at or before endingOffsets: t/0 would be read from 2 to 1",
    ),
    (
        {"startingTimestamp": "2000", "endingOffsetsByTimestamp": '{"t": {"0": 2000, "1": 1000}}'},
        "at or before endingOffsetsByTimestamp: t/1 would be read from 2000 to 1000",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), READS, ids=[sentence[:40] for _, sentence in READS])
def test_reading(spark: SparkSession, path: str, options: dict[str, Any], sentence: str) -> None:
    """Each mistake has its sentence."""
    given = {"path": path, "subscribe": "t", **options}
    schema = given.pop("schema", None)
    reader = spark.read.format("segmentlog").options(**{k: v for k, v in given.items() if v is not None})
    with pytest.raises(Exception) as told:  # noqa: PT011
        (reader.schema(schema) if schema else reader).load().collect()
    check_told(told.value, sentence)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"endingOffsets": "latest"}, "an option of spark.read; leave it out of a streaming read"),
        ({"subscribe": "nosuch"}, "topic 'nosuch': it does not exist in "),
        ({"startingOffsets": '{"t": {"0": 0, "1": 1}}'}, "t/1: offset 1 is outside the log"),
        ({"schema": "value string"}, "the value at t/0 offset 1 is not UTF-8 text; read it as binary"),
    ],
)
def test_streaming(spark: SparkSession, path: str, tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    """A query fails with the same sentences."""
    given = {"path": path, "subscribe": "t", "startingOffsets": "earliest", **options}
    schema = given.pop("schema", "value binary")
    with pytest.raises(Exception) as told:  # noqa: PT011, PT012
        frame = spark.readStream.format("segmentlog").options(**given).schema(schema).load()
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()
    check_told(told.value, sentence)


ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("'x' AS value", {"topic": None}, "the write names no topic: set .option('topic', ...), or add a column 'topic'"),
    ("'x' AS value", {"topic": "nosuch"}, "topic 'nosuch': it does not exist"),
    ("'x' AS value", {"path": "/nowhere/at/all"}, "/nowhere/at/all: there is no such folder on host"),
    ("'x' AS value", {"mode": "overwrite"}, "mode = 'overwrite' is not valid: append"),
    ("'x' AS value", {"topics": "t"}, "there is no such option; did you mean topic?"),
    ("1 AS value", {}, "column 'value' of the data has type int; it must be binary or string"),
    ("'x' AS value, 1 AS id", {}, "a record cannot hold the column 'id'"),
    ("'x' AS value, map('a', 'b') AS headers", {}, "column 'headers' of the data has type map<string,string>"),
    ("cast(null AS string) AS value", {}, "value[0] is null; expected a value: topic 't' is not compacted"),
    ("concat(uuid(), repeat('x', 2000)) AS value", {}, "over max.message.bytes = 1000"),
    ("'x' AS value, 9 AS partition", {}, "topic 't': it has no partition 9, only 0 to 1"),
    ("'x' AS value, array(named_struct('key', string(null), 'value', binary('x'))) AS headers", {}, "headers[0]"),
    (
        "'x' AS value, array(null, named_struct('key', 'k', 'value', binary('x'))) AS headers", {},
        "headers[0] is null at position 0; expected headers that each have a key and a value",
    ),
    ("'x' AS value, 'y' AS value", {}, "the data has column 'value' 2 times; name it once"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "options", "sentence"), ROWS, ids=[sentence[:40] for _, _, sentence in ROWS])
def test_writing(spark: SparkSession, path: str, row: str, options: dict[str, Any], sentence: str) -> None:
    """Each mistake has its sentence, and appends nothing."""
    given = {"path": path, "topic": "t", **options}
    mode = given.pop("mode", "append")
    writer = spark.sql(f"SELECT {row}").write.format("segmentlog").mode(mode)
    with pytest.raises(Exception) as told:  # noqa: PT011
        writer.options(**{k: v for k, v in given.items() if v is not None}).save()
    check_told(told.value, sentence)
    with segmentlog.open(path, read_only=True, background=False) as store:
        assert [log.log_end_offset for log in store.topic("t").partitions()] == [2, 6]


def test_tables_of_the_catalog(spark: SparkSession, path: str) -> None:
    """Spark hands a table's options to no Python source: the table is refused, or its first use, with what does it."""
    options = f"OPTIONS (path '{path}', subscribe 't')"
    instead = "CREATE TEMPORARY VIEW name USING segmentlog OPTIONS"
    for text in (
        f"CREATE TABLE made USING segmentlog {options}",
        f"CREATE TABLE made USING segmentlog {options} AS SELECT 'v' AS value",
    ):
        with pytest.raises(Exception) as told:  # noqa: PT011
            spark.sql(text)
        check_told(told.value, instead)
    assert not spark.catalog.tableExists("made")
    spark.sql(f"CREATE TABLE made (value binary) USING segmentlog {options}")  # Spark does not call the source for this
    try:
        for text in ("SELECT * FROM made", "INSERT INTO made VALUES (binary('v'))"):
            with pytest.raises(Exception) as told:  # noqa: PT011
                spark.sql(text).collect()
            check_told(told.value, instead)
        assert spark.read.options(path=path, subscribe="t").table("made").count() == 5
    finally:
        spark.sql("DROP TABLE made")


def test_writing_a_stream(spark: SparkSession, path: str, tmp_path: Path) -> None:
    """A sink's sentences arrive there, too."""
    frame = spark.readStream.format("segmentlog").options(subscribe="t", startingOffsets="earliest").load(path)

    def run(frame: Any, **options: str) -> BaseException:
        with pytest.raises(Exception) as told:  # noqa: PT011, PT012
            writer = frame.writeStream.format("segmentlog").option("path", path).options(**options)
            writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
            query = writer.trigger(availableNow=True).start()
            try:
                query.awaitTermination()
            finally:
                query.stop()
        return told.value

    check_told(
        run(frame.selectExpr("value", "9 AS partition"), topic="t"), "topic 't': it has no partition 9, only 0 to 1"
    )


def failing(what: Callable[[], object]) -> BaseException:
    """Return the error that the call raises."""
    with pytest.raises(Exception) as told:  # noqa: PT011
        what()
    return told.value


def test_sparks_own_sentences(spark: SparkSession, path: str) -> None:
    """An error of Spark has Spark's own sentence, without the rest."""
    frame = spark.read.format("segmentlog").load(path, subscribe="t")
    for error in (
        failing(lambda: frame.select("nosuch")),
        failing(lambda: spark.sql("SELEC 1")),
        failing(lambda: spark.sql("SELECT raise_error('by hand')").collect()),
        failing(lambda: spark.read.format("nosuch").load()),
    ):
        reason = reason_of(error)
        assert reason
        assert "\n" not in reason
        assert not re.search(r"SQLSTATE|Traceback|at org\.|^\[", reason), reason


def test_explained(spark: SparkSession, path: str) -> None:
    """Spark's exceptions become a `SparkFailed` of one sentence; others go through."""
    with pytest.raises(SparkFailed, match=r"^topic 'nosuch': it does not exist in .*$") as told, explain_spark_errors():
        spark.read.format("segmentlog").load(path, subscribe="nosuch").collect()
    assert "\n" not in str(told.value)
    with pytest.raises(ZeroDivisionError), explain_spark_errors():
        raise ZeroDivisionError
