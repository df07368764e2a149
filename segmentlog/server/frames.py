"""Requests off a connection: four bytes of length, then so many bytes."""

from __future__ import annotations

import time
from typing import Final

from segmentlog.server.api_table import PRODUCE
from segmentlog.server.request_buffers import SMALLEST, BufferPool, Lease, NoRoom
from segmentlog.server.transport import Idle, Transport

LENGTH_BYTES: Final = 4
_KEY_BYTES: Final = 2
"""Of its API, with which a request begins."""
_SMALL_BYTES: Final = 16 << 10
"""One system call brings several small requests; as much memory is kept for each connection."""
MEDIUM_BYTES: Final = 64 << 10
"""A request up to this size is waited for without a thread. A buffer as large is there while it comes."""
_COMES_FROM_BYTES: Final = 8 << 10
"""Once so much of a request is here, it is believed that the rest comes, too."""
_GROWTH: Final = 4
"""Times that a buffer is larger after it was full."""
_SLOWEST_BYTES: Final = 64 << 10
"""What comes of a large request at the least within one's patience."""


class BadFrame(Exception):
    """What came is no request, or one that is too large: the connection is of no use any more."""


class IdleTooLong(BadFrame):
    """The client sends nothing any more. It may have nothing to say."""


class FrameReader:
    """Cuts what comes into requests. For one thread.

    A request begun must be there within ``patience_s`` for each 64 KiB of it; between two there may be ``idle_s``.
    One that is larger than ``control_limit_bytes`` must be a Produce request.
    """

    def __init__(
        self, transport: Transport, pool: BufferPool, *, limit_bytes: int, control_limit_bytes: int | None = None,
        patience_s: float, idle_s: float,
    ) -> None:  # fmt: skip
        self.limit_bytes = limit_bytes
        self.deadline_s = float("inf")
        """By `time.monotonic`, when nothing is waited for any more, whatever has come."""
        self._control_limit_bytes = limit_bytes if control_limit_bytes is None else control_limit_bytes
        self._transport = transport
        self._pool = pool
        self._patience_s = patience_s
        self._idle_s = idle_s
        self._small = self._buffer = bytearray(_SMALL_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._since_s = time.monotonic()
        """When the client was last seen to be between two requests."""
        self._large: Lease | None = None
        self._frame: memoryview | None = None

    @property
    def has_more(self) -> bool:
        """Whether the next request has begun to come."""
        return self._end > self._begin

    # ------------------------------------------------------------ what is there already

    def receive_now(self) -> bool:
        """Take what has come, as far as it goes; False at the end. Raises `Idle` where nothing has.

        Take all that is `ready` before.
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
            raise BadFrame("it ended in the middle of a request")
        if not self._end:
            self._since_s = time.monotonic()
        self._end += received
        return received > 0

    def ready(self) -> memoryview | None:
        """The next request, if all of it is here; its bytes are its receiver's until more is received.

        Raises `BadFrame` for one that is larger than it may be, as soon as it says so.
        """
        at = self._begin + LENGTH_BYTES
        if at > self._end:
            return None
        size = self._size_at(self._begin)
        if size > self._control_limit_bytes and at + _KEY_BYTES <= self._end:  # whether all of it is here or not
            self._check_key(size, at)
        if at + size > self._end:
            return None
        self._begin = at + size
        self._since_s = time.monotonic()
        return self._view[at : at + size]

    @property
    def is_cut_off(self) -> bool:
        """Whether the next request is larger than the buffer, and coming: the rest of it is likely to be there."""
        return self._brings_more_than(len(self._buffer))

    @property
    def is_large(self) -> bool:
        """Whether the next request wants a buffer of its own: only `next` brings it."""
        return self._brings_more_than(MEDIUM_BYTES)

    def _brings_more_than(self, size_bytes: int) -> bool:
        """That it says so is not enough: who says it and sends nothing costs neither a thread nor a buffer."""
        at = self._begin
        return self._end - at >= _COMES_FROM_BYTES and self._size_at(at) + LENGTH_BYTES > size_bytes

    @property
    def is_late(self) -> bool:
        """Whether `deadline_s` has come."""
        return time.monotonic() >= self.deadline_s

    def is_overdue(self) -> bool:
        """Whether nothing has come for too long, of who is asked for what is there."""
        return time.monotonic() - self._since_s > (self._patience_s if self.has_more else self._idle_s)

    def _size_at(self, at: int) -> int:
        size = int.from_bytes(self._buffer[at : at + LENGTH_BYTES], "big", signed=True)
        if not 0 <= size <= self.limit_bytes:
            raise BadFrame(f"a request of {size} bytes, where at most {self.limit_bytes} are taken")
        return size

    # ------------------------------------------------------------ what comes

    def next(self, *, leaves: bool = False) -> memoryview | None:
        """The next request, without its length; None at the end. Its bytes are its receiver's until the next call.

        Raises `BadFrame`, and OSError of the connection; with ``leaves`` also `Idle`, when none has begun for a while.
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
                raise IdleTooLong("no request came for too long") from None
            if not is_there:
                if has_begun:
                    raise BadFrame("it ended in the middle of a request")
                return None
        at = self._begin
        size = self._size_at(at)
        self._begin += LENGTH_BYTES
        if size > self._control_limit_bytes:
            self._check_that_it_brings_records(size)
        if size > len(self._buffer):
            return self._receive_large(size)
        if self._begin + size > len(self._buffer):
            self._move_to_front()
        ends_s = time.monotonic() + self._patience_s if self._end - self._begin < size else 0.0
        while self._end - self._begin < size:
            if not self._fill(ends_s):
                raise BadFrame("it ended in the middle of a request")
        frame = self._view[self._begin : self._begin + size]
        self._begin += size
        return frame

    def _check_that_it_brings_records(self, size: int) -> None:
        """Before there is a buffer for it."""
        ends_s = time.monotonic() + self._patience_s
        while self._end - self._begin < _KEY_BYTES:
            if not self._fill(ends_s):
                raise BadFrame("it ended in the middle of a request")
        self._check_key(size, self._begin)

    def _check_key(self, size: int, at: int) -> None:
        key = int.from_bytes(self._buffer[at : at + _KEY_BYTES], "big", signed=True)
        if key != PRODUCE:
            raise BadFrame(
                f"a request of {size} bytes and API key {key}, where at most {self._control_limit_bytes} are taken"
            )

    def release(self) -> None:
        """Nobody uses the last request's bytes any more."""
        if self._frame is not None:
            self._frame.release()
            self._frame = None
        if self._large is not None:
            self._large.give_back()
            self._large = None

    def _fill(self, ends_s: float, *, leaves: bool = False) -> bool:
        """Receive something; False at the end."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._buffer):
            self._move_to_front()
        received = self._receive(self._view[self._end :], ends_s, leaves=leaves)
        self._end += received
        return received > 0

    def _receive_large(self, size: int) -> memoryview:
        """In a buffer that grows with what comes: who claims much and sends little has little."""
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
                    raise BadFrame("it ended in the middle of a request")
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
                raise BadFrame("it did not say who it is in time")
            if now_s >= ends_s:  # also for who sends a byte now and then
                raise BadFrame("nothing came for too long, or next to nothing")
            try:
                return self._transport.receive_into(view)
            except Idle:
                if leaves:
                    raise

    def _use(self, buffer: bytearray) -> None:
        """Go on in another buffer. Requests that were handed out keep the one they are in."""
        left = self._end - self._begin
        buffer[:left] = self._view[self._begin : self._end]
        self._buffer, self._view = buffer, memoryview(buffer)
        self._begin, self._end = 0, left

    def _move_to_front(self) -> None:
        left = self._end - self._begin
        self._buffer[:left] = self._buffer[self._begin : self._end]
        self._begin, self._end = 0, left
