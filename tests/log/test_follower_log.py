"""`FollowerLog`: a log that another machine leads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from follower_trial import Trial, fetch_once, history_of, stored_batches
from leftovers import opened
from logs import FakeClock, NoSyncFileSystem, open_log, values_by_offset
from msgspec.structs import replace
from replication.cluster_model import LOST, Entry, _truncated, history

from segmentlog.config import TopicConfig
from segmentlog.errors import CorruptBatch, LogTruncated
from segmentlog.log.follower_log import FollowerLog
from segmentlog.log.handle import Handle
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.policy.replica_fetch import LogHistory, truncate_history
from segmentlog.policy.replication import TermStart
from segmentlog.records import EpochStart, LostRange


def open_follower(folder: Path) -> FollowerLog:
    """Open the log in ``folder``, and create the folder if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TopicConfig.from_mapping({"fsync": "never"})
    log = FollowerLog(opened(Handle(NoSyncFileSystem(), str(folder), "t", 0, lambda: config, FakeClock())))
    log.open()
    return log


def follow(leader: Partition, follower: FollowerLog) -> None:
    """Fetch until the follower has everything."""
    while fetch_once(leader, follower):
        pass


def test_a_follower_has_the_leaders_bytes_and_records(tmp_path: Path) -> None:
    """Segments, offsets, epochs and records are the leader's, and a reader on the follower's machine sees them."""
    leader = open_log(tmp_path / "leader", segment_records=4)
    for number in range(10):
        leader.append([b"%d" % number, b"x" * number])
    follower = open_follower(tmp_path / "follower")
    follow(leader, follower)
    assert follower.log_end_offset == 20
    assert follower.sync() == follower.durable_offset == 20
    assert follower.history.epochs == history_of(leader).epochs
    reader = open_log(tmp_path / "follower")
    assert values_by_offset(reader) == values_by_offset(leader)
    names = [path.name for path in sorted((tmp_path / "leader").glob("*.log"))]
    assert [path.name for path in sorted((tmp_path / "follower").glob("*.log"))] == names
    for name in names[:-1]:
        assert (tmp_path / "follower" / name).read_bytes() == (tmp_path / "leader" / name).read_bytes()


def test_batches_that_do_not_continue_the_log_are_refused(tmp_path: Path) -> None:
    """A wrong offset, segment or checksum, and offsets beyond the ceiling: nothing of the answer is appended."""
    leader = open_log(tmp_path / "leader")
    for _ in range(3):
        leader.append([b"a", b"b"])
    follower = open_follower(tmp_path / "follower")
    data, base = stored_batches(leader, 0, 1 << 20)
    with pytest.raises(CorruptBatch, match="below the ceiling 0"):
        follower.append(data, base)
    follower.note_ceiling(1000)
    later, _ = stored_batches(leader, 2, 1 << 20)
    with pytest.raises(CorruptBatch, match="the batch of offset 0"):
        follower.append(later, base)
    with pytest.raises(CorruptBatch, match="found segment 5"):
        follower.append(data, 5)
    damaged = bytearray(data)
    damaged[-1] ^= 1
    with pytest.raises(CorruptBatch, match="payload checksum"):
        follower.append(damaged, base)
    with pytest.raises(CorruptBatch, match="a payload of"):
        follower.append(data[:-1], base)
    assert follower.log_end_offset == 0
    assert follower.append(data, base) == 6


def test_a_truncation_removes_what_the_leader_lacks_and_keeps_the_ceiling(tmp_path: Path) -> None:
    """The removed records go to quarantine; the ceiling stays, because a leader may have relied on it."""
    leader = open_log(tmp_path / "leader")
    for number in range(5):
        leader.append([b"%d" % number])
    follower = open_follower(tmp_path / "follower")
    follow(leader, follower)
    ceiling = follower.offset_ceiling
    follower.truncate(3)
    assert (follower.log_end_offset, follower.durable_offset, follower.offset_ceiling) == (3, 3, ceiling)
    assert follower.history.log_end_offset == 3
    assert list((tmp_path / "follower" / "quarantine").iterdir())
    follow(leader, follower)
    assert values_by_offset(open_log(tmp_path / "follower")) == values_by_offset(leader)


