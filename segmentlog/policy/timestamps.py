"""Which timestamps a topic accepts: those that every reader can hold, and that are near enough to the clock.

Kafka's rule (`message.timestamp.after.max.ms`, `message.timestamp.before.max.ms`). Topics whose
`message.timestamp.type` is LogAppendTime accept any distance, and a record without a timestamp (-1) has none.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from segmentlog.config import TopicConfig
from segmentlog.quantities import (
    EARLIEST_MS,
    LATEST_MS,
    NO_TIMESTAMP,
    TIMESTAMPS_ACCEPTED,
    UNLIMITED_MS,
    format_duration_ms,
)

NAMED_MAX: Final = 10_000
"""Refused records that an error lists. A client may send millions of them."""


class RefusedTimestamps(NamedTuple):
    """Records of one list or batch whose timestamps a topic does not accept."""

    indices: tuple[int, ...]
    """Positions of the records, ascending, the first `NAMED_MAX` of them."""
    found_ms: int
    """Timestamp of the first of them."""
    accepted: str
    """What the topic accepts, for a message."""


def accepts_timestamps(
    first_ms: int, last_ms: int, config: TopicConfig, now_ms: int, after_default_ms: int = UNLIMITED_MS
) -> bool:
    """Return whether the topic accepts every timestamp from ``first_ms`` to ``last_ms``, milliseconds since 1970.

    ``after_default_ms`` is the limit ahead of the clock in a topic that does not set one. False where only
    `refused_timestamps` can tell: of -1, a record without a timestamp, in a topic with a limit behind the clock.
    """
    if first_ms < EARLIEST_MS or last_ms > LATEST_MS:
        return False
    if config.message_timestamp_type == "LogAppendTime":
        return True
    return first_ms >= now_ms - config.message_timestamp_before_max_ms and last_ms <= now_ms + _after_ms(
        config, after_default_ms
    )


def refused_timestamps(
    stamps: npt.NDArray[np.int64], config: TopicConfig, now_ms: int, after_default_ms: int = UNLIMITED_MS
) -> RefusedTimestamps | None:
    """Return the records that the topic refuses for their timestamps, None where it accepts all.

    ``stamps`` has one item a record, at least one; the other arguments are those of `accepts_timestamps`.
    """
    if accepts_timestamps(int(stamps.min()), int(stamps.max()), config, now_ms, after_default_ms):
        return None
    beyond = (stamps < EARLIEST_MS) | (stamps > LATEST_MS)
    if beyond.any():
        return _refused(stamps, beyond, TIMESTAMPS_ACCEPTED)
    after_ms, before_ms = _after_ms(config, after_default_ms), config.message_timestamp_before_max_ms
    late = stamps > min(now_ms + after_ms, LATEST_MS)
    if late.any():
        limit = f"message.timestamp.after.max.ms = {format_duration_ms(after_ms)}"
        return _refused(stamps, late, f"at most {now_ms + after_ms}: the clock and {limit}")
    early = (stamps < max(now_ms - before_ms, EARLIEST_MS)) & (stamps != NO_TIMESTAMP)
    if early.any():
        limit = f"message.timestamp.before.max.ms = {format_duration_ms(before_ms)}"
        return _refused(stamps, early, f"at least {now_ms - before_ms}: the clock less {limit}")
    return None


def _after_ms(config: TopicConfig, default_ms: int) -> int:
    limit_ms = config.message_timestamp_after_max_ms
    return default_ms if limit_ms is None else limit_ms


def _refused(stamps: npt.NDArray[np.int64], refused: npt.NDArray[np.bool_], accepted: str) -> RefusedTimestamps:
    rows = np.flatnonzero(refused)
    return RefusedTimestamps(tuple(rows[:NAMED_MAX].tolist()), int(stamps[rows[0]]), accepted)
