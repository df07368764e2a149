"""Kafka's own clients, in Java: fetched by Maven and compiled once."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from server.clients.fetching import Missing, fetched
from server.clients.program import ProgramDriver

_HERE = Path(__file__).with_name("java")
_VERSION = "4.4.0"
MOVED = _HERE / "moved"
"""Additional files that programs of Kafka 4.3 need to run with 4.4."""


class JavaDriver(ProgramDriver):
    """Kafka's clients for Java."""

    name = f"java {_VERSION}"

    @classmethod
    def command(cls) -> list[str]:
        return java_command("Client")


def java_command(
    main: str, *words: object, memory: str = "128m", project: Path = _HERE, more: Sequence[Path] = (),
    options: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Return a command that runs ``main``: a program of a folder with a ``pom.xml``, or of the packages in it.

    ``more``: further folders of that kind. Raises `Missing` if it is not available.
    """
    # Without the optimizing compiler, which pays off in long runs only, it starts in half the time.
    settings = ["-XX:TieredStopAtLevel=1", "-Xshare:auto", f"-Xmx{memory}", *options]
    return ["java", *settings, "-cp", os.pathsep.join(map(class_path, (project, *more))), main, *map(str, words)]


@cache
def class_path(project: Path = _HERE) -> str:
    """Return the class path of a folder with a ``pom.xml``. Packages are downloaded and programs compiled once. Raise
    `Missing` if that is impossible.

    Raises `Missing` where that cannot be.
    """
    tools = {tool: shutil.which(tool) for tool in ("java", "javac", "mvn")}
    missing = [tool for tool, path in tools.items() if path is None]
    if missing:
        raise Missing(f"what Kafka has for Java needs {', '.join(missing)}")

    def make(folder: Path) -> None:
        libraries, classes = folder / "libraries", folder / "classes"
        subprocess.run(
            ["mvn", "-B", "-q", "-f", str(project / "pom.xml"), "dependency:copy-dependencies",
             f"-DoutputDirectory={libraries}",
             # Java reads the home folder from the user database, not from $HOME, and some users have none there.
             f"-Dmaven.repo.local={Path.home()}/.m2/repository"],
            check=True, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if not sources:
            return
        command = ["javac", "-nowarn", "-cp", f"{libraries}/*", "-d", str(classes), *map(str, sources)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)

    sources = sorted(project.glob("*.java"))
    folder = fetched(project.name, [project / "pom.xml", *sources], make)
    return os.pathsep.join([f"{folder}/classes", f"{folder}/libraries/*"])
