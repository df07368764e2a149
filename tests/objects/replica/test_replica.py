"""A replica: what others see who have it open, what it refuses, and what is left of one that was killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import FakeClock, values, values_by_offset
from objects.buckets import Memory

import segmentlog
from segmentlog.errors import DiskFull, InvalidConfig, ObjectStoreError, ReadOnlyStore, ShippingRefused, UnknownTopic
from segmentlog.log.replica_log import ReplicaLog
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.replica.replica import Replica, replica_status
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died, FaultyFileSystem


class Counting(Memory):
    """A bucket that counts what is asked of it, and fails if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.fails = False

    def get(self, key: str) -> tuple[bytes, str]:
        self.asked.append(key)
        if self.fails:
            raise ObjectStoreError(self.url, key, "no answer in time")
        return super().get(key)


@pytest.fixture
def bucket() -> Counting:
    """Return the bucket that the store is shipped to."""
    return Counting()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store of two topics, with segments."""
    with LogStore(tmp_path / "store", background=False) as opened:
        for name, partitions in (("a", 2), ("b", 1)):
            opened.create_topic(name, partitions, segment_records=2)
            for log in opened.topic(name).partitions():
                for number in range(5):
                    log.append([b"%s %d" % (name.encode(), number)])
        yield opened


def ship(store: LogStore, bucket: Memory) -> None:
    """Ship everything."""
    for log in store.opened_partitions():
        log.flush()
    shipper = Shipper(store._topics, bucket, parallel=0)
    shipper.ship()
    shipper.close()


def follow(bucket: Memory, folder: Path, **options: Any) -> Replica:
    """Return a replica without threads."""
    return Replica("memory://bucket", folder, threads=False, parallel=0, bucket=bucket, **options)


def contents(store: LogStore) -> dict[str, dict[int, bytes | None]]:
    """Return the values of all partitions."""
    return {
        f"{topic}/{log.number}": values_by_offset(log)
        for topic in store.topics() for log in store.topic(topic).partitions()
    }  # fmt: skip


def test_who_has_it_open_sees_what_is_shipped(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """A reader sees appends, rolls, retention, new settings, partitions and names without reopening the store."""
    ship(store, bucket)
    with follow(bucket, tmp_path / "copy") as replica:
        assert replica.refresh()
        assert not replica.refresh()
        with LogStore(tmp_path / "copy", background=False) as copy:
            assert copy.read_only
            assert contents(copy) == contents(store)
            log = copy.topic("a").partition(0)
            consumer = copy.consumer("a", start="latest")
            store.topic("a").partition(0).append([b"more", b"and more"])
            ship(store, bucket)
            assert replica.refresh()
            assert values(log)[-2:] == [b"more", b"and more"]
            assert [record.value for record in consumer] == [b"more", b"and more"]
            assert (log.durable_offset, log.shipped_offset, log.last_stable_offset) == (7, 7, 7)
            consumer.close()
            store.topic("a").partition(0).trim(3)
            store.alter_topic("a", retention_ms=77, partitions=3)
            ship(store, bucket)
            replica.refresh()
            assert log.log_start_offset == 3
            assert [segment.base_offset for segment in log.segments()] == [2, 4, 5]
            assert copy.topic("a").config.retention_ms == 77
            assert copy.topic("a").partition_count == 3
            store.rename_topic("a", "c")
            store.delete_topic("b")
            store.create_topic("b").partition(0).append([b"anew"])
            store.rename_topic("b", "a")
            store.rename_topic("c", "b")
            ship(store, bucket)
            replica.refresh()
            assert copy.topics() == ["a", "b"]
            assert contents(copy) == contents(store)
            with pytest.raises(UnknownTopic):
                values(log)
            with pytest.raises(ReadOnlyStore):
                copy.producer()


def test_aborted_and_open_transactions_are_not_shown(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """Readers of committed records see them once they are committed."""
    with follow_after(store, bucket, tmp_path) as replica, LogStore(tmp_path / "copy", background=False) as copy:
        log = copy.topic("b").partition(0)
        producer = store.producer(name="p", linger_ms=0)
        for verdict in ("abort", "commit", ""):
            producer.begin_transaction()
            producer.send("b", b"%s" % verdict.encode()).result()
            if verdict == "abort":
                producer.abort_transaction()
            elif verdict:
                producer.commit_transaction()
            ship(store, bucket)
            ship(store, bucket)  # markers, once they are on disk
            replica.refresh()
        assert values(log, isolation="read_committed")[5:] == [b"commit"]
        assert values(log)[5:] == [b"abort", b"commit", b""]
        assert log.last_stable_offset == store.topic("b").partition(0).last_stable_offset
        producer.abort_transaction()
        producer.close()


def follow_after(store: LogStore, bucket: Counting, tmp_path: Path) -> Replica:
    """Return a replica that has everything."""
    ship(store, bucket)
    replica = follow(bucket, tmp_path / "copy")
    replica.refresh()
    return replica


def test_killed_at_any_call_it_goes_on(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """Killed in the first cycle, or in one with new records, compaction and a trim; open readers continue."""
    store.create_topic("keys", cleanup_policy="compact", segment_records=3)
    keys = store.topic("keys").partition(0)
    for number in range(9):
        keys.append([b"%d" % number], [b"k%d" % (number % 2)])
    folder = tmp_path / "copy"
    ship(store, bucket)
    assert _killed_again_and_again(bucket, folder) > 20
    with LogStore(folder, background=False) as copy:
        assert contents(copy) == contents(store)
        keys.compact()
        store.topic("a").partition(0).trim(3)
        store.topic("b").partition(0).append([b"more"])
        ship(store, bucket)
        assert _killed_again_and_again(bucket, folder) > 10
        assert contents(copy) == contents(store)
    assert not list(folder.rglob("*.tmp"))


def _killed_again_and_again(bucket: Counting, folder: Path) -> int:
    """Have turns die at the first call, the second one...; how many it took until one came to its end."""
    for calls in range(1, 1000):
        files = FaultyFileSystem()
        files.die_at(calls * 3)
        replica = None
        try:
            replica = follow(bucket, folder, fs=files)
            replica.refresh()
        except Died:
            continue
        finally:
            if replica is not None:
                files.heal()
                replica.close()
        return calls
    raise AssertionError("it never came to its end")


def test_it_refuses_what_is_none_of_its_own(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """Other folders, other URLs and a second process are refused, and nothing changes there."""
    with pytest.raises(ShippingRefused, match="no store was shipped to this URL"):
        follow(bucket, tmp_path / "copy")
    ship(store, bucket)
    with pytest.raises(ShippingRefused, match="is a store; choose an empty or new folder"):
        follow(bucket, tmp_path / "store")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("of somebody")
    with pytest.raises(ShippingRefused, match="is not empty"):
        follow(bucket, tmp_path / "full")
    with follow(bucket, tmp_path / "copy") as first:
        first.refresh()
        with pytest.raises(ShippingRefused, match="another process refreshes"):
            follow(bucket, tmp_path / "copy")
    with pytest.raises(ShippingRefused, match="replica of another URL, store or set of topics"):
        follow(bucket, tmp_path / "copy", topics=["a"])
    for wrong in (0, -1, True, "1s"):
        with pytest.raises(InvalidConfig, match="interval_ms"):
            follow(bucket, tmp_path / "copy", interval_ms=wrong)
    with pytest.raises(ShippingRefused, match="closed"):
        first.refresh()


def test_topics_that_match(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """Other topics are left out, also later ones."""
    ship(store, bucket)
    with follow(bucket, tmp_path / "copy", topics=iter(["a*"])) as replica:
        replica.refresh()
        store.create_topic("a2").partition(0).append([b"x"])
        store.create_topic("b2").partition(0).append([b"x"])
        ship(store, bucket)
        replica.refresh()
    with LogStore(tmp_path / "copy", background=False) as copy:
        assert copy.topics() == ["a", "a2"]


def test_one_name_is_no_list_of_letters(tmp_path: Path) -> None:
    """A single name works for shipping, restoring and replicas."""
    url = f"file://{tmp_path}/bucket"
    with segmentlog.open(tmp_path / "store", background=False, ship=url, ship_topics="orders") as store:
        for name in ("orders", "o", "r"):
            store.create_topic(name).partition(0).append([b"x"])
        store.ship_tick()
    assert [topic.name for topic in require_manifest(open_bucket(url))[0].topics] == ["orders"]
    with segmentlog.open(tmp_path / "all", background=False) as store:
        for name in ("orders", "o", "r"):
            store.create_topic(name).partition(0).append([b"x"])
        store.ship(f"{url}2")
        with pytest.raises(InvalidConfig, match="topics"):
            store.ship(f"{url}3", topics=[7])  # type: ignore[list-item]
    segmentlog.replica(f"{url}2", tmp_path / "copy", topics="orders").close()
    restore(open_bucket(f"{url}2"), str(tmp_path / "restored"), "orders")
    for name in ("copy", "restored"):
        with segmentlog.open(tmp_path / name, background=False) as copy:
            assert copy.topics() == ["orders"]


def test_it_says_how_far_it_is(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """The status is right for the process that refreshes it, for others, and after the refreshing process ended."""
    clock = FakeClock()
    ship(store, bucket)
    with follow(bucket, tmp_path / "copy", clock=clock) as replica:
        assert replica.status.sequence == -1
        replica.refresh()
        clock.advance(3000)
        assert (replica.status.lag_s, replica.status.lag_records, replica.status.error) == (3.0, 0, "")
        assert replica.status.size_bytes == sum(
            segment.size_bytes for log in store.opened_partitions() for segment in log.segments()
        )
        bucket.fails = True
        with pytest.raises(ObjectStoreError):
            replica.refresh()
        assert "no answer in time" in replica.status.error
        with LogStore(tmp_path / "copy", background=False, clock=clock) as copy:
            assert "no answer in time" in copy.health()["replica"]
            bucket.fails = False
            store.topic("b").partition(0).append([b"x"])
            ship(store, bucket)
            replica.refresh()
            assert copy.health() == {}
            clock.advance(16_000)
            assert "no process has refreshed it for 16 s" in copy.health()["replica"]
    assert replica_status(str(tmp_path / "store")) is None
    (tmp_path / "copy" / "@replica-status").write_text("{")
    found = replica_status(str(tmp_path / "copy"))
    assert found is not None
    assert "the first refresh is not finished" in found.error


def test_a_tail_of_many_partitions_is_one_request(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """The tails of all partitions are in one request; local bytes are not requested."""
    many = store.create_topic("many", 30)
    for log in many.partitions():
        log.append([b"x"])
    with follow_after(store, bucket, tmp_path) as replica:
        for log in many.partitions():
            log.append([b"y"])
        ship(store, bucket)
        bucket.asked.clear()
        replica.refresh()
        assert len(bucket.asked) <= 3
        bucket.asked.clear()
        replica.refresh()
        assert bucket.asked == ["manifest.json"]


def test_a_damaged_object_is_refused_and_what_is_shown_stays(
    tmp_path: Path, store: LogStore, bucket: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the object; once it is intact, the next cycle continues."""
    monkeypatch.setattr("segmentlog.policy.upload_policy.INLINE_BYTES", 0)
    with follow_after(store, bucket, tmp_path) as replica, LogStore(tmp_path / "copy", background=False) as copy:
        before = contents(copy)
        store.topic("b").partition(0).append([b"x"])
        ship(store, bucket)
        key = max(key for key in bucket._objects if key.startswith("tails/"))
        data, tag = bucket._objects[key]
        bucket._objects[key] = bytes(len(data)), tag
        with pytest.raises(ShippingRefused, match="damaged"):
            replica.refresh()
        assert contents(copy) == before
        del bucket._objects[key]
        with pytest.raises(ShippingRefused, match="is missing, although the manifest refers to it"):
            replica.refresh()
        bucket._objects[key] = data, tag
        replica.refresh()
        assert contents(copy) == contents(store)


