"""What version 2 answers."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from segmentlog.http.rest import media
from segmentlog.http.rest.endpoints import NOTHING, Endpoint, Gives, Handler
from segmentlog.http.rest.faults import v2_problem
from segmentlog.http.rest.v2 import consumers, produce, topics, words

_ANSWERS: Final = (media.V2, media.JSON, "application/vnd.kafka+json")
_TAKES: Final = (media.V2, media.JSON, *media.V2_EMBEDDED.values(), "application/octet-stream")
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
        method="POST", path=path, handle=produce.produce, summary="Append records, in the format of the content type",
        tag="Topics (v2)", gives=_gives(words.Produced), takes=tuple(produce.BODIES), bodies=produce.BODIES,
        must_say=True, query=words.ProduceQuery, problems=(404, 406, 415, 422, 503, 507), problem_of=v2_problem,
    )  # fmt: skip


_DONE: Final = {204: NOTHING}

ENDPOINTS: Final = (
    _produce("/topics/{topic}"),
    _produce("/topics/{topic}/partitions/{partition}"),
    _consumer(
        "GET", f"{_INSTANCE}/records", consumers.records, "The records that come next",
        {200: Gives(list[words.ConsumedRecord], (*media.V2_EMBEDDED.values(), media.V2))},
        query=words.RecordsQuery,
    ),
    _topic(method="GET", path="/topics", handle=topics.list_topics, summary="Names of topics", gives=_gives(list[str]),
           problems=(406,)),
    _topic(method="GET", path="/topics/{topic}", handle=topics.get_topic, summary="A topic and its configuration",
           gives=_gives(words.TopicInfo), problems=(404, 406)),
    _topic(method="GET", path="/topics/{topic}/partitions", handle=topics.list_partitions, summary="Its partitions",
           gives=_gives(list[words.PartitionInfo]), problems=(404, 406)),
    _topic(method="GET", path="/topics/{topic}/partitions/{partition}", handle=topics.get_partition,
           summary="One partition", gives=_gives(words.PartitionInfo), problems=(404, 406)),
    _topic(method="GET", path="/topics/{topic}/partitions/{partition}/offsets", handle=topics.get_offsets,
           summary="Where a partition begins and ends", gives=_gives(words.Offsets), problems=(404, 406)),
    _topic(method="GET", path="/brokers", handle=topics.list_brokers, summary="The one broker",
           gives=_gives(words.Brokers), problems=(406,)),
    _consumer("POST", "/consumers/{group}", consumers.create, "Make a consumer instance", _gives(words.Instance),
              words.NewInstance, (409, 422, 503), body_optional=True),
    _consumer("DELETE", _INSTANCE, consumers.delete, "Delete a consumer instance", _DONE),
    _consumer("POST", f"{_INSTANCE}/subscription", consumers.subscribe, "Subscribe to topics or to a pattern", _DONE,
              words.Subscription),
    _consumer("GET", f"{_INSTANCE}/subscription", consumers.subscription, "The topics that it subscribes to",
              _gives(words.Subscribed)),
    _consumer("DELETE", f"{_INSTANCE}/subscription", consumers.unsubscribe, "Read nothing any more", _DONE),
    _consumer("POST", f"{_INSTANCE}/assignments", consumers.assign, "Read these partitions", _DONE, words.Partitions),
    _consumer("GET", f"{_INSTANCE}/assignments", consumers.assignments, "The partitions that it reads",
              _gives(words.Partitions)),
    _consumer("POST", f"{_INSTANCE}/offsets", consumers.commit, "Commit offsets, or all that was read",
              _gives(list[words.OneOffset]), words.OffsetsToCommit, body_optional=True, query=words.CommitQuery),
    _consumer("GET", f"{_INSTANCE}/offsets", consumers.committed, "What the group has committed",
              _gives(words.CommittedOffsets), words.Partitions),
    _consumer("POST", f"{_INSTANCE}/positions", consumers.seek, "Go on at offsets, or at times", _DONE, words.Seek,
              (404, 409, 410, 416, 422)),
    _consumer("POST", f"{_INSTANCE}/positions/beginning", consumers.seek_to_beginning, "Go on at the first records",
              _DONE, words.Partitions),
    _consumer("POST", f"{_INSTANCE}/positions/end", consumers.seek_to_end, "Go on behind the last records", _DONE,
              words.Partitions),
)  # fmt: skip
