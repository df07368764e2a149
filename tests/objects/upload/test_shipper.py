"""The shipper by itself, tick by tick: what is held back, what cannot be shipped at all, what a failed put leaves."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import threading
import time
from collections.abc import Iterator, Set
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from logs import FakeClock, NoSyncFileSystem, values_by_offset
from msgspec.structs import replace
from objects.buckets import RUBBISH, Memory

from segmentlog.errors import DiskFull, ObjectStoreError, PartitionFailed, ShippingRefused
from segmentlog.format.manifest import MANIFEST_KEY, StoreFile, encode_manifest
from segmentlog.groups.group_config_file import GroupConfigs
from segmentlog.log import offset_grants
from segmentlog.log.handle import Handle
from segmentlog.objects.bucket.base import Data
from segmentlog.objects.bucket.upload_pool import describe_object
from segmentlog.objects.local.partition_snapshot import LocalPartition
from segmentlog.objects.manifest.garbage_collection import sweep
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload import plan
from segmentlog.objects.upload import shipper as shipper_module
from segmentlog.objects.upload.segment_uploader import SegmentUploader
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.objects.upload.store_scan import entries_by_partition
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import FaultyFileSystem


class Unreliable(Memory):
    """Puts of the manifest fail as often as one likes."""

    fail = 0

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        """Raise an error ``fail`` times, then swap."""
        if self.fail:
            self.fail -= 1
            raise ObjectStoreError(self.url, key, "no answer in time")
        return super().compare_and_swap(key, data, tag)


@pytest.fixture
def bucket() -> Unreliable:
    """Return the bucket that the store is shipped to."""
    return Unreliable()


@pytest.fixture
def files() -> FaultyFileSystem:
    """Return the file system of the store."""
    return FaultyFileSystem()


@pytest.fixture
def store(tmp_path: Path, files: FaultyFileSystem) -> Iterator[LogStore]:
    """Provide a store of two topics."""
    with LogStore(tmp_path / "store", background=False, fs=files) as opened:
        opened.create_topic("a", 2, fsync="always")
        opened.create_topic("b", fsync="always")
        yield opened


@pytest.fixture
def shipper(store: LogStore, bucket: Unreliable) -> Iterator[Shipper]:
    """Yield a shipper of the store, without threads."""
    made = Shipper(store._topics, bucket, parallel=0)
    yield made
    made.close()


def restored(bucket: Memory, folder: Path) -> dict[str, list[bytes | None]]:
    """Return the values of all partitions in a restore."""
    restore(bucket, str(folder), parallel=0)
    with LogStore(folder, background=False, fs=NoSyncFileSystem()) as store:
        return {
            f"{topic}/{log.number}": list(values_by_offset(log).values())
            for topic in store.topics() for log in store.topic(topic).partitions()
        }  # fmt: skip


def little_room(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """Limit the size of a tail."""
    monkeypatch.setattr("segmentlog.policy.upload_policy.TAIL_BYTES", size_bytes)
    monkeypatch.setattr("segmentlog.objects.upload.plan.TAIL_BYTES", size_bytes)


# ---------------------------------------------------------------- what cannot be shipped


def fail(files: FaultyFileSystem, store: LogStore, topic: str) -> None:
    """Let a partition fail by an error of its fsync."""
    files.fail("fdatasync", errno.EIO)
    with pytest.raises(PartitionFailed):
        store.topic(topic).partition(0).append([b"never on disk"])


def test_a_partition_that_failed_is_told_and_keeps_no_other(
    tmp_path: Path, store: LogStore, files: FaultyFileSystem, shipper: Shipper, bucket: Unreliable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`ship` raises with the partition that cannot be shipped; later cycles report it in `stuck`."""
    for topic in ("a", "b"):
        store.topic(topic).partition(0).append([b"%s 1" % topic.encode()])
    assert shipper.ship().waiting == {}
    fail(files, store, "a")
    store.topic("b").partition(0).append([b"b 2"])
    now = shipper.run_cycle()
    assert now.put
    assert list(now.waiting) == ["a/0"]
    assert now.waiting["a/0"].startswith("shipped up to offset 1: a/0: refuses appends since ")
    assert shipper.stuck == {}, "it may be a matter of a moment"
    monkeypatch.setattr(shipper_module, "_PATIENCE_S", 0.05)
    with pytest.raises(ShippingRefused, match="which cannot be shipped: a/0: shipped up to offset 1: "):
        shipper.ship()
    assert list(shipper.stuck) == ["a/0"]
    assert restored(bucket, tmp_path / "restored") == {"a/0": [b"a 1"], "a/1": [], "b/0": [b"b 1", b"b 2"]}


