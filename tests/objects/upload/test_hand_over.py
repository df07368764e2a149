"""A planned hand-over of a shipped store: every step, its failures, and what the new owner has."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from logs import FakeClock, NoSyncFileSystem, values_by_offset
from objects.buckets import Memory

from segmentlog.errors import (
    HandOverInProgress,
    ObjectStoreError,
    PartitionFailed,
    ShippingRefused,
    StoreFenced,
    UnknownTopic,
)
from segmentlog.format.hand_over import HandOver
from segmentlog.format.manifest import MANIFEST_KEY, Manifest, decode_manifest
from segmentlog.log import offset_grants
from segmentlog.log.partition import Partition
from segmentlog.objects.bucket.base import Data
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.ownership.binding import Binding, read_binding, remove_binding
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload import hand_over_request
from segmentlog.objects.upload import shipper as shipper_module
from segmentlog.objects.upload.hand_over_request import HandOverRequest
from segmentlog.objects.upload.hand_over_steps import HandOverSteps
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.hand_over_file import read_hand_over, write_hand_over
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died
from segmentlog.topics.topic_registry import Topics

WAIT_MS = 10_000


class Bucket(Memory):
    """A bucket that counts its requests, and whose next puts of the manifest can fail before or after they are done."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.requests = 0

    def get(self, key: str) -> tuple[bytes, str]:
        self.requests += 1
        return super().get(key)

    def put(self, key: str, data: Data) -> None:
        self.requests += 1
        super().put(key, data)

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "before":
            raise ObjectStoreError(self.url, key, "no answer in time")
        if fault == "death before":
            raise Died
        tag = super().compare_and_swap(key, data, tag)
        if fault == "after":
            raise ObjectStoreError(self.url, key, "no answer in time")
        if fault == "death after":
            raise Died
        return tag

    @property
    def manifest(self) -> Manifest:
        """The manifest that is stored."""
        return decode_manifest(self._objects[MANIFEST_KEY][0])


@pytest.fixture
def bucket() -> Bucket:
    """Return the object store."""
    return Bucket()


@pytest.fixture
def clock() -> FakeClock:
    """Return the clock of all machines."""
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[LogStore]:
    """Open the owner's store, with three partitions."""
    with LogStore(tmp_path / "owner", background=False, fs=NoSyncFileSystem(), clock=clock) as opened:
        opened.create_topic("a", 2)
        opened.create_topic("b", segment_bytes=300)
        yield opened


@pytest.fixture
def shipper(store: LogStore, bucket: Bucket) -> Iterator[Shipper]:
    """Create the shipper of that store."""
    made = Shipper(store._topics, bucket, parallel=0)
    yield made
    made.close()


def request(store: LogStore, clock: FakeClock, wait_ms: int = WAIT_MS) -> None:
    """Request a hand-over as the command does."""
    binding = read_binding(store._topics.fs, store.path)
    assert binding is not None
    until_ms = clock.now_ms() + 60_000
    wanted = HandOver(stage="requested", owner_id=binding.owner_id, wait_ms=wait_ms, until_ms=until_ms)
    write_hand_over(store._topics.fs, store.path, wanted)


def stage(store: LogStore) -> str:
    """Return the stage of the hand-over."""
    found = read_hand_over(store._topics.fs, store.path)
    return "none" if found is None else found.stage


def run_until(shipper: Shipper, store: LogStore, wanted: str, limit: int = 10) -> None:
    """Run cycles until the hand-over has this stage."""
    for _ in range(limit):
        if stage(store) == wanted:
            return
        shipper.run_cycle()
    assert stage(store) == wanted


def take(bucket: Bucket, folder: Path, clock: FakeClock) -> LogStore:
    """Take the store over on another machine, and ship it there once, so that its logs may assign offsets."""
    take_over(bucket, str(folder), clock=clock, fs=NoSyncFileSystem(), parallel=0)
    opened = LogStore(folder, background=False, fs=NoSyncFileSystem(), clock=clock)
    for topic in opened.topics(internal=True):
        opened.topic(topic).partitions()
    shipper = Shipper(opened._topics, bucket, parallel=0)
    shipper.ship()
    shipper.close()
    return opened


