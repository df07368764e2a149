"""REST v2 endpoints of topics and partitions, and of the single broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from segmentlog.format.file_names import check_topic_name
from segmentlog.http.rest.responses import RestResponse, json_response
from segmentlog.http.rest.rest_error_codes import unknown_partition
from segmentlog.http.rest.v2.v2_models import Brokers, Offsets, PartitionInfo, ReplicaInfo, TopicInfo
from segmentlog.policy.kafka_configs import describe
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import RestRequest
    from segmentlog.topics.topic_registry import Topic

BROKER: Final = 1
"""The broker id of the Kafka server's first worker."""


def visible_topics(request: RestRequest) -> list[str]:
    """Return the names of the topics that the principal may see."""
    return [name for name in request.store.topics() if request.may_see(Thing.TOPIC, name)]


def visible_topic(request: RestRequest, operation: Operation = Operation.DESCRIBE) -> Topic:
    """Return the topic in the path, which must not be internal. Raises `UnknownTopic`, `Forbidden`."""
    name = request.path["topic"]
    request.check_topic(operation, name)
    return request.store.topic(check_topic_name(name))


def _count(request: RestRequest) -> int:
    """Return the number of partitions. Raises `HttpProblem` (404) for an unknown partition in the path."""
    topic = visible_topic(request)
    count = topic.partition_count
    if request.path.get("partition", 0) >= count:
        raise unknown_partition(topic.name, request.path["partition"])
    return count


def _partition(number: int) -> PartitionInfo:
    return PartitionInfo(number, BROKER, [ReplicaInfo(BROKER, True, True)])


async def list_topics(request: RestRequest) -> RestResponse:
    """Return the names of topics."""
    return json_response(await request.work(visible_topics, request), content_type=request.media)


async def get_topic(request: RestRequest) -> RestResponse:
    """Return a topic with its configuration, under Kafka's keys. Without the right to see it, it is empty."""

    def build_response() -> TopicInfo:
        topic = visible_topic(request)
        sees_config = request.may_see(Thing.TOPIC_CONFIG, topic.name)
        configs = {entry.name: entry.value or "" for entry in describe(topic.config)} if sees_config else {}
        return TopicInfo(topic.name, configs, [_partition(number) for number in range(topic.partition_count)])

    return json_response(await request.work(build_response), content_type=request.media)


async def list_partitions(request: RestRequest) -> RestResponse:
    """Return the partitions of a topic."""
    count = await request.work(_count, request)
    return json_response([_partition(number) for number in range(count)], content_type=request.media)


async def get_partition(request: RestRequest) -> RestResponse:
    """Return one partition."""
    await request.work(_count, request)
    return json_response(_partition(request.path["partition"]), content_type=request.media)


async def get_offsets(request: RestRequest) -> RestResponse:
    """Return the start and end offset of a partition."""

    def build_response() -> Offsets:
        _count(request)
        log = visible_topic(request).partition(request.path["partition"])
        return Offsets(log.log_start_offset, log.log_end_offset)

    return json_response(await request.work(build_response), content_type=request.media)


async def list_brokers(request: RestRequest) -> RestResponse:
    """Return the single broker."""
    return json_response(Brokers([BROKER]), content_type=request.media)
