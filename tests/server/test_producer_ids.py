"""Whose producer id a batch may carry: a client uses the ids that a server of the store assigned to its principal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from msgspec.structs import replace
from server.transactions.clients import Client
from server.wire_client import Desk
from wire import Sent, foreign

from segmentlog.format.file_names import PRODUCER_IDS_FILE
from segmentlog.format.producer_snapshot import CLIENT_IDS, OLD_IDS, STORE_IDS
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.security.principals import Principal
from segmentlog.server.broker import Broker
from segmentlog.server.codec.generated.init_producer_id import InitProducerIdRequest
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore
from segmentlog.transactions import assigned_ids as transactions_assigned

ANN, EVE = Principal("User", "ann"), Principal("User", "eve")
REFUSED = ErrorCode.INVALID_PRODUCER_ID_MAPPING
_NODES = [WorkerNode(1, "localhost", 9093), WorkerNode(2, "localhost", 9094)]

Serve = Callable[..., Broker]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Yield a function that creates workers over a store with a topic, each with the store open for itself."""
    brokers: list[Broker] = []

    def make(path: Path = tmp_path / "store", number: int = 1, **options: Any) -> Broker:
        store = opened(LogStore(path, **{"background": False, "fs": NoSyncFileSystem(), **options}))
        if "t" not in store.topics():
            store.create_topic("t", 2)
        cluster = WorkerCluster("c", _NODES[number - 1 : number], number)
        broker = Broker(store, cluster, ServerSettings(), OpenAuthorizer())  # type: ignore[arg-type]
        brokers.append(broker)
        return broker

    yield make
    for broker in brokers:
        broker.close()


def assigned(broker: Broker, who: Principal = ANN, numbers: tuple[int, int] = (-1, -1)) -> tuple[int, int]:
    """Return the producer id and epoch that a client gets; ``numbers`` are its current ones."""
    request = InitProducerIdRequest(None, 0)
    request.producer_id, request.producer_epoch = numbers
    answer = Desk(broker, who).ask(22, 4, request)
    assert answer.error_code == ErrorCode.NONE
    return answer.producer_id, answer.producer_epoch


def produce(
    broker: Broker,
    numbers: tuple[int, int],
    sequence: int,
    who: Principal = ANN,
    *,
    partition: int = 0,
    name: str | None = None,
) -> tuple[int, int]:
    """Send a batch of one record that belongs to no transaction; (error, offset)."""
    data = foreign([Sent(b"k", b"v")], producer=(*numbers, sequence))
    topics = [TopicProduceData("t", partition_data=[PartitionProduceData(partition, memoryview(data))])]
    answer = Desk(broker, who).ask(0, 9, ProduceRequest(name, 1, 1000, topics))
    (one,) = answer.responses[0].partition_responses
    return one.error_code, one.base_offset


# ---------------------------------------------------------------- what a client must not do


@pytest.mark.parametrize("name", [None, "mine"])
def test_a_plain_batch_under_the_id_of_a_transactional_id_is_refused(serve: Serve, name: str | None) -> None:
    """A right to write to the topic must not allow fencing the transactional id, whatever name the request gives."""
    broker = serve()
    victim = Client(Desk(broker, ANN), "tx", is_new=False)
    assert victim.begin() == victim.write(b"a") == victim.end() == ErrorCode.NONE
    for epoch in (victim.numbers.epoch, victim.numbers.epoch + 1, 30_000):
        assert produce(broker, (victim.numbers.producer_id, epoch), 0, EVE, name=name)[0] == REFUSED
        assert produce(broker, (victim.numbers.producer_id, epoch), 0, ANN, name=name)[0] == REFUSED
    assert victim.write(b"b") == victim.end() == victim.begin() == victim.write(b"c") == victim.end() == ErrorCode.NONE


@pytest.mark.parametrize("name", ["job", None])
def test_a_plain_batch_under_the_id_of_a_producer_of_the_library_is_refused(serve: Serve, name: str | None) -> None:
    """Named or not: the library's producer continues, and can be opened again."""
    broker = serve()
    with broker.store.producer(name=name) as producer:
        producer.send("t", b"a", partition=0).result()
        (entry,) = broker.partition("t", 0).producers()
        for epoch in (entry.epoch, entry.epoch + 1, 30_000):
            for sequence in (entry.next_sequence, 0):
                assert produce(broker, (entry.producer_id, epoch), sequence, EVE)[0] == REFUSED
        assert producer.send("t", b"b", partition=0).result().offset == 1
    with broker.store.producer(name=name) as producer:
        assert producer.send("t", b"c", partition=0).result().offset == 2


