"""Transactions of Kafka's clients, in both protocols: who counts, what is let through, how it ends, what is seen."""

from __future__ import annotations

import errno
from random import Random
from typing import Any

import pytest
from logs import FakeClock
from seeds import seeds
from server.transactions.clients import Client, both, fetched, read
from server.transactions.conftest import MakeDesk
from server.wire_client import Desk
from wire import Sent, foreign

from segmentlog.errors import ProducerFenced, ProducerNameInUse
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.transactions import server_transactions
from segmentlog.transactions.abandoned import SERVER_NAME_EXPIRATION_MS
from segmentlog.transactions.outcome import TransactionCompleter
from segmentlog.transactions.server_transactions import ProducerIdAndEpoch, ServerTransactions
from segmentlog.transactions.transaction_log import TransactionLog

NONE = ErrorCode.NONE
PROTOCOLS = pytest.mark.parametrize("is_new", [False, True], ids=["old", "new"])


def status(desk: Desk, name: str = "app") -> str:
    """Return the engine's state of a transactional id."""
    return desk.broker.store.transactions.states()[name].status


# ---------------------------------------------------------------- the usual course


@PROTOCOLS
def test_committed_is_seen_by_both_kinds_of_readers(desk: Desk, is_new: bool) -> None:
    """They see none of it before and all of it after, and never an aborted one."""
    client = Client(desk, is_new=is_new)
    assert client.begin() == NONE
    for committed in (True, False, True):
        before = both(desk), both(desk, 1)
        word = b"yes" if committed else b"no"
        assert client.write(word, word + b"!") == NONE
        assert client.write(b"one", partition=1) == NONE
        assert (both(desk), both(desk, 1)) == before
        assert status(desk) == "Ongoing"
        assert client.end(committed=committed) == NONE
        assert status(desk) == ("CompleteCommit" if committed else "CompleteAbort")
    assert both(desk) == [b"yes", b"yes!", b"yes", b"yes!"]
    assert both(desk, 1) == [b"one", b"one"]


def test_the_new_protocol_is_announced(desk: Desk) -> None:
    """``transaction.version`` 2, in the versions that have a place for it."""
    for version in range(6):
        answer = desk.ask(18, version, ApiVersionsRequest())
        told = {one.name: one.max_version_level for one in answer.finalized_features}
        assert told == ({"transaction.version": 2} if version >= 3 else {})


def test_each_transaction_has_an_epoch_of_its_own(desk: Desk) -> None:
    """In the new protocol, sequences begin at 0 in each, and no batch is mistaken for that of another transaction."""
    client = Client(desk, is_new=True)
    client.begin()
    first = client.numbers
    for number in range(3):
        assert client.numbers == (first.producer_id, first.epoch + number)
        batch = client.batch(b"%d" % number)
        assert client.send(batch) == NONE
        assert client.send(batch) == NONE, "the same again is known"
        assert client.end() == NONE
    assert both(desk) == [b"0", b"1", b"2"]


def test_a_new_epoch_begins_with_its_first_batch(desk: Desk) -> None:
    """If two batches are in flight together, the second must not be accepted before the first."""
    client = Client(desk, is_new=True)
    client.begin()
    client.write(b"a")
    client.end()
    first, second = client.batch(b"b"), client.batch(b"c")
    assert client.send(second) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert client.send(first) == client.send(second) == NONE
    client.end()
    assert both(desk) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("seed", seeds("remote transactions"))
