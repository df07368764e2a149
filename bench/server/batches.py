"""Batches as a Kafka client sends them, uncompressed, of the records that the other benches have: about 100 bytes."""

from __future__ import annotations

import time
from functools import cache

import numpy as np

from bench.workload import json_records
from segmentlog.format.columns import Values
from segmentlog.format.wire_encode import encode_wire_batch

CLIENT_RECORDS = 145
"""What fills 16 KiB, the size of a batch at which Kafka's producer sends it."""


@cache
def values(count: int) -> Values:
    """Return the values of so many records."""
    return json_records(1, count).values[0]


def batch(count: int) -> bytes:
    """One batch, of now."""
    now_ms = time.time_ns() // 1_000_000
    return encode_wire_batch(None, values(count), None, np.full(count, now_ms), base_offset=0, epoch=0)
