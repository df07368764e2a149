"""Any order of heartbeats, joins, departures, lost answers and restarts, in a group that changes its protocol.

Each state keeps the rules, and every partition has a reader in the end. Clients behave like Kafka's: those of the
consumer protocol, and those of the classic one that give up all partitions in a rebalance, or keep what they may.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeds

from segmentlog.groups.server_group_file import SavedGroup, decode_saved_group, encode_saved_group
from segmentlog.policy.assignment import assign
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.server.codec.generated import consumer_protocol
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_group import ClassicGroup
from segmentlog.server.groups.classic_types import GroupSettings, GroupState, JoinAnswer, JoinRequest, SyncAnswer
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.groups.consumer_types import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    STATIC_LEAVE_EPOCH,
    ConsumerMember,
    HeartbeatAnswer,
    HeartbeatFields,
    TopicShape,
    partition_set,
)
from segmentlog.server.groups.migration import GroupStateMachine, downgrade_group, may_upgrade, upgrade_group
from segmentlog.server.groups.subscriptions import encode_partitions, partitions_of, topics_of, with_descriptions

_SETTINGS = GroupSettings(initial_rebalance_delay_ms=100, consumer_session_timeout_ms=10_000, min_session_timeout_ms=10)
_REBALANCE_MS = 8_000
_STEPS = 300


class _Catalog:
    """Topics as a test says."""

    def __init__(self) -> None:
        self.topics = {"t": TopicShape("id-t", 3), "u": TopicShape("id-u", 2)}
        self._names: tuple[str, ...] = ()

    def shapes(self, names: Collection[str]) -> Mapping[str, TopicShape]:
        return {name: self.topics[name] for name in names if name in self.topics}

    def names(self) -> Collection[str]:
        if self._names != tuple(self.topics):
            self._names = tuple(self.topics)
        return self._names

    def ids_of(self, partitions: Mapping[str, Collection[int]]) -> frozenset[Any]:
        return partition_set({self.topics[name].id: numbers for name, numbers in partitions.items()})


class _Commit:
    """A commit of one partition on its way to the server. It records what happens to the partition meanwhile."""

    def __init__(self, client: _Client, where: PartitionId) -> None:
        self.member_id = client.id
        self.instance_id = client.instance_id
        self.epoch = client.epoch
        self.where = where
        self.is_late = False
        """Whether another member has owned the partition since the commit was sent."""
        # A classic client may have missed generations before the group changed its protocol.
        self.is_kept = isinstance(client, _Modern) or (
            client.is_member() and client.epoch == client.world.epoch_of(client.id)
        )
        """Whether the member has held the partition all the time, in a group of the consumer protocol."""

    def is_owned_again(self, world: _World) -> bool:
        """Return whether the member owns the partition now."""
        return any(client.id == self.member_id and self.where in client.owned for client in world.clients)

    def look(self, world: _World) -> None:
        """Record what has happened. The world calls it after each step."""
        self.is_late |= any(
            self.where in other.owned and other.id != self.member_id for other in world.clients if other.is_member()
        )
        machine = world.machine
        member = machine.members.get(self.member_id) if isinstance(machine, ConsumerGroup) else None
        self.is_kept &= (
            isinstance(member, ConsumerMember)
            and self.where in member.holding.assigned
            and member.holding.epoch != STATIC_LEAVE_EPOCH
        )


class _Client:
    """The state of a client."""

    def __init__(self, world: _World, name: str, instance_id: str | None = None) -> None:
        self.world = world
        self.name = name
        self.instance_id = instance_id
        self.id = ""
        self.epoch = 0
        self.owned: frozenset[Any] = frozenset()
        self.wanted: frozenset[Any] | None = None
        """Its latest assignment, until it has released the rest."""
        self.is_away = True
        self.heard_ms = 0

    def is_member(self) -> bool:
        """Return whether client and group both consider it a member."""
        return not self.is_away and self.id in self.world.machine.members

    def restart(self) -> None:
        """Die without leaving the group."""
        self.owned, self.wanted, self.epoch, self.is_away = frozenset(), None, 0, True
        self.id = ""


class _Modern(_Client):
    """A client of the consumer protocol."""

    must_say_all = True

    def act(self) -> None:
        if self.wanted is not None:
            self.owned, self.wanted = self.wanted, None
            self.must_say_all = True
        self.beat()

    def beat(self) -> None:
        choose = self.world.choose
        if self.is_away:
            self.world.counter += 1
            self.id = self.id or f"{self.name}-{self.world.counter}"
            self.epoch, self.is_away = JOIN_EPOCH, False
        is_full = self.epoch == JOIN_EPOCH or self.must_say_all
        subscription = self.world.subscription_of(self.name)
        request = HeartbeatFields(
            member_id=self.id, epoch=self.epoch, instance_id=self.instance_id,
            rebalance_timeout_ms=_REBALANCE_MS if is_full else -1,
            topics=subscription if is_full and self.name != "regex" else None,
            regex="[tu].*" if is_full and self.name == "regex" else None,
            owned=self.owned if is_full else None,
        )  # fmt: skip
        answer = self.world.beat(request)
        if choose(12) == 0 and not self.world.is_calm:
            self.must_say_all = True  # it was lost
            return
        self.hear(answer)

    def hear(self, answer: HeartbeatAnswer) -> None:
        if answer.error is ErrorCode.UNRELEASED_INSTANCE_ID:
            self.is_away = True
        elif answer.error in (ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID):
            self.owned, self.wanted, self.epoch, self.must_say_all = frozenset(), None, JOIN_EPOCH, True
        elif answer.error is ErrorCode.FENCED_INSTANCE_ID:
            self.restart()
        else:
            assert answer.error is ErrorCode.NONE, answer
            self.world.note_epoch(self.id, answer.epoch)
            self.epoch, self.must_say_all = answer.epoch, False
            if answer.assigned is not None:
                assigned = partition_set(answer.assigned)
                self.wanted = None if assigned == self.owned else assigned

    def leave(self) -> None:
        if self.is_away or self.epoch == JOIN_EPOCH:
            return
        may_step_out = self.instance_id is not None and not self.world.is_calm
        epoch = STATIC_LEAVE_EPOCH if may_step_out and self.world.choose(2) else LEAVE_EPOCH
        self.owned, self.wanted = frozenset(), None
        self.world.beat(HeartbeatFields(member_id=self.id, epoch=epoch, instance_id=self.instance_id))
        former_id = self.id
        self.restart()
        if epoch == STATIC_LEAVE_EPOCH and self.world.choose(2):
            self.id = former_id  # the same process joins again later


class _Classic(_Client):
    """A client of the classic protocol; an ``eager`` one gives up everything before it joins."""

    next = "join"
    waits_for: int | None = None
    members: tuple[Any, ...] = ()

    def __init__(self, world: _World, name: str, instance_id: str | None = None, *, eager: bool) -> None:
        super().__init__(world, name, instance_id)
        self.eager = eager

    def restart(self) -> None:
        super().restart()
        self.next, self.waits_for = "join", None

    def act(self) -> None:
        if self.waits_for is not None:
            return
        if self.wanted is not None:
            must_join = bool(self.owned - self.wanted) and not self.eager
            self.owned, self.wanted = self.wanted, None
            self.next = "join" if must_join else "heartbeat"
        getattr(self, self.next)()

    def join(self) -> None:
        if self.eager:
            self.owned = frozenset()
        self.is_away = False
        self.world.counter += 1
        self.waits_for = self.world.counter
        names = {shape.id: name for name, shape in self.world.catalog.topics.items()}
        owned: dict[str, list[int]] = {}
        for topic_id, number in sorted(self.owned):
            if topic_id in names:
                owned.setdefault(names[topic_id], []).append(number)
        said = consumer_protocol.ConsumerProtocolSubscription(
            topics=list(self.world.subscription_of(self.name)),
            owned_partitions=[consumer_protocol.TopicPartition(name, numbers) for name, numbers in owned.items()],
        )
        request = JoinRequest(
            member_id=self.id, instance_id=self.instance_id, new_member_id=f"{self.name}-{self.world.counter}",
            session_timeout_ms=10_000, rebalance_timeout_ms=_REBALANCE_MS, requires_known_member_id=True,
            protocols=(("any", consumer_protocol.encode_subscription(said, 1)),),
        )  # fmt: skip
        self.world.tokens[self.waits_for] = self
        self.world.machine.join(self.waits_for, request, self.world.now_ms)

    def sync(self) -> None:
        self.world.counter += 1
        self.waits_for = self.world.counter
        self.world.tokens[self.waits_for] = self
        self.world.machine.sync(
            self.waits_for, self.id, self.epoch, self.assignments(), self.world.now_ms, instance_id=self.instance_id
        )

    def is_member(self) -> bool:
        # A late static member is still in the classic protocol, and its partitions are given to others.
        return super().is_member() and (self.instance_id is None or self.epoch == self.world.epoch_of(self.id))

    def assignments(self) -> list[tuple[str, bytes]]:
        """Assign as the leader: a partition that another member still has is not assigned."""
        if not self.members:
            return []
        said = {one: consumer_protocol.decode_subscription(memoryview(data))[1] for one, _, data in self.members}
        has = {
            TopicPartition(of.topic, number): one
            for one, sub in said.items() for of in sub.owned_partitions for number in of.partitions
        }  # fmt: skip
        counts = {name: shape.partition_count for name, shape in self.world.catalog.topics.items()}
        had: dict[str, list[TopicPartition]] = {one: [] for one in said}
        for tp, one in has.items():
            had[one].append(tp)
        found = assign("sticky", {one: sub.topics for one, sub in said.items()}, counts, had)
        told = []
        for one, partitions in found.items():
            numbers: dict[str, list[int]] = {}
            for tp in partitions:
                if has.get(tp, one) == one:
                    numbers.setdefault(tp.topic, []).append(tp.partition)
            told.append((one, encode_partitions(numbers)))
        return told

    def heartbeat(self) -> None:
        error = self.world.machine.heartbeat(self.id, self.epoch, self.world.now_ms, instance_id=self.instance_id)
        self.hear_error(error)

    def hear_error(self, error: ErrorCode) -> None:
        if error is ErrorCode.REBALANCE_IN_PROGRESS:
            self.next = "join"
        elif error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID, ErrorCode.UNRELEASED_INSTANCE_ID):
            self.restart()
        elif error is ErrorCode.ILLEGAL_GENERATION:
            self.owned, self.next = frozenset(), "join"
        else:
            assert error is ErrorCode.NONE, error

    def hear(self, answer: JoinAnswer | SyncAnswer) -> None:
        self.waits_for = None
        if isinstance(answer, JoinAnswer) and answer.error is ErrorCode.MEMBER_ID_REQUIRED:
            self.id = answer.member_id
        elif answer.error is not ErrorCode.NONE:
            self.hear_error(answer.error)
        elif isinstance(answer, JoinAnswer):
            self.id, self.epoch, self.members, self.next = answer.member_id, answer.generation, answer.members, "sync"
            self.world.note_epoch(self.id, answer.generation)
        else:
            self.wanted = self.world.catalog.ids_of(partitions_of("consumer", answer.assignment))
            self.next = "heartbeat"

    def leave(self) -> None:
        if self.is_away or self.waits_for is not None:
            return
        self.owned, self.wanted = frozenset(), None
        self.world.machine.leave([(self.id, self.instance_id)], self.world.now_ms)
        self.restart()


class _World:
    """A group, its clients, and what has been seen of it."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose
        self.is_calm = False
        self.now_ms = 0
        self.counter = 0
        self.catalog = _Catalog()
        self.machine: GroupStateMachine = ClassicGroup(_SETTINGS, topics_of)
        self.saved = SavedGroup()
        self.highest = 0
        self.epochs: dict[str, int] = {}
        self.tokens: dict[int, _Classic] = {}
        self.kinds: set[type] = set()
        self.commits: list[_Commit] = []
        self.late = self.late_again = self.kept_under_former_epoch = 0
        """Counts of late commits, of late commits for partitions that the member owns again, and of commits for kept
        partitions under a former epoch."""
        self.clients: list[Any] = [
            _Modern(self, "m0"), _Modern(self, "m1"), _Modern(self, "regex"), _Modern(self, "ms", "i0"),
            _Classic(self, "eager", eager=True), _Classic(self, "c0", eager=False), _Classic(self, "c1", eager=False),
            _Classic(self, "cs", "i1", eager=True), _Modern(self, "m1s", "i1"),
        ]  # fmt: skip
        self.subscriptions: dict[str, tuple[str, ...]] = {}

    def subscription_of(self, name: str) -> tuple[str, ...]:
        return self.subscriptions.get(name, ("t", "u"))

    def epoch_of(self, member_id: str) -> int:
        """Return the member's epoch in the group."""
        machine = self.machine
        return machine.members[member_id].holding.epoch if isinstance(machine, ConsumerGroup) else machine.generation

    # ------------------------------------------------------------ what the coordinator does

    def beat(self, request: HeartbeatFields) -> HeartbeatAnswer:
        former, machine = self.machine, self.machine
        if isinstance(machine, ClassicGroup):
            if request.epoch != JOIN_EPOCH:
                return HeartbeatAnswer(error=ErrorCode.UNKNOWN_MEMBER_ID)
            assert may_upgrade(machine, _SETTINGS)
            machine = upgrade_group(machine, _SETTINGS, self.catalog, self.now_ms)
        answer = machine.consumer_heartbeat(request, self.now_ms)
        if machine is not former and answer.error is ErrorCode.NONE:
            former.end(ErrorCode.REBALANCE_IN_PROGRESS)
            machine.answers += former.answers
            self.machine = machine
        return answer

    def settle(self) -> None:
        if isinstance(self.machine, ConsumerGroup):
            if self.machine.should_downgrade:
                former = self.machine
                self.machine = downgrade_group(former, _SETTINGS, self.now_ms)
                self.machine.answers = former.answers
            elif self.machine.state is GroupState.EMPTY:
                former = self.machine
                self.machine = ClassicGroup(_SETTINGS, topics_of)
                self.machine.raise_generation(former.generation)
                self.machine.answers, self.machine.is_changed = former.answers, True
        if self.machine.is_changed:
            self.saved = decode_saved_group(encode_saved_group(with_descriptions(self.machine.snapshot())))
            self.machine.is_changed = False
        answers, self.machine.answers = self.machine.answers, []
        for token, answer in answers:
            client = self.tokens.pop(token)  # type: ignore[call-overload]
            if client.waits_for == token:
                client.hear(answer)
        self.kinds.add(type(self.machine))
        self.check()

    def check_time(self) -> None:
        """Check that the group is checked before any deadline of a member."""
        if isinstance(self.machine, ConsumerGroup) and self.machine.members:
            due_ms = self.machine.next_deadline_ms()
            assert due_ms is not None
            assert due_ms <= min(member.due_ms for member in self.machine.all())

    def check(self) -> None:
        self.check_time()
        assert self.machine.generation >= self.highest, "epochs go on"
        self.highest = self.machine.generation
        seen: dict[Any, str] = {}
        for client in self.clients:
            if client.is_member():
                for where in client.owned:
                    assert seen.setdefault(where, client.name) == client.name, f"{where} has two owners"
        if isinstance(self.machine, ConsumerGroup):
            held: dict[Any, str] = {}
            for member in self.machine.all():
                for where in member.holding.held:
                    assert held.setdefault(where, member.id) == member.id
                assert member.holding.epoch <= self.machine.generation
            assert held == {where: owner.member_id for where, owner in self.machine._owners.items()}
        for commit in self.commits:
            commit.look(self)

    def send_commit(self) -> None:
        """Send a commit of a client that owns partitions, or believes so."""
        owners = [client for client in self.clients if client.owned and client.epoch > 0]
        if owners:
            client = owners[self.choose(len(owners))]
            where = sorted(client.owned)[self.choose(len(client.owned))]
            self.commits.append(_Commit(client, where))

    def receive_commit(self) -> None:
        """Receive a commit. It must not overwrite a commit of the partition's next owner."""
        # Prefer late commits whose member owns the partition again: only the epoch shows that they are late.
        dangerous = [commit for commit in self.commits if commit.is_late and commit.is_owned_again(self)]
        waiting = dangerous or self.commits
        commit = waiting[self.choose(len(waiting))]
        self.commits.remove(commit)
        self.late_again += commit in dangerous
        error = self.machine.may_commit(
            commit.member_id, commit.epoch, self.now_ms, partitions=[commit.where], instance_id=commit.instance_id
        )
        if commit.is_late:
            self.late += 1
            assert error is not ErrorCode.NONE, f"{commit.where} has had another owner than {commit.member_id}"
        elif commit.is_kept:
            self.kept_under_former_epoch += commit.epoch != self.epoch_of(commit.member_id)
            assert error is ErrorCode.NONE, f"{commit.member_id} has kept {commit.where}"

    def note_epoch(self, member_id: str, epoch: int) -> None:
        assert epoch >= self.epochs.get(member_id, 0), "a member's epochs go on"
        assert epoch > 0
        self.epochs[member_id] = epoch

    def pass_time(self, ms: int) -> None:
        ends_ms = self.now_ms + ms
        while (due_ms := self.machine.next_deadline_ms()) is not None and due_ms <= ends_ms:
            self.now_ms = max(due_ms, self.now_ms)
            self.machine.expire(self.now_ms)
            self.settle()
        self.now_ms = ends_ms

    def restart(self) -> None:
        """Kill the worker: waiting clients get no answer, and the group has its saved state."""
        generation = self.machine.generation
        for client in self.tokens.values():
            client.waits_for = None
        self.tokens.clear()
        self.machine = ClassicGroup(_SETTINGS, topics_of)
        if self.saved.is_consumer:
            self.machine = ConsumerGroup(_SETTINGS, self.catalog)
        self.machine.restore(self.saved, self.now_ms)
        assert self.machine.generation == generation

    # ------------------------------------------------------------ one step

    def step(self) -> None:
        client = self.clients[self.choose(len(self.clients))]
        what = self.choose(80)
        if what == 0:
            self.restart()
        elif what == 1:
            client.restart()
        elif what == 2:
            client.leave()
        elif what == 3:
            self.subscriptions[client.name] = (("t",), ("u",), ("t", "u"), ("t", "nope"))[self.choose(4)]
            if isinstance(client, _Modern):
                client.must_say_all = True
        elif what == 4:
            name = ("t", "u", "tt")[self.choose(3)]
            count = self.catalog.topics[name].partition_count if name in self.catalog.topics else 0
            self.catalog.topics[name] = TopicShape(f"id-{name}", min(count + 1, 6))
        elif what <= 10:
            self.pass_time((50, 100, 500, 1_000, 3_000, 9_000)[self.choose(6)])
        elif what <= 22:
            self.send_commit()
        elif what <= 30 and self.commits:
            self.receive_commit()
        else:
            client.act()
        self.settle()

    def end(self) -> None:
        """Let clients work without further events: each partition then has one reader."""
        self.is_calm = True
        self.settle()
        for _ in range(120):
            for client in self.clients[:7]:
                client.act()
                self.settle()
            self.pass_time(400)
        assert self.machine.state is GroupState.STABLE, self.machine.snapshot()
        subscribed = {name for client in self.clients[:7] for name in self.subscription_of(client.name)} | {
            "t",
            "u",
            "tt",
        }
        shapes = self.catalog.shapes(subscribed)
        everything = {(shape.id, number) for shape in shapes.values() for number in range(shape.partition_count)}
        owned = [where for client in self.clients[:7] for where in client.owned]
        assert sorted(owned) == sorted(everything)
        for client in self.clients[:4]:
            client.leave()
            self.settle()
        assert isinstance(self.machine, ClassicGroup), "who is left speaks the classic protocol"
        for _ in range(60):
            for client in self.clients[4:7]:
                client.act()
                self.settle()
            self.pass_time(400)
        assert self.machine.state is GroupState.STABLE
        assert len(self.machine.members) == 3
        while self.commits:
            self.receive_commit()


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds("consumer groups"))
def test_many_orders(seed: int) -> None:
    """No partition has two owners, no late commit overwrites that of a next owner, and all is read in the end."""
    late = late_again = kept = 0
    for trial in range(30):
        world = _World(random.Random(f"{seed} {trial}").randrange)
        for _ in range(_STEPS):
            world.step()
        world.end()
        assert world.kinds == {ClassicGroup, ConsumerGroup}
        late += world.late
        late_again += world.late_again
        kept += world.kept_under_former_epoch
    assert min(late, late_again, kept) > 10, (late, late_again, kept)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order(data: st.DataObject) -> None:
    """The rules hold in orders that Hypothesis invents, and shortens after a failure."""
    world = _World(lambda bound: data.draw(st.integers(0, bound - 1)))
    for _ in range(40):
        world.step()
    world.end()
