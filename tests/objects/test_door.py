"""Shipping as users of the library reach it: `open(ship=)`, `ack="shipped"`, `shipped_only`, `LogStore.ship`."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from logs import values_by_offset
from waiting import wait_until

import segmentlog
from segmentlog.errors import (
    InvalidConfig,
    ObjectStoreError,
    OffsetGrantExhausted,
    PartitionFailed,
    ReadOnlyStore,
    ShippingRefused,
    ShipUnconfirmed,
    StoreFenced,
)
from segmentlog.log import offset_grants
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.storage.fork_safety import LockableFd
from segmentlog.storage.ship_signals import ShipSignals
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import FaultyFileSystem


@pytest.fixture
def bucket(tmp_path: Path) -> LocalBucket:
    """Return the bucket that the store is shipped to."""
    return LocalBucket(str(tmp_path / "bucket"))


@pytest.fixture
def shipped(tmp_path: Path, bucket: LocalBucket) -> Iterator[LogStore]:
    """Yield a store that ships in the background, but soon only if a call waits."""
    with segmentlog.open(tmp_path / "store", ship=bucket.url, ship_interval_ms=3_600_000) as store:
        store.create_topic("t", 2)
        yield store


def values_of(store: LogStore, topic: str = "t") -> list[bytes | None]:
    """Return the values of a topic, by partition."""
    return [
        record.value for log in store.topic(topic).partitions() for batch in log.read(log.log_start_offset)
        for record in batch
    ]  # fmt: skip


# ---------------------------------------------------------------- ack="shipped"


def test_what_is_acknowledged_as_shipped_is_in_a_restore(
    tmp_path: Path, shipped: LogStore, bucket: LocalBucket
) -> None:
    """It is in the object store without a close, and long before the interval ends."""
    log = shipped.topic("t").partition(0)
    for number in range(3):
        assert log.append([b"%d" % number], ack="shipped") == number
        assert log.shipped_offset == number + 1
    with shipped.producer(ack="shipped") as producer:
        assert producer.send("t", b"sent", partition=1).result().offset == 0
    restore(bucket, str(tmp_path / "restored"))
    with LogStore(tmp_path / "restored", background=False) as restored:
        assert values_of(restored) == [b"0", b"1", b"2", b"sent"]


def test_an_append_waits_for_a_shipper_that_is_starting(
    tmp_path: Path, bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that ships may be late on a busy machine: the first append waits for it."""
    asked, become = threading.Event(), ShipSignals.acquire_lease
    want = ShipSignals.request_cycle

    def become_late(self: ShipSignals) -> LockableFd | None:
        assert asked.wait(60)
        return become(self)

    def want_first(self: ShipSignals) -> None:
        want(self)
        threading.Timer(0.1, asked.set).start()

    monkeypatch.setattr(ShipSignals, "acquire_lease", become_late)
    monkeypatch.setattr(ShipSignals, "request_cycle", want_first)
    with segmentlog.open(tmp_path / "store", ship=bucket.url) as store:
        log = store.create_topic("t").partition(0)
        assert log.append([b"first"], ack="shipped") == 0
        assert log.shipped_offset == 1


def test_a_commit_is_shipped_with_all_that_it_decides_about(
    tmp_path: Path, shipped: LogStore, bucket: LocalBucket
) -> None:
    """A transaction of a producer with ``ack="shipped"`` has survived the machine once its commit returns."""
    with shipped.producer(name="p", ack="shipped") as producer:
        with producer.transaction():
            producer.send("t", b"a", partition=0)
            producer.send("t", b"b", partition=1)
        restore(bucket, str(tmp_path / "restored"))
    with LogStore(tmp_path / "restored", background=False) as restored:
        found = restored.consumer("t", isolation="read_committed")
        assert sorted(record.value for record in found) == [b"a", b"b"]


