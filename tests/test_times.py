"""Times as Python has them, wherever the library takes milliseconds."""

from __future__ import annotations

import math
import sys
import time
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logs import FakeClock

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.config import FsyncPolicy, TopicConfig
from segmentlog.consuming.start_position import parse_start_position, resolve_position
from segmentlog.errors import InvalidConfig, InvalidRecord, SegmentlogError
from segmentlog.objects.restore.cut_points import parse_target
from segmentlog.quantities import EARLIEST_MS, LATEST_MS, milliseconds_of, parse_duration_ms
from segmentlog.store import LogStore

AT = datetime(2026, 7, 31, 12, 0, 0, 123_456, UTC)
AT_MS = 1_785_499_200_123


def test_datetimes_are_timestamps(tmp_path: Path) -> None:
    """Records, lists and arrays may have them, in any zone, to the millisecond, up to the last year that exists."""
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


@pytest.mark.parametrize(
    "wrong",
    [
        "2026", 1.5, timedelta(1), [AT], EARLIEST_MS - 1, -(2**62), LATEST_MS + 1, 2**62, 2**63 - 1, 2**63,
        np.datetime64(2**61, "s"), np.datetime64(2**62, "D"), datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC),
    ],
)  # fmt: skip
def test_what_is_no_time_is_refused(tmp_path: Path, wrong: object) -> None:
    """Years before 1, more than 64 bits of microseconds, the "no timestamp" value, and other types are refused."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("t").partition(0)
        with pytest.raises(InvalidRecord, match="timestamps"):
            log.append([b"v"], timestamps=[wrong])
        with store.producer() as producer, pytest.raises(InvalidRecord, match="timestamps"):
            producer.send("t", b"v", timestamp=wrong)  # type: ignore[arg-type]
        assert log.log_end_offset == 0


@pytest.mark.parametrize(
    "limits", [{}, {"message_timestamp_after_max_ms": 1000}, {"message_timestamp_before_max_ms": 1000}], ids=str
)
@pytest.mark.parametrize("args", [["import", "FILE", "t"], ["produce", "--format", "json", "t", "FILE"]])
def test_what_a_topic_does_not_accept_is_refused_by_the_command_line(
    tmp_path: Path, args: list[str], limits: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says which record and what is accepted; nothing of the list is appended."""
    path, file = str(tmp_path / "store"), tmp_path / "records.ndjson"
    with segmentlog.open(path, background=False) as store:
        store.create_topic("t", **limits)
    wrong = {"message_timestamp_after_max_ms": 2 * AT_MS, "message_timestamp_before_max_ms": AT_MS // 2}.get(
        next(iter(limits), ""), LATEST_MS + 1
    )
    file.write_text(f'{{"value": "1"}}\n{{"value": "2", "timestamp": {wrong}}}\n')
    assert run(cli, ["--dir", path, *(str(file) if arg == "FILE" else arg for arg in args)]) == 1
    said = capsys.readouterr().err
    assert str(wrong) in said
    accepted = next(iter(limits), "year 294247").replace("_", ".")
    assert accepted in said.replace("\n", " "), said
    with segmentlog.open(path, background=False) as store:
        assert store.topic("t").partition(0).log_end_offset == 0


_HOUR_MS = 3_600_000


