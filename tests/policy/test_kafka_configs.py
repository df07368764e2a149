"""Every setting of Kafka's topics: its values at the limits and beyond, its effect, or the word that it has none."""

from __future__ import annotations

from typing import Final

import pytest

from segmentlog.config import TOPIC_CONFIG_KEYS, TopicConfig
from segmentlog.errors import InvalidConfig
from segmentlog.policy.kafka_configs import SETTINGS, describe, engine_keys, known_keys, to_engine, without_effect

INT_MAX, LONG_MAX = str(2**31 - 1), str(2**63 - 1)
NO_INT, NO_LONG = str(2**31), str(2**63)
NO_NUMBERS: Final = ("", "x", "1.5", "1e3", "0x10", "1 0", "--1")
NO_FLAGS: Final = ("", "maybe", "1", "yes")
NO_REPLICAS: Final = ("x", "1", "0:1,*", "-1:2", "0:1:2", "none")

# Answers of Kafka 4.4.0 (its LogConfig was asked): (values that it accepts, values that it refuses).
KAFKA: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "cleanup.policy": (("", "delete", "compact", "compact,delete", "delete, compact"), ("none", "delete;compact")),
    "compression.gzip.level": (("-1", "1", "9"), ("0", "10", "-2", *NO_NUMBERS)),
    "compression.lz4.level": (("1", "17"), ("0", "18", "-1", *NO_NUMBERS)),
    "compression.type": (
        ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer", " gzip "), ("brotli", "GZIP", "", "deflate")
    ),
    "compression.zstd.level": (("-131072", "-1", "0", "22"), ("-131073", "23", *NO_NUMBERS)),
    "delete.retention.ms": (("0", LONG_MAX), ("-1", NO_LONG, *NO_NUMBERS)),
    "errors.deadletterqueue.group.enable": (("true", "false", "TRUE", " true"), NO_FLAGS),
    "file.delete.delay.ms": (("0", "60000"), ("-1", NO_LONG, *NO_NUMBERS)),
    "flush.messages": (("1", "2", LONG_MAX), ("0", "-1", NO_LONG, *NO_NUMBERS)),
    "flush.ms": (("0", "1", LONG_MAX), ("-1", NO_LONG, *NO_NUMBERS)),
    "follower.replication.throttled.replicas": (("", "*", "0:1", "0:1,1:2", " 0:1 "), NO_REPLICAS),
    "index.interval.bytes": (("0", "1", INT_MAX), ("-1", NO_INT, *NO_NUMBERS)),
    "leader.replication.throttled.replicas": (("", "*", "0:1", "0:1, 1:2"), NO_REPLICAS),
    "local.retention.bytes": (("-2", "-1", "0", LONG_MAX), ("-3", NO_LONG, *NO_NUMBERS)),
    "local.retention.ms": (("-2", "-1", "0", LONG_MAX), ("-3", NO_LONG, *NO_NUMBERS)),
    "max.compaction.lag.ms": (("1", LONG_MAX), ("0", "-1", NO_LONG, *NO_NUMBERS)),
    "max.decompressed.message.bytes": (("1", "1000", "2147483639"), ("0", "-1", "2147483640", NO_INT, *NO_NUMBERS)),
    "max.message.bytes": (("1", "1048588", "536870912"), ("-1", NO_INT, *NO_NUMBERS)),
    "message.timestamp.after.max.ms": (("0", "1000", LONG_MAX), ("-1", NO_LONG, *NO_NUMBERS)),
    "message.timestamp.before.max.ms": (("0", "1000", LONG_MAX), ("-1", NO_LONG, *NO_NUMBERS)),
    "message.timestamp.type": (("CreateTime", "LogAppendTime"), ("", "x", "Now")),
    "min.cleanable.dirty.ratio": (("0", "0.5", "1", "1e-1"), ("-0.1", "1.1", "2", "", "x")),
    "min.compaction.lag.ms": (("0", "1"), ("-1", NO_LONG, *NO_NUMBERS)),
    "min.insync.replicas": (("1", "2", INT_MAX), ("0", "-1", NO_INT, *NO_NUMBERS)),
    "preallocate": (("true", "false", "TRUE", " False "), NO_FLAGS),
    "remote.copy.lag.bytes": (("-1", "0", LONG_MAX), ("-2", NO_LONG, *NO_NUMBERS)),
    "remote.copy.lag.ms": (("-1", "0", LONG_MAX), ("-2", NO_LONG, *NO_NUMBERS)),
    "remote.log.copy.disable": (("true", "false"), NO_FLAGS),
    "remote.log.delete.on.disable": (("true", "false"), NO_FLAGS),
    "remote.storage.enable": (("true", "false", "TRUE"), NO_FLAGS),
    "retention.bytes": (("-1", "0", LONG_MAX), (NO_LONG, *NO_NUMBERS)),
    "retention.ms": (("-1", "0", " 5", LONG_MAX), ("-2", NO_LONG, *NO_NUMBERS)),
    "segment.bytes": (("1048576", INT_MAX), ("1", "13", "-1", NO_INT, *NO_NUMBERS)),
    "segment.index.bytes": (("4", INT_MAX), ("3", "-1", NO_INT, *NO_NUMBERS)),
    "segment.jitter.ms": (("0", "1000", LONG_MAX), ("-1", NO_LONG, *NO_NUMBERS)),
    "segment.ms": (("1", LONG_MAX), ("0", "-1", NO_LONG, *NO_NUMBERS)),
    "unclean.leader.election.enable": (("true", "false"), NO_FLAGS),
}  # fmt: skip

