"""Reads and encodes new records of a topic once for all clients that stream it.

One thread reads for all broadcasts. It puts the encoded chunks of a topic into a ring, and each listener sends them at
its own pace. The ring has a size limit. When it is full, the thread waits for the slowest listener, at most one second
if other listeners are waiting. A listener that is too slow is removed from the ring and reads the log itself. A
listener that starts at earlier offsets also reads the log itself. So each listener receives every record exactly once.
A listener that reads the log itself joins the ring once it has caught up.

    ring       chunks [first, next), each with the positions after it
    positions  positions after the last chunk, where the thread continues to read
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from segmentlog.consuming.wakeup import announce_waiting
from segmentlog.errors import SegmentlogError
from segmentlog.http.rest.event_ids import EventChunk, StreamView, check_partitions, read_events, topic_mark
from segmentlog.storage import fork_safety
from segmentlog.storage.watch import Watch

if TYPE_CHECKING:
    from segmentlog.http.context import HttpContext
    from segmentlog.log.partition import Partition
    from segmentlog.topics.topic_registry import Topic

logger = logging.getLogger("segmentlog.http")

RING_BYTES: Final = 8 << 20
_SLOW_LISTENER_S: Final = 1.0
_POLL_S: Final = 1.0
_DURABLE_POLL_S: Final = 0.02
"""Readers are not notified when records become durable, so the thread polls."""


class BroadcastListener:
    """A client that streams a topic. Used by the event loop, except `index`."""

    __slots__ = ("index", "positions", "wakeup")

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions: tuple[int, ...] = tuple(positions)
        self.index = -1
        """Number of the next chunk; -1 if the listener reads the log itself."""
        self.wakeup = asyncio.Event()

    @property
    def is_live(self) -> bool:
        """Whether the listener takes chunks from the ring."""
        return self.index >= 0


class TopicBroadcast:
    """Ring of encoded chunks of one topic in one view."""

    def __init__(self, topic: Topic, view: StreamView, loop: asyncio.AbstractEventLoop) -> None:
        self.topic = topic
        self.view = view
        self.mark = topic_mark(topic)
        self.loop = loop
        self.listeners: set[BroadcastListener] = set()
        self.logs: list[Partition] = topic.partitions()
        self.failure_count = 0
        """Number of failures. After each failure every listener reads the log itself, and so gets the error."""
        self.is_full = False
        """Whether the thread waits for free space in the ring. The listener that frees it interrupts the wait."""
        self._mutex = fork_safety.lock(self, "_mutex")
        self._ring: deque[EventChunk] = deque()
        self._size_bytes = 0
        self._first = 0
        self._positions: tuple[int, ...] = (0,) * len(self.logs)
        self._first_partition = 0
        """Partition to read first in the next cycle: the one after that of the last chunk."""
        self._version = 0
        """Grows when positions change without a new chunk. Chunks that were read under an older version are dropped."""
        self._full_since_s = 0.0
        self._is_waking = False
        self._counted_s = time.monotonic()

    # ------------------------------------------------------------ listeners

    def try_join(self, listener: BroadcastListener) -> bool:
        """Attach a listener to the ring if its positions match those after a chunk, or if the ring has no listener."""
        with self._mutex:
            positions = listener.positions
            if not any(one.is_live for one in self.listeners):
                self._ring.clear()
                self._size_bytes = 0
                self._positions, self._first = positions, self._next
                self._version += 1
                listener.index = self._first
                return True
            if positions == self._positions:
                listener.index = self._next
                return True
            for number, piece in enumerate(self._ring, self._first + 1):
                if piece.after == positions:
                    listener.index = number
                    return True
            return False

    def target(self, positions: Sequence[int]) -> tuple[int, ...] | None:
        """Return the positions up to which a listener must read the log to join the ring.

        Return None if the listener is ahead of the ring in a partition.
        """
        with self._mutex:
            target_positions = self._positions
        behind = len(target_positions) == len(positions) and all(map(int.__le__, positions, target_positions))
        return target_positions if behind else None

    def take(self, listener: BroadcastListener) -> EventChunk | None:
        """Return the next chunk of a live listener; None if there is none yet or the listener was removed."""
        with self._mutex:
            if listener.index < self._first:
                listener.index = -1
                return None
            if listener.index >= self._next:
                listener.wakeup.clear()
                return None
            piece = self._ring[listener.index - self._first]
            listener.index += 1
            if listener.index - 1 == self._first:
                self._drop_delivered()
            return piece

    def _drop_delivered(self) -> None:
        """Drop chunks that every live listener has taken."""
        least = min((one.index for one in self.listeners.copy() if one.is_live), default=self._next)
        while self._first < least:
            self._size_bytes -= len(self._ring.popleft().data)
            self._first += 1

    @property
    def _next(self) -> int:
        return self._first + len(self._ring)

    def remove_listener(self, listener: BroadcastListener) -> None:
        """Remove a listener."""
        with self._mutex:
            self.listeners.discard(listener)
            self._drop_delivered()

    # ------------------------------------------------------------ the thread

    def advance(self) -> bool:
        """Read new records of each partition into the ring. Return True if there were any, or if reading failed."""
        with self._mutex:
            if not any(one.is_live for one in self.listeners):
                return False
            if not self._has_room():
                return False
            positions, version = self._positions, self._version
        is_any = False
        try:
            self._open_new_partitions()
            if len(positions) < len(self.logs):
                positions = (*positions, *(log.log_start_offset for log in self.logs[len(positions) :]))
            for piece in read_events(self.logs, self.mark, positions, self.view, None, self._first_partition):
                with self._mutex:
                    if self._version != version:
                        return True
                    self._ring.append(piece)
                    self._size_bytes += len(piece.data)
                    self._positions = piece.after
                    self._first_partition = piece.partition + 1
                    is_any = True
                    if self._size_bytes >= RING_BYTES:
                        break
                self.wake()
        except Exception as error:
            # Catch everything, also MemoryError: all broadcasts share the thread, and the listeners can read the log.
            if not isinstance(error, SegmentlogError | OSError):
                logger.exception("the broadcast of topic %s failed; its listeners read the log", self.topic.name)
            self.detach_listeners()
            is_any = True
        if is_any:
            self.wake()
        return is_any

    def detach_listeners(self) -> None:
        """Make every listener read the log itself from its own positions, after a failure."""
        with self._mutex:
            self._version += 1
            self.failure_count += 1
            for one in self.listeners:
                one.index = -1
        self.wake()

    def _has_room(self) -> bool:
        if self._size_bytes < RING_BYTES:
            self.is_full, self._full_since_s = False, 0.0
            return True
        now_s = time.monotonic()
        self.is_full = True
        if not self._full_since_s:
            self._full_since_s = now_s
        live = [one for one in self.listeners.copy() if one.is_live]
        is_waited_for = any(one.index == self._next for one in live)
        if now_s - self._full_since_s >= _SLOW_LISTENER_S and is_waited_for:
            # Remove the listeners in the older half of the ring: they read the log.
            for one in live:
                if one.index < self._first + len(self._ring) / 2:
                    one.index = -1
            self._drop_delivered()
            self._full_since_s = 0.0
            self.wake()
        return self._size_bytes < RING_BYTES

    def _open_new_partitions(self) -> None:
        if time.monotonic() - self._counted_s >= _POLL_S:
            self._counted_s = time.monotonic()
            count = self.topic.partition_count
            if count > len(self.logs):
                check_partitions(self.topic)
                self.logs = self.topic.partitions()

    def wake(self) -> None:
        """Wake all waiting listeners. Any thread may call it."""
        if not self._is_waking:
            self._is_waking = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self.loop.call_soon_threadsafe(self._wake_in_loop)

    def _wake_in_loop(self) -> None:
        self._is_waking = False
        for listener in self.listeners.copy():
            listener.wakeup.set()


_Key = tuple[str, StreamView, int]


class BroadcastHub:
    """All broadcasts of a server, and the thread that reads for them. The thread ends with the last listener.

    Event loops call `join` and `leave`.
    """

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._mutex = fork_safety.lock(self, "_mutex")
        self._broadcasts: dict[_Key, TopicBroadcast] = {}
        self._watch: Watch | None = None

    def join(
        self, topic: Topic, view: StreamView, listener: BroadcastListener, broadcast: TopicBroadcast
    ) -> TopicBroadcast:
        """Add a listener to the existing broadcast of this topic and view, or to the given one."""
        key = (topic.id, view, id(asyncio.get_running_loop()))
        with self._mutex:
            broadcast = self._broadcasts.setdefault(key, broadcast)
            broadcast.listeners.add(listener)
            if self._watch is None:
                self._watch = Watch()
                threading.Thread(
                    target=self._run, args=(self._watch,), name="segmentlog-http-tail", daemon=True
                ).start()
        return broadcast

    def leave(self, broadcast: TopicBroadcast, listener: BroadcastListener) -> None:
        """Remove a listener."""
        broadcast.remove_listener(listener)
        with self._mutex:
            for key, one in list(self._broadcasts.items()):
                if one is broadcast and not broadcast.listeners:
                    del self._broadcasts[key]
        self.interrupt()

    def interrupt(self) -> None:
        """Make the thread read again at once."""
        with self._mutex:
            if self._watch is not None:
                self._watch.interrupt()

    def _run(self, watch: Watch) -> None:
        try:
            while broadcasts := self._active_broadcasts(watch):
                try:
                    self._run_cycle(watch, broadcasts)
                except Exception:
                    logger.exception("reading for event streams failed; their listeners read the log")
                    for broadcast in broadcasts:
                        broadcast.detach_listeners()
                    time.sleep(_POLL_S)
        finally:
            with self._mutex:
                if self._watch is watch:  # the thread ends because of an error: the next listener starts a new thread
                    self._watch = None
            watch.close()

    def _active_broadcasts(self, watch: Watch) -> list[TopicBroadcast]:
        """Return the broadcasts to read; an empty list ends the thread."""
        with self._mutex:
            broadcasts = list(self._broadcasts.values())
            if not broadcasts or self._context.is_closing:
                for broadcast in broadcasts:
                    broadcast.wake()
                self._watch = None
                return []
            return broadcasts

    def _run_cycle(self, watch: Watch, broadcasts: list[TopicBroadcast]) -> None:
        watch.drain()
        if any([broadcast.advance() for broadcast in broadcasts]):
            return
        must_poll = False
        for broadcast in broadcasts:
            with contextlib.suppress(SegmentlogError, OSError):
                must_poll |= announce_waiting(watch, broadcast.logs)
        if any([broadcast.advance() for broadcast in broadcasts]):
            return
        is_durable = any(broadcast.view.durable_only for broadcast in broadcasts)
        watch.wait(_DURABLE_POLL_S if is_durable else _POLL_S, poll=must_poll)
