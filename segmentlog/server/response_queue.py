"""Send the responses of a connection in the order of its requests. A thread that completes a response never blocks.

A response that waits for the disk or for records stays in the queue while later requests are read. The thread that
completes it sends it, together with the complete responses after it. Responses to requests that arrived together are
sent together.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from segmentlog.server.transport import Buffer, Transport

_WAITING_MAX: Final = 128
"""Limit of queued responses; at the limit the connection reads no more requests."""
_TOGETHER_BYTES: Final = 64 << 10
"""Maximum size of a response that is sent together with those to requests that arrived at the same time."""


class PendingResponse:
    """A queued response that is not complete yet. Call `complete` once, from any thread."""

    __slots__ = ("_queue", "buffers")

    def __init__(self, outbox: ResponseQueue) -> None:
        self._queue = outbox
        self.buffers: Sequence[Buffer] | None = None

    def complete(self, buffers: Sequence[Buffer]) -> None:
        """Set the response, length prefix included. Send it if it is the next. Never waits for a slow client."""
        self.buffers = buffers
        self._queue.send_ready()


Answer = Sequence[Buffer] | PendingResponse | None
"""Buffers that begin with the length prefix; a `PendingResponse` that will get them; or None for no response."""


class ResponseQueue:
    """Responses of one connection.

    Only the connection's thread may call `put` and the flushes; the rest is thread-safe.
    """

    def __init__(self, transport: Transport, waiting_bytes_max: int, fail: Callable[[OSError], None]) -> None:
        self._transport = transport
        self._waiting_bytes_max = waiting_bytes_max
        self._fail = fail
        """Called with the error when sending fails, in the thread that sends."""
        self._together: list[Buffer] = []
        self._together_bytes = 0
        self._waiting: deque[PendingResponse | Sequence[Buffer]] = deque()
        self._sending = threading.Lock()
        self._has_room = threading.Condition()
        self._is_closed = False
        self.is_stuck = False
        """Whether a thread waits for the client, because it does not read its responses."""

    def __len__(self) -> int:
        """Return the number of queued responses, except those that wait to be sent together with the next."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether the connection must flush before it reads more requests."""
        return self._together_bytes > _TOGETHER_BYTES or len(self._waiting) >= _WAITING_MAX

    @property
    def is_large(self) -> bool:
        """Whether the unsent responses are large, so that sending them takes a while."""
        return self._together_bytes > _TOGETHER_BYTES

    def put(self, answer: Answer) -> None:
        """Add a response. The next flush sends it together with other responses."""
        if answer is None:
            return
        if isinstance(answer, PendingResponse):
            self._queue_together()
            self._waiting.append(answer)
        else:
            self._together += answer
            self._together_bytes += sum(map(len, answer))

    def flush_now(self) -> None:
        """Send as much as the socket takes without blocking."""
        self._queue_together()
        if self._waiting:
            self.send_ready()

    def flush(self) -> None:
        """Send all responses, and wait while the client is slow or too many responses are queued. Raise OSError."""
        if self._together:
            if self._waiting:
                self._queue_together()
            else:
                with self._sending:  # another thread may still be sending a response that precedes these
                    self._transport.send(self._take_together())
        if self._waiting:
            self.send_ready()
            if self._is_at_limit():
                with self._has_room:
                    self._has_room.wait_for(lambda: self._is_closed or not self._is_at_limit())

    def wait(self, timeout_s: float) -> None:
        """Wait until everything is sent, the queue is closed, or ``timeout_s`` has passed."""
        with self._has_room:
            self._has_room.wait_for(lambda: self._is_closed or not self._waiting, timeout_s)

    def close(self) -> None:
        """Stop sending, and wake waiting threads."""
        self._is_closed = True
        with self._has_room:
            self._has_room.notify_all()

    def close_transport(self) -> None:
        """Close the transport after `close`, once no thread is sending."""
        with self._sending:
            self._transport.close()

    # ------------------------------------------------------------ queue

    def _queue_together(self) -> None:
        if self._together:
            self._waiting.append(self._take_together())

    def _take_together(self) -> Sequence[Buffer]:
        together, size = self._together, self._together_bytes
        self._together, self._together_bytes = [], 0
        return together if len(together) < 2 or size > _TOGETHER_BYTES else (b"".join(together),)

    def _is_at_limit(self) -> bool:
        """Return whether the limit of responses or bytes is reached: a client may request much and read nothing."""
        waiting = self._waiting.copy()
        if len(waiting) >= _WAITING_MAX:
            return True
        if len(waiting) < 2 or isinstance(
            waiting[-1], PendingResponse
        ):  # a pending response is small, or the only long poll
            return False
        completed = [_buffers_of(answer) or () for answer in waiting]
        return sum(len(buffer) for buffers in completed for buffer in buffers) > self._waiting_bytes_max

    def _head(self) -> Sequence[Buffer] | None:
        """Return the next response if it is complete, else None."""
        try:
            return None if self._is_closed else _buffers_of(self._waiting[0])
        except IndexError:
            return None

    # ------------------------------------------------------------ sending

    def send_ready(self) -> None:
        """Send the complete responses at the head of the queue. Never blocks."""
        while self._head() is not None:
            if not self._sending.acquire(blocking=False):
                return  # the thread that is sending checks the queue again
            try:
                if self.is_stuck:
                    return
                self._send_ready_locked()
            except OSError as error:
                self._fail(error)
            finally:
                self._sending.release()

    def _send_ready_locked(self) -> None:
        while (buffers := self._head()) is not None:
            unsent = self._transport.send_now(buffers)
            if unsent:
                self._waiting[0] = unsent
                self.is_stuck = True
                threading.Thread(target=self._send_to_slow, name="segmentlog-slow-client", daemon=True).start()
                return
            self._has_gone()

    def _has_gone(self) -> None:
        self._waiting.popleft()
        with self._has_room:
            self._has_room.notify_all()

    def _send_to_slow(self) -> None:
        """Send to a client that does not read, in a thread of its own, until the client has caught up."""
        try:
            while self.is_stuck:
                with self._sending:
                    buffers = self._head()
                    if buffers is None:
                        self.is_stuck = False
                    else:
                        self._transport.send(buffers)
                        self._has_gone()
        except OSError as error:
            self._fail(error)
        self.send_ready()  # responses that were completed in the meantime


def _buffers_of(answer: PendingResponse | Sequence[Buffer]) -> Sequence[Buffer] | None:
    return answer.buffers if isinstance(answer, PendingResponse) else answer
