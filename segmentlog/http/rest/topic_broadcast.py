"""What is appended to a topic, read and encoded once for all who listen.

One thread reads for all tails. What it reads of one goes into a ring of pieces, and each listener sends them at its
own pace. The ring has a bound: when it is full, the thread waits for the slowest listener, a second at the most if
others wait for more. One that is too slow for that falls out of the ring, and reads the log by itself, as does one
that begins further back: the log is the buffer, and nobody gets anything twice, or misses any of it. It joins again
once it stands where the ring is.

    ring      pieces [first, next), each with the positions behind it
    positions those behind the last piece: where the thread reads on
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
from segmentlog.http.rest.event_ids import Piece, View, check_partitions, mark_of, read
from segmentlog.storage import fork_safety
from segmentlog.storage.watch import Watch

if TYPE_CHECKING:
    from segmentlog.http.context import Site
    from segmentlog.log.partition import Partition
    from segmentlog.topics.topic_registry import Topic

logger = logging.getLogger("segmentlog.http")

RING_BYTES: Final = 8 << 20
_PATIENCE_S: Final = 1.0
_LOOK_S: Final = 1.0
_DURABLE_LOOK_S: Final = 0.02
"""Nobody is woken when something becomes durable."""


class Listener:
    """Somebody who listens to a tail. All of it is for the event loop, but for `index`."""

    __slots__ = ("index", "positions", "woken")

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions: tuple[int, ...] = tuple(positions)
        self.index = -1
        """Of the piece that comes next; -1: it is not in the ring, and reads by itself."""
        self.woken = asyncio.Event()

    @property
    def is_live(self) -> bool:
        """Whether it is given pieces of the ring."""
        return self.index >= 0


class Tail:
    """One topic, as one view shows it."""

    def __init__(self, topic: Topic, view: View, loop: asyncio.AbstractEventLoop) -> None:
        self.topic = topic
        self.view = view
        self.mark = mark_of(topic)
        self.loop = loop
        self.listeners: set[Listener] = set()
        self.logs: list[Partition] = topic.partitions()
        self.troubles = 0
        """How often the thread could not read on: each listener then reads by itself, and meets the reason."""
        self.is_full = False
        """The thread waits for room in the ring: who makes some tells it."""
        self._mutex = fork_safety.lock(self, "_mutex")
        self._ring: deque[Piece] = deque()
        self._size_bytes = 0
        self._first = 0
        self._positions: tuple[int, ...] = (0,) * len(self.logs)
        self._first_partition = 0
        """Read first the next time: the one after that of the last piece, when the ring was full then."""
        self._version = 0
        """Changes when positions do without a piece: what was read for the old ones does not count."""
        self._waits_since_s = 0.0
        self._is_waking = False
        self._counted_s = time.monotonic()

    # ------------------------------------------------------------ listeners

    def try_join(self, listener: Listener) -> bool:
        """Give it what comes from now on, if it stands where a piece ends, or if nobody is given anything yet."""
        with self._mutex:
            here = listener.positions
            if not any(one.is_live for one in self.listeners):
                self._ring.clear()
                self._size_bytes = 0
                self._positions, self._first = here, self._next
                self._version += 1
                listener.index = self._first
                return True
            if here == self._positions:
                listener.index = self._next
                return True
            for number, piece in enumerate(self._ring, self._first + 1):
                if piece.after == here:
                    listener.index = number
                    return True
            return False

    def target(self, positions: Sequence[int]) -> tuple[int, ...] | None:
        """Up to where somebody who is behind in every partition reads to join; None for one who is ahead in some."""
        with self._mutex:
            wanted = self._positions
        behind = len(wanted) == len(positions) and all(map(int.__le__, positions, wanted))
        return wanted if behind else None

    def take(self, listener: Listener) -> Piece | None:
        """The next piece for a live listener; None when there is none yet, or when it fell out of the ring."""
        with self._mutex:
            if listener.index < self._first:
                listener.index = -1
                return None
            if listener.index >= self._next:
                listener.woken.clear()
                return None
            piece = self._ring[listener.index - self._first]
            listener.index += 1
            if listener.index - 1 == self._first:
                self._drop_taken()
            return piece

    def _drop_taken(self) -> None:
        """Let go of pieces that every live listener has taken."""
        least = min((one.index for one in self.listeners.copy() if one.is_live), default=self._next)
        while self._first < least:
            self._size_bytes -= len(self._ring.popleft().data)
            self._first += 1

    @property
    def _next(self) -> int:
        return self._first + len(self._ring)

    def forget(self, listener: Listener) -> None:
        """It listens no more."""
        with self._mutex:
            self.listeners.discard(listener)
            self._drop_taken()

    # ------------------------------------------------------------ the thread

    def advance(self) -> bool:
        """Read what there is of each partition into the ring; whether there was anything, or no room for it."""
        with self._mutex:
            if not any(one.is_live for one in self.listeners):
                return False
            if not self._has_room():
                return False
            positions, version = self._positions, self._version
        is_any = False
        try:
            self._see_new_partitions()
            if len(positions) < len(self.logs):
                positions = (*positions, *(log.log_start_offset for log in self.logs[len(positions) :]))
            for piece in read(self.logs, self.mark, positions, self.view, None, self._first_partition):
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
            # Whatever it is, a MemoryError too: the thread is everybody's, and those who listen here read on without.
            if not isinstance(error, SegmentlogError | OSError):
                logger.exception("the tail of %s", self.topic.name)
            self.give_up()
            is_any = True
        if is_any:
            self.wake()
        return is_any

    def give_up(self) -> None:
        """It cannot be read on: each listener reads by itself from where it is, and meets the reason."""
        with self._mutex:
            self._version += 1
            self.troubles += 1
            for one in self.listeners:
                one.index = -1
        self.wake()

    def _has_room(self) -> bool:
        if self._size_bytes < RING_BYTES:
            self.is_full, self._waits_since_s = False, 0.0
            return True
        now_s = time.monotonic()
        self.is_full = True
        if not self._waits_since_s:
            self._waits_since_s = now_s
        live = [one for one in self.listeners.copy() if one.is_live]
        is_waited_for = any(one.index == self._next for one in live)
        if now_s - self._waits_since_s >= _PATIENCE_S and is_waited_for:
            # Who is in the older half of the ring goes on by himself.
            for one in live:
                if one.index < self._first + len(self._ring) / 2:
                    one.index = -1
            self._drop_taken()
            self._waits_since_s = 0.0
            self.wake()
        return self._size_bytes < RING_BYTES

    def _see_new_partitions(self) -> None:
        if time.monotonic() - self._counted_s >= _LOOK_S:
            self._counted_s = time.monotonic()
            count = self.topic.partition_count
            if count > len(self.logs):
                check_partitions(self.topic)
                self.logs = self.topic.partitions()

    def wake(self) -> None:
        """Let everybody who waits look again; from any thread."""
        if not self._is_waking:
            self._is_waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._wake_in_loop)

    def _wake_in_loop(self) -> None:
        self._is_waking = False
        for listener in self.listeners.copy():
            listener.woken.set()


_Key = tuple[str, View, int]


class Tails:
    """All tails of a door. `listen` and `leave` are for event loops; the thread ends with the last listener."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._mutex = fork_safety.lock(self, "_mutex")
        self._tails: dict[_Key, Tail] = {}
        self._watch: Watch | None = None

    def listen(self, topic: Topic, view: View, listener: Listener, tail: Tail) -> Tail:
        """Join the tail of that topic and view: the one that there is, or the given one."""
        key = (topic.id, view, id(asyncio.get_running_loop()))
        with self._mutex:
            tail = self._tails.setdefault(key, tail)
            tail.listeners.add(listener)
            if self._watch is None:
                self._watch = Watch()
                threading.Thread(
                    target=self._run, args=(self._watch,), name="segmentlog-http-tail", daemon=True
                ).start()
        return tail

    def leave(self, tail: Tail, listener: Listener) -> None:
        """End listening."""
        tail.forget(listener)
        with self._mutex:
            for key, one in list(self._tails.items()):
                if one is tail and not tail.listeners:
                    del self._tails[key]
        self.interrupt()

    def interrupt(self) -> None:
        """Have the thread look again."""
        with self._mutex:
            if self._watch is not None:
                self._watch.interrupt()

    def _run(self, watch: Watch) -> None:
        try:
            while tails := self._current(watch):
                try:
                    self._turn(watch, tails)
                except Exception:
                    logger.exception("reading for event streams")
                    for tail in tails:
                        tail.give_up()
                    time.sleep(_LOOK_S)
        finally:
            with self._mutex:
                if self._watch is watch:  # it is not by itself that it ends: whoever comes next begins another one
                    self._watch = None
            watch.close()

    def _current(self, watch: Watch) -> list[Tail]:
        """The tails that are read; none: it ends."""
        with self._mutex:
            tails = list(self._tails.values())
            if not tails or self._site.is_closing:
                for tail in tails:
                    tail.wake()
                self._watch = None
                return []
            return tails

    def _turn(self, watch: Watch, tails: list[Tail]) -> None:
        watch.drain()
        if any([tail.advance() for tail in tails]):
            return
        must_poll = False
        for tail in tails:
            with contextlib.suppress(SegmentlogError, OSError):
                must_poll |= announce_waiting(watch, tail.logs)
        if any([tail.advance() for tail in tails]):
            return
        is_durable = any(tail.view.durable_only for tail in tails)
        watch.wait(_DURABLE_LOOK_S if is_durable else _LOOK_S, poll=must_poll)
