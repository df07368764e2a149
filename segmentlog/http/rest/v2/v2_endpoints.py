"""What version 2 answers."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from segmentlog.http.rest import media_types
from segmentlog.http.rest.endpoint_table import NOTHING, Endpoint, Gives, Handler
from segmentlog.http.rest.rest_error_codes import v2_problem
from segmentlog.http.rest.v2 import v2_consumers, v2_models, v2_produce, v2_topics

_ANSWERS: Final = (media_types.V2, media_types.JSON, "application/vnd.kafka+json")
_TAKES: Final = (media_types.V2, media_types.JSON, *media_types.V2_EMBEDDED.values(), "application/octet-stream")
_INSTANCE: Final = "/consumers/{group}/instances/{instance}"

_topic = partial(Endpoint, tag="Topics (v2)", problem_of=v2_problem)


def _gives(kind: Any) -> dict[int, Gives]:
    return {200: Gives(kind, _ANSWERS)}


def _consumer(
    method: str, path: str, handle: Handler, summary: str, gives: dict[int, Gives], body: Any = None,
    problems: tuple[int, ...] = (404, 409, 422), **more: Any,
) -> Endpoint:  # fmt: skip
    takes = () if body is None else _TAKES
    return Endpoint(
        method=method, path=path, handle=handle, summary=summary, gives=gives, body=body, takes=takes,
        problems=(*problems, 406, 415), tag="Consumers (v2)", problem_of=v2_problem, **more,
    )  # fmt: skip


def _produce(path: str) -> Endpoint:
    return Endpoint(
        method="POST", path=path, handle=v2_produce.produce,
        summary="Append records, in the format of the content type",
        tag="Topics (v2)", gives=_gives(v2_models.Produced), takes=tuple(v2_produce.BODIES), bodies=v2_produce.BODIES,
        must_say=True, query=v2_models.ProduceQuery, problems=(404, 406, 415, 422, 503, 507), problem_of=v2_problem,
    )  # fmt: skip


_DONE: Final = {204: NOTHING}

ENDPOINTS: Final = (
    _produce("/topics/{topic}"),
    _produce("/topics/{topic}/partitions/{partition}"),
    _consumer(
        "GET", f"{_INSTANCE}/records", v2_consumers.records, "The records that come next",
        {200: Gives(list[v2_models.ConsumedRecord], (*media_types.V2_EMBEDDED.values(), media_types.V2))},
        query=v2_models.RecordsQuery,
    ),
    _topic(method="GET", path="/topics", handle=v2_topics.list_topics, summary="Names of topics",
           gives=_gives(list[str]),
           problems=(406,)),
    _topic(method="GET", path="/topics/{topic}", handle=v2_topics.get_topic, summary="A topic and its configuration",
           gives=_gives(v2_models.TopicInfo), problems=(404, 406)),
    _topic(method="GET", path="/topics/{topic}/partitions", handle=v2_topics.list_partitions, summary="Its partitions",
           gives=_gives(list[v2_models.PartitionInfo]), problems=(404, 406)),
    _topic(method="GET", path="/topics/{topic}/partitions/{partition}", handle=v2_topics.get_partition,
           summary="One partition", gives=_gives(v2_models.PartitionInfo), problems=(404, 406)),
    _topic(method="GET", path="/topics/{topic}/partitions/{partition}/offsets", handle=v2_topics.get_offsets,
           summary="Where a partition begins and ends", gives=_gives(v2_models.Offsets), problems=(404, 406)),
    _topic(method="GET", path="/brokers", handle=v2_topics.list_brokers, summary="The one broker",
           gives=_gives(v2_models.Brokers), problems=(406,)),
    _consumer("POST", "/consumers/{group}", v2_consumers.create, "Make a consumer instance", _gives(v2_models.Instance),
              v2_models.NewInstance, (409, 422, 503), body_optional=True),
    _consumer("DELETE", _INSTANCE, v2_consumers.delete, "Delete a consumer instance", _DONE),
    _consumer("POST", f"{_INSTANCE}/subscription", v2_consumers.subscribe, "Subscribe to topics or to a pattern", _DONE,
              v2_models.Subscription),
    _consumer("GET", f"{_INSTANCE}/subscription", v2_consumers.subscription, "The topics that it subscribes to",
              _gives(v2_models.Subscribed)),
    _consumer("DELETE", f"{_INSTANCE}/subscription", v2_consumers.unsubscribe, "Read nothing any more", _DONE),
    _consumer("POST", f"{_INSTANCE}/assignments", v2_consumers.assign, "Read these partitions", _DONE,
              v2_models.Partitions),
    _consumer("GET", f"{_INSTANCE}/assignments", v2_consumers.assignments, "The partitions that it reads",
              _gives(v2_models.Partitions)),
    _consumer("POST", f"{_INSTANCE}/offsets", v2_consumers.commit, "Commit offsets, or all that was read",
              _gives(list[v2_models.OneOffset]), v2_models.OffsetsToCommit, body_optional=True,
              query=v2_models.CommitQuery),
    _consumer("GET", f"{_INSTANCE}/offsets", v2_consumers.committed, "What the group has committed",
              _gives(v2_models.CommittedOffsets), v2_models.Partitions),
    _consumer("POST", f"{_INSTANCE}/positions", v2_consumers.seek, "Go on at offsets, or at times", _DONE,
              v2_models.Seek,
              (404, 409, 410, 416, 422)),
    _consumer("POST", f"{_INSTANCE}/positions/beginning", v2_consumers.seek_to_beginning, "Go on at the first records",
              _DONE, v2_models.Partitions),
    _consumer("POST", f"{_INSTANCE}/positions/end", v2_consumers.seek_to_end, "Go on behind the last records", _DONE,
              v2_models.Partitions),
)  # fmt: skip
