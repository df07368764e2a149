"""When a segment is sealed: each limit alone, to the byte, the record and the millisecond."""

from __future__ import annotations

import pytest

from segmentlog.config import TopicConfig
from segmentlog.format.index_file import MAX_RELATIVE
from segmentlog.policy.roll import should_roll
from segmentlog.quantities import UNLIMITED_MS

# Nothing here is at a limit.
QUIET = {"size_bytes": 500, "offset_span": 5, "age_ms": 10, "batch_bytes": 100, "batch_records": 1}
SMALL = {"segment_bytes": 1000, "segment_ms": 60_000}

ROWS = [
    ("below every limit", {}, {}, False),
    ("fills the segment to the byte", {}, {"batch_bytes": 500}, False),
    ("one byte too many", {}, {"batch_bytes": 501}, True),
    ("one batch larger than a segment", {}, {"batch_bytes": 5000}, True),
    ("fills the segment to the record", {"segment_records": 6}, {}, False),
    ("one record too many", {"segment_records": 6}, {"batch_records": 2}, True),
    ("full already", {"segment_records": 5}, {}, True),
    ("no limit of records", {"segment_records": None}, {"offset_span": 2**31, "batch_records": 2**16}, False),
    ("one millisecond too young", {}, {"age_ms": 59_999}, False),
    ("old enough", {}, {"age_ms": 60_000}, True),
    ("of no age that counts", {"segment_ms": UNLIMITED_MS}, {"age_ms": 10**12}, False),
    ("a clock that went back", {}, {"age_ms": -5}, False),
    ("the last relative offset", {}, {"offset_span": MAX_RELATIVE - 1}, False),
    ("beyond relative offsets", {}, {"offset_span": MAX_RELATIVE}, True),
    ("empty, and the batch too large", {}, {"size_bytes": 0, "batch_bytes": 5000}, False),
    ("empty, and too many records", {"segment_records": 1}, {"size_bytes": 0, "batch_records": 9}, False),
    ("empty, and old", {}, {"size_bytes": 0, "age_ms": 10**9}, False),
]  # fmt: skip


@pytest.mark.parametrize(("config", "state", "rolls"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_every_limit(config, state, rolls):
    """A batch begins a new segment exactly when it would break a limit of the old one; an empty one takes any batch."""
    assert should_roll(TopicConfig(**(SMALL | config)), **(QUIET | state)) is rolls
