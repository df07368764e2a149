"""A local Spark session that starts fast, says little and finds the data source."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from segmentlog.errors import SegmentlogError
from segmentlog.spark.java import Java, JavaNotFound, find_java, launch_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CHECKPOINT_FILES = "spark.sql.streaming.checkpointFileManagerClass"
LOGGING = Path(__file__).with_name("log4j2.properties")


class SparkNotInstalled(SegmentlogError):
    """PySpark, or a package that the data source needs with it, is missing."""

    def __init__(self, package: str) -> None:
        super().__init__(package)
        self.package = package

    def __str__(self) -> str:
        return f"Spark needs the package {self.package}: pip install '.[spark]' in a clone of segmentlog"


def session(
    app_name: str = "segmentlog",
    master: str | None = None,
    *,
    conf: Mapping[str, object] | None = None,
    quiet: bool = True,
    fast_start: bool = False,
) -> SparkSession:
    """The Spark session of this process, with the data source ``segmentlog`` registered.

    When there is one it is returned as it is, and the arguments change nothing. Otherwise one is started. A Java
    that runs already (after ``SparkSession.stop()``) is used again; ``quiet`` and ``fast_start`` are its own.

    Args:
        app_name: what Spark calls the session.
        master: where it runs; None: ``local[*]``, every core of this machine.
        conf: Spark's settings by name; they go before those made here.
        quiet: no messages but warnings, no progress bar; and Python's exceptions without the traceback.
        fast_start: Java compiles quickly rather than well. For tests and scripts of seconds; long jobs take longer.

    Raises:
        SparkNotInstalled: PySpark or one of the packages it needs here is missing.
        JavaNotFound: there is no Java that Spark runs on.
    """
    _require_packages()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:
        spark = SparkSession.builder.getOrCreate()
    else:
        master = master or "local[*]"
        local = master.startswith("local")
        settings = _settings(local, quiet) | {key: _text(value) for key, value in (conf or {}).items()}
        builder = SparkSession.builder.master(master).appName(app_name)
        for key, value in settings.items():
            builder = builder.config(key, value)
        with _environment(_environment_for_java(local, quiet, fast_start)):
            spark = builder.getOrCreate()
        if local and _CHECKPOINT_FILES not in settings:
            _write_checkpoints_without_processes(spark)
        if quiet:
            _ignore_interrupted_counters(spark)
    register(spark)
    return spark


def _write_checkpoints_without_processes(spark: SparkSession) -> None:
    """The default way to write a checkpoint starts twenty processes a micro-batch where Hadoop's native library is
    missing, as in the Python package, to look at links; this one writes aside and renames, too, and starts four."""
    java = spark._jvm
    assert java is not None
    for package in ("streaming.checkpointing", "streaming"):  # it moved
        name = f"org.apache.spark.sql.execution.{package}.FileSystemBasedCheckpointFileManager"
        try:
            java.java.lang.Class.forName(name)
        except Exception:  # py4j's, which wraps that there is no such class
            continue
        spark.conf.set(_CHECKPOINT_FILES, name)
        return


def register(spark: SparkSession) -> None:
    """Make ``format("segmentlog")`` known to a session that was not started by `session`.

    Spark finds the package ``pyspark_segmentlog`` by itself where it is installed, though not in a checkout that
    was installed as editable: it lists the folders of the path, and asks no import hooks.
    """
    from pyspark_segmentlog import DefaultSource

    # Asked first: Spark warns when one takes the place of another, were it the same.
    known = spark._jsparkSession.sessionState().dataSourceManager()
    if not known.dataSourceExists(DefaultSource.name()):
        spark.dataSource.register(DefaultSource)


def _require_packages() -> None:
    for package in ("pyspark", "pyarrow"):
        try:
            __import__(package)
        except ImportError:
            raise SparkNotInstalled(package) from None


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---------------------------------------------------------------- settings


def _settings(local: bool, quiet: bool) -> dict[str, str]:
    settings = {
        "spark.sql.session.timeZone": "UTC",
        # toPandas and createDataFrame by columns.
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # The default one does not serve transformWithState.
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
    }
    if local:
        settings |= {
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            # 200 by default; a task that has nothing to do costs as much as one that has.
            "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
        }
    if quiet:
        settings |= {
            "spark.ui.showConsoleProgress": "false",
            # An error of this library is a sentence; where in a worker it was raised says nothing to its reader.
            "spark.sql.execution.pyspark.udf.hideTraceback.enabled": "true",
        }
    return settings


def _environment_for_java(local: bool, quiet: bool, fast_start: bool) -> dict[str, str]:
    """What the process that becomes Spark's driver is to find in its environment."""
    from pyspark import SparkContext

    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        return {}  # it runs already
    java = find_java()
    added = {"JAVA_HOME": str(_java_home(java, quiet))}
    # Workers are started by it, and what they are sent was pickled by this Python.
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        if name not in os.environ:
            added[name] = sys.executable
    if local and "SPARK_LOCAL_IP" not in os.environ:
        # Spark asks for the address of this machine's name otherwise, and does not start where it has none.
        added["SPARK_LOCAL_IP"] = "127.0.0.1"
    options: list[str] = []
    if quiet and not _has_own_logging():
        options.append(f"-Dlog4j2.configurationFile={LOGGING.as_uri()}")
    if local:
        # Java's side of Arrow looks at the bounds of every access otherwise, and for a null once more: a fifth of what
        # Java does for a row. Arrow itself says so of production.
        options += ["-Darrow.enable_unsafe_memory_access=true", "-Darrow.enable_null_check_for_get=false"]
    if fast_start:
        options.append("-XX:TieredStopAtLevel=1")
    if options:
        # Not spark.driver.extraJavaOptions, which would replace the user's, wherever those are written down.
        # Not SPARK_CONF_DIR either: it would hide the one of SPARK_HOME.
        given = os.environ.get("SPARK_SUBMIT_OPTS", "")
        added["SPARK_SUBMIT_OPTS"] = f"{shlex.join(options)} {given}".strip()
    return added


def _ignore_interrupted_counters(spark: SparkSession) -> None:
    """No traceback in this process each time that a stream is stopped.

    Java sends counters to a thread here and is cut off in the middle of it; it connects again for the next ones.
    """
    server = getattr(spark.sparkContext, "_accumulatorServer", None)
    if server is None:
        return
    report = server.handle_error

    def report_unless_cut_off(request: object, address: object) -> None:
        if not isinstance(sys.exception(), EOFError):
            report(request, address)

    server.handle_error = report_unless_cut_off


def _java_home(java: Java, quiet: bool) -> Path:
    if java.bundled or quiet:
        try:
            return launch_home(java)
        except JavaNotFound:
            if java.bundled:
                raise
    return java.home


def _has_own_logging() -> bool:
    folders = [os.environ.get("SPARK_CONF_DIR"), os.path.join(os.environ.get("SPARK_HOME", ""), "conf")]
    return any(os.path.exists(os.path.join(folder, "log4j2.properties")) for folder in folders if folder)


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """With these variables; without them again afterwards: they are Spark's, not of what the user starts next."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
