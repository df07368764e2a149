"""A group in memory, its lock, and the threads that wait for the group's answers."""

from __future__ import annotations

import threading

from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import JoinAnswer, SyncAnswer
from segmentlog.server.groups.migration import GroupStateMachine


class GroupUnavailable(Exception):
    """The group cannot answer now. ``code`` is the error for the client."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code)
        self.code = code


class AnswerWaiter:
    """A thread that waits for an answer."""

    __slots__ = ("answer", "event")

    def __init__(self) -> None:
        self.answer: JoinAnswer | SyncAnswer | None = None
        self.event = threading.Event()

    def set_answer(self, answer: JoinAnswer | SyncAnswer) -> None:
        """Store the answer and wake the thread. Must be called once."""
        self.answer = answer
        self.event.set()


class CachedGroup:
    """A group in memory, with its lock and the state of its saved file."""

    def __init__(self, name: str, machine: GroupStateMachine) -> None:
        self.name = name
        self.machine: GroupStateMachine = machine
        self.lock = threading.Lock()
        self.is_claimed = False
        """Whether the group's file names the clients of this worker as owners of the group."""
        self.is_dropped = False
        self.logged_generation = 0
        """The last generation whose start was logged."""
        self.timer_ms: int | None = None
