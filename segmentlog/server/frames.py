"""Split the byte stream of a connection into requests: a length of four bytes, then the request."""

from __future__ import annotations

import time
from typing import Final

from segmentlog.server.api_table import PRODUCE
from segmentlog.server.request_buffers import SMALLEST, BufferPool, Lease, NoRoom
from segmentlog.server.transport import Idle, Transport

LENGTH_BYTES: Final = 4
_KEY_BYTES: Final = 2
"""Size of the API key at the beginning of a request."""
_SMALL_BYTES: Final = 16 << 10
"""Buffer of each connection: one system call reads several small requests into it."""
MEDIUM_BYTES: Final = 64 << 10
"""A request up to this size is received without a thread, into a buffer of this size."""
_TRUSTED_FROM_BYTES: Final = 8 << 10
"""Once this many bytes of a request have arrived, the server trusts its length and allocates memory for the rest."""
_GROWTH: Final = 4
"""Growth factor of a full buffer."""
_SLOWEST_BYTES: Final = 64 << 10
"""Bytes of a large request that must arrive within ``patience_s``."""


class BadFrame(Exception):
    """The client sent something other than a request, or a request that is too large. The connection must be closed."""


class IdleTooLong(BadFrame):
    """The client has sent no request for too long. This is not an error: the connection is closed."""


