"""What version 3 answers."""

from __future__ import annotations

from typing import Any, Final

from segmentlog.http.rest import media
from segmentlog.http.rest.endpoints import NOTHING, Endpoint, Gives, Handler
from segmentlog.http.rest.faults import v3_problem
from segmentlog.http.rest.v2.words import ProduceQuery
from segmentlog.http.rest.v3 import acls, clusters, configs, groups, produce, record_words, topics, words

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
    takes = () if body is None else (media.JSON,)
    return Endpoint(
        method=method, path=path, handle=handle, summary=summary, tag=f"{tag} (v3)", body=body, takes=takes,
        gives=gives if isinstance(gives, dict) else {200: Gives(gives)},
        problems=(404, 406) if body is None else (404, 406, 415, 422), problem_of=v3_problem, **more,
    )  # fmt: skip


ENDPOINTS: Final = (
    _endpoint("POST", f"{_TOPIC}/records", produce.produce, "Append records, one after the other", "Records",
              record_words.Produced, record_words.NewRecord, query=ProduceQuery),
    _endpoint("POST", f"{_TOPIC}/records:batch", produce.produce_batch, "Append a batch of records", "Records",
              {207: Gives(record_words.ProducedEntries)}, record_words.Entries, query=ProduceQuery),
    _endpoint("GET", "/v3/clusters", clusters.list_clusters, "The one cluster", "Cluster", words.ClusterList),
    _endpoint("GET", _CLUSTER, clusters.get_cluster, "The cluster", "Cluster", words.Cluster),
    _endpoint("GET", f"{_CLUSTER}/brokers", clusters.list_brokers, "The one broker", "Broker", words.BrokerList),
    _endpoint("GET", f"{_CLUSTER}/broker-configs", clusters.list_broker_configs, "Settings of the cluster: none",
              "Broker", words.BrokerConfigList),
    _endpoint("GET", _BROKER, clusters.get_broker, "The broker", "Broker", words.Broker),
    _endpoint("GET", f"{_BROKER}/configs", clusters.list_broker_configs, "Settings of the broker: none", "Broker",
              words.BrokerConfigList),
    _endpoint("GET", f"{_BROKER}/partition-replicas", topics.list_broker_replicas, "The copies that it has", "Broker",
              words.ReplicaList),
    # ---- topics
    _endpoint("GET", _TOPICS, topics.list_topics, "Topics", "Topic", words.TopicList, query=words.TopicQuery),
    _endpoint("POST", _TOPICS, topics.create_topic, "Make a topic", "Topic",
              {200: Gives(words.Topic, what="With `validate_only`: it could be made."), 201: Gives(words.Topic)},
              words.NewTopic),
    _endpoint("GET", f"{_TOPICS}/-/configs", configs.list_all_configs, "Configurations of all topics", "Configs",
              words.TopicConfigList),
    _endpoint("GET", f"{_TOPICS}/-/partitions/-/reassignment", topics.list_reassignments, "Moves of copies: none",
              "Partition", words.ReassignmentList),
    _endpoint("GET", _TOPIC, topics.get_topic, "A topic", "Topic", words.Topic, query=words.TopicQuery),
    _endpoint("PATCH", _TOPIC, topics.grow_topic, "Add partitions", "Topic", words.Topic, words.PartitionCount),
    _endpoint("DELETE", _TOPIC, topics.delete_topic, "Delete a topic with its records", "Topic", _DONE),
    _endpoint("GET", f"{_TOPIC}/configs", configs.list_configs, "A topic's configuration", "Configs",
              words.TopicConfigList),
    _endpoint("POST", f"{_TOPIC}/configs:alter", configs.alter_configs, "Change several keys at once", "Configs", _DONE,
              words.ConfigChanges),
    _endpoint("GET", f"{_TOPIC}/configs/{{name}}", configs.get_config, "One key", "Configs", words.TopicConfig),
    _endpoint("PUT", f"{_TOPIC}/configs/{{name}}", configs.set_config, "Set a key", "Configs", _DONE,
              words.ConfigValue),
    _endpoint("DELETE", f"{_TOPIC}/configs/{{name}}", configs.reset_config, "A key back to its default", "Configs",
              _DONE),
    _endpoint("GET", f"{_TOPIC}/partitions", topics.list_partitions, "A topic's partitions", "Partition",
              words.PartitionList),
    _endpoint("GET", f"{_TOPIC}/partitions/-/reassignment", topics.list_reassignments, "Moves of copies: none",
              "Partition", words.ReassignmentList),
    _endpoint("GET", _PARTITION, topics.get_partition, "A partition", "Partition", words.Partition),
    _endpoint("GET", f"{_PARTITION}/offset", topics.get_offsets, "Where it begins and ends", "Partition",
              words.PartitionOffsets),
    _endpoint("GET", f"{_PARTITION}/replicas", topics.list_replicas, "Its one copy", "Replica", words.ReplicaList),
    _endpoint("GET", f"{_PARTITION}/replicas/{{broker_id}}", topics.get_replica, "Its one copy", "Replica",
              words.Replica),
    # ---- groups
    _endpoint("GET", f"{_CLUSTER}/consumer-groups", groups.list_groups, "Groups", "Consumer Group", words.GroupList),
    _endpoint("GET", _GROUP, groups.get_group, "A group", "Consumer Group", words.Group),
    _endpoint("GET", f"{_GROUP}/consumers", groups.list_consumers, "Its members", "Consumer Group",
              words.ConsumerList),
    _endpoint("GET", f"{_GROUP}/lag-summary", groups.get_lag_summary, "How far it is behind", "Consumer Group",
              words.LagSummary),
    _endpoint("GET", f"{_GROUP}/lags", groups.list_lags, "How far it is behind, by partition", "Consumer Group",
              words.LagList),
    _endpoint("GET", f"{_GROUP}/lags/{{topic_name}}/partitions/{{partition_id}}", groups.get_lag,
              "How far it is behind in a partition", "Consumer Group", words.Lag),
    _endpoint("GET", _MEMBER, groups.get_consumer, "A member", "Consumer Group", words.Consumer),
    _endpoint("GET", f"{_MEMBER}/assignments", groups.list_assignments, "What a member reads", "Consumer Group",
              words.AssignmentList),
    _endpoint("GET", f"{_MEMBER}/assignments/{{topic_name}}/partitions/{{partition_id}}", groups.get_assignment,
              "A partition that a member reads", "Consumer Group", words.Assignment),
    # ---- rules of access
    _endpoint("GET", f"{_CLUSTER}/acls", acls.list_acls, "Rules of access", "ACL", words.AclList,
              query=words.AclQuery),
    _endpoint("POST", f"{_CLUSTER}/acls", acls.create_acl, "Add a rule", "ACL", {201: _CREATED}, words.NewAcl),
    _endpoint("DELETE", f"{_CLUSTER}/acls", acls.delete_acls, "Delete rules", "ACL", words.DeletedAcls,
              query=words.AclQuery),
    _endpoint("POST", f"{_CLUSTER}/acls:batch", acls.create_acls, "Add rules", "ACL", {201: _CREATED}, words.NewAcls),
)  # fmt: skip
