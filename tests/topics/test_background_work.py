"""Background work of a store: tick by tick without threads; and its threads, which end with the store."""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from logs import FakeClock
from waiting import wait_until

import segmentlog
from segmentlog.errors import InvalidConfig, ReadOnlyStore
from segmentlog.store import LogStore
from segmentlog.topics import background_work
from segmentlog.topics.compaction_scheduler import Throttle
from segmentlog.topics.topic_folders import TopicFile, TopicFolders

DAY_MS = 86_400_000


def open_store(path: Path, clock: FakeClock | None = None, **options: object) -> LogStore:
    """Return a store without threads, on a clock that stands still."""
    return LogStore(path, background=False, clock=clock or FakeClock(), **options)  # type: ignore[arg-type]


def fill(store: LogStore, topic: str, segments: int, **config: object) -> None:
    """Create a topic of ``segments`` sealed segments of ten records, all with one key."""
    partition = store.create_topic(topic, config={"segment.records": 10, **config}).partition(0)
    for _ in range(segments + 1):
        partition.append([b"x"] * 10, keys=[b"k"] * 10)


# ---------------------------------------------------------------- retention


def test_retention_goes_through_every_topic(tmp_path: Path) -> None:
    """Retention handles every topic, also unopened ones; topics that keep everything are left alone."""
    with open_store(tmp_path) as store:
        for name in ("a", "b"):
            fill(store, name, 5, **{"retention.segments": 2})
        fill(store, "forever", 5, **{"retention.ms": -1})
    with open_store(tmp_path) as store:
        assert store.retention_tick() > 0
        assert [store.topic(name).partition(0).log_start_offset for name in ("a", "b", "forever")] == [30, 30, 0]
        assert ("forever", 0) in store.recovery_reports(), "opened by this test only"


def test_a_long_round_is_gone_through_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long round is divided: a tick stops in the middle, and the next one continues."""
    monkeypatch.setattr(background_work, "_SLICE_S", 0.0)
    names = ("a", "b", "c")
    with open_store(tmp_path) as store:
        for name in names:
            fill(store, name, 5, **{"retention.segments": 2})
        starts, pauses = [], []
        while not pauses or pauses[-1] < 1:
            pauses.append(store.retention_tick())
            starts.append([store.topic(name).partition(0).log_start_offset for name in names])
        assert starts == [[30, 0, 0], [30, 30, 0], [30, 30, 30], [30, 30, 30]]
        assert max(pauses[:-1]) < 1


def test_retention_waits_between_its_rounds_and_notices_time(tmp_path: Path) -> None:
    """The pause between scans follows the shortest limit of a topic.

    A quiet topic rolls, and its segments are deleted.
    """
    clock = FakeClock()
    with open_store(tmp_path, clock) as store:
        fill(store, "t", 1, **{"retention.ms": 8000, "segment.ms": 8000, "file.delete.delay.ms": 0})
        log = store.topic("t").partition(0)
        assert store.retention_tick() == pytest.approx(2.0)
        assert log.log_start_offset == 0
        clock.advance(2000)
        store.retention_tick()
        assert log.log_start_offset == 0
        clock.advance(6001)
        store.retention_tick()
        assert log.log_start_offset == log.log_end_offset == 20
        assert [segment.size_bytes for segment in log.segments()] == [0]


def test_two_threads_go_on_with_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads share one round: each waits for its turn."""
    looking, may_go_on = threading.Event(), threading.Event()
    read = TopicFolders.read

    def slow(self: TopicFolders, name: str, topic_id: str | None = None) -> TopicFile:
        if threading.current_thread() is not threading.main_thread():
            looking.set()
            may_go_on.wait(30)
        return read(self, name, topic_id)

    with open_store(tmp_path) as store, ThreadPoolExecutor(2) as pool:
        for name in ("a", "b"):
            fill(store, name, 5, **{"retention.segments": 2})
        monkeypatch.setattr(TopicFolders, "read", slow)
        first = pool.submit(store.retention_tick)
        assert looking.wait(30)
        second = pool.submit(store.retention_tick)
        time.sleep(0.05)
        may_go_on.set()
        assert first.result(30) > 0
        assert second.result(30) > 0
        assert [store.topic(name).partition(0).log_start_offset for name in ("a", "b")] == [30, 30]


def test_an_error_in_one_partition_keeps_no_other_from_retention(tmp_path: Path) -> None:
    """An error in one partition does not stop retention in others; the first error is raised at the end."""
    with open_store(tmp_path) as store:
        for name in ("a", "b", "c"):
            fill(store, name, 5, **{"retention.segments": 2})
        store.topic("b").partition(0).handle.page.failed = 1
        with pytest.raises(segmentlog.PartitionFailed, match="b/0"):
            store.retention_tick()
        assert [store.topic(name).partition(0).log_start_offset for name in ("a", "b", "c")] == [30, 0, 30]


