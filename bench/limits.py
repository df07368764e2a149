"""How far from the limits: each path of the engine against C code doing the same work on the same bytes.

The two are alternated within one process, several rounds; a row shows the medians, the
ratio with its range over the rounds, and what it should reach. ``python -m bench.limits``
prints a table, ``--json`` one JSON object a row; ``--only append`` picks rows by name.

Absolute figures are worth nothing on a shared machine; the ratios hold within their range.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench import limits_latency, limits_throughput, machine
from bench.arguments import existing_folder, one_or_more
from bench.measure import Row, RowResult, print_table
from bench.results import save


def rows() -> Iterator[Row]:
    """Every comparison, in the order of the table."""
    yield from limits_throughput.ROWS
    yield from limits_latency.ROWS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=one_or_more, default=5, help="rounds of alternation (default 5)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--scale", type=float, default=1.0, help="more or less work a round (default 1.0)")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder to write limits.json to (default: none is written)")
    options = parser.parse_args()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-limits-", dir=options.dir))
    results: list[RowResult] = []
    try:
        about = machine.describe(folder) if options.out else None
        for row in rows():
            if options.only not in row.name:
                continue
            print(f"{row.name} ...", file=sys.stderr, end="\r", flush=True)
            result = row.measure(folder / "row", options.rounds, options.scale)
            shutil.rmtree(folder / "row", ignore_errors=True)
            results.append(result)
            if options.json:
                print(json.dumps(msgspec.to_builtins(result)), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if about is not None:
        settings = {"rounds": options.rounds, "scale": options.scale}
        save(options.out, "limits", about, time.monotonic() - started, settings, results)
    if not options.json:
        print_table(results, "segmentlog against the limits of this machine")
    return 0


if __name__ == "__main__":
    sys.exit(main())
