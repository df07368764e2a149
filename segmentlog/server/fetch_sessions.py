"""Fetch sessions (KIP-227): a consumer sends its list of partitions once, and then only changes.

Client and server both keep the session's table of partitions, and an epoch that increases with each request. The server
returns only partitions that have changed. A new session may evict the least recently used session.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

NO_SESSION: Final = 0
FIRST_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
_EVICTABLE_AFTER_MS: Final = 120_000
"""Kafka's value: a session used more recently is not evicted."""
_EPOCH_END: Final = 2**31 - 1

Key = tuple[str, bytes, int]
"""A topic by name or by id (the other is empty), and a partition number."""


class SessionPartition(msgspec.Struct, gc=False):
    """A partition that a fetch requests, and the values that the session last sent to the client for it."""

    topic: str
    topic_id: bytes
    partition: int
    fetch_offset: int
    max_bytes: int
    leader_epoch: int = -1
    last_fetched_epoch: int = -1
    sent_high_watermark: int = -2
    sent_log_start: int = -2
    sent_error: bool = False

    @property
    def key(self) -> Key:
        """Key of the partition in a session."""
        return self.topic, self.topic_id, self.partition


class FetchSession:
    """The partitions that a client fetches. Used by one request at a time: the client waits for each response."""

    def __init__(self, session_id: int, used_ms: int) -> None:
        self.id = session_id
        self.epoch = 1
        """Epoch that the next request must have."""
        self.used_ms = used_ms
        self.partitions: OrderedDict[Key, SessionPartition] = OrderedDict()
        self.room = 0
        """Number of partitions that `FetchSessions` has reserved for it."""
        self.lock = threading.Lock()

    def advance(self) -> None:
        """Set the epoch that the next request must have."""
        self.epoch = 1 if self.epoch >= _EPOCH_END else self.epoch + 1

    def update(self, requested: Iterable[SessionPartition], forgotten: Iterable[Key]) -> None:
        """Add, change and drop partitions as a request says. Call `FetchSessions.update`, which checks the limit."""
        for partition in requested:
            key = partition.key
            present = self.partitions.get(key)
            if present is None:
                self.partitions[key] = partition
            else:
                present.fetch_offset, present.max_bytes = partition.fetch_offset, partition.max_bytes
                present.leader_epoch, present.last_fetched_epoch = partition.leader_epoch, partition.last_fetched_epoch
        for key in forgotten:
            self.partitions.pop(key, None)

    def move_to_end(self, key: Key) -> None:
        """Move a partition that had records to the end, so that the next response begins with the others."""
        if key in self.partitions:
            self.partitions.move_to_end(key)


class FetchSessions:
    """All fetch sessions of a worker. Thread-safe."""

    def __init__(self, slots: int, monotonic_ms: Callable[[], int], partitions_max: int = 500_000) -> None:
        self._slots = slots
        self._partitions_max = partitions_max
        self._monotonic_ms = monotonic_ms
        self._mutex = threading.Lock()
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()

    def create(self, partition_count: int = 0) -> FetchSession | None:
        """Return a new session. At the limit return None: the client must then send its full list with each request."""
        now_ms = self._monotonic_ms()
        with self._mutex:
            if self._held_locked() + partition_count > self._partitions_max:
                return None
            if len(self._sessions) >= self._slots:
                oldest = next(iter(self._sessions.values()), None)
                if oldest is None or now_ms - oldest.used_ms < _EVICTABLE_AFTER_MS:
                    return None
                del self._sessions[oldest.id]
            while True:
                session_id = secrets.randbelow(_EPOCH_END) + 1
                if session_id not in self._sessions:
                    break
            session = self._sessions[session_id] = FetchSession(session_id, now_ms)
            session.room = partition_count
            return session

    def update(self, session: FetchSession, requested: Iterable[SessionPartition], forgotten: Iterable[Key]) -> bool:
        """Add, change and drop partitions of a session as a request says. The caller must hold the session's lock.

        At the limit of partitions, delete the session and return False. The client then starts another session, or
        sends its full list with each request.
        """
        requested = list(requested)
        new = {key for partition in requested if (key := partition.key) not in session.partitions}
        if not self._reserve(session, len(session.partitions) + len(new)):
            return False
        session.update(requested, forgotten)
        return self._reserve(session, len(session.partitions))

    def _reserve(self, session: FetchSession, count: int) -> bool:
        with self._mutex:
            more = count - session.room
            if more > 0 and self._held_locked() + more > self._partitions_max:
                self._sessions.pop(session.id, None)
                return False
            session.room = count
            return True

    def _held_locked(self) -> int:
        return sum(session.room for session in self._sessions.values())

    def find(self, session_id: int) -> FetchSession | None:
        """Return the session, and record that it was used now; None if it was evicted."""
        with self._mutex:
            session = self._sessions.get(session_id)
            if session is not None:
                session.used_ms = self._monotonic_ms()
                self._sessions.move_to_end(session_id)
            return session

    def close(self, session_id: int) -> None:
        """Delete a session that its client has closed."""
        with self._mutex:
            self._sessions.pop(session_id, None)

    def __len__(self) -> int:
        return len(self._sessions)
