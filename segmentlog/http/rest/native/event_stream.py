"""A topic as server-sent events, resumed exactly where it broke off: the id of each event says where that is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from segmentlog.errors import LogTruncated, OffsetOutOfRange, SegmentlogError
from segmentlog.format.file_names import check_topic_name
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest import media_types
from segmentlog.http.rest.event_ids import Piece, View, check_partitions, decode_id, encode_id, ends_of, read
from segmentlog.http.rest.native.native_models import StreamQuery
from segmentlog.http.rest.responses import Flow, encode_json
from segmentlog.http.rest.topic_broadcast import Listener, Tail
from segmentlog.security.principals import Operation, ResourceType

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import Call

HEARTBEAT_S: Final = 15.0
_LOOK_S: Final = 1.0
_ALONE_S: Final = 0.05
"""How often somebody who is ahead of the others looks."""
_HEADERS: Final = ((b"x-accel-buffering", b"no"),)


async def stream(call: Call) -> Flow:
    """Records as they come, and those behind the last event that the client had."""
    name = check_topic_name(call.path["topic"])
    call.check_topic(Operation.READ, name)
    query: StreamQuery = call.query
    last_id = call.headers.get("last-event-id") or query.last_event_id
    view = View(query.values, query.isolation, query.durable_only)
    loop = asyncio.get_running_loop()

    def begin() -> tuple[Tail, list[int]]:
        topic = call.store.topic(name)
        check_partitions(topic)
        tail = Tail(topic, view, loop)
        if last_id is not None:
            positions = decode_id(tail.topic, last_id)
            # Partitions that came after the id was made are read from their beginning.
            positions += [log.log_start_offset for log in tail.logs[len(positions) :]]
            if query.gaps == "error":
                for log, position in zip(tail.logs, positions, strict=True):
                    log.check_position(position)
        elif query.start == "earliest":
            positions = [log.log_start_offset for log in tail.logs]
        else:
            positions = ends_of(tail.logs, view)
        return tail, positions

    tail, positions = await call.work(begin)
    return Flow(_Stream(call, tail, positions).pieces(), media_types.EVENTS, _HEADERS)


class _Stream:
    """One client's."""

    def __init__(self, call: Call, tail: Tail, positions: list[int]) -> None:
        self._call = call
        self._tail = tail
        self._listener = Listener(positions)
        self._is_gone = False
        self._troubles = 0
        """Those of the tail that it has looked into."""
        self._skips = call.query.gaps == "skip"
        self._first_partition = 0
        """Read first the next time, when it reads by itself: the one after that of the last piece."""

    async def pieces(self) -> AsyncIterator[bytes]:
        """What is sent: a first id, events, and now and then a comment, so that both ends know of each other."""
        call, listener = self._call, self._listener
        yield f"retry: 1000\nid: {encode_id(self._tail.mark, listener.positions)}\n\n".encode()
        tails = call.rest.tails
        tail = self._tail = tails.listen(self._tail.topic, self._tail.view, listener, self._tail)
        watcher = asyncio.create_task(self._watch())
        heard_s = asyncio.get_running_loop().time()
        try:
            while not (self._is_gone or call.site.is_closing):
                if not call.site.allows(call.connection, Operation.READ, ResourceType.TOPIC, tail.topic.name):
                    break
                data = b""
                if listener.is_live:
                    data = self._taken()
                elif (troubled := self._troubles != tail.troubles) or not tail.try_join(listener):
                    self._troubles = tail.troubles
                    data, problem = await self._read_alone(None if troubled else tail.target(listener.positions))
                    if problem is not None:
                        yield data + _problem_event(problem)
                        return
                else:
                    tails.interrupt()
                    continue
                now_s = asyncio.get_running_loop().time()
                if data:
                    heard_s = now_s
                    yield data
                    continue
                if now_s - heard_s >= HEARTBEAT_S:
                    heard_s = now_s
                    yield f": \nid: {encode_id(tail.mark, listener.positions)}\n\n".encode()
                await self._wait(_LOOK_S if listener.is_live else _ALONE_S)
        finally:
            watcher.cancel()
            tails.leave(tail, listener)
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self) -> None:
        """Notice that the client is gone, also when there is nothing to send."""
        await self._call.body.gone()
        self._is_gone = True
        self._listener.woken.set()

    async def _wait(self, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._listener.woken.wait()
        if not self._listener.is_live:
            self._listener.woken.clear()

    def _taken(self) -> bytes:
        """What the ring has for it, one piece or several small ones."""
        data, tail, listener = [], self._tail, self._listener
        size = 0
        while size < _SEND_BYTES:
            piece = tail.take(listener)
            if piece is None:
                break
            listener.positions = piece.after
            data.append(piece.data)
            size += len(piece.data)
        if data and tail.is_full:
            tail.is_full = False
            self._call.rest.tails.interrupt()
        return b"".join(data)

    # ------------------------------------------------------------ by itself

    async def _read_alone(self, ends: tuple[int, ...] | None) -> tuple[bytes, HttpProblem | None]:
        """Some of what lies before it, up to where the ring is; or the problem that ends the stream."""
        tail, listener = self._tail, self._listener
        logs = tail.logs
        if len(listener.positions) < len(logs):
            listener.positions = (
                *listener.positions, *(log.log_start_offset for log in logs[len(listener.positions) :])
            )  # fmt: skip
            ends = None

        def some() -> tuple[list[Piece], Exception | None]:
            found: list[Piece] = []
            size = 0
            try:
                check_partitions(tail.topic)  # raises also when the topic is gone
                for piece in read(logs, tail.mark, listener.positions, tail.view, ends, self._first_partition):
                    found.append(piece)
                    size += len(piece.data)
                    if size >= _SEND_BYTES:
                        break
            except (SegmentlogError, OSError) as error:
                return found, error
            return found, None

        found, error = await self._call.work(some)
        if found:
            listener.positions = found[-1].after
            self._first_partition = found[-1].partition + 1
        data = b"".join(piece.data for piece in found)
        if error is not None:
            gap = self._gap(error)
            if gap is None:
                return data, self._call.site.problem_of(error)
            data += gap
        return data, None

    def _gap(self, error: Exception) -> bytes | None:
        """Step over what is gone, and tell; None where that is not wanted, or is no gap."""
        if not self._skips or not isinstance(error, LogTruncated | OffsetOutOfRange):
            return None
        positions = list(self._listener.positions)
        for number, log in enumerate(self._tail.logs[: len(positions)]):
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
                encode_id(self._tail.mark, positions).encode(), encode_json(gap),
            )  # fmt: skip
        return b""


_SEND_BYTES: Final = 256 << 10


def _problem_event(problem: HttpProblem) -> bytes:
    document: Any = {"error_code": problem.error_code, "message": problem.message}
    return b"event: error\ndata: %b\n\n" % encode_json(document)
