"""Spark reads what was shipped from where it lies: in a session of its own, and on a cluster that sees nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from objects.s3_servers import BUCKET, moto
from pyspark.sql import DataFrame, SparkSession
from spark.cluster import cluster
from spark.conftest import skip_or_fail
from spark.test_verify import make_topic

import segmentlog
from segmentlog.errors import InvalidConfig, ReadOnlyStore, SegmentlogError, UnknownTopic
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.spark import store_opener
from segmentlog.spark.java import JavaNotFound
from segmentlog.spark.pipelines import topic_views
from segmentlog.spark.pipelines.aggregate import Windows, aggregate, aggregate_to, parse_aggregate
from segmentlog.spark.pipelines.archive import archive
from segmentlog.spark.pipelines.archive_restore import restore
from segmentlog.spark.pipelines.latest_rows import update_table
from segmentlog.spark.pipelines.pipeline_queries import Incremental, ensure_topic
from segmentlog.spark.pipelines.topic_verify import verify
from segmentlog.spark.query_lag import measure_lag
from segmentlog.spark.source_options import parse_read_options
from segmentlog.spark.spark_errors import SparkFailed, explain_spark_errors
from segmentlog.spark.store_opener import StoreLocation, open_for_task, resolve_location

PARTITIONS = 3
RECORDS = 300


class Shipped:
    """A store that is shipped to a folder that plays an object store, and is out of sight but while it is added to."""

    def __init__(self, folder: Path, url: str | None = None, environment: Mapping[str, str] | None = None) -> None:
        """``environment``: what to know for reaching ``url``."""
        self._away, self._store = folder / "away", folder / "store"
        self.url = url or f"file://{folder}/bucket"
        self._environment = dict(environment or {})
        self.committed: list[str] = []
        """Values that a reader of committed records must find."""
        with segmentlog.open(self._store, background=False) as store:
            store.create_topic("t", PARTITIONS, segment_records=40)
            store.create_topic("other")
        self._store.rename(self._away)
        self.add()

    def add(self) -> list[str]:
        """Ship some more, half of it in transactions, some of which are aborted; what was committed."""
        added = []
        first = len(self.committed)
        self._away.rename(self._store)
        with segmentlog.open(self._store, background=False) as store:
            store.topic("other").partition(0).append([b"no object"])
            plain, named = store.producer(), store.producer(name="writer")
            for at in range(RECORDS // 10):
                text = [json.dumps({"n": first + 10 * at + index, "k": at % 7}) for index in range(10)]
                if at % 2:
                    named.begin_transaction()
                    named.send_many("t", [b"aborted"] * 5, partition=at % PARTITIONS)
                    named.abort_transaction()
                    named.begin_transaction()
                    named.send_many("t", [value.encode() for value in text], partition=at % PARTITIONS)
                    named.commit_transaction()
                else:
                    plain.send_many("t", [value.encode() for value in text], partition=at % PARTITIONS)
                added += text
            plain.close()
            named.close()
            with pytest.MonkeyPatch.context() as patch:
                for name, value in self._environment.items():
                    patch.setenv(name, value)
                store.ship(self.url)
        self._store.rename(self._away)
        self.committed += added
        return added


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    """Return one shipped store for all tests that only read."""
    return Shipped(tmp_path_factory.mktemp("shipped"))


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    while store_opener._open_stores:
        store_opener._open_stores.popitem()[1].close()


def read(spark: SparkSession, url: str, **options: str) -> DataFrame:
    """Topic "t"."""
    return spark.read.format("segmentlog").options(path=url, subscribe="t", **options).load()


def texts(rows: DataFrame) -> list[str]:
    """Return the values of the rows."""
    return sorted(bytes(row.value).decode() for row in rows.select("value").collect())


# ---------------------------------------------------------------- reading


def test_a_batch_of_what_is_committed(spark: SparkSession, shipped: Shipped) -> None:
    """Split into several tasks, each of which reads a piece of a partition."""
    rows = read(spark, shipped.url, maxRecordsPerPartition="50", cacheBytes="1MiB")
    assert rows.rdd.getNumPartitions() > PARTITIONS
    assert texts(rows) == sorted(shipped.committed)
    everything = read(spark, shipped.url, isolation="read_uncommitted")
    assert everything.count() == len(shipped.committed) + RECORDS // 20 * 5


def test_file_urls_of_both_kinds(spark: SparkSession, shipped: Shipped, tmp_path: Path) -> None:
    """Spark writes folders this way, so the type of the location depends on what the folder contains."""
    folder = shipped.url.removeprefix("file://")
    assert resolve_location(f"file:{folder}") == resolve_location(f"file://{folder}/") == shipped.url
    assert texts(read(spark, f"file:{folder}")) == sorted(shipped.committed)
    with segmentlog.open(tmp_path / "s", background=False) as store:
        store.create_topic("t").partition(0).append([b"here"])
    assert resolve_location(f"file://{tmp_path}/s") == f"{tmp_path}/s"
    assert texts(read(spark, f"file://{tmp_path}/s")) == ["here"]
    assert resolve_location("s3://bucket/store") == "s3://bucket/store"
    assert resolve_location("relative") == os.path.abspath("relative")


def test_a_stream_goes_on_with_what_is_shipped_since(spark: SparkSession, tmp_path: Path) -> None:
    """With one checkpoint, each run has exactly the records since the last one."""
    shipped = Shipped(tmp_path)

    def run() -> list[str]:
        found: list[str] = []
        stream = spark.readStream.format("segmentlog").options(path=shipped.url, subscribe="t")
        query = (
            stream.option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", "200")
            .load()
            .writeStream.foreachBatch(lambda rows, _: found.extend(texts(rows)))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        left = measure_lag(query.lastProgress, shipped.url)
        assert set(left.offsets.values()) <= {0}
        return sorted(found)

    assert run() == sorted(shipped.committed)
    assert run() == []
    assert run() == []
    added = shipped.add()
    assert run() == sorted(added)


def test_a_query_that_runs_sees_what_is_shipped(spark: SparkSession, tmp_path: Path) -> None:
    """Asked for once a second, as long as it runs."""
    shipped = Shipped(tmp_path)
    found: list[str] = []
    stream = spark.readStream.format("segmentlog").options(path=shipped.url, subscribe="t")
    query = (
        stream.option("startingOffsets", "earliest")
        .load()
        .writeStream.foreachBatch(lambda rows, _: found.extend(texts(rows)))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        query.processAllAvailable()
        assert sorted(found) == sorted(shipped.committed)
        shipped.add()
        for _ in range(100):
            query.processAllAvailable()
            if len(found) >= len(shipped.committed):
                break
            query.awaitTermination(1)
        assert sorted(found) == sorted(shipped.committed)
    finally:
        query.stop()


# ---------------------------------------------------------------- what a process keeps


def test_tasks_of_a_process_share_what_is_open(tmp_path: Path) -> None:
    """Tasks for the same topics share an open store, which is refreshed; other topics or a fork open another one."""
    shipped = Shipped(tmp_path)
    place = StoreLocation(shipped.url, ("t",), cache_dir=str(tmp_path / "cache"))
    with open_for_task(place) as store:
        before = sum(log.log_end_offset for log in store.topic("t").partitions())
        assert store.topics() == ["t"]
    shipped.add()
    with open_for_task(place) as again:
        assert again is store
        assert sum(log.log_end_offset for log in again.topic("t").partitions()) > before
    with open_for_task(StoreLocation(shipped.url, cache_dir=str(tmp_path / "cache"))) as everything:
        assert everything is not store
        assert everything.topics() == ["other", "t"]
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            with open_for_task(place) as forked:
                ok = forked is not store and forked.topic("t").partition(0).log_end_offset > 0
                forked.close()
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    # Another store is shipped to the same place.
    for path in sorted(Path(shipped.url.removeprefix("file://")).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with segmentlog.open(tmp_path / "another", background=False) as another:
        another.create_topic("t").partition(0).append([b"another"])
        another.ship(shipped.url)
    with open_for_task(place) as anew:
        assert anew is not store
        assert store.is_closed
        assert [record.value for record in anew.consumer("t")] == [b"another"]


def test_few_are_kept(tmp_path: Path) -> None:
    """The store that was not used for the longest time is closed, and its folder deleted."""
    shipped, cache = Shipped(tmp_path), tmp_path / "cache"
    places = [StoreLocation(shipped.url, ("t",), cache_bytes=1 + at, cache_dir=str(cache)) for at in range(6)]
    for place in places:
        with open_for_task(place):
            pass
    assert len(list(cache.iterdir())) == len(store_opener._open_stores) == 4
    with open_for_task(places[2]) as third:
        pass
    with open_for_task(places[0]):
        pass
    assert not third.is_closed


# ---------------------------------------------------------------- pipelines


def test_verify_finds_what_one_process_finds(spark: SparkSession, tmp_path: Path) -> None:
    """All results of tasks are used: their files have other paths, but the same bytes."""
    make_topic(tmp_path / "store")
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.ship(f"file://{tmp_path}/bucket")
    expected = [finding for finding in inspect_store(str(tmp_path / "store"), "t") if finding.severity != "note"]
    (tmp_path / "store").rename(tmp_path / "away")
    report = verify(spark, f"file://{tmp_path}/bucket", "t")
    assert [finding for finding in report.findings if finding.severity != "note"] == expected == []
    assert report.segments > 20
    assert report.segments_on_driver == 0
    with pytest.raises(UnknownTopic):
        verify(spark, f"file://{tmp_path}/bucket", "nothing")


def test_pipelines_that_only_read(spark: SparkSession, shipped: Shipped, tmp_path: Path) -> None:
    """Windows, SQL, the latest rows, an archive and a topic made from it."""
    windows = Windows((parse_aggregate("count"),), "1h", keys=("k",))
    assert sum(row["count"] for row in aggregate(spark, shipped.url, "t", windows).collect()) == len(shipped.committed)
    rows = topic_views.query(spark, shipped.url, "select max(n) as most from t")
    assert [row.most for row in rows.collect()] == [len(shipped.committed) - 1]
    update_table(spark, shipped.url, "t", str(tmp_path / "table"), skip_null_keys=True)
    report = archive(spark, shipped.url, "t", str(tmp_path / "archive"))
    assert report.records > 0
    restore(spark, str(tmp_path / "restored"), str(tmp_path / "archive"), "t")
    with segmentlog.open(tmp_path / "restored", create=False, background=False) as store:
        assert len(list(store.consumer("t"))) == report.records


def test_what_writes_is_refused(spark: SparkSession, shipped: Shipped, tmp_path: Path) -> None:
    """Each call raises one sentence, before any work."""
    rows = spark.createDataFrame([(b"x",)], "value binary")
    with pytest.raises(SparkFailed, match="can only be read"), explain_spark_errors():
        rows.write.format("segmentlog").mode("append").options(path=shipped.url, topic="t").save()
    with pytest.raises(InvalidConfig, match="can only be read"):
        ensure_topic(shipped.url, "new", 1)
    windows = Windows((parse_aggregate("count"),), "1h")
    with pytest.raises(InvalidConfig, match="can only be read"):
        aggregate_to(spark, shipped.url, "t", windows, "sums", create=1, incremental=Incremental(str(tmp_path / "c")))
    with pytest.raises(ReadOnlyStore, match="archived"):
        archive(spark, shipped.url, "t", str(tmp_path / "archive"), trim=True)
    archive(spark, shipped.url, "t", str(tmp_path / "archive"))
    with pytest.raises(InvalidConfig, match="can only be read"):
        restore(spark, shipped.url, str(tmp_path / "archive"), "t")
    assert not (tmp_path / "c").exists()


def test_bad_input(spark: SparkSession, shipped: Shipped, tmp_path: Path) -> None:
    """Mistakes that a user would make first raise clear errors."""
    with pytest.raises(InvalidConfig, match=r"groupId.*only a store in a local folder can commit positions"):
        parse_read_options({"path": shipped.url, "subscribe": "t", "groupId": "g"}, streaming=True)
    for size in ("0", "-1", "lots"):
        with pytest.raises(InvalidConfig, match="cacheBytes"):
            parse_read_options({"path": shipped.url, "subscribe": "t", "cacheBytes": size}, streaming=False)
    with pytest.raises(SparkFailed, match=r"topic 'nothing': it does not exist in file://"), explain_spark_errors():
        spark.read.format("segmentlog").options(path=shipped.url, subscribe="nothing").load().count()
    with pytest.raises(SparkFailed, match="no such folder on host"), explain_spark_errors():
        read(spark, f"file://{tmp_path}/bucket").count()  # which may be either
    with pytest.raises((SparkFailed, SegmentlogError), match="URL"), explain_spark_errors():
        read(spark, "ftp://host/store").count()
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SparkFailed, match="cache_dir"), explain_spark_errors():
        read(spark, shipped.url, cacheDir=str(tmp_path / "file")).count()


# ---------------------------------------------------------------- a cluster


class Driver:
    """A driver in a process of its own, which is asked by lines of JSON."""

    def __init__(self, master: str, url: str, environment: dict[str, str], folder: Path) -> None:
        folder.mkdir()
        conf = {
            "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": False,
            "spark.executor.memory": "512m", "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": 2,
        }  # fmt: skip
        conf |= {f"spark.executorEnv.{name}": value for name, value in environment.items()}
        self._log = folder / "log"
        script = Path(__file__).with_name("cluster_driver.py")
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, script, master, url, json.dumps(conf)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, cwd=folder,
                env={**os.environ, **environment, "TMPDIR": str(folder), "SPARK_LOCAL_IP": "127.0.0.1"},
            )  # fmt: skip

    def ask(self, do: str, **arguments: str) -> Any:
        """Return the answer of the worker; fail if its work failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or "{}")
        assert "answer" in answer, f"{answer.get('error')}\n{self._log.read_text()[-2000:]}"
        return answer["answer"]

    def close(self) -> None:
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@pytest.mark.spark
@pytest.mark.long
def test_a_cluster_that_sees_nothing_else(tmp_path: Path) -> None:
    """A master, two workers and a driver, none of which sees the store: batches, a stream, verification, windows."""
    for name in ("s3", "cluster"):
        (tmp_path / name).mkdir()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(moto(tmp_path / "s3"))
        owner = tmp_path / "owner"
        owner.mkdir()
        shipped = Shipped(owner, f"s3://{BUCKET}/store", server.environment)
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        try:
            spark = stack.enter_context(cluster(tmp_path / "cluster", 2, path))
        except JavaNotFound as error:
            skip_or_fail(error)
            raise
        driver = Driver(spark.url, shipped.url, server.environment | path, tmp_path / "driver")
        stack.callback(driver.close)
        assert driver.ask("batch", maxRecordsPerPartition="40", cacheBytes="16MiB") == sorted(shipped.committed)
        assert driver.ask("executors") == 2
        # Each worker's cache is in a folder that Spark removes, and none is in the system's temporary folder.
        kept = [sorted(worker.rglob("segmentlog-*")) for worker in spark.workers]
        assert all(kept), "each worker had some of the tasks"
        assert all("local" in folder.parts for found in kept for folder in found)
        checkpoint, target = str(tmp_path / "checkpoint"), str(tmp_path / "target")
        assert driver.ask("stream", checkpoint=checkpoint, target=target) == sorted(shipped.committed)
        shipped.add()
        assert driver.ask("stream", checkpoint=checkpoint, target=target) == sorted(shipped.committed)
        assert driver.ask("batch") == sorted(shipped.committed)
        found = driver.ask("verify")
        assert set(found["severities"]) <= {"note"}
        assert found["segments"] > PARTITIONS
        assert found["here"] == 0
        assert driver.ask("aggregate") == len(shipped.committed)
    assert not [left for worker in spark.workers for left in worker.rglob("segmentlog-*")]
