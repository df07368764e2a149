"""Start a local Spark session that starts fast, logs little and has the data source registered."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from segmentlog.errors import SegmentlogError
from segmentlog.spark.java import Java, JavaNotFound, create_launch_home, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CHECKPOINT_FILES = "spark.sql.streaming.checkpointFileManagerClass"
LOGGING = Path(__file__).with_name("log4j2.properties")


class SparkNotInstalled(SegmentlogError):
    """PySpark, or another package that the data source needs, is not installed."""

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
    """Return the Spark session of this process, with the data source ``segmentlog`` registered.

    If a session exists, return it as it is, and ignore the arguments. Otherwise start a session. If
    Java already runs (after ``SparkSession.stop()``), the new session uses it, and ``quiet`` and ``fast_start`` do not
    change it.

    Args:
        app_name: the name of the session in Spark.
        master: URL of the Spark cluster; None: ``local[*]``, every core of this machine.
        conf: Spark's settings by name; they override those of this function.
        quiet: log only warnings and errors, show no progress bar, and shorten Python's exceptions to their message.
        fast_start: start Java with its fast compiler only. For tests and scripts of seconds; long jobs run slower.

    Raises:
        SparkNotInstalled: PySpark or another package that the data source needs is not installed.
        JavaNotFound: no Java that Spark supports was found.
    """
    _require_packages()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:
        spark = SparkSession.builder.getOrCreate()
    else:
        master = master or "local[*]"
        local = master.startswith("local")
        settings = _default_settings(local, quiet) | {
            key: _format_setting(value) for key, value in (conf or {}).items()
        }
        builder = SparkSession.builder.master(master).appName(app_name)
        for key, value in settings.items():
            builder = builder.config(key, value)
        with _set_environment(_environment_for_java(local, quiet, fast_start)):
            spark = builder.getOrCreate()
        if local and _CHECKPOINT_FILES not in settings:
            _select_checkpoint_writer(spark)
        if quiet:
            _ignore_interrupted_counters(spark)
    register(spark)
    return spark


def _select_checkpoint_writer(spark: SparkSession) -> None:
    """Select a checkpoint writer that starts fewer processes.

    The PySpark package has no native Hadoop library. Without it, the default writer starts twenty processes for each
    micro-batch to examine links. This writer starts four, and also writes to a temporary file and renames it.
    """
    java = spark._jvm
    assert java is not None
    for package in ("streaming.checkpointing", "streaming"):  # the package name differs between versions of Spark
        name = f"org.apache.spark.sql.execution.{package}.FileSystemBasedCheckpointFileManager"
        try:
            java.java.lang.Class.forName(name)
        except Exception:  # py4j wraps Java's ClassNotFoundException
            continue
        spark.conf.set(_CHECKPOINT_FILES, name)
        return


def register(spark: SparkSession) -> None:
    """Register ``format("segmentlog")`` in a session that `session` did not start.

    Spark finds an installed package ``pyspark_segmentlog`` by itself, but not an editable installation: it lists the
    folders of the path, and does not use import hooks.
    """
    from pyspark_segmentlog import DefaultSource

    # Check first: Spark warns about a second registration, even of the same class.
    known = spark._jsparkSession.sessionState().dataSourceManager()
    if not known.dataSourceExists(DefaultSource.name()):
        spark.dataSource.register(DefaultSource)


def _require_packages() -> None:
    for package in ("pyspark", "pyarrow"):
        try:
            __import__(package)
        except ImportError:
            raise SparkNotInstalled(package) from None


def _format_setting(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---------------------------------------------------------------- settings


def _default_settings(local: bool, quiet: bool) -> dict[str, str]:
    settings = {
        "spark.sql.session.timeZone": "UTC",
        # Convert column by column in toPandas and createDataFrame.
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # The default provider does not support transformWithState.
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
    }
    if local:
        settings |= {
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            # The default is 200; starting an empty task costs as much as starting a full task.
            "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
        }
    if quiet:
        settings |= {
            "spark.ui.showConsoleProgress": "false",
            # An error of this library is a sentence for its user; the worker's traceback adds nothing to it.
            "spark.sql.execution.pyspark.udf.hideTraceback.enabled": "true",
        }
    return settings


def _environment_for_java(local: bool, quiet: bool, fast_start: bool) -> dict[str, str]:
    """Return the environment variables to add for the Java process of Spark's driver."""
    from pyspark import SparkContext

    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        return {}  # Java already runs
    java = find_java()
    added = {"JAVA_HOME": str(_choose_java_home(java, quiet))}
    # Spark starts its workers with this executable. It must be this Python, which pickles the tasks.
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        if name not in os.environ:
            added[name] = sys.executable
    if local and "SPARK_LOCAL_IP" not in os.environ:
        # Otherwise Spark resolves the name of this machine, and does not start if the name has no address.
        added["SPARK_LOCAL_IP"] = "127.0.0.1"
    options: list[str] = []
    if quiet and not _has_own_logging():
        options.append(f"-Dlog4j2.configurationFile={LOGGING.as_uri()}")
    if local:
        # Otherwise Arrow's Java code checks the bounds and nulls of every access, a fifth of Java's time for a row.
        # Arrow's documentation recommends both settings for production.
        options += ["-Darrow.enable_unsafe_memory_access=true", "-Darrow.enable_null_check_for_get=false"]
    if fast_start:
        options.append("-XX:TieredStopAtLevel=1")
    if options:
        # Rejected: spark.driver.extraJavaOptions, which would replace the user's options in any configuration file.
        # Rejected: SPARK_CONF_DIR, which would hide the configuration folder of SPARK_HOME.
        given = os.environ.get("SPARK_SUBMIT_OPTS", "")
        added["SPARK_SUBMIT_OPTS"] = f"{shlex.join(options)} {given}".strip()
    return added


def _ignore_interrupted_counters(spark: SparkSession) -> None:
    """Suppress the traceback that this process prints when a stream is stopped.

    Stopping a stream interrupts the connection on which Java sends counters to this process. Java reconnects for the
    next counters.
    """
    server = getattr(spark.sparkContext, "_accumulatorServer", None)
    if server is None:
        return
    report = server.handle_error

    def report_unless_disconnected(request: object, address: object) -> None:
        if not isinstance(sys.exception(), EOFError):
            report(request, address)

    server.handle_error = report_unless_disconnected


def _choose_java_home(java: Java, quiet: bool) -> Path:
    if java.bundled or quiet:
        try:
            return create_launch_home(java)
        except JavaNotFound:
            if java.bundled:
                raise
    return java.home


def _has_own_logging() -> bool:
    folders = [os.environ.get("SPARK_CONF_DIR"), os.path.join(os.environ.get("SPARK_HOME", ""), "conf")]
    return any(os.path.exists(os.path.join(folder, "log4j2.properties")) for folder in folders if folder)


@contextmanager
def _set_environment(added: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment inside the block, and restore it after.

    The variables are for Spark only, not for programs that the user starts later.
    """
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
