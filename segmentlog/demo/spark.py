"""The second half of the demonstration: the flights through Spark, compared with plain Python.

Steps 12 and 13 leave their output beside the store: the query's checkpoint and the table of planes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import msgspec

import segmentlog
from segmentlog.demo.flights import Flights, Say, check
from segmentlog.spark.java import JavaNotFound, find_java
from segmentlog.spark.session import SparkNotInstalled, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HOURLY = "delays-hourly"
_HOUR_MS = 3_600_000
_NEW_YORK = ZoneInfo("America/New_York")


class _Delay(msgspec.Struct):
    """The fields of a flight that steps 12 and 14 read."""

    carrier: str
    dep_delay: str
    """Minutes; NA if the flight was cancelled."""


class Hour(msgspec.Struct):
    """A carrier's departures in an hour. Step 12 writes such a value for each key, which is an hour and a carrier."""

    flights: int = 0
    departed: int = 0
    delay_sum: int | None = None
    delay_mean: float | None = None


Hours = dict[tuple[int, str], Hour]
"""The hours by their start (ms UTC) and carrier."""


def run_on_spark(folder: Path, flights: Flights, plot: Path, say: Say) -> None:
    """Run steps 12 to 14 on a store with the topic 'flights'; skip them with a message if Spark is missing.

    Raises `DemoFailed` at the first check that fails.
    """
    if (missing := find_missing_package()) is not None:
        say(f"Steps 12 to 14 are skipped. {missing}")
        return
    beside = Path(f"{folder}-spark")
    started = time.perf_counter()
    say("Starting Spark for the steps that follow; that takes about ten seconds")
    with _session(beside) as spark:
        say(f"   Spark {spark.version}, started in {time.perf_counter() - started:.1f} s")
        hours = _aggregate(spark, folder, beside, flights, say)
        _tabulate(spark, folder, beside, flights, say)
    _plot(hours, len(flights), plot, say)


def find_missing_package() -> str | None:
    """Return a sentence that names the package or Java that Spark needs and does not find; None if all are found."""
    for package in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            return str(SparkNotInstalled(package))
    try:
        find_java()
    except JavaNotFound as error:
        return str(error)
    return None


@contextlib.contextmanager
def _session(beside: Path) -> Iterator[SparkSession]:
    """Yield the active Spark session of this process, or a new session, which is stopped at the end of the block."""
    from pyspark import SparkContext

    from segmentlog.spark.spark_errors import explain_spark_errors

    with explain_spark_errors():
        if SparkContext._active_spark_context is not None:
            yield session()
            return
        # Few partitions: a query keeps state for each of them, and a task costs more than these rows.
        conf = {"spark.sql.shuffle.partitions": 4, "spark.sql.warehouse.dir": beside / "warehouse"}
        spark = session("segmentlog demo", conf=conf, fast_start=True)
        try:
            spark.sparkContext.setLogLevel("OFF")  # errors are raised
            yield spark
        finally:
            spark.stop()


def _rate(count: int, started: float) -> str:
    seconds = time.perf_counter() - started
    return f"{count:,} records in {seconds:.1f} s, {count / seconds:,.0f} per second"


# ---------------------------------------------------------------- windows


