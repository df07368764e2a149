"""Shipping ends for good: beside others who ship, and after what others have left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from logs import FakeClock, values_by_offset
from objects.tiering import TIERED, fill, hurried, remote, url_of, value

from segmentlog.errors import OffsetGrantExhausted, ShippingRefused
from segmentlog.log import offset_grants
from segmentlog.log.partition import Partition
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.ownership import claim
from segmentlog.objects.ownership.binding import read_binding, remove_binding
from segmentlog.objects.tier.recall import recall_all
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.store import LogStore

__all__ = ["hurried"]
ALL = {number: value(number) for number in range(45)}
LARGE = [b"x"] * 300_000


@pytest.fixture
def clock() -> FakeClock:
    """Return a clock for both stores."""
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[LogStore]:
    """Provide a store of 45 records in five segments."""
    with LogStore(tmp_path / "store", background=False, clock=clock) as opened:
        fill(opened.create_topic("a", **TIERED).partition(0), 45)
        yield opened


@pytest.fixture
def log(store: LogStore) -> Partition:
    """Return the only partition."""
    return store.topic("a").partition(0)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    """Return the bucket that the store is shipped to."""
    return open_bucket(url_of(tmp_path))


@pytest.fixture
def shipper(store: LogStore, bucket: Bucket, clock: FakeClock) -> Iterator[Shipper]:
    """Yield a shipper that has shipped everything; four segments exist only in the object store."""
    made = Shipper(store._topics, bucket, parallel=0)
    made.ship()
    clock.advance(2_000)
    made.ship()
    yield made
    made.close()


@pytest.fixture
def other(store: LogStore, clock: FakeClock) -> Iterator[LogStore]:
    """Yield the same store, opened by another process."""
    with LogStore(store.path, background=False, clock=clock) as opened:
        yield opened


def test_it_does_not_end_beside_somebody_who_ships(
    other: LogStore, shipper: Shipper, log: Partition, clock: FakeClock
) -> None:
    """The error names the other process, and nothing changes; after its stop, shipping ends and all is local."""
    assert remote(log) == [0, 10, 20, 30]
    with pytest.raises(ShippingRefused, match=r"(this process itself|another process) ships this store; stop that"):
        other.shipping.stop_permanently()
    assert remote(log) == [0, 10, 20, 30]
    fill(log, 10)
    clock.advance(2_000)
    assert shipper.run_cycle().put
    shipper.close()
    assert other.shipping.stop_permanently() == shipper.bucket.url
    assert remote(log) == []
    assert values_by_offset(log) == ALL | {number: value(number) for number in range(45, 55)}


_HOLDING = """
import sys
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.ship_signals import ShipSignals
lease = ShipSignals(FileSystem(), sys.argv[1]).acquire_lease()
print(lease is not None, flush=True)
sys.stdin.read()
"""


def test_another_process_that_ships_is_told_by_its_number(store: LogStore) -> None:
    """The error has its process id, if the system knows it, so that a user can stop it."""
    command = [sys.executable, "-c", _HOLDING, store.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        with pytest.raises(ShippingRefused, match=rf"(process {holder.pid}|another process) ships this store"):
            store.shipping.stop_permanently()
        holder.communicate()
    assert store.shipping.stop_permanently() is None


@pytest.mark.parametrize("is_bound_anew", [False, True])
def test_who_ships_does_not_undo_the_end(
    other: LogStore, shipper: Shipper, log: Partition, clock: FakeClock, bucket: Bucket, is_bound_anew: bool
) -> None:
    """If another process ended shipping meanwhile, local segments stay, and the store is not fenced."""
    recall_all(other._topics, is_fenced=False)
    claim.stop_shipping(other._topics, bucket)
    if is_bound_anew:
        claim.claim(other._topics, bucket, (), clock.now_ms())
    fill(log, 15)
    for _ in range(3):
        clock.advance(2_000)
        with pytest.raises(ShippingRefused, match="another command ended shipping"):
            shipper.run_cycle()
    assert require_manifest(bucket)[0].ended
    assert remote(log) == []
    fill(log, 1)
    found = read_binding(other.fs, other.path)
    assert (found is not None, found.fenced if found else "") == (is_bound_anew, "")


def test_what_somebody_left_of_it_goes(other: LogStore, shipper: Shipper, log: Partition, bucket: Bucket) -> None:
    """Logs that wait for grants need none once shipping was ended again, and the store may be shipped again."""
    claim.stop_shipping(other._topics, bucket)
    shipper.close()
    wide = other.create_topic("wide").partition(0)
    offset_grants.start_limiting(wide.handle)
    for _ in range(3):
        wide.append(LARGE)
    with pytest.raises(OffsetGrantExhausted):
        wide.append(LARGE)
    assert other.shipping.stop_permanently() is None
    assert remote(log) == []
    wide.append(LARGE)
    other.ship(bucket.url)
    assert wide.shipped_offset == wide.log_end_offset


def test_it_ends_where_its_objects_are_gone_and_it_is_bound_to_nothing(
    other: LogStore, shipper: Shipper, log: Partition, tmp_path: Path
) -> None:
    """Missing records stay lost, and the other partitions continue."""
    remove_binding(other.fs, other.path)
    shipper.close()
    for path in (tmp_path / "bucket" / "segments").rglob("*"):
        if path.is_file():
            path.unlink()
    assert other.shipping.stop_permanently() is None
    assert remote(log) == [0, 10, 20, 30]
    assert not os.path.exists(f"{log.folder}/grant")
    fill(log, 1)