def test_readers_of_both_kinds_see_the_same(make_desk: MakeDesk, seed: int) -> None:
    """This holds for any mix of clients of both protocols and library producers, on any worker."""
    random = Random(seed)
    desks = [make_desk(), make_desk()]
    clients = [Client(random.choice(desks), f"c{number}", is_new=number % 2 == 0) for number in range(4)]
    local = desks[0].broker.store.producer(name="local", linger_ms=0)
    for client in clients:
        client.begin()
    wrote: dict[str, list[tuple[int, bytes]]] = {client.name: [] for client in clients}
    expected: dict[int, list[bytes]] = {0: [], 1: []}
    for step in range(60):
        client = random.choice(clients)
        client.desk = random.choice(desks)
        partition, value = random.randrange(2), b"%d" % step
        match random.randrange(6):
            case 0 | 1 | 2:
                assert client.write(value, partition=partition) == NONE
                wrote[client.name].append((partition, value))
            case 3:
                committed = random.random() < 0.6
                code = client.end(committed=committed) if wrote[client.name] else NONE
                assert code == NONE
                if committed:
                    for where, one in wrote[client.name]:
                        expected[where].append(one)
                wrote[client.name].clear()
            case 4:
                assert client.begin() == NONE
                wrote[client.name].clear()
            case 5:
                local.begin_transaction()
                local.send("t", value, partition=partition)
                if random.random() < 0.5:
                    local.commit_transaction()
                    expected[partition].append(value)
                else:
                    local.abort_transaction()
        for where in (0, 1):
            assert both(desks[0], where) == both(desks[1], where)
    for client in clients:
        client.begin()
    local.close()
    for where in (0, 1):
        assert sorted(filter(None, both(desks[0], where))) == sorted(expected[where])
    found = list(inspect_store(desks[0].broker.store.path))
    assert [str(one) for one in found if one.severity != "note"] == []


# ---------------------------------------------------------------- what a late request does


def test_the_old_protocol_can_tear(desk: Desk) -> None:
    """A request that outlives its transaction becomes part of the next one: what was aborted is committed."""
    client = Client(desk, is_new=False)
    client.begin()
    client.add(0)
    late = client.batch(b"of the first")
    assert client.end(committed=False) == NONE
    client.add(0)
    assert client.send(late) == NONE
    assert client.end() == NONE
    assert both(desk) == [b"of the first"]


def test_the_new_protocol_does_not_tear(desk: Desk) -> None:
    """A late request belongs to an ended epoch, whether another transaction is open or not."""
    client = Client(desk, is_new=True)
    client.begin()
    assert client.write(b"before") == NONE
    late = client.batch(b"of the first")
    assert client.end(committed=False) == NONE
    assert client.send(late) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert client.write(b"of the second") == NONE
    assert client.send(late) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert client.end() == NONE
    assert client.send(late) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert both(desk) == [b"of the second"]


def test_nothing_is_written_outside_of_a_transaction(desk: Desk) -> None:
    """In the old protocol, the partition must be part of it, so that no late request leaves a transaction hanging."""
    client = Client(desk, is_new=False)
    client.begin()
    assert client.send(client.batch(b"x")) == ErrorCode.INVALID_TXN_STATE
    assert client.send(client.batch(b"x"), version=11) == ErrorCode.TRANSACTION_ABORTABLE
    client.sequences.clear()
    client.add(1)
    assert client.send(client.batch(b"x")) == ErrorCode.INVALID_TXN_STATE
    client.sequences.clear()
    assert client.write(b"a") == NONE
    client.end()
    assert client.send(client.batch(b"b")) == ErrorCode.INVALID_TXN_STATE
    client.name = None  # type: ignore[assignment]
    assert client.send(client.batch(b"b")) == ErrorCode.INVALID_TXN_STATE
    assert desk.broker.store.topic("t").partition(0).open_transactions() == []
    assert both(desk) == [b"a"]


@PROTOCOLS
def test_what_is_synced_is_all_that_there_is(desk: Desk, monkeypatch: pytest.MonkeyPatch, is_new: bool) -> None:
    """Once a commit has begun, no further record is accepted."""
    client = Client(desk, is_new=is_new)
    client.begin()
    client.write(b"in time")
    late = client.batch(b"late")
    codes = []
    sync = server_transactions._sync_partition

    def synced(*args: Any, **options: Any) -> int:
        end = sync(*args, **options)
        codes.append(client.send(late))
        return end

    monkeypatch.setattr(server_transactions, "_sync_partition", synced)
    assert client.end() == NONE
    assert codes == [ErrorCode.INVALID_PRODUCER_EPOCH if is_new else ErrorCode.INVALID_TXN_STATE]
    assert both(desk) == [b"in time"]


