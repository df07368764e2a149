"""A transaction is shipped as a whole, whenever it is decided."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.local.partition_snapshot import LocalPartition
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.upload.segment_uploader import SegmentUploader
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.policy import upload_policy
from segmentlog.policy.upload_policy import LocalLog
from segmentlog.store import LogStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Yield a store with two topics that were shipped once."""
    with LogStore(tmp_path / "store", background=False) as opened:
        opened.create_topic("a", 2, fsync="always")
        opened.create_topic("b", fsync="always")
        yield opened


@pytest.fixture
def shipper(tmp_path: Path, store: LogStore) -> Iterator[Shipper]:
    """Yield a shipper of the store, without threads."""
    made = Shipper(store._topics, LocalBucket(str(tmp_path / "bucket")), parallel=0)
    made.run_cycle()
    yield made
    made.close()


def commit(store: LogStore, name: str) -> None:
    """Commit a transaction over all partitions."""
    with store.producer(name=name) as producer, producer.transaction():
        for topic, partition in (("a", 0), ("a", 1), ("b", 0)):
            producer.send(topic, name.encode(), partition=partition)


def visible(tmp_path: Path, folder: str) -> dict[str, int]:
    """Return how many records of each transaction a restore shows."""
    restore(LocalBucket(str(tmp_path / "bucket")), str(tmp_path / folder))
    with LogStore(tmp_path / folder, background=False) as restored:
        restored.finish_transactions()
        values = [record.value for record in restored.consumer("a", "b", isolation="read_committed")]
    return {str(value, "ascii"): values.count(value) for value in sorted(set(filter(None, values)))}


def test_one_that_is_decided_while_its_partitions_are_looked_at(
    tmp_path: Path, store: LogStore, shipper: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction ends after each scan of a partition: early scans lack its data, late ones have its markers."""
    commit(store, "first")
    real = LocalPartition.snapshot
    count = 0

    def look(self: LocalPartition) -> LocalLog | None:
        nonlocal count
        found = real(self)
        if not self.partition.topic.startswith("__") and count < 20:
            count += 1
            commit(store, f"meanwhile-{count}")
        return found

    monkeypatch.setattr(LocalPartition, "snapshot", look)
    for round_ in range(4):
        shipper.run_cycle()
        found = visible(tmp_path, f"restored-{round_}")
        assert found["first"] == 3
        assert set(found.values()) == {3}, found
    assert count > 4
    monkeypatch.undo()
    shipper.run_cycle()
    assert len(visible(tmp_path, "in-the-end")) == count + 1


def test_one_whose_data_has_to_wait_holds_back_all_of_it(
    tmp_path: Path, store: LogStore, shipper: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that has fallen behind, as segments are being uploaded, keeps back the others, and the decision."""
    monkeypatch.setattr(upload_policy, "TAIL_BYTES", 2000)
    monkeypatch.setattr("segmentlog.objects.upload.plan.TAIL_BYTES", 2000)
    log = store.topic("a").partition(1)
    for number in range(50):
        log.append([b"%d" % number * 50])
    log.roll()
    commit(store, "held")
    monkeypatch.setattr(SegmentUploader, "start", lambda self, planned: 1)
    before = store.topic("b").partition(0).shipped_offset
    shipper.run_cycle()
    assert store.topic("b").partition(0).shipped_offset == before
    assert "held" not in visible(tmp_path, "restored")
    monkeypatch.undo()
    shipper.ship()
    assert visible(tmp_path, "in-the-end")["held"] == 3
