"""Consumer groups: one live member reads each partition, and continues after the committed offset."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from seeds import fresh_seed, seeds, share
from waiting import wait_until

import segmentlog
from segmentlog.consuming.consumer import Consumer
from segmentlog.errors import (
    ConsumerFenced,
    GroupNotEmpty,
    InvalidConfig,
    OffsetOutOfRange,
    ReadOnlyStore,
    StoreClosed,
    UnknownTopic,
)
from segmentlog.format.control import encode_marker
from segmentlog.format.file_names import GROUPS_FOLDER, folder_name_of
from segmentlog.groups.committed_offsets import encode
from segmentlog.groups.group_folder import GroupFolder
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore

_MEMBER = Path(__file__).with_name("group_member.py")
_WAIT_S = 20.0
_TPS = [TopicPartition("t", number) for number in range(4)]


class _Failed(Exception):
    """The error of an application."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store with topic ``t``: four partitions of ten records."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", partitions=4, fsync="never")
        for number in range(4):
            store.topic("t").partition(number).append([b"%d" % one for one in range(10)])
        yield store


def _settle(*members: Consumer) -> list[list[TopicPartition]]:
    """Poll the members of one thread until all partitions have moved."""
    stable = 0
    ends = time.monotonic() + _WAIT_S
    while stable < 3:
        assert time.monotonic() < ends
        assigned = [member.poll_group() for member in members]
        generations = {member.generation for member in members}
        settled = all(member._session is not None and member._session.is_settled for member in members)
        stable = stable + 1 if settled and len(generations) == 1 else 0
        time.sleep(0.002)
    return assigned


def _read(consumer: Consumer, count: int) -> list[tuple[int, int]]:
    """Read this many records; return partition and offset of each."""
    found = []
    for record in consumer:
        found.append((record.partition, record.offset))
        if len(found) == count:
            break
    return found


class _Line(NamedTuple):
    at_ns: int
    pid: int
    member: str
    what: str
    details: list[str]


