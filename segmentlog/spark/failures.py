"""What Spark throws, as one sentence that says what went wrong."""

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


class SparkFailed(SegmentlogError):
    """A Spark job failed; the sentence is that of its cause."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return self.why


def reason_of(error: BaseException) -> str:
    """The sentence in an exception of PySpark: that of this library's error, if one is in it; else Spark's own."""
    text = str(error)
    ours = _OURS.findall(text)
    if ours:
        return str(ours[-1][1]).strip()
    lines = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
    sentence = lines[0] if lines else type(error).__name__
    return re.sub(r"^\[[A-Z_.]+\] ", "", sentence)


@contextmanager
def explained() -> Iterator[None]:
    """Within: an exception of Spark's becomes `SparkFailed`, with the first one as its cause."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise SparkFailed(reason_of(error)) from error
