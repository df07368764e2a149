"""`consume --group` commits exactly the printed records; and the `groups` commands."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.processes import WAIT_S, finish, on_terminal, read_until, shell, started, stop, unmeasured
from waiting import wait_until

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.records import TopicPartition

SIGNALS = [signal.SIGINT, signal.SIGTERM]
MANY = 40_000


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with a topic `t` of two partitions, 20 records in each, in batches of 4."""
    with segmentlog.open(tmp_path / "store") as opened:
        topic = opened.create_topic("t", partitions=2)
        for number in range(2):
            for begin in range(0, 20, 4):
                topic.partition(number).append(
                    [b"%d-%d" % (number, at) for at in range(begin, begin + 4)], timestamps=[1000 + begin] * 4
                )
    return tmp_path / "store"


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """Return a store whose topic `t` is larger than any pipe."""
    with segmentlog.open(tmp_path / "long") as opened:
        partition = opened.create_topic("t", segment_bytes=1 << 20).partition(0)
        for begin in range(0, MANY, 1000):
            partition.append([b"value number %d" % number for number in range(begin, begin + 1000)])
    return tmp_path / "long"


def committed(store: Path, group: str = "g") -> dict[str, int | None]:
    """Positions by partition."""
    with segmentlog.open(store, read_only=True) as opened:
        partitions = opened.groups.describe(group).partitions
        return {f"{one.topic}/{one.partition}": one.committed.offset if one.committed else None for one in partitions}


def read(store: Path, *arguments: str) -> list[bytes]:
    """Return the output of a member that ends successfully."""
    done = finish(store, "consume", "t", "-g", "g", "--values", *arguments)
    assert done.returncode == 0, done.stderr
    out: bytes = done.stdout
    return out.splitlines()


# ---------------------------------------------------------------- printing and committing


def test_the_next_run_goes_on_where_the_last_one_stopped(store: Path) -> None:
    """-n ends in the middle of a batch; a run without prints the rest, the next one what is new."""
    first, second = read(store, "-n", "5"), read(store, "-n", "5")
    assert len({*first, *second}) == 10
    rest = read(store)
    assert len({*first, *second, *rest}) == len(first + second + rest) == 40
    assert read(store) == []
    assert committed(store) == {"t/0": 20, "t/1": 20}
    with segmentlog.open(store) as opened:
        opened.topic("t").partition(1).append([b"new"])
    assert read(store) == [b"new"]
    assert len(finish(store, "consume", "t", "-g", "other", "--values").stdout.splitlines()) == 41


@pytest.mark.parametrize("size", ["1", "3"])
def test_the_size_of_what_is_printed_at_a_time_does_not_matter(store: Path, size: str) -> None:
    """For any size of the output buffer, each record is printed exactly once."""
    found = read(store, "--fetch-size", size, "-n", "7") + read(store, "--fetch-size", size)
    assert len(found) == len(set(found)) == 40


@pytest.mark.parametrize(
    ("place", "wanted"),
    [("earliest", 40), ("latest", 0), ("15", 10), ("-3", 6), ("@1008", 24), ("@99999999999999999", 0)],
)
def test_from_says_where_a_group_begins(store: Path, place: str, wanted: int) -> None:
    """--from applies to partitions without a committed offset; later runs resume at the committed offset."""
    assert len(read(store, "--from", place)) == wanted
    assert committed(store) == {"t/0": 20, "t/1": 20}
    assert read(store, "--from", "earliest") == []


