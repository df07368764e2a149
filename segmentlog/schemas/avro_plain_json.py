"""Converts plain JSON, as `consume --avro` prints it, to the values that fastavro's writer expects.

    bytes, fixed       text in base64
    decimal            "12.30", or a number
    date, timestamps   "2026-07-31", "2026-07-31T12:00:00Z", or the number that Avro stores
    time               "12:00:00", or the number
    uuid               text
    unions             the first branch that matches the value; also {"string": "a"}, Avro's own JSON encoding

All other types have the same form as in JSON.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import decimal
from collections.abc import Mapping
from typing import Any, Final

from segmentlog.schemas.avro_canonical import PRIMITIVES
from segmentlog.schemas.registry_errors import InvalidPayload

_INTEGERS: Final = {"int": 31, "long": 63}


class FromJson:
    """Converter for one schema, as parsed by fastavro: with full names."""

    def __init__(self, schema: Any, names: Mapping[str, Any]) -> None:
        self._schema = schema
        self._names = names

    def convert(self, value: Any) -> Any:
        """Convert a value. Raises `InvalidPayload` for a value that does not match the schema."""
        return _Conversion(self._names)._convert(self._schema, value, "#")


class _Conversion:
    """Conversion of one value."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._tried: dict[tuple[int, int], Any] = {}
        """Results of unions, by the ids of branches and value. Without this cache, a branch that fails late would
        convert all nested values again at each level."""

    def _convert(self, schema: Any, value: Any, place: str) -> Any:
        if isinstance(schema, str):
            if schema not in PRIMITIVES:
                return self._convert(self._names[schema], value, place)
            schema = {"type": schema}
        if isinstance(schema, list):
            return self._union(schema, value, place)
        kind = schema["type"]
        match kind:
            case "record" | "error":
                return self._record(schema, value, place)
            case "array" if isinstance(value, list):
                return [self._convert(schema["items"], item, f"{place}/{at}") for at, item in enumerate(value)]
            case "map" if isinstance(value, dict):
                return {name: self._convert(schema["values"], one, f"{place}/{name}") for name, one in value.items()}
            case "enum" if value in schema["symbols"]:
                return value
            case "null" if value is None:
                return None
            case "boolean" if isinstance(value, bool):
                return value
            case "float" | "double" if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        logical = schema.get("logicalType")
        if logical is not None and (found := _logical(logical, value)) is not None:
            return found
        if kind in _INTEGERS and type(value) is int and -(1 << _INTEGERS[kind]) <= value < 1 << _INTEGERS[kind]:
            return value
        if kind == "string" and isinstance(value, str):
            return value
        if kind in ("bytes", "fixed") and isinstance(value, str) and logical != "decimal":
            return _base64(value, schema.get("size"), place)
        raise InvalidPayload(f"{_shown(value)} is not a valid {logical or schema.get('name', kind)}, at {place}")

    def _record(self, schema: Any, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidPayload(f"{_shown(value)} is not a valid {schema['name']}, at {place}")
        fields = {field["name"]: field for field in schema["fields"]}
        if unknown := [name for name in value if name not in fields]:
            raise InvalidPayload(f"the schema has no field {unknown[0]!r}, at {place}")
        if missing := [name for name, field in fields.items() if name not in value and "default" not in field]:
            raise InvalidPayload(f"field {missing[0]!r} is missing, at {place}")
        return {name: self._convert(fields[name]["type"], one, f"{place}/{name}") for name, one in value.items()}

    def _union(self, branches: list[Any], value: Any, place: str) -> Any:
        if not isinstance(value, dict | list):
            return self._branch(branches, value, place)
        key = id(branches), id(value)
        found = self._tried.get(key)
        if found is None:
            try:
                found = self._branch(branches, value, place)
            except InvalidPayload as error:
                found = error
            self._tried[key] = found
        if isinstance(found, InvalidPayload):
            raise found
        return found

    def _branch(self, branches: list[Any], value: Any, place: str) -> Any:
        for branch in branches:
            try:
                found = self._convert(branch, value, place)
            except InvalidPayload:
                continue
            name = self._name_of(branch)
            # Name the branch: fastavro would otherwise choose it by the value, and could choose a different branch.
            return (name, found) if name is not None else found
        if isinstance(value, dict) and len(value) == 1:
            ((wanted, inner),) = value.items()
            for branch in branches:
                if wanted in (self._name_of(branch), _kind(branch)):
                    return self._convert(branch, inner, f"{place}/{wanted}")
        kinds = ", ".join(str(self._name_of(branch) or _kind(branch)) for branch in branches)
        raise InvalidPayload(f"{_shown(value)} does not match any of {kinds}, at {place}")

    def _name_of(self, branch: Any) -> str | None:
        if isinstance(branch, str):
            return None if branch in PRIMITIVES else branch
        return branch.get("name") if isinstance(branch, dict) else None


def _kind(branch: Any) -> Any:
    return branch if isinstance(branch, str) else branch["type"] if isinstance(branch, dict) else "union"


def _logical(kind: str, value: Any) -> Any:
    """Return the value of a logical type from its string form, or None for any other value."""
    if kind == "decimal" and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return decimal.Decimal(str(value))
        except decimal.InvalidOperation:
            return None
    if not isinstance(value, str):
        return None
    try:
        match kind:
            case "date":
                return datetime.date.fromisoformat(value)
            case "time-millis" | "time-micros":
                return datetime.time.fromisoformat(value)
            case "timestamp-millis" | "timestamp-micros" | "local-timestamp-millis" | "local-timestamp-micros":
                return datetime.datetime.fromisoformat(value)
    except ValueError:
        return None
    return None


def _base64(text: str, size: int | None, place: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidPayload(f"{_shown(text)} is not valid base64, at {place}") from None
    if size is not None and len(data) != size:
        raise InvalidPayload(f"the value has {len(data)} bytes, but the type has {size}, at {place}")
    return data


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
