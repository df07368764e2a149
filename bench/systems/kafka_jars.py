"""Kafka itself, as it is published for Maven, with whatever it needs to run: fetched once, kept in the cache.

``python -m bench.systems.kafka_jars`` fetches beforehand what `bench.peers` takes, and with ``--server`` what
`bench.server` does.
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

import msgspec

from bench.systems.base import Unavailable
from bench.systems.servers import cache_folder

KAFKA_VERSION = "4.4.0"
_LEAST_JAVA = 17


class Release(msgspec.Struct, frozen=True):
    """A version of Kafka, and which of its parts are wanted."""

    version: str
    artifacts: tuple[str, ...] = ("kafka_2.13",)
    part: str = ""
    """Of the folder's name, where there is another one of that version."""


ENGINE = Release(KAFKA_VERSION)
"""What the log is compared with; the driver over its log classes is compiled against these."""
SERVER = Release(KAFKA_VERSION, ("kafka_2.13", "kafka-tools"), "-server")
"""What the server is compared with, and Kafka's own tools for measuring."""

STREAMS = Release(KAFKA_VERSION, ("kafka-streams",), "-streams")
"""What Kafka Streams applications run with."""

# slf4j-simple: without a backend Kafka does not say why it does not start.
_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>segmentlog.bench</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <dependencies>
{wanted}
    <dependency>
      <groupId>org.slf4j</groupId>
      <artifactId>slf4j-simple</artifactId>
      <version>1.7.36</version>
    </dependency>
  </dependencies>
</project>
"""
_DEPENDENCY = """\
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>{artifact}</artifactId>
      <version>{version}</version>
    </dependency>"""

JVM_FLAGS = (
    "-Xms1G", "-Xmx1G", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent", "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
)  # fmt: skip
"""As kafka-server-start.sh and kafka-run-class.sh set them, but for what is logged: errors alone."""


def check_available(*programs: str, release: Release = ENGINE) -> None:
    """Raise `Unavailable` unless Java and ``programs`` are there, and the jars or the means to fetch them."""
    if (java := java_version()) < _LEAST_JAVA:
        found = f"Java {java} is too old" if java else "Java is not installed"
        raise Unavailable(
            f"{found}, Kafka {release.version} needs {_LEAST_JAVA}: apt-get install openjdk-17-jdk-headless"
        )
    for program in programs:
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not installed: apt-get install openjdk-17-jdk-headless")
    if not jars_folder(release).is_dir() and shutil.which("mvn") is None:
        raise Unavailable(
            f"Kafka's jars are not in {jars_folder(release)}, and Maven, which would fetch them, is not installed:"
            " apt-get install maven"
        )


@functools.cache
def java_version() -> int:
    """Return the major version of the Java on PATH; 0 without one."""
    if shutil.which("java") is None:
        return 0
    said = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else 0


def jars_folder(release: Release = ENGINE) -> Path:
    """Where the jars are, once they were fetched."""
    return cache_folder() / f"kafka{release.part}-{release.version}"


def fetch_jars(release: Release = ENGINE) -> str:
    """Return the class path of Kafka. Jars that are not in the cache are downloaded, which takes a minute."""
    folder = jars_folder(release)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as temporary:
            project = Path(temporary)
            wanted = [_DEPENDENCY.format(artifact=name, version=release.version) for name in release.artifacts]
            (project / "pom.xml").write_text(_POM.format(wanted="\n".join(wanted)))
            command = ["mvn", "-B", "-q", "dependency:copy-dependencies", "-DincludeScope=runtime",
                       "-DoutputDirectory=jars"]  # fmt: skip
            done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(
                    f"Maven could not fetch Kafka {release.version}: {(done.stdout + done.stderr)[-2000:]}"
                )
            # Renamed when all are there: a folder of that name is always complete.
            os.rename(project / "jars", folder)
    return f"{folder}/*"


def main() -> int:
    """Fetch the jars, and say where they are."""
    release = SERVER if "--server" in sys.argv[1:] else ENGINE
    try:
        check_available(release=release)
        fetch_jars(release)
    except (Unavailable, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Kafka {release.version} is in {jars_folder(release)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
