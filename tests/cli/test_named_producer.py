"""`produce --producer NAME`: killed anywhere and run again, each line is there once."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from cli.processes import WAIT_S, finish, started, stop, unmeasured
from seeds import seeds, share
from waiting import wait_until

import segmentlog

pytestmark = pytest.mark.long

LINES = 8_000


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with an empty topic `t` of three partitions."""
    with segmentlog.open(tmp_path / "store") as opened:
        opened.create_topic("t", partitions=3)
    return tmp_path / "store"


def held(store: Path, topic: str = "t") -> dict[int, list[bytes]]:
    """Return the values of each partition, in order."""
    with segmentlog.open(store, read_only=True) as opened:
        found: dict[int, list[bytes]] = {number: [] for number in range(opened.topic(topic).partition_count)}
        for record in opened.consumer(topic):
            found[record.partition].append(record.value or b"")
    return found


def count(store: Path) -> int:
    """Return the number of records in the topic."""
    with segmentlog.open(store, read_only=True) as opened:
        return sum(log.log_end_offset for log in opened.topic("t").partitions())


def has_sent(store: Path, target: int, process: subprocess.Popen[bytes]) -> bool:
    """Return whether this many records exist, or the process has ended."""
    return count(store) >= target or process.poll() is not None


def check_each_once(store: Path, wanted: list[bytes]) -> None:
    """Check that each value is stored once, and that each partition keeps the order of the input."""
    found = held(store)
    assert sorted(value for values in found.values() for value in values) == sorted(wanted)
    place = {value: number for number, value in enumerate(wanted)}
    for values in found.values():
        places = [place[value] for value in values]
        assert places == sorted(places)


def produce(store: Path, file: Path, *arguments: str, name: str = "job") -> str:
    """Run it to a good end: what it said."""
    done = finish(store, "produce", "t", str(file), "--producer", name, *arguments)
    assert done.returncode == 0, done.stderr
    err: bytes = done.stderr
    return err.decode()


# ---------------------------------------------------------------- killed


@pytest.mark.parametrize("arguments", [(), ("-k", ":"), ("--partition", "1")])
@pytest.mark.parametrize("seed", seeds("killed producers"))
def test_killed_at_any_moment_and_run_again(store: Path, tmp_path: Path, arguments: tuple[str, ...], seed: int) -> None:
    """After any number of kills, on several partitions, with and without keys, each line is there once, in order."""
    chance = random.Random(f"{seed} {arguments}")
    lines = [b"%d:line %d" % (number % 97, number) for number in range(LINES)]
    file = tmp_path / "lines"
    file.write_bytes(b"\n".join(lines) + b"\n")
    command = ("produce", "t", str(file), "--producer", "job", "--batch-size", "40", "--ack", "durable", *arguments)
    kills = 0
    rounds = share(10, "killed producers")
    for target in sorted(chance.sample(range(1, LINES), rounds)):
        with started(store, *command, env=unmeasured()) as process:
            if kills % 4 == 3:
                time.sleep(chance.uniform(0.05, 0.5))  # while it starts, registers, or skips the lines sent before
            else:
                wait_until(partial(has_sent, store, target, process))
            process.kill()
            kills += process.wait(WAIT_S) == -signal.SIGKILL
    while kills < rounds // 2:  # on a busy machine it had come to its end each time: then while it starts
        with started(store, *command, env=unmeasured()) as process:
            process.kill()
            kills += process.wait(WAIT_S) == -signal.SIGKILL
    produce(store, file, *arguments)
    check_each_once(store, lines if "-k" not in arguments else [line.partition(b":")[2] for line in lines])
    assert finish(store, "verify").returncode == 0


