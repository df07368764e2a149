"""Requests off a connection: four bytes of length, then so many bytes."""

from __future__ import annotations

import time
from typing import Final

from segmentlog.server.buffers import BufferPool
from segmentlog.server.transport import Idle, Transport

LENGTH_BYTES: Final = 4
_SMALL_BYTES: Final = 16 << 10
"""One system call brings several small requests; as much memory is kept for each connection."""

_SLOWEST_BYTES: Final = 64 << 10
"""What comes of a large request at the least within one's patience."""


class BadFrame(Exception):
    """What came is no request, or one that is too large: the connection is of no use any more."""


class IdleTooLong(BadFrame):
    """The client sends nothing any more. It may have nothing to say."""


class FrameReader:
    """Cuts what comes into requests. For one thread.

    A request begun must be there within ``patience_s`` for each 64 KiB of it; between two there may be ``idle_s``.
    """

    def __init__(self, transport: Transport, pool: BufferPool, *, limit_bytes: int, patience_s: float,
                 idle_s: float) -> None:  # fmt: skip
        self.limit_bytes = limit_bytes
        self._transport = transport
        self._pool = pool
        self._patience_s = patience_s
        self._idle_s = idle_s
        self._buffer = bytearray(_SMALL_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._large: bytearray | None = None
        self._frame: memoryview | None = None

    @property
    def has_more(self) -> bool:
        """Whether the next request has begun to come."""
        return self._end > self._begin

    def next(self) -> memoryview | None:
        """The next request, without its length; None at the end. Its bytes are its receiver's until the next call.

        Raises `BadFrame`, and OSError of the connection.
        """
        self.release()
        while self._end - self._begin < LENGTH_BYTES:
            has_begun = self._end > self._begin
            try:
                is_there = self._fill(time.monotonic() + (self._patience_s if has_begun else self._idle_s))
            except BadFrame:
                if has_begun:
                    raise
                raise IdleTooLong("no request came for too long") from None
            if not is_there:
                if has_begun:
                    raise BadFrame("it ended in the middle of a request")
                return None
        at = self._begin
        size = int.from_bytes(self._buffer[at : at + LENGTH_BYTES], "big", signed=True)
        if not 0 <= size <= self.limit_bytes:
            raise BadFrame(f"a request of {size} bytes, where at most {self.limit_bytes} are taken")
        self._begin += LENGTH_BYTES
        if size > _SMALL_BYTES:
            return self._receive_large(size)
        if self._begin + size > _SMALL_BYTES:
            self._move_to_front()
        ends_s = time.monotonic() + self._patience_s if self._end - self._begin < size else 0.0
        while self._end - self._begin < size:
            if not self._fill(ends_s):
                raise BadFrame("it ended in the middle of a request")
        frame = self._view[self._begin : self._begin + size]
        self._begin += size
        return frame

    def release(self) -> None:
        """Nobody uses the last request's bytes any more."""
        if self._frame is not None:
            self._frame.release()
            self._frame = None
        if self._large is not None:
            self._pool.give_back(self._large)
            self._large = None

    def _fill(self, ends_s: float) -> bool:
        """Receive something; False at the end."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == _SMALL_BYTES:
            self._move_to_front()
        received = self._receive(self._view[self._end :], ends_s)
        self._end += received
        return received > 0

    def _receive_large(self, size: int) -> memoryview:
        self._large = self._pool.take(size)
        view = memoryview(self._large)
        filled = self._end - self._begin
        view[:filled] = self._view[self._begin : self._end]
        self._begin = self._end = 0
        expected = 0
        while filled < size:
            if filled >= expected:
                expected, ends_s = filled + _SLOWEST_BYTES, time.monotonic() + self._patience_s
            received = self._receive(view[filled:size], ends_s)
            if not received:
                raise BadFrame("it ended in the middle of a request")
            filled += received
        self._frame = view[:size]
        return self._frame

    def _receive(self, view: memoryview, ends_s: float) -> int:
        while True:
            try:
                return self._transport.receive_into(view)
            except Idle:
                if time.monotonic() >= ends_s:
                    raise BadFrame("nothing came for too long") from None

    def _move_to_front(self) -> None:
        left = self._end - self._begin
        self._buffer[:left] = self._buffer[self._begin : self._end]
        self._begin, self._end = 0, left