class FrameReader:
    """Reads requests from a connection. Not thread-safe.

    Each 64 KiB of a request must arrive within ``patience_s``; between two requests ``idle_s`` may pass. A request
    larger than ``control_limit_bytes`` must be a Produce request.
    """

    def __init__(
        self, transport: Transport, pool: BufferPool, *, limit_bytes: int, control_limit_bytes: int | None = None,
        patience_s: float, idle_s: float,
    ) -> None:  # fmt: skip
        self.limit_bytes = limit_bytes
        self.deadline_s = float("inf")
        """Time (`time.monotonic`) after which the reader accepts no more requests, even if one has arrived."""
        self._control_limit_bytes = limit_bytes if control_limit_bytes is None else control_limit_bytes
        self._transport = transport
        self._pool = pool
        self._patience_s = patience_s
        self._idle_s = idle_s
        self._small = self._buffer = bytearray(_SMALL_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._since_s = time.monotonic()
        """Time when the last request was complete, or when the first bytes of the next request arrived."""
        self._large: Lease | None = None
        self._frame: memoryview | None = None

    @property
    def has_more(self) -> bool:
        """Whether a part of the next request has arrived."""
        return self._end > self._begin

    # ------------------------------------------------------------ without a thread

    def receive_now(self) -> bool:
        """Read the bytes that have arrived. Return False at the end of the stream; raise `Idle` if there are none.

        The caller must take all requests that are `ready` before it calls this again.
        """
        if self._begin == self._end:
            self._begin = self._end = 0
            if self._buffer is not self._small:
                self._use(self._small)
        elif self.is_cut_off and not self.is_large:
            self._use(bytearray(MEDIUM_BYTES))
        elif self._begin:
            self._move_to_front()
        received = self._transport.receive_now(self._view[self._end :])
        if not received and self._end:
            raise BadFrame("the client closed the connection in the middle of a request")
        if not self._end:
            self._since_s = time.monotonic()
        self._end += received
        return received > 0

    def ready(self) -> memoryview | None:
        """Return the next request if all of it has arrived, else None. Its bytes are valid until more is received.

        Raise `BadFrame` for a request that is too large, as soon as its length is known.
        """
        at = self._begin + LENGTH_BYTES
        if at > self._end:
            return None
        size = self._size_at(self._begin)
        if size > self._control_limit_bytes and at + _KEY_BYTES <= self._end:  # before the rest arrives
            self._check_key(size, at)
        if at + size > self._end:
            return None
        self._begin = at + size
        self._since_s = time.monotonic()
        return self._view[at : at + size]

    @property
    def is_cut_off(self) -> bool:
        """Whether a part of a request that is larger than the buffer has arrived: more bytes probably wait."""
        return self._is_larger_than(len(self._buffer))

    @property
    def is_large(self) -> bool:
        """Whether the next request needs a buffer of its own. Only `next` can receive such a request."""
        return self._is_larger_than(MEDIUM_BYTES)

    def _is_larger_than(self, size_bytes: int) -> bool:
        """Return whether the next request announces more than ``size_bytes``, and enough bytes have arrived to trust
        its length.
        """
        at = self._begin
        return self._end - at >= _TRUSTED_FROM_BYTES and self._size_at(at) + LENGTH_BYTES > size_bytes

    @property
    def is_late(self) -> bool:
        """Whether `deadline_s` has passed."""
        return time.monotonic() >= self.deadline_s

    def is_overdue(self) -> bool:
        """Return whether the client has sent nothing for longer than the limit.

        The limit is `patience_s` inside a request, and `idle_s` between two requests.
        """
        return time.monotonic() - self._since_s > (self._patience_s if self.has_more else self._idle_s)

    def _size_at(self, at: int) -> int:
        size = int.from_bytes(self._buffer[at : at + LENGTH_BYTES], "big", signed=True)
        if not 0 <= size <= self.limit_bytes:
            raise BadFrame(f"a request announces {size} bytes; at most {self.limit_bytes} are allowed")
        return size

    # ------------------------------------------------------------ with a thread

    def next(self, *, leaves: bool = False) -> memoryview | None:
        """Return the next request without its length; None at the end. Its bytes are valid until the next call.

        Raise `BadFrame`, and the connection's OSError; with ``leaves`` also `Idle` if no request has begun for a while.
        """
        self.release()
        self._since_s = time.monotonic()
        begun_s = 0.0
        while self._end - self._begin < LENGTH_BYTES:
            has_begun = self._end > self._begin
            if has_begun:
                begun_s = begun_s or time.monotonic()
            try:
                is_there = (
                    self._fill(begun_s + self._patience_s)
                    if begun_s
                    else self._fill(time.monotonic() + self._idle_s, leaves=leaves)
                )
            except BadFrame:
                if has_begun or time.monotonic() >= self.deadline_s:
                    raise
                raise IdleTooLong("no request arrived within the idle timeout") from None
            if not is_there:
                if has_begun:
                    raise BadFrame("the client closed the connection in the middle of a request")
                return None
        at = self._begin
        size = self._size_at(at)
        self._begin += LENGTH_BYTES
        if size > self._control_limit_bytes:
            self._check_is_produce(size)
        if size > len(self._buffer):
            return self._receive_large(size)
        if self._begin + size > len(self._buffer):
            self._move_to_front()
        ends_s = time.monotonic() + self._patience_s if self._end - self._begin < size else 0.0
        while self._end - self._begin < size:
            if not self._fill(ends_s):
                raise BadFrame("the client closed the connection in the middle of a request")
        frame = self._view[self._begin : self._begin + size]
        self._begin += size
        return frame

    def _check_is_produce(self, size: int) -> None:
        """Check the API key of a large request before a buffer is allocated for it."""
        ends_s = time.monotonic() + self._patience_s
        while self._end - self._begin < _KEY_BYTES:
            if not self._fill(ends_s):
                raise BadFrame("the client closed the connection in the middle of a request")
        self._check_key(size, self._begin)

    def _check_key(self, size: int, at: int) -> None:
        key = int.from_bytes(self._buffer[at : at + _KEY_BYTES], "big", signed=True)
        if key != PRODUCE:
            raise BadFrame(
                f"a request of API key {key} has {size} bytes; at most {self._control_limit_bytes} are allowed"
            )

    def release(self) -> None:
        """Return the buffer of the last request, whose bytes are not used any more."""
        if self._frame is not None:
            self._frame.release()
            self._frame = None
        if self._large is not None:
            self._large.give_back()
            self._large = None

    def _fill(self, ends_s: float, *, leaves: bool = False) -> bool:
        """Receive some bytes. Return False at the end of the stream."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._buffer):
            self._move_to_front()
        received = self._receive(self._view[self._end :], ends_s, leaves=leaves)
        self._end += received
        return received > 0

    def _receive_large(self, size: int) -> memoryview:
        """Receive a request into a buffer that grows with the arrived bytes. A length alone must not
        make the server allocate memory.
        """
        lease = self._large = self._pool.lease(self._transport.shut_down)
        filled = self._end - self._begin
        expected = 0
        try:
            lease.grow(min(size, SMALLEST), 0, self._patience_s)
            lease.buffer[:filled] = self._view[self._begin : self._end]
            self._begin = self._end = 0
            while filled < size:
                if filled == len(lease.buffer):
                    lease.grow(min(size, _GROWTH * filled), filled, self._patience_s)
                if filled >= expected:
                    expected, ends_s = filled + _SLOWEST_BYTES, time.monotonic() + self._patience_s
                with memoryview(lease.buffer) as view, view[filled:size] as room:
                    received = self._receive(room, ends_s)
                if not received:
                    raise BadFrame("the client closed the connection in the middle of a request")
                filled += received
        except NoRoom as error:
            raise BadFrame(str(error)) from None
        lease.complete()
        self._frame = memoryview(lease.buffer)[:size]
        return self._frame

    def _receive(self, view: memoryview, ends_s: float, *, leaves: bool = False) -> int:
        while True:
            now_s = time.monotonic()
            if now_s >= self.deadline_s:
                raise BadFrame("the client did not authenticate in time")
            if now_s >= ends_s:  # a client that sends a byte now and then does not extend the limit
                raise BadFrame("the rest of a request did not arrive in time")
            try:
                return self._transport.receive_into(view)
            except Idle:
                if leaves:
                    raise

    def _use(self, buffer: bytearray) -> None:
        """From now on, receive into another buffer. Requests that were already returned remain in the old buffer."""
        remaining = self._end - self._begin
        buffer[:remaining] = self._view[self._begin : self._end]
        self._buffer, self._view = buffer, memoryview(buffer)
        self._begin, self._end = 0, remaining

    def _move_to_front(self) -> None:
        remaining = self._end - self._begin
        self._buffer[:remaining] = self._buffer[self._begin : self._end]
        self._begin, self._end = 0, remaining
