"""The fsync bench at its smallest, and the plots of what it finds."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import msgspec
import pytest

from bench import fsync, plots, plots_fsync, results
from bench.fsync_cells import FsyncRow
from bench.machine import Latency, Machine, Noise


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> results.Measured:
    """Return one run of the quick grid, read back from its file."""
    folder = tmp_path_factory.mktemp("fsync")
    disk = folder / "disk"
    disk.mkdir()
    arguments = ["--quick", "--seconds", "0.02", "--out", str(folder), "--dir", str(disk), "--json"]
    assert fsync.main(arguments) == 0
    assert not list(disk.iterdir()), "a run leaves nothing on the disk that it measured"
    found = results.load(folder, "fsync")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def rows(measured: results.Measured) -> list[FsyncRow]:
    """Return the rows of that run."""
    return results.load_rows(measured, FsyncRow)


@pytest.fixture
def row(rows: list[FsyncRow]) -> FsyncRow:
    """Return one of the rows, as a template for others."""
    return next(row for row in rows if row.policy == "1000ms" and row.batch_records == 100)


@pytest.fixture
def machine() -> Machine:
    """Return a made-up one, with a disk like many."""
    latency = Latency(p50=500.0, p99=900.0, p999=1000.0, max=1200.0)
    return Machine("m", "A processor", 2, 8.0, "Linux", "ext4", "CPython 3", "", {}, latency, Noise(1.0, 0.0))


def test_every_cell_has_its_figures(measured: results.Measured, rows: list[FsyncRow]) -> None:
    """Each cell of the quick grid is in the file once, with consistent figures."""
    cells = {(row.policy, row.batch_records, row.writers, row.writer_kind) for row in rows}
    assert cells == {(cell.policy, cell.batch_records, cell.writers, cell.writer_kind) for cell in fsync.quick_cells()}
    assert len(rows) == len(cells)
    for row in rows:
        assert row.records == row.appends * row.batch_records > 0
        assert row.records_per_s == pytest.approx(row.records / row.seconds, rel=0.05)
        assert 0 < row.append_us.p50 <= row.append_us.p99 <= row.append_us.p999 <= row.append_us.max
        assert 0 <= row.records_at_risk_p50 <= row.records_at_risk_max <= row.records_unsynced_max
        assert row.samples >= 1
    assert measured.settings["raw_fdatasync_us"]
    assert measured.settings["left_out"] == []


def test_the_table_has_what_a_web_service_does(rows: list[FsyncRow], capsys: pytest.CaptureFixture[str]) -> None:
    """16 threads that append single records, each on disk when it returns, beside the rows of one writer."""
    fsync.print_table(rows)
    printed = capsys.readouterr().out
    assert len(re.findall(r"always .*16 threads", printed)) == 1
    assert "4 threads" not in printed.replace("16 threads", "")


def test_progress_is_printed_where_there_is_no_terminal(row: FsyncRow, capsys: pytest.CaptureFixture[str]) -> None:
    """A line at the beginning and one at the end, at least: minutes of silence look like a run that hangs."""
    cells = fsync.quick_cells()[:3]
    assert list(fsync._with_progress(iter([row] * 3), cells)) == [row] * 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("1 of 3 cells")
    assert lines[-1].endswith("3 of 3 cells")


def test_always_risks_nothing_that_was_acknowledged(rows: list[FsyncRow]) -> None:
    """Under `always`, no sample finds an acknowledged record above the durable offset, with any number of writers.

    At most one append of each writer waits for its fsync.
    """
    for row in (row for row in rows if row.policy == "always"):
        assert (row.records_at_risk_max, row.ms_at_risk_max) == (0, 0)
        assert row.records_unsynced_max <= row.writers * row.batch_records


def test_never_risks_everything(rows: list[FsyncRow]) -> None:
    """Under `never`, the bench runs no fsync, and all appended records are at risk at the end."""
    for row in (row for row in rows if row.policy == "never"):
        assert row.fsyncs == 0
        assert row.records_at_risk_max == row.records


def test_always_syncs_each_append_of_one_writer(rows: list[FsyncRow]) -> None:
    """A single writer needs an fsync for each append; four and more writers share them."""
    for row in (row for row in rows if row.policy == "always"):
        assert row.fsyncs >= row.appends if row.writers == 1 else 0 < row.fsyncs <= row.appends


def test_the_plots_say_what_the_rows_say(rows: list[FsyncRow], machine: Machine, tmp_path: Path) -> None:
    """Every figure is a PNG file, whose title has the figures of the rows."""
    figures = plots_fsync.plot_fsync(rows, machine, tmp_path)
    assert [figure.file for figure in figures] == ["fsync-risk.png", "fsync-latency.png", "fsync-writers.png"]
    for figure in figures:
        assert (tmp_path / figure.file).read_bytes().startswith(b"\x89PNG")
    always = {row.writers: row for row in rows if row.policy == "always" and row.writer_kind == "threads"
              and row.batch_records == 1}  # fmt: skip
    risk, latency, writers = (figure.title for figure in figures)
    assert re.search(r"; always [\d.]+ % and risked nothing", risk)
    at_100 = [row for row in rows if row.batch_records == 100]
    slowest = max(at_100, key=lambda row: row.append_us.p50)
    assert f"{plots.duration(slowest.append_us.p50 / 1e3)} under {slowest.policy}" in latency
    assert f"{always[16].records_per_s / always[1].records_per_s:.1f} times" in writers


def test_the_title_is_that_of_the_rows(row: FsyncRow) -> None:
    """Shares, seconds at risk, and whether the cell was long enough to know are the rows' own."""

    def made(policy: str, rate: float, records: int, ms: float, seconds: float) -> FsyncRow:
        return msgspec.structs.replace(
            row, policy=policy, records_per_s=rate, records_at_risk_max=records, ms_at_risk_max=ms, seconds=seconds
        )

    never = made("never", 1_000_000, 9, 9, 1.5)
    long = [never, made("1000ms", 960_000, 10, 1012, 1.5), made("always", 31_000, 0, 0, 1.5)]
    assert plots_fsync.risk_title(long) == (
        "1000ms gave 96 % of the throughput of never and risked up to 1.0 s; always 3.1 % and risked nothing"
        " (100 records an append)"
    )
    short = [never, made("1000ms", 960_000, 10, 20, 0.02)]
    assert "risked up to 20 ms in only 20 ms" in plots_fsync.risk_title(short)
    assert "risked nothing" not in plots_fsync.risk_title([never, made("10ms", 960_000, 10, 0, 0.02)])


