"""Transaction tools: list and describe transactions, and abort hanging ones."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
from logs import FakeClock
from seeds import seeds
from server.transactions.clients import Client, both
from server.transactions.conftest import MakeDesk
from server.wire_client import Desk

from segmentlog.log.producer_state import ProducerStamp
from segmentlog.server.codec.generated.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from segmentlog.server.codec.generated.describe_producers import DescribeProducersRequest, TopicRequest
from segmentlog.server.codec.generated.describe_transactions import DescribeTransactionsRequest
from segmentlog.server.codec.generated.list_transactions import ListTransactionsRequest
from segmentlog.server.codec.generated.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.handlers.transaction_admin_handlers import matches

NONE = ErrorCode.NONE


def listed(desk: Desk, *, version: int = 2, **options: Any) -> dict[str, str]:
    """ListTransactions: the states by name."""
    answer = desk.ask(66, version, ListTransactionsRequest(**options))
    assert answer.error_code == NONE
    return {one.transactional_id: one.transaction_state for one in answer.transaction_states}


def test_list_and_describe(make_desk: MakeDesk) -> None:
    """Transactions of clients and of the library's named producers, by state, id, age and pattern."""
    clock = FakeClock()
    desk = make_desk(clock=clock)
    store = desk.broker.store
    open_one, done = Client(desk, "app-1", is_new=True), Client(desk, "app-2", is_new=False)
    for client in (open_one, done):
        client.begin()
        client.write(b"x", partition=1)
        client.commit_offset(1)
    done.end()
    store.producer(name="etl").close()
    assert listed(desk) == {"app-1": "Ongoing", "app-2": "CompleteCommit", "etl": "Empty"}
    assert listed(desk, state_filters=["Ongoing", "Empty"]) == {"app-1": "Ongoing", "etl": "Empty"}
    assert listed(desk, producer_id_filters=[done.numbers.producer_id]) == {"app-2": "CompleteCommit"}
    assert set(listed(desk, transactional_id_pattern="app-.*")) == {"app-1", "app-2"}
    assert listed(desk, version=1, duration_filter=1000) == {}
    clock.advance(1001)
    assert listed(desk, version=1, duration_filter=1000) == {"app-1": "Ongoing"}
    answer = desk.ask(66, 0, ListTransactionsRequest(state_filters=["Odd"]))
    assert answer.unknown_state_filters == ["Odd"]
    assert desk.ask(66, 2, ListTransactionsRequest(transactional_id_pattern="(a+)+")).error_code == 128
    one, two, none = desk.ask(65, 0, DescribeTransactionsRequest(["app-1", "app-2", "nobody"])).transaction_states
    assert (one.transaction_state, one.transaction_timeout_ms, one.producer_epoch) == ("Ongoing", 60_000, 0)
    assert (one.producer_id, one.transaction_start_time_ms) == (open_one.numbers.producer_id, clock.wall_ms - 1001)
    assert [(topic.topic, topic.partitions) for topic in one.topics] == [("t", [1])]
    assert (two.transaction_state, two.transaction_start_time_ms, two.topics) == ("CompleteCommit", -1, [])
    assert none.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


@pytest.mark.parametrize("seed", seeds("patterns"))
def test_patterns(seed: int) -> None:
    """The supported subset of regular expressions has its usual meaning."""
    random = Random(seed)
    for _ in range(300):
        pattern = "".join(random.choice(("a", "b", ".", ".*", r"\.", "-")) for _ in range(random.randrange(6)))
        name = "".join(random.choice("ab.-") for _ in range(random.randrange(7)))
        assert matches(pattern, name) == bool(re.fullmatch(pattern, name)), (pattern, name)


def test_producers_of_a_partition(desk: Desk) -> None:
    """The answer has the partition's producers with their open transactions."""
    client = Client(desk, is_new=True)
    client.begin()
    client.write(b"a", b"b")
    request = DescribeProducersRequest([TopicRequest("t", [0, 1, 9]), TopicRequest("__consumer_offsets", [0])])
    told, internal = desk.ask(61, 0, request).topics
    (one,) = told.partitions[0].active_producers
    assert (one.producer_id, one.producer_epoch) == client.numbers
    assert (one.last_sequence, one.current_txn_start_offset) == (1, 0)
    assert told.partitions[1].active_producers == []
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert told.partitions[2].error_code == internal.partitions[0].error_code == unknown
    client.end()
    (one,) = desk.ask(61, 0, request).topics[0].partitions[0].active_producers
    assert (one.producer_epoch, one.current_txn_start_offset) == (1, -1)


def marked(desk: Desk, producer_id: int, *, committed: bool = False) -> int:
    """WriteTxnMarkers for t/0; its code."""
    topics = [WritableTxnMarkerTopic("t", [0])]
    marker = WritableTxnMarker(producer_id, 0, committed, topics)
    (result,) = desk.ask(27, 1, WriteTxnMarkersRequest([marker])).markers
    return result.topics[0].partitions[0].error_code  # type: ignore[no-any-return]


def test_to_end_what_hangs(desk: Desk) -> None:
    """The whole transaction is aborted, and its client is fenced; tools cannot commit."""
    client = Client(desk, is_new=True)
    client.begin()
    client.write(b"a")
    client.write(b"b", partition=1)
    assert marked(desk, client.numbers.producer_id, committed=True) == ErrorCode.INVALID_TXN_STATE
    assert marked(desk, client.numbers.producer_id) == NONE
    assert client.end() == ErrorCode.PRODUCER_FENCED
    log = desk.broker.store.topic("t").partition(0)
    log.append([b"of nobody"], producer=ProducerStamp(77, 0, 0, transactional=True))
    log.append([b"behind it"])
    assert both(desk) == []
    assert marked(desk, 77) == NONE
    assert marked(desk, 77) == NONE, "there is nothing open"
    assert both(desk) == [b"behind it"]
    assert both(desk, 1) == []


def test_brokers_add_and_verify(desk: Desk) -> None:
    """The versions that brokers use among themselves: several names at once, and to ask without changing anything."""
    client, other = Client(desk, is_new=False), Client(desk, "other", is_new=False)
    client.begin()
    other.begin()

    def asked(version: int, *, verify_only: bool) -> list[list[int]]:
        transactions = [
            AddPartitionsToTxnTransaction(one.name, *one.numbers, verify_only, [AddPartitionsToTxnTopic("t", [0, 1])])
            for one in (client, other)
        ]
        answer = desk.ask(24, version, AddPartitionsToTxnRequest(transactions))
        return [
            [one.partition_error_code for one in result.topic_results[0].results_by_partition]
            for result in answer.results_by_transaction
        ]

    client.add(0, 1)
    assert asked(4, verify_only=True) == [[NONE] * 2, [ErrorCode.INVALID_TXN_STATE] * 2]
    assert asked(5, verify_only=True) == [[NONE] * 2, [ErrorCode.TRANSACTION_ABORTABLE] * 2]
    assert asked(5, verify_only=False) == [[NONE] * 2] * 2
    assert asked(5, verify_only=True) == [[NONE] * 2] * 2
