"""REST v3 endpoints of the cluster, which is the store, and of its single broker."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest.responses import RestResponse, json_response
from segmentlog.http.rest.v3.v3_links import BROKER, Links
from segmentlog.http.rest.v3.v3_models import BrokerConfigList, BrokerData, BrokerList, ClusterData, ClusterList
from segmentlog.security.principals import Operation, ResourceType

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import RestRequest


def _cluster(links: Links) -> ClusterData:
    return ClusterData(
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


def _broker(request: RestRequest, links: Links) -> BrokerData:
    return BrokerData(
        metadata=links.metadata("brokers", BROKER, crn=f"/broker={BROKER}"),
        cluster_id=links.cluster_id,
        broker_id=BROKER,
        host=request.connection.url.hostname,
        port=request.connection.url.port,
        configs=links.related("brokers", BROKER, "configs"),
        partition_replicas=links.related("brokers", BROKER, "partition-replicas"),
    )


def check_broker(request: RestRequest) -> None:
    """Raise `HttpProblem` (404) for another broker in the path."""
    if request.path["broker_id"] != BROKER:
        raise HttpProblem(
            HTTPStatus.NOT_FOUND, f"Broker {request.path['broker_id']} cannot be found: the only broker is {BROKER}"
        )


async def list_clusters(request: RestRequest) -> RestResponse:
    """Return the single cluster."""
    links = Links(request)
    return json_response(ClusterList(metadata=links.clusters_metadata(), data=[_cluster(links)]))


async def get_cluster(request: RestRequest) -> RestResponse:
    """Return the cluster."""
    return json_response(_cluster(Links(request)))


async def list_brokers(request: RestRequest) -> RestResponse:
    """Return the single broker: this server, with the host name that the client uses."""
    links = Links(request)
    return json_response(BrokerList(metadata=links.list_metadata("brokers"), data=[_broker(request, links)]))


async def get_broker(request: RestRequest) -> RestResponse:
    """Return the broker."""
    links = Links(request)
    check_broker(request)
    return json_response(_broker(request, links))


async def list_broker_configs(request: RestRequest) -> RestResponse:
    """Return an empty list: a server's settings are its command-line options."""
    links = Links(request)
    request.check(Operation.DESCRIBE_CONFIGS, ResourceType.CLUSTER)
    if "broker_id" in request.path:
        check_broker(request)
        metadata = links.list_metadata("brokers", BROKER, "configs")
        return json_response(BrokerConfigList(kind="KafkaBrokerConfigList", metadata=metadata))
    metadata = links.list_metadata("broker-configs")
    return json_response(BrokerConfigList(kind="KafkaClusterConfigList", metadata=metadata))
