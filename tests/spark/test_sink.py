"""`df.write.format("segmentlog")`: rows become records where a producer would put them, all of them or none."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

import segmentlog
from segmentlog.format.file_names import STAGING_FOLDER
from segmentlog.records import Record
from segmentlog.spark import append_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HEADERS = "array<struct<key:string,value:binary>>"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store that the module's tests add topics to, each its own."""
    return str(tmp_path_factory.mktemp("sink") / "store")


@pytest.fixture
def store(path: str) -> Iterator[segmentlog.LogStore]:
    """Provide the store, open in this process while Spark's write to it."""
    with segmentlog.open(path, background=False) as opened:
        yield opened


@pytest.fixture
def save(path: str) -> Callable[..., None]:
    """Write a frame: `save(frame, topic="t")`."""

    def save(frame: DataFrame, mode: str = "append", **options: object) -> None:
        writer = frame.write.format("segmentlog").mode(mode).option("path", path)
        for name, value in options.items():
            writer = writer.option(name, str(value))
        writer.save()

    return save


Save = Callable[..., None]


def records_of(store: segmentlog.LogStore, *topics: str) -> list[Record]:
    """Return the committed records by partition and offset."""
    found = list(store.consumer(*topics, isolation="read_committed"))
    return sorted(found, key=lambda record: (record.topic, record.partition, record.offset))


def staged(path: str) -> list[str]:
    """Return the files and folders in the staging folder."""
    return sorted(str(one) for one in Path(path, STAGING_FOLDER).rglob("*"))


def test_keys_go_where_a_producer_sends_them(spark: SparkSession, store: segmentlog.LogStore, save: Save) -> None:
    """Every key's records are in the partition that `store.producer` would choose, in order of rows and tasks."""
    store.create_topic("keyed", partitions=5)
    store.create_topic("by-hand", partitions=5)
    frame = spark.range(0, 2000, 1, 3).selectExpr("concat('key ', id % 97) AS key", "cast(id AS string) AS value")
    save(frame, topic="keyed")
    with store.producer() as producer:
        keys = [f"key {n % 97}".encode() for n in range(2000)]
        producer.send_many("by-hand", [b"%d" % n for n in range(2000)], keys=keys)
    shape = [(one.partition, one.key, one.value) for one in records_of(store, "keyed")]
    assert shape == [(one.partition, one.key, one.value) for one in records_of(store, "by-hand")]
    assert {one[0] for one in shape} == set(range(5))
    assert staged(store.path) == []


def test_topics_by_column_and_option(spark: SparkSession, store: segmentlog.LogStore, save: Save) -> None:
    """A column names each row's topic; the option goes before it."""
    for name in ("col-a", "col-b", "opt"):
        store.create_topic(name)
    frame = spark.createDataFrame([("col-a", "1"), ("col-b", "2"), ("col-a", "3")], "topic string, value string")
    save(frame.coalesce(1))
    assert [one.value for one in records_of(store, "col-a")] == [b"1", b"3"]
    assert [one.value for one in records_of(store, "col-b")] == [b"2"]
    save(frame.coalesce(1), topic="opt")
    assert [one.value for one in records_of(store, "opt")] == [b"1", b"2", b"3"]
    assert len(records_of(store, "col-a")) == 2


def test_every_column(spark: SparkSession, store: segmentlog.LogStore, save: Save) -> None:
    """Keys, headers, partitions and timestamps; null keys, null timestamps (now), null partitions (by key)."""
    store.create_topic("columns", partitions=3)
    when = datetime.datetime(2024, 1, 2, 3, 4, 5, 678_000, tzinfo=datetime.UTC)
    rows = [
        (bytearray(b"k"), bytearray(b"1"), [("h", bytearray(b"x")), ("n", None)], 2, when),
        (None, bytearray(b""), None, 0, None),
        (bytearray(b"k"), bytearray(b"3"), [], None, when),
    ]
    schema = f"key binary, value binary, headers {HEADERS}, partition int, timestamp timestamp"
    before = time.time_ns() // 1_000_000
    save(spark.createDataFrame(rows, schema).coalesce(1), topic="columns")
    found = {one.value: one for one in records_of(store, "columns")}
    assert found[b"1"].partition == 2
    assert list(found[b"1"].headers) == [("h", b"x"), ("n", None)]
    assert found[b"1"].timestamp == found[b"3"].timestamp == int(when.timestamp() * 1000)
    assert (found[b""].key, found[b""].partition, list(found[b""].headers)) == (None, 0, [])
    assert before <= found[b""].timestamp <= time.time_ns() // 1_000_000
    with store.producer() as producer:
        assert found[b"3"].partition == producer.send("columns", b"4", key=b"k").result().partition


