"""Table of the REST v3 endpoints."""

from __future__ import annotations

from typing import Any, Final

from segmentlog.http.rest import media_types
from segmentlog.http.rest.endpoint_table import NO_CONTENT, Endpoint, Handler, ResponseSpec
from segmentlog.http.rest.rest_error_codes import v3_problem
from segmentlog.http.rest.v2.v2_models import ProduceQuery
from segmentlog.http.rest.v3 import (
    record_models,
    v3_acls,
    v3_clusters,
    v3_configs,
    v3_groups,
    v3_models,
    v3_produce,
    v3_topics,
)

_CLUSTER: Final = "/v3/clusters/{cluster_id}"
_BROKER: Final = f"{_CLUSTER}/brokers/{{broker_id}}"
_TOPICS: Final = f"{_CLUSTER}/topics"
_TOPIC: Final = f"{_TOPICS}/{{topic_name}}"
_PARTITION: Final = f"{_TOPIC}/partitions/{{partition_id}}"
_GROUP: Final = f"{_CLUSTER}/consumer-groups/{{consumer_group_id}}"
_MEMBER: Final = f"{_GROUP}/consumers/{{consumer_id}}"
_DONE: Final = {204: NO_CONTENT}
_CREATED: Final = ResponseSpec(media=(), description="Created.")


def _endpoint(
    method: str, path: str, handle: Handler, summary: str, tag: str, responses: Any, body: Any = None, **more: Any
) -> Endpoint:
    """Return an entry of the endpoint table. ``responses`` is the type for status 200, or specifications by status."""
    accepts = () if body is None else (media_types.JSON,)
    return Endpoint(
        method=method, path=path, handle=handle, summary=summary, tag=f"{tag} (v3)", body=body, accepts=accepts,
        responses=responses if isinstance(responses, dict) else {200: ResponseSpec(responses)},
        problems=(404, 406) if body is None else (404, 406, 415, 422), problem_of=v3_problem, **more,
    )  # fmt: skip


