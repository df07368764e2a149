"""InitProducerId (22): the number under which an idempotent producer counts its records."""

from __future__ import annotations

import secrets

from segmentlog.format.producers import NAMED_ID_END
from segmentlog.server.call import Call
from segmentlog.server.codec.errors import ErrorCode
from segmentlog.server.codec.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from segmentlog.server.security.principals import Operation, ResourceType

_EPOCH_MAX = 2**15 - 2


def init_producer_id(call: Call, request: InitProducerIdRequest) -> InitProducerIdResponse:
    """An id that nobody else has: 61 random bits, as the library draws them. Or the next epoch of one (KIP-360)."""
    if request.transactional_id is not None:
        allowed = call.allows(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id)
        code = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND if allowed else ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        return InitProducerIdResponse(error_code=code, producer_epoch=-1)
    if not call.allows_cluster(Operation.IDEMPOTENT_WRITE) and not call.broker.authorizer.allows_any(
        call.principal, call.client_host, Operation.WRITE, ResourceType.TOPIC
    ):
        return InitProducerIdResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED, producer_epoch=-1)
    if NAMED_ID_END <= request.producer_id < 2 * NAMED_ID_END and 0 <= request.producer_epoch < _EPOCH_MAX:
        return InitProducerIdResponse(producer_id=request.producer_id, producer_epoch=request.producer_epoch + 1)
    return InitProducerIdResponse(producer_id=NAMED_ID_END + secrets.randbelow(NAMED_ID_END), producer_epoch=0)
