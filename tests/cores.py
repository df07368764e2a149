"""The implementations that find the records of a Kafka batch, for tests that run with each of them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

import segmentlog.speedups
from segmentlog.format import wire_conversion, wire_encode, wire_numpy, wire_records, wire_scan
from segmentlog.format.wire_records import WireRecords
from segmentlog.speedups import COMPILED, records

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = Path(segmentlog.speedups.__file__).with_name("records.py")


def load_interpreted() -> ModuleType:
    """Return the core as plain Python, also where it is compiled."""
    spec = importlib.util.spec_from_file_location(records.__name__, SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INTERPRETED: Final = load_interpreted()
WAYS: Final = ("compiled", "interpreted", "numpy")


def need_compiler() -> None:
    """Skip the test where the core is not compiled; in CI, fail."""
    if not COMPILED and not os.environ.get("CI"):
        pytest.skip("the core is not compiled here: install a C compiler and Python's headers, then reinstall")
    assert COMPILED, "CI must test the compiled core"


def use_way(way: str, patch: pytest.MonkeyPatch) -> None:
    """Make the whole package use this implementation; skip the test where the core is not compiled."""
    if way == "compiled":
        need_compiler()
    core = records if way == "compiled" else INTERPRETED
    patch.setattr(wire_scan, "core", core)
    patch.setattr(wire_encode, "core", core)
    patch.setattr(wire_encode, "COMPILED", way != "numpy")
    patch.setattr(wire_conversion, "COMPILED", way != "numpy")
    patch.setattr(wire_records, "COMPILED", way != "numpy")
    patch.setattr(wire_records, "_SCANNED_MAX", 0)


def found_by(way: str, data: bytes, size: int, count: int, last_offset_delta: int) -> WireRecords:
    """Return the records that this implementation finds, checked; raise `MalformedRecord`."""
    with pytest.MonkeyPatch.context() as patch:
        use_way(way, patch)
        kind = wire_numpy.NumpyRecords if way == "numpy" else wire_scan.ScannedRecords
        found = kind(data, size, count, last_offset_delta)
        return found


def build_core(
    folder: Path, *, change: tuple[str, str] | None = None, before: Callable[[], object] | None = None, **variables: str
) -> Path:
    """Compile a copy of the core in ``folder`` with setup.py, and return the library.

    ``change`` replaces a part of the source, ``variables`` are set in the environment, and ``before`` is called once
    the sources are copied. Raise FileNotFoundError if nothing was compiled.
    """
    package = folder / "segmentlog" / "speedups"
    shutil.copytree(SOURCE.parent, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (package.parent / "__init__.py").touch()
    shutil.copy(ROOT / "setup.py", folder)
    if change is not None:
        text = (package / "records.py").read_text()
        assert change[0] in text
        (package / "records.py").write_text(text.replace(*change))
    if before is not None:
        before()
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for library in package.glob("*.so"):
        return library
    raise FileNotFoundError("nothing was compiled")
