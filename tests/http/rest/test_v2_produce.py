"""Version 2: topics, and appending in each format."""

import base64
import json
from typing import Any

import pytest
from doors import Client

from segmentlog.records import Record
from segmentlog.store import LogStore

BINARY, JSON = "application/vnd.kafka.binary.v2+json", "application/vnd.kafka.json.v2+json"
V2 = "application/vnd.kafka.v2+json"


def produce(client: Client, path: str, records: Any, content_type: str = JSON, status: int = 200) -> Any:
    """Post records."""
    answer = client.post(path, content=json.dumps({"records": records}), headers={"content-type": content_type})
    assert answer.status_code == status, answer.text
    return answer.json()


def records_of(store: LogStore, topic: str = "t", partition: int = 0) -> list[Record]:
    """Return all records of a partition."""
    return [record for batch in store.topic(topic).partition(partition).read(0) for record in batch]


def test_json_is_kept_as_it_came(store: LogStore, client: Client) -> None:
    """JSON values are appended byte for byte."""
    store.create_topic("t")
    value = '{"z": 1, "a": 12345678901234567890123, "pi": 3.1400}'
    answer = client.post("/topics/t", content=f'{{"records": [{{"value": {value}}}, {{"value": "é", "key": [1]}}]}}',
                         headers={"content-type": JSON})  # fmt: skip
    assert answer.json() == {
        "offsets": [
            {"partition": 0, "offset": 0, "error_code": None, "error": None},
            {"partition": 0, "offset": 1, "error_code": None, "error": None},
        ],
        "key_schema_id": None,
        "value_schema_id": None,
    }
    assert answer.headers["content-type"] == V2
    first, second = records_of(store)
    assert (first.key, first.value) == (None, value.encode())
    assert (second.key, second.value) == (b"[1]", '"é"'.encode())


def test_null_is_a_tombstone(store: LogStore, client: Client) -> None:
    """A null or omitted value is a tombstone, and a null key means that the record has no key."""
    store.create_topic("t")
    produce(client, "/topics/t", [{"key": "a", "value": None}, {"key": "b"}, {"key": None, "value": 1}])
    assert [(record.key, record.value) for record in records_of(store)] == [
        (b'"a"', None), (b'"b"', None), (None, b"1"),
    ]  # fmt: skip


def test_binary_is_base64(store: LogStore, client: Client) -> None:
    """Keys and values of the binary format are base64; invalid base64 is refused as a whole."""
    store.create_topic("t")
    value = bytes(range(256))
    produce(client, "/topics/t", [{"key": "AA==", "value": base64.b64encode(value).decode()}], BINARY)
    assert [(record.key, record.value) for record in records_of(store)] == [(b"\0", value)]
    answer = produce(client, "/topics/t", [{"value": "AA=="}, {"value": "*"}], BINARY, 422)
    assert answer["error_code"] == 422
    assert "base64" in answer["message"]
    assert len(records_of(store)) == 1


def test_keys_go_where_kafka_sends_them(store: LogStore, client: Client) -> None:
    """Keys map to the same partitions as in the library's producer; a record may name its partition."""
    store.create_topic("t", partitions=5)
    keys = [f"key-{number}" for number in range(40)]
    offsets = produce(client, "/topics/t", [{"key": key, "value": 1} for key in keys])["offsets"]
    with store.producer() as producer:
        deliveries = [producer.send("t", b"", key=json.dumps(key).encode()) for key in keys]
    assert [one["partition"] for one in offsets] == [delivery.result().partition for delivery in deliveries]
    named = produce(client, "/topics/t", [{"value": 1, "partition": 3}, {"value": 2, "partition": 4}])["offsets"]
    assert [one["partition"] for one in named] == [3, 4]
    one = produce(client, "/topics/t/partitions/2", [{"key": "key-1", "value": 1}])["offsets"][0]
    assert one["partition"] == 2


def test_requests_without_keys_take_turns(store: LogStore, client: Client) -> None:
    """Records without keys stay together, and requests are distributed round-robin."""
    store.create_topic("t", partitions=3)
    partitions = []
    for _ in range(6):
        offsets = produce(client, "/topics/t", [{"value": 1}, {"value": 2}])["offsets"]
        assert offsets[0]["partition"] == offsets[1]["partition"]
        partitions.append(offsets[0]["partition"])
    assert sorted(partitions) == [0, 0, 1, 1, 2, 2]


