"""Version 3: administration, and an outcome for each record."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from doors import Client

from segmentlog.http.context import HttpContext
from segmentlog.http.settings import HttpSettings
from segmentlog.records import Record
from segmentlog.security.acls import Authorizer
from segmentlog.store import LogStore


@pytest.fixture
def cluster(client: Client) -> str:
    """Return the path of the cluster."""
    return "/v3/clusters/" + client.get("/v3/clusters").json()["data"][0]["cluster_id"]


def outcomes(client: Client, path: str, body: str | bytes) -> list[Any]:
    """Return the outcome of each record."""
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.split("\r\n") if line]


def records_of(store: LogStore, topic: str = "t", partition: int = 0) -> list[Record]:
    """Return all records of a partition."""
    return [record for batch in store.topic(topic).partition(partition).read(0) for record in batch]


def test_links_lead_somewhere(store: LogStore, client: Client, cluster: str) -> None:
    """Every link of cluster, topic, partition and group works, and `self` is its own address."""
    store.create_topic("t", partitions=2).partition(0).append([b"x", b"y", b"z"])
    with store.consumer("t", group="g", client_id="c") as consumer:
        consumer.poll_group(1)
        consumer.commit({("t", 0): 1, ("t", 1): 0})
        seen, todo = set(), ["/v3/clusters", f"{cluster}/topics/-/configs"]
        while todo:
            path = todo.pop()
            if path in seen or (path.endswith("/reassignment") and "/-/" not in path):
                continue  # only a partition that is being moved has one
            seen.add(path)
            answer = client.get(path)
            if path == f"{cluster}/acls":
                assert answer.status_code == 400
                continue
            assert answer.status_code == 200, (path, answer.text)
            for document in [answer.json(), *answer.json().get("data", ())]:
                assert document["kind"].startswith("Kafka")
                links = [one["related"] for one in document.values() if isinstance(one, dict) and "related" in one]
                todo += [link.removeprefix("http://localhost") for link in [document["metadata"]["self"], *links]]
    assert f"{cluster}/consumer-groups/g/lags/t/partitions/0" in seen
    assert f"{cluster}/topics/t/configs/retention.ms" in seen
    assert f"{cluster}/topics/t/partitions/1/replicas/1" in seen


def test_topics_are_made_grown_and_deleted(store: LogStore, client: Client, cluster: str) -> None:
    """Topics are created and grown with Kafka's checks; validate_only creates nothing."""
    configs = [{"name": "retention.ms", "value": "5000"}, {"name": "min.insync.replicas", "value": "1"}]
    asked = {"topic_name": "t", "partitions_count": 3, "replication_factor": 1, "configs": configs}
    dry = client.post(f"{cluster}/topics", json={**asked, "validate_only": True})
    assert dry.status_code == 200
    assert not store.topics()
    made = client.post(f"{cluster}/topics", json=asked)
    assert (made.status_code, made.json()["partitions_count"]) == (201, 3)
    assert store.topic("t").config.retention_ms == 5000
    for wrong in (
        asked, {**asked, "topic_name": "u", "replication_factor": 3}, {"topic_name": "a b"},
        {"topic_name": "u", "configs": [{"name": "nope", "value": "1"}]}, {"topic_name": "u", "partitions_count": 5000},
        {"topic_name": "u", "replicas_assignments": {"0": [1, 2]}}, {"topic_name": "__consumer_offsets"},
    ):  # fmt: skip
        answer = client.post(f"{cluster}/topics", json=wrong)
        assert (answer.status_code, answer.json()["error_code"]) == (400, 40002), wrong
    assert store.topics() == ["t"]
    assert client.request("PATCH", f"{cluster}/topics/t", json={"partitions_count": 2}).status_code == 400
    grown = client.request("PATCH", f"{cluster}/topics/t", json={"partitions_count": 4})
    assert (grown.status_code, store.topic("t").partition_count) == (200, 4)
    assert client.delete(f"{cluster}/topics/t").status_code == 204
    gone = client.delete(f"{cluster}/topics/t")
    assert (gone.status_code, gone.json()["error_code"]) == (404, 40403)


def test_configs(store: LogStore, client: Client, cluster: str) -> None:
    """Keys are listed with their defaults, set, reset, and changed together or not at all."""
    store.create_topic("t")
    key = f"{cluster}/topics/t/configs/retention.ms"
    assert client.put(key, json={"value": "1234"}).status_code == 204
    told = client.get(key).json()
    assert (told["value"], told["is_default"], told["source"]) == ("1234", False, "DYNAMIC_TOPIC_CONFIG")
    assert [one["source"] for one in told["synonyms"]] == ["DYNAMIC_TOPIC_CONFIG", "DEFAULT_CONFIG"]
    assert client.delete(key).status_code == 204
    assert client.get(key).json()["is_default"]
    changes = [{"name": "segment.bytes", "value": "1048576"}, {"name": "retention.ms", "value": "soon"}]
    answer = client.post(f"{cluster}/topics/t/configs:alter", json={"data": changes})
    assert (answer.status_code, answer.json()["error_code"]) == (400, 40002)
    assert store.topic("t").config.segment_bytes != 1048576
    changes[1] = {"name": "retention.ms", "operation": "DELETE"}
    validated = {"data": changes, "validate_only": True}
    assert client.post(f"{cluster}/topics/t/configs:alter", json=validated).status_code == 204
    assert store.topic("t").config.segment_bytes != 1048576
    assert client.post(f"{cluster}/topics/t/configs:alter", json={"data": changes}).status_code == 204
    assert store.topic("t").config.segment_bytes == 1048576
    assert client.get(f"{cluster}/topics/t/configs/nope").status_code == 404
    assert client.delete(f"{cluster}/topics/t/configs/nope").status_code == 404


