"""Endpoints that the REST Proxy lacks: records by offset, and lines."""

import base64
import json
import socket
import threading
import time
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest
from doors import Client

from segmentlog.errors import DiskFull
from segmentlog.http.rest import batch_append, large_batch_slot
from segmentlog.http.rest.native import line_endpoints as lines_module
from segmentlog.http.rest.native import record_endpoints
from segmentlog.http.serving import HttpServer
from segmentlog.log.append.appender import Appender
from segmentlog.records import Record
from segmentlog.store import LogStore

NDJSON = {"content-type": "application/x-ndjson"}
LINES = {"accept": "application/x-ndjson"}


def records_of(store: LogStore, partition: int = 0) -> list[Record]:
    """Return all records of a partition of `t`."""
    return [record for batch in store.topic("t").partition(partition).read(0) for record in batch]


def test_a_page(store: LogStore, client: Client) -> None:
    """A page has records from an offset, the next offset, and the start and end of the partition."""
    log = store.create_topic("t").partition(0)
    log.append([b"a", None, b"\xff"], keys=[b"k", b"\xfe", None], timestamps=[1, 2, 3],
               headers=[[("h", b"x"), ("n", None)], None, [("b", b"\xff")]])  # fmt: skip
    log.append([b"%d" % number for number in range(1000)])
    page = client.get("/topics/t/partitions/0/records?max=3").json()
    assert page == {
        "records": [
            {"partition": 0, "offset": 0, "timestamp": 1, "key": "k", "value": "a",
             "headers": [{"name": "h", "value": "x"}, {"name": "n", "value": None}]},
            {"partition": 0, "offset": 1, "timestamp": 2, "key_base64": "/g==", "value": None},
            {"partition": 0, "offset": 2, "timestamp": 3, "key": None, "value_base64": "/w==",
             "headers": [{"name": "b", "value_base64": "/w=="}]},
        ],
        "next_offset": 3, "log_start_offset": 0, "end_offset": 1003,
    }  # fmt: skip
    offset, values = page["next_offset"], []
    while offset < page["end_offset"]:
        page = client.get(f"/topics/t/partitions/0/records?offset={offset}&max=300").json()
        values += [record["value"] for record in page["records"]]
        assert page["next_offset"] > offset
        offset = page["next_offset"]
    assert values == [str(number) for number in range(1000)]
    end = client.get("/topics/t/partitions/0/records?offset=latest").json()
    assert (end["records"], end["next_offset"]) == ([], 1003)


def test_values_as_json(store: LogStore, client: Client) -> None:
    """JSON values are embedded byte for byte; other values have a field for their encoding."""
    store.create_topic("t").partition(0).append([b'{"a": 1.50}', b"plain", b"\xff", None, b"[1,\n 2]"])
    answer = client.get("/topics/t/partitions/0/records?values=json")
    assert b'"value":{"a": 1.50}' in answer.content
    first, second, third, fourth, fifth = answer.json()["records"]
    assert (first["value"], second["value_text"], third["value_base64"]) == ({"a": 1.5}, "plain", "/w==")
    assert (fourth["value"], fifth["value"]) == (None, [1, 2])
    found = client.get("/topics/t/partitions/0/records?values=base64").json()["records"]
    assert base64.b64decode(found[0]["value_base64"]) == b'{"a": 1.50}'


def test_lines_out(store: LogStore, client: Client) -> None:
    """Lines return all records of a partition, or the values alone."""
    log = store.create_topic("t").partition(0)
    for start in range(0, 5000, 100):
        log.append([b"value %d" % number for number in range(start, start + 100)])
    answer = client.get("/topics/t/partitions/0/records", headers=LINES)
    assert answer.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [(one["offset"], one["value"]) for one in found] == [(n, f"value {n}") for n in range(5000)]
    assert found[:500] == client.get("/topics/t/partitions/0/records?max=500").json()["records"]
    bare = client.get("/topics/t/partitions/0/records?form=values&offset=4990&max=5", headers=LINES)
    assert bare.text == "".join(f"value {number}\n" for number in range(4990, 4995))


def test_what_readers_are_shown(store: LogStore, client: Client) -> None:
    """read_committed hides open transactions, and durable_only hides unsynced records."""
    log = store.create_topic("t", fsync="never").partition(0)
    log.append([b"a"], ack="durable")
    with store.producer(name="p") as producer, producer.transaction():
        producer.send("t", b"open")
        producer.flush()
        for query, shown in (
            ("", ["a", "open"]), ("?isolation=read_committed", ["a"]), ("?durable_only=true", ["a"]),
        ):  # fmt: skip
            page = client.get(f"/topics/t/partitions/0/records{query}").json()
            assert [record["value"] for record in page["records"]] == shown
            lines = client.get(f"/topics/t/partitions/0/records{query}", headers=LINES).text.splitlines()
            assert [json.loads(line)["value"] for line in lines] == shown


