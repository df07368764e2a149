"""Each command rejects bad input with the right status and one line that says what to do, and loses nothing."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.processes import WAIT_S, started

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run

Run = Callable[..., tuple[int, str]]

LINES = [b"%d" % number for number in range(100)]
TOO_LARGE = 5_000_000
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store and files, a fresh copy for each test."""
    folder = tmp_path_factory.mktemp("files")
    with segmentlog.open(folder / "store") as store:
        store.create_topic("words").partition(0).append(LINES)
        store.create_topic("several", partitions=4)
    (folder / "empty").write_bytes(b"")
    (folder / "folder").mkdir()
    (folder / "binary").write_bytes(bytes(range(256)) * 40)
    (folder / "large").write_bytes(b"before\n" + b"x" * TOO_LARGE + b"\nafter\n")
    (folder / "keyed").write_bytes(
        b"".join(b"k%d:v%d\n" % (one, one) for one in range(50))
        + b"k:" + b"x" * TOO_LARGE + b"\n"
        + b"".join(b"k%d:v%d\n" % (one, one) for one in range(50, 99))
    )  # fmt: skip
    return folder


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that commands run in, with $SEGMENTLOG_DIR set to the store in it."""
    shutil.copytree(files, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("SEGMENTLOG_DIR", "store")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    return tmp_path / "here"


@pytest.fixture
def call(here: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run a command: (exit status, stderr)."""

    def call(*arguments: str) -> tuple[int, str]:
        status = run(cli, arguments)
        sys.stdout.flush()
        return status, capfdbinary.readouterr().err.decode()

    return call


def values(path: Path | str, topic: str = "words") -> list[bytes | None]:
    """Return the values of a topic."""
    with segmentlog.open(path, read_only=True) as store:
        return [record.value for record in store.consumer(topic)]


def check_told(err: str, status: int, told: str) -> None:
    """Check that the error is one line with this text, after click's usage if the status is 2."""
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.lower().startswith("error: ")]
    assert len(errors) == 1, err
    assert err.splitlines()[-1] == errors[0], "the error is what is read last"
    assert told in errors[0], err
    assert err.startswith("Usage:") == (status == 2)


# ---------------------------------------------------------------- names, values, places

SEGMENT = "store/words/0/00000000000000000000.log"

TOPIC_COMMANDS = (
    "details {}", "alter {} -c fsync=always", "delete {} --yes", "rename {} x", "produce {} binary", "consume {}",
    "tail {}", "flush {}", "trim {} --before 0", "truncate {} --at 0 --yes",
    "verify {}", "repair {} --yes", "import empty {}", "export {}",
)  # fmt: skip


@pytest.mark.parametrize("command", TOPIC_COMMANDS)
def test_an_unknown_topic_gets_a_hint(call: Run, command: str) -> None:
    """Every command suggests the topic that was probably meant, or says how to find or create one, and creates none."""
    status, err = call(*command.format("word").split())
    assert status == 1
    check_told(err, 1, "topic 'word': it does not exist; did you mean 'words'?")
    status, err = call(*command.format("zzz").split())
    assert status == 1
    check_told(err, 1, "'segmentlog ")
    assert segmentlog.open("store", read_only=True).topics() == ["several", "words"]


PARTITION_COMMANDS = (
    "consume words/{}", "consume words --partition {}", "tail words/{}", "flush words/{}", "export words/{}",
    "trim words/{} --before 0", "truncate words/{} --at 0 --yes", "produce words --partition {} binary",
)  # fmt: skip


@pytest.mark.parametrize("command", PARTITION_COMMANDS)
@pytest.mark.parametrize("number", ["1", "99", "99999999999999999999"])
def test_a_partition_that_is_not_there_is_told(call: Run, command: str, number: str) -> None:
    """The error lists the partitions that exist, for any number."""
    status, err = call(*command.format(number).split())
    assert status == 1
    check_told(err, 1, "only 0 to 0")
    assert values("store") == LINES


