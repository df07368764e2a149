"""Configuration of a group (ConfigResource of type GROUP): check its keys and values, and apply them to settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from segmentlog.errors import InvalidConfig
from segmentlog.format.file_names import folder_name_of
from segmentlog.policy.kafka_configs import TYPE_BOOLEAN, TYPE_INT, ConfigEntry
from segmentlog.server.groups.classic_types import GroupSettings

_SESSION: Final = "consumer.session.timeout.ms"
_HEARTBEAT: Final = "consumer.heartbeat.interval.ms"
_FIELDS: Final = {_SESSION: "consumer_session_timeout_ms", _HEARTBEAT: "consumer_heartbeat_interval_ms"}
_FIXED: Final = {
    "consumer.assignment.interval.ms": ("0", TYPE_INT),
    "consumer.assignor.offload.enable": ("false", TYPE_BOOLEAN),
}
"""Keys of Kafka that must have this value, because the request that changes a group also computes its assignment."""


def check_name(group: str) -> None:
    """Raise `InvalidConfig` unless this is a valid group name."""
    if not group:
        raise InvalidConfig("group", group, "use the name of a group; defaults for all groups cannot be set")
    folder_name_of(group, "group")


def check_key(key: str) -> None:
    """Raise `InvalidConfig` unless this is a configuration key of groups."""
    if key not in _FIELDS and key not in _FIXED:
        raise InvalidConfig(key, "", f"a key of a group: {', '.join(sorted({*_FIELDS, *_FIXED}))}")


def checked(settings: GroupSettings, changes: Mapping[str, str | int | None]) -> dict[str, int]:
    """Return the values to store, as integers. Raises `InvalidConfig`."""
    found = {}
    for key, value in changes.items():
        check_key(key)
        text = "" if value is None else str(value).strip()
        if key in _FIXED:
            if text.lower() != _FIXED[key][0]:
                raise InvalidConfig(key, value, f"{_FIXED[key][0]}: other values are not supported")
        elif not (text.isascii() and text.isdecimal()) or len(text) > 10:
            raise InvalidConfig(key, value, "a whole number of milliseconds")
        else:
            found[key] = int(text)
    lowest, highest = settings.min_session_timeout_ms, settings.max_session_timeout_ms
    if not lowest <= found.get(_SESSION, lowest) <= highest:
        raise InvalidConfig(_SESSION, found[_SESSION], f"a number from {lowest} to {highest}")
    lowest = settings.consumer_min_heartbeat_interval_ms
    if found.get(_HEARTBEAT, lowest) < lowest:
        raise InvalidConfig(_HEARTBEAT, found[_HEARTBEAT], f"a number, at least {lowest}")
    after = configured(settings, found)
    if after.consumer_session_timeout_ms <= after.consumer_heartbeat_interval_ms:
        raise InvalidConfig(_SESSION, after.consumer_session_timeout_ms, f"more than {_HEARTBEAT}")
    return found


def configured(settings: GroupSettings, config: Mapping[str, int]) -> GroupSettings:
    """Return the settings of a group with this configuration."""
    if not config:
        return settings
    changes = {_FIELDS[key]: value for key, value in config.items() if key in _FIELDS}
    return msgspec.structs.replace(settings, **changes)


def describe(settings: GroupSettings, config: Mapping[str, int]) -> list[ConfigEntry]:
    """Return every key with its value, sorted by key."""
    now = configured(settings, config)
    entries = [
        ConfigEntry(key, str(getattr(now, field)), key not in config, TYPE_INT) for key, field in _FIELDS.items()
    ]
    return sorted(entries + [ConfigEntry(key, value, True, kind) for key, (value, kind) in _FIXED.items()])
