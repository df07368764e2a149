"""Turn exceptions of Spark into one sentence that says what failed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from segmentlog.errors import SegmentlogError

_OURS: Final = re.compile(r"(?:segmentlog|pyspark_segmentlog)[\w.]*\.(\w+): (.*)")
_NOISE: Final = re.compile(
    r"^\s*(at |SQLSTATE|File |Traceback|org\.apache|java\.|\.\.\.|== SQL ==|Caused by: *$)|^\s*$"
)
_CONDITION: Final = re.compile(r"\[[A-Z0-9_.]+\] ")
_STATE: Final = re.compile(r",? ?SQLSTATE: \w+;?")
_WRAPPING: Final = re.compile(
    r"^(?:An error occurred while calling [^\n]*\s*: |Query \[id = [^\]]*\] terminated with exception: )"
)
_CLASS: Final = re.compile(r"^(?:[a-z]\w*\.)+\w*(?:Exception|Error): ")
_LOGGERS: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")


class SparkFailed(SegmentlogError):
    """A Spark job failed. The message is that of the exception that caused the failure."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return self.why


def reason_of(error: BaseException) -> str:
    """Return the message in an exception of PySpark: of this library's error if it wraps one, else of Spark."""
    text = _CLASS.sub("", _WRAPPING.sub("", str(error).strip()))
    ours = _OURS.findall(text)
    if ours:
        return str(ours[-1][1]).strip()
    lines = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
    sentence = lines[0] if lines else type(error).__name__
    return _STATE.sub("", _CONDITION.sub("", sentence)).strip().rstrip(";")


@contextmanager
def explain_spark_errors() -> Iterator[None]:
    """Turn exceptions of Spark inside the block into `SparkFailed`, with the original as the cause."""
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
        from pyspark.logger import PySparkLogger
    except ImportError:  # `session` reports the missing package
        yield
        return

    # PySpark also logs some exceptions to stderr, with Java's stack trace, when it creates them.
    silenced = [logger for logger in map(PySparkLogger.getLogger, _LOGGERS) if not logger.disabled]
    for logger in silenced:
        logger.disabled = True
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise SparkFailed(reason_of(error)) from error
    finally:
        for logger in silenced:
            logger.disabled = False
