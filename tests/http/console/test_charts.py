"""Geometry of the console's charts."""

from itertools import pairwise

import pytest

from segmentlog.http.console.charts import (
    PLOT_HEIGHT,
    PLOT_WIDTH,
    SPARK_HEIGHT,
    SPARK_WIDTH,
    STRIP_WIDTH,
    LagHistory,
    RateSample,
    segment_strip,
    sparkline,
)
from segmentlog.records import SegmentInfo


def _segments(*sizes: int) -> list[SegmentInfo]:
    last = len(sizes) - 1
    return [SegmentInfo(at * 10, at * 10 + 10, size, 0, at == last, "") for at, size in enumerate(sizes)]


@pytest.mark.parametrize("count", [1, 2, 79, 80, 81, 500, 5000])
def test_a_strip_shows_every_segment_in_its_place(count: int) -> None:
    """Blocks follow each other from end to end; many adjacent segments of one state share a block."""
    segments = _segments(*(1000 + at % 7 for at in range(count)))
    blocks = segment_strip(segments, cleaned_offset=count * 3)
    assert len(blocks) <= 90
    assert sum(block.segment_count for block in blocks) == count
    assert sum(block.size_bytes for block in blocks) == sum(segment.size_bytes for segment in segments)
    assert blocks[-1].state == "active"
    assert blocks[0].base_offset == 0
    for one, following in pairwise(blocks):
        assert one.end_offset == following.base_offset
        assert one.x + one.width == pytest.approx(following.x, abs=0.02)
        assert one.state == ("compacted" if one.end_offset <= count * 3 else "sealed")
    assert blocks[-1].x + blocks[-1].width == pytest.approx(STRIP_WIDTH, abs=0.05)


def test_a_strip_tells_which_segments_are_elsewhere() -> None:
    """Segments that exist only in the object store have their own state, compacted or not."""
    elsewhere = SegmentInfo(0, 10, 10, 0, False, "", remote=True)
    assert [block.state for block in segment_strip([elsewhere, *_segments(10, 10)], 10)] == [
        "remote",
        "compacted",
        "active",
    ]


def test_a_segment_of_a_strip_is_as_wide_as_it_is_large_but_never_too_narrow() -> None:
    """Empty segments are visible, too."""
    large, small, empty = segment_strip(_segments(1_000_000, 10, 0), 0)
    assert large.width > 900
    assert small.width >= 5
    assert empty.width >= 5
    assert [block.width for block in segment_strip(_segments(0), 0)] == [5.0]
    assert segment_strip([], 0) == []


def test_lag_is_drawn_within_its_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line spans all samples, and the largest lag is at the top. One sample is not a line."""
    now_s = 0.0
    monkeypatch.setattr("segmentlog.http.console.charts.time.monotonic", lambda: now_s)
    history = LagHistory()
    assert history.plot("g") is None
    for at in range(2000):
        now_s += 1.0  # half of them come too soon after another one
        history.add("g", 1_000_000 + at * 1000, at % 100)
    plot = history.plot("g")
    assert plot is not None
    points = [tuple(map(float, point.split(","))) for point in plot.points.split()]
    assert len(points) == 720
    assert points[0][0] == 0
    assert points[-1][0] == PLOT_WIDTH
    assert all(0 <= x <= PLOT_WIDTH and 0 <= y <= PLOT_HEIGHT for x, y in points)
    assert min(y for _, y in points) == 0
    assert plot.samples[0].at_ms == plot.end_ms
    assert len(plot.samples) <= 13
    assert history.plot("other") is None


def test_the_history_of_lags_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups that were shown least recently are dropped first."""
    monkeypatch.setattr("segmentlog.http.console.charts._GROUPS_MAX", 3)
    now_s = 0.0
    monkeypatch.setattr("segmentlog.http.console.charts.time.monotonic", lambda: now_s)
    history = LagHistory()
    for turn in range(2):
        for group in ("a", "b", "c"):
            now_s += 5
            history.add(group, turn, 1)
    for turn in range(2):
        now_s += 5
        history.add("d", turn, 1)
    assert history.plot("a") is None
    assert history.plot("b") is not None
    assert history.plot("d") is not None


def test_a_sparkline_shows_the_last_five_minutes_within_its_box() -> None:
    """Older samples are dropped, a rate of zero is a flat line, and one sample is not a line."""
    assert sparkline([]) is None
    assert sparkline([RateSample(1.0, 5.0)]) is None
    flat = sparkline([RateSample(1.0, 0.0), RateSample(2.0, 0.0)])
    assert flat is not None
    assert flat.points == f"0.0,{SPARK_HEIGHT}.0 {SPARK_WIDTH}.0,{SPARK_HEIGHT}.0"
    line = sparkline([RateSample(float(at), 1000.0 if at == 0 else at % 7) for at in range(0, 1000, 5)])
    assert line is not None
    assert line.max_rate == 6
    assert line.duration_s == 300.0
    points = [tuple(map(float, point.split(","))) for point in line.points.split()]
    assert all(0 <= x <= SPARK_WIDTH and 0 <= y <= SPARK_HEIGHT for x, y in points)
    assert points[0][0] == 0
    assert points[-1][0] == SPARK_WIDTH
