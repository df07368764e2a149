"""Restores to a time and to offsets: records that are left out or kept, and the work that continues after them.

SEGMENTLOG_REWINDING_ROUNDS random histories
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from logs import FakeClock, NoSyncFileSystem, tree_bytes, values_by_offset
from msgspec.structs import replace
from objects.buckets import Memory
from objects.rewinding_trial import Committing, Trial
from seeds import seeds, share

from segmentlog.errors import InvalidConfig, LogTruncated, SegmentlogError, ShippingRefused
from segmentlog.objects.restore import cut_points, point_in_time
from segmentlog.objects.restore.cut_points import cut_partition
from segmentlog.objects.restore.restore import Restored, restore
from segmentlog.objects.restore.transaction_cuts import ConsistentCuts
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died, FaultyFileSystem

ROUNDS = int(os.environ.get("SEGMENTLOG_REWINDING_ROUNDS", "6"))
"""Histories of each kind."""


def run_trial(folder: Path, seed: str, *, forgetful: bool = False, restores: int = 2) -> None:
    """Run one history and restores of it."""
    folder.mkdir()
    trial = Trial(folder, seed, forgetful=forgetful)
    try:
        trial.run(40)
        for number in range(restores):
            trial.restore_at_random(number)
    finally:
        trial.close()


@pytest.mark.parametrize("forgetful", [False, True])
@pytest.mark.parametrize("seed", seeds("rewinding"))
def test_what_is_below_the_cut_is_there_and_nothing_else(tmp_path: Path, seed: int, forgetful: bool) -> None:
    """Random histories: transactions are complete, offsets are unique, and no committed offset is after the cut."""
    for number in range(share(ROUNDS, "rewinding")):
        run_trial(tmp_path / str(number), f"{seed}/{number}/{forgetful}", forgetful=forgetful)
        shutil.rmtree(tmp_path / str(number))


@pytest.mark.parametrize(
    "history",
    ["1/87/False"],  # a position in a range that was truncated before it was shipped
)
def test_histories_that_found_something(tmp_path: Path, history: str) -> None:
    """These histories found faults before, and always run."""
    run_trial(tmp_path / "found", history, forgetful=history.endswith("True"))


# ---------------------------------------------------------------- ways to break it


def patched(where: object, name: str, value: object) -> Callable[[], Any]:
    """Return a patch of one attribute."""
    return lambda: mock.patch.object(where, name, value)


def _resumed_at_the_cut(part: Any, offset: int, reason: str, now_ms: int) -> Any:
    cut = cut_partition(part, offset, reason, now_ms)
    lost = tuple(one for one in cut.lost_ranges if one.base_offset != offset)
    return replace(cut, offset_grant=offset, lost_ranges=lost)


SABOTAGES: dict[str, Callable[[], Any]] = {
    "transactions torn": patched(point_in_time, "extend_cuts", lambda cuts, *_: ConsistentCuts(dict(cuts))),
    "nothing cut in files": patched(point_in_time.PointInTimeRestore, "truncate_files", lambda self: None),
    "nothing taken back": patched(point_in_time.PointInTimeRestore, "undo_transactions", lambda self: None),
    "positions left where they are": patched(
        point_in_time.PointInTimeRestore, "_move_committed_offsets", lambda self, log, where: None
    ),
    "a cut too far": patched(point_in_time, "bytes_below", lambda data, offset, path: b""),
    "offsets handed out again": patched(cut_points, "cut_partition", _resumed_at_the_cut),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotage_is_caught(tmp_path: Path, name: str) -> None:
    """The check of the random histories detects each of these faults."""
    for number in range(30):
        try:
            with SABOTAGES[name]():
                run_trial(tmp_path / str(number), f"sabotage/{number}")
        except (SegmentlogError, AssertionError) as error:
            print(f"round {number}: {error}")
            return
    pytest.fail("nobody noticed in 30 rounds")


# ---------------------------------------------------------------- one by one


class Shipped:
    """A store that is shipped, and restores of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.bucket = Memory()
        self.store = LogStore(folder / "store", background=False, fs=NoSyncFileSystem(), clock=self.clock)

    def topic(self, name: str, count: int, **settings: Any) -> None:
        """Create a topic of ``count`` records, one a second."""
        log = self.store.create_topic(name, fsync="always", compression_type="none", **settings).partition(0)
        for number in range(count):
            log.append([b"%s-%d" % (name.encode(), number)])
            self.clock.advance(1000)

    def ship(self) -> None:
        """Ship everything."""
        shipper = Shipper(self.store._topics, self.bucket, parallel=0)
        shipper.ship()
        shipper.close()

    def restore(self, name: str = "restored", *topics: str, fs: Any = None, **options: Any) -> Restored:
        """Restore into a folder next to the store."""
        files = fs or NoSyncFileSystem()
        path = str(self.folder / name)
        return restore(self.bucket, path, topics, fs=files, clock=self.clock, parallel=0, **options)

    def open(self, name: str = "restored") -> LogStore:
        """Open the restored store."""
        return LogStore(self.folder / name, background=False, fs=NoSyncFileSystem(), clock=self.clock)

    def values(self, topic: str, name: str = "restored") -> list[bytes | None]:
        """Return the values of a topic of the restored store."""
        with self.open(name) as store:
            return list(values_by_offset(store.topic(topic).partition(0)).values())


