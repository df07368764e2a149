"""Expiry of records: by the topic's `record.ttl.ms` or by the header ``expires-at-ms``, whichever is earlier.

A record of a Kafka client may have no timestamp (-1): `record.ttl.ms` does not apply to it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from segmentlog.config import EXPIRES_HEADER
from segmentlog.format.record_batch import RecordBatch
from segmentlog.quantities import NO_TIMESTAMP
from segmentlog.records import Headers

NEVER: Final = 2**63 - 1
_DIGITS_MAX: Final = 18


def expiry_times(batch: RecordBatch, ttl_ms: int | None) -> npt.NDArray[np.int64] | None:
    """Return the time at which each record expires, in milliseconds since 1970, or None if no record expires."""
    ends: npt.NDArray[np.int64] | None = None
    if ttl_ms is not None:
        stamps = batch.timestamps
        ends = np.where(stamps == NO_TIMESTAMP, NEVER, np.minimum(stamps, NEVER - ttl_ms) + np.int64(ttl_ms))
    if batch.has_headers:
        own = [_own_expiry(headers) for headers in batch.headers]
        if min(own, default=NEVER) != NEVER:
            ends = np.array(own, np.int64) if ends is None else np.minimum(ends, np.array(own, np.int64))
    return ends


def is_expired(timestamp: int, headers: Headers, ttl_ms: int | None, now_ms: int) -> bool:
    """Return whether a record has expired at ``now_ms``."""
    return (ttl_ms is not None and timestamp != NO_TIMESTAMP and timestamp <= now_ms - ttl_ms) or _own_expiry(
        headers
    ) <= now_ms


def _own_expiry(headers: Headers) -> int:
    """Return the expiry time in a record's header, or `NEVER` if the record has no such header or its value is not a
    number.
    """
    for name, value in headers:
        if name == EXPIRES_HEADER and value is not None and value.isdigit() and len(value) <= _DIGITS_MAX:
            return int(value)
    return NEVER
