"""Decisions of a group: one request after another, in a time that is an argument."""

from __future__ import annotations

from typing import Any

import pytest

from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_group import ClassicGroup
from segmentlog.server.groups.classic_types import ClassicMember, GroupSettings, GroupState, JoinRequest, elect_protocol

_DELAY_MS = 100
_SESSION_MS = 10_000
_REBALANCE_MS = 30_000
_SETTINGS = GroupSettings(initial_rebalance_delay_ms=_DELAY_MS)


def _topics_of(protocol_type: str, metadata: bytes) -> tuple[str, ...]:
    return tuple(metadata.decode().split("|")[0].split(",")) if protocol_type == "consumer" else ()


class _Bench:
    """A group, its time, and the answers by the names of those who asked."""

    def __init__(self, settings: GroupSettings = _SETTINGS) -> None:
        self.settings = settings
        self.group = ClassicGroup(settings, _topics_of)
        self.now_ms = 0
        self.told: dict[str, Any] = {}
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def _collect(self) -> None:
        for token, answer in self.group.answers:
            assert token not in self.told, f"{token} is answered twice"
            self.told[str(token)] = answer
        self.group.answers.clear()

    def join(self, name: str, **options: Any) -> None:
        """Ask to join, as ``name``; under the id ``name`` if it has to have one."""
        self.told.pop(name, None)
        self._count += 1
        request = {
            "new_member_id": f"{name}-{self._count}", "session_timeout_ms": _SESSION_MS,
            "rebalance_timeout_ms": _REBALANCE_MS, "protocols": (("range", b"t"),), **options,
        }  # fmt: skip
        self.group.join(name, JoinRequest(**request), self.now_ms)
        self._collect()

    def rejoin(self, name: str, **options: Any) -> None:
        """Join again under the id that it has."""
        self.join(name, member_id=self.id_of(name), **options)

    def id_of(self, name: str) -> str:
        """Return the latest id of the member."""
        return next(one for one in reversed(self.group.members) if one.startswith(f"{name}-"))

    def sync(self, name: str, generation: int | None = None, **options: Any) -> None:
        """Ask for the assignment; the leader brings each member its id."""
        member = options.pop("member_id", None) or self.id_of(name)
        self.told.pop(f"sync {name}", None)
        given = [(one, one.encode()) for one in self.group.members] if member == self.group.leader else []
        generation = self.group.generation if generation is None else generation
        self.group.sync(f"sync {name}", member, generation, given, self.now_ms, **options)
        self._collect()

    def heartbeat(self, name: str) -> ErrorCode:
        return self.group.heartbeat(self.id_of(name), self.group.generation, self.now_ms)

    def leave(self, *leavers: tuple[str, str | None]) -> list[ErrorCode]:
        results = self.group.leave(leavers, self.now_ms)
        self._collect()
        return [error for _, error in results]

    def wait(self, ms: int) -> None:
        """Let time go by, and the group see it whenever it wants to."""
        ends_ms = self.now_ms + ms
        while (due_ms := self.group.next_deadline_ms()) is not None and due_ms <= ends_ms:
            self.now_ms = max(self.now_ms, due_ms)
            self.group.expire(self.now_ms)
            self._collect()
        self.now_ms = ends_ms

    def settle(self, *names: str, **options: Any) -> None:
        """Have members join from the beginning, and be assigned."""
        for name in names:
            self.join(name, **options)
        self.wait(_DELAY_MS * 2)
        for name in names:
            self.sync(name)
        assert self.group.state is GroupState.STABLE

    def restart(self) -> None:
        """Go on as a coordinator does that was started again."""
        saved = self.group.snapshot()
        self.group = ClassicGroup(self.settings, _topics_of)
        self.group.restore(saved, self.now_ms)


@pytest.fixture
def bench() -> _Bench:
    """Return an empty group."""
    return _Bench()


def _error(bench: _Bench, name: str) -> ErrorCode:
    return bench.told[name].error


# ------------------------------------------------------------ joining


