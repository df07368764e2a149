"""AddPartitionsToTxn (24), AddOffsetsToTxn (25), EndTxn (26): transactions of Kafka clients.

`segmentlog.transactions.server_transactions` executes and checks the requests. From EndTxn version 5, Produce version
12 and TxnOffsetCommit version 5 on, clients use the second transaction protocol (KIP-890). In this protocol, the first
write to a partition adds the partition to the transaction, and each transaction has its own producer epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from segmentlog.errors import ProducerFenced, SegmentlogError, ShipUnconfirmed, TransactionAborted
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.server.codec.generated.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from segmentlog.server.codec.generated.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTopicResult,
)
from segmentlog.server.codec.generated.end_txn import EndTxnRequest, EndTxnResponse
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import code_of, coordinator_code_of
from segmentlog.server.request_context import RequestContext
from segmentlog.server.topic_ids import is_visible
from segmentlog.transactions.server_transactions import ProducerIdAndEpoch

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

_ADD_OF_BROKERS: Final = 4
_FENCED_FROM: Final = 2
_END_BUMPS: Final = 5
_END_ABORTABLE: Final = 4
_VERIFY_ABORTABLE: Final = 5


def refusal(call: RequestContext, name: str, operation: Operation = Operation.WRITE) -> ErrorCode:
    """Return why this worker does not serve the transactional id, or `ErrorCode.NONE`."""
    if not name:
        return ErrorCode.INVALID_REQUEST
    if not call.allows(operation, ResourceType.TRANSACTIONAL_ID, name):
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    if not call.broker.cluster.is_coordinator(name):
        return ErrorCode.NOT_COORDINATOR
    return ErrorCode.NONE


def code_for(call: RequestContext, error: Exception, fenced_from: int) -> ErrorCode:
    """Return the error code for a client. Clients before version ``fenced_from`` do not have PRODUCER_FENCED."""
    if isinstance(error, ProducerFenced) and call.version >= fenced_from:
        return ErrorCode.PRODUCER_FENCED
    return coordinator_code_of(error)


# ---------------------------------------------------------------- partitions


def add_partitions_to_txn(call: RequestContext, request: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
    """Add all of the partitions to a transaction, or none. From version 4 on (for brokers), several transactions."""
    if call.version < _ADD_OF_BROKERS:
        name = request.v3_and_below_transactional_id
        numbers = ProducerIdAndEpoch(request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        results = _add(call, name, numbers, request.v3_and_below_topics)
        return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results)
    if not call.allows_cluster(Operation.CLUSTER_ACTION):
        return AddPartitionsToTxnResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    response = AddPartitionsToTxnResponse()
    for one in call.each(request.transactions):
        name, numbers = one.transactional_id, ProducerIdAndEpoch(one.producer_id, one.producer_epoch)
        results = _add(call, name, numbers, one.topics, verify_only=one.verify_only)
        response.results_by_transaction.append(AddPartitionsToTxnResult(name, results))
    return response


def _add(
    call: RequestContext,
    name: str,
    numbers: ProducerIdAndEpoch,
    topics: Sequence[AddPartitionsToTxnTopic],
    *,
    verify_only: bool = False,
) -> list[AddPartitionsToTxnTopicResult]:
    codes: dict[tuple[str, int], ErrorCode] = {}
    logs: list[Partition] = []
    code = refusal(call, name)
    merged = list(call.merged_topics(topics, "partitions", (), "name"))
    for asked in merged:
        topic = asked.topic
        for number in asked.partitions:
            log, found = (None, code) if code else _open(call, topic.name, number)
            codes[topic.name, number] = found
            if log is not None:
                logs.append(log)
    if code is ErrorCode.NONE and any(codes.values()):
        codes = {key: found or ErrorCode.OPERATION_NOT_ATTEMPTED for key, found in codes.items()}
    elif verify_only:
        codes |= {(log.topic, log.number): _verify(call, name, numbers, log) for log in logs}
    elif logs:
        codes = dict.fromkeys(codes, _join(call, name, numbers, logs))
    return [
        AddPartitionsToTxnTopicResult(
            asked.topic.name,
            [AddPartitionsToTxnPartitionResult(number, codes[asked.topic.name, number]) for number in asked.partitions],
        )
        for asked in merged
    ]


def _open(call: RequestContext, name: str, number: int) -> tuple[Partition | None, ErrorCode]:
    if not call.allows_topic(Operation.WRITE, name):
        return None, ErrorCode.TOPIC_AUTHORIZATION_FAILED
    if not is_visible(name):
        return None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    try:
        return call.broker.partition(name, number), ErrorCode.NONE
    except (SegmentlogError, OSError) as error:
        return None, code_of(error)


def _join(call: RequestContext, name: str, numbers: ProducerIdAndEpoch, logs: Sequence[Partition]) -> ErrorCode:
    try:
        call.broker.store.transactions.server_transactions.add_partitions(name, numbers, logs)
    except (SegmentlogError, OSError) as error:
        return code_for(call, error, _FENCED_FROM)
    return ErrorCode.NONE


def _verify(call: RequestContext, name: str, numbers: ProducerIdAndEpoch, log: Partition) -> ErrorCode:
    try:
        call.broker.store.transactions.server_transactions.append_check(name, numbers, log)()
    except (SegmentlogError, OSError) as error:
        code = code_for(call, error, _FENCED_FROM)
        is_abortable = code is ErrorCode.INVALID_TXN_STATE and call.version >= _VERIFY_ABORTABLE
        return ErrorCode.TRANSACTION_ABORTABLE if is_abortable else code
    return ErrorCode.NONE


def add_offsets_to_txn(call: RequestContext, request: AddOffsetsToTxnRequest) -> AddOffsetsToTxnResponse:
    """Add the committed offsets of a group to a transaction."""
    name = request.transactional_id
    code = refusal(call, name)
    if code is ErrorCode.NONE and not call.allows(Operation.READ, ResourceType.GROUP, request.group_id):
        code = ErrorCode.GROUP_AUTHORIZATION_FAILED
    if code is ErrorCode.NONE:
        try:
            positions = call.broker.store.group_offsets.open_or_create_log()
            code = _join(call, name, ProducerIdAndEpoch(request.producer_id, request.producer_epoch), [positions])
        except (SegmentlogError, OSError) as error:
            code = coordinator_code_of(error)
    return AddOffsetsToTxnResponse(error_code=code)


# ---------------------------------------------------------------- end


def end_txn(call: RequestContext, request: EndTxnRequest) -> EndTxnResponse:
    """Commit or abort. Respond once the decision is on disk, or shipped.

    From version 5 on, return the producer id and epoch of the next transaction.
    """
    name, bumps = request.transactional_id, call.version >= _END_BUMPS
    code = refusal(call, name)
    if code is not ErrorCode.NONE:
        return EndTxnResponse(error_code=code)
    numbers = ProducerIdAndEpoch(request.producer_id, request.producer_epoch)
    try:
        transactions = call.broker.store.transactions
        following = transactions.server_transactions.end_transaction(
            name, numbers, committed=request.committed, bumps_epoch=bumps
        )
        if request.committed and call.broker.settings.acks_all == "shipped":
            transactions.wait_shipped()
    except ShipUnconfirmed:  # the outcome is decided; a repeated request waits again
        return EndTxnResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)
    except (SegmentlogError, OSError) as error:
        code = code_for(call, error, _FENCED_FROM)
        if isinstance(error, TransactionAborted):
            # Old versions have no code for an aborted transaction. After this code, clients abort, request the next
            # epoch, and continue. INVALID_TXN_STATE would be fatal for the producer.
            is_known = call.version >= _END_ABORTABLE
            code = ErrorCode.TRANSACTION_ABORTABLE if is_known else ErrorCode.INVALID_PRODUCER_ID_MAPPING
        return EndTxnResponse(error_code=code)
    return (
        EndTxnResponse(producer_id=following.producer_id, producer_epoch=following.epoch) if bumps else EndTxnResponse()
    )
