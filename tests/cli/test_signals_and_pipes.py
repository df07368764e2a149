"""Processes that are told to stop, whose reader goes away, or whose streams are closed or full."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.processes import WAIT_S, finish, read_until, shell, started, stop, unmeasured
from waiting import wait_until

import segmentlog

SIGNALS = [signal.SIGINT, signal.SIGTERM]
MANY = 60_000


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with an empty topic `t`."""
    with segmentlog.open(tmp_path / "store") as opened:
        opened.create_topic("t")
    return tmp_path / "store"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store whose topic `t` is larger than any pipe; tests only read it."""
    path = tmp_path_factory.mktemp("full") / "store"
    with segmentlog.open(path) as opened:
        partition = opened.create_topic("t", segment_records=500, segment_bytes=1 << 20).partition(0)
        for begin in range(0, MANY, 100):
            partition.append([b"value number %d" % number for number in range(begin, begin + 100)])
        for number in range(300):
            opened.create_topic(f"{number}-{'long-name-' * 23}")
    return path


def values(store: Path, topic: str = "t") -> list[bytes | None]:
    """Return the values of a topic."""
    with segmentlog.open(store, read_only=True) as opened:
        return [record.value for record in opened.consumer(topic)]


def records_said(err: str) -> int:
    """Return the count that a summary begins with."""
    found = re.search(r"^([\d,]+) records", err, re.MULTILINE)
    assert found, err
    return int(found[1].replace(",", ""))


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_produce_after_the_batch_in_hand(store: Path, number: signal.Signals) -> None:
    """Records before the signal are appended, and exactly these are reported; the store is intact."""
    with started(store, "produce", "--batch-size", "100", "t", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"".join(b"%d\n" % line for line in range(250)) + b"half a line")
        process.stdin.flush()
        wait_until(lambda: len(values(store)) == 250)
        process.send_signal(number)
        assert process.wait(WAIT_S) == 128 + number
        assert process.stderr is not None
        err = process.stderr.read().decode()
    assert "Traceback" not in err
    assert f"stopped by {number.name}" in err
    assert records_said(err) == 250
    assert values(store) == [b"%d" % line for line in range(250)]
    assert finish(store, "verify").returncode == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_produce_in_full_flight(store: Path, number: signal.Signals) -> None:
    """Everything said to be appended is there, in order, and nothing else."""
    with subprocess.Popen(["yes", "a line"], stdout=subprocess.PIPE) as source:
        with started(store, "produce", "t", stdin=source.stdout) as process:
            wait_until(lambda: len(os.listdir(store / "t")) > 1 and len(values(store)) > 0)
            _, err = stop(process, number)
        source.kill()
    assert process.returncode == 128 + number
    assert records_said(err) == len(values(store)) > 0
    assert set(values(store)) == {b"a line"}
    assert finish(store, "verify").returncode == 0


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", ["consume", "tail"])
def test_a_signal_ends_following(store: Path, command: str, number: signal.Signals) -> None:
    """Following has no other end: it is done then, says how much it printed, and exits with 0."""
    with segmentlog.open(store) as opened:
        opened.topic("t").partition(0).append([b"one", b"two"])
    with started(store, command, "-f", "t") as process:
        read_until(process, b"two\n")
        _, err = stop(process, number)
    assert process.returncode == 0
    assert f"stopped by {number.name}" in err
    assert records_said(err) == 2
    assert finish(store, "verify").returncode == 0


@pytest.mark.parametrize("arguments", [("consume", "t"), ("export", "t")])
def test_an_output_cut_short_by_a_signal_is_no_success(full: Path, arguments: tuple[str, ...]) -> None:
    """A script must not take the part that was written for the whole."""
    with started(full, *arguments) as process:
        read_until(process, b"number 0")  # the pipe is full now, or soon
        time.sleep(0.2)
        out, err = stop(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert out.count(b"\n") < records_said(err) < MANY
    assert out.endswith(b"\n"), "whole records only"
    assert "stopped by SIGTERM" in err


def test_an_import_cut_short_by_a_signal_is_no_success(store: Path) -> None:
    """Imported records are reported, and exist."""
    with started(store, "import", "--batch-size", "10", "-", "t", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b'{"value":"v"}\n' * 10_000)
        process.stdin.flush()
        wait_until(lambda: len(values(store)) > 1000)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            process.stdin.write(b'{"value":"v"}\n' * 10_000)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert records_said(err.decode()) == len(values(store)) < 20_000


def test_the_second_signal_does_not_wait(full: Path) -> None:
    """A process whose reader sleeps can be ended without kill -9."""
    with started(full, "consume", "t", env=unmeasured()) as process:
        read_until(process, b"number 0")
        time.sleep(0.3)  # without a reader, it waits for the pipe
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert process.poll() is None, "it still wants to finish what it has"
        while process.poll() is None:  # two signals that are pending together count once
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # a third one would kill it while it ends
        assert process.returncode == 1
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stopped_bench_deletes_its_store(tmp_path: Path, number: signal.Signals) -> None:
    """The folder that is made for a measurement goes, however that ends."""
    with started(tmp_path / "store", "bench", "--seconds", "10", env=unmeasured()) as process:
        wait_until(lambda: any(tmp_path.glob(".segmentlog-bench-*/store/always/0")))
        _, err = stop(process, number)
    assert (process.returncode, err.strip()) == (1, "stopped")
    assert list(tmp_path.iterdir()) == []


_IN_A_FINALIZER = """
import gc, os, signal, sys, time
from segmentlog.cli import common

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(10):
            time.sleep(0.001)