def test_what_was_read_can_be_written(spark: SparkSession, store: segmentlog.LogStore, save: Save, path: str) -> None:
    """A copy of a topic: the same keys, values, headers and timestamps, in the same partitions."""
    log = store.create_topic("origin", partitions=2)
    store.create_topic("copy", partitions=2)
    for partition in range(2):
        log.partition(partition).append([b"1", b"2"], keys=[b"k", None], headers=[[("h", b"1")], None],
                                        timestamps=[1000, 2000])  # fmt: skip
    frame = spark.read.format("segmentlog").load(path, subscribe="origin", includeHeaders="true")
    save(frame, topic="copy")

    def shape(topic: str) -> list[Any]:
        return [(r.partition, r.key, r.value, r.timestamp, list(r.headers)) for r in records_of(store, topic)]

    assert shape("copy") == shape("origin")


def test_tombstones(spark: SparkSession, store: segmentlog.LogStore, save: Save) -> None:
    """A null value deletes a key of a compacted topic; elsewhere only who says so may write one."""
    store.create_topic("table", cleanup_policy="compact")
    store.create_topic("plain")
    frame = spark.createDataFrame([("k", None)], "key string, value string")
    save(frame, topic="table")
    assert [(one.key, one.value) for one in records_of(store, "table")] == [(b"k", None)]
    with pytest.raises(PySparkException, match="topic 'plain' is not compacted, and a null would delete nothing"):
        save(frame, topic="plain")
    save(frame, topic="plain", allowNullValues="true")
    assert [one.value for one in records_of(store, "plain")] == [None]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("IF(id = 777, repeat(uuid(), 1000), 'x') AS value, 'good' AS topic", "over max.message.bytes = 20000"),
        ("'x' AS value, IF(id = 777, 9, 0) AS partition, 'good' AS topic", "'good': it has no partition 9, only 0"),
        ("IF(id = 777, null, 'x') AS value, 'good' AS topic", "is null; expected a value: topic 'good'"),
        ("'x' AS value, IF(id = 777, null, 'good') AS topic", "is null; expected a topic for each row"),
        ("IF(id = 777, raise_error('a row of the user''s'), 'x') AS value, 'good' AS topic", "a row of the user's"),
    ],
)  # fmt: skip
def test_all_or_nothing(
    spark: SparkSession, store: segmentlog.LogStore, save: Save, path: str, bad: str, told: str
) -> None:
    """With one bad row in one of several tasks, no topic gets a record, and all staged files are deleted."""
    if "good" not in store.topics():
        store.create_topic("good", partitions=2, max_message_bytes=20_000)
    ends = [log.log_end_offset for log in store.topic("good").partitions()]
    frame = spark.sql(f"SELECT {bad} FROM range(0, 1000, 1, 4)")
    with pytest.raises(PySparkException) as error:
        save(frame)
    assert told in str(error.value)
    assert [log.log_end_offset for log in store.topic("good").partitions()] == ends
    assert staged(path) == []


def test_an_empty_frame(spark: SparkSession, store: segmentlog.LogStore, save: Save, path: str) -> None:
    """The write succeeds, and appends nothing."""
    store.create_topic("nothing")
    save(spark.range(0).selectExpr("cast(id AS string) AS value"), topic="nothing")
    assert store.topic("nothing").partition(0).log_end_offset == 0
    assert staged(path) == []


def test_idempotent_batches(spark: SparkSession, store: segmentlog.LogStore, save: Save, path: str) -> None:
    """With txnAppId and txnVersion, a repeated or older write changes nothing: as in foreachBatch."""
    store.create_topic("once")

    def batch(text: str, version: int) -> None:
        frame = spark.createDataFrame([(text,)], "value string")
        save(frame, topic="once", txnAppId="app", txnVersion=version)

    batch("zero", 0)
    batch("zero again", 0)
    batch("seven", 7)
    batch("three", 3)
    batch("eight", 8)
    assert [one.value for one in records_of(store, "once")] == [b"zero", b"seven", b"eight"]
    frame = spark.createDataFrame([("other",)], "value string")
    save(frame, topic="once", txnAppId="other", txnVersion=0)
    assert len(records_of(store, "once")) == 4
    assert staged(path) == []