def test_where_nothing_is(store: LogStore, client: Client) -> None:
    """Unknown offsets, partitions and topics and invalid queries get an error, for lines, too."""
    log = store.create_topic("t").partition(0)
    log.append([b"a"] * 10)
    log.truncate(5)
    for headers in ({}, LINES):
        for path, status in (
            ("t/partitions/0/records?offset=99", 416), ("t/partitions/0/records?offset=7", 410),
            ("t/partitions/1/records", 404), ("nope/partitions/0/records", 404), ("t/partitions/0/records?max=0", 400),
            ("t/partitions/0/records?offset=-1", 400), ("t/partitions/0/records?offset=soon", 400),
            ("t/partitions/0/records?offset=99999999999999999999", 400), ("__x/partitions/0/records", 404),
        ):  # fmt: skip
            assert client.get(f"/topics/{path}", headers=headers).status_code == status, path
    assert "lost range [5" in client.get("/topics/t/partitions/0/records?offset=7").json()["message"]


# ---------------------------------------------------------------- lines in


def test_lines_in(store: LogStore, client: Client) -> None:
    """Each line becomes a value, byte for byte, and the response lists the offsets."""
    store.create_topic("t")
    lines = [b'{"a":1}', b"\xff\r", b"x" * 100_000, "é".encode()]
    answer = client.post("/topics/t/records", content=b"\n".join(lines) + b"\n\n", headers=NDJSON)
    assert answer.json() == {"records": 4, "ranges": [{"partition": 0, "base_offset": 0, "records": 4}]}
    assert [record.value for record in records_of(store)] == lines
    text = client.post("/topics/t/records", content=b"a\n\nb", headers={"content-type": "text/plain"})
    assert text.json()["records"] == 3
    assert [record.value for record in records_of(store)][4:] == [b"a", b"", b"b"]
    assert client.post("/topics/t/records", content=b"", headers=NDJSON).json() == {"records": 0, "ranges": []}
    other = client.post("/topics/t/records", content=b"x", headers={"content-type": "image/png"})
    assert other.status_code == 415


def test_many_lines_in(store: LogStore, client: Client) -> None:
    """A body of many chunks is appended in order to the named partition."""
    store.create_topic("t", partitions=3)
    lines = [b"line %d %b" % (number, b"x" * 90) for number in range(50_000)]
    answer = client.post("/topics/t/records?partition=2&ack=durable", content=b"\n".join(lines), headers=NDJSON)
    assert answer.json() == {"records": 50_000, "ranges": [{"partition": 2, "base_offset": 0, "records": 50_000}]}
    assert [record.value for record in records_of(store, 2)] == lines
    spread = client.post("/topics/t/records", content=b"\n".join(lines), headers=NDJSON).json()
    assert spread["records"] == 50_000
    assert {one["partition"] for one in spread["ranges"]} == {0, 1, 2}


def test_records_come_back_as_they_went(store: LogStore, client: Client) -> None:
    """Exported records can be appended with their keys, timestamps, headers and partitions."""
    topic = store.create_topic("t", partitions=2)
    topic.partition(1).append([b"a", None, b"\xff"], keys=[b"k", b"\xfe", b"z"], timestamps=[1, 2, 3],
                              headers=[[("h", b"x")], None, [("b", b"\xff")]])  # fmt: skip
    lines = client.get("/topics/t/partitions/1/records", headers=LINES).content
    answer = client.post("/topics/t/records?form=records", content=lines, headers=NDJSON)
    assert answer.json()["ranges"] == [{"partition": 1, "base_offset": 3, "records": 3}]
    before, after = records_of(store, 1)[:3], records_of(store, 1)[3:]

    def told(record: Record) -> Any:
        return (record.key, record.value, record.timestamp, record.headers)

    assert list(map(told, after)) == list(map(told, before))
    wrong = client.post("/topics/t/records?form=records", content=b'{"value":"x"}\n{oops\n', headers=NDJSON)
    assert wrong.status_code == 422
    assert "line 2" in wrong.json()["message"]
    assert wrong.json()["appended"] == {"records": 0, "ranges": []}


def test_what_was_appended_before_an_error_is_told(store: LogStore, client: Client) -> None:
    """The chunks before a failing chunk are appended, and the response lists them."""
    store.create_topic("t", max_message_bytes=100_000)
    body = b"\n".join([b"x" * 1000] * 3000) + b"\n" + b"y" * 300_000 + b"\n"
    answer = client.post("/topics/t/records", content=body, headers=NDJSON)
    assert answer.status_code == 413
    appended = answer.json()["appended"]
    assert 0 < appended["records"] < 3001
    assert len(records_of(store)) == appended["records"]


