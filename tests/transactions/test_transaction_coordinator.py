"""Named producers and transactions in a whole store: fencing, resuming, decisions, and recovery after crashes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aio_helpers import run
from leftovers import opened
from waiting import wait_until

import segmentlog
from segmentlog.errors import (
    InvalidConfig,
    OutOfOrderSequence,
    ProcessLimitError,
    ProducerBusy,
    ProducerFenced,
    RecordTooLarge,
    SegmentlogError,
    ShipUnconfirmed,
    StoreClosed,
    TransactionAborted,
)
from segmentlog.format.file_names import PRODUCERS_FOLDER
from segmentlog.log.append import append_pipeline
from segmentlog.log.append.batch_encoding import check_columns, encode_columns_as_batches
from segmentlog.records import PartitionId
from segmentlog.transactions import name_locks as names_module
from segmentlog.transactions import producer_lease, transaction_coordinator
from segmentlog.transactions.producer_identity import ProducerIdentity
from segmentlog.transactions.transaction_log import TransactionState, UnconfirmedMarker


@pytest.fixture
def store(tmp_path: Path) -> Iterator[segmentlog.LogStore]:
    """Provide a store without threads, with a topic of two partitions and one of one."""
    with segmentlog.open(tmp_path / "store", background=False) as opened:
        opened.create_topic("a", partitions=2)
        opened.create_topic("b")
        yield opened


def values_of(store: segmentlog.LogStore, topic: str, isolation: Any = "read_committed") -> list[bytes | None]:
    """Return all values that a consumer with these options receives."""
    with store.consumer(topic, isolation=isolation) as consumer:
        return [record.value for record in consumer]


def in_child(work: Any) -> None:
    """Run in a forked process that is killed at the end, as in a crash."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os.kill(os.getpid(), signal.SIGKILL)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "it raised something, see stderr"


# ---------------------------------------------------------------- idempotent producers


