"""Config requests of tools: Kafka's keys without an effect, and the broker's own configs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.wire_client import Desk
from wire import CODECS, Sent, foreign

from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidRecord
from segmentlog.security.acls import Authorizer, OpenAuthorizer
from segmentlog.security.principals import ANONYMOUS
from segmentlog.server.broker import Broker
from segmentlog.server.codec.chunked_configs import encode_configs
from segmentlog.server.codec.generated import alter_configs as whole
from segmentlog.server.codec.generated import incremental_alter_configs as incremental
from segmentlog.server.codec.generated.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from segmentlog.server.codec.generated.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from segmentlog.server.codec.generated.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
    encode_response,
)
from segmentlog.server.codec.generated.describe_log_dirs import DescribeLogDirsRequest
from segmentlog.server.codec.generated.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.handlers.config_handlers import describe_configs
from segmentlog.server.request_context import RequestContext
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore

TOPIC, BROKER, GROUP = 2, 4, 32
SET, DELETE, APPEND, SUBTRACT = range(4)
(
    PRODUCE,
    DELETE_RECORDS,
    CREATE_TOPICS,
    DESCRIBE_CONFIGS,
    ALTER_CONFIGS,
    DESCRIBE_LOG_DIRS,
    INCREMENTAL_ALTER_CONFIGS,
) = 0, 21, 19, 32, 33, 35, 44
NODES = [WorkerNode(1, "localhost", 9093), WorkerNode(2, "localhost", 9094)]


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    """Return a store with topic t of eight partitions."""
    store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    store.create_topic("t", 8)
    return store


@pytest.fixture
def brokers(store: LogStore) -> Iterator[list[Broker]]:
    """Yield two workers."""
    brokers = [
        Broker(store, WorkerCluster("c", NODES, one.node_id), ServerSettings(), OpenAuthorizer()) for one in NODES
    ]
    yield brokers
    brokers[0].close()


@pytest.fixture
def desk(brokers: list[Broker]) -> Desk:
    """Return the first of them."""
    return Desk(brokers[0])


@pytest.fixture
def alone(store: LogStore) -> Iterator[Desk]:
    """Provide a worker without others, which leads every partition."""
    broker = Broker(store, WorkerCluster("c", NODES[:1], 1), ServerSettings(), OpenAuthorizer())
    yield Desk(broker)
    broker.close()


def alter(desk: Desk, *changes: tuple[str, int, str | None], kind: int = TOPIC, name: str = "t") -> Any:
    """Alter one resource, and return the answer."""
    configs = [AlterableConfig(name=key, config_operation=operation, value=value) for key, operation, value in changes]
    resource = AlterConfigsResource(resource_type=kind, resource_name=name, configs=configs)
    (answer,) = desk.ask(INCREMENTAL_ALTER_CONFIGS, 1, IncrementalAlterConfigsRequest(resources=[resource])).responses
    return answer


def described(desk: Desk, kind: int, name: str) -> dict[str, str | None]:
    """Return the configuration of a resource."""
    resource = DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=None)
    (result,) = desk.ask(DESCRIBE_CONFIGS, 4, DescribeConfigsRequest(resources=[resource])).results
    assert result.error_code == ErrorCode.NONE, result.error_message
    return {one.name: one.value for one in result.configs}


@pytest.mark.parametrize("has_synonyms", [False, True])
def test_ten_thousand_topics_are_described_at_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, has_synonyms: bool
) -> None:
    """Kafka's tools put all topics of a cluster into one request."""
    config = TopicConfig(retention_ms=60_000)
    monkeypatch.setattr(LogStore, "topic", lambda *_: SimpleNamespace(config=config))
    call = RequestContext(
        broker=desk.broker, api_key=DESCRIBE_CONFIGS, version=4, client_id="", client_host="", principal=ANONYMOUS
    )
    resources = [DescribeConfigsResource(TOPIC, f"topic-{number}", None) for number in range(10_000)]
    response = describe_configs(call, DescribeConfigsRequest(resources, include_synonyms=has_synonyms))
    assert {one.error_code for one in response.results} == {0}
    entries = {one.name: one for one in response.results[-1].configs}
    assert entries["retention.ms"].value == "60000"
    assert entries["retention.ms"].config_source == 1
    assert entries["cleanup.policy"].config_source == 5
    assert [one.value for one in entries["retention.ms"].synonyms] == ["60000"] * has_synonyms
    # The objects of default values are shared: without that, 10,000 topics take hundreds of MiB.
    assert len({id(one) for result in response.results for one in result.configs}) < 10_100