# docs/server-reference.md has these.
REFUSED_HERE: Final = (
    ("max.message.bytes", "0"), ("max.message.bytes", "536870913"), ("max.message.bytes", INT_MAX),
    ("file.delete.delay.ms", LONG_MAX), ("retention.bytes", "-5"), ("min.cleanable.dirty.ratio", "NaN"),
)  # fmt: skip
TAKEN_HERE: Final = (
    ("segment.bytes", "256"), ("segment.bytes", "64MiB"), ("retention.ms", "7d"), ("cleanup.policy", "Compact"),
    ("compression.type", "none"), ("message.timestamp.type", "logappendtime"),
)  # fmt: skip
SAID_AS: Final = {
    ("cleanup.policy", "delete, compact"): "compact,delete",
    ("cleanup.policy", "Compact"): "compact",
    ("compression.type", "none"): "uncompressed",
    ("flush.ms", "0"): "1",
    ("message.timestamp.type", "logappendtime"): "LogAppendTime",
    ("min.cleanable.dirty.ratio", "0"): "0.0",
    ("min.cleanable.dirty.ratio", "1"): "1.0",
    ("min.cleanable.dirty.ratio", "1e-1"): "0.1",
    ("remote.storage.enable", "TRUE"): "true",
    ("retention.ms", "7d"): "604800000",
    ("segment.bytes", "64MiB"): "67108864",
} | {
    (name, LONG_MAX): "-1"
    for name in ("local.retention.ms", "local.retention.bytes", "retention.ms", "retention.bytes")
}
WITHOUT: Final = {name for name, one in SETTINGS.items() if one.why}
TAKEN: Final = [(name, value) for name, (taken, _) in KAFKA.items() for value in taken]
REFUSED: Final = [(name, value) for name, (_, refused) in KAFKA.items() for value in refused]


def config_of(name: str, value: str) -> TopicConfig:
    """Return the settings of a new topic that is created with this one."""
    return TopicConfig.from_mapping(to_engine({name: value}))


def described(config: TopicConfig) -> dict[str, str | None]:
    """Return every setting as a client sees it."""
    return {entry.name: entry.value for entry in describe(config)}


def test_every_setting_of_kafkas_is_in_the_table() -> None:
    """The table has all settings of 4.4.0; the described settings are those that can be set."""
    assert len(KAFKA) == 37
    assert set(KAFKA) == set(SETTINGS)
    assert list(described(TopicConfig())) == known_keys() == sorted({*SETTINGS, *TOPIC_CONFIG_KEYS})


@pytest.mark.parametrize(("name", "value"), [*TAKEN, *TAKEN_HERE])
def test_a_right_value_has_its_effect_or_is_reported_to_have_none(name: str, value: str) -> None:
    """The described value is the new one, or the log says why it has no effect."""
    config = config_of(name, value)
    before, after = described(TopicConfig()), described(config)
    ineffective = without_effect({name: value}, config, is_shipped=True)
    if name in WITHOUT:
        assert config == TopicConfig()
        assert bool(ineffective) == (value.strip().lower() != before[name])
        assert not ineffective or ineffective.startswith(f"{name}={value.strip()} (")
    elif name.startswith("compression.") and name.endswith(".level"):
        assert ineffective == f"{name}={value} (compression.type is producer)"
    elif (name, value) == ("flush.ms", LONG_MAX):
        assert ineffective == f"{name}={value} (fsync is 1000ms)"
    else:
        assert not ineffective
        assert after[name] == SAID_AS.get((name, value), value.strip())


@pytest.mark.parametrize(("name", "value"), [*REFUSED, *REFUSED_HERE])
def test_a_wrong_value_is_refused(name: str, value: str) -> None:
    """The error has the key, the value, and the valid values."""
    with pytest.raises(InvalidConfig) as caught:
        config_of(name, value)
    assert caught.value.key == name
    assert caught.value.accepted in str(caught.value)


