"""Consumer instances of version 2."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from doors import Client

from segmentlog.http.context import HttpContext
from segmentlog.http.rest import consumer_instances
from segmentlog.http.rest.instance_reader import ReaderOptions
from segmentlog.http.serving import HttpServer
from segmentlog.http.settings import HttpSettings
from segmentlog.security.principals import ANONYMOUS
from segmentlog.store import LogStore

JSON, BINARY = "application/vnd.kafka.json.v2+json", "application/vnd.kafka.binary.v2+json"
BODY = {"content-type": "application/vnd.kafka.v2+json"}


class Consumer:
    """One instance, created over HTTP."""

    def __init__(self, client: Client, group: str = "g", **config: Any) -> None:
        self.client = client
        config = {"format": "json", "auto.offset.reset": "earliest", "auto.commit.enable": "false", **config}
        made = client.post(f"/consumers/{group}", json=config, headers=BODY)
        assert made.status_code == 200, made.text
        self.id, self.uri = made.json()["instance_id"], made.json()["base_uri"].removeprefix("http://localhost")
        self.accept = {"accept": JSON if config["format"] == "json" else BINARY}

    def post(self, path: str, document: Any = None, status: int = 204) -> Any:
        answer = self.client.post(f"{self.uri}/{path}", json=document, headers=BODY if document is not None else {})
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def get(self, path: str, document: Any = None, status: int = 200) -> Any:
        answer = self.client.request("GET", f"{self.uri}/{path}", json=document, headers=BODY)
        assert answer.status_code == status, answer.text
        return answer.json()

    def subscribe(self, *topics: str) -> "Consumer":
        self.post("subscription", {"topics": list(topics)})
        return self

    def records(self, timeout_ms: int = 50, **query: Any) -> list[Any]:
        answer = self.client.get(f"{self.uri}/records", params={"timeout": timeout_ms, **query}, headers=self.accept)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == self.accept["accept"]
        found: list[Any] = answer.json()
        return found

    def values(self, **options: Any) -> list[Any]:
        return [record["value"] for record in self.records(**options)]

    def delete(self) -> None:
        assert self.client.delete(self.uri).status_code == 204


def test_a_life(store: LogStore, client: Client) -> None:
    """An instance is created, subscribes, reads, commits and is deleted; the next one continues at the committed
    offset."""
    log = store.create_topic("t").partition(0)
    log.append([b'{"a":1}', b"2"], keys=[b'"k"', None])
    consumer = Consumer(client, name="one").subscribe("t")
    assert consumer.uri == "/consumers/g/instances/one"
    assert consumer.records() == [
        {"topic": "t", "key": "k", "value": {"a": 1}, "partition": 0, "offset": 0},
        {"topic": "t", "key": None, "value": 2, "partition": 0, "offset": 1},
    ]
    assert consumer.records() == []
    assert consumer.post("offsets", status=200) == []
    assert consumer.get("subscription") == {"topics": ["t"]}
    assert consumer.get("assignments") == {"partitions": [{"topic": "t", "partition": 0}]}
    committed = consumer.get(
        "offsets", {"partitions": [{"topic": "t", "partition": 0}, {"topic": "t", "partition": 7}]}
    )
    assert committed == {"offsets": [{"topic": "t", "partition": 0, "offset": 2, "metadata": ""}]}
    log.append([b"3"])
    consumer.delete()
    assert client.delete(consumer.uri).json()["error_code"] == 40403
    assert client.get(f"{consumer.uri}/records").json()["error_code"] == 40403
    other = Consumer(client).subscribe("t")
    assert other.values() == [3]
    other.delete()
    assert store.groups.describe("g").members == ()


def test_committing_given_offsets(store: LogStore, client: Client) -> None:
    """A client commits the offset of the last processed record, and the group continues after it."""
    store.create_topic("t").partition(0).append([b"0", b"1", b"2", b"3"])
    consumer = Consumer(client).subscribe("t")
    assert consumer.values() == [0, 1, 2, 3]
    consumer.post("offsets", {"offsets": [{"topic": "t", "partition": 0, "offset": 1, "metadata": "m"}]}, 200)
    consumer.delete()
    committed = store.group_offsets.committed("g")
    assert [(one.offset, one.metadata) for one in committed.values()] == [(2, "m")]
    other = Consumer(client).subscribe("t")
    assert other.values() == [2, 3]
    other.delete()


def test_positions(store: LogStore, client: Client) -> None:
    """An instance seeks to offsets, times, the beginning and the end, also before its first read."""
    log = store.create_topic("t").partition(0)
    log.append([b"0", b"1", b"2"], timestamps=[1_000_000, 2_000_000, 3_000_000])
    here = {"topic": "t", "partition": 0}
    consumer = Consumer(client).subscribe("t")
    consumer.post("positions", {"offsets": [{**here, "offset": 2}]})
    assert consumer.values() == [2]
    consumer.post("positions/beginning", {"partitions": [here]})
    assert consumer.values() == [0, 1, 2]
    consumer.post("positions", {"timestamps": [{**here, "timestamp": "1970-01-01T00:33:20Z"}]})
    assert consumer.values() == [1, 2]
    consumer.post("positions/end", {"partitions": [here]})
    assert consumer.values() == []
    assert consumer.post("positions", {"offsets": [{**here, "offset": 9}]}, 416)["error_code"] == 416
    assert consumer.post("positions", {"offsets": [{**here, "partition": 1, "offset": 0}]}, 409)["error_code"] == 40903
    assert consumer.post("positions", {"timestamps": [{**here, "timestamp": "now"}]}, 422)["error_code"] == 42206
    consumer.delete()


def test_assigned_by_hand(store: LogStore, client: Client) -> None:
    """Assigned partitions are read from their committed offsets, without group membership."""
    topic = store.create_topic("t", partitions=2)
    topic.partition(0).append([b"0", b"1"])
    topic.partition(1).append([b"2"])
    store.groups.reset("g", {("t", 0): 1})  # type: ignore[dict-item]
    consumer = Consumer(client)
    both = {"partitions": [{"topic": "t", "partition": 0}, {"topic": "t", "partition": 1}]}
    consumer.post("assignments", both)
    assert consumer.get("assignments") == both
    assert sorted(consumer.values()) == [1, 2]
    consumer.post("offsets", status=200)
    assert sorted(one.offset for one in store.group_offsets.committed("g").values()) == [1, 2]
    assert consumer.post("subscription", {"topics": ["t"]}, 409)["error_code"] == 40903
    assert consumer.post("assignments", {"partitions": [{"topic": "t", "partition": 5}]}, 404)["error_code"] == 40402
    consumer.client.delete(f"{consumer.uri}/subscription")
    consumer.subscribe("t")
    assert consumer.post("assignments", both, 409)["error_code"] == 40903
    consumer.delete()


def test_members_share_partitions(store: LogStore, client: Client) -> None:
    """Two instances of a group get different partitions, and together all records."""
    topic = store.create_topic("t", partitions=4)
    for number in range(4):
        topic.partition(number).append([b"%d" % number])
    one, two = Consumer(client).subscribe("t"), Consumer(client).subscribe("t")
    found: list[Any] = []
    ends_s = time.monotonic() + 20
    while (len(set(found)) < 4 or not two.get("assignments")["partitions"]) and time.monotonic() < ends_s:
        found += one.values(timeout_ms=20) + two.values(timeout_ms=20)
    assert set(found) == {0, 1, 2, 3}
    shares = [{part["partition"] for part in consumer.get("assignments")["partitions"]} for consumer in (one, two)]
    assert shares[0].isdisjoint(shares[1])
    assert shares[0] | shares[1] == {0, 1, 2, 3}
    one.delete()
    two.delete()


def test_a_pattern_follows_topics(store: LogStore, client: Client) -> None:
    """A pattern includes new topics, without reading records of the others again."""
    store.create_topic("log-a").partition(0).append([b"1"])
    store.create_topic("other")
    with mock.patch("segmentlog.http.rest.instance_reader._MATCH_INTERVAL_S", 0.0):
        consumer = Consumer(client)
        consumer.post("subscription", {"topic_pattern": "log-.*"})
        assert consumer.get("subscription") == {"topics": ["log-a"]}
        assert consumer.values() == [1]
        store.create_topic("log-b").partition(0).append([b"2"])
        assert consumer.values(timeout_ms=2000) == [2]
        assert consumer.get("subscription") == {"topics": ["log-a", "log-b"]}
        assert consumer.post("subscription", {"topic_pattern": "("}, 422)["error_code"] == 42206
        assert consumer.post("subscription", {"topic_pattern": "x", "topics": ["t"]}, 409)["error_code"] == 40903
        consumer.delete()


def test_waiting_for_records(store: LogStore, client: Client) -> None:
    """A request waits as long as it says, and returns as soon as a record exists.

    A request that waited for longer would end in an error: the client does not wait for ten minutes.
    """
    log = store.create_topic("t").partition(0)
    consumer = Consumer(client, **{"consumer.request.timeout.ms": 600_000}).subscribe("t")
    began_s = time.monotonic()
    assert consumer.values(timeout_ms=200) == []
    assert time.monotonic() - began_s > 0.15
    timer = threading.Timer(0.2, log.append, args=([b"1"],))
    timer.start()
    assert consumer.values(timeout_ms=600_000) == [1]
    timer.join()
    consumer.delete()


def test_deleting_ends_a_wait(store: LogStore, client: Client) -> None:
    """Deleting an instance ends a request that waits in it."""
    store.create_topic("t")
    consumer = Consumer(client, **{"consumer.request.timeout.ms": 600_000}).subscribe("t")
    answers: list[object] = []
    waiting = threading.Thread(
        target=lambda: answers.append(client.get(f"{consumer.uri}/records", headers=consumer.accept))
    )
    waiting.start()
    time.sleep(0.2)
    consumer.delete()
    waiting.join()
    assert answers


def test_at_most_so_many_bytes(store: LogStore, client: Client) -> None:
    """A request returns about the requested bytes and at least one record; the next request continues after them."""
    store.create_topic("t").partition(0).append([b'"%b"' % (b"x" * 98)] * 10)
    consumer = Consumer(client).subscribe("t")
    sizes = [len(consumer.records(max_bytes=250)) for _ in range(3)]
    assert sizes == [2, 2, 2]
    assert len(consumer.records(max_bytes=1)) == 1
    assert [record["offset"] for record in consumer.records()] == [7, 8, 9]
    consumer.delete()


def test_what_is_no_json_is_told_and_kept(store: LogStore, client: Client) -> None:
    """A record that cannot be encoded ends a batch; the next request reports it, and nothing is skipped."""
    store.create_topic("t").partition(0).append([b"1", b"{broken", b"3"])
    consumer = Consumer(client).subscribe("t")
    assert consumer.values() == [1]
    for _ in range(2):
        answer = client.get(f"{consumer.uri}/records?timeout=50", headers=consumer.accept)
        assert answer.status_code == 422
        assert answer.json()["error_code"] == 42203
        assert "t/0, offset 1" in answer.json()["message"]
    consumer.post("positions", {"offsets": [{"topic": "t", "partition": 0, "offset": 2}]})
    assert consumer.values() == [3]
    consumer.delete()


def test_what_cannot_be_read_loses_nothing_before_it(store: LogStore, client: Client) -> None:
    """Records before a damaged batch are returned, then the error, and after a repair the rest."""
    log = store.create_topic("t").partition(0)
    log.append([b"1", b"2"])
    log.append([b'"damaged"'])
    log.append([b"3"])
    (path,) = Path(store.path, "t", "0").glob("*.log")
    at = path.read_bytes().index(b"damaged")
    consumer = Consumer(client, **{"auto.commit.enable": "true"}).subscribe("t")
    _write(path, at, b"D")
    assert consumer.values() == [1, 2]
    for _ in range(2):
        assert client.get(f"{consumer.uri}/records?timeout=50", headers=consumer.accept).status_code == 500
    assert [one.offset for one in store.group_offsets.committed("g").values()] in ([], [2])
    _write(path, at, b"d")
    assert consumer.values() == ["damaged", 3]
    consumer.delete()
    assert [one.offset for one in store.group_offsets.committed("g").values()] == [4]


def test_a_request_of_several_looks_loses_nothing(store: LogStore, client: Client) -> None:
    """Records read before a failure are returned."""
    log = store.create_topic("t").partition(0)
    log.append([b"1"])
    log.append([b'"damaged"'])
    (path,) = Path(store.path, "t", "0").glob("*.log")
    _write(path, path.read_bytes().index(b"damaged"), b"D")
    consumer = Consumer(client, **{"fetch.min.bytes": 1000}).subscribe("t")
    assert consumer.values(timeout_ms=2000) == [1]
    assert client.get(f"{consumer.uri}/records?timeout=50", headers=consumer.accept).status_code == 500
    consumer.delete()


@pytest.mark.parametrize("error", [OSError("the disk is gone"), RuntimeError("a bug")])
def test_a_look_for_more_that_fails_loses_nothing(store: LogStore, client: Client, error: Exception) -> None:
    """Records read before a failing poll are returned, or read again."""
    store.create_topic("t").partition(0).append([b"1", b"2"])
    consumer = Consumer(client, **{"fetch.min.bytes": 1000}).subscribe("t")
    with mock.patch("segmentlog.http.rest.instance_reader.InstanceReader.has_more", side_effect=error):
        answer = client.get(f"{consumer.uri}/records?timeout=2000", headers=consumer.accept)
    first = [one["value"] for one in answer.json()] if answer.status_code == 200 else []
    assert first + consumer.values() == [1, 2]
    consumer.delete()


def _write(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_what_is_too_deep_to_tell_is_told_and_kept(store: LogStore, client: Client) -> None:
    """A value that is nested too deeply for JSON ends a batch, and the next request reports it."""
    schema = '{"type":"record","name":"L","fields":[{"name":"n","type":["null","L"]}]}'
    made = client.post("/subjects/t-value/versions", json={"schema": schema}).json()["id"]
    store.create_topic("t").partition(0).append(
        [b"\0" + made.to_bytes(4, "big") + b"\2" * depth + b"\0" for depth in (1, 1500, 2)]
    )
    consumer = Consumer(client, format="avro", **{"auto.commit.enable": "true"}).subscribe("t")
    accept = {"accept": "application/vnd.kafka.avro.v2+json"}
    answers = [client.get(f"{consumer.uri}/records?timeout=50", headers=accept) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 422, 422]
    assert [one["offset"] for one in answers[0].json()] == [0]
    assert "t/0, offset 1" in answers[1].json()["message"]
    consumer.delete()
    assert [one.offset for one in store.group_offsets.committed("g").values()] == [1]


def test_auto_commit(store: LogStore, client: Client) -> None:
    """Returned records are committed at the next request, or when the instance is deleted."""
    log = store.create_topic("t").partition(0)
    log.append([b"0"])
    with mock.patch("segmentlog.http.rest.instance_reader._COMMIT_INTERVAL_S", 0.0):
        consumer = Consumer(client, **{"auto.commit.enable": "true"}).subscribe("t")
        assert consumer.values() == [0]
        assert not store.group_offsets.committed("g")
        log.append([b"1"])
        assert consumer.values() == [1]
        assert [one.offset for one in store.group_offsets.committed("g").values()] == [1]
        consumer.delete()
    assert [one.offset for one in store.group_offsets.committed("g").values()] == [2]


def test_formats_do_not_mix(store: LogStore, client: Client) -> None:
    """An instance answers only in the format that it was created with."""
    store.create_topic("t").partition(0).append([b"\xff"], keys=[b"k"])
    consumer = Consumer(client, format="binary").subscribe("t")
    answer = client.get(f"{consumer.uri}/records", headers={"accept": JSON})
    assert (answer.status_code, answer.json()["error_code"]) == (406, 40601)
    assert consumer.records() == [{"topic": "t", "key": "aw==", "value": "/w==", "partition": 0, "offset": 0}]
    consumer.delete()


@pytest.mark.parametrize(
    ("document", "status", "code"),
    [
        ({"format": "xml"}, 422, 422),
        ({"auto.offset.reset": "sometime"}, 422, 422),
        ({"fetch.min.bytes": "many"}, 422, 422),
        ({"name": ""}, 422, 422),
        ({"name": "x" * 256}, 422, 422),
    ],
)
def test_bad_instances(client: Client, document: Any, status: int, code: int) -> None:
    """Invalid options are refused, and no instance is created."""
    answer = client.post("/consumers/g", json=document, headers=BODY)
    assert (answer.status_code, answer.json()["error_code"]) == (status, code)


def test_names_are_taken_once(store: LogStore, client: Client) -> None:
    """A second instance with the same name in a group is refused; all options have defaults."""
    one = Consumer(client, name="n")
    answer = client.post("/consumers/g", json={"name": "n"}, headers=BODY)
    assert (answer.status_code, answer.json()["error_code"]) == (409, 40902)
    other = client.post("/consumers/g")
    assert other.status_code == 200
    assert client.delete(other.json()["base_uri"].removeprefix("http://localhost")).status_code == 204
    assert one.post("subscription", {"topics": ["nope"]}, 404)["error_code"] == 40401
    assert one.records() == []
    one.delete()


def test_those_that_nobody_asks_are_closed(store: LogStore, client: Client) -> None:
    """An expired instance leaves the group, and other members get its partitions."""
    store.create_topic("t")
    with (
        mock.patch.object(consumer_instances, "INSTANCE_TIMEOUT_S", 0.3),
        mock.patch.object(consumer_instances, "_SWEEP_S", 0.05),
    ):
        consumer = Consumer(client).subscribe("t")
        consumer.get("assignments")
        assert len(store.groups.describe("g").members) == 1
        ends_s = time.monotonic() + 20
        while store.groups.describe("g").members and time.monotonic() < ends_s:
            time.sleep(0.05)
        assert not store.groups.describe("g").members
        assert client.get(f"{consumer.uri}/records").json()["error_code"] == 40403


def test_one_that_comes_as_the_last_one_goes_is_closed_too(store: LogStore) -> None:
    """An instance created while the last one is being deleted expires, too."""

    async def one_after_the_other() -> None:
        held = consumer_instances.ConsumerInstances(HttpContext(store))
        settings = consumer_instances.InstanceSettings("binary", 1, 1000)
        held.create(ANONYMOUS, "g", "first", ReaderOptions(), settings)
        await asyncio.sleep(0.01)
        await held.remove(ANONYMOUS, "g", "first")
        held.create(ANONYMOUS, "g", "second", ReaderOptions(), settings).expires_s = 0.0
        async with asyncio.timeout(10):
            while held._by_key:
                await asyncio.sleep(0.05)

    asyncio.run(one_after_the_other())


def test_so_many_and_no_more(client: Client) -> None:
    """The number of instances is limited; further ones get 503."""
    with mock.patch.object(consumer_instances, "INSTANCES_MAX", 1):
        one = Consumer(client)
        answer = client.post("/consumers/g", json={}, headers=BODY)
        assert (answer.status_code, answer.json()["error_code"]) == (503, 50003)
        one.delete()


def test_they_end_with_the_door(store: LogStore, serve: Callable[..., HttpServer]) -> None:
    """Closing the server makes its instances commit and leave their groups; the store stays open."""
    store.create_topic("t").partition(0).append([b"1"])
    server = serve(HttpSettings())
    with httpx.Client(base_url=server.url) as web:
        web.post("/consumers/g", json={"name": "n", "format": "json", "auto.offset.reset": "earliest"}, headers=BODY)
        web.post("/consumers/g/instances/n/subscription", json={"topics": ["t"]}, headers=BODY)
        assert len(web.get("/consumers/g/instances/n/records", headers={"accept": JSON}).json()) == 1
    assert len(store.groups.describe("g").members) == 1
    server.close()
    assert not store.groups.describe("g").members
    assert [one.offset for one in store.group_offsets.committed("g").values()] == [1]


def test_a_limit_of_bytes_starves_no_partition(store: LogStore, client: Client) -> None:
    """A small partition is read early although another partition has more than a request returns."""
    topic = store.create_topic("t", partitions=3)
    topic.partition(0).append([b"0" * 1000] * 100)
    topic.partition(2).append([b"2"])
    consumer = Consumer(client, format="binary").subscribe("t")
    read = [record["partition"] for _ in range(3) for record in consumer.records(max_bytes=1500)]
    assert 2 in read
