"""REST v3 endpoints of consumer groups: members, assignments and lag."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest.responses import RestResponse, json_response
from segmentlog.http.rest.v3 import v3_models
from segmentlog.http.rest.v3.v3_links import BROKER, Links
from segmentlog.records import TopicPartition
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from segmentlog.groups.group_admin import GroupDescription, MemberDescription, PartitionDescription
    from segmentlog.http.rest.rest_request import RestRequest

_STATES: Final = {"Stable": "STABLE", "Rebalancing": "PREPARING_REBALANCE", "Empty": "EMPTY"}
_GROUPS: Final = "consumer-groups"


def _describe(request: RestRequest) -> GroupDescription:
    """Return the group in the path. Raises `HttpProblem` (404) if it does not exist."""
    group = request.path["consumer_group_id"]
    request.check(Operation.DESCRIBE, ResourceType.GROUP, group)
    found = request.store.groups.describe(group)
    if not found.members and not found.partitions:
        raise HttpProblem(HTTPStatus.NOT_FOUND, f"Consumer group {group} cannot be found.")
    return found


def _may_see(request: RestRequest, topic: str) -> bool:
    return request.may_see(Thing.TOPIC, topic)


def _group(links: Links, found: GroupDescription) -> v3_models.GroupData:
    at = (_GROUPS, found.group)
    return v3_models.GroupData(
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


async def list_groups(request: RestRequest) -> RestResponse:
    """Return the groups that the principal may see."""
    links = Links(request)

    def build_response() -> v3_models.GroupList:
        groups = request.store.groups
        found = [_group(links, groups.describe(name)) for name in groups.names() if request.may_see(Thing.GROUP, name)]
        return v3_models.GroupList(metadata=links.list_metadata(_GROUPS), data=found)

    return json_response(await request.work(build_response))


async def get_group(request: RestRequest) -> RestResponse:
    """Return one group."""
    links = Links(request)
    return json_response(_group(links, await request.work(_describe, request)))


# ------------------------------------------------------------ members


def _consumer(links: Links, group: str, member: MemberDescription) -> v3_models.ConsumerData:
    at = (_GROUPS, group, "consumers", member.id)
    return v3_models.ConsumerData(
        metadata=links.metadata(*at, crn=f"/consumer-group={group}/consumer={member.id}"),
        cluster_id=links.cluster_id,
        consumer_group_id=group,
        consumer_id=member.id,
        instance_id=member.instance_id,
        client_id=member.client_id,
        assignments=links.related(*at, "assignments"),
    )


def _member(request: RestRequest, found: GroupDescription) -> MemberDescription:
    for member in found.members:
        if member.id == request.path["consumer_id"]:
            return member
    raise HttpProblem(
        HTTPStatus.NOT_FOUND, f"Consumer {request.path['consumer_id']} cannot be found in group {found.group}."
    )


async def list_consumers(request: RestRequest) -> RestResponse:
    """Return the members of a group."""
    links, found = Links(request), await request.work(_describe, request)
    data = [_consumer(links, found.group, member) for member in found.members]
    return json_response(
        v3_models.ConsumerList(metadata=links.list_metadata(_GROUPS, found.group, "consumers"), data=data)
    )


async def get_consumer(request: RestRequest) -> RestResponse:
    """Return one member."""
    links, found = Links(request), await request.work(_describe, request)
    return json_response(_consumer(links, found.group, _member(request, found)))


def _assignment(links: Links, group: str, member: str, tp: TopicPartition) -> v3_models.AssignmentData:
    at = (_GROUPS, group, "consumers", member, "assignments", tp.topic, "partitions", tp.partition)
    crn = f"/consumer-group={group}/consumer={member}/assignment={tp.topic}/partition={tp.partition}"
    return v3_models.AssignmentData(
        metadata=links.metadata(*at, crn=crn),
        cluster_id=links.cluster_id,
        consumer_group_id=group,
        consumer_id=member,
        topic_name=tp.topic,
        partition_id=tp.partition,
        partition=links.related("topics", tp.topic, "partitions", tp.partition),
        lag=links.related(_GROUPS, group, "lags", tp.topic, "partitions", tp.partition),
    )


async def list_assignments(request: RestRequest) -> RestResponse:
    """Return a member's partitions, of topics that the principal may see."""
    links, found = Links(request), await request.work(_describe, request)
    member = _member(request, found)
    data = [_assignment(links, found.group, member.id, tp) for tp in member.partitions if _may_see(request, tp.topic)]
    metadata = links.list_metadata(_GROUPS, found.group, "consumers", member.id, "assignments")
    return json_response(v3_models.AssignmentList(metadata=metadata, data=data))


async def get_assignment(request: RestRequest) -> RestResponse:
    """Return one partition of a member."""
    links, found = Links(request), await request.work(_describe, request)
    member = _member(request, found)
    tp = TopicPartition(request.path["topic_name"], request.path["partition_id"])
    if tp in member.partitions and _may_see(request, tp.topic):
        return json_response(_assignment(links, found.group, member.id, tp))
    raise HttpProblem(HTTPStatus.NOT_FOUND, f"Consumer {member.id} is not assigned this partition.")


# ------------------------------------------------------------ lags


def _lags(request: RestRequest) -> list[tuple[PartitionDescription, MemberDescription | None]]:
    found = _describe(request)
    members = {member.id: member for member in found.members}
    return [
        (one, members.get(one.member))
        for one in found.partitions
        if one.lag is not None and _may_see(request, one.topic)
    ]


def _lag(links: Links, group: str, entry: PartitionDescription, member: MemberDescription | None) -> v3_models.LagData:
    at = (_GROUPS, group, "lags", entry.topic, "partitions", entry.partition)
    assert entry.committed is not None
    return v3_models.LagData(
        metadata=links.metadata(*at, crn=f"/consumer-group={group}/lag={entry.topic}/partition={entry.partition}"),
        cluster_id=links.cluster_id,
        consumer_group_id=group,
        topic_name=entry.topic,
        partition_id=entry.partition,
        current_offset=entry.committed.offset,
        log_end_offset=entry.log_end_offset or 0,
        lag=entry.lag or 0,
        consumer_id=member.id if member else "",
        instance_id=member.instance_id if member else None,
        client_id=member.client_id if member else "",
    )


async def list_lags(request: RestRequest) -> RestResponse:
    """Return the lag of every partition with a committed offset."""
    links, group = Links(request), request.path["consumer_group_id"]
    data = [_lag(links, group, *one) for one in await request.work(_lags, request)]
    return json_response(v3_models.LagList(metadata=links.list_metadata(_GROUPS, group, "lags"), data=data))


async def get_lag(request: RestRequest) -> RestResponse:
    """Return the lag of one partition."""
    links, group = Links(request), request.path["consumer_group_id"]
    where = (request.path["topic_name"], request.path["partition_id"])
    for one, member in await request.work(_lags, request):
        if (one.topic, one.partition) == where:
            return json_response(_lag(links, group, one, member))
    raise HttpProblem(
        HTTPStatus.NOT_FOUND, f"Consumer group {group} has no committed offset for {where[0]}/{where[1]}."
    )


async def get_lag_summary(request: RestRequest) -> RestResponse:
    """Return the largest lag of a partition, and the sum."""
    links, group = Links(request), request.path["consumer_group_id"]
    found = await request.work(_lags, request)
    if not found:
        raise HttpProblem(HTTPStatus.NOT_FOUND, f"Consumer group {group} has no committed offsets.")
    most, member = max(found, key=lambda one: one[0].lag or 0)
    return json_response(
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