USAGE = [
    ("create x --segment-bytes 64XiB", "'64XiB' is not a size such as 64MiB"),
    ("create x --segment-bytes -5", "'-5' is not a size"),
    ("create x --retention-ms forever", "'forever' is not a time such as 7d"),
    ("create x -p many", "not a valid integer"),
    ("create x -c retention", "KEY=VALUE"),
    ("create", "Missing argument 'TOPIC'"),
    ("create x y", "unexpected extra argument"),
    ("topics x", "unexpected extra argument"),
    ("details words -n -1", "-1 is not in the range"),
    ("alter words", "nothing to change"),
    ("alter words -c x", "KEY=VALUE"),
    ("delete", "Missing argument"),
    ("delete words", "--yes"),
    ("rename words", "Missing argument 'NEW_NAME'"),
    ("produce words --batch-size 0", "0 is not in the range"),
    ("produce words --linger -1", "is not in the range"),
    ("produce words --linger nan", "finite"),
    ("produce words --linger inf", "not in the range"),
    ("produce words --linger 1e300", "not in the range"),
    ("produce words --partition -1", "-1 is not in the range"),
    ("produce words --skip -1", "-1 is not in the range"),
    ("produce words --format xml", "'xml' is not one of"),
    ("produce words --ack never", "'never' is not one of"),
    ("produce words -H x", "NAME=VALUE"),
    ("produce words -k :: --format json", "--key-separator"),
    ("consume words/x", "such as clicks or clicks/0"),
    ("consume words --partition -1", "-1 is not in the range"),
    ("consume words --from yesterday", "is not an offset or a time. Give earliest, latest, an offset"),
    ("consume words --from 99999999999999999999", "is not an offset or a time"),
    ("consume words --to 2026-99-99", "is not an offset or a time"),
    ("consume words -n 0", "0 is not in the range"),
    ("consume words --fetch-size 0", "0 is not in the range"),
    ("consume words --isolation some", "'some' is not one of"),
    ("consume words --format %z", "unknown token %z; known tokens: %t"),
    ("consume words --format %", "unknown token %"),
    ("consume words --format \\q", "unknown escape"),
    ("consume words --json --values", "exclude each other"),
    ("tail", "Missing argument"),
    ("tail words/0/0", "such as clicks or clicks/0"),
    ("tail -n -1 words", "-1 is not in the range"),
    ("flush", "Missing argument 'TOPIC'"),
    ("trim words", "--before"),
    ("trim several --before 1", "name a partition, such as several/0"),
    ("truncate words --at 5", "without a terminal, add --yes"),
    ("truncate several --at 0 --yes", "name one, such as several/0"),
    ("dump nothing", "'nothing' does not exist"),
    ("dump folder", "is a directory"),
    (f"dump {SEGMENT} --from 99999999", "the file has"),
    (f"dump {SEGMENT} --from x", "is not a size"),
    ("import binary words --batch-size 0", "0 is not in the range"),
    ("import binary words --whole --value x", "exclude each other"),
    ("import - words --format parquet", "not from a pipe"),
    ("import binary", "Missing argument 'TOPIC'"),
    ("export words --format xml", "'xml' is not one of"),
    ("export words --format parquet", "not to a pipe"),
    ("bench --seconds 0", "not in the range"),
    ("bench --seconds nan", "finite"),
    ("bench --batch-size 0", "not in the range"),
    ("bench --record-size -1", "not in the range"),
    ("serve --max-request unlimited", "a size such as 100MiB"),
    ("http --max-request 0", "a size such as 100MiB"),
    ("creat x", "Did you mean 'create'?"),
    ("--no-such-option", "--no-such-option"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "told"), USAGE, ids=[command for command, _ in USAGE])
def test_wrong_usage_is_status_2(call: Run, command: str, told: str) -> None:
    """The usage of the command, and a line that names what is wrong; nothing is changed."""
    status, err = call(*command.split())
    assert status == 2, err
    check_told(err, 2, told)
    assert values("store") == LINES


