"""Groups of each client: members share partitions, continue at committed offsets, and notice a member that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from server.clients.driver import SESSION_TIMEOUT_MS, Driver, text_of
from waiting import wait_until

import segmentlog
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.restore.restore import restore
from segmentlog.records import PartitionId
from segmentlog.security.security_settings import Security
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.embedded import Server
from segmentlog.server.groups.classic_group import ClassicGroup
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.server_settings import ServerSettings
from segmentlog.store import LogStore

_PARTITIONS = 6


def test_positions(client: Driver, store: LogStore) -> None:
    """A client continues where it was, and the library after it; both compute the same lag."""
    store.create_topic("t", partitions=2)
    for partition in store.topic("t").partitions():
        partition.append([b"%d" % number for number in range(10)])
    read = {(one.partition, one.offset) for one in client.consume("g", "t", 7)}
    if client.has_admin:
        committed = {one.partition: one.lag for one in store.groups.describe("g").partitions}
        assert client.lag("g", "t") == {number: lag for number, lag in committed.items() if lag is not None}
    more = {(one.partition, one.offset) for one in client.consume("g", "t", 6)}
    assert (len(read), len(more)) == (7, 6)
    assert read.isdisjoint(more)
    with store.consumer("t", group="g") as library:
        rest = {(one.partition, one.offset) for one in library}
        library.commit()
    assert (read | more).isdisjoint(rest)
    assert read | more | rest == {(number, offset) for number in range(2) for offset in range(10)}
    store.topic("t").partition(1).append([b"new"])
    assert [(one.partition, one.value) for one in client.consume("g", "t", 1)] == [(1, b"new")]


def test_a_position_that_is_gone(client: Driver, store: LogStore) -> None:
    """Records that a group had not read were deleted: it continues at the log start offset, as configured."""
    store.create_topic("t")
    partition = store.topic("t").partition(0)
    partition.append([b"%d" % number for number in range(20)])
    client.consume("g", "t", 5)
    partition.trim(12)
    assert [one.offset for one in client.consume("g", "t", 8)] == list(range(12, 20))


def _serving(store: LogStore) -> Server:
    """Return a server of a store that considers silent members dead soon."""
    groups = GroupSettings(min_session_timeout_ms=SESSION_TIMEOUT_MS)
    return Server(
        store, host="127.0.0.1", port=0, advertise=None, settings=ServerSettings(groups=groups), security=Security(),
        owns_store=False,
    )  # fmt: skip


def test_no_lag_where_a_restore_left_a_gap(kind: type[Driver], tmp_path: Path) -> None:
    """A group that had read everything has no lag after a restore, as each client computes it, and reads on."""
    bucket = f"file://{tmp_path}/bucket"
    with segmentlog.open(tmp_path / "first", background=False) as first:
        first.create_topic("t").partition(0).append([b"%d" % number for number in range(5)])
        with _serving(first) as server:
            assert len(kind(server.bootstrap_servers).consume("g", "t", 5)) == 5
        first.ship(bucket)
    restore(open_bucket(bucket), str(tmp_path / "restored"))
    with segmentlog.open(tmp_path / "restored", background=False) as restored:
        partition = restored.open_partition("t", 0)
        (lost,) = partition.lost_ranges()
        assert (lost.base_offset, lost.end_offset) == (5, partition.log_end_offset)
        with _serving(restored) as server:
            client = kind(server.bootstrap_servers)
            if kind.has_admin:
                assert client.lag("g", "t") == {0: 0}
            partition.append([b"new", b"newer"])
            if kind.has_admin:
                assert client.lag("g", "t") == {0: 2}
            found = [(one.offset, one.value) for one in client.consume("g", "t", 2)]
            assert found == [(lost.end_offset, b"new"), (lost.end_offset + 1, b"newer")]
            if kind.has_admin:
                assert client.lag("g", "t") == {0: 0}


def test_a_commit_that_is_refused(kind: type[Driver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server refuses a commit, the client reads the records again: alone in its group, and as a member."""
    if kind.name == "kcat":
        pytest.skip("kcat does not report refused commits")
    refused: set[PartitionId] = set()
    real = ClassicGroup.may_commit

    def refuse_once(self: ClassicGroup, *args: Any, partitions: Collection[PartitionId], **options: Any) -> ErrorCode:
        error = ErrorCode.NONE if refused.issuperset(partitions) else ErrorCode.ILLEGAL_GENERATION
        refused.update(partitions)
        return error or real(self, *args, partitions=partitions, **options)

    monkeypatch.setattr(ClassicGroup, "may_commit", refuse_once)
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", partitions=2, fsync="never")
        for partition in store.topic("t").partitions():
            partition.append([b"%d" % number for number in range(10)])
        every = {(number, offset) for number in range(2) for offset in range(10)}
        with _serving(store) as server:
            client = kind(server.bootstrap_servers)
            assert {(one.partition, one.offset) for one in client.consume("g", "t", 20)} == every
            assert len(refused) == 2
            refused.clear()
            member = _Member(client.member("h", "t"))
            try:
                wait_until(lambda: {told[:2] for told in member.told} == every, lambda: f"only {member.told}")
            finally:
                member.kill()
            assert len(refused) == 2


