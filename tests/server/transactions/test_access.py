"""Permissions of transactions."""

from __future__ import annotations

from typing import Any

import pytest
from server.transactions.clients import Client
from server.wire_client import Desk

from segmentlog.security.acls import OpenAuthorizer
from segmentlog.security.principals import CLUSTER_NAME, Operation, ResourceType
from segmentlog.server.codec.generated.add_partitions_to_txn import AddPartitionsToTxnRequest
from segmentlog.server.codec.generated.describe_producers import DescribeProducersRequest, TopicRequest
from segmentlog.server.codec.generated.describe_transactions import DescribeTransactionsRequest
from segmentlog.server.codec.generated.list_transactions import ListTransactionsRequest
from segmentlog.server.codec.generated.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from segmentlog.server.codec.kafka_errors import ErrorCode

NONE = ErrorCode.NONE


class _Denying(OpenAuthorizer):
    """Allows everything but one operation on something."""

    def __init__(self, operation: Operation, resource: ResourceType, name: str) -> None:
        super().__init__()
        self._denied = operation, resource, name

    def allows(self, principal: Any, host: str, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        return (operation, resource_type, name) != self._denied


def deny(desk: Desk, operation: Operation, resource: ResourceType, name: str) -> None:
    """Deny the operation from now on."""
    desk.broker.authorizer = _Denying(operation, resource, name)  # type: ignore[assignment]


@pytest.fixture(params=[False, True], ids=["old", "new"])
def client(request: pytest.FixtureRequest, desk: Desk) -> Client:
    """Return a client with an open transaction."""
    client = Client(desk, is_new=request.param)
    assert client.begin() == client.write(b"a") == NONE
    return client


def test_the_transactional_id(desk: Desk, client: Client) -> None:
    """Without the right, all requests for it fail; a client that may not see it does not find it in lists."""
    denied = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    deny(desk, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, "app")
    assert client.begin() == client.end() == client.add_offsets() == denied
    assert client.add(0) == [denied]
    assert client.send(client.batch(b"b")) == denied
    assert client.send_offset(1, group="g", topic="t", partition=0) == denied
    deny(desk, Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, "app")
    assert desk.ask(66, 0, ListTransactionsRequest()).transaction_states == []
    (told,) = desk.ask(65, 0, DescribeTransactionsRequest(["app"])).transaction_states
    assert (told.error_code, told.producer_id) == (denied, 0)


def test_topics_and_groups(desk: Desk, client: Client) -> None:
    """A topic without the right to write rejects the whole request: no partition of it joins the transaction."""
    desk.broker.store.create_topic("other")
    deny(desk, Operation.WRITE, ResourceType.TOPIC, "t")
    assert client.add(0, 1) == [ErrorCode.TOPIC_AUTHORIZATION_FAILED] * 2
    assert client.send(client.batch(b"b")) == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    deny(desk, Operation.READ, ResourceType.GROUP, "g")
    assert client.add_offsets() == ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert client.send_offset(1, group="g", topic="t", partition=0) == ErrorCode.GROUP_AUTHORIZATION_FAILED
    deny(desk, Operation.READ, ResourceType.TOPIC, "t")
    assert client.commit_offset(1) == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    (told,) = desk.ask(61, 0, DescribeProducersRequest([TopicRequest("t", [0])])).topics[0].partitions
    assert (told.error_code, told.active_producers) == (ErrorCode.TOPIC_AUTHORIZATION_FAILED, [])
    deny(desk, Operation.DESCRIBE, ResourceType.TOPIC, "t")
    (state,) = desk.ask(65, 0, DescribeTransactionsRequest(["app"])).transaction_states
    assert (state.error_code, state.topics) == (NONE, [])


def test_what_brokers_do(desk: Desk, client: Client) -> None:
    """Markers, and several names in one request, require CLUSTER_ACTION."""
    deny(desk, Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME)
    denied = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert desk.ask(24, 4, AddPartitionsToTxnRequest()).error_code == denied
    marker = WritableTxnMarker(client.numbers.producer_id, 0, False, [WritableTxnMarkerTopic("t", [0])])
    (result,) = desk.ask(27, 1, WriteTxnMarkersRequest([marker])).markers
    assert result.topics[0].partitions[0].error_code == denied
    assert client.end() == NONE
