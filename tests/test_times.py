"""Times as Python has them, wherever the library takes milliseconds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest

import segmentlog
from segmentlog.config import FsyncPolicy, TopicConfig
from segmentlog.errors import InvalidConfig, InvalidRecord
from segmentlog.quantities import parse_duration_ms

AT = datetime(2026, 7, 31, 12, 0, 0, 123_456, UTC)
AT_MS = 1_785_499_200_123


def test_datetimes_are_timestamps(tmp_path: Path) -> None:
    """In a record, a list, an array; in any zone, and to the millisecond up to the last year that there is."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("t", retention_ms=-1).partition(0)
        with store.producer() as producer:
            assert producer.send("t", b"0", timestamp=AT).result().timestamp == AT_MS
            elsewhere = AT.astimezone(timezone(timedelta(hours=-7)))
            producer.send_many("t", [b"1", b"2"], timestamps=[elsewhere, AT_MS])
        log.append([b"3"], timestamps=[AT.astimezone().replace(tzinfo=None)])
        log.append([b"4", b"5"], timestamps=np.array([AT_MS, AT_MS + 1], "datetime64[ms]"))
        last = datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)
        log.append([b"6"], timestamps=[last])
        found = [stamp for batch in log.read(0) for stamp in batch.timestamps.tolist()]
    assert found == [AT_MS] * 5 + [AT_MS + 1, 253_402_300_799_999]


@pytest.mark.parametrize("wrong", [datetime(1969, 12, 31, tzinfo=UTC), "2026", 1.5, 2**63, timedelta(1), [AT]])
def test_what_is_no_time_is_refused(tmp_path: Path, wrong: object) -> None:
    """Before 1970, and what is not a time at all."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("t").partition(0)
        with pytest.raises(InvalidRecord, match="timestamps"):
            log.append([b"v"], timestamps=[wrong])
        with store.producer() as producer, pytest.raises(InvalidRecord, match="timestamps"):
            producer.send("t", b"v", timestamp=wrong)  # type: ignore[arg-type]


def test_timedeltas_are_durations() -> None:
    """In every key of a topic that is a time."""
    config = TopicConfig.from_mapping({"retention_ms": timedelta(days=7), "fsync": timedelta(seconds=0.25)})
    assert (config.retention_ms, config.fsync) == (7 * 86_400_000, FsyncPolicy("ms", 250))
    assert parse_duration_ms(timedelta(milliseconds=5)) == 5


@pytest.mark.parametrize("wrong", [timedelta(microseconds=1), timedelta(days=-1), 1.5, [], b"7d"])
def test_other_durations_are_refused(wrong: object) -> None:
    """Parts of a millisecond, the past, and what is no duration."""
    for key in ("retention_ms", "fsync"):
        with pytest.raises(InvalidConfig):
            TopicConfig.from_mapping({key: wrong})
