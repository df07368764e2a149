"""A topic as a Delta table. Needs delta-spark and its JARs, which come from a Maven repository: run by hand.

pip install 'pyspark==4.2.*' 'delta-spark==4.4.*'
SEGMENTLOG_DELTA_PACKAGE=io.delta:delta-spark_4.2_2.13:4.4.0 python -m pytest tests/spark/test_delta.py
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import segmentlog
from segmentlog.spark.pipelines.latest_rows import TableReport
from segmentlog.spark.pipelines.table_delta import update_delta

pytestmark = pytest.mark.skipif(
    "SEGMENTLOG_DELTA_PACKAGE" not in os.environ or importlib.util.find_spec("delta") is None,
    reason="needs delta-spark, and SEGMENTLOG_DELTA_PACKAGE that says which JARs go with it",
)


def send(base: Path, keys: list[bytes], values: list[bytes | None]) -> None:
    """Produce to topic "t" of two partitions."""
    with segmentlog.open(base / "store", background=False) as store:
        if "t" not in store.topics():
            store.create_topic("t", partitions=2, cleanup_policy="compact")
        with store.producer() as producer:
            producer.send_many("t", values, keys)


def update(spark: SparkSession, base: Path, **options: Any) -> TableReport:
    """Bring the table up to date."""
    return update_delta(spark, str(base / "store"), "t", str(base / "table"), **options)


def rows_of(spark: SparkSession, base: Path) -> dict[bytes, bytes]:
    """Return the rows of the table by key, and check that each key is there once."""
    rows = spark.read.format("delta").load(str(base / "table")).collect()
    found = {bytes(row.key): bytes(row.value) for row in rows}
    assert len(found) == len(rows)
    return found


def changes(report: TableReport) -> tuple[int, int, int, int, int]:
    """Return the counts of the report."""
    return report.records, report.inserted, report.updated, report.deleted, report.rows


def test_inserts_updates_deletes(spark: SparkSession, tmp_path: Path) -> None:
    """Each update merges only new records; tombstones delete; the position is in the commit."""
    send(tmp_path, [b"k%d" % (at % 20) for at in range(100)], [b"%d" % at for at in range(100)])
    assert changes(update(spark, tmp_path)) == (100, 20, 0, 0, 20)
    expected = {b"k%d" % at: b"%d" % (at + 80) for at in range(20)}
    assert rows_of(spark, tmp_path) == expected
    send(tmp_path, [b"k1", b"k1", b"k2", b"x", b"y", b"y"], [b"old", b"new", None, b"1", b"1", None])
    assert changes(update(spark, tmp_path)) == (6, 1, 1, 1, 20)
    expected |= {b"k1": b"new", b"x": b"1"}
    del expected[b"k2"]
    assert rows_of(spark, tmp_path) == expected
    assert changes(update(spark, tmp_path)) == (0, 0, 0, 0, 20)
    spark.sql(f"OPTIMIZE delta.`{tmp_path / 'table'}`")  # a commit of another program
    send(tmp_path, [b"x"], [None])
    assert changes(update(spark, tmp_path)) == (1, 0, 0, 1, 19)
    assert b"x" not in rows_of(spark, tmp_path)


def test_json_values_and_a_rebuild(spark: SparkSession, tmp_path: Path) -> None:
    """The fields of JSON values become columns, and a rebuilt table is the same."""
    send(tmp_path, [b"a", b"b", b"a"], [b'{"n": 1}', b'{"n": 2}', b'{"n": 3}'])
    update(spark, tmp_path, json_values=True)
    for _ in range(2):
        rows = spark.read.format("delta").load(str(tmp_path / "table")).select("n").collect()
        assert sorted(row.n for row in rows) == [2, 3]
        update(spark, tmp_path, json_values=True, rebuild=True)