def test_stopped_by_a_signal_and_run_again(store: Path, tmp_path: Path) -> None:
    """A run that was asked to end says so by its status; the next one appends the rest."""
    lines = [b"%d" % number for number in range(LINES)]
    file = tmp_path / "lines"
    file.write_bytes(b"\n".join(lines))
    with started(store, "produce", "t", str(file), "--producer", "job", "--batch-size", "10", "--ack", "durable",
                 env=unmeasured()) as process:  # fmt: skip
        wait_until(lambda: count(store) > 100)
        _, err = stop(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert "fewer" not in err, "what was not read is not missing"
    produce(store, file)
    check_each_once(store, lines)


# ---------------------------------------------------------------- run again


def prefixed(values: list[bytes]) -> bytes:
    """Return records with their lengths before them."""
    return b"".join(len(value).to_bytes(4, "big") + value for value in values)


def as_json(values: list[bytes]) -> bytes:
    """Return records with a partition, with a key, and with neither, in turn."""
    documents = [
        f'"value":"{value.decode()}"' + (f',"partition":{number % 2}', f',"key":"k{number % 5}"', "")[number % 3]
        for number, value in enumerate(values)
    ]
    return b"".join(b"{%b}\n\n" % one.encode() for one in documents)


SHAPES: list[tuple[str, Callable[[list[bytes]], bytes]]] = [
    ("lines", lambda values: b"".join(value + b"\n" for value in values)),
    ("nul", lambda values: b"".join(value + b"\0" for value in values)),
    ("length-prefixed", prefixed),
    ("json", as_json),
]


@pytest.mark.parametrize(("shape", "encode"), SHAPES, ids=[shape for shape, _ in SHAPES])
def test_run_again_it_appends_nothing_and_of_a_file_that_grew_the_rest(
    store: Path, tmp_path: Path, shape: str, encode: Callable[[list[bytes]], bytes]
) -> None:
    """This holds for every format and batch size; the summary has the number of records that existed already."""
    lines = [b"%d" % number for number in range(5000)]
    file = tmp_path / "input"
    file.write_bytes(encode(lines[:3000]))
    assert produce(store, file, "--format", shape).startswith("3,000 records")
    before = held(store)
    assert all(before.values())
    err = produce(store, file, "--format", shape, "--batch-size", "7")
    assert err.startswith("0 records")
    assert "earlier runs had appended 3,000" in err
    assert held(store) == before
    file.write_bytes(encode(lines))
    err = produce(store, file, "--format", shape, "--batch-size", "1000")
    assert err.startswith("2,000 records")
    check_each_once(store, lines)


def test_partitions_that_are_added_do_not_move_lines(store: Path, tmp_path: Path) -> None:
    """The job continues with its initial partitions; another job uses all."""
    lines = [b"%d:%d" % (number % 31, number) for number in range(8000)]
    file = tmp_path / "lines"
    for name, options in (("plain", ()), ("keyed", ("-k", ":"))):
        file.write_bytes(b"".join(line + b"\n" for line in lines[:5000]))
        produce(store, file, *options, name=name)
        with segmentlog.open(store) as opened:
            opened.alter_topic("t", partitions=opened.topic("t").partition_count + 2)
        file.write_bytes(b"".join(line + b"\n" for line in lines))
        assert "earlier runs had appended 5,000" in produce(store, file, *options, name=name)
    found = held(store)
    assert len(found) == 7
    values = [value for one in found.values() for value in one]
    assert sorted(values) == sorted([*lines, *(line.partition(b":")[2] for line in lines)])
    assert not any(b":" in value for number in (3, 4, 5, 6) for value in found[number])
    assert not found[5], "the second job began with five"


def test_an_input_with_less_than_was_sent_is_told(store: Path, tmp_path: Path) -> None:
    """The error has both counts: the input was truncated, or is another one. Nothing is appended."""
    file = tmp_path / "lines"
    file.write_bytes(b"".join(b"%d\n" % number for number in range(3000)))
    produce(store, file)
    before = held(store)
    file.write_bytes(b"".join(b"%d\n" % number for number in range(1500)))
    done = finish(store, "produce", "t", str(file), "--producer", "job")
    assert done.returncode == 1
    err = done.stderr.decode()
    assert err.count("error: ") == 1
    assert "fewer records" in err
    assert "476 of 1,024 for t/1, 0 of 952 for t/2" in err
    assert held(store) == before


def test_another_input_under_the_same_name_is_told(store: Path, tmp_path: Path) -> None:
    """A second input would be taken for the rest of the first one: the record at its end is compared."""
    (tmp_path / "a").write_bytes(b"".join(b"a%d\n" % number for number in range(100)))
    (tmp_path / "b").write_bytes(b"".join(b"b%d\n" % number for number in range(200)))
    produce(store, tmp_path / "a")
    done = finish(store, "produce", "t", str(tmp_path / "b"), "--producer", "job")
    assert done.returncode == 1
    assert b"record 100 of the input differs from the record that producer 'job' sent to t/0" in done.stderr
    produce(store, tmp_path / "b", name="another")
    assert count(store) == 300


def test_a_last_line_that_was_not_finished_is_told(store: Path, tmp_path: Path) -> None:
    """An unfinished last line was sent as it was: if it is longer in the next run, the run reports a mismatch."""
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntw")
    produce(store, file)
    file.write_bytes(b"one\ntwo\nthree\n")
    done = finish(store, "produce", "t", str(file), "--producer", "job")
    assert done.returncode == 1
    assert b"record 2 of the input differs from the record that producer 'job' sent to t/0" in done.stderr
    assert held(store)[0] == [b"one", b"tw"]


def test_a_second_instance_fences_the_first(store: Path, tmp_path: Path) -> None:
    """The later instance continues; the first ends with one line that says why, and duplicates nothing."""
    lines = [b"%d" % number for number in range(50)]
    (tmp_path / "lines").write_bytes(b"".join(line + b"\n" for line in lines))
    with started(store, "produce", "t", "--producer", "job", stdin=subprocess.PIPE) as first:
        assert first.stdin is not None
        first.stdin.write(b"".join(line + b"\n" for line in lines[:20]))
        first.stdin.flush()
        wait_until(lambda: count(store) == 20)
        assert "earlier runs had appended 20" in produce(store, tmp_path / "lines")
        _, err = first.communicate(b"".join(line + b"\n" for line in lines[20:]), timeout=WAIT_S)
    assert first.returncode == 1
    assert b"Traceback" not in err
    assert [line for line in err.decode().splitlines() if "records/s" not in line] == [
        line for line in err.decode().splitlines() if line.startswith("error: producer job: a newer instance took over")
    ]
    check_each_once(store, lines)


@pytest.mark.parametrize("shape", ["lines", "json"])
def test_a_record_that_cannot_be_sent_is_taken_out_and_the_rest_follows(
    store: Path, tmp_path: Path, shape: str
) -> None:
    """No later record was appended in any partition, so the order of the rest is kept."""
    lines = [b'"%d"' % number if shape == "json" else b"%d" % number for number in range(4000)]
    records = [b'{"value":%b}' % line for line in lines] if shape == "json" else list(lines)
    records[2500:2500] = [b"{" if shape == "json" else b"x" * 2_000_000]
    file = tmp_path / "input"
    file.write_bytes(b"\n".join(records))
    done = finish(store, "produce", "t", str(file), "--producer", "job", "--format", shape)
    assert done.returncode == 1
    assert b"record 2501" in done.stderr
    assert b"--skip" not in done.stderr
    assert b"run the command again" in done.stderr
    assert count(store) <= 2500
    file.write_bytes(b"\n".join(records[:2500] + records[2501:]))
    produce(store, file, "--format", shape)
    check_each_once(store, [line.strip(b'"') for line in lines])


def test_wrong_usage_is_told(store: Path) -> None:
    """Counting by hand and by name at once would leave records out."""
    assert finish(store, "produce", "t", "--producer", "job", "--skip", "3").returncode == 2
    done = finish(store, "produce", "t", "--producer", "")
    assert done.returncode == 1
    assert b"not empty" in done.stderr