def _aggregate(spark: SparkSession, folder: Path, beside: Path, flights: Flights, say: Say) -> Hours:
    from segmentlog.spark.pipelines.aggregate import Windows, aggregate_to, parse_aggregate
    from segmentlog.spark.pipelines.pipeline_queries import Incremental

    say(f"12. Departures and delays by the hour and carrier: a streaming query, with a checkpoint, to '{_HOURLY}'")
    delay = "try_cast(dep_delay AS int)"  # null for NA
    aggregates = [
        "count AS flights",
        f"count({delay}) AS departed",
        f"sum({delay}) AS delay_sum",
        f"avg({delay}) AS delay_mean",
    ]
    windows = Windows(
        tuple(map(parse_aggregate, aggregates)),
        "1h",
        keys=("carrier",),
        where="carrier IS NOT NULL",  # steps 6 and 7 wrote records that are not flights
        watermark="366d",  # in the source, October follows January: no record of the year may count as late
    )
    with segmentlog.open(folder) as store:
        # A window that changes later is written again, and compaction keeps its last state.
        store.create_topic(_HOURLY, cleanup_policy="compact")
    started = time.perf_counter()
    report = aggregate_to(
        spark,
        str(folder),
        "flights",
        windows,
        _HOURLY,
        schema="carrier string, dep_delay string",
        mode="update",
        incremental=Incremental(str(beside / "checkpoint")),
    )
    say(f"   read, aggregated and written: {_rate(report.rows, started)}")
    found, records = _read_hours(folder)
    expected = compute_hours(flights)
    check(records == len(found), "each window was written once")
    check(found == expected, "every window has the numbers that plain Python computes")
    cancelled = sum(hour.flights - hour.departed for hour in found.values())
    say(f"   {len(found):,} windows, each written once; {cancelled:,} flights were cancelled and have no delay")
    say("   equal to plain Python: counts and sums exactly, means to the last bit")
    return found


def _read_hours(folder: Path) -> tuple[Hours, int]:
    """Return (the hours in the topic, the number of records)."""
    hours: Hours = {}
    count = 0
    key, value = msgspec.json.Decoder(dict[str, str]), msgspec.json.Decoder(Hour)
    with segmentlog.open(folder, read_only=True) as store:
        for record in store.consumer(_HOURLY, isolation="read_committed"):
            assert record.key is not None
            assert record.value is not None
            hours[record.timestamp, key.decode(record.key)["carrier"]] = value.decode(record.value)
            count += 1
    return hours, count


def compute_hours(flights: Flights) -> Hours:
    """Compute the expected result of step 12 in plain Python."""
    delays: dict[tuple[int, str], list[str]] = defaultdict(list)
    decode = msgspec.json.Decoder(_Delay).decode
    for value, timestamp in zip(flights.values, flights.timestamps, strict=True):
        flight = decode(value)
        delays[timestamp - timestamp % _HOUR_MS, flight.carrier].append(flight.dep_delay)
    hours: Hours = {}
    for hour, texts in delays.items():
        known = [int(text) for text in texts if text != "NA"]
        hours[hour] = Hour(len(texts), len(known))
        if known:
            hours[hour].delay_sum = sum(known)
            hours[hour].delay_mean = sum(known) / len(known)
    return hours


# ---------------------------------------------------------------- a table


def _tabulate(spark: SparkSession, folder: Path, beside: Path, flights: Flights, say: Say) -> None:
    from segmentlog.spark.pipelines.latest_rows import update_table

    say("13. The last record of each plane as a row of a Parquet table, whose columns are the fields of the JSON")
    target = str(beside / "planes")
    started = time.perf_counter()
    report = update_table(spark, str(folder), "flights", target, json_values=True, skip_null_keys=True)
    say(f"   updated: {_rate(report.records, started)}; {report.skipped:,} of them have no key and get no row")
    last: dict[bytes, bytes] = {}
    for key, value in zip(flights.keys, flights.values, strict=True):
        if key is not None:
            last[key] = value
    started = time.perf_counter()
    rows = {bytes(row["key"]): row.asDict() for row in spark.read.parquet(target).collect()}
    elapsed = time.perf_counter() - started
    check(rows.keys() == last.keys(), "the table has exactly one row for each plane")
    for key, value in last.items():
        check(msgspec.json.decode(value).items() <= rows[key].items(), f"the row of {key!r} is its last record")
    columns = len(next(iter(rows.values()), {}))
    say(f"   {len(rows):,} rows of {columns} columns read back in {elapsed:.2f} s: one per plane. Every field")
    say("   equals that of the plane's last record, found with plain Python")
    for plane, flown in Counter(key for key in flights.keys if key is not None).most_common(1):
        row = rows[plane]
        say(
            f"   {plane.decode()} flew most, {flown:,} times; its row: {row['carrier']}{row['flight']}"
            f" {row['origin']}-{row['dest']} on {row['time_hour'][:10]}, offset {row['offset']:,}"
        )


