"""The answers to one client on their way: in the order of its requests, and never waited for by who makes them.

An answer that has to wait, for the disk or for records, waits in a queue while the next request is read; whoever
completes it sends it, with all behind it that are ready. Answers to requests that came together go together.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from segmentlog.server.transport import Buffer, Transport

_WAITING_MAX: Final = 128
"""Answers that wait; no more requests are read until one has gone."""
_TOGETHER_BYTES: Final = 64 << 10
"""Up to which answers wait for others to requests that came with theirs."""


class Later:
    """An answer that is not there yet. `complete` it once, from any thread."""

    __slots__ = ("_outbox", "buffers")

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.buffers: Sequence[Buffer] | None = None

    def complete(self, buffers: Sequence[Buffer]) -> None:
        """The answer, with its length in front; it is sent when its turn comes, without waiting for a slow client."""
        self.buffers = buffers
        self._outbox.send_ready()


Answer = Sequence[Buffer] | Later | None
"""Buffers with the length in front; or what will have them; None: nothing is answered."""


class Outbox:
    """Answers of one connection. `put` and the flushes are for who does its requests, the rest is for any thread."""

    def __init__(self, transport: Transport, waiting_bytes_max: int, fail: Callable[[OSError], None]) -> None:
        self._transport = transport
        self._waiting_bytes_max = waiting_bytes_max
        self._fail = fail
        """Called when nothing can be sent any more, by whoever found that."""
        self._together: list[Buffer] = []
        self._together_bytes = 0
        self._waiting: deque[Later | Sequence[Buffer]] = deque()
        self._sending = threading.Lock()
        self._has_room = threading.Condition()
        self._is_closed = False
        self.is_stuck = False
        """The client takes nothing: a thread waits for it."""

    def __len__(self) -> int:
        """Answers that wait, but for those that go together with the next ones."""
        return len(self._waiting)

    @property
    def is_crowded(self) -> bool:
        """Whether more is kept than should be before it is sent."""
        return self._together_bytes > _TOGETHER_BYTES or len(self._waiting) >= _WAITING_MAX

    @property
    def is_large(self) -> bool:
        """Whether what is kept is much: sending it takes a while."""
        return self._together_bytes > _TOGETHER_BYTES

    def put(self, answer: Answer) -> None:
        """Keep an answer until those to all that came with its request are there: then flush."""
        if answer is None:
            return
        if isinstance(answer, Later):
            self._queue_together()
            self._waiting.append(answer)
        else:
            self._together += answer
            self._together_bytes += sum(map(len, answer))

    def flush_now(self) -> None:
        """Send what goes without waiting."""
        self._queue_together()
        if self._waiting:
            self.send_ready()

    def flush(self) -> None:
        """Send what was kept; waits for who takes it, and until fewer answers wait than may. Raises OSError."""
        if self._together:
            if self._waiting:
                self._queue_together()
            else:
                with self._sending:  # behind what was taken out of the queue a moment ago
                    self._transport.send(self._take_together())
        if self._waiting:
            self.send_ready()
            if self._is_full():
                with self._has_room:
                    self._has_room.wait_for(lambda: self._is_closed or not self._is_full())

    def wait(self, timeout_s: float) -> None:
        """Until everything has gone, or nothing can go any more."""
        with self._has_room:
            self._has_room.wait_for(lambda: self._is_closed or not self._waiting, timeout_s)

    def close(self) -> None:
        """Send nothing more, and have nobody wait for that."""
        self._is_closed = True
        with self._has_room:
            self._has_room.notify_all()

    def close_transport(self) -> None:
        """Once it is closed, and nobody is in the middle of sending."""
        with self._sending:
            self._transport.close()

    # ------------------------------------------------------------ what waits

    def _queue_together(self) -> None:
        if self._together:
            self._waiting.append(self._take_together())

    def _take_together(self) -> Sequence[Buffer]:
        together, size = self._together, self._together_bytes
        self._together, self._together_bytes = [], 0
        return together if len(together) < 2 or size > _TOGETHER_BYTES else (b"".join(together),)

    def _is_full(self) -> bool:
        """Whether as many answers wait as may, or as many bytes: a client may ask for much and take nothing."""
        waiting = self._waiting.copy()
        if len(waiting) >= _WAITING_MAX:
            return True
        if len(waiting) < 2 or isinstance(waiting[-1], Later):  # what comes later is small, or the only long poll
            return False
        made = [_buffers_of(answer) or () for answer in waiting]
        return sum(len(buffer) for buffers in made for buffer in buffers) > self._waiting_bytes_max

    def _head(self) -> Sequence[Buffer] | None:
        """The next answer, if there is one and it is complete."""
        try:
            return None if self._is_closed else _buffers_of(self._waiting[0])
        except IndexError:
            return None

    # ------------------------------------------------------------ sending

    def send_ready(self) -> None:
        """Send the answers at the head of the queue that are complete. Waits for nobody."""
        while self._head() is not None:
            if not self._sending.acquire(blocking=False):
                return  # whoever has it looks again
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
            left = self._transport.send_now(buffers)
            if left:
                self._waiting[0] = left
                self.is_stuck = True
                threading.Thread(target=self._send_to_slow, name="segmentlog-slow-client", daemon=True).start()
                return
            self._has_gone()

    def _has_gone(self) -> None:
        self._waiting.popleft()
        with self._has_room:
            self._has_room.notify_all()

    def _send_to_slow(self) -> None:
        """Wait for a client that takes nothing, in a thread of its own, until it has caught up."""
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
        self.send_ready()  # of what was completed in between


def _buffers_of(answer: Later | Sequence[Buffer]) -> Sequence[Buffer] | None:
    return answer.buffers if isinstance(answer, Later) else answer