def test_a_record_without_a_key_is_named_by_its_place_in_the_request(store: LogStore, client: Client) -> None:
    """A compacted topic refuses it by its index; other partitions get their records."""
    store.create_topic("t", partitions=2, config={"cleanup.policy": "compact"})
    lines = [b'{"partition":%d,"key":"k","value":"x"}' % (number % 2) for number in range(6)]
    lines[5] = b'{"partition":1,"value":"x"}'
    answer = client.post("/topics/t/records?form=records", content=b"\n".join(lines), headers=NDJSON)
    assert answer.status_code == 422
    assert "keys[5]" in answer.json()["message"]


@pytest.mark.parametrize("query", ["partition=1", "", "form=records", "partition=1&producer=p&sequence=0"])
@pytest.mark.parametrize("call", [1, 2, 4, 7])
def test_a_chunk_that_fails_ends_the_request(store: LogStore, client: Client, call: int, query: str) -> None:
    """A full disk ends the request, and resending from `next_line` keeps the order in every partition."""
    topic = store.create_topic("t", partitions=2)
    for number in range(2):
        topic.partition(number).append([b"first"])
    values = [b"%03d" % number for number in range(200)]
    lines = [b'{"key":"%b","value":"%b"}' % (value[-1:], value) for value in values] if "form" in query else values
    calls, real, is_full = [], Appender.place, [True]

    def place(appender: Appender, *args: Any, **options: Any) -> Any:
        if appender._handle.topic == "t":
            calls.append(args)
            if len(calls) == call:
                raise DiskFull("/disk", 1)
        return real(appender, *args, **options)

    twice: set[bytes | None] = set()
    with mock.patch.object(lines_module, "_CHUNK_BYTES", 100), mock.patch.object(Appender, "place", place):
        begin = 0
        for _ in range(2):
            answer = client.post(f"/topics/t/records?{query}", content=b"\n".join(lines[begin:]), headers=NDJSON)
            if answer.status_code == 200:
                break
            assert answer.status_code == 507
            is_full.clear()
            there = [record.value for number in range(2) for record in records_of(store, number)[1:]]
            assert answer.json()["appended"]["records"] == len(there)
            if "producer" not in query:
                begin += answer.json()["next_line"] - 1
            assert set(values[:begin]) <= set(there)
            twice = set(there) - set(values[:begin]) if "form" in query else set()
    assert not is_full
    assert answer.status_code == 200
    for number in range(2):
        found = [record.value for record in records_of(store, number)[1:]]
        firsts = list(dict.fromkeys(found))
        assert firsts == sorted(value for value in firsts if value)
        assert {value for value in firsts if found.count(value) > 1} <= twice
    everywhere = {record.value for number in range(2) for record in records_of(store, number)[1:]}
    assert everywhere == set(values)


def test_a_named_producer_appends_once(store: LogStore, client: Client) -> None:
    """Lines that are sent again with their numbers are skipped, and a gap is refused."""
    store.create_topic("t", partitions=2)

    def send(sequence: int, *lines: bytes, status: int = 200) -> Any:
        answer = client.post(
            f"/topics/t/records?partition=1&producer=p&sequence={sequence}", content=b"\n".join(lines), headers=NDJSON
        )
        assert answer.status_code == status, answer.text
        return answer.json()

    assert send(0, b"a", b"b") == {
        "records": 2, "ranges": [{"partition": 1, "base_offset": 0, "records": 2}], "skipped": 0, "next_sequence": 2,
    }  # fmt: skip
    again = send(0, b"a", b"b", b"c")
    assert (again["records"], again["skipped"], again["next_sequence"]) == (1, 2, 3)
    assert send(3) == {"records": 0, "ranges": [], "skipped": 0, "next_sequence": 3}
    assert "sequence 9, but 3 is next" in send(9, b"x", status=409)["message"]
    assert [record.value for record in records_of(store, 1)] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("form", ["values", "records"])
def test_what_is_read_is_json(store: LogStore, client: Client, form: str) -> None:
    """A page is valid JSON, even with control characters and line feeds in values."""
    store.create_topic("t").partition(0).append([bytes([number]) + b'"\\\n' for number in range(256)])
    for values in ("text", "json", "base64"):
        for line in client.get(f"/topics/t/partitions/0/records?values={values}", headers=LINES).content.splitlines():
            msgspec.json.decode(line)
        page = client.get(f"/topics/t/partitions/0/records?values={values}&form={form}")
        assert len(msgspec.json.decode(page.content)["records"]) == 256


