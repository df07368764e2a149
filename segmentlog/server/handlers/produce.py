"""Produce (0): batches are checked, stored as they came, and acknowledged as ``acks`` asks.

acks=0     nothing is answered; an error ends the connection, as in Kafka
acks=1     once they are written: they survive this process (or are on disk, where the topic's policy is ``always``)
acks=all   once they are on disk, with ``--acks-all shipped`` in the object store; with ``--acks-all written``, and in a
           transaction, whose end puts all of it there, as acks=1

Batches are placed in the order in which they come. One that has to wait for the disk does not keep the connection: its
answer waits in the queue while the next request is read. Those of a transaction are placed where the partition is part
of it.
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
from segmentlog.server.request_context import Call, PendingAnswer
from segmentlog.server.topic_ids import is_visible, wire_epoch
from segmentlog.transactions.server_transactions import Numbers, WrongState

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition
    from segmentlog.server.ack_waiter import Durability

_LEADERS_FROM = 10
_IDS_FROM = 13
_ABORTABLE_FROM = 11
_JOINS_FROM = 12
_ALL, _NONE = -1, 0


class _Unsynced:
    """A partition's answer that counts only once these records are on disk, or shipped."""

    __slots__ = ("answer", "base_offset", "end_offset", "partition", "until")

    def __init__(
        self,
        partition: Partition,
        base_offset: int,
        end_offset: int,
        answer: PartitionProduceResponse,
        until: Durability,
    ) -> None:
        self.partition = partition
        self.base_offset = base_offset
        self.end_offset = end_offset
        self.answer = answer
        self.until = until


def produce(call: Call, request: ProduceRequest) -> ProduceResponse | PendingAnswer | None:
    """Append each partition's batch; a wrong one does not keep the others from it."""
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
            raise BadFrame(f"a batch that wanted no answer was refused: {code.name}")
        for item in unsynced:
            item.until.when_durable(item.partition, item.base_offset, item.end_offset, _nobody_waits)
        return None
    if not unsynced:
        return response
    return _answer_once_there(call, response, unsynced)


def _refusal(call: Call, request: ProduceRequest) -> ErrorCode | None:
    """Why nothing of the request can be done."""
    if request.acks not in (_ALL, _NONE, 1):
        return ErrorCode.INVALID_REQUIRED_ACKS
    name = request.transactional_id
    if name is not None and not call.allows(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, name):
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    return None


def _name_of(call: Call, topic: TopicProduceData) -> tuple[str, str | None, ErrorCode | None]:
    """(what the topic is called, the id that it has to have, why it cannot be written to)."""
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
    call: Call, name: str, topic_id: str | None, data: PartitionProduceData, request: ProduceRequest,
    response: ProduceResponse, unsynced: list[_Unsynced],
) -> PartitionProduceResponse:  # fmt: skip
    broker = call.broker
    try:
        partition = broker.partition(name, data.index, topic_id)
        if not broker.cluster.leads(partition.topic_id, data.index):
            return _elsewhere(call, partition, response)
        if not isinstance(data.records, memoryview) or not len(data.records):
            return _error(data.index, ErrorCode.INVALID_RECORD, "there is no batch")
        transaction = _enter(call, request.transactional_id, partition, data.records)
        placed = partition.append_wire(
            data.records, sync=False, transaction=transaction, owns=partial(_owns, call),
            unpacking=partial(call.unpacking, is_stopped=False),
        )  # fmt: skip
    except (SegmentlogError, OSError) as error:
        answer = _error(data.index, _code_of(call, error), call.explain(error))
        if isinstance(error, InvalidRecord | InvalidWireBatch):
            # So that the client knows which to send again, without these (KIP-467). Without room it knows the first.
            indices = error.indices if call.takes_room(len(error.indices)) else error.indices[:1]
            answer.record_errors = [BatchIndexAndErrorMessage(index) for index in indices]
        return answer
    broker.arrivals.note_grown(partition)
    answer = PartitionProduceResponse(
        data.index, 0, placed.base_offset, placed.log_append_time_ms, placed.log_start_offset
    )
    # The end of a transaction waits for the disk, or finds that a crash came in between.
    waits = request.acks == _ALL and broker.settings.acks_all != "written" and transaction is _keep_out
    if waits or placed.needs_sync:
        until = broker.acknowledgement if waits else broker.durability
        unsynced.append(_Unsynced(partition, placed.base_offset, placed.next_offset, answer, until))
    return answer


def _enter(call: Call, name: str | None, partition: Partition, data: Buffer) -> Callable[[], None]:
    """What lets a transactional batch through, or keeps it out; from a version on the partition joins by it."""
    if name is None:
        return _keep_out
    wire = parse_wire_batch(data)
    if not wire.is_transactional:
        return _keep_out  # which nobody asks
    remote, numbers = call.broker.store.transactions.remote, Numbers(wire.producer_id, wire.producer_epoch)
    if call.version >= _JOINS_FROM:
        remote.add(name, numbers, [partition])
    return remote.guard(name, numbers, partition)


def _owns(call: Call, producer_id: int) -> bool:
    """Return whether a server of this store assigned the id to the client's principal.

    False for an id that an earlier version may have assigned: the partition accepts it from a producer that it knows.
    Raises `InvalidWireBatch` for every other id: those of transactional ids and of the library's producers, and
    those that a client made up or read in another client's batches.
    """
    transactions = call.broker.store.transactions
    if transactions.assigned_ids.is_assigned(producer_id, str(call.principal)):
        return True
    if producer_id in OLD_IDS and not transactions.holds(producer_id):
        return False
    raise InvalidWireBatch.unassigned(producer_id)


def _keep_out() -> None:
    raise WrongState("", "a transactional batch in a request that names no transaction")


def _code_of(call: Call, error: Exception) -> ErrorCode:
    if isinstance(error, ProducerBusy):
        return ErrorCode.NOT_ENOUGH_REPLICAS  # which every client takes for a reason to try again
    if isinstance(error, WrongState) and call.version >= _ABORTABLE_FROM:
        return ErrorCode.TRANSACTION_ABORTABLE
    return code_of(error)


def _elsewhere(call: Call, partition: Partition, response: ProduceResponse) -> PartitionProduceResponse:
    """Who asked here is told who leads the partition."""
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


def _nobody_waits(error: Exception | None) -> None:
    """Of what wanted no answer: the partition itself remembers an fsync that failed."""


def _answer_once_there(call: Call, response: ProduceResponse, unsynced: list[_Unsynced]) -> PendingAnswer:
    """The answer goes once the last of the partitions is there; one that cannot be is an error of its own."""
    pending = call.answer_later()
    mutex = threading.Lock()
    left = len(unsynced)

    def note(item: _Unsynced, error: Exception | None) -> None:
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
        item.until.when_durable(item.partition, item.base_offset, item.end_offset, partial(note, item))
    return pending
