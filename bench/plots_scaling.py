"""Plots of how things scale: a figure for each axis, a panel for each curve, with what it shows above it."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import Machine
from bench.plots import Figure
from bench.scaling_curves import AXES, LOG_SIZE, PARTITIONS, PROCESSES, RECORD_SIZE, Curve, ScalingRow, curves

_COLOUR, _BEND_COLOUR, _GREY = "#0072b2", "#d55e00", "#777777"
_COLUMNS = 3
_TITLE_WIDTH = 46
_LOG_DECADES = 1.0
"""A value axis is logarithmic when its curve spans more than this."""

_HEADLINES = {
    LOG_SIZE: ("append rate", "records/s"),
    PARTITIONS: ("append rate, each in turn", "records/s"),
    RECORD_SIZE: ("append, LZ4", "MB/s"),
    PROCESSES: ("readers, one partition", "records/s"),
}
"""The curve that a figure's title tells of."""

_LABELS = {
    LOG_SIZE: "size of the log on disk",
    PARTITIONS: "partitions of the topic",
    RECORD_SIZE: "size of a record",
    PROCESSES: "processes",
}


def plot_scaling(rows: Sequence[ScalingRow], machine: Machine, folder: Path) -> list[Figure]:
    """Write a PNG for each axis that ``rows`` have points of."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [curve for curve in curves(rows) if curve.is_told]
    figures = []
    for axis in AXES:
        own = [curve for curve in found if curve.axis == axis]
        if own:
            figures.append(_plot(own, machine, folder))
    return figures


def _plot(own: list[Curve], machine: Machine, folder: Path) -> Figure:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axis = own[0].axis
    lines = math.ceil(len(own) / _COLUMNS)
    figure, panels = pyplot.subplots(lines, _COLUMNS, figsize=(4.3 * _COLUMNS, 2.9 * lines + 0.6), squeeze=False)
    for panel in panels.flat[len(own) :]:
        panel.set_axis_off()
    for panel, curve in zip(panels.flat, own, strict=False):
        _draw(panel, curve)
    headline = next((curve for curve in own if (curve.figure, curve.unit) == _HEADLINES[axis]), own[0])
    figure.suptitle(headline.title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    where = f"{machine.cpu}, {machine.cores} cores; medians, and the range over rounds; broken line: leaves the flat"
    figure.text(0.01, 0.005, where, fontsize=8, color=_GREY)
    figure.tight_layout(rect=(0, 0.02, 1, 0.98))
    file = f"scaling-{axis.replace(' ', '-')}.png"
    figure.savefig(folder / file, dpi=110)
    pyplot.close(figure)
    return Figure(file=file, title=headline.title)


def _draw(panel: Any, curve: Curve) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    at = [row.at for row in curve.rows]
    factor, unit = _scaled(curve)
    values = [row.value * factor for row in curve.rows]
    below = [(row.value - row.low) * factor for row in curve.rows]
    above = [(row.high - row.value) * factor for row in curve.rows]
    panel.errorbar(at, values, yerr=[below, above], color=_COLOUR, marker="o", markersize=4, capsize=3, linewidth=1.5)
    if curve.leaves is not None:
        panel.axvline(curve.leaves, color=_BEND_COLOUR, linestyle="--", linewidth=1)
    panel.set_xscale("log")
    panel.set_xticks(at, [row.at_text for row in curve.rows], fontsize=8)
    panel.set_xticks([], minor=True)
    panel.set_xlabel(_LABELS[curve.axis], fontsize=8)
    if max(values) > min(values) * 10**_LOG_DECADES:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    else:
        panel.set_ylim(0, max(row.high for row in curve.rows) * factor * 1.15)
    panel.set_ylabel(unit, fontsize=8)
    panel.tick_params(axis="y", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    # A number stays with its unit.
    title = re.sub(r"(?<=\d) (?=[A-Za-z%])", "\N{NO-BREAK SPACE}", curve.title)
    panel.set_title(textwrap.fill(title, _TITLE_WIDTH), fontsize=8.5, loc="left")


def _scaled(curve: Curve) -> tuple[float, str]:
    """Rates in thousands or millions of records a second, so that ticks are short."""
    if curve.unit != "records/s":
        return 1.0, curve.unit
    if max(row.value for row in curve.rows) >= 1e6:
        return 1e-6, "million records/s"
    return 1e-3, "thousand records/s"
