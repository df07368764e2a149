"""Any order of requests, timeouts and restarts: each state keeps the rules, and each client is answered in the end.

Clients behave like Kafka's, and also misbehave. They forget their ids, die while they wait, repeat old requests, and
use the instance id of another client.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeds

from segmentlog.groups.server_group_file import SavedGroup, decode_saved_group, encode_saved_group
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_group import ClassicGroup
from segmentlog.server.groups.classic_types import GroupSettings, GroupState, JoinAnswer, JoinRequest, SyncAnswer

_SETTINGS = GroupSettings(initial_rebalance_delay_ms=100, max_size=5)
_NAMES = ("a", "b", "c", "d", "e", "f", "g")
_STEPS = 400


class _Client:
    """The state of a client."""

    def __init__(self, name: str, instance_id: str | None) -> None:
        self.name = name
        self.instance_id = instance_id
        self.id = ""
        self.generation = -1
        self.is_leader = False
        self.members: tuple[str, ...] = ()
        self.waits_for: int | None = None
        """The token of its call."""
        self.next = "join"
        """The next action of a correct client."""


class _World:
    """A group, its clients, and what has been seen of it."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose
        self.now_ms = 0
        self.group = ClassicGroup(_SETTINGS)
        self.saved = SavedGroup()
        self.clients = [_Client(name, f"i{number % 2}" if number >= 4 else None) for number, name in enumerate(_NAMES)]
        self.open: dict[int, tuple[_Client, str]] = {}
        self.tokens = 0
        self.highest = 0
        self.leaders: dict[int, str] = {}
        self.rosters: dict[int, frozenset[str]] = {}
        self.told_generations: dict[str, int] = {}

    # ------------------------------------------------------------ what clients do

    def token(self, client: _Client, kind: str) -> int:
        self.tokens += 1
        self.open[self.tokens] = (client, kind)
        client.waits_for = self.tokens
        return self.tokens

    def join(self, client: _Client) -> None:
        is_fresh = not client.id or self.choose(10) == 0
        request = JoinRequest(
            member_id="" if is_fresh else client.id, instance_id=client.instance_id,
            new_member_id=f"{client.name}-{self.tokens}", session_timeout_ms=6_000 + 2_000 * self.choose(3),
            rebalance_timeout_ms=1_000 + 4_000 * self.choose(5), requires_known_member_id=bool(self.choose(2)),
            supports_skipping_assignment=bool(self.choose(2)),
            protocols=(("range", b"t"), ("sticky", b"%d" % self.choose(2)))[: 1 + self.choose(2)],
        )  # fmt: skip
        self.group.join(self.token(client, "join"), request, self.now_ms)

    def sync(self, client: _Client) -> None:
        given_members = client.members if client.is_leader else ()
        self.group.sync(
            self.token(client, "sync"), client.id, client.generation - (self.choose(15) == 0),
            [(member, member.encode()) for member in given_members], self.now_ms, instance_id=client.instance_id,
        )  # fmt: skip

    def heartbeat(self, client: _Client) -> None:
        error = self.group.heartbeat(client.id, client.generation, self.now_ms, instance_id=client.instance_id)
        if error is ErrorCode.NONE:
            assert client.generation == self.group.generation, "nobody lives on in a former generation"
        else:
            client.next = "join"
            if error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
                client.id = ""

    def commit(self, client: _Client) -> None:
        error = self.group.may_commit(client.id, client.generation, self.now_ms, instance_id=client.instance_id)
        if error is ErrorCode.NONE and client.generation >= 0:
            assert client.generation == self.group.generation, "nobody commits in a former generation"
            assert client.id in self.group.members

    def leave(self, client: _Client) -> None:
        by_instance = client.instance_id is not None and self.choose(2)
        self.group.leave([("" if by_instance else client.id, client.instance_id)], self.now_ms)

    def die(self, client: _Client) -> None:
        """Let a client die while it waits; its connection may report it or not."""
        token = client.waits_for
        client.waits_for, client.id, client.generation, client.next = None, "", -1, "join"
        if token is not None and self.choose(2):
            self.group.drop_waiting(token, self.now_ms)
            assert token in [answered for answered, _ in self.group.answers], "its thread ends"

    # ------------------------------------------------------------ what the coordinator does

    def settle(self) -> None:
        """Save, tell, look."""
        if self.group.is_changed:
            self.saved = decode_saved_group(encode_saved_group(self.group.snapshot()))
            self.group.is_changed = False
        answers, self.group.answers = self.group.answers, []
        for token, answer in answers:
            assert token in self.open, "nobody is answered twice"
            client, kind = self.open.pop(token)  # type: ignore[call-overload]
            assert isinstance(answer, JoinAnswer if kind == "join" else SyncAnswer)
            self.check_answer(answer)
            if client.waits_for == token:
                self.hear(client, answer)
        self.check()

    def hear(self, client: _Client, answer: JoinAnswer | SyncAnswer) -> None:
        client.waits_for = None
        client.next = "heartbeat" if isinstance(answer, SyncAnswer) and answer.error is ErrorCode.NONE else "join"
        if isinstance(answer, JoinAnswer) and answer.error is ErrorCode.NONE:
            client.next = "sync"
        if isinstance(answer, JoinAnswer) and answer.error in (ErrorCode.NONE, ErrorCode.MEMBER_ID_REQUIRED):
            client.id = answer.member_id
            if answer.error is ErrorCode.NONE:
                client.generation = answer.generation
                client.is_leader = answer.leader == answer.member_id
                client.members = tuple(member for member, _, _ in answer.members)
        elif answer.error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
            client.id, client.generation = "", -1

    def check_answer(self, answer: JoinAnswer | SyncAnswer) -> None:
        if answer.error is not ErrorCode.NONE or isinstance(answer, SyncAnswer):
            return
        # Each answer has the saved state, which a restart would have, too.
        assert answer.generation == self.saved.generation
        assert answer.member_id in {member.id for member in self.saved.members}
        known = self.told_generations.get(answer.member_id, 0)
        assert answer.generation >= known, "generations go on"
        self.told_generations[answer.member_id] = answer.generation
        if answer.members and not answer.skip_assignment:
            # Only one leader of a generation gets the members; a static one that rejoined, under its new id.
            leader = self.leaders.setdefault(answer.generation, answer.member_id)
            assert leader.split("-")[0] == answer.member_id.split("-")[0] or leader not in self.group.members

    def check(self) -> None:
        group = self.group
        assert group.generation >= self.highest, "generations go on"
        self.highest = group.generation
        assert (group.state is GroupState.EMPTY) == (not group.members)
        if group.members:
            assert group.leader in group.members
        waiting = {member.join_token for member in group.members.values()}
        waiting |= {member.sync_token for member in group.members.values()}
        assert waiting - {None} == self.open.keys(), "who waits is waited for, and nobody else"
        if group.state is GroupState.STABLE:
            assert not self.open
        if self.open:
            assert group.next_deadline_ms() is not None, "nobody waits for ever"

    def pass_time(self, ms: int) -> None:
        ends_ms = self.now_ms + ms
        while (due_ms := self.group.next_deadline_ms()) is not None and due_ms <= ends_ms:
            self.now_ms = max(due_ms, self.now_ms)
            self.group.expire(self.now_ms)
            self.settle()
        self.now_ms = ends_ms

    def restart(self) -> None:
        """Kill the worker: waiting clients get no answer, and the group has its saved state."""
        self.open.clear()
        for client in self.clients:
            client.waits_for = None
        generation = self.group.generation
        self.group = ClassicGroup(_SETTINGS)
        self.group.restore(self.saved, self.now_ms)
        assert self.group.generation == generation, "whatever happened to it was saved"

    # ------------------------------------------------------------ one step

    def step(self) -> None:
        client = self.clients[self.choose(len(self.clients))]
        what = self.choose(60)
        if what == 0:
            self.restart()
        elif what == 1:
            self.die(client)
        elif what <= 7:
            self.pass_time((50, 100, 500, 3_000, 10_000)[self.choose(5)])
        elif what == 8:
            getattr(self, ("join", "sync", "heartbeat", "commit")[self.choose(4)])(client)
        elif client.waits_for is None:
            if what == 9 and client.id:
                self.leave(client)
            elif what <= 12:
                self.commit(client)
            elif client.next == "join":
                self.join(client)
            elif client.next == "sync":
                self.sync(client)
            else:
                self.heartbeat(client)
        self.settle()

    def end(self) -> None:
        """Let all clients be silent: each is answered and removed all the same."""
        self.pass_time(3_600_000)
        assert not self.open
        assert self.group.state is GroupState.EMPTY
        assert self.group.is_idle


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds("group machine"))
def test_many_orders(seed: int) -> None:
    """One leader, ascending generations, and exactly one answer for each client, with restarts."""
    for trial in range(100):
        world = _World(random.Random(f"{seed} {trial}").randrange)
        for _ in range(_STEPS):
            world.step()
        world.end()


@settings(max_examples=60)
@given(st.data())
def test_any_order(data: st.DataObject) -> None:
    """The rules hold in orders that Hypothesis invents, and shortens after a failure."""
    world = _World(lambda bound: data.draw(st.integers(0, bound - 1)))
    for _ in range(40):
        world.step()
    world.end()
