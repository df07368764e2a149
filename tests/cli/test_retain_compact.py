"""`segmentlog apply-retention` and `segmentlog compact`: what they remove, what they say, and when they do nothing."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli.processes import finish, on_terminal, started, stop
from waiting import wait_until

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import BusyRetry, run
from segmentlog.cli.option_types import SELECTOR
from segmentlog.records import RetentionReport
from segmentlog.storage.fs import FileSystem

Run = Callable[..., tuple[int, list[str], str]]

KEYS = 50
BATCHES = 40


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Topics `users` (compacted, two partitions), `old` (keeps two sealed segments) and `plain`."""
    path = tmp_path / "store"
    with segmentlog.open(path, background=False) as opened:
        users = opened.create_topic("users", partitions=2, cleanup_policy="compact", segment_records=200)
        for log in users.partitions():
            for number in range(BATCHES):
                log.append([b"%d" % number] * KEYS, keys=[b"user:%d" % key for key in range(KEYS)])
            log.roll()
        old = opened.create_topic("old", segment_records=10, retention_segments=2).partition(0)
        for _ in range(5):
            old.append([b"x" * 50] * 10)
        opened.create_topic("plain").partition(0).append([b"one"])
    return path


@pytest.fixture
def call(store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command on the store with a short lease wait; return (exit status, lines of stdout, stderr)."""
    monkeypatch.setattr("segmentlog.cli.common.LEASE_WAIT_S", 0.3)

    def call(*arguments: str) -> tuple[int, list[str], str]:
        status = run(cli, ["--dir", str(store), *arguments])
        sys.stdout.flush()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return status, out.splitlines(), err

    return call


def contents(store: Path) -> dict[str, tuple[bytes, int]]:
    """Return every file of a store, with its modification time."""
    return {
        str(path.relative_to(store)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in store.rglob("*")
        if path.is_file()
    }


def held_by_us(store: Path, name: str) -> Any:
    """Return the lease of a partition, for a ``with``."""

    @contextmanager
    def held() -> Iterator[None]:
        fd = os.open(store / name / "cleaner", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    return held()


def documents(lines: list[str]) -> list[dict[str, Any]]:
    """Return the printed JSON objects."""
    return [json.loads(line) for line in lines]


def count(store: Path, topic: str) -> int:
    """Return the number of records in a topic."""
    with segmentlog.open(store, read_only=True) as opened:
        return sum(len(batch) for batch in opened.consumer(topic).batches())


# ---------------------------------------------------------------- retain


def test_retain_deletes_what_is_too_much(call: Run, store: Path) -> None:
    """A line for each segment with its extent and the reason, a summary of all; once more finds nothing."""
    status, lines, err = call("apply-retention")
    assert status == 0
    assert [line.split(" bytes")[0].rpartition(", ")[0] for line in lines] == [
        "old/0: [0, 10)",
        "old/0: [10, 20)",
    ]
    assert all(line.endswith("deleted: more than 2 sealed segments (retention.segments)") for line in lines)
    assert err.startswith("2 segments of 1 partitions, 20 offsets, ")
    assert err.endswith(" bytes deleted: 2 by retention.segments\n")
    with segmentlog.open(store, read_only=True) as opened:
        assert opened.topic("old").partition(0).log_start_offset == 20
    status, lines, err = call("apply-retention", "old/0")
    assert (status, lines, err) == (0, [], "nothing to delete in 1 partitions\n")


def test_retain_dry_run_changes_nothing(call: Run, store: Path) -> None:
    """It prints the same in other words, and changes no byte of the store."""
    before = contents(store)
    status, lines, err = call("apply-retention", "--dry-run")
    assert status == 0
    assert [" would be deleted: more than 2" in line for line in lines] == [True, True]
    assert "would be deleted" in err
    assert contents(store) == before


def test_retain_json(call: Run) -> None:
    """An object for each segment, then one for its partition."""
    status, lines, _ = call("apply-retention", "--json", "old")
    assert status == 0
    first, second, partition = documents(lines)
    assert (first["partition"], first["base_offset"], first["end_offset"]) == ("old/0", 0, 10)
    assert first["why"] == "more than 2 sealed segments (retention.segments)"
    assert partition == {
        "partition": "old/0",
        "log_start_offset": 20,
        "deleted_segments": 2,
        "deleted_bytes": first["size_bytes"] + second["size_bytes"],
        "rolled": False,
        "busy": False,
        "dry_run": False,
    }


def test_retain_seals_what_is_old(call: Run, store: Path) -> None:
    """A quiet active segment is sealed for its age, and goes for it; the summary tells both."""
    assert call("alter", "plain", "-c", "segment.ms=1ms", "-c", "retention.ms=1ms")[0] == 0
    time.sleep(0.01)
    status, lines, err = call("apply-retention", "plain", "--dry-run")
    assert (status, len(lines)) == (0, 1)
    assert err.endswith("1 by retention.ms; 1 active segments would be sealed\n")
    status, lines, err = call("apply-retention", "plain")
    assert (status, len(lines)) == (0, 1)
    assert err.endswith("1 by retention.ms; 1 active segments sealed\n")
    assert count(store, "plain") == 0


# ---------------------------------------------------------------- compact


def test_compact_keeps_the_last_of_each_key(call: Run, store: Path) -> None:
    """A line for each partition, the sum on stderr, and the records to match; a second pass has nothing to do."""
    status, lines, err = call("compact")
    assert status == 0
    assert [line.split(",")[0] for line in lines] == [f"users/{number}: 2000 -> 50 records" for number in range(2)]
    assert all("10 -> 1 segments, 0 tombstones removed, 0 expired, 1 pass, " in line for line in lines)
    assert err.startswith("2 partitions compacted: 4,000 -> 100 records, ")
    assert count(store, "users") == 2 * KEYS
    status, lines, err = call("compact", "users/1")
    assert (status, lines[0].split(",")[0]) == (0, "users/1: 50 -> 50 records")
    assert "(0% less)" in err


def test_compact_dry_run_changes_nothing(call: Run, store: Path) -> None:
    """The numbers of the pass that would be, and no byte of the store is touched; nor by --stats."""
    before = contents(store)
    planned = documents(call("compact", "--dry-run", "--json")[1])
    status, lines, err = call("compact", "--dry-run", "users/0")
    assert (status, lines[0].split(",")[0]) == (0, "users/0: 2000 -> 50 records")
    assert err.startswith("1 partitions would be compacted: 2,000 -> 50 records")
    assert call("compact", "--stats")[0] == 0
    assert contents(store) == before
    done = documents(call("compact", "--json")[1])
    for one, other in zip(planned, done, strict=True):
        assert (one["dry_run"], other["dry_run"]) == (True, False)
        for field in ("partition", "records_before", "records_after", "bytes_before", "bytes_after", "segments_after"):
            assert one[field] == other[field]


def test_compact_with_little_memory(call: Run, store: Path) -> None:
    """A map that is too small takes several passes, and ends in the same."""
    status, lines, _ = call("compact", "--buffer", "1000", "--json", "users/0")
    (report,) = documents(lines)
    assert status == 0
    assert report["passes"] > 1
    assert (report["records_before"], report["records_after"]) == (2000, 50)
    assert count(store, "users") == 2000 + KEYS


def test_compact_keeps_to_a_rate(call: Run, store: Path) -> None:
    """--max-rate is bytes read and written a second, after a burst of a fifth of one."""
    size = sum(path.stat().st_size for path in (store / "users" / "0").glob("*.log"))
    started_at = time.monotonic()
    assert call("compact", "--max-rate", str(size), "users/0")[0] == 0
    # The pass reads the whole log at least once and writes what remains; the limit counts both.
    assert time.monotonic() - started_at > 0.7


def test_compact_stats(call: Run) -> None:
    """The statistics show what a pass would remove, by prefix, largest first, and the total; as table and as JSON."""
    status, lines, _ = call("compact", "--stats", "--prefix-length", "6", "-n", "3")
    assert status == 0
    assert lines[0].startswith("users: what a pass would remove")
    # the prefix user:1 covers user:1 and user:10 to user:19
    assert lines[2].split()[:5] == ["user:1", "880", "22", "0", "858"]
    assert [line.split()[0] for line in lines[2:]] == ["user:1", "user:2", "user:3", "all"]
    assert lines[-1].split()[:9] == ["all", "(and", "7", "more", "prefixes)", "4000", "100", "0", "3900"]
    status, lines, _ = call("compact", "--stats", "--json", "users/1")
    assert status == 0
    size = sum(len(b"user:%d" % key) + len(b"%d" % number) for key in range(KEYS) for number in range(BATCHES))
    last = sum(len(b"user:%d" % key) + 2 for key in range(KEYS))
    numbers = {"records": 2000, "would_stay": 50, "tombstones": 0, "would_go": 1950}
    numbers |= {"bytes": size, "bytes_that_would_go": size - last}
    assert documents(lines) == [
        {"topic": "users", "prefix": "user", "total": False, **numbers},
        {"topic": "users", "prefix": None, "total": True, **numbers, "unreadable_batches": 0},
    ]
    _, lines, _ = call("compact", "--stats", "--json", "users/1", "--prefix-separator", "#")
    assert documents(lines)[0]["prefix"] == "(none)"


def test_details_of_a_compacted_topic(call: Run, store: Path) -> None:
    """How clean it is, when the last pass was, what it saved, and why it is left alone; on a read-only store too."""
    assert "cleaned_offset" not in documents(call("describe", "old", "--json")[1])[0]["partitions"][0]
    one = documents(call("describe", "users", "--json")[1])[0]["partitions"][0]
    assert (one["cleaned_offset"], one["dirty_ratio"], one["last_compaction"]) == (0, 1.0, None)
    assert call("compact", "users/0")[0] == 0
    with segmentlog.open(store, background=False) as opened:
        opened.topic("users").partition(1).record_uncleanable("it is full of holes")
    one, other = documents(call("describe", "users", "--json")[1])[0]["partitions"]
    assert (one["cleaned_offset"], one["dirty_ratio"], one["uncleanable"]) == (2000, 0.0, None)
    assert (one["last_compaction"]["records_before"], one["last_compaction"]["records_after"]) == (2000, 50)
    assert abs(time.time() * 1000 - one["last_compaction"]["at_ms"]) < 60_000
    assert (other["last_compaction"], other["uncleanable"]) == (None, "it is full of holes")
    before = contents(store)
    _, lines, _ = call("describe", "users", "-n", "0")
    assert lines[-3].split()[:3] == ["0", "2000", "0%"]
    assert lines[-3].split()[-2] == "1950"
    assert lines[-2].split() == ["1", "0", "100%", "-", "-", "-"]
    assert lines[-1] == "partition 1 uncleanable: it is full of holes"
    assert contents(store) == before


# ---------------------------------------------------------------- when nothing is done


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        ("apply-retention user", 1, "did you mean 'users'"),
        ("apply-retention old/7", 1, "no partition 7"),
        ("apply-retention no*", 1, "no topic matches"),
        ("apply-retention old/x", 2, "is not TOPIC or TOPIC/PARTITION"),
        ("compact user", 1, "did you mean 'users'"),
        ("compact plain", 1, "segmentlog alter plain -c cleanup.policy=compact"),
        ("compact plain/0 --dry-run", 1, "is not compacted (cleanup.policy = delete)"),
        ("compact plain --stats", 1, "is not compacted"),
        ("compact users/7", 1, "no partition 7"),
        ("compact --buffer 0", 2, "--buffer"),
        ("compact --buffer unlimited", 2, "--buffer"),
        ("compact --max-rate 0", 2, "--max-rate"),
        ("compact --max-rate much", 2, "much"),
        ("compact --prefix-length 3", 2, "--stats"),
        ("compact --stats --prefix-length 3 --prefix-separator :", 2, "exclude"),
        ("compact --stats --prefix-separator=", 2, "at least one character"),
        ("compact pl*", 0, "there are no compacted topics"),
        ("compact pl* --stats", 0, "there are no compacted topics"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(call: Run, arguments: str, status: int, told: str) -> None:
    """The error says what to do instead, and no results are printed."""
    found, lines, err = call(*arguments.split())
    assert (found, lines) == (status, []), err
    assert told in err


@pytest.mark.parametrize(
    "arguments", ["apply-retention", "apply-retention --dry-run", "compact", "compact --dry-run", "compact --stats"]
)
def test_without_a_store(tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: str) -> None:
    """It says so, and makes none."""
    assert run(cli, ["--dir", str(tmp_path / "none"), *arguments.split()]) == 1
    assert "there is no store here" in capfd.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("command", "topic"), [("apply-retention", "old"), ("compact", "users")])
def test_a_partition_that_another_process_is_at(call: Run, store: Path, command: str, topic: str) -> None:
    """A locked partition is skipped, which is reported as a failure; others are processed. A dry run needs no lock."""
    with held_by_us(store, f"{topic}/0"):
        assert call(command, "--dry-run", topic)[0] == 0
        status, lines, err = call(command, topic)
        assert status == 1
        assert f"error: {topic}/0: locked by another process" in err
        assert [line.split(":")[0] for line in lines] == (["users/1"] if topic == "users" else [])
    status, lines, _ = call(command, topic)
    assert status == 0
    assert lines[0].startswith(f"{topic}/0: ")


def test_patience_ends_once_for_all() -> None:
    """Ten busy partitions do not make it wait ten times; a signal ends the wait."""
    waits: list[float] = []

    def busy(wait_s: float) -> RetentionReport:
        waits.append(wait_s)
        time.sleep(wait_s)
        return RetentionReport("t", 0, 0, busy=True)

    patience = BusyRetry([], 0.3)
    assert patience.run(busy).busy
    assert 0.25 < sum(waits) < 1
    del waits[:]
    assert patience.run(busy).busy
    assert waits == [0.0]
    assert BusyRetry([signal.SIGINT], 3_600).run(busy).busy


def test_a_read_only_disk(call: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only disk, a dry run works, and a real run fails."""
    monkeypatch.setattr(FileSystem, "is_read_only", lambda self, path: True)
    before = contents(store)
    assert len(call("apply-retention", "old", "--dry-run")[1]) == 2
    assert len(call("compact", "--dry-run")[1]) == 2
    assert call("compact", "--stats")[0] == 0
    assert call("describe", "users")[0] == 0
    for arguments in (("apply-retention", "old"), ("compact",)):
        status, lines, err = call(*arguments)
        assert (status, lines) == (1, [])
        assert "read-only" in err
    assert contents(store) == before


def test_a_damaged_partition_does_not_keep_the_others(call: Run, store: Path) -> None:
    """Damage is reported with its file, the other partitions are compacted, and the exit status is that of damage."""
    path = min((store / "users" / "0").glob("*.log"))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 1)
        file.write(b"\xff" if path.read_bytes()[-1] != 0xFF else b"\x00")
    status, lines, err = call("compact")
    assert status == 3
    assert f"error: users/0: {path}: damaged" in err
    assert [line.split(",")[0] for line in lines] == ["users/1: 2000 -> 50 records"]
    status, lines, err = call("compact", "--stats", "--json")
    assert status == 3
    assert str(path) in err
    for index in path.parent.glob("*.*index"):  # so that they are rebuilt from the damaged file
        index.unlink()
    status, lines, err = call("compact")
    assert status == 3
    assert len(lines) == 1
    assert call("apply-retention")[0] == 0


