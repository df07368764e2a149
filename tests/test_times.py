"""Times as Python has them, wherever the library takes milliseconds."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import segmentlog
from segmentlog.config import FsyncPolicy, TopicConfig
from segmentlog.consuming.places import parse_place, resolve
from segmentlog.errors import InvalidConfig, InvalidRecord, SegmentlogError
from segmentlog.objects.cutting import target_of
from segmentlog.quantities import milliseconds_of, parse_duration_ms

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


@pytest.mark.parametrize("wrong", [datetime(1969, 12, 31, tzinfo=UTC), "2026", 1.5, -1, timedelta(1), [AT]])
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


_FAR_EAST, _FAR_WEST = timezone(timedelta(hours=23, minutes=59)), timezone(-timedelta(hours=23, minutes=59))
FIRST_TIMES = [
    datetime.min, datetime.min.replace(tzinfo=UTC), datetime.min.replace(tzinfo=_FAR_EAST), date.min, timedelta.max,
    datetime(1969, 12, 31, 23, 59, tzinfo=UTC), datetime(1900, 1, 1), timedelta(days=36_500),
]  # fmt: skip
LAST_TIMES = [
    datetime.max, datetime.max.replace(tzinfo=UTC), datetime.max.replace(tzinfo=_FAR_WEST), date.max, timedelta.min,
    datetime(2500, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("moment", FIRST_TIMES + LAST_TIMES, ids=str)
def test_every_time_of_the_calendar_is_a_place(tmp_path: Path, moment: Any) -> None:
    """A consumer starts at, and seeks to, the first record from then on: the oldest, or the end of the log."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("t", retention_ms=-1).partition(0)
        log.append([b"0", b"1"], timestamps=[0, AT_MS])
        expected = 0 if moment in FIRST_TIMES else 2
        with store.consumer("t", start=moment) as consumer:
            assert consumer.position("t", 0) == expected
            assert consumer.seek("t", 0, moment) == expected
        if not isinstance(moment, timedelta):
            place = parse_place(moment.isoformat(), AT_MS)
            assert resolve(place, log) == expected
        if isinstance(moment, datetime):
            target = target_of(moment, None)
            assert target is not None
            assert target.at_ms == milliseconds_of(moment)


def test_a_start_within_a_millisecond_finds_the_record_of_that_moment(tmp_path: Path) -> None:
    """A record's timestamp is rounded down, and so is the time that is searched for."""
    moment = AT.replace(microsecond=123_999)
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", retention_ms=-1).partition(0).append([b"0"], timestamps=[moment])
        with store.consumer("t", start=moment) as consumer:
            assert [record.value for record in consumer] == [b"0"]


class _NaT(datetime):
    """As pandas' NaT: a datetime that equals nothing, and has no zone."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = datetime.__hash__


@pytest.mark.parametrize(
    "wrong", [math.nan, math.inf, 1.5, _NaT(2026, 1, 1), np.datetime64("NaT"), None, True], ids=str
)
def test_what_is_no_time_is_refused_by_name(tmp_path: Path, wrong: Any) -> None:
    """By every call that takes one, with an exception of the library that names the argument."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("t").partition(0)
        log.append([b"0"])
        with pytest.raises(InvalidConfig, match="start"):
            store.consumer("t", start=wrong)
        with store.consumer("t") as consumer, pytest.raises(InvalidConfig, match="to = "):
            consumer.seek("t", 0, wrong)
        with pytest.raises(InvalidConfig, match="timestamp_ms"):
            log.offset_for_timestamp(wrong)
        if wrong is not None:
            with pytest.raises(InvalidConfig, match="at = "):
                target_of(wrong, None)
            with pytest.raises(InvalidConfig, match="now_ms"):
                log.retain(now_ms=wrong)
            with store.producer() as producer, pytest.raises(SegmentlogError, match="timestamps"):
                producer.send("t", b"v", timestamp=wrong)


@pytest.mark.parametrize("text", ["0001-01-01", "0001-01-01T00:00:00+23:59", "1969-12-31T00:00Z", "-99999999999d"])
def test_places_before_1970_are_the_beginning(text: str) -> None:
    """``--from 0001-01-01`` is a time, and not a place that nobody understands."""
    assert parse_place(text, AT_MS) == ("time", 0)


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59.999999", "9999-12-31T23:59:59-23:59"])
def test_places_in_the_far_future(text: str) -> None:
    """Likewise at the other end of the calendar."""
    kind, number = parse_place(text, AT_MS)
    assert kind == "time"
    assert number >= milliseconds_of(datetime(9999, 12, 30, tzinfo=UTC))


@pytest.mark.parametrize("text", ["2026-13-01", "nan", "inf", "1e400", "@nan", "-nan", "10000-01-01", "@1.5", "-infd"])
def test_texts_that_are_no_place(text: str) -> None:
    """They are refused with the places that there are."""
    with pytest.raises(ValueError, match="is not a place: earliest"):
        parse_place(text, AT_MS)
