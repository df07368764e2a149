"""Memory for large requests, used again: making a megabyte costs as much as checking what comes into it."""

from __future__ import annotations

import threading
from typing import Final

SMALLEST: Final = 64 << 10
_LARGEST_KEPT: Final = 8 << 20
_KEPT_BYTES: Final = 32 << 20


class BufferPool:
    """Buffers of sizes that are powers of two, at most so many bytes of them unused. Thread-safe.

    A new one takes memory only as it is filled: who claims a large request and sends nothing costs nothing.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._mutex = threading.Lock()
        self._free: dict[int, list[bytearray]] = {}
        self._kept_bytes = kept_bytes
        self._free_bytes = 0

    def take(self, size_bytes: int) -> bytearray:
        """A buffer of at least that size; what is in it is somebody else's."""
        size = max(SMALLEST, 1 << (size_bytes - 1).bit_length())
        if size > _LARGEST_KEPT:
            return bytearray(size_bytes)
        with self._mutex:
            free = self._free.get(size)
            if free:
                self._free_bytes -= size
                return free.pop()
        return bytearray(size)

    def give_back(self, buffer: bytearray) -> None:
        """Nobody uses the buffer any more."""
        size = len(buffer)
        if size > _LARGEST_KEPT or size & (size - 1):
            return
        with self._mutex:
            if self._free_bytes + size <= self._kept_bytes:
                self._free.setdefault(size, []).append(buffer)
                self._free_bytes += size
