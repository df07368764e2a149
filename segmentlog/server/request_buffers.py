"""Memory for large requests: reused, limited for all connections together, and allocated as the data arrives.

Creating a buffer of one megabyte costs as much as checking its contents, so buffers are reused. A client that announces
a large request but sends nothing costs no memory: its buffer grows, by doubling, only as data arrives. All buffers
share one limit. At the limit, the pool closes the connection whose present request began first. So it closes slow
clients one after the other, and they do not block clients that send their requests quickly.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

SMALLEST: Final = 64 << 10
_LARGEST_KEPT: Final = 8 << 20
_KEPT_BYTES: Final = 32 << 20
_RECHECK_S: Final = 0.2
_SPARED_S: Final = 1.0
"""A request that began within this time is not ended in favor of others."""


class NoRoom(Exception):
    """A large request got no memory in time, or its connection was closed in favor of other requests."""


class Lease:
    """Buffer of one request from its first byte until it is done. Call `give_back` once."""

    __slots__ = ("_pool", "begun_s", "buffer", "cut", "is_complete", "is_cut")

    def __init__(self, pool: BufferPool, cut: Callable[[], None]) -> None:
        self._pool = pool
        self.buffer = bytearray()
        self.begun_s = time.monotonic()
        self.cut = cut
        self.is_cut = self.is_complete = False

    def grow(self, size_bytes: int, filled_bytes: int, patience_s: float) -> None:
        """Enlarge the buffer to at least ``size_bytes``, and retain its first ``filled_bytes``. Raise `NoRoom`."""
        self._pool._grow(self, size_bytes, filled_bytes, patience_s)

    def complete(self) -> None:
        """Mark the request as complete: its connection is no longer closed to make room."""
        self.is_complete = True

    def give_back(self) -> None:
        """Return the buffer to the pool."""
        self._pool._give_back(self)


class BufferPool:
    """Buffers of power-of-two sizes. Unused buffers and buffers in use each have a limit in bytes. Thread-safe."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES, bound_bytes: int = 1 << 62) -> None:
        self._condition = threading.Condition()
        self._free: dict[int, list[bytearray]] = {}
        self._kept_bytes = kept_bytes
        self._free_bytes = 0
        self._bound_bytes = bound_bytes
        self._used_bytes = 0
        self._leases: OrderedDict[Lease, None] = OrderedDict()
        """Leases, ordered by the start of their request."""

    @property
    def used_bytes(self) -> int:
        """Total size of the buffers in use."""
        return self._used_bytes

    def lease(self, cut: Callable[[], None]) -> Lease:
        """Return a lease for one request.

        The pool calls ``cut``, from any thread, to close the connection of the request. It must not block.
        """
        lease = Lease(self, cut)
        with self._condition:
            self._leases[lease] = None
        return lease

    def _grow(self, lease: Lease, size_bytes: int, filled_bytes: int, patience_s: float) -> None:
        size = max(SMALLEST, 1 << (size_bytes - 1).bit_length())
        if size > _LARGEST_KEPT:
            size = size_bytes
        former = lease.buffer
        if size <= len(former):
            return
        with self._condition:
            self._make_room_locked(lease, size - len(former), patience_s)
            self._used_bytes += size - len(former)
            free = self._free.get(size)
            buffer = free.pop() if free else None
            if buffer is not None:
                self._free_bytes -= size
        if buffer is None:
            buffer = bytearray(size)
        buffer[:filled_bytes] = memoryview(former)[:filled_bytes]
        lease.buffer = buffer
        self._retain(former)

    def _make_room_locked(self, lease: Lease, more_bytes: int, patience_s: float) -> None:
        """Wait until ``more_bytes`` are free. Meanwhile close the connections of slow requests."""
        ends_s = time.monotonic() + patience_s
        while not lease.is_cut and self._is_too_much(lease, more_bytes):
            now_s = time.monotonic()
            if now_s >= ends_s:
                raise NoRoom("no memory for a request of this size became free in time")
            for other in self._leases:
                if other.begun_s > now_s - _SPARED_S:
                    break
                if other is not lease and not other.is_complete and not other.is_cut and other.buffer:
                    other.is_cut = True
                    other.cut()
                    break
            self._condition.wait(_RECHECK_S)
        if lease.is_cut:
            raise NoRoom("the request arrived too slowly, and other connections needed its memory")

    def _is_too_much(self, lease: Lease, more_bytes: int) -> bool:
        # A single request may be as large as the limit of a request, even above the shared limit.
        return self._used_bytes > len(lease.buffer) and self._used_bytes + more_bytes > self._bound_bytes

    def _give_back(self, lease: Lease) -> None:
        buffer, lease.buffer = lease.buffer, bytearray()
        with self._condition:
            if self._leases.pop(lease, lease) is not None:
                return
            self._used_bytes -= len(buffer)
            self._condition.notify_all()
        self._retain(buffer)

    def _retain(self, buffer: bytearray) -> None:
        size = len(buffer)
        if not SMALLEST <= size <= _LARGEST_KEPT:
            return
        with self._condition:
            if self._free_bytes + size <= self._kept_bytes:
                self._free.setdefault(size, []).append(buffer)
                self._free_bytes += size
