"""The ways in which the records of a Kafka batch are found here, for tests that go through all of them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

import segmentlog.speedups
from segmentlog.format import wire_numpy, wire_records, wire_scan
from segmentlog.format.wire_records import WireRecords
from segmentlog.speedups import COMPILED, records

SOURCE: Final = Path(segmentlog.speedups.__file__).with_name("records.py")


def load_interpreted() -> ModuleType:
    """Return the core as Python runs it, whether it is compiled here or not."""
    spec = importlib.util.spec_from_file_location("interpreted_records", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INTERPRETED: Final = load_interpreted()
WAYS: Final = ("compiled", "interpreted", "numpy")


def use_way(way: str, patch: pytest.MonkeyPatch) -> None:
    """Let all of the package find records in this way; skip where the core is not compiled, but not in CI."""
    if way == "compiled":
        if not COMPILED and not os.environ.get("CI"):
            pytest.skip("the core is not compiled here: install a C compiler and Python's headers, then reinstall")
        assert COMPILED, "CI must test the compiled core"
    patch.setattr(wire_scan, "core", records if way == "compiled" else INTERPRETED)
    patch.setattr(wire_records, "COMPILED", way != "numpy")
    patch.setattr(wire_records, "_SCANNED_MAX", 0)


def found_by(way: str, data: bytes, size: int, count: int, last_offset_delta: int) -> WireRecords:
    """Return records found in this way, checked; raise `MalformedRecord`."""
    with pytest.MonkeyPatch.context() as patch:
        use_way(way, patch)
        kind = wire_numpy.NumpyRecords if way == "numpy" else wire_scan.ScannedRecords
        found = kind(data, size, count, last_offset_delta)
        found.check()
        return found