def test_head_has_committed_what_came_through(long: Path) -> None:
    """Each record is printed once over several runs that a closed pipe ends, even within a batch and a record."""
    seen: list[int] = []
    for lines in (1, 700, 3):
        script = 'segmentlog --dir "$STORE" consume t -g g -q | (head -c 100; sleep 0.3; head -c "$BYTES") | cat'
        done = shell(script, STORE=long, BYTES=str(lines * 20))
        assert done.stderr == b""
        position = committed(long)["t/0"]
        assert position is not None
        assert done.stdout.splitlines()[0] == b"%d value number %d" % ((seen[-1] if seen else 0,) * 2)
        assert 0 < position < MANY
        seen.append(position)
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("shape", ["--values", "--json", "--format=%o-%s\\n", "-f"])
def test_what_head_throws_away_is_not_consumed(tmp_path: Path, shape: str) -> None:
    """`| head -3`, again and again, shows three records each time, and the next three the next time."""
    with segmentlog.open(tmp_path / "store") as opened:
        opened.create_topic("t").partition(0).append([b"value number %d" % number for number in range(4096)])
    for begin in (0, 3, 6):
        script = 'segmentlog --dir "$STORE" consume t -g g -q "$SHAPE" | head -3; exit "${PIPESTATUS[0]}"'
        done = shell(script, STORE=tmp_path / "store", SHAPE=shape)
        assert (done.returncode, done.stderr) == (0, b"")
        assert [b"value number %d" % number in line for number, line in enumerate(done.stdout.splitlines(), begin)] == (
            [True] * 3
        )
        assert committed(tmp_path / "store") == {"t/0": begin + 3}


