"""Count the bytes that the reader of stdout took: a pipe may hold bytes that are never read.

Bytes that `write` accepted wait in the pipe, usually up to 64 KiB. Linux reports the number of waiting bytes (FIONREAD,
at either end, and also after the reader is gone). All other written bytes were taken by the reader. For files,
terminals and sockets, accepted bytes count as taken, although a socket may hold undelivered bytes.
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

_POLL_S: Final = 0.05
_YIELDS: Final = 20
"""How often `wait_taken` yields the processor to the reader before it sleeps."""
_SHORTEST_S: Final = 20e-6


class StdoutWriter:
    """Unbuffered writer to stdout that counts the bytes that the reader of stdout took.

    After it is created, nothing else may write to stdout.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
        self._fd = sys.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLERR)
        self.is_pipe = stat.S_ISFIFO(os.fstat(self._fd).st_mode)
        self.written_bytes = 0

    def write(self, text: bytes) -> None:
        """Write all of ``text``. Raises `ReaderGone`. `written_bytes` is correct after an error, too."""
        left = memoryview(text)
        while left:
            written = self._out.write(left)
            if written is None:  # another process made the descriptor non-blocking
                select.select([], [self._fd], [])
                continue
            self.written_bytes += written
            left = left[written:]

    @property
    def taken_bytes(self) -> int:
        """Number of written bytes that the reader took, or fewer.

        All bytes that wait in the pipe count as written by this process, although another process may write to it as
        well.
        """
        if not self.is_pipe:
            return self.written_bytes
        try:
            waiting = int.from_bytes(fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        except OSError:  # not Linux: accepted bytes count as taken
            return self.written_bytes
        return max(self.written_bytes - waiting, 0)

    def is_abandoned(self, wait_s: float = 0.0) -> bool:
        """Return whether the pipe has no reader any more; wait up to ``wait_s`` seconds for the reader to end."""
        return any(events & select.POLLERR for _, events in self._poll.poll(wait_s * 1000))

    def wait_taken(self, wait_s: float, between: Callable[[], bool] = lambda: True) -> bool:
        """Wait until the reader took everything; return False after ``wait_s`` seconds, or if the reader is gone.

        ``between`` is called at intervals, and ends the wait by returning False.
        """
        ends_s = time.monotonic() + wait_s
        tries = 0
        while self.taken_bytes < self.written_bytes:
            tries += 1
            if tries <= _YIELDS:
                os.sched_yield()
                continue
            pause_s = _SHORTEST_S * 2 ** min(tries - _YIELDS, 20)
            if pause_s < _POLL_S / 50:
                time.sleep(pause_s)  # poll counts in milliseconds
                if self.is_abandoned():
                    return False
            elif self.is_abandoned(min(pause_s, _POLL_S)):
                return False
            if time.monotonic() >= ends_s or not between():
                return False
        return True


def stop_at_stdout_end(consumer: Consumer) -> None:
    """Stop a following consumer once the reader of stdout is gone, even if no records arrive."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLERR)
        if any(events & select.POLLERR for _, events in poll.poll()):
            consumer.wakeup()

    threading.Thread(target=watch, daemon=True).start()
