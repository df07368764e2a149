"""A table shows the latest row of each key, as it was before an update or as it is after it."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.errors import SegmentlogError, UnknownTopic
from segmentlog.spark.pipelines.latest_rows import NullKeys, TableReport, update_table
from segmentlog.spark.pipelines.run_history import AnotherHistory, RecordsGone
from segmentlog.spark.pipelines.table_delta import DeltaNotInstalled, update_delta
from segmentlog.spark.pipelines.table_folder import TableFolder

Items = list[tuple[bytes | None, bytes | None]]
COLUMNS = ["key", "value", "partition", "offset", "timestamp"]


class Crash(BaseException):
    """The process dies here."""


def crash_before(step: str) -> Callable[[str], None]:
    """Return an ``on_step`` that dies before a step."""

    def on_step(name: str) -> None:
        if name == step:
            raise Crash

    return on_step


def send(store: Path, items: Items, topic: str = "t", partitions: int = 2) -> None:
    """Produce records by their keys; the topic is made when it is not there."""
    with segmentlog.open(store, background=False) as opened:
        try:
            opened.topic(topic)
        except UnknownTopic:
            opened.create_topic(topic, partitions=partitions, cleanup_policy="compact")
        keys, values = zip(*items, strict=True)
        with opened.producer() as producer:
            producer.send_many(topic, list(values), list(keys))


def update(spark: SparkSession, base: Path, **options: Any) -> TableReport:
    """Bring the table of topic "t" up to date."""
    if not (base / "table").exists():
        options.setdefault("buckets", 2)
    return update_table(spark, str(base / "store"), "t", str(base / "table"), **options)


def rows_of(spark: SparkSession, base: Path) -> dict[bytes, bytes]:
    """Return the rows of the table by key, and check that each key is there once."""
    rows = spark.read.parquet(str(base / "table")).collect()
    found = {bytes(row.key): bytes(row.value) for row in rows}
    assert len(found) == len(rows)
    return found


def stop_at(link: Path, version: str) -> None:
    """SIGTERM once the table has come to that version."""
    while not os.readlink(link).endswith(version):
        time.sleep(0.1)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def changes(report: TableReport) -> tuple[int, int, int, int, int]:
    """Return the counts of the report."""
    return report.records, report.inserted, report.updated, report.deleted, report.rows


def test_inserts_updates_deletes(spark: SparkSession, tmp_path: Path) -> None:
    """Each update reads only new records, rewrites the affected buckets, and counts the changes of keys."""
    store = tmp_path / "store"
    send(store, [(b"k%d" % (at % 20), b"%d" % at) for at in range(100)])
    assert changes(update(spark, tmp_path, buckets=16)) == (100, 20, 0, 0, 20)
    expected = {b"k%d" % at: b"%d" % (at + 80) for at in range(20)}
    assert rows_of(spark, tmp_path) == expected
    assert spark.read.parquet(str(tmp_path / "table")).columns == COLUMNS
    before = {one.stat().st_ino: one.name for one in (tmp_path / "table/").glob("*.parquet")}

    send(store, [(b"k1", b"old"), (b"k1", b"new"), (b"k2", None), (b"x", b"1"), (b"y", b"1"), (b"y", None)])
    report = update(spark, tmp_path)
    assert changes(report) == (6, 1, 1, 1, 20)
    assert report.rewritten <= 4
    expected |= {b"k1": b"new", b"x": b"1"}
    del expected[b"k2"]
    assert rows_of(spark, tmp_path) == expected
    after = {one.stat().st_ino: one.name for one in (tmp_path / "table/").glob("*.parquet")}
    assert len(before.keys() & after.keys()) >= len(before) - 4
    assert not set(before.values()) & set(after.values())

    again = update(spark, tmp_path)
    assert (changes(again), again.version) == ((0, 0, 0, 0, 20), report.version)
    send(store, [(key, None) for key in expected])
    assert changes(update(spark, tmp_path)) == (20, 0, 0, 20, 0)
    assert rows_of(spark, tmp_path) == {}
    send(store, [(b"back", b"1")])
    assert changes(update(spark, tmp_path)) == (1, 1, 0, 0, 1)
    assert rows_of(spark, tmp_path) == {b"back": b"1"}


def test_the_highest_offset_counts(spark: SparkSession, tmp_path: Path) -> None:
    """The order of a partition is by offset, for any timestamps. Between partitions, the later timestamp counts."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        topic = store.create_topic("t")
        topic.partition(0).append([b"later", b"last"], keys=[b"a", b"a"], timestamps=[2000, 1000])
        update(spark, tmp_path)
        assert rows_of(spark, tmp_path) == {b"a": b"last"}
        store.alter_topic("t", partitions=2)
        topic.partition(1).append([b"older", b"b"], keys=[b"a", b"b"], timestamps=[500, 1])
        assert changes(update(spark, tmp_path)) == (2, 1, 0, 0, 2)
        assert rows_of(spark, tmp_path) == {b"a": b"last", b"b": b"b"}
        topic.partition(1).append([None], keys=[b"b"], timestamps=[0])
        topic.partition(1).append([b"newer"], keys=[b"a"], timestamps=[1001])
        assert changes(update(spark, tmp_path)) == (2, 0, 1, 1, 1)
        assert rows_of(spark, tmp_path) == {b"a": b"newer"}


