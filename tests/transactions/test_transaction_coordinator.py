"""Named producers and transactions over a whole store: fencing, resuming, deciding, and who finishes what was left."""

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

import segmentlog
from segmentlog.errors import (
    InvalidConfig,
    LocalError,
    NotShipped,
    OutOfOrderSequence,
    ProducerBusy,
    ProducerFenced,
    RecordTooLarge,
    SegmentlogError,
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
    """All values that a consumer of that kind is handed."""
    with store.consumer(topic, isolation=isolation) as consumer:
        return [record.value for record in consumer]


def in_child(work: Any) -> None:
    """Run in a forked process that is killed at the end, like one that crashes."""
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
    """The interrupt comes right after one partition's append; the next flush does the rest."""
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
    """The next append to a log by that method is interrupted when it has just been made."""
    real = getattr(log, method)

    def append(*args: Any) -> int:
        monkeypatch.undo()
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(log, method, append)


def test_positions_behind_an_interrupt_are_committed(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are others than those that the interrupted call has appended, and was not told of."""
    store.topic("a").partition(0).append([b"1", b"2"])
    with store.consumer("a", group="g") as consumer, store.producer(name="n") as producer:
        records = iter(consumer)
        with producer.transaction():
            next(records)
            producer.commit_positions(consumer)
        next(records)
        _interrupt_after(monkeypatch, store.topic("__consumer_offsets").partition(0), "append_columns")
        with pytest.raises(KeyboardInterrupt), producer.transaction():
            producer.commit_positions(consumer, {("a", 0): 0})
        with producer.transaction():
            producer.commit_positions(consumer, {("a", 0): 2})
    assert store.group_offsets.committed("g")[segmentlog.TopicPartition("a", 0)].offset == 2


@pytest.mark.parametrize("ack", ["shipped", "durable", "written"])
def test_what_fails_behind_its_append_takes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ack: Any
) -> None:
    """Told as failed it is there all the same, and what comes next is something else: it is appended."""

    shipped = iter([True, False, True])

    def wait_shipped(*_: Any) -> None:
        if not next(shipped):
            raise NotShipped("b/0", 1, 2, "nobody ships it")

    def fail_to_sync(*_: Any) -> None:
        raise LocalError(errno.EMFILE, "Too many open files; the records are not on disk yet", "b/0")

    monkeypatch.setattr(append_pipeline, "wait_shipped", wait_shipped)
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("b", fsync="1records").partition(0)
        with store.producer(name="n", ack=ack) as producer:
            producer.send_many("b", [b"1"])
            with monkeypatch.context() as patch:
                for name in () if ack == "shipped" else ("sync", "sync_records"):
                    patch.setattr(log._syncer, name, fail_to_sync)
                with pytest.raises((NotShipped, LocalError)):
                    producer.send_many("b", [b"2"])
            assert producer.send_many("b", [b"3"]).result()[0].offset == 2
        assert values_of(store, "b") == [b"1", b"2", b"3"]


def test_what_failed_is_not_appended_again_behind_an_interrupt(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be there all the same; the rest of what was sent with it, to other partitions, is appended by the next."""
    failing, interrupted = store.topic("a").partitions()
    real = failing.append_columns

    def fail_behind_it(*args: Any) -> int:
        real(*args)
        raise LocalError(errno.EMFILE, "Too many open files; the records are not on disk yet", "a/0")

    def interrupt(*_: Any) -> int:
        monkeypatch.delattr(interrupted, "append_columns")
        raise KeyboardInterrupt

    with store.producer(linger_ms=10_000) as producer:
        monkeypatch.setattr(failing, "append_columns", fail_behind_it)
        monkeypatch.setattr(interrupted, "append_columns", interrupt)
        deliveries = [producer.send("a", b"%d" % number, partition=number) for number in range(2)]
        with pytest.raises(KeyboardInterrupt):
            producer.flush()
        with pytest.raises(LocalError):
            producer.flush()
        assert isinstance(deliveries[0].exception(), LocalError)
        assert deliveries[1].result().offset == 0
    assert sorted(values_of(store, "a")) == [b"0", b"1"]


def test_encoded_batches_behind_an_interrupt_are_appended(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody appends again what an interrupted call was given, so what comes next is something else."""
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
    """The next append of a producer is interrupted before it has done anything."""
    real = ProducerIdentity.append
    interrupts = iter([True])

    def append(self: ProducerIdentity, *args: Any) -> int:
        if next(interrupts, False):
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(ProducerIdentity, "append", append)


def test_closing_that_was_interrupted_goes_on(store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has yet to append is appended by the next call, and the name is its own up to then."""
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
    """By whoever has the name since, and counts on what the log holds."""
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
    """But for those that want none."""
    with store.producer() as one, store.producer() as two, store.producer(enable_idempotence=False) as three:
        for producer in (one, two, three):
            producer.send_many("b", [b"x"] * 3)
    batches = list(store.topic("b").partition(0).read(0))
    assert len({batch.header.producer_id for batch in batches}) == 3
    assert [batch.header.base_sequence for batch in batches] == [0, 0, -1]


def test_a_forked_child_is_another_producer(store: segmentlog.LogStore) -> None:
    """Without a name it gets another id; a name stays with the parent."""
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
    """The log was truncated under it: it hears of that once."""
    with store.producer() as producer:
        producer.send_many("b", [b"%d" % number for number in range(5)])
        store.topic("b").partition(0).truncate(3)
        with pytest.raises(OutOfOrderSequence):
            producer.send_many("b", [b"5"])
        producer.send_many("b", [b"6"])
    assert values_of(store, "b") == [b"0", b"1", b"2", b"6"]


# ---------------------------------------------------------------- names


def test_a_named_producer_counts_on(store: segmentlog.LogStore, tmp_path: Path) -> None:
    """Over instances and opens of the store."""
    for number in range(3):
        with store.producer(name="etl-1") as producer:
            assert producer.last_sequence("b") == 2 * number - 1
            producer.send_many("b", [b"%d" % (2 * number), b"%d" % (2 * number + 1)])
    store.close()
    with segmentlog.open(tmp_path / "store") as again, again.producer(name="etl-1") as producer:
        assert (producer.name, producer.last_sequence("b"), producer.last_sequence("a", 1)) == ("etl-1", 5, -1)


def test_a_newer_instance_fences_the_older(store: segmentlog.LogStore) -> None:
    """For sends and for transactions, also when the older one closes late."""
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
    """Under another id, as if nothing had happened."""
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
    """Empty, of the wrong type, too long, not to be written, or the store's own."""
    with pytest.raises(InvalidConfig):
        store.producer(name=name)


def test_who_waits_for_a_name_that_is_forgotten_has_it_alone(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that it has locked in the end is the one that others lock, and not the one that went."""
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
    """Whatever file names they would make."""
    for name in ("a/b", "..", "ö ü", "x" * 255, "x" * 32_767, "%41", "A"):
        with store.producer(name=name) as producer:
            producer.send_many("b", [name.encode()])
            assert producer.last_sequence("b") == 0


def test_options_that_do_not_go_together(store: segmentlog.LogStore) -> None:
    """Each refusal names the option."""
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
    """Over topics and partitions; and what is sent outside is plain."""
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
    """Data and decision are on disk."""
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
    """Whether the program looked at the failure or not; the next transaction is a new one."""
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
    """Ending what was not begun, beginning twice, and using a closed producer."""
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
    """One that fails as long as it is told to."""

    fails = True

    def partitions(self, keys: Any, partition_count: int, sticky: int) -> Any:
        if self.fails:
            raise ZeroDivisionError
        return np.zeros(len(keys), np.int32)


def test_a_commit_that_is_interrupted_leaves_nothing_open(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the decision it is none: the block's transaction is aborted, and what is sent next is none of it."""
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
    """One that a partitioner raises, when a commit sends what is left."""
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
    """Though the application goes on behind the error: they would be made once more by whoever reads on."""
    store.topic("a").partition(0).append([b"1"])
    offsets = store._make_positions()

    def full(*_: Any) -> int:
        raise segmentlog.DiskFull("/disk", 1)

    with store.consumer("a", group="g") as consumer, store.producer() as producer:
        list(consumer)
        with pytest.raises(TransactionAborted, match="/disk"), producer.transaction():  # noqa: PT012
            producer.send("b", b"of 1")
            with monkeypatch.context() as patch:
                patch.setattr(offsets, "append_columns", full)
                with contextlib.suppress(segmentlog.DiskFull):
                    producer.commit_positions(consumer)
        assert values_of(store, "b") == []
        with producer.transaction():
            producer.send("b", b"of 1")
            with pytest.raises(InvalidConfig):
                producer.commit_positions(consumer, {("a", 0): -1})
            producer.commit_positions(consumer)
    assert values_of(store, "b") == [b"of 1"]
    assert store.group_offsets.committed("g")[segmentlog.TopicPartition("a", 0)].offset == 1


def test_closing_aborts_what_is_open(store: segmentlog.LogStore) -> None:
    """Nobody is held back by it."""
    producer = store.producer(name="n")
    producer.begin_transaction()
    producer.send("b", b"1")
    producer.close()
    log = store.topic("b").partition(0)
    assert values_of(store, "b") == []
    assert log.last_stable_offset == log.log_end_offset


def test_a_producer_without_a_name_leaves_nothing_behind(store: segmentlog.LogStore) -> None:
    """No state, and no files."""
    with store.producer() as producer, producer.transaction():
        producer.send("b", b"1")
    assert store.transactions.states() == {}
    assert os.listdir(f"{store.path}/{PRODUCERS_FOLDER}") == []


def test_other_topics_are_not_held_back(store: segmentlog.LogStore) -> None:
    """Only what lies behind an open transaction in its own partition waits."""
    with store.producer() as producer, store.producer() as other:
        producer.begin_transaction()
        producer.send_many("b", [b"open"])
        with other.transaction():
            other.send_many("a", [b"1"], partition=0)
            other.send_many("b", [b"2"])
        assert values_of(store, "a") == [b"1"]
        assert values_of(store, "b") == []  # behind the open one
        producer.abort_transaction()
        assert values_of(store, "b") == [b"2"]


def test_threads_send_within_one_transaction(store: segmentlog.LogStore) -> None:
    """All of it becomes visible together."""
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
    """There is nothing left to decide in it."""
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
    """Its lease is free: no timeout is waited for."""

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
    """A thread of any process that has the store open."""
    import time

    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("b")

        def die() -> None:
            producer = store.producer(name="dies")
            producer.begin_transaction()
            producer.send_many("b", [b"lost"])

        in_child(die)
        log = store.topic("b").partition(0)
        ends = time.monotonic() + 20
        while log.last_stable_offset != log.log_end_offset or not log.log_end_offset:
            assert time.monotonic() < ends
            time.sleep(0.02)


def test_a_hung_producer_s_transaction_times_out(store: segmentlog.LogStore) -> None:
    """Aborted by others, it learns of it at its next call."""
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
    """A process of its own commits one record in partition 0 of a, and one in b, and is killed behind the decision."""

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
    """Killed at any step behind the decision."""
    _commit_and_die(store, step)
    store.close()
    with segmentlog.open(tmp_path / "store", background=False) as again:
        assert values_of(again, "a") == [b"1"]
        assert values_of(again, "b") == [b"2"]
        again.finish_transactions()
        assert again.transactions.states()["dies"].status == "CompleteCommit"


def _lose_markers(store: segmentlog.LogStore, *names: str) -> None:
    """The machine dies; of these topics' partition 0 all is on disk but the marker in the end, of the states all is."""
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
    """The record that says it is done survived, the marker did not: what it said is known all the same."""
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
    """Who notes that it is done finds the markers written, and knows no more of their being on disk than that."""
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
    """The producer itself was kept from noting that it is done, and does so when it begins the next transaction."""
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
    """The next transaction of the name names the partition, writes nothing to it, and a power cut takes the abort."""
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
    """Both the state and its producer were lost to a power cut; the data was not."""
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
    """The error names it; afterwards it can."""
    monkeypatch.setattr(producer_lease, "_DECISION_WAIT_S", 0.05)
    with store.transactions._names.locked("n"), pytest.raises(ProducerBusy, match="'n' cannot be opened"):
        store.producer(name="n")
    store.producer(name="n").close()


def test_a_read_only_store_finishes_nothing(store: segmentlog.LogStore, tmp_path: Path) -> None:
    """It sees what is decided."""

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
    """Somebody else held the name's lock for too long; what was written then is taken back."""
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
    """No room for the data, nor for the note that it is aborted: it is, and the next transaction begins without it."""
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
    """No state with one of these can be written down any more."""
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
    """The commit returns, since it is one: told that it failed one would do it again. The next one finishes it."""
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
    """It is told what was decided, with the numbers that it goes on under."""
    log = store.topic("b").partition(0)
    remote = store.transactions.server_transactions
    numbers = remote.register("client", 60_000)
    remote.add_partitions("client", numbers, [log])
    stamp = segmentlog.ProducerStamp(
        numbers.producer_id, numbers.epoch, 0, True, remote.append_check("client", numbers, log)
    )
    log.append([b"1"], producer=stamp)
    _no_room_for(monkeypatch, store, "CompleteCommit")
    following = remote.end_transaction("client", numbers, committed=True, bumps=True)
    assert following.epoch == numbers.epoch + 1
    assert values_of(store, "b") == [b"1"]
    monkeypatch.undo()
    assert remote.end_transaction("client", numbers, committed=True, bumps=True) == following
    assert store.transactions.states()["client"].status == "CompleteCommit"


# ---------------------------------------------------------------- found by the checker of deliveries


def test_an_abort_is_seen_by_who_looked_while_it_was_written(
    store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted before it is published: a look in between must not be the last one."""
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
    """The last state of a name, as a power cut may have left it."""
    from msgspec.structs import replace

    state = replace(store.transactions.states()[name], **changes)
    store.transactions._log.write(name, state)
    return state


def test_a_decision_does_not_reach_the_transaction_behind_it(store: segmentlog.LogStore) -> None:
    """The state fell back to the decision for one transaction; data of the next one, undecided, is in the log."""
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
    """The marker of a commit was lost, and the transaction after it is aborted: both stand open as one."""
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
    """The state that named the partition was lost, and nobody has looked since."""
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
    """It was sent between the sync and the decision, and belongs to the transaction."""
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
    """By a failed fsync and the recovery after it, say, while this process stood behind the cut."""
    with segmentlog.open(tmp_path / "store", background=False) as other:
        store.producer(name="n").close()
        store.producer(name="n").close()
        assert other.transactions.states()["n"].epoch == 1
        log = store.topic("__transaction_state").partition(0)
        log.truncate(log.log_end_offset - 1)
        store.producer(name="m").close()
        assert other.transactions.states()["n"].epoch == 0
        assert set(other.transactions.states()) == {"n", "m"}
