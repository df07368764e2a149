"""`segmentlog compact --stats` agrees with plain lists and dicts."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest
from keyed import compacted
from logs import NOW_MS, FakeClock, Kept
from seeds import seeds

import segmentlog
from segmentlog.config import EXPIRES_HEADER
from segmentlog.log.partition import Partition
from segmentlog.tables.key_statistics import (
    KEYLESS,
    NO_SEPARATOR,
    REST,
    GroupName,
    KeyGroup,
    KeyStatistics,
    group_by_length,
    group_by_separator,
)

PLENTY = 1 << 20


def records_of(log: Partition) -> list[Kept]:
    """Return all records of a log."""
    return [
        Kept(one.offset, one.key, one.value, one.timestamp, one.headers)
        for batch in log.read(log.log_start_offset)
        for one in batch.records()
    ]


def expected_groups(
    records: list[Kept], end_offset: int, separator: bytes, keep_last: int, now_ms: int = 0, ttl_ms: int | None = None
) -> dict[GroupName, KeyGroup]:
    """Return the same as a plain loop."""
    below = [one for one in records if one.offset < end_offset]
    kept = {one.offset for one in compacted(below, end_offset, keep_last, now_ms, ttl_ms)}
    groups: dict[GroupName, KeyGroup] = defaultdict(KeyGroup)
    for one in below:
        name: GroupName = KEYLESS
        if one.key is not None:
            name = one.key.split(separator)[0] if separator in one.key else NO_SEPARATOR
        size = len(one.key or b"") + len(one.value or b"")
        stays = one.offset in kept
        groups[name].add(KeyGroup(1, stays, stays and one.value is None, size, 0 if stays else size))
    return dict(groups)


def sealed_end(log: Partition) -> int:
    """Return the base offset of the active segment."""
    return log.segments()[-1].base_offset


@pytest.mark.parametrize("buffer_bytes", [PLENTY, 1500])
@pytest.mark.parametrize("seed", seeds("key statistics", range(5)))
def test_groups_are_those_of_a_plain_loop(tmp_path: Path, seed: int, buffer_bytes: int) -> None:
    """Random keys, long ones, tombstones, records that expire and records without a key, at any size of the map."""
    rng = random.Random(seed)
    keep_last = rng.choice((1, 2, 3))
    ttl_ms = rng.choice((None, 300))
    prefixes = [b"user:", b"order:", b"", b":", b"a prefix of more than 15 bytes:"]
    with segmentlog.open(tmp_path, background=False) as store:
        topic = store.create_topic(
            "t", segment_records=rng.choice((30, 200)), compression_type=rng.choice(("none", "lz4", "zstd"))
        )
        log = topic.partition(0)
        log.append([b"from before", None], timestamps=[NOW_MS] * 2)
        store.alter_topic("t", cleanup_policy="compact", compaction_keep_last=keep_last, record_ttl_ms=ttl_ms)
        for _ in range(40):
            count = rng.randrange(1, 20)
            log.append(
                [rng.choice((None, b"x" * rng.randrange(9))) for _ in range(count)],
                keys=[rng.choice(prefixes) + b"%d" % rng.randrange(25) for _ in range(count)],
                timestamps=[NOW_MS - rng.randrange(400) for _ in range(count)],
                headers=[
                    rng.choice(((), [(EXPIRES_HEADER, b"%d" % (NOW_MS + rng.choice((-5, 5))))])) for _ in range(count)
                ],
            )
        log.trim(rng.choice((0, 3, 45)))
        statistics = KeyStatistics(group_by_separator(b":"), buffer_bytes=buffer_bytes)
        statistics.count(log, NOW_MS)
        expected = expected_groups(records_of(log), sealed_end(log), b":", keep_last, NOW_MS, ttl_ms)
        assert statistics.groups == expected
        assert statistics.total().records == sum(one.records for one in expected.values())
        report = log.compact(dry_run=True, now_ms=NOW_MS)
        assert statistics.total().kept == report.records_after
        log.compact(now_ms=NOW_MS)
        assert sum(one.offset < sealed_end(log) for one in records_of(log)) == statistics.total().kept


def test_what_was_compacted_before_counts_too(tmp_path: Path) -> None:
    """Records of the clean section are removed for newer ones after it; a tombstone once its horizon has passed."""
    clock = FakeClock()
    with segmentlog.LogStore(tmp_path, background=False, clock=clock) as store:
        config = {"cleanup_policy": "compact", "delete_retention_ms": 1000}
        log = store.create_topic("t", config=config).partition(0)
        log.append([b"1", b"2", None], keys=[b"a:1", b"a:2", b"b:1"])
        log.roll()
        log.compact()
        log.append([b"11"], keys=[b"a:1"])
        log.roll()

        def counted() -> dict[GroupName, KeyGroup]:
            statistics = KeyStatistics(group_by_separator(b":"), buffer_bytes=PLENTY)
            statistics.count(log, clock.now_ms())
            return statistics.groups

        assert counted() == {b"a": KeyGroup(3, 2, 0, 13, 4), b"b": KeyGroup(1, 1, 1, 3, 0)}
        clock.advance(1000)
        assert counted() == {b"a": KeyGroup(3, 2, 0, 13, 4), b"b": KeyGroup(1, 0, 0, 3, 3)}
        assert log.compact().tombstones_removed == 1
        assert counted() == {b"a": KeyGroup(2, 2, 0, 9, 0)}


def test_the_active_segment_and_young_records_are_left_out(tmp_path: Path) -> None:
    """The statistics end where a pass would: before the first segment that is younger than min.compaction.lag.ms."""
    with segmentlog.open(tmp_path, background=False) as store:
        log = store.create_topic("t", cleanup_policy="compact", min_compaction_lag_ms=1000).partition(0)
        for timestamp in (NOW_MS - 5000, NOW_MS - 10, NOW_MS):
            log.append([b"v"], keys=[b"k:1"], timestamps=[timestamp])
            log.roll()
        log.append([b"v"], keys=[b"k:1"])
        for now_ms, count in ((NOW_MS, 1), (NOW_MS + 1000, 3)):
            statistics = KeyStatistics(group_by_separator(b":"), buffer_bytes=PLENTY)
            statistics.count(log, now_ms)
            assert statistics.total() == KeyGroup(count, 1, 0, 4 * count, 4 * (count - 1))


def test_prefixes_of_a_length_and_one_group_too_many(tmp_path: Path) -> None:
    """A key that is shorter is its own prefix; beyond the most groups all keys go to one."""
    with segmentlog.open(tmp_path, background=False) as store:
        log = store.create_topic("t", cleanup_policy="compact").partition(0)
        log.append([b""] * 5, keys=[b"abc", b"abd", b"a", b"xyz", b"uvw"])
        log.roll()
        statistics = KeyStatistics(group_by_length(2), buffer_bytes=PLENTY)
        statistics.count(log, NOW_MS)
        assert {name: group.records for name, group in statistics.groups.items()} == {
            b"ab": 2, b"a": 1, b"xy": 1, b"uv": 1,
        }  # fmt: skip
        few = KeyStatistics(group_by_length(2), buffer_bytes=PLENTY, max_groups=2)
        few.count(log, NOW_MS)
        assert {name: group.records for name, group in few.groups.items()} == {b"ab": 2, b"a": 1, REST: 2}


def test_a_key_with_more_versions_than_the_map_has_room_for(tmp_path: Path) -> None:
    """Parting the keys does not help then: the map grows."""
    with segmentlog.open(tmp_path, background=False) as store:
        log = store.create_topic("t", cleanup_policy="compact", compaction_keep_last=50).partition(0)
        for _ in range(8):
            log.append([b"v"] * 10, keys=[b"k"] * 10)
        log.roll()
        statistics = KeyStatistics(group_by_separator(b":"), buffer_bytes=1)
        statistics.count(log, NOW_MS)
        assert statistics.groups == {NO_SEPARATOR: KeyGroup(80, 50, 0, 160, 60)}
