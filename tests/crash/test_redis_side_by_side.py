"""One workload and one checker for kafkaesque's log in Redis and for ours: which log breaks a guarantee?"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from seeds import seeds, share

from bench.kafkaesque import (
    POLICIES,
    Fsync,
    KafkaesqueTopic,
    RedisLog,
    RedisServer,
    RedisUnavailable,
    check_available,
)
from segmentlog.errors import OffsetOutOfRange
from segmentlog.exchange.record_files import RedisTopic
from segmentlog.store import LogStore
from segmentlog.testing import offset_reuse
from segmentlog.testing.offset_reuse import SegmentlogLog, play, torment
from segmentlog.testing.worst_case import WorstCaseDisk

ROUNDS = int(os.environ.get("SEGMENTLOG_SCENARIO_ROUNDS", "6"))

RECYCLED = "one offset, two records"
ACKS: list[Any] = ["written", "durable", None]


@pytest.fixture
def redis() -> None:
    """Skips without Redis; in CI that is a failure, or the comparison would quietly stop being made."""
    try:
        check_available()
    except RedisUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(f"in CI Redis must be there: {error}")
        pytest.skip(str(error))


# ---------------------------------------------------------------- the scenario of kafkaesque's README


@pytest.mark.parametrize("policy", ["everysec", "no"])
def test_redis_gives_offsets_to_two_records(redis: None, policy: Fsync) -> None:
    """The loss that kafkaesque's README describes happens, and `History` finds it."""
    with RedisLog(policy) as log:
        outcome = play(log)
    assert outcome.a == ((0, b"alpha"), (1, b"beta"), (2, b"gamma"), (3, b"zeta"))
    assert outcome.b == ((0, b"alpha"), (1, b"delta"), (2, b"epsilon"), (3, b"zeta"))
    assert not outcome.agree
    assert {conflict.rule for conflict in outcome.conflicts} == {RECYCLED}
    assert outcome.reused_offsets == [1, 2]
    assert outcome.reported_lost == ()
    assert outcome.verdict() == "DISAGREE: two records each at 1, 2"


def test_redis_that_fsyncs_before_it_answers_keeps_its_word(redis: None) -> None:
    """The checker does not report false conflicts: appendfsync always loses no record and reuses no offset."""
    with RedisLog("always") as log:
        outcome = play(log)
    assert outcome.conflicts == ()
    assert outcome.agree
    assert [offset for offset, _ in outcome.a] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("durable_only", [False, True])
@pytest.mark.parametrize("ack", ACKS)
@pytest.mark.parametrize("policy", offset_reuse.POLICIES)
def test_segmentlog_tells_what_is_gone_and_recycles_nothing(policy: str, ack: Any, durable_only: bool) -> None:
    """Under every policy both consumers get the same records, except records of A that are reported as lost."""
    with SegmentlogLog(policy, ack, durable_only=durable_only) as log:
        outcome = play(log)
        assert outcome.conflicts == ()
        assert outcome.agree
        assert outcome.reports_each_loss
        values = [value for _, value in outcome.b]
        if log.acks_durably:
            assert values == [b"alpha", b"beta", b"gamma", b"delta", b"epsilon", b"zeta"]
            assert outcome.reported_lost == ()
        else:
            assert values == [b"alpha", b"delta", b"epsilon", b"zeta"]
            assert set(log.lost_ranges()) >= set(outcome.reported_lost)
            # A's position was 3. With `durable_only` it never got beta and gamma, and its position was 1.
            assert len(outcome.reported_lost) == (0 if durable_only else 1)
            for base_offset, end_offset in outcome.reported_lost:
                assert base_offset == 1
                assert end_offset > 3
        assert outcome.a[-1] == outcome.b[-1]


# ---------------------------------------------------------------- at random


@pytest.mark.parametrize("durable_only", [False, True])
@pytest.mark.parametrize("ack", ["written", "durable"])
@pytest.mark.parametrize("policy", [*offset_reuse.POLICIES, "7records", "200bytes"])
@pytest.mark.parametrize("seed", seeds("scenario"))
def test_segmentlog_at_random(policy: str, ack: Any, durable_only: bool, seed: int) -> None:
    """Any order of appends, syncs, reads and power cuts: no rule is broken, and readers get errors for losses."""
    rng = random.Random(seed)
    for segment_records in (2, 100_000):  # small segments, so that power cuts happen during rolls
        settings = {"durable_only": durable_only, "segment_records": segment_records}
        with SegmentlogLog(policy, ack, **settings) as log:
            outcome = torment(log, rng, share(ROUNDS, "scenario"))
        assert outcome.conflicts == ()
        assert outcome.agree, outcome.verdict()
        assert outcome.reports_each_loss
        if log.acks_durably or durable_only:
            assert outcome.reported_lost == ()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", seeds("scenario"))
