"""Requests and responses of REST v3."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType


class Metadata(Struct):
    self: str
    resource_name: str | None = None


class ListMetadata(Struct):
    self: str
    next: str | None = None


class Related(Struct):
    related: str


class ClusterData(Struct, kw_only=True):
    kind: Literal["KafkaCluster"] = "KafkaCluster"
    metadata: Metadata
    cluster_id: str
    controller: Related
    acls: Related
    brokers: Related
    broker_configs: Related
    consumer_groups: Related
    topics: Related
    partition_reassignments: Related


class ClusterList(Struct, kw_only=True):
    kind: Literal["KafkaClusterList"] = "KafkaClusterList"
    metadata: ListMetadata
    data: list[ClusterData]


class BrokerData(Struct, kw_only=True):
    kind: Literal["KafkaBroker"] = "KafkaBroker"
    metadata: Metadata
    cluster_id: str
    broker_id: int
    host: str | None
    port: int | None
    rack: str | None = None
    configs: Related
    partition_replicas: Related


class BrokerList(Struct, kw_only=True):
    kind: Literal["KafkaBrokerList"] = "KafkaBrokerList"
    metadata: ListMetadata
    data: list[BrokerData]


# ---------------------------------------------------------------- topics


class TopicData(Struct, kw_only=True):
    kind: Literal["KafkaTopic"] = "KafkaTopic"
    metadata: Metadata
    cluster_id: str
    topic_name: str
    is_internal: bool = False
    replication_factor: int = 1
    partitions_count: int
    partitions: Related
    configs: Related
    partition_reassignments: Related
    authorized_operations: list[str] | UnsetType = UNSET


class TopicList(Struct, kw_only=True):
    kind: Literal["KafkaTopicList"] = "KafkaTopicList"
    metadata: ListMetadata
    data: list[TopicData]


class TopicQuery(Struct):
    include_authorized_operations: bool = False


class NewConfig(Struct):
    name: str
    value: str | None = None


class NewTopic(Struct, kw_only=True):
    topic_name: str
    partitions_count: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    replication_factor: Annotated[int, Meta(ge=-1, le=2**15 - 1)] | None = None
    replicas_assignments: dict[str, list[int]] | None = None
    configs: list[NewConfig] = []
    validate_only: bool = False


class PartitionCount(Struct):
    partitions_count: Annotated[int, Meta(ge=1, le=2**31 - 1)]


class PartitionData(Struct, kw_only=True):
    kind: Literal["KafkaPartition"] = "KafkaPartition"
    metadata: Metadata
    cluster_id: str
    topic_name: str
    partition_id: int
    leader: Related
    replicas: Related
    reassignment: Related


class PartitionList(Struct, kw_only=True):
    kind: Literal["KafkaPartitionList"] = "KafkaPartitionList"
    metadata: ListMetadata
    data: list[PartitionData]


class PartitionOffsets(Struct, kw_only=True):
    kind: Literal["KafkaPartitionWithOffsets"] = "KafkaPartitionWithOffsets"
    metadata: Metadata
    cluster_id: str
    topic_name: str
    partition_id: int
    earliest_offset: int
    latest_offset: int


class ReplicaData(Struct, kw_only=True):
    kind: Literal["KafkaReplica"] = "KafkaReplica"
    metadata: Metadata
    cluster_id: str
    topic_name: str
    partition_id: int
    broker_id: int
    is_leader: bool = True
    is_in_sync: bool = True
    broker: Related


class ReplicaList(Struct, kw_only=True):
    kind: Literal["KafkaReplicaList"] = "KafkaReplicaList"
    metadata: ListMetadata
    data: list[ReplicaData]


class ReassignmentList(Struct, kw_only=True):
    """List of running reassignments. It is always empty: each partition has one replica."""

    kind: Literal["KafkaReassignmentList"] = "KafkaReassignmentList"
    metadata: ListMetadata
    data: Annotated[list[Any], Meta(max_length=0)] = []


# ---------------------------------------------------------------- configs


class Synonym(Struct):
    name: str
    value: str | None
    source: str


class TopicConfigData(Struct, kw_only=True):
    kind: Literal["KafkaTopicConfig"] = "KafkaTopicConfig"
    metadata: Metadata
    cluster_id: str
    topic_name: str
    name: str
    value: str | None
    is_default: bool
    is_read_only: bool = False
    is_sensitive: bool = False
    source: str
    synonyms: list[Synonym]


class TopicConfigList(Struct, kw_only=True):
    kind: Literal["KafkaTopicConfigList"] = "KafkaTopicConfigList"
    metadata: ListMetadata
    data: list[TopicConfigData]


class BrokerConfigList(Struct, kw_only=True):
    """List of broker settings. It is always empty: a server's settings are its command-line options."""

    kind: Literal["KafkaBrokerConfigList", "KafkaClusterConfigList"]
    metadata: ListMetadata
    data: Annotated[list[Any], Meta(max_length=0)] = []


