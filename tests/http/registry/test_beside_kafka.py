"""Kafka clients and registry clients together: one server, two ports."""

import json
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

import segmentlog
from segmentlog import schemas
from segmentlog.store import LogStore

CLICK = {"type": "record", "name": "Click", "fields": [{"name": "page", "type": "string"}]}


@pytest.mark.timeout(120)
def test_programs_that_know_kafka_and_its_registry_find_both(tmp_path: Path) -> None:
    """Confluent's serializers work through the Kafka server, and the registry's topic is readable."""
    context = SerializationContext("clicks", MessageField.VALUE)
    with (
        segmentlog.serve(tmp_path / "store", port=0, http="127.0.0.1:0") as server,
        SchemaRegistryClient({"url": server.http_url}) as registry,
    ):
        producer = Producer({"bootstrap.servers": server.bootstrap_servers})
        serialize = AvroSerializer(registry, json.dumps(CLICK))
        for number in range(10):
            producer.produce("clicks", serialize({"page": f"/{number}"}, context))
        assert producer.flush(30) == 0
        with LogStore(tmp_path / "store", background=False) as store:
            deserializer = schemas.AvroDeserializer(store.schemas)
            with store.consumer("clicks", deserializer=deserializer) as reader:
                assert [record.value["page"] for record in reader] == [f"/{number}" for number in range(10)]
            with store.producer(serializer=schemas.AvroSerializer(store.schemas, CLICK)) as ours:
                ours.send("clicks", {"page": "/ours"})
        consumer = Consumer({"bootstrap.servers": server.bootstrap_servers, "group.id": "g"})
        try:
            consumer.assign([TopicPartition("clicks", 0, 10), TopicPartition("_schemas", 0, 0)])
            found = {}
            while len(found) < 2:
                message = consumer.poll(30)
                assert message is not None
                assert message.error() is None
                found[message.topic()] = message
        finally:
            consumer.close()
        assert AvroDeserializer(registry)(found["clicks"].value(), context) == {"page": "/ours"}
        assert json.loads(found["_schemas"].key())["subject"] == "clicks-value"
        assert json.loads(found["_schemas"].value())["id"] == 1