def test_settings_of_kafka_that_change_nothing(
    store: LogStore, client: Client, cluster: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Kafka settings without effect are validated, and logged with the reason."""
    with caplog.at_level(logging.WARNING, "segmentlog.http"):
        configs = [{"name": "min.insync.replicas", "value": "2"}, {"name": "compression.type", "value": "gzip"}]
        assert client.post(f"{cluster}/topics", json={"topic_name": "t", "configs": configs}).status_code == 201
        assert client.put(f"{cluster}/topics/t/configs/preallocate", json={"value": "false"}).status_code == 204
    assert store.topic("t").config.compression_type == "gzip"
    created, altered = (record.getMessage() for record in caplog.records)
    assert "topic t was created" in created
    assert "min.insync.replicas=2 (a partition has one copy" in created
    assert "topic t was given" in altered
    assert "preallocate=false (" in altered
    assert client.get(f"{cluster}/topics/t/configs/min.insync.replicas").json()["value"] == "1"
    for name, value in (("min.insync.replicas", "0"), ("preallocate", "maybe"), ("delete.retention.ms", "-1")):
        answer = client.put(f"{cluster}/topics/t/configs/{name}", json={"value": value})
        assert (answer.status_code, answer.json()["error_code"]) == (400, 40002)
        assert f"{name} = {value!r}" in answer.json()["message"]


def test_administration_takes_a_door_that_allows_writes(
    store: LogStore, client: Client, read_only_client: Client, cluster: str
) -> None:
    """A read-only server refuses administration, but appends records and describes groups."""
    store.create_topic("t")
    for method, path, document in (
        ("POST", "topics", {"topic_name": "u"}), ("DELETE", "topics/t", None),
        ("PATCH", "topics/t", {"partitions_count": 2}), ("PUT", "topics/t/configs/retention.ms", {"value": "1"}),
        ("POST", "topics/t/configs:alter", {"data": []}), ("DELETE", "topics/t/configs/retention.ms", None),
    ):  # fmt: skip
        answer = read_only_client.request(method, f"{cluster}/{path}", json=document)
        assert (answer.status_code, answer.json()["error_code"]) == (403, 40301), path
    assert outcomes(read_only_client, f"{cluster}/topics/t/records", '{"value":{"type":"JSON","data":1}}')
    assert len(records_of(store)) == 1


def test_records_have_an_outcome_each(store: LogStore, client: Client, cluster: str) -> None:
    """Records of each type, with headers, timestamps and partitions; an invalid record does not affect others."""
    store.create_topic("t", partitions=2)
    found = outcomes(client, f"{cluster}/topics/t/records", """
        {"partition_id": 1, "key": {"type": "STRING", "data": "k"}, "value": {"type": "JSON", "data": {"a": [1, "}"]}},
         "headers": [{"name": "h", "value": "AAE="}, {"name": "n"}], "timestamp": "2021-02-05T19:14:42Z"}
        {"partition_id": 0, "value": {"type": "BINARY", "data": 1}} {"partition_id": 7, "value": null}
        {"partition_id": 0, "key": {"type": "BINARY", "data": "a2V5"}}{"partition_id": "x"}{"partition_id": -1}
        {"partition_id": 0, "value": {"type": "AVRO", "data": 1}}
    """)  # fmt: skip
    assert [one["error_code"] for one in found] == [200, 400, 40403, 200, 400, 40403, 400]
    assert found[0] == {
        "error_code": 200, "cluster_id": cluster.rpartition("/")[2], "topic_name": "t", "partition_id": 1, "offset": 0,
        "timestamp": "2021-02-05T19:14:42.000Z", "key": {"size": 1, "type": "STRING"},
        "value": {"size": 15, "type": "JSON"},
    }  # fmt: skip
    assert "is not a base64 string" in found[1]["message"]
    (record,) = records_of(store, partition=1)
    assert (record.key, record.value, record.timestamp) == (b"k", b'{"a": [1, "}"]}', 1612552482000)
    assert record.headers == (("h", b"\0\1"), ("n", None))
    (record,) = records_of(store)
    assert (record.key, record.value) == (b"key", None)


def test_a_stream_that_breaks_off(store: LogStore, client: Client, cluster: str) -> None:
    """Records before malformed data are appended and answered; data after it are ignored."""
    store.create_topic("t")
    one = '{"value": {"type": "JSON", "data": 1}}'
    found = outcomes(client, f"{cluster}/topics/t/records", f"{one}{one} nonsense {one}")
    assert [one["error_code"] for one in found] == [200, 200, 400]
    assert len(records_of(store)) == 2
    assert outcomes(client, f"{cluster}/topics/t/records", f"{one}{one[:-5]}")[-1]["error_code"] == 400
    empty = client.post(f"{cluster}/topics/t/records", content=b" ", headers={"content-type": "application/json"})
    assert (empty.status_code, empty.json()["error_code"]) == (422, 42206)
    nowhere = client.post(f"{cluster}/topics/nope/records", content=one, headers={"content-type": "application/json"})
    assert (nowhere.status_code, nowhere.json()["error_code"]) == (404, 40403)


def test_batches(store: LogStore, client: Client, cluster: str) -> None:
    """Successes and failures of a batch are listed by the ids of its entries."""
    store.create_topic("t")
    entries = [
        {"id": "a", "value": {"type": "STRING", "data": "x"}},
        {"id": "b", "value": {"type": "STRING", "data": 1}},
    ]
    answer = client.post(f"{cluster}/topics/t/records:batch", json={"entries": entries})
    assert answer.status_code == 207
    assert [(one["id"], one["offset"]) for one in answer.json()["successes"]] == [("a", 0)]
    assert [(one["id"], one["error_code"]) for one in answer.json()["failures"]] == [("b", 400)]
    twice = client.post(f"{cluster}/topics/t/records:batch", json={"entries": [entries[0], entries[0]]})
    assert (twice.status_code, twice.json()["error_code"]) == (422, 42208)


def test_lags(store: LogStore, client: Client, cluster: str) -> None:
    """Lags are returned by partition and in total; an unknown group gets 404."""
    store.create_topic("t", partitions=2).partition(0).append([b"x"] * 10)
    store.groups.reset("g", {("t", 0): 3, ("t", 1): 0})  # type: ignore[dict-item]
    lags = client.get(f"{cluster}/consumer-groups/g/lags").json()["data"]
    assert [(one["partition_id"], one["current_offset"], one["lag"]) for one in lags] == [(0, 3, 7), (1, 0, 0)]
    summary = client.get(f"{cluster}/consumer-groups/g/lag-summary").json()
    assert (summary["max_lag"], summary["total_lag"], summary["max_lag_partition_id"]) == (7, 7, 0)
    group = client.get(f"{cluster}/consumer-groups/g").json()
    assert (group["state"], group["is_simple"]) == ("EMPTY", True)
    for path in ("nope", "nope/lags", "g/consumers/x", "g/lags/t/partitions/9"):
        assert client.get(f"{cluster}/consumer-groups/{path}").status_code == 404


def test_another_cluster(client: Client) -> None:
    """The id of another cluster gets 404."""
    assert client.get("/v3/clusters/other/topics").status_code == 404


def test_rules_of_access(store: LogStore, tmp_path: Path) -> None:
    """ACLs are listed, created and deleted in the ACL file; invalid ones are refused."""
    path = tmp_path / "acls"
    path.write_text("")
    authorizer = Authorizer(str(path), super_users=["User:ANONYMOUS"])
    with Client(HttpContext(store, HttpSettings(allow_writes=True), authorizer)) as client:
        acls = "/v3/clusters/" + client.get("/v3/clusters").json()["data"][0]["cluster_id"] + "/acls"
        rule = {"resource_type": "TOPIC", "resource_name": "t", "pattern_type": "LITERAL", "principal": "User:ann",
                "host": "*", "operation": "READ", "permission": "ALLOW"}  # fmt: skip
        assert client.post(acls, json=rule).status_code == 201
        more = [{**rule, "operation": "WRITE"}, {**rule, "resource_name": "u"}]
        assert client.post(f"{acls}:batch", json={"data": more}).status_code == 201
        for wrong in ({**rule, "principal": "ann"}, {**rule, "operation": "IDEMPOTENT_WRITE"}, {**rule, "host": "x"}):
            assert client.post(acls, json=wrong).json()["error_code"] == 40002
        told = client.get(acls, params={"resource_name": "t"}).json()["data"]
        assert [one["operation"] for one in told] == ["READ", "WRITE"]
        assert {key: told[0][key] for key in rule} == rule
        assert client.delete(acls, params={"resource_name": "t"}).json()["error_code"] == 40002
        every = {"resource_type": "TOPIC", "pattern_type": "ANY", "operation": "ANY", "permission": "ANY"}
        gone = client.delete(acls, params={**every, "resource_name": "t"}).json()["data"]
        assert len(gone) == 2
        assert [one["resource_name"] for one in client.get(acls).json()["data"]] == ["u"]