def test_head_of_many_lines_throws_little_away(long: Path) -> None:
    """A reader of blocks leaves in the pipe what it does not want: a block, or a 256th, are the most that is lost."""
    script = 'segmentlog --dir "$STORE" consume t -g g -q | head -n "$LINES_WANTED" | tail -1'
    for wanted, slack in ((200, 0), (3000, 3000 // 256 + 1), (20_000, 8192 // 20)):
        before = committed(long).get("t/0") or 0
        done = shell(script, STORE=long, LINES_WANTED=str(wanted))
        shown = int(done.stdout.split()[0]) + 1
        position = committed(long)["t/0"]
        assert position is not None
        assert shown == before + wanted
        assert shown <= position <= shown + slack


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_what_nobody_reads_is_not_consumed(store: Path, follow: list[str]) -> None:
    """A reader that takes nothing of the little that there is: all of it is for the next one."""
    script = 'segmentlog --dir "$STORE" consume t -g g -q "$@" | sleep 1; exit "${PIPESTATUS[0]}"'
    done = shell(script.replace("$@", follow[0] if follow else "--values"), STORE=store)
    assert (done.returncode, done.stderr) == (0, b"")
    assert committed(store) == {"t/0": 0, "t/1": 0}
    assert len(read(store)) == 40


@pytest.mark.long
@pytest.mark.parametrize("taken", [7, 21])
def test_what_was_committed_too_early_is_taken_back(store: Path, taken: int) -> None:
    """If records of several partitions wait in one pipe, each partition resumes after the records that were read."""
    with started(store, "consume", "t", "-g", "g", "--format", r"%p %o\n") as process:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        out = b"".join(read_line(fd) for _ in range(taken))
        wait_until(lambda: in_pipe(fd) > 0 and rests(fd, 2.5))
        process.stdout.close()
        assert process.wait(WAIT_S) == 0
    found = {number: sum(line.startswith(b"%d " % number) for line in out.splitlines()) for number in range(2)}
    assert sum(found.values()) == taken
    assert committed(store) == {"t/0": found[0], "t/1": found[1]}


@pytest.mark.long
def test_a_slow_reader_is_waited_for(store: Path) -> None:
    """Printed records are not committed while the reader may still end; the commit follows its last byte."""
    with started(store, "consume", "t", "-g", "g", "--values") as process:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        wait_until(lambda: in_pipe(fd) > 0 and rests(fd, 2.5))
        assert process.poll() is None
        out, _ = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out.count(b"\n")) == (0, 40)
    assert committed(store) == {"t/0": 20, "t/1": 20}


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_does_not_wait_long_for_a_reader(store: Path, number: signal.Signals) -> None:
    """Whose reader sleeps can be ended in seconds; what the pipe holds it may still read, and counts as printed."""
    with started(store, "consume", "t", "-g", "g", "--values", env=unmeasured()) as process:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        wait_until(lambda: in_pipe(fd) > 0 and rests(fd, 2.5))
        process.send_signal(number)
        assert process.wait(WAIT_S) == 128 + number
        assert process.stdout.read().count(b"\n") == 40
    assert committed(store) == {"t/0": 20, "t/1": 20}


def test_a_file_takes_what_is_written(store: Path, tmp_path: Path) -> None:
    """A file gets all records; a full one gets those that fit."""
    with open(tmp_path / "out", "wb") as out:
        assert finish(store, "consume", "t", "-g", "g", "--values", stdout=out).returncode == 0
    assert len((tmp_path / "out").read_bytes().splitlines()) == 40
    assert committed(store) == {"t/0": 20, "t/1": 20}
    with open("/dev/full", "wb") as full:
        assert finish(store, "consume", "t", "-g", "other", stdout=full).returncode == 1
    assert committed(store, "other") == {"t/0": 0, "t/1": 0}


@pytest.mark.parametrize("taken_bytes", [30_000, 30_007, 100_001])
def test_what_waits_in_a_closed_pipe_is_not_consumed(long: Path, taken_bytes: int) -> None:
    """The cut record is the next command's first, also if its writer had it committed."""
    with started(long, "consume", "t", "-g", "g") as process:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        left = taken_bytes
        while left:
            left -= len(os.read(fd, left))
        wait_until(lambda: in_pipe(fd) > 1 << 15 and rests(fd))
        process.stdout.close()
        assert process.wait(WAIT_S) == 0
        assert process.stderr is not None
        assert b"error" not in process.stderr.read()
    everything = b"".join(b"%d value number %d\n" % (number, number) for number in range(MANY))
    assert committed(long) == {"t/0": everything[:taken_bytes].count(b"\n")}


def read_line(fd: int) -> bytes:
    """Read one line, and no byte of the next one."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(fd, 1)
    return line


def in_pipe(fd: int) -> int:
    """Return the number of bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def rests(fd: int, seconds: float = 0.3) -> bool:
    """Return whether the content of a pipe stays the same for a while: it is full, or its writer is done or waits."""
    before = in_pipe(fd)
    time.sleep(seconds)
    return in_pipe(fd) == before


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("follow", [True, False])
def test_a_signal_commits_what_was_printed(long: Path, number: signal.Signals, follow: bool) -> None:
    """A signal also makes the member leave at once: the next member gets the partition, and continues after it."""
    with started(long, "consume", "t", "-g", "g", *(["-f"] if follow else []), env=unmeasured()) as process:
        out = read_until(process, b"number 500\n")
        more, err = stop(process, number)
    printed = (out + more).count(b"\n")
    assert process.returncode == (0 if follow else 128 + number)
    assert f"stopped by {number.name}" in err
    assert 500 < printed < MANY
    assert committed(long) == {"t/0": printed}
    with segmentlog.open(long, read_only=True) as opened:
        assert opened.groups.describe("g").state == "Empty"
    assert read(long, "-n", "1") == [b"value number %d" % printed]


def test_following_commits_while_nothing_comes(store: Path) -> None:
    """A member that is killed while it waits has nothing printed again."""
    with started(store, "consume", "t", "-g", "g", "-f") as process:
        read_until(process, b"19 1-19\n")
        wait_until(lambda: committed(store) == {"t/0": 20, "t/1": 20})
        process.kill()
        process.wait(WAIT_S)
    assert read(store) == []


def test_killed_again_and_again_nothing_is_left_out(long: Path) -> None:
    """kill -9 may have something printed twice, and loses nothing."""
    seen: set[bytes] = set()
    for pause_s in (0.0, 0.02, 0.05, 0.1):
        with started(long, "consume", "t", "-g", "g", "--values") as process:
            out = read_until(process, b"\n")
            time.sleep(pause_s)
            process.kill()
            out += process.communicate(timeout=WAIT_S)[0]
        seen.update(line for line in out.splitlines(keepends=True) if line.endswith(b"\n"))
    seen.update(line + b"\n" for line in read(long))
    assert len(seen) == MANY


@pytest.mark.long
def test_two_members_share_the_partitions(store: Path) -> None:
    """One member reads each partition; when a member leaves, the other gets all. Rebalances are printed on stderr."""
    follow = ("consume", "t", "-g", "g", "-f", "--format", r"%p %s\n")
    with contextlib.ExitStack() as processes:
        one = processes.enter_context(started(store, *follow))
        wait_until(lambda: describe_state(store) == ("Stable", 1))  # it has all, and so something to hand over
        other = processes.enter_context(started(store, *follow))
        wait_until(lambda: describe_state(store) == ("Stable", 2))
        with segmentlog.open(store) as opened:
            for number in range(2):
                opened.topic("t").partition(number).append([b"together-%d" % number])
        wait_until(lambda: committed(store) == {"t/0": 21, "t/1": 21})
        out, err = stop(one)
        wait_until(lambda: describe_state(store) == ("Stable", 1))
        with segmentlog.open(store) as opened:
            for number in range(2):
                opened.topic("t").partition(number).append([b"alone-%d" % number])
        rest = read_until(other, b"alone-0\n")
        if b"alone-1\n" not in rest:
            rest += read_until(other, b"alone-1\n")
        other_out, other_err = stop(other)
    lines = (out + rest + other_out).splitlines()
    assert len(lines) == len(set(lines)) == 44, "nothing twice, nothing left out"
    assert [b"together-0" in text for text in (out, rest)] != [b"together-1" in text for text in (out, rest)]
    assert "group g: reads t/" in err
    assert "group g: releases t/" in err + other_err


def describe_state(store: Path) -> tuple[str, int]:
    """State and number of members of the group."""
    with segmentlog.open(store, read_only=True) as opened:
        found = opened.groups.describe("g")
        return found.state, len(found.members)


def test_a_group_sees_what_a_reader_would(store: Path) -> None:
    """--isolation and --durable-only apply to members, too; markers after the last record do not count as lag."""
    with segmentlog.open(store) as opened, opened.producer(name="p") as producer:
        with producer.transaction():
            producer.send("t", b"committed", partition=0)
        assert b"committed" in read(store, "--isolation", "read_committed")
        producer.begin_transaction()
        producer.send("t", b"open", partition=0)
        producer.flush()
        assert read(store, "--isolation", "read_committed") == []
        assert read(store, "--durable-only", "--isolation", "read_committed") == []
        assert read(store) == [b"open"]
        producer.abort_transaction()
    read(store)
    with segmentlog.open(store, read_only=True) as opened:
        assert [one.lag for one in opened.groups.describe("g").partitions] == [0, 0]


def test_quiet_says_nothing(store: Path) -> None:
    """With --quiet, neither a summary nor assignments are printed."""
    assert finish(store, "consume", "t", "-g", "g", "-q").stderr == b""


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("t", "--partition", "0"), b"the group assigns partitions"),
        (("t/0",), b"the group assigns partitions"),
        (("t", "--to", "5"), b"--to and --group"),
    ],
)
def test_what_does_not_go_with_a_group_is_wrong_usage(store: Path, arguments: tuple[str, ...], why: bytes) -> None:
    """The error gives the reason, and no group is created."""
    done = finish(store, "consume", "-g", "g", *arguments)
    assert done.returncode == 2
    assert why in done.stderr
    assert committed(store) == {}


