"""Streams a topic as server-sent events. The id of an event is the exact position to resume at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from segmentlog.errors import LogTruncated, OffsetOutOfRange, SegmentlogError
from segmentlog.format.file_names import check_topic_name
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest import media_types
from segmentlog.http.rest.event_ids import (
    EventChunk,
    StreamView,
    check_partitions,
    decode_id,
    encode_id,
    ends_of,
    read_events,
)
from segmentlog.http.rest.native.native_models import StreamQuery
from segmentlog.http.rest.responses import StreamedResponse, encode_json
from segmentlog.http.rest.topic_broadcast import BroadcastListener, TopicBroadcast
from segmentlog.security.principals import Operation, ResourceType

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import RestRequest

HEARTBEAT_S: Final = 15.0
_POLL_S: Final = 1.0
_CATCH_UP_S: Final = 0.05
"""Interval at which a listener whose positions are ahead of the ring tries to join it."""
_HEADERS: Final = ((b"x-accel-buffering", b"no"),)


async def stream(request: RestRequest) -> StreamedResponse:
    """Stream new records, and those after the event in ``Last-Event-ID``."""
    name = check_topic_name(request.path["topic"])
    request.check_topic(Operation.READ, name)
    query: StreamQuery = request.query
    last_id = request.headers.get("last-event-id") or query.last_event_id
    view = StreamView(query.values, query.isolation, query.durable_only)
    loop = asyncio.get_running_loop()

    def open_broadcast() -> tuple[TopicBroadcast, list[int]]:
        topic = request.store.topic(name)
        check_partitions(topic)
        broadcast = TopicBroadcast(topic, view, loop)
        if last_id is not None:
            positions = decode_id(broadcast.topic, last_id)
            # Partitions that came after the id was made are read from their beginning.
            positions += [log.log_start_offset for log in broadcast.logs[len(positions) :]]
            if query.gaps == "error":
                for log, position in zip(broadcast.logs, positions, strict=True):
                    log.check_position(position)
        elif query.start == "earliest":
            positions = [log.log_start_offset for log in broadcast.logs]
        else:
            positions = ends_of(broadcast.logs, view)
        return broadcast, positions

    broadcast, positions = await request.work(open_broadcast)
    return StreamedResponse(_Stream(request, broadcast, positions).pieces(), media_types.EVENTS, _HEADERS)


class _Stream:
    """The event stream of one client."""

    def __init__(self, request: RestRequest, broadcast: TopicBroadcast, positions: list[int]) -> None:
        self._call = request
        self._broadcast = broadcast
        self._listener = BroadcastListener(positions)
        self._is_gone = False
        self._failure_count = 0
        """Failures of the broadcast that this stream has handled."""
        self._skips = request.query.gaps == "skip"
        self._first_partition = 0
        """Partition to read first from the log: the one after that of the last chunk."""

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the first id, events, and comments as heartbeats."""
        request, listener = self._call, self._listener
        yield f"retry: 1000\nid: {encode_id(self._broadcast.mark, listener.positions)}\n\n".encode()
        broadcasts = request.rest.broadcasts
        broadcast = self._broadcast = broadcasts.join(
            self._broadcast.topic, self._broadcast.view, listener, self._broadcast
        )
        watcher = asyncio.create_task(self._watch())
        sent_s = asyncio.get_running_loop().time()
        try:
            while not (self._is_gone or request.context.is_closing):
                if not request.context.allows(
                    request.connection, Operation.READ, ResourceType.TOPIC, broadcast.topic.name
                ):
                    break
                data = b""
                if listener.is_live:
                    data = self._take_chunks()
                elif (has_failed := self._failure_count != broadcast.failure_count) or not broadcast.try_join(listener):
                    self._failure_count = broadcast.failure_count
                    data, problem = await self._read_log(None if has_failed else broadcast.target(listener.positions))
                    if problem is not None:
                        yield data + _problem_event(problem)
                        return
                else:
                    broadcasts.interrupt()
                    continue
                now_s = asyncio.get_running_loop().time()
                if data:
                    sent_s = now_s
                    yield data
                    continue
                if now_s - sent_s >= HEARTBEAT_S:
                    sent_s = now_s
                    yield f": \nid: {encode_id(broadcast.mark, listener.positions)}\n\n".encode()
                await self._wait(_POLL_S if listener.is_live else _CATCH_UP_S)
        finally:
            watcher.cancel()
            broadcasts.leave(broadcast, listener)
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self) -> None:
        """Notice a disconnected client even if there is nothing to send."""
        await self._call.body.wait_for_disconnect()
        self._is_gone = True
        self._listener.wakeup.set()

    async def _wait(self, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._listener.wakeup.wait()
        if not self._listener.is_live:
            self._listener.wakeup.clear()

    def _take_chunks(self) -> bytes:
        """Return chunks from the ring, up to 256 KiB."""
        data, broadcast, listener = [], self._broadcast, self._listener
        size = 0
        while size < _SEND_BYTES:
            piece = broadcast.take(listener)
            if piece is None:
                break
            listener.positions = piece.after
            data.append(piece.data)
            size += len(piece.data)
        if data and broadcast.is_full:
            broadcast.is_full = False
            self._call.rest.broadcasts.interrupt()
        return b"".join(data)

    # ------------------------------------------------------------ by itself

    async def _read_log(self, ends: tuple[int, ...] | None) -> tuple[bytes, HttpProblem | None]:
        """Read events from the log up to the ring's positions. Return (events, problem that ends the stream)."""
        broadcast, listener = self._broadcast, self._listener
        logs = broadcast.logs
        if len(listener.positions) < len(logs):
            listener.positions = (
                *listener.positions, *(log.log_start_offset for log in logs[len(listener.positions) :])
            )  # fmt: skip
            ends = None

        def read_chunks() -> tuple[list[EventChunk], Exception | None]:
            found: list[EventChunk] = []
            size = 0
            try:
                check_partitions(broadcast.topic)  # this also raises if the topic was deleted
                for piece in read_events(
                    logs, broadcast.mark, listener.positions, broadcast.view, ends, self._first_partition
                ):
                    found.append(piece)
                    size += len(piece.data)
                    if size >= _SEND_BYTES:
                        break
            except (SegmentlogError, OSError) as error:
                return found, error
            return found, None

        found, error = await self._call.work(read_chunks)
        if found:
            listener.positions = found[-1].after
            self._first_partition = found[-1].partition + 1
        data = b"".join(piece.data for piece in found)
        if error is not None:
            gap = self._gap(error)
            if gap is None:
                return data, self._call.context.problem_of(error)
            data += gap
        return data, None

    def _gap(self, error: Exception) -> bytes | None:
        """Skip lost or deleted offsets and return an event that reports them; None if the stream must end."""
        if not self._skips or not isinstance(error, LogTruncated | OffsetOutOfRange):
            return None
        positions = list(self._listener.positions)
        for number, log in enumerate(self._broadcast.logs[: len(positions)]):
            try:
                log.check_position(positions[number])
                continue
            except LogTruncated as truncated:
                end, why = truncated.lost.end_offset, truncated.lost.reason
            except OffsetOutOfRange as outside:
                if positions[number] >= outside.log_start_offset:
                    return None
                end, why = outside.log_start_offset, "retention"
            gap = {"partition": number, "base_offset": positions[number], "end_offset": end, "reason": why}
            positions[number] = end
            self._listener.positions = tuple(positions)
            return b"event: gap\nid: %b\ndata: %b\n\n" % (
                encode_id(self._broadcast.mark, positions).encode(), encode_json(gap),
            )  # fmt: skip
        return b""


_SEND_BYTES: Final = 256 << 10


def _problem_event(problem: HttpProblem) -> bytes:
    document: Any = {"error_code": problem.error_code, "message": problem.message}
    return b"event: error\ndata: %b\n\n" % encode_json(document)
