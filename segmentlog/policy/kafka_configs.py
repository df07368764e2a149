"""A topic's configuration in Kafka's words: most keys are the engine's, a few are translated, some change nothing.

Kafka's tools, Streams, Connect and MirrorMaker set keys that mean something between brokers. They are taken, and told
as they stand with a single broker, where nothing that anybody relies on is promised by that; every other unknown key
is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from segmentlog.config import CLIENT_TIMESTAMP_AFTER_MAX_MS, TOPIC_CONFIG_KEYS, FsyncPolicy, TopicConfig
from segmentlog.errors import InvalidConfig
from segmentlog.quantities import UNLIMITED, UNLIMITED_MS

TYPE_BOOLEAN, TYPE_STRING, TYPE_INT, TYPE_LONG, TYPE_DOUBLE, TYPE_LIST = 1, 2, 3, 5, 6, 7
SOURCE_TOPIC, SOURCE_DEFAULT, SOURCE_GROUP = 1, 5, 8

WITHOUT_EFFECT: Final[Mapping[str, tuple[str, int]]] = {
    "compression.gzip.level": ("-1", TYPE_INT),
    "compression.lz4.level": ("9", TYPE_INT),
    "compression.zstd.level": ("3", TYPE_INT),
    "follower.replication.throttled.replicas": ("", TYPE_LIST),
    "leader.replication.throttled.replicas": ("", TYPE_LIST),
    "min.insync.replicas": ("1", TYPE_INT),
    "preallocate": ("true", TYPE_BOOLEAN),
    "segment.index.bytes": ("10485760", TYPE_INT),
    "segment.jitter.ms": ("0", TYPE_LONG),
    "unclean.leader.election.enable": ("false", TYPE_BOOLEAN),
}
"""Keys of Kafka's that are taken and change nothing: the value that is told, and its type."""

_TIMESTAMP_AFTER: Final = "message.timestamp.after.max.ms"
_FLUSH_MESSAGES, _FLUSH_MS = "flush.messages", "flush.ms"
_COMPRESSION: Final = "compression.type"
_FROM_KAFKA: Final = {"producer": "lz4", "uncompressed": "none"}
_TYPES: Final = {
    "cleanup.policy": TYPE_LIST,
    "min.cleanable.dirty.ratio": TYPE_DOUBLE,
    "segment.bytes": TYPE_INT,
    "index.interval.bytes": TYPE_INT,
    "max.message.bytes": TYPE_INT,
}


class Entry(NamedTuple):
    """One key as DescribeConfigs tells it."""

    name: str
    value: str | None
    is_default: bool
    type: int
    read_only: bool = False


def to_engine(settings: Mapping[str, str | None]) -> dict[str, object]:
    """The engine's keys for Kafka's, their values yet to be checked. Raises `InvalidConfig` for what neither knows."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        if value is None:
            raise InvalidConfig(name, value, "a value")
        if name == _COMPRESSION:
            found[name] = _FROM_KAFKA.get(value, value)
        elif name == _FLUSH_MESSAGES:
            found["fsync"] = "always" if value == "1" else _policy(name, value, "records", found)
        elif name == _FLUSH_MS:
            found["fsync"] = _policy(name, value, "ms", found)
        elif name in TOPIC_CONFIG_KEYS:
            found[name] = value
        elif name not in WITHOUT_EFFECT:
            raise InvalidConfig(name, value, f"a key of a topic: {', '.join(known_keys())}")
    return {name: value for name, value in found.items() if value is not None}


def _policy(name: str, value: str, kind: str, found: Mapping[str, object]) -> str | None:
    """Kafka's two keys for fsync as the engine's one; without a limit they say nothing, and ours stands."""
    if not value.isdecimal() or not 1 <= int(value) <= UNLIMITED_MS:
        raise InvalidConfig(name, value, "a whole number from 1 on")
    if int(value) >= 2**31:
        return str(found["fsync"]) if "fsync" in found else None
    return f"{value}{kind}"


def known_keys() -> list[str]:
    """Every key that is taken, sorted."""
    return sorted({*TOPIC_CONFIG_KEYS, *WITHOUT_EFFECT, _FLUSH_MESSAGES, _FLUSH_MS})


def engine_keys(name: str) -> tuple[str, ...]:
    """The engine's keys that a key of Kafka's is about; none for one without effect, or of which nothing is known."""
    if name in (_FLUSH_MESSAGES, _FLUSH_MS):
        return ("fsync",)
    return (name,) if name in TOPIC_CONFIG_KEYS else ()


def describe(config: TopicConfig) -> list[Entry]:
    """Every key with its value, as Kafka's clients read it: plain numbers."""
    changed = config.to_mapping()
    entries = []
    for name in TOPIC_CONFIG_KEYS:
        value: Any = getattr(config, name.replace(".", "_"))
        entries.append(Entry(name, _text(name, value, name in changed), name not in changed, _type_of(name, value)))
    policy, is_default = config.fsync, "fsync" not in changed
    messages = 1 if policy.kind == "always" else policy.amount if policy.kind == "records" else UNLIMITED_MS
    flush_ms = policy.amount if policy.kind == "ms" else UNLIMITED_MS
    entries.append(Entry(_FLUSH_MESSAGES, str(messages), is_default, TYPE_LONG))
    entries.append(Entry(_FLUSH_MS, str(flush_ms), is_default, TYPE_LONG))
    entries.extend(Entry(name, value, True, kind) for name, (value, kind) in WITHOUT_EFFECT.items())
    return sorted(entries)


def _text(name: str, value: Any, is_changed: bool) -> str:
    if name == _COMPRESSION and not is_changed:
        return "producer"  # what clients wrote is kept as it came
    if name == _TIMESTAMP_AFTER and value is None:
        return str(CLIENT_TIMESTAMP_AFTER_MAX_MS)
    if value is None:
        return str(UNLIMITED)
    if isinstance(value, FsyncPolicy):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(sorted(value.split(","))) if name == "cleanup.policy" else str(value)


def _type_of(name: str, value: Any) -> int:
    if name in _TYPES:
        return _TYPES[name]
    if name == _TIMESTAMP_AFTER:
        return TYPE_LONG  # also where it is None
    if isinstance(value, bool):
        return TYPE_BOOLEAN
    return TYPE_LONG if isinstance(value, int) else TYPE_STRING