# ---------------------------------------------------------------- groups

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(store: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process: (exit status, stdout, stderr)."""

    def call(*arguments: str, directory: Path = store) -> tuple[int, str, str]:
        status = run(cli, ["--dir", str(directory), *arguments])
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return status, out.decode(), err.decode()

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    return call


@pytest.fixture
def group(store: Path) -> str:
    """Return a group that has read 8 records of t/0, and none of t/1."""
    with segmentlog.open(store) as opened, opened.consumer("t", group="g") as consumer:
        consumer.poll_group(5)
        consumer.commit({TopicPartition("t", 0): 8, TopicPartition("t", 1): 0}, metadata="by hand")
    return "g"


@pytest.fixture
def member(store: Path, group: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that is a member of the group."""
    with started(store, "consume", "t", "-g", group, "-f") as process:
        read_until(process, b"1-19\n")
        yield process


def documents(out: str) -> list[dict[str, Any]]:
    """Return the documents that --json printed."""
    return [json.loads(line) for line in out.splitlines()]


def test_a_name_is_no_more_than_a_name(store: Path) -> None:
    """Control characters are escaped, a row is one line, and characters that a terminal lacks cause no error."""
    name = "red\x1b[31m\ncl\x9bear\u202eevil\t\u65e5"
    with segmentlog.open(store) as opened:
        opened.groups.reset(name, {TopicPartition("t", 0): 8}, metadata="\x1b]0;title\x07")
    shown = r"red\x1b[31m\ncl\x9bear\u202eevil\t"
    for command in (("list",), ("describe", name)):
        status, out = on_terminal(store, "groups", *command, streams="out", columns=250)
        assert status == 0
        assert shown in out
        assert not {"\x9b", "\u202e", "\x07"} & set(out)
        assert "\x1b[31m" not in out
        assert "\x1b]" not in out
    latin = finish(store, "groups", "list", env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert latin.returncode == 0
    assert (shown + r"\u65e5").encode() in latin.stdout
    missing = finish(store, "groups", "describe", name + "?")
    assert missing.returncode == 1
    assert b"\x1b" not in missing.stderr


def test_groups_are_listed_and_described(call: Run, group: str) -> None:
    """Tables and JSON have the state, offsets, ends, lag, time and metadata."""
    assert call("groups", "list")[1].splitlines()[1].split() == ["g", "Empty", "0", "t", "32"]
    assert documents(call("groups", "list", "--json")[1]) == [
        {"group": "g", "state": "Empty", "members": 0, "topics": ["t"], "lag": 32}
    ]
    out = call("groups", "describe", group)[1]
    assert out.startswith("g: Empty, generation ")
    assert "by hand" in out
    (found,) = documents(call("groups", "describe", group, "--json")[1])
    assert (found["state"], found["members"]) == ("Empty", [])
    first = found["partitions"][0]
    assert (first["topic"], first["partition"], first["committed_offset"]) == ("t", 0, 8)
    assert (first["log_end_offset"], first["lag"], first["member"], first["metadata"]) == (20, 12, None, "by hand")
    assert abs(first["committed_ms"] / 1000 - time.time()) < 600


def test_members_are_described(call: Run, member: subprocess.Popen[bytes]) -> None:
    """`describe` shows which process reads which partition, and when it last polled."""
    wait_until(lambda: "Stable" in call("groups", "describe", "g")[1])
    (found,) = documents(call("groups", "describe", "g", "--json")[1])
    (one,) = found["members"]
    assert (one["pid"], one["client_id"], one["partitions"]) == (member.pid, "consume", ["t/0", "t/1"])
    assert one["host"]
    assert 0 <= one["last_poll_s"] < WAIT_S
    assert {partition["member"] for partition in found["partitions"]} == {one["member"]}
    assert documents(call("groups", "list", "--json")[1])[0]["members"] == 1
    out = call("groups", "describe", "g")[1]
    assert str(member.pid) in out
    assert "t/0, t/1" in out


RESETS = [
    (("--to-earliest",), (0, 0)),
    (("--to-latest",), (20, 20)),
    (("--to-offset", "7"), (7, 7)),
    (("--to-offset", "700"), (20, 20)),
    (("--to-datetime", "@1008"), (8, 8)),
    (("--to-datetime", "1970-01-01T00:00:01.004+00:00"), (4, 4)),
    (("--to-datetime", "-1h"), (20, 20)),
    (("--by-duration", "1h"), (20, 20)),
    (("--shift-by", "-3"), (5, 0)),
    (("--shift-by", "5"), (13, 5)),
    (("--to-latest", "--topic", "t:1"), (8, 20)),
    (("--to-latest", "--topic", "t/0", "--topic", "t:0"), (20, 0)),
    (("--to-latest", "--topic", "t"), (20, 20)),
]


@pytest.mark.parametrize(("arguments", "wanted"), RESETS, ids=[" ".join(one) for one, _ in RESETS])
def test_positions_are_reset(call: Run, store: Path, group: str, arguments: tuple[str, ...], wanted: Any) -> None:
    """A dry run prints the same, and changes nothing; what lies outside is clamped, and said."""
    status, foreseen, err = call("groups", "reset", group, *arguments, "--dry-run", "--json")
    assert status == 0
    assert "would be moved" in err
    assert committed(store) == {"t/0": 8, "t/1": 0}
    status, out, err = call("groups", "reset", group, *arguments, "--json")
    assert status == 0
    assert committed(store) == {"t/0": wanted[0], "t/1": wanted[1]}
    moves = documents(out)
    assert [{**one, "dry_run": True} for one in moves] == documents(foreseen)
    old = {0: 8, 1: 0}
    assert all((one["old"], one["new"]) == (old[one["partition"]], wanted[one["partition"]]) for one in moves)
    assert ("is outside [0, 20]" in err) == (arguments in {("--to-offset", "700"), ("--shift-by", "-3")})
    assert call("groups", "reset", group, "--to-offset", "1")[1].splitlines()[1].split() == [
        "t", "0", str(wanted[0]), "1",
    ]  # fmt: skip


def test_a_reset_reaches_partitions_without_a_position(call: Run, store: Path, group: str) -> None:
    """Named partitions without a committed offset are reset, too, but cannot be shifted. Deleted topics are ignored."""
    with segmentlog.open(store) as opened:
        opened.create_topic("other").partition(0).append([b"a", b"b"])
    status, _, err = call("groups", "reset", group, "--topic", "other", "--shift-by", "1")
    assert status == 1
    assert "no committed offset in other/0" in err
    assert call("groups", "reset", group, "--topic", "other", "--to-latest")[0] == 0
    assert committed(store) == {"t/0": 8, "t/1": 0, "other/0": 2}
    shutil.rmtree(store / "other")  # by hand, since `delete` removes the committed offsets too
    status, out, err = call("groups", "reset", group, "--to-earliest", "--json")
    assert (status, len(documents(out))) == (0, 2)
    assert "other" not in err
    assert call("groups", "describe", group)[0] == 0


def test_a_reset_makes_the_positions_of_a_new_group(call: Run, store: Path) -> None:
    """As with Kafka's tool, it covers the topics of --topic, also in a store that has no groups yet."""
    arguments = ("groups", "reset", "new", "--topic", "t", "--to-offset", "18")
    status, foreseen, err = call(*arguments, "--dry-run", "--json")
    assert status == 0, err
    assert "2 committed offsets of new would be created" in err
    assert committed(store, "new") == {}
    status, out, err = call(*arguments, "--json")
    assert (status, [{**one, "dry_run": True} for one in documents(out)]) == (0, documents(foreseen))
    assert "2 committed offsets of new created" in err
    assert committed(store, "new") == {"t/0": 18, "t/1": 18}
    assert len(finish(store, "consume", "t", "-g", "new").stdout.splitlines()) == 4
    assert call("groups", "reset", "other", "--topic", "t:1", "--to-latest")[0] == 0
    assert committed(store, "other") == {"t/1": 20}
    assert call("groups", "reset", "third", "--topic", "t", "--shift-by", "1")[0] == 1
    assert call("groups", "reset", "", "--topic", "t", "--to-latest")[0] in (1, 2)
    assert "--topic" in call("groups", "reset", "third", "--to-latest")[2]


def test_a_group_reads_what_fits_a_pattern(store: Path) -> None:
    """Offsets are kept by topic; a pattern without matches is an error, unless topics may be created later."""
    with segmentlog.open(store) as opened:
        opened.create_topic("u").partition(0).append([b"u-0"])
        opened.create_topic("vv").partition(0).append([b"v-0"])
    done = finish(store, "consume", "?", "-g", "g", "--format", r"%t %s\n")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 41
    assert committed(store) == {"t/0": 20, "t/1": 20, "u/0": 1}
    assert finish(store, "consume", "x*", "-g", "g").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("reset", "g", "--to-latest", "--topic", "t:x"), 2, "'t:x' is not TOPIC or TOPIC:PARTITION"),
        (("reset", "g", "--to-latest", "--topic", "t/x"), 2, "'t/x' is not TOPIC or TOPIC:PARTITION"),
        (("reset", "g"), 2, "give exactly one of"),
        (("reset", "g", "--to-earliest", "--to-latest"), 2, "give exactly one of"),
        (("reset", "g", "--to-datetime", "latest"), 2, "give a time"),
        (("reset", "g", "--to-datetime", "soon"), 2, "or a time such as"),
        (("reset", "g", "--to-latest", "--topic", "a:b:c"), 2, "is not TOPIC"),
        (("reset", "g", "--to-latest", "--topic", "tt"), 1, "did you mean 't'"),
        (("reset", "g", "--to-latest", "--topic", "t:9"), 1, "no partition 9"),
        (("reset", "gg", "--to-latest"), 1, "did you mean 'g'"),
        (("describe", "nobody"), 1, "neither members nor committed offsets"),
        (("delete", "--yes", "nobody"), 1, "neither members nor committed offsets"),
        (("delete", "g"), 2, "add --yes"),
    ],
)
@pytest.mark.usefixtures("group")
def test_wrong_usage_is_told(call: Run, store: Path, arguments: tuple[str, ...], status: int, told: str) -> None:
    """The error is a line that says what to do, and nothing changes."""
    found, out, err = call("groups", *arguments)
    assert (found, out) == (status, "")
    assert told in err
    assert "Traceback" not in err
    assert committed(store) == {"t/0": 8, "t/1": 0}