FAILURES = [
    ("create words", "exists already"),
    ("create a/b", "only letters, digits, '.', '_' and '-' are allowed; found '/'"),
    ("create __transaction_state", "reserved for an internal topic"),
    ("create ..", "are not allowed"),
    ("create " + "a" * 250, "249"),
    ("create x -p 0", "from 1 to"),
    ("create x -p -1", "from 1 to"),
    ("create x -p 99999999", "from 1 to 100000"),
    ("create x --page-size 0", "from 1 to"),
    ("create x --max 0", "from 1 to"),
    ("create x --fsync sometimes", "always, everysec, never, <n>ms"),
    ("create x --fsync -1ms", "always, everysec, never, <n>ms"),
    ("create x --compression zip", "lz4, zstd, gzip, snappy or none"),
    ("create x --cleanup-policy shred", "delete, compact, delete,compact or none"),
    ("create x -c segment.bytes=lots", "a size from"),
    ("create x -c segment.bytes=1", "a size from"),
    ("create x -c retention.mss=1", "did you mean retention.ms? The keys are segment.bytes,"),
    ("create x -c =", "no such key. The keys are"),
    ("alter words -c nonsense=1", "no such key. The keys are"),
    ("alter words -p 0", "from 1 to"),
    ("alter several -p 2", "4"),
    ("delete z* --yes", "no topic matches"),
    ("rename words several", "exists already"),
    ("rename words a/b", "is not valid"),
    ("produce words nothing", "nothing"),
    ("produce words folder", "Is a directory: folder"),
    ("consume words --from 101", "offset 101 is outside the log, which holds offsets [0, 100)"),
    ("consume x*", "no topic matches"),
    ("trim words --before 101", "outside the log"),
    ("truncate words --at 101 --yes", "outside the log"),
    ("truncate words --at 101", "outside the log"),
    ("import nothing words", "No such file or directory: nothing"),
    ("import folder words", "Is a directory: folder"),
    ("import binary words --format parquet", "binary is not a readable Parquet file"),
    ("import redis://127.0.0.1:1/0 words", "redis://127.0.0.1:1/0: "),
    ("import unix:///nothing words", "unix:///nothing: "),
    ("export words folder", "Is a directory: folder"),
    ("export words nothing/x.csv", "No such file or directory: nothing/x.csv"),
    ("export words nothing/x.parquet", "nothing/x.parquet"),
    ("export words binary --from 101", "outside the log"),
    ("export words binary --format parquet --from 101", "outside the log"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "told"), FAILURES, ids=[command[:60] for command, _ in FAILURES])
def test_what_cannot_be_done_is_status_1(call: Run, here: Path, command: str, told: str) -> None:
    """A single line that says what is accepted or where to look; store and files stay as they were."""
    before = (here / "binary").read_bytes()
    status, err = call(*command.split())
    assert status == 1, err
    errors = [line for line in err.splitlines() if not line[:1].isdigit()]  # without the lines of a summary
    check_told("\n".join(errors), 1, told)
    assert len(errors) == 1, err
    assert values("store") == LINES
    assert (here / "binary").read_bytes() == before
    assert call("verify")[0] == 0


# ---------------------------------------------------------------- the folder of the store


@pytest.mark.parametrize("command", ["topics", "verify", "repair", *(one.format("words") for one in TOPIC_COMMANDS)])
@pytest.mark.parametrize(
    ("folder", "told"),
    [("nothing", "there is no"), ("folder", "there is no store here"), ("binary", "not a folder"),
     ("binary/x", "not a folder")],
)  # fmt: skip
def test_a_folder_that_is_no_store_is_told(call: Run, here: Path, command: str, folder: str, told: str) -> None:
    """The error names the path, and no store is created there, whether by option or by $SEGMENTLOG_DIR."""
    status, err = call("--dir", folder, *command.split())
    assert status == 1
    check_told(err, 1, told)
    assert str(here / folder) in err
    assert not (here / "nothing").exists()
    assert list((here / "folder").iterdir()) == []


