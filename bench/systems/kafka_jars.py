"""Kafka itself, as it is published for Maven, with whatever it needs to run: fetched once, kept in the cache.

``python -m bench.systems.kafka_jars`` fetches it beforehand.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.systems.base import Unavailable
from bench.systems.servers import cache_folder

KAFKA_VERSION = "4.1.1"
_LEAST_JAVA = 17

# slf4j-simple: without a backend Kafka does not say why it does not start.
_POM = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>segmentlog.bench</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{KAFKA_VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.slf4j</groupId>
      <artifactId>slf4j-simple</artifactId>
      <version>1.7.36</version>
    </dependency>
  </dependencies>
</project>
"""

JVM_FLAGS = (
    "-Xms1G", "-Xmx1G", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent", "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
)  # fmt: skip
"""As kafka-server-start.sh and kafka-run-class.sh set them, but for what is logged: errors alone."""


def check_available(*programs: str) -> None:
    """Raise `Unavailable` unless Java and ``programs`` are there, and the jars or the means to fetch them."""
    if (java := java_version()) < _LEAST_JAVA:
        found = f"Java {java} is too old" if java else "Java is not installed"
        raise Unavailable(
            f"{found}, Kafka {KAFKA_VERSION} needs {_LEAST_JAVA}: apt-get install openjdk-17-jdk-headless"
        )
    for program in programs:
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not installed: apt-get install openjdk-17-jdk-headless")
    if not jars_folder().is_dir() and shutil.which("mvn") is None:
        raise Unavailable(
            f"Kafka's jars are not in {jars_folder()}, and Maven, which would fetch them, is not installed:"
            " apt-get install maven"
        )


@functools.cache
def java_version() -> int:
    """The major version of the Java on PATH; 0 without one."""
    if shutil.which("java") is None:
        return 0
    said = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else 0


def jars_folder() -> Path:
    """Where the jars are, once they were fetched."""
    return cache_folder() / f"kafka-{KAFKA_VERSION}"


def fetch_jars() -> str:
    """The class path of Kafka; what is not in the cache is fetched, which takes a minute."""
    folder = jars_folder()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as temporary:
            project = Path(temporary)
            (project / "pom.xml").write_text(_POM)
            command = ["mvn", "-B", "-q", "dependency:copy-dependencies", "-DincludeScope=runtime",
                       "-DoutputDirectory=jars"]  # fmt: skip
            done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(
                    f"Maven could not fetch Kafka {KAFKA_VERSION}: {(done.stdout + done.stderr)[-2000:]}"
                )
            # Renamed when all are there: a folder of that name is always complete.
            os.rename(project / "jars", folder)
    return f"{folder}/*"


def main() -> int:
    """Fetch the jars, and say where they are."""
    try:
        check_available()
        fetch_jars()
    except (Unavailable, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Kafka {KAFKA_VERSION} is in {jars_folder()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
