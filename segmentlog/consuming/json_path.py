"""A small language for conditions on JSON values: a path, optionally compared with a value.

    user.id                 the field exists and is not null
    user.id == 7            the field is the number 7 or the text "7"; a single = means the same
    user.name ~ ann         the text of the field contains "ann", ignoring case
    items[0].price > 9.5    compare numbers; also >=, <, <=, !=
    items[*].sku = "A 1"    matches an element of a list or a member of an object; [-1] is the last element
    ["odd key"].x           a name with other characters; a leading $ or @ is the value itself and may be omitted

It is a subset of JSONPath (RFC 9535), so that many copied paths work. Unsupported syntax (`=>`, `&&`, `length()`, an
open quote) raises `InvalidConfig`, instead of becoming a condition that no value matches.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from segmentlog.errors import InvalidConfig

_STEP: Final = re.compile(
    r"""\.?(?P<name>[^\s.\[\]=<>!~"'$*()?&|,]+)|\.?(?P<all>\*)|\[(?P<every>\*)\]|\[(?P<index>-?[0-9]{1,9})\]"""
    r"""|\[(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')\]"""
)
_OPERATOR: Final = re.compile(r"\s*(?P<operator>==|!=|<=|>=|=|<|>|~)\s*(?P<operand>.*)", re.DOTALL)
_EXPECTED: Final = (
    "a path such as user.id, items[0].name or $['odd key'], optionally with ==, !=, <, <=, >, >= or ~ and a value"
)
_QUOTED: Final = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", re.DOTALL)
_NEEDS_QUOTES: Final = re.compile(r"[=<>!~\"'](?s:.*)|(?s:.*)(?:&&|\|\|)(?s:.*)")
"""Matches an unquoted value that is probably a mistake: a second operator, an open quote, a second condition."""
_STEPS_MAX: Final = 50
_NUMBER_MAX: Final = sys.float_info.max
_EVERY: Final = object()

_decode = msgspec.json.Decoder().decode


class JsonPath(NamedTuple):
    """A path to a field of a JSON value, optionally with an operator and a value to compare the field with."""

    steps: tuple[Any, ...]
    operator: str
    operand: str
    number: float | None

    @classmethod
    def parse(cls, text: str) -> JsonPath:
        """Parse a path with an optional comparison. Raises `InvalidConfig`."""
        rest = text.strip()
        at = 1 if rest.startswith(("$", "@.", "@[")) else 0
        steps: list[Any] = []
        while at < len(rest) and (match := _STEP.match(rest, at)):
            steps.append(_step(match))
            at = match.end()
        if len(steps) > _STEPS_MAX or not (steps or rest.startswith("$")):
            raise InvalidConfig("JSON path", text, _EXPECTED)
        if not rest[at:].strip():
            return cls(tuple(steps), "", "", None)
        found = _OPERATOR.fullmatch(rest, at)
        if found is None:
            raise InvalidConfig("JSON path", text, f"{_EXPECTED}; {rest[at:].strip()[:20]!r} is not supported")
        operator, operand = found["operator"], found["operand"].strip()
        if _QUOTED.fullmatch(operand):
            operand = _unquoted(text, operand)
        elif not operand or _NEEDS_QUOTES.fullmatch(operand):
            raise InvalidConfig("JSON path", text, f'one value after {operator}; put a text in quotes, such as "A 1"')
        number = _number(operand)
        # Not `math.isfinite`, which raises OverflowError for a whole number that no float can hold.
        if operator in ("<", ">", "<=", ">=") and (number is None or not -_NUMBER_MAX <= number <= _NUMBER_MAX):
            raise InvalidConfig("JSON path", text, f"a number after {operator}, from -1.8e308 to 1.8e308")
        return cls(tuple(steps), "=" if operator == "==" else operator, operand, number)

    def matches(self, value: bytes | None) -> bool:
        """Return whether a value is JSON and meets the condition."""
        if not value:
            return False
        try:
            document = _decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return self.matches_document(document)

    def matches_document(self, document: object) -> bool:
        """Return whether decoded JSON (dicts, lists, texts, numbers, booleans and None) meets the condition."""
        return any(map(self._matches_value, _walk(document, self.steps)))

    def _matches_value(self, found: Any) -> bool:
        if not self.operator:
            return found is not None
        if self.operator in ("=", "!="):
            return self._equals(found) == (self.operator == "=")
        if self.operator == "~":
            return self.operand.lower() in _text(found).lower()
        if not isinstance(found, int | float) or isinstance(found, bool) or self.number is None:
            return False
        if self.operator == "<":
            return found < self.number
        if self.operator == ">":
            return found > self.number
        return found <= self.number if self.operator == "<=" else found >= self.number

    def _equals(self, found: Any) -> bool:
        if isinstance(found, int | float) and not isinstance(found, bool):
            return self.number is not None and found == self.number
        return _text(found) == self.operand


def _step(match: re.Match[str]) -> Any:
    if match["name"] is not None:
        return match["name"]
    if match["index"] is not None:
        return int(match["index"])
    if match["quoted"] is not None:
        return _unquoted(match["quoted"], match["quoted"])
    return _EVERY


def _unquoted(text: str, quoted: str) -> str:
    """Return the text inside double quotes (with JSON's escapes) or single quotes (with those of RFC 9535).

    Raises `InvalidConfig`.
    """
    if quoted[0] == "'":
        # Convert to JSON with the same characters: RFC 9535 allows a backslash before ', which JSON does not.
        inner = re.sub(
            r"\\(.)|\"",
            lambda found: "'" if found[1] == "'" else found[0] if found[1] else '\\"',
            quoted[1:-1],
            flags=re.DOTALL,
        )
        quoted = f'"{inner}"'
    try:
        return str(json.loads(quoted))
    except ValueError:
        raise InvalidConfig("JSON path", text, _EXPECTED) from None


def _walk(document: Any, steps: tuple[Any, ...]) -> Iterator[Any]:
    if not steps:
        yield document
        return
    step, rest = steps[0], steps[1:]
    if step is _EVERY:
        parts = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
        for part in parts:
            yield from _walk(part, rest)
    elif isinstance(step, int):
        if isinstance(document, list) and -len(document) <= step < len(document):
            yield from _walk(document[step], rest)
    elif isinstance(document, dict) and step in document:
        yield from _walk(document[step], rest)


def _text(found: Any) -> str:
    return found if isinstance(found, str) else msgspec.json.encode(found).decode()


def _number(text: str) -> float | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None
