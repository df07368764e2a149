"""A Spark driver with Spark's Kafka source and sink.

    job.py CLASSPATH batch                             reads tasks from stdin, a line of JSON each, and answers each so
    job.py CLASSPATH stream STORE BOOTSTRAP CHECKPOINT copies topic "from" to "to", by Kafka's source and our sink, and
                                                       "to" to "sent", by our source and Kafka's sink

A task is {"read": [FORMAT, OPTIONS]}, answered by {"rows": [...], "tasks": N}; or has a "write" of the same form.
The answer to a task that failed is {"error": TEXT}.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.functions import spark_partition_id

from segmentlog.spark.session import session

_COLUMNS = ["topic", "partition", "offset", "key", "value", "unix_millis(timestamp) AS ms", "timestampType"]


def text(data: Any) -> Any:
    """Return the bytes as text for JSON."""
    return data if data is None else base64.b64encode(bytes(data)).decode()


def answer(spark: SparkSession, task: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one task."""
    kind, options = task["read"]
    frame = spark.read.format(kind).options(**options).load()
    if "write" in task:
        kind, options = task["write"]
        frame.select("key", "value", "partition", "headers").write.format(kind).options(**options).mode("append").save()
        return {}
    headers = ["headers"] if "headers" in frame.columns else []
    rows = [
        [
            *row[:3], text(row.key), text(row.value), row.ms, row.timestampType,
            [[one.key, text(one.value)] for one in row.headers] if headers and row.headers is not None else None,
        ]
        for row in frame.selectExpr(*_COLUMNS, *headers).orderBy("topic", "partition", "offset").collect()
    ]  # fmt: skip
    return {"rows": rows, "tasks": frame.select(spark_partition_id()).distinct().count()}


def batch(spark: SparkSession) -> None:
    """Answer."""
    for line in sys.stdin:
        try:
            said = answer(spark, json.loads(line))
        except Exception as error:  # the test judges every error
            said = {"error": str(error)}
        print(json.dumps(said), flush=True)


def stream(spark: SparkSession, store: str, bootstrap: str, checkpoint: str) -> None:
    """Copy what is there, a hundred records at a time."""
    ours = {"path": store, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "100"}
    theirs = {"kafka.bootstrap.servers": bootstrap, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "100"}
    for name, source, options, sink, target in (
        ("there", "kafka", theirs | {"subscribe": "from"}, "segmentlog", {"path": store, "topic": "to"}),
        ("back", "segmentlog", ours | {"subscribe": "to"}, "kafka", theirs | {"topic": "sent"}),
    ):
        frame = spark.readStream.format(source).options(**options).load().select("key", "value", "partition")
        writer = frame.writeStream.format(sink).options(**target)
        query = writer.option("checkpointLocation", f"{checkpoint}/{name}").trigger(availableNow=True).start()
        told = -1
        while query.isActive:
            progress = query.lastProgress
            if progress is not None and progress["batchId"] != told:
                told = progress["batchId"]
                print(name, told, flush=True)
            time.sleep(0.05)
        query.awaitTermination()
    print("done", flush=True)


def main() -> None:
    """Run as a group of processes, with Java in it, so that the test can kill all of it."""
    os.setpgid(0, 0)
    conf = {"spark.driver.extraClassPath": sys.argv[1], "spark.sql.shuffle.partitions": 2}
    spark = session("segmentlog beside Kafka", "local[2]", conf=conf, fast_start=True)
    print(os.getpid(), flush=True)
    if sys.argv[2] == "batch":
        batch(spark)
    else:
        stream(spark, *sys.argv[3:])
    spark.stop()


main()