class Collected:
    def __init__(self):
        self.me = self
    __del__ = Dropped.__del__

common.prepare_process()
common.end_loading()
try:
    make = {"dropped": Dropped, "collected": Collected}[sys.argv[2]]
    with common.collect_signals() if sys.argv[3] == "twice" else common.contextlib.nullcontext():
        if sys.argv[3] == "twice":
            os.kill(os.getpid(), int(sys.argv[1]))  # the first one asks, the next one interrupts
            time.sleep(0.01)
        make()
        gc.collect()
        time.sleep(20)
    print("not heard")
except KeyboardInterrupt:
    print("heard", flush=True)
"""


@pytest.mark.parametrize("times", ["once", "twice"])
@pytest.mark.parametrize("how", ["dropped", "collected"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_comes_in_a_finalizer_is_heard(number: signal.Signals, how: str, times: str) -> None:
    """Python drops an exception there; the command must end nevertheless."""
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_FINALIZER, str(int(number)), how, times],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=WAIT_S, check=False, env=unmeasured(),
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == (b"heard\n", b"", 0)


_IN_MANY_FINALIZERS = """
import os, signal, sys, time
from segmentlog.cli import common

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10):
            time.sleep(0)

common.prepare_process()
common.end_loading()
common._AGAIN_S = 0.0  # a machine so busy that the signal comes again while Python still drops the first exception
sys.setswitchinterval(1e-6)
heard = 0
for _ in range(100):
    try:
        Dropped()
        time.sleep(20)
    except KeyboardInterrupt:
        heard += 1
