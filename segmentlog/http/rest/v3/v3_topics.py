"""Topics and partitions: told, made, grown, deleted."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from segmentlog.config import TopicConfig
from segmentlog.errors import TopicExists
from segmentlog.format.file_names import check_topic_name
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest import rest_error_codes
from segmentlog.http.rest.responses import Reply, json_reply, nothing
from segmentlog.http.rest.v3 import v3_models
from segmentlog.http.rest.v3.v3_clusters import check_broker
from segmentlog.http.rest.v3.v3_links import BROKER, Links
from segmentlog.policy.kafka_configs import to_engine, without_effect
from segmentlog.security.acl_rules import SUPPORTED
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import Call
    from segmentlog.topics.topic_registry import Topic

logger = logging.getLogger("segmentlog.http")

PARTITIONS_MAX: Final = 1000
"""That one request may make: they take a folder each, and their time."""


def visible_topic(call: Call, operation: Operation = Operation.DESCRIBE) -> Topic:
    """The topic in the path, none of the store's own. Raises `UnknownTopic`, `Forbidden`."""
    name = call.path["topic_name"]
    call.check_topic(operation, name)
    return call.store.topic(check_topic_name(name))


def topic_data(call: Call, links: Links, name: str, count: int, *, with_operations: bool = False) -> v3_models.Topic:
    """One topic as it is told."""
    data = v3_models.Topic(
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
            if call.allows(operation, ResourceType.TOPIC, name)
        ]
    return data


async def list_topics(call: Call) -> Reply:
    """Those that whoever asks may know of."""
    links = Links(call)

    def look() -> v3_models.TopicList:
        found = []
        for name in call.store.topics():
            if call.may_see(Thing.TOPIC, name):
                count = call.store.topic(name).partition_count
                found.append(
                    topic_data(call, links, name, count, with_operations=call.query.include_authorized_operations)
                )
        return v3_models.TopicList(metadata=links.list_metadata("topics"), data=found)

    return json_reply(await call.work(look))


async def get_topic(call: Call) -> Reply:
    """One."""
    links = Links(call)

    def look() -> v3_models.Topic:
        topic = visible_topic(call)
        return topic_data(
            call, links, topic.name, topic.partition_count, with_operations=call.query.include_authorized_operations
        )

    return json_reply(await call.work(look))


async def create_topic(call: Call) -> Reply:
    """Make one."""
    links = Links(call)
    call.check_administration()
    asked: v3_models.NewTopic = await call.document()
    if not call.allows(Operation.CREATE, ResourceType.CLUSTER):
        call.check_topic(Operation.CREATE, asked.topic_name)

    def make() -> v3_models.Topic:
        count = _partitions_of(asked)
        name = check_topic_name(asked.topic_name)
        given = {config.name: config.value for config in asked.configs}
        settings = to_engine(given)
        config = TopicConfig.from_mapping(settings)
        if name in call.store.topics():
            raise TopicExists(name)
        if not asked.validate_only:
            call.store.create_topic(name, count, settings)
            if ineffective := without_effect(given, config, is_shipped=call.store.is_shipped):
                logger.warning("topic %s was created with settings that have no effect: %s", name, ineffective)
        return topic_data(call, links, name, count)

    data = await call.work(make)
    return json_reply(data, HTTPStatus.OK if asked.validate_only else HTTPStatus.CREATED)


def _partitions_of(asked: v3_models.NewTopic) -> int:
    if asked.replicas_assignments:
        if asked.partitions_count is not None or asked.replication_factor is not None:
            raise bad("replicas_assignments exclude partitions_count and replication_factor")
        count = len(asked.replicas_assignments)
        if sorted(asked.replicas_assignments) != sorted(map(str, range(count))):
            raise bad("replicas_assignments name the partitions from 0 on, each once")
        if any(brokers != [BROKER] for brokers in asked.replicas_assignments.values()):
            raise bad(f"each partition has one copy, of broker {BROKER}")
    else:
        if asked.replication_factor not in (None, -1, 1):
            raise bad(f"Replication factor: {asked.replication_factor} larger than available brokers: 1.")
        count = 1 if asked.partitions_count is None else asked.partitions_count
    if count > PARTITIONS_MAX:
        raise bad(f"{count} partitions in one request, where at most {PARTITIONS_MAX} are made")
    return count


def bad(message: str) -> HttpProblem:
    """What Kafka would not do either."""
    return HttpProblem(HTTPStatus.BAD_REQUEST, message, error_code=rest_error_codes.BAD_REQUEST)


