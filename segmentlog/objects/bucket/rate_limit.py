"""How fast things are put, where somebody has set a limit: all threads that put share it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from segmentlog.arguments import as_int
from segmentlog.objects.bucket.base import Data
from segmentlog.storage import fork_safety
from segmentlog.topics.compaction_scheduler import Throttle

_PIECE_BYTES: Final = 256 << 10


class Pace:
    """Lets ``bytes_per_s`` through, with a burst of a fifth of a second; None for no limit. Thread-safe."""

    def __init__(self, bytes_per_s: int | None = None) -> None:
        if bytes_per_s is not None:
            bytes_per_s = as_int("ship_bytes_per_s", bytes_per_s, 1)
        self.is_limited = bytes_per_s is not None
        self._throttle = Throttle(bytes_per_s)
        self._mutex = fork_safety.lock(self, "_mutex")

    def wait(self, size_bytes: int) -> None:
        """Sleep for as long as so many bytes take."""
        with self._mutex:
            wait_s = self._throttle.wait_s(size_bytes)
        time.sleep(wait_s)

    def pieces(self, data: Data) -> Iterator[memoryview]:
        """All of it, piece by piece, each when its time has come."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self.wait(len(piece))
            yield piece
