"""A partition without appends since a takeover takes no offsets at the next takeover or restore."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from logs import values_by_offset
from objects.buckets import Memory

import segmentlog
from segmentlog.config import OFFSET_CEILING_STEP
from segmentlog.errors import OffsetGrantExhausted, StoreFenced
from segmentlog.log import offset_grants
from segmentlog.log.handle import Handle
from segmentlog.log.partition import Partition
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.policy.upload_policy import GRANT_MIN
from segmentlog.store import LogStore


class Killed(Exception):
    """The process is killed."""


@pytest.fixture
def bucket(tmp_path: Path) -> Memory:
    """Return an object store with a store of one record, whose machine is lost."""
    bucket = Memory()
    with LogStore(tmp_path / "first", background=False) as store:
        store.create_topic("t", 2, fsync="always").partition(0).append([b"first"])
        ship(store, bucket)
    return bucket


def ship(store: LogStore, bucket: Memory, *, grants_on_request: bool = True) -> None:
    """Ship everything, as in the background; or once, without ``grants_on_request``."""
    shipper = Shipper(store._topics, bucket, parallel=0, grants_on_request=grants_on_request)
    try:
        shipper.ship()
    finally:
        shipper.close()


@contextmanager
def taken_over(bucket: Memory, folder: Path) -> Iterator[LogStore]:
    """Take over the store, and ship it once."""
    take_over(bucket, str(folder), parallel=0)
    with LogStore(folder, background=False) as store:
        ship(store, bucket)
        yield store


def logs_of(store: LogStore) -> list[Partition]:
    """Open both partitions."""
    return store.topic("t").partitions()


def append(store: LogStore, bucket: Memory, number: int, value: bytes) -> int:
    """Append a record to a partition that waits for a grant; return its offset."""
    log = logs_of(store)[number]
    with pytest.raises(OffsetGrantExhausted):
        log.append([value])
    ship(store, bucket)
    return log.append([value])


@pytest.mark.parametrize("last", ["takeover", "restore"])
def test_partitions_without_appends_take_no_offsets(tmp_path: Path, bucket: Memory, last: str) -> None:
    """After the first gap, takeovers and a restore resume where the log ends, and lose nothing."""
    with taken_over(bucket, tmp_path / "second") as store:
        ends = [log.log_end_offset for log in logs_of(store)]
    assert ends == [1 + OFFSET_CEILING_STEP, OFFSET_CEILING_STEP]
    with taken_over(bucket, tmp_path / "third") as store:
        assert [log.log_end_offset for log in logs_of(store)] == ends
        ship(store, bucket)
    if last == "takeover":
        take_over(bucket, str(tmp_path / "last"), parallel=0)
    else:
        restore(bucket, str(tmp_path / "last"), parallel=0)
    with LogStore(tmp_path / "last", background=False) as store:
        for log, end in zip(logs_of(store), ends, strict=True):
            assert log.log_end_offset == end
            assert [(lost.base_offset, lost.end_offset) for lost in log.lost_ranges()] == [
                (end - OFFSET_CEILING_STEP, end)
            ]
            assert log.recovery_report.lost is None
        assert list(values_by_offset(logs_of(store)[0]).values()) == [b"first"]


def test_a_partition_with_appends_takes_offsets_alone(tmp_path: Path, bucket: Memory) -> None:
    """A takeover skips the whole grant of that partition: records of it may not be shipped."""
    with taken_over(bucket, tmp_path / "second") as store:
        end = logs_of(store)[0].log_end_offset
        assert append(store, bucket, 0, b"second") == end
        ship(store, bucket)
        unshipped = logs_of(store)[0].append([b"not shipped"])
    with taken_over(bucket, tmp_path / "third") as store:
        first, other = logs_of(store)
        assert other.log_end_offset == OFFSET_CEILING_STEP
        assert first.log_end_offset > unshipped
        assert append(store, bucket, 0, b"third") == end + 1 + GRANT_MIN
        assert values_by_offset(first) == {0: b"first", end: b"second", end + 1 + GRANT_MIN: b"third"}


def test_shipping_once_grants_offsets_to_all(tmp_path: Path, bucket: Memory) -> None:
    """After ``segmentlog ship`` no process answers requests, so every partition can append without one."""
    with taken_over(bucket, tmp_path / "second") as store:
        ends = [log.log_end_offset for log in logs_of(store)]
        ship(store, bucket, grants_on_request=False)
        assert [log.append([b"second"]) for log in logs_of(store)] == ends


def test_the_first_append_waits_for_its_grant(tmp_path: Path) -> None:
    """While a process ships in the background, the append waits for an upload. The other partition gets no offsets."""
    url = f"file://{tmp_path}/bucket"
    with LogStore(tmp_path / "first", background=False) as store:
        store.create_topic("t", 2).partition(0).append([b"first"])
        store.shipping.ship(url)
    take_over(open_bucket(url), str(tmp_path / "second"))
    with segmentlog.open(tmp_path / "second", ship=url, ship_interval_ms=86_400_000) as store:
        first, other = logs_of(store)
        end = other.log_end_offset
        assert first.append([b"second"]) == first.log_end_offset - 1 == end + 1
    take_over(open_bucket(url), str(tmp_path / "third"))
    with LogStore(tmp_path / "third", background=False) as store:
        first, other = logs_of(store)
        assert list(values_by_offset(first).values()) == [b"first", b"second"]
        assert other.log_end_offset == end


def test_added_partitions_need_no_request(tmp_path: Path, bucket: Memory) -> None:
    """A partition that the new owner adds gets a grant with the next upload, whatever the first partition requested."""
    with taken_over(bucket, tmp_path / "second") as store:
        with pytest.raises(OffsetGrantExhausted):
            logs_of(store)[0].append([b"waits"])
        store.alter_topic("t", partitions=3)
        ship(store, bucket)
        assert logs_of(store)[2].append([b"new"]) == 0


def test_a_grant_that_only_the_manifest_has_is_not_granted_again(
    tmp_path: Path, bucket: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is killed after it published a grant and before it wrote the file: nothing below is assigned twice."""

    def killed(handle: Handle, end_offset: int) -> None:
        raise Killed

    with taken_over(bucket, tmp_path / "second") as store:
        log = logs_of(store)[0]
        end = log.log_end_offset
        with pytest.raises(OffsetGrantExhausted):
            log.append([b"second"])
        with monkeypatch.context() as patched:
            patched.setattr(offset_grants, "extend", killed)
            with pytest.raises(Killed):
                ship(store, bucket)
        with pytest.raises(OffsetGrantExhausted):
            log.append([b"second"])
    with LogStore(tmp_path / "second", background=False) as store, taken_over(bucket, tmp_path / "third") as third:
        assert logs_of(third)[0].log_end_offset == end + 1 + GRANT_MIN
        with pytest.raises(OffsetGrantExhausted):
            logs_of(store)[0].append([b"late"])
        with pytest.raises(StoreFenced):
            ship(store, bucket)


