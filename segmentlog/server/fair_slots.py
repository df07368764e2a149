"""Places for work that takes much memory: few at a time, and given to clients in turn."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from segmentlog.server.request_budget import LOOK_S


class FairPlaces:
    """So many places. Thread-safe.

    A place that becomes free goes to the next client of those that wait, in turn, and there to the request that has
    waited the longest. So a client with a thousand requests delays another client by one of them for each place.
    """

    def __init__(self, count: int) -> None:
        self._mutex = threading.Lock()
        self._free = count
        """Above 0 only while nobody waits."""
        self._waiting: OrderedDict[Hashable, deque[threading.Event]] = OrderedDict()
        """By client, the one whose turn it is first."""

    @contextmanager
    def place(self, client: Hashable, check: Callable[[], None]) -> Iterator[Turn]:
        """Have a place. Waits until there is one, and raises what ``check`` does, which is called while it waits."""
        turn = Turn(self, client, check)
        self._take(turn)
        try:
            yield turn
        finally:
            if turn.has_place:
                self._hand_over()

    @property
    def waiting_count(self) -> int:
        """Requests that wait for a place."""
        with self._mutex:
            return sum(map(len, self._waiting.values()))

    def _take(self, turn: Turn) -> None:
        with self._mutex:
            if self._free:
                self._free -= 1
                turn.has_place = True
                return
            given = threading.Event()
            self._waiting.setdefault(turn.client, deque()).append(given)
        try:
            while not given.wait(LOOK_S):
                turn.check()
        except BaseException:
            with self._mutex:
                if given.is_set():  # a moment ago
                    self._hand_over_locked()
                else:
                    self._leave_locked(turn.client, given)
            raise
        turn.has_place = True

    def _pass_on(self, turn: Turn) -> None:
        with self._mutex:
            if not self._waiting:
                return
            turn.has_place = False
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
            self._waiting[client] = given  # behind the others

    def _leave_locked(self, client: Hashable, given: threading.Event) -> None:
        queue = self._waiting[client]
        queue.remove(given)
        if not queue:
            del self._waiting[client]


class Turn:
    """A place that somebody has. For one thread."""

    __slots__ = ("_places", "check", "client", "has_place")

    def __init__(self, places: FairPlaces, client: Hashable, check: Callable[[], None]) -> None:
        self._places = places
        self.client = client
        self.check = check
        self.has_place = False

    def pass_on(self) -> None:
        """Give the place to whoever waits for one, and wait for the next; for long work, between two parts of it."""
        self._places._pass_on(self)
