"""Plots of the fsync bench: rows in, PNG files out, each with a title that is computed from those rows.

Colours are those of Okabe and Ito, which any kind of colour blindness tells apart, two of them darker so that text
in them can be read; lines are named where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.plots import GREY, Figure, duration, pyplot, save

if TYPE_CHECKING:
    from bench.fsync_cells import FsyncRow
    from bench.machine import Machine

_COLOURS = {
    "always": "#0072B2",
    "10ms": "#009E73",
    "1000ms": "#D55E00",
    "1000records": "#B5528F",
    "1MiB": "#B8860B",
    "never": "#000000",
}
_MARKER_SIZES = (4.0, 6.0, 8.5, 11.5)
_RECORD_BYTES = 100
_USUAL_BATCH = 100


def plot_fsync(rows: list[FsyncRow], machine: Machine, folder: Path) -> list[Figure]:
    """Draw what the rows are enough for: risk, latency, writers. Raises `PlotsUnavailable`."""
    pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    figures = [draw(rows, machine, folder) for draw in (_plot_risk, _plot_latency, _plot_writers)]
    return [figure for figure in figures if figure is not None]


# ---------------------------------------------------------------- throughput against risk


def _plot_risk(rows: Sequence[FsyncRow], machine: Machine, folder: Path) -> Figure | None:
    shown = _of_one_writer(rows)
    policies = _policies(shown)
    if not shown:
        return None
    title = risk_title(shown)
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 5.9), sharey=True)
    sides: tuple[tuple[Any, str, Callable[[FsyncRow], float], str], ...] = (
        (axes[0], "ms", _ms_at_risk, "oldest acknowledged record at risk, at most"),
        (axes[1], "records", lambda row: float(row.records_at_risk_max), "acknowledged records at risk, at most"),
    )
    for axis, unit, risk, label in sides:
        scale = _RiskScale({policy: [risk(row) for row in _of(shown, policy)] for policy in policies})
        scale.draw(axis, unit, label)
        for policy in policies:
            line = sorted(_of(shown, policy), key=lambda row: row.batch_records)
            xs = [scale.at(policy, risk(row)) for row in line]
            ys = [row.records_per_s for row in line]
            axis.plot(xs, ys, color=_COLOURS.get(policy, GREY), linewidth=1.6, zorder=3)
            for x, y, row in zip(xs, ys, line, strict=True):
                size = _marker_size(row.batch_records, shown)
                axis.plot([x], [y], "o", color=_COLOURS.get(policy, GREY), markersize=size, zorder=4, mec="white")
        axis.set_yscale("log")
        axis.grid(True, which="major", color="#e4e4e4", linewidth=0.8)
        _label_lines(axis, shown, policies, scale, risk)
    axes[0].set_ylabel("records/s")
    _format_counts(axes[0].yaxis)
    batches = sorted({row.batch_records for row in shown})
    handles = [
        plt.Line2D(
            [], [], marker="o", linestyle="", color=GREY, markersize=_marker_size(batch, shown), label=f"{batch:,}"
        )
        for batch in batches
    ]
    legend = figure.legend(
        handles=handles, loc="lower right", ncol=len(handles), frameon=False, fontsize=9, bbox_to_anchor=(0.99, 0.0),
        title="records an append", title_fontsize=9, handletextpad=0.2, columnspacing=1.2,
    )  # fmt: skip
    legend.set_in_layout(False)
    figure.subplots_adjust(left=0.085, right=0.985, bottom=0.2, wspace=0.06)
    return save(figure, machine, folder, "fsync-risk.png", title, "records of 100 B, one writer")


def risk_title(shown: Sequence[FsyncRow]) -> str:
    """Return the part of the throughput of `never` that the policies reach, and their risk, at the usual batch size."""
    batch = _usual_batch(shown)
    at = {row.policy: row for row in shown if row.batch_records == batch}
    ceiling = at.get("never")
    parts: list[str] = []
    for policy in ("1000ms", "10ms", "always"):
        if (row := at.get(policy)) is None:
            continue
        gives = f"{row.records_per_s / 1e3:,.0f} k records/s"
        if ceiling is not None:
            gives = _percent(row.records_per_s / ceiling.records_per_s)
            if not parts:
                gives += " of the throughput of never"
        risks = f"risked {_ms_text(row)}"
        if not row.is_whole_interval_seen:
            risks += f" in only {duration(row.seconds * 1000)}"
        parts.append(f"{policy} gave {gives} and {risks}" if not parts else f"{policy} {gives} and {risks}")
    if not parts:
        row = max(shown, key=lambda row: row.records_per_s)
        return f"{row.policy} gave up to {row.records_per_s / 1e3:,.0f} k records/s"
    return "; ".join(parts) + f" ({_records(batch)} an append)"


def _ms_text(row: FsyncRow) -> str:
    if not row.records_at_risk_max:
        return "nothing"
    # Seen in single samples only: it lived for less than the time between two of them.
    return f"up to {duration(row.ms_at_risk_max)}" if row.ms_at_risk_max else f"under {duration(row.sample_gap_ms_max)}"


def _ms_at_risk(row: FsyncRow) -> float:
    """Half an interval of the sampler where there was something for less than one; 0 only where there was nothing."""
    return max(row.ms_at_risk_max, 0.5) if row.records_at_risk_max else 0.0


class _RiskScale:
    """A logarithmic axis, in decades, with a place for nothing before it and one for `never` behind it.

    Under `never` what a cell finds is how long the cell was, and no property of the policy.
    """

    def __init__(self, risks: dict[str, list[float]]) -> None:
        some = [risk for policy, found in risks.items() if policy != "never" for risk in found if risk > 0]
        self.low = math.floor(math.log10(min(some))) if some else 0
        self.high = max(math.ceil(math.log10(max(some))), self.low + 1) if some else 1
        gap = (self.high - self.low) * 0.19 + 0.1
        self.nothing = self.low - gap
        self.unbounded = self.high + gap
        self._margin = gap * 0.75
        # Side by side, as they would hide one another.
        safe = [policy for policy, found in risks.items() if policy != "never" and 0 in found]
        self._aside = {policy: (at - (len(safe) - 1) / 2) * gap * 0.25 for at, policy in enumerate(safe)}

    def at(self, policy: str, risk: float) -> float:
        if policy == "never":
            return self.unbounded
        return math.log10(risk) if risk > 0 else self.nothing + self._aside[policy]

    def draw(self, axis: Any, unit: str, label: str) -> None:
        decades = range(self.low, self.high + 1)
        name = (lambda decade: duration(10.0**decade)) if unit == "ms" else (lambda decade: _count(10**decade))
        axis.set_xticks(
            [self.nothing, *decades, self.unbounded], ["nothing", *map(name, decades), "until the\nOS writes"]
        )
        axis.set_xlim(self.nothing - self._margin, self.unbounded + self._margin)
        for edge in (self.low - self._margin / 3, self.high + self._margin / 3):
            axis.axvline(edge, color="#bbbbbb", linewidth=0.8, linestyle=(0, (2, 3)))
        axis.set_xlabel(label)


def _label_lines(
    axis: Any, shown: Sequence[FsyncRow], policies: Sequence[str], scale: _RiskScale, risk: Callable[[FsyncRow], float]
) -> None:
    """Each policy's name below the first point of its line, or as much further below as others leave room."""
    first = {policy: min(_of(shown, policy), key=lambda row: row.batch_records) for policy in policies}
    low, high = min(row.records_per_s for row in shown), max(row.records_per_s for row in shown)
    axis.set_ylim(low / 3.2, high * 1.6)
    axis.figure.canvas.draw()
    per_point = axis.figure.dpi / 72
    taken: list[tuple[float, float, float]] = []
    for policy in sorted(policies, key=lambda policy: -first[policy].records_per_s):
        x = scale.at(policy, risk(first[policy]))
        at_x, at_y = axis.transData.transform((x, first[policy].records_per_s)) / per_point
        half = len(policy) * 3.4 + 3
        top = at_y - 7
        while any(abs(at_x - other_x) < half + other and abs(top - other_y) < 12 for other_x, other, other_y in taken):
            top -= 3
        taken.append((at_x, half, top))
        axis.annotate(
            policy, (x, first[policy].records_per_s), xytext=(0, top - at_y), textcoords="offset points", ha="center",
            va="top", color=_COLOURS.get(policy, GREY), fontsize=9.5, fontweight="bold", zorder=5,
        )  # fmt: skip


