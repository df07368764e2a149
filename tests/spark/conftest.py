"""One Spark session a process for all of its tests: it takes ten seconds to start."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from segmentlog.spark.java import JavaNotFound
from segmentlog.spark.session import SparkNotInstalled, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_SECOND = {"test_archive", "test_exactly_once", "test_session", "test_spark_table"}
# Modules for a second process of a parallel run: those that start JVMs of their own anyway, about half of all.


@pytest.hookimpl(tryfirst=True)  # runs before -m selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use the session `spark`, and run them in two processes of a run with several."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()) and item.get_closest_marker("spark") is None:
            item.add_marker(pytest.mark.spark)
        if item.get_closest_marker("spark") is not None:
            group = "spark-2" if item.path.stem in _SECOND else "spark-1"
            item.add_marker(pytest.mark.xdist_group(group))  # heeded with --dist loadgroup


def skip_or_fail(error: Exception) -> None:
    """Skip the test without Java; in CI, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"Spark's tests cannot be run: {error}")
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    """Return the session: two cores, few partitions, its tables in a folder of this run."""
    conf = {
        "spark.sql.shuffle.partitions": 2,
        "spark.default.parallelism": 2,
        "spark.sql.warehouse.dir": tmp_path_factory.mktemp("warehouse"),
    }
    if delta := os.environ.get("SEGMENTLOG_DELTA_PACKAGE"):  # see test_delta.py
        conf |= {
            "spark.jars.packages": delta,
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        }
    try:
        started = session("segmentlog tests", "local[2]", conf=conf, fast_start=True)
    except (JavaNotFound, SparkNotInstalled) as error:
        skip_or_fail(error)
        raise  # not reached
    yield started
    started.stop()
