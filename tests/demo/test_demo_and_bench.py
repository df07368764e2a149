"""The demonstration and the quick bench, each at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import segmentlog
from segmentlog.demo import flights as demo_flights
from segmentlog.demo import server_step as demo_serving
from segmentlog.demo import shipping_step as demo_shipping
from segmentlog.demo import spark as demo_spark
from segmentlog.demo import steps as demo
from segmentlog.log.partition import Partition
from segmentlog.records import CompactionReport
from segmentlog.spark.java import Java, JavaNotFound


@pytest.mark.long
def test_the_demonstration_holds(tmp_path: Path) -> None:
    """Every step of the demo runs and checks its output, on the first flights of the year."""
    said: list[str] = []
    demo.run(tmp_path / "store", said.append, limit=5_000)
    text = "\n".join(said)
    assert "5,000 flights" in text
    assert "equal to the byte" in text
    assert "each once, in order" in text
    assert "store.table('planes-last-1')[b'N14228']" in text
    assert "all 5,000 acknowledged records are in the log" in text
    assert "all 5,000 records, each once, shipped" in text
    assert said[-1].startswith("Everything held")


def test_a_check_of_the_demonstration_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that comes back changed fails the demo."""
    flights = demo_flights.load_flights(limit=100)
    changed = demo_flights.Flights([b"{}", *flights.values[1:]], flights.keys, flights.timestamps)
    monkeypatch.setattr(demo, "load_flights", lambda limit: flights)
    write = demo._write
    monkeypatch.setattr(demo, "_write", lambda store, _, say: write(store, changed, say))
    with pytest.raises(demo_flights.DemoFailed, match="this claim failed"):
        demo.run(tmp_path / "store", lambda _: None)


def test_without_a_client_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """confluent-kafka is missing: the step is left out, and all is well."""
    said: list[str] = []
    monkeypatch.setattr(demo_serving.importlib.util, "find_spec", lambda name: None)
    demo_serving.serve(tmp_path / "store", [b"x"], said.append)
    assert "pip install '.[demo]' in a clone of segmentlog" in said[-1]
    assert not (tmp_path / "store").exists()


