"""Where a reader of a whole topic is: an offset for each partition, and that as the id of an event.

    1f0c2a9e:120,45,9

are the first characters of the topic's id, so that one that was made anew under the name is not taken for it, and the
offsets to go on at, from partition 0 on. It comes back in a header, which has a bound: so have the partitions of a
stream. Long ids are not at every event, or they would be most of what is sent, but at the last of each piece; whose
stream breaks off within one gets what lies behind the id before it again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest.large_batch_slot import Alone
from segmentlog.http.rest.record_json import ValuesAs, events, parts

if TYPE_CHECKING:
    from segmentlog.log.partition import Isolation, Partition
    from segmentlog.topics.topic_registry import Topic

_FORM: Final = re.compile(r"([0-9a-f]{8}):([0-9]{1,19}(?:,[0-9]{1,19})*)")
PARTITIONS_MAX: Final = 2500
"""Of a stream: so many offsets of 19 digits, with commas, leave a quarter of the 64 KiB of a request's head."""
_SHORT_BYTES: Final = 512
"""Ids up to this size are at every event."""
_READ_BYTES: Final = 256 << 10
"""Stored bytes of one partition before it is the next one's turn."""


class View(NamedTuple):
    """What of a topic is shown, and how."""

    values_as: ValuesAs = "text"
    isolation: Isolation = "read_uncommitted"
    durable_only: bool = False


class Piece(NamedTuple):
    """Events, how many, and where a reader is behind them."""

    data: bytes
    records: int
    after: tuple[int, ...]
    partition: int = 0
    """Number of the partition that the events are from."""


def mark_of(topic: Topic) -> str:
    """What ids of events of this topic begin with."""
    return topic.id.replace("-", "")[:8]


def check_partitions(topic: Topic) -> None:
    """Raises `HttpProblem` for a topic with more partitions than an id can hold."""
    count = topic.partition_count
    if count > PARTITIONS_MAX:
        raise HttpProblem(
            HTTPStatus.BAD_REQUEST, f"topic {topic.name!r} has {count:,} partitions, and a stream at most"
            f" {PARTITIONS_MAX:,}: name partitions, and read each by /topics/{topic.name}/partitions/P/records",
        )  # fmt: skip


def encode_id(mark: str, offsets: Sequence[int]) -> str:
    """The id of an event behind which a reader is there."""
    return f"{mark}:{','.join(map(str, offsets))}"


def decode_id(topic: Topic, text: str) -> list[int]:
    """The offsets of an id. Raises `HttpProblem`: 400 for what is none, 410 for one of another topic of this name."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise HttpProblem(HTTPStatus.BAD_REQUEST, f"{text[:100]!r} is no id of an event of this stream")
    mark, offsets = match.group(1), [int(offset) for offset in match.group(2).split(",")]
    if mark != mark_of(topic):
        raise HttpProblem(
            HTTPStatus.GONE, f"the topic {topic.name!r} that the id {text!r} is of was deleted; this is another one"
        )
    if len(offsets) > topic.partition_count or max(offsets) >= 1 << 63:
        raise HttpProblem(HTTPStatus.BAD_REQUEST, f"{text[:100]!r} is no id of an event of this stream")
    return offsets


def read(
    logs: Sequence[Partition],
    mark: str,
    positions: Sequence[int],
    view: View,
    ends: Sequence[int] | None = None,
    first: int = 0,
) -> Iterator[Piece]:
    """What lies behind the positions, up to ``ends`` or to where the logs end now: some of each partition.

    Every piece goes on where the one before it ends. Partition ``first`` comes first, and partition 0 after the last.
    A caller that stops before the end must begin the next time with the partition after that of its last piece: else
    a backlog in one partition keeps those after it from being read. Raises what `Partition.read` does.
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
        if id_bytes > _SHORT_BYTES:
            id_bytes = 0
        with Alone() as alone:
            for batch in log.read(now[number], _READ_BYTES, isolation=view.isolation, durable_only=view.durable_only):
                if batch.base_offset >= end:
                    break
                left_bytes -= batch.size_bytes
                alone.see(batch)
                for part in parts(batch, end, id_bytes):
                    now[number] = part.next_offset
                    data = events(part, view.values_as, begin, rest, at_each=id_bytes > 0)
                    yield Piece(data, len(part), tuple(now), number)
                now[number] = min(batch.next_offset, end)
        if left_bytes > 0 and now[number] < end:
            # Nothing more up to there: a gap, or what is not shown, the ends of transactions and what was aborted.
            now[number] = end
            yield Piece(b"", 0, tuple(now), number)


def ends_of(logs: Sequence[Partition], view: View) -> list[int]:
    """Where a reader ends now."""
    return [log.end_offset(isolation=view.isolation, durable_only=view.durable_only) for log in logs]