class ConfigValue(Struct):
    value: str | None = None


class ConfigChange(Struct):
    name: str
    value: str | None = None
    operation: Literal["SET", "DELETE"] | None = None


class ConfigChanges(Struct):
    data: list[ConfigChange]
    validate_only: bool = False


# ---------------------------------------------------------------- groups


class GroupData(Struct, kw_only=True):
    kind: Literal["KafkaConsumerGroup"] = "KafkaConsumerGroup"
    metadata: Metadata
    cluster_id: str
    consumer_group_id: str
    is_simple: bool
    partition_assignor: str
    state: Literal["STABLE", "PREPARING_REBALANCE", "EMPTY"]
    type: Literal["CLASSIC"] = "CLASSIC"
    is_mixed_consumer_group: bool = False
    coordinator: Related
    consumers: Related
    lag_summary: Related


class GroupList(Struct, kw_only=True):
    kind: Literal["KafkaConsumerGroupList"] = "KafkaConsumerGroupList"
    metadata: ListMetadata
    data: list[GroupData]


class ConsumerData(Struct, kw_only=True):
    kind: Literal["KafkaConsumer"] = "KafkaConsumer"
    metadata: Metadata
    cluster_id: str
    consumer_group_id: str
    consumer_id: str
    instance_id: str | None
    client_id: str
    assignments: Related


class ConsumerList(Struct, kw_only=True):
    kind: Literal["KafkaConsumerList"] = "KafkaConsumerList"
    metadata: ListMetadata
    data: list[ConsumerData]


class AssignmentData(Struct, kw_only=True):
    kind: Literal["KafkaConsumerAssignment"] = "KafkaConsumerAssignment"
    metadata: Metadata
    cluster_id: str
    consumer_group_id: str
    consumer_id: str
    topic_name: str
    partition_id: int
    partition: Related
    lag: Related


class AssignmentList(Struct, kw_only=True):
    kind: Literal["KafkaConsumerAssignmentList"] = "KafkaConsumerAssignmentList"
    metadata: ListMetadata
    data: list[AssignmentData]


class LagData(Struct, kw_only=True):
    kind: Literal["KafkaConsumerLag"] = "KafkaConsumerLag"
    metadata: Metadata
    cluster_id: str
    consumer_group_id: str
    topic_name: str
    partition_id: int
    current_offset: int
    log_end_offset: int
    lag: int
    consumer_id: str
    instance_id: str | None
    client_id: str


class LagList(Struct, kw_only=True):
    kind: Literal["KafkaConsumerLagList"] = "KafkaConsumerLagList"
    metadata: ListMetadata
    data: list[LagData]


class LagSummary(Struct, kw_only=True):
    kind: Literal["KafkaConsumerGroupLagSummary"] = "KafkaConsumerGroupLagSummary"
    metadata: Metadata
    cluster_id: str
    consumer_group_id: str
    max_lag_consumer_id: str
    max_lag_instance_id: str | None
    max_lag_client_id: str
    max_lag_topic_name: str
    max_lag_partition_id: int
    max_lag: int
    total_lag: int
    max_lag_consumer: Related
    max_lag_partition: Related


# ---------------------------------------------------------------- rules of access

_Resource = Literal["TOPIC", "GROUP", "CLUSTER", "TRANSACTIONAL_ID"]
_Operation = Literal[
    "ALL", "READ", "WRITE", "CREATE", "DELETE", "ALTER", "DESCRIBE", "CLUSTER_ACTION", "DESCRIBE_CONFIGS",
    "ALTER_CONFIGS", "IDEMPOTENT_WRITE",
]  # fmt: skip


class NewAcl(Struct):
    resource_type: _Resource
    resource_name: str
    pattern_type: Literal["LITERAL", "PREFIXED"]
    principal: str
    host: str
    operation: _Operation
    permission: Literal["ALLOW", "DENY"]


class NewAcls(Struct):
    data: list[NewAcl]


class AclData(Struct, kw_only=True):
    kind: Literal["KafkaAcl"] = "KafkaAcl"
    metadata: Metadata
    cluster_id: str
    resource_type: str
    resource_name: str
    pattern_type: str
    principal: str
    host: str
    operation: str
    permission: str


class AclList(Struct, kw_only=True):
    kind: Literal["KafkaAclList"] = "KafkaAclList"
    metadata: ListMetadata
    data: list[AclData]


class DeletedAcls(Struct):
    data: list[AclData]


class AclQuery(Struct):
    resource_type: _Resource | Literal["ANY"] = "ANY"
    resource_name: str | None = None
    pattern_type: Literal["ANY", "MATCH", "LITERAL", "PREFIXED"] = "ANY"
    principal: str | None = None
    host: str | None = None
    operation: _Operation | Literal["ANY"] = "ANY"
    permission: Literal["ANY", "ALLOW", "DENY"] = "ANY"