def test_topics_of_the_store_itself_only_by_name(call: Run, store: Path) -> None:
    """Internal topics are included only by name."""
    (store / "users").rename(store / "__consumer_offsets")
    assert call("compact")[2].startswith("there are no compacted topics")
    assert len(call("compact", "__consumer_offsets")[1]) == 2
    assert not any("__" in line for line in call("apply-retention", "--json")[1])
    assert len(call("apply-retention", "--json", "__consumer_offsets")[1]) == 2


@pytest.mark.parametrize("command", ["apply-retention", "compact"])
def test_topics_are_completed(store: Path, command: str) -> None:
    """The shell offers names of topics."""
    found = cli.get_command(cli.make_context("segmentlog", ["--dir", str(store), "topics"]), command)
    assert found is not None
    context = cli.make_context("segmentlog", ["--dir", str(store), command])
    (argument,) = [one for one in found.params if one.name == "topic"]
    assert argument.type is SELECTOR
    assert [one.value for one in argument.shell_complete(context, "u")] == ["users"]


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--stats",)])
def test_a_signal_ends_a_pass_between_batches(store: Path, number: signal.Signals, options: tuple[str, ...]) -> None:
    """It prints that, the status is that of the signal, no record is lost, and the next pass completes the work."""
    with started(store, "compact", "--max-rate", "1", *options) as process:
        wait_until(lambda: f"{store}/users" in opened_by(process.pid))
        time.sleep(0.2)
        out, err = stop(process, number)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in err
    if options != ("--stats",):
        assert out.startswith(b"users/0: stopped; ")
        assert out.count(b"\n") == 1
    assert not list(store.rglob("*.cleaned"))
    assert finish(store, "verify", "--strict").returncode == 0
    assert count(store, "users") == 2 * BATCHES * KEYS
    assert finish(store, "compact").returncode == 0
    assert count(store, "users") == 2 * KEYS


