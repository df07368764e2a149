"""A bounded buffer of log records that are not appended yet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import msgspec

from segmentlog.records import Headers
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_safe import InterruptSafeCondition

_CHECK_S = 0.001


class Line(msgspec.Struct, frozen=True, gc=False):
    """One log record to append."""

    value: bytes
    key: bytes | None
    headers: Headers
    timestamp_ms: int
    passed_ms: int
    """Wall clock when the program logged it. The timestamp limits of the topic are checked against this time."""

    @property
    def size_bytes(self) -> int:
        """Approximate bytes that this line takes in the buffer."""
        return len(self.value) + 200


class Buffer:
    """Bounded queue of lines. Thread-safe. In a forked child it starts empty, because the parent appends the lines."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        fork_safety.on_fork(self, "_reset_after_fork")
        self._reset_after_fork()

    def _reset_after_fork(self) -> None:
        self._lines: SimpleQueue[Line] = SimpleQueue()
        self._removed = InterruptSafeCondition()
        self._bytes = self._put = self._done = self.dropped = 0
        self._is_stuck = False

    def put(self, line: Line, block_s: float) -> bool:
        """Add a line, after waiting up to ``block_s`` for room. Return False if the line was dropped for lack of room.

        After such a drop, later calls do not wait until the buffer has room again.
        """
        ends_s = 0.0
        while True:
            with self._mutex:
                if self._bytes + line.size_bytes <= self._max_bytes or not self._bytes:
                    self._bytes += line.size_bytes
                    self._put += 1
                    self._lines.put(line)
                    return True
            now_s = time.monotonic()
            ends_s = ends_s or now_s + block_s
            if self._is_stuck or now_s >= ends_s:
                self._is_stuck = True
                self.drop(1)
                return False
            time.sleep(min(_CHECK_S, ends_s - now_s))

    def take(self, max_bytes: int) -> Iterator[Line]:
        """Yield lines of at most about ``max_bytes``, oldest first. The caller must pass each to `remove` later."""
        left_bytes = max_bytes
        while left_bytes > 0:
            try:
                line = self._lines.get_nowait()
            except Empty:
                return
            left_bytes -= line.size_bytes
            yield line

    def remove(self, lines: list[Line]) -> None:
        """Remove lines that `take` returned, after they were appended or dropped."""
        if lines:
            with self._mutex:
                self._bytes -= sum(line.size_bytes for line in lines)
                self._done += len(lines)
                self._is_stuck = False
            self._removed.notify_all()

    def drop(self, count: int) -> None:
        """Add to the number of dropped lines."""
        with self._mutex:
            self.dropped += count

    @property
    def is_empty(self) -> bool:
        """Whether every line was appended or dropped."""
        return self._done >= self._put

    @property
    def count(self) -> int:
        """Number of lines that are not appended yet."""
        return self._put - self._done

    def wait(self, timeout_s: float) -> bool:
        """Wait until all present lines are appended or dropped; return False after ``timeout_s``."""
        upto = self._put
        return self._removed.wait_for(lambda: self._done >= upto, timeout_s)
