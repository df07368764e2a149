"""The demonstration and the quick bench, each at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from segmentlog import demo


def test_the_demonstration_holds(tmp_path: Path) -> None:
    """Every step of the demo runs and checks what it says, on the first flights of the year."""
    said: list[str] = []
    demo.run(tmp_path / "store", said.append, limit=5_000)
    text = "\n".join(said)
    assert "5,000 flights" in text
    assert "the same, to the byte" in text
    assert "each once, in order" in text
    assert said[-1].startswith("Everything held")


def test_a_check_of_the_demonstration_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that comes back changed fails the demo."""
    flights = demo.load_flights(limit=100)
    changed = demo.Flights([b"{}", *flights.values[1:]], flights.keys, flights.timestamps)
    monkeypatch.setattr(demo, "load_flights", lambda limit: flights)
    write = demo._write
    monkeypatch.setattr(demo, "_write", lambda store, _, say: write(store, changed, say))
    with pytest.raises(demo.DemoFailed, match="this does not hold"):
        demo.run(tmp_path / "store", lambda _: None)


def test_the_demo_command_keeps_its_store(tmp_path: Path) -> None:
    """`segmentlog demo --keep` leaves a store behind that opens."""
    command = [sys.executable, "-m", "segmentlog", "demo", "--limit", "2000", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "PARTITION" in done.stdout
    assert (tmp_path / "kept" / "store.json").exists()


def test_bench_measures_every_policy_and_leaves_nothing(tmp_path: Path) -> None:
    """`segmentlog bench` gives a row a policy; always puts nothing at risk, and fsyncs every append."""
    command = [
        sys.executable,
        "-m",
        "segmentlog",
        "--dir",
        str(tmp_path / "data"),
        "bench",
        "--seconds",
        "0.05",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    disk, *rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert disk["disk"]["fdatasync_us_p50"] > 0
    by_policy = {row["fsync"]: row for row in rows}
    assert list(by_policy) == ["always", "10ms", "1000ms", "1000records", "1MiB", "never"]
    assert by_policy["always"]["records_at_risk_max"] == 0
    assert by_policy["always"]["fsyncs"] > 0
    assert by_policy["never"]["records_at_risk_max"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("row", ["append lists, keyed, lz4", "read values", "append one record", "random offset"])
def test_the_limits_bench_runs(row: str) -> None:
    """A row of the limits bench runs at a small size and tells both sides; how fast is not asserted."""
    command = [sys.executable, "-m", "bench.limits", "--rounds", "1", "--scale", "0.05", "--only", row, "--json"]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ours"] > 0
    assert result["limit"] > 0
