"""From topic to topic, each record exactly once: whatever fails, is done again, or is killed, and whenever."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.datasource import WriterCommitMessage
from seeds import fresh_seed
from waiting import wait_until

import segmentlog
from segmentlog.format.file_names import STAGING_FOLDER
from segmentlog.spark import batch_writer
from segmentlog.spark.batch_writer import StreamWriter
from segmentlog.spark.data_source import DefaultSource
from segmentlog.spark.spark_errors import reason_of
from segmentlog.staging.staging import publish
from segmentlog.storage.fs import FileSystem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

KILL_ROUNDS = int(os.environ.get("SEGMENTLOG_SPARK_KILL_ROUNDS", "1"))
KEYS = 23
WORKER = Path(__file__).with_name("exactly_once_worker.py")


def make(path: Path, count: int) -> None:
    """Create a store with ``count`` numbered records in the three partitions of "in", and an empty topic "out"."""
    with segmentlog.open(path, background=False) as store:
        store.create_topic("in", partitions=3, fsync="never")
        store.create_topic("out", partitions=4, fsync="never")
    feed(path, 0, count)


def feed(path: Path, start: int, stop: int) -> None:
    """Send the records ``start`` to ``stop``, in batches of a dozen."""
    with segmentlog.open(path, background=False) as store, store.producer() as producer:
        for first in range(start, stop, 12):
            numbers = range(first, min(first + 12, stop))
            producer.send_many("in", [b"%d" % n for n in numbers], keys=[b"key %d" % (n % KEYS) for n in numbers])
            producer.flush()


def check(path: Path, count: int) -> None:
    """Topic "out" holds each of the first ``count`` records exactly once, those of a key in order, in one partition."""
    with segmentlog.open(path, background=False) as store:
        records = list(store.consumer("out", isolation="read_committed"))
    numbers = sorted(int(record.value or b"-1") for record in records)
    missing = sorted(set(range(count)) - set(numbers))
    double = sorted({one for one, other in itertools.pairwise(numbers) if one == other})
    assert (missing, double, len(numbers)) == ([], [], count)
    for key in range(KEYS):
        mine = [record for record in records if record.key == b"key %d" % key]
        assert len({record.partition for record in mine}) == 1
        mine.sort(key=lambda record: record.offset)
        assert [int(record.value or b"") for record in mine] == list(range(key, count, KEYS))


def orphans(path: Path) -> list[str]:
    """Return the staged files that will never be published."""
    return sorted(one.name for one in Path(path, STAGING_FOLDER).rglob("*.batches"))


# ---------------------------------------------------------------- the process that publishes is killed


def die_once(marker: str) -> None:
    """Kill this process the first time that any process calls this."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class KillingWriter(StreamWriter):
    """The sink, whose process dies on the way."""

    def __init__(self, options: Any, where: str, marker: str) -> None:
        super().__init__(options)
        self.where, self.marker = where, marker

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        done = super().write(iterator)
        if self.where == "after staging":
            die_once(self.marker)
        return done

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        if batchId != 1:
            super().commit(messages, batchId)
            return
        if self.where == "paused":
            while not os.path.exists(self.marker):
                time.sleep(0.05)
        elif self.where == "before publishing":
            die_once(self.marker)
        elif self.where == "before the decision":

            def publish_and_die(producer: Any, fs: FileSystem, staged: Sequence[Any]) -> int:
                count = publish(producer, fs, staged)
                die_once(self.marker)
                return count

            with mock.patch.object(batch_writer, "publish", publish_and_die):  # Spark may use the process again
                super().commit(messages, batchId)
            return
        super().commit(messages, batchId)
        if self.where == "after publishing":
            die_once(self.marker)


class KillingSource(DefaultSource):
    """The data source with that sink."""

    @classmethod
    def name(cls) -> str:
        return "killing"

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        where, marker = self.options.pop("where"), self.options.pop("marker")
        return KillingWriter(self._write_options(schema, overwrite), where, marker)


Copy = Callable[..., "StreamingQuery"]
GO_ON = "go on"


@pytest.fixture
def start(spark: SparkSession, tmp_path: Path) -> Iterator[Copy]:
    """Start a query that copies "in" to "out", with one checkpoint, however often it is started."""
    from pyspark import cloudpickle

    # Workers cannot import this module, so its contents are sent to them.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    spark.dataSource.register(KillingSource)
    queries = []

    def start(*, sink: str = "segmentlog", **options: str) -> StreamingQuery:
        frame = spark.readStream.format("segmentlog").load(
            str(tmp_path / "store"),
            subscribe="in",
            startingOffsets="earliest",
            maxOffsetsPerTrigger=100,
            minPartitions=2,
        )
        writer = frame.drop("topic", "partition").writeStream.format(sink).option("topic", "out")
        for name, value in options.items():
            writer = writer.option(name, value)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        queries.append(writer.trigger(availableNow=True).start(str(tmp_path / "store")))
        return queries[-1]

    yield start
    (tmp_path / GO_ON).touch()  # stop() waits for a paused sink, forever if its test failed before
    for query in queries:
        query.stop()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_nothing_happens(start: Copy, tmp_path: Path) -> None:
    """Without failures, each record is copied once, no staged file is left, and a restarted query adds nothing."""
    make(tmp_path / "store", 300)
    start().awaitTermination()
    check(tmp_path / "store", 300)
    assert orphans(tmp_path / "store") == []
    start().awaitTermination()
    check(tmp_path / "store", 300)


