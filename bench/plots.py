"""What all plots share: a title that says what is seen, the machine at the foot, a file without a screen."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import msgspec

from bench.machine import Machine

_DPI = 110
_TITLE_WIDTH = 92
GREY = "#666666"


class Figure(msgspec.Struct, frozen=True):
    """A PNG of that name in the folder of the results, and what it shows, in a sentence."""

    file: str
    title: str


class PlotsUnavailable(RuntimeError):
    """matplotlib is not installed; says how to get it."""


def duration(ms: float) -> str:
    """As people say it: 85 us, 1.2 ms, 1.0 s."""
    if ms < 0.9995:
        return f"{ms * 1e3:,.0f} us"
    if ms < 999.5:
        return f"{ms:.3g} ms" if ms < 1 or ms == int(ms) else f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"
    return f"{ms / 1e3:.1f} s" if ms < 9_995 else f"{ms / 1e3:,.0f} s"


def save(figure: Any, machine: Machine, folder: Path, file: str, title: str, detail: str) -> Figure:
    """Write it with the title, the disk's own figure below it, and the machine at the foot."""
    disk = f"the disk: a write and fdatasync in {duration(machine.fdatasync_us.p50 / 1e3)} at the median"
    if not machine.is_fsync_plausible:
        disk += ", which no disk can: a cache answers"
    lines = textwrap.wrap(title, _TITLE_WIDTH)
    height_points = figure.get_size_inches()[1] * 72
    figure.text(0.012, 1 - 8 / height_points, "\n".join(lines), fontsize=12.5, fontweight="bold", va="top")
    below = 1 - (12 + 18.5 * len(lines)) / height_points
    figure.text(0.012, below, f"{detail}; {disk}", fontsize=9.5, color="#333333", va="top")
    figure.subplots_adjust(top=below - 30 / height_points)
    figure.text(0.012, 0.012, f"{machine.cpu}, {machine.cores} cores; {machine.file_system}", fontsize=8, color=GREY)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / file, dpi=_DPI, metadata={"Title": title})
    pyplot().close(figure)
    return Figure(file, title)


def pyplot() -> Any:
    """pyplot, drawing to files: there may be no screen."""
    try:
        import matplotlib
    except ImportError:
        raise PlotsUnavailable("plots need matplotlib: pip install '.[bench]' in a clone of segmentlog") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
