"""Translate Kafka's topic settings: a table of all settings of Kafka 4.4.0, and the effect of each.

Most settings are also keys of the engine. A few are translated to one (`flush.ms`, `compression.gzip.level`). The
rest concern replication, or mechanisms that segmentlog does not have: their values are checked by Kafka's rules, and
have no effect. DescribeConfigs documents that, and returns the effective value. `without_effect` lists these settings
for a log message. Any other key is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from segmentlog.config import CLIENT_TIMESTAMP_AFTER_MAX_MS, PRODUCER, TOPIC_CONFIG_KEYS, FsyncPolicy, TopicConfig
from segmentlog.errors import InvalidConfig
from segmentlog.quantities import INT64_MAX, UNLIMITED, UNLIMITED_MS

TYPE_BOOLEAN, TYPE_STRING, TYPE_INT, TYPE_LONG, TYPE_DOUBLE, TYPE_LIST = 1, 2, 3, 5, 6, 7
SOURCE_TOPIC, SOURCE_DEFAULT, SOURCE_GROUP = 1, 5, 8

_INT_MAX: Final = 2**31 - 1
_WHOLE: Final = re.compile(r"[+-]?[0-9]+")
_REPLICA: Final = re.compile(r"([0-9]+:[0-9]+)?")

# ---------------------------------------------------------------- Kafka's rules


class _Rule(NamedTuple):
    """The type and the valid values of a setting in Kafka."""

    type: int
    allows: Callable[[str], bool]
    """Takes a value without surrounding spaces."""
    accepted: str


def _whole(kind: int, low: int, high: int | None = None, *more: int) -> _Rule:
    """Return the rule for an integer from ``low`` to ``high`` (None: the maximum of the type), or one of ``more``."""
    most = high if high is not None else _INT_MAX if kind == TYPE_INT else INT64_MAX

    def allows(value: str) -> bool:
        if not _WHOLE.fullmatch(value) or len(value) > 20:
            return False
        return low <= int(value) <= most or int(value) in more

    others = "".join(f", or {number}" for number in more)
    return _Rule(kind, allows, f"a whole number from {low} to {most}{others}")


def _is_policy(value: str) -> bool:
    return {word.strip().lower() for word in value.split(",")} <= {"", "delete", "compact"}


def _are_replicas(value: str) -> bool:
    return value == "*" or all(_REPLICA.fullmatch(part.strip()) for part in value.split(","))


def _is_ratio(value: str) -> bool:
    try:
        return 0 <= float(value) <= 1
    except ValueError:
        return False


def _choice(*names: str) -> _Rule:
    return _Rule(TYPE_STRING, names.__contains__, f"{', '.join(names[:-1])} or {names[-1]}")


_FLAG: Final = _Rule(TYPE_BOOLEAN, lambda value: value.lower() in ("true", "false"), "true or false")
_REPLICAS: Final = _Rule(TYPE_LIST, _are_replicas, "* or a list of PARTITION:BROKER")


class _Setting(NamedTuple):
    """A row of the table of settings."""

    rule: _Rule
    described: str = ""
    """The effective value of a setting without effect."""
    why: str = ""
    """Why the setting has no effect; empty for a setting that has one."""
    is_exact: bool = True
    """Whether the rule applies to every value. If not, it applies to plain numbers, and the engine checks texts such as
    7d or 64MiB."""


def _in_effect(rule: _Rule) -> _Setting:
    return _Setting(rule, is_exact=False)


_TIMESTAMP_AFTER: Final = "message.timestamp.after.max.ms"
_FLUSH_MESSAGES, _FLUSH_MS = "flush.messages", "flush.ms"
_COMPRESSION: Final = "compression.type"
_LEVEL: Final = "compression.level"
_LEVELS: Final = {"compression.gzip.level": ("gzip", "-1"), "compression.zstd.level": ("zstd", "1")}
"""The codec of each level, and the level that is used if none is set."""
_ONE_COPY: Final = "a partition has one copy, on this machine"
_NO_TIERS: Final = "it configures Kafka's own tiered storage; `segmentlog ship` uploads each segment that is sealed"

SETTINGS: Final[Mapping[str, _Setting]] = {
    "cleanup.policy": _Setting(_Rule(TYPE_LIST, _is_policy, "delete, compact, both or nothing")),
    "compression.gzip.level": _Setting(_whole(TYPE_INT, 1, 9, -1)),
    "compression.lz4.level": _Setting(_whole(TYPE_INT, 1, 17), "9", "LZ4 has one level here"),
    "compression.type": _Setting(_choice("uncompressed", "zstd", "lz4", "snappy", "gzip", PRODUCER, "none")),
    "compression.zstd.level": _Setting(_whole(TYPE_INT, -131072, 22)),
    "delete.retention.ms": _in_effect(_whole(TYPE_LONG, 0)),
    "errors.deadletterqueue.group.enable": _Setting(_FLAG, "false", "there are no share groups"),
    "file.delete.delay.ms": _in_effect(_whole(TYPE_LONG, 0)),
    _FLUSH_MESSAGES: _Setting(_whole(TYPE_LONG, 1)),
    _FLUSH_MS: _Setting(_whole(TYPE_LONG, 0)),
    "follower.replication.throttled.replicas": _Setting(_REPLICAS, "", _ONE_COPY),
    "index.interval.bytes": _in_effect(_whole(TYPE_INT, 0)),
    "leader.replication.throttled.replicas": _Setting(_REPLICAS, "", _ONE_COPY),
    "local.retention.bytes": _in_effect(_whole(TYPE_LONG, -2)),
    "local.retention.ms": _in_effect(_whole(TYPE_LONG, -2)),
    "max.compaction.lag.ms": _in_effect(_whole(TYPE_LONG, 1)),
    "max.decompressed.message.bytes": _in_effect(_whole(TYPE_INT, 1, 2**31 - 9)),
    "max.message.bytes": _in_effect(_whole(TYPE_INT, 0)),
    _TIMESTAMP_AFTER: _in_effect(_whole(TYPE_LONG, 0)),
    "message.timestamp.before.max.ms": _in_effect(_whole(TYPE_LONG, 0)),
    "message.timestamp.type": _in_effect(_choice("CreateTime", "LogAppendTime")),
    "min.cleanable.dirty.ratio": _Setting(_Rule(TYPE_DOUBLE, _is_ratio, "a number from 0 to 1")),
    "min.compaction.lag.ms": _in_effect(_whole(TYPE_LONG, 0)),
    "min.insync.replicas": _Setting(_whole(TYPE_INT, 1), "1", _ONE_COPY),
    "preallocate": _Setting(_FLAG, "true", "segments are always preallocated"),
    "remote.copy.lag.bytes": _Setting(_whole(TYPE_LONG, -1), "0", _NO_TIERS),
    "remote.copy.lag.ms": _Setting(_whole(TYPE_LONG, -1), "0", _NO_TIERS),
    "remote.log.copy.disable": _Setting(_FLAG, "false", _NO_TIERS),
    "remote.log.delete.on.disable": _Setting(_FLAG, "false", _NO_TIERS),
    "remote.storage.enable": _Setting(_FLAG),
    "retention.bytes": _in_effect(_whole(TYPE_LONG, -(2**63))),
    "retention.ms": _in_effect(_whole(TYPE_LONG, -1)),
    # Kafka requires at least 1 MiB. Small segments do no harm in this engine.
    "segment.bytes": _in_effect(_whole(TYPE_INT, 256)),
    "segment.index.bytes": _Setting(_whole(TYPE_INT, 4), "10485760", "indexes grow with their segment"),
    "segment.jitter.ms": _Setting(_whole(TYPE_LONG, 0), "0", "each partition is rolled by its own records"),
    "segment.ms": _in_effect(_whole(TYPE_LONG, 1)),
    "unclean.leader.election.enable": _Setting(_FLAG, "false", _ONE_COPY),
}
"""Every topic setting of Kafka 4.4.0, with the rules of its `LogConfig`."""

_KNOWN: Final = tuple(sorted({*TOPIC_CONFIG_KEYS, *SETTINGS}))


def _checked(name: str, value: str) -> str:
    """Return the value without surrounding spaces. Raise `InvalidConfig` for a value that Kafka refuses."""
    text, (rule, _, _, is_exact) = value.strip(), SETTINGS[name]
    if (is_exact or _WHOLE.fullmatch(text)) and not rule.allows(text):
        raise InvalidConfig(name, value, rule.accepted)
    return text


# ---------------------------------------------------------------- into the engine's keys


def to_engine(
    settings: Mapping[str, str | None], config: TopicConfig | None = None, resets: Iterable[str] = ()
) -> dict[str, object]:
    """Translate Kafka's settings to changes of engine keys for a topic with ``config`` (None: a new topic).

    Keys in ``resets`` get their defaults. This function checks the values of settings without effect; `TopicConfig`
    also checks all others. Raise `InvalidConfig` for an unknown key, a value that Kafka refuses, and a missing value.
    The reset of an unknown key has no effect: MirrorMaker resets each key that is not set at the source.
    """
    fresh = TopicConfig()
    before = fresh if config is None else config
    changes = {key: getattr(fresh, key.replace(".", "_")) for name in resets for key in engine_keys(name, before)}
    texts: dict[str, str] = {}
    for name, value in settings.items():
        if value is None:
            raise InvalidConfig(name, value, "a value is required")
        if name not in _KNOWN:
            raise InvalidConfig(name, value, f"unknown topic setting; the settings are: {', '.join(_KNOWN)}")
        texts[name] = _checked(name, value) if name in SETTINGS else value
    changes |= {name: value for name, value in texts.items() if name in TOPIC_CONFIG_KEYS}
    codec = before.replace(
        {_COMPRESSION: changes.get(_COMPRESSION, before.compression_type), _LEVEL: None}
    ).compression_type
    if codec != before.compression_type and before.compression_level is not None:
        changes.setdefault(_LEVEL, None)  # it was the level of the previous codec
    for name, (of_codec, unset) in _LEVELS.items():
        if name in texts and of_codec == codec:
            changes[_LEVEL] = None if texts[name] == unset else int(texts[name])
    messages, flush_ms = (int(texts.get(name, INT64_MAX)) for name in (_FLUSH_MESSAGES, _FLUSH_MS))
    if messages == 1:
        changes["fsync"] = "always"
    elif flush_ms <= _INT_MAX:  # a larger value means no limit, and keeps the engine's policy
        changes["fsync"] = f"{max(flush_ms, 1)}ms"
    elif messages <= _INT_MAX:
        changes["fsync"] = f"{messages}records"
    return changes


def without_effect(settings: Mapping[str, str | None], config: TopicConfig, *, is_shipped: bool) -> str:
    """Return the settings whose values have no effect in a topic with ``config``, each with the reason; "" for none.

    A value that is in effect anyway (`min.insync.replicas=1`) is not listed. ``is_shipped`` tells whether the store is
    uploaded to an object store.
    """
    found = []
    for name, value in sorted(settings.items()):
        setting = SETTINGS.get(name)
        if setting is None or value is None:
            continue
        if setting.why and value.strip().lower() != setting.described:
            found.append(f"{name}={' '.join(value.split()):.100} ({setting.why})")
        elif name in _LEVELS and _LEVELS[name][0] != config.compression_type:
            found.append(f"{name}={value.strip()} (compression.type is {config.compression_type})")
        elif name in (_FLUSH_MESSAGES, _FLUSH_MS) and max(int(value), 1) != _flushes(config.fsync)[name]:
            found.append(f"{name}={value.strip()} (fsync is {config.fsync})")
        elif name == "remote.storage.enable" and config.remote_storage_enable and not is_shipped:
            found.append(f"{name}=true (until the store is shipped to an object store: segmentlog ship)")
    return ", ".join(found)


def known_keys() -> list[str]:
    """Return every valid key, sorted."""
    return list(_KNOWN)


def is_list(name: str) -> bool:
    """Return whether a setting is a list, to which an alteration can append words or remove them."""
    return name in SETTINGS and SETTINGS[name].rule.type == TYPE_LIST


def engine_keys(name: str, config: TopicConfig | None = None) -> tuple[str, ...]:
    """Return the engine's keys that a Kafka setting changes in a topic with ``config``.

    Return () for a setting without effect, an unknown key, and the level of a codec that the topic does not use.
    """
    if name in (_FLUSH_MESSAGES, _FLUSH_MS):
        return ("fsync",)
    if name in _LEVELS:
        return (_LEVEL,) if config is None or config.compression_type == _LEVELS[name][0] else ()
    return (name,) if name in TOPIC_CONFIG_KEYS else ()


# ---------------------------------------------------------------- for DescribeConfigs


class ConfigEntry(NamedTuple):
    """A key and its value in the response to DescribeConfigs."""

    name: str
    value: str | None
    is_default: bool
    type: int
    read_only: bool = False
    documentation: str | None = None


def describe(config: TopicConfig) -> list[ConfigEntry]:
    """Return every key with its value as Kafka writes it: sizes and times are plain numbers, without units."""
    changed = config.to_mapping()
    entries = []
    for name in TOPIC_CONFIG_KEYS:
        value: Any = getattr(config, name.replace(".", "_"))
        is_default = name not in changed
        entries.append(
            ConfigEntry(name, _text(name, value), is_default, _type_of(name, value), documentation=_MEANINGS[name])
        )
    for name, (codec, unset) in _LEVELS.items():
        is_set = config.compression_type == codec and config.compression_level is not None
        level = str(config.compression_level) if is_set else unset
        entries.append(
            ConfigEntry(name, level, not is_set, TYPE_INT, documentation=f"{_LEVEL} where {_COMPRESSION} is {codec}")
        )
    for name, amount in _flushes(config.fsync).items():
        entries.append(
            ConfigEntry(name, str(amount), "fsync" not in changed, TYPE_LONG, documentation="fsync, as Kafka says it")
        )
    entries += _WITHOUT_EFFECT
    return sorted(entries)


def _flushes(policy: FsyncPolicy) -> dict[str, int]:
    """Return the engine's fsync policy as Kafka's two settings."""
    return {
        _FLUSH_MESSAGES: 1 if policy.kind == "always" else policy.amount if policy.kind == "records" else UNLIMITED_MS,
        _FLUSH_MS: policy.amount if policy.kind == "ms" else UNLIMITED_MS,
    }


_MEANINGS: Final = {line.key: line.meaning for line in TopicConfig().describe()}
_WITHOUT_EFFECT: Final = [
    ConfigEntry(name, one.described, True, one.rule.type, documentation=f"Has no effect here: {one.why}.")
    for name, one in SETTINGS.items()
    if one.why
]


def _text(name: str, value: Any) -> str:
    if name == _TIMESTAMP_AFTER and value is None:
        return str(CLIENT_TIMESTAMP_AFTER_MAX_MS)
    if name == _LEVEL and value is None:
        return "default"  # -1 is a level of zstd
    if value is None:
        return str(UNLIMITED)
    if isinstance(value, FsyncPolicy):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if name == _COMPRESSION and value == "none":
        return "uncompressed"
    return ",".join(sorted(value.split(","))) if name == "cleanup.policy" else str(value)


def _type_of(name: str, value: Any) -> int:
    if name in SETTINGS:
        return SETTINGS[name].rule.type
    if isinstance(value, bool):
        return TYPE_BOOLEAN
    return TYPE_LONG if isinstance(value, int) else TYPE_STRING
