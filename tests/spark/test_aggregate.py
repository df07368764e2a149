"""Windows come to what plain Python makes of the same rows, in one job and on and on."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.errors import InvalidConfig, SegmentlogError, UnknownTopic
from segmentlog.spark.pipelines.aggregate import (
    Aggregate,
    InvalidAggregation,
    Windows,
    aggregate,
    aggregate_to,
    parse_aggregate,
)
from segmentlog.spark.pipelines.json_columns import NotJson
from segmentlog.spark.pipelines.pipeline_queries import Incremental, parse_interval
from segmentlog.spark.spark_errors import SparkFailed

TEN = datetime(2013, 1, 1, 10, tzinfo=UTC)
TEN_MS = int(TEN.timestamp() * 1000)
MINUTE_MS = 60_000

Row = dict[str, Any]


def make_store(path: Path, *topics: str) -> str:
    """Return a store with these topics, of two partitions each."""
    with segmentlog.open(path, background=False) as store:
        for topic in topics:
            store.create_topic(topic, partitions=2)
    return str(path)


def add(path: str, rows: Iterable[tuple[int, Row]], topic: str = "t") -> None:
    """Append rows as JSON, with their timestamps."""
    with segmentlog.open(path, background=False) as store, store.producer() as producer:
        for timestamp_ms, row in rows:
            producer.send(topic, json.dumps(row).encode(), timestamp=timestamp_ms)


def outputs(path: str, topic: str) -> list[tuple[Row, Row, int]]:
    """Keys, values and timestamps, sorted."""
    with segmentlog.open(path, background=False) as store:
        found = [
            (json.loads(one.key or b""), json.loads(one.value or b""), one.timestamp) for one in store.consumer(topic)
        ]
    return sorted(found, key=lambda one: json.dumps(one[:2]))


def text(timestamp_ms: int) -> str:
    """Return the time as JSON has it."""
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def nearest_rank(numbers: list[float], share: float) -> float:
    """Return the smallest number with at least this share of all numbers at or below it."""
    return sorted(numbers)[max(0, math.ceil(share * len(numbers)) - 1)]


def test_the_same_as_python(spark: SparkSession, tmp_path: Path) -> None:
    """One job has sliding windows by two keys: counts, sums, averages, extremes and percentiles to the last digit."""
    path = make_store(tmp_path / "store", "t", "out")
    chance = random.Random(1)
    rows = [
        (
            TEN_MS + chance.randrange(180 * MINUTE_MS),
            # Multiples of an eighth: their sums are exact in any order.
            {
                "carrier": chance.choice(["UA", "AA", None]),
                "deep": {"leg": at % 2},
                "delay": chance.choice([None, at / 8 - 50]),
            },
        )
        for at in range(2000)
    ]
    add(path, rows)
    names = [
        "count",
        "count(delay)",
        "sum(delay)",
        "avg(delay)",
        "min(delay)",
        "max(delay * 2) as most",
        "p50(delay)",
        "p99.9(delay)",
    ]
    windows = Windows(tuple(map(parse_aggregate, names)), "1h", "30m", ("carrier", "deep.leg"))
    expected: dict[tuple[int, str | None, int], list[float | None]] = defaultdict(list)
    for timestamp_ms, row in rows:
        last = timestamp_ms - timestamp_ms % (30 * MINUTE_MS)
        for start_ms in (last - 30 * MINUTE_MS, last):
            expected[start_ms, row["carrier"], row["deep"]["leg"]].append(row["delay"])

    assert aggregate_to(spark, path, "t", windows, "out").rows == len(rows)
    found = outputs(path, "out")
    assert len(found) == len(expected)
    for key, value, timestamp_ms in found:
        delays = expected[timestamp_ms, key["carrier"], key["deep.leg"]]
        known = [delay for delay in delays if delay is not None]
        assert key == {"carrier": key["carrier"], "deep.leg": key["deep.leg"], "window_start": text(timestamp_ms)}
        assert value == {
            **key,
            "window_end": text(timestamp_ms + 60 * MINUTE_MS),
            "count": len(delays),
            "count_delay": len(known),
            "sum_delay": sum(known),
            "avg_delay": sum(known) / len(known),
            "min_delay": min(known),
            "most": max(known) * 2,
            "p50_delay": nearest_rank(known, 0.5),
            "p99_9_delay": nearest_rank(known, 0.999),
        }
    printed = aggregate(spark, path, "t", windows).collect()
    assert sum(row["count"] for row in printed) == 2 * len(rows)
    assert [row["window_start"] for row in printed] == sorted(row["window_start"] for row in printed)


def test_time_of_the_value(spark: SparkSession, tmp_path: Path) -> None:
    """Event time may be a field, milliseconds or text; a row without it is left out, and where says which count."""
    path = make_store(tmp_path / "store", "t")
    minutes = [0, 59, 60, 61, 150]
    rows: list[Row] = [
        {"ms": TEN_MS + one * MINUTE_MS, "text": text(TEN_MS + one * MINUTE_MS), "n": one} for one in minutes
    ]
    add(path, [(0, row) for row in [*rows, {"ms": None, "text": "noon", "n": 1}]])
    for time in ("ms", "text"):
        windows = Windows((parse_aggregate("count"), parse_aggregate("sum(n)")), "1 hour", time=time, where="n != 61")
        found = aggregate(spark, path, "t", windows).selectExpr("hour(window_start)", "count", "sum_n").collect()
        assert [tuple(row) for row in found] == [(10, 2, 59), (11, 1, 60), (12, 1, 150)]


def test_append_from_run_to_run(spark: SparkSession, tmp_path: Path) -> None:
    """A window is written once, when the watermark has passed it; what comes later than that is not counted."""
    path = make_store(tmp_path / "store", "t", "out")
    went = Incremental(str(tmp_path / "checkpoint"))
    windows = Windows((parse_aggregate("count"), parse_aggregate("p50(n)")), "1h", watermark="10m")

    def step(*minutes: int) -> list[tuple[int, int]]:
        add(path, [(TEN_MS + minute * MINUTE_MS, {"n": minute}) for minute in minutes])
        aggregate_to(spark, path, "t", windows, "out", incremental=went)
        return [
            ((timestamp_ms - TEN_MS) // MINUTE_MS, value["count"]) for _, value, timestamp_ms in outputs(path, "out")
        ]

    assert step(0, 30, 65) == []  # the watermark is at 55: the first hour may get more
    assert step(5, 75) == [(0, 3)]  # 5 is late, but not too late; then it is at 65
    assert step(10, 200) == [(0, 3), (60, 2)]  # 10 is too late
    (_, first, _), *_ = outputs(path, "out")
    assert first["p50_n"] == 5


def test_update(spark: SparkSession, tmp_path: Path) -> None:
    """With mode "update", a window is written once for each change: the last record of its key is its state."""
    path = make_store(tmp_path / "store", "t", "out")
    went = Incremental(str(tmp_path / "checkpoint"))
    windows = Windows((parse_aggregate("count"),), "1h", keys=("k",))
    for keys in ("aab", "a"):
        add(path, [(TEN_MS, {"k": key}) for key in keys])
        report = aggregate_to(spark, path, "t", windows, "out", mode="update", incremental=went, schema="k string")
        assert report.rows == len(keys)
    states = [("a", 2), ("a", 3), ("b", 1)]
    assert [(key["k"], value["count"]) for key, value, _ in outputs(path, "out")] == states
    # As after a crash between the sink's commit and Spark's: the last micro-batch is done again.
    commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    commits[-1].unlink()
    (commits[-1].parent / f".{commits[-1].name}.crc").unlink()
    aggregate_to(spark, path, "t", windows, "out", mode="update", incremental=went, schema="k string")
    assert [(key["k"], value["count"]) for key, value, _ in outputs(path, "out")] == states


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("count", Aggregate("count", "*", "count")),
        (" COUNT ( * ) ", Aggregate("count", "*", "count")),
        ("count(a)", Aggregate("count", "a", "count_a")),
        ("avg(dep_delay) AS late", Aggregate("avg", "dep_delay", "late")),
        ("count as n", Aggregate("count", "*", "n")),
        ("sum(abs(a - b))", Aggregate("sum", "abs(a - b)", "sum_abs_a_b")),
        ("p99.9(`a b`)", Aggregate("p99.9", "`a b`", "p99_9_a_b")),
        ("sum(cast(a as int))", Aggregate("sum", "cast(a as int)", "sum_cast_a_as_int")),
    ],
)
def test_aggregates_as_they_are_written(written: str, read: Aggregate) -> None:
    """A function, what it is of, and perhaps a name."""
    assert parse_aggregate(written) == read


@pytest.mark.parametrize("wrong", ["", "median(a)", "avg", "avg()", "sum(*)", "avg(a", "p100(a)", "avg(a) late", "p50"])
def test_aggregates_that_are_none(wrong: str) -> None:
    """The error names the aggregates that exist."""
    with pytest.raises(InvalidAggregation, match=r"write|there are count, sum"):
        parse_aggregate(wrong)


def test_intervals() -> None:
    """Short forms become Spark's; Spark's own stay."""
    assert [parse_interval(one) for one in ("1h", "1h30m", "1 day")] == [
        "3600000 milliseconds",
        "5400000 milliseconds",
        "1 day",
    ]
    for wrong in ("0s", "-1"):
        with pytest.raises(InvalidConfig):
            parse_interval(wrong)


def test_bad_input(spark: SparkSession, tmp_path: Path) -> None:
    """The error is one sentence, and nothing is written."""
    path = make_store(tmp_path / "store", "t", "empty", "out")
    add(path, [(TEN_MS, {"n": 1, "deep": {"x": 1}, "name": "a"})])
    count = parse_aggregate("count")
    cases: list[tuple[Windows, type[SegmentlogError], str]] = [
        (Windows((count,), "1 hou"), SparkFailed, "'1 hou'"),
        (Windows((count,), "1h", "2h"), SparkFailed, "slide_duration"),
        (Windows((count,), "1h", where="n >"), SparkFailed, "Syntax error"),
        (Windows((count,), "1h", keys=("nope",)), SparkFailed, "`deep`, `n`, `name`"),
        (Windows((count,), "1h", time="nope"), SparkFailed, "`nope` cannot be resolved"),
        (Windows((count,), "1h", watermark="soon"), SparkFailed, "'soon'"),
        (Windows((parse_aggregate("sum(deep)"),), "1h"), SparkFailed, "data type mismatch"),
        (Windows((parse_aggregate("sum(name)"),), "1h"), SparkFailed, "cannot be cast"),
        (Windows((count, count), "1h"), InvalidAggregation, "'count'"),
        (Windows((), "1h"), InvalidAggregation, "no aggregate"),
    ]
    for windows, kind, part in cases:
        with pytest.raises(kind) as failure:
            aggregate_to(spark, path, "t", windows, "out")
        assert part in str(failure.value)
        assert len(str(failure.value).splitlines()) == 1
    good = Windows((count,), "1h")
    for topic, to, kind in (
        ("nope", "out", UnknownTopic),
        ("t", "nope", UnknownTopic),
        ("empty", "out", NotJson),
        ("t", "t", InvalidAggregation),
    ):
        with pytest.raises(kind):
            aggregate_to(spark, path, topic, good, to)
    assert aggregate_to(spark, path, "empty", good, "out", schema="n int").rows == 0
    assert outputs(path, "out") == []


def test_command_line(spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Windows are printed as a table or as JSON, or written; what does not go together is wrong usage."""
    path = make_store(tmp_path / "store", "t")
    add(
        path,
        [(TEN_MS, {"k": "a", "n": 1}), (TEN_MS, {"k": "b", "n": 2}), (TEN_MS + 90 * MINUTE_MS, {"k": "a", "n": 4})],
    )

    def call(*args: str) -> tuple[int, str, str]:
        status = run(cli, ["--dir", path, "spark", "aggregate", "t", "--window", "1h", *args])
        return status, *capfd.readouterr()

    assert call("--key", "k", "--agg", "avg(n)") == (
        0,
        "K  WINDOW_START         WINDOW_END           AVG_N\n"
        "a  2013-01-01 10:00:00  2013-01-01 11:00:00  1.0\n"
        "b  2013-01-01 10:00:00  2013-01-01 11:00:00  2.0\n"
        "a  2013-01-01 11:00:00  2013-01-01 12:00:00  4.0\n",
        "3 rows\n",
    )
    status, out, _ = call("--json")
    assert (status, [json.loads(line)["count"] for line in out.splitlines()]) == (0, [2, 1])
    status, out, err = call("--to", "out", "--create", "1")
    assert (status, out, len(outputs(path, "out"))) == (0, "", 2)
    assert err.startswith("3 records aggregated to out in ")
    for args in (
        ["--agg", "median(n)"],
        ["--checkpoint", "x"],
        ["--to", "out", "--mode", "update"],
        ["--to", "out", "--json"],
        ["--to", "out", "--follow"],
    ):
        assert call(*args)[0] == 2
    assert call("--to", "nope")[0] == 1
