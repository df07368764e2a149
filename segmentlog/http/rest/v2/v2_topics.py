"""Topics and partitions as version 2 tells them, and the one broker that there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from segmentlog.format.file_names import check_topic_name
from segmentlog.http.rest.responses import Reply, json_reply
from segmentlog.http.rest.rest_error_codes import no_partition
from segmentlog.http.rest.v2.v2_models import Brokers, Offsets, PartitionInfo, Replica, TopicInfo
from segmentlog.policy.kafka_configs import describe
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import Call
    from segmentlog.topics.topic_registry import Topic

BROKER: Final = 1
"""As at the Kafka door: the first of its workers."""


def visible_topics(call: Call) -> list[str]:
    """Names of the topics that whoever asks may know of."""
    return [name for name in call.store.topics() if call.may_see(Thing.TOPIC, name)]


def visible_topic(call: Call, operation: Operation = Operation.DESCRIBE) -> Topic:
    """The topic in the path, none of the store's own. Raises `UnknownTopic`, `Forbidden`."""
    name = call.path["topic"]
    call.check_topic(operation, name)
    return call.store.topic(check_topic_name(name))


def _count(call: Call) -> int:
    """How many partitions there are. Raises `HttpProblem` when the one in the path is none of them."""
    topic = visible_topic(call)
    count = topic.partition_count
    if call.path.get("partition", 0) >= count:
        raise no_partition(topic.name, call.path["partition"])
    return count


def _partition(number: int) -> PartitionInfo:
    return PartitionInfo(number, BROKER, [Replica(BROKER, True, True)])


async def list_topics(call: Call) -> Reply:
    """Names."""
    return json_reply(await call.work(visible_topics, call), content_type=call.media)


async def get_topic(call: Call) -> Reply:
    """One topic with its configuration, in Kafka's words; without the right to see that, none of it."""

    def look() -> TopicInfo:
        topic = visible_topic(call)
        sees_config = call.may_see(Thing.TOPIC_CONFIG, topic.name)
        configs = {entry.name: entry.value or "" for entry in describe(topic.config)} if sees_config else {}
        return TopicInfo(topic.name, configs, [_partition(number) for number in range(topic.partition_count)])

    return json_reply(await call.work(look), content_type=call.media)


async def list_partitions(call: Call) -> Reply:
    """Partitions of a topic."""
    count = await call.work(_count, call)
    return json_reply([_partition(number) for number in range(count)], content_type=call.media)


async def get_partition(call: Call) -> Reply:
    """One partition."""
    await call.work(_count, call)
    return json_reply(_partition(call.path["partition"]), content_type=call.media)


async def get_offsets(call: Call) -> Reply:
    """Where a partition begins and ends."""

    def look() -> Offsets:
        _count(call)
        log = visible_topic(call).partition(call.path["partition"])
        return Offsets(log.log_start_offset, log.log_end_offset)

    return json_reply(await call.work(look), content_type=call.media)


async def list_brokers(call: Call) -> Reply:
    """The one."""
    return json_reply(Brokers([BROKER]), content_type=call.media)
