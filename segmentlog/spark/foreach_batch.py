"""Append micro-batches through `foreachBatch`, for output mode "update".

Spark does not allow that mode for a sink written in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from segmentlog.spark.spark_errors import SparkFailed
from segmentlog.spark.store_opener import resolve_writable_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def append_batches(path: str, topic: str | None = None, **options: str) -> Callable[[DataFrame, int], None]:
    """Return a function for `DataStreamWriter.foreachBatch` that appends the rows of each micro-batch exactly once.

    It works in every output mode.

        counts.writeStream.outputMode("update").foreachBatch(append_batches("data", "counts"))

    All rows of a micro-batch become visible at once. A micro-batch that Spark replays after a crash is not written
    again: the store records the id of each query's last micro-batch together with its records.

    Args:
        path: the store's folder.
        topic: the topic to append to; None: the rows have a column ``topic``.
        options: options of the sink.
    """
    given = {**options, "path": resolve_writable_folder(path)} | ({} if topic is None else {"topic": topic})

    def append(rows: DataFrame, batch_id: int) -> None:
        query_id = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        if not query_id:
            raise SparkFailed("Spark passed no query id, which segmentlog needs to write the micro-batch only once")
        once = {"txnAppId": query_id, "txnVersion": str(batch_id)}
        rows.write.format("segmentlog").mode("append").options(**given, **once).save()

    return append
