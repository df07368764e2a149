"""Table of segmentlog's own REST endpoints."""

from __future__ import annotations

from typing import Final

from segmentlog.http.rest import media_types
from segmentlog.http.rest.endpoint_table import Endpoint, ResponseSpec
from segmentlog.http.rest.native import event_stream, line_endpoints, native_models, record_endpoints

_TAG: Final = "Records"

ENDPOINTS: Final = (
    Endpoint(
        method="POST", path="/topics/{topic}/records", handle=line_endpoints.append, summary="Append lines", tag=_TAG,
        responses={200: ResponseSpec(native_models.AppendResult)}, accepts=(media_types.NDJSON, media_types.TEXT,
        "application/octet-stream"),
        query=native_models.AppendQuery, problems=(404, 406, 409, 415, 422, 507),
    ),
    Endpoint(
        method="GET", path="/topics/{topic}/partitions/{partition}/records", handle=record_endpoints.read,
        summary="Records from an offset on: a page, or lines", tag=_TAG,
        responses={200: ResponseSpec(native_models.RecordPage, other_media=(media_types.NDJSON,))},
        query=native_models.ReadQuery,
        problems=(404, 406, 410, 416),
    ),
    Endpoint(
        method="GET", path="/topics/{topic}/stream", handle=event_stream.stream,
        summary="Records as server-sent events", tag=_TAG,
        responses={200: ResponseSpec(media=(media_types.EVENTS,), description="Events, until the client disconnects.")},
        query=native_models.StreamQuery, problems=(404, 406, 410, 416),
    ),
)  # fmt: skip
