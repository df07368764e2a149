"""Every bench at its smallest, so that none rots: that it runs and what it writes, and no time of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench import results
from bench.ecosystem import page as ecosystem_page
from bench.limits import rows as limit_rows
from bench.measure import RowResult
from bench.peers import WORKLOADS, PeerRow, Peers, rows_of
from bench.report import write_report
from bench.server.page import write_page
from bench.server.rows import Result
from bench.systems.base import Unavailable
from bench.systems.kafka_jars import jars_folder
from bench.systems.registry import NAMES, OURS, OURS_ALL, OURS_KAFKA, OURS_UNCOMPRESSED, system_class

ROOT = Path(__file__).parent.parent
REDIS = "Redis pages"
ALL_SERVERS = os.environ.get("SEGMENTLOG_BENCH_SERVERS") == "1"
EMBEDDED = ("plain file", "SQLite", "LMDB", "RocksDB", "persist-queue", "diskcache")


def run(bench: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one, which must end well."""
    command = [sys.executable, "-m", f"bench.{bench}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def test_limits(tmp_path: Path) -> None:
    """Each path has one row with a ratio, and the saved results are the same."""
    run("limits", "--rounds", "1", "--scale", "0.005", "--out", str(tmp_path))
    measured = results.load(tmp_path, "limits")
    assert measured is not None
    found = results.load_rows(measured, RowResult)
    assert [row.name for row in found] == [row.name for row in limit_rows()]
    assert all(row.ours > 0 for row in found)
    report = write_report(tmp_path).read_text()
    missed = [row.name for row in found if not row.reached]
    assert all(f"- **{name}**" in report for name in missed), "what is missed is told where we lose"
    assert len(missed) == report.split("## Where we lose")[1].count("\n- **")


@pytest.mark.parametrize(
    ("bench", "arguments", "said"),
    [
        ("aio", ("--records", "10000", "--rounds", "1"), "send, one by one"),
        ("compaction", ("--records", "5000", "--rounds", "1", "--segments", "10"), "retention tick"),
        ("delivery", ("--rounds", "1", "--kills", "1"), "rebalance after SIGKILL"),
        ("table", ("--keys", "2000"), "get, p50"),
        ("console", ("--topics", "20", "--records", "2000", "--times", "2"), "records searched a second"),
        ("ship", ("--mb", "100", "--rounds", "1", "--scale", "0.05"), "worst lag"),
        ("standby", ("--only", "requests"), "dollars a month"),
        ("http", ("--rounds", "1", "--scale", "0.05"), "to 100 clients"),
    ],
)
def test_the_others(bench: str, arguments: tuple[str, ...], said: str) -> None:
    """The other benches run to their end."""
    assert said in run(bench, *arguments).stdout


def test_embedded_peers(tmp_path: Path) -> None:
    """All Python packages, and Redis, do everything that they can; the report has a table and a plot of it."""
    peers = (OURS_KAFKA, *EMBEDDED, *((REDIS,) if shutil.which("redis-server") else ()))
    workloads = [one for one in WORKLOADS if one != "singly"]
    chosen = ("--systems", ",".join(peers), "--workloads", ",".join(workloads), "--syncs", "batch")
    run("peers", *_small(tmp_path), *chosen)
    rows = _rows(tmp_path)
    assert {row.system for row in rows} == {*peers, OURS, OURS_UNCOMPRESSED}
    assert {row.workload for row in rows} == {
        "append in batches", "append in batches, p99.9", "16 threads",
        "scan values", "scan records", "read at a random offset", "disk for the same records", "memory",
        "open after kill -9", "compaction",
    }  # fmt: skip
    assert all(row.figure > 0 for row in rows)
    # Each system has a row, or a reason why it has none.
    absent = _settings(tmp_path).absent
    assert not [one for one in absent if "failed" in one.reason], absent
    assert {one.system for one in absent} <= {"plain file", "persist-queue", REDIS}
    report = write_report(tmp_path).read_text()
    for name in peers:
        assert f"| {name} |" in report
    assert report.count(".png)") == len(list(tmp_path.glob("*.png"))) == 3
    behind = [row for row in rows if row.against == OURS and _is_behind(row)]
    lost = report.split("## Where we lose")[1]
    for row in behind:
        assert f"{row.system} {row.ratio:.2f} (" in lost


def _is_behind(row: PeerRow) -> bool:
    return row.ratio is not None and row.ratio < max(row.target or 0, 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*EMBEDDED, REDIS, *OURS_ALL)])
def test_servers(tmp_path: Path, name: str) -> None:
    """Each system with an available server is started, killed, found with its records, and stopped."""
    try:
        system_class(name).version()
    except (Unavailable, ImportError) as error:
        pytest.skip(f"{name}: {error}")
    if not ALL_SERVERS:
        pytest.skip(f"{name}: a minute and more; SEGMENTLOG_BENCH_SERVERS=1 runs it")
    if name.startswith("Kafka") and not jars_folder().is_dir():
        pytest.skip(f"{name}: its jars are not there yet; python -m bench.systems.kafka_jars gets them")
    workloads = [one for one in WORKLOADS if one != "singly"]
    run("peers", *_small(tmp_path), "--systems", name, "--workloads", ",".join(workloads))
    assert not [one for one in _settings(tmp_path).absent if "failed" in one.reason], _settings(tmp_path).absent
    found = {row.workload for row in _rows(tmp_path) if row.system == name}
    assert {"append in batches", "16 threads", "scan values", "scan records", "open after kill -9"} <= found


