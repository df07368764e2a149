"""Fetch (1): return stored batches unchanged, and wait for more if there are too few.

A consumer that always fetches the same partitions uses a session (`fetch_sessions`). A fetch that finds too few bytes
is parked (`long_poll`) until there are enough bytes, or until its time is up. A parked fetch uses no thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from segmentlog.errors import LogTruncated, OffsetOutOfRange, SegmentlogError
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.fetch import (
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionData,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import code_of
from segmentlog.server.fetch_sessions import FINAL_EPOCH, FIRST_EPOCH, NO_SESSION, FetchSession, Key, SessionPartition
from segmentlog.server.long_poll import RECHECK_S
from segmentlog.server.partition_fetch import Bounds, fetch_error, read_batches
from segmentlog.server.request_context import DeferredResponse, RequestContext
from segmentlog.server.topic_ids import is_visible, wire_epoch

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

_LEADERS_FROM: Final = 12
_IDS_FROM: Final = 13
_ENDPOINTS_FROM: Final = 16
_COMMITTED: Final = 1

Answers = list[tuple[SessionPartition, PartitionData]]
"""Requested partitions with the response to each."""


def fetch(call: RequestContext, request: FetchRequest) -> FetchResponse | DeferredResponse:
    """Return the requested records, or a deferred response that waits for them."""
    session, code = _session_of(call, request)
    if code is not None:
        return FetchResponse(error_code=code)
    if session is None:
        once = {one.key: one for one in call.each(_requested_partitions(request))}  # as in a session
        return _Fetch(call, request, list(once.values()), None).respond()
    with session.lock:
        if not call.broker.fetch_sessions.update(session, _requested_partitions(request), _forgotten(request)):
            return FetchResponse(error_code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        requested = list(session.partitions.values())
    return _Fetch(call, request, requested, session).respond()


def _session_of(call: RequestContext, request: FetchRequest) -> tuple[FetchSession | None, ErrorCode | None]:
    """Return (the session that the request uses or creates, the error if the session cannot be used)."""
    sessions = call.broker.fetch_sessions
    if request.session_epoch in (FIRST_EPOCH, FINAL_EPOCH):
        if request.session_id != NO_SESSION:
            sessions.close(request.session_id)
        if request.session_epoch == FINAL_EPOCH:
            return None, None
        return sessions.create(sum(len(topic.partitions) for topic in request.topics)), None
    session = sessions.find(request.session_id)
    if session is None:
        return None, ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    with session.lock:
        if session.epoch != request.session_epoch:
            return None, ErrorCode.INVALID_FETCH_SESSION_EPOCH
        session.advance()
    return session, None


def _requested_partitions(request: FetchRequest) -> Iterator[SessionPartition]:
    for topic in request.topics:
        for partition in topic.partitions:
            yield SessionPartition(
                topic.topic,
                topic.topic_id,
                partition.partition,
                partition.fetch_offset,
                partition.partition_max_bytes,
                partition.current_leader_epoch,
                partition.last_fetched_epoch,
            )


def _forgotten(request: FetchRequest) -> Iterator[Key]:
    for topic in request.forgotten_topics_data:
        for number in topic.partitions:
            yield topic.topic, topic.topic_id, number


class _Fetch:
    """A fetch request that is not answered yet: its partitions, and the errors of those that cannot be read."""

    def __init__(
        self,
        call: RequestContext,
        request: FetchRequest,
        requested: list[SessionPartition],
        session: FetchSession | None,
    ) -> None:
        self._call = call
        self._request = request
        self._session = session
        self._is_incremental = session is not None and request.session_epoch not in (FIRST_EPOCH, FINAL_EPOCH)
        self._is_committed = request.isolation_level == _COMMITTED
        self._durable_only = call.broker.settings.durable_reads
        self._refused: list[tuple[SessionPartition, PartitionData]] = []
        self._open: list[tuple[SessionPartition, Partition]] = []
        self._endpoints: dict[int, NodeEndpoint] = {}
        for one in call.each(requested):
            self._open_partition(one)

    def _open_partition(self, requested: SessionPartition) -> None:
        """Open a requested partition, or add the error of one that cannot be read."""
        call, broker = self._call, self._call.broker
        name, topic_id = requested.topic, None
        if call.version >= _IDS_FROM:
            name, topic_id = call.topic_by_id(requested.topic_id) or ("", None)
            if not name or not call.may_see(Thing.RECORDS, name):
                hidden = not name or not call.may_see(Thing.TOPIC, name)
                self._refuse(requested, ErrorCode.UNKNOWN_TOPIC_ID if hidden else ErrorCode.TOPIC_AUTHORIZATION_FAILED)
                return
        elif not call.may_see(Thing.RECORDS, name):
            self._refuse(requested, ErrorCode.TOPIC_AUTHORIZATION_FAILED)
            return
        if not is_visible(name):
            self._refuse(requested, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            return
        try:
            partition = broker.partition(name, requested.partition, topic_id)
        except (SegmentlogError, OSError) as error:
            self._refuse(requested, code_of(error))
            return
        if broker.cluster.leads(partition.topic_id, partition.number):
            self._open.append((requested, partition))
            return
        node = broker.cluster.leader_of(partition.topic_id, partition.number)
        data = self._refuse(requested, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if call.version >= _LEADERS_FROM:
            data.current_leader = LeaderIdAndEpoch(node.node_id, wire_epoch(partition.epoch))
        if call.version >= _ENDPOINTS_FROM:
            self._endpoints[node.node_id] = NodeEndpoint(node.node_id, node.host, node.port)

    def _refuse(self, requested: SessionPartition, code: ErrorCode) -> PartitionData:
        data = PartitionData(
            partition_index=requested.partition,
            error_code=int(code),
            high_watermark=-1,
            aborted_transactions=None,
            records=b"",
        )
        self._refused.append((requested, data))
        return data

    # ------------------------------------------------------------ waiting

    def respond(self) -> FetchResponse | DeferredResponse:
        """Return what is available if it is enough or the client does not wait, else park the request."""
        call, request = self._call, self._request
        answers, is_enough = self._collect()
        wait_ms = min(request.max_wait_ms, call.broker.settings.limits.fetch_wait_ms_max)
        connection = call.connection
        if is_enough or wait_ms <= 0 or not self._open or connection is None or connection.is_polling:
            return self.response(answers)
        connection.is_polling = True
        poll = _LongPoll(self, call, answers, wait_ms / 1000)
        call.broker.purgatory.park(poll)
        poll.recheck()  # for records that arrived before it was parked
        return poll.pending

    @property
    def partitions(self) -> list[Partition]:
        """Partitions that may still get records."""
        return [partition for _, partition in self._open]

    def recheck(self, answers: Answers) -> tuple[Answers, bool]:
        """Return (answers, whether they are enough). If no partition has changed, these are the old ``answers``."""
        return self._collect() if self._has_more(answers) else (answers, False)

    def _has_more(self, answers: Answers) -> bool:
        """Return whether a partition has grown since its answer was created, or was deleted or renamed."""
        sent = {id(requested): data for requested, data in answers}
        for requested, partition in self._open:
            if partition.is_stale or self._bounds(partition).end > max(
                requested.fetch_offset, _end_of(sent.get(id(requested)), self._is_committed)
            ):
                return True
        return False

    def _bounds(self, partition: Partition) -> Bounds:
        return Bounds(partition, is_committed=self._is_committed, durable_only=self._durable_only)

    # ------------------------------------------------------------ collecting

    def _collect(self) -> tuple[Answers, bool]:
        """Read all partitions. Return (the answers, whether to send them now instead of waiting)."""
        request = self._request
        left = min(request.max_bytes, self._call.broker.settings.limits.fetch_bytes)
        answers = list(self._refused)
        is_enough = bool(self._refused)
        size = 0
        for requested, partition in self._open:
            data = self._read_partition(requested, partition, left - size, at_least_one=not size)
            size += _size_of(data)
            is_enough |= bool(data.error_code) or data.diverging_epoch is not None
            answers.append((requested, data))
        return answers, is_enough or size >= max(request.min_bytes, 0)

    def _read_partition(
        self, requested: SessionPartition, partition: Partition, left_bytes: int, *, at_least_one: bool
    ) -> PartitionData:
        bounds = self._bounds(partition)
        leader = self._call.broker.broker_id if self._call.version >= _LEADERS_FROM else None
        try:
            refusal = fetch_error(partition, bounds, requested, leader)
            if refusal is not None:
                return refusal
            partition.check_position(requested.fetch_offset)
            if requested.fetch_offset >= bounds.end or (not at_least_one and left_bytes <= 0):
                return bounds.empty_response(requested.partition)
            return read_batches(
                partition,
                bounds,
                requested,
                min(requested.max_bytes, left_bytes),
                at_least_one=at_least_one,
                converted_batches=self._call.broker.converted_batches,
            )
        except (OffsetOutOfRange, LogTruncated):
            return bounds.empty_response(requested.partition, ErrorCode.OFFSET_OUT_OF_RANGE)
        except (SegmentlogError, OSError) as error:
            return bounds.empty_response(requested.partition, code_of(error))

    # ------------------------------------------------------------ response

    def response(self, answers: Answers) -> FetchResponse:
        """Return the response, and update the session with what it contains."""
        if self._session is None:
            return self._response(answers)
        with self._session.lock:
            response = self._response(answers)
        response.session_id = self._session.id
        return response

    def _response(self, answers: Answers) -> FetchResponse:
        response = FetchResponse(node_endpoints=list(self._endpoints.copy().values()))
        by_topic: dict[tuple[str, bytes], FetchableTopicResponse] = {}
        for requested, data in answers:
            if self._session is not None:
                has_news = _update_session(requested, data)
                if data.records:
                    self._session.move_to_end(requested.key)
                if self._is_incremental and not has_news:
                    continue
            key = (requested.topic, requested.topic_id)
            topic = by_topic.get(key)
            if topic is None:
                topic = by_topic[key] = FetchableTopicResponse(requested.topic, requested.topic_id)
                response.responses.append(topic)
            topic.partitions.append(data)
        return response


class _LongPoll:
    """A parked fetch; implements `long_poll.ParkedRequest`."""

    def __init__(self, fetch: _Fetch, call: RequestContext, answers: Answers, wait_s: float) -> None:
        self.pending = call.defer_response()
        self.ends_s = time.monotonic() + wait_s
        self.paths: Sequence[str] = [partition.handle.lock_path for partition in fetch.partitions]
        self.topic_ids: Sequence[str] = [partition.topic_id for partition in fetch.partitions]
        self._fetch = fetch
        self._call = call
        self._answers = answers
        self._mutex = threading.Lock()
        self._is_done = self._must_recheck = False

    def recheck(self) -> None:
        """Respond if there are enough bytes or the wait is over."""
        self._must_recheck = True
        while self._must_recheck and not self._is_done:
            if not self._mutex.acquire(blocking=False):
                return  # the thread that is rechecking now will recheck once more
            try:
                self._must_recheck = False
                is_over = self._recheck()
            except BaseException:
                self._abort()
                raise
            finally:
                self._mutex.release()
            if is_over:
                self._answer()

    def _recheck(self) -> bool:
        """Read again. Return True exactly once, when the fetch must be answered. Not thread-safe."""
        if self._is_done:
            return False
        for partition in self._fetch.partitions:  # before reading: a later append of another process must wake this one
            partition.handle.announce_waiting(2 * RECHECK_S)
        self._answers, is_enough = self._fetch.recheck(self._answers)
        call = self._call
        is_over = (
            is_enough or call.is_disconnected() or call.broker.purgatory.is_closed or time.monotonic() >= self.ends_s
        )
        self._is_done = is_over
        return is_over

    def _answer(self) -> None:
        self._call.broker.purgatory.unpark(self)
        try:
            if self._call.connection is not None:
                self._call.connection.is_polling = False
            self.pending.complete(self._fetch.response(self._answers))
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        """Close the connection after an unexpected error, so that the client does not wait forever."""
        self._is_done = True
        self._call.broker.purgatory.unpark(self)
        if self._call.connection is not None:
            self._call.connection.close()


def _update_session(requested: SessionPartition, data: PartitionData) -> bool:
    """Store in the session what the client gets for a partition. Return whether it contains anything new."""
    has_news = bool(
        data.records
        or data.error_code
        or requested.sent_error
        or data.diverging_epoch is not None
        or data.high_watermark != requested.sent_high_watermark
        or data.log_start_offset != requested.sent_log_start
    )
    requested.sent_high_watermark, requested.sent_log_start = data.high_watermark, data.log_start_offset
    requested.sent_error = bool(data.error_code)
    return has_news


def _size_of(data: PartitionData) -> int:
    records = data.records
    if records is None:
        return 0
    return sum(map(len, records)) if isinstance(records, list) else len(records)


def _end_of(data: PartitionData | None, is_committed: bool) -> int:
    """Return the end of the records that a reader may see, as an answer contains it; -1 without an answer."""
    if data is None:
        return -1
    return data.last_stable_offset if is_committed else data.high_watermark