def test_put_aside_files_go_when_their_time_has_come(tmp_path: Path) -> None:
    """Files that a trim has left are deleted by a later tick, of this or another process."""
    clock = FakeClock()
    folder = tmp_path / "t" / "0"
    with open_store(tmp_path, clock) as store:
        fill(store, "t", 5, **{"retention.segments": 2, "file.delete.delay.ms": 60_000})
        store.retention_tick()
        assert len(list(folder.glob("*.deleted"))) == 3
    clock.advance(60_000)
    with open_store(tmp_path, clock) as store:
        store.retention_tick()
        assert list(folder.glob("*.deleted")) == []


def test_put_aside_files_of_a_topic_that_keeps_everything_go_too(tmp_path: Path) -> None:
    """Files that a trim has left are deleted in open topics without retention, too."""
    clock = FakeClock()
    folder = tmp_path / "t" / "0"
    with open_store(tmp_path, clock) as store:
        fill(store, "t", 5, **{"retention.ms": -1})
        store.retention_tick()
        store.topic("t").partition(0).trim(30)
        assert len(list(folder.glob("*.deleted"))) == 3
        clock.advance(60_000)
        store.retention_tick()
        assert list(folder.glob("*.deleted")) == []


# ---------------------------------------------------------------- compaction


def test_the_dirtiest_partition_is_compacted_first(tmp_path: Path) -> None:
    """The dirtiest partition is compacted first, one in each tick; the pause is 0 while more are due."""
    with open_store(tmp_path) as store:
        fill(store, "small", 2, **{"cleanup.policy": "compact"})
        store.topic("small").partition(0).compact()
        for _ in range(3):
            store.topic("small").partition(0).append([b"x"] * 10, keys=[b"k"] * 10)
        fill(store, "large", 9, **{"cleanup.policy": "compact"})
        ratios = [store.topic(name).partition(0).dirty_ratio() for name in ("small", "large")]
        assert 0.5 < ratios[0] < ratios[1] == 1.0
        assert store.cleaner_tick() == 0
        assert store.topic("large").partition(0).cleaned_offset == 90
        assert store.topic("small").partition(0).cleaned_offset == 20
        assert store.cleaner_tick() > 0
        assert store.topic("small").partition(0).cleaned_offset == 50
        assert store.cleaner_tick() > 0, "nothing is due"


