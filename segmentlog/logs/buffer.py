"""What was logged and is not appended yet: bounded, without a lock that anybody holds for long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import msgspec

from segmentlog.records import Headers
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_safe import InterruptSafeCondition

_LOOK_S = 0.001


class Line(msgspec.Struct, frozen=True, gc=False):
    """One record of a log on its way."""

    value: bytes
    key: bytes | None
    headers: Headers
    timestamp_ms: int
    passed_ms: int
    """Wall clock when the program logged it: by that time a topic's limits of timestamps decide."""

    @property
    def size_bytes(self) -> int:
        """What it counts."""
        return len(self.value) + 200


class Buffer:
    """Lines in order, and counts of them. Thread-safe; a forked child has an empty one: those are its parent's."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        fork_safety.on_fork(self, "_forget_parent")
        self._forget_parent()

    def _forget_parent(self) -> None:
        self._lines: SimpleQueue[Line] = SimpleQueue()
        self._news = InterruptSafeCondition()
        self._bytes = self._put = self._done = self.dropped = 0
        self._is_stuck = False

    def put(self, line: Line, block_s: float) -> bool:
        """Add a line; waits for room up to ``block_s``, once: until there is progress others do not wait, too.

        False when there was no room: it is counted as dropped.
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
            time.sleep(min(_LOOK_S, ends_s - now_s))

    def take(self, max_bytes: int) -> Iterator[Line]:
        """Lines to append, oldest first; each is to be `done` afterwards."""
        left_bytes = max_bytes
        while left_bytes > 0:
            try:
                line = self._lines.get_nowait()
            except Empty:
                return
            left_bytes -= line.size_bytes
            yield line

    def done(self, lines: list[Line]) -> None:
        """These are appended, or given up."""
        if lines:
            with self._mutex:
                self._bytes -= sum(line.size_bytes for line in lines)
                self._done += len(lines)
                self._is_stuck = False
            self._news.notify_all()

    def drop(self, count: int) -> None:
        """So many were lost."""
        with self._mutex:
            self.dropped += count

    @property
    def is_empty(self) -> bool:
        """Whether everything was appended, or given up."""
        return self._done >= self._put

    @property
    def count(self) -> int:
        """How many lines are on their way."""
        return self._put - self._done

    def wait(self, timeout_s: float) -> bool:
        """Until what is there now was appended, or given up; False when it was not in time."""
        upto = self._put
        return self._news.wait_for(lambda: self._done >= upto, timeout_s)
