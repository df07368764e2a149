"""What version 2 is sent and answers, field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Raw, Struct, field

from segmentlog.http.rest.endpoint_table import PartitionNumber

ABSENT: Raw = cast(Raw, None)
"""Instead of a key or a value that was left out. (A default that is a `Raw` cannot be told by a schema.)"""

# ---------------------------------------------------------------- topics


class Replica(Struct):
    broker: int
    leader: bool
    in_sync: bool


class PartitionInfo(Struct):
    partition: int
    leader: int
    replicas: list[Replica]


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
    """Keys and values as a schema describes them: by its id, or in full, which registers it."""

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


class Produced(Struct):
    offsets: list[RecordOffset]
    key_schema_id: int | None = None
    value_schema_id: int | None = None


# ---------------------------------------------------------------- consumers

_Name = Annotated[str, Meta(min_length=1, max_length=255)]


class NewInstance(Struct):
    """Everything has a default."""

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


class Instance(Struct):
    instance_id: str
    base_uri: str


class Subscription(Struct):
    topics: list[str] | None = None
    topic_pattern: str | None = None


class Subscribed(Struct):
    topics: list[str]


class OnePartition(Struct):
    topic: str
    partition: PartitionNumber


class Partitions(Struct):
    partitions: list[OnePartition]


class OneOffset(Struct):
    topic: str
    partition: PartitionNumber
    offset: Annotated[int, Meta(ge=0, le=2**63 - 2)]
    metadata: str | None = None


class OneTimestamp(Struct):
    topic: str
    partition: PartitionNumber
    timestamp: str
    metadata: str | None = None


class OffsetsToCommit(Struct):
    offsets: list[OneOffset] | None = None


class Seek(Struct):
    offsets: list[OneOffset] = []
    timestamps: list[OneTimestamp] = []


class CommittedOffsets(Struct):
    offsets: list[OneOffset]


class ConsumedRecord(Struct, gc=False):
    topic: str
    key: Any
    value: Any
    partition: int
    offset: int


class RecordsQuery(Struct):
    timeout: Annotated[
        int, Meta(description="Milliseconds to wait for records, at most what the instance was made with.")
    ] = -1
    max_bytes: Annotated[int, Meta(description="Of keys and values; one record comes however large it is.")] = -1


class CommitQuery(Struct):
    async_: bool = field(name="async", default=False)


class ProduceQuery(Struct):
    ack: Annotated[
        Literal["written", "durable", "shipped"] | None,
        Meta(description="What records survive before the answer; by default as the topic's fsync policy says."),
    ] = None
