"""`transactions`: what producers have open, and ending what hangs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.processes import WAIT_S, finish, read_until

import segmentlog

HANGING = """
import sys, segmentlog
with segmentlog.open(sys.argv[1], background=False) as store:
    producer = store.producer(name=sys.argv[2], transaction_timeout_ms=3_600_000)
    producer.begin_transaction()
    producer.send("t", b"undecided", partition=1)
    producer.flush()
    print("open", flush=True)
    sys.stdin.read()
    try:
        producer.commit_transaction()
        print("committed", flush=True)
    except segmentlog.ProducerFenced:
        print("fenced", flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with an empty topic `t` of two partitions."""
    with segmentlog.open(tmp_path / "store") as opened:
        opened.create_topic("t", partitions=2)
    return tmp_path / "store"


@pytest.fixture
def hanging(store: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process whose producer `etl-1` has an open transaction until its stdin is closed."""
    words = [sys.executable, "-c", HANGING, str(store), "etl-1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            read_until(process, b"open\n")
            yield process
        finally:
            process.kill()


def listed(store: Path) -> list[dict[str, Any]]:
    """Return the documents that --json prints."""
    done = finish(store, "transactions", "list", "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def visible(store: Path) -> list[bytes]:
    """Return the records that a read_committed reader gets."""
    out: bytes = finish(store, "consume", "t", "--values", "--isolation", "read_committed").stdout
    return out.splitlines()


def test_an_open_transaction_is_listed(store: Path, hanging: subprocess.Popen[bytes]) -> None:
    """The list has its producer, start, partitions, and whether its process lives."""
    (one,) = listed(store)
    assert (one["producer"], one["status"], one["epoch"], one["alive"]) == ("etl-1", "Ongoing", 0, True)
    assert (one["timeout_ms"], one["partitions"]) == (3_600_000, ["t/1"])
    assert abs(one["since_ms"] / 1000 - time.time()) < 600
    out = finish(store, "transactions", "list").stdout.decode()
    assert out.splitlines()[0].split() == ["PRODUCER", "ID", "EPOCH", "STATUS", "SINCE", "TIMEOUT", "PROCESS",
                                           "PARTITIONS"]  # fmt: skip
    assert str(one["producer_id"]) in out
    assert "3600 s" in out
    hanging.kill()
    hanging.wait(WAIT_S)
    (one,) = listed(store)
    assert (one["status"], one["alive"]) == ("Ongoing", False), "looking changes nothing"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_hung_transaction_is_aborted(store: Path, hanging: subprocess.Popen[bytes], stopped: bool) -> None:
    """Readers continue, and the owner of the transaction is fenced when it resumes, even after a SIGSTOP."""
    with segmentlog.open(store) as opened, opened.producer() as producer:
        producer.send_many("t", [b"later"], partition=1)
    assert visible(store) == []
    if stopped:
        hanging.send_signal(signal.SIGSTOP)
    done = finish(store, "transactions", "abort", "etl-1")
    assert done.returncode == 0
    assert done.stderr == b"aborted the transaction of etl-1, and fenced its producer\n"
    assert visible(store) == [b"later"]
    (one,) = listed(store)
    assert (one["status"], one["epoch"]) == ("CompleteAbort", 1)
    if stopped:
        hanging.send_signal(signal.SIGCONT)
    assert hanging.communicate(timeout=WAIT_S)[0] == b"fenced\n"
    assert visible(store) == [b"later"]
    again = finish(store, "transactions", "abort", "etl-1")
    assert again.returncode == 0
    assert again.stderr == b"etl-1 has no transaction to abort: CompleteAbort\n"


def test_a_name_that_is_not_there_is_told(store: Path) -> None:
    """The error suggests the name that was probably meant; the lookup creates no file."""
    with segmentlog.open(store) as opened:
        opened.producer(name="etl-1").close()
    done = finish(store, "transactions", "abort", "etl1")
    assert done.returncode == 1
    assert b"did you mean 'etl-1'?" in done.stderr
    assert finish(store, "transactions", "abort", "something").returncode == 1
    assert [one["producer"] for one in listed(store)] == ["etl-1"]
    assert len(list((store / "@producers").iterdir())) == 1


def test_a_store_without_transactions(store: Path) -> None:
    """`list` prints nothing, `abort` fails, and both leave the store unchanged."""
    before = sorted(path.name for path in store.iterdir())
    done = finish(store, "transactions", "list")
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr == b"there are no named producers and no transactions\n"
    assert listed(store) == []
    assert finish(store, "transactions", "abort", "p").returncode == 1
    assert sorted(path.name for path in store.iterdir()) == before
