"""Records as version 3 is sent them, and what it answers of each."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

_NULL = Raw(b"null")


def _null() -> Raw:
    """By a function: the schema would tell a default."""
    return _NULL


DataType = Literal["BINARY", "JSON", "STRING", "AVRO", "JSONSCHEMA", "PROTOBUF"]


class Header(Struct):
    name: str
    value: bytes | None = None


class Data(Struct):
    type: DataType | None = None
    subject: str | None = None
    subject_name_strategy: Literal["TOPIC_NAME", "RECORD_NAME", "TOPIC_RECORD_NAME"] | None = None
    schema_id: int | None = None
    schema_version: int | None = None
    schema: str | None = None
    data: Raw = field(default_factory=_null)


class NewRecord(Struct):
    partition_id: Annotated[int, Meta(le=2**31 - 1)] | None = None
    headers: list[Header] = []
    key: Data | None = None
    value: Data | None = None
    timestamp: str | None = None


class Entry(NewRecord, kw_only=True):
    id: Annotated[str, Meta(min_length=1, max_length=80)]


class Entries(Struct):
    entries: Annotated[list[Entry], Meta(min_length=1, max_length=10_000)]


class Size(Struct, omit_defaults=True):
    size: int
    type: str | None = None
    subject: str | None = None
    schema_id: int | None = None
    schema_version: int | None = None


class Produced(Struct, omit_defaults=True):
    """The outcome of one record; those of several follow each other. 200 is success."""

    error_code: int
    message: str | UnsetType = UNSET
    cluster_id: str | UnsetType = UNSET
    topic_name: str | UnsetType = UNSET
    partition_id: int | UnsetType = UNSET
    offset: int | UnsetType = UNSET
    timestamp: str | UnsetType = UNSET
    key: Size | UnsetType = UNSET
    value: Size | UnsetType = UNSET


class Success(Struct, omit_defaults=True):
    id: str
    cluster_id: str
    topic_name: str
    partition_id: int
    offset: int
    timestamp: str
    key: Size | UnsetType = UNSET
    value: Size | UnsetType = UNSET


class Failure(Struct):
    id: str
    error_code: int
    message: str


class ProducedEntries(Struct):
    successes: list[Success]
    failures: list[Failure]
