"""ApiVersions (18): the supported APIs and their versions, which a client requests first."""

from __future__ import annotations

from functools import cache
from typing import Final

from segmentlog.server.api_table import API_VERSIONS, PRODUCE, SERVED
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.generated.api_versions import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.request_context import RequestContext

_ADVERTISED_FROM = {PRODUCE: 0}
"""Advertised but not decoded: librdkafka compresses only if a server supports Produce v0 (KAFKA-18659)."""

OWNER_PROBE: Final = "segmentlog-standby"
"""Client software name of a standby, which asks whether this server serves the store that is shipped."""

_NO_NODE: Final = -1
"""Node id sent by a client that connects to a bootstrap server and does not know the node."""

_TRANSACTIONS: Final = "transaction.version"
_EPOCH_OF_EACH: Final = 2
"""Feature level at which each transaction has its own epoch (KIP-890). Other clients use the first protocol."""


@cache
def _advertised() -> tuple[ApiVersion, ...]:
    versions = []
    for key in SERVED:
        api = APIS[key]
        versions.append(ApiVersion(key, _ADVERTISED_FROM.get(key, api.min_version), api.max_version))
    return tuple(versions)


def api_versions(call: RequestContext, request: ApiVersionsRequest) -> ApiVersionsResponse:
    """Return the supported APIs with their versions.

    A client may name the node and the cluster to which it wants to connect (KIP-1242). A server that is another node
    returns REBOOTSTRAP_REQUIRED, and the client asks its bootstrap servers for the node's address. Without this error
    the client would read and write another store. A server also returns it if another machine has taken over the
    store, because the cluster id now belongs to that machine.
    """
    if (request.cluster_id is None) != (request.node_id == _NO_NODE):
        return ApiVersionsResponse(error_code=ErrorCode.INVALID_REQUEST)
    cluster = call.broker.cluster
    if request.cluster_id is not None and (
        request.cluster_id != cluster.cluster_id or not cluster.is_own(request.node_id) or call.broker.is_taken_over
    ):
        return ApiVersionsResponse(error_code=ErrorCode.REBOOTSTRAP_REQUIRED)
    if request.client_software_name == OWNER_PROBE:
        if call.connection is not None:
            call.connection.is_probe = True
        return _owner_identity(call)
    return ApiVersionsResponse(
        api_keys=list(_advertised()),
        # Starts at 1: Java clients before 3.9 fail on a feature with version 0.
        supported_features=[SupportedFeatureKey(_TRANSACTIONS, 1, _EPOCH_OF_EACH)],
        finalized_features_epoch=0,
        finalized_features=[FinalizedFeatureKey(_TRANSACTIONS, _EPOCH_OF_EACH, _EPOCH_OF_EACH)],
    )


def owner_feature(owner_id: str) -> str:
    """Return the name of the feature with which a server answers a standby, as the owner with this id."""
    return f"segmentlog.owner.{owner_id}"


def _owner_identity(call: RequestContext) -> ApiVersionsResponse:
    """Return as which owner this server serves its store. No other client gets this, so that none can stumble over it.

    During a takeover the binding exists, too: the new owner counts as alive while it downloads what it lacks.
    """
    response = ApiVersionsResponse(api_keys=list(_advertised()))
    binding = call.broker.owner_binding
    if binding is not None:
        response.supported_features = [SupportedFeatureKey(owner_feature(binding.owner_id), 1, 1)]
        response.finalized_features_epoch = binding.owner_epoch
    return response


def unsupported_version(call: RequestContext) -> ApiVersionsResponse:
    """Return the supported versions to a client that used a newer version of this request. The client then repeats it
    in one of these.
    """
    api = APIS[API_VERSIONS]
    return ApiVersionsResponse(
        error_code=ErrorCode.UNSUPPORTED_VERSION,
        api_keys=[ApiVersion(API_VERSIONS, api.min_version, api.max_version)],
    )
