"""The metadata of a transaction, stored with its decision, so that a repeated job can see what is done."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import segmentlog
from segmentlog.errors import DiskFull, InvalidConfig, ProducerFenced, TransactionAborted
from segmentlog.log.partition import Partition
from segmentlog.producing.producer import NOTE_MAX_BYTES
from segmentlog.testing.fault_injection import FaultyFileSystem
from segmentlog.transactions.transaction_log import TransactionLog


@pytest.fixture
def store(tmp_path: Path) -> Iterator[segmentlog.LogStore]:
    """Provide a store without threads, with topic "t" of two partitions."""
    with segmentlog.open(tmp_path / "store", background=False) as opened:
        opened.create_topic("t", partitions=2)
        yield opened


def values_of(store: segmentlog.LogStore) -> list[bytes | None]:
    """Return the committed values."""
    with store.consumer("t", isolation="read_committed") as consumer:
        return [record.value for record in consumer]


def note_of(path: str) -> str | None:
    """Return the metadata that a new instance in another store object gets."""
    with segmentlog.open(path, background=False) as store, store.producer(name="p") as producer:
        return producer.last_note


def killed(work: Callable[[], None]) -> None:
    """Run in a forked process that is killed with SIGKILL at the end."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_note_is_kept_with_the_commit(store: segmentlog.LogStore) -> None:
    """Metadata is None before the first commit; then every instance returns that of the last commit."""
    with store.producer(name="p") as producer:
        assert producer.last_note is None
        for number in range(3):
            with producer.transaction(note=str(number)):
                producer.send("t", b"%d" % number)
            assert producer.last_note == str(number)
    assert note_of(store.path) == "2"
    with store.producer(name="other") as other:
        assert other.last_note is None


def test_a_note_is_seen_only_after_the_commit(store: segmentlog.LogStore) -> None:
    """Within a transaction, the earlier metadata is returned until the commit."""
    with store.producer(name="p") as producer:
        with producer.transaction(note="1"):
            producer.send("t", b"x")
            assert producer.last_note is None
        with producer.transaction(note="2"):
            assert producer.last_note == "1"


def test_an_abort_keeps_the_earlier_note(store: segmentlog.LogStore) -> None:
    """An abort keeps the earlier metadata."""
    with store.producer(name="p") as producer:
        with producer.transaction(note="1"):
            producer.send("t", b"1")
        with pytest.raises(ZeroDivisionError), producer.transaction(note="2"):  # noqa: PT012
            producer.send("t", b"2")
            raise ZeroDivisionError
        assert producer.last_note == "1"
        producer.begin_transaction()
        producer.send("t", b"3")
        producer.abort_transaction()
        assert producer.last_note == "1"
    assert note_of(store.path) == "1"
    assert values_of(store) == [b"1"]


def test_a_transaction_without_a_note_keeps_the_earlier_one(store: segmentlog.LogStore) -> None:
    """A commit without metadata keeps the earlier metadata."""
    with store.producer(name="p") as producer:
        with producer.transaction(note="1"):
            producer.send("t", b"1")
        with producer.transaction():
            producer.send("t", b"2")
        assert producer.last_note == "1"
    assert note_of(store.path) == "1"


def test_a_note_without_records(store: segmentlog.LogStore) -> None:
    """A transaction without records stores its metadata; the empty text is valid."""
    with store.producer(name="p") as producer, producer.transaction(note="nothing"):
        pass
    assert note_of(store.path) == "nothing"
    with store.producer(name="p") as producer:
        producer.begin_transaction()
        producer.commit_transaction("")
    assert note_of(store.path) == ""
    assert values_of(store) == []


def test_a_note_without_records_after_one_with(store: segmentlog.LogStore) -> None:
    """A commit without records has no partitions of the previous transaction."""
    with store.producer(name="p") as producer:
        with producer.transaction(note="1"):
            producer.send("t", b"1", partition=0)
        with producer.transaction(note="2"):
            pass
        with producer.transaction(note="3"):
            producer.send("t", b"3", partition=1)
    assert note_of(store.path) == "3"
    assert sorted(values_of(store)) == [b"1", b"3"]