def test_a_thread_keeps_it_up(tmp_path: Path) -> None:
    """A thread refreshes it, as in `segmentlog.replica`; a consumer that follows sees records as they come."""
    url = f"file://{tmp_path}/bucket"
    with segmentlog.open(tmp_path / "store") as store:
        log = store.create_topic("a").partition(0)
        log.append([b"0"])
        store.ship(url)
        with segmentlog.replica(url, tmp_path / "copy", interval_ms=20) as replica:
            replica.refresh()
            seen: list[bytes | None] = []
            with segmentlog.open(tmp_path / "copy") as copy, copy.consumer("a", follow=True) as consumer:
                reader = threading.Thread(target=lambda: seen.extend(next(consumer).value for _ in range(3)))
                reader.start()
                for number in (b"1", b"2"):
                    log.append([number])
                    store.ship(url)
                reader.join(30)
                assert seen == [b"0", b"1", b"2"]


def test_positions_and_decisions_come_last(tmp_path: Path, store: LogStore, bucket: Counting, monkeypatch: Any) -> None:
    """A cycle that ends half way shows no offset of a missing record."""
    with store.producer(name="p", linger_ms=0) as producer:
        producer.begin_transaction()
        producer.send("b", b"x").result()
        producer.commit_transaction()
    store.groups.reset("g", {TopicPartition("b", 0): 2})
    ship(store, bucket)
    shown: list[str] = []
    real = ReplicaLog.publish
    monkeypatch.setattr(
        ReplicaLog, "publish", lambda log, *args, **options: (shown.append(log.folder), real(log, *args, **options))
    )
    with follow(bucket, tmp_path / "copy") as replica:
        replica.refresh()
    names = [Path(folder).parent.name for folder in shown]
    assert len(names) == 5
    assert set(names[:3]) == {"a", "b"}
    assert set(names[3:]) == {"__consumer_offsets", "__transaction_state"}