def _marker_size(batch: int, shown: Sequence[FsyncRow]) -> float:
    order = sorted({row.batch_records for row in shown}).index(batch)
    return _MARKER_SIZES[min(order, len(_MARKER_SIZES) - 1)]


# ---------------------------------------------------------------- latency


def _plot_latency(rows: Sequence[FsyncRow], machine: Machine, folder: Path) -> Figure | None:
    one_writer = _of_one_writer(rows)
    if not one_writer:
        return None
    batch = _usual_batch(one_writer)
    shown = [row for row in one_writer if row.batch_records == batch]
    policies = _policies(shown)
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(11, 4.6))
    for place, policy in enumerate(reversed(policies)):
        row = next(row for row in shown if row.policy == policy)
        figures = (row.append_us.p50, row.append_us.p99, row.append_us.p999, row.append_us.max)
        colour = _COLOURS.get(policy, GREY)
        axis.plot(figures, [place] * 4, color=colour, linewidth=1.6, zorder=2)
        for figure_us, marker in zip(figures, ("o", "s", "D", ">"), strict=True):
            axis.plot([figure_us], [place], marker, color=colour, markersize=8, zorder=3, mec="white")
        axis.annotate(
            duration(figures[0] / 1e3), (figures[0], place), xytext=(0, 8), textcoords="offset points", ha="center",
            fontsize=9, color=colour, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
        axis.annotate(
            duration(figures[-1] / 1e3), (figures[-1], place), xytext=(9, 0), textcoords="offset points", va="center",
            fontsize=9, color=colour,
        )  # fmt: skip
    axis.set_yticks(range(len(policies)), list(reversed(policies)))
    axis.set_ylim(-0.6, len(policies) - 0.35)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.set_xlim(min(low, machine.fdatasync_us.p50 / 1.5), high * 1.6)
    axis.xaxis.set_major_formatter(lambda value, _: duration(value / 1e3))
    axis.set_xlabel("one append")
    axis.grid(True, axis="x", which="major", color="#e4e4e4", linewidth=0.8)
    axis.axvline(machine.fdatasync_us.p50, color=GREY, linestyle="--", linewidth=1, zorder=1)
    axis.annotate(" one write and fdatasync", (machine.fdatasync_us.p50, -0.52), color=GREY, fontsize=8.5, va="bottom")
    handles = [
        plt.Line2D([], [], marker=marker, linestyle="", color=GREY, markersize=7, label=name)
        for name, marker in (("p50", "o"), ("p99", "s"), ("p99.9", "D"), ("max", ">"))
    ]
    figure.legend(
        handles=handles, loc="lower right", ncol=4, frameon=False, fontsize=9, bbox_to_anchor=(0.99, 0.0),
        handletextpad=0.2, columnspacing=1.2,
    )  # fmt: skip
    figure.subplots_adjust(left=0.105, right=0.985, bottom=0.21)
    detail = f"{_records(batch)} of 100 B an append, one writer"
    return save(figure, machine, folder, "fsync-latency.png", latency_title(shown), detail)


def latency_title(shown: Sequence[FsyncRow]) -> str:
    """Return the medians of the policies, and the slowest 99th percentile."""
    ordered = sorted(shown, key=lambda row: row.append_us.p50)
    fast, slow = ordered[0], ordered[-1]
    title = f"The median append took {duration(fast.append_us.p50 / 1e3)} under {fast.policy}"
    if slow is not fast:
        title += f" and {duration(slow.append_us.p50 / 1e3)} under {slow.policy}"
    tail = max(shown, key=lambda row: row.append_us.p99)
    return f"{title}; the longest p99 was {duration(tail.append_us.p99 / 1e3)}, under {tail.policy}"


# ---------------------------------------------------------------- writers


def _plot_writers(rows: Sequence[FsyncRow], machine: Machine, folder: Path) -> Figure | None:
    always = [row for row in rows if row.policy == "always" and row.record_bytes == _RECORD_BYTES]
    shown = [row for row in always if row.batch_records == min(row.batch_records for row in always)]
    lines = {kind: _line(shown, kind) for kind in ("threads", "processes")}
    if len(lines["threads"]) < 2:
        return None
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.9))
    colours = {"threads": _COLOURS["always"], "processes": _COLOURS["1000ms"]}
    sides: tuple[tuple[Any, Callable[[FsyncRow], float], str], ...] = (
        (axes[0], lambda row: row.appends / row.seconds, "durable appends/s"),
        (axes[1], lambda row: row.fsyncs / row.appends, "fsyncs for one append"),
    )
    for axis, figure_of, label in sides:
        for kind, line in lines.items():
            if len(line) < 2:
                continue
            ys = [figure_of(row) for row in line]
            axis.plot(
                [row.writers for row in line], ys, marker="o", color=colours[kind], markersize=8, mec="white", zorder=3,
                linestyle="-" if kind == "threads" else (0, (5, 2)),
            )  # fmt: skip
            axis.annotate(
                kind, (line[-1].writers, ys[-1]), xytext=(9, 0), textcoords="offset points", va="center",
                color=colours[kind], fontweight="bold", fontsize=9.5,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        writers = sorted({row.writers for row in shown})
        axis.set_xticks(writers, [str(count) for count in writers])
        axis.set_xticks([], minor=True)
        axis.set_xlim(writers[0] / 1.25, writers[-1] * 1.9)
        axis.set_ylim(0, max(figure_of(row) for row in shown) * 1.15)
        axis.set_xlabel("writers at the same time")
        axis.set_ylabel(label)
        axis.grid(True, color="#e4e4e4", linewidth=0.8)
    floor = 1e6 / machine.fdatasync_us.p50
    if floor < axes[0].get_ylim()[1] * 3:
        axes[0].axhline(floor, color=GREY, linestyle="--", linewidth=1)
        axes[0].set_ylim(0, max(floor * 1.15, axes[0].get_ylim()[1]))
        axes[0].annotate(
            "the disk, one fdatasync after the other", (axes[0].get_xlim()[0], floor), xytext=(4, 3),
            textcoords="offset points", color=GREY, fontsize=8.5,
        )  # fmt: skip
    _format_counts(axes[0].yaxis)
    figure.subplots_adjust(left=0.085, right=0.985, bottom=0.17, wspace=0.2)
    detail = f"always, {_records(shown[0].batch_records)} of 100 B an append"
    return save(figure, machine, folder, "fsync-writers.png", writers_title(shown), detail)


def writers_title(shown: Sequence[FsyncRow]) -> str:
    """Return the rate of many writers in relation to one writer's, and how many share an fsync."""
    threads = _line(shown, "threads")
    one, many = threads[0], threads[-1]
    times = many.records_per_s / one.records_per_s
    shared = many.appends / max(many.fsyncs, 1)
    return (
        f"Group commit: {many.writers} threads made {times:.1f} times the durable appends of {one.writers},"
        f" {shared:.1f} to an fsync"
    )


def _line(shown: Sequence[FsyncRow], kind: str) -> list[FsyncRow]:
    """By writers; one process is one thread."""
    found = [row for row in shown if row.writer_kind == kind or row.writers == 1]
    return sorted(found, key=lambda row: row.writers)


# ---------------------------------------------------------------- what they share


def _percent(part: float) -> str:
    return f"{part:.0%}".replace("%", " %") if part >= 0.0995 else f"{part * 100:.2g} %"


def _of(rows: Sequence[FsyncRow], policy: str) -> list[FsyncRow]:
    return [row for row in rows if row.policy == policy]


def _records(count: int) -> str:
    return f"{count:,} record" + ("s" if count > 1 else "")


def _of_one_writer(rows: Sequence[FsyncRow]) -> list[FsyncRow]:
    return [row for row in rows if row.writers == 1 and row.record_bytes == _RECORD_BYTES]


def _policies(rows: Sequence[FsyncRow]) -> list[str]:
    """In the order of the colours, which is that of promises."""
    known = [policy for policy in _COLOURS if any(row.policy == policy for row in rows)]
    return known + sorted({row.policy for row in rows} - set(known))


def _usual_batch(rows: Sequence[FsyncRow]) -> int:
    """Return the batch size that most policies have; of several, the one nearest to a hundred."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[row.batch_records] = counts.get(row.batch_records, 0) + 1
    most = max(counts.values())
    return min((b for b, n in counts.items() if n == most), key=lambda b: abs(math.log10(b / _USUAL_BATCH)))


def _format_counts(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: _count(value))


def _count(value: float) -> str:
    return f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k" if value >= 1e3 else f"{value:g}"