def test_the_new_owner_continues_at_the_log_end_without_a_gap(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock
) -> None:
    """No record is lost, no offset is left out, and the former owner is fenced."""
    log = store.topic("a").partition(0)
    log.append([b"1", b"2"])
    store.topic("b").partition(0).append([b"x" * 200])
    shipper.ship()
    log.append([b"3"])
    request(store, clock)
    run_until(shipper, store, "published")
    with pytest.raises(HandOverInProgress, match="a/0: the store is being handed over"):
        log.append([b"never"])
    manifest = bucket.manifest
    assert manifest.is_handed_over
    assert {part.offset_grant - part.end_offset for topic in manifest.topics for part in topic.partitions} == {0}
    with take(bucket, tmp_path / "standby", clock) as taken:
        with pytest.raises(StoreFenced):
            shipper.run_cycle()
        assert stage(store) == "none"
        binding = read_binding(store._topics.fs, store.path)
        assert binding is not None
        assert binding.fenced
        with pytest.raises(StoreFenced, match="taken over by"):
            log.append([b"never"])
        for topic in taken.topics():
            for part in taken.topic(topic).partitions():
                assert part.lost_ranges() == []
        new = taken.topic("a").partition(0)
        assert new.append([b"4"]) == 3
        assert values_by_offset(new) == {0: b"1", 1: b"2", 2: b"3", 3: b"4"}
        assert not bucket.manifest.is_handed_over


def test_records_of_other_processes_are_synced_and_shipped(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock
) -> None:
    """Appends of each process stop, and its records are shipped although it has not synced them."""
    shipper.ship()
    with LogStore(store.path, background=False, fs=NoSyncFileSystem(), clock=clock) as other:
        log = other.topic("a").partition(1)
        log.append([b"1"])
        request(store, clock)
        run_until(shipper, store, "stopped")
        with pytest.raises(HandOverInProgress):
            log.append([b"never"])
        run_until(shipper, store, "published")
        with take(bucket, tmp_path / "standby", clock) as taken:
            assert values_by_offset(taken.topic("a").partition(1)) == {0: b"1"}


def test_a_topic_that_is_created_meanwhile_takes_no_records(
    store: LogStore, shipper: Shipper, clock: FakeClock
) -> None:
    """Its records would not be shipped."""
    shipper.ship()
    request(store, clock)
    run_until(shipper, store, "published")
    late = store.create_topic("late").partition(0)
    with pytest.raises(HandOverInProgress):
        late.append([b"never"])


def test_topics_that_are_not_shipped_continue(store: LogStore, bucket: Bucket, clock: FakeClock) -> None:
    """Only the shipped topics go to the new owner."""
    shipper = Shipper(store._topics, bucket, topic_patterns=["a"], parallel=0)
    shipper.ship()
    request(store, clock)
    run_until(shipper, store, "published")
    assert store.topic("b").partition(0).append([b"1"]) == 0
    with pytest.raises(HandOverInProgress):
        store.topic("a").partition(0).append([b"never"])
    store.rename_topic("a", "c")  # the manifest still lists it
    with pytest.raises(HandOverInProgress):
        store.topic("c").partition(0).append([b"never"])
    shipper.close()


def test_a_store_that_nobody_takes_is_taken_back(
    store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock
) -> None:
    """The manifest's grants cover the local ones before appends are allowed again."""
    log = store.topic("a").partition(0)
    log.append([b"1"])
    shipper.ship()
    before = {part.offset_grant for part in bucket.manifest.topics[0].partitions}
    request(store, clock)
    run_until(shipper, store, "published")
    clock.advance(WAIT_MS - 1)
    shipper.run_cycle()
    assert stage(store) == "published"
    clock.advance(1)
    shipper.run_cycle()
    found = read_hand_over(store._topics.fs, store.path)
    assert found is not None
    assert (found.stage, found.reason) == ("failed", "no machine took it over within 10 s")
    assert {part.offset_grant for part in bucket.manifest.topics[0].partitions} == before
    assert not bucket.manifest.is_handed_over
    assert log.append([b"2"]) == 1
    shipper.ship()
    assert bucket.manifest.topics[0].partitions[0].end_offset == 2