@pytest.fixture
def shipped(tmp_path: Path) -> Iterator[Shipped]:
    """Yield an empty store that is shipped."""
    made = Shipped(tmp_path)
    yield made
    made.store.close()


def test_a_batch_is_cut_in_two(shipped: Shipped) -> None:
    """Records after the cut are in no file of the restored store, which continues after all promised offsets."""
    shipped.topic("a", 0, segment_records=4)
    log = shipped.store.topic("a").partition(0)
    log.append([b"first-%d" % number for number in range(3)])
    log.append([b"second-%d" % number for number in range(3)])
    log.append([b"third"])
    shipped.ship()
    done = shipped.restore(offsets={("a", 0): 4})
    assert [(cut.topic, cut.partition, cut.offset, cut.end_offset) for cut in done.cuts] == [("a", 0, 4, 7)]
    files = b"".join(tree_bytes(shipped.folder / "restored").values())
    assert b"second-0" in files
    assert b"second-1" not in files
    assert b"third" not in files
    (part,) = done.manifest.topics[0].partitions
    with shipped.open() as store:
        log = store.topic("a").partition(0)
        assert list(values_by_offset(log)) == [0, 1, 2, 3]
        (lost,) = log.lost_ranges()
        assert (lost.base_offset, lost.end_offset) == (4, part.offset_grant + 1)
        assert lost.reason == "left out by a restore to offsets"
        with pytest.raises(LogTruncated, match="left out by a restore"):
            log.check_position(7)
        assert log.check_position(4) == log.append([b"on"]) == part.offset_grant + 1
        assert log.epoch > part.epoch
    assert b"second-1" not in b"".join(tree_bytes(shipped.folder / "restored").values()), "nor in quarantine"


def test_to_a_time(shipped: Shipped) -> None:
    """The order of offsets counts; an early time leaves nothing, a late one everything; datetimes work, too."""
    began_ms = shipped.clock.now_ms()
    shipped.topic("a", 6, segment_records=2)
    shipped.ship()
    for number, (at, count) in enumerate(
        [(began_ms - 1, 0), (began_ms, 1), (began_ms + 2999, 3), (began_ms + 3000, 4), (began_ms + 10**9, 6), (-5, 0)]
    ):
        done = shipped.restore(str(number), at=at)
        assert len(shipped.values("a", str(number))) == count
        assert bool(done.cuts) == (count < 6)
    shipped.restore("dated", at=datetime.fromtimestamp((began_ms + 1000) / 1000, UTC))
    assert len(shipped.values("a", "dated")) == 2


