"""Produce (0): check batches, append them unchanged, and acknowledge them as ``acks`` requires.

acks=0     no response; an error closes the connection, as in Kafka
acks=1     after the write, which survives a crash of this process; after the fsync if the topic has ``fsync=always``
acks=all   by ``--acks-all``. ``durable``: after the fsync. ``shipped``: when the batch is in the object store.
           ``written``: as acks=1. A batch of a transaction is always acknowledged as with acks=1, because the end of
           the transaction syncs or ships all of its batches

Batches are appended in the order of arrival. While a batch waits for the disk, its response waits in the response
queue, and the connection reads the next request. A transactional batch is accepted only in
partitions that are part of its transaction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from segmentlog.errors import InvalidRecord, InvalidWireBatch, ProducerBusy, SegmentlogError
from segmentlog.format.producer_snapshot import OLD_IDS
from segmentlog.format.wire import Buffer, parse_wire_batch
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.produce import (
    BatchIndexAndErrorMessage,
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import code_of, message_of
from segmentlog.server.frames import BadFrame
from segmentlog.server.request_context import DeferredResponse, RequestContext
from segmentlog.server.topic_ids import is_visible, wire_epoch
from segmentlog.transactions.server_transactions import ProducerIdAndEpoch, WrongState

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition
    from segmentlog.server.ack_waiter import AckWaiter

_LEADERS_FROM = 10
_IDS_FROM = 13
_ABORTABLE_FROM = 11
_JOINS_FROM = 12
_ALL, _NONE = -1, 0


class _Unsynced:
    """A partition's response that is valid only after these records are synced or shipped."""

    __slots__ = ("answer", "base_offset", "end_offset", "partition", "until")

    def __init__(
        self,
        partition: Partition,
        base_offset: int,
        end_offset: int,
        answer: PartitionProduceResponse,
        until: AckWaiter,
    ) -> None:
        self.partition = partition
        self.base_offset = base_offset
        self.end_offset = end_offset
        self.answer = answer
        self.until = until


def produce(call: RequestContext, request: ProduceRequest) -> ProduceResponse | DeferredResponse | None:
    """Append the batch of each partition; an invalid batch does not affect the other partitions."""
    response = ProduceResponse()
    unsynced: list[_Unsynced] = []
    acks = request.acks
    refused = _refusal(call, request)
    for topic in request.topic_data:
        name, topic_id, code = (topic.name, None, refused) if refused else _name_of(call, topic)
        answers = [
            _append(call, name, topic_id, data, request, response, unsynced) if not code else _error(data.index, code)
            for data in topic.partition_data
        ]
        response.responses.append(TopicProduceResponse(topic.name, topic.topic_id, answers))
    if acks == _NONE:
        wrong = [answer for topic in response.responses for answer in topic.partition_responses if answer.error_code]
        if wrong:
            code = ErrorCode(wrong[0].error_code)
            raise BadFrame(f"a batch with acks=0 was rejected: {code.name}")
        for item in unsynced:
            item.until.when_durable(item.partition, item.base_offset, item.end_offset, _ignore)
        return None
    if not unsynced:
        return response
    return _respond_when_durable(call, response, unsynced)


def _refusal(call: RequestContext, request: ProduceRequest) -> ErrorCode | None:
    """Return the error for the whole request; None if it is valid."""
    if request.acks not in (_ALL, _NONE, 1):
        return ErrorCode.INVALID_REQUIRED_ACKS
    name = request.transactional_id
    if name is not None and not call.allows(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, name):
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    return None


def _name_of(call: RequestContext, topic: TopicProduceData) -> tuple[str, str | None, ErrorCode | None]:
    """Return (name of the topic, id that the topic must have, error if the client may not write to it)."""
    name, topic_id = topic.name, None
    if call.version >= _IDS_FROM:
        found = call.topic_by_id(topic.topic_id)
        if found is None:
            return "", None, ErrorCode.UNKNOWN_TOPIC_ID
        name, topic_id = found
    if not call.allows_topic(Operation.WRITE, name):
        hidden = call.version >= _IDS_FROM and not call.may_see(Thing.TOPIC, name)
        return name, None, ErrorCode.UNKNOWN_TOPIC_ID if hidden else ErrorCode.TOPIC_AUTHORIZATION_FAILED
    return name, topic_id, None if is_visible(name) else ErrorCode.INVALID_TOPIC_EXCEPTION


