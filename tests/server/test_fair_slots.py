"""Places for decompression go to clients in turn: one with many requests delays another by few of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.test_limits import producing
from server.wire_client import Desk
from waiting import wait_until
from wire import CODECS, NOW_MS, Sent, foreign

from segmentlog.format import wire_records
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.server.broker import Broker
from segmentlog.server.codec.generated.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from segmentlog.server.fair_slots import FairSlots
from segmentlog.server.request_budget import ClientGone
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore


def nothing() -> None:
    """Check nothing: the wait continues."""


class Crowd:
    """Threads that want a place, and the order in which they have one. Each keeps it until it is told to go."""

    def __init__(self, places: FairSlots) -> None:
        self.places = places
        self.order: list[str] = []
        self.go_on = threading.Semaphore(0)
        self.threads: list[threading.Thread] = []

    def want(self, client: str) -> None:
        """Start a request, and return once it waits."""
        waiting = self.places.waiting_count
        thread = threading.Thread(target=self._work, args=(client,))
        self.threads.append(thread)
        thread.start()
        wait_until(lambda: self.places.waiting_count == waiting + 1)

    def _work(self, client: str) -> None:
        with self.places.slot(client, nothing):
            self.order.append(client)
            assert self.go_on.acquire(timeout=20)

    def end(self) -> None:
        """Let all of them go."""
        for _ in self.threads:
            self.go_on.release()
        for thread in self.threads:
            thread.join(20)


def test_clients_have_their_turns() -> None:
    """A client with one request waits for one request of each other client, however many those have."""
    places = FairSlots(1)
    crowd = Crowd(places)
    with places.slot("busy", nothing):
        for client in ("busy", "busy", "busy", "busy", "one", "two", "two"):
            crowd.want(client)
    crowd.end()
    assert crowd.order == ["busy", "one", "two", "busy", "two", "busy", "busy"]
    with places.slot("late", nothing):  # nothing is lost
        assert places.waiting_count == 0


def test_long_work_passes_its_place_on() -> None:
    """Other requests get the slot between two parts of it; if none waits, the work continues."""
    places = FairSlots(1)
    crowd = Crowd(places)
    with places.slot("long", nothing) as turn:
        turn.yield_slot()
        crowd.want("other")
        crowd.go_on.release()
        turn.yield_slot()
        assert crowd.order == ["other"]
    crowd.end()


def test_who_gives_up_leaves_the_queue() -> None:
    """A client that left while it waited takes no slot, and blocks no request after it."""
    places = FairSlots(1)

    def gone() -> None:
        raise ClientGone

    with places.slot("one", nothing):
        with pytest.raises(ClientGone), places.slot("two", gone):
            raise AssertionError("it has no place")
        assert places.waiting_count == 0
    with places.slot("three", nothing), pytest.raises(ClientGone), places.slot("four", gone):
        raise AssertionError("it has no place")


# ---------------------------------------------------------------- as clients see it

PARTITIONS = 60


@pytest.fixture
def make_desk(tmp_path: Path) -> Iterator[Callable[[], Desk]]:
    """Desks at one broker, whose topic ``t`` has a compressed batch in each of many partitions."""
    store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    store.create_topic("t", PARTITIONS)
    store.create_topic("other")
    made = foreign([Sent(b"k", b"v" * 100, NOW_MS + number) for number in range(10)], CODECS["zstd"])
    for number in range(PARTITIONS):
        store.open_partition("t", number).append_wire(memoryview(made))
    broker = Broker(
        store, WorkerCluster("c", [WorkerNode(1, "localhost", 9092)], 1), ServerSettings(), OpenAuthorizer()
    )
    yield lambda: Desk(broker)
    broker.close()


def test_look_ups_of_one_client_do_not_hold_the_produce_of_another(
    make_desk: Callable[[], Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three connections search sixty times each: a produce of a large batch waits for one or two searches of each."""
    decompress, done = wire_records.decompress_records, [0]

    def slow(*args: Any) -> Any:
        done[0] += 1
        sum(range(100_000))  # some milliseconds, in which no other thread runs
        return decompress(*args)

    large = producing(1, foreign([Sent(b"k", b"v" * 300_000)], CODECS["zstd"]))
    large.topic_data[0].name = "other"
    desk = make_desk()
    desk.ask(0, 7, large)
    monkeypatch.setattr(wire_records, "decompress_records", slow)
    parts = [ListOffsetsPartition(number, -1, NOW_MS + 5) for number in range(PARTITIONS)]
    request = ListOffsetsRequest(-1, 0, [ListOffsetsTopic("t", parts)])
    threads = [threading.Thread(target=make_desk().ask, args=(2, 5, request)) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: done[0] > 6)
    waited = []
    for _ in range(5):
        before = done[0]
        assert desk.ask(0, 7, large).responses[0].partition_responses[0].error_code == 0
        waited.append(done[0] - before)
    is_busy = any(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join(60)
    assert is_busy
    # A look-up decompresses its batch twice. Some are done before the produce has come to the queue.
    assert max(waited) <= 30, waited