@PROTOCOLS
def test_the_end_waits_for_the_disk(desk: Desk, is_new: bool) -> None:
    """Batches of a transaction are acknowledged once written; the end of the transaction syncs all of them."""
    desk.broker.store.create_topic("lazy", fsync="never")
    log = desk.broker.store.topic("lazy").partition(0)
    client = Client(desk, is_new=is_new)
    client.begin()
    assert client.write(b"1", b"2", topic="lazy") == NONE
    assert (log.durable_offset, log.log_end_offset) == (0, 2)
    assert client.end() == NONE
    assert log.durable_offset >= 2
    after = log.log_end_offset
    data = foreign([Sent(b"k", b"alone")])
    topics = [TopicProduceData("lazy", partition_data=[PartitionProduceData(0, data)])]
    desk.ask(0, 10, ProduceRequest(None, -1, 1000, topics))
    assert log.durable_offset == after + 1


# ---------------------------------------------------------------- who counts


@PROTOCOLS
def test_a_newer_instance_fences_the_older_one(desk: Desk, is_new: bool) -> None:
    """Its transaction is aborted, and its requests are refused."""
    old, new = Client(desk, is_new=is_new), Client(desk, is_new=is_new)
    old.begin()
    old.write(b"zombie")
    assert new.begin() == NONE
    assert new.numbers.producer_id == old.numbers.producer_id
    assert new.numbers.epoch > old.numbers.epoch
    assert old.write(b"zombie") in (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH)
    assert old.send(old.batch(b"zombie")) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert old.end() == ErrorCode.PRODUCER_FENCED
    assert old.end(version=1) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert old.add(0) == [ErrorCode.PRODUCER_FENCED]
    assert old.add(0, version=1) == [ErrorCode.INVALID_PRODUCER_EPOCH]
    assert old.begin(expected=old.numbers) == ErrorCode.PRODUCER_FENCED
    assert old.begin(expected=old.numbers, version=3) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert old.add_offsets() == ErrorCode.PRODUCER_FENCED
    new.write(b"new")
    assert new.end() == NONE
    assert both(desk) == [b"new"]


def test_the_next_epoch_for_who_has_the_last_one(desk: Desk) -> None:
    """KIP-360; a client that missed the response repeats the request, and gets the same epoch."""
    client = Client(desk, is_new=False)
    client.begin()
    first = client.numbers
    assert client.begin(expected=first) == NONE
    assert client.numbers == (first.producer_id, first.epoch + 1)
    assert client.begin(expected=first) == NONE
    assert client.numbers == (first.producer_id, first.epoch + 1)
    assert client.begin(expected=ProducerIdAndEpoch(first.producer_id + 1, first.epoch)) == ErrorCode.PRODUCER_FENCED


def test_a_name_belongs_to_one_door(desk: Desk) -> None:
    """Names of the library and transactional ids are counted in different ways: the other kind is refused."""
    store = desk.broker.store
    store.producer(name="library").close()
    assert Client(desk, "library", is_new=True).begin() == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    Client(desk, "remote", is_new=True).begin()
    with pytest.raises(ProducerNameInUse, match="belongs to a client of the server"):
        store.producer(name="remote")


