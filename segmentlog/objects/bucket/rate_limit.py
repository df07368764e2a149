"""Limit the upload bandwidth. All threads that upload through one `RateLimiter` share its limit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from segmentlog.arguments import as_int
from segmentlog.objects.bucket.base import Data
from segmentlog.storage import fork_safety
from segmentlog.topics.compaction_scheduler import Throttle

_PIECE_BYTES: Final = 256 << 10


class RateLimiter:
    """An upload limit of ``bytes_per_s``, with bursts of a fifth of a second; None means no limit. Thread-safe."""

    def __init__(self, bytes_per_s: int | None = None) -> None:
        if bytes_per_s is not None:
            bytes_per_s = as_int("ship_bytes_per_s", bytes_per_s, 1)
        self.is_limited = bytes_per_s is not None
        self._throttle = Throttle(bytes_per_s)
        self._mutex = fork_safety.lock(self, "_mutex")

    def wait(self, size_bytes: int) -> None:
        """Sleep until ``size_bytes`` may be sent."""
        with self._mutex:
            wait_s = self._throttle.wait_s(size_bytes)
        time.sleep(wait_s)

    def paced_pieces(self, data: Data) -> Iterator[memoryview]:
        """Yield the data in pieces, each as soon as the limit allows it."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self.wait(len(piece))
            yield piece
