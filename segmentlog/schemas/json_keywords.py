"""`jsonschema`'s validators, of which no keyword takes longer than what it looks at is large.

Its own look for patterns by `re`, which some patterns keep busy for years, and with it every thread of the process.
They compare each item of an array with each. And a few lines of allOf and $ref that double each other make it go on
without an end. Here patterns are RE2's, items are hashed, and steps are counted.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import jsonschema
import re2
from jsonschema.validators import extend, validator_for

from segmentlog.schemas.registry_errors import InvalidPayload

STEPS_MAX: Final = 20_000
"""Keywords that are looked at for one value at most, and `STEPS_PER_PART` more for each part of it."""
STEPS_PER_PART: Final = 50
_ENTRIES_PER_STEP: Final = 20
"""Of an enum, or of the properties that a keyword names."""
_PATTERN_BYTES: Final = 1 << 20
_UNICODE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)

_Keyword = Callable[[Any, Any, Any, Any], Any]


class _Count(threading.local):
    """Of the value that this thread looks at."""

    steps_left = 0
    has_name_patterns = True


_count: Final = _Count()


def begin(value: Any, *, has_name_patterns: bool) -> None:
    """A value from its first step on. ``has_name_patterns``: whether its schema has patternProperties anywhere."""
    parts, todo = 0, [value]
    while todo:
        parts += len(todo)
        inner: list[Any] = []
        for one in todo:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        todo = inner
    _count.steps_left = STEPS_MAX + STEPS_PER_PART * parts
    _count.has_name_patterns = has_name_patterns


def _spend(steps: int) -> None:
    _count.steps_left -= steps
    if _count.steps_left < 0:
        raise InvalidPayload("its schema takes too many steps to check it: simplify its allOf, anyOf, oneOf and $ref")


@functools.cache
def bounded(kind: Any) -> Any:
    """A validator class of `jsonschema`, with keywords that are bounded."""
    own: dict[str, _Keyword] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
    }
    checks = {name: _counted(own.get(name, keyword)) for name, keyword in kind.VALIDATORS.items()}
    if "unevaluatedProperties" in checks:
        checks["unevaluatedProperties"] = _without_name_patterns(checks["unevaluatedProperties"])
    made = extend(kind, checks)
    # A schema within may name another draft: its own validator would be taken, with keywords that are not bounded.
    made.evolve = _evolve
    made.is_bounded = True
    return made


def _evolve(self: Any, **changes: Any) -> Any:
    _spend(1)
    schema = changes.setdefault("schema", self.schema)
    kind = validator_for(schema, default=self.__class__)
    for field in attrs.fields(self.__class__):
        if field.init:
            changes.setdefault(field.alias, getattr(self, field.name))
    return (kind if getattr(kind, "is_bounded", False) else bounded(kind))(**changes)


def _counted(keyword: _Keyword) -> _Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _spend(1 + (len(value) // _ENTRIES_PER_STEP if isinstance(value, list | dict) else 0))
        yield from keyword(validator, value, instance, schema) or ()

    return check


def _without_name_patterns(keyword: _Keyword) -> _Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if _count.has_name_patterns:  # those `jsonschema` would look for by itself
            raise InvalidPayload(
                "its schema has unevaluatedProperties with patternProperties, which is not checked here"
            )
        return keyword(validator, value, instance, schema)

    return check


# ---------------------------------------------------------------- patterns


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, _PATTERN_BYTES
    try:
        return re2.compile(_UNICODE.sub(_as_re2, pattern), options=options)
    except re2.error as error:
        said = error.args[0] if error.args else "not understood"
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        raise InvalidPayload(f"its schema has the pattern {pattern[:200]!r}, which RE2 does not take: {said}") from None


def _as_re2(escape: re.Match[str]) -> str:
    return f"\\x{{{escape[1]}}}" if escape[1] else escape[0]


def _finds(pattern: str, text: str) -> bool:
    _spend(1 + len(text) // 1000)
    return _compiled(pattern).search(text) is not None


def _pattern(validator: Any, pattern: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "string") and not _finds(pattern, instance):
        yield jsonschema.ValidationError(f"{instance[:200]!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, inner in patterns.items():
        for name, one in instance.items():
            if _finds(pattern, name):
                yield from validator.descend(one, inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, rest: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extras = [name for name in instance if name not in known and not any(_finds(pattern, name) for pattern in patterns)]
    if validator.is_type(rest, "object"):
        for name in extras:
            yield from validator.descend(instance[name], rest, path=name)
    elif not rest and extras:
        names = ", ".join(map(repr, sorted(extras)))
        yield jsonschema.ValidationError(f"Additional properties are not allowed: {names}")


# ---------------------------------------------------------------- items


def _unique_items(validator: Any, is_wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not is_wanted or not validator.is_type(instance, "array"):
        return
    seen: set[Any] = set()
    for item in instance:
        key = hashable(item)
        if key in seen:
            yield jsonschema.ValidationError(f"{repr(instance)[:200]} has non-unique elements")
            return
        seen.add(key)


def hashable(value: Any) -> Any:
    """Equal for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset((name, hashable(one)) for name, one in value.items())
    if isinstance(value, list):
        return "array", tuple(map(hashable, value))
    return ("boolean", value) if isinstance(value, bool) else value