def test_few_rows_are_plotted_as_far_as_they_go(row: FsyncRow, machine: Machine, tmp_path: Path) -> None:
    """A part of the grid gives the figures that its rows suffice for. An empty grid gives an empty list."""
    assert [figure.file for figure in plots_fsync.plot_fsync([row], machine, tmp_path)] == [
        "fsync-risk.png",
        "fsync-latency.png",
    ]
    assert plots_fsync.plot_fsync([], machine, tmp_path) == []


def test_without_matplotlib_it_says_how_to_get_it(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra, the error names it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plots.PlotsUnavailable, match=r"pip install '\.\[bench\]' in a clone"):
        plots_fsync.plot_fsync([], machine, tmp_path)


def test_the_grid_is_whole_and_always_in_the_same_order() -> None:
    """Every combination is a cell once.

    A cell that does not fit on the disk is named; the bench does not shrink it.
    """
    cells = fsync.all_cells()
    assert len(set(cells)) == len(cells) == 6 * 4 * 3 * 4
    order, left_out = fsync.choose(cells, "", 1 << 30)
    assert order == fsync.choose(cells, "", 1 << 30)[0]
    assert order != [cell for cell in cells if cell in order]
    assert sorted(left_out) == sorted(f"{policy}, 10000 x 10240 B, 16 threads" for policy in fsync.POLICIES)
    assert len(fsync.choose(cells, "always, 4 threads, 1 x", 1 << 30)[0]) == 3


@pytest.mark.parametrize("batch_records", [1, 100])
@pytest.mark.parametrize("record_bytes", fsync.RECORD_SIZES)
def test_values_compress_about_two_to_one(record_bytes: int, batch_records: int) -> None:
    """Values of any batch size compress to about half. A log of constant bytes would write almost nothing."""
    assert 1.4 < fsync.compression_ratio(record_bytes, batch_records) < 2.2


def test_a_cell_ends_with_what_it_may_write(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cell stops at its bound long before its time, and says so."""
    monkeypatch.setattr("bench.machine.describe", lambda _: machine)
    arguments = ["--only", "1000ms, 1000 x 10240 B, 4 threads", "--most-mb", "80", "--seconds", "30"]
    assert fsync.main([*arguments, "--out", str(tmp_path), "--dir", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cut_short"]
    assert found["records"] * found["record_bytes"] <= 80 << 20


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_run_that_is_ended_leaves_nothing(
    error: BaseException,
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Interrupted, or with the disk full, it deletes its folder, saves nothing and says so."""

    def fail(*_: object) -> FsyncRow:
        raise type(error)(*error.args)  # another one: its traceback holds on to all that was open

    monkeypatch.setattr("bench.machine.describe", lambda _: machine)
    monkeypatch.setattr(fsync.Bench, "measure", fail)
    assert fsync.main(["--quick", "--seconds", "0.02", "--out", str(tmp_path / "out"), "--dir", str(tmp_path)]) != 0
    assert list(tmp_path.iterdir()) == []
    assert "after 0 of 15 cells; nothing was saved" in capsys.readouterr().err
