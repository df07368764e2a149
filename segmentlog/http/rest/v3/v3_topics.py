"""REST v3 endpoints of topics and partitions."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from segmentlog.config import TopicConfig
from segmentlog.errors import TopicExists
from segmentlog.format.file_names import check_topic_name
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest import rest_error_codes
from segmentlog.http.rest.responses import RestResponse, json_response, no_content
from segmentlog.http.rest.v3 import v3_models
from segmentlog.http.rest.v3.v3_clusters import check_broker
from segmentlog.http.rest.v3.v3_links import BROKER, Links
from segmentlog.policy.kafka_configs import to_engine, without_effect
from segmentlog.security.acl_rules import SUPPORTED
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import RestRequest
    from segmentlog.topics.topic_registry import Topic

logger = logging.getLogger("segmentlog.http")

PARTITIONS_MAX: Final = 1000
"""Maximum number of partitions that one request may create: each is a folder, and takes time."""


def visible_topic(request: RestRequest, operation: Operation = Operation.DESCRIBE) -> Topic:
    """Return the topic in the path, which must not be internal. Raises `UnknownTopic`, `Forbidden`."""
    name = request.path["topic_name"]
    request.check_topic(operation, name)
    return request.store.topic(check_topic_name(name))


def topic_data(
    request: RestRequest, links: Links, name: str, count: int, *, with_operations: bool = False
) -> v3_models.TopicData:
    """Return one topic as REST v3 represents it."""
    data = v3_models.TopicData(
        metadata=links.metadata("topics", name, crn=f"/topic={name}"),
        cluster_id=links.cluster_id,
        topic_name=name,
        partitions_count=count,
        partitions=links.related("topics", name, "partitions"),
        configs=links.related("topics", name, "configs"),
        partition_reassignments=links.related("topics", name, "partitions", "-", "reassignment"),
    )
    if with_operations:
        data.authorized_operations = [
            operation.name
            for operation in SUPPORTED[ResourceType.TOPIC]
            if request.allows(operation, ResourceType.TOPIC, name)
        ]
    return data


async def list_topics(request: RestRequest) -> RestResponse:
    """Return the topics that the principal may see."""
    links = Links(request)

    def build_response() -> v3_models.TopicList:
        found = []
        for name in request.store.topics():
            if request.may_see(Thing.TOPIC, name):
                count = request.store.topic(name).partition_count
                found.append(
                    topic_data(request, links, name, count, with_operations=request.query.include_authorized_operations)
                )
        return v3_models.TopicList(metadata=links.list_metadata("topics"), data=found)

    return json_response(await request.work(build_response))


async def get_topic(request: RestRequest) -> RestResponse:
    """Return one topic."""
    links = Links(request)

    def build_response() -> v3_models.TopicData:
        topic = visible_topic(request)
        return topic_data(
            request,
            links,
            topic.name,
            topic.partition_count,
            with_operations=request.query.include_authorized_operations,
        )

    return json_response(await request.work(build_response))


async def create_topic(request: RestRequest) -> RestResponse:
    """Create a topic."""
    links = Links(request)
    request.check_administration()
    asked: v3_models.NewTopic = await request.document()
    if not request.allows(Operation.CREATE, ResourceType.CLUSTER):
        request.check_topic(Operation.CREATE, asked.topic_name)

    def make() -> v3_models.TopicData:
        count = _partitions_of(asked)
        name = check_topic_name(asked.topic_name)
        given = {config.name: config.value for config in asked.configs}
        settings = to_engine(given)
        config = TopicConfig.from_mapping(settings)
        if name in request.store.topics():
            raise TopicExists(name)
        if not asked.validate_only:
            request.store.create_topic(name, count, settings)
            if ineffective := without_effect(given, config, is_shipped=request.store.is_shipped):
                logger.warning("topic %s was created with settings that have no effect: %s", name, ineffective)
        return topic_data(request, links, name, count)

    data = await request.work(make)
    return json_response(data, HTTPStatus.OK if asked.validate_only else HTTPStatus.CREATED)


def _partitions_of(asked: v3_models.NewTopic) -> int:
    if asked.replicas_assignments:
        if asked.partitions_count is not None or asked.replication_factor is not None:
            raise bad_request("replicas_assignments cannot be combined with partitions_count or replication_factor")
        count = len(asked.replicas_assignments)
        if sorted(asked.replicas_assignments) != sorted(map(str, range(count))):
            raise bad_request("replicas_assignments must name the partitions 0, 1, ... once each")
        if any(brokers != [BROKER] for brokers in asked.replicas_assignments.values()):
            raise bad_request(f"each partition must have exactly one replica, on broker {BROKER}")
    else:
        if asked.replication_factor not in (None, -1, 1):
            raise bad_request(f"Replication factor: {asked.replication_factor} larger than available brokers: 1.")
        count = 1 if asked.partitions_count is None else asked.partitions_count
    if count > PARTITIONS_MAX:
        raise bad_request(f"cannot create {count} partitions in one request: the maximum is {PARTITIONS_MAX}")
    return count


def bad_request(message: str) -> HttpProblem:
    """Return the response (400) for a request that Kafka would refuse, too."""
    return HttpProblem(HTTPStatus.BAD_REQUEST, message, error_code=rest_error_codes.BAD_REQUEST)


async def grow_topic(request: RestRequest) -> RestResponse:
    """Add partitions."""
    links = Links(request)
    request.check_administration()
    asked: v3_models.PartitionCount = await request.document()
    new_count = asked.partitions_count

    def grow() -> v3_models.TopicData:
        topic = visible_topic(request, Operation.ALTER)
        now = topic.partition_count
        if not now < new_count <= now + PARTITIONS_MAX:
            raise bad_request(
                f"Topic {topic.name!r} has {now} partitions; the new count must be {now + 1} to {now + PARTITIONS_MAX}"
            )
        request.store.alter_topic(topic.name, partitions=new_count)
        return topic_data(request, links, topic.name, new_count)

    return json_response(await request.work(grow))


async def delete_topic(request: RestRequest) -> RestResponse:
    """Delete a topic with its records."""
    Links(request)
    request.check_administration()
    await request.work(lambda: request.store.delete_topic(visible_topic(request, Operation.DELETE).name))
    return no_content()


# ------------------------------------------------------------ partitions


def _partition(links: Links, topic: str, number: int) -> v3_models.PartitionData:
    at = ("topics", topic, "partitions", number)
    return v3_models.PartitionData(
        metadata=links.metadata(*at, crn=f"/topic={topic}/partition={number}"),
        cluster_id=links.cluster_id,
        topic_name=topic,
        partition_id=number,
        leader=links.related(*at, "replicas", BROKER),
        replicas=links.related(*at, "replicas"),
        reassignment=links.related(*at, "reassignment"),
    )


def _replica(links: Links, topic: str, number: int) -> v3_models.ReplicaData:
    at = ("topics", topic, "partitions", number, "replicas", BROKER)
    return v3_models.ReplicaData(
        metadata=links.metadata(*at, crn=f"/topic={topic}/partition={number}/replica={BROKER}"),
        cluster_id=links.cluster_id,
        topic_name=topic,
        partition_id=number,
        broker_id=BROKER,
        broker=links.related("brokers", BROKER),
    )


def check_partition(request: RestRequest) -> Topic:
    """Return the topic in the path. Raises `HttpProblem` (404) if it lacks the partition in the path."""
    topic = visible_topic(request)
    if request.path["partition_id"] >= topic.partition_count:
        raise HttpProblem(
            HTTPStatus.NOT_FOUND, "This server does not host this topic-partition.",
            error_code=rest_error_codes.UNKNOWN_TOPIC_OR_PARTITION,
        )  # fmt: skip
    return topic


async def list_partitions(request: RestRequest) -> RestResponse:
    """Return the partitions of a topic."""
    links = Links(request)
    topic = await request.work(visible_topic, request)
    count = await request.work(lambda: topic.partition_count)
    data = [_partition(links, topic.name, number) for number in range(count)]
    return json_response(
        v3_models.PartitionList(metadata=links.list_metadata("topics", topic.name, "partitions"), data=data)
    )


async def get_partition(request: RestRequest) -> RestResponse:
    """Return one partition."""
    links = Links(request)
    topic = await request.work(check_partition, request)
    return json_response(_partition(links, topic.name, request.path["partition_id"]))


async def get_offsets(request: RestRequest) -> RestResponse:
    """Return the start and end offset of a partition."""
    links, number = Links(request), request.path["partition_id"]

    def build_response() -> v3_models.PartitionOffsets:
        topic = check_partition(request)
        log = topic.partition(number)
        return v3_models.PartitionOffsets(
            metadata=links.metadata(
                "topics",
                topic.name,
                "partitions",
                number,
                "offset",
                crn=f"/topic={topic.name}/partition={number}/offset",
            ),
            cluster_id=links.cluster_id,
            topic_name=topic.name,
            partition_id=number,
            earliest_offset=log.log_start_offset,
            latest_offset=log.log_end_offset,
        )

    return json_response(await request.work(build_response))


async def list_replicas(request: RestRequest) -> RestResponse:
    """Return the single replica of a partition."""
    links, number = Links(request), request.path["partition_id"]
    topic = await request.work(check_partition, request)
    metadata = links.list_metadata("topics", topic.name, "partitions", number, "replicas")
    return json_response(v3_models.ReplicaList(metadata=metadata, data=[_replica(links, topic.name, number)]))


async def get_replica(request: RestRequest) -> RestResponse:
    """Return the single replica of a partition."""
    links = Links(request)
    topic = await request.work(check_partition, request)
    check_broker(request)
    return json_response(_replica(links, topic.name, request.path["partition_id"]))


async def list_broker_replicas(request: RestRequest) -> RestResponse:
    """Return the replicas of the single broker: one replica of every partition."""
    links = Links(request)
    check_broker(request)

    def build_response() -> v3_models.ReplicaList:
        found = []
        for name in request.store.topics():
            if request.may_see(Thing.TOPIC, name):
                found += [_replica(links, name, number) for number in range(request.store.topic(name).partition_count)]
        return v3_models.ReplicaList(metadata=links.list_metadata("brokers", BROKER, "partition-replicas"), data=found)

    return json_response(await request.work(build_response))


async def list_reassignments(request: RestRequest) -> RestResponse:
    """Return an empty list: partitions never move to another broker."""
    links, topic = Links(request), "-"
    if "topic_name" in request.path:
        topic = (await request.work(visible_topic, request)).name
    metadata = links.list_metadata("topics", topic, "partitions", "-", "reassignment")
    return json_response(v3_models.ReassignmentList(metadata=metadata))