def test_those_who_come_together_join_together(bench: _Bench) -> None:
    """The first to come waits for others, as long as more come, and all are in the first generation."""
    bench.join("a")
    bench.wait(_DELAY_MS - 1)
    bench.join("b")
    bench.wait(_DELAY_MS - 1)
    assert bench.told == {}
    bench.wait(2 * _DELAY_MS)
    a, b = bench.told["a"], bench.told["b"]
    assert a.generation == b.generation == 1
    assert a.leader == b.leader == a.member_id
    assert [member for member, _, _ in a.members] == [a.member_id, b.member_id]
    assert b.members == ()


def test_waiting_for_more_ends(bench: _Bench) -> None:
    """For any number of new members, those who are there begin after the rebalance timeout."""
    for number in range(_REBALANCE_MS // 50 + 10):
        bench.join(f"n{number}")
        bench.wait(50)
    assert bench.now_ms > _REBALANCE_MS
    assert bench.told["n0"].error is ErrorCode.NONE


def test_a_new_member_makes_the_others_join(bench: _Bench) -> None:
    """Existing members learn of it by their heartbeats, and the phase ends when the last one has joined."""
    bench.settle("a", "b")
    bench.join("c")
    assert bench.heartbeat("a") is ErrorCode.REBALANCE_IN_PROGRESS
    bench.rejoin("a")
    assert "c" not in bench.told
    bench.rejoin("b")
    assert {bench.told[name].generation for name in "abc"} == {2}


def test_who_does_not_join_again_is_no_member(bench: _Bench) -> None:
    """After the rebalance timeout, the others continue without it, although it sends heartbeats."""
    bench.settle("a", "b")
    b = bench.id_of("b")
    bench.join("c")
    bench.rejoin("a")
    for _ in range(_REBALANCE_MS // 5_000 + 1):
        bench.wait(5_000)
        bench.group.heartbeat(b, 1, bench.now_ms)
    assert bench.told["a"].generation == bench.told["c"].generation == 2
    assert b not in bench.members


def test_an_id_first(bench: _Bench) -> None:
    """KIP-394: a client that got an id is a member once it joins with it. The id expires after a session timeout."""
    bench.join("a", requires_known_member_id=True)
    answer = bench.told["a"]
    assert (answer.error, answer.member_id) == (ErrorCode.MEMBER_ID_REQUIRED, "a-1")
    assert bench.state is GroupState.EMPTY
    assert not bench.is_idle
    bench.join("a", requires_known_member_id=True, member_id="a-1")
    bench.wait(_DELAY_MS)
    assert bench.told["a"].member_id == "a-1"
    bench.join("b", requires_known_member_id=True)
    bench.wait(_SESSION_MS)
    bench.join("b", requires_known_member_id=True, member_id=bench.told["b"].member_id)
    assert _error(bench, "b") is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_rebalance_waits_for_who_was_told_its_id(bench: _Bench) -> None:
    """It then joins this generation, instead of starting another one."""
    bench.settle("a")
    bench.join("b", requires_known_member_id=True)
    bench.join("c")
    bench.rejoin("a")
    assert "a" not in bench.told
    bench.join("b", requires_known_member_id=True, member_id=bench.told["b"].member_id)
    assert {bench.told[name].generation for name in "abc"} == {2}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"protocols": ()}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocols": (("other", b"t"),)}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": ""}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": "connect"}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"session_timeout_ms": 5_999}, ErrorCode.INVALID_SESSION_TIMEOUT),
        ({"session_timeout_ms": 1_800_001}, ErrorCode.INVALID_SESSION_TIMEOUT),
        ({"member_id": "stranger"}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({"member_id": "stranger", "instance_id": "i"}, ErrorCode.UNKNOWN_MEMBER_ID),
    ],
)
def test_who_is_refused(bench: _Bench, options: dict[str, Any], error: ErrorCode) -> None:
    """The client gets the reason, and other members are not affected."""
    bench.settle("a")
    bench.join("b", **options)
    assert _error(bench, "b") is error
    assert bench.heartbeat("a") is ErrorCode.NONE


