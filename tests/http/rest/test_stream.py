"""Event streams of a topic: live, resumed, shared, slow, interrupted."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import httpx
import pytest
from http_listener import Listener
from seeds import seeds

from segmentlog.http.rest import event_ids, topic_broadcast
from segmentlog.http.rest.event_ids import decode_id
from segmentlog.http.serving import HttpServer
from segmentlog.http.settings import HttpSettings
from segmentlog.producing.producer import Producer
from segmentlog.store import LogStore


def test_what_comes_is_sent(store: LogStore, http_server: HttpServer) -> None:
    """Events have partition, offset and id, and start at the end by default."""
    topic = store.create_topic("t", partitions=2)
    topic.partition(0).append([b"before"])
    with Listener(http_server, "/topics/t/stream") as events:
        assert events.headers["content-type"] == "text/event-stream"
        topic.partition(1).append([b"a"], keys=[b"k"], timestamps=[5])
        kind, event_id, data = next(events)
        assert (kind, data) == (
            "message", {"partition": 1, "offset": 0, "timestamp": 5, "key": "k", "value": "a"}
        )  # fmt: skip
        assert decode_id(topic, event_id) == [1, 1]
        topic.partition(0).append([b"b", b"c"])
        assert events.values(2) == ["b", "c"]
    with Listener(http_server, "/topics/t/stream?from=earliest&values=base64") as events:
        assert next(events)[2]["value_base64"] == "YmVmb3Jl"


def test_resuming_anywhere_is_exact(store: LogStore, http_server: HttpServer) -> None:
    """A client that resumes at any event misses and repeats no record in any partition."""
    topic = store.create_topic("t", partitions=3)
    for number in range(30):
        topic.partition(number % 3).append([b"%d-%d" % (number, index) for index in range(2)])
    with Listener(http_server, "/topics/t/stream?from=earliest") as events:
        first, everything = events.first_id, [next(events) for _ in range(60)]
    places = {(data["partition"], data["offset"]) for _, _, data in everything}
    assert len(places) == 60
    for had in range(0, 60, 7):
        last_id = everything[had - 1][1] if had else first
        with Listener(http_server, "/topics/t/stream", last_id) as events:
            rest = [next(events)[2] for _ in range(60 - had)]
        had_places = {(data["partition"], data["offset"]) for _, _, data in everything[:had]}
        assert {(data["partition"], data["offset"]) for data in rest} == places - had_places
        for partition in range(3):
            offsets = [data["offset"] for data in rest if data["partition"] == partition]
            assert offsets == sorted(offsets)
    with Listener(http_server, f"/topics/t/stream?last_event_id={everything[10][1]}") as events:
        assert next(events)[2] == everything[11][2]


def test_partitions_that_come_are_read_from_their_beginning(store: LogStore, http_server: HttpServer) -> None:
    """A stream includes new partitions from their first record."""
    topic = store.create_topic("t")
    topic.partition(0).append([b"a"])
    with Listener(http_server, "/topics/t/stream?from=earliest") as events:
        _, old_id, _ = next(events)
        store.alter_topic("t", partitions=2)
        topic.partition(1).append([b"b"])
        topic.partition(0).append([b"c"])
        assert sorted(events.values(2)) == ["b", "c"]
    with Listener(http_server, "/topics/t/stream", old_id) as events:
        assert sorted(events.values(2)) == ["b", "c"]


@pytest.mark.parametrize("seed", seeds("listeners of a stream", (5,)))
def test_many_listeners_get_everything_once(store: LogStore, http_server: HttpServer, seed: int) -> None:
    """Clients that reconnect while producers append get every record once and in order, from one reader thread."""
    rng = random.Random(seed)
    topic = store.create_topic("t", partitions=2)
    total, failures = 2000, []

    def append() -> None:
        for number in range(0, total, 20):
            topic.partition(number // 20 % 2).append([b"%d" % n for n in range(number, number + 20)])
            time.sleep(0.002)

    def listen(first_size: int, parts: int) -> None:
        try:
            found, last_id, path = [], None, "/topics/t/stream?from=earliest"
            for part in range(parts):
                with Listener(http_server, path, last_id) as events:
                    upto = total if part == parts - 1 else first_size * (part + 1)
                    while len(found) < upto:
                        _, last_id, data = next(events)
                        found.append((data["partition"], data["offset"], data["value"]))
            assert len(set(found)) == total
            for partition in range(2):
                offsets = [offset for number, offset, _ in found if number == partition]
                assert offsets == list(range(total // 2))
        except BaseException as error:
            failures.append(error)

    with mock.patch.object(topic_broadcast, "RING_BYTES", 20_000):
        threads = [threading.Thread(target=append)]
        threads += [
            threading.Thread(target=listen, args=(rng.randrange(1, 500), rng.randrange(1, 4))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]


def test_a_slow_client_is_paced_and_holds_nobody_up(store: LogStore, http_server: HttpServer) -> None:
    """A client that does not read delays no other client, and later reads everything from the log."""
    log = store.create_topic("t").partition(0)
    path, total = "/topics/t/stream?from=earliest", 3000
    log.append([b"begin"])
    with (
        mock.patch.object(topic_broadcast, "RING_BYTES", 100_000),
        mock.patch.object(topic_broadcast, "_SLOW_LISTENER_S", 0.2),
        Listener(http_server, path, receive_bytes=4096) as slow,
        Listener(http_server, path) as quick,
    ):
        assert slow.values(1) == quick.values(1) == ["begin"]
        for number in range(0, total, 100):
            log.append([b"%d %b" % (n, b"x" * 1000) for n in range(number, number + 100)])
        assert [value.split()[0] for value in quick.values(total)] == [str(n) for n in range(total)]
        assert [value.split()[0] for value in slow.values(total)] == [str(n) for n in range(total)]


def test_one_reader_for_all(store: LogStore, http_server: HttpServer) -> None:
    """Records are read and encoded once for all listeners, and the thread ends with the last listener."""
    log = store.create_topic("t").partition(0)
    with mock.patch("segmentlog.http.rest.topic_broadcast.read_events", wraps=topic_broadcast.read_events) as reading:
        listeners = [Listener(http_server, "/topics/t/stream") for _ in range(20)]
        for number in range(10):
            log.append([b"%d" % number])
            assert all(listener.values(1) == [str(number)] for listener in listeners)
        assert any(one.name == "segmentlog-http-tail" for one in threading.enumerate())
        for listener in listeners:
            listener.close()
        ends_s = time.monotonic() + 20
        while any(one.name == "segmentlog-http-tail" for one in threading.enumerate()) and time.monotonic() < ends_s:
            time.sleep(0.05)
        assert not any(one.name == "segmentlog-http-tail" for one in threading.enumerate())
    with_records = [call for call in reading.mock_calls if call]
    assert len(with_records) < 100  # and not 20 for each append


@pytest.mark.parametrize("where", ["read_events", "announce_waiting"])
def test_what_nobody_expected_ends_no_stream(store: LogStore, http_server: HttpServer, where: str) -> None:
    """The reader thread survives an unexpected error, and its listeners continue."""
    log = store.create_topic("t").partition(0)
    real, failures = getattr(topic_broadcast, where), []

    def fail_once(*args: Any) -> Any:
        if threading.current_thread().name == "segmentlog-http-tail" and not failures:
            failures.append(MemoryError())
            raise failures[0]
        return real(*args)

    with mock.patch.object(topic_broadcast, "_POLL_S", 0.1), Listener(http_server, "/topics/t/stream") as events:
        log.append([b"before"])
        assert events.values(1) == ["before"]
        with mock.patch.object(topic_broadcast, where, fail_once):
            log.append([b"a"])
            assert events.values(1) == ["a"]
            ends_s = time.monotonic() + 20
            while not failures and time.monotonic() < ends_s:
                log.append([b""])
                assert events.values(1) == [""]
        assert failures
        log.append([b"b"])
        assert events.values(1) == ["b"]
        with Listener(http_server, "/topics/t/stream") as later:
            log.append([b"c"])
            assert later.values(1) == events.values(1) == ["c"]


def test_many_partitions(store: LogStore, http_server: HttpServer) -> None:
    """With long ids the stream stays small, and clients can still resume."""
    topic = store.create_topic("t", partitions=300)
    topic.partition(7).append([b"x"] * 20_000)
    view = event_ids.StreamView()
    pieces = list(event_ids.read_events(topic.partitions(), event_ids.topic_mark(topic), [0] * 300, view))
    assert sum(piece.records for piece in pieces) == 20_000
    assert max(len(piece.data) for piece in pieces) < 2 * (256 << 10)
    with Listener(http_server, "/topics/t/stream?from=earliest") as events:
        ids: list[tuple[str, int]] = []
        while len(ids) < 3:
            _, event_id, data = next(events)
            if event_id:
                ids.append((event_id, data["offset"]))
    for event_id, offset in ids:
        with Listener(http_server, "/topics/t/stream", event_id) as events:
            assert next(events)[2]["offset"] == offset + 1


@pytest.mark.parametrize("alone", [False, True])
def test_a_backlog_starves_no_other_partition(store: LogStore, http_server: HttpServer, alone: bool) -> None:
    """A record in a small partition arrives early, however many records a partition before it has.

    Both ways: read by the shared thread into a ring with little room, and read by the stream itself (``alone``).
    """
    topic = store.create_topic("t", partitions=3, compression_type="none")
    for _ in range(100):
        topic.partition(0).append([b"x" * 1000] * 100)
    topic.partition(2).append([b"small"])
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(topic_broadcast, "RING_BYTES", 1 << 10))
        if alone:  # the ring is at the end of the log, where the first listener is
            first = stack.enter_context(Listener(http_server, "/topics/t/stream"))
            topic.partition(1).append([b"live"])
            assert first.values(1) == ["live"]
        events = stack.enter_context(Listener(http_server, "/topics/t/stream?from=earliest"))
        before = next(number for number, (_, _, data) in enumerate(events) if data["partition"] == 2)
    assert before < 2000


def test_small_records_in_small_pieces(store: LogStore) -> None:
    """The size of a chunk includes the JSON and the id of each event."""
    topic = store.create_topic("t", partitions=30)
    topic.partition(0).append([b"x"] * 20_000)
    pieces = list(
        event_ids.read_events(topic.partitions(), event_ids.topic_mark(topic), [0] * 30, event_ids.StreamView())
    )
    assert max(len(piece.data) for piece in pieces) < 2 * (256 << 10)
    assert all(piece.data.count(b"id: ") == piece.records for piece in pieces)


def test_too_many_partitions(store: LogStore, web: httpx.Client) -> None:
    """A topic whose event ids would exceed a header is refused, with the alternative."""
    store.create_topic("t", partitions=3)
    with mock.patch.object(event_ids, "PARTITIONS_MAX", 2):
        answer = web.get("/topics/t/stream")
    assert answer.status_code == 400
    assert "/topics/t/partitions/P/records" in answer.json()["message"]


def test_json_in_several_lines_is_one_event(store: LogStore, http_server: HttpServer) -> None:
    """Line ends between JSON tokens do not split an event."""
    log = store.create_topic("t").partition(0)
    log.append([b'{"a":\r1}', b'{"a":\r\n2}', b'{"a":\n3}'])
    answer = httpx.get(
        f"{http_server.url}/topics/t/partitions/0/records?values=json", headers={"accept": "application/x-ndjson"}
    )
    assert b"\r" not in answer.content
    with Listener(http_server, "/topics/t/stream?from=earliest&values=json") as events:
        assert events.values(3) == [{"a": 1}, {"a": 2}, {"a": 3}]


def _abort(producer: Producer) -> None:
    with producer.transaction():
        producer.send("t", b"aborted")
        producer.flush()
        raise ZeroDivisionError


def test_views(store: LogStore, http_server: HttpServer) -> None:
    """Committed and durable views send records once they are committed or durable."""
    topic = store.create_topic("t", fsync="never")
    log = topic.partition(0)
    with (
        Listener(http_server, "/topics/t/stream?isolation=read_committed") as committed,
        Listener(http_server, "/topics/t/stream?durable_only=true") as durable,
        Listener(http_server, "/topics/t/stream") as every,
    ):
        with store.producer(name="p") as producer:
            with producer.transaction():
                producer.send("t", b"in")
            with pytest.raises(ZeroDivisionError):
                _abort(producer)
        log.append([b"last"], ack="written")
        assert every.values(3) == ["in", "aborted", "last"]
        assert committed.values(2) == ["in", "last"]
        log.flush()
        assert durable.values(3) == ["in", "aborted", "last"]


def test_a_place_that_is_gone_is_told(store: LogStore, http_server: HttpServer) -> None:
    """A client at lost or deleted offsets gets an error, or with ``gaps=skip`` an event that names them."""
    topic = store.create_topic("t")
    log = topic.partition(0)
    log.append([b"%d" % number for number in range(10)])
    with Listener(http_server, "/topics/t/stream?from=earliest") as events:
        ids = [next(events)[1] for _ in range(10)]
    log.truncate(5)
    log.append([b"after"])
    with Listener(http_server, "/topics/t/stream", ids[6]) as events:
        assert events.status == 410
        assert "lost range [5, " in events.body()["message"]
    with Listener(http_server, "/topics/t/stream?gaps=skip", ids[6]) as events:
        kind, gap_id, gap = next(events)
        assert (kind, gap["base_offset"], gap["end_offset"]) == ("gap", 7, 11)
        assert events.values(1) == ["after"]
    with Listener(http_server, "/topics/t/stream", gap_id) as events:
        assert events.values(1) == ["after"]
    log.trim(4)
    with Listener(http_server, "/topics/t/stream", ids[0]) as events:
        assert events.status == 416
    with Listener(http_server, "/topics/t/stream?gaps=skip", ids[0]) as events:
        assert next(events)[2] == {"partition": 0, "base_offset": 1, "end_offset": 4, "reason": "retention"}
        assert events.values(2) == ["4", "after"]


def test_a_topic_that_is_deleted_ends_its_streams(store: LogStore, http_server: HttpServer) -> None:
    """The stream reports the deletion; its ids are invalid for a new topic of the same name."""
    store.create_topic("t").partition(0).append([b"a"])
    with Listener(http_server, "/topics/t/stream?from=earliest") as events:
        _, event_id, _ = next(events)
        store.delete_topic("t")
        store.create_topic("t").partition(0).append([b"b", b"c"])
        kind, _, data = next(events)
        assert (kind, data["error_code"]) == ("error", 404)
        with pytest.raises(StopIteration):
            next(events)
    with Listener(http_server, "/topics/t/stream", event_id) as events:
        assert events.status == 410


@pytest.mark.parametrize("last_id", ["", "x", "00000000:1", "00000000:", ":1", "0" * 8 + ":" + "9" * 30, "é"])
def test_ids_that_are_none(store: LogStore, client: object, web: httpx.Client, last_id: str) -> None:
    """An invalid event id gets 400."""
    store.create_topic("t")
    answer = web.get("/topics/t/stream", params={"last_event_id": last_id})
    assert answer.status_code in (400, 410)


def test_heartbeats_and_the_end(store: LogStore, serve: Callable[..., HttpServer]) -> None:
    """An idle stream sends heartbeats, and closing the server ends it soon."""
    store.create_topic("t")
    server = serve(HttpSettings())
    with mock.patch("segmentlog.http.rest.native.event_stream.HEARTBEAT_S", 0.1):
        events = Listener(server, "/topics/t/stream")
        assert events._event()[2] is None  # a comment with where the client is
        began_s = time.monotonic()
        server.close()
        assert time.monotonic() - began_s < 60
        with pytest.raises(StopIteration):
            next(events)
        events.close()
