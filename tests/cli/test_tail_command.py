"""`segmentlog tail`: prompt when something comes, idle when nothing does, and there for what is made later."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.processes import finish, read_until, started, stop

import segmentlog


@pytest.fixture
def store(tmp_path: Path) -> Iterator[segmentlog.LogStore]:
    """Provide an open store with a topic `t` of one partition and the records 0 to 19."""
    with segmentlog.open(tmp_path / "store") as opened:
        opened.create_topic("t").partition(0).append([b"%d" % number for number in range(20)])
        yield opened


def path_of(store: segmentlog.LogStore) -> Path:
    """Return the folder of a store."""
    return Path(store.path)


def wake_ups(process: subprocess.Popen[bytes]) -> int:
    """Return how often the threads of a process have waited so far."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


@contextlib.contextmanager
def only_woken(store: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command whose followers poll once an hour: records they find earlier have woken them."""
    script = (
        "from segmentlog.consuming import wakeup; wakeup.WAIT_S = 3600.0; from segmentlog.__main__ import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, "--dir", str(store), *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("command", [("tail", "-f"), ("tail", "-f", "--json"), ("consume", "-f", "--from", "-1")])
def test_an_append_wakes_a_follower(store: segmentlog.LogStore, command: tuple[str, ...]) -> None:
    """A follower in another process prints each record when it is appended, and not when it looks again."""
    partition = store.topic("t").partition(0)
    with only_woken(path_of(store), *command, "t") as process:
        read_until(process, b"19")
        for number in range(10):
            value = b"record-%d-" % number
            partition.append([value])
            read_until(process, value)


def test_an_idle_follower_leaves_the_processor_alone(store: segmentlog.LogStore) -> None:
    """An idle follower wakes up once or twice a second, also with a pattern."""
    store.create_topic("other", partitions=8)
    path = path_of(store)
    with started(path, "tail", "-f", "t") as plain, started(path, "tail", "-f", "*") as pattern:
        read_until(plain, b"19\n")
        read_until(pattern, b"19\n")
        time.sleep(0.5)
        before = wake_ups(plain), wake_ups(pattern)
        time.sleep(1.5)
        used = wake_ups(plain) - before[0], wake_ups(pattern) - before[1]
        stop(plain)
        stop(pattern)
    assert max(used) < 40, used  # one that polls every 20 ms has 75


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], range(10, 20)),
        (["-n", "3"], range(17, 20)),
        (["-n", "0"], range(0)),
        (["-n", "20"], range(20)),
        (["-n", "21"], range(20)),
        (["-n", "99999999999999999999"], range(20)),
    ],
)
def test_so_many_last_records_are_printed(store: segmentlog.LogStore, options: list[str], expected: range) -> None:
    """Ten, or as many as -n says, or as many as there are; bare values, nothing else."""
    done = finish(path_of(store), "tail", *options, "t")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"".join(b"%d\n" % one for one in expected), b"")


def test_headers_tell_partitions_apart(store: segmentlog.LogStore) -> None:
    """As in tail(1), each header but the first follows an empty line, if there are several partitions."""
    events = store.create_topic("events", partitions=2)
    events.partition(0).append([b"a"])
    events.partition(1).append([b"b"])
    path = path_of(store)
    both = b"==> events/0 <==\na\n\n==> events/1 <==\nb\n"
    assert finish(path, "tail", "events").stdout == both
    assert finish(path, "tail", "events/*").stdout == both
    assert finish(path, "tail", "ev*").stdout == both
    assert finish(path, "tail", "-n", "1", "events/0", "t").stdout == b"==> t/0 <==\n19\n\n==> events/0 <==\na\n"
    assert finish(path, "tail", "-q", "events").stdout == b"a\nb\n"
    assert finish(path, "tail", "events/1").stdout == b"b\n"
    assert finish(path, "tail", "-v", "events/1").stdout == b"==> events/1 <==\nb\n"
    documents = [json.loads(line) for line in finish(path, "tail", "--json", "events").stdout.splitlines()]
    assert [(one["partition"], one["value"]) for one in documents] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize("pattern", ["events/*", "events*", "ev*/*"])
def test_a_topic_made_later_is_picked_up(store: segmentlog.LogStore, pattern: str) -> None:
    """A pattern of topics or of partitions waits for what fits it, with all that is in it by then."""
    with started(path_of(store), "tail", "-f", pattern, "t") as process:
        read_until(process, b"==> t/0 <==")
        events = store.create_topic("events", partitions=2)
        events.partition(1).append([b"first"])
        assert read_until(process, b"first\n").endswith(b"\n==> events/1 <==\nfirst\n")
        events.partition(0).append([b"second"])
        assert read_until(process, b"second\n") == b"\n==> events/0 <==\nsecond\n"
        stop(process)


def test_a_pattern_may_fit_nothing_yet(store: segmentlog.LogStore) -> None:
    """A pattern without matches is an error only without -f."""
    assert finish(path_of(store), "tail", "later-*").returncode == 1
    assert finish(path_of(store), "tail", "later/*").returncode == 1
    with started(path_of(store), "tail", "-f", "later-*") as process:
        time.sleep(0.5)
        store.create_topic("later-1").partition(0).append([b"here"])
        assert read_until(process, b"here\n") == b"==> later-1/0 <==\nhere\n"
        stop(process)


def test_a_partition_added_later_is_picked_up(store: segmentlog.LogStore) -> None:
    """Plain names follow new partitions; from then on headers name the partition."""
    with started(path_of(store), "tail", "-f", "-n", "1", "t") as process:
        assert read_until(process, b"\n") == b"19\n"
        store.alter_topic("t", partitions=2)
        store.topic("t").partition(1).append([b"new"])
        assert read_until(process, b"new\n") == b"\n==> t/1 <==\nnew\n"
        stop(process)


def test_partitions_that_were_not_asked_for_stay_out(store: segmentlog.LogStore) -> None:
    """A pattern of partitions holds for what is there and for what comes."""
    events = store.create_topic("events", partitions=2)
    events.partition(0).append([b"yes"])
    events.partition(1).append([b"no"])
    with started(path_of(store), "tail", "-f", "e*/0") as process:
        assert read_until(process, b"yes\n") == b"==> events/0 <==\nyes\n"
        events.partition(1).append([b"no"])
        events.partition(0).append([b"more"])
        assert read_until(process, b"more\n") == b"more\n"
        stop(process)


def test_a_name_that_does_not_exist_is_an_error_without_f(store: segmentlog.LogStore) -> None:
    """The error suggests the name that was probably meant."""
    store.create_topic("events")
    for command in ("tail", "consume"):
        done = finish(path_of(store), command, "event")
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.decode() == "error: topic 'event': it does not exist; did you mean 'events'?\n"


@pytest.mark.parametrize(
    "command", [("tail", "-f"), ("consume", "-f", "--values"), ("consume", "-f", "-g", "g", "--values")]
)
@pytest.mark.parametrize("name", ["event", "event/0"])
def test_a_follower_waits_for_a_topic_that_does_not_exist_yet(
    store: segmentlog.LogStore, command: tuple[str, ...], name: str
) -> None:
    """It reports that it waits, and what may have been meant, as the name may be mistyped; then it prints the topic."""
    if "-g" in command and "/" in name:
        return  # a group assigns the partitions
    store.create_topic("events")
    with started(path_of(store), *command, name) as process:
        told = read_until(process, b"is created\n", of="stderr")
        assert b"topic 'event' does not exist yet; the consumer waits until it is created\n" in told
        store.create_topic("event").partition(0).append([b"first"])
        assert read_until(process, b"first\n") == b"first\n"
        stop(process)


def test_a_follower_asks_what_was_meant(store: segmentlog.LogStore) -> None:
    """A mistyped name would otherwise wait forever."""
    store.create_topic("events")
    with started(path_of(store), "tail", "-f", "event") as process:
        read_until(process, b"topic 'event' does not exist: did you mean 'events'?\n", of="stderr")
        stop(process)


def test_a_follower_goes_on_through_rolls_and_retention(store: segmentlog.LogStore) -> None:
    """Every record is printed once and in order while segments are rolled and old ones deleted."""
    log = store.create_topic("rolling", segment_records=10).partition(0)
    log.append([b"start"])
    expected = [b"start"]
    with started(path_of(store), "tail", "-f", "rolling") as process:
        seen = read_until(process, b"start\n")
        for number in range(30):
            values = [b"%d-%d" % (number, one) for one in range(7)]
            log.append(values)
            expected += values
            seen += read_until(process, values[-1] + b"\n")
            log.trim(log.log_end_offset)
        stop(process)
    assert seen.splitlines() == expected


# ---------------------------------------------------------------- patterns


@pytest.fixture
def several(store: segmentlog.LogStore) -> Path:
    """Return the store with topics `a-1` and `a-2` of two partitions, a record in each, too."""
    for topic in ("a-1", "a-2"):
        made = store.create_topic(topic, partitions=2)
        for number in range(2):
            made.partition(number).append([f"{topic}/{number}".encode()])
    return path_of(store)


FITTING = [
    ("a-*", {b"a-1/0", b"a-1/1", b"a-2/0", b"a-2/1"}),
    ("a-*/1", {b"a-1/1", b"a-2/1"}),
    ("a-[1]/[0-5]", {b"a-1/0", b"a-1/1"}),
    ("a-2/?", {b"a-2/0", b"a-2/1"}),
    ("a-[!1]/[!1]", {b"a-2/0"}),
]


@pytest.mark.parametrize(("pattern", "wanted"), FITTING)
@pytest.mark.parametrize("command", [("consume", "--values", "-q"), ("tail", "-q")])
def test_patterns_name_topics_and_partitions(
    several: Path, pattern: str, wanted: set[bytes], command: tuple[str, ...]
) -> None:
    """`consume` takes those that `tail` takes; other topics are not touched."""
    done = finish(several, *command, pattern)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(done.stdout.splitlines()) == sorted(wanted)


def test_consume_follows_what_fits_a_pattern(store: segmentlog.LogStore, several: Path) -> None:
    """Matching topics and partitions that are created later are read from their beginning; others are not read."""
    there, later = {b"a-1/0", b"a-2/0"}, {b"a-3/0", b"late-0", b"late-2"}
    with started(several, "consume", "-f", "--values", "a-*/[02]") as process:
        out = b""
        while set(out.splitlines()) != there:
            out += read_until(process, b"\n")
        made = store.create_topic("a-3", partitions=2)
        for number in range(2):
            made.partition(number).append([b"a-3/%d" % number])
        store.alter_topic("a-1", partitions=3)
        for number in range(3):
            store.topic("a-1").partition(number).append([b"late-%d" % number])
        while not later <= set(out.splitlines()):
            out += read_until(process, b"\n")
        more, _ = stop(process)
    assert sorted((out + more).splitlines()) == sorted(there | later)


def test_consume_waits_for_what_a_pattern_may_mean(store: segmentlog.LogStore) -> None:
    """Like `tail -f`; without -f, a pattern without matches is an error at once."""
    with started(path_of(store), "consume", "-f", "--values", "new-*") as process:
        store.create_topic("new-1").partition(0).append([b"there"])
        assert read_until(process, b"there\n") == b"there\n"
        stop(process)


@pytest.mark.parametrize("command", [("consume",), ("tail",), ("retain",), ("compact",)])
@pytest.mark.parametrize(
    ("selector", "status", "told"),
    [
        ("a-1/[", 2, b"a '[' has no ']'"),
        ("a-[", 2, b"a '[' has no ']'"),
        ("a-[]", 2, b"a '[' has no ']'"),
        ("a-[!]/0", 2, b"a '[' has no ']'"),
        ("a-1/x*", 2, b"is not TOPIC or TOPIC/PARTITION"),
        ("/*", 2, b"is not TOPIC or TOPIC/PARTITION"),
        ("a-1/[89]", 1, b"no partition matches '[89]', there are 0 to 1"),
        ("a-*/7", 1, b"no partition matches '7', there are 0 to 1"),
        ("x-*", 1, b"no topic matches"),
        ("x-*/0", 1, b"no topic matches"),
    ],
)
def test_a_pattern_that_fits_nothing_is_told(
    several: Path, command: tuple[str, ...], selector: str, status: int, told: bytes
) -> None:
    """The error quotes the pattern as it was typed."""
    done = finish(several, *command, selector)
    assert (done.returncode, done.stdout) == (status, b"")
    assert told in done.stderr
    assert b"topics = ()" not in done.stderr


def test_every_token_of_a_template_is_in_the_help(several: Path) -> None:
    """All of kcat's tokens and escapes work."""
    text = " ".join(finish(several, "consume", "--help").stdout.decode().split())
    for token in ("%t", "%p", "%o", "%k", "%s", "%T", "%h", "%K", "%S", "%%", r"\n", r"\t", r"\r", r"\0", "\\\\"):
        assert token in text, token
    done = finish(several, "consume", "a-1/0", "--format", r"%t %p %o %k %s %h %K %S %%\n\t\r\0\\")
    assert done.stdout == b"a-1 0 0  a-1/0  -1 5 %\n\t\r\0\\"