def test_what_lies_wholly_behind_the_cut_is_not_brought(shipped: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments completely before the time are restored but not inspected."""
    shipped.topic("a", 20, segment_records=2)
    shipped.topic("b", 1)
    with shipped.store.producer(name="p") as producer:
        producer.send_many("a", [b"idempotent"])
        with producer.transaction():
            producer.send_many("b", [b"x"])
    shipped.ship()
    asked: Counter[str] = Counter()
    real = shipped.bucket.get

    def get(key: str) -> tuple[bytes, str]:
        asked[key] += 1
        return real(key)

    monkeypatch.setattr(shipped.bucket, "get", get)
    shipped.restore(offsets={("a", 0): 5})
    assert sum(key.startswith("segments/") for key in asked.elements()) == 3
    asked.clear()
    shipped.restore("timed", at=shipped.clock.now_ms() - 16_000)
    assert len(shipped.values("a", "timed")) == 6
    assert sum(key.startswith("segments/") for key in asked.elements()) <= 5


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"offsets": {("b", 0): 1}}, ShippingRefused, "b/0: the topic is not among the topics to restore"),
        ({"offsets": {("a", 1): 1}}, ShippingRefused, "a/1: the topic has partitions 0 to 0"),
        ({"offsets": {("a", 0): 1}}, ShippingRefused, "a/0 cannot be cut at offset 1: its log begins at 2"),
        ({"offsets": {("a", 0): 9}}, ShippingRefused, "a/0 cannot be cut at offset 9: its log ends at 6"),
        ({"offsets": {("a", 0): -1}}, InvalidConfig, "a whole number of at least 0"),
        ({"offsets": {"a": 1}}, InvalidConfig, "topic, partition"),
        ({"offsets": {("__consumer_offsets", 0): 0}}, ShippingRefused, "__consumer_offsets cannot be cut"),
        ({"offsets": {("a", 0): 3}, "at": 1}, InvalidConfig, "either a time or offsets"),
        ({"at": "now"}, InvalidConfig, "milliseconds since 1970"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    shipped: Shipped, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """The error has the partition and the reason; no file of the restore remains."""
    shipped.topic("a", 6)
    shipped.store.topic("a").partition(0).trim(2)
    shipped.ship()
    with pytest.raises(error, match=words):
        shipped.restore(**options)
    assert not (shipped.folder / "restored").exists()


def test_at_the_end_and_at_the_begin(shipped: Shipped) -> None:
    """A cut at the end removes nothing; at the beginning it removes all records, but the state of producers stays."""
    shipped.topic("a", 6)
    shipped.store.topic("a").partition(0).trim(2)
    shipped.ship()
    assert shipped.restore("whole", offsets={("a", 0): 6}).cuts == ()
    assert len(shipped.values("a", "whole")) == 4
    assert shipped.restore("empty", offsets={("a", 0): 2}).cuts[0].offset == 2
    assert shipped.values("a", "empty") == []


@pytest.mark.parametrize("options", [{"offsets": {("a", 0): 5, ("b", 0): 0}}, {"at": None}])
def test_killed_anywhere_it_goes_on(shipped: Shipped, options: dict[str, Any]) -> None:
    """A restore with the same options continues; with other options, the error names the options of the first one."""
    shipped.topic("a", 8, segment_records=3)
    shipped.topic("b", 3)
    with shipped.store.producer(name="p") as producer, producer.transaction():
        producer.send_many("a", [b"x"])
        producer.send_many("b", [b"y"])
        producer.commit_offsets(Committing(shipped.store, 0), {TopicPartition("a", 0): 8})
    shipped.ship()
    if "at" in options:
        options = {"at": shipped.clock.now_ms() - 4_500}
    shipped.restore("whole", **options)
    wanted = shipped.values("a", "whole"), shipped.values("b", "whole")
    call, died = 1, True
    while died:
        name, files = f"killed-{call}", FaultyFileSystem()
        files.die_at(call)
        try:
            shipped.restore(name, fs=files, **options)
            died = False
        except Died:
            died = True
        if not (shipped.folder / name / "store.json").exists():
            if (shipped.folder / name / "@restoring").exists():
                with pytest.raises(ShippingRefused, match="another unfinished restore"):
                    shipped.restore(name)
            shipped.restore(name, **options)
        assert (shipped.values("a", name), shipped.values("b", name)) == wanted, f"killed at call {call}"
        call += 53
    assert call > 100


def test_positions_go_back_with_what_committed_them(shipped: Shipped) -> None:
    """Offsets return to their earlier values, where those are known.

    Offsets after a cut move to it, the others stay.
    """
    shipped.topic("in", 9)
    shipped.topic("out", 2)
    shipped.topic("other", 5)
    other, source = TopicPartition("other", 0), TopicPartition("in", 0)
    shipped.store.groups.reset("group", {source: 3, other: 4})
    shipped.store.groups.reset("plain", {other: 1})
    with shipped.store.producer(name="p") as producer, producer.transaction():
        producer.send_many("out", [b"x"])
        producer.commit_offsets(Committing(shipped.store, 0), {source: 7})
    shipped.ship()
    done = shipped.restore(offsets={("out", 0): 2, ("other", 0): 2})
    assert "committed offsets of these groups were moved back: group" in done.warnings
    with shipped.open() as store:
        found = {
            (group, entry.topic): entry.committed and entry.committed.offset
            for group in store.groups.names() for entry in store.groups.describe(group).partitions
        }  # fmt: skip
        assert found == {("group", "in"): 3, ("group", "other"): 2, ("plain", "other"): 1}
        with store.producer(name="p") as producer, producer.transaction():
            producer.send_many("out", [b"again"])
        records = [record.value for record in store.consumer("out", isolation="read_committed")]
        assert records == [b"out-0", b"out-1", b"again"]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_position_that_was_the_first(shipped: Shipped, compacted: bool) -> None:
    """It is deleted with its transaction. If there may have been an earlier offset, it stays, with a warning."""
    shipped.topic("in", 9)
    shipped.topic("out", 2)
    source = TopicPartition("in", 0)
    with shipped.store.producer(name="p") as producer, producer.transaction():
        producer.send_many("out", [b"x"])
        producer.commit_offsets(Committing(shipped.store, 0), {source: 7})
    positions = shipped.store.topic("__consumer_offsets").partition(0)
    positions.flush()
    if compacted:
        positions.roll()
        positions.compact()
    shipped.ship()
    done = shipped.restore(offsets={("out", 0): 2})
    is_told = any("were not moved back" in warning and "group" in warning for warning in done.warnings)
    assert is_told == compacted
    with shipped.open() as store:
        found = [entry.committed for entry in store.groups.describe("group").partitions if entry.committed]
        assert [committed.offset for committed in found] == ([7] if compacted else [])


def test_a_transaction_is_left_out_as_a_whole(shipped: Shipped) -> None:
    """If one partition is cut, the others end before the transaction's marker; earlier commits stay."""
    for name in "ab":
        shipped.topic(name, 0)
    with shipped.store.producer(name="p") as producer:
        for value in (b"1", b"2", b"3"):
            shipped.clock.advance(10)
            with producer.transaction():
                producer.send_many("a", [value])
                producer.send_many("b", [value])
    shipped.ship()
    done = shipped.restore(offsets={("a", 0): 2})
    assert [(cut.topic, cut.offset, cut.wanted_offset) for cut in done.cuts] == [("a", 2, 2), ("b", 3, None)]
    with shipped.open() as store:
        for name in "ab":
            assert [record.value for record in store.consumer(name, isolation="read_committed")] == [b"1"]
            assert store.topic(name).partition(0).open_transactions() == []


@pytest.mark.parametrize("is_told", [False, True])
def test_the_end_of_a_transaction_has_a_time(shipped: Shipped, is_told: bool) -> None:
    """A transaction that was decided after the time counts as not committed, whether or not its marker is on disk."""
    shipped.topic("a", 0)
    with shipped.store.producer(name="p") as producer, producer.transaction():
        at = shipped.clock.now_ms()
        producer.send_many("a", [b"x"], timestamps=[at])
        shipped.clock.advance(10)
    if is_told:
        shipped.store.topic("a").partition(0).flush()
    shipped.ship()
    shipped.restore("before", at=at)
    shipped.restore("behind", at=at + 10)
    for name, count in (("before", 0), ("behind", 1)):
        with shipped.open(name) as store:
            for _ in range(3):
                store.finish_transactions()
            assert len(list(store.consumer("a", isolation="read_committed"))) == count


def test_what_compaction_has_taken_is_told(shipped: Shipped) -> None:
    """A key that was written again after the cut is missing before it."""
    shipped.topic("a", 0, cleanup_policy="compact", segment_records=2)
    log = shipped.store.topic("a").partition(0)
    for number in range(6):
        log.append([b"%d" % number], [b"key"])
    log.compact()
    shipped.ship()
    done = shipped.restore(offsets={("a", 0): 2})
    assert any("compacted after the restore point: a;" in warning for warning in done.warnings)
    assert shipped.restore("whole", offsets={("a", 0): 6}).warnings == ()


def test_of_some_topics(shipped: Shipped) -> None:
    """Partitions that are not restored cannot be cut."""
    shipped.topic("a", 3)
    shipped.topic("b", 3)
    shipped.ship()
    with pytest.raises(ShippingRefused, match="b/0: the topic is not among the topics to restore"):
        shipped.restore("one", "a", offsets={("b", 0): 1})
    shipped.restore("one", "b", offsets={("b", 0): 1})
    with shipped.open("one") as store:
        assert store.topics() == ["b"]