def test_a_gap_of_the_leader_becomes_a_lost_range(tmp_path: Path) -> None:
    """Whoever received a record that is gone is told its range, also on the follower's machine (I7)."""
    leader = open_log(tmp_path / "leader")
    leader.append([b"a", b"b", b"c"])
    follower = open_follower(tmp_path / "follower")
    follow(leader, follower)
    leader.truncate(1)
    leader.append([b"d"])
    follow(leader, follower)
    assert follower.history.lost_ranges == history_of(leader).lost_ranges
    reader = open_log(tmp_path / "follower")
    assert values_by_offset(reader) == {0: b"a", 4: b"d"}
    with pytest.raises(LogTruncated):
        list(reader.read(2))


def test_a_gap_must_begin_at_the_end_and_be_below_the_ceiling(tmp_path: Path) -> None:
    """A lost range from elsewhere would hide records, or hand out offsets that another leader may have assigned."""
    follower = open_follower(tmp_path / "follower")
    follower.note_ceiling(100)
    with pytest.raises(CorruptBatch, match="a lost range from 0 on"):
        follower.add_lost_range(LostRange(5, 10, 3, "takeover"))
    with pytest.raises(CorruptBatch, match="below 100"):
        follower.add_lost_range(LostRange(0, 101, 3, "takeover"))
    follower.add_lost_range(LostRange(0, 10, 3, "takeover"))
    with pytest.raises(CorruptBatch, match="epoch 3 or later"):
        follower.add_lost_range(LostRange(10, 20, 2, "takeover"))
    assert follower.history == LogHistory((EpochStart(0, 0), EpochStart(3, 10)), (LostRange(0, 10, 3, "takeover"),), 10)


def test_transactions_have_the_same_last_stable_offset(tmp_path: Path) -> None:
    """Open, committed and aborted transactions: a reader of committed records sees the same on both machines."""
    leader = open_log(tmp_path / "leader")
    leader.append([b"plain"])
    leader.append([b"aborted"], producer=ProducerStamp(1 << 40, 0, 0, transactional=True))
    leader.end_transaction(1 << 40, 0, committed=False)
    leader.append([b"open"], producer=ProducerStamp(1 << 41, 0, 0, transactional=True))
    leader.append([b"after"])
    follower = open_follower(tmp_path / "follower")
    follow(leader, follower)
    reader = open_log(tmp_path / "follower")
    assert reader.last_stable_offset == leader.last_stable_offset == 3
    assert [batch.values for batch in reader.read(0, isolation="read_committed")] == [[b"plain"]]
    leader.end_transaction(1 << 41, 0, committed=True)
    follow(leader, follower)
    assert reader.last_stable_offset == leader.last_stable_offset == 6
    assert [entry.producer_id for entry in reader.producers()] == [1 << 40, 1 << 41]


def test_the_log_start_follows_the_leaders(tmp_path: Path) -> None:
    """Segments below the leader's log start are deleted. A log that ends before the leader's first begins again."""
    leader = open_log(tmp_path / "leader", segment_records=2, file_delete_delay_ms=0)
    follower, late = open_follower(tmp_path / "follower"), open_follower(tmp_path / "late")
    leader.append([b"a", b"b"])
    follow(leader, late)
    for _ in range(4):
        leader.append([b"c", b"d"])
    follow(leader, follower)
    leader.trim(7)
    follow(leader, follower)
    follow(leader, late)
    for log, name in ((follower, "follower"), (late, "late")):
        assert log.log_start_offset == 7
        assert values_by_offset(open_log(tmp_path / name)) == values_by_offset(leader)


