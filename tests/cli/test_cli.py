"""The command line, in this process: each command with what it should take and what it should refuse."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.processes import WAIT_S, finish, started

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run

Run = Callable[..., tuple[int, bytes, str]]


@pytest.fixture
def call(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command on a store of its own: (exit status, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, bytes, str]:
        status = run(cli, ["--dir", str(tmp_path / "store"), *arguments])
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        assert b"Traceback" not in err
        return status, out, err.decode()

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    return call


@pytest.fixture
def lines(tmp_path: Path) -> str:
    """Return a file of five lines, one of them empty, one as Windows ends it, the last without its newline."""
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\r\n\nfour\nfive")
    return str(path)


@pytest.mark.parametrize(("text", "told"), [("3600", "1h"), ("3_600", "1h"), ("1h30m", "1h30m"), ("500ms", "500ms")])
def test_a_bare_time_is_in_seconds(call: Run, text: str, told: str) -> None:
    """A number without a unit is in seconds, in any grouping of its digits."""
    call("create", "a", "--ttl", text)
    assert json.loads(call("describe", "a", "--json")[1])["config"]["retention.closed.ms"] == told


def test_topics_come_and_go(call: Run) -> None:
    """create, topics, details, alter, rename and delete do what they say, and list what is there."""
    assert (
        call("create", "a", "-p", "2", "--page-size", "10", "--max", "3", "--ttl", "60", "-c", "retention.ms=7d")[0]
        == 0
    )
    assert call("create", "a")[0] == 1
    assert json.loads(call("topics", "--json")[1]) == {"topic": "a", "partitions": 2, "offsets": 0}
    status, out, _ = call("describe", "a", "--json")
    assert status == 0
    assert json.loads(out)["config"]["segment.records"] == "10"
    assert call("alter", "a", "-c", "fsync=always", "-p", "3")[0] == 0
    assert b"always" in call("describe", "a")[1]
    assert call("describe", "a", "--all", "--sizes")[0] == 0
    assert call("alter", "a", "-p", "1")[0] == 1
    assert call("alter", "a")[0] == 2
    assert call("rename", "a", "b")[0] == 0
    assert call("delete", "b")[0] == 2, "nobody can be asked"
    assert call("delete", "b", "--yes")[0] == 0
    assert call("topics")[1] == b""


def test_create_may_accept_a_topic_that_exists(call: Run) -> None:
    """With --if-not-exists a topic keeps its configuration, and is refused only for another number of partitions."""
    assert call("create", "t", "-p", "2", "--retention-ms", "1d", "--if-not-exists")[0] == 0
    for more in ((), ("-p", "2"), ("--retention-ms", "7d")):
        status, _, err = call("create", "t", "--if-not-exists", *more)
        assert (status, "t exists already: 2 partitions" in err) == (0, True), err
    assert b"1d" in call("describe", "t")[1]
    status, _, err = call("create", "t", "--if-not-exists", "-p", "3")
    assert status == 1
    assert "topic 't' exists already; it has 2 partitions, but 3 were asked for; nothing was changed" in err
    assert call("create", "t")[0] == 1
    assert call("create", "u", "-p", "0")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("create", "../x"), 1, "is not valid"),
        (("create", "x", "--segment-bytes", "lots"), 2, "lots"),
        (("create", "x", "--fsync", "sometimes"), 1, "always"),
        (("create", "x", "-c", "retention.mss=1"), 1, "retention.ms"),
        (("create", "x", "-c", "retention"), 2, "KEY=VALUE"),
        (("create", "x", "-p", "0"), 1, "from 1"),
        (("consume", "word"), 1, "did you mean 'words'"),
        (("consume", "words/9"), 1, "no partition"),
        (("consume", "words", "--from", "yesterday"), 2, "is not an offset or a time"),
        (("consume", "words", "--values", "--json"), 2, "exclude"),
        (("consume", "words", "--format", "%z"), 2, "%z"),
        (("produce", "words", "/nowhere"), 1, "/nowhere"),
        (("produce", "words", "-H", "x"), 2, "NAME=VALUE"),
        (("produce", "nope", "-"), 1, "create nope"),
        (("trim", "words"), 2, "--before"),
        (("trim", "words", "--before", "99"), 1, "outside the log"),
        (("truncate", "words", "--at", "1"), 2, "--yes"),
        (("tail", "nope"), 1, "nope"),
        (("creat", "x"), 2, "create"),
        (("dump", "/nowhere"), 2, "/nowhere"),
    ],
)
def test_wrong_usage_is_told_in_a_line(
    call: Run, lines: str, arguments: tuple[str, ...], status: int, told: str
) -> None:
    """Bad names, values, places and files end with the status and a sentence that names them."""
    call("create", "words")
    call("produce", "words", lines)
    found, _, err = call(*arguments)
    assert (found, told in err) == (status, True), err


def test_no_store_is_told_in_a_line(call: Run) -> None:
    """Reading a store that does not exist raises an error, and does not create the store."""
    status, _, err = call("topics")
    assert status == 1
    assert "no store" in err


def test_lines_go_in_and_come_out(call: Run, lines: str) -> None:
    """Lines are stripped of their ends only; an empty line is an empty record; the last needs no newline."""
    call("create", "words", "--page-size", "2")
    status, out, _ = call("produce", "--batch-size", "2", "--print-offsets", "words", lines)
    assert (status, out) == (0, b"0 0 2\n0 2 2\n0 4 1\n")
    assert call("consume", "--fetch-size", "2", "words")[1] == b"0 one\n1 two\r\n2 \n3 four\n4 five\n"
    assert call("consume", "--values", "-n", "2", "--from", "-3", "words")[1] == b"\nfour\n"
    assert (
        call("consume", "--from", "1", "--to", "3", "--format", r"%t/%p@%o=%s\n", "words")[1]
        == b"words/0@1=two\r\nwords/0@2=\n"
    )
    assert call("consume", "--from", "latest", "words")[1] == b""
    document = json.loads(call("consume", "--json", "-n", "1", "words")[1])
    assert (document["offset"], document["value"], document["key"]) == (0, "one", None)
    assert call("tail", "-n", "2", "words")[1] == b"four\nfive\n"
    assert call("tail", "-n", "1", "-v", "words")[1] == b"==> words/0 <==\nfive\n"
    assert json.loads(call("tail", "-n", "1", "--json", "words")[1])["value"] == "five"


def test_following_ends_at_its_end(call: Run, lines: str, tmp_path: Path) -> None:
    """`consume -f --to` ends once every partition has reached the place; at once if no records precede it."""
    call("create", "words", "-p", "2")
    call("produce", "--partition", "0", "words", lines)
    store = tmp_path / "store"
    for start, stop, out in (("0", "3", b"one\ntwo\r\n\n"), ("2", "2", b""), ("earliest", "earliest", b"")):
        done = finish(store, "consume", "-f", "--values", "--from", start, "--to", stop, "words/0")
        assert (done.returncode, done.stdout) == (0, out)
    with started(store, "consume", "-f", "--values", "--to", "2", "words") as process:
        assert process.stdout is not None
        assert process.stdout.read(9) == b"one\ntwo\r\n"
        with segmentlog.open(store) as opened:
            opened.topic("words").partition(1).append([b"a", b"b", b"c"])
        assert process.communicate(timeout=WAIT_S)[0] == b"a\nb\n"
        assert process.returncode == 0


def test_following_ends_behind_a_transaction(call: Run, lines: str, tmp_path: Path) -> None:
    """The last offset before the place may be a transaction marker or an aborted record."""
    call("create", "words")
    call("produce", "words", lines)
    store = tmp_path / "store"
    with segmentlog.open(store) as opened, opened.producer(name="p") as producer:
        with producer.transaction():
            producer.send("words", b"decided")
        with contextlib.suppress(ZeroDivisionError), producer.transaction():
            producer.send("words", b"aborted")
            raise ZeroDivisionError
    for isolation in ("read_committed", "read_uncommitted"):
        done = finish(store, "consume", "-f", "--values", "--isolation", isolation, "--to", "latest", "words")
        assert done.returncode == 0
        assert done.stdout.startswith(b"one\ntwo\r\n")
        assert b"decided\n" in done.stdout


def test_other_shapes_of_input(call: Run, tmp_path: Path) -> None:
    """nul, length-prefixed and JSON records arrive whole, with keys, headers and partitions."""
    call("create", "t", "-p", "2")
    (tmp_path / "nul").write_bytes(b"a\nb\0c")
    (tmp_path / "prefixed").write_bytes(b"\0\0\0\2\n\0\0\0\0\0")
    (tmp_path / "json").write_bytes(
        b'{"value": "v", "key": "k", "partition": 1, "timestamp": 5}\n{"value_base64": "/w=="}\n'
    )
    (tmp_path / "pairs").write_bytes(b"k1:v1\nno key\n")
    assert call("produce", "--format", "nul", "--partition", "0", "t", str(tmp_path / "nul"))[0] == 0
    assert call("produce", "--format", "length-prefixed", "--partition", "0", "t", str(tmp_path / "prefixed"))[0] == 0
    assert call("produce", "--format", "json", "t", str(tmp_path / "json"))[0] == 0
    assert (
        call("produce", "-k", ":", "-H", "h=1", "--ack", "durable", "--partition", "1", "t", str(tmp_path / "pairs"))[0]
        == 0
    )
    with segmentlog.open(tmp_path / "store") as store:
        records = {(one.partition, one.value): one for one in store.consumer("t")}
    assert {(0, b"a\nb"), (0, b"c"), (0, b"\n\0"), (0, b"")} <= records.keys()
    assert (records[1, b"v"].key, records[1, b"v"].timestamp) == (b"k", 5)
    assert (records[1, b"v1"].key, records[1, b"v1"].headers) == (b"k1", (("h", b"1"),))
    assert records[1, b"no key"].key is None
    assert any(value == b"\xff" for _, value in records)
    (tmp_path / "bad").write_bytes(b'{"value": "fine"}\nnot json\n')
    status, _, err = call("produce", "--format", "json", "--batch-size", "1", "t", str(tmp_path / "bad"))
    assert status == 1
    assert "--skip 1" in err
    (tmp_path / "cut").write_bytes(b"\0\0\0\x09abc")
    assert call("produce", "--format", "length-prefixed", "t", str(tmp_path / "cut"))[0] == 1


def test_upkeep(call: Run, lines: str) -> None:
    """flush, trim and truncate say what they did; what is cut off is not given out again."""
    call("create", "words", "--page-size", "2")
    call("produce", "--batch-size", "2", "words", lines)
    assert json.loads(call("flush", "words", "--json")[1])["durable_offset"] == 5
    assert call("flush", "words")[0] == 0
    assert json.loads(call("trim", "words", "--before", "3", "--json")[1])["log_start_offset"] == 3
    assert call("trim", "words", "--before", "earliest")[0] == 0
    assert json.loads(call("truncate", "words", "--at", "4", "--yes", "--json")[1])["lost"] == [4, 6]
    assert call("truncate", "words", "--at", "latest", "--yes")[0] == 0
    assert call("consume", "words")[1] == b"3 four\n"
    assert b"lost" in call("describe", "words")[1]


def test_damage_is_found_repaired_and_dumped(call: Run, tmp_path: Path) -> None:
    """verify finds a flipped byte, consume stops at the damage or skips it, and repair removes only its batch."""
    call("create", "t", "--segment-bytes", "2000")
    (tmp_path / "numbers").write_bytes(b"".join(b"%d\n" % number for number in range(500)))
    call("produce", "--batch-size", "20", "t", str(tmp_path / "numbers"))
    assert call("verify")[0] == 0
    log = sorted((tmp_path / "store" / "t" / "0").glob("*.log"))[0]
    data = bytearray(log.read_bytes())
    data[300] ^= 1
    log.write_bytes(data)
    status, out, _ = call("verify", "t")
    assert status == 3
    assert b"[20, 40)" in out
    assert json.loads(call("verify", "--json")[1].splitlines()[0])["base_offset"] == 20
    assert call("consume", "t")[0] == 3
    status, out, err = call("consume", "--skip-damaged", "t")
    assert (status, out.count(b"\n")) == (3, 480)
    assert "20 to 39" in err
    before = {path: path.read_bytes() for path in log.parent.iterdir() if path.is_file()}
    assert call("repair", "t", "--dry-run")[0] == 3
    assert before == {path: path.read_bytes() for path in log.parent.iterdir() if path.is_file()}
    assert call("repair", "t")[0] == 2, "nobody can be asked"
    assert call("repair", "t", "--yes")[0] == 0
    assert call("verify", "t")[0] == 0
    assert call("consume", "t")[1].count(b"\n") == 480
    for path in (
        log,
        log.with_suffix(".index"),
        log.with_suffix(".timeindex"),
        log.parent / "checkpoint",
        log.parent / "state",
    ):
        if path.exists():
            assert call("dump", str(path))[0] in (0, 3)
            assert call("dump", "--json", str(path))[1]
    assert b"'0'" in call("dump", "--records", str(log))[1]
    log.write_bytes(bytes(data))
    assert call("dump", str(log))[0] == 3


def test_a_damaged_checkpoint_and_index_are_found_and_made_anew(call: Run, tmp_path: Path, lines: str) -> None:
    """Damaged caches and checkpoints are distinguished from damaged records, and repaired."""
    call("create", "t", "--page-size", "2", "-c", "index.interval.bytes=1")
    call("produce", "--batch-size", "1", "t", lines)
    folder = tmp_path / "store" / "t" / "0"
    for name in ("checkpoint", "00000000000000000000.index"):
        spoiled = bytearray((folder / name).read_bytes())
        spoiled[5] ^= 255
        (folder / name).write_bytes(spoiled)
    status, out, _ = call("verify")
    assert b"checkpoint" in out
    assert b".index" in out
    assert call("repair", "--yes")[0] in (0, 3)
    assert call("verify")[0] == 0
    assert status in (0, 3)
    assert call("consume", "--values", "t")[1] == b"one\ntwo\r\n\nfour\nfive\n"
