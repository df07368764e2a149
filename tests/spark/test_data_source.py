"""`spark.read.format("segmentlog")`: the rows are exactly the records that a consumer reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.functions import spark_partition_id
from pyspark.sql.types import StructType

import segmentlog
from segmentlog.records import Record
from segmentlog.spark.batch_reader import BatchReader
from segmentlog.spark.schema import source_schema
from segmentlog.spark.source_options import parse_read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Row = tuple[Any, ...]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store that the module's tests add topics to, each its own."""
    return str(tmp_path_factory.mktemp("source") / "store")


@pytest.fixture
def store(path: str) -> Iterator[segmentlog.LogStore]:
    """Provide the store, open in this process while Spark's read it."""
    with segmentlog.open(path, background=False) as opened:
        yield opened


@pytest.fixture
def load(spark: SparkSession, path: str) -> Callable[..., DataFrame]:
    """Read topics: `load(subscribe="t", minPartitions=3)`."""

    def load(*, schema: str | None = None, **options: object) -> DataFrame:
        reader = spark.read.format("segmentlog").option("path", path)
        for name, value in options.items():
            reader = reader.option(name, str(value))
        return (reader if schema is None else reader.schema(schema)).load()

    return load


Load = Callable[..., "DataFrame"]


def as_row(record: Record) -> Row:
    """Return the record as Spark shows it."""
    headers = [(name, value) for name, value in record.headers] or None
    return record.key, record.value, record.topic, record.partition, record.offset, record.timestamp, 0, headers


