"""Stdout of which it is known how much its reader took: a pipe holds bytes that nobody may ever read.

What `write` accepted waits in the pipe, 64 KiB as a rule. Linux tells how much does (FIONREAD, at either
end, and also once the reader is gone), so the difference is what the reader took out. Of files and
terminals what was accepted is taken; of sockets, too, though nobody can know.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from segmentlog.consuming.consumer import Consumer

_TICK_S: Final = 0.05
_YIELDS: Final = 20
"""So often the processor is offered to the reader before it is waited for in steps of time."""
_SHORTEST_S: Final = 20e-6


class Stdout:
    """Writes to stdout past Python's buffer, and follows what becomes of it. Make it once nothing else writes there."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
        self._fd = sys.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLERR)
        self.is_pipe = stat.S_ISFIFO(os.fstat(self._fd).st_mode)
        self.written_bytes = 0

    def write(self, text: bytes) -> None:
        """Write all of it. Raises `ReaderGone`; `written_bytes` is true however it ends."""
        left = memoryview(text)
        while left:
            written = self._out.write(left)
            if written is None:  # somebody made it non-blocking
                select.select([], [self._fd], [])
                continue
            self.written_bytes += written
            left = left[written:]

    @property
    def taken_bytes(self) -> int:
        """How many of the written bytes the reader took, at least: others may have written into the same pipe."""
        if not self.is_pipe:
            return self.written_bytes
        try:
            waiting = int.from_bytes(fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        except OSError:  # not Linux: what was accepted has to count
            return self.written_bytes
        return max(self.written_bytes - waiting, 0)

    def is_abandoned(self, wait_s: float = 0.0) -> bool:
        """Whether nobody reads the pipe any more; waits so long for that."""
        return any(events & select.POLLERR for _, events in self._poll.poll(wait_s * 1000))

    def wait_taken(self, wait_s: float, between: Callable[[], bool] = lambda: True) -> bool:
        """Wait until the reader has taken everything, so long at most; False when it has not, or is gone.

        ``between`` is called every now and then, and ends the waiting by returning False.
        """
        ends_s = time.monotonic() + wait_s
        tries = 0
        while self.taken_bytes < self.written_bytes:
            tries += 1
            if tries <= _YIELDS:
                os.sched_yield()
                continue
            pause_s = _SHORTEST_S * 2 ** min(tries - _YIELDS, 20)
            if pause_s < _TICK_S / 50:
                time.sleep(pause_s)  # poll counts in milliseconds
                if self.is_abandoned():
                    return False
            elif self.is_abandoned(min(pause_s, _TICK_S)):
                return False
            if time.monotonic() >= ends_s or not between():
                return False
        return True


def end_with_stdout(consumer: Consumer) -> None:
    """End following once nobody reads stdout any more, even if nothing is ever appended again."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLERR)
        if any(events & select.POLLERR for _, events in poll.poll()):
            consumer.wakeup()

    threading.Thread(target=watch, daemon=True).start()