def test_a_loss_fails_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a client got an acknowledgement for a record that is missing, the demonstration fails."""
    monkeypatch.setattr(demo_serving._Client, "join", _told_of_more(demo_serving._Client.join))
    with pytest.raises(demo_flights.DemoFailed, match="acknowledged"):
        demo_serving.serve(tmp_path / "store", [b"%d" % number for number in range(300)], lambda _: None)


def _told_of_more(join: Callable[[demo_serving._Client], None]) -> Callable[[demo_serving._Client], None]:
    def joined(client: demo_serving._Client) -> None:
        join(client)
        client.acknowledged[0] = b"another"

    return joined


def test_a_restore_that_lacks_records_fails_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that were acknowledged as shipped must be in the restore."""
    work = demo_shipping._work_until_killed
    monkeypatch.setattr(demo_shipping, "_work_until_killed", lambda *args: (work(*args)[0], 100_000))
    with pytest.raises(demo_flights.DemoFailed, match="acknowledged as shipped"):
        demo_shipping.ship(tmp_path / "store", [b"%d" % number for number in range(1000)], lambda _: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_demonstration_of_compaction_on_the_whole_year(tmp_path: Path) -> None:
    """All flights: the last record of each plane, and the last three, remain; the counts are those of plain Python."""
    flights = demo_flights.load_flights()
    said: list[str] = []
    demo._compact(tmp_path / "store", flights, said.append)
    with_tail = [key for key in flights.keys if key is not None]
    assert (len(flights), len(flights) - len(with_tail), len(set(with_tail))) == (336_776, 2_512, 4_043)
    assert "each of 4,043 planes" in said[0]
    counts = Counter(demo.plane_keys(flights))
    for keep_last in (1, 3):
        kept = sum(min(count, keep_last) for count in counts.values())
        assert any(f"keeping {keep_last} of each: 336,776 -> {kept:,} records" in line for line in said)
        with segmentlog.open(tmp_path / "store", read_only=True) as store:
            keys = Counter(key for batch in store.consumer(f"planes-last-{keep_last}").batches() for key in batch.keys)
        assert keys == {key: min(count, keep_last) for key, count in counts.items()}
        assert sum(not key.startswith(b"unknown:") for key in keys if key is not None) == 4_043
    last = {key: value for key, value in zip(flights.keys, flights.values, strict=True)}
    with segmentlog.open(tmp_path / "store", read_only=True) as store:
        assert store.table("planes-last-1")[b"N14228"] == last[b"N14228"]


def test_a_wrong_compaction_fails_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that keeps nothing more than it should, or less, is found."""
    flights = demo_flights.load_flights(limit=500)
    monkeypatch.setattr(Partition, "compact", lambda self: CompactionReport(self.topic, self.number))
    with pytest.raises(demo_flights.DemoFailed, match="the last 1 records of each key"):
        demo._compact(tmp_path / "store", flights, lambda _: None)


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`segmentlog demo`, called in a folder."""
    command = [sys.executable, "-m", "segmentlog", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)


@pytest.mark.long
def test_the_demo_command_keeps_its_store(tmp_path: Path) -> None:
    """`segmentlog demo --keep --no-spark` keeps a store that opens, and only that."""
    done = run_demo(tmp_path, "--limit", "2000", "--keep", "kept", "--no-spark")
    assert done.returncode == 0, done.stderr
    assert "PARTITION" in done.stdout
    assert "Spark" not in done.stdout
    assert (tmp_path / "kept" / "store.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_demo_does_not_mix_with_what_spark_made_before(tmp_path: Path) -> None:
    """A checkpoint of an earlier store would mark all records as read: the demonstration refuses to start with it."""
    (tmp_path / "kept-spark").mkdir()
    done = run_demo(tmp_path, "--limit", "2000", "--keep", "kept")
    assert (done.returncode, done.stdout) == (1, "")
    assert "kept-spark: it exists" in done.stderr


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("pyspark", "Spark needs the package pyspark: pip install '.[spark]' in a clone of segmentlog"),
        ("java", "Spark needs Java 17 or newer, and none was found. Install one,"),
    ],
)
def test_without_spark_its_steps_are_left_out(
    missing: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demonstration reports in one line what is missing, and succeeds."""

    def find_spec(name: str) -> object | None:
        return None if name == missing else object()

    def find_java() -> Java:
        raise JavaNotFound

    monkeypatch.setattr(demo_spark.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(demo_spark, "find_java", find_java)
    said: list[str] = []
    demo_spark.run_on_spark(tmp_path / "store", demo_flights.Flights([], [], []), tmp_path / "delays.png", said.append)
    assert len(said) == 1
    assert said[0].startswith("Steps 12 to 14 are skipped. " + sentence)
    assert list(tmp_path.iterdir()) == []


def test_the_plot_shows_every_flight(tmp_path: Path) -> None:
    """The picture is made of the hours that plain Python finds; one that a flight is missing from fails."""
    flights = demo_flights.load_flights(limit=2_000)
    hours, said = demo_spark.compute_hours(flights), list[str]()
    assert sum(hour.flights for hour in hours.values()) == 2_000
    path = tmp_path / "delays.png"
    demo_spark._plot(hours, 2_000, path, said.append)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert said[-1] == f"   drawn: {path}"
    with pytest.raises(demo_flights.DemoFailed, match="every flight is in the plot"):
        demo_spark._plot(hours, 2_001, path, said.append)


@pytest.mark.long
def test_bench_measures_every_policy_and_leaves_nothing(tmp_path: Path) -> None:
    """`segmentlog bench` gives a row a policy; always puts nothing at risk, and fsyncs every append.

    Risk is measured at one rate for all, over several intervals of the default policy: so that is between the two.
    """
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
    *rows, web_service = rows
    assert (web_service["fsync"], web_service["threads"], web_service["batch_size"]) == ("always", 16, 1)
    assert web_service["records_per_s"] > 0
    by_policy = {row["fsync"]: row for row in rows}
    assert list(by_policy) == ["always", "10ms", "1000ms", "1000records", "1MiB", "never"]
    assert by_policy["always"]["records_at_risk_max"] == 0
    assert by_policy["always"]["fsyncs"] > 0
    assert len({row["risk_records_per_s"] for row in rows}) == 1
    assert by_policy["1000ms"]["risk_seconds"] >= 3
    assert by_policy["1000ms"]["fsyncs_per_s"] > 0
    assert by_policy["never"]["fsyncs_per_s"] == 0
    never, default = by_policy["never"]["records_at_risk_max"], by_policy["1000ms"]["records_at_risk_max"]
    assert 0 < default < never
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("row", ["append lists, keyed, lz4", "read values", "append one record", "random offset"])
def test_the_limits_bench_runs(row: str) -> None:
    """A row of the limits bench runs at a small size and tells both sides; how fast is not asserted."""
    command = [sys.executable, "-m", "bench.limits", "--rounds", "1", "--scale", "0.05", "--only", row, "--json"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ours"] > 0
    assert result["limit"] > 0
