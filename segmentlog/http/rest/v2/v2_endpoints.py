"""Table of the REST v2 endpoints."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from segmentlog.http.rest import media_types
from segmentlog.http.rest.endpoint_table import NO_CONTENT, Endpoint, Handler, ResponseSpec
from segmentlog.http.rest.rest_error_codes import v2_problem
from segmentlog.http.rest.v2 import v2_consumers, v2_models, v2_produce, v2_topics

_OFFERED: Final = (media_types.V2, media_types.JSON, "application/vnd.kafka+json")
_ACCEPTS: Final = (media_types.V2, media_types.JSON, *media_types.V2_EMBEDDED.values(), "application/octet-stream")
_INSTANCE: Final = "/consumers/{group}/instances/{instance}"

_topic = partial(Endpoint, tag="Topics (v2)", problem_of=v2_problem)


def _ok_response(kind: Any) -> dict[int, ResponseSpec]:
    return {200: ResponseSpec(kind, _OFFERED)}


def _consumer(
    method: str, path: str, handle: Handler, summary: str, responses: dict[int, ResponseSpec], body: Any = None,
    problems: tuple[int, ...] = (404, 409, 422), **more: Any,
) -> Endpoint:  # fmt: skip
    accepts = () if body is None else _ACCEPTS
    return Endpoint(
        method=method, path=path, handle=handle, summary=summary, responses=responses, body=body, accepts=accepts,
        problems=(*problems, 406, 415), tag="Consumers (v2)", problem_of=v2_problem, **more,
    )  # fmt: skip


def _produce(path: str) -> Endpoint:
    return Endpoint(
        method="POST", path=path, handle=v2_produce.produce,
        summary="Append records, in the format of the content type",
        tag="Topics (v2)", responses=_ok_response(v2_models.ProducedOffsets),
        accepts=tuple(v2_produce.BODIES), bodies=v2_produce.BODIES,
        requires_content_type=True, query=v2_models.ProduceQuery, problems=(404, 406, 415, 422, 503, 507),
        problem_of=v2_problem,
    )  # fmt: skip


_DONE: Final = {204: NO_CONTENT}

ENDPOINTS: Final = (
    _produce("/topics/{topic}"),
    _produce("/topics/{topic}/partitions/{partition}"),
    _consumer(
        "GET", f"{_INSTANCE}/records", v2_consumers.records, "Read the next records",
        {200: ResponseSpec(list[v2_models.ConsumedRecord], (*media_types.V2_EMBEDDED.values(), media_types.V2))},
        query=v2_models.RecordsQuery,
    ),
    _topic(method="GET", path="/topics", handle=v2_topics.list_topics, summary="List topic names",
           responses=_ok_response(list[str]),
           problems=(406,)),
    _topic(method="GET", path="/topics/{topic}", handle=v2_topics.get_topic,
           summary="Describe a topic and its configuration",
           responses=_ok_response(v2_models.TopicInfo), problems=(404, 406)),
    _topic(method="GET", path="/topics/{topic}/partitions", handle=v2_topics.list_partitions,
           summary="List the partitions of a topic",
           responses=_ok_response(list[v2_models.PartitionInfo]), problems=(404, 406)),
    _topic(method="GET", path="/topics/{topic}/partitions/{partition}", handle=v2_topics.get_partition,
           summary="Describe a partition", responses=_ok_response(v2_models.PartitionInfo), problems=(404, 406)),
    _topic(method="GET", path="/topics/{topic}/partitions/{partition}/offsets", handle=v2_topics.get_offsets,
           summary="Return the start and end offset of a partition", responses=_ok_response(v2_models.Offsets),
                                                                                            problems=(404, 406)),
    _topic(method="GET", path="/brokers", handle=v2_topics.list_brokers, summary="List the single broker",
           responses=_ok_response(v2_models.Brokers), problems=(406,)),
    _consumer("POST", "/consumers/{group}", v2_consumers.create, "Create a consumer instance",
              _ok_response(v2_models.CreatedInstance),
              v2_models.NewInstance, (409, 422, 503), body_optional=True),
    _consumer("DELETE", _INSTANCE, v2_consumers.delete, "Delete a consumer instance", _DONE),
    _consumer("POST", f"{_INSTANCE}/subscription", v2_consumers.subscribe, "Subscribe to topics or to a pattern", _DONE,
              v2_models.Subscription),
    _consumer("GET", f"{_INSTANCE}/subscription", v2_consumers.subscription, "Return the subscribed topics",
              _ok_response(v2_models.Subscribed)),
    _consumer("DELETE", f"{_INSTANCE}/subscription", v2_consumers.unsubscribe, "Drop the subscription or assignment",
              _DONE),
    _consumer("POST", f"{_INSTANCE}/assignments", v2_consumers.assign, "Assign partitions", _DONE,
              v2_models.TopicPartitions),
    _consumer("GET", f"{_INSTANCE}/assignments", v2_consumers.assignments, "Return the assigned partitions",
              _ok_response(v2_models.TopicPartitions)),
    _consumer("POST", f"{_INSTANCE}/offsets", v2_consumers.commit, "Commit offsets, or all returned records",
              _ok_response(list[v2_models.PartitionOffset]), v2_models.OffsetsToCommit, body_optional=True,
              query=v2_models.CommitQuery),
    _consumer("GET", f"{_INSTANCE}/offsets", v2_consumers.committed, "Return committed offsets",
              _ok_response(v2_models.GroupOffsets), v2_models.TopicPartitions),
    _consumer("POST", f"{_INSTANCE}/positions", v2_consumers.seek, "Seek to offsets or times", _DONE,
              v2_models.Seek,
              (404, 409, 410, 416, 422)),
    _consumer("POST", f"{_INSTANCE}/positions/beginning", v2_consumers.seek_to_beginning, "Seek to the first records",
              _DONE, v2_models.TopicPartitions),
    _consumer("POST", f"{_INSTANCE}/positions/end", v2_consumers.seek_to_end, "Seek to the end", _DONE,
              v2_models.TopicPartitions),
)  # fmt: skip
