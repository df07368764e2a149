"""Which segments leave this machine, by tables."""

from __future__ import annotations

from typing import Any

import pytest

from segmentlog.config import TopicConfig
from segmentlog.policy.eviction_policy import EvictionCandidate, evictable_segments

NOW_MS = 10_000


def sealed(*marks: str) -> list[EvictionCandidate]:
    """Segments of 100 bytes, the first 10 s old, each a second younger: here, ``r``emote, not ``u``ploaded."""
    return [EvictionCandidate(at, 100, at * 1000, mark == "r", mark != "u") for at, mark in enumerate(marks)]


@pytest.mark.parametrize(
    ("config", "segments", "leave"),
    [
        # by age: the first segment that stays keeps all later ones
        ({"local_retention_ms": 7500}, "hhhhh", [0, 1, 2]),
        ({"local_retention_ms": 0}, "hhhhh", [0, 1, 2, 3, 4]),
        ({"local_retention_ms": 20_000}, "hhhhh", []),
        ({"local_retention_ms": -1, "retention_ms": -1}, "hhhhh", []),
        # by size: the active segment holds 50 bytes, and remote segments do not count
        ({"local_retention_bytes": 250}, "hhhhh", [0, 1, 2]),
        ({"local_retention_bytes": 250}, "rrhhh", [2]),
        ({"local_retention_bytes": 0}, "hhhhh", [0, 1, 2, 3, 4]),
        ({"local_retention_bytes": -1}, "hhhhh", []),
        # either is enough
        ({"local_retention_ms": 9500, "local_retention_bytes": 350}, "hhhhh", [0, 1]),
        # remote segments are skipped; a segment that is not shipped keeps all later ones
        ({"local_retention_ms": 0}, "rhrhh", [1, 3, 4]),
        ({"local_retention_ms": 0}, "hhuhh", [0, 1]),
        ({"local_retention_ms": 0}, "uhhhh", []),
        # -2: as the retention of all of it
        ({"retention_ms": 8500}, "hhhhh", [0, 1]),
        ({"retention_bytes": 350, "retention_ms": -1}, "hhhhh", [0, 1]),
        ({"retention_ms": -1}, "hhhhh", []),
        ({"retention_ms": 8500, "cleanup_policy": "compact"}, "hhhhh", [0, 1]),
        # off
        ({"local_retention_ms": 0, "remote_storage_enable": False}, "hhhhh", []),
    ],
)
def test_what_leaves(config: dict[str, Any], segments: str, leave: list[int]) -> None:
    """Segments leave by age or by size, the oldest first, as in Kafka."""
    settings = TopicConfig.from_mapping({"remote_storage_enable": True, **config})
    found = evictable_segments(settings, sealed(*segments), 50, NOW_MS)
    assert [segment.base_offset for segment in found] == leave


def test_a_segment_without_bytes_stays() -> None:
    """Its eviction frees nothing, and a hole of size 0 would mark nothing."""
    settings = TopicConfig(remote_storage_enable=True, local_retention_ms=0)
    empty = EvictionCandidate(0, 0, 0, False, True)
    assert [one.base_offset for one in evictable_segments(settings, [empty, *sealed("h", "h")[1:]], 0, NOW_MS)] == [1]