def test_a_promoted_log_continues_at_its_ceiling_as_an_ordinary_one(tmp_path: Path) -> None:
    """The offsets up to the ceiling may have been assigned by the leader before: they become a lost range (R6)."""
    leader = open_log(tmp_path / "leader")
    leader.append([b"a"])
    follower = open_follower(tmp_path / "follower")
    follow(leader, follower)
    follower.note_ceiling(5000)
    ceiling = follower.offset_ceiling
    follower.promote(TermStart(7, 1, ceiling, ceiling + 100))
    follower.close()
    log = open_log(tmp_path / "follower")
    assert log.append([b"b"]) == ceiling
    assert log.epochs() == [EpochStart(0, 0), EpochStart(7, ceiling)]
    assert [(lost.base_offset, lost.end_offset, lost.epoch) for lost in log.lost_ranges()] == [(1, ceiling, 7)]


def test_epochs_without_a_record_are_not_part_of_a_history() -> None:
    """An epoch that a truncation leaves without a record is dropped; one whose lost range is cut stays, up to there."""
    epochs = (EpochStart(0, 0), EpochStart(2, 10), EpochStart(3, 20))
    history = LogHistory(epochs, (LostRange(15, 20, 3, "takeover"),), 25)
    assert truncate_history(history, 25) == history
    assert truncate_history(history, 18) == LogHistory(
        (*epochs[:2], EpochStart(3, 18)), (LostRange(15, 18, 3, "takeover"),), 18
    )
    assert truncate_history(history, 15) == LogHistory(epochs[:2], (), 15)
    assert truncate_history(history, 10) == LogHistory(epochs[:1], (), 10)
    assert truncate_history(history, 0) == LogHistory(epochs[:1], (), 0)


def test_histories_are_truncated_as_in_the_model() -> None:
    """`truncate_history` and the model of replication agree on every truncation of random logs."""
    rng = random.Random("histories")
    for _ in range(300):
        entries, offset, term = [], 0, 1
        for number in range(rng.randrange(1, 12)):
            if rng.random() < 0.3:
                term += rng.randrange(1, 3)
                gap = rng.randrange(4)
                if gap:
                    entries.append(Entry(offset, offset + gap, term, LOST))
                    offset += gap
            entries.append(Entry(offset, offset + 1, term, number))
            offset += 1
        log = tuple(entries)
        for cut in range(1, offset + 1):
            expected, found = history(_truncated(log, cut)), truncate_history(history(log), cut)
            assert found.log_end_offset == expected.log_end_offset == cut
            assert tuple(found.epochs) == tuple(expected.epochs), (log, cut)
            assert found.lost_ranges == expected.lost_ranges, (log, cut)


def test_no_power_cut_breaks_a_promise_of_a_follower() -> None:
    """One life; `tests/crash/test_follower_cuts.py` has thousands."""
    assert Trial(4).run(rounds=2, operations=25, variants=6) > 300


@pytest.mark.parametrize("mistake", ["gap", "ceiling", "unsynced"])
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial notices a follower that recovers like a leader, forgets its ceiling, or confirms unsynced records."""
    if mistake == "gap":
        monkeypatch.setattr("segmentlog.log.recovery.log_recovery._LogScan.replicated", None)
    elif mistake == "ceiling":

        def note_in_memory(self: FollowerLog, ceiling: int) -> None:
            log = self._handle.page.log.read()
            self._handle.ledger.publish(replace(log, offset_ceiling=max(log.offset_ceiling, ceiling)))

        monkeypatch.setattr(FollowerLog, "note_ceiling", note_in_memory)
    else:
        monkeypatch.setattr(FollowerLog, "durable_offset", property(lambda self: self.log_end_offset))

    def run() -> None:
        for seed in range(1, 6):
            Trial(seed).run(1, 25, 6)

    with pytest.raises(AssertionError):
        run()