def rows_of(frame: DataFrame) -> list[Row]:
    """Return all rows, sorted by partition and offset, with timestamps in milliseconds."""
    found = frame.selectExpr("*", "unix_millis(timestamp) AS ms").drop("timestamp").collect()
    rows = []
    for row in found:
        headers = row.headers if "headers" in row else None
        rows.append(
            (
                None if row.key is None else bytes(row.key),
                None if row.value is None else bytes(row.value),
                row.topic, row.partition, row.offset, row.ms, row.timestampType,
                None if headers is None else [(h.key, None if h.value is None else bytes(h.value)) for h in headers],
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: row[2:5])


def values_of(frame: DataFrame) -> list[bytes]:
    """Return the values, sorted."""
    return sorted(bytes(row.value) for row in frame.select("value").collect())


def test_rows_are_what_a_consumer_reads(store: segmentlog.LogStore, load: Load) -> None:
    """The rows have all columns of all records: null keys, empty and null values, headers, timestamps."""
    store.create_topic("all", partitions=3)
    for partition in range(3):
        log = store.topic("all").partition(partition)
        for batch in range(4):
            log.append(
                [b"%d" % n if n % 5 else b"" for n in range(50)],
                keys=[b"k%d" % n if n % 3 else None for n in range(50)],
                timestamps=[1_700_000_000_000 + 1000 * batch + n for n in range(50)],
                headers=[[("h", b"%d" % n), ("null", None)] if n % 2 else None for n in range(50)]
                if batch % 2
                else None,
            )
        log.append([None], keys=[b"gone"])
    frame = load(subscribe="all", includeHeaders="true")
    text = "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int"
    assert frame.schema == StructType.fromDDL(f"{text}, headers array<struct<key:string,value:binary>>")
    records = sorted(map(as_row, store.consumer("all")), key=lambda row: row[2:5])
    assert len(records) == 3 * 201
    assert rows_of(frame) == records
    plain = load(subscribe="all")
    assert plain.schema == StructType.fromDDL(text)
    assert rows_of(plain) == [(*row[:7], None) for row in records]


def test_which_topics(store: segmentlog.LogStore, load: Load) -> None:
    """Topics are chosen by a list, a pattern, or single partitions."""
    for name in ("many-a", "many-b", "many-c"):
        for log in store.create_topic(name, partitions=2).partitions():
            log.append([f"{name}/{log.number}".encode()])

    assert values_of(load(subscribe="many-a, many-c")) == [b"many-a/0", b"many-a/1", b"many-c/0", b"many-c/1"]
    assert len(values_of(load(subscribePattern="many-[ab]"))) == 4
    assert values_of(load(assign='{"many-b": [1], "many-c": [0]}')) == [b"many-b/1", b"many-c/0"]
    assert values_of(load(subscribePattern="nothing-.*")) == []


def test_where_reading_begins_and_ends(store: segmentlog.LogStore, load: Load) -> None:
    """Reading begins and ends at offsets or timestamps, for all partitions or each."""
    log = store.create_topic("range").partition(0)
    for n in range(10):
        log.append([b"%d" % n], timestamps=[1000 * n])

    def numbers(**options: str) -> list[int]:
        return [int(value) for value in values_of(load(subscribe="range", **options))]

    assert numbers(startingOffsets='{"range": {"0": 3}}', endingOffsets='{"range": {"0": 6}}') == [3, 4, 5]
    assert numbers(startingOffsets='{"range": {"0": -2}}', endingOffsets='{"range": {"0": -1}}') == list(range(10))
    assert numbers(startingOffsets="latest") == []
    assert numbers(startingTimestamp="2500", endingTimestamp="4000") == [3]
    assert numbers(startingOffsetsByTimestamp='{"range": {"0": 8000}}') == [8, 9]
    assert numbers(startingTimestamp="99999", startingOffsetsByTimestampStrategy="latest") == []


def test_projection(store: segmentlog.LogStore, load: Load) -> None:
    """An explicit schema chooses columns, in its order, and text instead of bytes."""
    store.create_topic("narrow").partition(0).append(["grün".encode()] * 3, keys=[b"k", None, b"l"])
    assert load(subscribe="narrow", schema="offset bigint").count() == 3
    frame = load(subscribe="narrow", schema="value string, offset bigint, key string")
    assert [tuple(row) for row in frame.orderBy("offset").collect()] == [
        ("grün", 0, "k"), ("grün", 1, None), ("grün", 2, "l"),
    ]  # fmt: skip
    headers = load(subscribe="narrow", schema="headers array<struct<key:string,value:binary>>, topic string")
    assert [tuple(row) for row in headers.distinct().collect()] == [(None, "narrow")]


def test_isolation(store: segmentlog.LogStore, load: Load) -> None:
    """By default, rows are committed; uncommitted has all records, and durableOnly those that survive a power cut."""
    log = store.create_topic("isolated", fsync="never").partition(0)
    log.append([b"before"], ack="durable")
    producer = store.producer(name="isolated")
    for value, commits in ((b"committed", True), (b"aborted", False)):
        producer.begin_transaction()
        producer.send("isolated", value)
        producer.commit_transaction() if commits else producer.abort_transaction()
    log.append([b"after"])
    producer.begin_transaction()
    producer.send("isolated", b"open")
    producer.flush()
    log.append([b"behind"])
    everything = [b"aborted", b"after", b"before", b"behind", b"committed", b"open"]
    assert values_of(load(subscribe="isolated")) == [b"after", b"before", b"committed"]
    assert values_of(load(subscribe="isolated", isolation="read_uncommitted")) == everything
    durable = values_of(load(subscribe="isolated", isolation="read_uncommitted", durableOnly="true"))
    reader = store.consumer("isolated", durable_only=True)
    assert durable == sorted(record.value for record in reader)
    assert b"behind" not in durable
    producer.commit_transaction()
    assert values_of(load(subscribe="isolated")) == [one for one in everything if one != b"aborted"]
    producer.close()


def test_data_that_is_gone_before_it_is_planned(store: segmentlog.LogStore, load: Load) -> None:
    """An offset below the log's start is an error; with failOnDataLoss = false reading begins at what is there."""
    log = store.create_topic("trimmed").partition(0)
    for n in range(10):
        log.append([b"%d" % n])
    log.trim(4)
    offsets = {"startingOffsets": '{"trimmed": {"0": 1}}'}
    with pytest.raises(PySparkException, match="trimmed/0: offset 1 is outside the log"):
        load(subscribe="trimmed", **offsets).count()
    found = values_of(load(subscribe="trimmed", **offsets, failOnDataLoss="false"))
    assert found == [b"%d" % n for n in range(4, 10)]


@pytest.mark.parametrize("what", ["trim", "truncate", "delete"])
def test_data_that_goes_after_it_was_planned(store: segmentlog.LogStore, load: Load, what: str) -> None:
    """Records deleted after the planning are an error, or with failOnDataLoss = false a warning with the rest."""
    name = f"going-{what}"
    log = store.create_topic(name).partition(0)
    for n in range(10):
        log.append([b"%d" % n])
    strict = load(subscribe=name)
    lenient = load(subscribe=name, failOnDataLoss="false")
    for frame in (strict, lenient):
        assert frame.rdd.getNumPartitions() == 1  # plans it
    if what == "trim":
        log.trim(4)
    elif what == "truncate":
        log.truncate(6)
    else:
        store.delete_topic(name)
    left = {"trim": range(4, 10), "truncate": range(6), "delete": ()}[what]
    with pytest.raises(PySparkException, match=rf"{name}.*failOnDataLoss"):
        strict.count()
    assert values_of(lenient) == [b"%d" % n for n in left]


def test_a_range_that_was_truncated(store: segmentlog.LogStore, load: Load) -> None:
    """A position inside of what was cut off is an error that names the range; reading across it is none."""
    log = store.create_topic("cut").partition(0)
    for n in range(10):
        log.append([b"%d" % n])
    log.truncate(6)
    log.append([b"new"])
    assert len(values_of(load(subscribe="cut", minPartitions=4))) == 7
    offsets = {"startingOffsets": '{"cut": {"0": 8}}'}
    with pytest.raises(PySparkException, match=r"cut/0: offset 8 is inside the lost range \[6, 11\)"):
        load(subscribe="cut", **offsets).count()
    assert values_of(load(subscribe="cut", **offsets, failOnDataLoss="false")) == [b"new"]


def test_the_number_of_tasks(store: segmentlog.LogStore, load: Load) -> None:
    """minPartitions and maxRecordsPerPartition are honoured, and change no row."""
    topic = store.create_topic("tasks", partitions=3)
    for log in topic.partitions():
        for _ in range(20):
            log.append([b"x"] * 10)
    plain = load(subscribe="tasks")
    assert plain.rdd.getNumPartitions() == 1
    split = load(subscribe="tasks", minPartitions=7)
    assert 7 <= split.rdd.getNumPartitions() <= 12
    assert rows_of(split) == rows_of(plain)
    small = load(subscribe="tasks", maxRecordsPerPartition=100)
    assert small.rdd.getNumPartitions() >= 6
    counts = small.groupBy(spark_partition_id()).count().collect()
    assert max(row["count"] for row in counts) <= 100
    assert sum(row["count"] for row in counts) == 600


def test_many_partitions_are_few_tasks(store: segmentlog.LogStore, load: Load) -> None:
    """Two hundred partitions of a record or none: one task reads them all."""
    topic = store.create_topic("wide", partitions=200, fsync="never")
    for number in range(0, 200, 2):
        topic.partition(number).append([b"%d" % number])
    frame = load(subscribe="wide")
    assert frame.rdd.getNumPartitions() == 1
    assert values_of(frame) == sorted(b"%d" % number for number in range(0, 200, 2))


def test_a_compacted_topic(store: segmentlog.LogStore, load: Load) -> None:
    """The remaining records keep their offsets, also if a task begins or ends in a hole."""
    log = store.create_topic("compacted", cleanup_policy="compact").partition(0)
    for n in range(200):
        log.append([b"%d" % n], keys=[b"k%d" % (n % 7) if n % 50 else b"once %d" % n])
    log.roll()
    log.append([b"last"], keys=[b"last"])
    report = log.compact()
    assert report.records_after < report.records_before
    records = [as_row(record) for record in store.consumer("compacted")]
    assert rows_of(load(subscribe="compacted")) == records
    assert rows_of(load(subscribe="compacted", minPartitions=9)) == records
    ends = {"startingOffsets": '{"compacted": {"0": 20}}', "endingOffsets": '{"compacted": {"0": 120}}'}
    found = rows_of(load(subscribe="compacted", minPartitions=3, **ends))
    assert found == [row for row in records if 20 <= row[4] < 120]


def test_an_empty_topic(store: segmentlog.LogStore, load: Load) -> None:
    """An empty topic gives no rows."""
    store.create_topic("empty", partitions=2)
    assert load(subscribe="empty").count() == 0
    assert load(subscribe="empty").schema.names[0] == "key"


def test_damage_is_told(store: segmentlog.LogStore, load: Load, path: str) -> None:
    """A bad byte in a batch is an error with file and position, never rows that are wrong or missing."""
    log = store.create_topic("harmed", compression_type="none").partition(0)
    log.append([b"a" * 100])
    log.append([b"b" * 100])
    log.flush()
    (file,) = Path(path, "harmed", "0").glob("*.log")
    position = file.read_bytes().index(b"b" * 50)
    with file.open("r+b") as opened:
        opened.seek(position)
        opened.write(b"x")
    with pytest.raises(PySparkException, match=r"damaged at byte \d+ \(offset 1\)"):
        load(subscribe="harmed").count()


def test_damage_is_stepped_over(
    store: segmentlog.LogStore, load: Load, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With skipDamaged, all records of other batches are returned for any split, and the skipped range is logged."""
    log = store.create_topic("holes", compression_type="none").partition(0)
    for start in range(0, 500, 50):
        log.append([b"%04d " % (start + n) * 40 for n in range(50)])
    log.flush()
    data = next(Path(path, "holes", "0").glob("*.log"))
    content = bytearray(data.read_bytes())
    for damaged in (b"0120 ", b"0475 "):
        content[content.index(damaged * 40) + 100] ^= 1
    data.write_bytes(bytes(content))
    kept = [b"%04d " % n * 40 for n in range(500) if not 100 <= n < 150 and not 450 <= n < 500]
    for options in ({}, {"minPartitions": 7}, {"maxRecordsPerPartition": 30}):
        assert values_of(load(subscribe="holes", skipDamaged="true", **options)) == kept
    options = {"path": path, "subscribe": "holes", "skipDamaged": "true"}
    reader = BatchReader(parse_read_options(options, streaming=False), source_schema(include_headers=False))
    assert sum(batch.num_rows for task in reader.partitions() for batch in reader.read(task)) == 400
    assert "holes/0: skipped offsets 100 to 149" in caplog.text


def test_text_that_is_none(store: segmentlog.LogStore, load: Load) -> None:
    """With invalidText, an invalid byte is null or U+FFFD; everything else is unchanged."""
    log = store.create_topic("text").partition(0)
    log.append([b"fine", b"\xffab", None, b""], keys=[b"\xc3", b"\xc3\xa4", None, b"k"])
    expected = {
        "null": [(None, "fine"), ("ä", None), (None, None), ("k", "")],
        "replace": [("\ufffd", "fine"), ("ä", "\ufffdab"), (None, None), ("k", "")],
    }
    for invalid_text, rows in expected.items():
        found = load(subscribe="text", invalidText=invalid_text, schema="key string, value string").collect()
        assert [tuple(row) for row in found] == rows
    assert load(subscribe="text", invalidText="null").first().value == b"fine"


def test_options_of_kafka(store: segmentlog.LogStore, load: Load) -> None:
    """With compatible = true, options that only Kafka's source has are ignored."""
    store.create_topic("moved").partition(0).append([b"1"])
    kafkas = {"kafka.bootstrap.servers": "broker:9092", "fetchOffset.numRetries": 3, "maxOffsetsPerTrigger": 5}
    assert load(subscribe="moved", compatible="true", **kafkas).count() == 1


def test_bounds_that_only_seem_to_contradict(store: segmentlog.LogStore, load: Load) -> None:
    """A start above the end is fine where an open transaction or retention is the reason: there is nothing to read."""
    log = store.create_topic("bounds").partition(0)
    log.append([b"0"], timestamps=[1000])
    with store.producer(name="bounds") as producer:
        producer.begin_transaction()
        producer.send("bounds", b"1", timestamp=2000)
        producer.flush()
        assert values_of(load(subscribe="bounds", startingOffsets='{"bounds": {"0": 2}}')) == []
        assert values_of(load(subscribe="bounds", startingTimestamp=1500, endingTimestamp=2500)) == []
        assert values_of(load(subscribe="bounds", endingTimestamp=1500)) == [b"0"]
        producer.commit_transaction()
    log.trim(2)
    ending = '{"bounds": {"0": 1}}'
    assert values_of(load(subscribe="bounds", endingOffsets=ending, failOnDataLoss="false")) == []


def test_the_store_is_only_read(store: segmentlog.LogStore, load: Load, path: str) -> None:
    """Reading changes nothing in the store's folder."""
    store.create_topic("untouched").partition(0).append([b"x"])
    store.topic("untouched").partition(0).flush()

    def look() -> dict[str, tuple[int, int]]:
        stats = {str(file): os.stat(file) for file in Path(path, "untouched").rglob("*")}
        return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in stats.items()}

    before = look()
    assert load(subscribe="untouched").count() == 1
    assert look() == before
