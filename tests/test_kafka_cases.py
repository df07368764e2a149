"""The cases that Kafka documents for delivery, in KIP-98, KIP-447 and its protocol guide."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import FakeClock

import segmentlog
from segmentlog.errors import ConsumerFenced, GroupNotEmpty, OutOfOrderSequence, ProducerFenced, TransactionAborted
from segmentlog.format.producer_snapshot import NAMED_ID_END, SEQUENCE_END
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore


@pytest.fixture
def clock() -> FakeClock:
    """Stands still until it is moved."""
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[LogStore]:
    """Provide a store without threads, with two topics."""
    with LogStore(tmp_path / "store", background=False, clock=clock) as opened:
        opened.create_topic("a")
        opened.create_topic("b")
        yield opened


def committed(store: LogStore, topic: str) -> list[bytes | None]:
    """Return the values that a ``read_committed`` consumer returns."""
    with store.consumer(topic, isolation="read_committed") as consumer:
        return [record.value for record in consumer]


def killed(work: Callable[[], object]) -> None:
    """Do it in a process that is killed then."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def is_decided(store: LogStore, topic: str) -> bool:
    """Return whether readers of the topic can read to its end."""
    log = store.topic(topic).partition(0)
    return log.last_stable_offset == log.log_end_offset


# ---------------------------------------------------------------- idempotent producers


def test_a_retried_batch_is_appended_once(store: LogStore) -> None:
    """KIP-98: the answer to the first attempt was lost; the second gets the offset of the first."""
    log = store.topic("a").partition(0)
    stamp = ProducerStamp(NAMED_ID_END + 1, 0, 0)
    assert log.append([b"1", b"2"], producer=stamp) == 0
    assert log.append([b"3"], producer=stamp.after(2)) == 2
    assert log.append([b"1", b"2"], producer=stamp) == 0
    assert log.append([b"3"], producer=stamp.after(2)) == 2
    assert committed(store, "a") == [b"1", b"2", b"3"]


