"""The live tail: constant cost per poll, and exact counts of skipped records."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from segmentlog.consuming.record_filter import RecordFilter
from segmentlog.http.console.live_tail import RECORDS, LiveTail, parse_position
from segmentlog.http.serving import HttpServer
from segmentlog.store import LogStore


def test_a_tail_shows_what_is_appended_after_it_began(store: LogStore) -> None:
    """Each record appears once, in the order of time; a position resumes the tail."""
    store.create_topic("t", 2)
    logs = store.topic("t").partitions()
    logs[0].append([b"before"])
    tail = LiveTail(logs, RecordFilter())
    assert tail.poll() is None
    position = tail.position
    logs[1].append([b"one"], timestamps=[1000])
    logs[0].append([b"two"], timestamps=[2000])
    for one in (tail, LiveTail(logs, RecordFilter(), position)):
        update = one.poll()
        assert update is not None
        assert [record["value"] for record in update.records] == ["one", "two"]
        assert (update.appended, update.skipped) == (2, 0)
        assert one.poll() is None
    assert parse_position(tail.position) == {0: 2, 1: 1}


def test_a_flood_is_sampled_and_said_to_be(store: LogStore) -> None:
    """One poll reads the newest of 100,000 records and counts all of them."""
    store.create_topic("t", 2)
    logs = store.topic("t").partitions()
    tail = LiveTail(logs, RecordFilter())
    for _ in range(10):
        logs[0].append([b"flood"] * 10_000)
    logs[1].append([b"other"])
    update = tail.poll()
    assert update is not None
    assert update.appended == 100_001
    assert len(update.records) + update.skipped == update.appended
    assert len(update.records) <= RECORDS
    assert {record["offset"] for record in update.records if record["partition"] == 0} <= set(range(99_900, 100_000))
    assert [record["value"] for record in update.records if record["partition"] == 1] == ["other"]


def test_a_filter_looks_at_more_than_it_shows(store: LogStore) -> None:
    """Records that were read but did not match are not counted as skipped."""
    store.create_topic("t")
    (log,) = store.topic("t").partitions()
    tail = LiveTail([log], RecordFilter.parse(path="at = 1500"))
    log.append([b'{"at": %d}' % at for at in range(1990)])
    update = tail.poll()
    assert update is not None
    assert [record["offset"] for record in update.records] == [1500]
    assert (update.appended, update.skipped) == (1990, 0)
    log.append([b'{"at": %d}' % at for at in range(5000)])
    update = tail.poll()
    assert update is not None
    assert (update.appended, update.skipped, update.records) == (5000, 3000, [])


def test_a_tail_outlives_retention_and_truncation(store: LogStore) -> None:
    """The tail continues after records that were deleted or truncated meanwhile."""
    store.create_topic("t")
    (log,) = store.topic("t").partitions()
    tail = LiveTail([log], RecordFilter())
    log.append([b"x"] * 10)
    log.trim(10)
    update = tail.poll()
    assert update is not None
    assert update.records == []
    log.append([b"y"] * 10)
    log.truncate(12)
    log.append([b"z"])
    while (update := tail.poll()) is not None:
        last = update
    assert last.records[-1]["value"] == "z"


def test_positions_that_are_none_are_left_out() -> None:
    """Event ids come from clients, so malformed parts are ignored."""
    assert parse_position("0:5,1:7") == {0: 5, 1: 7}
    for text in ("", "x", "0:x", ":", "0", "-1:5", "0:-5", "9" * 100 + ":1", "0:" + "9" * 100, "0:5" * 100_000):
        assert parse_position(text) == {}, text


@pytest.fixture
def events(http_server: HttpServer) -> Callable[..., tuple[str, str]]:
    """Return the id and the data of the next event with records."""

    def next_event(path: str, append: Callable[[], object], headers: dict[str, str] | None = None) -> tuple[str, str]:
        with (
            httpx.Client(base_url=http_server.url, timeout=20) as client,
            client.stream("GET", path, headers=headers) as answer,
        ):
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            event: dict[str, str] = {}
            for line in answer.iter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    event[name] = value
                    continue
                if event.get("event") == "begin":
                    append()
                elif "data" in event:
                    return event["id"], event["data"]
                event = {}
        raise AssertionError("it ended")

    return next_event


def test_records_come_as_events_and_an_id_goes_on_where_it_was(
    store: LogStore, events: Callable[..., tuple[str, str]]
) -> None:
    """The tail resumes by the `Last-Event-ID` header and by the page's parameter."""
    store.create_topic("t")
    log = store.topic("t").partition(0)
    position, data = events("/ui/topics/t/tail/events", lambda: log.append([b"<b>one</b>"]))
    assert json.loads(data)["records"][0]["value"] == "<b>one</b>"
    log.append([b"two"])
    for path, headers in (("", {"last-event-id": position}), (f"?after={position}", None)):
        _, data = events(f"/ui/topics/t/tail/events{path}", lambda: None, headers)
        assert [record["value"] for record in json.loads(data)["records"]] == ["two"]


def test_a_door_that_closes_ends_its_tails(store: LogStore, http_server: HttpServer) -> None:
    """Closing the server ends tails at once, before the time for running requests is over."""
    store.create_topic("t")
    ended = threading.Event()

    def follow() -> None:
        with (
            httpx.Client(timeout=20) as client,
            client.stream("GET", f"{http_server.url}/ui/topics/t/tail/events") as got,
        ):
            begun.set()
            for _ in got.iter_lines():
                pass
        ended.set()

    begun = threading.Event()
    thread = threading.Thread(target=follow)
    thread.start()
    assert begun.wait(10)
    began_s = time.monotonic()
    http_server.close()
    assert ended.wait(10)
    assert time.monotonic() - began_s < 60
    thread.join()
