"""A Spark driver that copies topic "in" to topic "out", and that test_exactly_once.py kills.

    python exactly_once_worker.py STORE CHECKPOINT MASTER [NAME=VALUE ...]

It prints "batch N" after each micro-batch, and "done" when all records are copied.

    flaky=1       each task of partition 0 fails at its first attempt, after it has staged everything
    slow=SECONDS  ... and takes this long for it, so that Spark starts a speculative task
    kill=1        kill Java and this process the first time that a micro-batch is published, before
                  Spark knows of it
    kill_executor=1  kill an executor after the second micro-batch
    conf.NAME=VALUE  a setting of Spark's
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import TaskContext

from segmentlog.spark.batch_writer import StreamWriter, WriterCommitMessage
from segmentlog.spark.data_source import DefaultSource
from segmentlog.spark.session import session

PATH, CHECKPOINT, MASTER = sys.argv[1:4]
OPTIONS = dict(argument.split("=", 1) for argument in sys.argv[4:])
GROUP = os.getpgid(0)
IN_A_TRIGGER = 150


class HarmedWriter(StreamWriter):
    """The sink, to which things happen."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        done = super().write(iterator)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0 and context.partitionId() == 0:
            time.sleep(float(OPTIONS.get("slow", "0")))
            if "flaky" in OPTIONS:
                raise RuntimeError("the first attempt fails")
        return done

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        super().commit(messages, batchId)
        if "kill" in OPTIONS and batchId >= 2:
            os.killpg(GROUP, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


class HarmedSource(DefaultSource):
    """The data source with that sink."""

    @classmethod
    def name(cls) -> str:
        return "harmed"

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        return HarmedWriter(self._write_options(schema, overwrite))


def executors() -> list[int]:
    """Return the processes of the executors that this driver's workers have started in a local cluster."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
        except OSError:  # it has ended
            continue
        if "CoarseGrainedExecutorBackend" in command and CHECKPOINT in command:
            found.append(int(entry.name))
    return found


def main() -> None:
    """Copy until nothing is left."""
    conf = {"spark.sql.shuffle.partitions": 2} | {
        name.removeprefix("conf."): value for name, value in OPTIONS.items() if name.startswith("conf.")
    }
    if MASTER.startswith("local-cluster"):
        import pyspark

        os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
        conf |= {
            "spark.executor.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -Dtest={CHECKPOINT}",
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
    spark = session("exactly once", MASTER, conf=conf, fast_start=True)
    spark.dataSource.register(HarmedSource)
    frame = spark.readStream.format("segmentlog").load(
        PATH, subscribe="in", startingOffsets="earliest", maxOffsetsPerTrigger=IN_A_TRIGGER, minPartitions=3
    )
    query = (
        frame.drop("topic", "partition", "timestamp")
        .writeStream.format("harmed").option("path", PATH).option("topic", "out")
        .option("checkpointLocation", CHECKPOINT).trigger(availableNow=True).start()
    )  # fmt: skip
    told = -1
    killed = "kill_executor" not in OPTIONS
    while query.isActive:
        progress = query.lastProgress
        if progress is not None and progress["batchId"] != told:
            told = progress["batchId"]
            print("batch", told, flush=True)
        if not killed and told >= 2 and (victims := executors()):
            print("executor", victims[0], flush=True)
            os.kill(victims[0], signal.SIGKILL)
            killed = True
        time.sleep(0.02)
    query.awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
