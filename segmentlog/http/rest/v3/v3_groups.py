"""Consumer groups: members, assignments, how far they are."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest.responses import Reply, json_reply
from segmentlog.http.rest.v3 import v3_models
from segmentlog.http.rest.v3.v3_links import BROKER, Links
from segmentlog.records import TopicPartition
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from segmentlog.groups.group_admin import GroupDescription, MemberDescription, PartitionDescription
    from segmentlog.http.rest.rest_request import Call

_STATES: Final = {"Stable": "STABLE", "Rebalancing": "PREPARING_REBALANCE", "Empty": "EMPTY"}
_GROUPS: Final = "consumer-groups"


def _describe(call: Call) -> GroupDescription:
    """The group in the path. Raises `HttpProblem` where nobody knows it."""
    group = call.path["consumer_group_id"]
    call.check(Operation.DESCRIBE, ResourceType.GROUP, group)
    found = call.store.groups.describe(group)
    if not found.members and not found.partitions:
        raise HttpProblem(HTTPStatus.NOT_FOUND, f"Consumer group {group} cannot be found.")
    return found


def _may_see(call: Call, topic: str) -> bool:
    return call.may_see(Thing.TOPIC, topic)


def _group(links: Links, found: GroupDescription) -> v3_models.Group:
    at = (_GROUPS, found.group)
    return v3_models.Group(
        metadata=links.metadata(*at, crn=f"/consumer-group={found.group}"),
        cluster_id=links.cluster_id,
        consumer_group_id=found.group,
        is_simple=not found.members and not found.strategy,
        partition_assignor=found.strategy,
        state=_STATES[found.state],  # type: ignore[arg-type]
        coordinator=links.related("brokers", BROKER),
        consumers=links.related(*at, "consumers"),
        lag_summary=links.related(*at, "lag-summary"),
    )


async def list_groups(call: Call) -> Reply:
    """Those that whoever asks may know of."""
    links = Links(call)

    def look() -> v3_models.GroupList:
        groups = call.store.groups
        found = [_group(links, groups.describe(name)) for name in groups.names() if call.may_see(Thing.GROUP, name)]
        return v3_models.GroupList(metadata=links.list_metadata(_GROUPS), data=found)

    return json_reply(await call.work(look))


async def get_group(call: Call) -> Reply:
    """One."""
    links = Links(call)
    return json_reply(_group(links, await call.work(_describe, call)))


# ------------------------------------------------------------ members


def _consumer(links: Links, group: str, member: MemberDescription) -> v3_models.Consumer:
    at = (_GROUPS, group, "consumers", member.id)
    return v3_models.Consumer(
        metadata=links.metadata(*at, crn=f"/consumer-group={group}/consumer={member.id}"),
        cluster_id=links.cluster_id,
        consumer_group_id=group,
        consumer_id=member.id,
        instance_id=member.instance_id,
        client_id=member.client_id,
        assignments=links.related(*at, "assignments"),
    )


def _member(call: Call, found: GroupDescription) -> MemberDescription:
    for member in found.members:
        if member.id == call.path["consumer_id"]:
            return member
    raise HttpProblem(
        HTTPStatus.NOT_FOUND, f"Consumer {call.path['consumer_id']} cannot be found in group {found.group}."
    )


async def list_consumers(call: Call) -> Reply:
    """The members of a group."""
    links, found = Links(call), await call.work(_describe, call)
    data = [_consumer(links, found.group, member) for member in found.members]
    return json_reply(
        v3_models.ConsumerList(metadata=links.list_metadata(_GROUPS, found.group, "consumers"), data=data)
    )


async def get_consumer(call: Call) -> Reply:
    """One member."""
    links, found = Links(call), await call.work(_describe, call)
    return json_reply(_consumer(links, found.group, _member(call, found)))


def _assignment(links: Links, group: str, member: str, tp: TopicPartition) -> v3_models.Assignment:
    at = (_GROUPS, group, "consumers", member, "assignments", tp.topic, "partitions", tp.partition)
    crn = f"/consumer-group={group}/consumer={member}/assignment={tp.topic}/partition={tp.partition}"
    return v3_models.Assignment(
        metadata=links.metadata(*at, crn=crn),
        cluster_id=links.cluster_id,
        consumer_group_id=group,
        consumer_id=member,
        topic_name=tp.topic,
        partition_id=tp.partition,
        partition=links.related("topics", tp.topic, "partitions", tp.partition),
        lag=links.related(_GROUPS, group, "lags", tp.topic, "partitions", tp.partition),
    )


async def list_assignments(call: Call) -> Reply:
    """What a member is given, of topics that whoever asks may see."""
    links, found = Links(call), await call.work(_describe, call)
    member = _member(call, found)
    data = [_assignment(links, found.group, member.id, tp) for tp in member.partitions if _may_see(call, tp.topic)]
    metadata = links.list_metadata(_GROUPS, found.group, "consumers", member.id, "assignments")
    return json_reply(v3_models.AssignmentList(metadata=metadata, data=data))


async def get_assignment(call: Call) -> Reply:
    """One partition that a member is given."""
    links, found = Links(call), await call.work(_describe, call)
    member = _member(call, found)
    wanted = TopicPartition(call.path["topic_name"], call.path["partition_id"])
    if wanted in member.partitions and _may_see(call, wanted.topic):
        return json_reply(_assignment(links, found.group, member.id, wanted))
    raise HttpProblem(HTTPStatus.NOT_FOUND, f"Consumer {member.id} has no such partition.")


# ------------------------------------------------------------ lags


def _lags(call: Call) -> list[tuple[PartitionDescription, MemberDescription | None]]:
    found = _describe(call)
    members = {member.id: member for member in found.members}
    return [
        (one, members.get(one.member)) for one in found.partitions if one.lag is not None and _may_see(call, one.topic)
    ]


def _lag(links: Links, group: str, one: PartitionDescription, member: MemberDescription | None) -> v3_models.Lag:
    at = (_GROUPS, group, "lags", one.topic, "partitions", one.partition)
    assert one.committed is not None
    return v3_models.Lag(
        metadata=links.metadata(*at, crn=f"/consumer-group={group}/lag={one.topic}/partition={one.partition}"),
        cluster_id=links.cluster_id,
        consumer_group_id=group,
        topic_name=one.topic,
        partition_id=one.partition,
        current_offset=one.committed.offset,
        log_end_offset=one.log_end_offset or 0,
        lag=one.lag or 0,
        consumer_id=member.id if member else "",
        instance_id=member.instance_id if member else None,
        client_id=member.client_id if member else "",
    )


async def list_lags(call: Call) -> Reply:
    """Of every partition that the group has a position in."""
    links, group = Links(call), call.path["consumer_group_id"]
    data = [_lag(links, group, *one) for one in await call.work(_lags, call)]
    return json_reply(v3_models.LagList(metadata=links.list_metadata(_GROUPS, group, "lags"), data=data))


async def get_lag(call: Call) -> Reply:
    """Of one partition."""
    links, group = Links(call), call.path["consumer_group_id"]
    where = (call.path["topic_name"], call.path["partition_id"])
    for one, member in await call.work(_lags, call):
        if (one.topic, one.partition) == where:
            return json_reply(_lag(links, group, one, member))
    raise HttpProblem(HTTPStatus.NOT_FOUND, f"Consumer group {group} has no position in {where[0]}/{where[1]}.")


async def get_lag_summary(call: Call) -> Reply:
    """The largest, and the sum."""
    links, group = Links(call), call.path["consumer_group_id"]
    found = await call.work(_lags, call)
    if not found:
        raise HttpProblem(HTTPStatus.NOT_FOUND, f"Consumer group {group} has no positions.")
    most, member = max(found, key=lambda one: one[0].lag or 0)
    return json_reply(
        v3_models.LagSummary(
            metadata=links.metadata(_GROUPS, group, "lag-summary", crn=f"/consumer-group={group}/lag-summary"),
            cluster_id=links.cluster_id,
            consumer_group_id=group,
            max_lag_consumer_id=member.id if member else "",
            max_lag_instance_id=member.instance_id if member else None,
            max_lag_client_id=member.client_id if member else "",
            max_lag_topic_name=most.topic,
            max_lag_partition_id=most.partition,
            max_lag=most.lag or 0,
            total_lag=sum(one.lag or 0 for one, _ in found),
            max_lag_consumer=links.related(_GROUPS, group, "consumers", *([member.id] if member else ())),
            max_lag_partition=links.related("topics", most.topic, "partitions", most.partition),
        )
    )