def test_a_group_can_be_full() -> None:
    """`group.max.size` members, and no more; those that it has may join again."""
    bench = _Bench(GroupSettings(initial_rebalance_delay_ms=_DELAY_MS, max_size=2))
    bench.settle("a", "b")
    bench.join("c")
    assert _error(bench, "c") is ErrorCode.GROUP_MAX_SIZE_REACHED
    bench.rejoin("a", protocols=(("range", b"u"),))
    bench.rejoin("b")
    assert _error(bench, "b") is ErrorCode.NONE


def test_what_members_say_has_a_limit() -> None:
    """The size of a group is limited, because it is saved as a whole, and so is the size of an assignment."""
    bench = _Bench(GroupSettings(initial_rebalance_delay_ms=_DELAY_MS, group_bytes=100))
    bench.settle("a", protocols=(("range", b"t" * 50),))
    bench.join("b", protocols=(("range", b"t" * 50),))
    assert _error(bench, "b") is ErrorCode.GROUP_MAX_SIZE_REACHED
    bench.rejoin("a", protocols=(("range", b"t" * 90),))
    assert _error(bench, "a") is ErrorCode.NONE
    bench.group.sync("too much", bench.id_of("a"), 2, [(bench.id_of("a"), bytes(101))], bench.now_ms)
    bench._collect()
    assert _error(bench, "too much") is ErrorCode.INVALID_REQUEST


def test_the_protocol_that_most_like_best() -> None:
    """Each member votes for its best protocol of those that all have."""

    def member(*names: str) -> ClassicMember:
        return ClassicMember("", None, "", "", 0, 0, tuple((name, b"") for name in names), 0)

    assert elect_protocol([member("a", "b"), member("b", "a"), member("b", "a")]) == "b"
    assert elect_protocol([member("c", "a", "b"), member("b", "a")]) == "a"
    assert elect_protocol([member("a", "b"), member("b", "a")]) == "a"


def test_any_protocol_type(bench: _Bench) -> None:
    """Connect's workers and registries form groups with their own data. An empty group accepts any type."""
    bench.settle("w", protocol_type="connect", protocols=(("sessioned", b"\xff\x00"),))
    assert bench.told["w"].protocol_type == "connect"
    assert bench.leave((bench.id_of("w"), None)) == [ErrorCode.NONE]
    bench.settle("r", protocol_type="sr", protocols=(("v0", b"\x00"),))


# ------------------------------------------------------------ joining again


def test_joining_again_unchanged(bench: _Bench) -> None:
    """A follower gets the current generation; a leader that joins again starts a rebalance."""
    bench.settle("a", "b")
    bench.rejoin("b")
    assert bench.told["b"].generation == 1
    assert bench.state is GroupState.STABLE
    bench.rejoin("a")
    assert bench.state is GroupState.PREPARING


def test_a_lost_answer_is_given_again(bench: _Bench) -> None:
    """A member that joins again before its assignment gets the same answer, the leader with the members."""
    for name in "ab":
        bench.join(name)
    bench.wait(2 * _DELAY_MS)
    before = bench.told["a"]
    bench.rejoin("a")
    assert bench.told["a"] == before
    bench.rejoin("b")
    assert bench.told["b"].generation == 1


def test_another_subscription_makes_all_join(bench: _Bench) -> None:
    """If a member joins again with another subscription, all members must join again."""
    bench.settle("a", "b")
    bench.rejoin("b", protocols=(("range", b"t,u"),))
    assert bench.heartbeat("a") is ErrorCode.REBALANCE_IN_PROGRESS


def test_who_asks_twice_is_answered_once_each(bench: _Bench) -> None:
    """A client that gave up a connection, and waits on another one."""
    bench.settle("a", "b")
    bench.join("c")
    b = bench.id_of("b")
    bench.join("b", member_id=b)
    bench.join("b on another connection", member_id=b)
    assert _error(bench, "b") is ErrorCode.REBALANCE_IN_PROGRESS
    bench.rejoin("a")
    assert bench.told["b on another connection"].generation == 2


# ------------------------------------------------------------ assigning


