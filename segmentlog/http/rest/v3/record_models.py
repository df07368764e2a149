"""Requests and responses of REST v3 about records."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

_NULL = Raw(b"null")


def _null() -> Raw:
    """Return null. This is a function because the JSON schema contains every default that is a value."""
    return _NULL


DataType = Literal["BINARY", "JSON", "STRING", "AVRO", "JSONSCHEMA", "PROTOBUF"]


class RecordHeader(Struct):
    name: str
    value: bytes | None = None


class RecordData(Struct):
    type: DataType | None = None
    subject: str | None = None
    subject_name_strategy: Literal["TOPIC_NAME", "RECORD_NAME", "TOPIC_RECORD_NAME"] | None = None
    schema_id: int | None = None
    schema_version: int | None = None
    schema: str | None = None
    data: Raw = field(default_factory=_null)


class NewRecord(Struct):
    partition_id: Annotated[int, Meta(le=2**31 - 1)] | None = None
    headers: list[RecordHeader] = []
    key: RecordData | None = None
    value: RecordData | None = None
    timestamp: str | None = None


class BatchEntry(NewRecord, kw_only=True):
    id: Annotated[str, Meta(min_length=1, max_length=80)]


class BatchEntries(Struct):
    entries: Annotated[list[BatchEntry], Meta(min_length=1, max_length=10_000)]


class EncodedSize(Struct, omit_defaults=True):
    size: int
    type: str | None = None
    subject: str | None = None
    schema_id: int | None = None
    schema_version: int | None = None


class ProduceResponse(Struct, omit_defaults=True):
    """Outcome of one record; the code 200 is success. The response to several records is a sequence of these."""

    error_code: int
    message: str | UnsetType = UNSET
    cluster_id: str | UnsetType = UNSET
    topic_name: str | UnsetType = UNSET
    partition_id: int | UnsetType = UNSET
    offset: int | UnsetType = UNSET
    timestamp: str | UnsetType = UNSET
    key: EncodedSize | UnsetType = UNSET
    value: EncodedSize | UnsetType = UNSET


class BatchSuccess(Struct, omit_defaults=True):
    id: str
    cluster_id: str
    topic_name: str
    partition_id: int
    offset: int
    timestamp: str
    key: EncodedSize | UnsetType = UNSET
    value: EncodedSize | UnsetType = UNSET


class BatchFailure(Struct):
    id: str
    error_code: int
    message: str


class ProduceBatchResponse(Struct):
    successes: list[BatchSuccess]
    failures: list[BatchFailure]