@pytest.mark.parametrize("note", ["x" * (NOTE_MAX_BYTES + 1), "ü" * (NOTE_MAX_BYTES // 2 + 1), b"bytes", 7])
def test_a_note_that_is_none_is_refused_first(store: segmentlog.LogStore, note: object) -> None:
    """Invalid metadata is refused before the transaction begins, and the producer continues."""
    with store.producer(name="p") as producer:
        with pytest.raises(InvalidConfig, match=f"text of at most {NOTE_MAX_BYTES} bytes"), producer.transaction(note):  # type: ignore[arg-type]
            producer.send("t", b"never")
        assert store.topic("t").partition(0).log_end_offset == 0
        with producer.transaction(note="x" * NOTE_MAX_BYTES):
            producer.send("t", b"1")
    assert note_of(store.path) == "x" * NOTE_MAX_BYTES


def test_a_note_that_comes_with_the_commit(store: segmentlog.LogStore) -> None:
    """Invalid metadata at `commit` is refused, and the transaction stays open."""
    with store.producer(name="p") as producer:
        producer.begin_transaction()
        producer.send("t", b"1")
        with pytest.raises(InvalidConfig):
            producer.commit_transaction("x" * (NOTE_MAX_BYTES + 1))
        producer.commit_transaction("fits")
        assert producer.last_note == "fits"
    assert values_of(store) == [b"1"]


def test_producers_without_a_name_have_notes_too(store: segmentlog.LogStore) -> None:
    """Producers without a name have metadata, as long as they live."""
    with store.producer() as producer:
        assert producer.last_note is None
        with producer.transaction(note="1"):
            producer.send("t", b"1")
        assert producer.last_note == "1"


@pytest.mark.parametrize(
    ("dies_in", "note"),
    [
        ("before the commit", "0"),
        ("after the data is synced", "0"),
        ("after the decision", "1"),
        ("after a marker", "1"),
        ("after the commit", "1"),
    ],
)
def test_killed_on_the_way(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch, dies_in: str, note: str
) -> None:
    """The new metadata is stored if and only if the records are committed, wherever SIGKILL comes."""
    path = store.path
    with store.producer(name="p") as producer, producer.transaction(note="0"):
        producer.send("t", b"0")

    def die(*args: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        with segmentlog.open(path, background=False) as mine:
            producer = mine.producer(name="p")
            producer.begin_transaction()
            for partition in (0, 1):
                producer.send("t", b"1", partition=partition)
            producer.flush()
            real_write, real_end = TransactionLog.write, Partition.end_transaction
            if dies_in == "before the commit":
                die()
            elif dies_in == "after the data is synced":
                monkeypatch.setattr(TransactionLog, "write", die)
            elif dies_in == "after the decision":

                def write(self: TransactionLog, *args: object) -> None:
                    real_write(self, *args)  # type: ignore[arg-type]
                    die()

                monkeypatch.setattr(TransactionLog, "write", write)
            elif dies_in == "after a marker":

                def end(self: Partition, *args: object, **options: object) -> None:
                    real_end(self, *args, **options)  # type: ignore[arg-type]
                    die()

                monkeypatch.setattr(Partition, "end_transaction", end)
            producer.commit_transaction("1")

    killed(work)
    assert note_of(path) == note
    assert values_of(store) == ([b"0", b"1", b"1"] if note == "1" else [b"0"])


def test_who_was_fenced_leaves_no_note(store: segmentlog.LogStore) -> None:
    """A fenced instance cannot store metadata: its open transaction is aborted."""
    old = store.producer(name="p")
    old.begin_transaction()
    old.send("t", b"old")
    with store.producer(name="p") as new:
        with pytest.raises(ProducerFenced):
            old.commit_transaction("old")
        assert new.last_note is None
        with new.transaction(note="new"):
            new.send("t", b"new")
    assert note_of(store.path) == "new"
    assert values_of(store) == [b"new"]


def test_a_full_disk_leaves_no_note(tmp_path: Path) -> None:
    """A full disk stores neither the commit nor its metadata."""
    fs = FaultyFileSystem()
    with segmentlog.LogStore(tmp_path / "store", background=False, fs=fs) as store:
        store.create_topic("t", partitions=2)
        with store.producer(name="p") as producer:
            with producer.transaction(note="0"):
                producer.send("t", b"0")
            with pytest.raises((TransactionAborted, DiskFull)), producer.transaction(note="1"):  # noqa: PT012
                producer.send("t", bytes(1000))
                fs.room_bytes = 0
            fs.heal()
            assert producer.last_note == "0"
            with producer.transaction(note="2"):
                producer.send("t", b"2")
        assert values_of(store) == [b"0", b"2"]
    assert note_of(str(tmp_path / "store")) == "2"