@pytest.mark.parametrize("fault", ["before", "after", "death before", "death after"])
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_put_whose_outcome_is_unknown(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock, fault: str, *, is_taken: bool
) -> None:
    """After any outcome of the put, the store has one owner, and no offset is assigned twice."""
    log = store.topic("a").partition(0)
    log.append([b"1"])
    shipper.ship()
    request(store, clock)
    run_until(shipper, store, "stopped")
    bucket.faults = [fault]
    try:
        shipper.run_cycle()
    except (ObjectStoreError, Died):
        shipper.close()
    with pytest.raises(HandOverInProgress):
        log.append([b"never"])
    if is_taken:
        run_until(shipper, store, "published")
        shipper.run_cycle()
        with take(bucket, tmp_path / "standby", clock) as taken:
            with pytest.raises(StoreFenced):
                shipper.run_cycle()
            assert taken.topic("a").partition(0).append([b"2"]) == 1
    else:
        clock.advance(2 * WAIT_MS)
        shipper.run_cycle()
        assert not bucket.manifest.is_handed_over
        assert log.append([b"2"]) == 1
        shipper.ship()


def test_a_late_put_cannot_hand_over_a_store_that_was_taken_back(
    store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock
) -> None:
    """Taking it back puts a manifest even if nothing was handed over, so that the late put has a wrong tag."""
    store.topic("a").partition(0).append([b"1"])
    shipper.ship()
    request(store, clock)
    run_until(shipper, store, "stopped")
    bucket.faults = ["before"]
    tag = bucket.tag(MANIFEST_KEY)
    with pytest.raises(ObjectStoreError):
        shipper.run_cycle()
    clock.advance(WAIT_MS)
    shipper.run_cycle()
    assert stage(store) == "failed"
    assert bucket.tag(MANIFEST_KEY) != tag


@pytest.mark.parametrize("at", ["requested", "stopped", "published"])
def test_the_next_process_continues_after_a_crash(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock, at: str
) -> None:
    """It hands the store over, if there is still time."""
    store.topic("a").partition(0).append([b"1"])
    shipper.ship()
    request(store, clock)
    run_until(shipper, store, at)
    shipper.close()
    second = Shipper(store._topics, bucket, parallel=0)
    run_until(second, store, "published")
    with take(bucket, tmp_path / "standby", clock), pytest.raises(StoreFenced):
        second.run_cycle()
    second.close()


@pytest.mark.parametrize("at", ["requested", "stopped", "published"])
def test_the_next_process_takes_the_store_back_after_the_time(
    store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock, at: str
) -> None:
    """Appends continue after that."""
    log = store.topic("a").partition(0)
    log.append([b"1"])
    shipper.ship()
    request(store, clock)
    run_until(shipper, store, at)
    shipper.close()
    clock.advance(70_000)
    second = Shipper(store._topics, bucket, parallel=0)
    second.run_cycle()
    assert stage(store) == "failed"
    assert not bucket.manifest.is_handed_over
    assert log.append([b"2"]) == 1
    second.close()


def test_the_former_owner_finds_itself_fenced_after_a_crash(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock
) -> None:
    """No process may append between the restart and the fence."""
    log = store.topic("a").partition(0)
    log.append([b"1"])
    shipper.ship()
    request(store, clock)
    run_until(shipper, store, "published")
    shipper.close()
    with take(bucket, tmp_path / "standby", clock):
        clock.advance(3_600_000)
        with LogStore(store.path, background=False, fs=NoSyncFileSystem(), clock=clock) as again:
            with pytest.raises(HandOverInProgress):
                again.topic("a").partition(0).append([b"never"])
            second = Shipper(again._topics, bucket, parallel=0)
            with pytest.raises(StoreFenced):
                second.run_cycle()
            second.close()
            with pytest.raises(StoreFenced, match="taken over"):
                again.topic("a").partition(0).append([b"never"])