class _Member:
    """A process that consumes."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.told: list[tuple[int, int, str]] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.split()
            if line.endswith("\n") and len(words) == 3:
                self.told.append((int(words[0]), int(words[1]), words[2]))

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process like `kill -9`."""
        self.send(signal.SIGKILL)
        self._thread.join()
        self._process.communicate()


@pytest.mark.long
def test_three_members_one_is_killed(client: Driver, store: LogStore) -> None:
    """They share the partitions; when one is killed the others take its share, and no record is left out."""
    store.create_topic("t", partitions=_PARTITIONS)
    sent: dict[tuple[int, int], str] = {}

    def append(turn: int) -> None:
        for number in range(_PARTITIONS):
            value = b"turn-%d" % turn
            partition = store.topic("t").partition(number)
            word = value.decode() if client.name == "kcat" else text_of(value)
            sent[number, partition.append([value])] = word

    members = [_Member(client.member("g", "t")) for _ in range(3)]
    try:
        turn = 0

        def all_share() -> bool:
            described = store.groups.describe("g")
            return described.state == "Stable" and [len(one.partitions) for one in described.members] == [2, 2, 2]

        wait_until(lambda: "g" in store.groups.names(), "nobody joined")
        wait_until(all_share, "three members do not share")
        append(turn)
        wait_until(lambda: all(len({told[0] for told in one.told}) == 2 for one in members), "some member got nothing")
        members[0].kill()
        for turn in range(1, 6):
            append(turn)
        wait_until(
            lambda: {told[:2] for one in members for told in one.told} == set(sent),
            "what a dead member had did not come to the others",
        )
        told = defaultdict(set)
        for one in members:
            for partition, offset, word in one.told:
                told[partition, offset].add(word)
        assert told == {position: {word} for position, word in sent.items()}
        wait_until(lambda: all(one.lag == 0 for one in store.groups.describe("g").partitions), "not all is committed")
        assert len(store.groups.describe("g").members) == 2
    finally:
        for one in members:
            if one._process.poll() is None:
                one.kill()


@pytest.mark.long
def test_a_member_that_stood_still(client: Driver, store: LogStore) -> None:
    """The group notices its absence.

    It cannot commit what it reads then; those records are returned again and committed.
    """
    store.create_topic("t")
    partition = store.topic("t").partition(0)
    member = _Member(client.member("g", "t"))
    try:
        offsets = {partition.append([b"before"])}
        wait_until(lambda: {told[1] for told in member.told} == offsets, "it does not read")
        generation = store.groups.describe("g").generation
        member.send(signal.SIGSTOP)
        wait_until(lambda: not store.groups.describe("g").members, "it is not missed")
        offsets |= {partition.append([b"%d" % number]) for number in range(5)}
        member.send(signal.SIGCONT)
        wait_until(lambda: {told[1] for told in member.told} == offsets, "what it read then did not come again")
        wait_until(lambda: [one.lag for one in store.groups.describe("g").partitions] == [0], "not all is committed")
        # aiokafka commits without a member id between its memberships, and then joins again.
        wait_until(lambda: store.groups.describe("g").generation > generation, "it does not join again")
    finally:
        member.kill()
