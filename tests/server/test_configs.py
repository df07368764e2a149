"""What tools do to configurations: keys of Kafka's that are not ours, and what belongs to brokers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.wire_client import Desk

from segmentlog.config import TopicConfig
from segmentlog.security.acls import Authorizer, OpenAuthorizer
from segmentlog.security.principals import ANONYMOUS
from segmentlog.server.broker import Broker
from segmentlog.server.call import Call
from segmentlog.server.cluster import Cluster, Node
from segmentlog.server.codec.errors import ErrorCode
from segmentlog.server.codec.messages import alter_configs as whole
from segmentlog.server.codec.messages import incremental_alter_configs as incremental
from segmentlog.server.codec.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from segmentlog.server.codec.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
    encode_response,
)
from segmentlog.server.codec.messages.describe_log_dirs import DescribeLogDirsRequest
from segmentlog.server.codec.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from segmentlog.server.codec.pieces import encode_configs
from segmentlog.server.handlers.configs import describe_configs
from segmentlog.server.settings import ServerSettings
from segmentlog.store import LogStore

TOPIC, BROKER, GROUP = 2, 4, 32
SET, DELETE, APPEND = 0, 1, 2
CREATE_TOPICS, DESCRIBE_CONFIGS, ALTER_CONFIGS, DESCRIBE_LOG_DIRS, INCREMENTAL_ALTER_CONFIGS = 19, 32, 33, 35, 44
NODES = [Node(1, "localhost", 9093), Node(2, "localhost", 9094)]


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    """With topic t of eight partitions."""
    store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    store.create_topic("t", 8)
    return store


@pytest.fixture
def brokers(store: LogStore) -> Iterator[list[Broker]]:
    """Two workers."""
    brokers = [Broker(store, Cluster("c", NODES, one.node_id), ServerSettings(), OpenAuthorizer()) for one in NODES]
    yield brokers
    brokers[0].close()


@pytest.fixture
def desk(brokers: list[Broker]) -> Desk:
    """The first of them."""
    return Desk(brokers[0])


def alter(desk: Desk, *changes: tuple[str, int, str | None], kind: int = TOPIC, name: str = "t") -> Any:
    """An alteration of one resource, and what is said of it."""
    configs = [AlterableConfig(name=key, config_operation=operation, value=value) for key, operation, value in changes]
    resource = AlterConfigsResource(resource_type=kind, resource_name=name, configs=configs)
    (answer,) = desk.ask(INCREMENTAL_ALTER_CONFIGS, 1, IncrementalAlterConfigsRequest(resources=[resource])).responses
    return answer


def described(desk: Desk, kind: int, name: str) -> dict[str, str | None]:
    """The configuration of a resource."""
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
    call = Call(
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
    """Which gives the bytes of the whole, in each version."""
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
    answer = alter(desk, ("remote.log.copy.disable", DELETE, None), ("retention.ms", SET, "60000"))
    assert answer.error_code == ErrorCode.NONE, answer.error_message
    assert described(desk, TOPIC, "t")["retention.ms"] == "60000"


@pytest.mark.parametrize("operation", [SET, APPEND])
def test_what_is_not_known_cannot_be_set(desk: Desk, operation: int) -> None:
    """Who sets a key relies on it. Nothing else of the request is done either."""
    answer = alter(desk, ("remote.log.copy.disable", operation, "true"), ("retention.ms", SET, "60000"))
    assert answer.error_code == ErrorCode.INVALID_CONFIG
    assert "remote.log.copy.disable" in answer.error_message
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
    """Two changes of one resource are refused, and answered once; others of the request are done."""
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


def test_levels_of_compression_are_taken(desk: Desk) -> None:
    """A topic of Kafka's that has one can be made here: batches of clients keep what they were compressed with."""
    levels = {"compression.gzip.level": "5", "compression.lz4.level": "12", "compression.zstd.level": "9"}
    configs = [CreatableTopicConfig(name=name, value=value) for name, value in levels.items()]
    topic = CreatableTopic(name="levels", num_partitions=1, replication_factor=1, configs=configs)
    (made,) = desk.ask(CREATE_TOPICS, 7, CreateTopicsRequest(topics=[topic])).topics
    assert made.error_code == ErrorCode.NONE, made.error_message


def test_brokers_have_no_common_settings(desk: Desk) -> None:
    """Without a name a broker resource is what was set for all of them: nothing, since each has its command line."""
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
    """It is an alteration, though nothing comes of it."""
    (tmp_path / "acls").write_text("allow User:ANONYMOUS alter-configs topic:t\n")
    broker = Broker(store, Cluster("c", NODES, 1), ServerSettings(), Authorizer(str(tmp_path / "acls")))
    try:
        answer = alter(Desk(broker), ("log.cleaner.threads", DELETE, None), kind=BROKER, name="1")
        assert answer.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    finally:
        broker.close()


def test_each_partition_lies_at_one_worker(brokers: list[Broker]) -> None:
    """Sizes are told by leaders alone: tools add up what workers say, and show where replicas are."""
    found = []
    for broker in brokers:
        (result,) = Desk(broker).ask(DESCRIBE_LOG_DIRS, 4, DescribeLogDirsRequest(topics=None)).results
        (topic,) = result.topics
        numbers = [one.partition_index for one in topic.partitions]
        assert numbers, "a worker that leads nothing proves nothing"
        assert all(broker.cluster.leads(broker.store.topic("t").id, number) for number in numbers)
        found += numbers
    assert sorted(found) == list(range(8))