def test_what_is_refused(desk: Desk) -> None:
    """The refusal comes first, before any effect; a transactional id of the maximal length is accepted."""
    client = Client(desk, is_new=False)
    assert client.end() == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    for timeout_ms in (0, -1, 900_001):
        assert client.begin(timeout_ms) == ErrorCode.INVALID_TRANSACTION_TIMEOUT
    client.begin()
    assert client.end() == ErrorCode.INVALID_TXN_STATE
    assert client.end(numbers=ProducerIdAndEpoch(5, 0)) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert client.add(0, 7) == [ErrorCode.OPERATION_NOT_ATTEMPTED, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert client.add(0, topic="__consumer_offsets") == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    client.name = ""
    assert client.begin() == ErrorCode.INVALID_REQUEST
    client.name = "x" * 32_767
    assert client.begin() == 0


def test_epochs_come_to_an_end(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transactional id then continues under another producer id; a client that repeats EndTxn learns it."""
    monkeypatch.setattr(server_transactions, "EPOCH_MAX", 3)
    client = Client(desk, is_new=True)
    client.begin()
    ids = set()
    for number in range(9):
        ids.add(client.numbers.producer_id)
        asked = client.numbers
        assert client.write(b"%d" % number) == NONE
        assert client.end() == NONE
        following = client.numbers
        assert client.end(numbers=asked) == NONE
        assert client.numbers == following
        assert following.epoch <= 3
    assert len(ids) == 3
    assert both(desk) == [b"%d" % number for number in range(9)]


# ---------------------------------------------------------------- how it ends


@PROTOCOLS
@pytest.mark.parametrize("committed", [True, False])
def test_who_asks_again_is_told_the_same(desk: Desk, is_new: bool, committed: bool) -> None:
    """A request for the opposite result is then refused."""
    client = Client(desk, is_new=is_new)
    client.begin()
    client.write(b"a")
    asked = client.numbers
    assert client.end(committed=committed) == NONE
    following = client.numbers
    for _ in range(2):
        assert client.end(committed=committed, numbers=asked) == NONE
        assert client.numbers == following
    assert client.end(committed=not committed, numbers=asked) == ErrorCode.INVALID_TXN_STATE
    assert both(desk) == ([b"a"] if committed else [])


def test_to_end_nothing(desk: Desk) -> None:
    """The new protocol aborts where nothing was written, and brings an epoch; there is nothing to commit."""
    client = Client(desk, is_new=True)
    client.begin()
    first = client.numbers
    assert client.end() == ErrorCode.INVALID_TXN_STATE
    assert client.end(committed=False) == NONE
    assert client.numbers == (first.producer_id, first.epoch + 1)
    assert client.end(committed=False, numbers=first) == NONE
    assert client.numbers == (first.producer_id, first.epoch + 1)
    assert client.write(b"a") == client.end() == NONE
    assert client.end() == ErrorCode.INVALID_TXN_STATE, "that of the last transaction is not of this one"
    assert both(desk) == [b"a"]


@PROTOCOLS
def test_a_timeout_aborts_and_fences(make_desk: MakeDesk, is_new: bool) -> None:
    """Only the timeout does this: a client has no lease that shows that it is gone."""
    clock = FakeClock()
    desk = make_desk(clock=clock)
    client = Client(desk, is_new=is_new)
    client.begin(10_000)
    client.write(b"a")
    clock.advance(10_000)
    desk.broker.store.finish_transactions()
    assert status(desk) == "Ongoing"
    clock.advance(1)
    desk.broker.store.finish_transactions()
    assert status(desk) == "CompleteAbort"
    assert client.end() == ErrorCode.PRODUCER_FENCED
    assert both(desk) == []
    assert client.begin() == NONE
    assert client.write(b"b") == client.end() == NONE
    assert both(desk) == [b"b"]


@PROTOCOLS
def test_a_timeout_between_the_two_halves_of_a_commit(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """The worker is killed while it commits, and the transaction's time is over before its client asks again.

    The client is fenced, after which Kafka Streams continues with a new producer. INVALID_TXN_STATE would end it.
    """
    clock = FakeClock()
    desk = make_desk(clock=clock)
    client = Client(desk, is_new=is_new)
    client.begin(10_000)
    client.write(b"a")

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ServerTransactions, "_sync", killed)
        with pytest.raises(KeyboardInterrupt):
            client.end()
    clock.advance(10_001)
    desk.broker.store.finish_transactions()
    assert status(desk) == "CompleteAbort"
    for _ in range(2):
        assert client.end() == ErrorCode.PRODUCER_FENCED
        assert client.end(committed=False) == ErrorCode.PRODUCER_FENCED
    assert both(desk) == []
    assert client.begin() == NONE
    assert client.write(b"b") == client.end() == NONE
    assert both(desk) == [b"b"]


@PROTOCOLS
@pytest.mark.parametrize("where", ["_sync", "complete_if_possible"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_that_is_killed_while_it_commits(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, is_new: bool, where: str, fails: bool
) -> None:
    """A client that repeats its commit gets what was decided: the commit, or TRANSACTION_ABORTABLE where it failed."""
    client = Client(desk, is_new=is_new)
    client.begin()
    client.write(b"a")
    is_decided = where == "complete_if_possible"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    def full(*_: Any) -> None:
        raise OSError(errno.EIO, "the disk failed")

    with monkeypatch.context() as patched:
        if fails:
            patched.setattr(ServerTransactions, "_sync", full)
        patched.setattr(TransactionCompleter if is_decided else ServerTransactions, where, killed)
        with pytest.raises(KeyboardInterrupt):
            client.end()
    assert status(desk) == ("Ongoing" if not is_decided else "PrepareAbort" if fails else "PrepareCommit")
    if fails and is_decided:
        for _ in range(2):
            assert client.end() == (
                ErrorCode.TRANSACTION_ABORTABLE if is_new else ErrorCode.INVALID_PRODUCER_ID_MAPPING
            )
        assert client.end(committed=False) == NONE
        assert both(desk) == []
    else:
        assert client.end() == NONE
        assert both(desk) == [b"a"]


def test_a_timeout_goes_on_after_the_machine_was_started_again(make_desk: MakeDesk) -> None:
    """The machine's clock restarts: an earlier transaction counts as open at least since the restart."""
    clock = FakeClock()
    desk = make_desk(clock=clock)
    client = Client(desk, is_new=True)
    client.begin(10_000)
    client.write(b"a")
    clock.up_ms = 9_000
    desk.broker.store.finish_transactions()
    assert status(desk) == "Ongoing"
    clock.up_ms = 10_001
    desk.broker.store.finish_transactions()
    assert status(desk) == "CompleteAbort"


@PROTOCOLS
def test_what_begins_while_others_are_looked_at_is_not_overdue(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """It must not count as one from before the machine's start, which would be aborted at once."""
    clock = FakeClock()
    desk = make_desk(clock=clock)
    client = Client(desk, is_new=is_new)
    client.begin(10_000)
    clock.advance(20_000)
    begun: list[ErrorCode] = []
    states = TransactionLog.states

    def slow_states(self: TransactionLog) -> Any:
        if not begun:
            begun.append(NONE)
            clock.advance(1)
            begun.append(client.write(b"a"))
        return states(self)

    with monkeypatch.context() as patched:
        patched.setattr(TransactionLog, "states", slow_states)
        desk.broker.store.finish_transactions()
    assert begun == [NONE, NONE]
    assert status(desk) == "Ongoing"
    assert client.end() == NONE
    assert both(desk) == [b"a"]


def test_names_are_forgotten(make_desk: MakeDesk) -> None:
    """A week after they were heard of last; not while something is open."""
    clock = FakeClock()
    desk = make_desk(clock=clock)
    store = desk.broker.store
    client, other = Client(desk, is_new=True), Client(desk, "other", is_new=True)
    client.begin()
    other.begin(900_000)
    clock.advance(SERVER_NAME_EXPIRATION_MS)
    store.finish_transactions()
    other.write(b"a")
    clock.advance(1)
    store.finish_transactions()
    assert set(store.transactions.states()) == {"other"}
    assert client.write(b"b") == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert client.begin() == client.write(b"b") == client.end() == other.end() == NONE
    assert both(desk) == [b"a", b"b"]


@PROTOCOLS
@pytest.mark.parametrize("what", ["the log of states", "a partition"])
def test_what_a_crash_may_have_taken_is_not_committed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, is_new: bool, what: str
) -> None:
    """A part must not be committed either: the client must abort, and then continues."""
    client = Client(desk, is_new=is_new)
    client.begin()
    client.write(b"a")
    with monkeypatch.context() as patched:
        if what == "a partition":
            patched.setattr(type(desk.broker.store.topic("t").partition(0)), "epoch", 7)
        else:
            patched.setattr(TransactionLog, "epoch", 7)
        version = 5 if is_new else 4
        assert client.end(version=version) == ErrorCode.TRANSACTION_ABORTABLE
        assert client.end(committed=False, version=version) == NONE
        assert client.write(b"b") == NONE
        assert client.end(version=version) == NONE
    assert both(desk) == [b"b"]


def test_after_a_crash_nobody_is_told_that_another_transaction_was_his(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old protocol cannot tell the transaction that was committed from the next one, which a crash took."""
    client = Client(desk, is_new=False)
    client.begin()
    client.write(b"a")
    assert client.end() == client.end() == NONE
    monkeypatch.setattr(TransactionLog, "epoch", 7)
    assert client.end() == ErrorCode.INVALID_TXN_STATE


# ---------------------------------------------------------------- others


def test_tools_of_the_library_end_it(desk: Desk) -> None:
    """`segmentlog transactions abort` is for transactions of clients as well."""
    client = Client(desk, is_new=True)
    client.begin()
    client.write(b"a")
    assert desk.broker.store.transactions.abort_by_name("app")
    assert client.end() == ErrorCode.PRODUCER_FENCED
    assert both(desk) == []


def test_a_decision_that_cannot_be_told_is_told_later(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision is made, and the client learns of it; its next transaction waits until the markers are written."""
    client = Client(desk, is_new=True)
    client.begin()
    client.write(b"a")
    with monkeypatch.context() as patched:
        patched.setattr(TransactionCompleter, "_write_marker", _no_room)
        assert client.end() == NONE
        assert read(desk.broker.store) == fetched(desk) == []
        assert client.write(b"b") == ErrorCode.NOT_ENOUGH_REPLICAS
        assert client.begin() == ErrorCode.CONCURRENT_TRANSACTIONS
    client.sequences.clear()
    assert client.write(b"b") == client.end() == NONE
    assert both(desk) == [b"a", b"b"]


def _no_room(*_: object) -> None:
    raise OSError(28, "no room")


def test_deleted_topics_take_their_part_along(desk: Desk) -> None:
    """The rest is decided as ever."""
    desk.broker.store.create_topic("gone")
    client = Client(desk, is_new=True)
    client.begin()
    assert client.write(b"a") == client.write(b"b", topic="gone") == NONE
    desk.broker.store.delete_topic("gone")
    assert client.end() == NONE
    assert both(desk) == [b"a"]


def test_the_engine_says_who_is_fenced(desk: Desk) -> None:
    """The error has the epochs, for programs that embed the engine."""
    transactions = desk.broker.store.transactions.server_transactions
    numbers = transactions.register("x", 1000)
    transactions.register("x", 1000)
    with pytest.raises(ProducerFenced) as raised:
        transactions.end_transaction("x", numbers, committed=True)
    assert (raised.value.epoch, raised.value.current_epoch) == (0, 1)


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("before", ["begun", "committed", "aborted"])
def test_a_transaction_that_a_crash_took_whole(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, version: int, before: str
) -> None:
    """Its client must abort, can do so, and continues; a committed transaction is never reported as aborted."""
    client = Client(desk, is_new=version == 5)
    client.begin()
    if before != "begun":
        client.write(b"a")
        assert client.end(committed=before == "committed", version=version) == NONE
    # A restart of the machine forgets all writes from now on.
    monkeypatch.setattr(TransactionLog, "epoch", 7)
    lost = ErrorCode.INVALID_PRODUCER_ID_MAPPING if version < 4 else ErrorCode.TRANSACTION_ABORTABLE
    if before == "committed" and version < 5:
        assert client.end(version=version) == ErrorCode.INVALID_TXN_STATE
    else:
        assert client.end(version=version) == lost
    if version == 3:  # as clients abort upon that
        assert client.begin(expected=client.numbers) == NONE
    else:
        assert client.end(committed=False, version=version) == NONE
    assert client.write(b"b") == client.end(version=version) == NONE
    assert both(desk) == ([b"a", b"b"] if before == "committed" else [b"b"])


@PROTOCOLS
def test_a_batch_of_no_transaction_within_one(desk: Desk, is_new: bool) -> None:
    """A transactional id's producer id takes none: before a transaction, within it, elsewhere and after it."""
    client = Client(desk, is_new=is_new)
    client.begin()

    def plain(value: bytes, partition: int = 0) -> int:
        sequence = client.sequences.get(("t", partition), 0)
        data = foreign([Sent(b"k", value)], producer=(*client.numbers, sequence))
        code = client.send(data, partition=partition)
        client.sequences["t", partition] = sequence + (code == NONE)
        return code

    refused = ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert plain(b"before") == refused
    assert client.write(b"in") == NONE
    assert plain(b"within") == plain(b"elsewhere", 1) == refused
    assert client.end() == NONE
    assert plain(b"after") == refused
    assert (both(desk), both(desk, 1)) == ([b"in"], [])