def test_overwrite_is_refused(spark: SparkSession, store: segmentlog.LogStore, save: Save) -> None:
    """A log is appended to; the error says which mode does that."""
    store.create_topic("kept").partition(0).append([b"x"])
    frame = spark.createDataFrame([("y",)], "value string")
    with pytest.raises(PySparkException, match=r"mode = 'overwrite' is not valid: append \(.mode\('append'\)"):
        save(frame, mode="overwrite", topic="kept")
    assert [one.value for one in records_of(store, "kept")] == [b"x"]


def test_insert_into_a_view(spark: SparkSession, store: segmentlog.LogStore, path: str) -> None:
    """A view of the source takes INSERT: rows are appended to the topic that it shows; overwriting is refused."""
    store.create_topic("viewed", partitions=2)
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW viewed (key string, value string, `partition` int, timestamp timestamp)"
        f" USING segmentlog OPTIONS (path '{path}', subscribe 'viewed')"
    )
    try:
        spark.sql("INSERT INTO viewed (key, value) VALUES ('k', 'v'), (null, 'w')")
        spark.sql("INSERT INTO viewed SELECT 'c', value, 1, timestamp FROM viewed")
        spark.read.format("segmentlog").options(path=path, subscribe="viewed").load().createOrReplaceTempView("all")
        spark.sql("INSERT INTO all SELECT * FROM all WHERE key = 'k'")
        with pytest.raises(PySparkException, match="a log is only ever appended to"):
            spark.sql("INSERT OVERWRITE viewed SELECT * FROM viewed")
    finally:
        for name in ("viewed", "all"):
            spark.catalog.dropTempView(name)
    found = sorted((one.key or b"", one.value) for one in records_of(store, "viewed"))
    assert found == [(b"", b"w"), (b"c", b"v"), (b"c", b"w"), (b"k", b"v"), (b"k", b"v")]


@pytest.mark.parametrize("mode", ["complete", "update"])
def test_other_output_modes(
    spark: SparkSession, store: segmentlog.LogStore, path: str, tmp_path: Path, mode: str
) -> None:
    """The rows of each micro-batch are appended; those of one that Spark runs again after a crash are not again."""
    source = store.create_topic(f"words-{mode}").partition(0)
    store.create_topic(f"counts-{mode}")
    checkpoint = tmp_path / "checkpoint"

    def run() -> list[tuple[bytes | None, bytes | None]]:
        read = spark.readStream.format("segmentlog").schema("value string").option("startingOffsets", "earliest")
        words = read.option("subscribe", f"words-{mode}").load(path)
        counts = words.groupBy("value").count().selectExpr("value AS key", "string(count) AS value")
        writer = counts.writeStream.outputMode(mode).option("checkpointLocation", str(checkpoint))
        if mode == "complete":
            writer = writer.format("segmentlog").option("path", path).option("topic", f"counts-{mode}")
        else:
            writer = writer.foreachBatch(append_batches(path, f"counts-{mode}"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return sorted((one.key, one.value) for one in records_of(store, f"counts-{mode}"))

    source.append([b"a", b"a", b"b"])
    first = [(b"a", b"2"), (b"b", b"1")]
    assert run() == first
    source.append([b"a"])
    second = sorted([*first, (b"a", b"3"), *([(b"b", b"1")] if mode == "complete" else [])])
    assert run() == second
    (checkpoint / "commits" / "1").unlink()  # as it is after a crash between the sink's commit and Spark's
    (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    assert run() == second


def test_old_orphans_are_swept(spark: SparkSession, store: segmentlog.LogStore, save: Save, path: str) -> None:
    """The next write deletes files of jobs that died long ago."""
    store.create_topic("sweep")
    old = Path(path, STAGING_FOLDER, "spark-job-old")
    fresh = Path(path, STAGING_FOLDER, "spark-job-fresh")
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "0-0-x.batches").write_bytes(b"x")
    then = time.time() - 8 * 86_400
    for one in (old / "0-0-x.batches", old):
        os.utime(one, (then, then))
    save(spark.createDataFrame([("y",)], "value string"), topic="sweep")
    assert not old.exists()
    assert fresh.exists()
    (fresh / "0-0-x.batches").unlink()
    fresh.rmdir()


def test_while_others_write(spark: SparkSession, store: segmentlog.LogStore, save: Save) -> None:
    """A producer of another process appends meanwhile, and both get all their records."""
    store.create_topic("shared")
    with store.producer() as producer:
        producer.send("shared", b"before").result()
        save(spark.range(500).selectExpr("cast(id AS string) AS value"), topic="shared")
        producer.send("shared", b"after").result()
    values = [one.value for one in records_of(store, "shared")]
    assert (values[0], values[-1], len(values)) == (b"before", b"after", 502)
