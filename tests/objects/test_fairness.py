"""A shipper shares its limits of a cycle: a partition with much to do does not keep others waiting forever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from objects.buckets import Memory
from objects.tiering import TIERED, fill, hurried, remote

from segmentlog.objects.bucket import upload_pool
from segmentlog.objects.tier import eviction
from segmentlog.objects.upload import plan
from segmentlog.objects.upload.segment_uploader import SegmentUploader
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.policy import upload_policy
from segmentlog.store import LogStore

__all__ = ["hurried"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide an empty store without threads."""
    with LogStore(tmp_path / "store", background=False) as opened:
        yield opened


@pytest.fixture
def ship(store: LogStore) -> Iterator[Callable[..., Shipper]]:
    """Yield a function that creates shippers, and close them at the end."""
    made = []

    def make(parallel: int = 0) -> Shipper:
        made.append(Shipper(store._topics, Memory(), parallel=parallel))
        return made[-1]

    yield make
    for shipper in made:
        shipper.close()


def test_segments_of_every_partition_leave(
    store: LogStore, ship: Callable[..., Shipper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of a partition leave this disk though another one has as many new ones as may leave in each cycle."""
    monkeypatch.setattr(eviction, "_SEGMENTS_MAX", 2)
    busy, small = (store.create_topic(name, **TIERED).partition(0) for name in "ab")
    fill(small, 25)
    shipper = ship()
    for _ in range(6):
        fill(busy, 20)
        shipper.run_cycle()
    assert len(remote(small)) == 2
    assert remote(busy)


def test_every_partition_uploads(
    store: LogStore, ship: Callable[..., Shipper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition with many sealed segments leaves places for those of others, from the first cycle on."""
    for name, count in (("a", 100), ("b", 15), ("c", 15)):
        fill(store.create_topic(name, **TIERED | {"remote_storage_enable": False}).partition(0), count)
    begun: list[tuple[str, int]] = []
    places = 0

    def begin(self: object, key: tuple[tuple[str, int], int], do: Callable[[], object]) -> bool:
        nonlocal places
        (topic_id, _), base_offset = key
        if places:
            places -= 1
            begun.append((names[topic_id], base_offset))
            return True
        return False

    names = {store.topic(name).id: name for name in "abc"}
    monkeypatch.setattr(upload_pool.UploadPool, "start", begin)
    shipper = ship(parallel=1)
    for _ in range(2):
        places = 2
        shipper.run_cycle()
        fill(store.topic("a").partition(0), 1)  # gives the next cycle something to ship
    assert begun == [("a", 0), ("b", 0), ("c", 0), ("a", 0)]


def test_a_cycle_stops_at_the_first_refusal(
    store: LogStore, ship: Callable[..., Shipper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all places are taken, a cycle prepares no uploads, and still counts those that wait."""
    topic = store.create_topic("t", **TIERED | {"remote_storage_enable": False}, partitions=3)
    for number in range(3):
        fill(topic.partition(number), 40)
    free, prepared = 2, 0
    uploading = SegmentUploader._prepare_upload

    def begin(self: object, key: object, do: object) -> bool:
        nonlocal free
        free -= 1
        return free >= 0

    def prepare(self: SegmentUploader, *which: Any) -> Any:
        nonlocal prepared
        prepared += 1
        return uploading(self, *which)

    monkeypatch.setattr(upload_pool.UploadPool, "start", begin)
    monkeypatch.setattr(SegmentUploader, "_prepare_upload", prepare)
    done = ship(parallel=1).run_cycle()
    sealed = sum(len(topic.partition(number).handle.list_segments()) - 1 for number in range(3))
    assert done.pending == sealed - 2 > 6  # `begin` above took two of them
    assert prepared == 3


def test_every_partition_has_room_in_a_tail(
    store: LogStore, ship: Callable[..., Shipper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large piece waits for a whole tail once, however many other partitions have something new in each cycle."""
    for module in (plan, upload_policy):
        monkeypatch.setattr(module, "TAIL_BYTES", 8192)
    topic = store.create_topic("t", partitions=8, fsync="always", compression_type="none")
    shipper = ship()
    shipper.run_cycle()
    topic.partition(6).append([bytes(8000)])
    for _ in range(2):
        for number in (0, 1, 2, 3, 4, 5, 7):
            topic.partition(number).append([bytes(200)])
        shipper.run_cycle()
    assert ends_of(shipper)[6] == 1
    shipper.run_cycle()  # ships the topics that had to wait
    assert ends_of(shipper) == [2, 2, 2, 2, 2, 2, 1, 2]


def ends_of(shipper: Shipper) -> list[int]:
    """Return the shipped end of each partition of the only topic."""
    assert shipper.manifest is not None
    (topic,) = shipper.manifest.topics
    return [part.end_offset for part in topic.partitions]
