"""Plots of the peers: a dot a system, ours in colour, each panel with what it shows above it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.measure import quantity
from bench.peers import PeerRow
from bench.plots import Figure, pyplot
from bench.systems.registry import OURS, OURS_ALL

_FILES = (
    ("peers-append.png", (
        ("append in batches", "never"), ("append in batches", "batch"),
        ("append singly", "never"), ("16 threads", "batch"),
    )),
    ("peers-read.png", (
        ("scan values", "never"), ("scan records", "never"),
        ("read at a random offset", "never"), ("compaction", "never"),
    )),
    ("peers-space.png", (
        ("disk for the same records", "never"), ("memory", "never"), ("open after kill -9", "never"),
    )),
)  # fmt: skip

_OURS_COLOUR, _OTHERS_COLOUR = "#0072b2", "#777777"
_TITLE_WIDTH = 56
_LESS_IS_BETTER = {"us", "ms", "MB", "bytes a record"}


def plot_peers(rows: Sequence[PeerRow], folder: Path) -> list[Figure]:
    """Write the plots that ``rows`` have something for."""
    figures = []
    for file, workloads in _FILES:
        panels = [(what, chosen) for what in workloads if len(chosen := _of(rows, *what)) > 1]
        if panels:
            figures.append(_plot(folder, file, panels))
    return figures


def _of(rows: Sequence[PeerRow], workload: str, sync: str) -> list[PeerRow]:
    """One row a system, worst first: the last is drawn at the top."""
    chosen = [
        row for row in rows
        if (row.workload, row.sync) == (workload, sync) and (row.against == OURS or row.system == row.against)
    ]  # fmt: skip
    less = bool(chosen) and chosen[0].unit in _LESS_IS_BETTER
    return sorted(chosen, key=lambda row: row.figure, reverse=less)


def _plot(folder: Path, file: str, panels: list[tuple[tuple[str, str], list[PeerRow]]]) -> Figure:
    plt = pyplot()
    columns = 2
    lines = -(-len(panels) // columns)
    tallest = max(len(chosen) for _, chosen in panels)
    figure, axes = plt.subplots(lines, columns, figsize=(11, lines * (0.28 * tallest + 1.3)), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (_, chosen) in zip(axes.flat, panels, strict=False):
        _panel(axis, chosen)
    title = _sentence(panels[0][1])
    figure.tight_layout()
    figure.savefig(folder / file, dpi=110)
    plt.close(figure)
    return Figure(file=file, title=title)


def _panel(axis: Any, rows: list[PeerRow]) -> None:
    colours = [_OURS_COLOUR if row.system in OURS_ALL else _OTHERS_COLOUR for row in rows]
    places = range(len(rows))
    figures = [row.figure for row in rows]
    axis.set_xscale("log")
    axis.hlines(places, [row.low for row in rows], [row.high for row in rows], color=colours, linewidth=2)
    axis.scatter(figures, places, color=colours, s=28, zorder=3)
    axis.set_yticks(places, [row.system for row in rows], fontsize=8)
    axis.set_xlim(min(row.low for row in rows) / 2, max(row.high for row in rows) * 6)
    for place, row in zip(places, rows, strict=True):
        axis.annotate(
            quantity(row.figure, row.unit), (row.high, place), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    axis.set_title(textwrap.fill(_sentence(rows), _TITLE_WIDTH), fontsize=9, loc="left")
    better = "less" if rows[0].unit in _LESS_IS_BETTER else "more"
    axis.set_xlabel(f"{rows[0].unit}; {better} is better; the line is the range over the rounds", fontsize=7)
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(axis="x", alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


_SYNCED = {"never": ", nothing synced", "second": ", synced once a second", "batch": ", each call synced"}


def _sentence(rows: list[PeerRow]) -> str:
    """Return a sentence about the ratios of the panel."""
    workload, sync = rows[0].workload, rows[0].sync
    what = workload[0].upper() + workload[1:]
    if "append" in workload or "threads" in workload:
        what += _SYNCED[sync]
    ratios = sorted((row.ratio, row.system) for row in rows if row.ratio is not None)
    if not ratios:
        return what
    (least, best), (most, worst) = ratios[0], ratios[-1]
    if least >= 1:
        return f"{what}: segmentlog is ahead of all, {least:.1f} ({best}) to {most:,.0f} times ({worst})"
    behind = sum(ratio < 1 for ratio, _ in ratios)
    return f"{what}: {behind} of {len(ratios)} are ahead of segmentlog, {best} by {1 / least:.1f} times"
