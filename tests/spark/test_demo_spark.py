"""The demonstration's steps on Spark, at a small size."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import segmentlog
from segmentlog.demo import flights as demo_flights
from segmentlog.demo import spark as demo_spark
from segmentlog.demo import steps as demo

COUNT = 3_000


@pytest.fixture(scope="module")
def flights() -> demo_flights.Flights:
    """Return the first ones of the year."""
    return demo_flights.load_flights(COUNT)


@pytest.fixture
def folder(flights: demo_flights.Flights, tmp_path: Path) -> Path:
    """Return a store with the flights and a few other records, as the steps before leave it."""
    path = tmp_path / "store"
    with segmentlog.open(path) as store:
        store.create_topic("flights", partitions=4, retention_ms=-1)
        demo._write(store, flights, lambda _: None)
        for number in (0, 1):
            store.topic("flights").partition(number).append([b"killed 12", b"123456789"])
    return path


def test_the_steps_on_spark_hold(spark: SparkSession, folder: Path, flights: demo_flights.Flights) -> None:
    """Windows, table and plot are created and right; other records do not count; the session stays open."""
    plot, said = folder.parent / "delays.png", list[str]()
    demo_spark.run_on_spark(folder, flights, plot, said.append)
    text = "\n".join(said)
    planes = len({key for key in flights.keys if key is not None})
    assert f"{len(demo_spark.compute_hours(flights)):,} windows, each written once" in text
    assert "means to the last bit" in text
    assert f"{COUNT + 4:,} records in" in text
    assert f"{planes:,} rows of 23 columns" in text
    assert said[-1].endswith(f": {plot}")

    image = plot.read_bytes()
    assert image.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", image[16:24])
    assert width > height > 500
    assert spark.range(3).count() == 3  # it was there before, and is not stopped
    with segmentlog.open(folder, read_only=True) as store:
        assert len(store.table("delays-hourly")) == len(demo_spark.compute_hours(flights))


def test_a_wrong_aggregate_fails_the_steps(
    spark: SparkSession, folder: Path, flights: demo_flights.Flights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean that is off by its last bit is found."""
    wanted = demo_spark.compute_hours(flights)
    one = next(hour for hour in wanted.values() if hour.delay_mean)
    assert one.delay_mean is not None
    one.delay_mean *= 1 + 2**-52
    monkeypatch.setattr(demo_spark, "compute_hours", lambda _: wanted)
    with pytest.raises(demo_flights.DemoFailed, match="every window has the numbers"):
        demo_spark.run_on_spark(folder, flights, folder.parent / "delays.png", lambda _: None)
