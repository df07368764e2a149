"""Memory for large requests: used again, bounded for all of them together, and taken only as it is filled.

Making a megabyte costs as much as checking what comes into it, so buffers are kept. Who claims a large request and
sends nothing of it costs nothing: its buffer grows with what has come, by doubling. What has come takes room from a
budget of all connections. When that is used up, who has been sending for the longest makes room: a hundred slow
clients are cut off one after the other, and do not keep those out that send what they said.
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
_LOOK_S: Final = 0.2
_SPARED_S: Final = 1.0
"""Who has been sending for less than that is not cut off for others."""


class NoRoom(Exception):
    """There was no room for a request for too long, or its sender made room for others."""


class Lease:
    """The buffer of one request that is coming or being done. Give it back once."""

    __slots__ = ("_pool", "begun_s", "buffer", "cut", "is_complete", "is_cut")

    def __init__(self, pool: BufferPool, cut: Callable[[], None]) -> None:
        self._pool = pool
        self.buffer = bytearray()
        self.begun_s = time.monotonic()
        self.cut = cut
        self.is_cut = self.is_complete = False

    def grow(self, size_bytes: int, filled_bytes: int, patience_s: float) -> None:
        """Have room for at least so many bytes; the ``filled_bytes`` first are kept. Raises `NoRoom`."""
        self._pool._grow(self, size_bytes, filled_bytes, patience_s)

    def complete(self) -> None:
        """All has come: it is not cut off any more."""
        self.is_complete = True

    def give_back(self) -> None:
        """Nobody uses the buffer any more."""
        self._pool._give_back(self)


class BufferPool:
    """Buffers of sizes that are powers of two, at most so many bytes of them unused, and in use. Thread-safe."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES, bound_bytes: int = 1 << 62) -> None:
        self._condition = threading.Condition()
        self._free: dict[int, list[bytearray]] = {}
        self._kept_bytes = kept_bytes
        self._free_bytes = 0
        self._bound_bytes = bound_bytes
        self._used_bytes = 0
        self._leases: OrderedDict[Lease, None] = OrderedDict()
        """In the order in which they were begun."""

    @property
    def used_bytes(self) -> int:
        """Of requests that are coming or being done."""
        return self._used_bytes

    def lease(self, cut: Callable[[], None]) -> Lease:
        """For one request. ``cut`` ends its connection, from any thread, and waits for nobody."""
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
        self._keep(former)

    def _make_room_locked(self, lease: Lease, more_bytes: int, patience_s: float) -> None:
        """Wait until there are so many bytes, and have somebody cut off if there are not soon."""
        ends_s = time.monotonic() + patience_s
        while not lease.is_cut and self._is_too_much(lease, more_bytes):
            now_s = time.monotonic()
            if now_s >= ends_s:
                raise NoRoom("no room for a request of that size")
            for one in self._leases:
                if one.begun_s > now_s - _SPARED_S:
                    break
                if one is not lease and not one.is_complete and not one.is_cut and one.buffer:
                    one.is_cut = True
                    one.cut()
                    break
            self._condition.wait(_LOOK_S)
        if lease.is_cut:
            raise NoRoom("it came too slowly, and others needed the room")

    def _is_too_much(self, lease: Lease, more_bytes: int) -> bool:
        # Who is alone has as much as a request may have at all.
        return self._used_bytes > len(lease.buffer) and self._used_bytes + more_bytes > self._bound_bytes

    def _give_back(self, lease: Lease) -> None:
        buffer, lease.buffer = lease.buffer, bytearray()
        with self._condition:
            if self._leases.pop(lease, lease) is not None:
                return
            self._used_bytes -= len(buffer)
            self._condition.notify_all()
        self._keep(buffer)

    def _keep(self, buffer: bytearray) -> None:
        size = len(buffer)
        if not SMALLEST <= size <= _LARGEST_KEPT:
            return
        with self._condition:
            if self._free_bytes + size <= self._kept_bytes:
                self._free.setdefault(size, []).append(buffer)
                self._free_bytes += size