def test_a_crash_at_every_step(spark: SparkSession, tmp_path: Path) -> None:
    """The table is as it was before; the next update brings all of it, and leaves nothing behind."""
    store = tmp_path / "store"
    send(store, [(b"a", b"1"), (b"b", b"1")])
    with pytest.raises(Crash):
        update(spark, tmp_path, on_step=crash_before("publishing"))
    assert not (tmp_path / "table").exists()
    update(spark, tmp_path)
    send(store, [(b"a", b"2"), (b"b", None)])
    for step in ("building", "publishing"):
        with pytest.raises(Crash):
            update(spark, tmp_path, on_step=crash_before(step))
        assert rows_of(spark, tmp_path) == {b"a": b"1", b"b": b"1"}
    with pytest.raises(Crash):
        update(spark, tmp_path, on_step=crash_before("sweeping"))
    assert rows_of(spark, tmp_path) == {b"a": b"2"}
    assert changes(update(spark, tmp_path)) == (0, 0, 0, 0, 1)
    assert len(list((tmp_path / ".table.versions").glob("v*"))) == 2
    assert {one.name for one in (tmp_path / ".table.versions").iterdir() if one.name[0] != "v"} == {"lock"}


def test_a_reader_while_it_is_updated(spark: SparkSession, tmp_path: Path) -> None:
    """The reader sees one complete version or the other; a reader that has resolved the link may take longer."""
    store = tmp_path / "store"
    send(store, [(b"k%d" % at, b"1") for at in range(50)])
    update(spark, tmp_path)
    resolved = os.path.realpath(tmp_path / "table")
    seen: list[set[bytes]] = []

    def on_step(step: str) -> None:
        seen.append(set(rows_of(spark, tmp_path).values()))

    send(store, [(b"k%d" % at, b"2") for at in range(50)])
    update(spark, tmp_path, on_step=on_step)
    assert seen == [{b"1"}] * (len(seen) - 1) + [{b"2"}]
    assert {bytes(row.value) for row in spark.read.parquet(resolved).collect()} == {b"1"}
    straddling = spark.read.parquet(str(tmp_path / "table"))
    send(store, [(b"k0", b"3")])
    update(spark, tmp_path)
    with pytest.raises(Exception, match=r"FILE_NOT_EXIST|FileNotFound|does not exist"):
        straddling.collect()


def test_json_values(spark: SparkSession, tmp_path: Path) -> None:
    """Fields become columns, those of a sample or of a schema; a column that a field has the name of gives way."""
    send(tmp_path / "store", [(b"%d" % at, b'{"id": %d, "offset": "x", "t": {"a": [1]}}' % at) for at in range(3)])
    update(spark, tmp_path, json_values=True)
    send(tmp_path / "store", [(b"0", b'{"id": 7, "more": 1}'), (b"1", None), (b"2", b"no JSON")])
    assert changes(update(spark, tmp_path)) == (3, 0, 2, 1, 2)
    table = spark.read.parquet(str(tmp_path / "table")).orderBy("key")
    assert table.columns == ["key", "id", "offset", "t", "partition", "_offset", "timestamp"]
    assert [row.id for row in table.collect()] == [7, None]
    with pytest.raises(SegmentlogError, match="created with other columns; to rebuild the table from all"):
        update(spark, tmp_path, schema="id string")
    update(spark, tmp_path, schema="id string", rebuild=True)
    table = spark.read.parquet(str(tmp_path / "table")).orderBy("key")
    assert [row.id for row in table.collect()] == ["7", None]


