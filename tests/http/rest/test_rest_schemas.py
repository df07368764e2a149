"""Records with schemas of the registry, in both versions, compatible with Confluent's deserializers."""

import json
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from doors import Client

from segmentlog.http.serving import HttpServer
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.store import LogStore

_BODY = {"content-type": "application/vnd.kafka.v2+json"}
AVRO = json.dumps(
    {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}, {"name": "b", "type": "string"}]}
)
JSON_SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
PROTOBUF = 'syntax = "proto3"; message R { int32 a = 1; string b = 2; }'
VALUE = {"a": 7, "b": "x"}


def produce(client: Client, name: str, document: Any, status: int = 200) -> Any:
    """Post records in a format of version 2."""
    content_type = f"application/vnd.kafka.{name}.v2+json"
    answer = client.post("/topics/t", content=json.dumps(document), headers={"content-type": content_type})
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("name", "schema"), [("avro", AVRO), ("jsonschema", JSON_SCHEMA), ("protobuf", PROTOBUF)]
)  # fmt: skip
def test_there_and_back(store: LogStore, client: Client, name: str, schema: str) -> None:
    """A schema is registered by the first request, used by its id, and decoded by a consumer instance."""
    store.create_topic("t")
    first = produce(client, name, {"value_schema": schema, "records": [{"value": VALUE}, {"value": None}]})
    schema_id = first["value_schema_id"]
    assert store.schemas.version("t-value").id == schema_id
    again = produce(client, name, {"value_schema_id": schema_id, "records": [{"value": VALUE}]})
    assert (again["value_schema_id"], again["key_schema_id"]) == (schema_id, None)
    made = client.post("/consumers/g", json={"format": name, "auto.offset.reset": "earliest"}, headers=_BODY).json()
    uri = made["base_uri"].removeprefix("http://localhost")
    client.post(f"{uri}/subscription", json={"topics": ["t"]}, headers=_BODY)
    answer = client.get(f"{uri}/records", headers={"accept": f"application/vnd.kafka.{name}.v2+json"})
    assert [record["value"] for record in answer.json()] == [VALUE, None, VALUE]
    client.delete(uri)


def test_what_does_not_fit_is_refused(store: LogStore, client: Client) -> None:
    """Invalid values, invalid schemas and missing schemas get the proxy's codes."""
    log = store.create_topic("t").partition(0)
    wrong = [
        ({"value_schema": AVRO, "records": [{"value": VALUE}, {"value": {"a": "x", "b": "y"}}]}, 42203),
        ({"value_schema": '{"type": "nope"}', "records": [{"value": 1}]}, 42205),
        ({"value_schema_id": 99, "records": [{"value": 1}]}, 42205),
        ({"records": [{"value": 1}]}, 42202),
        ({"value_schema": AVRO, "records": [{"key": 1, "value": VALUE}]}, 42201),
    ]
    for document, code in wrong:
        assert produce(client, "avro", document, 422)["error_code"] == code, document
    assert log.log_end_offset == 0


def test_version_3_finds_the_latest_schema(store: LogStore, client: Client) -> None:
    """Without a type the topic's latest schema or the named one is used, and the outcome names it."""
    store.create_topic("t")
    registered = store.schemas.register("t-value", Draft(AVRO))
    path = "/v3/clusters/" + client.get("/v3/clusters").json()["data"][0]["cluster_id"] + "/topics/t/records"
    named = {"schema_id": registered.id, "data": VALUE}
    asked = [
        {"data": VALUE}, {"type": "AVRO", "schema": AVRO, "data": VALUE}, named, {"schema_version": 1, "data": VALUE},
        {"type": "JSONSCHEMA", **named}, {"subject": "nope", "data": VALUE}, {"data": 1},
    ]  # fmt: skip
    body = "".join(json.dumps({"value": one}) for one in asked)
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    found = [json.loads(line) for line in answer.text.split("\r\n") if line]
    assert [one["error_code"] for one in found] == [200, 200, 200, 200, 400, 400, 400]
    size = found[0]["value"]
    assert (size["type"], size["subject"], size["schema_id"], size["schema_version"]) == (
        "AVRO", "t-value", registered.id, 1
    )  # fmt: skip


def test_confluents_deserializer_reads_it(store: LogStore, http_server: HttpServer, client: Client) -> None:
    """Confluent's deserializers read values that REST has encoded."""
    log = store.create_topic("t").partition(0)
    produce(client, "avro", {"value_schema": AVRO, "records": [{"value": VALUE}]})
    (value,) = [record.value for batch in log.read(0) for record in batch]
    with SchemaRegistryClient({"url": http_server.url}) as registry:
        read = AvroDeserializer(registry)(value, SerializationContext("t", MessageField.VALUE))
    assert read == VALUE