@pytest.mark.parametrize("fsync", ["always", "never"])
def test_a_topic_may_limit_how_far_timestamps_are_from_the_clock(tmp_path: Path, fsync: str) -> None:
    """Each call that appends refuses a record beyond the limit, names it, and appends the others' records."""
    limits = {"message_timestamp_after_max_ms": _HOUR_MS, "message_timestamp_before_max_ms": "1d"}
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("t", fsync=fsync, **limits).partition(0)
        stamped = store.create_topic("stamped", fsync=fsync, message_timestamp_type="LogAppendTime", **limits)
        now = time.time_ns() // 1_000_000
        early, late, fits = now - 26 * _HOUR_MS, now + 2 * _HOUR_MS, [now - 23 * _HOUR_MS, -1, now + _HOUR_MS // 2]
        for wrong, key in ((early, "before"), (late, "after")):
            message = rf"timestamps\[1\] is {wrong}; expected .*message.timestamp.{key}.max.ms"
            with pytest.raises(InvalidRecord, match=message) as raised:
                log.append([b"1", b"2", b"3"], timestamps=[now, wrong, wrong])
            assert raised.value.indices == (1, 2)
            with store.producer() as producer:
                with pytest.raises(InvalidRecord, match=message):
                    producer.send_many("t", [b"1", b"2"], timestamps=[now, wrong])
                sent = producer.send("t", b"v", timestamp=now)
                with pytest.raises(InvalidRecord, match="timestamps"):
                    producer.send("t", b"v", timestamp=wrong)
                assert sent.result().timestamp == now, "it shares a batch with nobody's mistakes"
            stamped.partition(0).append([b"v"], timestamps=[wrong])
        log.append([b"v"] * 3, timestamps=fits)
        log.append([b"v"])
        assert log.log_end_offset == 6
        store.alter_topic(
            "t", {"message.timestamp.after.max.ms": "default", "message.timestamp.before.max.ms": "unlimited"}
        )
        log.append([b"v"] * 2, timestamps=[early, late])


def test_timedeltas_are_durations() -> None:
    """Every key of a topic that is a time accepts them."""
    config = TopicConfig.from_mapping({"retention_ms": timedelta(days=7), "fsync": timedelta(seconds=0.25)})
    assert (config.retention_ms, config.fsync) == (7 * 86_400_000, FsyncPolicy("ms", 250))
    assert parse_duration_ms(timedelta(milliseconds=5)) == 5


@pytest.mark.parametrize("wrong", [timedelta(microseconds=1), timedelta(days=-1), 1.5, [], b"7d"])
def test_other_durations_are_refused(wrong: object) -> None:
    """Parts of a millisecond, negative durations and other types raise `InvalidConfig`."""
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
            place = parse_start_position(moment.isoformat(), AT_MS)
            assert resolve_position(place, log) == expected
        if isinstance(moment, datetime):
            target = parse_target(moment, None)
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
    """A datetime that equals no other one and has no zone, like pandas' NaT."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = datetime.__hash__


@pytest.mark.parametrize(
    "wrong", [math.nan, math.inf, 1.5, _NaT(2026, 1, 1), np.datetime64("NaT"), None, True], ids=str
)
def test_what_is_no_time_is_refused_by_name(tmp_path: Path, wrong: Any) -> None:
    """Every call that takes one raises an error of the library with the argument's name."""
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
                parse_target(wrong, None)
            with pytest.raises(InvalidConfig, match="now_ms"):
                log.apply_retention(now_ms=wrong)
            with store.producer() as producer, pytest.raises(SegmentlogError, match="timestamps"):
                producer.send("t", b"v", timestamp=wrong)


@pytest.mark.parametrize(
    "text",
    [
        "0001-01-01",
        "0001-01-01T00:00:00+23:59",
        "1969-12-31T00:00Z",
        "-99999999999d",
        "@-60001",
        "@-9999999999999999999",
    ],
)
def test_places_before_1970(text: str) -> None:
    """``--from 0001-01-01`` is a time, not an invalid position."""
    kind, number = parse_start_position(text, AT_MS)
    assert kind == "time"
    assert -(2**63) <= number <= -60_000


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59.999999", "9999-12-31T23:59:59-23:59"])
def test_places_in_the_far_future(text: str) -> None:
    """Dates at the other end of the calendar are times, too."""
    kind, number = parse_start_position(text, AT_MS)
    assert kind == "time"
    assert number >= milliseconds_of(datetime(9999, 12, 30, tzinfo=UTC))


@pytest.mark.parametrize(
    "text", ["2026-13-01", "nan", "inf", "1e400", "@nan", "@--5", "-nan", "10000-01-01", "@1.5", "-infd"]
)
def test_texts_that_are_no_place(text: str) -> None:
    """The error lists the valid positions."""
    with pytest.raises(ValueError, match=r"is not an offset or a time. Give earliest"):
        parse_start_position(text, AT_MS)


# ---------------------------------------------------------------- before 1970

MOON_MS = -14_182_940_000
"""When men landed on the moon."""


def test_records_of_before_1970(tmp_path: Path) -> None:
    """They keep their timestamps in order and through an index; -1 means "none", and sorts before all."""
    stamps = [-62_135_596_800_000, MOON_MS, -2, -1, 0, 1, MOON_MS + 1]
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("t", retention_ms=-1, segment_records=2, index_interval_bytes=1).partition(0)
        for stamp in stamps:
            log.append([b"%d" % stamp], timestamps=[stamp])
        log.append([b"many"] * len(stamps), timestamps=stamps)
        with store.producer() as producer:
            moment = datetime(1969, 7, 20, 20, 17, 40, tzinfo=UTC)
            assert producer.send("t", b"moon", timestamp=moment).result().timestamp == MOON_MS
    with segmentlog.open(tmp_path / "store", background=False) as store:  # with the indexes as they are on disk
        log = store.topic("t").partition(0)
        found = [stamp for batch in log.read(0) for stamp in batch.timestamps.tolist()]
        assert found == [*stamps, *stamps, MOON_MS]
        for wanted in (*stamps, MOON_MS - 1, -1000):
            first = next(at for at, stamp in enumerate(found) if stamp >= wanted)
            assert log.offset_for_timestamp(wanted) == first
        with store.consumer("t", start=moment) as consumer:
            assert consumer.position("t", 0) == 1
        assert resolve_position(parse_start_position(moment.isoformat(), AT_MS), log) == 1
    assert not list((tmp_path / "store").rglob("quarantine"))


def test_the_widest_batch_there_can_be(tmp_path: Path) -> None:
    """The batch has the earliest and the latest timestamp."""
    stamps = [EARLIEST_MS, LATEST_MS, -5, 2**52]
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("t", retention_ms=-1).partition(0)
        log.append([b"v"] * 4, timestamps=stamps)
        assert [stamp for batch in log.read(0) for stamp in batch.timestamps.tolist()] == stamps


def test_retention_counts_from_the_write_of_segments_of_before_1970(tmp_path: Path) -> None:
    """Old records are not deleted as soon as they come.

    In Kafka, too, a negative timestamp means none for retention.
    """
    clock = FakeClock()
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        log = store.create_topic("t", retention_ms=60_000, segment_records=1).partition(0)
        log.append([b"0"], timestamps=[MOON_MS])
        log.append([b"1"], timestamps=[MOON_MS])
        log.append([b"2"])
        log.apply_retention()
        assert log.log_start_offset == 0
        clock.advance(120_000)
        log.apply_retention(now_ms=int(time.time() * 1000) + 120_000)
        assert log.log_start_offset >= 2


def test_compaction_of_records_of_before_1970(tmp_path: Path) -> None:
    """The last record of each key stays, with its timestamp.

    `record.ttl.ms` counts from a timestamp, if there is one.
    """
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("t", cleanup_policy="compact", segment_records=4).partition(0)
        log.append([b"a1", b"b1", b"n1", b"a2"], [b"a", b"b", b"n", b"a"], [MOON_MS, MOON_MS - 1, -1, MOON_MS + 2])
        log.append([b"c1"] * 4, [b"c"] * 4, [5, -62_135_596_800_000, -3, MOON_MS])
        log.append([b"end"], [b"end"])
        log.compact()
        kept = [(one.value, one.timestamp) for one in store.consumer("t")][:-1]
        assert kept == [(b"b1", MOON_MS - 1), (b"n1", -1), (b"a2", MOON_MS + 2), (b"c1", MOON_MS)]
        store.alter_topic("t", record_ttl_ms=1000)
        log.append([b"z"] * 4, [b"z"] * 4)
        log.append([b"end"], [b"end"])
        log.compact()
        values = [one.value for one in store.consumer("t")]
        assert b"n1" in values
        assert not {b"a2", b"b1", b"c1"} & set(values)


def test_records_of_before_1970_there_and_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exported and imported in every format, and printed by consume, they are what they were."""

    def call(*arguments: str) -> str:
        status = run(cli, ["--dir", str(tmp_path / "store"), *arguments])
        sys.stdout.flush()
        out, err = capfd.readouterr()
        assert status == 0, err
        return out

    stamps = [MOON_MS, -2, 0, -62_135_596_800_000]
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", retention_ms=-1).partition(0).append([b"%d" % stamp for stamp in stamps], None, stamps)
    for form in ("ndjson", "csv", "parquet"):
        path = str(tmp_path / f"out.{form}")
        call("export", "t", path)
        call("create", f"copy-{form}", "--retention-ms", "-1")
        call("import", path, f"copy-{form}")
        assert call("consume", f"copy-{form}", "--format", "%T %s\n").splitlines() == [f"{s} {s}" for s in stamps], form
    assert call("consume", "t", "--from", "1969-07-20T20:17:40+00:00", "-n", "1", "--values") == f"{MOON_MS}\n"
    call("verify")
