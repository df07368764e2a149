"""Serve all connections that have no thread of their own from one thread.

A thread for each connection would cost two thread switches and two changes of the interpreter's lock a request, and
more with more threads. So the thread of the loop handles each quick request itself:

- A connection whose request may take long gets a thread of its own (`KafkaConnection.step` decides).
- If a handler finds during a request that it will take long, it calls `step_aside`: a new thread then steps the other
  connections.
- A request may take long unexpectedly, because another process has locked a file or the disk does not answer. A second
  thread, which checks ten times a second while there is work, then starts a new thread for the other connections.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final

from segmentlog.server.kafka_connection import KafkaConnection, StepResult

logger = logging.getLogger("segmentlog.server")

_STEP_PATIENCE_S: Final = 0.1
"""Time for which a connection may delay the others. The second thread acts after twice this time at the latest."""
_IDLE_CHECK_S: Final = 1.0
"""Interval of the check for idle connections."""


_thread = threading.local()
"""Attribute ``loop``: the loop whose connections this thread steps or has stepped."""


def step_aside() -> None:
    """Start a thread that steps the other connections. Call this before an operation that may take long.

    The calling thread continues with its connection until the step ends. The call has no effect
    outside a loop's thread.
    """
    loop: Loop | None = getattr(_thread, "loop", None)
    if loop is not None:
        loop.step_aside()


class Loop:
    """Steps connections when they receive data. Thread-safe."""

    def __init__(self, release: Callable[[KafkaConnection, StepResult], None]) -> None:
        self._release_connection = release
        """Called with a connection that ended or needs a thread of its own, after the loop removed it."""
        self._mutex = threading.Lock()
        self._epoll = select.epoll()
        self._connections: dict[int, KafkaConnection] = {}
        self._leader: threading.Thread | None = None
        self._current: KafkaConnection | None = None
        self._since_s = 0.0
        """Start of the step of the current connection (monotonic)."""
        self._steps = 0
        self._is_asleep = False
        self._woken = threading.Event()
        self._is_closed = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll.register(self._wake_read, select.EPOLLIN)

    def start(self) -> None:
        """Start the threads."""
        self._start_leader()
        threading.Thread(target=self._watch, name="segmentlog-loop-watch", daemon=True).start()

    def add(self, connection: KafkaConnection) -> None:
        """Step this connection whenever it receives data."""
        fd = connection.fileno()
        with self._mutex:
            if self._is_closed or fd < 0:
                is_ours = False
            else:
                is_ours = True
                self._connections[fd] = connection
                self._epoll.register(fd, select.EPOLLIN)
        if not is_ours:
            self._release(connection, StepResult.ENDED)

    def is_healthy(self) -> bool:
        """Return whether the thread that steps the connections is alive."""
        leader = self._leader
        return leader is not None and leader.is_alive()

    def close(self) -> None:
        """Stop stepping, and end the remaining connections. Idempotent."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
            leader = self._leader
            remaining = [other for other in self._connections.values() if other is not self._current]
            self._connections.clear()
        self._woken.set()
        os.write(self._wake_write, b"\0")
        if leader is not None and leader is not threading.current_thread():
            leader.join(2 * _STEP_PATIENCE_S)
        for connection in remaining:
            self._release(connection, StepResult.ENDED)
        self._close_files()

    def abandon(self) -> None:
        """Close the descriptors in a forked child, which are copies: the connections belong to the parent."""
        self._is_closed = True
        self._close_files()

    def _close_files(self) -> None:
        self._epoll.close()
        fds, self._wake_read, self._wake_write = (self._wake_read, self._wake_write), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    # ------------------------------------------------------------ stepping

    def _start_leader(self) -> None:
        self._leader = threading.Thread(target=self._run, name="segmentlog-loop", daemon=True)
        self._leader.start()

    def _run(self) -> None:
        me, poll = threading.current_thread(), self._epoll.poll
        _thread.loop = self
        while self._leader is me and not self._is_closed:
            try:
                events = poll()
            except (OSError, ValueError):  # closed
                return
            if self._is_asleep:
                self._woken.set()
            for fd, _ in events:
                with self._mutex:
                    if self._leader is not me:
                        return
                    connection = self._connections.get(fd)
                    self._current, self._since_s = connection, time.monotonic()
                if connection is None:
                    continue
                result = connection.step()
                self._steps += 1
                if not self._finish_step(me, fd, connection, result):
                    return

    def _finish_step(self, me: threading.Thread, fd: int, connection: KafkaConnection, result: StepResult) -> bool:
        """Put a connection back, or release it, after its step. Return False if another thread is the leader now."""
        with self._mutex:
            leads = self._leader is me and not self._is_closed
            if leads:
                self._current = None
                if result is not StepResult.STAYS:
                    self._remove_locked(fd)
        if result is not StepResult.STAYS:
            self._release(connection, result)
        elif not leads:
            self.add(connection)
        return leads

    def _release(self, connection: KafkaConnection, result: StepResult) -> None:
        try:
            self._release_connection(connection, result)
        except Exception:  # otherwise the leader would stop, and serve none of its connections any more
            logger.exception("%s: ending the connection failed", connection.client_host)

    def _remove_locked(self, fd: int) -> None:
        self._connections.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def step_aside(self) -> None:
        """Replace the calling thread as the leader, if it is the leader and steps a connection."""
        with self._mutex:
            if self._leader is threading.current_thread() and self._current is not None and not self._is_closed:
                self._replace_leader_locked(self._current)

    def _replace_leader_locked(self, connection: KafkaConnection) -> None:
        """Start a new leader thread; ``connection`` stays with the thread that steps it."""
        for fd, other in self._connections.items():
            if other is connection:
                self._remove_locked(fd)
                break
        self._current = None
        self._start_leader()

    # ------------------------------------------------------------ watching

    def _watch(self) -> None:
        steps = -1
        next_check_s = time.monotonic() + _IDLE_CHECK_S
        while not self._is_closed:
            if steps == self._steps and self._current is None:
                self._is_asleep = True
                self._woken.wait(_IDLE_CHECK_S)
                self._is_asleep = False
                self._woken.clear()
            else:
                time.sleep(_STEP_PATIENCE_S)
            steps = self._steps
            self._replace_stuck_leader()
            if time.monotonic() >= next_check_s:
                self._end_idle()
                next_check_s = time.monotonic() + _IDLE_CHECK_S

    def _replace_stuck_leader(self) -> None:
        """Start a new leader if the current connection has been stepped for too long."""
        with self._mutex:
            stuck = self._current
            if stuck is None or time.monotonic() - self._since_s < _STEP_PATIENCE_S or self._is_closed:
                return
            self._replace_leader_locked(stuck)
        logger.debug("%s: a request takes long; another thread now serves the other connections", stuck.client_host)

    def _end_idle(self) -> None:
        """End connections that have been idle for too long."""
        with self._mutex:
            quiet = [
                (fd, other)
                for fd, other in self._connections.items()
                if other is not self._current and other.is_overdue
            ]
            for fd, _ in quiet:
                self._remove_locked(fd)
        for _, connection in quiet:
            connection.log_overdue()
            self._release(connection, StepResult.ENDED)
