"""Requests of tools about a cluster: its workers, and many features that this server lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ecosystem.kafka.programs import Ran, Tools
from ecosystem.tools.conftest import Command
from server.clients.served import Served

import segmentlog
from segmentlog.store import LogStore

pytestmark = pytest.mark.xdist_group("tools")
REASSIGN = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"
SHARE = "org.apache.kafka.tools.consumer.group.ShareGroupCommand"
STREAMS = "org.apache.kafka.tools.streams.StreamsGroupCommand"


def test_workers(do: Command, served: Served) -> None:
    """Each worker is a broker, with the same cluster id and the same requests."""
    (cluster,) = do("ClusterTool", "cluster-id").splitlines()
    assert cluster.startswith("Cluster ID: ")
    rows = [line.split() for line in do("ClusterTool", "list-endpoints").splitlines()[1:]]
    assert [(row[0], row[-2], row[-1]) for row in rows] == [(str(one), "unfenced", "broker") for one in (1, 2, 3)]
    versions = do("BrokerApiVersionsCommand")
    assert versions.count("\tProduce(0): 0 to 13 [usable: 13],") == 3
    assert versions.count("\tElectLeaders(43): UNSUPPORTED,") == 3
    said = do("ClusterTool", "unregister", "--id", 1)
    assert said == "The target cluster does not support the broker unregistration API.\n"


def test_features(do: Command, refuse: Command) -> None:
    """The server has one feature, which gives each transaction an epoch; features cannot be changed."""
    told = do("FeatureCommand", "describe").splitlines()
    assert [line.split()[1] for line in told] == ["transaction.version"]
    assert "FinalizedVersionLevel: 2" in told[0]
    for way in ("upgrade", "downgrade"):
        said = refuse("FeatureCommand", way, "--feature", "transaction.version=1")
        assert f"Could not {way} transaction.version to 1. The node does not support UPDATE_FEATURES" in said
    assert "metadata.version=" in do("FeatureCommand", "version-mapping")


def test_sizes(do: Command, store: LogStore) -> None:
    """Each partition is listed once, at the worker that leads it, with its size."""
    store.create_topic("t", 4)
    do("ConsoleProducer", "--topic", "t", stdin="value\n")
    *_, line = do("LogDirsCommand", "--describe", "--topic-list", "t").splitlines()
    found = {}
    for broker in json.loads(line)["brokers"]:
        (folder,) = broker["logDirs"]
        assert folder["logDir"] == store.path
        for one in folder["partitions"]:
            assert one["partition"] not in found
            found[one["partition"]] = one["size"]
    assert sorted(found) == [f"t-{number}" for number in range(4)]
    assert sum(size > 0 for size in found.values()) == 1


def test_moves(do: Command, refuse: Command, store: LogStore, tmp_path: Path) -> None:
    """Partitions cannot be moved: a plan is created, and reported as done or not, but cannot be carried out."""
    store.create_topic("t", 1)
    topics, plan = tmp_path / "topics.json", tmp_path / "plan.json"
    topics.write_text('{"topics":[{"topic":"t"}],"version":1}')
    told = do(REASSIGN, "--generate", "--topics-to-move-json-file", topics, "--broker-list", "1,2,3").splitlines()
    now = json.loads(told[1])
    (where,) = now["partitions"][0]["replicas"]
    plan.write_text(told[1])
    said = do(REASSIGN, "--verify", "--reassignment-json-file", plan)
    assert "Reassignment of partition t-0 is completed." in said
    now["partitions"][0]["replicas"] = [where % 3 + 1]
    plan.write_text(json.dumps(now))
    said = refuse(REASSIGN, "--execute", "--reassignment-json-file", plan)
    assert "t-0: The node does not support ALTER_PARTITION_REASSIGNMENTS" in said
    said = do(REASSIGN, "--verify", "--reassignment-json-file", plan)
    assert f"There is no active reassignment of partition t-0, but replica set is {where} rather than " in said
    assert do(REASSIGN, "--list") == "No partition reassignments found.\n"
    assert "None of the specified partition reassignments are active." in do(
        REASSIGN, "--cancel", "--reassignment-json-file", plan
    )


def test_what_is_not_there(ask: Callable[..., Ran], store: LogStore) -> None:
    """The client finds the request missing, and says so."""
    store.create_topic("t", 1)
    to_earliest = ("--reset-offsets", "--group", "s", "--topic", "t", "--to-earliest", "--execute")
    for main, words, missing in (
        ("LeaderElectionCommand", ("--election-type", "preferred", "--all-topic-partitions"), "ELECT_LEADERS"),
        ("LeaderElectionCommand", ("--election-type", "unclean", "--topic", "t", "--partition", 0), "ELECT_LEADERS"),
        ("MetadataQuorumCommand", ("describe", "--status"), "DESCRIBE_QUORUM"),
        ("MetadataQuorumCommand", ("describe", "--replication"), "DESCRIBE_QUORUM"),
        ("ClientMetricsCommand", ("--list",), "LIST_CONFIG_RESOURCES"),
        ("ClientMetricsCommand", ("--describe", "--name", "m"), "LIST_CONFIG_RESOURCES"),
        (SHARE, to_earliest, "SHARE_GROUP_DESCRIBE"),
        (SHARE, ("--describe", "--group", "s"), "SHARE_GROUP_DESCRIBE"),
        (STREAMS, ("--describe", "--group", "s"), "STREAMS_GROUP_DESCRIBE"),
    ):
        ran = ask(main, *words)
        assert f"The node does not support {missing}" in ran.said
        # For a share group, the tool ends as if it had succeeded, as it does with Kafka.
        assert ran.status == (0 if main == SHARE and "--describe" in words else 1)


def test_other_groups(do: Command) -> None:
    """The server has no share groups and no groups of Streams tasks."""
    for main in (SHARE, STREAMS):
        assert do(main, "--list").strip() == ""
    said = do(SHARE, "--delete", "--group", "s")
    assert "Group 's' is not a share group" in said


def test_rules_are_made(tools: Tools, tmp_path: Path) -> None:
    """Told, made and removed in the file that was given."""
    rules = tmp_path / "acls"
    rules.write_text("super User:ANONYMOUS\n")
    rule = ("--allow-principal", "User:ann", "--operation", "read", "--topic", "flights")
    with segmentlog.serve(tmp_path / "other", port=0, acls=str(rules)) as server:
        where = ("--bootstrap-server", server.bootstrap_servers)
        assert tools.run("AclCommand", *where, "--add", *rule).status == 0
        assert "allow User:ann read topic:flights" in rules.read_text()
        said = tools.run("AclCommand", *where, "--list", "--topic", "flights").out
        assert "(principal=User:ann, host=*, operation=READ, permissionType=ALLOW)" in said
        assert tools.run("AclCommand", *where, "--remove", "--force", *rule).status == 0
        assert "User:ann" not in rules.read_text()


def test_rules(refuse: Command) -> None:
    """Without --acls everything is allowed, and rules can be neither listed nor created."""
    disabled = "SecurityDisabledException: No Authorizer is configured: segmentlog serve --acls FILE"
    assert disabled in refuse("AclCommand", "--list")
    rule = ("--allow-principal", "User:a", "--operation", "read", "--topic", "t")
    assert disabled in refuse("AclCommand", "--add", *rule)
    assert disabled in refuse("AclCommand", "--remove", "--force", *rule)


def test_what_cannot_be_altered(refuse: Command, tmp_path: Path) -> None:
    """Clients send no telemetry, and tokens do not authenticate."""
    said = refuse("ClientMetricsCommand", "--alter", "--name", "m", "--interval", 1000)
    assert "only topics and groups can be altered; set the server's settings on its command line" in said
    config = tmp_path / "admin.properties"
    config.write_text("")
    said = refuse("DelegationTokenCommand", "--command-config", config, "--describe")
    assert "The node does not support DESCRIBE_DELEGATION_TOKEN" in said


def test_streams_can_be_reset(do: Command, store: LogStore) -> None:
    """Positions in input topics go back, internal topics are deleted, others are not."""
    store.create_topic("input", 1)
    store.create_topic("app-counts-changelog", 1)
    do("ConsoleProducer", "--topic", "input", stdin="one\ntwo\n")
    options = ("--application-id", "app", "--input-topics", "input")
    said = do("StreamsResetter", *options, "--to-latest")
    assert "Topic: input Partition: 0 Offset: 2" in said
    assert "Deleting inferred internal topics [app-counts-changelog]" in said
    assert store.topics() == ["input"]
    assert "Topic: input Partition: 0 Offset: 0" in do("StreamsResetter", *options)
