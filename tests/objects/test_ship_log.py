"""What shipping logs: its begin and end, what it uploaded, and when a failure is over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from segmentlog.errors import SegmentlogError
from segmentlog.objects.ship_log import SUMMARY_S, ShipLog
from segmentlog.store import LogStore

Logged = Callable[[], list[str]]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """The lines since it was asked last."""
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
        assert "works again, after 2 failed cycles" in again
        log.append([b"4"])
    summary, ended = logged()
    assert "shipped 2 offsets in" in summary
    assert "ended: 4 offsets in" in ended
    assert ended.endswith("all of it is there")


def test_one_ship_logs_nothing(tmp_path: Path, logged: Logged) -> None:
    """Whoever ships once has the outcome."""
    with LogStore(tmp_path / "store", background=False) as store:
        store.create_topic("t").partition(0).append([b"1"])
        store.ship(f"file://{tmp_path}/bucket")
    assert logged() == []


def test_the_second_process_waits(tmp_path: Path, logged: Logged) -> None:
    """It logs that another one ships, once, and that it took over once that has gone."""
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
    """However often it ships; a partition that is stuck is a warning when it is new, and so is its end."""
    now_s = 1000.0
    log = ShipLog("store", "s3://bucket", clock=lambda: now_s)
    for _ in range(100):
        log.note_cycle(is_owner=True, put=True, records=7, stuck={})
        now_s += 0.5
    assert len(logged()) == 2
    now_s += SUMMARY_S
    log.note_cycle(is_owner=True, put=False, records=0, stuck={"t/0": "an fsync failed"})
    stuck, summary = logged()
    assert stuck.startswith("WARNING")
    assert "t/0 cannot be shipped: an fsync failed" in stuck
    assert f"shipped {99 * 7} offsets in 99 uploads" in summary
    log.note_cycle(is_owner=True, put=False, records=0, stuck={"t/0": "an fsync failed"})
    log.note_cycle(is_owner=True, put=False, records=0, stuck={})
    (over,) = logged()
    assert "t/0 is shipped again" in over
