"""A standby sends clients to the owner of the store: every API, in every version."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.hostile import Asker, every_api
from server.test_every_api import SETTINGS, error_codes, fill, ids_of
from server.wire_client import Desk

from segmentlog.security.acls import OpenAuthorizer
from segmentlog.server.broker import Broker
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest
from segmentlog.server.codec.generated.describe_cluster import DescribeClusterRequest
from segmentlog.server.codec.generated.describe_topic_partitions import DescribeTopicPartitionsRequest, TopicRequest
from segmentlog.server.codec.generated.find_coordinator import FindCoordinatorRequest
from segmentlog.server.codec.generated.init_producer_id import InitProducerIdRequest
from segmentlog.server.codec.generated.metadata import MetadataRequest, MetadataRequestTopic
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.frames import BadFrame
from segmentlog.server.server_settings import Limits, ServerSettings
from segmentlog.server.topic_ids import wire_id
from segmentlog.server.worker_cluster import STANDBY_ID, WorkerCluster, WorkerNode
from segmentlog.store import LogStore

_OWNER = (WorkerNode(1, "owner", 9093), WorkerNode(2, "owner", 9094))
_ANSWERED = frozenset((3, 10, 17, 18, 35, 36, 60, 75))
"""APIs that a standby answers itself: metadata, coordinators, versions, SASL, its (empty) part of the log folders."""
_CONTROLLER = frozenset((19, 20, 29, 30, 31, 32, 33, 37, 44, 46))
_ROUNDS = 12


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[Broker]:
    """Return the state of a standby's worker, whose owner has two workers."""
    yield from _broker(tmp_path, _OWNER)


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[Broker]:
    """Return the state of a standby's worker, whose owner has no server."""
    yield from _broker(tmp_path, ())


def _broker(tmp_path: Path, nodes: tuple[WorkerNode, ...]) -> Iterator[Broker]:
    path = tmp_path / "store"
    with LogStore(path, background=False, fs=NoSyncFileSystem()) as store:
        fill(store)
    store = opened(LogStore(path, read_only=True, background=False, fs=NoSyncFileSystem()))
    settings = ServerSettings(auto_create=True, groups=SETTINGS.groups, limits=Limits(fetch_wait_ms_max=5))
    broker = Broker(store, WorkerCluster("c", nodes, STANDBY_ID), settings, OpenAuthorizer())
    yield broker
    broker.close()


def _files(path: str) -> dict[str, int]:
    return {
        os.path.join(folder, name): os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(path)
        for name in names
        if name not in ("lock", "state")
    }


def _has_records(answer: Any) -> bool:
    for name in getattr(answer, "__struct_fields__", ()):
        value = getattr(answer, name)
        if name == "records" and value:
            return True
        if any(_has_records(one) for one in (value if isinstance(value, list) else [value])):
            return True
    return False


@pytest.mark.parametrize("has_nodes", [True, False])
def test_no_request_gets_data_from_a_standby(tmp_path: Path, has_nodes: bool) -> None:
    """Each version of each API is answered, without records, and the replica stays unchanged."""
    for broker in _broker(tmp_path, _OWNER if has_nodes else ()):
        desk, random = Desk(broker), Random(7)
        before, met = _files(broker.store.path or ""), defaultdict(set)
        for key, version in every_api():
            for _ in range(_ROUNDS):
                request = Asker(random, ids_of(broker.store)).request(key, version)
                try:
                    answer = desk.ask(key, version, request)
                except BadFrame:  # an error of a request that wants no answer: the client reconnects elsewhere
                    assert (key, request.acks) == (0, 0)
                    continue
                assert not _has_records(answer), (APIS[key].name, request)
                if answer is not None:
                    met[key].update(error_codes(answer))
        assert _files(broker.store.path or "") == before
        for key, codes in met.items():
            assert ErrorCode.UNKNOWN_SERVER_ERROR not in codes, APIS[key].name
            assert ErrorCode.KAFKA_STORAGE_ERROR not in codes, APIS[key].name
            assert ErrorCode.POLICY_VIOLATION not in codes, APIS[key].name
            if key in _CONTROLLER:
                assert codes == {ErrorCode.NOT_CONTROLLER}, APIS[key].name