# ---------------------------------------------------------------- a plot


class _Day(msgspec.Struct):
    """The departures from New York in a day."""

    flights: int = 0
    departed: int = 0
    delay_sum: int = 0

    @property
    def mean(self) -> float:
        return self.delay_sum / self.departed if self.departed else 0.0


def _plot(hours: Hours, count: int, path: Path, say: Say) -> None:
    say(f"14. Plotting the delays of the year from the topic '{_HOURLY}'")
    if importlib.util.find_spec("matplotlib") is None:
        say("   skipped: the plot needs the package matplotlib: pip install '.[demo]' in a clone of segmentlog")
        return
    days: dict[date, _Day] = defaultdict(_Day)
    for (start_ms, _), hour in hours.items():
        day = days[datetime.fromtimestamp(start_ms / 1000, UTC).astimezone(_NEW_YORK).date()]
        day.flights += hour.flights
        day.departed += hour.departed
        day.delay_sum += hour.delay_sum or 0
    check(sum(day.flights for day in days.values()) == count, "every flight is in the plot")
    _draw(dict(sorted(days.items())), path)
    worst = max(days, key=lambda calendar_day: days[calendar_day].mean)
    say(f"   worst day: {worst:%d %B}, {days[worst].mean:.0f} minutes late on average")
    say(f"   drawn: {path}")


_INK, _PALE, _RED = "#1f3b57", "#a9c4dc", "#d1495b"


def _draw(days: dict[date, _Day], path: Path) -> None:
    """Draw delays and numbers of flights in two panels. Does not use pyplot, which would require a display."""
    from matplotlib.figure import Figure

    dates: Any = importlib.import_module("matplotlib.dates")  # has no types
    figure = Figure(figsize=(11, 6), dpi=130, layout="constrained")
    late, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    x = [dates.date2num(day) for day in days]
    means = [day.mean for day in days.values()]
    late.bar(x, means, width=1.0, color=_PALE, label="mean of the day")
    late.plot(x, [_mean_of_week(days, day) for day in days], color=_INK, linewidth=2, label="mean of seven days")
    late.axhline(0, color="black", linewidth=0.8)
    for day in sorted(days, key=lambda calendar_day: -days[calendar_day].mean)[:3]:
        late.annotate(f"{day:%-d %b}: {days[day].mean:.0f} min", (dates.date2num(day), days[day].mean),
                      xytext=(0, 4), textcoords="offset points", ha="center", fontsize=9, color=_INK)  # fmt: skip
    late.set_ylim(min(0, *means) - 2, 1.12 * max(1, *means))
    late.set_ylabel("mean departure delay (minutes)")
    late.legend(loc="upper right", frameon=False)
    departed = [day.departed for day in days.values()]
    counts.bar(x, departed, width=1.0, color=_PALE, label="departed")
    cancelled = [day.flights - day.departed for day in days.values()]
    counts.bar(x, cancelled, width=1.0, bottom=departed, color=_RED, label="cancelled")
    counts.set_ylabel("flights a day")
    counts.yaxis.set_major_formatter("{x:,.0f}")
    counts.set_xlabel("scheduled departure, New York time")
    counts.legend(loc="lower right", ncols=2, fontsize=9)
    locator = dates.AutoDateLocator()
    counts.xaxis.set_major_locator(locator)
    counts.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    for axes in (late, counts):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
    what = f"{sum(day.flights for day in days.values()):,} flights from EWR, JFK and LGA in 2013"
    late.set_title("How late flights leave New York", loc="left", fontsize=15, fontweight="bold", pad=24)
    late.text(0, 1.02, what, transform=late.transAxes, color="#555555")
    figure.savefig(path)


def _mean_of_week(days: dict[date, _Day], middle: date) -> float:
    """Return the mean delay of the flights of up to seven days around ``middle``."""
    around = [days[day] for step in range(-3, 4) if (day := middle + timedelta(days=step)) in days]
    return _Day(0, sum(day.departed for day in around), sum(day.delay_sum for day in around)).mean
