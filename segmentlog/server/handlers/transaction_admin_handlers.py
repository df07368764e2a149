"""DescribeTransactions (65), ListTransactions (66), WriteTxnMarkers (27): inspect and abort transactions.

This includes transactions of the library's named producers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from segmentlog.errors import SegmentlogError
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    TopicData,
)
from segmentlog.server.codec.generated.describe_transactions import TransactionState as Described
from segmentlog.server.codec.generated.list_transactions import ListTransactionsRequest, ListTransactionsResponse
from segmentlog.server.codec.generated.list_transactions import TransactionState as Listed
from segmentlog.server.codec.generated.write_txn_markers import (
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import code_of
from segmentlog.server.handlers.transaction_handlers import refusal
from segmentlog.server.request_context import TOO_MUCH, RequestContext
from segmentlog.server.topic_ids import is_visible
from segmentlog.transactions.transaction_coordinator import ANONYMOUS
from segmentlog.transactions.transaction_log import TransactionState

_STATES: Final = frozenset(
    ("Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead",
     "PrepareEpochFence")
)  # fmt: skip
_PATTERN: Final = re.compile(r"(?:\.\*|\.|\\[\W_]|[\w \-:/,;@#%&=<>!~'\"])*")
"""The supported regular expressions: characters, ``.`` and ``.*``."""
_PATTERN_PART: Final = re.compile(r"\.\*|\\?(.)", re.DOTALL)


def _visible_transactions(call: RequestContext) -> Iterator[tuple[str, TransactionState]]:
    """Yield the transactional ids that this worker coordinates and the client may describe."""
    for name, state in call.each(sorted(call.broker.store.transactions.states().items())):
        is_named = state.is_server_name or not name.startswith(ANONYMOUS)
        if is_named and refusal(call, name, Operation.DESCRIBE) is ErrorCode.NONE:
            yield name, state


def describe_transactions(call: RequestContext, request: DescribeTransactionsRequest) -> DescribeTransactionsResponse:
    """Return the state of each transactional id."""
    try:
        known = dict(_visible_transactions(call))
    except (SegmentlogError, OSError) as error:
        code = code_of(error)
        found = [Described(error_code=code, transactional_id=name) for name in call.distinct(request.transactional_ids)]
        return DescribeTransactionsResponse(transaction_states=found)
    results = []
    for name in call.distinct(request.transactional_ids):
        code = refusal(call, name, Operation.DESCRIBE)
        if code is ErrorCode.NONE and name not in known:
            code = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
        results.append(Described(code, name) if code else _describe(call, name, known[name]))
    return DescribeTransactionsResponse(transaction_states=results)


def _describe(call: RequestContext, name: str, state: TransactionState) -> Described:
    is_open = state.is_open
    names = call.broker.store.topic_names({partition.topic_id for partition in state.partitions}) if is_open else {}
    topics: dict[str, list[int]] = {}
    for partition in state.partitions:
        topic = names.get(partition.topic_id, "")
        if topic and is_visible(topic) and call.may_see(Thing.TOPIC, topic):
            topics.setdefault(topic, []).append(partition.partition)
    if not call.reserve_room(1 + sum(map(len, topics.values()))):
        return Described(TOO_MUCH, name)
    return Described(
        transactional_id=name, transaction_state=state.status, transaction_timeout_ms=state.timeout_ms,
        transaction_start_time_ms=state.started_ms if is_open else -1, producer_id=state.producer_id,
        producer_epoch=state.epoch, topics=[TopicData(topic, sorted(numbers)) for topic, numbers in topics.items()],
    )  # fmt: skip


def list_transactions(call: RequestContext, request: ListTransactionsRequest) -> ListTransactionsResponse:
    """Return transactional ids, filtered by state, producer id, age of the open transaction, and pattern."""
    unknown = [state for state in call.distinct(request.state_filters) if state not in _STATES]
    response = ListTransactionsResponse(unknown_state_filters=unknown)
    pattern = request.transactional_id_pattern
    if pattern and not _PATTERN.fullmatch(pattern):
        response.error_code = ErrorCode.INVALID_REGULAR_EXPRESSION
        return response
    states, ids, age_ms = set(request.state_filters), set(request.producer_id_filters), request.duration_filter
    now_ms = call.broker.clock.now_ms()
    try:
        for name, state in _visible_transactions(call):
            is_selected = (
                (not states or state.status in states)
                and (not ids or state.producer_id in ids)
                and (age_ms < 0 or (state.is_open and now_ms - state.started_ms > age_ms))
                and (not pattern or matches(pattern, name))
            )
            if is_selected and not call.reserve_room(1):
                return ListTransactionsResponse(error_code=TOO_MUCH)
            if is_selected:
                response.transaction_states.append(Listed(name, state.producer_id, state.status))
    except (SegmentlogError, OSError) as error:
        response.error_code = code_of(error)
    return response


def matches(pattern: str, name: str) -> bool:
    """Return whether the whole name matches the pattern (`_PATTERN`), in time O(len(pattern) * len(name)).

    Not `re`: a client's expression could occupy a thread for years.
    """
    pieces: list[list[str | None]] = [[]]
    for part in _PATTERN_PART.finditer(pattern):
        if part[0] == ".*":
            pieces.append([])
        else:
            pieces[-1].append(None if part[0] == "." else part[1])

    def fits(piece: list[str | None], at: int) -> bool:
        return all(wanted in (None, found) for wanted, found in zip(piece, name[at : at + len(piece)], strict=True))

    if len(pieces) == 1:
        return len(pieces[0]) == len(name) and fits(pieces[0], 0)
    first, *middle, last = pieces
    end = len(name) - len(last)
    if end < len(first) or not fits(first, 0) or not fits(last, end):
        return False
    at = len(first)
    for piece in middle:
        found = next((place for place in range(at, end - len(piece) + 1) if fits(piece, place)), None)
        if found is None:
            return False
        at = found + len(piece)
    return True


def write_txn_markers(call: RequestContext, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
    """Abort the transactions that a producer has open in partitions. Commit markers are rejected."""
    response = WriteTxnMarkersResponse()
    for marker in call.each(request.markers):
        result = WritableTxnMarkerResult(marker.producer_id)
        for asked in call.merged_topics(marker.topics, "partition_indexes", (), "name"):
            name = asked.topic.name
            results = [
                WritableTxnMarkerPartitionResult(
                    number, _abort(call, name, number, marker.producer_id, committed=marker.transaction_result)
                )
                for number in call.each(asked.partitions)
            ]
            result.topics.append(WritableTxnMarkerTopicResult(name, results))
        response.markers.append(result)
    return response


def _abort(call: RequestContext, name: str, number: int, producer_id: int, *, committed: bool) -> ErrorCode:
    if not call.allows_cluster(Operation.CLUSTER_ACTION):
        return ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    if not is_visible(name):
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    try:
        partition = call.broker.partition(name, number)
        if not call.broker.cluster.leads(partition.topic_id, number):
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if committed:  # only the transaction's coordinator knows all of its partitions
            return ErrorCode.INVALID_TXN_STATE
        call.broker.store.transactions.abort_in_partition(partition, producer_id)
    except (SegmentlogError, OSError) as error:
        return code_of(error)
    return ErrorCode.NONE