def test_a_signal_in_the_middle_leaves_what_was_done(store: Path) -> None:
    """Segments that were replaced stay so; what is said of them is so."""
    with segmentlog.open(store, background=False) as opened:
        log = opened.create_topic("many", cleanup_policy="compact", fsync="never", segment_bytes=1500).partition(0)
        for number in range(80):
            log.append([os.urandom(400), os.urandom(400)], keys=[b"a", b"%d" % number])
        log.roll()
        size = sum(one.size_bytes for one in log.segments())
        before = len(log.segments())
    folder = store / "many" / "0"
    with started(store, "compact", "--json", "--max-rate", str(2 * size), "many") as process:
        wait_until(lambda: sum(path.stat().st_size < 700 for path in folder.glob("*.log")) > 5)
        out, err = stop(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.endswith("; stopped by SIGTERM\n")
    (report,) = documents(out.decode().splitlines())
    assert report["stopped"] is True
    assert (report["segments_before"], report["bytes_before"]) == (before, size)
    with segmentlog.open(store, read_only=True) as opened:
        segments = opened.topic("many").partition(0).segments()
    assert report["segments_after"] == len(segments)
    assert report["bytes_after"] == sum(one.size_bytes for one in segments) < size
    assert 81 < count(store, "many") < 160
    assert finish(store, "verify", "--strict").returncode == 0
    assert finish(store, "compact", "many").returncode == 0
    assert count(store, "many") == 81


def opened_by(pid: int) -> str:
    """Paths that a process has open or mapped."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("command", "unit"),
    [(("apply-retention",), "partitions"), (("compact",), "bytes"), (("compact", "--stats"), "bytes")],
)
def test_a_bar_is_drawn_on_a_terminal_only(store: Path, tmp_path: Path, command: tuple[str, ...], unit: str) -> None:
    """The bar is on stderr; results go to stdout, wherever that leads."""
    quiet = finish(store, *command, "--dry-run")
    assert b"\x1b" not in quiet.stderr + quiet.stdout
    assert quiet.stdout
    status, shown = on_terminal(store, *command, "--dry-run", streams="err")
    assert status == 0
    assert "━" in shown
    assert unit in shown
    assert "users/" not in shown, "results are not for stderr"
    status, shown = on_terminal(store, *command, "--dry-run", streams="out err", columns=120)
    assert status == 0
    assert ("old/0: [0, 10)" if command == ("apply-retention",) else "users") in shown


def test_dump_tells_what_compaction_left(tmp_path: Path) -> None:
    """Batches without records, and from when on tombstones may go."""
    path = tmp_path / "store"
    with segmentlog.open(path, background=False) as store:
        log = store.create_topic("t", cleanup_policy="compact").partition(0)
        log.append([b"old"] * 5, keys=[b"k"] * 5)
        log.roll()
        log.append([b"new", None], keys=[b"k", b"gone"])
        log.roll()
        log.compact()
        (segment, _) = log.segments()
    done = finish(path, "dump", "--records", segment.path)
    assert done.returncode == 0
    lines = done.stdout.decode().splitlines()
    assert "offsets [0, 5), 0 records, epoch 0, none" in lines[0]
    assert "offsets [5, 7), 2 records" in lines[1]
    assert "tombstones until " in lines[1]
    assert len(lines) == 4
