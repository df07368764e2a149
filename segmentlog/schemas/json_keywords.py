"""Validators of `jsonschema` with bounded run time: linear in the size of the value.

The original keywords have three problems:

1. They match patterns with `re`, which takes years for some patterns and meanwhile blocks every thread of the process.
2. They compare each array item with every other item.
3. A few lines of allOf and $ref can double the work at each level, so that a check practically never ends.

This module matches patterns with RE2, hashes items and counts steps.
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
"""Maximum keywords to check for one value; each part of the value adds `STEPS_PER_PART`."""
STEPS_PER_PART: Final = 50
_ENTRIES_PER_STEP: Final = 20
"""Entries of an enum, or properties named by a keyword, that count as one step."""
_PATTERN_BYTES: Final = 1 << 20
_UNICODE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)

_Keyword = Callable[[Any, Any, Any, Any], Any]


class _Count(threading.local):
    """Steps left for the value that this thread checks."""

    steps_left = 0
    has_name_patterns = True


_count: Final = _Count()


def start_step_count(value: Any, *, has_name_patterns: bool) -> None:
    """Start to count steps for a value; ``has_name_patterns`` is whether its schema has patternProperties anywhere."""
    parts, todo = 0, [value]
    while todo:
        parts += len(todo)
        inner: list[Any] = []
        for part in todo:
            if isinstance(part, dict):
                inner += part.values()
            elif isinstance(part, list):
                inner += part
        todo = inner
    _count.steps_left = STEPS_MAX + STEPS_PER_PART * parts
    _count.has_name_patterns = has_name_patterns


def _spend(steps: int) -> None:
    _count.steps_left -= steps
    if _count.steps_left < 0:
        raise InvalidPayload(
            "checking the value takes too many steps; simplify allOf, anyOf, oneOf and $ref in its schema"
        )


@functools.cache
def bounded(kind: Any) -> Any:
    """Return a validator class of `jsonschema` with bounded keywords."""
    own: dict[str, _Keyword] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
    }
    checks = {name: _counted(own.get(name, keyword)) for name, keyword in kind.VALIDATORS.items()}
    if "unevaluatedProperties" in checks:
        checks["unevaluatedProperties"] = _without_name_patterns(checks["unevaluatedProperties"])
    bounded_kind = extend(kind, checks)
    # A subschema may name another draft: without this, `jsonschema` would use that draft's unbounded keywords.
    bounded_kind.evolve = _evolve
    bounded_kind.is_bounded = True
    return bounded_kind


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
        if _count.has_name_patterns:  # `jsonschema` would match these patterns with `re`
            raise InvalidPayload(
                "the value cannot be checked: its schema has both unevaluatedProperties and patternProperties"
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
        reason = error.args[0] if error.args else "not understood"
        reason = reason.decode(errors="replace") if isinstance(reason, bytes) else reason
        raise InvalidPayload(
            f"the value cannot be checked: RE2 does not accept the pattern {pattern[:200]!r} of its schema: {reason}"
        ) from None


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
    """Return a hashable form of a value, the same for values that are equal in JSON: 1 and 1.0, but not true."""
    if isinstance(value, dict):
        return "object", frozenset((name, hashable(one)) for name, one in value.items())
    if isinstance(value, list):
        return "array", tuple(map(hashable, value))
    return ("boolean", value) if isinstance(value, bool) else value