def _append(
    call: RequestContext, name: str, topic_id: str | None, data: PartitionProduceData, request: ProduceRequest,
    response: ProduceResponse, unsynced: list[_Unsynced],
) -> PartitionProduceResponse:  # fmt: skip
    broker = call.broker
    try:
        partition = broker.partition(name, data.index, topic_id)
        if not broker.cluster.leads(partition.topic_id, data.index):
            return _not_leader(call, partition, response)
        if not isinstance(data.records, memoryview) or not len(data.records):
            return _error(data.index, ErrorCode.INVALID_RECORD, "the request contains no batch")
        transaction = _transaction_check(call, request.transactional_id, partition, data.records)
        placed = partition.append_wire(
            data.records, sync=False, transaction=transaction, owns=partial(_owns, call),
            unpacking=partial(call.decompression_slot, is_stopped=False),
        )  # fmt: skip
    except (SegmentlogError, OSError) as error:
        answer = _error(data.index, _code_of(call, error), call.explain_error(error))
        if isinstance(error, InvalidRecord | InvalidWireBatch):
            # KIP-467: list the invalid records, so that the client can leave them out of a retry. If the response has
            # no room, list only the first.
            indices = error.indices if call.reserve_room(len(error.indices)) else error.indices[:1]
            answer.record_errors = [BatchIndexAndErrorMessage(index) for index in indices]
        return answer
    broker.purgatory.mark_grown(partition)
    answer = PartitionProduceResponse(
        data.index, 0, placed.base_offset, placed.log_append_time_ms, placed.log_start_offset
    )
    # Do not wait for a batch of a transaction: the end of the transaction syncs its records, or finds that a crash lost
    # some of them.
    waits = request.acks == _ALL and broker.settings.acks_all != "written" and transaction is _reject_transactional
    if waits or placed.needs_sync:
        until = broker.ack_waiter if waits else broker.fsync_waiter
        unsynced.append(_Unsynced(partition, placed.base_offset, placed.next_offset, answer, until))
    return answer


def _transaction_check(
    call: RequestContext, name: str | None, partition: Partition, data: Buffer
) -> Callable[[], None]:
    """Return a check of a transactional batch. In newer versions the check adds the partition to the transaction."""
    if name is None:
        return _reject_transactional
    wire = parse_wire_batch(data)
    if not wire.is_transactional:
        return _reject_transactional  # the partition calls the check only for transactional batches
    remote = call.broker.store.transactions.server_transactions
    numbers = ProducerIdAndEpoch(wire.producer_id, wire.producer_epoch)
    if call.version >= _JOINS_FROM:
        remote.add_partitions(name, numbers, [partition])
    return remote.append_check(name, numbers, partition)


def _owns(call: RequestContext, producer_id: int) -> bool:
    """Return whether a server of this store assigned the id to the client's principal.

    Return False for an id that an earlier version of the server may have assigned; a partition accepts it only if it
    already has state of this producer. Raises `InvalidWireBatch` for every other id: one that belongs to a
    transactional id or a library producer, that the client invented, or that it read in another client's batches.
    """
    transactions = call.broker.store.transactions
    if transactions.assigned_ids.is_assigned(producer_id, str(call.principal)):
        return True
    if producer_id in OLD_IDS and not transactions.has_producer_id(producer_id):
        return False
    raise InvalidWireBatch.unassigned(producer_id)


def _reject_transactional() -> None:
    raise WrongState("", "transactional batch in a request without transactional id")


def _code_of(call: RequestContext, error: Exception) -> ErrorCode:
    if isinstance(error, ProducerBusy):
        return ErrorCode.NOT_ENOUGH_REPLICAS  # every client retries this code
    if isinstance(error, WrongState) and call.version >= _ABORTABLE_FROM:
        return ErrorCode.TRANSACTION_ABORTABLE
    return code_of(error)


def _not_leader(call: RequestContext, partition: Partition, response: ProduceResponse) -> PartitionProduceResponse:
    """Return an error that names the worker that leads the partition."""
    node = call.broker.cluster.leader_of(partition.topic_id, partition.number)
    answer = _error(partition.number, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    if call.version < _LEADERS_FROM:
        return answer
    if all(known.node_id != node.node_id for known in response.node_endpoints):
        response.node_endpoints.append(NodeEndpoint(node.node_id, node.host, node.port))
    answer.current_leader = LeaderIdAndEpoch(node.node_id, wire_epoch(partition.epoch))
    return answer


def _error(index: int, code: ErrorCode, message: str | None = None) -> PartitionProduceResponse:
    return PartitionProduceResponse(index, int(code), -1, error_message=message)


def _ignore(error: Exception | None) -> None:
    """Do nothing after the fsync: a batch with acks=0 has no response, and the partition itself records a failure."""


def _respond_when_durable(
    call: RequestContext, response: ProduceResponse, unsynced: list[_Unsynced]
) -> DeferredResponse:
    """Complete the response once all partitions are durable. A partition whose fsync failed gets its own error."""
    pending = call.defer_response()
    mutex = threading.Lock()
    left = len(unsynced)

    def complete_one(item: _Unsynced, error: Exception | None) -> None:
        nonlocal left
        if error is not None:
            answer = item.answer
            answer.error_code, answer.error_message, answer.base_offset = int(code_of(error)), message_of(error), -1
        with mutex:
            left -= 1
            is_last = not left
        if is_last:
            pending.complete(response)

    for item in unsynced:
        item.until.when_durable(item.partition, item.base_offset, item.end_offset, partial(complete_one, item))
    return pending