def test_the_id_of_another_principal_is_refused(serve: Serve) -> None:
    """An id that a client reads in the batches of others is of no use to it; the owner does not notice."""
    broker = serve()
    numbers = assigned(broker, ANN)
    assert produce(broker, numbers, 0, ANN) == (ErrorCode.NONE, 0)
    for epoch, sequence in ((0, 1), (0, 0), (1, 0), (30_000, 0)):
        assert produce(broker, (numbers[0], epoch), sequence, EVE)[0] == REFUSED
        assert produce(broker, (numbers[0], epoch), sequence, EVE, partition=1)[0] == REFUSED
    assert produce(broker, numbers, 1, ANN) == (ErrorCode.NONE, 1)
    assert assigned(broker, EVE, numbers)[0] != numbers[0]


def test_ids_that_a_client_makes_up_are_refused(serve: Serve) -> None:
    """They leave no state in the partition, so memory does not grow."""
    broker = serve()
    own, _ = assigned(broker)
    edges = [one for ids in (OLD_IDS, CLIENT_IDS, STORE_IDS) for one in (ids[0], ids[-1])]
    made_up = (0, 7, OLD_IDS.start - 1, OLD_IDS.start + 5, *edges, own ^ 1, own ^ 1 << 25)
    for producer_id in made_up:
        assert produce(broker, (producer_id, 0), 0) == (REFUSED, -1), producer_id
    assert broker.partition("t", 0).producers() == []
    assert broker.partition("t", 0).log_end_offset == 0


def test_a_transactional_batch_that_names_no_transaction_is_refused(serve: Serve) -> None:
    """This also holds for the client's own id."""
    broker = serve()
    data = foreign([Sent(b"k", b"v")], producer=(*assigned(broker), 0), transactional=True)
    topics = [TopicProduceData("t", partition_data=[PartitionProduceData(0, memoryview(data))])]
    answer = Desk(broker, ANN).ask(0, 9, ProduceRequest(None, 1, 1000, topics))
    assert answer.responses[0].partition_responses[0].error_code == ErrorCode.INVALID_TXN_STATE


# ---------------------------------------------------------------- what a client may do


def test_a_client_counts_on_under_its_id(serve: Serve) -> None:
    """A batch that comes again has its first offset; the client may begin the next epoch by itself, or ask for it."""
    broker = serve()
    numbers = assigned(broker)
    assert [produce(broker, numbers, sequence)[1] for sequence in (0, 1, 1, 0)] == [0, 1, 1, 0]
    assert produce(broker, numbers, 3)[0] == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert produce(broker, (numbers[0], 1), 0) == (ErrorCode.NONE, 2)
    assert assigned(broker, ANN, (numbers[0], 1)) == (numbers[0], 2)
    assert produce(broker, (numbers[0], 2), 0) == (ErrorCode.NONE, 3)
    assert produce(broker, numbers, 2)[0] == ErrorCode.INVALID_PRODUCER_EPOCH


def test_every_client_has_an_id_of_its_own(serve: Serve) -> None:
    """This holds for clients of one principal, and of two workers."""
    brokers = [serve(), serve(number=2)]
    found = [assigned(broker, who)[0] for broker in brokers for who in (ANN, EVE) for _ in range(50)]
    assert len(set(found)) == 200
    assert all(one in CLIENT_IDS for one in found)


def test_another_worker_knows_the_id_and_so_does_a_restart(serve: Serve) -> None:
    """A repeated batch that was acknowledged is not appended again."""
    first, second = serve(), serve(number=2)
    numbers = assigned(first)
    assert produce(second, numbers, 0) == (ErrorCode.NONE, 0)
    first.store.close()
    second.store.close()
    again = serve()
    assert [produce(again, numbers, sequence) for sequence in (0, 1)] == [(ErrorCode.NONE, 0), (ErrorCode.NONE, 1)]
    assert produce(again, (numbers[0], 1), 0, EVE)[0] == REFUSED


@pytest.mark.parametrize("how", ["restore", "takeover"])
def test_a_restored_store_knows_the_ids(tmp_path: Path, serve: Serve, how: str) -> None:
    """A client that connects to the new owner repeats its unanswered requests, and continues."""
    url = f"file://{tmp_path}/bucket"
    with LogStore(tmp_path / "store", ship=url) as store:
        store.create_topic("t", 2)
        broker = Broker(store, WorkerCluster("c", _NODES[:1], 1), ServerSettings(), OpenAuthorizer())
        numbers = assigned(broker)
        assert produce(broker, numbers, 0) == (ErrorCode.NONE, 0)
        broker.close()
    bucket = LocalBucket(str(tmp_path / "bucket"))
    if how == "restore":
        restore(bucket, str(tmp_path / "new"))
        new = serve(tmp_path / "new")
    else:
        take_over(bucket, str(tmp_path / "new"))
        new = serve(tmp_path / "new", ship=url, background=True)
    assert produce(new, numbers, 0) == (ErrorCode.NONE, 0)
    ends_s = time.monotonic() + 30
    while (code := produce(new, numbers, 1)[0]) == ErrorCode.NOT_ENOUGH_REPLICAS:  # until offsets are granted
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    assert code == ErrorCode.NONE
    assert produce(new, (numbers[0], 1), 0, EVE)[0] == REFUSED


