"""Import and export, through the command line and back."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import segmentlog


def cli(store: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the command line on a store."""
    command = [sys.executable, "-m", "segmentlog", "--dir", str(store), *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)


def content(store: Path, topic: str) -> list[tuple[Any, ...]]:
    """Everything of a topic but the offsets."""
    with segmentlog.open(store, create=False, read_only=True) as opened:
        return [(one.key, one.value, one.timestamp, one.headers) for one in opened.consumer(topic)]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A store with a topic that has every kind of record, and an empty one."""
    path = tmp_path / "store"
    with segmentlog.open(path) as store:
        partition = store.create_topic("from").partition(0)
        partition.append(
            [b"text", b"\xff\x00binary", None, b"", "ü".encode()],
            keys=[b"k", None, b"\xfe", b"", None],
            timestamps=[5, 1_700_000_000_000, 7, 8, 9],
            headers=[[("a", b"1"), ("a", None)], None, [("b", b"\xff")], None, None],
        )
        store.create_topic("to")
    return path


@pytest.mark.parametrize("ending", ["ndjson", "parquet"])
def test_export_then_import_gives_the_same_records(filled: Path, tmp_path: Path, ending: str) -> None:
    """Keys, values, timestamps and headers come back as they were, binary and nulls included."""
    file = tmp_path / f"records.{ending}"
    assert cli(filled, "export", "from", str(file)).returncode == 0
    done = cli(filled, "import", str(file), "to")
    assert done.returncode == 0, done.stderr
    assert content(filled, "to") == content(filled, "from")


def test_csv_is_for_text(filled: Path) -> None:
    """Text goes to CSV and back by the names of its columns; binary is refused in one line."""
    refused = cli(filled, "export", "from", "--format", "csv")
    assert refused.returncode == 1
    assert b"offset 1 is binary" in refused.stderr
    rows = b"name,when,amount\nada,2026-01-01T00:00:00Z,1.5\nbob,1000,2\n"
    done = cli(
        filled, "import", "-", "to", "--format", "csv", "--key", "name", "--whole", "--timestamp", "when", stdin=rows
    )
    assert done.returncode == 0, done.stderr
    found = content(filled, "to")
    assert [(key, timestamp) for key, _, timestamp, _ in found] == [(b"ada", 1767225600000), (b"bob", 1000)]
    assert json.loads(found[0][1]) == {"name": "ada", "when": "2026-01-01T00:00:00Z", "amount": "1.5"}
    exported = cli(filled, "export", "to", "--format", "csv", "--from", "1")
    assert exported.stdout.splitlines()[1].startswith(b"0,1,1000,bob,")


@pytest.mark.parametrize(
    ("arguments", "stdin", "told"),
    [
        (("--format", "ndjson"), b"{not json}\n", b"line 1 is no JSON"),
        (("--format", "ndjson"), b"[1]\n", b"line 1 is no JSON object"),
        (("--format", "ndjson"), b'{"other": 1}\n', b"no field 'value' (there are: other)"),
        (("--format", "ndjson"), b'{"value_base64": "?"}\n', b"value_base64 is no base64"),
        (("--format", "ndjson"), b'{"value": "x", "timestamp": "soon"}\n', b"'soon' is no timestamp"),
        (("--format", "csv"), b"value\na,b\n", b"another number of columns"),
        (("--format", "csv"), b"value\n\xff\n", b"not UTF-8"),
        (("--format", "parquet"), b"", b"Parquet is read from a file"),
        (("--whole", "--value", "x"), b"", b"give one of them"),
    ],
)
def test_bad_input_is_told_in_a_line(filled: Path, arguments: tuple[str, ...], stdin: bytes, told: bytes) -> None:
    """What cannot be imported says which record and why, and appends nothing of it."""
    done = cli(filled, "import", "-", "to", *arguments, stdin=stdin)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert b"Traceback" not in done.stderr
    assert content(filled, "to") == []


def test_a_file_that_is_no_parquet(filled: Path, tmp_path: Path) -> None:
    """A file of another kind is refused in one line, and an empty topic exports to an empty file."""
    (tmp_path / "x.parquet").write_bytes(b"nothing of the kind")
    done = cli(filled, "import", str(tmp_path / "x.parquet"), "to")
    assert done.returncode == 1
    assert b"no Parquet file" in done.stderr
    assert cli(filled, "export", "to", str(tmp_path / "empty.parquet")).returncode == 0
    assert cli(filled, "import", str(tmp_path / "empty.parquet"), "to").returncode == 0
    assert content(filled, "to") == []


# ---------------------------------------------------------------- kafkaesque


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    """A redis-server on a free port, with nothing in it."""
    server = shutil.which("redis-server")
    if server is None:
        if os.environ.get("CI") == "true":
            pytest.fail("redis-server is not installed, and in CI it must be")
        pytest.skip("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def test_a_kafkaesque_topic_is_taken_over(tmp_path: Path, redis_port: int) -> None:
    """Settings become the topic's, records keep their order; pages that expired are told, not made up."""
    import redis

    client = redis.Redis(port=redis_port)
    client.hset("clicks", mapping={"size": 3, "max": 10, "ttl": 60})
    for page in range(3):
        client.zadd("clicks/pages", {str(page): page * 3})
        if page:  # the first one has expired
            client.rpush(f"clicks/pages/{page}", *[f"record {page * 3 + index}" for index in range(3)])
    store = tmp_path / "store"
    done = cli(store, "import", f"redis://127.0.0.1:{redis_port}/0", "clicks")
    assert done.returncode == 0, done.stderr
    assert b"has offset 3 there and gets offset 0 here" in done.stderr
    assert [value for _, value, _, _ in content(store, "clicks")] == [b"record %d" % number for number in range(3, 9)]
    with segmentlog.open(store) as opened:
        config = opened.topic("clicks").config
        assert (config.segment_records, config.retention_segments, config.retention_closed_ms) == (3, 10, 60_000)
    missing = cli(store, "import", f"redis://127.0.0.1:{redis_port}/0", "nope")
    assert missing.returncode == 1
    assert b"no kafkaesque topic 'nope'" in missing.stderr


def test_a_redis_that_is_not_there(tmp_path: Path) -> None:
    """No server is one line, not a traceback."""
    done = cli(tmp_path / "store", "import", "redis://127.0.0.1:1/0", "clicks")
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