async def grow_topic(call: Call) -> Reply:
    """Add partitions."""
    links = Links(call)
    call.check_administration()
    asked: v3_models.PartitionCount = await call.document()
    wanted = asked.partitions_count

    def grow() -> v3_models.Topic:
        topic = visible_topic(call, Operation.ALTER)
        now = topic.partition_count
        if not now < wanted <= now + PARTITIONS_MAX:
            raise bad(f"Topic {topic.name!r} has {now} partitions: there can be {now + 1} to {now + PARTITIONS_MAX}")
        call.store.alter_topic(topic.name, partitions=wanted)
        return topic_data(call, links, topic.name, wanted)

    return json_reply(await call.work(grow))


async def delete_topic(call: Call) -> Reply:
    """Delete it with all that is in it."""
    Links(call)
    call.check_administration()
    await call.work(lambda: call.store.delete_topic(visible_topic(call, Operation.DELETE).name))
    return nothing()


# ------------------------------------------------------------ partitions


def _partition(links: Links, topic: str, number: int) -> v3_models.Partition:
    at = ("topics", topic, "partitions", number)
    return v3_models.Partition(
        metadata=links.metadata(*at, crn=f"/topic={topic}/partition={number}"),
        cluster_id=links.cluster_id,
        topic_name=topic,
        partition_id=number,
        leader=links.related(*at, "replicas", BROKER),
        replicas=links.related(*at, "replicas"),
        reassignment=links.related(*at, "reassignment"),
    )


def _replica(links: Links, topic: str, number: int) -> v3_models.Replica:
    at = ("topics", topic, "partitions", number, "replicas", BROKER)
    return v3_models.Replica(
        metadata=links.metadata(*at, crn=f"/topic={topic}/partition={number}/replica={BROKER}"),
        cluster_id=links.cluster_id,
        topic_name=topic,
        partition_id=number,
        broker_id=BROKER,
        broker=links.related("brokers", BROKER),
    )


def check_partition(call: Call) -> Topic:
    """The topic in the path, which has the partition in it."""
    topic = visible_topic(call)
    if call.path["partition_id"] >= topic.partition_count:
        raise HttpProblem(
            HTTPStatus.NOT_FOUND, "This server does not host this topic-partition.",
            error_code=rest_error_codes.UNKNOWN_TOPIC_OR_PARTITION,
        )  # fmt: skip
    return topic


async def list_partitions(call: Call) -> Reply:
    """Those of a topic."""
    links = Links(call)
    topic = await call.work(visible_topic, call)
    count = await call.work(lambda: topic.partition_count)
    data = [_partition(links, topic.name, number) for number in range(count)]
    return json_reply(
        v3_models.PartitionList(metadata=links.list_metadata("topics", topic.name, "partitions"), data=data)
    )


async def get_partition(call: Call) -> Reply:
    """One."""
    links = Links(call)
    topic = await call.work(check_partition, call)
    return json_reply(_partition(links, topic.name, call.path["partition_id"]))


async def get_offsets(call: Call) -> Reply:
    """Where a partition begins and ends."""
    links, number = Links(call), call.path["partition_id"]

    def look() -> v3_models.PartitionOffsets:
        topic = check_partition(call)
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

    return json_reply(await call.work(look))


async def list_replicas(call: Call) -> Reply:
    """The one copy of a partition."""
    links, number = Links(call), call.path["partition_id"]
    topic = await call.work(check_partition, call)
    metadata = links.list_metadata("topics", topic.name, "partitions", number, "replicas")
    return json_reply(v3_models.ReplicaList(metadata=metadata, data=[_replica(links, topic.name, number)]))


async def get_replica(call: Call) -> Reply:
    """The one copy of a partition."""
    links = Links(call)
    topic = await call.work(check_partition, call)
    check_broker(call)
    return json_reply(_replica(links, topic.name, call.path["partition_id"]))


async def list_broker_replicas(call: Call) -> Reply:
    """The copies that the one broker has: all."""
    links = Links(call)
    check_broker(call)

    def look() -> v3_models.ReplicaList:
        found = []
        for name in call.store.topics():
            if call.may_see(Thing.TOPIC, name):
                found += [_replica(links, name, number) for number in range(call.store.topic(name).partition_count)]
        return v3_models.ReplicaList(metadata=links.list_metadata("brokers", BROKER, "partition-replicas"), data=found)

    return json_reply(await call.work(look))


async def list_reassignments(call: Call) -> Reply:
    """None: no partition is ever moved to another broker."""
    links, topic = Links(call), "-"
    if "topic_name" in call.path:
        topic = (await call.work(visible_topic, call)).name
    metadata = links.list_metadata("topics", topic, "partitions", "-", "reassignment")
    return json_reply(v3_models.ReassignmentList(metadata=metadata))