def test_an_answer_is_encoded_a_few_topics_at_a_time() -> None:
    """The pieces together are the bytes of the whole response, in each version."""
    entry = DescribeConfigsResourceResult("retention.ms", "1", synonyms=[DescribeConfigsSynonym("retention.ms", "1")])
    for count in (0, 1, 128, 129, 300):
        results = [DescribeConfigsResult(0, None, TOPIC, f"topic-{number}", [entry]) for number in range(count)]
        response = DescribeConfigsResponse(throttle_time_ms=3, results=results)
        for version in (1, 2, 3, 4):
            pieces = encode_configs(encode_response, response, version)
            assert len(pieces) > count // 129
            assert b"".join(pieces) == encode_response(response, version)[0]


def test_a_reset_of_what_is_not_known_changes_nothing(desk: Desk) -> None:
    """MirrorMaker resets each key that Kafka has a default of, along with what it sets: all of it is to be done."""
    answer = alter(desk, ("log.cleaner.threads", DELETE, None), ("retention.ms", SET, "60000"))
    assert answer.error_code == ErrorCode.NONE, answer.error_message
    assert described(desk, TOPIC, "t")["retention.ms"] == "60000"


@pytest.mark.parametrize("operation", [SET, APPEND])
def test_what_is_not_known_cannot_be_set(desk: Desk, operation: int) -> None:
    """A client relies on a key that it sets, so an unknown key is an error, and nothing of the request is applied."""
    answer = alter(desk, ("log.cleaner.threads", operation, "1"), ("retention.ms", SET, "60000"))
    assert answer.error_code == ErrorCode.INVALID_CONFIG
    assert "log.cleaner.threads" in answer.error_message
    assert described(desk, TOPIC, "t")["retention.ms"] == "604800000"


@pytest.mark.parametrize(
    "changes",
    [
        [("retention.ms", SET, "60000"), ("retention.ms", SET, "70000")],
        [("retention.ms", SET, "60000"), ("retention.ms", DELETE, None)],
        [("segment.bytes", SET, "1048576"), ("retention.ms", SET, None)],
        [("segment.bytes", SET, "1048576"), ("cleanup.policy", APPEND, None)],
    ],
)
@pytest.mark.parametrize(("kind", "name"), [(TOPIC, "t"), (TOPIC, "missing"), (BROKER, "1"), (GROUP, "g")])
def test_what_makes_no_sense_is_refused(
    desk: Desk, kind: int, name: str, changes: list[tuple[str, int, str | None]]
) -> None:
    """A key that is named twice, or has no value: whatever the resource is, and before anything of it is done."""
    before = described(desk, TOPIC, "t")
    answer = alter(desk, *changes, kind=kind, name=name)
    assert answer.error_code == ErrorCode.INVALID_REQUEST
    assert changes[-1][0] in answer.error_message
    assert described(desk, TOPIC, "t") == before


@pytest.mark.parametrize("is_incremental", [True, False])
def test_a_resource_is_named_once(desk: Desk, is_incremental: bool) -> None:
    """Two changes of one resource are refused with one answer; other changes of the request are made."""
    desk.broker.store.create_topic("u", 1)
    module, key = (incremental, INCREMENTAL_ALTER_CONFIGS) if is_incremental else (whole, ALTER_CONFIGS)
    resources = [
        module.AlterConfigsResource(TOPIC, name, [module.AlterableConfig(name="retention.ms", value=value)])
        for name, value in (("t", "60000"), ("u", "60000"), ("t", "70000"))
    ]
    request = (module.IncrementalAlterConfigsRequest if is_incremental else module.AlterConfigsRequest)(resources)
    codes = [one.error_code for one in desk.ask(key, 1, request).responses]
    assert codes == [ErrorCode.INVALID_REQUEST, ErrorCode.NONE]
    assert described(desk, TOPIC, "t")["retention.ms"] == "604800000"
    assert described(desk, TOPIC, "u")["retention.ms"] == "60000"