def test_records_without_a_key(spark: SparkSession, tmp_path: Path) -> None:
    """The error has the position of the first such record; with the option they are skipped and counted."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t").partition(0).append([b"1", b"2", b"3"], keys=[b"a", None, None])
    with pytest.raises(NullKeys, match=r"2 records have no key .the first at t/0 offset 1.*--skip-null-keys"):
        update(spark, tmp_path)
    report = update(spark, tmp_path, skip_null_keys=True)
    assert (changes(report), report.skipped) == ((3, 1, 0, 0, 1), 2)


def test_history_that_is_gone(spark: SparkSession, tmp_path: Path) -> None:
    """After a trim, a truncation, or for another topic of the name, the update raises; ``rebuild`` starts again."""
    send(tmp_path / "store", [(b"a", b"1"), (b"b", b"1")], partitions=1)
    update(spark, tmp_path)
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.topic("t").partition(0)
        log.append([b"2", b"3"], keys=[b"a", b"c"])
        log.trim(3)
        with pytest.raises(RecordsGone, match=r"^t/0: offsets 2 to 2 are gone: .*--rebuild"):
            update(spark, tmp_path)
        assert rows_of(spark, tmp_path) == {b"a": b"1", b"b": b"1"}
        assert changes(update(spark, tmp_path, rebuild=True)) == (1, 1, 0, 0, 1)
        log.truncate(3)
        with pytest.raises(RecordsGone, match="truncated on request"):
            update(spark, tmp_path)
        store.delete_topic("t")
        store.create_topic("t", partitions=1).partition(0).append([b"x"] * 100, keys=[b"k"] * 100)
        store.create_topic("other")
    with pytest.raises(AnotherHistory, match="another record"):
        update(spark, tmp_path)
    with pytest.raises(AnotherHistory, match="table of topic 't'"):
        update_table(spark, str(tmp_path / "store"), "other", str(tmp_path / "table"))


def test_places_that_will_not_do(spark: SparkSession, tmp_path: Path) -> None:
    """Each of them raises one sentence."""
    send(tmp_path / "store", [(b"a", b"1")])
    store = str(tmp_path / "store")
    with pytest.raises(SegmentlogError, match=r"^s3://bucket/table: the folder must be on a file system"):
        update_table(spark, store, "t", "s3://bucket/table")
    with pytest.raises(SegmentlogError, match="it is not a table"):
        update_table(spark, store, "t", store)
    (tmp_path / "link").symlink_to("store")
    with pytest.raises(SegmentlogError, match="it is a link to store, which is not a table"):
        update_table(spark, store, "t", str(tmp_path / "link"))
    with TableFolder(str(tmp_path / "table")).writing(), pytest.raises(SegmentlogError, match="another update"):
        update(spark, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("delta") is not None, reason="Delta Lake is installed")
def test_without_delta(spark: SparkSession, tmp_path: Path) -> None:
    """The error says what to install, and how to start Spark with it."""
    with pytest.raises(DeltaNotInstalled, match="pip install delta-spark, and start Spark with"):
        update_delta(spark, str(tmp_path), "t", str(tmp_path / "table"))


@pytest.mark.usefixtures("spark")
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a summary on stderr, a report with --json, and updates until a signal with --follow."""
    send(tmp_path / "store", [(b"a", b"1")])
    target = str(tmp_path / "table")

    def call(*args: str) -> tuple[int, str, str]:
        status = run(cli, ["--dir", str(tmp_path / "store"), "spark", "table", *args])
        return (status, *capsys.readouterr())

    status, out, err = call("t", target, "--json")
    assert status == 0
    assert '"inserted":1' in out
    assert "version 1: 1 records read" in err
    assert "1 rows inserted, 0 updated, 0 deleted; 1 rows" in err
    send(tmp_path / "store", [(b"b", b"1")])
    threading.Thread(target=stop_at, args=(tmp_path / "table", "v000002")).start()
    status, out, err = call("t", target, "--follow", "--every", "300ms")
    assert (status, out) == (0, "")
    assert "version 2: 1 records read" in err
    assert call("none", target)[0] == 1
    assert call("t", target, "--buckets", "3")[0] == 1
    assert call("t", target, "--format", "delta", "--buckets", "3")[0] == 2
