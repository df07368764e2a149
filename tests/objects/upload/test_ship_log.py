"""Log lines of shipping: its begin and end, its uploads, and the end of a failure."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from segmentlog.errors import SegmentlogError
from segmentlog.format.manifest import MANIFEST_KEY, decode_manifest
from segmentlog.objects.bucket.base import Data
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.upload import plan, service
from segmentlog.objects.upload.ship_log import SUMMARY_S, ShipLog
from segmentlog.policy import upload_policy as policy
from segmentlog.store import LogStore

Logged = Callable[[], list[str]]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """Return a function that returns the lines since its previous call."""
    caplog.set_level(logging.INFO, "segmentlog.ship")

    def take() -> list[str]:
        found = [f"{one.levelname} {one.getMessage()}" for one in caplog.records if one.name == "segmentlog.ship"]
        caplog.clear()
        return found

    return take


def test_a_store_that_is_shipped(tmp_path: Path, logged: Logged) -> None:
    """Begin, first upload, a failure that is over, the end with all that was uploaded; nothing for idle cycles."""
    bucket = tmp_path / "bucket"
    with LogStore(tmp_path / "store", background=False, ship=f"file://{bucket}") as store:
        log = store.create_topic("t", fsync="always").partition(0)
        log.append([b"1", b"2"])
        store.ship_tick()
        begun, first = logged()
        assert begun.endswith(f"shipping to file://{bucket}")
        assert "shipped 2 offsets in 1 uploads" in first
        for _ in range(3):
            store.ship_tick()
        assert logged() == []
        log.append([b"3"])
        bucket.rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises(SegmentlogError):
                store.ship_tick()
        assert logged() == [], "whoever calls has the error; a thread logs it"
        (tmp_path / "away").rename(bucket)
        store.ship_tick()
        (again,) = logged()
        assert "works again after 2 failed cycles" in again
        log.append([b"4"])
    summary, ended = logged()
    assert "shipped 2 offsets in" in summary
    assert "ended: 4 offsets in" in ended
    assert ended.endswith("; everything is uploaded")


SEGMENTS = {"segment_bytes": 16 << 10, "compression_type": "none", "fsync": "always"}
"""A topic in which a few records fill a segment."""


def put_segments_after(monkeypatch: pytest.MonkeyPatch, release: threading.Event) -> None:
    """Make uploads of segments wait for ``release``; tails and manifests do not wait."""
    put = LocalBucket.put

    def put_later(self: LocalBucket, key: str, data: Data) -> None:
        if threading.current_thread().name.startswith("segmentlog-upload"):
            assert release.wait(30)
        put(self, key, data)

    monkeypatch.setattr(LocalBucket, "put", put_later)


def shipped_end(bucket: Path) -> int:
    """Return the end of the only partition in the manifest."""
    (topic,) = decode_manifest((bucket / MANIFEST_KEY).read_bytes()).topics
    return topic.partitions[0].end_offset


def test_the_end_waits_for_segments(tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close continues while segments are uploaded, and logs "all of it" once the manifest includes the log's end."""
    monkeypatch.setattr(service, "_CLOSING_S", 30.0)
    monkeypatch.setattr(policy, "TAIL_BYTES", 8 << 10)
    monkeypatch.setattr(plan, "TAIL_BYTES", 8 << 10)
    bucket = tmp_path / "bucket"
    with LogStore(tmp_path / "store", background=False, ship=f"file://{bucket}") as store:
        store.ship_tick()
        log = store.create_topic("t", config=SEGMENTS).partition(0)
        for _ in range(30):
            log.append([bytes(6000)])
    assert logged()[-1].endswith("; everything is uploaded")
    assert shipped_end(bucket) == 30


