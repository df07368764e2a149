"""Levels of compatibility: which earlier versions a new one is compared with, and in which direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from segmentlog.schemas.registry_errors import InvalidCompatibility
from segmentlog.schemas.schema_kind import ParsedSchema

DEFAULT_LEVEL: Final = "BACKWARD"
LEVELS: Final = (
    "NONE", "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE"
)  # fmt: skip
"""BACKWARD: a reader with the new schema understands what was written with the last one; FORWARD: the other way round;
FULL: both. Transitive: with all earlier ones, too."""


def check_level(level: object) -> str:
    """A level, in whatever case. Raises `InvalidCompatibility`."""
    if not isinstance(level, str) or level.upper() not in LEVELS:
        raise InvalidCompatibility(level)
    return level.upper()


class Earlier(NamedTuple):
    """A version that a new one is compared with. It is read when it is needed."""

    version: int
    text: str
    schema_type: str
    parsed: Callable[[], ParsedSchema]


def incompatibilities(level: str, new: ParsedSchema, new_type: str, earlier: Sequence[Earlier]) -> list[str]:
    """What a level finds wrong with a schema that is to follow others, which are given in order. Empty: nothing."""
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
