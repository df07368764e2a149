"""A store whose objects have recognisable names, and users with one right each.

`SECRETS` says by which bytes each kind of object is recognised in an answer. `USERS` says which kinds a user may see; a
user that gets any other kind has found a leak.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from leftovers import opened
from logs import NoSyncFileSystem

from segmentlog.records import TopicPartition
from segmentlog.schemas import AvroSerializer
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.security.acls import Authorizer
from segmentlog.security.principals import Principal
from segmentlog.store import LogStore

TOPIC, CONFIG, VALUE, GROUP, NAME, SCHEMA = "topic", "config", "value", "group", "name", "schema"
_VALUE = b"hidden-value"
SECRETS: dict[str, tuple[bytes, ...]] = {
    TOPIC: (b"hidden-topic",),
    CONFIG: (b"123456789", b"1d10h17m36s789ms"),
    VALUE: (_VALUE, base64.b64encode(_VALUE)),
    GROUP: (b"hidden-group",),
    NAME: (b"hidden-producer", b"hidden-txn"),
    SCHEMA: (b"hidden_field", b"hidden-subject"),
}
"""By kind: topic, its configuration, its records, group, transactional id or producer's name, schema."""
SCHEMA_TEXT = '{"type":"record","name":"R","fields":[{"name":"hidden_field","type":"string"}]}'
EVERYTHING = frozenset(SECRETS)


class User(NamedTuple):
    """The rules of one user, and the kinds of objects that it may see."""

    rules: tuple[str, ...]
    sees: frozenset[str] = frozenset()
    over_kafka: frozenset[str] = frozenset()
    """Kinds that Kafka's protocol shows in addition, and HTTP does not."""


def _may(rule: str, *sees: str, over_kafka: Iterable[str] = ()) -> User:
    return User((f"allow {{}} {rule}",), frozenset(sees), frozenset(over_kafka))


USERS: dict[str, User] = {
    "nobody": User(()),
    "super": User(("super {}",), EVERYTHING),
    "topic-describe": _may("describe topic:*", TOPIC),
    # Schemas are in the topic _schemas.
    "topic-read": _may("read topic:*", TOPIC, VALUE, SCHEMA),
    "topic-write": _may("write topic:*", TOPIC),
    "topic-create": _may("create topic:*"),
    "topic-delete": _may("delete topic:*", TOPIC),
    "topic-alter": _may("alter topic:*", TOPIC),
    # Lists of configurations name the topics.
    "topic-describe-configs": _may("describe-configs topic:*", TOPIC, CONFIG),
    "topic-alter-configs": _may("alter-configs topic:*", TOPIC, CONFIG),
    "topic-all": _may("all topic:*", TOPIC, CONFIG, VALUE, SCHEMA),
    "group-describe": _may("describe group:*", GROUP),
    "group-read": _may("read group:*", GROUP),
    "group-delete": _may("delete group:*", GROUP),
    "group-describe-configs": _may("describe-configs group:*"),
    "group-alter-configs": _may("alter-configs group:*"),
    "name-describe": _may("describe transactional-id:*", NAME),
    "name-write": _may("write transactional-id:*", NAME),
    # As in Kafka, ListGroups returns all groups to a user that may describe the cluster.
    "cluster-describe": _may("describe cluster", over_kafka=[GROUP]),
    "cluster-alter": _may("alter cluster", over_kafka=[GROUP]),
    "cluster-create": _may("create cluster"),
    "cluster-action": _may("cluster-action cluster"),
    "cluster-describe-configs": _may("describe-configs cluster"),
    "cluster-alter-configs": _may("alter-configs cluster"),
    "cluster-idempotent-write": _may("idempotent-write cluster"),
    "open-describe": _may("describe topic:open"),
    "open-read": _may("read topic:open", VALUE),
    "open-all": _may("all topic:open", VALUE, CONFIG),
    "open-things": User(
        ("allow {} read,write topic:open", "allow {} read group:open-group", "allow {} read group:rest-group",
         "allow {} write transactional-id:open-txn", "deny {} describe-configs topic:open"),
        frozenset((VALUE,)),
    ),
    "open-all-and-cluster": User(
        ("allow {} all topic:open", "allow {} all cluster", "allow {} all group:open-group"),
        frozenset((VALUE, CONFIG)), frozenset((GROUP,)),
    ),
}  # fmt: skip


def principal(name: str) -> Principal:
    """Return the principal of a user."""
    return Principal("User", name)


_TOPICS = ("open", "hidden-topic")


def fill(folder: Path) -> None:
    """Create the store below a folder, and the file of rules."""
    rules = [rule.format(principal(name)) for name, user in USERS.items() for rule in user.rules]
    (folder / "acls").write_text("\n".join(rules) + "\n")
    with LogStore(folder / "store", background=False, fs=NoSyncFileSystem()) as store:
        for topic in _TOPICS:
            store.create_topic(topic, 2, {"retention.ms": 123_456_789})
        with store.producer(serializer=AvroSerializer(store.schemas, SCHEMA_TEXT)) as encoding:
            encoding.send("open", {"hidden_field": "x"}, partition=0).result()
        store.schemas.register("hidden-subject", Draft(SCHEMA_TEXT))
        for topic in _TOPICS:
            for partition in (0, 1):
                store.open_partition(topic, partition).append([_VALUE])
        for name in ("hidden-producer", "open-producer"):
            with store.producer(name=name) as producer, producer.transaction():
                for topic in _TOPICS:
                    producer.send(topic, _VALUE, partition=0)
        transactions = store.transactions.server_transactions
        for name in ("hidden-txn", "open-txn"):
            numbers = transactions.register(name, 600_000)
            transactions.add_partitions(name, numbers, [store.open_partition(topic, 0) for topic in _TOPICS])
        for group in ("hidden-group", "open-group"):
            store.groups.reset(group, {TopicPartition(topic, 0): 1 for topic in _TOPICS})


class World:
    """The open store that `fill` created below a folder; one of its groups has a member."""

    def __init__(self, folder: Path) -> None:
        self.store = store = opened(LogStore(folder / "store", background=False, fs=NoSyncFileSystem()))
        self.authorizer = Authorizer(str(folder / "acls"))
        self.schema_id = store.schemas.version("open-value", "latest").id
        self.member = store.consumer(*_TOPICS, group="open-group")
        next(self.member.batches())
        self.member_id = store.groups.describe("open-group").members[0].id

    def close(self) -> None:
        """Close the store."""
        self.member.close()
        self.store.close()


def shown(answer: bytes) -> set[str]:
    """Return the kinds of objects that an answer shows."""
    return {kind for kind, marks in SECRETS.items() if any(mark in answer for mark in marks)}