def test_threads_that_wait_share_what_is_put(shipped: LogStore, bucket: LocalBucket) -> None:
    """Sixteen of them take far fewer manifests than appends."""
    log = shipped.topic("t").partition(0)
    log.append([b"first"], ack="shipped")

    def append() -> None:
        for _ in range(10):
            log.append([b"x"], ack="shipped")

    threads = [threading.Thread(target=append) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = shipped.shipping.status()
    assert log.shipped_offset == 161
    assert status is not None
    assert len(list(bucket.list("tails/"))) < 120


def test_another_process_can_wait_for_it(shipped: LogStore) -> None:
    """It wakes the shipping process, and sees its result."""
    shipped.topic("t").partition(0).append([b"ours"], ack="shipped")
    script = (
        "import sys, segmentlog\n"
        "with segmentlog.open(sys.argv[1]) as store:\n"
        "    log = store.topic('t').partition(0)\n"
        "    print(log.append([b'theirs'], ack='shipped'), log.shipped_offset)"
    )
    # The interval between uploads is an hour.
    done = subprocess.run(
        [sys.executable, "-c", script, shipped.path], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["1", "2"]


def test_who_waits_while_nobody_ships_is_told(tmp_path: Path) -> None:
    """The records are on the local disk, as the error says, and a later process ships them."""
    with LogStore(tmp_path / "store") as store:
        log = store.create_topic("t").partition(0)
        with pytest.raises(
            ShipUnconfirmed, match=r"t/0: offsets 0 to 1 are on the local disk.*no process ships"
        ) as caught:
            log.append([b"a", b"b"], ack="shipped")
        assert (caught.value.base_offset, caught.value.end_offset) == (0, 2)
        assert log.durable_offset == 2
        store.ship(f"file://{tmp_path}/bucket")
        assert log.shipped_offset == 2


def test_who_waits_for_an_object_store_that_is_gone_is_told_why(
    tmp_path: Path, shipped: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait ends with the last failure as the reason; `health()` reports it until shipping works again."""
    monkeypatch.setattr("segmentlog.log.append.wait_shipped.WAIT_S", 0.5)
    log = shipped.topic("t").partition(0)
    log.append([b"first"], ack="shipped")
    bucket = tmp_path / "bucket"
    bucket.rename(tmp_path / "away")
    bucket.write_text("a file stands there")
    with pytest.raises(ShipUnconfirmed, match="Not a directory"):
        log.append([b"x"], ack="shipped")
    assert "Not a directory" in shipped.health()["ship"]
    bucket.unlink()
    (tmp_path / "away").rename(bucket)
    assert log.append([b"y"], ack="shipped") == 2
    wait_until(lambda: shipped.health() == {})


def test_who_waits_is_told_of_a_takeover(tmp_path: Path, shipped: LogStore, bucket: LocalBucket) -> None:
    """Later appends raise the error, too."""
    log = shipped.topic("t").partition(0)
    log.append([b"first"], ack="shipped")
    take_over(bucket, str(tmp_path / "elsewhere"))
    with pytest.raises(StoreFenced):
        log.append([b"x"], ack="shipped")
    with pytest.raises(StoreFenced):
        log.append([b"x"])
    assert "taken over" in shipped.health()["ship"]


# ---------------------------------------------------------------- shipped_only


def test_a_consumer_may_read_no_further_than_what_is_shipped(tmp_path: Path, bucket: LocalBucket) -> None:
    """A consumer of shipped records does not see records that the loss of this machine would take."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("t").partition(0)
        log.append([b"a"])
        assert log.end_offset(shipped_only=True) == 0
        store.ship(bucket.url)
        log.append([b"b"], ack="durable")
        assert [record.value for record in store.consumer("t", shipped_only=True)] == [b"a"]
        assert [record.value for record in store.consumer("t")] == [b"a", b"b"]
        with pytest.raises(InvalidConfig, match="shipped_only"):
            store.consumer("t", shipped_only="yes")  # type: ignore[arg-type]


def test_a_follower_is_woken_by_what_is_shipped(shipped: LogStore) -> None:
    """It need not poll for that."""
    log = shipped.topic("t").partition(0)
    seen = []
    with shipped.consumer("t", follow=True, shipped_only=True) as consumer:
        for number in range(5):
            log.append([b"%d" % number], ack="shipped")
            seen.append(next(iter(consumer)).value)
    assert seen == [b"0", b"1", b"2", b"3", b"4"]


# ---------------------------------------------------------------- opening, closing, several processes


def test_closing_ships_what_is_left(tmp_path: Path, bucket: LocalBucket) -> None:
    """Closing ships the remaining records, also those that no fsync had covered yet."""
    with segmentlog.open(tmp_path / "store", ship=bucket.url, ship_interval_ms=3_600_000) as store:
        store.create_topic("t", fsync="never").partition(0).append([b"last"])
    restore(bucket, str(tmp_path / "restored"))
    with LogStore(tmp_path / "restored", background=False) as restored:
        assert values_of(restored) == [b"last"]


def test_closing_while_the_object_store_is_gone_comes_to_an_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The close reports the missing records."""
    (tmp_path / "bucket").write_text("a file stands there")
    with segmentlog.open(tmp_path / "store", ship=f"file://{tmp_path}/bucket") as store:
        store.create_topic("t").partition(0).append([b"x"])
        wait_until(lambda: "ship" in store.health())
    with LogStore(tmp_path / "store") as again:
        assert values_of(again) == [b"x"]


def test_without_threads_a_tick_ships(tmp_path: Path, bucket: LocalBucket) -> None:
    """The tick returns when the next one is due."""
    with segmentlog.open(
        tmp_path / "store", background=False, ship=bucket.url, ship_interval_ms=250, ship_topics=["t*"]
    ) as store:
        log = store.create_topic("t").partition(0)
        store.create_topic("other").partition(0).append([b"not this"])
        log.append([b"x"], ack="durable")
        assert log.shipped_offset == 0
        assert 0 < store.ship_tick() <= 0.25
        assert log.shipped_offset == 1
    restore(bucket, str(tmp_path / "restored"))
    with LogStore(tmp_path / "restored", background=False) as restored:
        assert restored.topics() == ["t"]


def test_so_many_bytes_are_shipped_before_the_interval_is_over(tmp_path: Path, bucket: LocalBucket) -> None:
    """This holds if the number is set."""
    with segmentlog.open(tmp_path / "store", ship=bucket.url, ship_interval_ms=3_600_000, ship_bytes=10_000) as store:
        log = store.create_topic("t", fsync="always", compression_type="none").partition(0)
        wait_until(lambda: store.shipping.status().is_owner)  # type: ignore[union-attr]
        store.ship_tick()
        log.append([b"x" * 100])
        assert log.shipped_offset == 0
        log.append([b"x" * 20_000])
        wait_until(lambda: log.shipped_offset == 2)


def test_one_process_ships_and_another_takes_its_place(tmp_path: Path, bucket: LocalBucket) -> None:
    """The shipping process is killed, and another one continues after its uploads."""
    script = (
        "import sys, time, segmentlog\n"
        "store = segmentlog.open(sys.argv[1], ship=sys.argv[2], ship_interval_ms=10)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    path = tmp_path / "store"
    with LogStore(path) as store:
        log = store.create_topic("t").partition(0)
        first = subprocess.Popen([sys.executable, "-c", script, str(path), bucket.url], stdout=subprocess.PIPE)
        try:
            assert first.stdout is not None
            first.stdout.readline()
            log.append([b"1"], ack="shipped")
            second = segmentlog.open(path, ship=bucket.url, ship_interval_ms=10)
            with second:
                log.append([b"2"], ack="shipped")
                status = second.shipping.status()
                assert status is not None
                assert not status.is_owner
                first.kill()
                first.wait()
                wait_until(lambda: second.shipping.status().is_owner)  # type: ignore[union-attr]
                log.append([b"3"], ack="shipped")
        finally:
            first.kill()
            first.wait()
            assert first.stdout is not None
            first.stdout.close()
    restore(bucket, str(tmp_path / "restored"))
    with LogStore(tmp_path / "restored", background=False) as restored:
        assert values_of(restored) == [b"1", b"2", b"3"]


def _child(store: LogStore) -> None:
    log = store.topic("t").partition(0)
    assert log.append([b"child"], ack="shipped") == 1
    assert not store.shipping.status().is_owner  # type: ignore[union-attr]


def test_a_forked_child_appends_and_its_parent_ships(shipped: LogStore) -> None:
    """The child does not ship; its append returns when the parent has shipped it."""
    log = shipped.topic("t").partition(0)
    log.append([b"parent"], ack="shipped")
    child = multiprocessing.get_context("fork").Process(target=_child, args=(shipped,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert log.append([b"parent"], ack="shipped") == 2


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"ship": "ftp://host/x"}, "url"),
        ({"ship": "bucket"}, "url"),
        ({"ship": 5}, "url"),
        ({"ship": "file:///"}, "url"),
        ({"ship": "file://host/folder"}, "url"),
        ({"ship": "file:///x", "ship_interval_ms": 0}, "ship_interval_ms"),
        ({"ship": "file:///x", "ship_bytes": 0}, "ship_bytes"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(tmp_path: Path, options: dict[str, object], key: str) -> None:
    """The store is closed again, and nothing is left of it."""
    with pytest.raises(InvalidConfig) as caught:
        segmentlog.open(tmp_path / "store", **options)  # type: ignore[arg-type]
    assert caught.value.key == key


def test_a_read_only_store_is_not_shipped(tmp_path: Path, bucket: LocalBucket) -> None:
    """Shipping writes: which offsets may be handed out."""
    LogStore(tmp_path / "store").close()
    with pytest.raises(ReadOnlyStore):
        segmentlog.open(tmp_path / "store", read_only=True, ship=bucket.url)


def test_another_store_is_not_put_over_the_first(tmp_path: Path, bucket: LocalBucket) -> None:
    """One store cannot be shipped to two places, either; both stores can continue."""
    with LogStore(tmp_path / "a", background=False) as one, LogStore(tmp_path / "b", background=False) as other:
        log, theirs = one.create_topic("t").partition(0), other.create_topic("t").partition(0)
        log.append([b"x"])
        one.ship(bucket.url)
        with pytest.raises(ShippingRefused, match="ships another store to this URL"):
            other.ship(bucket.url)
        with pytest.raises(ShippingRefused, match=r"ship --stop"):
            one.ship(f"file://{tmp_path}/second")
        theirs.append([b"y"])
        log.append([b"x"])
        one.ship(bucket.url)


def test_a_copy_of_the_folder_is_not_the_owner(tmp_path: Path, bucket: LocalBucket) -> None:
    """The copy would assign the same offsets as the original."""
    with LogStore(tmp_path / "store", background=False) as store:
        store.create_topic("t").partition(0).append([b"x"])
        store.ship(bucket.url)
    subprocess.run(["cp", "-a", str(tmp_path / "store"), str(tmp_path / "copy")], check=True)
    with (
        LogStore(tmp_path / "copy", background=False) as copy,
        pytest.raises(ShippingRefused, match="is a copy of a shipped store"),
    ):
        copy.ship(bucket.url)


def test_ending_it_lets_the_store_go_on_alone(tmp_path: Path, bucket: LocalBucket) -> None:
    """It needs no grants; a takeover is refused unless forced, and shipping may begin again."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("t").partition(0)
        log.append([b"x"])
        store.ship(bucket.url)
        assert store.shipping.stop_permanently() == bucket.url
        assert store.shipping.stop_permanently() is None
        with pytest.raises(ShippingRefused, match="--force"):
            take_over(bucket, str(tmp_path / "elsewhere"))
        assert not os.path.exists(f"{log.folder}/grant")
        log.append([b"y"])
        store.ship(bucket.url)
        assert log.shipped_offset == 2
    take_over(bucket, str(tmp_path / "elsewhere"))


def test_an_object_store_that_is_not_there_is_told(tmp_path: Path) -> None:
    """Shipping once raises at once, and leaves the store unchanged."""
    (tmp_path / "bucket").write_text("a file stands there")
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("t").partition(0)
        log.append([b"x"])
        with pytest.raises(ObjectStoreError, match="Not a directory"):
            store.ship(f"file://{tmp_path}/bucket")
        log.append([b"y"])


def test_a_partition_that_failed_keeps_no_other_from_being_shipped(tmp_path: Path, bucket: LocalBucket) -> None:
    """The other partitions ship on request and at the end."""
    files = FaultyFileSystem()
    with LogStore(tmp_path / "store", background=False, fs=files, ship=bucket.url) as store:
        failed, other = (store.create_topic(name, fsync="never").partition(0) for name in ("a", "b"))
        for log in (failed, other):
            log.append([b"1"])
        store.ship(bucket.url)
        failed.append([b"2"])
        files.fail("fdatasync", errno.EIO)
        with pytest.raises(PartitionFailed):
            failed.flush()
        other.append([b"2"])
        with pytest.raises(ShippingRefused, match="shipped except these, which cannot be shipped: a/0"):
            store.ship(bucket.url)
        assert other.shipped_offset == 2
        other.append([b"3"])
    restore(bucket, str(tmp_path / "restored"))
    with LogStore(tmp_path / "restored", background=False) as restored:
        found = {name: list(values_by_offset(restored.topic(name).partition(0)).values()) for name in ("a", "b")}
    assert found == {"a": [b"1"], "b": [b"1", b"2", b"3"]}


def test_a_topic_that_is_shipped_no_more_goes_on_alone(tmp_path: Path, bucket: LocalBucket) -> None:
    """It would get no more offset grants. If it is shipped again, its grants limit it again."""
    many = [b"x"] * 300_000
    with LogStore(tmp_path / "store", background=False) as store:
        store.create_topic("a")
        log = store.create_topic("b").partition(0)
        log.append([b"1"])
        store.ship(bucket.url)
        store.ship(bucket.url, topics=["a"])
        for _ in range(8):
            log.append(many)
        store.ship(bucket.url, topics=["a", "b"])
        assert log.shipped_offset == log.log_end_offset
        assert offset_grants.start_limiting(log.handle) > log.log_end_offset
        with pytest.raises(OffsetGrantExhausted):
            log.append(many * 5)


def test_the_place_is_known_however_it_is_written(tmp_path: Path, bucket: LocalBucket) -> None:
    """A request to ship to the place that this process ships to uses that shipper, and returns when all is shipped."""
    with segmentlog.open(tmp_path / "store", ship=f"{bucket.url}/", ship_interval_ms=3_600_000) as store:
        log = store.create_topic("a").partition(0)
        for url in (bucket.url, f"{bucket.url}/", f"{bucket.url}/./"):
            log.append([b"1"])
            store.ship(url)
            assert log.shipped_offset == log.log_end_offset


def test_whoever_asks_for_other_topics_is_not_told_that_they_lie_there(tmp_path: Path, bucket: LocalBucket) -> None:
    """This process ships some of them anyway, and no others."""
    with LogStore(tmp_path / "store", background=False, ship=bucket.url, ship_topics="a") as store:
        for name in ("a", "b"):
            store.create_topic(name).partition(0).append([b"1"])
        with pytest.raises(InvalidConfig, match="the topics that this process already ships to it: a"):
            store.ship(bucket.url, topics=["b"])
        store.ship(bucket.url, topics=["a"])
        store.ship(bucket.url)
        assert [store.topic(name).partition(0).shipped_offset for name in ("a", "b")] == [1, 0]
