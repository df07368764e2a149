"""The cached overview of all topics."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import httpx
import pytest

from segmentlog.clock import Clock
from segmentlog.errors import StoreClosed
from segmentlog.http.console import topic_overview as surveys
from segmentlog.http.console.topic_overview import OverviewCache
from segmentlog.http.serving import HttpServer
from segmentlog.store import LogStore


class Watch:
    """Replaces `time` in the module under test."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        """Return the time that the test has set."""
        return self.now_s


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Provide a clock that the test advances."""
    made = Watch()
    monkeypatch.setattr(surveys, "time", made)
    return made


def test_rates_are_counted_from_one_look_to_the_next(store: LogStore, watch: Watch) -> None:
    """Rates of records and bytes exist after two refreshes, and not for a topic created again between them."""
    store.create_topic("t", 2)
    logs = store.topic("t").partitions()
    logs[0].append([b"x"] * 10)
    overviews = OverviewCache(store, Clock())
    assert overviews.current().topics["t"].rate is None
    assert overviews.current().rate_window_s == 0
    logs[0].append([b"x"] * 20)
    logs[1].append([b"x"] * 20)
    watch.now_s += 10
    overview = overviews.current()
    assert overview.rate_window_s == 10
    assert overview.topics["t"].rate == 4.0
    assert (overview.topics["t"].byte_rate or 0) > 0
    assert overview.topics["t"].record_count == 50
    store.delete_topic("t")
    store.create_topic("t").partition(0).append([b"x"])
    watch.now_s += 10
    assert overviews.current().topics["t"].rate is None


def test_offsets_that_a_truncation_leaves_out_are_no_records(store: LogStore, watch: Watch) -> None:
    """Offsets skipped by a truncation do not count as appended."""
    log = store.create_topic("t").partition(0)
    log.append([b"x"] * 100)
    overviews = OverviewCache(store, Clock())
    overviews.current()
    log.truncate(50)
    log.append([b"x"])
    watch.now_s += 10
    overview = overviews.current().topics["t"]
    assert overview.rate == 0
    assert overview.lost_count > 0


def test_what_is_not_on_disk_yet_is_at_risk(store: LogStore) -> None:
    """Unsynced records are counted with their age, and vanish after a sync."""
    log = store.create_topic("t", config={"fsync": "never"}).partition(0)
    log.append([b"x"] * 7)
    overviews = OverviewCache(store, Clock())
    assert overviews.current().topics["t"].unsynced_count == 7
    log.flush()
    overviews.invalidate()
    overview = overviews.current().topics["t"]
    assert (overview.unsynced_count, overview.unsynced_s) == (0, 0.0)


def test_nobody_waits_for_a_look_that_takes_long(
    store: LogStore, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow refresh runs after the response; a page shows the cached overview unless it is too old."""
    store.create_topic("t")
    overviews = OverviewCache(store, Clock())
    looked = overviews.current()
    monkeypatch.setattr(overviews, "_took_s", 1.0)
    assert overviews.current() is looked
    watch.now_s += 5
    assert not overviews.is_stale()  # looking takes a tenth of the time at most
    assert overviews.refresh() is looked
    watch.now_s += 5
    assert overviews.current() is looked
    assert overviews.is_stale()
    refreshed = overviews.refresh()
    assert refreshed is not looked
    assert not overviews.is_stale()
    assert overviews.refresh() is refreshed
    monkeypatch.setattr(overviews, "_took_s", 1.0)
    watch.now_s += 60
    assert overviews.current() is not refreshed


def test_what_nobody_has_opened_since_the_machine_started_is_opened_bit_by_bit(tmp_path: Path) -> None:
    """A copied store has no valid state pages, as after a reboot, and its partitions are opened step by step."""
    with LogStore(tmp_path / "original") as store:
        for number in range(3):
            store.create_topic(f"t{number}", 2).partition(1).append([b"x"] * (number + 1))
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    for read_only in (True, False):
        with LogStore(tmp_path / "copy", read_only=read_only) as store:
            overview = OverviewCache(store, Clock()).current()
            assert [overview.topics[f"t{number}"].record_count for number in range(3)] == [1, 2, 3]
            assert all(topic.unread_count == 0 for topic in overview.topics.values())


def test_a_look_ends_when_nobody_wants_to_know_any_more(store: LogStore) -> None:
    """Closing the server does not wait for thousands of topics."""
    for number in range(3):
        store.create_topic(f"t{number}")
    asked = iter((False, True))
    overviews = OverviewCache(store, Clock(), lambda: next(asked))
    with pytest.raises(StoreClosed):
        overviews.refresh()
    assert next(asked, None) is None
    assert overviews.is_stale()


def test_the_first_page_finds_the_look_already_made(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reads the first overview when it starts, and the first page shows it."""
    monkeypatch.setattr(surveys, "_FRESH_S", 3600.0)
    monkeypatch.setattr(surveys, "_OLD_S", 3600.0)
    store.create_topic("t")
    with HttpServer(store, "127.0.0.1", 0) as server:
        overviews = server.console.overviews
        ends_s = time.monotonic() + 30
        while overviews.is_stale() and time.monotonic() < ends_s:
            time.sleep(0.005)
        looked = overviews.current()
        assert "t" in looked.topics
        assert httpx.get(f"{server.url}/ui/").status_code == 200
        assert overviews.current() is looked
