"""InitProducerId (22): the numbers under which a producer counts its records. DescribeProducers (61): who counts so."""

from __future__ import annotations

import logging
from typing import Final

from segmentlog.errors import InvalidConfig, ProducerNameInUse, SegmentlogError
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    PartitionResponse,
    ProducerState,
    TopicResponse,
)
from segmentlog.server.codec.generated.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import code_of
from segmentlog.server.handlers.transaction_handlers import code_for, refusal
from segmentlog.server.request_context import TOO_MUCH, Call
from segmentlog.server.topic_ids import is_visible
from segmentlog.transactions.server_transactions import Numbers

logger = logging.getLogger("segmentlog.server")

_EPOCH_MAX: Final = 2**15 - 2
_FENCED_FROM: Final = 4
TIMEOUT_MAX_MS: Final = 900_000
"""`transaction.max.timeout.ms`: what a client may take for a transaction."""


def init_producer_id(call: Call, request: InitProducerIdRequest) -> InitProducerIdResponse:
    """Assign an id that only this principal can use. For an id that it has already: the next epoch (KIP-360)."""
    if request.transactional_id is not None:
        return _begin(call, request.transactional_id, request)
    if not call.allows_cluster(Operation.IDEMPOTENT_WRITE) and not call.broker.authorizer.allows_any(
        call.principal, call.client_host, Operation.WRITE, ResourceType.TOPIC
    ):
        return _refused(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    ids, principal = call.broker.store.transactions.assigned_ids, str(call.principal)
    try:
        if 0 <= request.producer_epoch < _EPOCH_MAX and ids.is_assigned(request.producer_id, principal):
            return InitProducerIdResponse(producer_id=request.producer_id, producer_epoch=request.producer_epoch + 1)
        return InitProducerIdResponse(producer_id=ids.assign(principal), producer_epoch=0)
    except (SegmentlogError, OSError) as error:
        logger.warning("a client gets no producer id: %s", error, extra={"client_id": call.client_id})
        return _refused(code_of(error))


def _begin(call: Call, name: str, request: InitProducerIdRequest) -> InitProducerIdResponse:
    """Become the instance of a transactional id; the one before it is fenced, and its transaction aborted."""
    code = refusal(call, name)
    if code is not ErrorCode.NONE:
        return _refused(code)
    if not 0 < request.transaction_timeout_ms <= TIMEOUT_MAX_MS:
        return _refused(ErrorCode.INVALID_TRANSACTION_TIMEOUT)
    if (request.producer_id < 0) is not (request.producer_epoch < 0):
        return _refused(ErrorCode.INVALID_REQUEST)
    expected = None if request.producer_id < 0 else Numbers(request.producer_id, request.producer_epoch)
    try:
        numbers = call.broker.store.transactions.remote.begin(name, request.transaction_timeout_ms, expected)
    except ProducerNameInUse as error:
        logger.warning("a client of the server is refused: %s", error, extra={"client_id": call.client_id})
        return _refused(code_of(error))
    except InvalidConfig:
        return _refused(ErrorCode.INVALID_REQUEST)  # longer than any name may be
    except (SegmentlogError, OSError) as error:
        return _refused(code_for(call, error, _FENCED_FROM))
    return InitProducerIdResponse(producer_id=numbers.producer_id, producer_epoch=numbers.epoch)


def _refused(code: ErrorCode) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=code, producer_epoch=-1)


def describe_producers(call: Call, request: DescribeProducersRequest) -> DescribeProducersResponse:
    """What each of these partitions knows of its producers."""
    response = DescribeProducersResponse()
    for asked in call.topics_once(request.topics, "partition_indexes", (), "name"):
        name = asked.topic.name
        told = [_describe(call, name, number) for number in call.each(asked.partitions)]
        response.topics.append(TopicResponse(name, told))
    return response


def _describe(call: Call, name: str, number: int) -> PartitionResponse:
    if not call.may_see(Thing.RECORDS, name):
        return PartitionResponse(number, ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    if not is_visible(name):
        return PartitionResponse(number, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    try:
        partition = call.broker.partition(name, number)
        if not call.broker.cluster.leads(partition.topic_id, number):
            return PartitionResponse(number, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        known = partition.producers()
        if not call.takes_room(len(known)):
            return PartitionResponse(number, TOO_MUCH)
        found = [
            ProducerState(
                producer_id=one.producer_id, producer_epoch=one.epoch, last_sequence=one.last_sequence,
                last_timestamp=one.appended_ms, current_txn_start_offset=one.transaction_offset,
            )
            for one in known
        ]  # fmt: skip
    except (SegmentlogError, OSError) as error:
        return PartitionResponse(number, code_of(error), call.explain(error))
    return PartitionResponse(number, active_producers=found)