def test_an_interrupted_send_is_appended_once(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append is interrupted after it stored its records: the producer sends the same sequence numbers again."""
    real = Partition.append_columns
    answers: list[int] = []

    def lose_the_first_answer(self: Partition, *args: Any, **options: Any) -> int:
        answers.append(real(self, *args, **options))
        if len(answers) == 1:
            raise KeyboardInterrupt
        return answers[-1]

    monkeypatch.setattr(Partition, "append_columns", lose_the_first_answer)
    with store.producer(linger_ms=0) as producer:
        with pytest.raises(KeyboardInterrupt):
            producer.send_many("a", [b"once"])
        producer.flush()
        producer.send_many("a", [b"next"])
    assert committed(store, "a") == [b"once", b"next"]


def test_a_gap_in_the_sequence_is_refused(store: LogStore) -> None:
    """OUT_OF_ORDER_SEQUENCE_NUMBER: a batch before this one was lost."""
    log = store.topic("a").partition(0)
    stamp = ProducerStamp(NAMED_ID_END + 1, 0, 0)
    log.append([b"1"], producer=stamp)
    with pytest.raises(OutOfOrderSequence):
        log.append([b"3"], producer=stamp.after(2))
    assert committed(store, "a") == [b"1"]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_sequences_wrap_at_their_end(store: LogStore, before: int) -> None:
    """After 2^31 - 1 comes 0; a retry across the wrap is still known."""
    log = store.topic("a").partition(0)
    stamp = ProducerStamp(NAMED_ID_END + 1, 0, SEQUENCE_END - before if before else 0)
    assert SEQUENCE_END == 1 << 31
    assert log.append([b"1", b"2"], producer=stamp) == 0
    assert log.append([b"3"], producer=stamp.after(2)) == 2
    assert stamp.after(2).sequence == (2 - before) % SEQUENCE_END
    assert log.append([b"1", b"2"], producer=stamp) == 0
    assert committed(store, "a") == [b"1", b"2", b"3"]


# ---------------------------------------------------------------- fencing


def test_a_zombie_is_fenced(store: LogStore) -> None:
    """KIP-98: initTransactions of a new instance aborts what the old one has open, and nothing of that comes after."""
    zombie = store.producer(name="job", linger_ms=0)
    zombie.begin_transaction()
    zombie.send_many("a", [b"of the zombie"])
    with store.producer(name="job", linger_ms=0) as producer:
        assert is_decided(store, "a")
        with pytest.raises(ProducerFenced):
            zombie.send_many("b", [b"late"])
        with pytest.raises(ProducerFenced):
            zombie.commit_transaction()
        with producer.transaction():
            producer.send_many("a", [b"of its successor"])
    zombie.close()
    assert (committed(store, "a"), committed(store, "b")) == ([b"of its successor"], [])


def test_a_hung_producer_is_timed_out(store: LogStore, clock: FakeClock) -> None:
    """After transaction.timeout.ms, the transaction is aborted and its producer fenced: others need not wait."""
    hung = store.producer(name="hung", linger_ms=0, transaction_timeout_ms=1000)
    hung.begin_transaction()
    hung.send_many("a", [b"hung"])
    clock.advance(1000)
    store.finish_transactions()
    assert not is_decided(store, "a")
    clock.advance(1)
    store.finish_transactions()
    assert is_decided(store, "a")
    with pytest.raises(ProducerFenced):
        hung.commit_transaction()
    hung.close()
    assert committed(store, "a") == []


def test_a_dead_producer_is_aborted_at_once(store: LogStore) -> None:
    """A dead producer's transaction is aborted at once; Kafka waits for the timeout."""

    def die() -> None:
        producer = store.producer(name="dies", linger_ms=0)
        producer.begin_transaction()
        producer.send_many("a", [b"lost"])

    killed(die)
    store.topic("a").partition(0)
    store.finish_transactions()
    assert is_decided(store, "a")
    assert committed(store, "a") == []


# ---------------------------------------------------------------- the coordinator


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_a_decision_survives_its_coordinator(store: LogStore, tmp_path: Path, clock: FakeClock, outcome: str) -> None:
    """A coordinator dies between PrepareCommit and CompleteCommit: the next opening of the store writes the markers."""

    def die() -> None:
        producer = store.producer(name="dies", linger_ms=0)
        coordinator: Any = store.transactions
        coordinator._completer.complete = lambda *_: os._exit(9)
        producer.begin_transaction()
        producer.send_many("a", [b"1"])
        producer.send_many("b", [b"2"])
        producer.commit_transaction() if outcome == "commit" else producer.abort_transaction()

    pid = os.fork()
    if not pid:
        try:
            die()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert store.transactions.states()["dies"].status == ("PrepareCommit" if outcome == "commit" else "PrepareAbort")
    store.close()
    with LogStore(tmp_path / "store", background=False, clock=clock) as again:
        wanted = ([b"1"], [b"2"]) if outcome == "commit" else ([], [])
        assert (committed(again, "a"), committed(again, "b")) == wanted
        assert is_decided(again, "a")
        assert is_decided(again, "b")


# ---------------------------------------------------------------- what readers see


def test_readers_are_not_held_back_by_other_topics(store: LogStore) -> None:
    """The last stable offset is a partition's own."""
    with store.producer(linger_ms=0) as one, store.producer(linger_ms=0) as two:
        one.begin_transaction()
        one.send_many("a", [b"open"])
        with two.transaction():
            two.send_many("b", [b"committed"])
        assert (committed(store, "a"), committed(store, "b")) == ([], [b"committed"])
        one.commit_transaction()
    assert committed(store, "a") == [b"open"]


def test_interleaved_transactions_wait_for_the_first(store: LogStore) -> None:
    """A committed transaction after an open one stays hidden: readers get records in the order of the log."""
    with store.producer(linger_ms=0) as one, store.producer(linger_ms=0) as two:
        one.begin_transaction()
        one.send_many("a", [b"1"])
        with two.transaction():
            two.send_many("a", [b"2"])
        store.topic("a").partition(0).append([b"3"])
        assert committed(store, "a") == []
        one.abort_transaction()
    assert committed(store, "a") == [b"2", b"3"]


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_a_transaction_spans_segments(store: LogStore, tmp_path: Path, clock: FakeClock, outcome: str) -> None:
    """A transaction has its data and its marker in different segments, also after a restart."""
    store.create_topic("rolls", segment_records=3)
    with store.producer(linger_ms=0) as producer:
        producer.begin_transaction()
        for number in range(10):
            producer.send_many("rolls", [b"%d" % number])
            store.topic("rolls").partition(0).append([b"other %d" % number])
        assert committed(store, "rolls") == []
        producer.commit_transaction() if outcome == "commit" else producer.abort_transaction()
    assert len(store.topic("rolls").partition(0).segments()) > 4
    others = [b"other %d" % number for number in range(10)]
    wanted = others if outcome == "abort" else [part for n in range(10) for part in (b"%d" % n, others[n])]
    assert committed(store, "rolls") == wanted
    with LogStore(tmp_path / "store", background=False, clock=clock) as again:
        assert committed(again, "rolls") == wanted


def test_an_aborted_transaction_across_compactions(store: LogStore, clock: FakeClock) -> None:
    """Its values never replace older ones of their keys, and its marker is deleted only after them."""
    store.create_topic("table", cleanup_policy="compact", segment_records=2, delete_retention_ms=10)
    log = store.topic("table").partition(0)
    with store.producer(linger_ms=0, name="writer") as producer:
        producer.send_many("table", [b"old"], keys=[b"k"])
        producer.begin_transaction()
        producer.send_many("table", [b"aborted"] * 3, keys=[b"k", b"other", b"k"])
        log.roll()
        log.compact()
        assert committed(store, "table") == [b"old"]  # nothing undecided is compacted
        producer.abort_transaction()
        for _ in range(3):
            producer.send_many("table", [b"filler"], keys=[b"filler"])
            log.roll()
            clock.advance(20)
            log.compact()
            assert committed(store, "table")[0] == b"old"
            assert b"aborted" not in committed(store, "table")
    with store.consumer("table") as consumer:
        assert b"aborted" not in [record.value for record in consumer]


# ---------------------------------------------------------------- groups


def test_positions_are_part_of_the_transaction(store: LogStore) -> None:
    """KIP-98: sendOffsetsToTransaction. Aborted, the input is read again; committed, never."""
    store.topic("a").partition(0).append([b"1", b"2"])
    with store.producer(name="etl", linger_ms=0) as producer:
        for outcome in ("abort", "commit"):
            with store.consumer("a", group="g", auto_offset_reset="earliest") as consumer:
                producer.begin_transaction()
                for record in consumer:
                    producer.send("b", (record.value or b"") + b"!")
                producer.commit_offsets(consumer)
                producer.commit_transaction() if outcome == "commit" else producer.abort_transaction()
    assert committed(store, "b") == [b"1!", b"2!"]
    with store.consumer("a", group="g", auto_offset_reset="earliest") as consumer:
        assert list(consumer) == []


def test_a_zombie_member_commits_nothing(store: LogStore, clock: FakeClock) -> None:
    """KIP-447: an evicted member's transaction cannot commit positions of what others read by now."""
    store.topic("a").partition(0).append([b"1"])
    zombie = store.consumer("a", group="g", auto_offset_reset="earliest", max_poll_interval_ms=1000)
    with store.producer(name="zombie", linger_ms=0) as old, store.producer(name="heir", linger_ms=0) as new:
        old.begin_transaction()
        old.send_many("b", [record.value for record in zombie])
        clock.advance(2000)
        with store.consumer("a", group="g", auto_offset_reset="earliest") as heir, new.transaction():
            new.send_many("b", [record.value for record in heir])
            with pytest.raises(ConsumerFenced):
                old.commit_offsets(zombie)
            old.abort_transaction()
            new.commit_offsets(heir)
    zombie.close()
    assert committed(store, "b") == [b"1"]


def test_a_successor_waits_for_pending_positions(store: LogStore) -> None:
    """KIP-447, UNSTABLE_OFFSET_COMMIT: the next owner of a partition begins at the result of the open transaction."""
    store.topic("a").partition(0).append([b"1"])
    with store.producer(name="first", linger_ms=0) as producer:
        first = store.consumer("a", group="g", auto_offset_reset="earliest")
        producer.begin_transaction()
        producer.send_many("b", [record.value for record in first])
        producer.commit_offsets(first)
        first.close()
        with store.consumer("a", group="g", auto_offset_reset="earliest") as second:
            assert second.poll_group() == []
            producer.commit_transaction()
            assert second.poll_group(20) == [("a", 0)]
            assert second.position("a", 0) == 1


def test_a_group_with_members_is_not_reset(store: LogStore) -> None:
    """Kafka's tool refuses as well: the members would overwrite it."""
    store.topic("a").partition(0).append([b"1", b"2"])
    tp = TopicPartition("a", 0)
    with store.consumer("a", group="g", auto_offset_reset="earliest") as consumer:
        assert len(list(consumer)) == 2
        consumer.commit()
        with pytest.raises(GroupNotEmpty):
            store.groups.reset("g", {tp: 0})
        with pytest.raises(GroupNotEmpty):
            store.groups.delete("g")
        assert consumer.committed("a").offset == 2  # type: ignore[union-attr]
    store.groups.reset("g", {tp: 1})
    with store.consumer("a", group="g", auto_offset_reset="earliest") as consumer:
        assert [record.value for record in consumer] == [b"2"]


def test_what_cannot_be_appended_aborts(store: LogStore) -> None:
    """A send that failed makes the commit fail, and nothing of the transaction is there."""
    with store.producer(linger_ms=0) as producer:
        producer.begin_transaction()
        producer.send_many("a", [b"fits"])
        with pytest.raises(segmentlog.RecordTooLarge):
            producer.send_many("b", [b"x" * (2 << 20)])
        with pytest.raises(TransactionAborted):
            producer.commit_transaction()
        with producer.transaction():
            producer.send_many("b", [b"next"])
    assert (committed(store, "a"), committed(store, "b")) == ([], [b"next"])
