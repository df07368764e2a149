"""What version 3 answers."""

from __future__ import annotations

from typing import Any, Final

from segmentlog.http.rest import media_types
from segmentlog.http.rest.endpoint_table import NOTHING, Endpoint, Gives, Handler
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
_DONE: Final = {204: NOTHING}
_CREATED: Final = Gives(media=(), what="Made.")


def _endpoint(
    method: str, path: str, handle: Handler, summary: str, tag: str, gives: Any, body: Any = None, **more: Any
) -> Endpoint:
    """``gives``: a type, or what it gives by status."""
    takes = () if body is None else (media_types.JSON,)
    return Endpoint(
        method=method, path=path, handle=handle, summary=summary, tag=f"{tag} (v3)", body=body, takes=takes,
        gives=gives if isinstance(gives, dict) else {200: Gives(gives)},
        problems=(404, 406) if body is None else (404, 406, 415, 422), problem_of=v3_problem, **more,
    )  # fmt: skip


ENDPOINTS: Final = (
    _endpoint("POST", f"{_TOPIC}/records", v3_produce.produce, "Append records, one after the other", "Records",
              record_models.Produced, record_models.NewRecord, query=ProduceQuery),
    _endpoint("POST", f"{_TOPIC}/records:batch", v3_produce.produce_batch, "Append a batch of records", "Records",
              {207: Gives(record_models.ProducedEntries)}, record_models.Entries, query=ProduceQuery),
    _endpoint("GET", "/v3/clusters", v3_clusters.list_clusters, "The one cluster", "Cluster", v3_models.ClusterList),
    _endpoint("GET", _CLUSTER, v3_clusters.get_cluster, "The cluster", "Cluster", v3_models.Cluster),
    _endpoint("GET", f"{_CLUSTER}/brokers", v3_clusters.list_brokers, "The one broker", "Broker", v3_models.BrokerList),
    _endpoint("GET", f"{_CLUSTER}/broker-configs", v3_clusters.list_broker_configs, "Settings of the cluster: none",
              "Broker", v3_models.BrokerConfigList),
    _endpoint("GET", _BROKER, v3_clusters.get_broker, "The broker", "Broker", v3_models.Broker),
    _endpoint("GET", f"{_BROKER}/configs", v3_clusters.list_broker_configs, "Settings of the broker: none", "Broker",
              v3_models.BrokerConfigList),
    _endpoint("GET", f"{_BROKER}/partition-replicas", v3_topics.list_broker_replicas, "The copies that it has",
              "Broker",
              v3_models.ReplicaList),
    # ---- topics
    _endpoint("GET", _TOPICS, v3_topics.list_topics, "Topics", "Topic", v3_models.TopicList,
              query=v3_models.TopicQuery),
    _endpoint("POST", _TOPICS, v3_topics.create_topic, "Make a topic", "Topic",
              {200: Gives(v3_models.Topic, what="With `validate_only`: it could be made."),
              201: Gives(v3_models.Topic)},
              v3_models.NewTopic),
    _endpoint("GET", f"{_TOPICS}/-/configs", v3_configs.list_all_configs, "Configurations of all topics", "Configs",
              v3_models.TopicConfigList),
    _endpoint("GET", f"{_TOPICS}/-/partitions/-/reassignment", v3_topics.list_reassignments, "Moves of copies: none",
              "Partition", v3_models.ReassignmentList),
    _endpoint("GET", _TOPIC, v3_topics.get_topic, "A topic", "Topic", v3_models.Topic, query=v3_models.TopicQuery),
    _endpoint("PATCH", _TOPIC, v3_topics.grow_topic, "Add partitions", "Topic", v3_models.Topic,
              v3_models.PartitionCount),
    _endpoint("DELETE", _TOPIC, v3_topics.delete_topic, "Delete a topic with its records", "Topic", _DONE),
    _endpoint("GET", f"{_TOPIC}/configs", v3_configs.list_configs, "A topic's configuration", "Configs",
              v3_models.TopicConfigList),
    _endpoint("POST", f"{_TOPIC}/configs:alter", v3_configs.alter_configs, "Change several keys at once", "Configs",
              _DONE,
              v3_models.ConfigChanges),
    _endpoint("GET", f"{_TOPIC}/configs/{{name}}", v3_configs.get_config, "One key", "Configs", v3_models.TopicConfig),
    _endpoint("PUT", f"{_TOPIC}/configs/{{name}}", v3_configs.set_config, "Set a key", "Configs", _DONE,
              v3_models.ConfigValue),
    _endpoint("DELETE", f"{_TOPIC}/configs/{{name}}", v3_configs.reset_config, "A key back to its default", "Configs",
              _DONE),
    _endpoint("GET", f"{_TOPIC}/partitions", v3_topics.list_partitions, "A topic's partitions", "Partition",
              v3_models.PartitionList),
    _endpoint("GET", f"{_TOPIC}/partitions/-/reassignment", v3_topics.list_reassignments, "Moves of copies: none",
              "Partition", v3_models.ReassignmentList),
    _endpoint("GET", _PARTITION, v3_topics.get_partition, "A partition", "Partition", v3_models.Partition),
    _endpoint("GET", f"{_PARTITION}/offset", v3_topics.get_offsets, "Where it begins and ends", "Partition",
              v3_models.PartitionOffsets),
    _endpoint("GET", f"{_PARTITION}/replicas", v3_topics.list_replicas, "Its one copy", "Replica",
              v3_models.ReplicaList),
    _endpoint("GET", f"{_PARTITION}/replicas/{{broker_id}}", v3_topics.get_replica, "Its one copy", "Replica",
              v3_models.Replica),
    # ---- groups
    _endpoint("GET", f"{_CLUSTER}/consumer-groups", v3_groups.list_groups, "Groups", "Consumer Group",
              v3_models.GroupList),
    _endpoint("GET", _GROUP, v3_groups.get_group, "A group", "Consumer Group", v3_models.Group),
    _endpoint("GET", f"{_GROUP}/consumers", v3_groups.list_consumers, "Its members", "Consumer Group",
              v3_models.ConsumerList),
    _endpoint("GET", f"{_GROUP}/lag-summary", v3_groups.get_lag_summary, "How far it is behind", "Consumer Group",
              v3_models.LagSummary),
    _endpoint("GET", f"{_GROUP}/lags", v3_groups.list_lags, "How far it is behind, by partition", "Consumer Group",
              v3_models.LagList),
    _endpoint("GET", f"{_GROUP}/lags/{{topic_name}}/partitions/{{partition_id}}", v3_groups.get_lag,
              "How far it is behind in a partition", "Consumer Group", v3_models.Lag),
    _endpoint("GET", _MEMBER, v3_groups.get_consumer, "A member", "Consumer Group", v3_models.Consumer),
    _endpoint("GET", f"{_MEMBER}/assignments", v3_groups.list_assignments, "What a member reads", "Consumer Group",
              v3_models.AssignmentList),
    _endpoint("GET", f"{_MEMBER}/assignments/{{topic_name}}/partitions/{{partition_id}}", v3_groups.get_assignment,
              "A partition that a member reads", "Consumer Group", v3_models.Assignment),
    # ---- rules of access
    _endpoint("GET", f"{_CLUSTER}/acls", v3_acls.list_acls, "Rules of access", "ACL", v3_models.AclList,
              query=v3_models.AclQuery),
    _endpoint("POST", f"{_CLUSTER}/acls", v3_acls.create_acl, "Add a rule", "ACL", {201: _CREATED}, v3_models.NewAcl),
    _endpoint("DELETE", f"{_CLUSTER}/acls", v3_acls.delete_acls, "Delete rules", "ACL", v3_models.DeletedAcls,
              query=v3_models.AclQuery),
    _endpoint("POST", f"{_CLUSTER}/acls:batch", v3_acls.create_acls, "Add rules", "ACL", {201: _CREATED},
              v3_models.NewAcls),
)  # fmt: skip