@pytest.mark.parametrize("where", ["after staging", "before publishing", "before the decision", "after publishing"])
def test_killed_at(start: Copy, tmp_path: Path, where: str) -> None:
    """The process is killed there: the query fails; started again it does that micro-batch again, and only once."""
    make(tmp_path / "store", 300)
    marker = tmp_path / "marker"
    query = start(sink="killing", where=where, marker=str(marker))
    with pytest.raises(StreamingQueryException):
        query.awaitTermination()
    assert marker.exists()
    with segmentlog.open(tmp_path / "store", background=False) as store:
        done = len(list(store.consumer("out", isolation="read_committed")))
    assert done == {"after staging": 0, "after publishing": 200}.get(where, 100)
    start(sink="killing", where=where, marker=str(marker)).awaitTermination()
    check(tmp_path / "store", 300)
    assert orphans(tmp_path / "store") == []


# ---------------------------------------------------------------- a second driver


def run(tmp_path: Path, master: str, checkpoint: str = "copy", **options: str) -> subprocess.Popen[str]:
    """Start a driver of its own, in a process group of its own."""
    arguments = [str(tmp_path / "store"), str(tmp_path / checkpoint), master, *(f"{k}={v}" for k, v in options.items())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    with (tmp_path / "worker.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, str(WORKER), *arguments], stdout=subprocess.PIPE, stderr=log, text=True,
            start_new_session=True, env=environment, cwd=tmp_path,
        )  # fmt: skip


def end_of(worker: subprocess.Popen[str], tmp_path: Path) -> list[str]:
    """Return the output of the worker up to its end, and check that it succeeded."""
    try:
        said, _ = worker.communicate(timeout=240)
    finally:
        kill(worker)
    assert worker.returncode == 0, (tmp_path / "worker.log").read_text()[-3000:]
    return said.splitlines()


def kill(worker: subprocess.Popen[str]) -> None:
    """Kill -9 of driver and Java at once, if they are still there."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    worker.wait()


def committed(path: Path) -> int:
    """Return the number of committed records in topic "out"."""
    with segmentlog.open(path, background=False, read_only=True) as store:
        return len(list(store.consumer("out", isolation="read_committed")))


# ---------------------------------------------------------------- drivers that are killed


def test_drivers_that_are_killed(start: Copy, tmp_path: Path) -> None:
    """Other drivers continue with copies of the checkpoint: the newest one wins, and the older one gets a fencing
    error.

    Their tasks fail, and `kill -9` ends their Python and Java: first between the sink's commit and Spark's own, then at
    any time. The last driver is a cluster of two executors with speculation, one of which is killed. Each record is
    still copied once.
    """
    path, count = tmp_path / "store", 750 + 150 * KILL_ROUNDS
    make(path, 150)
    older = start(sink="killing", where="paused", marker=str(tmp_path / GO_ON))
    wait_until(lambda: (committed(path) == 100 and bool(orphans(path))) or older.exception() is not None)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    feed(path, 150, count)
    rng = random.Random(fresh_seed())  # a fresh seed, because kills by the clock cannot be repeated anyway
    for number in range(KILL_ROUNDS):
        if not number:
            worker = run(tmp_path, "local[2,4]", flaky="1", kill="1")
            wait_until(lambda worker=worker: worker.poll() is not None, timeout_s=240)
            assert worker.returncode == -signal.SIGKILL, (tmp_path / "worker.log").read_text()[-3000:]
            continue
        worker = run(tmp_path, "local[2,4]", flaky="1")
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith(("batch", "done")):
                break
        time.sleep(rng.random() * 3)
        kill(worker)
    cluster = {
        "conf.spark.speculation": "true", "conf.spark.speculation.interval": "50ms",
        "conf.spark.speculation.quantile": "0.3", "conf.spark.speculation.multiplier": "1.1",
        "conf.spark.speculation.minTaskRuntime": "50ms",
        "conf.spark.deploy.maxExecutorRetries": "-1",  # on a busy machine they do not come up at the first attempt
    }  # fmt: skip
    said = end_of(run(tmp_path, "local-cluster[2,1,512]", kill_executor="1", slow="0.3", **cluster), tmp_path)
    assert said[-1] == "done"
    assert any(line.startswith("executor") for line in said), said
    check(path, count)
    assert orphans(path) == []
    (tmp_path / GO_ON).touch()
    with pytest.raises(StreamingQueryException) as told:
        older.awaitTermination()
    reason = reason_of(told.value)
    assert "another run of the same job has started since" in reason, reason
    assert "nothing was appended" in reason
    check(path, count)
