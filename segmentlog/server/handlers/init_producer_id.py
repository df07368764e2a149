"""InitProducerId (22): assign producer ids and epochs. DescribeProducers (61): active producers of partitions."""

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
from segmentlog.server.request_context import TOO_MUCH, RequestContext
from segmentlog.server.topic_ids import is_visible
from segmentlog.transactions.server_transactions import ProducerIdAndEpoch

logger = logging.getLogger("segmentlog.server")

_EPOCH_MAX: Final = 2**15 - 2
_FENCED_FROM: Final = 4
TIMEOUT_MAX_MS: Final = 900_000
"""`transaction.max.timeout.ms`: longest transaction timeout of a client."""


def init_producer_id(call: RequestContext, request: InitProducerIdRequest) -> InitProducerIdResponse:
    """Assign a new producer id that only this principal can use, or the next epoch of the client's producer id
    (KIP-360).
    """
    if request.transactional_id is not None:
        return _take_over(call, request.transactional_id, request)
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
        logger.warning("no producer id could be assigned to a client: %s", error, extra={"client_id": call.client_id})
        return _refused(code_of(error))


def _take_over(call: RequestContext, name: str, request: InitProducerIdRequest) -> InitProducerIdResponse:
    """Take over a transactional id: fence the previous producer instance, and abort its open transaction."""
    code = refusal(call, name)
    if code is not ErrorCode.NONE:
        return _refused(code)
    if not 0 < request.transaction_timeout_ms <= TIMEOUT_MAX_MS:
        return _refused(ErrorCode.INVALID_TRANSACTION_TIMEOUT)
    if (request.producer_id < 0) is not (request.producer_epoch < 0):
        return _refused(ErrorCode.INVALID_REQUEST)
    expected = None if request.producer_id < 0 else ProducerIdAndEpoch(request.producer_id, request.producer_epoch)
    try:
        numbers = call.broker.store.transactions.server_transactions.register(
            name, request.transaction_timeout_ms, expected
        )
    except ProducerNameInUse as error:
        logger.warning("an InitProducerId request was rejected: %s", error, extra={"client_id": call.client_id})
        return _refused(code_of(error))
    except InvalidConfig:
        return _refused(ErrorCode.INVALID_REQUEST)  # a name that is too long
    except (SegmentlogError, OSError) as error:
        return _refused(code_for(call, error, _FENCED_FROM))
    return InitProducerIdResponse(producer_id=numbers.producer_id, producer_epoch=numbers.epoch)


def _refused(code: ErrorCode) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=code, producer_epoch=-1)


def describe_producers(call: RequestContext, request: DescribeProducersRequest) -> DescribeProducersResponse:
    """Return the state of the producers of each partition."""
    response = DescribeProducersResponse()
    for asked in call.merged_topics(request.topics, "partition_indexes", (), "name"):
        name = asked.topic.name
        responses = [_describe(call, name, number) for number in call.each(asked.partitions)]
        response.topics.append(TopicResponse(name, responses))
    return response


def _describe(call: RequestContext, name: str, number: int) -> PartitionResponse:
    if not call.may_see(Thing.RECORDS, name):
        return PartitionResponse(number, ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    if not is_visible(name):
        return PartitionResponse(number, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    try:
        partition = call.broker.partition(name, number)
        if not call.broker.cluster.leads(partition.topic_id, number):
            return PartitionResponse(number, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        known = partition.producers()
        if not call.reserve_room(len(known)):
            return PartitionResponse(number, TOO_MUCH)
        found = [
            ProducerState(
                producer_id=one.producer_id, producer_epoch=one.epoch, last_sequence=one.last_sequence,
                last_timestamp=one.appended_ms, current_txn_start_offset=one.transaction_offset,
            )
            for one in known
        ]  # fmt: skip
    except (SegmentlogError, OSError) as error:
        return PartitionResponse(number, code_of(error), call.explain_error(error))
    return PartitionResponse(number, active_producers=found)