def test_a_lost_secret_ends_ids_and_new_ones_work(tmp_path: Path, serve: Serve) -> None:
    """The batch is refused for good, and a new producer gets another id."""
    broker = serve()
    numbers = assigned(broker)
    assert produce(broker, numbers, 0) == (ErrorCode.NONE, 0)
    broker.store.close()
    (tmp_path / "store" / PRODUCER_IDS_FILE).write_bytes(b"damaged")
    again = serve()
    assert produce(again, numbers, 1)[0] == REFUSED
    renewed = assigned(again, ANN, numbers)
    assert renewed[0] != numbers[0]
    assert produce(again, renewed, 0) == (ErrorCode.NONE, 1)
    again.store.close()
    assert produce(serve(), renewed, 1) == (ErrorCode.NONE, 2)


def test_a_damaged_secret_is_read_and_warned_about_once(
    tmp_path: Path, serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any number of batches; a file that another process has replaced is noticed."""
    broker = serve()
    numbers = assigned(broker)
    broker.store.close()
    path = tmp_path / "store" / PRODUCER_IDS_FILE
    path.write_bytes(b"damaged")
    again, reads = serve(), 0
    read = transactions_assigned.read_file

    def read_counted(*which: Any) -> bytes:
        nonlocal reads
        reads += 1
        return read(*which)

    monkeypatch.setattr(transactions_assigned, "read_file", read_counted)
    for _ in range(5):
        assert produce(again, numbers, 0)[0] == REFUSED
    assert reads == 1
    assert sum("is damaged" in one.getMessage() for one in caplog.records) == 1
    renewed = assigned(serve())
    assert produce(again, renewed, 0) == (ErrorCode.NONE, 0)


def test_a_store_that_cannot_be_written_to_assigns_no_ids(tmp_path: Path, serve: Serve) -> None:
    """The client gets the error at once, and not with its first batch."""
    serve().store.close()
    store = opened(LogStore(tmp_path / "store", background=False, read_only=True))
    broker = Broker(store, WorkerCluster("c", _NODES[:1], 1), ServerSettings(), OpenAuthorizer())
    answer = Desk(broker).ask(22, 4, InitProducerIdRequest(None, 0))
    assert (answer.error_code, answer.producer_id) == (ErrorCode.POLICY_VIOLATION, -1)
    broker.close()


# ---------------------------------------------------------------- ids of earlier versions


def test_an_id_of_an_earlier_version_goes_on_where_it_was(serve: Serve) -> None:
    """A client that stays connected through an upgrade loses and doubles nothing in the partitions it wrote to."""
    broker = serve()
    producer_id = OLD_IDS.start + 12_345
    broker.partition("t", 0).append([b"a"], producer=ProducerStamp(producer_id, 0, 0))
    assert [produce(broker, (producer_id, 0), sequence)[1] for sequence in (0, 1)] == [0, 1]
    assert produce(broker, (producer_id, 2), 0)[0] == REFUSED  # clients raise an epoch by one at most
    assert produce(broker, (producer_id, 1), 0) == (ErrorCode.NONE, 2)
    # To the server it looks like an invented one.
    assert produce(broker, (producer_id, 0), 0, partition=1)[0] == REFUSED
    assert assigned(broker, ANN, (producer_id, 1))[0] in CLIENT_IDS


def test_an_id_of_an_earlier_version_that_a_name_has_is_refused(serve: Serve) -> None:
    """A transactional id keeps its id over the upgrade."""
    broker = serve()
    victim = Client(Desk(broker, ANN), "tx", is_new=False)
    transactions = broker.store.transactions
    assert victim.begin() == ErrorCode.NONE
    state = replace(transactions.states()["tx"], producer_id=OLD_IDS.start + 9, epoch=0)
    transactions._log.write("tx", state, "durable")
    assert victim.begin() == victim.write(b"a") == victim.end() == ErrorCode.NONE
    assert victim.numbers.producer_id == OLD_IDS.start + 9
    assert produce(broker, (victim.numbers.producer_id, victim.numbers.epoch), 1, EVE)[0] == REFUSED
    assert produce(broker, (victim.numbers.producer_id, victim.numbers.epoch + 1), 0, EVE)[0] == REFUSED
    assert victim.begin() == victim.write(b"b") == victim.end() == ErrorCode.NONE
