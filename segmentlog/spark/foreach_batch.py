"""What Spark lets no sink that is written in Python do, with `foreachBatch`: output mode "update"."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from segmentlog.spark.spark_errors import SparkFailed
from segmentlog.spark.store_opener import folder_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def append_batches(path: str, topic: str | None = None, **options: str) -> Callable[[DataFrame, int], None]:
    """What to give to `DataStreamWriter.foreachBatch`, in any output mode: each micro-batch's rows are appended, once.

        counts.writeStream.outputMode("update").foreachBatch(append_batches("data", "counts"))

    All rows of a micro-batch become visible at once. One that is replayed after a crash is not written again: the
    store keeps the id of the last one of each query, together with its records.

    Args:
        path: the store's folder.
        topic: where to; None: the rows have a column for it.
        options: those of the sink.
    """
    given = {**options, "path": folder_of(path)} | ({} if topic is None else {"topic": topic})

    def append(rows: DataFrame, batch_id: int) -> None:
        query_id = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        if not query_id:
            raise SparkFailed("Spark does not tell which query this is, so that it could be written once only")
        once = {"txnAppId": query_id, "txnVersion": str(batch_id)}
        rows.write.format("segmentlog").mode("append").options(**given, **once).save()

    return append