def test_the_end_with_segments_that_are_missing(
    tmp_path: Path, logged: Logged, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close that cannot wait for all uploads logs that some are missing, and how many."""
    monkeypatch.setattr(service, "_CLOSING_S", 0.05)
    monkeypatch.setattr(policy, "TAIL_BYTES", 8 << 10)
    monkeypatch.setattr(plan, "TAIL_BYTES", 8 << 10)
    release = threading.Event()
    put_segments_after(monkeypatch, release)
    bucket = tmp_path / "bucket"
    try:
        with LogStore(tmp_path / "store", background=False, ship=f"file://{bucket}") as store:
            store.ship_tick()
            log = store.create_topic("t", config=SEGMENTS).partition(0)
            for _ in range(30):
                log.append([bytes(6000)])
            logged()
        warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert logged()[-1].endswith("not everything is uploaded")
    finally:
        release.set()
    assert shipped_end(bucket) < 30
    assert any("offsets are missing in the object store" in one for one in warnings), warnings


def test_the_end_with_a_partition_that_failed(tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """If records of a partition could not be synced, the line does not say "all of it"."""
    monkeypatch.setattr(service, "_CLOSING_S", 0.05)
    store = LogStore(tmp_path / "store", background=False, ship=f"file://{tmp_path}/bucket")
    log = store.create_topic("t", fsync="never").partition(0)
    log.append([b"1"])
    log.flush()
    log.append([b"2"])
    store.ship_tick()  # sees both
    log.handle.page.failed = 5
    with contextlib.suppress(SegmentlogError):
        store.close()
    assert logged()[-1].endswith("not everything is uploaded")


def _close_copy(store: LogStore, logged: Logged, found: Connection) -> None:
    logged()
    store.close()
    found.send(logged())


def test_a_forked_child_logs_no_end(tmp_path: Path, logged: Logged) -> None:
    """A child that closes its copy of a store logs nothing, because it does not ship; its parent continues."""
    with LogStore(tmp_path / "store", background=False, ship=f"file://{tmp_path}/bucket") as store:
        store.create_topic("t").partition(0).append([b"1"])
        store.ship_tick()
        context = multiprocessing.get_context("fork")
        found, of_child = context.Pipe(duplex=False)
        with found, of_child:
            child = context.Process(target=_close_copy, args=(store, logged, of_child))
            child.start()
            child.join(60)
            assert child.exitcode == 0
            assert found.recv() == []
        logged()
    assert logged()[-1].endswith("; everything is uploaded")


def test_one_ship_logs_nothing(tmp_path: Path, logged: Logged) -> None:
    """The caller of a single ship has the result."""
    with LogStore(tmp_path / "store", background=False) as store:
        store.create_topic("t").partition(0).append([b"1"])
        store.ship(f"file://{tmp_path}/bucket")
    assert logged() == []


def test_the_second_process_waits(tmp_path: Path, logged: Logged) -> None:
    """It logs once that another process ships, and once that it took over after that one ended."""
    url = f"file://{tmp_path}/bucket"
    with LogStore(tmp_path / "store", background=False, ship=url) as first:
        first.create_topic("t").partition(0).append([b"1"])
        first.ship_tick()
        second = LogStore(tmp_path / "store", background=False, ship=url)
        logged()
        for _ in range(2):
            second.ship_tick()
        (line,) = logged()
        assert "another process ships" in line
    logged()
    second.ship_tick()
    assert logged()[0].endswith(f"shipping to {url}")
    second.close()


def test_uploads_are_summed_up_once_a_minute(logged: Logged) -> None:
    """This holds for any number of cycles; a stuck partition gives a warning at first, and a line at its end."""
    now_s = 1000.0
    log = ShipLog("store", "s3://bucket", clock=lambda: now_s)
    for _ in range(100):
        log.record_cycle(is_owner=True, put=True, records=7, stuck={})
        now_s += 0.5
    assert len(logged()) == 2
    now_s += SUMMARY_S
    log.record_cycle(is_owner=True, put=False, records=0, stuck={"t/0": "an fsync failed"})
    stuck, summary = logged()
    assert stuck.startswith("WARNING")
    assert "t/0 cannot be shipped: an fsync failed" in stuck
    assert f"shipped {99 * 7} offsets in 99 uploads" in summary
    log.record_cycle(is_owner=True, put=False, records=0, stuck={"t/0": "an fsync failed"})
    log.record_cycle(is_owner=True, put=False, records=0, stuck={})
    (over,) = logged()
    assert "shipping t/0 works again" in over
