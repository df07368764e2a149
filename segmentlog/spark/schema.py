"""Define the columns of the data source, as in Spark's Kafka source and sink, and their Arrow types."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from segmentlog.errors import SegmentlogError

HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

_COLUMNS: Final[dict[str, tuple[DataType, ...]]] = {
    "key": (BinaryType(), StringType()),
    "value": (BinaryType(), StringType()),
    "topic": (StringType(),),
    "partition": (IntegerType(),),
    "offset": (LongType(),),
    "timestamp": (TimestampType(), LongType()),
    "timestampType": (IntegerType(),),
    "headers": (HEADERS,),
}
"""Columns of the source, in order: the default type, then other types that an explicit schema may ask for."""

_SINK_COLUMNS: Final[dict[str, tuple[DataType, ...]]] = {
    "key": (BinaryType(), StringType()),
    "value": (BinaryType(), StringType()),
    "topic": (StringType(),),
    "partition": (IntegerType(), ShortType(), LongType()),
    "headers": (HEADERS,),
    "timestamp": (TimestampType(), TimestampNTZType(), LongType()),
}
_IGNORED_COLUMNS: Final = ("offset", "timestampType")
"""Columns of the source that a writer cannot set. The sink ignores them, so rows can be written as they are read."""


class WrongSchema(SegmentlogError, TypeError):
    """A column does not exist in the data source, is not accepted by it, or has the wrong type."""


def source_schema(*, include_headers: bool) -> StructType:
    """Return the columns of a read without an explicit schema."""
    names = [name for name in _COLUMNS if include_headers or name != "headers"]
    return StructType([StructField(name, _COLUMNS[name][0]) for name in names])


def check_read_schema(schema: StructType) -> None:
    """Raise `WrongSchema` for a schema that the source cannot read."""
    _check_names("the schema", schema)
    for field in schema.fields:
        accepted = _COLUMNS.get(field.name)
        if accepted is None:
            there = ", ".join(_COLUMNS)
            raise WrongSchema(f"the schema has a column {field.name!r}, and the source has only {there}")
        _check_type("the schema", field, accepted)


def check_write_schema(schema: StructType, *, topic_is_given: bool) -> None:
    """Raise `WrongSchema` for columns that cannot be written."""
    names = schema.fieldNames()
    _check_names("the data", schema)
    for field in schema.fields:
        if field.name in _IGNORED_COLUMNS:
            continue
        accepted = _SINK_COLUMNS.get(field.name)
        if accepted is None:
            raise WrongSchema(
                f"a record cannot hold the column {field.name!r}: a topic takes {', '.join(_SINK_COLUMNS)};"
                " drop it, or make it part of the value, as in to_json(struct(...)) AS value"
            )
        _check_type("the data", field, accepted)
    if "value" not in names:
        raise WrongSchema(
            f"the data has no column 'value' (only {', '.join(names) or 'none'}); every record needs a value"
        )
    if "topic" not in names and not topic_is_given:
        raise WrongSchema("the write names no topic: set .option('topic', ...), or add a column 'topic'")


def _check_names(owner: str, schema: StructType) -> None:
    names = schema.fieldNames()
    for name in names:
        if names.count(name) > 1:
            raise WrongSchema(f"{owner} has column {name!r} {names.count(name)} times; name it once")


def _check_type(owner: str, field: StructField, accepted: tuple[DataType, ...]) -> None:
    if not any(_is_same_type(field.dataType, kind) for kind in accepted):
        types = " or ".join(kind.simpleString() for kind in accepted)
        found = field.dataType.simpleString()
        raise WrongSchema(f"column {field.name!r} of {owner} has type {found}; it must be {types}")


def _is_same_type(found: DataType, wanted: DataType) -> bool:
    """Return whether two types are equal except for nullability and collation."""
    if isinstance(found, ArrayType) and isinstance(wanted, ArrayType):
        return _is_same_type(found.elementType, wanted.elementType)
    if isinstance(found, StructType) and isinstance(wanted, StructType):
        return found.fieldNames() == wanted.fieldNames() and all(
            _is_same_type(found_field.dataType, wanted_field.dataType)
            for found_field, wanted_field in zip(found.fields, wanted.fields, strict=True)
        )
    return type(found) is type(wanted)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the exact Arrow schema that Spark requires of a source."""
    return pa.schema([_arrow_field(field) for field in schema.fields])


def _arrow_field(field: StructField) -> pa.Field:
    return pa.field(field.name, _arrow_type(field.dataType), field.nullable)


def _arrow_type(kind: DataType) -> pa.DataType:
    if isinstance(kind, ArrayType):
        return pa.list_(pa.field("element", _arrow_type(kind.elementType), kind.containsNull))
    if isinstance(kind, StructType):
        return pa.struct([_arrow_field(field) for field in kind.fields])
    return _ARROW[type(kind)]


_ARROW: Final = {
    BinaryType: pa.binary(),
    StringType: pa.string(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    TimestampType: pa.timestamp("us", tz="UTC"),
}
