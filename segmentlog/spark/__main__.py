"""``python -m segmentlog.spark java-home``: print a JAVA_HOME for Spark's own programs.

    JAVA_HOME=$(python -m segmentlog.spark java-home) spark-submit job.py

`segmentlog.spark.session` would use the same Java, through the same folder: see `segmentlog.spark.java`. The command
does not load PySpark.
"""

from __future__ import annotations

import sys
import warnings

import click

from segmentlog.spark.java import JavaNotFound, create_launch_home, find_java

_USAGE = """\
usage: python -m segmentlog.spark java-home

prints a folder to give to Spark as JAVA_HOME, for spark-submit, pyspark and spark-sql:
    JAVA_HOME=$(python -m segmentlog.spark java-home) spark-submit job.py
"""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status.

    0: a folder was printed. 1: no Java was found. 2: the arguments are wrong.
    """
    if arguments in (["--help"], ["-h"]):
        click.echo(_USAGE, nl=False)
        return 0
    if arguments != ["java-home"]:
        click.echo(_USAGE, nl=False, err=True)
        return 2
    try:
        with warnings.catch_warnings(record=True, action="always") as told:
            home = create_launch_home(find_java())
    except JavaNotFound as error:
        click.echo(error, err=True)
        return 1
    for warning in told:
        click.echo(warning.message, err=True)
    click.echo(home)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