def test_nobody_is_read_for_who_is_gone(store: LogStore, http_server: HttpServer) -> None:
    """The server stops reading lines for a client that has disconnected."""
    log = store.create_topic("t", compression_type="none").partition(0)
    for _ in range(60):
        log.append([b"x" * 1000] * 900)
    host, _, port = http_server.address.rpartition(":")
    with mock.patch("segmentlog.http.rest.native.record_endpoints.lines", wraps=record_endpoints.lines) as rendering:
        with socket.create_connection((host, int(port))) as sock:
            fields = f"host: {http_server.address}\r\naccept: application/x-ndjson\r\n"
            sock.sendall(f"GET /topics/t/partitions/0/records HTTP/1.1\r\n{fields}\r\n".encode())
            sock.recv(1000)
        ends_s, before = time.monotonic() + 20, -1
        while rendering.call_count != before and time.monotonic() < ends_s:
            before = rendering.call_count
            time.sleep(0.3)
        assert rendering.call_count < 120  # of 240 parts


def test_who_waits_for_an_object_store_holds_nobody_up(
    store: LogStore, http_server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait for shipping do not delay reads and other appends."""
    monkeypatch.setattr("segmentlog.http.rest.rest_context.is_bound", lambda fs, path: True)
    store.create_topic("t").partition(0).append([b"a"])
    real, may_go = batch_append._append, threading.Event()

    def append(topic: Any, number: int, records: Any, rows: Any, ack: str | None) -> int:
        if ack != "shipped":
            return real(topic, number, records, rows, ack)  # type: ignore[arg-type]
        assert may_go.wait(120)
        return 0

    def ship() -> None:
        headers = {"content-type": "text/plain"}
        url = f"{http_server.url}/topics/t/records?ack=shipped"
        answers.append(httpx.post(url, content=b"x", headers=headers, timeout=120).status_code)

    answers: list[int] = []
    threads = [threading.Thread(target=ship) for _ in range(40)]
    with mock.patch.object(batch_append, "_append", append):
        for thread in threads:
            thread.start()
        time.sleep(1)
        try:
            url = f"{http_server.url}/topics/t/records"
            assert httpx.post(url, content=b"b", headers={"content-type": "text/plain"}, timeout=60).status_code == 200
        finally:
            may_go.set()
            for thread in threads:
                thread.join()
    assert answers == [200] * 40


@pytest.mark.parametrize("path", ["/records?max=1", "/records?max=5"])
def test_one_large_batch_at_a_time(store: LogStore, http_server: HttpServer, path: str) -> None:
    """Concurrent requests decompress a large batch one at a time."""
    store.create_topic("t").partition(0).append([b"x" * 1000] * 100)
    real, mutex, at_once, most = record_endpoints.lines, threading.Lock(), 0, 0

    def lines(*args: Any) -> bytes:
        nonlocal at_once, most
        with mutex:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.05)
        with mutex:
            at_once -= 1
        return real(*args)

    def get(number: int) -> None:
        headers = LINES if number % 2 else {}
        url = f"{http_server.url}/topics/t/partitions/0{path}"
        answers.append(httpx.get(url, headers=headers, timeout=30).status_code)

    answers: list[int] = []
    with (
        mock.patch.object(large_batch_slot, "LARGE_BYTES", 50_000),
        mock.patch.object(record_endpoints, "lines", lines),
    ):
        threads = [threading.Thread(target=get, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (answers, most) == ([200] * 8, 1)


def test_who_takes_a_large_batch_slowly_holds_nobody_up(store: LogStore, http_server: HttpServer) -> None:
    """A large batch is freed while a slow client reads its lines, and no client misses any."""
    log = store.create_topic("t").partition(0)
    for _ in range(4):
        log.append([b"x" * 1000] * 5000)
    url = f"{http_server.url}/topics/t/partitions/0/records"
    with (
        mock.patch.object(large_batch_slot, "LARGE_BYTES", 50_000),
        mock.patch.object(record_endpoints, "_RENDER_BYTES", 700_000),
        httpx.stream("GET", url, headers=LINES, timeout=30) as slow,
    ):
        coming = slow.iter_lines()
        first = next(coming)
        for _ in range(3):
            assert len(httpx.get(url, params={"max": 3}, timeout=30).json()["records"]) == 3
        found = [json.loads(line)["offset"] for line in (first, *coming)]
    assert found == list(range(20_000))


def test_who_waits_too_long_for_a_large_batch_is_told(store: LogStore, client: Client) -> None:
    """The request gets 503 and may be retried."""
    store.create_topic("t").partition(0).append([b"x" * 1000] * 100)
    path = "/topics/t/partitions/0/records"
    with (
        mock.patch.object(large_batch_slot, "LARGE_BYTES", 50_000),
        mock.patch.object(large_batch_slot, "_WAIT_S", 0.1),
    ):
        with large_batch_slot.LargeBatchSlot() as slot:
            slot.acquire_for(next(iter(store.topic("t").partition(0).read(0))))
            assert client.get(path).status_code == 503
        assert client.get(path).status_code == 200
