"""Limit concurrent work that takes much memory, and share the slots fairly among clients."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from segmentlog.server.request_budget import CHECK_INTERVAL_S


class FairSlots:
    """A fixed number of slots. Thread-safe.

    Waiting clients take turns: a free slot goes to the next client, for the oldest of its requests. So a client with a
    thousand waiting requests delays another client by only one request for each slot.
    """

    def __init__(self, count: int) -> None:
        self._mutex = threading.Lock()
        self._free = count
        """Number of free slots; 0 while any request waits."""
        self._waiting: OrderedDict[Hashable, deque[threading.Event]] = OrderedDict()
        """Waiting requests of each client; the client that gets the next slot is first."""

    @contextmanager
    def slot(self, client: Hashable, check: Callable[[], None]) -> Iterator[HeldSlot]:
        """Wait for a slot, and hold it during the block. Call ``check`` meanwhile, and raise its errors."""
        turn = HeldSlot(self, client, check)
        self._take(turn)
        try:
            yield turn
        finally:
            if turn.is_held:
                self._hand_over()

    @property
    def waiting_count(self) -> int:
        """Number of requests that wait for a slot."""
        with self._mutex:
            return sum(map(len, self._waiting.values()))

    def _take(self, turn: HeldSlot) -> None:
        with self._mutex:
            if self._free:
                self._free -= 1
                turn.is_held = True
                return
            given = threading.Event()
            self._waiting.setdefault(turn.client, deque()).append(given)
        try:
            while not given.wait(CHECK_INTERVAL_S):
                turn.check()
        except BaseException:
            with self._mutex:
                if given.is_set():  # the slot was assigned a moment ago
                    self._hand_over_locked()
                else:
                    self._leave_locked(turn.client, given)
            raise
        turn.is_held = True

    def _yield_slot(self, turn: HeldSlot) -> None:
        with self._mutex:
            if not self._waiting:
                return
            turn.is_held = False
            self._hand_over_locked()
        self._take(turn)

    def _hand_over(self) -> None:
        with self._mutex:
            self._hand_over_locked()

    def _hand_over_locked(self) -> None:
        if not self._waiting:
            self._free += 1
            return
        client, given = self._waiting.popitem(last=False)
        given.popleft().set()
        if given:
            self._waiting[client] = given  # at the end of the queue

    def _leave_locked(self, client: Hashable, given: threading.Event) -> None:
        queue = self._waiting[client]
        queue.remove(given)
        if not queue:
            del self._waiting[client]


class HeldSlot:
    """A slot held by one request. Not thread-safe."""

    __slots__ = ("_slots", "check", "client", "is_held")

    def __init__(self, places: FairSlots, client: Hashable, check: Callable[[], None]) -> None:
        self._slots = places
        self.client = client
        self.check = check
        self.is_held = False

    def yield_slot(self) -> None:
        """Give the slot to a waiting request, if any, and wait for the next slot. Call this within long work."""
        self._slots._yield_slot(self)