def test_followers_wait_for_the_leader(bench: _Bench) -> None:
    """Each member gets the leader's assignment, also later; a member that the leader left out gets an empty one."""
    for name in "abc":
        bench.join(name)
    bench.wait(2 * _DELAY_MS)
    bench.sync("b")
    assert "sync b" not in bench.told
    bench.sync("a")
    bench.sync("c")
    for name in "abc":
        assert bench.told[f"sync {name}"].assignment == bench.id_of(name).encode()
        assert bench.told[f"sync {name}"].protocol == "range"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"member_id": "stranger"}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({"generation": 7}, ErrorCode.ILLEGAL_GENERATION),
        ({"protocol": "other"}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": "connect"}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
    ],
)
def test_syncs_that_are_refused(bench: _Bench, options: dict[str, Any], error: ErrorCode) -> None:
    """A sync from a client outside of this generation, or with another generation, is refused."""
    bench.settle("a")
    bench.sync("a", **options)
    assert _error(bench, "sync a") is error


def test_a_rebalance_sends_away_who_syncs(bench: _Bench) -> None:
    """A new member joins before the leader has assigned: waiting members must join again."""
    for name in "ab":
        bench.join(name)
    bench.wait(2 * _DELAY_MS)
    bench.sync("b")
    bench.join("c")
    assert _error(bench, "sync b") is ErrorCode.REBALANCE_IN_PROGRESS
    bench.sync("a")
    assert _error(bench, "sync a") is ErrorCode.REBALANCE_IN_PROGRESS