def test_a_store_is_not_taken_on_with_a_partition_that_failed(
    store: LogStore, files: FaultyFileSystem, shipper: Shipper
) -> None:
    """How far its offsets were handed out cannot be promised."""
    fail(files, store, "a")
    with pytest.raises(PartitionFailed, match="a/0"):
        shipper.ship()
    assert shipper.manifest is None


def test_one_that_cannot_be_looked_at_yet_is_promised_its_offsets(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of it may have been read, so their offsets must not be assigned again."""
    store.topic("a").partition(0).append([b"read by somebody"])
    look = LocalPartition.snapshot
    monkeypatch.setattr(LocalPartition, "snapshot", lambda self: None if self.partition.topic == "a" else look(self))
    assert list(shipper.run_cycle().waiting) == ["a/0", "a/1"]
    manifest = shipper.manifest
    (there,) = (part for where, part in entries_by_partition(manifest).items() if where == (store.topic("a").id, 0))
    assert there.end_offset == 0
    assert there.offset_grant > 1
    monkeypatch.undo()
    take_over(bucket, str(tmp_path / "other"), parallel=0)
    with LogStore(tmp_path / "other", background=False) as other:
        log = other.topic("a").partition(0)
        assert log.log_end_offset >= there.offset_grant


@contextlib.contextmanager
def hidden(partition: Path) -> Iterator[None]:
    """Replace the segment of a partition by a folder, so that the partition cannot be opened."""
    (segment,) = partition.glob("*.log")
    (partition / "state").unlink()
    kept = segment.rename(partition.parent / "kept")
    segment.mkdir()
    yield
    segment.rmdir()
    kept.rename(segment)


def test_one_that_cannot_be_opened_keeps_no_other_from_being_shipped(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Unreliable
) -> None:
    """A process that starts then ships the others; the partition follows once it can be opened, if it is unchanged."""
    for topic in ("a", "b"):
        store.topic(topic).partition(0).append([b"%s 1" % topic.encode()])
    shipper.ship()
    shipper.close()
    store.close()
    with hidden(Path(store.path) / "a" / "0"), opened(store, bucket) as (again, other):
        again.topic("b").partition(0).append([b"b 2"])
        assert list(other.run_cycle().waiting) == ["a/0"]
        assert restored(bucket, tmp_path / "restored") == {"a/0": [b"a 1"], "a/1": [], "b/0": [b"b 1", b"b 2"]}
    with opened(store, bucket) as (again, other):
        again.topic("a").partition(0).append([b"a 2"])
        assert other.ship().waiting == {}
        assert restored(bucket, tmp_path / "restored 2")["a/0"] == [b"a 1", b"a 2"]


def test_one_that_can_be_opened_later_is_compared_then(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Unreliable
) -> None:
    """It may be an older copy by then: no byte of it is shipped."""
    log = store.topic("a").partition(0)
    log.append([b"1"])
    shipper.ship()
    store.close()
    shipper.close()
    older = shutil.copytree(Path(store.path) / "a" / "0", tmp_path / "older")
    with opened(store, bucket) as (again, other):
        again.topic("a").partition(0).append([b"2"])
        other.ship()
    with hidden(Path(store.path) / "a" / "0"):
        again = LogStore(store.path, background=False)
        other = Shipper(again._topics, bucket, parallel=0)
        other.run_cycle()
    shutil.rmtree(Path(store.path) / "a" / "0")
    older.rename(Path(store.path) / "a" / "0")
    again.topic("a").partition(0).append([b"another 2", b"3"])
    again.topic("b").partition(0).append([b"b"])
    for _ in range(2):
        assert "the records from offset 0 on differ in the object store" in other.run_cycle().waiting["a/0"]
    other.close()
    again.close()
    assert restored(bucket, tmp_path / "restored") == {"a/0": [b"1", b"2"], "a/1": [], "b/0": [b"b"]}


@contextlib.contextmanager
def opened(store: LogStore, bucket: Memory) -> Iterator[tuple[LogStore, Shipper]]:
    """Open the store and ship as another process."""
    with LogStore(store.path, background=False) as again:
        shipper = Shipper(again._topics, bucket, parallel=0)
        yield again, shipper
        shipper.close()


# ---------------------------------------------------------------- what has to wait


def test_a_transaction_larger_than_a_tail_is_put_piece_by_piece(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest has no entry of it until all pieces are uploaded; then it has all of them."""
    store.topic("b").partition(0).append([b"first"])
    shipper.run_cycle()
    little_room(monkeypatch, 5000)
    with store.producer(name="p", linger_ms=0) as producer, producer.transaction():
        for number in range(60):
            producer.send("ab"[number % 2], b"%d" % number * 60, partition=0).result()
    sizes = set()
    for round_ in range(1, 30):
        now = shipper.run_cycle()
        assert now.size_bytes <= 2 * 5000, "decisions have room of their own"
        values = restored(bucket, tmp_path / f"restored-{round_}")
        sizes.add((len(values["a/0"]), len(values["b/0"])))
        if not now.waiting and not now.pending:
            break
        assert now.size_bytes, "nothing went on"
    assert sizes == {(0, 1), (30, 31)}
    assert round_ > 1


def test_a_transaction_over_a_partition_that_is_added_during_the_scan_is_shipped_whole(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest of that cycle lacks the new partition, so it must not have the decision, either."""
    with store.producer(name="p", linger_ms=0) as producer, producer.transaction():
        producer.send("a", b"before", partition=0)
    shipper.ship()
    real, left = LocalPartition.snapshot, [True]

    def scan(local: LocalPartition) -> object:
        if left and local.partition.topic == "a":
            left.clear()
            store.alter_topic("new", partitions=3)
            with store.producer(name="p", linger_ms=0) as producer, producer.transaction():
                producer.send("new", b"1", partition=1)
                producer.send("new", b"2", partition=2)
        return real(local)

    monkeypatch.setattr(LocalPartition, "snapshot", scan)
    store.create_topic("new", 2)  # its partitions have no offset grants yet, so appends are not limited
    store.topic("a").partition(0).append([b"new"])
    shipper.run_cycle()
    assert not left
    assert restored(bucket, tmp_path / "first")["new/1"] == []
    shipper.ship()
    now = restored(bucket, tmp_path / "second")
    assert (now["new/1"], now["new/2"]) == ([b"1"], [b"2"])


def test_what_was_staged_is_put_anew_where_it_was_swept(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No manifest referred to it for a long time, so a sweep considered it rubbish."""
    monkeypatch.setattr("segmentlog.policy.upload_policy.INLINE_BYTES", 0)
    shipper.run_cycle()
    little_room(monkeypatch, 5000)
    with store.producer(name="p", linger_ms=0) as producer, producer.transaction():
        for number in range(60):
            producer.send("ab"[number % 2], b"%d" % number * 60, partition=0).result()
    assert list(shipper.run_cycle().waiting) == ["a/0", "b/0", "__transaction_state/0"]
    held = {one.key for one in bucket.list("tails/")}
    assert held
    shipper._states.drop_keys(held)
    bucket.delete(held)
    assert shipper.ship().waiting == {}
    values = restored(bucket, tmp_path / "restored")
    assert (len(values["a/0"]), len(values["b/0"])) == (30, 30)


# ---------------------------------------------------------------- puts that failed


def test_chunks_are_compared_again_after_a_put_that_failed(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison uses the manifest in the object store, and not the one whose put failed."""
    log = store.create_topic("keys", cleanup_policy="compact", fsync="always").partition(0)
    old, new = random.Random(1).randbytes(200), random.Random(2).randbytes(600)
    for key in (b"1", b"2", b"3"):
        log.append([old], [key])
    shipper.run_cycle()
    # Makes the copy larger than the shipped part of the segment, but less than twice as large.
    log.append([new], [b"1"])
    log.roll()
    log.compact()
    # Uploads no segment, so that its chunks stay in use.
    monkeypatch.setattr(SegmentUploader, "start", lambda self, planned: 1)
    bucket.fail = 1
    with pytest.raises(ObjectStoreError):
        shipper.run_cycle()
    shipper.run_cycle()
    assert restored(bucket, tmp_path / "restored")["keys/0"] == [old, old, new]


def test_what_was_interrupted_is_shipped_the_next_time(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt, also Ctrl-C in the waiting call, leaves records unshipped and unreported until the next cycle."""
    monkeypatch.setattr("segmentlog.policy.upload_policy.INLINE_BYTES", 0)
    shipper.ship()
    for name, cause in (("put", KeyboardInterrupt), ("compare_and_swap", KeyboardInterrupt), ("put", MemoryError)):
        log = store.topic("b").partition(0)
        log.append([name.encode()])
        with monkeypatch.context() as patched:
            patched.setattr(bucket, name, partial(interrupted, cause))
            with pytest.raises(cause):
                shipper.run_cycle()
        shipper.ship()
        assert log.shipped_offset == log.log_end_offset
    assert restored(bucket, tmp_path / "restored")["b/0"] == [b"put", b"compare_and_swap", b"put"]


@pytest.mark.parametrize("is_inline", [True, False])
def test_a_put_that_fails_leaves_a_beginning_of_each_partition(
    tmp_path: Path, store: LogStore, bucket: Unreliable, monkeypatch: pytest.MonkeyPatch, is_inline: bool
) -> None:
    """Each put fails once, in turn. A restore then has a beginning of each partition, and later everything."""
    if not is_inline:
        monkeypatch.setattr("segmentlog.policy.upload_policy.INLINE_BYTES", 0)
    store.alter_topic("a", segment_records=10)
    wanted: dict[str, list[bytes | None]] = {"a/0": [], "a/1": [], "b/0": []}
    shipper = Shipper(store._topics, bucket, parallel=0)
    puts: list[str] = []

    def counted(name: str) -> None:
        put = getattr(bucket, name)

        def fail_once(key: str, *arguments: Any) -> Any:
            puts.append(key)
            if len(puts) == fails_at:
                raise ObjectStoreError(bucket.url, key, "no answer in time")
            return put(key, *arguments)

        monkeypatch.setattr(bucket, name, fail_once)

    counted("put")
    counted("compare_and_swap")
    failed = 0
    for fails_at in range(1, 9):
        puts.clear()
        for name, values in wanted.items():
            topic, number = name.split("/")
            new: list[bytes | None] = [b"%d/%d" % (fails_at, row) for row in range(15)]
            store.topic(topic).partition(int(number)).append(new)
            values += new
        try:
            shipper.ship()
        except ObjectStoreError:
            failed += 1
            if shipper.manifest is not None:
                for name, there in restored(bucket, tmp_path / f"failed {fails_at}").items():
                    assert there == wanted[name][: len(there)]
            shipper.ship()
    assert restored(bucket, tmp_path / "whole") == wanted
    shipper.close()
    assert failed > 3


def interrupted(cause: type[BaseException], *_: object) -> None:
    """Raise instead of making a request."""
    raise cause


def test_who_cannot_be_told_keeps_it_from_no_other(
    store: LogStore, shipper: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file with offset grants of one partition cannot be written: the others get grants and shipped offsets."""
    shipper.ship()
    grant = offset_grants.extend

    def full(handle: Handle, ceiling: int) -> None:
        if handle.topic == "a":
            raise DiskFull(handle.folder)
        grant(handle, ceiling)

    logs = [store.topic(name).partition(0) for name in ("a", "b")]
    with monkeypatch.context() as patched:
        patched.setattr(offset_grants, "extend", full)
        for log in logs:
            log.append([b"x"] * 600_000)
        with pytest.raises(DiskFull):
            shipper.run_cycle()
        assert [log.shipped_offset for log in logs] == [600_000, 600_000]
        logs[1].append([b"x"] * 600_000)
    assert shipper.ship().waiting == {}
    logs[0].append([b"x"] * 600_000)


def test_what_lies_there_for_nobody_is_condemned(
    store: LogStore, shipper: Shipper, bucket: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tails whose manifests were never put are condemned."""
    monkeypatch.setattr("segmentlog.policy.upload_policy.INLINE_BYTES", 0)
    log = store.topic("b").partition(0)
    for number in range(3):
        log.append([b"%d" % number])
        bucket.fail = 1
        with pytest.raises(ObjectStoreError):
            shipper.run_cycle()
    shipper.ship()
    assert shipper.manifest is not None
    known = {stored.key for stored in shipper.manifest.objects()} | {one.key for one in shipper.manifest.condemned}
    assert {one.key for one in bucket.list("tails/")} <= known
    assert len(shipper.manifest.condemned) >= 3


def sealed(store: LogStore) -> None:
    """Seal a segment of topic b, so that it is shipped."""
    log = store.topic("b").partition(0)
    log.append([b"1"])
    log.roll()


def check_condemned(store: LogStore, shipper: Shipper, bucket: Unreliable, left: set[str]) -> None:
    """Check that leftovers are condemned, and that every object is in the manifest."""
    assert left
    deadline = time.monotonic() + 20
    while True:  # shipping does not wait for the upload of a deleted topic, so it is repeated
        store.topic("a").partition(0).append([b"goes on"])
        shipper.ship()
        assert shipper.manifest is not None
        if left <= {one.key for one in shipper.manifest.condemned}:
            break
        assert time.monotonic() < deadline
    known = {stored.key for stored in shipper.manifest.objects()} | left
    assert {one.key for one in bucket.list("segments/")} <= known


def test_what_an_upload_that_failed_left_is_condemned(
    store: LogStore, shipper: Shipper, bucket: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the index of a segment cannot be put, both are put again."""
    sealed(store)
    put = bucket.put

    def failing(key: str, data: Data) -> None:
        if key.endswith(".index"):
            raise ObjectStoreError(bucket.url, key, "no answer in time")
        put(key, data)

    monkeypatch.setattr(bucket, "put", failing)
    with pytest.raises(ObjectStoreError):
        shipper.ship()
    monkeypatch.undo()
    check_condemned(store, shipper, bucket, {one.key for one in bucket.list("segments/")})


def test_an_upload_for_a_topic_that_is_gone_is_condemned(
    store: LogStore, bucket: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was running when the topic was deleted, and ends afterwards."""
    sealed(store)
    put, is_begun, may_end = bucket.put, threading.Event(), threading.Event()

    def slow(key: str, data: Data) -> None:
        put(key, data)
        if key.endswith(".index"):
            is_begun.set()
            assert may_end.wait(30)

    monkeypatch.setattr(bucket, "put", slow)
    shipper = Shipper(store._topics, bucket, parallel=1)
    try:
        shipper.run_cycle()
        assert is_begun.wait(30)
        store.delete_topic("b")
        shipper.run_cycle()
        left = {one.key for one in bucket.list("segments/")}
        assert len(left) == 2
        may_end.set()
        check_condemned(store, shipper, bucket, left)
    finally:
        may_end.set()
        shipper.close()


def test_somebody_who_sweeps_meanwhile_keeps_nobody_from_shipping(
    store: LogStore, shipper: Shipper, bucket: Unreliable
) -> None:
    """`segmentlog objects gc` puts a manifest, too: the next cycle reads it, and ships."""
    shipper.ship()
    bucket.put(RUBBISH, b"x")
    assert sweep(bucket, int(time.time() * 1000) + 1000, grace_ms=0).condemned == (RUBBISH,)
    store.topic("b").partition(0).append([b"x"])
    assert shipper.run_cycle().put
    assert store.topic("b").partition(0).shipped_offset == 1
    assert shipper.manifest is not None
    assert RUBBISH in {one.key for one in shipper.manifest.condemned}


# ---------------------------------------------------------------- files of the store itself


def test_configurations_of_groups_are_shipped(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Unreliable
) -> None:
    """Put once, and again when they were altered; a restore has the last ones."""
    configs = GroupConfigs(store._topics)
    shipper.ship()
    assert not list(bucket.list("files/"))
    configs.alter("g", lambda known: {**known, "consumer.session.timeout.ms": 30_000})
    bucket.fail = 1
    with pytest.raises(ObjectStoreError):
        shipper.run_cycle()
    shipper.ship()
    configs.alter("g", lambda known: {**known, "consumer.heartbeat.interval.ms": 2_000})
    shipper.ship()
    put = [one.key for one in bucket.list("files/")]
    for _ in range(3):
        assert not shipper.run_cycle().put
    assert [one.key for one in bucket.list("files/")] == put
    assert shipper.manifest is not None
    (file,) = shipper.manifest.files
    assert file.object.key in put
    assert {one.key for one in shipper.manifest.condemned} >= set(put) - {file.object.key}
    restore(bucket, str(tmp_path / "restored"), parallel=0)
    with LogStore(tmp_path / "restored", background=False) as other:
        assert GroupConfigs(other._topics).find("g") == configs.find("g")
        assert len(configs.find("g")) == 2
    again = Shipper(store._topics, bucket, parallel=0)  # another process, say
    shipper.close()
    again.ship()
    assert [one.key for one in bucket.list("files/")] == put, "it lies there already"
    again.close()


def test_a_manifest_brings_no_other_file(tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Unreliable) -> None:
    """This holds for any path in the manifest, wherever it leads."""
    shipper.ship()
    bucket.put("files/evil", b"evil")
    for path in ("../evil", "@acls", "a/0/evil", "/tmp/evil"):
        file = StoreFile(path, describe_object("files/evil", b"evil"))
        assert shipper.manifest is not None
        bucket.put(MANIFEST_KEY, encode_manifest(replace(shipper.manifest, files=(file,))))
        folder = tmp_path / path.replace("/", "-") / "restored"
        restore(bucket, str(folder), parallel=0)
        assert not [one for one in tmp_path.rglob("*") if one.is_file() and one.read_bytes() == b"evil"]


def test_a_manifest_of_an_earlier_process_that_comes_late(
    tmp_path: Path, store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It numbers its tails like the next process, which withholds records: the tails are not confused."""
    bucket = Late()
    first = Shipper(store._topics, bucket, parallel=0)
    first.run_cycle()
    for name in ("a", "b"):
        store.topic(name).partition(0).append([name.encode() * 100])
    bucket.is_late = True
    with pytest.raises(ObjectStoreError):
        first.run_cycle()
    first.close()
    bucket.is_late = False
    store.topic("b").partition(0).append([b"more"])
    real = plan.withheld_partitions
    count = 0

    def withheld_partitions(plans: dict[Any, Any], *rest: Any) -> Set[Any]:
        nonlocal count
        count += 1
        held = real(plans, *rest)
        return {where for where in plans if where[0] == store.topic("a").id} if count == 1 else held

    monkeypatch.setattr(plan, "withheld_partitions", withheld_partitions)
    second = Shipper(store._topics, bucket, parallel=0)
    second.run_cycle()
    second.run_cycle()
    second.close()
    assert not bucket.postponed, "it never came"
    assert restored(bucket, tmp_path / "there") == {
        "a/0": [b"a" * 100], "a/1": [], "b/0": [b"b" * 100, b"more"],
    }  # fmt: skip


class Late(Memory):
    """A put of the manifest may be answered never, and done right before the next one."""

    is_late = False

    def __init__(self) -> None:
        super().__init__()
        self.postponed: list[tuple[str, bytes, str | None]] = []

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        if self.is_late:
            self.postponed.append((key, bytes(data), tag))
            raise ObjectStoreError(self.url, key, "no answer in time")
        if self.postponed:
            super().compare_and_swap(*self.postponed.pop())
        return super().compare_and_swap(key, data, tag)


def test_a_record_in_a_millisecond_is_no_thousand_in_a_second(
    tmp_path: Path, bucket: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of a grant follows the appended records per second, however often the shipper scans."""
    for name in ("log.append.appender.OFFSET_CEILING_STEP", "log.offset_grants.OFFSET_CEILING_STEP"):
        monkeypatch.setattr(f"segmentlog.{name}", 4)
    monkeypatch.setattr("segmentlog.policy.upload_policy.GRANT_MIN", 10)
    clock = FakeClock()
    with LogStore(tmp_path / "another", background=False, clock=clock) as store:
        log = store.create_topic("a").partition(0)
        shipper = Shipper(store._topics, bucket, parallel=0)
        try:
            for _ in range(20):
                log.append([b"x"], ack="durable")
                shipper.run_cycle()
                clock.advance(1)
            assert shipper.manifest is not None
            (topic,) = (topic for topic in shipper.manifest.topics if topic.name == "a")
            assert topic.partitions[0].offset_grant <= 20 + 20 * 120
            assert topic.partitions[0].offset_grant > 20
        finally:
            shipper.close()
