"""What is ours."""

from __future__ import annotations

from typing import Final

from segmentlog.http.rest import media
from segmentlog.http.rest.endpoints import Endpoint, Gives
from segmentlog.http.rest.own import lines, records, stream, words

_TAG: Final = "Records"

ENDPOINTS: Final = (
    Endpoint(
        method="POST", path="/topics/{topic}/records", handle=lines.append, summary="Append lines", tag=_TAG,
        gives={200: Gives(words.Appended)}, takes=(media.NDJSON, media.TEXT, "application/octet-stream"),
        query=words.AppendQuery, problems=(404, 406, 409, 415, 422, 507),
    ),
    Endpoint(
        method="GET", path="/topics/{topic}/partitions/{partition}/records", handle=records.read,
        summary="Records from an offset on: a page, or lines", tag=_TAG,
        gives={200: Gives(words.RecordPage, also=(media.NDJSON,))}, query=words.ReadQuery,
        problems=(404, 406, 410, 416),
    ),
    Endpoint(
        method="GET", path="/topics/{topic}/stream", handle=stream.stream, summary="Records as server-sent events",
        tag=_TAG, gives={200: Gives(media=(media.EVENTS,), what="Events, for as long as the client listens.")},
        query=words.StreamQuery, problems=(404, 406, 410, 416),
    ),
)  # fmt: skip