def test_a_replica_takes_over(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """A takeover in a folder that no process refreshes uses its files; killed at any call, it continues."""
    with follow_after(store, bucket, tmp_path), pytest.raises(ShippingRefused, match="stop that process first"):
        take_over(bucket, str(tmp_path / "copy"), parallel=0)
    with pytest.raises(ShippingRefused, match="replica of another URL"):
        take_over(_elsewhere(store), str(tmp_path / "copy"), parallel=0)
    wanted = contents(store)
    for calls in range(1, 1000, 3):
        files = FaultyFileSystem()
        files.die_at(calls)
        try:
            done = take_over(bucket, str(tmp_path / "copy"), fs=files, parallel=0)
            break
        except Died:
            continue
    assert calls > 60
    assert done.kept_bytes == done.size_bytes > 0
    with LogStore(tmp_path / "copy", background=False) as other:
        assert not other.read_only
        assert contents(other) == wanted
        assert other.topic("b").partition(0).log_end_offset > 1000
        assert not list((tmp_path / "copy").glob("@replica*"))


def _elsewhere(store: LogStore) -> Counting:
    other = Counting()
    other._objects = {}
    other.url = "memory://other"
    with LogStore(Path(store.path).parent / "other", background=False) as another:
        another.create_topic("x").partition(0).append([b"x"])
        ship(another, other)
    return other


@pytest.mark.parametrize("why", ["damaged", "is missing, although the manifest refers to it"])
def test_damage_in_one_partition_keeps_no_other_back(
    tmp_path: Path, store: LogStore, bucket: Counting, why: str
) -> None:
    """Only offsets and the ends of transactions, which depend on the damaged partition, wait."""
    with follow_after(store, bucket, tmp_path) as replica, LogStore(tmp_path / "copy", background=False) as copy:
        for name in ("a", "b"):
            for log in store.topic(name).partitions():
                log.append([b"new" * 100])
                log.roll()
        store.groups.reset("g", {TopicPartition("b", 0): 6})
        ship(store, bucket)
        key = max(key for key in bucket._objects if f"{store.topic('a').id}/0" in key and "." not in key)
        data, tag = bucket._objects.pop(key)
        if why == "damaged":
            bucket._objects[key] = bytes(len(data)), tag
        with pytest.raises(ShippingRefused, match=why):
            replica.refresh()
        assert [log.log_end_offset for log in copy.topic("a").partitions()] == [5, 6]
        assert copy.topic("b").partition(0).log_end_offset == 6
        assert copy.group_offsets.groups_with_any_offset() == []
        bucket._objects[key] = data, tag
        replica.refresh()
        assert copy.topic("a").partition(0).log_end_offset == 6
        assert copy.group_offsets.groups_with_any_offset() == ["g"]


@pytest.mark.long
def test_killed_while_topics_are_renamed_and_deleted(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """Killed at any call: downloaded files are used, and folders of former topics are removed."""
    ship(store, bucket)
    for calls in range(1, 1000):
        folder = tmp_path / str(calls)
        with follow(bucket, folder) as replica:
            replica.refresh()
        store.rename_topic("a", "c")
        store.rename_topic("b", "a")
        store.delete_topic("a")
        ship(store, bucket)
        files = FaultyFileSystem()
        files.die_at(calls)
        is_killed = False
        try:
            with follow(bucket, folder, fs=files) as replica:
                replica.refresh()
                files.heal()
        except Died:
            is_killed = True
        with follow(bucket, folder) as replica:
            bucket.asked.clear()
            replica.refresh()
        assert sorted(one.name for one in folder.iterdir() if one.is_dir()) == ["c"]
        store.rename_topic("c", "a")
        store.create_topic("b").partition(0).append([b"x"])
        ship(store, bucket)
        if not is_killed:
            break
    assert calls > 20


def test_a_reader_that_looks_before_what_was_compacted_away_is_removed(
    tmp_path: Path, store: LogStore, bucket: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists old and new files together; a file that is deleted meanwhile is not reported as missing."""
    store.create_topic("keys", cleanup_policy="compact", segment_records=3)
    keys = store.topic("keys").partition(0)
    for number in range(10):
        keys.append([b"%d" % number], keys=[b"k%d" % (number % 2)])
    ship(store, bucket)
    with follow(bucket, tmp_path / "copy") as replica:
        replica.refresh()
        with LogStore(tmp_path / "copy", background=False) as copy:
            log = copy.topic("keys").partition(0)
            keys.compact()
            ship(store, bucket)
            real = ReplicaLog.remove_other_segments
            looked: list[int] = []

            def remove_other_segments(mirrored: ReplicaLog, kept: Any) -> None:
                looked.append(len(log.segments()))
                real(mirrored, kept)

            monkeypatch.setattr(ReplicaLog, "remove_other_segments", remove_other_segments)
            replica.refresh()
            assert 4 in looked
            assert values_by_offset(log) == values_by_offset(keys)
            for offset in range(10):
                assert [batch.values for batch in log.read(offset)] == [batch.values for batch in keys.read(offset)]
            assert [one.base_offset for one in log.segments()] == [one.base_offset for one in keys.segments()]


class Full(FaultyFileSystem):
    """A file system that has no room for a topic for a while."""

    full = ""

    def make_folders(self, path: str) -> None:
        if self.full and path.startswith(self.full):
            raise DiskFull(path)
        super().make_folders(path)


@pytest.mark.parametrize("is_begun_anew", [False, True])
def test_a_turn_that_failed_at_renaming_is_made_good(
    tmp_path: Path, store: LogStore, bucket: Counting, is_begun_anew: bool
) -> None:
    """The next cycle of any process repairs it: it downloads nothing again, and finds no obstacle."""
    files, folder = Full(), tmp_path / "copy"
    ship(store, bucket)
    with follow(bucket, folder, fs=files) as replica:
        replica.refresh()
        store.rename_topic("b", "z")
        store.create_topic("new")
        ship(store, bucket)
        files.full = f"{folder}/new"
        with pytest.raises(DiskFull):
            replica.refresh()
        files.full = ""
        assert not (folder / "b").exists()
        bucket.asked.clear()
        if not is_begun_anew:
            replica.refresh()
    with follow(bucket, folder) as replica:
        replica.refresh()
    assert not [key for key in bucket.asked if key.startswith("segments/") and store.topic("z").id in key]
    assert sorted(one.name for one in folder.iterdir() if one.is_dir()) == ["a", "new", "z"]
    with LogStore(folder, background=False) as copy:
        assert contents(copy) == contents(store)
