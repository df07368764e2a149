"""ApiVersions (18): what a client is told first, and decides by what it asks for."""

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
from segmentlog.server.request_context import Call

_ADVERTISED_FROM = {PRODUCE: 0}
"""Below what can be decoded: librdkafka judges by Produce v0 whether a broker knows compression (KAFKA-18659)."""

_NO_NODE: Final = -1
"""What a client sends that does not know the node's id: it connects to a bootstrap server."""

_TRANSACTIONS: Final = "transaction.version"
_EPOCH_OF_EACH: Final = 2
"""With which each transaction has an epoch of its own (KIP-890). Clients that do not look for it speak as before."""


@cache
def _advertised() -> tuple[ApiVersion, ...]:
    versions = []
    for key in SERVED:
        api = APIS[key]
        versions.append(ApiVersion(key, _ADVERTISED_FROM.get(key, api.min_version), api.max_version))
    return tuple(versions)


def api_versions(call: Call, request: ApiVersionsRequest) -> ApiVersionsResponse:
    """Return every API that is served, with its versions.

    A client may say which node of which cluster it connects to (KIP-1242). Any other node answers
    REBOOTSTRAP_REQUIRED, and the client asks its bootstrap servers where the node is now. Without this answer the
    client reads and writes another store. So does a machine whose store was taken over, which has the cluster id of
    the new owner.
    """
    if (request.cluster_id is None) != (request.node_id == _NO_NODE):
        return ApiVersionsResponse(error_code=ErrorCode.INVALID_REQUEST)
    cluster = call.broker.cluster
    if request.cluster_id is not None and (
        (request.cluster_id, request.node_id) != (cluster.cluster_id, cluster.own_id) or call.broker.is_taken_over
    ):
        return ApiVersionsResponse(error_code=ErrorCode.REBOOTSTRAP_REQUIRED)
    return ApiVersionsResponse(
        api_keys=list(_advertised()),
        # From 1 on: Java's clients before 3.9 take no version 0 of a feature, and break off.
        supported_features=[SupportedFeatureKey(_TRANSACTIONS, 1, _EPOCH_OF_EACH)],
        finalized_features_epoch=0,
        finalized_features=[FinalizedFeatureKey(_TRANSACTIONS, _EPOCH_OF_EACH, _EPOCH_OF_EACH)],
    )


def of_unknown_version(call: Call) -> ApiVersionsResponse:
    """For a client that is ahead of us: it asks again, in a version that is told here."""
    api = APIS[API_VERSIONS]
    return ApiVersionsResponse(
        error_code=ErrorCode.UNSUPPORTED_VERSION,
        api_keys=[ApiVersion(API_VERSIONS, api.min_version, api.max_version)],
    )