print(heard, flush=True)
"""


def test_a_signal_is_repeated_only_after_python_has_dropped_the_first_exception() -> None:
    """A signal that is repeated too early raises in the hook for dropped exceptions, and is dropped as well."""
    done = subprocess.run(
        [sys.executable, "-c", _IN_MANY_FINALIZERS],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=WAIT_S, check=False, env=unmeasured(),
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == (b"100\n", b"", 0)


@pytest.mark.parametrize("command", ["consume", "bench"])
def test_a_process_told_to_ignore_a_signal_ignores_it(store: Path, command: str) -> None:
    """A background job of a script survives the Ctrl-C that was meant for what is in the foreground."""
    with segmentlog.open(store) as opened:
        opened.topic("t").partition(0).append([b"one"])
    arguments = ("consume", "-f", "t") if command == "consume" else ("bench", "--seconds", "10")

    def begun() -> bool:
        return any(store.parent.glob(".segmentlog-bench-*/store/always/0"))

    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN), "env": unmeasured()}
    with started(store, *arguments, **ignore) as process:
        if command == "consume":
            read_until(process, b"one\n")
        else:
            wait_until(begun)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        stop(process, signal.SIGTERM)
    assert not begun()


# ---------------------------------------------------------------- readers that go away


@pytest.mark.parametrize(
    "command",
    [
        "consume t",
        "consume -f t",
        "tail -f -n 100000 t",
        "details -n 100000 t",
        "topics",
        "export t",
        "verify",
        "--help",
        "dump --records $SEGMENTLOG_DIR/t/0/00000000000000000000.log",
    ],
)
def test_a_reader_that_has_seen_enough_is_no_failure(full: Path, command: str) -> None:
    """`| head -1` ends a command at once and quietly, with status 0."""
    done = shell(f'segmentlog {command} | head -1; exit "${{PIPESTATUS[0]}}"', SEGMENTLOG_DIR=full)
    err = done.stderr.decode()
    assert done.returncode == 0, err
    assert done.stdout.count(b"\n") == (0 if command == "verify" else 1)
    assert "Traceback" not in err
    assert "Broken" not in err
    assert "error" not in err.lower()


def test_following_ends_when_the_reader_does(store: Path) -> None:
    """`tail -f | head -1` ends though nothing is ever appended again."""
    with segmentlog.open(store) as opened:
        opened.topic("t").partition(0).append([b"one"])
    done = shell('segmentlog tail -f t | head -1; exit "${PIPESTATUS[0]}"', SEGMENTLOG_DIR=store)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"one\n", b"")


def test_a_writer_that_goes_away_ends_the_input(store: Path) -> None:
    """A source that is killed in the middle of a line leaves the lines it wrote, the last as far as it came."""
    done = shell("(printf 'one\\ntwo\\nthr'; kill -9 $BASHPID) | segmentlog produce t", SEGMENTLOG_DIR=store)
    assert done.returncode == 0, done.stderr
    assert values(store) == [b"one", b"two", b"thr"]


@pytest.mark.parametrize(
    ("options", "advice"), [((), "resume with --skip 2"), (("--producer", "p"), "run the command again")]
)
def test_an_input_that_fails_is_told(store: Path, options: tuple[str, ...], advice: str) -> None:
    """When a terminal hangs up, the received lines are appended, and the command says how to resume."""
    ours, theirs = os.openpty()
    try:
        os.write(theirs, b"one\ntwo\nthr")
        os.close(theirs)
        done = finish(store, "produce", *options, "t", stdin=ours)
    finally:
        os.close(ours)
    assert (done.returncode, values(store)) == (1, [b"one\r", b"two\r"])
    said = done.stderr.decode()
    assert said.startswith("2 records")
    assert advice in said
    assert said.endswith("error: Input/output error: stdin\n")


def test_offsets_that_cannot_be_printed_are_told_of_records_that_are_there(store: Path) -> None:
    """The advice on resuming counts records whose offsets stdout did not take."""
    done = shell("seq 3000 | segmentlog produce --batch-size 1 --print-offsets t >/dev/full", SEGMENTLOG_DIR=store)
    assert done.returncode == 1
    there = len(values(store))
    assert 0 < there < 3000
    assert f"resume with --skip {there}\n" in done.stderr.decode()


# ---------------------------------------------------------------- streams that are closed or full

PRINTING = [
    "topics --json",
    "details t",
    "consume t",
    "consume -f t",
    "tail t",
    "tail -f t",
    "export t",
    "flush t",
    "--version",
    "dump $SEGMENTLOG_DIR/t/0/00000000000000000000.log",
]


@pytest.mark.parametrize(
    ("command", "where"),
    [*((one, ">/dev/full") for one in PRINTING), *((one, ">&-") for one in ("topics", "consume t", "tail -f t", "-h"))],
)
def test_results_that_cannot_be_written_are_a_failure(full: Path, command: str, where: str) -> None:
    """A closed stdout and a full disk give a line that blames stdout, and status 1."""
    done = shell(f"segmentlog {command} {where}", SEGMENTLOG_DIR=full)
    errors = [line for line in done.stderr.decode().splitlines() if "error" in line]
    what = "Bad file descriptor" if where == ">&-" else "No space left on device"
    assert (done.returncode, errors) == (1, [f"error: {what}: stdout"])
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


@pytest.mark.parametrize("command", ["produce t", "import - t"])
def test_a_closed_stdin_is_told(store: Path, command: str) -> None:
    """A file of the store that got the free descriptor is not used as stdin."""
    done = shell(f"segmentlog {command} <&-", SEGMENTLOG_DIR=store)
    assert done.returncode == 1
    assert done.stderr.decode().startswith("error: stdin is closed")
    assert values(store) == []


@pytest.mark.parametrize("where", ["2>/dev/full", ">&- 2>&-"])
def test_messages_that_nobody_can_read_hold_nothing_up(store: Path, where: str) -> None:
    """produce needs neither stdout nor stderr, and does not write to a file of the store instead."""
    done = shell(f"echo one | segmentlog produce t {where}", SEGMENTLOG_DIR=store)
    assert done.returncode == 0
    assert values(store) == [b"one"]
    assert finish(store, "verify").returncode == 0
