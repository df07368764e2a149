"""How throughput, opening and memory change with the log's size, partitions, the record's size and processes.

``python -m bench.scaling`` takes some three minutes and 5 GB of disk; ``--full`` goes to 50 GB and 10,000 partitions,
``--quick`` only shows that everything works. ``--only "log size,processes"`` picks axes. What is measured where is
told in `bench.scaling_axes`, how a bend is found, and why it is there, in `bench.scaling_curves`.

Each figure is the median over rounds, with its range. Memory is RssAnon, what a process has for itself; some 20 MB
of it are Python and numpy. Writers go round in a few batches: the bench itself takes no more memory for a larger log.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from bench import machine, results
from bench.arguments import existing_folder
from bench.scaling_axes import DEFAULT, FULL, MEASURE, QUICK, NoRoom, Plan
from bench.scaling_curves import AXES, Curve, ScalingRow, bends, curves

__all__ = ["Curve", "Plan", "ScalingRow", "bends", "curves", "main", "measure"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a few megabytes and seconds; saved only with --out")
    size.add_argument("--full", action="store_true", help="up to 50 GB and 10,000 partitions: 20 minutes, 65 GB free")
    parser.add_argument("--only", default="", help="some axes, with commas between: " + ", ".join(AXES))
    parser.add_argument("--out", type=Path, help="folder for the results (default: today's below bench/results)")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="one JSON object a row, and no table")
    options = parser.parse_args()
    axes = [name.strip() for name in options.only.split(",") if name.strip()] or list(AXES)
    if unknown := [name for name in axes if name not in AXES]:
        parser.error(f"there is no axis {unknown[0]!r}; there are: {', '.join(AXES)}")
    plan = QUICK if options.quick else FULL if options.full else DEFAULT
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-scaling-", dir=options.dir))
    try:
        about = machine.describe(folder)
        rows = measure(folder, plan, axes, as_json=options.json)
    except NoRoom as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was written is removed", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not options.json:
        print_table(rows)
    # Half of the axes in place of all of them, or figures of a few megabytes, are no result to keep by default.
    if options.out or (axes == list(AXES) and not options.quick):
        settings = {**msgspec.to_builtins(plan), "axes": axes}
        out = options.out or results.default_folder()
        path = results.save(out, "scaling", about, time.monotonic() - started, settings, rows)
        print(f"written: {path}", file=sys.stderr)
    return 0


def measure(folder: Path, plan: Plan, axes: Sequence[str] = AXES, *, as_json: bool = False) -> list[ScalingRow]:
    """Measure the rows of these axes; ``folder`` is as empty afterwards as before. Raises `NoRoom`."""
    rows: list[ScalingRow] = []
    started = time.monotonic()
    for axis in axes:
        work = folder / "axis"
        work.mkdir()
        try:
            for row in MEASURE[axis](work, plan):
                rows.append(row)
                if as_json:
                    print(json.dumps(msgspec.to_builtins(row)), flush=True)
                about = f"{row.axis} {row.at_text}, {row.figure}: {row.value_text}"
                print(f"{time.monotonic() - started:6.0f} s  {about}", file=sys.stderr)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return rows


def print_table(rows: Sequence[ScalingRow]) -> None:
    """Print a table for each axis, its points as columns, and below it a description of its curves."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150 if not sys.stdout.isatty() else None)
    found = curves(rows)
    for axis in dict.fromkeys(curve.axis for curve in found):
        own = [curve for curve in found if curve.axis == axis]
        points = sorted({row.at: row.at_text for curve in own for row in curve.rows}.items())
        table = Table(title=f"segmentlog by {axis}")
        table.add_column("figure")
        for _, text in points:
            table.add_column(text, justify="right")
        for curve in own:
            values = {row.at: row.value_text for row in curve.rows}
            table.add_row(curve.figure, *(values.get(at, "") for at, _ in points))
        console.print(table)
        for curve in own:
            if curve.is_told:
                console.print(f"- {curve.text}", highlight=False)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C does it: what was started ends, and what was written goes."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