def test_an_interrupted_chunk_is_appended_once(store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is interrupted after one partition's append is appended once; the next flush appends the rest."""
    real = ProducerIdentity.append
    interrupts = iter([False, True])

    def append(self: ProducerIdentity, *args: Any) -> int:
        offset = real(self, *args)
        if next(interrupts, False):
            self._sequences.update(dict.fromkeys(self._sequences, 0))  # as before the append
            raise KeyboardInterrupt
        return offset

    with store.producer(linger_ms=10_000) as producer:
        sent = [producer.send("a", b"%d" % number, partition=number % 2) for number in range(10)]
        monkeypatch.setattr(ProducerIdentity, "append", append)
        with pytest.raises(KeyboardInterrupt):
            producer.flush()
        monkeypatch.undo()
        producer.flush()
        assert sorted(map(bytes, filter(None, values_of(store, "a")))) == [b"%d" % number for number in range(10)]
        assert [delivery.result().offset for delivery in sent] == [number // 2 for number in range(10)]


def _interrupt_after(monkeypatch: pytest.MonkeyPatch, log: segmentlog.Partition, method: str) -> None:
    """Interrupt the next append to a log by that method, right after it has succeeded."""
    real = getattr(log, method)

    def append(*args: Any) -> int:
        monkeypatch.undo()
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(log, method, append)


def test_positions_behind_an_interrupt_are_committed(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets committed after an interrupted commit are appended: they are not taken for the interrupted ones."""
    store.topic("a").partition(0).append([b"1", b"2"])
    with store.consumer("a", group="g") as consumer, store.producer(name="n") as producer:
        records = iter(consumer)
        with producer.transaction():
            next(records)
            producer.commit_offsets(consumer)
        next(records)
        _interrupt_after(monkeypatch, store.topic("__consumer_offsets").partition(0), "append_columns")
        with pytest.raises(KeyboardInterrupt), producer.transaction():
            producer.commit_offsets(consumer, {("a", 0): 0})
        with producer.transaction():
            producer.commit_offsets(consumer, {("a", 0): 2})
    assert store.group_offsets.committed("g")[segmentlog.TopicPartition("a", 0)].offset == 2


@pytest.mark.parametrize("ack", ["shipped", "durable", "written"])
def test_what_fails_behind_its_append_takes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ack: Any
) -> None:
    """An append that fails after the write is in the log; the next record gets another number and is appended."""

    shipped = iter([True, False, True])

    def wait_shipped(*_: Any) -> None:
        if not next(shipped):
            raise ShipUnconfirmed("b/0", 1, 2, "nobody ships it")

    def fail_to_sync(*_: Any) -> None:
        raise ProcessLimitError(errno.EMFILE, "Too many open files; the records are not on disk yet", "b/0")

    monkeypatch.setattr(append_pipeline, "wait_shipped", wait_shipped)
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("b", fsync="1records").partition(0)
        with store.producer(name="n", ack=ack) as producer:
            producer.send_many("b", [b"1"])
            with monkeypatch.context() as patch:
                for name in () if ack == "shipped" else ("sync", "sync_records"):
                    patch.setattr(log._syncer, name, fail_to_sync)
                with pytest.raises((ShipUnconfirmed, ProcessLimitError)):
                    producer.send_many("b", [b"2"])
            assert producer.send_many("b", [b"3"]).result()[0].offset == 2
        assert values_of(store, "b") == [b"1", b"2", b"3"]


def test_what_failed_is_not_appended_again_behind_an_interrupt(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed chunk is not sent again after an interrupt; the rest of the send, to other partitions, is appended."""
    failing, interrupted = store.topic("a").partitions()
    real = failing.append_columns

    def fail_behind_it(*args: Any) -> int:
        real(*args)
        raise ProcessLimitError(errno.EMFILE, "Too many open files; the records are not on disk yet", "a/0")

    def interrupt(*_: Any) -> int:
        monkeypatch.delattr(interrupted, "append_columns")
        raise KeyboardInterrupt

    with store.producer(linger_ms=10_000) as producer:
        monkeypatch.setattr(failing, "append_columns", fail_behind_it)
        monkeypatch.setattr(interrupted, "append_columns", interrupt)
        deliveries = [producer.send("a", b"%d" % number, partition=number) for number in range(2)]
        with pytest.raises(KeyboardInterrupt):
            producer.flush()
        with pytest.raises(ProcessLimitError):
            producer.flush()
        assert isinstance(deliveries[0].exception(), ProcessLimitError)
        assert deliveries[1].result().offset == 0
    assert sorted(values_of(store, "a")) == [b"0", b"1"]


def test_encoded_batches_behind_an_interrupt_are_appended(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that are sent after an interrupted call are appended: callers do not repeat encoded batches."""
    log = store.topic("b").partition(0)

    def encoded(value: bytes) -> list[Any]:
        return encode_columns_as_batches(check_columns([value], None, None, None), log.config, 0)

    with store.producer(name="n") as producer:
        producer.send_encoded("b", 0, encoded(b"1"))
        _interrupt_after(monkeypatch, log, "append_batches")
        with pytest.raises(KeyboardInterrupt):
            producer.send_encoded("b", 0, encoded(b"2"))
        assert producer.send_encoded("b", 0, encoded(b"3")) == 2
    assert values_of(store, "b") == [b"1", b"2", b"3"]


def _interrupt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the next append of a producer before it has done anything."""
    real = ProducerIdentity.append
    interrupts = iter([True])

    def append(self: ProducerIdentity, *args: Any) -> int:
        if next(interrupts, False):
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(ProducerIdentity, "append", append)


def test_closing_that_was_interrupted_goes_on(store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupted close, the next close appends the rest. The producer keeps its name until then."""
    producer = store.producer(name="n", linger_ms=10_000)
    producer.send("b", b"1")
    _interrupt_once(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        producer.close()
    with pytest.raises(StoreClosed):
        producer.send("b", b"2")
    producer.close()
    assert values_of(store, "b") == [b"1"]


def test_what_an_interrupted_close_left_is_fenced(store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer whose close was interrupted is fenced by the next instance, which counts on from the log."""
    producer = store.producer(name="n", linger_ms=10_000)
    delivery = producer.send("b", b"1")
    _interrupt_once(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        producer.close()
    with store.producer(name="n") as newer:
        assert newer.last_sequence("b") == -1
        assert isinstance(delivery.exception(), ProducerFenced)
        newer.send_many("b", [b"1"])
    with pytest.raises(ProducerFenced):
        producer.close()
    assert values_of(store, "b") == [b"1"]


def test_producers_have_ids_of_their_own(store: segmentlog.LogStore) -> None:
    """Each producer gets an id of its own, except producers without idempotence."""
    with store.producer() as one, store.producer() as two, store.producer(enable_idempotence=False) as three:
        for producer in (one, two, three):
            producer.send_many("b", [b"x"] * 3)
    batches = list(store.topic("b").partition(0).read(0))
    assert len({batch.header.producer_id for batch in batches}) == 3
    assert [batch.header.base_sequence for batch in batches] == [0, 0, -1]


def test_a_forked_child_is_another_producer(store: segmentlog.LogStore) -> None:
    """A forked child gets another id if the producer has no name. A name stays with the parent."""
    producer = store.producer(linger_ms=0)
    producer.send_many("b", [b"parent"])

    def child() -> None:
        producer.send_many("b", [b"child", b"child"])

    in_child(child)
    producer.send_many("b", [b"parent"])
    ids = [batch.header.producer_id for batch in store.topic("b").partition(0).read(0)]
    assert ids[0] == ids[2] != ids[1]
    named = store.producer(name="n", linger_ms=0)

    def fenced_child() -> None:
        with pytest.raises(StoreClosed):
            named.send_many("b", [b"child"])
        store.topic("b").partition(0).append([b"refused"])

    in_child(fenced_child)
    assert values_of(store, "b")[-1] == b"refused"
    named.send_many("b", [b"still ours"])
    producer.close()
    named.close()


def test_after_a_gap_was_told_the_producer_goes_on(store: segmentlog.LogStore) -> None:
    """After the log was truncated, the producer gets one error, and then continues."""
    with store.producer() as producer:
        producer.send_many("b", [b"%d" % number for number in range(5)])
        store.topic("b").partition(0).truncate(3)
        with pytest.raises(OutOfOrderSequence):
            producer.send_many("b", [b"5"])
        producer.send_many("b", [b"6"])
    assert values_of(store, "b") == [b"0", b"1", b"2", b"6"]


# ---------------------------------------------------------------- names


def test_a_named_producer_counts_on(store: segmentlog.LogStore, tmp_path: Path) -> None:
    """Sequence numbers of a name continue over instances and reopened stores."""
    for number in range(3):
        with store.producer(name="etl-1") as producer:
            assert producer.last_sequence("b") == 2 * number - 1
            producer.send_many("b", [b"%d" % (2 * number), b"%d" % (2 * number + 1)])
    store.close()
    with segmentlog.open(tmp_path / "store") as again, again.producer(name="etl-1") as producer:
        assert (producer.name, producer.last_sequence("b"), producer.last_sequence("a", 1)) == ("etl-1", 5, -1)


def test_a_newer_instance_fences_the_older(store: segmentlog.LogStore) -> None:
    """A newer instance fences the older one for sends and transactions, also if the older one closes late."""
    older = store.producer(name="etl")
    older.send_many("b", [b"1"])
    newer = store.producer(name="etl")
    with pytest.raises(ProducerFenced) as caught:
        older.send_many("b", [b"2"])
    assert (caught.value.producer, caught.value.epoch, caught.value.current_epoch) == ("etl", 0, 1)
    with pytest.raises(ProducerFenced):
        older.begin_transaction()
    assert newer.last_sequence("b") == 0
    newer.send_many("b", [b"3"])
    older.close()
    newer.send_many("b", [b"4"])
    newer.close()
    assert values_of(store, "b") == [b"1", b"3", b"4"]


def test_a_name_that_ran_out_of_epochs_counts_on(store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that runs out of epochs continues under another producer id."""
    monkeypatch.setattr(transaction_coordinator, "EPOCH_MAX", 2)
    ids = set()
    for number in range(8):
        with store.producer(name="often") as producer:
            assert producer.last_sequence("b") == number - 1
            producer.send_many("b", [b"%d" % number])
            ids.add(producer._identity.producer_id if producer._identity else 0)
    assert len(ids) == 3
    assert values_of(store, "b") == [b"%d" % number for number in range(8)]


@pytest.mark.parametrize("name", ["", "~mine", 7, "x" * 32_768, "\ud800"], ids=lambda name: ascii(name)[:10])
def test_names_that_are_none(store: segmentlog.LogStore, name: Any) -> None:
    """Invalid names are refused: empty, of the wrong type, too long, not encodable, or with the reserved prefix."""
    with pytest.raises(InvalidConfig):
        store.producer(name=name)


def test_who_waits_for_a_name_that_is_forgotten_has_it_alone(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for the lock of a deleted name gets the lock of the new file, not of the deleted one."""
    names = store.transactions._names
    real = producer_lease.lock_fence
    forgets = iter([True])

    def lock_fence(*args: Any) -> None:
        if next(forgets, False):  # while this one waits
            names.remove("n")
        real(*args)

    monkeypatch.setattr(names_module, "lock_fence", lock_fence)
    with names.locked("n"), pytest.raises(ProducerBusy), names.locked("n", wait_s=0.0):
        pass


def test_odd_names_are_names(store: segmentlog.LogStore) -> None:
    """Every other text is a valid name, whatever file name it needs."""
    for name in ("a/b", "..", "ö ü", "x" * 255, "x" * 32_767, "%41", "A"):
        with store.producer(name=name) as producer:
            producer.send_many("b", [name.encode()])
            assert producer.last_sequence("b") == 0


def test_options_that_do_not_go_together(store: segmentlog.LogStore) -> None:
    """Options that cannot be combined are refused; each error names the option."""
    with pytest.raises(InvalidConfig, match="enable_idempotence"):
        store.producer(name="n", enable_idempotence=False)
    with pytest.raises(InvalidConfig, match="transaction_timeout_ms"):
        store.producer(transaction_timeout_ms=0)
    with store.producer(enable_idempotence=False) as plain:
        with pytest.raises(InvalidConfig, match="enable_idempotence"):
            plain.begin_transaction()
        assert plain.last_sequence("b") == -1


# ---------------------------------------------------------------- transactions


def test_all_of_it_or_nothing(store: segmentlog.LogStore) -> None:
    """A transaction is visible completely or not at all, over all topics; records outside of it are plain."""
    with store.producer() as producer:
        with producer.transaction():
            producer.send("a", b"1", key=b"k")
            producer.send_many("b", [b"2", b"3"])
            producer.flush()
            assert values_of(store, "a") == values_of(store, "b") == []
            assert values_of(store, "a", "read_uncommitted") == [b"1"]
        assert values_of(store, "a") == [b"1"]
        assert values_of(store, "b") == [b"2", b"3"]
        with pytest.raises(ZeroDivisionError), producer.transaction():  # noqa: PT012
            producer.send_many("b", [b"4"])
            producer.send("a", b"5")
            raise ZeroDivisionError
        producer.send_many("b", [b"6"])  # outside of any
    assert values_of(store, "a") == [b"1"]
    assert values_of(store, "b") == [b"2", b"3", b"6"]
    for topic, number in (("a", 0), ("a", 1), ("b", 0)):
        log = store.topic(topic).partition(number)
        assert log.last_stable_offset == log.log_end_offset


def test_a_commit_is_durable_before_it_returns(store: segmentlog.LogStore) -> None:
    """Data and decision are on disk before a commit returns."""
    log = store.topic("b").partition(0)
    with store.producer(name="n") as producer:
        producer.begin_transaction()
        producer.send_many("b", [b"x"])
        assert log.durable_offset == 0
        producer.commit_transaction()
        assert log.durable_offset >= 1
        states = store.topic("__transaction_state").partition(0)
        kept = [value for batch in states.read(0) for value in batch.values]
        decided = [number for number, value in enumerate(kept) if b"PrepareCommit" in (value or b"")]
        assert states.durable_offset > decided[-1]


def test_a_failed_send_aborts(store: segmentlog.LogStore) -> None:
    """A failed send aborts the transaction, whether the program looked at the error or not; the next one works."""
    with store.producer(name="n", linger_ms=10_000) as producer:
        with pytest.raises(RecordTooLarge), producer.transaction():  # noqa: PT012
            producer.send("b", b"0")
            producer.send("b", b"x" * 2_000_000)
        with pytest.raises(TransactionAborted) as caught, producer.transaction():  # noqa: PT012
            producer.send("b", b"1")
            producer.send("b", b"x" * 2000)
            store.alter_topic("b", max_message_bytes=1000)
        store.alter_topic("b", max_message_bytes=1_048_588)
        assert isinstance(caught.value.__cause__, RecordTooLarge)
        with pytest.raises(TransactionAborted), producer.transaction():  # noqa: PT012
            producer.send_many("b", [b"2"])
            with pytest.raises(RecordTooLarge):
                producer.send_many("b", [b"x" * 2_000_000])
        with producer.transaction():
            producer.send("b", b"3")
    assert values_of(store, "b") == [b"3"]


def test_out_of_place_calls_are_refused(store: segmentlog.LogStore) -> None:
    """Calls out of order are refused: ending without begin, beginning twice, using a closed producer."""
    with store.producer() as producer:
        for call in (producer.commit_transaction, producer.abort_transaction):
            with pytest.raises(SegmentlogError, match="no transaction open"):
                call()
        with producer.transaction(), pytest.raises(SegmentlogError, match="has a transaction open"):
            producer.begin_transaction()
        with producer.transaction():
            pass  # empty: nothing to decide
    with pytest.raises(StoreClosed):
        producer.begin_transaction()


class _Partitioner:
    """A partitioner that fails while it is told to."""

    fails = True

    def partitions(self, keys: Any, partition_count: int, sticky: int) -> Any:
        if self.fails:
            raise ZeroDivisionError
        return np.zeros(len(keys), np.int32)


def test_a_commit_that_is_interrupted_leaves_nothing_open(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt before the decision aborts the transaction; later records do not belong to it."""
    with store.producer(linger_ms=10_000) as producer:
        _interrupt_once(monkeypatch)
        with pytest.raises(KeyboardInterrupt), producer.transaction():
            producer.send("b", b"1")
        producer.send("b", b"2")
        with producer.transaction():
            producer.send("b", b"3")
        producer.send("b", b"4")
    assert values_of(store, "b") == [b"2", b"3", b"4"]


def test_an_error_of_nobodys_ends_a_transaction_too(store: segmentlog.LogStore) -> None:
    """An exception of a partitioner during the commit ends the transaction, too."""
    partitioner = _Partitioner()

    async def asynchronously() -> None:
        async with store.aproducer(linger_ms=10_000, partitioner=partitioner) as producer:
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction():
                    await producer.send("a", b"1", b"key")
            await producer.send("b", b"3")

    with store.producer(linger_ms=10_000, partitioner=partitioner) as producer:
        with pytest.raises(ZeroDivisionError), producer.transaction():
            producer.send("a", b"1", b"key")
        producer.send("b", b"2")
    run(asynchronously())
    assert values_of(store, "b") == [b"2", b"3"]
    assert values_of(store, "a", "read_uncommitted") == []


def test_results_are_not_committed_without_their_positions(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are not committed without their offsets, even if the program ignores the error."""
    store.topic("a").partition(0).append([b"1"])
    offsets = store._create_offsets_log()

    def full(*_: Any) -> int:
        raise segmentlog.DiskFull("/disk", 1)

    with store.consumer("a", group="g") as consumer, store.producer() as producer:
        list(consumer)
        with pytest.raises(TransactionAborted, match="/disk"), producer.transaction():  # noqa: PT012
            producer.send("b", b"of 1")
            with monkeypatch.context() as patch:
                patch.setattr(offsets, "append_columns", full)
                with contextlib.suppress(segmentlog.DiskFull):
                    producer.commit_offsets(consumer)
        assert values_of(store, "b") == []
        with producer.transaction():
            producer.send("b", b"of 1")
            with pytest.raises(InvalidConfig):
                producer.commit_offsets(consumer, {("a", 0): -1})
            producer.commit_offsets(consumer)
    assert values_of(store, "b") == [b"of 1"]
    assert store.group_offsets.committed("g")[segmentlog.TopicPartition("a", 0)].offset == 1


def test_closing_aborts_what_is_open(store: segmentlog.LogStore) -> None:
    """Closing a producer aborts its open transaction, so that readers are not blocked."""
    producer = store.producer(name="n")
    producer.begin_transaction()
    producer.send("b", b"1")
    producer.close()
    log = store.topic("b").partition(0)
    assert values_of(store, "b") == []
    assert log.last_stable_offset == log.log_end_offset


def test_a_producer_without_a_name_leaves_nothing_behind(store: segmentlog.LogStore) -> None:
    """A producer without a name leaves neither state nor files."""
    with store.producer() as producer, producer.transaction():
        producer.send("b", b"1")
    assert store.transactions.states() == {}
    assert os.listdir(f"{store.path}/{PRODUCERS_FOLDER}") == []


def test_other_topics_are_not_held_back(store: segmentlog.LogStore) -> None:
    """Only records after an open transaction in the same partition wait for its end."""
    with store.producer() as producer, store.producer() as other:
        producer.begin_transaction()
        producer.send_many("b", [b"open"])
        with other.transaction():
            other.send_many("a", [b"1"], partition=0)
            other.send_many("b", [b"2"])
        assert values_of(store, "a") == [b"1"]
        assert values_of(store, "b") == []  # after the open transaction
        producer.abort_transaction()
        assert values_of(store, "b") == [b"2"]


def test_threads_send_within_one_transaction(store: segmentlog.LogStore) -> None:
    """Threads may send within one transaction; all records become visible together."""
    with store.producer() as producer:

        def send(who: int) -> None:
            for number in range(50):
                producer.send("a", b"%d-%d" % (who, number), key=b"%d" % number)

        with producer.transaction():
            threads = [threading.Thread(target=send, args=(who,)) for who in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            producer.flush()
            assert values_of(store, "a") == []
        assert len(set(values_of(store, "a"))) == 200


def test_a_deleted_topic_does_not_keep_a_transaction_open(store: segmentlog.LogStore) -> None:
    """A deleted topic does not keep a transaction open."""
    with store.producer(name="n") as producer:
        producer.begin_transaction()
        producer.send_many("a", [b"1"], partition=0)
        producer.send_many("b", [b"2"])
        producer.flush()
        store.delete_topic("a")
        producer.abort_transaction()
        with producer.transaction():
            producer.send_many("b", [b"3"])
    assert values_of(store, "b") == [b"3"]


# ---------------------------------------------------------------- who finishes what was left


def test_a_dead_process_s_transaction_is_aborted_at_once(store: segmentlog.LogStore) -> None:
    """A dead process's transaction is aborted at once: its lease is free, so no time-out is awaited."""

    def die() -> None:
        producer = store.producer(name="dies")
        producer.begin_transaction()
        producer.send_many("b", [b"lost"])

    in_child(die)
    log = store.topic("b").partition(0)
    assert log.last_stable_offset == log.log_end_offset == 2  # opening it was enough
    in_child(die)
    assert (log.last_stable_offset, log.log_end_offset) == (2, 3)
    store.finish_transactions()
    assert log.last_stable_offset == log.log_end_offset == 4
    assert values_of(store, "b") == []
    assert store.transactions.states()["dies"].status == "CompleteAbort"


def test_background_work_does_it_without_being_asked(tmp_path: Path) -> None:
    """A thread of any process that has the store open finishes abandoned transactions."""

    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("b")

        def die() -> None:
            producer = store.producer(name="dies")
            producer.begin_transaction()
            producer.send_many("b", [b"lost"])

        in_child(die)
        log = store.topic("b").partition(0)
        wait_until(lambda: log.last_stable_offset == log.log_end_offset > 0)


def test_a_hung_producer_s_transaction_times_out(store: segmentlog.LogStore) -> None:
    """The transaction of a hung producer is aborted at its time-out; the producer gets an error at its next call."""
    producer = store.producer(name="hangs", transaction_timeout_ms=1000)
    producer.begin_transaction()
    producer.send_many("b", [b"late"])
    store.finish_transactions()
    assert store.transactions.states()["hangs"].status == "Ongoing"
    started_ms = store.transactions.states()["hangs"].started_up_ms
    store.finish_transactions(started_ms + 1000)
    assert store.transactions.states()["hangs"].status == "Ongoing"
    store.finish_transactions(started_ms + 1001)
    assert store.transactions.states()["hangs"].status == "CompleteAbort"
    with pytest.raises(ProducerFenced):
        producer.send_many("b", [b"too late"])
    with pytest.raises(ProducerFenced):
        producer.commit_transaction()
    producer.close()
    assert values_of(store, "b") == []
    with store.producer(name="hangs") as again, again.transaction():
        again.send_many("b", [b"in time"])
    assert values_of(store, "b") == [b"in time"]


def _commit_and_die(store: segmentlog.LogStore, step: str) -> None:
    """Commit one record in a/0 and one in b/0 in a process that is killed after the decision."""

    def die() -> None:
        producer = store.producer(name="dies")
        producer.begin_transaction()
        producer.send_many("a", [b"1"], partition=0)
        producer.send_many("b", [b"2"])
        coordinator: Any = store.transactions
        topics: Any = coordinator._topics
        real_tell, real_write = topics.on_partition, coordinator._log.write
        told: list[PartitionId] = []

        def on_partition(where: PartitionId, do: Any) -> Any:
            told.append(where)
            if step == "after the decision" or (step == "after one marker" and len(told) == 2):
                os.kill(os.getpid(), signal.SIGKILL)
            return real_tell(where, do)

        def write(name: str, state: Any, ack: Any = "written") -> None:
            if state.status == "CompleteCommit":
                os.kill(os.getpid(), signal.SIGKILL)
            real_write(name, state, ack)
            if state.status == "PrepareCommit":
                topics.on_partition = on_partition

        coordinator._log.write = write
        producer.commit_transaction()

    in_child(die)


@pytest.mark.parametrize("step", ["after the decision", "after one marker", "after the markers"])
def test_a_decided_transaction_is_finished_by_whoever_opens_the_store(
    store: segmentlog.LogStore, tmp_path: Path, step: str
) -> None:
    """A decided transaction is finished by the next process that opens the store, wherever the first was killed."""
    _commit_and_die(store, step)
    store.close()
    with segmentlog.open(tmp_path / "store", background=False) as again:
        assert values_of(again, "a") == [b"1"]
        assert values_of(again, "b") == [b"2"]
        again.finish_transactions()
        assert again.transactions.states()["dies"].status == "CompleteCommit"


def _lose_markers(store: segmentlog.LogStore, *names: str) -> None:
    """Simulate a power cut that loses only the last marker of these topics' partitions, and no state."""
    store.topic("__transaction_state").partition(0).flush()
    cuts = []
    for name in names:
        log = store.topic(name).partition(0)
        *_, last = log.read(0, control=True)
        assert last.header.is_control
        cuts.append((log.segments()[-1].path, log.handle.page.log.read().end_position - last.size_bytes))
    for partition in store.opened_partitions():
        partition.abandon()
        os.unlink(f"{partition.folder}/state")
    for path, size in cuts:
        os.truncate(path, size)


@pytest.mark.parametrize("then", ["kept open", "opened again", "another transaction"])
def test_a_marker_that_a_power_cut_took_is_written_again(tmp_path: Path, then: str) -> None:
    """A marker that a power cut has lost is written again as the state says."""
    path = tmp_path / "store"
    store = opened(segmentlog.open(path, background=False))
    store.create_topic("t")
    store.create_topic("elsewhere")
    producer = store.producer(name="n")
    with producer.transaction():
        producer.send_many("t", [b"1"])
    if then == "another transaction":
        with producer.transaction():
            producer.send_many("elsewhere", [b"2"])
    _lose_markers(store, "t")
    del producer, store
    if then == "opened again":
        with segmentlog.open(path, background=False) as again, again.producer(name="n"):
            pass
    for _ in range(2):
        with segmentlog.open(path, background=False) as again:
            assert values_of(again, "t") == [b"1"]


@pytest.mark.parametrize("step", ["after one marker", "after the markers"])
@pytest.mark.parametrize("then", ["looks", "opens the name"])
def test_a_marker_of_one_that_died_before_noting_it_may_be_lost_as_well(tmp_path: Path, step: str, then: str) -> None:
    """A lost marker is restored, also if another process wrote the completed state and cannot know its offset."""
    path = tmp_path / "store"
    store = opened(segmentlog.open(path, background=False))
    store.create_topic("a")
    store.create_topic("b")
    _commit_and_die(store, step)
    store.finish_transactions()
    assert store.transactions.states()["dies"].status == "CompleteCommit"
    assert values_of(store, "a") + values_of(store, "b") == [b"1", b"2"]
    _lose_markers(store, "a", "b")
    del store
    if then == "opens the name":
        with segmentlog.open(path, background=False) as again, again.producer(name="dies"):
            pass
    for _ in range(2):
        with segmentlog.open(path, background=False) as again:
            assert values_of(again, "a") + values_of(again, "b") == [b"1", b"2"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_marker_of_a_commit_that_was_noted_later_may_be_lost_as_well(tmp_path: Path, error: BaseException) -> None:
    """A lost marker is restored, also if the producer wrote the completed state at its next transaction."""
    path = tmp_path / "store"
    store = opened(segmentlog.open(path, background=False))
    store.create_topic("a")
    store.create_topic("b")
    log: Any = store.transactions._log
    real_write, failed = log.write, []

    def write(name: str, state: Any, ack: Any = "written") -> None:
        if state.status == "CompleteCommit" and not failed:
            failed.append(state)
            raise error
        real_write(name, state, ack)

    log.write = write
    producer = store.producer(name="n")
    with contextlib.suppress(KeyboardInterrupt), producer.transaction():
        producer.send_many("b", [b"1"])
    assert failed
    with producer.transaction():
        producer.send_many("a", [b"2"])
    _lose_markers(store, "b")
    del producer, store
    for _ in range(2):
        with segmentlog.open(path, background=False) as again:
            assert values_of(again, "b") == [b"1"]


def test_what_was_aborted_stays_so_though_a_commit_names_its_partition(tmp_path: Path) -> None:
    """An aborted transaction stays aborted if a power cut loses the abort, and a later commit names its partition."""
    path = tmp_path / "store"
    store = opened(segmentlog.open(path, background=False))
    store.create_topic("a")
    store.create_topic("b")
    producer = store.producer(name="n")
    producer.begin_transaction()
    producer.send_many("b", [b"aborted"])
    store.topic("b").partition(0).flush()
    producer.abort_transaction()
    with producer.transaction():
        producer.send_many("a", [b"1"])
        log = store.topic("b").partition(0)
        identity: Any = producer._identity
        identity._add_partitions([log])
    assert store.transactions.states()["n"].status == "CompleteCommit"
    assert len(store.transactions.states()["n"].partitions) == 2
    _lose_markers(store, "b")
    del producer, store
    for _ in range(2):
        with segmentlog.open(path, background=False) as again:
            assert values_of(again, "b") == []
            with again.producer(name="n"):
                pass


def test_an_open_transaction_that_no_state_knows_is_aborted(store: segmentlog.LogStore) -> None:
    """An open transaction is aborted if a power cut has lost its state and its producer, but not its data."""
    from segmentlog import ProducerStamp

    log = store.topic("b").partition(0)
    log.append([b"orphan"], producer=ProducerStamp(5, 0, 0, True))
    with store.producer(name="n"):  # so that there are states at all
        store.finish_transactions()
    assert log.last_stable_offset == log.log_end_offset
    assert values_of(store, "b") == []


def test_a_name_whose_decision_hangs_cannot_be_opened(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name cannot be opened while a decision about it hangs; the error names it. Later it can."""
    monkeypatch.setattr(producer_lease, "_DECISION_WAIT_S", 0.05)
    with store.transactions._names.locked("n"), pytest.raises(ProducerBusy, match="'n' cannot be opened"):
        store.producer(name="n")
    store.producer(name="n").close()


def test_a_read_only_store_finishes_nothing(store: segmentlog.LogStore, tmp_path: Path) -> None:
    """A read-only store finishes no transactions, and sees the decided ones."""

    def die() -> None:
        producer = store.producer(name="dies")
        producer.begin_transaction()
        producer.send_many("b", [b"lost"])

    in_child(die)
    with segmentlog.open(tmp_path / "store", read_only=True) as reader:
        reader.finish_transactions()
        assert values_of(reader, "b") == []
        assert values_of(reader, "b", "read_uncommitted") == [b"lost"]
        assert reader.transactions.states()["dies"].status == "Ongoing"
    assert store.transactions.states()["dies"].status == "Ongoing"


def test_a_commit_that_did_not_get_to_its_decision_is_not_part_of_the_next(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that could not get the name's lock is aborted, and is not part of the next transaction."""
    monkeypatch.setattr(producer_lease, "_DECISION_WAIT_S", 0.05)
    with store.producer(name="n") as producer:
        producer.begin_transaction()
        producer.send_many("b", [b"1"])
        with store.transactions._names.locked("n"), pytest.raises(ProducerBusy):
            producer.commit_transaction()
        with producer.transaction():
            producer.send_many("b", [b"2"])
    assert values_of(store, "b") == [b"2"]


def test_a_full_disk_aborts_and_afterwards_it_goes_on(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk aborts a transaction, even if the abort cannot be recorded. The next one works without its
    records."""
    log = store.topic("b").partition(0)
    with store.producer(name="n", linger_ms=10_000) as producer:
        with producer.transaction():
            producer.send_many("b", [b"1"])
        with pytest.raises(TransactionAborted) as caught, producer.transaction():  # noqa: PT012
            producer.send_many("b", [b"2"])
            producer.send("b", b"3")

            def full(*_: Any, **__: Any) -> Any:
                raise segmentlog.DiskFull("/disk", 1)

            monkeypatch.setattr(log._appender, "_place_locked", full)
            monkeypatch.setattr(store.transactions._log, "write", full)
        assert isinstance(caught.value.__cause__, segmentlog.DiskFull)
        assert values_of(store, "b") == [b"1"]
        monkeypatch.undo()
        with producer.transaction():
            producer.send_many("b", [b"4"])
    assert values_of(store, "b") == [b"1", b"4"]
    assert log.last_stable_offset == log.log_end_offset


def _no_room_for(monkeypatch: pytest.MonkeyPatch, store: segmentlog.LogStore, *statuses: str) -> None:
    """Make writes of states with one of these statuses fail."""
    log = store.transactions._log
    real = log.write

    def write(name: str, state: TransactionState | None, ack: Any = "written") -> None:
        if state is not None and state.status in statuses:
            raise segmentlog.DiskFull("/disk", 1)
        real(name, state, ack)

    monkeypatch.setattr(log, "write", write)


def test_a_full_disk_behind_the_decision_takes_nothing_back(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit succeeds if the disk is full after the decision. The next transaction completes it."""
    with store.producer(name="n") as producer:
        _no_room_for(monkeypatch, store, "CompleteCommit")
        with producer.transaction(note="1"):
            producer.send_many("b", [b"1"])
        assert values_of(store, "b") == [b"1"]
        assert store.transactions.states()["n"].status == "PrepareCommit"
        with pytest.raises(segmentlog.DiskFull):
            producer.begin_transaction()
        monkeypatch.undo()
        with producer.transaction():
            assert producer.last_note == "1"
            producer.send_many("b", [b"2"])
    assert values_of(store, "b") == [b"1", b"2"]


def test_so_it_is_for_a_client_of_a_server(store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of a server gets the same answer, with its next epoch, if the disk is full after the decision."""
    log = store.topic("b").partition(0)
    remote = store.transactions.server_transactions
    numbers = remote.register("client", 60_000)
    remote.add_partitions("client", numbers, [log])
    stamp = segmentlog.ProducerStamp(
        numbers.producer_id, numbers.epoch, 0, True, remote.append_check("client", numbers, log)
    )
    log.append([b"1"], producer=stamp)
    _no_room_for(monkeypatch, store, "CompleteCommit")
    following = remote.end_transaction("client", numbers, committed=True, bumps_epoch=True)
    assert following.epoch == numbers.epoch + 1
    assert values_of(store, "b") == [b"1"]
    monkeypatch.undo()
    assert remote.end_transaction("client", numbers, committed=True, bumps_epoch=True) == following
    assert store.transactions.states()["client"].status == "CompleteCommit"


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("bumps_epoch", [False, True])
def test_a_commit_without_its_markers_is_not_replaced(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch, *, committed: bool, bumps_epoch: bool
) -> None:
    """Until all markers of a commit are written, the client's next request to end a transaction must wait.

    After a takeover, a client ended its next transaction, which was lost. The store forgot the commit, and aborted it.
    """
    log, coordinator = store.topic("b").partition(0), store.transactions
    remote = coordinator.server_transactions
    numbers = remote.register("client", 60_000)
    remote.add_partitions("client", numbers, [log])
    stamp = segmentlog.ProducerStamp(
        numbers.producer_id, numbers.epoch, 0, True, remote.append_check("client", numbers, log)
    )
    log.append([b"1"], producer=stamp)

    def exhausted(*_: Any, **__: Any) -> Any:
        raise segmentlog.OffsetGrantExhausted("b/0", 1)

    with monkeypatch.context() as patch:
        patch.setattr(log._appender, "_place_locked", exhausted)
        following = remote.end_transaction("client", numbers, committed=True, bumps_epoch=bumps_epoch)
        patch.setattr(type(coordinator._log), "epoch", coordinator._log.epoch + 1)  # a crash, or a takeover
        with pytest.raises(ProducerBusy):
            remote.end_transaction("client", following, committed=committed, bumps_epoch=bumps_epoch)
    store.finish_transactions()
    assert values_of(store, "b") == [b"1"]
    assert coordinator.states()["client"].status == "CompleteCommit"


# ---------------------------------------------------------------- found by the checker of deliveries


def test_an_abort_is_seen_by_who_looked_while_it_was_written(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that looks while an abort is being published sees it at its next look."""
    from segmentlog.log.append.appender import Appender

    store.topic("b").partition(0).append([b"plain"])
    real = Appender._place_locked
    looks = []

    def place(self: Appender, *args: Any, **options: Any) -> Any:
        if self._handle.topic == "b":
            looks.append(values_of(store, "b"))
        return real(self, *args, **options)

    with store.producer(linger_ms=0) as producer:
        producer.begin_transaction()
        producer.send_many("b", [b"aborted"])
        monkeypatch.setattr(Appender, "_place_locked", place)
        producer.abort_transaction()
        monkeypatch.undo()
    assert looks == [[b"plain"]]
    assert values_of(store, "b") == [b"plain"]


def _state_of(store: segmentlog.LogStore, name: str, **changes: Any) -> TransactionState:
    """Write the state of a name as a power cut may have left it."""
    from msgspec.structs import replace

    state = replace(store.transactions.states()[name], **changes)
    store.transactions._log.write(name, state)
    return state


def test_a_decision_does_not_reach_the_transaction_behind_it(store: segmentlog.LogStore) -> None:
    """A decision does not apply to the next transaction, if the state was reset to it by a power cut."""
    from segmentlog import ProducerStamp

    log = store.topic("b").partition(0)
    with store.producer(name="n") as producer, producer.transaction():
        producer.send_many("b", [b"1"])
    done = store.transactions.states()["n"]
    log.append([b"2"], producer=ProducerStamp(done.producer_id, done.epoch, 1, True))
    for status in ("PrepareCommit", "CompleteCommit"):
        _state_of(store, "n", status=status)
        store.finish_transactions()
        assert log.last_stable_offset == log.log_end_offset
        assert values_of(store, "b") == [b"1"]


def test_an_abort_does_not_take_back_what_was_committed_before(store: segmentlog.LogStore) -> None:
    """An abort does not undo the commit before it whose marker was lost, though both look like one transaction."""
    from segmentlog import ProducerStamp

    log = store.topic("b").partition(0)
    with store.producer(name="n") as producer, producer.transaction():
        producer.send_many("a", [b"elsewhere"], partition=0)
    state = store.transactions.states()["n"]
    log.append([b"committed"], producer=ProducerStamp(state.producer_id, state.epoch, 0, True))
    lost = UnconfirmedMarker(log.topic_id, 0, 1, log.epoch - 1)
    partition = PartitionId(log.topic_id, 0)
    _state_of(store, "n", status="PrepareAbort", partitions=(partition,), ends=(), unconfirmed_markers=(lost,))
    store.finish_transactions()
    assert values_of(store, "b") == [b"committed"]


def test_what_was_left_open_does_not_join_the_next_transaction(store: segmentlog.LogStore) -> None:
    """Records of a transaction whose state was lost do not join the next transaction."""
    from segmentlog import ProducerStamp

    log = store.topic("b").partition(0)
    with store.producer(name="n") as producer:
        state = store.transactions.states()["n"]
        log.append([b"left"], producer=ProducerStamp(state.producer_id, state.epoch, 0, True))
        with producer.transaction():
            producer.send_many("b", [b"1"])
    assert values_of(store, "b") == [b"1"]


def test_what_another_thread_sent_last_is_on_disk_before_the_decision(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that another thread sends between sync and decision are synced before the decision."""
    log = store.topic("b").partition(0)
    real_commit, real_write = ProducerIdentity.commit, store.transactions._log.write
    ends: list[tuple[int, int]] = []
    producer = store.producer(name="n", linger_ms=0)

    def commit(self: ProducerIdentity, note: str | None = None) -> None:
        thread = threading.Thread(target=producer.send_many, args=("b", [b"2"]))
        thread.start()
        thread.join()
        real_commit(self, note)

    def write(name: str, state: Any, ack: Any = "written") -> None:
        if state.status == "PrepareCommit":
            ends.append((log.durable_offset, log.log_end_offset))
        real_write(name, state, ack)

    monkeypatch.setattr(ProducerIdentity, "commit", commit)
    monkeypatch.setattr(store.transactions._log, "write", write)
    with producer.transaction():
        producer.send_many("b", [b"1"])
    producer.close()
    assert ends == [(2, 2)]
    assert values_of(store, "b") == [b"1", b"2"]


def test_states_are_read_anew_when_their_log_was_cut(store: segmentlog.LogStore, tmp_path: Path) -> None:
    """States are read again when their log was truncated, such as after a failed fsync."""
    with segmentlog.open(tmp_path / "store", background=False) as other:
        store.producer(name="n").close()
        store.producer(name="n").close()
        assert other.transactions.states()["n"].epoch == 1
        log = store.topic("__transaction_state").partition(0)
        log.truncate(log.log_end_offset - 1)
        store.producer(name="m").close()
        assert other.transactions.states()["n"].epoch == 0
        assert set(other.transactions.states()) == {"n", "m"}
