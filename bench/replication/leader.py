"""A prototype of a leader: ``segmentlog serve`` that also answers followers. Not part of the package.

``python -m bench.replication.leader FOLLOWERS PARTITIONS TRACE_PATH serve ARGUMENTS...`` replaces functions of the
server, and then runs the command line. ``acks=all`` waits for the fsync of this process and for FOLLOWERS followers. An
answer to a follower has at most PARTITIONS partitions.

A follower's fetch has a replica id. It lists only partitions whose log end or confirmed offset has changed since the
follower's last fetch. The answer contains the batches as they are on disk, with our header. A follower has at most one
parked fetch: a later fetch answers the parked one at once, without records.

The prototype uses two fields of Fetch for other purposes: ``log_start_offset`` of a request is the confirmed offset.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from segmentlog.format.batch import HEADER_SIZE
from segmentlog.server import broker as broker_module
from segmentlog.server import worker as worker_module
from segmentlog.server.ack_waiter import AckWaiter, Done
from segmentlog.server.codec.generated.fetch import (
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from segmentlog.server.handlers import fetch as fetch_module
from segmentlog.server.handlers import produce as produce_module
from segmentlog.server.long_poll import FetchPurgatory
from segmentlog.server.request_context import DeferredResponse, RequestContext
from segmentlog.storage.segment import MappedSegment

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

_ANSWER_BYTES = 8 << 20
_answer_partitions = 1 << 30
_payload_size = struct.Struct("<I").unpack_from
_PAYLOAD_SIZE_AT = 56
_place = struct.Struct("<qII").unpack_from
_PLACE_AT = 8

trace: list[tuple[str, float, int]] = []
"""(event, `time.perf_counter`, offset): only with a trace path."""
_is_traced = False


def note(event: str, offset: int) -> None:
    """Add an event to the trace."""
    if _is_traced:
        trace.append((event, time.perf_counter(), offset))


# ---------------------------------------------------------------- acknowledgements


class _LogProgress:
    """The confirmed offsets of one partition, and the acknowledgements that wait for them."""

    def __init__(self) -> None:
        self.durable = 0
        self.confirmed: dict[int, int] = {}
        self.waiting: deque[tuple[int, Done]] = deque()


class ReplicatedWaiter:
    """Calls ``done`` once records are on the local disk and confirmed by the followers. Thread-safe."""

    def __init__(self, fsync_waiter: AckWaiter, followers: int) -> None:
        self._fsync_waiter = fsync_waiter
        self._followers = followers
        self._mutex = threading.Lock()
        self._logs: dict[Partition, _LogProgress] = {}

    def _log_locked(self, partition: Partition) -> _LogProgress:
        log = self._logs.get(partition)
        if log is None:
            log = self._logs[partition] = _LogProgress()
        return log

    def when_durable(self, partition: Partition, base_offset: int, end_offset: int, done: Done) -> None:
        """See `AckWaiter.when_durable`."""
        with self._mutex:
            self._log_locked(partition).waiting.append((end_offset, done))
        self._fsync_waiter.when_durable(
            partition, base_offset, end_offset, partial(self._note_synced, partition, end_offset)
        )

    def _note_synced(self, partition: Partition, end_offset: int, error: Exception | None) -> None:
        if error is not None:
            raise error
        note("leader synced", end_offset)
        with self._mutex:
            log = self._log_locked(partition)
            log.durable = max(log.durable, end_offset)
            ready = self._ready_locked(log)
        for done in ready:
            done(None)

    def confirm(self, partition: Partition, follower: int, offset: int) -> None:
        """Record that a follower has everything below ``offset`` on its disk."""
        with self._mutex:
            log = self._log_locked(partition)
            if log.confirmed.get(follower, 0) >= offset:
                return
            log.confirmed[follower] = offset
            ready = self._ready_locked(log)
        for done in ready:
            done(None)
        note("acknowledged", offset)

    def _ready_locked(self, log: _LogProgress) -> list[Done]:
        if len(log.confirmed) < self._followers:
            return []
        reached = min(log.durable, *log.confirmed.values())
        ready = []
        while log.waiting and log.waiting[0][0] <= reached:
            ready.append(log.waiting.popleft()[1])
        return ready

    def is_healthy(self, patience_s: float) -> bool:
        """Return whether the lock becomes free within ``patience_s`` seconds."""
        if not self._mutex.acquire(timeout=patience_s):
            return False
        self._mutex.release()
        return True

    def close(self) -> None:
        """Do nothing: the server closes the other waiter."""

    @property
    def waiting_count(self) -> int:
        """Number of waiting acknowledgements."""
        with self._mutex:
            return sum(len(log.waiting) for log in self._logs.values())


# ---------------------------------------------------------------- batches for followers


class _Cursor:
    """The position of a follower in one partition."""

    def __init__(self, key: tuple[str, int], partition: Partition) -> None:
        self.key = key
        self.partition = partition
        self.offset = -1
        self._base = -1
        self._position = 0
        self._mapped: MappedSegment | None = None

    def seek(self, offset: int) -> None:
        """Continue at an offset, which must be the base offset of a batch or the log end."""
        handle = self.partition.handle
        log = handle.page.log.read()
        bases = handle.segments(log, offset)
        self._open(bases[bisect_right(bases, offset) - 1])
        assert self._mapped is not None
        view, at = self._mapped.view, 0
        while self.offset < offset:
            base, _, last_delta = _place(view, at + _PLACE_AT)
            self.offset = base + last_delta + 1
            at += HEADER_SIZE + _payload_size(view, at + _PAYLOAD_SIZE_AT)[0]
        self._position = at

    def _open(self, base: int) -> None:
        handle = self.partition.handle
        self._mapped = MappedSegment(handle.fs, handle.folder, base)
        self._base, self._position, self.offset = base, 0, base

    @property
    def has_more(self) -> bool:
        """Whether the log has batches after the cursor."""
        return self.partition.handle.page.log.read().log_end_offset > self.offset

    def read(self, room: int) -> memoryview:
        """Return whole batches of one segment, at most ``room`` bytes but at least one batch, and move after them."""
        handle = self.partition.handle
        log = handle.page.log.read()
        assert self._mapped is not None
        if self._base != log.active_base_offset and self.offset in handle.segments(log, self.offset):
            self._open(self.offset)
        is_active = self._base == log.active_base_offset
        end = log.end_position if is_active else handle.fs.stat(self._mapped.path).st_size
        view = self._mapped.view_to(end)
        if is_active and end - self._position <= room:
            found = view[self._position :]
            self._position, self.offset = end, log.log_end_offset
            return found
        begin = at = self._position
        while at < end:
            size = HEADER_SIZE + _payload_size(view, at + _PAYLOAD_SIZE_AT)[0]
            if at > begin and at + size - begin > room:
                break
            base, _, last_delta = _place(view, at + _PLACE_AT)
            self.offset = base + last_delta + 1
            at += size
        self._position = at
        return view[begin:at]


class Feed:
    """Batches for one follower. Thread-safe."""

    def __init__(self, follower: int, waiter: ReplicatedWaiter) -> None:
        self._follower = follower
        self._waiter = waiter
        self._mutex = threading.Lock()
        self._cursors: dict[tuple[str, int], _Cursor] = {}
        self._of_partition: dict[Partition, _Cursor] = {}
        self._grown: dict[_Cursor, None] = {}
        self._parked: DeferredResponse | None = None

    def fetch(self, call: RequestContext, request: FetchRequest) -> FetchResponse | DeferredResponse:
        """Record what the follower confirms, and return new batches or a parked response."""
        confirmed: list[tuple[Partition, int]] = []
        with self._mutex:
            for topic in request.topics:
                for wanted in topic.partitions:
                    cursor = self._cursor_locked(call, topic.topic, wanted.partition)
                    if wanted.fetch_offset >= 0 and cursor.offset != wanted.fetch_offset:
                        cursor.seek(wanted.fetch_offset)
                    if cursor.has_more:
                        self._grown[cursor] = None
                    confirmed.append((cursor.partition, wanted.log_start_offset))
        for partition, offset in confirmed:
            note("confirmed", offset)
            self._waiter.confirm(partition, self._follower, offset)
        with self._mutex:
            former, self._parked = self._parked, None
            response = self._response_locked()
            parked = self._parked = call.defer_response() if response is None else None
        if former is not None:
            former.complete(FetchResponse())
        return response or parked  # type: ignore[return-value]

    def _cursor_locked(self, call: RequestContext, topic: str, number: int) -> _Cursor:
        cursor = self._cursors.get((topic, number))
        if cursor is None:
            partition = call.broker.store.open_partition(topic, number)
            cursor = self._cursors[topic, number] = self._of_partition[partition] = _Cursor((topic, number), partition)
        return cursor

    def mark_grown(self, partition: Partition) -> None:
        """Record new batches, and answer the parked fetch with them."""
        cursor = self._of_partition.get(partition)
        if cursor is None:
            return
        with self._mutex:
            self._grown[cursor] = None
            parked = self._parked
            if parked is None:
                return
            response = self._response_locked()
            if response is None:
                return
            self._parked = None
        parked.complete(response)

    def _response_locked(self) -> FetchResponse | None:
        by_topic: dict[str, list[PartitionData]] = {}
        room, count = _ANSWER_BYTES, 0
        grown, self._grown = self._grown, {}
        for cursor in grown:
            if cursor.offset < 0 or not cursor.has_more:
                continue
            if room <= 0 or count >= _answer_partitions:
                self._grown[cursor] = None
                continue
            records = cursor.read(room)
            note("sent", cursor.offset)
            room -= len(records)
            count += 1
            if cursor.has_more:
                self._grown[cursor] = None
            topic, number = cursor.key
            by_topic.setdefault(topic, []).append(PartitionData(number, 0, 0, records=records))
        if not by_topic:
            return None
        return FetchResponse(
            responses=[FetchableTopicResponse(topic, partitions=all) for topic, all in by_topic.items()]
        )


# ---------------------------------------------------------------- the server's functions


def install(followers: int) -> None:
    """Replace functions of the server."""
    feeds: dict[int, Feed] = {}
    grown: deque[Partition] = deque()
    fetch, recheck_grown, mark_grown = fetch_module.fetch, FetchPurgatory.recheck_grown, FetchPurgatory.mark_grown
    new_broker, append = broker_module.Broker.__init__, produce_module._append

    def fetch_or_replicate(call: RequestContext, request: FetchRequest) -> Any:
        if request.replica_id < 0:
            return fetch(call, request)
        feed = feeds.get(request.replica_id)
        if feed is None:
            waiter: Any = call.broker.ack_waiter
            feed = feeds[request.replica_id] = Feed(request.replica_id, waiter)
        return feed.fetch(call, request)

    def mark(self: FetchPurgatory, partition: Partition) -> None:
        grown.append(partition)
        mark_grown(self, partition)

    def recheck(self: FetchPurgatory) -> None:
        while grown:
            try:
                partition = grown.popleft()
            except IndexError:
                break
            for feed in feeds.values():
                feed.mark_grown(partition)
        recheck_grown(self)

    def initialise(self: Any, *arguments: Any, **options: Any) -> None:
        new_broker(self, *arguments, **options)
        if followers:
            self.ack_waiter = ReplicatedWaiter(self.fsync_waiter, followers)

    def traced_append(call: RequestContext, *arguments: Any) -> Any:
        answer = append(call, *arguments)
        trace.append(("received", call.started_s, answer.base_offset + 1))
        note("leader appended", answer.base_offset + 1)
        return answer

    fetch_module.fetch = fetch_or_replicate
    FetchPurgatory.mark_grown = mark  # type: ignore[method-assign]
    FetchPurgatory.recheck_grown = recheck  # type: ignore[method-assign]
    broker_module.Broker.__init__ = initialise  # type: ignore[method-assign]
    if _is_traced:
        produce_module._append = traced_append  # type: ignore[assignment]


def _write_trace_at_close(path: str) -> None:
    close: Callable[..., None] = worker_module.KafkaWorker.close

    def close_and_write(self: Any, timeout_s: float) -> None:
        close(self, timeout_s)
        with open(path, "w", encoding="ascii") as file:
            json.dump(trace, file)

    worker_module.KafkaWorker.close = close_and_write  # type: ignore[method-assign]


def main() -> None:
    """Run the command line with the functions replaced."""
    global _is_traced, _answer_partitions
    followers, _answer_partitions, trace_path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    _is_traced = trace_path != "-"
    install(followers)
    if _is_traced:
        _write_trace_at_close(trace_path)
    sys.argv[1:4] = []
    from segmentlog.__main__ import main as run

    run()


if __name__ == "__main__":
    main()
