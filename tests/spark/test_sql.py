"""Queries over topics: JSON values are columns, and what is wrong is a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.errors import InvalidConfig, SegmentlogError, StoreVersionError, UnknownTopic
from segmentlog.spark.pipelines.json_columns import _sample_values, resolve_schema
from segmentlog.spark.pipelines.topic_views import query, save
from segmentlog.spark.spark_errors import SparkFailed

FLIGHTS = [
    {"id": at, "carrier": "UA" if at % 3 else "AA", "delay": at / 2, "deep": {"leg": at % 2}} for at in range(30)
]
NAMES = {"UA": "United", "AA": "American"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store with two topics of JSON, one of bytes, and an empty one."""
    path = tmp_path_factory.mktemp("sql") / "store"
    with segmentlog.open(path, background=False) as opened, opened.producer() as producer:
        for topic in ("flights", "carrier-names.v1", "bytes", "empty"):
            opened.create_topic(topic, partitions=2)
        producer.send_many(
            "flights", [json.dumps(row).encode() for row in FLIGHTS], [b"k%d" % row["id"] for row in FLIGHTS]
        )
        producer.send_many(
            "carrier-names.v1", [json.dumps({"code": code, "name": name}).encode() for code, name in NAMES.items()]
        )
        producer.send_many("bytes", [b"\xff\x00", b"text"], headers=[[("h", b"1")], []])
    return str(path)


