"""Requests and responses of REST v2."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Raw, Struct, field

from segmentlog.http.rest.endpoint_table import PartitionNumber

ABSENT: Raw = cast(Raw, None)
"""Default of a key or value that the request omits. (JSON schemas cannot express a default that is a `Raw`.)"""

# ---------------------------------------------------------------- topics


class ReplicaInfo(Struct):
    broker: int
    leader: bool
    in_sync: bool


class PartitionInfo(Struct):
    partition: int
    leader: int
    replicas: list[ReplicaInfo]


class TopicInfo(Struct):
    name: str
    configs: dict[str, str]
    partitions: list[PartitionInfo]


class Offsets(Struct):
    beginning_offset: int
    end_offset: int


class Brokers(Struct):
    brokers: list[int]


# ---------------------------------------------------------------- produce


class BinaryRecord(Struct, gc=False):
    key: bytes | None = None
    value: bytes | None = None
    partition: PartitionNumber | None = None


class JsonRecord(Struct, gc=False):
    key: Raw = ABSENT
    value: Raw = ABSENT
    partition: PartitionNumber | None = None


class BinaryRecords(Struct):
    records: Annotated[list[BinaryRecord], Meta(min_length=1)]


class JsonRecords(Struct):
    records: Annotated[list[JsonRecord], Meta(min_length=1)]


class SchemaRecords(Struct):
    """Keys and values with a schema: the id of a registered schema, or the text of a schema to register."""

    records: Annotated[list[JsonRecord], Meta(min_length=1)]
    key_schema: str | None = None
    key_schema_id: int | None = None
    value_schema: str | None = None
    value_schema_id: int | None = None


class RecordOffset(Struct):
    partition: int | None
    offset: int | None
    error_code: int | None
    error: str | None


class ProducedOffsets(Struct):
    offsets: list[RecordOffset]
    key_schema_id: int | None = None
    value_schema_id: int | None = None


# ---------------------------------------------------------------- consumers

_Name = Annotated[str, Meta(min_length=1, max_length=255)]


class NewInstance(Struct):
    """Options of a new consumer instance. All have defaults."""

    name: _Name | None = None
    id: _Name | None = None
    format: Literal["binary", "json", "avro", "jsonschema", "protobuf"] | None = None
    auto_offset_reset: Literal["earliest", "latest", "none"] | None = field(name="auto.offset.reset", default=None)
    auto_commit_enable: bool | Literal["true", "false"] | None = field(name="auto.commit.enable", default=None)
    fetch_min_bytes: Annotated[int, Meta(ge=-1, le=10_000_000)] | None = field(name="fetch.min.bytes", default=None)
    request_timeout_ms: Annotated[int, Meta(ge=0, le=600_000)] | None = field(
        name="consumer.request.timeout.ms", default=None
    )
    isolation_level: Literal["read_committed", "read_uncommitted"] | None = field(name="isolation.level", default=None)


class CreatedInstance(Struct):
    instance_id: str
    base_uri: str


class Subscription(Struct):
    topics: list[str] | None = None
    topic_pattern: str | None = None


class Subscribed(Struct):
    topics: list[str]


class PartitionRef(Struct):
    topic: str
    partition: PartitionNumber


class TopicPartitions(Struct):
    partitions: list[PartitionRef]


class PartitionOffset(Struct):
    topic: str
    partition: PartitionNumber
    offset: Annotated[int, Meta(ge=0, le=2**63 - 2)]
    metadata: str | None = None


class PartitionTimestamp(Struct):
    topic: str
    partition: PartitionNumber
    timestamp: str
    metadata: str | None = None


class OffsetsToCommit(Struct):
    offsets: list[PartitionOffset] | None = None


class Seek(Struct):
    offsets: list[PartitionOffset] = []
    timestamps: list[PartitionTimestamp] = []


class GroupOffsets(Struct):
    offsets: list[PartitionOffset]


class ConsumedRecord(Struct, gc=False):
    topic: str
    key: Any
    value: Any
    partition: int
    offset: int


class RecordsQuery(Struct):
    timeout: Annotated[
        int, Meta(description="Milliseconds to wait for records, at most the request time-out of the instance.")
    ] = -1
    max_bytes: Annotated[
        int, Meta(description="Maximum bytes of keys and values; at least one record is returned, whatever its size.")
    ] = -1


class CommitQuery(Struct):
    async_: bool = field(name="async", default=False)


class ProduceQuery(Struct):
    ack: Annotated[
        Literal["written", "durable", "shipped"] | None,
        Meta(
            description="When to respond: after the write, the fsync, or the upload. Default: the topic's fsync policy."
        ),
    ] = None
