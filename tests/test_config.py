"""A config says what a person meant, or which word was wrong and what would be right."""

import ast
import json
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segmentlog import config
from segmentlog.config import TOPIC_CONFIG_KEYS, FsyncPolicy, TopicConfig
from segmentlog.errors import InvalidConfig
from segmentlog.quantities import (
    INT64_MAX,
    UNLIMITED_MS,
    format_duration_ms,
    format_size,
    parse_duration_ms,
    parse_size,
)

MIB = 1024 * 1024
DAY_MS = 86_400_000

# --- sizes and durations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        *[("64MiB", 64 * MIB), ("64m", 64 * MIB), ("64M", 64 * MIB), ("64 MiB", 64 * MIB), (" 4k ", 4096)],
        *[("10MB", 10**7), ("1kb", 1000), ("1GiB", 2**30), ("2t", 2**41), ("1.5GiB", 3 * 2**29)],
        *[("1_000", 1000), ("65536", 65536), ("65536bytes", 65536), ("0", 0), (4096, 4096), (np.int64(7), 7)],
        *[("-1", -1), (-1, -1), ("unlimited", -1), ("None", -1), ("off", -1)],
    ],
)
def test_sizes_as_people_write_them(text, size_bytes):
    """A size in any usual spelling is that many bytes; -1 and its names mean no limit."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [
        *[("7d", 7 * DAY_MS), ("36h", 36 * 3_600_000), ("1h30m", 5_400_000), ("1.5h", 5_400_000)],
        *[("500ms", 500), ("500", 500), ("1s", 1000), ("2w", 14 * DAY_MS), ("5min", 300_000), (0, 0)],
        *[("1d 2h", DAY_MS + 7_200_000), ("1_000", 1000), ("-1", -1), ("unlimited", -1)],
    ],
)
def test_durations_as_people_write_them(text, duration_ms):
    """A time in any usual spelling is that many milliseconds; -1 and its names mean no limit."""
    assert parse_duration_ms(text) == duration_ms


@pytest.mark.parametrize("parse", [parse_size, parse_duration_ms])
@pytest.mark.parametrize(
    "value",
    [
        *[
            "",
            "  ",
            "x",
            "7 parsecs",
            "-2",
            "--1",
            "1 000",
            "1h30",
            "1e6",
            "1__0",
            "0.5",
            "1.",
            ".5",
            "\u0667",
            "1k1",
        ],
        *["9" * 5000, None, True, 1.5, 4096.0, -2, b"1", [1]],
    ],
)
def test_anything_else_is_refused(parse, value):
    """Anything but a plain quantity raises ValueError, also a fraction of a byte or a millisecond."""
    with pytest.raises(ValueError, match="is not a"):
        parse(value)


@given(st.integers(-1, 2**62))
def test_exact_texts_parse_back(amount):
    """The parsers read the exact output of the formatters as the same number."""
    assert parse_size(format_size(amount, exact=True)) == amount
    assert parse_duration_ms(format_duration_ms(amount)) == amount


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        *[(0, "0B"), (512, "512B"), (1023, "1023B"), (1024, "1KiB"), (1536, "1.5KiB"), (1_048_588, "1MiB")],
        *[(MIB - 1, "1MiB"), (5 * 2**50, "5120TiB"), (-1, "unlimited")],
    ],
)
def test_sizes_for_people_are_rounded(size_bytes, text):
    """A size is shown with one decimal at most, and never as 1024 of the smaller unit."""
    assert format_size(size_bytes) == text


def test_durations_for_people():
    """A duration is shown in the units it has, largest first."""
    assert format_duration_ms(DAY_MS + 2 * 3_600_000 + 3 * 60_000 + 4005) == "1d2h3m4s5ms"
    assert (format_duration_ms(0), format_duration_ms(UNLIMITED_MS)) == ("0ms", "unlimited")


# --- fsync ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy", "canonical"),
    [
        ("always", FsyncPolicy("always"), "always"),
        ("Never ", FsyncPolicy("never"), "never"),
        ("everysec", FsyncPolicy("ms", 1000), "1000ms"),
        ("250ms", FsyncPolicy("ms", 250), "250ms"),
        ("1s", FsyncPolicy("ms", 1000), "1000ms"),
        ("1000records", FsyncPolicy("records", 1000), "1000records"),
        ("1_000 records", FsyncPolicy("records", 1000), "1000records"),
        ("1MiB", FsyncPolicy("bytes", MIB), "1048576bytes"),
        ("65536bytes", FsyncPolicy("bytes", 65536), "65536bytes"),
    ],
)
def test_fsync_policies_as_people_write_them(text, policy, canonical):
    """Each spelling names one policy, whose canonical text names it again."""
    assert FsyncPolicy.parse(text) == policy
    assert str(policy) == canonical
    assert FsyncPolicy.parse(canonical) == policy
    assert FsyncPolicy.parse(policy) is policy


@pytest.mark.parametrize(
    "value",
    [
        *[
            "",
            "sometimes",
            "1000",
            "5m",
            "0ms",
            "0records",
            "0bytes",
            "-1ms",
            "nonerecords",
            "unlimited",
            "ms",
        ],
        *["records", "1.5records", "4294967296bytes", "100d0s", 1000, None, True],
    ],
)
def test_other_fsync_policies_are_refused(value):
    """A text that names none, or two (5m), is refused as it was written, with the list of those there are."""
    with pytest.raises(InvalidConfig, match="always, everysec, never, <n>ms") as error:
        FsyncPolicy.parse(value)
    assert (error.value.key, error.value.value) == ("fsync", value)


@pytest.mark.parametrize(("kind", "amount"), [("always", 1), ("ms", 0), ("ms", -5), ("hourly", 1)])
def test_an_impossible_fsync_policy_cannot_be_made(kind, amount):
    """The constructor refuses it, too."""
    with pytest.raises(InvalidConfig):
        FsyncPolicy(kind, amount)


# --- the topic config -----------------------------------------------------------------------------------


def test_defaults_are_kafkas_where_kafka_has_them():
    """A topic created with no settings behaves as documented; a change here changes stored topics."""
    assert {line.key: line.value for line in TopicConfig().describe()} == {
        "segment.bytes": "64MiB",
        "segment.ms": "7d",
        "segment.records": "unlimited",
        "index.interval.bytes": "4KiB",
        "retention.ms": "7d",
        "retention.bytes": "unlimited",
        "retention.segments": "unlimited",
        "retention.closed.ms": "unlimited",
        "cleanup.policy": "delete",
        "min.cleanable.dirty.ratio": "0.5",
        "delete.retention.ms": "1d",
        "min.compaction.lag.ms": "0ms",
        "max.compaction.lag.ms": "unlimited",
        "compaction.keep.last": "1",
        "record.ttl.ms": "unlimited",
        "max.message.bytes": "1048588B",
        "max.decompressed.message.bytes": "2147483639B",
        "message.timestamp.type": "CreateTime",
        "message.timestamp.after.max.ms": "default",
        "message.timestamp.before.max.ms": "unlimited",
        "compression.type": "producer",
        "compression.level": "default",
        "file.delete.delay.ms": "1m",
        "producer.id.expiration.ms": "1d",
        "remote.storage.enable": "false",
        "local.retention.ms": "-2",
        "local.retention.bytes": "-2",
        "fsync": "1000ms",
    }
    assert TopicConfig().to_mapping() == {}


def test_settings_as_typed_and_as_numbers_are_the_same():
    """Dotted or underscored keys, texts or numbers: the same config."""
    typed = {"segment.bytes": "1MiB", "retention.ms": "36h", "segment.records": "4096", "fsync": "always"}
    numbers = {
        "segment_bytes": MIB,
        "retention_ms": 36 * 3_600_000,
        "segment_records": 4096,
        "fsync": FsyncPolicy("always"),
    }
    assert TopicConfig.from_mapping(typed) == TopicConfig.from_mapping(numbers) == TopicConfig(**numbers)


@pytest.mark.parametrize("text", ["delete,compact", "compact, delete", "Compact,Delete"])
def test_cleanup_policy_is_stored_in_one_spelling(text):
    """Both policies together have one spelling, whatever order they were named in."""
    both = TopicConfig.from_mapping({"cleanup.policy": text})
    assert both.cleanup_policy == "delete,compact"
    assert (both.deletes, both.compacts) == (True, True)


def test_cleanup_policy_says_what_to_do():
    """A policy of one word does that only."""
    assert (TopicConfig().deletes, TopicConfig().compacts) == (True, False)
    compacted = TopicConfig(cleanup_policy="compact")
    assert (compacted.deletes, compacted.compacts) == (False, True)
    for text in ("", "none", " None "):
        neither = TopicConfig(cleanup_policy=text)
        assert (neither.cleanup_policy, neither.deletes, neither.compacts) == ("", False, False)


def test_no_limit_has_one_value_a_key():
    """Every spelling of "no limit" becomes the value that the key's default would have."""
    for word in ("unlimited", "-1", -1, "none", INT64_MAX):
        keys = (
            "segment.records",
            "retention.ms",
            "retention.bytes",
            "retention.segments",
            "retention.closed.ms",
        )
        config = TopicConfig.from_mapping(dict.fromkeys((*keys, "max.compaction.lag.ms"), word))
        assert (config.segment_records, config.retention_segments, config.retention_closed_ms) == (
            None,
            None,
            None,
        )
        assert (config.retention_ms, config.retention_bytes) == (-1, -1)
        assert config.max_compaction_lag_ms == UNLIMITED_MS
        assert config.to_mapping() == {"retention.ms": -1}


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("segment.bytes", "255", "a size from 256B to 2147483647B"),
        ("segment.bytes", 2**31, "a size from 256B to 2147483647B"),
        ("segment.bytes", "-1", "a size from 256B to 2147483647B"),
        ("segment.bytes", 64e6, "a size from 256B to 2147483647B"),
        ("segment.bytes", None, "a size from 256B to 2147483647B"),
        ("segment.ms", 0, "a time of at least 1ms, or unlimited"),
        ("segment.records", 0, "a whole number from 1 to 2147483647, or unlimited"),
        ("segment.records", "4k", "a whole number from 1"),
        ("index.interval.bytes", -1, "a size from 0B to 2147483647B"),
        ("retention.ms", "-7d", "a time of at least 0ms, or unlimited"),
        ("retention.ms", None, "a time of at least 0ms, or unlimited"),
        ("retention.ms", INT64_MAX + 1, "a time of at least 0ms, or unlimited"),
        ("retention.bytes", "lots", "a size of at least 0B, or unlimited"),
        ("retention.segments", 0, "a whole number from 1"),
        ("cleanup.policy", "compress", "delete, compact, delete,compact or none"),
        ("cleanup.policy", "none,delete", "delete, compact, delete,compact or none"),
        ("min.cleanable.dirty.ratio", 1.01, "a number from 0 to 1"),
        ("min.cleanable.dirty.ratio", "nan", "a number from 0 to 1"),
        pytest.param("min.cleanable.dirty.ratio", 10**400, "a number from 0 to 1", id="more than a float holds"),
        ("min.cleanable.dirty.ratio", True, "a number from 0 to 1"),
        ("min.cleanable.dirty.ratio", None, "a number from 0 to 1"),
        ("min.compaction.lag.ms", "-2", "a time of at least 0ms, or unlimited"),
        ("file.delete.delay.ms", INT64_MAX, "a time from 0ms to 36500d"),
        ("max.compaction.lag.ms", 0, "a time of at least 1ms, or unlimited"),
        ("compaction.keep.last", 0, "a whole number from 1"),
        ("max.message.bytes", "1GiB", "a size from 1B to 512MiB: each reader holds a whole batch in memory"),
        ("max.decompressed.message.bytes", 0, "a size from 1B to 2147483639B"),
        ("message.timestamp.type", "Now", "CreateTime or LogAppendTime"),
        ("message.timestamp.after.max.ms", -1, "a time of at least 0ms, unlimited, or default"),
        ("message.timestamp.after.max.ms", "-1", "a time of at least 0ms, unlimited, or default"),
        ("message.timestamp.after.max.ms", 2**63, "a time of at least 0ms, unlimited, or default"),
        ("message.timestamp.before.max.ms", -1, "a time of at least 0ms, or unlimited"),
        ("message.timestamp.before.max.ms", None, "a time of at least 0ms, or unlimited"),
        ("compression.type", "brotli", "producer, lz4, zstd, gzip, snappy or none (or uncompressed)"),
        ("compression.type", None, "producer, lz4, zstd, gzip, snappy or none (or uncompressed)"),
        ("remote.storage.enable", "yes", "true or false"),
        ("remote.storage.enable", 1, "true or false"),
        ("local.retention.ms", -3, "a time of at least 0ms, or unlimited, or -2: that of retention.ms"),
        ("local.retention.bytes", True, "a size of at least 0B, or unlimited, or -2: that of retention.bytes"),
        ("fsync", "sometimes", "always, everysec, never"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(key, value, accepted):
    """The error carries the key, the value as it was given, and what the key takes."""
    with pytest.raises(InvalidConfig) as error:
        TopicConfig.from_mapping({key: value})
    assert error.value.key == key
    assert error.value.value is value
    assert error.value.accepted.startswith(accepted)
    assert key in str(error.value)


def test_what_is_kept_here_is_part_of_what_is_kept():
    """As in Kafka, -2 means the retention of the whole topic, and a larger value is refused for a tiered topic."""
    assert (TopicConfig().effective_local_retention_ms, TopicConfig().effective_local_retention_bytes) == (
        7 * 86_400_000,
        -1,
    )
    config = TopicConfig.from_mapping({"remote.storage.enable": "true", "local.retention.ms": "1h"})
    assert (config.remote_storage_enable, config.effective_local_retention_ms) == (True, 3_600_000)
    assert config.to_mapping() == {"remote.storage.enable": True, "local.retention.ms": 3_600_000}
    assert TopicConfig.from_mapping(config.to_mapping()) == config
    assert TopicConfig.from_mapping({"local.retention.ms": "-2", "local.retention.bytes": -2}).to_mapping() == {}
    for key, value in (("local.retention.ms", "8d"), ("local.retention.ms", -1)):
        TopicConfig.from_mapping({key: value})
        with pytest.raises(InvalidConfig, match=r"at most retention\.ms"):
            TopicConfig.from_mapping({key: value, "remote.storage.enable": True})
        TopicConfig.from_mapping({key: value, "remote.storage.enable": True, "cleanup.policy": "compact"})
    with pytest.raises(InvalidConfig, match=r"at most retention\.bytes"):
        TopicConfig(remote_storage_enable=True, retention_bytes=100, local_retention_bytes=101)


def test_an_unknown_key_is_named_with_its_neighbour():
    """A slip of the finger is answered with the key that was meant, and with all there are."""
    with pytest.raises(InvalidConfig, match=r"did you mean retention\.ms\?") as error:
        TopicConfig.from_mapping({"retnetion.ms": 5})
    assert error.value.key == "retnetion.ms"
    for key in TOPIC_CONFIG_KEYS:
        assert key in str(error.value)


def test_an_unknown_key_without_a_neighbour():
    """A word that resembles no key gets no suggestion."""
    with pytest.raises(InvalidConfig, match="no such key") as error:
        TopicConfig.from_mapping({"quux": 5})
    assert "did you mean" not in str(error.value)


def test_a_key_given_twice_is_refused():
    """Two spellings of one key leave open which of them was meant."""
    with pytest.raises(InvalidConfig, match=r"segment\.bytes is given twice"):
        TopicConfig.from_mapping({"segment.bytes": 1024, "segment_bytes": 2048})


def test_compaction_lags_must_leave_a_moment():
    """A record cannot be due for compaction before compaction may touch it."""
    with pytest.raises(InvalidConfig, match=r"at most max\.compaction\.lag\.ms, which is 1h"):
        TopicConfig.from_mapping({"min.compaction.lag.ms": "2h", "max.compaction.lag.ms": "1h"})


def test_replace_keeps_the_rest_and_checks_all():
    """An altered config differs in the keys named only; what is bad, alone or with the rest, is refused."""
    old = TopicConfig.from_mapping({"segment.bytes": "1MiB", "max.compaction.lag.ms": "1h"})
    new = old.replace({"retention.ms": "1d", "segment.bytes": "2MiB"})
    assert new.to_mapping() == {
        "segment.bytes": 2 * MIB,
        "retention.ms": DAY_MS,
        "max.compaction.lag.ms": 3_600_000,
    }
    for bad in ({"retention.ms": "soon"}, {"retention.sm": 1}, {"min.compaction.lag.ms": "2h"}):
        with pytest.raises(InvalidConfig):
            old.replace(bad)
    assert old.segment_bytes == MIB


def test_a_config_is_a_value():
    """A config is immutable, and survives being sent to another process."""
    config = TopicConfig(fsync=FsyncPolicy("bytes", 4096))
    with pytest.raises(FrozenInstanceError):
        config.segment_bytes = 1024
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(config.replace({}))


configs = st.builds(
    TopicConfig,
    segment_bytes=st.integers(256, 2**31 - 1),
    segment_ms=st.integers(1, INT64_MAX),
    segment_records=st.none() | st.integers(1, 2**31 - 1),
    retention_ms=st.integers(-1, INT64_MAX),
    retention_bytes=st.integers(-1, INT64_MAX),
    retention_closed_ms=st.none() | st.integers(1, INT64_MAX),
    cleanup_policy=st.sampled_from(["", "delete", "compact", "delete,compact"]),
    min_cleanable_dirty_ratio=st.floats(0, 1),
    min_compaction_lag_ms=st.integers(0, 1000),
    max_compaction_lag_ms=st.integers(1000, INT64_MAX),
    message_timestamp_type=st.sampled_from(["CreateTime", "LogAppendTime"]),
    message_timestamp_after_max_ms=st.none() | st.integers(0, INT64_MAX),
    message_timestamp_before_max_ms=st.integers(0, INT64_MAX),
    compression_type=st.sampled_from(["producer", "lz4", "zstd", "gzip", "snappy", "none"]),
    fsync=st.sampled_from([FsyncPolicy("always"), FsyncPolicy("never")])
    | st.builds(FsyncPolicy, st.sampled_from(["ms", "records", "bytes"]), st.integers(1, 2**31 - 1)),
)


@settings(deadline=None)
@given(configs)
def test_stored_configs_come_back(config):
    """The JSON in topic.json gives the same config again."""
    assert TopicConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


@settings(deadline=None)
@given(configs)
def test_described_configs_can_be_typed_in(config):
    """The values shown to a person make the same config when a person types them, default or not."""
    lines = config.describe()
    assert TopicConfig.from_mapping({line.key: line.value for line in lines}) == config
    assert {line.key for line in lines if not line.is_default} == set(config.to_mapping())
    assert tuple(line.key for line in lines) == TOPIC_CONFIG_KEYS
    assert all(line.meaning for line in lines)


def test_config_is_pure_and_light():
    """The config module uses no clock, file or thread, and imports nothing that slows a command down."""
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(Path(config.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert imported <= {"collections", "dataclasses", "difflib", "operator", "re", "segmentlog", "typing"}