def test_redis_at_random(redis: None, policy: Fsync, seed: int) -> None:
    """On Redis, unsynced offsets are reused sooner or later, and synced ones are not."""
    rng = random.Random(seed)
    for _ in range(10):  # until an unsynced append is lost and another record gets its offset
        with RedisLog(policy) as log:
            outcome = torment(log, rng, max(share(ROUNDS, "scenario"), 5))
        if policy == "always" or outcome.reused_offsets:
            break
    if policy == "always":
        assert outcome.conflicts == ()
        assert outcome.agree
    else:
        assert outcome.reused_offsets
        assert outcome.reported_lost == ()


# ---------------------------------------------------------------- a process dies, the machine does not


WRITER = """
import json, sys, segmentlog
with segmentlog.open(sys.argv[1]) as store:
    if not store.topics():
        store.create_topic("t", fsync=sys.argv[2])
    partition = store.topic("t").partition(0)
    print("ready", flush=True)
    for line in sys.stdin:
        values = json.loads(line)
        if values:
            print(partition.append([value.encode() for value in values]), flush=True)
        else:
            print(partition.flush(), flush=True)
"""


class KilledSegmentlogLog:
    """segmentlog in another process, which a crash ends by SIGKILL; reads are made by a new one's store here."""

    acks_durably = True  # under every policy, an acknowledged record survives the death of its process
    reads_durable = False

    def __init__(self, folder: Path, policy: str) -> None:
        self.name = f"segmentlog, fsync={policy}, process killed"
        self._folder, self._policy = folder, policy
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-c", WRITER, str(self._folder), self._policy]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self._store = LogStore(self._folder, create=False, read_only=True)

    def _ask(self, values: list[str]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(values) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def append(self, values: list[bytes]) -> int:
        return self._ask([value.decode() for value in values])

    def sync(self) -> None:
        self._ask([])

    def crash(self) -> None:
        self._end()
        self._start()

    def _end(self) -> None:
        self._store.close()
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
        assert self.process.returncode == -signal.SIGKILL

    def read(self, from_offset: int) -> list[offset_reuse.ReceivedRecord]:
        return [
            (record.offset, record.value or b"")
            for batch in self._store.topic("t").partition(0).read(from_offset)
            for record in batch.records()
        ]

    def lost_ranges(self) -> list[tuple[int, int]]:
        return [(lost.base_offset, lost.end_offset) for lost in self._store.topic("t").partition(0).lost_ranges()]

    def __enter__(self) -> KilledSegmentlogLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()


def check_killed(make: Callable[[str], AbstractContextManager[offset_reuse.CrashableLog]], seed: int) -> None:
    """Check that no record is lost, no offset is skipped, and no reader gets an error."""
    with make("play") as log:
        outcome = play(log)
    assert outcome.conflicts == ()
    assert outcome.agree
    names = [b"alpha", b"beta", b"gamma", b"delta", b"epsilon", b"zeta"]
    assert outcome.a == outcome.b == tuple(enumerate(names))
    with make("torment") as log:
        outcome = torment(log, random.Random(seed), 3)
    assert outcome.conflicts == ()
    assert outcome.agree
    assert outcome.reported_lost == ()
    assert [offset for offset, _ in outcome.b] == list(range(len(outcome.b)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", seeds("scenario"))
def test_sigkill_takes_nothing_from_redis(redis: None, policy: Fsync, seed: int) -> None:
    """The page cache outlives the process: Redis loses nothing that it has written.

    Under everysec that is not all that it has acknowledged: while an fsync is under way it holds records back
    in memory. `RedisLog.crash` waits until they are written; this is a test of the checker, not of Redis.
    """
    check_killed(lambda _: RedisLog(policy, power_cut=False), seed)


@pytest.mark.parametrize("policy", ["always", "everysec", "never"])
@pytest.mark.parametrize("seed", seeds("scenario"))
def test_sigkill_takes_nothing_from_segmentlog(tmp_path: Path, policy: str, seed: int) -> None:
    """The page cache outlives the process, and an append is acknowledged when it is there: under every policy."""
    check_killed(lambda name: KilledSegmentlogLog(tmp_path / name, policy), seed)


# ---------------------------------------------------------------- the parts


def test_a_power_cut_takes_what_was_acknowledged_and_not_fsynced(redis: None) -> None:
    """The cut is at the mark, to the byte; and it is refused while the server lives."""
    with RedisServer("everysec") as server:
        server.client().set("alpha", "1")
        server.mark_synced()
        server.client().set("beta", "2")
        server.wait_written()
        with pytest.raises(RuntimeError, match="kill the server first"):
            server.cut_back_to_last_fsync()
        server.kill()
        assert server.cut_back_to_last_fsync() > 0
        assert server.cut_back_to_last_fsync() == 0
        server.restart()
        assert server.client().keys() == [b"alpha"]


def test_kafkaesque_pages(redis: None) -> None:
    """Pages fill up and open as its design says; old pages are deleted, and reads continue after them."""
    with RedisServer("no") as server:
        client = server.client()
        with pytest.raises(KeyError, match="create it first"):
            KafkaesqueTopic(client, "t").push([b"x"])
        topic = KafkaesqueTopic(client, "t").create(size=3, max_pages=2, ttl_s=1000)
        with pytest.raises(ValueError, match="exists already"):
            topic.create()
        assert len(topic) == 0
        assert topic.pull() == []
        assert [topic.push([b"%d" % number] * number) for number in (1, 2, 3, 5, 1)] == [0, 1, 3, 6, 11]
        assert len(topic) == 12
        assert client.zrange("t/pages", 0, -1, withscores=True) == [(b"0", 0), (b"1", 3), (b"2", 6), (b"3", 9)]
        assert [client.exists(f"t/pages/{page}") for page in range(4)] == [0, 1, 1, 1]
        assert client.ttl("t/pages/2") > 0
        assert client.ttl("t/pages/3") == -1, "the newest page must not expire, or the end of the log is forgotten"
        assert topic.pull(0, 4) == [(3, b"3"), (4, b"3"), (5, b"3"), (6, b"5")]
        assert topic.pull(10) == [(10, b"5"), (11, b"1")]
        assert topic.pull(12) == []
        big = KafkaesqueTopic(client, "big").create(size=4000)
        assert big.push([b"x"] * 10_000) == 0, "more than Lua unpacks at once"
        assert len(big) == len(big.pull(0, 20_000)) == 10_000


def test_import_understands_these_pages(redis: None) -> None:
    """`segmentlog import` and this topic mean the same layout: what is pushed here is found there, settings too."""
    with RedisServer("no") as server:
        topic = KafkaesqueTopic(server.client(), "t").create(size=3, max_pages=2, ttl_s=60)
        topic.push([b"%d" % number for number in range(12)])
        found = RedisTopic(server.url, "t")
        pages = found.pages()
        assert pages == [(1, 3), (2, 6), (3, 9)]
        assert found.config() == {"segment.records": 3, "retention.segments": 2, "retention.closed.ms": 60_000}
        values = [value for rows in found.rows(pages, 2) for value in rows.values]
        assert values == [value for _, value in topic.pull()] == [b"%d" % number for number in range(3, 12)]
        found._client.close()


def test_what_was_not_synced_is_gone(tmp_path: Path) -> None:
    """`WorstCaseDisk`: bytes need a sync of the file, names one of the folder, and renames and deletions too."""
    folder = tmp_path / "disk"
    folder.mkdir()
    (folder / "old").write_bytes(b"was there before")
    disk = WorstCaseDisk(folder)
    disk.mkdir(disk.path("sub"))
    for name in ("synced", "renamed", "named only", "sub/lost"):
        fd = disk.open(disk.path(name), os.O_RDWR | os.O_CREAT)
        disk.pwritev(fd, [b"synced bytes"], 0)
        if name != "named only":
            disk.fdatasync(fd)
        disk.close(fd)
    disk.sync_folder(disk.path(""))
    fd = disk.open(disk.path("synced"), os.O_RDWR)
    disk.pwritev(fd, [b"unsynced bytes"], 0)
    disk.close(fd)
    disk.rename(disk.path("renamed"), disk.path("new name"))
    disk.unlink(disk.path("old"))
    for number in range(20):  # files that come and go take the numbers of deleted ones, if they can
        disk.close(disk.open(disk.path(f"new {number}"), os.O_RDWR | os.O_CREAT))
    before = disk.boot_id()
    disk.power_cut()
    assert disk.boot_id() != before
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert found == {
        "old": b"was there before",
        "synced": b"synced bytes",
        "renamed": b"synced bytes",
        "named only": b"",
    }
    assert list((folder / "sub").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk"]
    disk.power_cut()  # keeps the files that were found: they are durable
    assert {path.name for path in folder.iterdir()} == {*found, "sub"}
    disk.close_held()


class _Forgetful(SegmentlogLog):
    """A log that is blind to lost ranges, as if the engine had never heard of them."""

    def read(self, from_offset: int) -> list[offset_reuse.ReceivedRecord]:
        try:
            return super().read(from_offset)
        except offset_reuse.LostPosition as lost:
            return super().read(lost.end_offset)
        except OffsetOutOfRange:
            return []

    def lost_ranges(self) -> list[tuple[int, int]]:
        return []


def test_the_scenario_finds_a_log_that_keeps_its_losses_to_itself() -> None:
    """The checker finds unreported losses, even if no offset is reused."""
    with _Forgetful("never") as log:
        outcome = play(log)
    assert not outcome.agree
    assert not outcome.reports_each_loss
    assert {conflict.rule for conflict in outcome.conflicts} == {"a record is gone outside every lost range"}
    assert outcome.verdict() == "DISAGREE"
