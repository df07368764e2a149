"""kafka-topics.sh and kafka-configs.sh."""

from __future__ import annotations

import pytest
from ecosystem.tools.conftest import Command

from segmentlog.store import LogStore

pytestmark = pytest.mark.xdist_group("tools")
TOPICS, CONFIGS = "TopicCommand", "ConfigCommand"


def test_topics(do: Command, refuse: Command, store: LogStore) -> None:
    """Made, listed, described, given partitions, deleted; what one copy cannot do is refused, and why."""
    made = do(TOPICS, "--create", "--topic", "flights", "--partitions", 3, "--config", "retention.ms=3600000")
    assert made == "Created topic flights.\n"
    assert do(TOPICS, "--create", "--topic", "flights", "--if-not-exists") == ""
    assert "topic 'flights' exists already" in refuse(TOPICS, "--create", "--topic", "flights")
    said = refuse(TOPICS, "--create", "--topic", "more", "--replication-factor", 2)
    assert "replication factor 2 is not supported: a store has one copy" in said
    assert "Unknown topic config name: no" in refuse(TOPICS, "--create", "--topic", "more", "--config", "no=1")
    said = refuse(TOPICS, "--create", "--topic", "more", "--config", "max.message.bytes=2147483647")
    assert "max.message.bytes = '2147483647' is not valid: a size from 1B to 512MiB" in said
    assert do(TOPICS, "--list") == "flights\n"
    head, *rows = do(TOPICS, "--describe").splitlines()
    assert head.endswith("PartitionCount: 3\tReplicationFactor: 1\tConfigs: retention.ms=3600000")
    assert [row.split("\t")[2] for row in rows] == [f"Partition: {number}" for number in range(3)]
    assert do(TOPICS, "--describe", "--topics-with-overrides").splitlines() == [head]
    for nothing in ("--under-replicated-partitions", "--unavailable-partitions", "--under-min-isr-partitions",
                    "--at-min-isr-partitions"):  # fmt: skip
        out = do(TOPICS, "--describe", nothing)
        # One copy is the least there may be.
        assert len(out.splitlines()) == (3 if nothing == "--at-min-isr-partitions" else 0)
    assert do(TOPICS, "--alter", "--topic", "flights", "--partitions", 4) == ""
    said = refuse(TOPICS, "--alter", "--topic", "flights", "--partitions", 2)
    assert "it has 4 partitions; allowed are 5 to 100000" in said
    assert store.topic("flights").partition_count == 4
    assert "Topic 'none' does not exist as expected" in refuse(TOPICS, "--describe", "--topic", "none")
    assert do(TOPICS, "--delete", "--topic", "flights") == ""
    assert do(TOPICS, "--list").strip() == ""


def test_configurations_of_topics(do: Command, refuse: Command, store: LogStore) -> None:
    """Kafka's tool shows, sets and resets settings of topics, including those that only this server has."""
    store.create_topic("t", 1)
    assert do(CONFIGS, "--describe", "--topic", "t") == "Dynamic configs for topic t are:\n"
    said = do(CONFIGS, "--alter", "--topic", "t", "--add-config", "cleanup.policy=[compact,delete],fsync=always")
    assert said == "Completed updating config for topic t.\n"
    assert set(store.topic("t").config.cleanup_policy.split(",")) == {"compact", "delete"}
    told = do(CONFIGS, "--describe", "--topic", "t")
    assert "  cleanup.policy=compact,delete sensitive=false synonyms={DYNAMIC_TOPIC_CONFIG:cleanup.policy=" in told
    assert "  fsync=always " in told
    assert "  flush.messages=1 " in told
    do(CONFIGS, "--alter", "--topic", "t", "--delete-config", "cleanup.policy,fsync")
    assert do(CONFIGS, "--describe", "--topic", "t") == "Dynamic configs for topic t are:\n"
    every = do(CONFIGS, "--describe", "--topic", "t", "--all").splitlines()
    assert "  retention.ms=604800000 sensitive=false synonyms={DEFAULT_CONFIG:retention.ms=604800000}" in every
    said = refuse(CONFIGS, "--alter", "--topic", "t", "--add-config", "max.message.bytes=2147483647")
    assert "max.message.bytes = '2147483647' is not valid: a size from 1B to 512MiB" in said
    # As in Kafka: the key has no value, and will never have one.
    do(CONFIGS, "--alter", "--topic", "t", "--delete-config", "remote.log.copy.disable")
    do(CONFIGS, "--alter", "--topic", "t", "--add-config", "local.retention.ms=60000")
    assert store.topic("t").config.local_retention_ms == 60_000


def test_configurations_of_brokers(do: Command, refuse: Command) -> None:
    """The tools show them, and cannot change them: they come from the command line."""
    every = do(CONFIGS, "--describe", "--entity-type", "brokers", "--all")
    for number in (1, 2, 3):
        assert f"All configs for broker {number} are:\n" in every
        assert f"  broker.id={number} " in every
    assert every.endswith("Default configs for brokers in the cluster are:\n")
    changed = do(CONFIGS, "--describe", "--entity-type", "brokers").splitlines()
    assert [line for line in changed if line.startswith(" ")] == []
    where = "only topics and groups can be altered; set the server's settings on its command line"
    assert where in refuse(CONFIGS, "--alter", "--broker", 1, "--add-config", "log.cleaner.threads=2")
    assert where in refuse(CONFIGS, "--alter", "--broker-defaults", "--add-config", "log.cleaner.threads=2")


def test_configurations_of_groups(do: Command, refuse: Command) -> None:
    """Configurations of the consumer protocol can be set, shown and reset; other keys are refused."""
    group = ("--group", "g")
    do(CONFIGS, "--alter", *group, "--add-config", "consumer.session.timeout.ms=50000")
    assert "  consumer.session.timeout.ms=50000 " in do(CONFIGS, "--describe", *group)
    do(CONFIGS, "--alter", *group, "--delete-config", "consumer.session.timeout.ms")
    assert "consumer.session.timeout.ms" not in do(CONFIGS, "--describe", *group)
    assert "InvalidConfigurationException" in refuse(CONFIGS, "--alter", *group, "--add-config", "no.such=1")


def test_what_is_not_there(refuse: Command) -> None:
    """Quotas, users over the wire, telemetry of clients: the client finds the request missing, and says so."""
    for words, missing in (
        (("--describe", "--user", "alice"), "DESCRIBE_CLIENT_QUOTAS"),
        (("--alter", "--client", "c", "--add-config", "producer_byte_rate=1024"), "DESCRIBE_CLIENT_QUOTAS"),
        (("--alter", "--user", "alice", "--add-config", "SCRAM-SHA-256=[password=x]"), "ALTER_USER_SCRAM_CREDENTIALS"),
        (("--describe", "--entity-type", "ips"), "DESCRIBE_CLIENT_QUOTAS"),
        (("--describe", "--entity-type", "client-metrics"), "LIST_CONFIG_RESOURCES"),
    ):
        assert f"UnsupportedVersionException: The node does not support {missing}" in refuse(CONFIGS, *words)
