"""Geometry of the console's charts. The templates render it as SVG: the content security policy allows no inline
style."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from segmentlog.storage import fork_safety

if TYPE_CHECKING:
    from segmentlog.records import SegmentInfo

# ------------------------------------------------------------ segments as a strip

STRIP_WIDTH: Final = 1000.0
_BLOCKS_MAX: Final = 80
_NARROWEST: Final = 5.0


class SegmentBlock(NamedTuple):
    """One segment in a strip, or several adjacent segments of the same state."""

    state: str
    """"sealed", "active", "compacted" or "remote"."""
    base_offset: int
    end_offset: int
    size_bytes: int
    segment_count: int
    x: float = 0.0
    width: float = 0.0


def segment_state(segment: SegmentInfo, cleaned_offset: int) -> str:
    """Return the state of a segment as the console shows it."""
    if segment.active:
        return "active"
    if segment.remote:
        return "remote"
    return "compacted" if segment.end_offset <= cleaned_offset else "sealed"


def segment_strip(segments: Sequence[SegmentInfo], cleaned_offset: int) -> list[SegmentBlock]:
    """Return one block for each segment, with a width in proportion to its size but wide enough to be seen.

    Adjacent segments of one state are merged while there are more than 80 blocks.
    """
    blocks = [
        SegmentBlock(segment_state(one, cleaned_offset), one.base_offset, one.end_offset, one.size_bytes, 1)
        for one in segments
    ]
    while len(blocks) > _BLOCKS_MAX:
        fewer = _merge_pairs(blocks)
        if len(fewer) == len(blocks):
            break
        blocks = fewer
    spare = STRIP_WIDTH - _NARROWEST * len(blocks)
    total = sum(block.size_bytes for block in blocks) or 1
    placed, x = [], 0.0
    for block in blocks:
        width = _NARROWEST + max(spare, 0.0) * block.size_bytes / total
        placed.append(block._replace(x=round(x, 2), width=round(width, 2)))
        x += width
    return placed


def _merge_pairs(blocks: list[SegmentBlock]) -> list[SegmentBlock]:
    """Merge every two adjacent blocks of the same state."""
    paired: list[SegmentBlock] = []
    at = 0
    while at < len(blocks):
        one = blocks[at]
        if at + 1 < len(blocks) and blocks[at + 1].state == one.state:
            other = blocks[at + 1]
            one = one._replace(
                end_offset=other.end_offset,
                size_bytes=one.size_bytes + other.size_bytes,
                segment_count=one.segment_count + other.segment_count,
            )
            at += 1
        paired.append(one)
        at += 1
    return paired


# ------------------------------------------------------------ records/s as a sparkline

SPARK_WIDTH: Final = 96
SPARK_HEIGHT: Final = 20
_SPARK_S: Final = 300.0
"""Older samples are not shown."""


class RateSample(NamedTuple):
    """Records per second at one time."""

    at_s: float
    """Monotonic time in seconds."""
    rate: float


class Sparkline(NamedTuple):
    """Points of a small chart without axes, in a box of `SPARK_WIDTH` by `SPARK_HEIGHT`."""

    points: str
    area: str
    """These points as a polygon, closed along the bottom of the box."""
    max_rate: float
    duration_s: float
    width: int = SPARK_WIDTH
    height: int = SPARK_HEIGHT


def sparkline(samples: Sequence[RateSample]) -> Sparkline | None:
    """Return the chart of the last five minutes; None if there are fewer than two samples in that time."""
    shown = [sample for sample in samples if sample.at_s >= samples[-1].at_s - _SPARK_S]
    if len(shown) < 2:
        return None
    begin_s, duration_s = shown[0].at_s, max(shown[-1].at_s - shown[0].at_s, 0.001)
    max_rate = max(sample.rate for sample in shown)
    points = " ".join(
        f"{(at_s - begin_s) / duration_s * SPARK_WIDTH:.1f},{SPARK_HEIGHT - rate / (max_rate or 1) * SPARK_HEIGHT:.1f}"
        for at_s, rate in shown
    )
    area = f"0,{SPARK_HEIGHT} {points} {SPARK_WIDTH},{SPARK_HEIGHT}"
    return Sparkline(points, area, max_rate, duration_s)


# ------------------------------------------------------------ lag over time

PLOT_WIDTH: Final = 720
PLOT_HEIGHT: Final = 140
_SAMPLES_MAX: Final = 720
_INTERVAL_S: Final = 2.0
_GROUPS_MAX: Final = 2000


class Sample(NamedTuple):
    """Lag of a group at one time."""

    at_ms: int
    lag: int


class Plot(NamedTuple):
    """Points of a line chart, in a box of `PLOT_WIDTH` by `PLOT_HEIGHT`."""

    points: str
    max_lag: int
    begin_ms: int
    end_ms: int
    samples: list[Sample]
    """About a dozen samples, newest first, for a table."""


class LagHistory:
    """Lag of groups over time, sampled when a page shows a group. Kept in memory. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = fork_safety.lock(self, "_mutex")
        self._samples: dict[str, deque[Sample]] = {}
        self._added_s: dict[str, float] = {}

    def add(self, group: str, at_ms: int, lag: int) -> None:
        """Add a sample, unless the last sample of the group is less than two seconds old."""
        now_s = time.monotonic()
        with self._mutex:
            if now_s - self._added_s.get(group, -_INTERVAL_S) < _INTERVAL_S:
                return
            if group not in self._samples and len(self._samples) >= _GROUPS_MAX:
                oldest = min(self._added_s, key=self._added_s.__getitem__)
                del self._samples[oldest], self._added_s[oldest]
            self._added_s[group] = now_s
            self._samples.setdefault(group, deque(maxlen=_SAMPLES_MAX)).append(Sample(at_ms, lag))

    def plot(self, group: str) -> Plot | None:
        """Return the chart of a group; None before there are two samples."""
        with self._mutex:
            samples = list(self._samples.get(group, ()))
        if len(samples) < 2:
            return None
        begin_ms, end_ms = samples[0].at_ms, samples[-1].at_ms
        max_lag = max(sample.lag for sample in samples)
        span = max(end_ms - begin_ms, 1)
        points = " ".join(
            f"{(at_ms - begin_ms) / span * PLOT_WIDTH:.1f},{PLOT_HEIGHT - lag / (max_lag or 1) * PLOT_HEIGHT:.1f}"
            for at_ms, lag in samples
        )
        step = max(len(samples) // 12, 1)
        return Plot(points, max_lag, begin_ms, end_ms, samples[::-step][:13])
