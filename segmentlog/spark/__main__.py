"""``python -m segmentlog.spark java-home``: the JAVA_HOME that Spark's own programs start with.

    JAVA_HOME=$(python -m segmentlog.spark java-home) spark-submit job.py

It is the Java that `segmentlog.spark.session` would take, through a home that leaves out what that Java does not have:
see `segmentlog.spark.java`. Nothing of PySpark is loaded for it.
"""

from __future__ import annotations

import sys
import warnings

import click

from segmentlog.spark.java import JavaNotFound, find_java, launch_home

_USAGE = """\
usage: python -m segmentlog.spark java-home

prints a folder to give to Spark as JAVA_HOME, for spark-submit, pyspark and spark-sql:
    JAVA_HOME=$(python -m segmentlog.spark java-home) spark-submit job.py
"""


def main(arguments: list[str]) -> int:
    """What to exit with: 0 when a folder was printed, 1 when there is no Java, 2 for other arguments."""
    if arguments in (["--help"], ["-h"]):
        click.echo(_USAGE, nl=False)
        return 0
    if arguments != ["java-home"]:
        click.echo(_USAGE, nl=False, err=True)
        return 2
    try:
        with warnings.catch_warnings(record=True, action="always") as told:
            home = launch_home(find_java())
    except JavaNotFound as error:
        click.echo(error, err=True)
        return 1
    for warning in told:
        click.echo(warning.message, err=True)
    click.echo(home)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
