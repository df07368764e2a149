"""Takeovers that are killed half way, and what happens to a place or a folder until they are run again."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from delivery_jobs import OneBoot
from logs import values_by_offset
from objects.buckets import Memory

from segmentlog.errors import ShippingRefused, StoreFenced
from segmentlog.log import offset_grants
from segmentlog.log.handle import Handle
from segmentlog.objects import takeover
from segmentlog.objects.bucket.base import Data
from segmentlog.objects.ownership.claim import stop_shipping
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.store import LogStore


class Killed(Exception):
    """The process is."""


def killed(*_: Any, **__: Any) -> None:
    """Kill the process in place of a step of a takeover."""
    raise Killed


@pytest.fixture
def bucket() -> Memory:
    """Return the bucket that the store is shipped to."""
    return Memory()


@pytest.fixture
def store(tmp_path: Path, bucket: Memory) -> Iterator[LogStore]:
    """Provide a store with one record, which is shipped."""
    with LogStore(tmp_path / "store", background=False) as opened:
        opened.create_topic("a", fsync="always").partition(0).append([b"1"])
        ship(opened, bucket)
        yield opened


def ship(store: LogStore, bucket: Memory) -> None:
    """Ship everything."""
    shipper = Shipper(store._topics, bucket, parallel=0)
    shipper.ship()
    shipper.close()


def begin(bucket: Memory, folder: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str) -> None:
    """Begin a takeover that is killed at the function ``killed_at``."""
    with monkeypatch.context() as patched:
        patched.setattr(takeover, killed_at, killed)
        with pytest.raises(Killed):
            take_over(bucket, str(folder), parallel=0)


def test_an_owner_who_ended_meanwhile_is_not_taken_over(
    tmp_path: Path, store: LogStore, bucket: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store is independent now: a new owner would assign the same offsets to other records."""
    begin(bucket, tmp_path / "other", monkeypatch, "_become_owner")
    stop_shipping(store._topics, bucket)
    store.topic("a").partition(0).append([b"2"])
    with pytest.raises(ShippingRefused, match="has ended shipping"):
        take_over(bucket, str(tmp_path / "other"), parallel=0)
    take_over(bucket, str(tmp_path / "other"), force=True, parallel=0)


def test_an_owner_who_ends_right_now_is_not_taken_over(
    tmp_path: Path, store: LogStore, bucket: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put that fails for that is not tried again."""
    swap = bucket.compare_and_swap

    def ending(key: str, data: Data, tag: str | None) -> str:
        monkeypatch.undo()
        stop_shipping(store._topics, bucket)
        return swap(key, data, tag)

    monkeypatch.setattr(bucket, "compare_and_swap", ending)
    with pytest.raises(ShippingRefused, match="has ended shipping"):
        take_over(bucket, str(tmp_path / "other"), parallel=0)


@pytest.mark.parametrize("step", ["_become_owner", "restore"])
def test_a_restore_makes_no_owner_of_what_a_takeover_has_begun(
    tmp_path: Path, store: LogStore, bucket: Memory, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The folder belongs to an unfinished takeover: its logs would assign offsets that no owner granted."""
    begin(bucket, tmp_path / "other", monkeypatch, step)
    with pytest.raises(ShippingRefused, match="an unfinished takeover"):
        restore(bucket, str(tmp_path / "other"), parallel=0)
    take_over(bucket, str(tmp_path / "other"), parallel=0)
    with LogStore(tmp_path / "other", background=False) as other:
        assert list(values_by_offset(other.topic("a").partition(0)).values()) == [b"1"]


def test_a_partition_that_cannot_be_fenced_keeps_no_other_from_that(
    tmp_path: Path, store: LogStore, bucket: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The former owner cannot append to the others, its error names the new owner, and the log the partition."""
    store.create_topic("b", fsync="always").partition(0).append([b"1"])
    ship(store, bucket)
    shipper = Shipper(store._topics, bucket, parallel=0)
    shipper.run_cycle()
    take_over(bucket, str(tmp_path / "other"), parallel=0)
    fence = offset_grants.fence

    def failing(handle: Handle, owner: str) -> None:
        if handle.topic == "a":
            raise OSError(errno.EIO, "Input/output error")
        fence(handle, owner)

    monkeypatch.setattr(offset_grants, "fence", failing)
    store.topic("b").partition(0).append([b"2"])
    with pytest.raises(StoreFenced):
        shipper.run_cycle()
    shipper.close()
    with pytest.raises(StoreFenced):
        store.topic("b").partition(0).append([b"3"])
    assert "a/0: " in caplog.text
    again = Shipper(store._topics, bucket, parallel=0)
    with pytest.raises(StoreFenced):
        again.run_cycle()
    again.close()


def test_an_owner_whose_clock_is_set_back_is_told(tmp_path: Path, store: LogStore, bucket: Memory) -> None:
    """It finds the new owner although it has nothing to ship: it checks twice a minute, by the monotonic clock."""
    shipper = Shipper(store._topics, bucket, parallel=0)
    now_ms = int(time.time() * 1000)
    shipper.run_cycle(now_ms)
    shipper.run_cycle(now_ms + 40_000)
    take_over(bucket, str(tmp_path / "other"), parallel=0)
    with pytest.raises(StoreFenced):
        shipper.run_cycle(now_ms - 3_600_000)
    shipper.close()


def test_epochs_that_were_not_shipped_are_not_used_again(tmp_path: Path, store: LogStore, bucket: Memory) -> None:
    """The owner loses power, resumes in a new epoch, and is gone before it ships: the new owner's epoch is higher.

    A consumer that has the unshipped epoch waits for ever for a leader with a lower epoch.
    """
    shutil.copytree(tmp_path / "store", tmp_path / "crashed")
    with LogStore(tmp_path / "crashed", fs=OneBoot("second boot"), background=False) as crashed:
        unshipped = crashed.topic("a").partition(0).epoch
    assert unshipped > store.topic("a").partition(0).epoch
    take_over(bucket, str(tmp_path / "new"))
    with LogStore(tmp_path / "new", background=False) as new:
        assert new.topic("a").partition(0).epoch > unshipped