def test_a_group_at_work_is_left_alone(call: Run, store: Path, member: subprocess.Popen[bytes]) -> None:
    """A group with live members is neither reset nor deleted; a killed member is gone at once."""
    for arguments in (
        ("reset", "g", "--to-earliest"),
        ("reset", "g", "--to-earliest", "--dry-run"),
        ("delete", "--yes", "g"),
    ):
        status, out, err = call("groups", *arguments)
        assert (status, out) == (1, "")
        assert "has 1 live members; stop them first" in err
    member.kill()
    member.wait(WAIT_S)
    assert call("groups", "reset", "g", "--to-earliest")[0] == 0
    assert committed(store) == {"t/0": 0, "t/1": 0}
    assert call("groups", "delete", "--yes", "g")[0] == 0
    assert call("groups", "list")[1] == ""
    assert len(read(store)) == 40, "it begins anew"


def test_a_store_without_groups(call: Run, tmp_path: Path) -> None:
    """A store without groups lists none, and is not changed by listing."""
    with segmentlog.open(tmp_path / "empty"):
        pass
    before = sorted(os.listdir(tmp_path / "empty"))
    status, out, err = call("groups", "list", directory=tmp_path / "empty")
    assert (status, out) == (0, "")
    assert "no groups yet" in err
    assert call("groups", "list", "--json", directory=tmp_path / "empty")[:2] == (0, "")
    assert call("groups", "describe", "g", directory=tmp_path / "empty")[0] == 1
    assert call("groups", "delete", "-y", "g", directory=tmp_path / "empty")[0] == 1
    assert sorted(os.listdir(tmp_path / "empty")) == before
