"""Map types of Avro to types of Spark, and convert the values.

    null, T            T, nullable                 fixed, bytes       binary
    record             struct                      decimal            decimal(p, s)
    map                map<string, ...>            date               date
    enum, string, uuid string                      timestamp-*        timestamp
    int | long         long                        local-timestamp-*  timestamp_ntz
    float | double     double                      time-*             the number that Avro stores

These are the types of spark-avro, except for other unions, which become JSON in a string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import msgspec

from segmentlog.schemas.registry_errors import InvalidSchema

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

Convert = Callable[[Any], Any]
_PLAIN: Final = {
    "boolean": "BooleanType", "int": "IntegerType", "long": "LongType", "float": "FloatType", "double": "DoubleType",
    "bytes": "BinaryType", "fixed": "BinaryType", "string": "StringType", "enum": "StringType",
}  # fmt: skip
_LOGICAL: Final = {
    "date": "DateType", "timestamp-millis": "TimestampType", "timestamp-micros": "TimestampType",
    "local-timestamp-millis": "TimestampNTZType", "local-timestamp-micros": "TimestampNTZType", "uuid": "StringType",
}  # fmt: skip
_BASES: Final = {
    "date": ("int",), "time-millis": ("int",), "time-micros": ("long",), "decimal": ("bytes", "fixed"),
    "uuid": ("string", "fixed"), **dict.fromkeys((name for name in _LOGICAL if "timestamp" in name), ("long",)),
}  # fmt: skip
"""The types that a logical type may annotate. On another type, Avro requires readers to ignore it."""
_PRECISION_MAX: Final = 38
_DEPTH_MAX: Final = 64


class AvroTypes:
    """One schema as fastavro parsed it, and the types that it defines, by name."""

    def __init__(self, schema: Any, names: Mapping[str, Any]) -> None:
        self._schema = schema
        self._names = names

    def spark_type(self) -> DataType:
        """Return the type of Spark. Raises `InvalidSchema` for a recursive record, which Spark does not support."""
        return self._spark_type(self._schema, 0)[0]

    def converter(self) -> Convert | None:
        """Return the function from a value of fastavro to a value for Arrow; None if they are the same."""
        return self._find_converter(self._schema)

    # ------------------------------------------------------------ types

    def _spark_type(self, schema: Any, depth: int) -> tuple[DataType, bool]:
        """Return (type, whether it may be null)."""
        from pyspark.sql import types

        if depth > _DEPTH_MAX:
            raise InvalidSchema("the schema is recursive, which no type of Spark supports")
        schema, nullable = self._resolve_union(schema)
        kind = _type_name(schema)
        logical = _logical_type(schema)
        if kind == "record":
            fields = []
            for field in schema["fields"]:
                inner, may_be_null = self._spark_type(field["type"], depth + 1)
                fields.append(types.StructField(field["name"], inner, may_be_null))
            return types.StructType(fields), nullable
        if kind == "array":
            inner, may_be_null = self._spark_type(schema["items"], depth + 1)
            return types.ArrayType(inner, may_be_null), nullable
        if kind == "map":
            inner, may_be_null = self._spark_type(schema["values"], depth + 1)
            return types.MapType(types.StringType(), inner, may_be_null), nullable
        if logical == "decimal":
            precision, scale = schema.get("precision"), schema.get("scale", 0)
            if type(precision) is not int or not 0 < precision <= _PRECISION_MAX or not 0 <= scale <= precision:
                wanted = f"Spark's decimals have 1 to {_PRECISION_MAX} digits, of which 0 or more are after the point"
                raise InvalidSchema(f"a decimal of precision {precision} and scale {scale}: {wanted}")
            return types.DecimalType(precision, scale), nullable
        if kind == "null":
            return types.NullType(), True
        name = _LOGICAL.get(logical or "") or _PLAIN.get(kind, "StringType")
        return getattr(types, name)(), nullable

    def _resolve_union(self, schema: Any) -> tuple[Any, bool]:
        """Return (the only branch of a union, or a type that holds all branches; whether null is a branch)."""
        if not isinstance(schema, list):
            return self._resolve_name(schema), False
        branches = [branch for branch in schema if branch != "null"]
        nullable = len(branches) < len(schema)
        if len(branches) == 1:
            return self._resolve_name(branches[0]), nullable
        if not branches:
            return "null", True
        if set(map(str, branches)) == {"int", "long"}:
            return "long", nullable
        if set(map(str, branches)) == {"float", "double"}:
            return "double", nullable
        return {"type": "union"}, nullable

    def _resolve_name(self, schema: Any) -> Any:
        return self._names.get(schema, schema) if isinstance(schema, str) else schema

    # ------------------------------------------------------------ values

    def _find_converter(self, schema: Any, depth: int = 0) -> Convert | None:
        if depth > _DEPTH_MAX:
            raise InvalidSchema("the schema is recursive, which no type of Spark supports")
        schema, _ = self._resolve_union(schema)
        kind = _type_name(schema)
        logical = _logical_type(schema)
        if kind == "union":
            return lambda value: None if value is None else msgspec.json.encode(value).decode()
        if kind == "record":
            inner = {field["name"]: self._find_converter(field["type"], depth + 1) for field in schema["fields"]}
            changed = {name: convert for name, convert in inner.items() if convert is not None}
            return _record_converter(changed) if changed else None
        if kind == "array":
            return _array_converter(self._find_converter(schema["items"], depth + 1))
        if kind == "map":
            return _map_converter(self._find_converter(schema["values"], depth + 1))
        if logical == "uuid":
            return _format_uuid
        if logical in ("time-millis", "time-micros"):
            return _time_converter(1_000 if logical == "time-millis" else 1_000_000)
        return None


def _type_name(schema: Any) -> str:
    return schema if isinstance(schema, str) else str(schema["type"])


def _logical_type(schema: Any) -> str | None:
    logical = schema.get("logicalType") if isinstance(schema, dict) else None
    if _type_name(schema) not in _BASES.get(logical or "", ()) or (logical == "uuid" and schema.get("size", 16) != 16):
        return None
    return str(logical)


def _format_uuid(value: Any) -> Any:
    """Return a uuid as text. A uuid of type fixed comes as its sixteen bytes."""
    return None if value is None else str(UUID(bytes=value) if isinstance(value, bytes) else value)


def _record_converter(changed: Mapping[str, Convert]) -> Convert:
    def convert(value: Any) -> Any:
        if value is None:
            return None
        return value | {name: one(value[name]) for name, one in changed.items()}

    return convert


def _array_converter(inner: Convert | None) -> Convert | None:
    if inner is None:
        return None
    return lambda value: None if value is None else [inner(one) for one in value]


def _map_converter(inner: Convert | None) -> Convert:
    """Return the converter of a map to the list of pairs that Arrow takes."""
    if inner is None:
        return lambda value: None if value is None else list(value.items())
    return lambda value: None if value is None else [(name, inner(one)) for name, one in value.items()]


def _time_converter(per_second: int) -> Convert:
    def convert(value: Any) -> Any:
        if value is None:
            return None
        seconds = (value.hour * 60 + value.minute) * 60 + value.second
        return seconds * per_second + value.microsecond * per_second // 1_000_000

    return convert
