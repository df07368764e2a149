"""Fetch (1): batches as they lie, and a wait for more where there are none.

A consumer that says nothing new has a session (`fetch_sessions`); one that has nothing to read waits (`arrivals`) until
there are as many bytes as it wants at once, or its time is up. It keeps no thread meanwhile.
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
from segmentlog.server.fetch_sessions import FINAL_EPOCH, FIRST_EPOCH, NO_SESSION, FetchSession, Key, Wanted
from segmentlog.server.long_poll import LOOK_S
from segmentlog.server.partition_fetch import Bounds, read, why_not
from segmentlog.server.request_context import Call, PendingAnswer
from segmentlog.server.topic_ids import is_visible, wire_epoch

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

_LEADERS_FROM: Final = 12
_IDS_FROM: Final = 13
_ENDPOINTS_FROM: Final = 16
_COMMITTED: Final = 1

Answers = list[tuple[Wanted, PartitionData]]
"""What is said of each partition."""


def fetch(call: Call, request: FetchRequest) -> FetchResponse | PendingAnswer:
    """What there is now, or what comes while the client waits."""
    session, code = _session_of(call, request)
    if code is not None:
        return FetchResponse(error_code=code)
    if session is None:
        once = {one.key: one for one in call.each(_wanted(request))}  # as in a session
        return _Fetch(call, request, list(once.values()), None).respond()
    with session.lock:
        if not call.broker.fetch_sessions.update(session, _wanted(request), _forgotten(request)):
            return FetchResponse(error_code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        wanted = list(session.partitions.values())
    return _Fetch(call, request, wanted, session).respond()


def _session_of(call: Call, request: FetchRequest) -> tuple[FetchSession | None, ErrorCode | None]:
    """(the session that a request is part of or begins, why it cannot be)."""
    sessions = call.broker.fetch_sessions
    if request.session_epoch in (FIRST_EPOCH, FINAL_EPOCH):
        if request.session_id != NO_SESSION:
            sessions.drop(request.session_id)
        if request.session_epoch == FINAL_EPOCH:
            return None, None
        return sessions.make(sum(len(topic.partitions) for topic in request.topics)), None
    session = sessions.find(request.session_id)
    if session is None:
        return None, ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    with session.lock:
        if session.epoch != request.session_epoch:
            return None, ErrorCode.INVALID_FETCH_SESSION_EPOCH
        session.advance()
    return session, None


def _wanted(request: FetchRequest) -> Iterator[Wanted]:
    for topic in request.topics:
        for partition in topic.partitions:
            yield Wanted(
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
    """One request on its way to its answer."""

    def __init__(self, call: Call, request: FetchRequest, wanted: list[Wanted], session: FetchSession | None) -> None:
        self._call = call
        self._request = request
        self._session = session
        self._is_incremental = session is not None and request.session_epoch not in (FIRST_EPOCH, FINAL_EPOCH)
        self._is_committed = request.isolation_level == _COMMITTED
        self._durable_only = call.broker.settings.durable_reads
        self._refused: list[tuple[Wanted, PartitionData]] = []
        self._open: list[tuple[Wanted, Partition]] = []
        self._endpoints: dict[int, NodeEndpoint] = {}
        for one in call.each(wanted):
            self._take(one)

    def _take(self, wanted: Wanted) -> None:
        """Find the partition, or say why not."""
        call, broker = self._call, self._call.broker
        name, topic_id = wanted.topic, None
        if call.version >= _IDS_FROM:
            name, topic_id = call.topic_by_id(wanted.topic_id) or ("", None)
            if not name or not call.may_see(Thing.RECORDS, name):
                hidden = not name or not call.may_see(Thing.TOPIC, name)
                self._refuse(wanted, ErrorCode.UNKNOWN_TOPIC_ID if hidden else ErrorCode.TOPIC_AUTHORIZATION_FAILED)
                return
        elif not call.may_see(Thing.RECORDS, name):
            self._refuse(wanted, ErrorCode.TOPIC_AUTHORIZATION_FAILED)
            return
        if not is_visible(name):
            self._refuse(wanted, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            return
        try:
            partition = broker.partition(name, wanted.partition, topic_id)
        except (SegmentlogError, OSError) as error:
            self._refuse(wanted, code_of(error))
            return
        if broker.cluster.leads(partition.topic_id, partition.number):
            self._open.append((wanted, partition))
            return
        node = broker.cluster.leader_of(partition.topic_id, partition.number)
        data = self._refuse(wanted, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if call.version >= _LEADERS_FROM:
            data.current_leader = LeaderIdAndEpoch(node.node_id, wire_epoch(partition.epoch))
        if call.version >= _ENDPOINTS_FROM:
            self._endpoints[node.node_id] = NodeEndpoint(node.node_id, node.host, node.port)

    def _refuse(self, wanted: Wanted, code: ErrorCode) -> PartitionData:
        data = PartitionData(
            partition_index=wanted.partition,
            error_code=int(code),
            high_watermark=-1,
            aborted_transactions=None,
            records=b"",
        )
        self._refused.append((wanted, data))
        return data

    # ------------------------------------------------------------ waiting

    def respond(self) -> FetchResponse | PendingAnswer:
        """What there is, if it is enough or nobody waits for more; else what there will be."""
        call, request = self._call, self._request
        answers, is_enough = self._collect()
        wait_ms = min(request.max_wait_ms, call.broker.settings.limits.fetch_wait_ms_max)
        connection = call.connection
        if is_enough or wait_ms <= 0 or not self._open or connection is None or connection.is_polling:
            return self.response(answers)
        connection.is_polling = True
        poll = _LongPoll(self, call, answers, wait_ms / 1000)
        call.broker.arrivals.enter(poll)
        poll.look()  # what came meanwhile
        return poll.pending

    @property
    def partitions(self) -> list[Partition]:
        """Those that something may come to."""
        return [partition for _, partition in self._open]

    def look(self, answers: Answers) -> tuple[Answers, bool]:
        """(what there is by now, whether it is enough), where there was so much before."""
        return self._collect() if self._has_more(answers) else (answers, False)

    def _has_more(self, answers: Answers) -> bool:
        """Whether a partition has grown since its answer was made, or is another one by now."""
        said = {id(wanted): data for wanted, data in answers}
        for wanted, partition in self._open:
            if partition.is_stale or self._bounds(partition).end > max(
                wanted.fetch_offset, _end_of(said.get(id(wanted)), self._is_committed)
            ):
                return True
        return False

    def _bounds(self, partition: Partition) -> Bounds:
        return Bounds(partition, is_committed=self._is_committed, durable_only=self._durable_only)

    # ------------------------------------------------------------ collecting

    def _collect(self) -> tuple[Answers, bool]:
        """(what there is now, whether that is worth an answer at once)."""
        request = self._request
        left = min(request.max_bytes, self._call.broker.settings.limits.fetch_bytes)
        answers = list(self._refused)
        is_enough = bool(self._refused)
        size = 0
        for wanted, partition in self._open:
            data = self._of_partition(wanted, partition, left - size, at_least_one=not size)
            size += _size_of(data)
            is_enough |= bool(data.error_code) or data.diverging_epoch is not None
            answers.append((wanted, data))
        return answers, is_enough or size >= max(request.min_bytes, 0)

    def _of_partition(
        self, wanted: Wanted, partition: Partition, left_bytes: int, *, at_least_one: bool
    ) -> PartitionData:
        bounds = self._bounds(partition)
        leader = self._call.broker.broker_id if self._call.version >= _LEADERS_FROM else None
        try:
            refusal = why_not(partition, bounds, wanted, leader)
            if refusal is not None:
                return refusal
            partition.check_position(wanted.fetch_offset)
            if wanted.fetch_offset >= bounds.end or (not at_least_one and left_bytes <= 0):
                return bounds.of(wanted.partition)
            return read(
                partition,
                bounds,
                wanted,
                min(wanted.max_bytes, left_bytes),
                at_least_one=at_least_one,
                renderings=self._call.broker.renderings,
            )
        except (OffsetOutOfRange, LogTruncated):
            return bounds.of(wanted.partition, ErrorCode.OFFSET_OUT_OF_RANGE)
        except (SegmentlogError, OSError) as error:
            return bounds.of(wanted.partition, code_of(error))

    # ------------------------------------------------------------ the answer

    def response(self, answers: Answers) -> FetchResponse:
        """That, as it is told."""
        if self._session is None:
            return self._response(answers)
        with self._session.lock:
            response = self._response(answers)
        response.session_id = self._session.id
        return response

    def _response(self, answers: Answers) -> FetchResponse:
        response = FetchResponse(node_endpoints=list(self._endpoints.copy().values()))
        by_topic: dict[tuple[str, bytes], FetchableTopicResponse] = {}
        for wanted, data in answers:
            if self._session is not None:
                has_news = _note(wanted, data)
                if data.records:
                    self._session.move_to_end(wanted.key)
                if self._is_incremental and not has_news:
                    continue
            key = (wanted.topic, wanted.topic_id)
            topic = by_topic.get(key)
            if topic is None:
                topic = by_topic[key] = FetchableTopicResponse(wanted.topic, wanted.topic_id)
                response.responses.append(topic)
            topic.partitions.append(data)
        return response


class _LongPoll:
    """A fetch that waits: see `arrivals.Waiter`."""

    def __init__(self, fetch: _Fetch, call: Call, answers: Answers, wait_s: float) -> None:
        self.pending = call.answer_later()
        self.ends_s = time.monotonic() + wait_s
        self.paths: Sequence[str] = [partition.handle.lock_path for partition in fetch.partitions]
        self.topic_ids: Sequence[str] = [partition.topic_id for partition in fetch.partitions]
        self._fetch = fetch
        self._call = call
        self._answers = answers
        self._mutex = threading.Lock()
        self._is_done = self._is_to_look = False

    def look(self) -> None:
        """Answer, once there is enough or it is over."""
        self._is_to_look = True
        while self._is_to_look and not self._is_done:
            if not self._mutex.acquire(blocking=False):
                return  # whoever looks now looks again
            try:
                self._is_to_look = False
                is_over = self._look()
            except BaseException:
                self._give_up()
                raise
            finally:
                self._mutex.release()
            if is_over:
                self._answer()

    def _look(self) -> bool:
        """For one thread at a time; True once and for all."""
        if self._is_done:
            return False
        for partition in self._fetch.partitions:  # before looking: who appends after that wakes us
            partition.handle.announce_waiting(2 * LOOK_S)
        self._answers, is_enough = self._fetch.look(self._answers)
        call = self._call
        is_over = is_enough or call.is_left() or call.broker.arrivals.is_closed or time.monotonic() >= self.ends_s
        self._is_done = is_over
        return is_over

    def _answer(self) -> None:
        self._call.broker.arrivals.leave(self)
        try:
            if self._call.connection is not None:
                self._call.connection.is_polling = False
            self.pending.complete(self._fetch.response(self._answers))
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Nobody is left to wait for ever."""
        self._is_done = True
        self._call.broker.arrivals.leave(self)
        if self._call.connection is not None:
            self._call.connection.close()


def _note(wanted: Wanted, data: PartitionData) -> bool:
    """Keep in mind what the client is told, and say whether it is anything new."""
    has_news = bool(
        data.records
        or data.error_code
        or wanted.said_error
        or data.diverging_epoch is not None
        or data.high_watermark != wanted.said_high_watermark
        or data.log_start_offset != wanted.said_log_start
    )
    wanted.said_high_watermark, wanted.said_log_start = data.high_watermark, data.log_start_offset
    wanted.said_error = bool(data.error_code)
    return has_news


def _size_of(data: PartitionData) -> int:
    records = data.records
    if records is None:
        return 0
    return sum(map(len, records)) if isinstance(records, list) else len(records)


def _end_of(data: PartitionData | None, is_committed: bool) -> int:
    """Up to where an answer was made."""
    if data is None:
        return -1
    return data.last_stable_offset if is_committed else data.high_watermark
