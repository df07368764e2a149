"""Members of a group as a Kafka client has them, which talk to a coordinator in threads of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from segmentlog.clock import Clock
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.cached_group import GroupUnavailable
from segmentlog.server.groups.classic_types import GroupSettings, JoinAnswer, JoinRequest, SyncAnswer
from segmentlog.server.groups.coordinator import GroupCoordinator
from segmentlog.server.groups.subscriptions import encode_partitions, encode_topics

SETTINGS = GroupSettings(initial_rebalance_delay_ms=0, min_session_timeout_ms=10)
WAIT_S = 20.0


class TestClock(Clock):
    """Goes on only when it is told to."""

    __test__ = False

    def __init__(self) -> None:
        self.ms = 1_000_000

    def monotonic_ms(self) -> int:
        return self.ms


class Waiting:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._result: Any = None
        self._call = lambda: call(*args, **options)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except GroupUnavailable as error:
            self._result = error

    @property
    def is_done(self) -> bool:
        """Whether it has come back."""
        return not self._thread.is_alive()

    def result(self) -> Any:
        """Wait for the call, and return its result."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "nobody answered"
        return self._result


class Client:
    """One member."""

    def __init__(self, coordinator: GroupCoordinator, name: str, group: str = "g", **options: Any) -> None:
        self.coordinator = coordinator
        self.group = group
        self.name = name
        self.id = ""
        self.generation = -1
        self.leader = ""
        self.members: tuple[str, ...] = ()
        self.assignment = b""
        self.options = {
            "client_id": name, "client_host": "127.0.0.1", "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 10_000, "protocols": (("range", encode_topics(("t",))),), **options,
        }  # fmt: skip

    @property
    def instance_id(self) -> str | None:
        return self.options.get("instance_id")

    def request(self, **options: Any) -> JoinRequest:
        """Return a request to join under the client's id."""
        fresh = self.coordinator.new_member_id(self.instance_id or self.name)
        return JoinRequest(**{"member_id": self.id, "new_member_id": fresh, **self.options, **options})

    def join(self, **options: Any) -> JoinAnswer:
        """Join, and wait."""
        answer = self.coordinator.join(self.group, self.request(**options))
        if answer.error is ErrorCode.NONE:
            self.id, self.generation, self.leader = answer.member_id, answer.generation, answer.leader
            self.members = tuple(member for member, _, _ in answer.members)
        return answer

    def sync(self) -> SyncAnswer:
        """Ask for the assignment; a leader gives partition n of topic t to the n-th member."""
        given = [(member, encode_partitions({"t": [number]})) for number, member in enumerate(self.members)]
        answer = self.coordinator.sync(self.group, self.id, self.generation, given, instance_id=self.instance_id)
        self.assignment = answer.assignment
        return answer

    def heartbeat(self) -> ErrorCode:
        """Say that it lives."""
        return self.coordinator.heartbeat(self.group, self.id, self.generation, instance_id=self.instance_id)

    def leave(self) -> ErrorCode:
        """Go."""
        return self.coordinator.leave(self.group, [(self.id, None)])[0][1]


def settle(*clients: Client) -> None:
    """Have all of them join and be assigned, as clients do that hear of a rebalance by their heartbeats."""
    settled: dict[str, int] = {}
    ends = time.monotonic() + WAIT_S

    def live(client: Client) -> None:
        # A client that must join again discards its assignment, and is not settled until it has joined.
        while time.monotonic() < ends:
            if client.assignment and client.heartbeat() is ErrorCode.NONE:
                settled[client.name] = client.generation
                if len(settled) == len(clients) and len(set(settled.values())) == 1:
                    return
                time.sleep(0.002)
                continue
            settled.pop(client.name, None)
            client.assignment = b""
            error = client.join().error
            if error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
                client.id = ""
            if error is ErrorCode.NONE:
                client.sync()
        raise AssertionError("they did not settle")

    calls = [Waiting(live, client) for client in clients]
    for call in calls:
        call.result()
    assert len(settled) == len(clients)
    assert len(set(settled.values())) == 1