def test_the_environment_names_the_store(call: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$SEGMENTLOG_DIR names the store if --dir is missing; without both it is ./segmentlog-data."""
    monkeypatch.setenv("SEGMENTLOG_DIR", "elsewhere")
    assert call("create", "x")[0] == 0
    assert (here / "elsewhere" / "x").is_dir()
    assert call("--dir", "store", "describe", "x")[0] == 1
    monkeypatch.delenv("SEGMENTLOG_DIR")
    assert call("create", "y")[0] == 0
    assert (here / "segmentlog-data" / "y").is_dir()
    status, err = call("--dir", "binary", "create", "z")
    assert status == 1
    check_told(err, 1, "not a folder")


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"{}", b'{"version": 99}', b"[1]", b"nonsense"])
@pytest.mark.parametrize("command", ["topics", "create x", "consume words", "produce words binary"])
def test_a_spoiled_store_file_is_told(call: Run, here: Path, command: str, content: bytes) -> None:
    """A store.json that says nothing, or another version, fails in a line with its path."""
    (here / "store" / "store.json").write_bytes(content)
    status, err = call(*command.split())
    assert status in (1, 3)
    check_told(err, status, "store")


# ---------------------------------------------------------------- what is fed to produce


@pytest.mark.parametrize(
    ("shape", "data", "expected"),
    [
        ("lines", b"", []),
        ("lines", b"\n", [b""]),
        ("lines", b"\xff\xfe\n\0\n", [b"\xff\xfe", b"\0"]),
        ("lines", b"a\r\nb\rc\n\r\n\r", [b"a\r", b"b\rc", b"\r", b"\r"]),
        ("lines", b"a\r", [b"a\r"]),
        ("nul", b"", []),
        ("nul", b"a\r\n\0\r", [b"a\r\n", b"\r"]),
        ("nul", b"a\nb\0\0c", [b"a\nb", b"", b"c"]),
        ("length-prefixed", b"", []),
        ("length-prefixed", b"\0\0\0\0\0\0\0\2\n\0", [b"", b"\n\0"]),
        ("json", b"", []),
        ("json", b'\n  \n{"value":"\xc3\xa4"}\n{"value":null}\n{"value":[1]}', ["ä".encode(), None, b"[1]"]),
    ],
)
def test_any_bytes_can_be_a_record(
    call: Run, here: Path, shape: str, data: bytes, expected: list[bytes | None]
) -> None:
    """Empty, binary and invalid UTF-8 input arrives as it is."""
    (here / "data").write_bytes(data)
    assert call("produce", "--format", shape, "words", "data")[0] == 0
    assert values("store")[100:] == expected


BAD_RECORDS = [
    ("length-prefixed", b"\0\0\0\1a\0\0", "2 bytes are left over"),
    ("length-prefixed", b"\0\0\0\1a\0\0\0\x09abc", "7 bytes are left over"),
    ("length-prefixed", b"a line of text\n", "is the input length-prefixed?"),
    ("json", b'{"value":"a"}\n\n{"value":', "record 2: not a JSON object"),
    ("json", b'{"value":"a"}\n[1]', "record 2: a JSON record needs 'value'"),
    ("json", b'{"value":"a"}\n{"key":"a"}', "record 2: a JSON record needs 'value'"),
    ("json", b'{"value":"\xff"}', "record 1: not a JSON object"),
    ("json", b'{"value":"a","partition":9}', "it has no partition 9, only 0 to 0"),
    ("json", b'{"value":"a","partition":"0"}', "is not a partition number"),
    ("json", b'{"value":"a","partition":-1}', "is not a partition number"),
    ("json", b'{"value":"a"}\n{"value":"a","timestamp":"now"}', "record 2: timestamp 'now'"),
    ("json", b'{"value":"a","timestamp":-62135596800001}', "record 1: timestamp -62135596800001"),
    ("json", b'{"value":"a","timestamp":99999999999999999999}', "record 1: timestamp 9999"),
    ("json", b'{"value":"a","headers":5}', "record 1: headers must be a list"),
    ("json", b'{"value":"a","headers":{"a":"b"}}', "record 1: headers must be a list"),
    ("json", b'{"value":"a","headers":[{"x":"b"}]}', "record 1: a header must be"),
    ("json", b'{"value_base64":"x"}', "record 1: value_base64 is not base64"),
    ("json", b'{"value_base64":7}', "record 1: value_base64 is not base64"),
    ("json", b'{"value":"a"}\n{"value":' + DEEP + b"}", "record 2: not a JSON object"),
]


@pytest.mark.parametrize(("shape", "data", "told"), BAD_RECORDS)
def test_a_record_that_cannot_be_understood_is_told(call: Run, here: Path, shape: str, data: bytes, told: str) -> None:
    """The error has the record's number, counted from 1, and the number of records that are appended."""
    (here / "data").write_bytes(data)
    status, err = call("produce", "--format", shape, "words", "data")
    assert status == 1
    check_told(err, 1, told)
    appended = len(values("store")) - 100
    if appended:
        first = "record was" if appended == 1 else f"{appended} records were"
        assert f"the first {first} appended; resume with --skip {appended}" in err
    else:
        assert "no record was appended" in err
        assert "resume with --skip" not in err
        assert "first 0" not in err


KEYLESS = "it has no key; expected a key for each record: the topic is compacted (cleanup.policy)"


@pytest.mark.parametrize(
    ("options", "data", "number", "appended", "hint"),
    [
        ((), b"a\nb\n", 1, 0, "; take keys from the lines with -k SEPARATOR"),
        (("-k", ":"), b"k:a\nb\n", 2, 0, ""),
        (("-k", ":", "--batch-size", "1"), b"k:a\nb\n", 2, 1, ""),
        (("-k", ":", "--batch-size", "1", "--skip", "1"), b"k:a\nb\n", 2, 0, ""),
        (("--format", "json"), b'{"value":"a"}\n', 1, 0, ""),
        (("--format", "nul"), b"a\0", 1, 0, "; take keys from the lines with -k SEPARATOR"),
    ],
)
def test_a_record_without_a_key_in_a_compacted_topic(
    call: Run, here: Path, options: tuple[str, ...], data: bytes, number: int, appended: int, hint: str
) -> None:
    """The record is named by its number in the input; a summary is printed where something was appended."""
    assert call("create", "users", "--cleanup-policy", "compact")[0] == 0
    (here / "data").write_bytes(data)
    status, err = call("produce", *options, "users", "data")
    assert status == 1
    error = err.splitlines()[-1]
    assert error.startswith(f"error: record {number}: {KEYLESS}")
    assert error.endswith("retains the last record of each key" + hint)
    assert ("the first record was appended; resume with --skip 1" in err) == bool(appended)
    assert ("no record was appended" in err) == (not appended)
    assert "keys[" not in err


@pytest.mark.parametrize("batch_size", ["1", "2", "4096"])
def test_a_line_that_is_too_long_is_told_and_can_be_left_out(call: Run, here: Path, batch_size: str) -> None:
    """Records before a line that is too long are appended. Following the advice appends every other line once."""
    status, err = call("produce", "--batch-size", batch_size, "words", "large")
    assert status == 1
    check_told(err, 1, "record 2 is longer than max.message.bytes = 1048588")
    assert "--skip 2" in err
    assert values("store")[100:] == [b"before"]
    assert call("produce", "--skip", "2", "words", "large")[0] == 0
    assert values("store")[100:] == [b"before", b"after"]


def test_a_long_line_among_several_partitions_doubles_nothing(call: Run, here: Path) -> None:
    """Keys spread a batch over partitions; none is ahead of the count that --skip is given."""
    status, err = call("produce", "-k", ":", "several", "keyed")
    assert status == 1
    check_told(err, 1, "record 51 is longer than")
    assert sorted(values("store", "several")) == sorted(b"v%d" % one for one in range(50))
    assert call("produce", "-k", ":", "--skip", "51", "several", "keyed")[0] == 0
    assert sorted(values("store", "several")) == sorted(b"v%d" % one for one in range(99))


LONG = [
    ("lines", b"before\n", b"%b\n", b"x"),
    ("nul", b"before\0", b"%b\0", b"x"),
    ("json", b'{"value":"before"}\n\n \n', b'{"value":"%b"}\n', b"x"),
    ("json", b'{"value":"before"}\n\n \n', b'{"value":"%b"}\n', b"\\u0001"),
    ("length-prefixed", b"\0\0\0\6before", b"%b", b"x"),
]


@pytest.mark.parametrize(("shape", "before", "frame", "unit"), LONG)
@pytest.mark.parametrize("limit", [100, 20_000, 2_000_000])
def test_any_length_up_to_the_limit_is_a_record(
    call: Run, here: Path, shape: str, before: bytes, frame: bytes, unit: bytes, limit: int
) -> None:
    """Records up to the topic's limit are appended, in each shape; one over it is refused, or left out by --skip."""
    assert call("alter", "words", "-c", f"max.message.bytes={limit}")[0] == 0

    def record(size: int) -> bytes:
        prefix = size.to_bytes(4, "big") if shape == "length-prefixed" else b""
        return prefix + frame % (unit * size)

    content = unit if unit == b"x" else b"\1"
    (here / "data").write_bytes(before + record(limit - 50) + record(limit + 1) + before)
    status, err = call("produce", "--format", shape, "words", "data")
    assert status == 1
    check_told(err, 1, "record 3 ")
    assert f"max.message.bytes = {limit}" in err
    assert values("store")[100:] == [b"before", content * (limit - 50)]
    assert call("produce", "--format", shape, "--skip", "3", "words", "data")[0] == 0
    assert values("store")[102:] == [b"before"]


@pytest.mark.parametrize(("shape", "frame"), [("lines", b"%b\n"), ("nul", b"%b\0"), ("json", b'{"value":"%b"}\n'),
                                              ("length-prefixed", b"\4\0\0\0%b")])  # fmt: skip
def test_a_long_record_is_read_once(call: Run, here: Path, shape: str, frame: bytes) -> None:
    """With 64 MiB allowed, every byte is copied a few times, and not once for each block that is read."""
    assert call("alter", "words", "-c", "max.message.bytes=100MiB", "-c", "segment.bytes=200MiB")[0] == 0
    (here / "data").write_bytes(frame % (b"x" * (64 << 20)))
    before = time.process_time()
    status, err = call("produce", "--format", shape, "words", "data")
    assert status == 0, err
    assert time.process_time() - before < 4, "it took 0.2 s; with a copy for each block 60"
    assert [len(value or b"") for value in values("store")[100:]] == [64 << 20]


@pytest.mark.parametrize("shape", ["lines", "nul", "json", "length-prefixed"])
def test_what_is_too_long_is_refused_before_it_ends(here: Path, shape: str) -> None:
    """A record without an end is rejected as soon as it is over the limit; records before it are appended."""
    begin = {"lines": b"a\n", "nul": b"a\0", "json": b'{"value":"a"}\n{"value":"',
             "length-prefixed": b"\0\0\0\1a\xff\xff\xff\xff"}[shape]  # fmt: skip
    with started(here / "store", "produce", "--format", shape, "words", stdin=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(begin)
            for _ in range(1000):
                process.stdin.write(b"x" * (1 << 16))
            raise AssertionError("it reads on and on")
        assert process.wait(WAIT_S) == 1
        assert process.stderr is not None
        assert b"error: record 2 " in process.stderr.read()
    assert values("store")[100:] == [b"a"]


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("skip", [0, 1, 2, 3, 4, 1000])
def test_skipping_counts_every_record(call: Run, here: Path, skip: int, end: bytes) -> None:
    """A last line without a newline counts, too; skipping all records appends nothing."""
    lines = [b"a", b"b", b"c"]
    (here / "data").write_bytes(b"\n".join(lines) + end)
    assert call("produce", "--skip", str(skip), "words", "data")[0] == 0
    assert values("store")[100:] == lines[skip:]


# ---------------------------------------------------------------- what is imported and exported

BAD_ROWS = [
    ("x.ndjson", b'{"value":"a"}\n{oops\n', "line 2 is not JSON"),
    ("x.ndjson", b'{"value":"a"}\n\n[1]\n', "line 3 is not a JSON object"),
    ("x.ndjson", b'{"value":"\xff"}\n', "line 1 is not JSON: 'utf-8' codec"),
    ("x.ndjson", b'{"v":"a"}\n', "record 1: it has no field 'value' (it has: v)"),
    ("x.ndjson", b'{"value":"a","timestamp":[1]}\n', "record 1: [1] is not a timestamp"),
    ("x.ndjson", b'{"value_base64":"x"}\n', "record 1: value_base64 is not base64"),
    ("x.ndjson", b'{"value":"' + b"x" * TOO_LARGE + b'"}\n', "over max.message.bytes"),
    ("x.csv", b"key,value\n1,2\n1,2,3\n", "line 3 has 3 columns, but the first line has 2"),
    ("x.csv", b"key,value\n1\n", "line 2 has 1 columns, but the first line has 2"),
    ("x.csv", b"k,v\n1,2\n", "record 1: it has no field 'value' (it has: k, v)"),
    ("x.csv", b"value\n\xff\n", "not UTF-8"),
    ("x.csv", b"value,timestamp\na,soon\n", "record 1: 'soon' is not a timestamp"),
    ("x.parquet", b"PAR1", "is not a readable Parquet file"),
    ("x.ndjson", b'{"value":' + DEEP + b"}\n", "line 1 is not JSON"),
    ("x.csv", b"value,headers\na," + DEEP + b"\n", "record 1: headers must be a list"),
]


@pytest.mark.parametrize(("name", "data", "told"), BAD_ROWS)
def test_rows_that_cannot_be_understood_are_told(call: Run, here: Path, name: str, data: bytes, told: str) -> None:
    """The error has the line or record, and the number of imported records, which are in the topic."""
    (here / name).write_bytes(data)
    status, err = call("import", name, "words")
    assert status == 1
    check_told(err, 1, told)
    assert err.startswith("0 records imported")
    assert values("store") == LINES


@pytest.mark.parametrize("headers", [b"7", b"[5]", b'[{"x":1}]', b'["a"]'])
def test_imported_headers_that_are_none_are_told(call: Run, here: Path, headers: bytes) -> None:
    """Invalid headers cause an error that names the line, without a traceback."""
    (here / "x.ndjson").write_bytes(b'{"value":"a","headers":' + headers + b"}\n")
    status, err = call("import", "x.ndjson", "words")
    assert status == 1
    check_told(err, 1, "record 1")


def test_an_import_from_nothing_is_no_failure(call: Run) -> None:
    """An empty file has no records."""
    status, err = call("import", "empty", "words")
    assert (status, err[:18]) == (0, "0 records imported")


def test_binary_is_not_forced_into_csv(call: Run) -> None:
    """The error names the offset of the binary record, and the formats to export to."""
    assert call("produce", "words", "binary")[0] == 0
    status, err = call("export", "words", "--format", "csv")
    assert status == 1
    check_told(err, 1, "words/0 offset 1")
    assert "export to ndjson or parquet" in err
    assert call("export", "words", "--format", "ndjson")[0] == 0


# ---------------------------------------------------------------- every reading command, for programs


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("topics", {"topic", "partitions", "offsets"}),
        ("details words", {"topic", "id", "config", "partitions"}),
        ("consume words", {"topic", "partition", "offset", "timestamp", "key", "value"}),
        ("tail words", {"topic", "partition", "offset", "timestamp", "key", "value"}),
        ("produce words binary", {"partition", "base_offset", "count"}),
        ("flush words", {"partition", "durable_offset", "synced_records"}),
        ("trim words --before 5", {"partition", "log_start_offset", "was", "deleted_segments"}),
        ("truncate words --at 5 --yes", {"partition", "lost", "log_end_offset"}),
        (f"dump {SEGMENT}", {"type", "position", "size_bytes", "base_offset"}),
        (f"dump --records {SEGMENT}", {"type"}),
        ("dump store/words/0/checkpoint", {"type", "slot"}),
        ("dump store/words/0/state", {"type"}),
        ("verify", {"severity", "path"}),
        ("repair --dry-run", {"done", "topic", "partition"}),
        ("bench --seconds 0.05", {"batch_size"}),
    ],
)
def test_json_is_an_object_a_line(
    call: Run, here: Path, capfdbinary: pytest.CaptureFixture[bytes], command: str, fields: set[str]
) -> None:
    """Each line on stdout parses by itself, and the first has the fields that scripts rely on."""
    if command in ("verify", "repair --dry-run"):
        segment = here / SEGMENT
        segment.write_bytes(segment.read_bytes()[:-1] + b"!")
    status = run(cli, [*command.split(), "--json"])
    sys.stdout.flush()
    assert status == (3 if command in ("verify", "repair --dry-run") else 0)
    documents = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert documents
    assert all(isinstance(document, dict) for document in documents)
    assert fields <= documents[0].keys() | (documents[1].keys() if command.startswith("bench") else set())
