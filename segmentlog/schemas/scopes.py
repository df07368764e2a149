"""Find the settings and the mode that apply to a subject: its own, else those of its context, else the global ones."""

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
    """Return a mode in upper case. Raises `InvalidRegistryMode`."""
    if not isinstance(mode, str) or mode.upper() not in MODES:
        raise InvalidRegistryMode(mode)
    return mode.upper()


def _scopes(subject: str | None) -> list[str | None]:
    if subject is None:
        return [None]
    scope = context_scope(context_of(subject))
    return [subject, None] if scope is None else [subject, scope, None]


def mode_of(state: RegistryState, subject: str | None) -> str:
    """Return the mode that applies to a subject; a global READONLY_OVERRIDE overrides the subject's own mode."""
    if state.modes.get(None) == READONLY_OVERRIDE:
        return READONLY_OVERRIDE
    return next((state.modes[scope] for scope in _scopes(subject) if scope in state.modes), READWRITE)


def setting_of(state: RegistryState, subject: str | None, name: str) -> Any:
    """Return the value of a setting that applies to a subject, or None."""
    for scope in _scopes(subject):
        value = state.configs.get(scope, {}).get(name)
        if value is not None:
            return value
    return None


def level_of(state: RegistryState, subject: str | None) -> str:
    """Return the compatibility level that applies to a subject."""
    level = setting_of(state, subject, "compatibilityLevel")
    return level if level in LEVELS else DEFAULT_LEVEL


def config_of(state: RegistryState, subject: str | None) -> Mapping[str, Any]:
    """Return every setting that applies to a subject."""
    found: dict[str, Any] = {"compatibilityLevel": level_of(state, subject)}
    for scope in reversed(_scopes(subject)):
        found |= {name: value for name, value in state.configs.get(scope, {}).items() if value is not None}
    found.pop("subject", None)
    return found


def check_writable_mode(state: RegistryState, subject: str | None) -> None:
    """Raise `NotPermitted` if the mode of a subject forbids changes."""
    if mode_of(state, subject) in (READONLY, READONLY_OVERRIDE):
        where = "The registry" if subject is None else f"Subject {subject} in context {context_of(subject)}"
        raise NotPermitted(f"{where} is in read-only mode")


def check_register_mode(state: RegistryState, subject: str, schema_id: int) -> None:
    """Raise `NotPermitted` if the mode of a subject forbids a new schema.

    A schema with an id (an import) requires mode IMPORT. A schema without an id (-1) requires mode READWRITE.
    """
    check_writable_mode(state, subject)
    mode = mode_of(state, subject)
    if schema_id >= 0 and mode != IMPORT:
        raise NotPermitted(f"Subject {subject} is not in import mode")
    if schema_id < 0 and mode != READWRITE:
        raise NotPermitted(f"Subject {subject} is not in read-write mode")
