"""Where results are kept: a folder for each day and machine, with a JSON file for each bench.

``bench/results/2026-11-21-amd-epyc-2-cores/`` holds ``fsync.json``, ``limits.json``, ``scaling.json`` and
``peers.json`` (what was measured, and with what command), and ``README.md`` with its plots: the report,
which is made from those files alone (`bench.report`).
"""

from __future__ import annotations

import datetime
import os
import shlex
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.machine import Machine, machine_name

_Row = TypeVar("_Row")

RESULTS = Path(__file__).parent / "results"


class Measured(msgspec.Struct, frozen=True):
    """One bench's result: its rows as the bench itself defines them, and what they depend on.

    ``settings`` are the bench's options, so that a report can say sizes and rounds.
    """

    bench: str
    date: str
    command: str
    machine: Machine
    seconds: float
    settings: dict[str, Any]
    rows: list[Any]


def default_folder() -> Path:
    """Today's folder for this machine."""
    return RESULTS / f"{datetime.date.today().isoformat()}-{machine_name()}"


def save(folder: Path, bench: str, machine: Machine, seconds: float, settings: dict[str, Any], rows: list[Any]) -> Path:
    """Write ``folder/bench.json``; an older one is replaced whole."""
    measured = Measured(
        bench=bench,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        command=_command(bench),
        machine=machine,
        seconds=round(seconds, 1),
        settings=settings,
        rows=rows,
    )
    return replace(folder, measured)


def _command(bench: str) -> str:
    """Return the command that repeats the measurement, without the folder for results."""
    arguments = sys.argv[1:]
    for at, argument in enumerate(arguments):
        if argument == "--out" or argument.startswith("--out="):
            del arguments[at : at + (2 if argument == "--out" else 1)]
            break
    return shlex.join(["python", "-m", f"bench.{bench}", *arguments])


def replace(folder: Path, measured: Measured) -> Path:
    """Write ``folder/bench.json``, as it is given."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{measured.bench}.json"
    temporary = path.with_suffix(".json.new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
    os.replace(temporary, path)
    return path


def load(folder: Path, bench: str) -> Measured | None:
    """Return the saved results of that bench, or None if it was not run."""
    try:
        return msgspec.json.decode((folder / f"{bench}.json").read_bytes(), type=Measured)
    except FileNotFoundError:
        return None


def load_rows(measured: Measured, row: type[_Row]) -> list[_Row]:
    """Its rows as the struct they were."""
    return msgspec.convert(measured.rows, type=list[row])  # type: ignore[valid-type]
