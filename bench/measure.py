"""Alternating two ways of doing the same thing, and telling what came out."""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

import segmentlog
from segmentlog.store import LogStore

Unit = Literal["records/s", "MB/s", "us", "ms", "s", "MB"]
Side = Callable[[], float]
"""Does its work once and returns a rate or a time in the row's unit."""


class RowResult(msgspec.Struct, frozen=True):
    """Medians of both sides, and the ratio ours / limit with its range over the rounds."""

    name: str
    unit: str
    ours: float
    limit: float | None
    ratio: float
    ratio_low: float
    ratio_high: float
    target: float
    target_text: str
    reached: bool
    judged_alone: bool = False
    """Whether the target is a bound of the figure itself, not of its ratio."""

    @property
    def ours_text(self) -> str:
        return quantity(self.ours, self.unit)

    @property
    def limit_text(self) -> str:
        return "" if self.limit is None else quantity(self.limit, self.unit)


def quantity(value: float, unit: str) -> str:
    """Return a figure with its unit, three digits of it."""
    if unit == "records/s":
        return f"{value / 1e6:.2f} M/s" if value >= 1e5 else f"{value / 1e3:.1f} k/s"
    return f"{value:.3g} {unit}"


_opened: list[LogStore] = []


def open_store(path: Path, **options: Any) -> LogStore:
    """Open a store for the rounds of one row. It is closed after them, before its folder is deleted."""
    store = segmentlog.open(path, **options)
    _opened.append(store)
    return store


class Row(msgspec.Struct, frozen=True):
    """One comparison: ``prepare(folder, scale)`` gives both sides, which are then run in turn.

    ``at_least`` rows want ratio >= target (rates), the others ratio <= target (times). With
    ``absolute``, or without a limit side, the target is a bound of the figure itself.
    """

    name: str
    unit: Unit
    target: float
    at_least: bool
    prepare: Callable[[Path, float], tuple[Side, Side | None]]
    absolute: bool = False

    def measure(self, folder: Path, rounds: int, scale: float) -> RowResult:
        """Run the sides in turn, ``rounds`` times after one for warming up."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pairs: list[tuple[float, float | None]] = []
        try:
            ours, limit = self.prepare(folder, scale)
            for number in range(rounds + 1):
                # Else what of the program's own objects is collected falls into one round or another, which of them the
                # number of lines imported decides: a collection takes longer than opening a store.
                gc.collect()
                pair = (ours(), limit() if limit is not None else None)
                if number:
                    pairs.append(pair)
        finally:
            while _opened:
                _opened.pop().close()
        bare = self.absolute or limit is None
        ratios = [mine if other is None else mine / other for mine, other in pairs]
        ratio = statistics.median(ratios)
        judged = statistics.median(mine for mine, _ in pairs) if bare else ratio
        sign = ">=" if self.at_least else "<="
        return RowResult(
            name=self.name,
            unit=self.unit,
            ours=statistics.median(mine for mine, _ in pairs),
            limit=None if limit is None else statistics.median(other for _, other in pairs if other is not None),
            ratio=ratio,
            ratio_low=min(ratios),
            ratio_high=max(ratios),
            target=self.target,
            target_text=f"{sign} {self.target:g}{' ' + self.unit if bare else ''}",
            reached=judged >= self.target if self.at_least else judged <= self.target,
            judged_alone=bare,
        )


def print_table(results: list[RowResult], title: str) -> None:
    """Print a table for people."""
    table = Table(title=title)
    for column, justify in (
        ("path", "left"), ("ours", "right"), ("limit", "right"), ("ratio", "right"), ("range", "right"),
        ("target", "right"), ("", "left"),
    ):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for result in results:
        reached = "reached" if result.reached else "MISSED"
        table.add_row(
            result.name,
            result.ours_text,
            result.limit_text,
            f"{result.ratio:.2f}",
            f"{result.ratio_low:.2f}-{result.ratio_high:.2f}",
            result.target_text,
            reached,
        )
    Console(width=150 if not sys.stdout.isatty() else None).print(table)
