"""The report of a results folder, made from its JSON files alone: ``python -m bench.report [FOLDER]``.

Writes ``README.md`` and the plots. What it says of the figures it computes from them; only the reasons
(`bench.reasons`) are somebody's words.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from bench import plots_fsync, plots_peers, plots_scaling, results
from bench.fsync_cells import POLICIES, FsyncRow
from bench.machine import Machine
from bench.measure import RowResult, quantity
from bench.peers import Absent, PeerRow, Peers
from bench.plots import Figure
from bench.reasons import reason_for
from bench.results import Measured
from bench.scaling_curves import ScalingRow, bends
from bench.systems.registry import OURS, OURS_ALL, OURS_KAFKA, OURS_UNCOMPRESSED

_BENCHES = ("fsync", "limits", "scaling", "peers")


def write_report(folder: Path) -> Path:
    """Make ``README.md`` and the plots of what is in ``folder``. Raises `FileNotFoundError` if nothing is."""
    found = {bench: measured for bench in _BENCHES if (measured := results.load(folder, bench)) is not None}
    if not found:
        raise FileNotFoundError(f"{folder} holds no results; run make bench, or python -m bench.fsync --out {folder}")
    newest = max(found.values(), key=lambda measured: measured.date)
    lines = [f"# segmentlog, measured on {newest.date[:10]}", "", *_machine(found.values(), newest.machine)]
    losses: list[Loss] = []
    if "fsync" in found:
        lines += _fsync(found["fsync"], folder)
    if "limits" in found:
        lines += _limits(found["limits"], losses)
    if "scaling" in found:
        lines += _scaling(found["scaling"], folder)
    if "peers" in found:
        lines += _peers(found["peers"], folder, losses)
    lines += _where_we_lose(losses)
    lines += _repeat(found)
    path = folder / "README.md"
    path.write_text("\n".join(lines) + "\n")
    return path


class Loss(msgspec.Struct, frozen=True):
    """One place where we are behind, or short of what was wanted. ``factor``: by how much, above 1.

    ``against`` is who is ahead, where it is one of several that are told together.
    """

    what: str
    factor: float
    text: str
    reason: str
    against: str = ""


# ---------------------------------------------------------------- the parts


def _machine(measured: Iterable[Measured], machine: Machine) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    noise = [one.machine.noise for one in measured]
    syncs = machine.fdatasync_us
    lines = [
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gb:g} GB; {machine.system}; {machine.file_system};"
        f" {machine.python_text}; {versions}.",
        "",
        f"One write and `fdatasync` of this disk: median {syncs.p50:.0f} us, 99 % within {syncs.p99:.0f} us, at most"
        f" {syncs.max:.0f} us.",
        "",
    ]
    if machine.fsync_warning:
        lines += [f"**{machine.fsync_warning}**", ""]
    spread, steal = max(one.spread for one in noise), max(one.steal for one in noise)
    lines += [
        f"Noise: the same piece of work took up to {spread:.2f} times as long as in its best tenth"
        f"{f', and {steal:.0%} of the processor went to other machines' if steal >= 0.005 else ''}."
        " Ratios within one run hold, absolute figures are this machine's of that hour.",
        "",
    ]
    return lines


def _fsync(measured: Measured, folder: Path) -> list[str]:
    rows = results.load_rows(measured, FsyncRow)
    lines = ["## What an fsync policy costs, and what it puts at risk", ""]
    lines += _figures(plots_fsync.plot_fsync(rows, measured.machine, folder))
    lines += [line for warning in measured.settings.get("warnings", ()) for line in (f"**{warning}**", "")]
    one = [row for row in rows if (row.record_bytes, row.writers) == (100, 1)]
    one.sort(key=lambda row: (row.batch_records, POLICIES.index(row.policy)))
    lines += ["One writer, records of 100 bytes:", ""]
    lines += table(
        ("fsync", "records an append", "records/s", "append p50", "p99.9", "fsyncs/s", "at risk: p50", "at most"),
        [
            (
                row.policy,
                f"{row.batch_records:,}",
                quantity(row.records_per_s, "records/s"),
                f"{row.append_us.p50:,.0f} us",
                f"{row.append_us.p999:,.0f} us",
                f"{row.fsyncs / row.seconds:,.0f}",
                f"{row.records_at_risk_p50:,} records, {row.ms_at_risk_p50:,.0f} ms",
                f"{row.records_at_risk_max:,} records, {row.ms_at_risk_max:,.0f} ms",
            )
            for row in one
        ],
        right_from=1,
    )
    return [*lines, "All cells are in `fsync.json`.", ""]


def _limits(measured: Measured, losses: list[Loss]) -> list[str]:
    rows = results.load_rows(measured, RowResult)
    lines = ["## How far from what the machine can do", ""]
    lines += ["Each path against C code that does the same work on the same bytes, in turn, in one process.", ""]
    lines += table(
        ("path", "ours", "limit", "ratio", "range", "wanted"),
        [
            (
                row.name,
                row.ours_text,
                row.limit_text,
                "" if row.limit is None else f"{row.ratio:.2f}",
                "" if row.limit is None else f"{row.ratio_low:.2f}-{row.ratio_high:.2f}",
                row.target_text + ("" if row.reached else " (missed)"),
            )
            for row in rows
        ],
        right_from=1,
    )
    for row in rows:
        if not row.reached:
            judged = row.ours if row.judged_alone else row.ratio
            factor = row.target / judged if row.target_text.startswith(">=") else judged / row.target
            shown = quantity(judged, row.unit) if row.judged_alone else f"{judged:.2f} of the limit"
            text = f"{shown}, {row.target_text} was wanted"
            losses.append(Loss(row.name, factor, text, reason_for("limits", row.name)))
    return lines


def _scaling(measured: Measured, folder: Path) -> list[str]:
    rows = results.load_rows(measured, ScalingRow)
    lines = ["## How it scales", ""]
    lines += _figures(plots_scaling.plot_scaling(rows, measured.machine, folder))
    found = bends(rows)
    lines += ["Where curves bend:", "", *(f"- {bend.text}" for bend in found), ""] if found else []
    return lines


def _peers(measured: Measured, folder: Path, losses: list[Loss]) -> list[str]:
    rows = results.load_rows(measured, PeerRow)
    about = msgspec.convert(measured.settings, Peers)
    lines = ["## Against what you would pick instead", ""]
    lines += [
        f"The same records of about 100 bytes, batches of 1,024, {measured.settings['rounds']} rounds in turn; medians."
        " First our log with LZ4 and how it compares with each: **more than 1 is better for segmentlog**. Below it each"
        " piece of work, with the range of the ratio over the rounds, and on the right that of our log without LZ4.",
        "",
    ]
    lines += _overview(rows)
    lines += _figures(plots_peers.plot_peers(rows, folder))
    for workload, sync in dict.fromkeys((row.workload, row.sync) for row in rows):
        chosen = [row for row in rows if (row.workload, row.sync) == (workload, sync)]
        lines += [f"### {_heading(workload, sync)}", "", *_peer_table(chosen)]
        for row in chosen:
            if row.against == OURS or row.target is not None:
                _note_loss(row, about, losses)
    lines += ["### How each is used", ""]
    lines += [
        f"- **{name}** {about.versions.get(name, '')}: {text}{'' if about.compresses[name] else '; uncompressed'}."
        for name, text in about.about.items()
    ]
    lines += [""]
    lines += _absent(about.absent)
    return lines


def _overview(rows: Sequence[PeerRow]) -> list[str]:
    """Return a line for each piece of work: our figure with LZ4, and the ratios to the others."""
    compared = [row for row in rows if row.against == OURS]
    systems = [name for name in dict.fromkeys(row.system for row in compared) if name != OURS]
    work: dict[tuple[str, str], dict[str, PeerRow]] = {}
    for row in compared:
        work.setdefault((row.workload, row.sync), {})[row.system] = row
    body = []
    for (workload, sync), found in work.items():
        if OURS in found:
            ours = quantity(found[OURS].figure, found[OURS].unit)
            body.append((_heading(workload, sync), ours, *(_short_ratio(found.get(name)) for name in systems)))
    return table(("", OURS, *systems), body)


def _short_ratio(row: PeerRow | None) -> str:
    if row is None or row.ratio is None:
        return ""
    return f"{row.ratio:,.0f}" if row.ratio >= 9.95 else f"{row.ratio:.1f}" if row.ratio >= 0.95 else f"{row.ratio:.2f}"


def _heading(workload: str, sync: str) -> str:
    synced = {"never": "nothing synced", "second": "synced once a second", "batch": "each call synced"}[sync]
    return f"{workload[0].upper()}{workload[1:]}" + (
        f", {synced}" if "append" in workload or "threads" in workload else ""
    )


def _peer_table(rows: Sequence[PeerRow]) -> list[str]:
    with_lz4 = {row.system: row for row in rows if row.against == OURS or row.system == row.against}
    without = {row.system: row for row in rows if row.against == OURS_UNCOMPRESSED}

    def ratio(row: PeerRow | None) -> str:
        if row is None or row.ratio is None:
            return ""
        wanted = "" if row.target is None else f", {row.target:.3g} wanted{'' if row.reached else ': missed'}"
        return f"{row.ratio:.2f} ({row.ratio_low:.2f}-{row.ratio_high:.2f}{wanted})"

    body = [
        (
            row.system,
            quantity(row.figure, row.unit),
            f"{quantity(row.low, row.unit)} - {quantity(row.high, row.unit)}",
            ratio(row),
            "" if row.system in OURS_ALL else ratio(without.get(row.system)),
        )
        for row in with_lz4.values()
    ]
    return table(("system", "figure", "range", "ours / theirs", "ours uncompressed / theirs"), body, right_from=1)


def _note_loss(row: PeerRow, about: Peers, losses: list[Loss]) -> None:
    if row.ratio is None:
        return
    wanted = max(row.target or 0.0, 1.0)
    if row.ratio >= wanted:
        return
    text = f"{row.ratio:.2f} ({row.ratio_low:.2f}-{row.ratio_high:.2f}"
    text += f"; {row.target:.3g} was wanted)" if row.target is not None else ")"
    reason = reason_for("peers", row.workload, row.sync, row.system)
    ours = {OURS_UNCOMPRESSED: " (ours uncompressed)", OURS_KAFKA: " (ours with Kafka's batches)"}
    against = row.system + ours.get(row.against, "")
    losses.append(Loss(_heading(row.workload, row.sync), wanted / row.ratio, text, reason, against=against))


def _absent(absent: Sequence[Absent]) -> list[str]:
    if not absent:
        return []
    lines = ["### What is missing here", ""]
    lines += [
        f"- {one.system}{'' if one.workload == 'all' else ', ' + one.workload}: {one.reason}."
        for one in sorted(absent, key=lambda one: (one.workload != "all", one.system))
    ]
    return [*lines, ""]


def _where_we_lose(losses: list[Loss]) -> list[str]:
    lines = ["## Where we lose", ""]
    if not losses:
        return [*lines, "Nowhere in this run, of what was measured in it.", ""]
    lines += ["The worst first; of peers, ours / theirs with its range over the rounds.", ""]
    losses.sort(key=lambda loss: -loss.factor)
    together: dict[tuple[str, str], list[Loss]] = {}
    for loss in losses:
        together.setdefault((loss.what, loss.reason), []).append(loss)
    for (what, reason), some in together.items():
        told = ", ".join(f"{one.against} {one.text}" if one.against else one.text for one in some)
        lines.append(f"- **{what}**: {told}. {reason}")
    return [*lines, ""]


def _repeat(found: dict[str, Measured]) -> list[str]:
    lines = ["## To repeat it", ""]
    lines += [
        f"- `{one.command}` ({one.seconds / 60:.0f} min, {one.date}, revision `{one.machine.revision or 'unknown'}`)"
        for one in found.values()
    ]
    return lines


# ---------------------------------------------------------------- Markdown


def _figures(figures: Iterable[Figure]) -> list[str]:
    return [line for figure in figures for line in (f"**{figure.title}**", "", f"![{figure.title}]({figure.file})", "")]


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right_from: int = 1) -> list[str]:
    """Return a table; columns from ``right_from`` on stand on the right."""
    marks = ["---" if number < right_from else "--:" for number in range(len(header))]
    body = [header, marks, *rows]
    return ["| " + " | ".join(row) + " |" for row in body] + [""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of the results (default: today's below bench/results)")
    options = parser.parse_args()
    try:
        print(write_report(options.folder or results.default_folder()))
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
