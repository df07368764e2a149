"""The driver of a cluster's tests, in a process of its own: does what a line of JSON says, and answers by another."""

from __future__ import annotations

import json
import sys
from typing import Any

from segmentlog.spark.pipelines.aggregate import Windows, aggregate, parse_aggregate
from segmentlog.spark.pipelines.topic_verify import verify
from segmentlog.spark.session import session


def main() -> None:
    """``MASTER URL CONF``: the cluster, the store, and Spark's settings as JSON."""
    master, url, conf = sys.argv[1:]
    spark = session("segmentlog cluster", master, conf=json.loads(conf), fast_start=True)

    def batch(**options: str) -> list[str]:
        rows = spark.read.format("segmentlog").options(path=url, subscribe="t", **options).load()
        return sorted(bytes(row.value).decode() for row in rows.select("value").collect())

    def stream(checkpoint: str, target: str) -> list[str]:
        rows = spark.readStream.format("segmentlog").options(path=url, subscribe="t", startingOffsets="earliest").load()
        query = (
            rows.selectExpr("string(value) as value")
            .writeStream.format("parquet")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start(target)
        )
        query.awaitTermination()
        return sorted(row.value for row in spark.read.parquet(target).collect())

    def checked() -> dict[str, Any]:
        report = verify(spark, url, "t")
        severities = [finding.severity for finding in report.findings]
        return {"severities": severities, "segments": report.segments, "here": report.segments_on_driver}

    def counted() -> int:
        windows = Windows((parse_aggregate("count"),), "1h")
        return sum(row["count"] for row in aggregate(spark, url, "t", windows).collect())

    def executors() -> int:
        java: Any = spark.sparkContext._jsc
        return len(java.sc().statusTracker().getExecutorInfos()) - 1  # the driver is one

    does = {"batch": batch, "stream": stream, "verify": checked, "aggregate": counted, "executors": executors}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: Any = {"answer": does[request.pop("do")](**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
