"""Decide which timestamps a topic accepts: valid ones that are close enough to the clock.

The rules are Kafka's (`message.timestamp.after.max.ms`, `message.timestamp.before.max.ms`). The limits do not apply
to topics whose `message.timestamp.type` is LogAppendTime, or to a record without a timestamp (-1).
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
"""Largest number of refused records that an error lists. A client may send millions of them."""


class RefusedTimestamps(NamedTuple):
    """Records of one list or batch whose timestamps a topic does not accept."""

    indices: tuple[int, ...]
    """Indices of the records, ascending; at most the first `NAMED_MAX`."""
    found_ms: int
    """Timestamp of the first refused record."""
    accepted: str
    """The accepted range, for an error message."""


def accepts_timestamps(
    first_ms: int, last_ms: int, config: TopicConfig, now_ms: int, after_default_ms: int = UNLIMITED_MS
) -> bool:
    """Return whether the topic accepts every timestamp from ``first_ms`` to ``last_ms``, milliseconds since 1970.

    ``after_default_ms`` limits how far timestamps may be after the clock if the topic does not set this limit.

    The result may be false although `refused_timestamps` accepts all records. That happens if a record has no
    timestamp (-1) and the topic limits how far timestamps may be before the clock.
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
    """Return the records that the topic refuses for their timestamps, or None if it accepts all.

    ``stamps`` has an item for each record, at least one. The other arguments are those of `accepts_timestamps`.
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
        return _refused(stamps, late, f"at most {now_ms + after_ms}: the clock plus {limit}")
    early = (stamps < max(now_ms - before_ms, EARLIEST_MS)) & (stamps != NO_TIMESTAMP)
    if early.any():
        limit = f"message.timestamp.before.max.ms = {format_duration_ms(before_ms)}"
        return _refused(stamps, early, f"at least {now_ms - before_ms}: the clock minus {limit}")
    return None


def _after_ms(config: TopicConfig, default_ms: int) -> int:
    limit_ms = config.message_timestamp_after_max_ms
    return default_ms if limit_ms is None else limit_ms


def _refused(stamps: npt.NDArray[np.int64], refused: npt.NDArray[np.bool_], accepted: str) -> RefusedTimestamps:
    rows = np.flatnonzero(refused)
    return RefusedTimestamps(tuple(rows[:NAMED_MAX].tolist()), int(stamps[rows[0]]), accepted)