def test_who_never_syncs_is_given_up(bench: _Bench) -> None:
    """A leader that joins and sends heartbeats but never assigns delays the others only for a limited time."""
    for name in "ab":
        bench.join(name)
    bench.wait(2 * _DELAY_MS)
    a = bench.id_of("a")
    bench.sync("b")
    for _ in range(_REBALANCE_MS // 5_000 + 1):
        bench.wait(5_000)
        bench.group.heartbeat(a, 1, bench.now_ms)
    assert _error(bench, "sync b") is ErrorCode.REBALANCE_IN_PROGRESS
    assert a not in bench.members


# ------------------------------------------------------------ living, dying, leaving


def test_silence_ends_a_session(bench: _Bench) -> None:
    """Heartbeats keep a member; a client that waits in a JoinGroup or SyncGroup is exempt."""
    bench.settle("a", "b")
    b = bench.id_of("b")
    bench.wait(_SESSION_MS - 1)
    assert bench.heartbeat("a") is ErrorCode.NONE
    bench.wait(1)
    assert b not in bench.members
    bench.rejoin("a")
    assert bench.told["a"].generation == 2
    bench.join("c", rebalance_timeout_ms=_REBALANCE_MS)
    for _ in range(5):
        bench.wait(5_000)
        bench.heartbeat("a")
    assert "c" not in bench.told
    bench.rejoin("a")
    assert bench.told["c"].generation == 3


def test_the_last_that_dies_leaves_an_empty_group(bench: _Bench) -> None:
    """The next generation is a new one, and the next member leads."""
    bench.settle("a")
    bench.wait(_SESSION_MS)
    assert (bench.state, bench.generation) == (GroupState.EMPTY, 2)
    bench.settle("b")
    assert bench.told["b"].generation == 3
    assert bench.told["b"].leader == bench.told["b"].member_id


def test_leaving(bench: _Bench) -> None:
    """Several members leave at once: by id, by instance id, or before they joined; unknown members get an error."""
    bench.settle("a", "b")
    bench.join("s", instance_id="i")
    bench.rejoin("a")
    bench.rejoin("b")
    bench.join("p", requires_known_member_id=True)
    promised = bench.told["p"].member_id
    errors = bench.leave((bench.id_of("b"), None), ("", "i"), (promised, None), ("stranger", None), ("", "nobody"))
    assert errors == [ErrorCode.NONE] * 3 + [ErrorCode.UNKNOWN_MEMBER_ID] * 2
    assert list(bench.members) == [bench.id_of("a")]


def test_leaving_answers_who_waits(bench: _Bench) -> None:
    """A waiting member that another client removes gets an error."""
    bench.settle("a", "b")
    bench.join("c")
    bench.rejoin("b")
    assert bench.leave((bench.id_of("b"), None)) == [ErrorCode.NONE]
    assert _error(bench, "b") is ErrorCode.UNKNOWN_MEMBER_ID


def test_the_end_of_the_group_answers_everybody(bench: _Bench) -> None:
    """The end of a group answers all waiting members."""
    bench.settle("a")
    bench.join("b")
    bench.group.end()
    bench._collect()
    assert _error(bench, "b") is ErrorCode.COORDINATOR_NOT_AVAILABLE
    bench.join("c")
    assert _error(bench, "c") is ErrorCode.COORDINATOR_NOT_AVAILABLE


@pytest.mark.parametrize(
    ("state", "member", "generation", "error"),
    [
        (GroupState.STABLE, True, 1, ErrorCode.NONE),
        (GroupState.STABLE, True, 0, ErrorCode.ILLEGAL_GENERATION),
        (GroupState.STABLE, False, 1, ErrorCode.UNKNOWN_MEMBER_ID),
        (GroupState.STABLE, None, -1, ErrorCode.UNKNOWN_MEMBER_ID),
        (GroupState.PREPARING, True, 1, ErrorCode.NONE),
        (GroupState.COMPLETING, True, 1, ErrorCode.REBALANCE_IN_PROGRESS),
        (GroupState.EMPTY, None, -1, ErrorCode.NONE),
        (GroupState.EMPTY, False, 1, ErrorCode.UNKNOWN_MEMBER_ID),
    ],
)
def test_who_may_commit(
    bench: _Bench, state: GroupState, member: bool | None, generation: int, error: ErrorCode
) -> None:
    """Members of this generation may commit until a new one begins; other clients only if the group is empty."""
    if state is not GroupState.EMPTY:
        bench.settle("a")
        if state is not GroupState.STABLE:
            bench.join("b")
        if state is GroupState.COMPLETING:
            bench.rejoin("a")
            generation += 1
    assert bench.state is state
    member_id = {True: "a-1", False: "stranger", None: ""}[member]
    assert bench.group.may_commit(member_id, generation, 0) is error


# ------------------------------------------------------------ static members


def test_a_static_member_comes_again(bench: _Bench) -> None:
    """It gets a new id and its assignment, other members are not affected, and its old id is fenced."""
    bench.join("a")
    bench.join("s", instance_id="i")
    bench.wait(2 * _DELAY_MS)
    bench.sync("a")
    bench.sync("s")
    old, assignment = bench.id_of("s"), bench.told["sync s"].assignment
    bench.group.is_changed = False
    bench.join("s", instance_id="i")
    answer = bench.told["s"]
    assert (answer.error, answer.generation, answer.leader) == (ErrorCode.NONE, 1, bench.id_of("a"))
    assert answer.member_id != old
    assert bench.is_changed
    assert bench.heartbeat("a") is ErrorCode.NONE
    bench.sync("s")
    assert bench.told["sync s"].assignment == assignment
    assert bench.group.heartbeat(old, 1, bench.now_ms, instance_id="i") is ErrorCode.FENCED_INSTANCE_ID
    assert bench.group.heartbeat(old, 1, bench.now_ms) is ErrorCode.UNKNOWN_MEMBER_ID
    assert bench.group.may_commit(old, 1, bench.now_ms, instance_id="i") is ErrorCode.FENCED_INSTANCE_ID
    assert bench.leave((old, "i")) == [ErrorCode.FENCED_INSTANCE_ID]
    bench.sync("s", member_id=old, instance_id="i")
    assert _error(bench, "sync s") is ErrorCode.FENCED_INSTANCE_ID
    bench.join("old", member_id=old, instance_id="i")
    assert _error(bench, "old") is ErrorCode.FENCED_INSTANCE_ID


@pytest.mark.parametrize("may_skip", [False, True])
def test_a_static_leader_comes_again(bench: _Bench, may_skip: bool) -> None:
    """It still leads and need not assign; older clients get another member as leader, because they would."""
    bench.settle("s", instance_id="i")
    old = bench.id_of("s")
    bench.join("s", instance_id="i", supports_skipping_assignment=may_skip)
    answer = bench.told["s"]
    assert answer.generation == 1
    assert answer.skip_assignment == may_skip
    assert answer.leader == (answer.member_id if may_skip else old)
    assert len(answer.members) == may_skip
    assert bench.leader == answer.member_id


@pytest.mark.parametrize(
    ("metadata", "state"),
    [(b"t", GroupState.STABLE), (b"t|owns nothing now", GroupState.STABLE), (b"t,u", GroupState.PREPARING)],
)
def test_a_static_member_that_reads_something_else(bench: _Bench, metadata: bytes, state: GroupState) -> None:
    """Makes the others join; that it says something else of itself does not."""
    bench.join("a")
    bench.join("s", instance_id="i")
    bench.wait(2 * _DELAY_MS)
    bench.sync("a")
    bench.sync("s")
    bench.join("s", instance_id="i", protocols=(("range", metadata),))
    assert bench.state is state


def test_a_static_member_that_waits_is_fenced_by_its_next_self(bench: _Bench) -> None:
    """A client that waits under the instance id gets an error, and the new client takes its place."""
    bench.settle("a")
    bench.join("s", instance_id="i")
    bench.join("s again", instance_id="i")
    assert _error(bench, "s") is ErrorCode.FENCED_INSTANCE_ID
    bench.rejoin("a")
    assert bench.told["s again"].generation == 2


def test_a_static_member_that_is_away_stays_one(bench: _Bench) -> None:
    """Others rebalance after the usual wait, and it rejoins later under its id."""
    bench.settle("a")
    bench.join("s", instance_id="i", session_timeout_ms=1_000_000)
    bench.rejoin("a")
    bench.sync("a")
    bench.sync("s")
    bench.join("b")
    bench.rejoin("a")
    bench.wait(_REBALANCE_MS)
    assert bench.told["b"].generation == 3
    assert bench.id_of("s") in bench.members
    bench.sync("a")
    bench.sync("b")
    for _ in range(20):
        bench.wait(5_000)
        assert bench.heartbeat("a") is bench.heartbeat("b") is ErrorCode.NONE
    assert bench.id_of("s") in bench.members
    bench.join("s", instance_id="i", session_timeout_ms=1_000_000)
    assert bench.told["s"].generation == 3


# ------------------------------------------------------------ restarts


@pytest.mark.parametrize("state", [GroupState.PREPARING, GroupState.COMPLETING, GroupState.STABLE])
def test_a_restart_in_every_state(bench: _Bench, state: GroupState) -> None:
    """The members of a generation continue in it or in the next one, and all are kept."""
    for name in "ab":
        bench.join(name)
    bench.wait(2 * _DELAY_MS)
    if state is not GroupState.COMPLETING:
        bench.sync("a")
        bench.sync("b")
    if state is GroupState.PREPARING:
        bench.join("c")
    bench.now_ms += 1_000_000
    bench.restart()
    assert bench.state is state
    assert bench.generation == 1
    assert bench.heartbeat("a") is (
        ErrorCode.REBALANCE_IN_PROGRESS if state is GroupState.PREPARING else ErrorCode.NONE
    )
    if state is GroupState.PREPARING:
        bench.rejoin("a")
        bench.rejoin("b")
        assert bench.told["a"].generation == bench.told["b"].generation == 2
    bench.sync("b")
    bench.sync("a")
    assert _error(bench, "sync a") is _error(bench, "sync b") is ErrorCode.NONE


def test_who_does_not_come_after_a_restart_is_given_up(bench: _Bench) -> None:
    """Sessions begin again, and end as usual."""
    bench.settle("a", "b")
    b = bench.id_of("b")
    bench.restart()
    bench.wait(_SESSION_MS - 1)
    bench.heartbeat("a")
    bench.wait(1)
    assert b not in bench.members
    assert bench.heartbeat("a") is ErrorCode.REBALANCE_IN_PROGRESS


def test_who_left_does_not_come_back_by_a_restart(bench: _Bench) -> None:
    """Its departure is saved before the answer."""
    bench.settle("a", "b")
    bench.group.is_changed = False
    b = bench.id_of("b")
    bench.leave((b, None))
    assert bench.is_changed
    bench.restart()
    assert b not in bench.members
    assert bench.heartbeat("a") is ErrorCode.REBALANCE_IN_PROGRESS
