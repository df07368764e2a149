"""Run mutated batches through a core that was compiled with sanitizers: ``sanitized_core.py LIBRARY SEED COUNT``.

The program runs in a process without numpy: AddressSanitizer must be loaded first, and ends the process at the first
fault.
"""

from __future__ import annotations

import importlib.util
import sys
from array import array
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from core_batches import random_columns, random_deltas, random_payload


def load(path: str) -> ModuleType:
    """Return the module of that library."""
    spec = importlib.util.spec_from_file_location("segmentlog.speedups.records", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table_of(core: ModuleType, count: int) -> Any:
    """Return an int64 table of exactly the size for ``count`` records."""
    numbers = memoryview(array("q", bytes(8 * core.ROW_COUNT * count)))
    return numbers.cast("B").cast("q", (core.ROW_COUNT, count)) if count else None


def run(core: ModuleType, seed: int, count: int) -> tuple[int, int]:
    """Return how many payloads were accepted and how many columns were encoded."""
    rng = Random(seed)
    accepted = encoded = 0
    for _ in range(count):
        payload = random_payload(rng)
        table = table_of(core, payload.count)
        if core.scan_records(*payload, table)[0] == 0 and table is not None:
            accepted += 1
            core.cut_field(payload.data, table, core.KEY, 0, payload.count)
            core.cut_field(payload.data, table, core.VALUE, 0, payload.count)
            core.cut_headers(payload.data, table, 0, payload.count)
        columns = random_columns(rng)
        timestamps, offsets = random_deltas(rng, columns.count)
        try:
            core.encode_columns(*columns, array("q", timestamps), array("q", offsets))
            encoded += 1
        except ValueError:
            continue
    return accepted, encoded


if __name__ == "__main__":
    library, seed, count = sys.argv[1:]
    print(*run(load(library), int(seed), int(count)))
