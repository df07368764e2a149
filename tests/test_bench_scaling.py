"""The scaling bench: it measures every axis, and tells flat curves from those that bend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench import results
from bench.scaling import main, measure
from bench.scaling_axes import DEFAULT, FULL, QUICK, NoRoom, Plan, check_room
from bench.scaling_curves import AXES, PARTITIONS, RECORD_SIZE, WHY, Curve, ScalingRow, bends, curves
from bench.scaling_worker import Crew, WorkerFailed

_TINY = Plan(
    log_bytes=(1e6,),
    partitions=(1, 3),
    record_bytes=(100, 1 << 20),
    processes=(2,),
    rounds=1,
    seconds=0.005,
    scan_records=2_000,
    reads=20,
    filled_bytes=3e5,
)


def _curve(*values: float, spread: float = 0.02, axis: str = PARTITIONS, figure: str = "rate") -> list[ScalingRow]:
    """Points at 1, 10, 100, ..., each with a range of that part of its value to either side."""
    return [
        ScalingRow(axis, 10.0**index, figure, "records/s", value, value * (1 - spread), value * (1 + spread))
        for index, value in enumerate(values)
    ]


def _only(rows: list[ScalingRow]) -> Curve:
    (curve,) = curves(rows)
    return curve


def test_a_curve_within_the_noise_is_flat() -> None:
    """Points a few percent apart do not bend, and the title says how far apart they are."""
    curve = _only(_curve(100, 104, 97, 101))
    assert (curve.shape, curve.leaves) == ("flat", None)
    assert curve.title == "Rate is flat from 1 to 1,000 (within 4 %)"
    assert bends(_curve(100, 104, 97, 101)) == []


def test_a_falling_curve_bends_where_it_leaves_the_flat() -> None:
    """The first point below the noise is named, and what becomes of the rate."""
    (curve,) = bends(_curve(100, 99, 70, 30))
    assert (curve.shape, curve.leaves, curve.settles) == ("falls", 100, None)
    assert curve.title == "Rate is flat to 10, then falls: 0.3x at 1,000"


def test_a_rising_curve_that_is_flat_again_tells_where() -> None:
    """A curve that rises and then stays flat is described with both places."""
    (curve,) = bends(_curve(100, 190, 195, 192))
    assert (curve.shape, curve.leaves, curve.settles) == ("rises", 10, 10)
    assert curve.title == "Rate rises from 1 on: 1.9x at 1,000, and is flat from 10 on"


def test_a_power_law_is_told_as_proportion() -> None:
    """Ten times the cost for ten times the partitions is called proportional; a tenth is inverse."""
    assert _only(_curve(2, 20, 200)).title == "Rate rises from 1 on: 100x at 100, in proportion"
    assert _only(_curve(200, 20, 2)).title == "Rate falls from 1 on: 1/100 at 100, in inverse proportion"


def test_a_peak_is_told_when_the_curve_turns_back() -> None:
    """The curve is twice as high at ten, and lower than at first at a thousand."""
    assert _only(_curve(100, 200, 150, 80)).title == "Rate rises from 1 on: 2x at 10, 0.8x at 1,000"


def test_one_point_that_comes_back_is_an_accident() -> None:
    """A single outlier in a flat curve is not a bend."""
    assert bends(_curve(100, 60, 101, 99)) == []


def test_rounds_that_differ_much_hide_a_bend() -> None:
    """A difference smaller than the range over the rounds is none, and the title says how wide that is."""
    curve = _only(_curve(100, 75, 70, spread=0.4))
    assert curve.shape == "flat"
    assert "rounds differ by 80 %" in curve.title


def test_a_single_point_is_told_as_it_is() -> None:
    """A curve of one point has the shape "point"."""
    curve = _only(_curve(2.5e6))
    assert (curve.shape, curve.title) == ("point", "Rate: 2.50 M/s at 1")
    assert curve.text == "Rate: 2.50 M/s at 1."


def test_points_are_taken_in_the_order_of_their_axis() -> None:
    """Rows may come in any order."""
    assert _only(_curve(100, 99, 70, 30)[::-1]) == _only(_curve(100, 99, 70, 30))


def test_a_reason_is_told_for_the_shape_that_it_explains() -> None:
    """The text gives a reason where opening takes longer with more partitions, and none where it takes less."""
    rising, falling = (_only(_curve(*values, figure="open")) for values in ((1, 10, 100), (100, 10, 1)))
    assert "one after the other" in rising.text
    assert falling.text == falling.title + "."


def test_every_axis_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny run has figures of every axis and of every explained curve, all positive, and leaves nothing behind."""
    rows = measure(tmp_path, _TINY)
    assert os.listdir(tmp_path) == []
    assert {row.axis for row in rows} == set(AXES)
    assert {(axis, figure) for axis, figure, _ in WHY} <= {(row.axis, row.figure) for row in rows}
    assert all(0 < row.low <= row.value <= row.high for row in rows)
    assert {row.at for row in rows if row.axis == RECORD_SIZE} == {100, 1 << 20}
    descriptors = {row.at: row.value for row in rows if row.figure == "file descriptors after open"}
    assert descriptors[3] == 3 * descriptors[1]
    assert "processes 2, readers, one partition" in capsys.readouterr().err


def test_the_command_saves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--quick with --out writes the rows as JSON that reads back, and plots can be made of them."""
    pytest.importorskip("matplotlib")
    from bench.plots_scaling import plot_scaling

    command = ["scaling", "--quick", "--only", "record size", "--out", str(tmp_path / "out"), "--dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0
    assert os.listdir(tmp_path) == ["out"]
    measured = results.load(tmp_path / "out", "scaling")
    assert measured is not None
    assert measured.settings["rounds"] == QUICK.rounds
    rows = results.load_rows(measured, ScalingRow)
    assert {row.axis for row in rows} == {RECORD_SIZE}
    (figure,) = plot_scaling(rows, measured.machine, tmp_path / "plots")
    assert figure.title.startswith("Append, LZ4, in MB/s, ")
    assert (tmp_path / "plots" / figure.file).read_bytes().startswith(b"\x89PNG")


def test_an_axis_that_does_not_exist_is_refused() -> None:
    """The message names those that do."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.scaling", "--only", "colour"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "log size, partitions, record size, processes" in done.stderr


def test_no_log_is_written_that_does_not_fit(tmp_path: Path) -> None:
    """Before a byte is written, the error says how much is free and how much is needed."""
    with pytest.raises(NoRoom, match=r"GB free, and this needs 1000002\.0 GB"):
        check_room(tmp_path, 1e15)
    plan = msgspec.structs.replace(_TINY, log_bytes=(1e15,))
    with pytest.raises(NoRoom):
        measure(tmp_path, plan, ["log size"])
    assert os.listdir(tmp_path) == []


def test_the_full_run_goes_further() -> None:
    """Every axis of the full run ends at or beyond the end of the default run."""
    for axis in ("log_bytes", "partitions", "record_bytes", "processes"):
        assert max(getattr(QUICK, axis)) <= max(getattr(DEFAULT, axis)) <= max(getattr(FULL, axis))
    assert (max(FULL.log_bytes), max(FULL.partitions)) == (50e9, 10_000)


def test_what_fails_in_another_process_is_told_here(tmp_path: Path) -> None:
    """The other process's traceback is in the error, and the process ends."""
    crew = Crew(1)
    with pytest.raises(WorkerFailed, match="StoreVersionError"), crew:
        crew.call("open", str(tmp_path / "nothing"))
    assert not any(process.is_alive() for process, _ in crew._members)
