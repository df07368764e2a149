"""Confluent's registry client and serializers, against the HTTP server."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.type import money_pb2

import segmentlog
from segmentlog import schemas
from segmentlog.http.serving import HttpServer
from segmentlog.store import LogStore

CLICK = {
    "type": "record",
    "name": "Click",
    "namespace": "shop",
    "fields": [{"name": "page", "type": "string"}, {"name": "at", "type": "long"}],
}


@pytest.fixture
def registry(http_server: HttpServer) -> Iterator[SchemaRegistryClient]:
    """Provide Confluent's client."""
    client = SchemaRegistryClient({"url": http_server.url})
    yield client
    client.__exit__(None, None, None)


def context(topic: str = "clicks") -> SerializationContext:
    """Return the context in which a value of a topic is serialized."""
    return SerializationContext(topic, MessageField.VALUE)


def test_a_client_registers_finds_and_deletes_schemas(registry: SchemaRegistryClient) -> None:
    """Every call of Confluent's client about subjects, versions and ids gets the expected response."""
    schema = Schema(json.dumps(CLICK), "AVRO")
    number = registry.register_schema("clicks-value", schema)
    assert registry.get_schema(number).schema_type == "AVRO"
    assert json.loads(registry.get_schema(number).schema_str)["name"] == "Click"
    wider = {**CLICK, "fields": [*CLICK["fields"], {"name": "user", "type": ["null", "string"], "default": None}]}
    second = registry.register_schema("clicks-value", Schema(json.dumps(wider), "AVRO"))
    assert second > number
    assert registry.get_subjects() == ["clicks-value"]
    assert registry.get_versions("clicks-value") == [1, 2]
    assert registry.get_latest_version("clicks-value").schema_id == second
    assert registry.get_version("clicks-value", 1).schema_id == number
    assert registry.lookup_schema("clicks-value", schema).version == 1
    assert registry.register_schema("other-value", schema) == number
    assert [one.subject for one in registry.get_schema_versions(number)] == ["clicks-value", "other-value"]
    assert registry.delete_version("clicks-value", 1) == 1
    assert registry.delete_subject("clicks-value", permanent=False) == [2]
    assert registry.delete_subject("clicks-value", permanent=True) == [1, 2]
    assert sorted(registry.get_schema_types()) == ["AVRO", "JSON", "PROTOBUF"]


def test_a_client_is_told_what_does_not_fit(registry: SchemaRegistryClient) -> None:
    """Compatibility levels are set and applied; errors have Confluent's codes."""
    registry.register_schema("clicks-value", Schema(json.dumps(CLICK), "AVRO"))
    needs_more = Schema(json.dumps({**CLICK, "fields": [*CLICK["fields"], {"name": "user", "type": "string"}]}), "AVRO")
    assert not registry.test_compatibility("clicks-value", needs_more)
    with pytest.raises(SchemaRegistryError) as refused:
        registry.register_schema("clicks-value", needs_more)
    assert refused.value.http_status_code == 409
    assert "READER_FIELD_MISSING_DEFAULT_VALUE" in str(refused.value)
    assert registry.get_compatibility() == "BACKWARD"
    registry.set_compatibility("clicks-value", "FORWARD")
    assert registry.get_compatibility("clicks-value") == "FORWARD"
    assert registry.test_compatibility("clicks-value", needs_more)
    registry.register_schema("clicks-value", needs_more)
    registry.update_mode("clicks-value", "READONLY")
    assert registry.get_mode("clicks-value") == "READONLY"
    with pytest.raises(SchemaRegistryError) as refused:
        registry.register_schema("clicks-value", Schema('"string"', "AVRO"))
    assert refused.value.error_code == 42205
    with pytest.raises(SchemaRegistryError) as missing:
        registry.get_latest_version("nobody-value")
    assert (missing.value.http_status_code, missing.value.error_code) == (404, 40401)


def test_avro_goes_between_their_serializers_and_ours(registry: SchemaRegistryClient, store: LogStore) -> None:
    """Confluent's Avro serializer and this library's are interchangeable, byte for byte."""
    value = {"page": "/", "at": 7}
    theirs = AvroSerializer(registry, json.dumps(CLICK))(value, context())
    ours = schemas.AvroSerializer(store.schemas, CLICK)
    assert ours.serialize("clicks", [value, None]) == [theirs, None]
    assert schemas.AvroDeserializer(store.schemas).deserialize("clicks", [theirs, None]) == [value, None]
    assert AvroDeserializer(registry)(ours.serialize("clicks", [value])[0], context()) == value


def test_json_goes_between_their_serializers_and_ours(registry: SchemaRegistryClient, store: LogStore) -> None:
    """JSON serializers are interchangeable, with a schema that refers to another schema."""
    page = {"type": "string", "pattern": "^/"}
    registry.register_schema("page.json", Schema(json.dumps(page), "JSON"))
    click = {
        "title": "Click",
        "type": "object",
        "properties": {"page": {"$ref": "page.json"}},
        "additionalProperties": False,
    }
    references = [SchemaReference("page.json", "page.json", 1)]
    wanted = Schema(json.dumps(click), "JSON", references)
    theirs = JSONSerializer(wanted, registry)({"page": "/"}, context())
    ours = schemas.JsonSerializer(store.schemas, click, references=[schemas.Reference("page.json", "page.json", 1)])
    made = ours.serialize("clicks", [{"page": "/"}])
    assert theirs is not None
    assert made[0] is not None
    assert theirs[:5] == made[0][:5]
    assert schemas.JsonDeserializer(store.schemas).deserialize("clicks", [theirs]) == [{"page": "/"}]
    assert JSONDeserializer(wanted, schema_registry_client=registry)(made[0], context()) == {"page": "/"}
    with pytest.raises(ValueError, match="does not match its schema"):
        ours.serialize("clicks", [{"page": "no path"}])