def test_a_damaged_or_removed_file_takes_the_store_back(
    store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock
) -> None:
    """Its content is not trusted, but its existence stops appends."""
    log = store.topic("a").partition(0)
    shipper.ship()
    for spoil in (lambda path: path.write_bytes(b"{"), Path.unlink):
        request(store, clock)
        run_until(shipper, store, "published")
        spoil(Path(store.path, "@hand-over"))
        shipper.run_cycle()
        assert stage(store) in ("published", "failed")
        shipper.run_cycle()
        assert stage(store) == "failed"
        assert not bucket.manifest.is_handed_over
        log.append([b"1"])


def test_a_clock_that_is_set_back_does_not_stop_appends_for_longer(
    store: LogStore, shipper: Shipper, clock: FakeClock
) -> None:
    """The monotonic clock limits the wait, too."""
    shipper.ship()
    request(store, clock)
    run_until(shipper, store, "published")
    clock.wall_ms -= 3_600_000
    shipper.run_cycle()
    assert stage(store) == "published"
    clock.advance(WAIT_MS)
    shipper.run_cycle()
    assert stage(store) == "failed"


def test_a_partition_that_cannot_be_shipped_prevents_the_hand_over(
    store: LogStore, shipper: Shipper, clock: FakeClock
) -> None:
    """Its records would be lost."""
    shipper.ship()
    store.topic("a").partition(0).append([b"1"])
    with pytest.raises(PartitionFailed):
        store.topic("a").partition(0).handle.fail("an fsync failed")
    request(store, clock)
    for _ in range(3):
        shipper.run_cycle()
    assert stage(store) == "requested"
    clock.advance(70_000)
    shipper.run_cycle()
    found = read_hand_over(store._topics.fs, store.path)
    assert found is not None
    assert found.stage == "failed"
    assert "a/0" in found.reason
    assert "refuses appends since" in found.reason


