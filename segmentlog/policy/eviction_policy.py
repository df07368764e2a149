"""Which segments leave this machine for the object store alone: sizes and times in, segments out.

    local.retention.ms     the segment's newest record is so old
    local.retention.bytes  without the segment there still lie so many bytes here

Segments leave from the oldest on, and the first that stays keeps all behind it, as in Kafka. One that lies there alone
already is passed over, and so none of its bytes count. One that has not been shipped as it is now stays, whatever its
age, and all behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from segmentlog.config import TopicConfig
from segmentlog.quantities import UNLIMITED


class Sealed(NamedTuple):
    """A sealed segment as tiering looks at it.

    ``newest_ms`` as `retention.Candidate`; ``is_shipped``: the object store has it, byte for byte.
    """

    base_offset: int
    size_bytes: int
    newest_ms: int
    is_remote: bool
    is_shipped: bool


def is_tiered(config: TopicConfig) -> bool:
    """Whether any segment may ever leave."""
    return config.remote_storage_enable and not config.kept_here_ms == config.kept_here_bytes == UNLIMITED


def evictable_segments(
    config: TopicConfig, sealed: Sequence[Sealed], active_bytes: int, now_ms: int
) -> Iterator[Sealed]:
    """The segments that leave, oldest first; ``active_bytes`` is the size of the one that takes appends."""
    if not is_tiered(config):
        return
    left_bytes = active_bytes + sum(segment.size_bytes for segment in sealed if not segment.is_remote)
    for segment in sealed:
        if segment.is_remote or not segment.size_bytes:
            continue
        left_bytes -= segment.size_bytes
        is_old = config.kept_here_ms != UNLIMITED and now_ms - segment.newest_ms > config.kept_here_ms
        is_much = config.kept_here_bytes != UNLIMITED and left_bytes >= config.kept_here_bytes
        if not segment.is_shipped or not (is_old or is_much):
            return
        yield segment