def _message_classes() -> dict[str, Any]:
    """Return message classes of two files, of which one imports the other."""
    pool = DescriptorPool()
    money = descriptor_pb2.FileDescriptorProto()
    money_pb2.DESCRIPTOR.CopyToProto(money)
    pool.Add(money)
    place = descriptor_pb2.FileDescriptorProto(name="place.proto", package="shop", syntax="proto3")
    city = place.message_type.add(name="Place").field.add(name="city", number=1, type=9, label=1)
    assert city.name == "city"
    order = descriptor_pb2.FileDescriptorProto(
        name="order.proto", package="shop", syntax="proto3", dependency=["place.proto", "google/type/money.proto"]
    )
    order.message_type.add(name="Unused")
    message = order.message_type.add(name="Order")
    message.field.add(name="place", number=1, type=11, type_name=".shop.Place", label=1)
    message.field.add(name="price", number=2, type=11, type_name=".google.type.Money", label=1)
    line = message.nested_type.add(name="Line")
    line.field.add(name="count", number=1, type=5, label=1)
    pool.Add(place)
    pool.Add(order)
    names = ("shop.Place", "shop.Order", "shop.Order.Line", "google.type.Money")
    return {name: GetMessageClass(pool.FindMessageTypeByName(name)) for name in names}


@pytest.mark.parametrize("name", ["shop.Order", "shop.Order.Line", "shop.Place"])
def test_protobuf_goes_between_their_serializers_and_ours(
    registry: SchemaRegistryClient, store: LogStore, name: str
) -> None:
    """Protobuf serializers are interchangeable, for every message of a file and its imports."""
    classes = _message_classes()
    if name == "shop.Order":
        value = classes[name](place=classes["shop.Place"](city="Ulm"), price=classes["google.type.Money"](units=3))
    else:
        value = classes[name](**({"city": "Ulm"} if name == "shop.Place" else {"count": 3}))
    theirs = ProtobufSerializer(classes[name], registry, {"use.deprecated.format": False})(value, context())
    ours = schemas.ProtobufSerializer(store.schemas, classes[name])
    assert ours.serialize("clicks", [value]) == [theirs]
    read = schemas.ProtobufDeserializer(store.schemas).deserialize("clicks", [theirs])[0]
    assert read.DESCRIPTOR.full_name == name
    assert str(read) == str(value)
    back = ProtobufDeserializer(classes[name], {"use.deprecated.format": False}, registry)(
        ours.serialize("clicks", [value])[0], context()
    )
    assert back == value


def test_a_remote_registry_serves_serializers_as_the_store_does(
    http_server: HttpServer, store: LogStore, serve: Callable[..., HttpServer]
) -> None:
    """A registry URL gives the same bytes, ids and references as the store."""
    remote = schemas.RemoteRegistry(http_server.url)
    values = [{"page": "/", "at": 7}]
    here = schemas.AvroSerializer(store.schemas, CLICK).serialize("clicks", values)
    assert schemas.AvroSerializer(remote, CLICK).serialize("clicks", values) == here
    assert schemas.AvroDeserializer(remote).deserialize("clicks", here) == values
    classes = _message_classes()
    message = classes["shop.Order"](place=classes["shop.Place"](city="Ulm"))
    made = schemas.ProtobufSerializer(remote, classes["shop.Order"]).serialize("orders", [message])
    assert str(schemas.ProtobufDeserializer(remote).deserialize("orders", made)[0]) == str(message)
    with pytest.raises(ValueError, match="which the registry does not have"):
        schemas.AvroDeserializer(remote).deserialize("clicks", [b"\0\0\0\x03\xe8xx"])


def test_records_of_their_clients_are_read_from_the_store(registry: SchemaRegistryClient, store: LogStore) -> None:
    """A consumer of the store decodes values of Confluent's serializers."""
    serializer = AvroSerializer(registry, json.dumps(CLICK))
    store.create_topic("clicks")
    log = store.topic("clicks").partition(0)
    log.append([serializer({"page": f"/{number}", "at": number}, context()) for number in range(3)])
    with store.consumer("clicks", deserializer=schemas.AvroDeserializer(store.schemas)) as consumer:
        assert [record.value["page"] for record in consumer] == ["/0", "/1", "/2"]
    with store.producer(serializer=schemas.AvroSerializer(store.schemas, CLICK)) as producer:
        producer.send("clicks", {"page": "/3", "at": 3})
        with pytest.raises(segmentlog.SerializationError, match="lost"):
            producer.send("clicks", {"page": "/4", "at": 4, "lost": True})
    read = AvroDeserializer(registry)
    assert read(store.topic("clicks").partition(0).read(3).__next__().values[0], context()) == {"page": "/3", "at": 3}