class _Process:
    """A member in a process of its own, see `group_member.py`."""

    def __init__(self, store: LogStore, folder: Path, group: str = "g", **options: object) -> None:
        self.log = folder / f"member-{random.getrandbits(64):x}.log"
        arguments = [sys.executable, str(_MEMBER), store.path, group, str(self.log), json.dumps(options)]
        self._process = subprocess.Popen(arguments)
        self.pid = self._process.pid
        self.died_ns: int | None = None

    def lines(self, *what: str) -> list[_Line]:
        """Return the lines that it has written so far."""
        text = self.log.read_text() if self.log.exists() else ""
        found = []
        for line in text.splitlines():
            at_ns, pid, member, kind, *details = line.split(" ")
            if not what or kind in what:
                found.append(_Line(int(at_ns), int(pid), member, kind, details))
        return found

    def owned(self) -> set[str]:
        """Return the partitions that it reads."""
        owned: set[str] = set()
        for line in self.lines("assigned", "revoked", "lost"):
            if line.what == "assigned":
                owned.add(line.details[0])
            else:
                owned.discard(line.details[0])
        return owned

    def send(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.died_ns = time.monotonic_ns()
        self._process.kill()
        self._process.wait(_WAIT_S)

    def stop(self) -> int:
        """Stop it; return its exit status."""
        self.died_ns = time.monotonic_ns()
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            return self._process.wait(_WAIT_S)
        finally:
            self._process.kill()


@pytest.fixture
def start(store: LogStore, tmp_path: Path) -> Iterator[Callable[..., _Process]]:
    """Provide a function that starts members; they are killed at the end."""
    started: list[_Process] = []

    def start_member(**options: object) -> _Process:
        started.append(_Process(store, tmp_path, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start_member
    for process in started:
        process.kill()


# ------------------------------------------------------------ one member


def test_a_group_goes_on_where_it_committed(store: LogStore) -> None:
    """A new member continues after the committed offsets; records without a commit are read again."""
    with store.consumer("t", group="g") as consumer:
        assert len(_read(consumer, 1000)) == 40
        consumer.commit()
    with store.consumer("t", group="g") as consumer:
        assert _read(consumer, 1000) == []
        store.topic("t").partition(2).append([b"new"])
        assert _read(consumer, 1000) == [(2, 10)]
    with store.consumer("t", group="g") as consumer:
        assert _read(consumer, 1000) == [(2, 10)]
    with store.consumer("t", group="another") as consumer:
        assert len(_read(consumer, 1000)) == 41
    assert store.groups.names() == ["g"]


def test_commit_covers_what_was_handed_out(store: LogStore) -> None:
    """A commit covers the returned records by default, or explicit offsets, with metadata and epoch."""
    with store.consumer("t", group="g", fetch_bytes=1) as consumer:
        assert consumer.committed("t", 0) is None
        for record in consumer:
            if record.offset == 3:
                break
        consumer.commit(metadata="so far", sync=False)
        found = consumer.committed("t", record.partition)
        assert found is not None
        assert (found.offset, found.metadata, found.epoch) == (4, "so far", record.epoch)
        assert (found.generation, found.member) == (consumer.generation, consumer.member_id)
        consumer.commit({("t", 1): 2, TopicPartition("t", 2): 3})
        consumer.commit_async({("t", 3): 1})
        assert [one and one.offset for one in (consumer.committed("t", number) for number in (1, 2, 3))] == [2, 3, 1]
        with pytest.raises(UnknownTopic):
            consumer.commit({("t", 9): 1})
        with pytest.raises(InvalidConfig):
            consumer.commit({("t", 1): -1})
        with pytest.raises(InvalidConfig, match="4,096 characters"):
            consumer.commit(metadata="x" * 4097)
    assert store.topic("__consumer_offsets").partition(0).durable_offset > 0


def test_without_a_position_start_or_auto_offset_reset_decides(store: LogStore) -> None:
    """Without a committed offset, `start` or `auto_offset_reset` decides; a committed offset wins over both."""
    with store.consumer("t", group="new", start="latest") as consumer:
        assert _read(consumer, 1000) == []
    with store.consumer("t", group="new", start=8) as consumer:
        assert len(_read(consumer, 1000)) == 8
    with store.consumer("t", group="new", start="latest", auto_offset_reset="earliest") as consumer:
        assert len(_read(consumer, 1000)) == 40
    with store.consumer("t", group="new", auto_offset_reset="error") as consumer, pytest.raises(InvalidConfig):
        _read(consumer, 1)
    store.groups.reset("new", dict.fromkeys(_TPS, 9))
    with store.consumer("t", group="new", start="latest") as consumer:
        assert len(_read(consumer, 1000)) == 4
    store.topic("t").partition(0).trim(10)
    with store.consumer("t", group="new") as consumer, pytest.raises(OffsetOutOfRange):
        _read(consumer, 1000)
    with store.consumer("t", group="new", auto_offset_reset="earliest") as consumer:
        assert len(_read(consumer, 1000)) == 3
        assert consumer.resets == [(_TPS[0], 9, 10)]


def test_auto_commit_leaves_out_the_record_in_hand(store: LogStore) -> None:
    """After a failed loop body, its record is read again, and no record before it."""
    with contextlib.suppress(_Failed), store.consumer("t", group="g", auto_commit=True) as consumer:
        for record in consumer:
            if record.offset == 4:
                raise _Failed
    with store.consumer("t", group="g", auto_commit=True) as consumer:
        assert consumer.poll_group(_WAIT_S) == _TPS
        assert consumer.position("t", record.partition) == 4
        assert len(_read(consumer, 1000)) == 36
    with store.consumer("t", group="g") as consumer:
        assert _read(consumer, 1000) == []
    for _ in range(2):  # a batch counts as a whole
        with contextlib.suppress(_Failed), store.consumer("t", group="b", auto_commit=True) as consumer:
            for batch in consumer.batches():
                assert batch.base_offset == 0
                raise _Failed


def test_auto_commit_at_polls(store: LogStore) -> None:
    """Auto-commit commits the records of earlier polls, once its interval has passed."""
    with store.consumer("t", group="g", auto_commit=True, auto_commit_interval_ms=1, max_poll_records=3) as consumer:
        for record in consumer:
            if record.offset == 4:
                break
            time.sleep(0.002)
        found = store.group_offsets.committed("g")[TopicPartition("t", record.partition)]
        assert found.offset == 3


def test_a_loop_body_that_polls_has_not_processed_what_it_is_at(store: LogStore) -> None:
    """A loop body that polls does not commit its own record by that; its explicit commits stand."""
    with store.consumer("t", group="g", auto_commit=True, auto_commit_interval_ms=1) as consumer:
        for record in consumer:
            tp = TopicPartition("t", record.partition)
            if record.offset == 4:
                time.sleep(0.002)
                consumer.poll_group()
                assert store.group_offsets.committed("g")[tp].offset == 4
                consumer.commit()
                time.sleep(0.002)
                consumer.poll_group()
                assert store.group_offsets.committed("g")[tp].offset == 5
            if record.offset == 6:
                break
        time.sleep(0.002)
        consumer.poll_group()
        assert store.group_offsets.committed("g")[tp].offset == 6
        others = [store.consumer("t", group="g") for _ in range(3)]
        _settle(consumer, *others)
        reader = next(other for other in (consumer, *others) if tp in other.assignment())
        assert reader.position(*tp) == 7 if reader is consumer else 6
        for other in others:
            other.close()


def test_options_that_make_no_sense_are_refused(store: LogStore) -> None:
    """Invalid options are refused with their name, and the consumer does not become a member."""
    for options in (
        {"group": ""}, {"group": "x" * 32_768}, {"group": 1}, {"group": "\ud800"}, {"auto_commit": True},
        {"group": "g", "assignment_strategy": "fair"}, {"group": "g", "max_poll_records": 0},
        {"group": "g", "max_poll_interval_ms": 0}, {"group": "g", "auto_commit_interval_ms": True},
    ):  # fmt: skip
        with pytest.raises(InvalidConfig):
            store.consumer("t", **options)
    with pytest.raises(InvalidConfig, match="group"):
        store.consumer(("t", 0), group="g")
    with pytest.raises(UnknownTopic):
        store.consumer("nothing", group="g")
    alone = store.consumer("t")
    for ask in (alone.commit, alone.poll_group, lambda: alone.member_id, lambda: alone.committed("t")):
        with pytest.raises(InvalidConfig, match="without a group"):
            ask()
    assert store.groups.describe("g").members == ()
    with segmentlog.open(store.path, read_only=True) as other, pytest.raises(ReadOnlyStore):
        other.consumer("t", group="g")


@pytest.mark.parametrize(
    "group",
    [
        *("a/b", "..", ".", "@x", "naïve group", "日本" * 100, "x" * 255, "x" * 254 + "y", "%2E", "a\nb\0c"),
        *("x" * 32_767, "é" * 16_383),
    ],
    ids=lambda name: ascii(name)[:20],
)
def test_any_name_is_a_groups_name(store: LogStore, group: str) -> None:
    """Every text is a group name; it is quoted for the file system."""
    name = folder_name_of(group, "group")
    assert "/" not in name
    assert len(name.encode()) <= 255
    assert name not in (".", "..")
    with store.consumer("t", group=group) as consumer:
        assert store.groups.names() == [group]
        _read(consumer, 1)
        consumer.commit()
        assert os.listdir(f"{store.path}/{GROUPS_FOLDER}") == [name]
    assert store.groups.names() == [group]
    assert store.topics() == ["t"]
    store.groups.delete(group)
    assert store.groups.names() == []


@pytest.mark.parametrize(
    "group", ["", "x" * 32_768, "é" * 16_384, "\ud800", b"g", 5], ids=lambda name: ascii(name)[:10]
)
def test_what_is_no_name_of_a_group(store: LogStore, group: Any) -> None:
    """Group names are limited as in Kafka's protocol; the error names the limit."""
    with pytest.raises(InvalidConfig, match=r"32,767 bytes|UTF-8 can encode"):
        store.consumer("t", group=group)


def test_names_that_look_alike_when_quoted_stay_apart() -> None:
    """Groups whose quoted names are alike have different folders."""
    names = [
        "x" * 200 + "1",
        "x" * 200 + "2",
        ".",
        "%2E",
        "a/b",
        "a%2Fb",
        "é" * 100,
        "é" * 99 + "e",
        "x" * 32_766 + "1",
        "x" * 32_766 + "2",
    ]
    assert len({folder_name_of(name, "group") for name in names}) == len(names)


# ------------------------------------------------------------ several members


def test_members_share_the_partitions(store: LogStore) -> None:
    """Each partition has one reader; joining and leaving move few partitions."""
    first = store.consumer("t", group="g")
    assert _settle(first) == [_TPS]
    second = store.consumer("t", group="g")
    held, taken = _settle(first, second)
    assert sorted(held + taken) == _TPS
    assert len(held) == len(taken) == 2
    third = store.consumer("t", group="g")
    assigned = _settle(first, second, third)
    assert sorted(chain.from_iterable(assigned)) == _TPS
    assert sorted(map(len, assigned)) == [1, 1, 2]
    before = set(assigned[1])
    third.close()
    assigned = _settle(first, second)
    assert before <= set(assigned[1])
    assert sorted(map(len, assigned)) == [2, 2]
    first.close()
    assert _settle(second) == [_TPS]
    generation = second.generation
    second.close()
    with store.consumer("t", group="g") as late:
        assert _settle(late) == [_TPS]
        assert late.generation > generation


def test_callbacks_come_in_order_and_may_commit(store: LogStore) -> None:
    """Listeners run in order: revoked before the release, assigned after the lock; all partitions at the end."""
    told: list[tuple[str, str, list[TopicPartition]]] = []

    def listen(name: str) -> dict[str, Any]:
        def revoked(partitions: list[TopicPartition]) -> None:
            told.append((name, "revoked", partitions))
            first.commit({tp: first.position(*tp) for tp in partitions})

        return {
            "on_assigned": lambda partitions: told.append((name, "assigned", partitions)),
            "on_revoked": revoked if name == "first" else lambda partitions: told.append((name, "revoked", partitions)),
        }

    first = store.consumer("t", group="g", **listen("first"))
    _settle(first)
    assert told == [("first", "assigned", _TPS)]
    list(first)
    second = store.consumer("t", group="g", **listen("second"))
    kept, moved = _settle(first, second)
    assert told[1:] == [("first", "revoked", moved), ("second", "assigned", moved)]
    assert [second.position(*tp) for tp in moved] == [10, 10]
    first.close()
    _settle(second)
    assert told[3:] == [("first", "revoked", kept), ("second", "assigned", kept)]
    assert _read(second, 1000) == []
    second.close()
    assert told[5:] == [("second", "revoked", _TPS)]


def test_what_is_begun_is_told_though_another_partition_cannot_be(store: LogStore) -> None:
    """If one partition cannot be started, `on_assigned` gets those that were, and may seek them."""
    told: list[TopicPartition] = []
    store.groups.reset("g", {_TPS[0]: 3, _TPS[1]: 4, _TPS[3]: 5})
    with store.consumer("t", group="g", auto_offset_reset="error", on_assigned=told.extend) as consumer:
        for _ in range(2):
            with pytest.raises(InvalidConfig, match="t/2"):
                consumer.poll_group(_WAIT_S)
        assert told == _TPS[:2] == consumer.assignment()
    assert sorted(told) == _TPS[:2]


def test_a_revoked_partition_is_handed_out_no_more(store: LogStore) -> None:
    """A revoked partition returns no more records, also within a batch; no record is lost or read twice."""
    first = store.consumer("t", group="g", max_poll_records=2, auto_commit=True)
    found = []
    iteration = iter(first)
    for _ in range(3):
        record = next(iteration)
        found.append((record.partition, record.offset))
    second = store.consumer("t", group="g", auto_commit=True)
    found += [(record.partition, record.offset) for record in iteration]
    _settle(first, second)
    assert len(first.assignment()) == 2
    found += _read(second, 1000)
    found += _read(first, 1000)
    assert sorted(found) == [(partition, offset) for partition in range(4) for offset in range(10)]


def test_a_late_commit_is_fenced(store: LogStore) -> None:
    """A commit for a partition that has moved to another member writes nothing."""
    first = store.consumer("t", group="g")
    _settle(first)
    second = store.consumer("t", group="g")
    kept, moved = _settle(first, second)
    with pytest.raises(ConsumerFenced, match=str(moved[0])):
        first.commit({kept[0]: 3, moved[0]: 3})
    assert store.group_offsets.committed("g") == {}
    with first.committing({kept[0]: 4}) as (keys, values):
        store.group_offsets.append(keys, values)
    with pytest.raises(ConsumerFenced), first.committing({moved[0]: 3}):
        raise AssertionError
    assert {tp: one.offset for tp, one in store.group_offsets.committed("g").items()} == {kept[0]: 4}


def test_strategies_must_agree(store: LogStore) -> None:
    """A member with another strategy is refused; the error names both, and the group continues."""
    with store.consumer("t", group="g", assignment_strategy="range") as first:
        with pytest.raises(InvalidConfig, match=r"sticky.*range"):
            store.consumer("t", group="g")
        with store.consumer("t", group="g", assignment_strategy="range") as second:
            assert _settle(first, second) in ([_TPS[:2], _TPS[2:]], [_TPS[2:], _TPS[:2]])
    with store.consumer("t", group="g", assignment_strategy="roundrobin") as consumer:
        assert _settle(consumer) == [_TPS]


def test_different_subscriptions(store: LogStore) -> None:
    """Each topic is assigned to the members that subscribe to it."""
    store.create_topic("u", partitions=2)
    with store.consumer("t", group="g") as first, store.consumer("u", group="g") as second:
        assert _settle(first, second) == [_TPS, [TopicPartition("u", 0), TopicPartition("u", 1)]]
    members = [store.consumer("u", group="g") for _ in range(3)]
    assert sorted(map(len, _settle(*members))) == [0, 1, 1]
    assert list(next(one for one in members if not one.assignment())) == []


def test_new_topics_and_partitions_are_assigned(store: LogStore) -> None:
    """New topics that match a pattern, and new partitions, are assigned and read from their start."""
    with store.consumer("[tu]*", group="g", start="latest") as first, store.consumer("t", group="g") as second:
        _settle(first, second)
        store.create_topic("u2", partitions=1)
        store.topic("u2").partition(0).append([b"x"])
        store.alter_topic("t", partitions=5)
        store.topic("t").partition(4).append([b"y"])
        expected = [*_TPS, TopicPartition("t", 4), TopicPartition("u2", 0)]
        wait_until(lambda: sorted(chain(first.poll_group(), second.poll_group())) == expected)
        _settle(first, second)
        assert sorted(record.value or b"" for one in (first, second) for record in one if record.value in (b"x", b"y"))
        assert first.position("u2") == 1
        store.delete_topic("u2")
        wait_until(lambda: sorted(chain(first.poll_group(), second.poll_group())) == expected[:-1])


@pytest.mark.parametrize(
    ("how", "follows"), [("delete", True), ("recreate", False), ("recreate", True), ("recreate later", False)]
)
def test_a_member_by_a_pattern_outlives_a_topic(store: LogStore, how: str, follows: bool) -> None:
    """A member with a pattern loses a deleted topic, and reads a new topic of the name from its start."""
    tps = [TopicPartition(name, 0) for name in ("ev-a", "ev-b")]
    for tp in tps:
        store.create_topic(tp.topic)
    seen: list[tuple[str, bytes | None]] = []
    assigned: list[TopicPartition] = []
    revoked: list[TopicPartition] = []
    failed: list[BaseException] = []
    ended = threading.Event()
    consumer = store.consumer(
        "ev-*", group="g", start="latest", follow=follows, on_assigned=assigned.extend, on_revoked=revoked.extend
    )
    assert consumer.poll_group(_WAIT_S) == tps

    def read() -> None:
        try:
            while not ended.is_set():
                seen.extend((record.topic, record.value) for record in consumer)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for tp in tps:
        store.topic(tp.topic).partition(0).append([b"1"])
    wait_until(lambda: len(seen) == 2 or failed)
    with segmentlog.open(store.path, background=False) as other:
        other.delete_topic("ev-a")
        if how != "recreate":
            wait_until(lambda: (revoked and store.groups.describe("g").state == "Stable") or failed)
        if how != "delete":
            other.create_topic("ev-a").partition(0).append([b"anew"])
        other.topic("ev-b").partition(0).append([b"on"])
        expected = [("ev-a", b"anew"), ("ev-b", b"on")] if how != "delete" else [("ev-b", b"on")]
        wait_until(lambda: sorted(seen[2:]) == expected or failed)
    ended.set()
    consumer.wakeup()
    thread.join(_WAIT_S)
    assert failed == []
    assert consumer.assignment() == (tps if how != "delete" else tps[1:])
    assert revoked == tps[:1]
    assert assigned == (tps + tps[:1] if how != "delete" else tps)
    consumer.close()


def test_following_takes_over_what_another_leaves(store: LogStore) -> None:
    """A waiting member is woken at once when another leaves; `close` from outside ends the wait."""
    first = store.consumer("t", group="g")
    _settle(first)
    found: list[int] = []
    second = store.consumer("t", group="g", follow=True)

    def follow() -> None:
        found.extend(record.offset for record in second)

    thread = threading.Thread(target=follow)
    thread.start()
    wait_until(lambda: first.poll_group() and len(first.assignment()) == 2 and len(found) == 20)
    first.close()
    wait_until(lambda: len(found) == 40)
    store.topic("t").partition(0).append([b"x"])
    wait_until(lambda: len(found) == 41)
    second.close()
    thread.join(_WAIT_S)
    assert not thread.is_alive()
    assert store.groups.describe("g").state == "Empty"


def test_async_iteration(store: LogStore) -> None:
    """A group can be read with `async for`."""

    async def read() -> int:
        count = 0
        with store.consumer("t", group="g", max_poll_records=3, auto_commit=True) as consumer:
            async for _ in consumer:
                count += 1
        return count

    assert asyncio.run(read()) == 40
    assert asyncio.run(read()) == 0


def test_a_consumer_that_nobody_closed_holds_nothing(store: LogStore) -> None:
    """A consumer that was garbage-collected, or whose store is closed, holds no partition."""
    for record in store.consumer("t", group="g"):
        assert record.offset == 0
        break
    with store.consumer("t", group="g") as consumer:
        assert consumer.poll_group(_WAIT_S) == _TPS
        with segmentlog.open(store.path, background=False) as other:
            left = other.consumer("t", group="g")
            _settle(consumer, left)
        assert _settle(consumer) == [_TPS]


def test_a_pending_position_is_waited_for(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition is not read while an open transaction commits its offset."""
    waited: list[int] = []
    pending = {PartitionId(store.topic("t").id, 1)}

    def finish() -> None:
        waited.append(1)
        if len(waited) == 3:
            store.group_offsets.append(*encode("g", {_TPS[1]: 7}, lambda tp: store.topic(tp.topic).id, committed_ms=1))
            pending.clear()

    monkeypatch.setattr(store, "finish_transactions", finish, raising=False)
    monkeypatch.setattr(store.group_offsets, "pending_by_topic_id", lambda group: set(pending))
    assigned: list[TopicPartition] = []
    with store.consumer("t", group="g", on_assigned=assigned.extend) as consumer:
        assert consumer.poll_group() == [_TPS[0], _TPS[2], _TPS[3]]
        assert len(_read(consumer, 1000)) == 33
        assert sorted(assigned) == _TPS
        assert len(waited) == 3


def test_the_position_moves_past_what_is_not_handed_out(store: LogStore) -> None:
    """The position moves past records that are not returned, so that no lag remains."""
    store.create_topic("x", fsync="never")
    partition = store.topic("x").partition(0)
    partition.append([b"a", b"b"])
    partition._appender.place([encode_marker(7, 0, committed=True, first_offset=0, now_ms=1)], 1)
    end = partition.log_end_offset
    with store.consumer("x", group="g") as consumer:
        assert [record.value for record in consumer] == [b"a", b"b"]
        assert consumer.position("x") == end > 2
        assert consumer.lag() == {TopicPartition("x", 0): 0}
    consumer = store.consumer("x", fetch_bytes=1)
    assert [record.value for record in consumer] == [b"a", b"b"]
    assert consumer.position("x") == end


# ------------------------------------------------------------ looking at groups, and changing them


def test_describe(store: LogStore) -> None:
    """`describe` returns members, state and progress, in a read-only store, too."""
    assert store.groups.describe("g").state == "Empty"
    first = store.consumer("t", group="g", client_id="web/1")
    assert store.groups.describe("g").state == "Rebalancing"
    _settle(first)
    first.commit({_TPS[1]: 4}, metadata="m")
    with segmentlog.open(store.path, read_only=True) as other:
        found = other.groups.describe("g")
        assert other.groups.names() == ["g"]
    assert (found.group, found.state, found.strategy) == ("g", "Stable", "sticky")
    assert found.generation == first.generation
    (member,) = found.members
    assert (member.id, member.client_id, member.pid) == (first.member_id, "web/1", os.getpid())
    assert member.id.startswith("web_1-")
    assert member.partitions == tuple(_TPS)
    assert 0 <= member.idle_s < _WAIT_S
    lags = {one.partition: (one.lag, one.log_end_offset, one.member) for one in found.partitions}
    assert lags[1] == (6, 10, first.member_id)
    assert lags[0] == (None, 10, first.member_id)
    committed = found.partitions[1].committed
    assert committed is not None
    assert (committed.offset, committed.metadata) == (4, "m")
    first.close()
    found = store.groups.describe("g")
    assert (found.state, found.members, found.partitions[0].member) == ("Empty", (), "")


def test_reset_and_delete_need_an_empty_group(store: LogStore) -> None:
    """Reset and delete are refused while members live; afterwards they are durable."""
    with store.consumer("t", group="g") as consumer:
        _settle(consumer)
        for change in (lambda: store.groups.reset("g", {_TPS[0]: 5}), lambda: store.groups.delete("g")):
            with pytest.raises(GroupNotEmpty):
                change()
    with pytest.raises(UnknownTopic):
        store.groups.reset("g", {TopicPartition("t", 9): 5})
    store.groups.reset("g", {_TPS[0]: 5})
    with store.consumer("t", group="g") as consumer:
        assert len(_read(consumer, 1000)) == 35
    store.groups.delete("g")
    assert store.group_offsets.groups() == []
    assert os.listdir(f"{store.path}/{GROUPS_FOLDER}") == []
    with pytest.raises(InvalidConfig):
        store.groups.delete("g")
    with store.consumer("t", group="g") as consumer:
        assert len(_read(consumer, 1000)) == 40


def test_positions_expire(store: LogStore) -> None:
    """Offsets of groups without members expire; retention does it."""
    day_ms = 86_400_000
    for group in ("old", "live"):
        with store.consumer("t", group=group) as consumer:
            _read(consumer, 1000)
            consumer.commit()
    now_ms = time.time_ns() // 1_000_000
    with store.consumer("t", group="live"):
        assert store.groups.expire(now_ms + 6 * day_ms, 7 * day_ms) == []
        store.retention_tick(now_ms + 6 * day_ms)
        assert store.group_offsets.groups() == ["live", "old"]
        store.retention_tick(now_ms + 6 * day_ms + 59_000 + 2 * day_ms)
        assert store.group_offsets.groups() == ["live"]
        assert os.listdir(f"{store.path}/{GROUPS_FOLDER}") == ["live"]
    with pytest.raises(InvalidConfig):
        segmentlog.open(store.path, offsets_retention_minutes=0)


def test_a_lost_assignment_is_made_anew_in_a_higher_generation(store: LogStore) -> None:
    """A lost or damaged assignment is replaced in a higher generation, and members continue."""
    with store.consumer("t", group="g") as first, store.consumer("t", group="g") as second:
        _settle(first, second)
        first.commit()
        generation = first.generation
        path = Path(GroupFolder(store._topics, store.group_offsets, "g").assignment_path)
        for damage in (path.unlink, lambda: path.write_bytes(b"{")):
            damage()
            _settle(first, second)
            assert first.generation > generation
            generation = first.generation


# ------------------------------------------------------------ processes


def test_a_killed_members_partitions_are_taken_over(store: LogStore, start: Callable[..., _Process]) -> None:
    """A waiting member takes over the partitions of a killed one, after its committed offsets."""
    first = start()
    wait_until(lambda: len(first.owned()) == 4 and len(first.lines("record")) == 40)
    second = start()
    wait_until(lambda: len(first.owned()) == len(second.owned()) == 2)
    killed_ns = time.monotonic_ns()
    first.kill()
    wait_until(lambda: len(second.owned()) == 4)
    assert max(line.at_ns for line in second.lines("assigned")) - killed_ns < 5e9
    for tp in _TPS:
        store.topic("t").partition(tp.partition).append([b"more"])
    wait_until(lambda: len(second.lines("record")) >= 4)
    assert second.stop() == 0
    read = [tuple(line.details) for line in second.lines("record")]
    assert sorted(read) == [(str(tp), "10") for tp in _TPS]
    assert store.groups.describe("g").state == "Empty"


def test_a_stopped_member_is_evicted_and_fenced(store: LogStore, start: Callable[..., _Process]) -> None:
    """A stopped member is evicted; its late commit is refused, and it joins again."""
    stuck = start(stop_at=3, max_poll_interval_ms=300, commit_every=0)
    wait_until(lambda: stuck.lines("stopping"))
    with store.consumer("t", group="g", max_poll_interval_ms=60_000) as consumer:
        wait_until(lambda: consumer.poll_group() == _TPS)
        list(consumer)
        consumer.commit()
        before = store.group_offsets.committed("g")
        stuck.send(signal.SIGCONT)
        wait_until(lambda: stuck.lines("fenced"))
        assert stuck.lines("committed") == []
        assert store.group_offsets.committed("g") == before
        wait_until(lambda: consumer.poll_group() and stuck.lines("lost"))
        wait_until(lambda: len(consumer.poll_group()) == 2 and len(stuck.owned()) == 2)
        ids = {line.member for line in stuck.lines()}
        assert len(ids) == 2


def test_a_member_that_does_not_poll_is_evicted_within_a_process(store: LogStore) -> None:
    """A member that does not poll is evicted; `on_lost` gets its partitions, and its commits are refused."""
    lost: list[TopicPartition] = []
    first = store.consumer("t", group="g", max_poll_interval_ms=100, on_lost=lost.extend)
    _settle(first)
    second = store.consumer("t", group="g")
    member = first.member_id
    wait_until(lambda: second.poll_group() == _TPS)
    with pytest.raises(ConsumerFenced):
        first.commit()
    first.poll_group()
    assert lost == _TPS
    assert first.member_id != member
    assert store.group_offsets.committed("g") == {}


def test_a_forked_child_has_no_part_in_it(store: LogStore) -> None:
    """A forked child does not keep the parent's locks, and its consumer raises an error."""
    consumer = store.consumer("t", group="g")
    _settle(consumer)
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        found = b"nothing raised"
        try:
            consumer.commit()
        except StoreClosed as error:
            found = str(error).encode()
        except BaseException as error:
            found = repr(error).encode()
        consumer.close()
        os.write(write_fd, found)
        os.close(write_fd)
        time.sleep(60)
        os._exit(0)
    try:
        os.close(write_fd)
        assert b"fork" in os.read(read_fd, 4096)
        assert consumer.poll_group() == _TPS  # not disturbed by the child's close
        consumer.close()
        with store.consumer("t", group="g") as other:
            assert _settle(other) == [_TPS]
    finally:
        os.close(read_fd)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class _Dying(FileSystem):
    """A file system that kills the process before a certain call."""

    def __init__(self, at_call: int) -> None:
        self.left: int | None = None
        self._at_call = at_call
        for name in (
            "open", "close", "pwritev", "fsync", "ftruncate", "rename", "replace", "unlink", "flock", "mkdir",
            "listdir", "fstat", "stat",
        ):  # fmt: skip
            setattr(self, name, self._counted(getattr(self, name)))

    def begin(self) -> None:
        self.left = self._at_call

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    os._exit(9)
            return call(*arguments)

        return counted


@pytest.mark.long
@pytest.mark.parametrize("evicting", [False, True])
def test_a_death_at_any_step_blocks_nobody(tmp_path: Path, evicting: bool) -> None:
    """A member dies before a file system call of joining, (evicting,) taking, committing, and leaving.

    Before each with SEGMENTLOG_GROUP_ROUNDS of 100 and more, else before every third, the seed decides which.
    """
    every = 1 if int(os.environ.get("SEGMENTLOG_GROUP_ROUNDS", "20")) >= 100 else 3
    first = fresh_seed() % every
    print(f"SEGMENTLOG_SEED={fresh_seed()}")
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", partitions=2, fsync="never")
        both = [TopicPartition("t", 0), TopicPartition("t", 1)]
        generation = 0
        for at_call in range(first, 1000, every):
            overdue = store.consumer("t", group="g", max_poll_interval_ms=20 if evicting else 60_000)
            assert overdue.poll_group(_WAIT_S) == both
            if evicting:
                time.sleep(0.025)
            pid = os.fork()
            if pid == 0:  # pragma: no cover
                _join_and_leave(store.path, at_call)
            _, wait_status = os.waitpid(pid, 0)
            status = os.waitstatus_to_exitcode(wait_status)
            assert status in (0, 9)
            with store.consumer("t", group="g", max_poll_interval_ms=60_000) as other:
                if evicting:
                    wait_until(lambda: other.poll_group() == both)
                else:
                    assert sorted(chain.from_iterable(_settle(overdue, other))) == both
                    overdue.commit()
                other.commit()
                assert other.generation > generation
                generation = other.generation
            overdue.close()
            assert store.groups.describe("g").state == "Empty"
            if status == 0:
                break
        assert status == 0
        assert at_call > 50


def _join_and_leave(path: str, at_call: int) -> None:
    status = 1
    try:
        fs = _Dying(at_call)
        store = LogStore(path, fs=fs, background=False)
        store.group_offsets.open_or_create_log()
        fs.begin()
        consumer = store.consumer("t", group="g", max_poll_interval_ms=60_000)
        consumer.poll_group()
        consumer.commit(sync=False)
        consumer.close()
        status = 0
    finally:
        os._exit(status)


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds("groups"))
def test_members_killed_at_any_moment(store: LogStore, start: Callable[..., _Process], seed: int) -> None:
    """With members killed at any time, each partition has one owner, and each record is processed in order."""
    rounds = share(int(os.environ.get("SEGMENTLOG_GROUP_ROUNDS", "20")), "groups")
    rng = random.Random(seed)
    every: list[_Process] = []
    alive: list[_Process] = []
    for number in range(rounds):
        while len(alive) < 3:
            options = {"sync": rng.random() < 0.3, "commit_every": rng.choice((1, 3)), "pause_s": 0.002}
            alive.append(start(**options))
            every.append(alive[-1])
        for tp in _TPS:
            store.topic("t").partition(tp.partition).append([b"%d" % number] * rng.randrange(20, 60))
        if rng.random() < 0.8:
            wait_until(partial(alive[-1].lines, "joined"))
        time.sleep(rng.uniform(0.0, 0.2))
        victim = alive.pop(rng.randrange(len(alive)))
        if rng.random() < 0.8:
            victim.kill()
        else:
            assert victim.stop() in (0, -signal.SIGTERM)  # it may not have come to where it listens
    ends = {tp: store.topic("t").partition(tp.partition).log_end_offset for tp in _TPS}

    def done() -> bool:
        committed = store.group_offsets.committed("g")
        return all(tp in committed and committed[tp].offset >= ends[tp] - 2 for tp in _TPS)

    wait_until(done)
    wait_until(lambda: set().union(*(_records(process) for process in every)) >= _all(ends))
    for process in alive:
        wait_until(partial(process.lines, "joined"))  # from then on it has a handler for the signal
        assert process.stop() == 0
    _check_history(every)


def _records(process: _Process) -> set[tuple[str, int]]:
    return {(line.details[0], int(line.details[1])) for line in process.lines("record")}


def _all(ends: dict[TopicPartition, int]) -> set[tuple[str, int]]:
    return {(str(tp), offset) for tp, end in ends.items() for offset in range(end)}


def _check_history(processes: list[_Process]) -> None:
    owners: dict[tuple[str, str], set[str]] = defaultdict(set)
    spans: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for process in processes:
        since: dict[str, int] = {}
        last: dict[str, int] = {}
        for line in process.lines("assigned", "revoked", "lost", "record"):
            partition, detail = line.details
            if line.what == "assigned":
                owners[partition, detail].add(line.member)
                assert partition not in since
                since[partition] = line.at_ns
                last.pop(partition, None)
            elif line.what == "record":
                assert partition in since, "a record of a partition that is not its own"
                assert int(detail) == last.get(partition, int(detail) - 1) + 1
                last[partition] = int(detail)
            else:
                spans[partition].append((since.pop(partition), line.at_ns, line.member))
        for partition, at_ns in since.items():
            assert process.died_ns is not None
            spans[partition].append((at_ns, max(process.died_ns, at_ns), f"pid {process.pid}"))
    assert all(len(members) == 1 for members in owners.values()), owners
    for partition, owned in spans.items():
        owned.sort()
        for one, other in pairwise(owned):
            assert one[1] <= other[0], f"{partition}: {one[2]} and {other[2]} at the same time"


def test_commits_that_wait_for_nothing_are_written_once_in_a_while(tmp_path: Path) -> None:
    """A thousand `commit_soon` are a handful of records; the last one is written at a read or at `close`."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t")
        store.topic("t").partition(0).append([b"x"] * 2000)
        consumer = store.consumer("t", group="g")
        for number, record in enumerate(consumer):
            consumer.commit_async()
            if number == 999:
                assert record.offset == 999
                break
        found = consumer.committed("t")
        assert found is not None
        assert found.offset == 1000
        consumer.commit_async({("t", 0): 1500}, metadata="by hand")
        consumer.commit_async({("t", 0): 1501}, metadata="by hand")
        with pytest.raises(InvalidConfig):
            consumer.commit_async({("t", 0): -1})
        consumer.close()
        last = store.group_offsets.committed("g")[TopicPartition("t", 0)]
        assert (last.offset, last.metadata) == (1501, "by hand")
        assert store.topic("__consumer_offsets").partition(0).log_end_offset < 200


def test_closing_does_not_take_back_what_was_committed_by_hand(tmp_path: Path) -> None:
    """Closing with auto-commit does not undo an explicit commit of the record in hand."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t")
        store.topic("t").partition(0).append([b"x"] * 100)
        tp = TopicPartition("t", 0)

        def closed_after(act: Callable[[segmentlog.Consumer], object]) -> int:
            store.groups.reset("g", {tp: 0})
            consumer = store.consumer("t", group="g", auto_commit=True)
            for _ in consumer.batches():
                act(consumer)
                break
            consumer.close()
            return store.group_offsets.committed("g")[tp].offset

        assert closed_after(lambda consumer: None) == 0
        assert closed_after(lambda consumer: consumer.commit({tp: 40})) == 40
        assert closed_after(lambda consumer: consumer.commit_async({tp: 50})) == 50
        assert closed_after(lambda consumer: (consumer.commit({tp: 60}), consumer.seek("t", 0, 5))) == 5


def test_closing_does_not_take_back_what_a_transaction_committed(store: LogStore) -> None:
    """Closing with auto-commit does not undo an offset that a transaction committed."""
    store.create_topic("out")

    def closed_after(*, aborts: bool) -> int:
        store.groups.reset("g", dict.fromkeys(_TPS, 0))
        with store.producer() as producer, store.consumer("t", group="g", auto_commit=True) as consumer:
            for record in consumer:
                if record.offset == 4:
                    with contextlib.suppress(_Failed), producer.transaction():
                        producer.send("out", b"of 4")
                        producer.commit_offsets(consumer)
                        if aborts:
                            raise _Failed
                    break
        return store.group_offsets.committed("g")[TopicPartition("t", record.partition)].offset

    assert closed_after(aborts=False) == 5
    assert closed_after(aborts=True) <= 4


def test_a_topic_made_anew_is_begun_anew(tmp_path: Path) -> None:
    """A topic that is created again is read from its start; a rename keeps the offsets."""
    with segmentlog.open(tmp_path / "store", background=False) as store:

        def read() -> list[bytes | None]:
            with store.consumer("t", group="g") as consumer:
                found = [record.value for record in consumer]
                consumer.commit()
                return found

        store.create_topic("t").partition(0).append([b"1", b"2", b"3"])
        assert read() == [b"1", b"2", b"3"]
        member = store.consumer("t", group="g")
        assert list(member) == []
        store.delete_topic("t")
        store.create_topic("t").partition(0).append([b"new"])
        with pytest.raises(UnknownTopic, match="deleted or renamed"):
            list(member)
        member.close()
        assert read() == [b"new"]
        store.rename_topic("t", "u")
        positions = store.group_offsets.committed("g")
        assert {tp: one.offset for tp, one in positions.items()} == {TopicPartition("u", 0): 1}


def test_nobody_has_a_partition_that_its_owner_has_not_let_go_of(tmp_path: Path) -> None:
    """A partition moves only after its owner has released it, whatever the assignment says."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", partitions=2)
        first = store.consumer("t", group="g")
        assert len(first.poll_group(_WAIT_S)) == 2
        second = store.consumer("t", group="g")
        for _ in range(20):
            assert second.poll_group() == []
            time.sleep(0.002)
        assert len(first.poll_group()) == 1
        wait_until(lambda: len(second.poll_group()) == 1)
        assert not set(first.assignment()) & set(second.assignment())
        first.close()
        second.close()
