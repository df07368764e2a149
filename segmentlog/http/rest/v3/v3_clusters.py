"""The cluster, which is the store, and its one broker."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest.responses import Reply, json_reply
from segmentlog.http.rest.v3.v3_links import BROKER, Links
from segmentlog.http.rest.v3.v3_models import Broker, BrokerConfigList, BrokerList, Cluster, ClusterList
from segmentlog.security.principals import Operation, ResourceType

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import Call


def _cluster(links: Links) -> Cluster:
    return Cluster(
        metadata=links.metadata(),
        cluster_id=links.cluster_id,
        controller=links.related("brokers", BROKER),
        acls=links.related("acls"),
        brokers=links.related("brokers"),
        broker_configs=links.related("broker-configs"),
        consumer_groups=links.related("consumer-groups"),
        topics=links.related("topics"),
        partition_reassignments=links.related("topics", "-", "partitions", "-", "reassignment"),
    )


def _broker(call: Call, links: Links) -> Broker:
    return Broker(
        metadata=links.metadata("brokers", BROKER, crn=f"/broker={BROKER}"),
        cluster_id=links.cluster_id,
        broker_id=BROKER,
        host=call.connection.url.hostname,
        port=call.connection.url.port,
        configs=links.related("brokers", BROKER, "configs"),
        partition_replicas=links.related("brokers", BROKER, "partition-replicas"),
    )


def check_broker(call: Call) -> None:
    """Raises `HttpProblem` when the broker in the path is not the one."""
    if call.path["broker_id"] != BROKER:
        raise HttpProblem(HTTPStatus.NOT_FOUND, f"Broker {call.path['broker_id']} cannot be found: there is {BROKER}")


async def list_clusters(call: Call) -> Reply:
    """The one."""
    links = Links(call)
    return json_reply(ClusterList(metadata=links.clusters_metadata(), data=[_cluster(links)]))


async def get_cluster(call: Call) -> Reply:
    """The one."""
    return json_reply(_cluster(Links(call)))


async def list_brokers(call: Call) -> Reply:
    """The one: this door, by the name that the client knows it by."""
    links = Links(call)
    return json_reply(BrokerList(metadata=links.list_metadata("brokers"), data=[_broker(call, links)]))


async def get_broker(call: Call) -> Reply:
    """The one."""
    links = Links(call)
    check_broker(call)
    return json_reply(_broker(call, links))


async def list_broker_configs(call: Call) -> Reply:
    """None: they are those of a command line."""
    links = Links(call)
    call.check(Operation.DESCRIBE_CONFIGS, ResourceType.CLUSTER)
    if "broker_id" in call.path:
        check_broker(call)
        metadata = links.list_metadata("brokers", BROKER, "configs")
        return json_reply(BrokerConfigList(kind="KafkaBrokerConfigList", metadata=metadata))
    metadata = links.list_metadata("broker-configs")
    return json_reply(BrokerConfigList(kind="KafkaClusterConfigList", metadata=metadata))
