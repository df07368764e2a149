"""Committed offsets of groups in a restore: a group that missed no record continues, others get an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from objects.buckets import Memory

from segmentlog.errors import LogTruncated
from segmentlog.format.file_names import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.store import LogStore


@pytest.fixture
def bucket() -> Memory:
    """Return the bucket that the store is shipped to."""
    return Memory()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Yield a store whose topic is synced only on request."""
    with LogStore(tmp_path / "store", background=False) as opened:
        opened.create_topic("t", fsync="never")
        yield opened


def transaction(store: LogStore, name: str, *values: bytes, committed: bool = True) -> None:
    """Run a transaction of a producer of that name: afterwards its data is on disk, but not its marker."""
    with store.producer(name=name, linger_ms=0) as producer:
        producer.begin_transaction()
        for value in values:
            producer.send("t", value).result()
        store.topic("t").partition(0).flush()
        if committed:
            producer.commit_transaction()
        else:
            producer.abort_transaction()


def read_all(store: LogStore, isolation: str = "read_committed") -> list[bytes | None]:
    """Return the values that a group reads to the end, and commit its offsets."""
    with store.consumer("t", group="g", start="earliest", follow=False, isolation=isolation) as consumer:
        found = [record.value for record in consumer]
        consumer.commit()
    for name in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC):
        if name in store.topics(internal=True):
            for log in store.topic(name).partitions():
                log.flush()
    return found


def position(store: LogStore) -> int:
    """Return the committed offset of the group."""
    (found,) = store.group_offsets.by_topic_id("g").values()
    return found.offset


def ship(store: LogStore, bucket: Memory) -> int:
    """Ship exactly what is on disk, and return the log end there."""
    shipper = Shipper(store._topics, bucket, parallel=0)
    shipper.run_cycle()
    shipper.close()
    assert shipper.manifest is not None
    (topic,) = (topic for topic in shipper.manifest.topics if topic.name == "t")
    return topic.partitions[0].end_offset


def reopened(bucket: Memory, folder: Path, *, taken: bool) -> LogStore:
    """Restore, or take over and ship so that appends have offsets; then finish decided transactions."""
    if taken:
        take_over(bucket, str(folder), parallel=0)
    else:
        restore(bucket, str(folder), parallel=0)
    store = LogStore(folder, background=False)
    if taken:
        ship(store, bucket)
    store.finish_transactions()
    return store


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("ends", [(True,), (False,), (True, True, False)])
def test_who_stands_behind_markers_that_were_not_shipped_missed_nothing(
    tmp_path: Path, store: LogStore, bucket: Memory, ends: tuple[bool, ...], taken: bool
) -> None:
    """Markers of transactions are not records: the group continues with the next record."""
    names = [f"p{number}" for number in range(len(ends))]
    producers = [store.producer(name=name, linger_ms=0) for name in names]
    for producer in producers:
        producer.begin_transaction()
        producer.send("t", producer.name.encode()).result()
    store.topic("t").partition(0).flush()
    for producer, committed in zip(producers, ends, strict=True):
        if committed:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
        producer.close()
    assert read_all(store) == [name.encode() for name, committed in zip(names, ends, strict=True) if committed]
    assert position(store) == 2 * len(ends)
    assert ship(store, bucket) == len(ends), "the markers are not on disk"
    with reopened(bucket, tmp_path / "restored", taken=taken) as there:
        assert read_all(there) == []
        there.topic("t").partition(0).append([b"new"])
        assert read_all(there) == [b"new"]
        assert read_all(there) == []


@pytest.mark.parametrize("taken", [False, True])
def test_who_has_read_what_was_not_shipped_is_told(
    tmp_path: Path, store: LogStore, bucket: Memory, taken: bool
) -> None:
    """The group has read a record after the marker, which no longer exists."""
    transaction(store, "p", b"1")
    store.topic("t").partition(0).append([b"lost"])
    assert read_all(store) == [b"1", b"lost"]
    assert ship(store, bucket) == 1
    with reopened(bucket, tmp_path / "restored", taken=taken) as there:
        there.topic("t").partition(0).append([b"new"])
        with pytest.raises(LogTruncated):
            read_all(there)


def test_who_has_read_a_record_between_markers_is_told(tmp_path: Path, store: LogStore, bucket: Memory) -> None:
    """Only the markers before the first record are skipped."""
    transaction(store, "p", b"1")
    transaction_of_lost = store.producer(name="q", linger_ms=0)
    transaction_of_lost.begin_transaction()
    store.topic("t").partition(0).append([b"lost"])
    transaction_of_lost.abort_transaction()
    transaction_of_lost.close()
    assert read_all(store) == [b"1", b"lost"]
    assert ship(store, bucket) == 1
    with reopened(bucket, tmp_path / "restored", taken=False) as there, pytest.raises(LogTruncated):
        read_all(there)


def test_who_stands_at_the_end_of_what_was_shipped_goes_on(tmp_path: Path, store: LogStore, bucket: Memory) -> None:
    """The group continues, also if the restored store is reopened, dies, or is restored from its own shipping."""
    transaction(store, "p", b"1")
    assert read_all(store) == [b"1"]
    ship(store, bucket)
    with reopened(bucket, tmp_path / "restored", taken=True) as there:
        assert read_all(there) == []
        transaction(there, "q", b"2")
        assert read_all(there) == [b"2"]
        ship(there, bucket)
    with reopened(bucket, tmp_path / "again", taken=False) as again:
        assert read_all(again) == []
        again.topic("t").partition(0).append([b"3"])
        assert read_all(again) == [b"3"]
