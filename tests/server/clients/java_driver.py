"""Kafka's own clients, in Java: fetched by Maven and compiled once."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from server.clients.fetching import Missing, fetched
from server.clients.program import ProgramDriver

_HERE = Path(__file__).with_name("java")
_VERSION = "4.3.1"


class JavaDriver(ProgramDriver):
    """Kafka's clients for Java."""

    name = f"java {_VERSION}"

    @classmethod
    def command(cls) -> list[str]:
        return java_command("Client")


def java_command(main: str, *words: object, memory: str = "128m") -> list[str]:
    """To run one of the programs of the folder ``java``. Raises `Missing` where that cannot be."""
    # It starts in half the time where the compiler for what runs long is left out.
    settings = ["-XX:TieredStopAtLevel=1", "-Xshare:auto", f"-Xmx{memory}"]
    return ["java", *settings, "-cp", _class_path(), main, *map(str, words)]


@cache
def _class_path() -> str:
    tools = {tool: shutil.which(tool) for tool in ("java", "javac", "mvn")}
    missing = [tool for tool, path in tools.items() if path is None]
    if missing:
        raise Missing(f"Kafka's Java clients need {', '.join(missing)}")

    def make(folder: Path) -> None:
        libraries, classes = folder / "libraries", folder / "classes"
        subprocess.run(
            ["mvn", "-B", "-q", "-f", str(_HERE / "pom.xml"), "dependency:copy-dependencies",
             f"-DoutputDirectory={libraries}",
             # Java asks the system where home is, and not $HOME: of some users there is none.
             f"-Dmaven.repo.local={Path.home()}/.m2/repository"],
            check=True, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        command = ["javac", "-nowarn", "-cp", f"{libraries}/*", "-d", str(classes), *map(str, sources)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)

    sources = sorted(_HERE.glob("*.java"))
    folder = fetched("java", [_HERE / "pom.xml", *sources], make)
    return os.pathsep.join([f"{folder}/classes", f"{folder}/libraries/*"])