def test_a_partition_that_cannot_be_opened_keeps_its_grant_when_the_store_is_taken_back(
    store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have it open, and may assign all offsets of the local grant."""
    store.topic("a").partition(0).append([b"1"])
    shipper.ship()
    before = bucket.manifest.topics
    request(store, clock)
    run_until(shipper, store, "published")
    shipper.close()
    clock.advance(WAIT_MS)
    second = Shipper(store._topics, bucket, parallel=0)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "the disk is broken")

    with monkeypatch.context() as patched:
        patched.setattr(type(store._topics), "open_partition", refuse)
        second.run_cycle()
    grants = [[part.offset_grant for part in topic.partitions] for topic in bucket.manifest.topics]
    assert grants == [[part.offset_grant for part in topic.partitions] for topic in before]
    second.close()


def test_an_open_transaction_is_waited_for_and_then_aborted_by_the_new_owner(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock
) -> None:
    """Committed records survive; of the open transaction no reader sees a record."""
    producer = store.producer(name="p", linger_ms=0)
    with producer.transaction():
        producer.send("a", b"committed", partition=0)
    producer.begin_transaction()
    producer.send("a", b"open", partition=0).result()
    shipper.ship()
    request(store, clock)
    shipper.run_cycle()
    assert stage(store) == "requested"
    clock.advance(2_000)
    run_until(shipper, store, "published")
    with take(bucket, tmp_path / "standby", clock) as taken:
        log = taken.topic("a").partition(0)
        for _ in range(3):
            taken.finish_transactions()
        assert log.lost_ranges() == []
        assert log.last_stable_offset == log.log_end_offset
        seen = [record.value for batch in log.read(0, isolation="read_committed") for record in batch]
        assert seen == [b"committed"]
        with taken.producer(name="p", linger_ms=0) as next_producer, next_producer.transaction():
            next_producer.send("a", b"next", partition=0)
    with pytest.raises(StoreFenced):
        shipper.run_cycle()
    with pytest.raises(StoreFenced):
        producer.close()


def test_compacted_truncated_and_evicted_logs_are_handed_over_whole(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new owner has their ends, and their lost ranges of before."""
    bucket = LocalBucket(str(tmp_path / "objects"))
    fs = NoSyncFileSystem()
    with LogStore(tmp_path / "owner", background=False, fs=fs, clock=clock) as store:
        keys = store.create_topic("keys", cleanup_policy="compact", segment_bytes=300).partition(0)
        tiered = store.create_topic(
            "tiered", segment_bytes=300, remote_storage_enable=True, local_retention_ms=0
        ).partition(0)  # fmt: skip
        cut = store.create_topic("cut").partition(0)
        for number in range(10):
            keys.append([b"x" * 100], [b"k%d" % (number % 2)])
            tiered.append([b"%d" % number + b"x" * 100])
            cut.append([b"%d" % number])
        shipper = Shipper(store._topics, bucket, parallel=0)
        shipper.ship()
        keys.roll()
        keys.compact()
        cut.truncate(5)
        clock.advance(60_000)
        request(store, clock)
        run_until(shipper, store, "published")
        assert any(segment.remote for segment in tiered.segments())
        ends = {log.topic: log.log_end_offset for log in (keys, tiered, cut)}
        lost = cut.lost_ranges()
        expected = values_by_offset(keys)
        take_over(bucket, str(tmp_path / "standby"), clock=clock, fs=fs, parallel=0)
        with LogStore(tmp_path / "standby", background=False, fs=fs, clock=clock) as taken:
            for topic, end in ends.items():
                assert taken.topic(topic).partition(0).log_end_offset == end
            assert values_by_offset(taken.topic("keys").partition(0)) == expected
            assert [(one.base_offset, one.end_offset) for one in taken.topic("cut").partition(0).lost_ranges()] == [
                (one.base_offset, one.end_offset) for one in lost
            ]
            assert list(values_by_offset(taken.topic("tiered").partition(0))) == list(range(10))
        shipper.close()


@pytest.fixture
def others_log(store: LogStore, clock: FakeClock) -> Iterator[Partition]:
    """Open a/0 in another process, which has appended to it."""
    with LogStore(store.path, background=False, fs=NoSyncFileSystem(), clock=clock) as other:
        log = other.topic("a").partition(0)
        log.append([b"1"])
        yield log


def test_a_shipper_that_dies_before_it_has_stopped_all_partitions(
    store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock, others_log: Partition,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The next shipper stops them before it hands the store over: a process may not have read the file yet."""
    shipper.ship()
    request(store, clock)

    def die(*_: object) -> None:
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(HandOverSteps, "_stop_partitions", die)
        with pytest.raises(Died):
            shipper.run_cycle()
    assert stage(store) == "stopped"
    shipper.close()
    assert others_log.append([b"2"]) == 1, "this process has not read the file"
    second = Shipper(store._topics, bucket, parallel=0)
    run_until(second, store, "published")
    with pytest.raises(HandOverInProgress):
        others_log.append([b"never"])
    assert bucket.manifest.topics[0].partitions[0].offset_grant == 2
    second.close()


@pytest.mark.parametrize("is_lasting", [True, False])
def test_a_partition_that_cannot_be_stopped_prevents_the_hand_over(
    store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock, others_log: Partition,
    monkeypatch: pytest.MonkeyPatch, *, is_lasting: bool,
) -> None:  # fmt: skip
    """The shipper tries again in each cycle, and takes the store back when the time is up."""
    shipper.ship()
    request(store, clock)
    open_partition = Topics.open_partition

    def refuse(topics: Topics, name: str, number: int, topic_id: str | None = None) -> Partition:
        if stage(store) == "stopped" and (name, number) == ("a", 0):
            raise OSError(24, "Too many open files")
        return open_partition(topics, name, number, topic_id)

    with monkeypatch.context() as patched:
        patched.setattr(Topics, "open_partition", refuse)
        for _ in range(3):
            shipper.run_cycle()
        assert stage(store) == "stopped"
        if is_lasting:
            clock.advance(WAIT_MS)
            shipper.run_cycle()
            found = read_hand_over(store._topics.fs, store.path)
            assert found is not None
            assert found.stage == "failed"
            assert found.reason == "appends cannot be stopped: a/0: [Errno 24] Too many open files"
    assert others_log.append([b"2"]) == 1
    if not is_lasting:
        run_until(shipper, store, "published")
        with pytest.raises(HandOverInProgress):
            others_log.append([b"never"])
        assert bucket.manifest.topics[0].partitions[0].offset_grant == 2


@pytest.mark.parametrize("failure", ["disk full", "renamed"])
def test_a_partition_that_cannot_be_fenced_takes_no_records(
    tmp_path: Path, store: LogStore, bucket: Bucket, clock: FakeClock, others_log: Partition,
    monkeypatch: pytest.MonkeyPatch, failure: str,
) -> None:  # fmt: skip
    """Its own grant file allows offsets above the lowered grant; the binding of the fenced store refuses them."""
    shipper = Shipper(store._topics, bucket, topic_patterns=["a"], parallel=0)
    shipper.ship()
    request(store, clock)
    run_until(shipper, store, "published")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with take(bucket, tmp_path / "standby", clock) as taken:
        with monkeypatch.context() as patched:
            if failure == "renamed":
                store.rename_topic("a", "c")  # no longer a topic to ship
            else:
                patched.setattr(offset_grants, "write_grant", refuse)
            with pytest.raises(StoreFenced):
                shipper.run_cycle()
        assert stage(store) == "none"
        with pytest.raises((StoreFenced, UnknownTopic)):
            others_log.append([b"never"])
        with LogStore(store.path, background=False, fs=NoSyncFileSystem(), clock=clock) as again:
            name = "c" if failure == "renamed" else "a"
            with pytest.raises(StoreFenced, match="taken over by"):
                again.topic(name).partition(0).append([b"never"])
            assert again.topic("b").partition(0).append([b"1"]) == 0, "this topic was not handed over"
        assert taken.topic("a").partition(0).append([b"2"]) == 1
    shipper.close()


# ---------------------------------------------------------------- the request


def in_thread(work: Callable[[], None]) -> threading.Thread:
    """Start a thread of the test."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_process_asks_the_process_that_ships(tmp_path: Path) -> None:
    """The server's worker ships; the command waits for it. Another machine takes over meanwhile."""
    url = f"file://{tmp_path}/objects"
    with LogStore(tmp_path / "owner", ship=url, ship_interval_ms=20) as server:
        log = server.create_topic("a").partition(0)
        log.append([b"1"], ack="shipped")
        bucket = LocalBucket(str(tmp_path / "objects"))

        def stand_by() -> None:
            while not decode_manifest(bucket.get(MANIFEST_KEY)[0]).is_handed_over:
                time.sleep(0.01)
            take_over(bucket, str(tmp_path / "standby"), parallel=0)

        standby = in_thread(stand_by)
        with LogStore(server.path, background=False) as command:
            done = command.shipping.hand_over()
        standby.join()
        assert "epoch 2" in done.owner
        with pytest.raises(StoreFenced, match="taken over"):
            log.append([b"never"])


def test_without_a_process_that_ships_the_command_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On time-out it raises the reason, and appends continue."""
    monkeypatch.setattr(hand_over_request, "HAND_OVER_PAUSE_S", 0.001)
    with LogStore(tmp_path / "owner", background=False) as store:
        with pytest.raises(ShippingRefused, match="it is not shipped"):
            store.shipping.hand_over()
        log = store.create_topic("a").partition(0)
        store.ship(f"file://{tmp_path}/objects")
        log.append([b"1"])
        with pytest.raises(ShippingRefused, match=r"was not handed over: no machine took it over within 0\.2 s"):
            store.shipping.hand_over(wait_ms=200)
        assert stage(store) == "none"
        assert log.append([b"2"]) == 1


def test_an_interrupted_command_takes_the_store_back(
    store: LogStore, shipper: Shipper, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appends must not stay stopped after Ctrl-C."""
    shipper.ship()

    def interrupt(_: float) -> None:
        if stage(store) == "published":
            raise KeyboardInterrupt

    monkeypatch.setattr(hand_over_request.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        HandOverRequest(store._topics, shipper).run(WAIT_MS, 60_000)
    assert stage(store) == "failed"
    assert not bucket.manifest.is_handed_over
    store.topic("a").partition(0).append([b"1"])


@pytest.mark.parametrize("is_set_aside", [False, True])
def test_a_takeover_while_the_command_looks_is_reported(
    tmp_path: Path,
    store: LogStore,
    bucket: Bucket,
    shipper: Shipper,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_set_aside: bool,
) -> None:
    """Another process fences the store after the command has read the binding, and may set the store aside."""
    shipper.ship()
    real = hand_over_request.read_binding

    def read(fs: FileSystem, path: str) -> Binding | None:
        found = real(fs, path)
        asked = read_hand_over(fs, path)
        if asked is not None and asked.stage == "published":
            take_over(bucket, str(tmp_path / "new"))
        with contextlib.suppress(StoreFenced):
            if found is not None:
                shipper.run_cycle()
        if is_set_aside and asked is not None and asked.stage == "published":
            remove_binding(fs, path)
        return found

    monkeypatch.setattr(hand_over_request, "read_binding", read)
    command = Shipper(store._topics, bucket, parallel=0)
    try:
        done = HandOverRequest(store._topics, command).run(WAIT_MS, 60_000)
    finally:
        command.close()
    assert done.owner == str(bucket.manifest.owner)


def test_an_older_version_that_ships_ignores_the_request(
    store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command withdraws it, and appends were never stopped."""
    shipper.ship()
    second = Shipper(store._topics, bucket, parallel=0)
    monkeypatch.setattr(hand_over_request.time, "sleep", lambda _: clock.advance(10_000))
    with pytest.raises(ShippingRefused, match="does not answer; is its version older"):
        HandOverRequest(store._topics, second).run(WAIT_MS, 60_000)
    assert stage(store) == "none"
    store.topic("a").partition(0).append([b"1"])


def test_a_manifest_of_1000_partitions_takes_few_requests(tmp_path: Path, bucket: Bucket, clock: FakeClock) -> None:
    """The requests of a hand-over do not depend on the number of partitions."""
    with LogStore(tmp_path / "many", background=False, fs=NoSyncFileSystem(), clock=clock) as store:
        topic = store.create_topic("a", 50)
        shipper = Shipper(store._topics, bucket, parallel=0)
        shipper.ship()
        for log in topic.partitions():
            log.append([b"1"])
        request(store, clock)
        before = bucket.requests
        run_until(shipper, store, "published")
        assert bucket.requests - before <= 6
        shipper.close()


# ---------------------------------------------------------------- a paused owner


def test_an_owner_that_was_stopped_checks_the_manifest_before_anything_else(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock
) -> None:
    """After a pause of some seconds its first cycle finds the new owner, although it has nothing to ship."""
    shipper.ship()
    clock.advance(1_500)
    shipper.run_cycle()
    take_over(bucket, str(tmp_path / "standby"), clock=clock, parallel=0)
    clock.advance(1_500)
    before = bucket.requests
    shipper.run_cycle()
    assert bucket.requests == before, "a cycle in time makes no request"
    clock.advance(shipper_module._PAUSE_MS + 1_001)
    with pytest.raises(StoreFenced):
        shipper.run_cycle()


def test_a_suspended_machine_counts_as_a_pause(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Bucket, clock: FakeClock
) -> None:
    """Its monotonic clock stands still meanwhile; the wall clock does not."""
    shipper.ship()
    take_over(bucket, str(tmp_path / "standby"), clock=clock, parallel=0)
    clock.wall_ms += 5_000
    with pytest.raises(StoreFenced):
        shipper.run_cycle()
