"""The wheel is complete: without a clone, an installation runs everything, the demonstration included."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import segmentlog
from segmentlog.speedups import COMPILED

ROOT = Path(__file__).parents[1]
PACKAGES = ("segmentlog", "pyspark_segmentlog")
SOURCES = {"README.md", "LICENSE", "setup.cfg", "setup.py"}

Run = Callable[..., str]

_IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    for one in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        if not one.name.endswith(".__main__"):
            importlib.import_module(one.name)
print(*(one.__file__ for name, one in sys.modules.items() if name.partition(".")[0] in sys.argv[1:]), sep="\\n")
"""

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution and the wheel, and return their folder."""
    folder = tmp_path_factory.mktemp("wheel")
    # A build writes beside the sources and uses files that an earlier build left there, so it is done in a copy.
    without = shutil.ignore_patterns(".*", "__pycache__", "build", "*.so", "*.egg-info", "tests", "bench")
    shutil.copytree(ROOT, folder / "source", ignore=without)
    # Without isolation: setuptools and Cython are installed already, and no network is needed.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def run(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs a program of an environment with the wheel, in an empty folder."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
    (site_packages,) = home.glob("lib/python*/site-packages")
    # The environment borrows its dependencies from this one. Such folders come last, and .pth files in them are
    # ignored. So a segmentlog that is installed there, also an editable one, is not found.
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_packages / "borrowed.pth").write_text("\n".join(borrowed))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SEGMENTLOG", "PYTHON", "PYSPARK", "SPARK"))
    }
    folder = tmp_path_factory.mktemp("empty")

    def run(program: str, *arguments: str, text: str = "") -> str:
        done = subprocess.run(
            [home / "bin" / program, *arguments],
            cwd=folder, env=environment, input=text, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{program} {arguments}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    return run


def test_wheel_and_source_distribution_hold_every_file_of_the_packages(dist: Path) -> None:
    """Modules, py.typed, settings of Spark's logging; in the wheel nothing else but the compiled core."""
    there = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    assert {"segmentlog/py.typed", "segmentlog/spark/log4j2.properties", "pyspark_segmentlog/__init__.py"} <= there
    with zipfile.ZipFile(*dist.glob("*.whl")) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    compiled = {f"segmentlog/speedups/records{sysconfig.get_config_var('EXT_SUFFIX')}"} if COMPILED else set()
    assert held == there | compiled
    with tarfile.open(*dist.glob("*.tar.gz")) as source:
        assert {name.partition("/")[2] for name in source.getnames()} >= there | {
            "README.md",
            "LICENSE",
            "setup.cfg",
            "setup.py",
        }


def test_every_module_is_imported_from_the_wheel(run: Run) -> None:
    """The wheel has all modules of the clone, and none is imported from the clone."""
    files = {Path(line) for line in run("python", "-c", _IMPORT_EVERYTHING, *PACKAGES).splitlines()}
    home = Path(run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    wanted = {path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    # A compiled module has the name of its source, with another ending.
    found = {path.with_name(f"{path.name.partition('.')[0]}.py").relative_to(home) for path in files}
    assert found == {path for path in wanted if path.name != "__main__.py"}


def test_the_command_line_works(run: Run) -> None:
    """The version; a topic is made, appended to, and read."""
    assert run("segmentlog", "--version").split()[2] == segmentlog.__version__
    run("segmentlog", "create", "words")
    run("segmentlog", "produce", "words", text="one\ntwo\n")
    assert [line.split()[-1] for line in run("segmentlog", "consume", "words").splitlines()] == ["one", "two"]


def test_the_demonstration_runs(run: Run) -> None:
    """The half with Spark is left out, because it takes a minute: its modules are imported above."""
    assert "Everything held" in run("segmentlog", "demo", "--limit", "3000", "--no-spark")