def test_each_refusal_names_an_error_for_what_was_requested(standby: Broker) -> None:
    """Only answers about the owner's address contain successes."""
    desk, random = Desk(standby), Random(3)
    for key, version in every_api():
        if key in _ANSWERED:
            continue
        for _ in range(_ROUNDS):
            request = Asker(random, ids_of(standby.store), extreme=0).request(key, version)
            if getattr(request, "acks", 1) == 0:
                continue
            try:
                answer = desk.ask(key, version, request)
            except BadFrame:
                continue
            plain = [code for code in error_codes(answer) if not code]
            # The outer code of an answer whose parts have errors is 0.
            parts = [code for code in error_codes(answer) if code]
            assert parts or _is_empty(request) or len(plain) <= 1, (APIS[key].name, version, request, answer)


def _is_empty(request: Any) -> bool:
    values = [getattr(request, name) for name in request.__struct_fields__]
    return any(value == [] for value in values) or any(
        isinstance(value, list) and all(_is_empty(one) for one in value if hasattr(one, "__struct_fields__"))
        for value in values
    )


def test_metadata_names_the_owner(standby: Broker) -> None:
    """All topics, topics by name and by id have the owner's workers as leaders; unknown ones are asked for again."""
    desk, store = Desk(standby), standby.store
    for version in range(APIS[3].min_version, APIS[3].max_version + 1):
        answer = desk.ask(3, version, MetadataRequest(topics=[] if version == 0 else None))
        assert [(one.node_id, one.host, one.port) for one in answer.brokers] == list(_OWNER)
        assert {one.name for one in answer.topics} >= {"t", "library"}
        assert all(part.leader_id in (1, 2) for topic in answer.topics for part in topic.partitions)
        asked = [MetadataRequestTopic(name="t"), MetadataRequestTopic(name="new")]
        answer = desk.ask(3, version, MetadataRequest(topics=asked))
        assert {one.name: one.error_code for one in answer.topics} == {
            "t": 0, "new": ErrorCode.LEADER_NOT_AVAILABLE,
        }  # fmt: skip
        if version >= 1:
            assert answer.controller_id == 1
    assert "new" not in store.topics()
    asked = [MetadataRequestTopic(name=None, topic_id=wire_id(store.topic("t").id))]
    (topic,) = desk.ask(3, 12, MetadataRequest(topics=asked)).topics
    assert (topic.name, topic.error_code, len(topic.partitions)) == ("t", 0, 2)
    asked = [MetadataRequestTopic(name=None, topic_id=b"\x07" * 16)]
    (topic,) = desk.ask(3, 12, MetadataRequest(topics=asked)).topics
    assert topic.error_code == ErrorCode.UNKNOWN_TOPIC_ID


def test_other_descriptions_name_the_owner(standby: Broker) -> None:
    """DescribeCluster, DescribeTopicPartitions and FindCoordinator name the owner's workers."""
    desk = Desk(standby)
    cluster = desk.ask(60, 1, DescribeClusterRequest())
    assert [(one.broker_id, one.host, one.port) for one in cluster.brokers] == list(_OWNER)
    found = desk.ask(75, 0, DescribeTopicPartitionsRequest(topics=[TopicRequest("t"), TopicRequest("new")]))
    assert {one.name: one.error_code for one in found.topics} == {"t": 0, "new": ErrorCode.LEADER_NOT_AVAILABLE}
    assert all(part.leader_id in (1, 2) for topic in found.topics for part in topic.partitions)
    for kind in (0, 1):
        (one,) = desk.ask(10, 4, FindCoordinatorRequest(key_type=kind, coordinator_keys=["g"])).coordinators
        assert (one.error_code, one.host) == (0, "owner")
    assert desk.ask(18, 3, ApiVersionsRequest(client_software_name="x", client_software_version="1")).api_keys


def test_producers_without_a_transactional_id_try_again(standby: Broker) -> None:
    """They get the error after which every client repeats the request."""
    answer = Desk(standby).ask(22, 4, InitProducerIdRequest(transactional_id=None))
    assert (answer.error_code, answer.producer_id) == (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, -1)


def test_an_owner_without_a_server_is_no_node(orphan: Broker) -> None:
    """Clients get errors that they retry, and no address."""
    desk = Desk(orphan)
    answer = desk.ask(3, 12, MetadataRequest(topics=None))
    assert (answer.brokers, answer.controller_id) == ([], -1)
    assert {part.error_code for topic in answer.topics for part in topic.partitions} == {ErrorCode.LEADER_NOT_AVAILABLE}
    (one,) = desk.ask(10, 4, FindCoordinatorRequest(coordinator_keys=["g"])).coordinators
    assert (one.error_code, one.node_id) == (ErrorCode.COORDINATOR_NOT_AVAILABLE, -1)
