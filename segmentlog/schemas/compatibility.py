"""Compatibility levels: which earlier versions a new version is compared with, and in which direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from segmentlog.schemas.registry_errors import InvalidCompatibility
from segmentlog.schemas.schema_kind import ParsedSchema

DEFAULT_LEVEL: Final = "BACKWARD"
LEVELS: Final = (
    "NONE", "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE"
)  # fmt: skip
"""BACKWARD: a reader with the new schema can read data of the latest version. FORWARD: a reader with the latest version
can read data of the new schema. FULL: both. TRANSITIVE compares with all earlier versions, not only with the latest."""


def check_level(level: object) -> str:
    """Return a compatibility level in upper case. Raises `InvalidCompatibility`."""
    if not isinstance(level, str) or level.upper() not in LEVELS:
        raise InvalidCompatibility(level)
    return level.upper()


class Earlier(NamedTuple):
    """An earlier version, to be compared with a new version. Calling `parsed` parses its text."""

    version: int
    text: str
    schema_type: str
    parsed: Callable[[], ParsedSchema]


def incompatibilities(level: str, new: ParsedSchema, new_type: str, earlier: Sequence[Earlier]) -> list[str]:
    """Return the reasons why a level forbids a new schema; empty if it is compatible. Earlier versions are in order."""
    if level == "NONE":
        return []
    compared = earlier if level.endswith("_TRANSITIVE") else earlier[-1:]
    for one in reversed(compared):
        if one.schema_type != new_type:
            problems = [
                "{errorType:'SCHEMA_TYPE_CHANGED', description:'Incompatible because of different schema type:"
                f" {one.schema_type} before, {new_type} now'}}"
            ]
        else:
            try:
                other = one.parsed()
                problems = new.why_unreadable(other) if not level.startswith("FORWARD") else []
                if not level.startswith("BACKWARD"):
                    problems += other.why_unreadable(new)
            except RecursionError:
                problems = ["{errorType:'NOT_COMPARED', description:'the schemas are nested too deeply'}"]
        if problems:
            return [
                *problems,
                f"{{oldSchemaVersion: {one.version}}}",
                f"{{oldSchema: '{one.text}'}}",
                f"{{compatibility: '{level}'}}",
            ]
    return []