def rows(spark: SparkSession, store: str, text: str, **more: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a query."""
    return [tuple(row) for row in query(spark, store, text, **more).collect()]


def test_a_join_of_two_topics(spark: SparkSession, store: str) -> None:
    """Topics are tables, and the fields of their values are columns. Names that are not one word need backticks."""
    found = rows(
        spark,
        store,
        "with late as (select * from Flights where delay > 2) select name, count(*), max(late.deep.leg) from late"
        " join `carrier-names.v1` n on n.code = late.carrier group by name order by name",
    )
    late = [row for row in FLIGHTS if row["delay"] > 2]
    assert found == [(name, sum(NAMES[row["carrier"]] == name for row in late), 1) for name in ("American", "United")]


def test_the_records_own_columns(spark: SparkSession, store: str) -> None:
    """They come after the columns of the value, and are read only if the query names them."""
    assert rows(spark, store, "select count(*) from flights") == [(30,)]
    assert rows(spark, store, "select cast(_key as string), _offset >= 0 from flights where id = 7") == [("k7", True)]
    everything = query(spark, store, "select * from flights")
    own = ["_key", "_value", "_partition", "_offset", "_timestamp", "_headers"]
    assert everything.columns == ["carrier", "deep", "delay", "id", *own]
    assert {json.loads(row["_value"])["id"]: row["id"] for row in everything.collect()} == {at: at for at in range(30)}
    plan = query(spark, store, "select sum(id) from flights")._jdf.queryExecution().analyzed().toString()
    assert "RelationV2[value" in plan
    assert "timestamp" not in plan


def test_values_that_are_no_json(spark: SparkSession, store: str) -> None:
    """They have the record's own columns only; an empty topic has no rows."""
    found = rows(spark, store, "select * from bytes order by _value")
    assert [row[1] for row in found] == [b"text", b"\xff\x00"]
    assert len(query(spark, store, "select * from bytes").columns) == 6
    assert rows(spark, store, "select _value from empty") == []
    assert rows(spark, store, "select a from empty", schemas={"empty": "a int"}) == []


def test_the_sample(spark: SparkSession, tmp_path: Path) -> None:
    """Columns are those of the first and the last records, types what fits them; others can be named."""
    path = str(tmp_path / "store")
    with segmentlog.open(path, background=False) as opened, opened.producer() as producer:
        opened.create_topic("t")
        values = [{"a": 1}] * 10 + [{"hidden": 1}] * 100 + [{"a": 1.5, "_key": "mine", "b": [1]}] * 8
        producer.send_many("t", [b"junk", *(json.dumps(value).encode() for value in values), b"[1]", b"{"])
    assert resolve_schema(spark, path, "t", sample=10).simpleString() == "struct<a:double,b:array<bigint>>"
    assert rows(spark, path, "select sum(hidden) from t", schemas={"t": "hidden int"}) == [(100,)]
    assert rows(spark, path, "select count(*), count(a) from t where a is not null or _offset = 0") == [(19, 18)]
    with pytest.raises(Exception, match="Malformed records"):
        rows(spark, path, "select sum(a) from t", strict=True)


@pytest.mark.parametrize("after", [0, 3, 12])
def test_the_sample_of_a_log_that_lost_its_end(tmp_path: Path, after: int) -> None:
    """A crash leaves a million offsets without a record: the sample has the last records before and after them."""
    path = str(tmp_path / "store")
    with segmentlog.open(path, background=False) as opened:
        log = opened.create_topic("t").partition(0)
        log.append([b"%d" % number for number in range(200)])
        log.truncate(60)
        log.append([b"new %d" % number for number in range(after)])
    first = [b"%d" % number for number in range(10)]
    last = [*(b"%d" % number for number in range(60)), *(b"new %d" % number for number in range(after))][-10:]
    assert list(_sample_values(path, "t", 10)) == first + last


def test_views_of_the_session(spark: SparkSession, store: str) -> None:
    """A query leaves no view behind, and one that is there already goes before the topic of its name."""
    rows(spark, store, "select 1 from flights")
    assert spark.catalog.listTables() == []
    spark.range(1).createOrReplaceTempView("flights")
    try:
        assert rows(spark, store, "select * from flights") == [(0,)]
    finally:
        spark.catalog.dropTempView("flights")


@pytest.mark.parametrize(
    ("text", "kind", "part"),
    [
        ("selec 1", SparkFailed, "Syntax error at or near 'selec'"),
        ("select * from nope", UnknownTopic, "existing topics: bytes, carrier-names.v1, empty, flights"),
        ("select nope from flights", SparkFailed, "Did you mean one of the following? [`"),
        ("select count(*) from flights where delai > 1", SparkFailed, "`delay`"),
        ("select * from carrier-names.v1", SparkFailed, "back quoted"),
        ("select sum(deep) from flights", SparkFailed, "data type mismatch"),
        ("insert into flights select * from flights", SparkFailed, "a query only reads topics"),
    ],
)
def test_bad_queries(spark: SparkSession, store: str, text: str, kind: type[SegmentlogError], part: str) -> None:
    """The error is one sentence, and names the tables, columns or functions that exist."""
    with pytest.raises(kind) as failure:
        query(spark, store, text)
    assert part in str(failure.value)
    assert len(str(failure.value).splitlines()) == 1


def test_names_with_a_dot(spark: SparkSession, tmp_path: Path) -> None:
    """Spark takes a dot for a database: that the topic wants backticks is said."""
    with segmentlog.open(tmp_path / "store", background=False) as opened:
        opened.create_topic("a.b")
    with pytest.raises(SparkFailed, match=r"needs backticks: `a\.b`"):
        query(spark, str(tmp_path / "store"), "select * from a.b")
    with pytest.raises(UnknownTopic):
        query(spark, str(tmp_path / "store"), "select 1", schemas={"nope": "a int"})
    with pytest.raises(StoreVersionError):
        query(spark, str(tmp_path / "none"), "select 1")


def test_saved(spark: SparkSession, store: str, tmp_path: Path) -> None:
    """Rows go to a folder in the format of its ending, or in the one that is named; not over what is there."""
    found = query(spark, store, "select id, carrier from flights")
    assert save(found, str(tmp_path / "out.parquet")).rows == 30
    assert save(found, str(tmp_path / "out"), "json").rows == 30
    assert {row.id for row in spark.read.parquet(str(tmp_path / "out.parquet")).collect()} == set(range(30))
    with pytest.raises(InvalidConfig, match="give a format, such as parquet"):
        save(found, str(tmp_path / "other"))
    for target, form in (("out.parquet", None), ("x", "nosuch")):
        with pytest.raises(SparkFailed):
            save(found, str(tmp_path / target), form)


@pytest.fixture
def call(store: str, capfd: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a command, and returns its status, stdout and stderr."""

    def call_(*args: str) -> tuple[int, str, str]:
        status = run(cli, ["--dir", store, "spark", "sql", *args])
        return status, *capfd.readouterr()

    return call_


def test_command_line(spark: SparkSession, call: Any, tmp_path: Path) -> None:
    """A table, with a note when there is more; JSON lines, all of them; a folder; one line for what is wrong."""
    text = "select id, deep, null as nothing, id as id, timestamp'2013-01-01 10:00:00' as at from flights order by 1"
    status, out, err = call(text, "--limit", "2")
    assert (status, out.splitlines()) == (
        0,
        [
            "ID  DEEP       NOTHING  ID  AT",
            ' 0  {"leg":0}        -   0  2013-01-01 10:00:00',
            ' 1  {"leg":1}        -   1  2013-01-01 10:00:00',
        ],
    )
    assert err.startswith("2 rows shown; more with")
    status, out, err = call("select _value as raw from bytes where _partition >= 0 order by 1")
    assert (status, out.split()) == (0, ["RAW", "text", "\\xff\\x00"])
    status, out, err = call("select id, deep from flights order by id", "--json")
    assert (status, [json.loads(line)["id"] for line in out.splitlines()], err) == (0, list(range(30)), "30 rows\n")
    status, out, err = call("select id from flights", "-o", str(tmp_path / "out.csv"))
    assert (status, out, err.startswith("30 records written to ")) == (0, "", True)
    assert call("select nope from flights")[:2] == (1, "")
    status, out, err = call("select raise_error('stop here') from flights")
    assert (status, out, err) == (1, "", "error: stop here\n")
    assert call("create temp view v as select 1") == (0, "", "")
    spark.catalog.dropTempView("v")
    assert call("select 1", "--json", "-o", "x")[0] == 2