ENDPOINTS: Final = (
    _endpoint("POST", f"{_TOPIC}/records", v3_produce.produce, "Append a stream of records", "Records",
              record_models.ProduceResponse, record_models.NewRecord, query=ProduceQuery),
    _endpoint("POST", f"{_TOPIC}/records:batch", v3_produce.produce_batch, "Append a batch of records", "Records",
              {207: ResponseSpec(record_models.ProduceBatchResponse)}, record_models.BatchEntries, query=ProduceQuery),
    _endpoint("GET", "/v3/clusters", v3_clusters.list_clusters, "List the single cluster", "Cluster",
              v3_models.ClusterList),
    _endpoint("GET", _CLUSTER, v3_clusters.get_cluster, "Describe the cluster", "Cluster", v3_models.ClusterData),
    _endpoint("GET", f"{_CLUSTER}/brokers", v3_clusters.list_brokers, "List the single broker", "Broker",
              v3_models.BrokerList),
    _endpoint("GET", f"{_CLUSTER}/broker-configs", v3_clusters.list_broker_configs,
              "List settings of the cluster (none)",
              "Broker", v3_models.BrokerConfigList),
    _endpoint("GET", _BROKER, v3_clusters.get_broker, "Describe the broker", "Broker", v3_models.BrokerData),
    _endpoint("GET", f"{_BROKER}/configs", v3_clusters.list_broker_configs, "List settings of the broker (none)",
              "Broker",
              v3_models.BrokerConfigList),
    _endpoint("GET", f"{_BROKER}/partition-replicas", v3_topics.list_broker_replicas, "List the replicas of the broker",
              "Broker",
              v3_models.ReplicaList),
    # ---- topics
    _endpoint("GET", _TOPICS, v3_topics.list_topics, "List topics", "Topic", v3_models.TopicList,
              query=v3_models.TopicQuery),
    _endpoint("POST", _TOPICS, v3_topics.create_topic, "Create a topic", "Topic",
              {200: ResponseSpec(v3_models.TopicData, description="With `validate_only`: the topic could be created."),
              201: ResponseSpec(v3_models.TopicData)},
              v3_models.NewTopic),
    _endpoint("GET", f"{_TOPICS}/-/configs", v3_configs.list_all_configs, "List configurations of all topics",
              "Configs",
              v3_models.TopicConfigList),
    _endpoint("GET", f"{_TOPICS}/-/partitions/-/reassignment", v3_topics.list_reassignments,
              "List partition reassignments (none)",
              "Partition", v3_models.ReassignmentList),
    _endpoint("GET", _TOPIC, v3_topics.get_topic, "Describe a topic", "Topic", v3_models.TopicData,
              query=v3_models.TopicQuery),
    _endpoint("PATCH", _TOPIC, v3_topics.grow_topic, "Add partitions", "Topic", v3_models.TopicData,
              v3_models.PartitionCount),
    _endpoint("DELETE", _TOPIC, v3_topics.delete_topic, "Delete a topic with its records", "Topic", _DONE),
    _endpoint("GET", f"{_TOPIC}/configs", v3_configs.list_configs, "List the configuration of a topic", "Configs",
              v3_models.TopicConfigList),
    _endpoint("POST", f"{_TOPIC}/configs:alter", v3_configs.alter_configs, "Change several configuration keys",
              "Configs",
              _DONE,
              v3_models.ConfigChanges),
    _endpoint("GET", f"{_TOPIC}/configs/{{name}}", v3_configs.get_config, "Return a configuration key", "Configs",
              v3_models.TopicConfigData),
    _endpoint("PUT", f"{_TOPIC}/configs/{{name}}", v3_configs.set_config, "Set a configuration key", "Configs", _DONE,
              v3_models.ConfigValue),
    _endpoint("DELETE", f"{_TOPIC}/configs/{{name}}", v3_configs.reset_config,
              "Reset a configuration key to its default", "Configs",
              _DONE),
    _endpoint("GET", f"{_TOPIC}/partitions", v3_topics.list_partitions, "List the partitions of a topic", "Partition",
              v3_models.PartitionList),
    _endpoint("GET", f"{_TOPIC}/partitions/-/reassignment", v3_topics.list_reassignments,
              "List partition reassignments (none)",
              "Partition", v3_models.ReassignmentList),
    _endpoint("GET", _PARTITION, v3_topics.get_partition, "Describe a partition", "Partition", v3_models.PartitionData),
    _endpoint("GET", f"{_PARTITION}/offset", v3_topics.get_offsets, "Return the start and end offset of a partition",
              "Partition",
              v3_models.PartitionOffsets),
    _endpoint("GET", f"{_PARTITION}/replicas", v3_topics.list_replicas, "List the single replica", "Replica",
              v3_models.ReplicaList),
    _endpoint("GET", f"{_PARTITION}/replicas/{{broker_id}}", v3_topics.get_replica, "Describe the single replica",
              "Replica",
              v3_models.ReplicaData),
    # ---- groups
    _endpoint("GET", f"{_CLUSTER}/consumer-groups", v3_groups.list_groups, "List groups", "Consumer Group",
              v3_models.GroupList),
    _endpoint("GET", _GROUP, v3_groups.get_group, "Describe a group", "Consumer Group", v3_models.GroupData),
    _endpoint("GET", f"{_GROUP}/consumers", v3_groups.list_consumers, "List the members of a group", "Consumer Group",
              v3_models.ConsumerList),
    _endpoint("GET", f"{_GROUP}/lag-summary", v3_groups.get_lag_summary, "Return the total lag of a group",
              "Consumer Group",
              v3_models.LagSummary),
    _endpoint("GET", f"{_GROUP}/lags", v3_groups.list_lags, "List the lag of a group by partition", "Consumer Group",
              v3_models.LagList),
    _endpoint("GET", f"{_GROUP}/lags/{{topic_name}}/partitions/{{partition_id}}", v3_groups.get_lag,
              "Return the lag of a partition", "Consumer Group", v3_models.LagData),
    _endpoint("GET", _MEMBER, v3_groups.get_consumer, "Describe a member", "Consumer Group", v3_models.ConsumerData),
    _endpoint("GET", f"{_MEMBER}/assignments", v3_groups.list_assignments, "List the partitions of a member",
              "Consumer Group",
              v3_models.AssignmentList),
    _endpoint("GET", f"{_MEMBER}/assignments/{{topic_name}}/partitions/{{partition_id}}", v3_groups.get_assignment,
              "Describe a partition of a member", "Consumer Group", v3_models.AssignmentData),
    # ---- rules of access
    _endpoint("GET", f"{_CLUSTER}/acls", v3_acls.list_acls, "List ACLs", "ACL", v3_models.AclList,
              query=v3_models.AclQuery),
    _endpoint("POST", f"{_CLUSTER}/acls", v3_acls.create_acl, "Add an ACL", "ACL", {201: _CREATED}, v3_models.NewAcl),
    _endpoint("DELETE", f"{_CLUSTER}/acls", v3_acls.delete_acls, "Delete ACLs", "ACL", v3_models.DeletedAcls,
              query=v3_models.AclQuery),
    _endpoint("POST", f"{_CLUSTER}/acls:batch", v3_acls.create_acls, "Add several ACLs", "ACL", {201: _CREATED},
              v3_models.NewAcls),
)  # fmt: skip