def _small(folder: Path) -> tuple[str, ...]:
    return ("--rounds", "1", "--seconds", "0.01", "--records", "2048", "--out", str(folder))


def _settings(folder: Path) -> Peers:
    return msgspec.json.decode(json.dumps(_measured(folder).settings), type=Peers)


def _rows(folder: Path) -> list[PeerRow]:
    return results.load_rows(_measured(folder), PeerRow)


def _measured(folder: Path) -> results.Measured:
    measured = results.load(folder, "peers")
    assert measured is not None
    return measured


def test_the_server_bench(tmp_path: Path) -> None:
    """Our server alone, a tiny row: requests are answered, what was acknowledged is there, and the page says so."""
    run("server", "--tiny", "--systems", OURS, "--rows", "small/produce-10", "--out", str(tmp_path))
    measured = results.load(tmp_path, "server")
    assert measured is not None
    rate, _cpu = results.load_rows(measured, Result)
    assert (rate.row, rate.theirs, rate.reached) == ("small/produce-10", None, None)
    assert rate.ours > 0
    page = write_page(tmp_path, tmp_path / "page.md").read_text()
    assert "| produce, batches of 10 records |" in page
    assert "## Where we lose" in page
    run("server", "--tiny", "--systems", OURS, "--rows", "acks-all/1", "--again", "--out", str(tmp_path))
    measured = results.load(tmp_path, "server")
    assert measured is not None
    rows = results.load_rows(measured, Result)
    assert [one.row for one in rows] == ["small/produce-10", "small/produce-10", "acks-all/1", "acks-all/1000"]
    assert rows[0] == rate
    page = write_page(tmp_path, tmp_path / "page.md").read_text()
    assert f"Measured once more at {measured.settings['again'][0]['date']}" in page
    assert ": acks-all/1, acks-all/1000." in page


def test_rows_of_other_sizes_do_not_join(tmp_path: Path) -> None:
    """--again replaces rows of a result; it has to be there, and made in the same way."""
    command = [sys.executable, "-m", "bench.server", "--tiny", "--systems", OURS, "--rows", "start", "--again"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "holds no server.json" in done.stderr
    run("server", "--tiny", "--systems", OURS, "--rows", "start", "--out", str(tmp_path))
    before = (tmp_path / "server.json").read_bytes()
    done = subprocess.run([*command, "--rounds", "2"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "other rounds than what is there" in done.stderr
    assert (tmp_path / "server.json").read_bytes() == before


def test_ecosystem(tmp_path: Path) -> None:
    """The rows that need no Java each report a measurement, and the bench makes a page of them."""
    rows = "transactions,rebalance/consumer"
    options = ["--tiny", "--rounds", "1", "--systems", OURS, "--out", str(tmp_path)]
    run("ecosystem", *options, "--rows", rows)
    run("ecosystem", *options, "--again", "transactions/copy")
    measured = results.load(tmp_path, "ecosystem")
    assert measured is not None
    found = results.load_rows(measured, Result)
    names = ["transactions/records", "transactions/records", "transactions/copy", "rebalance/consumer"]
    assert [one.row for one in found] == names
    assert all(one.ours > 0 for one in found)
    page = ecosystem_page.write_page(tmp_path, tmp_path / "page.md").read_text()
    assert "## Transactions on disk" in page
    assert ": transactions/copy." in page


def test_ratios_are_of_the_same_round() -> None:
    """A ratio above 1 means that segmentlog is better, for any unit."""
    rates = {OURS: [10.0, 20.0, 30.0], "LMDB": [5.0, 20.0, 10.0]}
    ours, theirs = rows_of("append in batches", "never", "records/s", "more", rates, {OURS: True, "LMDB": False})
    assert (ours.figure, ours.ratio, ours.target) == (20, None, None)
    assert (theirs.figure, theirs.ratio, theirs.ratio_low, theirs.ratio_high) == (10, 2, 1, 3)
    assert (theirs.target, theirs.reached) == (1.2, True)
    times = {OURS: [2.0], "SQLite": [1.0]}
    _, slower = rows_of("open after kill -9", "never", "ms", "less", times, {OURS: True, "SQLite": False})
    assert (slower.ratio, slower.reached) == (0.5, False)


def test_what_there_is_not(tmp_path: Path) -> None:
    """Errors about an unknown name list the known names; an error about a folder without results names it."""
    command = [sys.executable, "-m", "bench.peers", "--systems", "LMDB,Sqlite"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "there is no 'Sqlite'" in done.stderr
    assert "SQLite" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "bench.report", str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "holds no results" in done.stderr
    for wrong in ("--dir=/nowhere", "--rounds=0"):
        command = [sys.executable, "-m", "bench.limits", wrong]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 2
        assert "is not a" in done.stderr
