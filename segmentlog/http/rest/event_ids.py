"""Positions of a reader in all partitions of a topic, encoded as the id of a server-sent event.

    1f0c2a9e:120,45,9

The first part is the beginning of the topic's id: a topic created again under the same name has another id. The second
part is the next offset of each partition, from partition 0. Clients return the id in a header, whose size is limited,
so a stream has a limited number of partitions. Short ids are sent with every event. Long ids would be most of the data,
so only the last event of each chunk has an id. A client whose stream breaks within a chunk receives that chunk again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest.large_batch_slot import LargeBatchSlot
from segmentlog.http.rest.record_json import ValueEncoding, events, parts

if TYPE_CHECKING:
    from segmentlog.log.partition import Isolation, Partition
    from segmentlog.topics.topic_registry import Topic

_FORM: Final = re.compile(r"([0-9a-f]{8}):([0-9]{1,19}(?:,[0-9]{1,19})*)")
PARTITIONS_MAX: Final = 2500
"""Maximum partitions of a stream: that many 19-digit offsets leave a quarter of the 64 KiB for a request's headers."""
_EVERY_ID_BYTES: Final = 512
"""Ids up to this size are sent with every event."""
_READ_BYTES: Final = 256 << 10
"""Stored bytes to read from one partition before the next partition."""


class StreamView(NamedTuple):
    """Which records of a topic a stream sends, and how it encodes them."""

    value_encoding: ValueEncoding = "text"
    isolation: Isolation = "read_uncommitted"
    durable_only: bool = False


class EventChunk(NamedTuple):
    """Encoded events, their number, and the positions after them."""

    data: bytes
    records: int
    after: tuple[int, ...]
    partition: int = 0
    """Partition that the events are from."""


def topic_mark(topic: Topic) -> str:
    """Return the first part of event ids of this topic."""
    return topic.id.replace("-", "")[:8]


def check_partitions(topic: Topic) -> None:
    """Raise `HttpProblem` for a topic with more partitions than an event id can hold."""
    count = topic.partition_count
    if count > PARTITIONS_MAX:
        raise HttpProblem(
            HTTPStatus.BAD_REQUEST, f"topic {topic.name!r} has {count:,} partitions, but a stream may have at most"
            f" {PARTITIONS_MAX:,}; read each partition with /topics/{topic.name}/partitions/P/records",
        )  # fmt: skip


def encode_id(mark: str, offsets: Sequence[int]) -> str:
    """Return the event id for these positions."""
    return f"{mark}:{','.join(map(str, offsets))}"


def decode_id(topic: Topic, text: str) -> list[int]:
    """Return the positions in an event id. Raises `HttpProblem`: 400 if it is malformed, 410 if its topic was
    deleted."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise HttpProblem(HTTPStatus.BAD_REQUEST, f"{text[:100]!r} is not an event id of this stream")
    mark, offsets = match.group(1), [int(offset) for offset in match.group(2).split(",")]
    if mark != topic_mark(topic):
        raise HttpProblem(
            HTTPStatus.GONE,
            f"the event id {text!r} belongs to a deleted topic {topic.name!r}; start without Last-Event-ID",
        )
    if len(offsets) > topic.partition_count or max(offsets) >= 1 << 63:
        raise HttpProblem(HTTPStatus.BAD_REQUEST, f"{text[:100]!r} is not an event id of this stream")
    return offsets


def read_events(
    logs: Sequence[Partition],
    mark: str,
    positions: Sequence[int],
    view: StreamView,
    ends: Sequence[int] | None = None,
    first: int = 0,
) -> Iterator[EventChunk]:
    """Yield chunks of events after the positions, up to ``ends`` or the current ends of the logs.

    Read some events of each partition in turn, from partition ``first`` on, with partition 0 after the last partition.
    The positions of a chunk include all chunks before it. A caller that stops early must start the next call with the
    partition after that of its last chunk: otherwise a backlog in one partition blocks the partitions after it. Raises
    like `Partition.read`.
    """
    now = list(positions)
    for number in (*range(first, len(logs)), *range(min(first, len(logs)))):
        log = logs[number]
        end = log.end_offset(isolation=view.isolation, durable_only=view.durable_only)
        if ends is not None:
            end = min(end, ends[number])
        if now[number] >= end:
            continue
        left_bytes = _READ_BYTES
        begin = (encode_id(mark, now[:number]) + ("," if number else "")).encode()
        rest = "".join(f",{offset}" for offset in now[number + 1 :]).encode()
        id_bytes = len(begin) + len(rest) + len(str(end))
        if id_bytes > _EVERY_ID_BYTES:
            id_bytes = 0
        with LargeBatchSlot() as slot:
            for batch in log.read(now[number], _READ_BYTES, isolation=view.isolation, durable_only=view.durable_only):
                if batch.base_offset >= end:
                    break
                left_bytes -= batch.size_bytes
                slot.acquire_for(batch)
                for part in parts(batch, end, id_bytes):
                    now[number] = part.next_offset
                    data = events(part, view.value_encoding, begin, rest, at_each=id_bytes > 0)
                    yield EventChunk(data, len(part), tuple(now), number)
                now[number] = min(batch.next_offset, end)
        if left_bytes > 0 and now[number] < end:
            # Up to `end` there are only gaps, transaction markers or aborted records.
            now[number] = end
            yield EventChunk(b"", 0, tuple(now), number)


def ends_of(logs: Sequence[Partition], view: StreamView) -> list[int]:
    """Return the current end offsets that this view can read."""
    return [log.end_offset(isolation=view.isolation, durable_only=view.durable_only) for log in logs]
