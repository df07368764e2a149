"""What applies to a subject: its own setting, else that of its context, else that for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from segmentlog.schemas.compatibility import DEFAULT_LEVEL, LEVELS
from segmentlog.schemas.registry_errors import InvalidRegistryMode, NotPermitted
from segmentlog.schemas.registry_state import RegistryState
from segmentlog.schemas.subject_names import context_of, context_scope

READWRITE, READONLY, READONLY_OVERRIDE, IMPORT = "READWRITE", "READONLY", "READONLY_OVERRIDE", "IMPORT"
MODES: Final = (READWRITE, READONLY, READONLY_OVERRIDE, IMPORT)


def check_mode(mode: object) -> str:
    """A mode, in whatever case. Raises `InvalidRegistryMode`."""
    if not isinstance(mode, str) or mode.upper() not in MODES:
        raise InvalidRegistryMode(mode)
    return mode.upper()


def _scopes(subject: str | None) -> list[str | None]:
    if subject is None:
        return [None]
    scope = context_scope(context_of(subject))
    return [subject, None] if scope is None else [subject, scope, None]


def mode_of(state: RegistryState, subject: str | None) -> str:
    """The mode that a subject is in; READONLY_OVERRIDE for all goes before whatever a subject says."""
    if state.modes.get(None) == READONLY_OVERRIDE:
        return READONLY_OVERRIDE
    return next((state.modes[scope] for scope in _scopes(subject) if scope in state.modes), READWRITE)


def setting_of(state: RegistryState, subject: str | None, name: str) -> Any:
    """One setting as it applies to a subject; None where nobody has set it."""
    for scope in _scopes(subject):
        value = state.configs.get(scope, {}).get(name)
        if value is not None:
            return value
    return None


def level_of(state: RegistryState, subject: str | None) -> str:
    """The level of compatibility that applies to a subject."""
    level = setting_of(state, subject, "compatibilityLevel")
    return level if level in LEVELS else DEFAULT_LEVEL


def config_of(state: RegistryState, subject: str | None) -> Mapping[str, Any]:
    """Every setting as it applies to a subject."""
    found: dict[str, Any] = {"compatibilityLevel": level_of(state, subject)}
    for scope in reversed(_scopes(subject)):
        found |= {name: value for name, value in state.configs.get(scope, {}).items() if value is not None}
    found.pop("subject", None)
    return found


def check_writable_mode(state: RegistryState, subject: str | None) -> None:
    """Raise `NotPermitted` in a mode that lets nothing be changed."""
    if mode_of(state, subject) in (READONLY, READONLY_OVERRIDE):
        where = "The registry" if subject is None else f"Subject {subject} in context {context_of(subject)}"
        raise NotPermitted(f"{where} is in read-only mode")


def check_register_mode(state: RegistryState, subject: str, schema_id: int) -> None:
    """Raise `NotPermitted`: with an id of its own a schema is imported, without it is registered, and never both."""
    check_writable_mode(state, subject)
    mode = mode_of(state, subject)
    if schema_id >= 0 and mode != IMPORT:
        raise NotPermitted(f"Subject {subject} is not in import mode")
    if schema_id < 0 and mode != READWRITE:
        raise NotPermitted(f"Subject {subject} is not in read-write mode")