def test_tiered_storage_is_set_as_at_kafka(desk: Desk) -> None:
    """Kafka's three keys, as text; what is kept here is part of what is kept at all."""
    assert described(desk, TOPIC, "t")["remote.storage.enable"] == "false"
    answer = alter(desk, ("remote.storage.enable", SET, "true"), ("local.retention.ms", SET, "60000"))
    assert answer.error_code == ErrorCode.NONE, answer.error_message
    told = described(desk, TOPIC, "t")
    assert (told["remote.storage.enable"], told["local.retention.ms"]) == ("true", "60000")
    assert told["local.retention.bytes"] == "-2"
    answer = alter(desk, ("local.retention.ms", SET, "604800001"))
    assert answer.error_code == ErrorCode.INVALID_CONFIG
    assert "at most retention.ms" in answer.error_message


def create(desk: Desk, name: str, **settings: str) -> Any:
    """Create a topic with one partition, and return the answer."""
    configs = [CreatableTopicConfig(name=key.replace("_", "."), value=value) for key, value in settings.items()]
    topic = CreatableTopic(name=name, num_partitions=1, replication_factor=1, configs=configs)
    (made,) = desk.ask(CREATE_TOPICS, 7, CreateTopicsRequest(topics=[topic])).topics
    return made


def test_a_setting_without_effect_is_taken_and_reported(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """A topic of Kafka's that has one can be made here. The log names it and the reason, the description what holds."""
    levels = {"compression_gzip_level": "5", "compression_lz4_level": "12", "min_insync_replicas": "2"}
    with caplog.at_level(logging.WARNING, "segmentlog.server"):
        made = create(desk, "made", **levels)
        assert made.error_code == ErrorCode.NONE, made.error_message
        assert alter(desk, ("preallocate", SET, "false"), ("retention.ms", SET, "5")).error_code == ErrorCode.NONE
        assert alter(desk, ("min.insync.replicas", SET, "1"), ("retention.ms", SET, "6")).error_code == ErrorCode.NONE
    assert [record.getMessage() for record in caplog.records] == [
        "a client created topic made with keys that have no effect: compression.gzip.level=5 (compression.type is"
        " producer), compression.lz4.level=12 (LZ4 has one level here), min.insync.replicas=2 (a partition has one"
        " copy, on this machine)",
        "a client set keys of topic t that have no effect: preallocate=false (segments are always preallocated)",
    ]
    assert described(desk, TOPIC, "made")["min.insync.replicas"] == "1"
    resource = DescribeConfigsResource(TOPIC, "made", ["min.insync.replicas", "retention.ms"])
    for is_wanted in (True, False):
        request = DescribeConfigsRequest(resources=[resource], include_documentation=is_wanted)
        (result,) = desk.ask(DESCRIBE_CONFIGS, 4, request).results
        why, meaning = (one.documentation for one in result.configs)
        assert why == ("Has no effect here: a partition has one copy, on this machine." if is_wanted else None)
        assert bool(meaning) == is_wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("message.timestamp.after.max.ms", "-1"), ("preallocate", "maybe"), ("min.insync.replicas", "0"),
        ("compression.gzip.level", "10"), ("compression.zstd.level", "23"), ("compression.lz4.level", "0"),
        ("segment.jitter.ms", "-1"), ("leader.replication.throttled.replicas", "x"), ("delete.retention.ms", "-1"),
        ("max.message.bytes", "2147483647"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_every_request(desk: Desk, name: str, value: str) -> None:
    """Creating a topic and both ways of altering it refuse it; the message has the setting and its valid values."""
    answers = [create(desk, "made", **{name.replace(".", "_"): value}), alter(desk, (name, SET, value))]
    resource = whole.AlterConfigsResource(TOPIC, "t", [whole.AlterableConfig(name=name, value=value)])
    answers += desk.ask(ALTER_CONFIGS, 1, whole.AlterConfigsRequest([resource])).responses
    for answer in answers:
        assert answer.error_code == ErrorCode.INVALID_CONFIG
        assert f"{name} = {value!r} is not valid: " in answer.error_message
    assert "made" not in desk.broker.store.topics()


def test_words_of_lists_are_added_and_taken_away(alone: Desk) -> None:
    """The last policy can be removed, too: records are then kept forever, and can be deleted on request.

    Throttles are ignored.
    """
    throttled = "leader.replication.throttled.replicas"
    assert alter(alone, ("cleanup.policy", APPEND, "compact"), (throttled, APPEND, "0:1")).error_code == ErrorCode.NONE
    assert described(alone, TOPIC, "t")["cleanup.policy"] == "compact,delete"
    assert alter(alone, ("cleanup.policy", SUBTRACT, "delete,compact")).error_code == ErrorCode.NONE
    assert described(alone, TOPIC, "t")["cleanup.policy"] == ""
    partition = DeleteRecordsPartition(0, -1)
    request = DeleteRecordsRequest(topics=[DeleteRecordsTopic("t", [partition])])
    alone.broker.store.topic("t").partition(0).append([b"a", b"b"])
    (topic,) = alone.ask(DELETE_RECORDS, 2, request).topics
    (answer,) = (one for one in topic.partitions)
    assert (answer.error_code, answer.low_watermark) == (ErrorCode.NONE, 2)
    assert alter(alone, ("cleanup.policy", APPEND, "delete")).error_code == ErrorCode.NONE
    assert described(alone, TOPIC, "t")["cleanup.policy"] == "delete"
    assert create(alone, "kept", cleanup_policy="").error_code == ErrorCode.NONE
    for name, value in ((throttled, "x"), ("retention.ms", "5"), ("segment.records", "5")):
        assert alter(alone, (name, APPEND, value)).error_code == ErrorCode.INVALID_CONFIG


def produce(desk: Desk, name: str, batch: bytes) -> Any:
    """Send a batch to the first partition of a topic, and return the answer."""
    topic = TopicProduceData(name, partition_data=[PartitionProduceData(0, batch)])
    (found,) = desk.ask(PRODUCE, 9, ProduceRequest(None, 1, 1000, [topic])).responses
    (answer,) = found.partition_responses
    return answer


@pytest.mark.parametrize("wanted", CODECS)
def test_what_clients_send_has_the_codec_of_the_topic(alone: Desk, wanted: str) -> None:
    """With any codec of the clients; with ``producer``, the batch stays unchanged."""
    name = "uncompressed" if wanted == "none" else wanted
    assert create(alone, "made", compression_type=name).error_code == ErrorCode.NONE
    assert described(alone, TOPIC, "made")["compression.type"] == name
    assert create(alone, "theirs", compression_type="producer").error_code == ErrorCode.NONE
    records = [Sent(b"key", b"value %d" % number) for number in range(20)]
    for codec in CODECS.values():
        for topic in ("made", "theirs"):
            assert produce(alone, topic, foreign(records, codec)).error_code == ErrorCode.NONE
    for topic, codecs in (("made", [CODECS[wanted]] * len(CODECS)), ("theirs", list(CODECS.values()))):
        batches = list(alone.broker.store.topic(topic).partition(0).read(0))
        assert [batch.header.codec for batch in batches] == codecs
        assert [record.value for batch in batches for record in batch.records()] == [one.value for one in records] * 5
    alone.broker.store.topic("made").partition(0).append([b"x" * 1000])
    *_, own = alone.broker.store.topic("made").partition(0).read(0)
    assert own.header.codec == CODECS[wanted]


def test_a_decompressed_record_that_is_too_large_is_named(alone: Desk) -> None:
    """As in Kafka 4.4, the error is INVALID_RECORD with its index, and the batch is not stored."""
    assert create(alone, "made", max_decompressed_message_bytes="1000").error_code == ErrorCode.NONE
    batch = [Sent(None, b"x"), Sent(None, b"x" * 1001)]
    answer = produce(alone, "made", foreign(batch, CODECS["zstd"]))
    assert answer.error_code == ErrorCode.INVALID_RECORD
    assert "max.decompressed.message.bytes = 1000" in answer.error_message
    assert [one.batch_index for one in answer.record_errors] == [1]
    assert alone.broker.store.topic("made").partition(0).log_end_offset == 0
    assert produce(alone, "made", foreign(batch)).error_code == ErrorCode.NONE


def test_brokers_have_no_common_settings(desk: Desk) -> None:
    """A broker resource without a name is empty: each broker has the settings of its command line."""
    assert described(desk, BROKER, "") == {}
    assert described(desk, BROKER, "1")["num.partitions"] == "1"


@pytest.mark.parametrize("name", ["", "1"])
def test_throttles_of_a_broker_are_taken_away(desk: Desk, name: str) -> None:
    """kafka-reassign-partitions.sh does it to find out how things stand, whether there are any or not."""
    key = "leader.replication.throttled.rate"
    assert alter(desk, (key, DELETE, None), kind=BROKER, name=name).error_code == ErrorCode.NONE
    refused = alter(desk, (key, SET, "1"), ("log.cleaner.threads", DELETE, None), kind=BROKER, name=name)
    assert refused.error_code == ErrorCode.INVALID_REQUEST
    assert "command line" in refused.error_message


def test_who_may_not_alter_brokers_may_reset_nothing(store: LogStore, tmp_path: Path) -> None:
    """A reset is an alteration, although it changes nothing."""
    (tmp_path / "acls").write_text("allow User:ANONYMOUS alter-configs topic:t\n")
    broker = Broker(store, WorkerCluster("c", NODES, 1), ServerSettings(), Authorizer(str(tmp_path / "acls")))
    try:
        answer = alter(Desk(broker), ("log.cleaner.threads", DELETE, None), kind=BROKER, name="1")
        assert answer.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    finally:
        broker.close()


def test_each_partition_lies_at_one_worker(brokers: list[Broker]) -> None:
    """Only leaders report sizes, because tools add up the sizes of all workers and show replicas."""
    found = []
    for broker in brokers:
        (result,) = Desk(broker).ask(DESCRIBE_LOG_DIRS, 4, DescribeLogDirsRequest(topics=None)).results
        (topic,) = result.topics
        numbers = [one.partition_index for one in topic.partitions]
        assert numbers, "a worker that leads nothing proves nothing"
        assert all(broker.cluster.leads(broker.store.topic("t").id, number) for number in numbers)
        found += numbers
    assert sorted(found) == list(range(8))


def test_settings_that_are_described_and_written_back(desk: Desk, store: LogStore) -> None:
    """Each is then explicit, with its value: the hour that timestamps may be ahead limits the library, too.

    A deletion takes it back.
    """
    key = "message.timestamp.after.max.ms"
    future_ms = 4_000_000_000_000
    log = store.topic("t").partition(0)
    before = described(desk, TOPIC, "t")
    assert before[key] == "3600000"
    log.append([b"v"], timestamps=[future_ms])
    answer = alter(desk, *((name, SET, value) for name, value in before.items()))
    assert answer.error_code == ErrorCode.NONE, answer.error_message
    assert described(desk, TOPIC, "t") == before
    with pytest.raises(InvalidRecord, match=key):
        log.append([b"v"], timestamps=[future_ms])
    assert alter(desk, (key, DELETE, None)).error_code == ErrorCode.NONE
    assert described(desk, TOPIC, "t") == before
    log.append([b"v"], timestamps=[future_ms])
    assert log.log_end_offset == 2
