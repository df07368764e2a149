"""Records that were sent and not flushed are appended when their producer or store is closed or dropped, or at exit."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

import segmentlog
from segmentlog.errors import RecordTooLarge


def _count(path: Path) -> int:
    with segmentlog.open(path, background=False) as store:
        return sum(len(batch) for log in store.topic("t").partitions() for batch in log.read(0))


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("linger_ms", [0, 5, 10_000])
def test_a_store_that_is_closed_appends_what_was_sent(tmp_path: Path, background: bool, linger_ms: int) -> None:
    """All sent records are appended, although the program neither flushed nor closed the producer."""
    with segmentlog.open(tmp_path / "s", background=background) as store:
        store.create_topic("t", partitions=3)
        producer = store.producer(linger_ms=linger_ms)
        for number in range(5000):
            producer.send("t", b"x", key=b"%d" % (number % 7))
    assert _count(tmp_path / "s") == 5000
    with pytest.raises(segmentlog.StoreClosed):
        producer.send("t", b"late")


def test_the_end_of_a_program_appends_what_was_sent(tmp_path: Path) -> None:
    """A warning has the number of records."""
    script = """
import sys, segmentlog
store = segmentlog.open(sys.argv[1])
store.create_topic("t")
producer = store.producer(linger_ms=10_000)
for number in range(5):
    producer.send("t", b"x")
"""
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", script, tmp_path / "s"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "5 records are appended only at exit" in done.stderr
    assert _count(tmp_path / "s") == 5


def test_a_dropped_producer_is_flushed_by_its_store(tmp_path: Path) -> None:
    """A warning names the number; the next tick, or the store's end, appends the records."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        store.create_topic("t")
        for how in ("tick", "end"):
            producer = store.producer(linger_ms=10_000)
            for _ in range(3):
                producer.send("t", b"x")
            with pytest.warns(ResourceWarning, match="3 unsent records"):  # noqa: PT031
                del producer
                gc.collect()
            if how == "tick":
                store.flush_tick()
                assert store.topic("t").partition(0).log_end_offset == 3
    assert _count(tmp_path / "s") == 6


def test_a_producer_that_is_done_is_dropped_in_silence(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Flushed, closed, or without a record: nothing is to be said."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        store.create_topic("t")
        for how in ("flushed", "closed", "unused"):
            producer = store.producer(linger_ms=10_000)
            if how != "unused":
                producer.send("t", b"x")
            if how == "flushed":
                producer.flush()
            if how == "closed":
                producer.close()
            del producer
            gc.collect()
    assert [one for one in recwarn if one.category is ResourceWarning] == []
    assert _count(tmp_path / "s") == 2


def test_what_cannot_be_appended_is_told_at_the_end(tmp_path: Path) -> None:
    """The error of the first, with a note of what it was about; the others are appended, and the store is closed."""
    store = segmentlog.open(tmp_path / "s", background=False)
    store.create_topic("t")
    store.create_topic("small")
    bad, good = store.producer(linger_ms=10_000, name="bad"), store.producer(linger_ms=10_000)
    bad.send("small", b"x" * 5000)
    good.send("t", b"x")
    store.alter_topic("small", max_message_bytes=1000)
    with pytest.raises(RecordTooLarge) as told:
        store.close()
    assert "1 unsent records of producer 'bad'" in told.value.__notes__[0]
    assert _count(tmp_path / "s") == 1


def test_a_member_commits_as_its_store_is_closed(tmp_path: Path) -> None:
    """With ``auto_commit`` it commits the processed records, without the current one."""
    with segmentlog.open(tmp_path / "s") as store:
        store.create_topic("t").partition(0).append([b"%d" % number for number in range(10)])
        consumer = store.consumer("t", group="g", auto_commit=True)
        for record in consumer:
            if record.offset == 6:
                break
    with segmentlog.open(tmp_path / "s", background=False) as store:
        committed = store.groups.describe("g").partitions[0].committed
        assert committed is not None
        assert committed.offset == 6


def test_who_waits_sends_when_no_thread_does(tmp_path: Path) -> None:
    """The thread that should send lingering chunks has ended; a waiting caller sends the chunk itself."""
    with segmentlog.open(tmp_path / "s") as store:
        store.create_topic("t")
        producer = store.producer(linger_ms=60_000)
        delivery = producer.send("t", b"x")
        assert producer._accumulator._lingerer is not None
        producer._accumulator._lingerer.stop()
        assert delivery.result(timeout_s=10).offset == 0