def test_a_grant_and_a_takeover_at_once(tmp_path: Path, bucket: Memory) -> None:
    """The former owner gets no offsets after a takeover, although an append had requested them before."""
    with taken_over(bucket, tmp_path / "second") as store:
        end = logs_of(store)[0].log_end_offset
        with pytest.raises(OffsetGrantExhausted):
            logs_of(store)[0].append([b"second"])
        with taken_over(bucket, tmp_path / "third") as third:
            with pytest.raises(StoreFenced):
                ship(store, bucket)
            with pytest.raises(StoreFenced):
                logs_of(store)[0].append([b"second"])
            assert append(third, bucket, 0, b"third") == end


def test_an_append_that_waits_for_its_first_grant_learns_of_a_takeover(tmp_path: Path, bucket: Memory) -> None:
    """It raises StoreFenced: the object store is reachable, but this machine gets no more grants."""
    with taken_over(bucket, tmp_path / "second") as store, ThreadPoolExecutor(1) as pool:
        shipper = Shipper(store._topics, bucket, parallel=0, grants_on_request=True)
        shipper.run_cycle()
        take_over(bucket, str(tmp_path / "third"), parallel=0)
        appending = pool.submit(logs_of(store)[0].append, [b"late"])
        while not appending.done():
            with contextlib.suppress(StoreFenced):
                shipper.run_cycle()
        shipper.close()
        with pytest.raises(StoreFenced):
            appending.result()