def test_what_fails_in_one_partition_is_told_of_its_records(store: LogStore, client: Client) -> None:
    """A record that is too large fails the records of its partition, and only those."""
    store.create_topic("t", partitions=2, max_message_bytes=2000, compression_type="none")
    large = {"value": "x" * 5000, "partition": 1}
    records = [{"value": 1, "partition": 0}, large, {"value": 2, "partition": 0}]
    offsets = produce(client, "/topics/t", records)["offsets"]
    assert [one["offset"] for one in offsets] == [0, None, 1]
    assert offsets[1]["error_code"] == 413
    assert "record 1 of the call" in offsets[1]["error"]
    assert not records_of(store, partition=1)


@pytest.mark.parametrize(
    ("path", "records", "code"),
    [
        ("/topics/nope", [{"value": 1}], 40401),
        ("/topics/__consumer_offsets", [{"value": 1}], 40401),
        ("/topics/t/partitions/9", [{"value": 1}], 40402),
        ("/topics/t", [{"value": 1, "partition": 9}], 40402),
    ],
)
def test_where_nothing_is(store: LogStore, client: Client, path: str, records: Any, code: int) -> None:
    """Unknown and internal topics and unknown partitions get the proxy's codes."""
    store.create_topic("t")
    store.groups.reset("g", {("t", 0): 0})  # type: ignore[dict-item]
    assert produce(client, path, records, status=404)["error_code"] == code
    assert not records_of(store)


def test_durable_when_asked(store: LogStore, client: Client) -> None:
    """With ``ack=durable`` the response follows the fsync, whatever the topic's policy."""
    log = store.create_topic("t", fsync="never").partition(0)
    produce(client, "/topics/t", [{"value": 1}])
    assert log.durable_offset < 1
    produce(client, "/topics/t?ack=durable", [{"value": 2}])
    assert log.durable_offset == 2
    assert produce(client, "/topics/t?ack=maybe", [{"value": 3}], status=400)["error_code"] == 400


def test_topics_that_always_sync_do(store: LogStore, client: Client) -> None:
    """With fsync=always records are on disk before the response, also on the fast path."""
    log = store.create_topic("t", fsync="always").partition(0)
    for number in range(3):
        produce(client, "/topics/t", [{"value": number}])
        assert log.durable_offset == number + 1


def test_a_compacted_topic_wants_keys(store: LogStore, client: Client) -> None:
    """A record without a key gets an error with the reason, and is not appended."""
    store.create_topic("t", cleanup_policy="compact")
    offsets = produce(client, "/topics/t", [{"value": 1}])["offsets"]
    assert offsets[0]["error_code"] == 42206
    assert "key" in offsets[0]["error"]


def test_topics_are_told(store: LogStore, client: Client) -> None:
    """Version 2 describes topics, partitions, offsets and the broker, without internal topics."""
    store.create_topic("b", partitions=2, retention_ms=1000)
    store.create_topic("a")
    store.topic("b").partition(1).append([b"x", b"y"])
    store.topic("b").partition(1).trim(1)
    store.groups.reset("g", {("a", 0): 0})  # type: ignore[dict-item]  # there is a topic of the store's own now
    assert client.get("/topics").json() == ["a", "b"]
    topic = client.get("/topics/b").json()
    assert topic["name"] == "b"
    assert topic["configs"]["retention.ms"] == "1000"
    assert [one["partition"] for one in topic["partitions"]] == [0, 1]
    assert client.get("/topics/b/partitions").json() == topic["partitions"]
    partition = client.get("/topics/b/partitions/1").json()
    assert partition == {"partition": 1, "leader": 1, "replicas": [{"broker": 1, "leader": True, "in_sync": True}]}
    assert client.get("/topics/b/partitions/1/offsets").json() == {"beginning_offset": 1, "end_offset": 2}
    assert client.get("/brokers").json() == {"brokers": [1]}
    assert client.get("/topics/b/partitions/2").json()["error_code"] == 40402
    assert client.get("/topics/b/partitions/x").status_code == 404
    assert client.get("/topics/__consumer_offsets").json()["error_code"] == 40401


@pytest.mark.parametrize(
    ("accept", "status", "content_type"),
    [
        (V2, 200, V2),
        ("application/json", 200, "application/json"),
        ("*/*", 200, V2),
        ("text/html;q=0.9, application/json;q=0.1", 200, "application/json"),
        ("text/html", 406, "application/json"),
        ("application/vnd.kafka.v2+json;q=0", 406, "application/json"),
    ],
)
def test_media_types(client: Client, accept: str, status: int, content_type: str) -> None:
    """The response has an accepted media type, or the status 406."""
    answer = client.get("/topics", headers={"accept": accept})
    assert (answer.status_code, answer.headers["content-type"]) == (status, content_type)


def test_other_methods(client: Client) -> None:
    """An unsupported method gets 405 with the supported methods."""
    answer = client.request("PATCH", "/topics/t")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD, POST"
    assert client.request("HEAD", "/topics").status_code == 200