def test_a_partition_that_cannot_be_compacted_holds_up_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A partition that cannot be compacted is skipped, reported and logged, and tried again after a change."""
    caplog.set_level(logging.WARNING)
    with open_store(tmp_path) as store:
        for name in ("bad", "good"):
            fill(store, name, 5, **{"cleanup.policy": "compact"})
        path = Path(store.topic("bad").partition(0).segments()[1].path)
        whole = path.read_bytes()
        path.write_bytes(whole[:-5] + b"zzzzz")
        while store.cleaner_tick() == 0:
            pass
        assert store.topic("good").partition(0).cleaned_offset == 50
        bad = store.topic("bad").partition(0)
        assert bad.cleaned_offset == 0
        assert "checksum" in store.health()["bad/0"]
        assert "checksum" in bad.cleaner_note().uncleanable
        assert any("bad/0: cannot be compacted" in line for line in caplog.messages)
        assert store.cleaner_tick() > 0
        path.write_bytes(whole)
        assert store.cleaner_tick() > 0
        assert bad.cleaned_offset == 0, "damage does not go away by itself"
        bad.trim(10)
        store.cleaner_tick()
        assert bad.cleaned_offset == 50
        assert store.health() == {}
        assert bad.cleaner_note().uncleanable == ""
        Path(bad.folder, "cleaner").write_bytes(b'{"uncleanable": "\xff"}')
        assert bad.cleaner_note().uncleanable == "", "a note that is no text is none"


def test_what_is_left_alone_is_the_topic_and_not_its_name(tmp_path: Path) -> None:
    """Skipping applies to the topic id: a topic that is created again under the name is compacted."""
    compacted = {"cleanup.policy": "compact"}
    with open_store(tmp_path) as store:
        for name in ("gone", "anew"):
            fill(store, name, 5, **compacted)
            path = Path(store.topic(name).partition(0).segments()[1].path)
            path.write_bytes(path.read_bytes()[:-5] + b"zzzzz")
        while store.cleaner_tick() == 0:
            pass
        assert sorted(store.health()) == ["anew/0", "gone/0"]
        for name in ("gone", "anew"):
            store.delete_topic(name)
        fill(store, "anew", 5, **compacted)
        store.cleaner_tick()
        assert store.topic("anew").partition(0).cleaned_offset == 50
        assert store.health() == {}


def test_a_full_disk_is_tried_again_later(tmp_path: Path) -> None:
    """After a full disk, compaction is tried again after one minute, then after two."""
    clock = FakeClock()
    with open_store(tmp_path, clock) as store:
        fill(store, "t", 5, **{"cleanup.policy": "compact"})
        log = store.topic("t").partition(0)
        attempts = []

        def refuse(*arguments: object, **options: object) -> None:
            attempts.append(clock.up_ms)
            raise segmentlog.DiskFull("a file", 1)

        log.compact, compact = refuse, log.compact  # type: ignore[method-assign,assignment]
        for _ in range(40):
            store.cleaner_tick()
            clock.advance(10_000)
        assert [after - before for before, after in pairwise(attempts)] == [60_000, 120_000]
        log.compact = compact  # type: ignore[method-assign]
        clock.advance(400_000)
        store.cleaner_tick()
        assert log.cleaned_offset == 50
        assert store.health() == {}


def test_tombstones_go_without_anything_new(tmp_path: Path) -> None:
    """Tombstones are removed after their delete horizon, even if the log is clean."""
    clock = FakeClock()
    with open_store(tmp_path, clock) as store:
        config = {"cleanup.policy": "compact", "delete.retention.ms": 100_000}
        log = store.create_topic("t", config=config).partition(0)
        log.append([b"v", None], keys=[b"k", b"k"])
        log.roll()
        store.cleaner_tick()
        assert [record.value for batch in log.read(0) for record in batch] == [None]
        clock.advance(99_999)
        assert log.compaction_due() is None
        clock.advance(1)
        assert "time" in str(log.compaction_due())
        store.cleaner_tick()
        assert list(log.read(0)) == []
        assert log.compaction_due() is None


def test_a_partition_at_work_elsewhere_is_left_to_it(tmp_path: Path) -> None:
    """A partition that another process compacts is skipped: background work does not wait for locks."""
    with open_store(tmp_path) as store:
        fill(store, "t", 5, **{"cleanup.policy": "delete,compact", "retention.segments": 2})
        with (tmp_path / "t" / "0" / "cleaner").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert store.topic("t").partition(0).compact().busy
            assert store.topic("t").partition(0).retain().busy
            store.cleaner_tick()
            store.retention_tick()
        assert store.topic("t").partition(0).cleaned_offset == 0
        assert not store.topic("t").partition(0).retain().busy


# ---------------------------------------------------------------- options, threads


def test_a_throttle_lets_so_much_through_a_second() -> None:
    """A throttle allows a burst of a fifth of a second, then its rate; None means no limit."""
    now_s = 100.0
    throttle = Throttle(1000, lambda: now_s)
    assert throttle.wait_s(200) == pytest.approx(0)
    assert throttle.wait_s(500) == pytest.approx(0.5)
    now_s += 0.5
    assert throttle.wait_s(0) == pytest.approx(0)
    assert Throttle(None).wait_s(10**12) == 0


@pytest.mark.parametrize("options", [{"cleaner_dedupe_buffer_bytes": 0}, {"cleaner_io_max_bytes_per_second": 0}])
def test_absurd_options_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    """Invalid options are refused; the error names the key."""
    with pytest.raises(InvalidConfig, match=r"cleaner\."):
        open_store(tmp_path, **options)


def workers() -> set[threading.Thread]:
    """Threads of stores, those included that an earlier test has left open."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("segmentlog-")}


def test_a_read_only_store_removes_nothing(tmp_path: Path) -> None:
    """A read-only store deletes nothing: its ticks raise, and it has no threads."""
    before = workers()
    with open_store(tmp_path) as store:
        fill(store, "t", 5, **{"retention.segments": 1})
    with segmentlog.open(tmp_path, read_only=True) as store:
        for tick in (store.retention_tick, store.cleaner_tick):
            with pytest.raises(ReadOnlyStore):
                tick()
        assert store.topic("t").partition(0).retain(dry_run=True).removed
        assert workers() <= before


def test_threads_retain_what_rolls_and_end_with_the_store(tmp_path: Path) -> None:
    """Threads of a store apply retention to new segments, and end with the store."""
    before = workers()
    with segmentlog.open(tmp_path) as store:
        fill(store, "t", 30, **{"retention.segments": 3})
        log = store.topic("t").partition(0)
        wait_until(lambda: log.log_start_offset >= 270)
        names = {thread.name for thread in workers() - before}
        assert {"segmentlog-flush", "segmentlog-retention", "segmentlog-cleaner"} <= names
    assert workers() <= before


def test_closing_ends_a_pass_that_is_under_way(tmp_path: Path) -> None:
    """Closing a store stops a slow compaction; the log is whole, and no temporary file remains."""
    with segmentlog.open(tmp_path, cleaner_io_max_bytes_per_second=100) as store:
        log = store.create_topic("t", cleanup_policy="compact", segment_bytes=4096).partition(0)
        for number in range(200):
            log.append([b"value %d" % number] * 20, keys=[b"k%d" % (number % 7)] * 20)
        time.sleep(0.5)  # it is at work, or waiting to be
    with segmentlog.open(tmp_path, background=False) as store:
        log = store.topic("t").partition(0)
        last = [record.value for batch in log.read(0) for record in batch][-1]
        assert last == b"value 199"
        log.compact()
        assert sum(len(batch) for batch in log.read(0)) >= 7
    assert not list((tmp_path / "t" / "0").glob("*.cleaned"))
