"""A group in memory, and threads that wait for it."""

from __future__ import annotations

import threading

from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import JoinAnswer, SyncAnswer
from segmentlog.server.groups.migration import Machine


class Unavailable(Exception):
    """The group cannot be asked now: ``code`` tells clients why."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code)
        self.code = code


class Waiter:
    """A thread that waits for an answer."""

    __slots__ = ("answer", "event")

    def __init__(self) -> None:
        self.answer: JoinAnswer | SyncAnswer | None = None
        self.event = threading.Event()

    def tell(self, answer: JoinAnswer | SyncAnswer) -> None:
        """The answer, for good."""
        self.answer = answer
        self.event.set()


class Entry:
    """A group in memory."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self.machine: Machine = machine
        self.lock = threading.Lock()
        self.is_held = False
        """Whether the file says that clients hold it."""
        self.is_gone = False
        self.told_generation = 0
        """The last one that the log has heard of."""
        self.armed_ms: int | None = None
