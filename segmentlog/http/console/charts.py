"""Where lines and boxes of drawings go. The templates make SVG of it: a strict policy lets no style in."""

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


class Block(NamedTuple):
    """One segment of a strip, or neighbours that are alike."""

    state: str
    """"sealed", "active", "compacted" or "remote"."""
    base_offset: int
    end_offset: int
    size_bytes: int
    segment_count: int
    x: float = 0.0
    width: float = 0.0


def state_of(segment: SegmentInfo, cleaned_offset: int) -> str:
    """What a segment is, for people."""
    if segment.active:
        return "active"
    if segment.remote:
        return "remote"
    return "compacted" if segment.end_offset <= cleaned_offset else "sealed"


def strip(segments: Sequence[SegmentInfo], cleaned_offset: int) -> list[Block]:
    """The segments side by side, as wide as they are large, but none too narrow to be seen."""
    blocks = [
        Block(state_of(one, cleaned_offset), one.base_offset, one.end_offset, one.size_bytes, 1) for one in segments
    ]
    while len(blocks) > _BLOCKS_MAX:
        fewer = _paired(blocks)
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


def _paired(blocks: list[Block]) -> list[Block]:
    """Neighbours that are alike, two and two."""
    paired: list[Block] = []
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


# ------------------------------------------------------------ lag over time

PLOT_WIDTH: Final = 720
PLOT_HEIGHT: Final = 140
_KEPT: Final = 720
_EVERY_S: Final = 2.0
_GROUPS_MAX: Final = 2000


class Sample(NamedTuple):
    """How far a group was behind, at a time."""

    at_ms: int
    lag: int


class Plot(NamedTuple):
    """Samples as points of a line, in a box of `PLOT_WIDTH` by `PLOT_HEIGHT`."""

    points: str
    most: int
    begin_ms: int
    end_ms: int
    samples: list[Sample]
    """Some of them, for a table."""


class LagHistory:
    """How far groups were behind whenever somebody looked, as long as this process lives. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = fork_safety.lock(self, "_mutex")
        self._samples: dict[str, deque[Sample]] = {}
        self._noted_s: dict[str, float] = {}

    def note(self, group: str, at_ms: int, lag: int) -> None:
        """Keep it, unless one was kept a moment ago."""
        now_s = time.monotonic()
        with self._mutex:
            if now_s - self._noted_s.get(group, -_EVERY_S) < _EVERY_S:
                return
            if group not in self._samples and len(self._samples) >= _GROUPS_MAX:
                oldest = min(self._noted_s, key=self._noted_s.__getitem__)
                del self._samples[oldest], self._noted_s[oldest]
            self._noted_s[group] = now_s
            self._samples.setdefault(group, deque(maxlen=_KEPT)).append(Sample(at_ms, lag))

    def plot(self, group: str) -> Plot | None:
        """The line; None before there are two samples."""
        with self._mutex:
            samples = list(self._samples.get(group, ()))
        if len(samples) < 2:
            return None
        begin_ms, end_ms = samples[0].at_ms, samples[-1].at_ms
        most = max(sample.lag for sample in samples)
        span = max(end_ms - begin_ms, 1)
        points = " ".join(
            f"{(one.at_ms - begin_ms) / span * PLOT_WIDTH:.1f},{PLOT_HEIGHT - one.lag / (most or 1) * PLOT_HEIGHT:.1f}"
            for one in samples
        )
        step = max(len(samples) // 12, 1)
        return Plot(points, most, begin_ms, end_ms, samples[::-step][:13])