def test_every_setting_has_a_meaning_or_a_reason() -> None:
    """Each has the text that a client gets as documentation."""
    for entry in describe(TopicConfig()):
        assert entry.documentation
        assert entry.documentation.startswith("Has no effect here: ") == (entry.name in WITHOUT)


@pytest.mark.parametrize("codec", ["producer", "lz4", "zstd", "gzip", "snappy", "none"])
def test_a_level_that_is_described_can_be_written_back(codec: str) -> None:
    """Tools read all settings and write them back: an unset level stays unset."""
    config = TopicConfig(compression_type=codec)
    (level,) = [entry.value for entry in describe(config) if entry.name == "compression.level"]
    assert config.replace(to_engine({"compression.level": level}, config)).compression_level is None


def test_levels_are_those_of_the_topics_codec() -> None:
    """The level of another codec changes nothing; a topic that changes its codec has that one's level."""
    zstd = TopicConfig.from_mapping(
        to_engine({"compression.zstd.level": "19", "compression.type": "zstd", "compression.gzip.level": "2"})
    )
    assert (zstd.compression_type, zstd.compression_level) == ("zstd", 19)
    told = described(zstd)
    assert (told["compression.zstd.level"], told["compression.gzip.level"]) == ("19", "-1")
    ineffective = without_effect({"compression.gzip.level": "2"}, zstd, is_shipped=True)
    assert ineffective == "compression.gzip.level=2 (compression.type is zstd)"
    gzip = zstd.replace(to_engine({"compression.type": "gzip"}, zstd))
    assert (gzip.compression_type, gzip.compression_level) == ("gzip", None)
    gzip = zstd.replace(to_engine({"compression.type": "gzip", "compression.gzip.level": "9"}, zstd))
    assert gzip.compression_level == 9
    assert not without_effect({"compression.gzip.level": "9"}, gzip, is_shipped=True)
    assert gzip.replace(to_engine({"compression.gzip.level": "-1"}, gzip)).compression_level is None
    assert gzip.replace(to_engine({}, gzip, ["compression.gzip.level"])).compression_level is None
    assert gzip.replace(to_engine({}, gzip, ["compression.zstd.level"])) == gzip
    assert gzip.replace(to_engine({}, gzip, ["compression.type"])) == TopicConfig()


@pytest.mark.parametrize(
    ("settings", "fsync"),
    [
        ({"flush.messages": "1", "flush.ms": "5000"}, "always"),
        ({"flush.ms": "5000", "flush.messages": "1"}, "always"),
        ({"flush.messages": "10", "flush.ms": "5000"}, "5000ms"),
        ({"flush.messages": "10", "flush.ms": LONG_MAX}, "10records"),
        ({"flush.messages": LONG_MAX, "flush.ms": LONG_MAX}, "1000ms"),
        ({"flush.ms": "0"}, "1ms"),
        ({"flush.messages": "1", "fsync": "never"}, "always"),
    ],
)
def test_of_both_flush_settings_the_safer_holds(settings: dict[str, str], fsync: str) -> None:
    """This holds in any order: the engine has one policy. Without a limit, the policy stays as it is."""
    assert str(TopicConfig.from_mapping(to_engine(settings)).fsync) == fsync


def test_tiered_storage_has_no_effect_until_the_store_is_shipped() -> None:
    """The missing effect is reported, as for a setting that never has one."""
    config = config_of("remote.storage.enable", "true")
    assert not without_effect({"remote.storage.enable": "true"}, config, is_shipped=True)
    assert "segmentlog ship" in without_effect({"remote.storage.enable": "true"}, config, is_shipped=False)
    assert not without_effect({"remote.storage.enable": "false"}, TopicConfig(), is_shipped=False)


def test_unknown_settings() -> None:
    """They are refused when they are set, and ignored when they are reset: MirrorMaker resets all settings it knows."""
    for name in ("message.downconversion.enable", "message.format.version", "retention.sm", ""):
        with pytest.raises(InvalidConfig, match="unknown topic setting"):
            to_engine({name: "1"})
        assert engine_keys(name) == ()
        assert to_engine({}, TopicConfig(), [name]) == {}
    with pytest.raises(InvalidConfig, match="a value"):
        to_engine({"retention.ms": None})


@pytest.mark.parametrize("name", KAFKA)
def test_a_reset_gives_the_default_back(name: str) -> None:
    """A reset of any setting restores the default."""
    config = config_of(name, KAFKA[name][0][-1])
    assert config.replace(to_engine({}, config, [name])) == TopicConfig()
