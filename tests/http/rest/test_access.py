"""Access rules of the REST API: the same rules as in the Kafka server, and consumer instances that belong to one
user."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from doors import Client

from segmentlog.http.accounts import Accounts
from segmentlog.http.context import HttpContext
from segmentlog.http.rest import consumer_instances
from segmentlog.http.settings import HttpSettings
from segmentlog.security.acl_rules import Permission, Rule, RuleFilter
from segmentlog.security.acls import Authorizer
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.users import Users, add_user
from segmentlog.store import LogStore

JSON = {"content-type": "application/vnd.kafka.json.v2+json"}


@pytest.fixture
def guarded(store: LogStore, tmp_path: Path) -> Any:
    """Provide a client with users ann (everything on `a` and group `g`), bob (may read `a`) and eve (no rights)."""
    path = str(tmp_path / "users.json")
    for name in ("ann", "bob", "eve"):
        add_user(path, name, "pw", iterations=4096)
    (tmp_path / "acls").write_text("")
    authorizer = Authorizer(str(tmp_path / "acls"))
    for who, operation, kind, what in (
        ("ann", Operation.ALL, ResourceType.TOPIC, "a"), ("ann", Operation.ALL, ResourceType.GROUP, "g"),
        ("bob", Operation.READ, ResourceType.TOPIC, "a"), ("bob", Operation.READ, ResourceType.GROUP, "g"),
    ):  # fmt: skip
        authorizer.add([Rule(f"User:{who}", Permission.ALLOW, operation, kind, what)])
    store.create_topic("a").partition(0).append([b"1"])
    store.create_topic("b").partition(0).append([b"2"])
    with Client(HttpContext(store, HttpSettings(allow_writes=True), authorizer), Accounts(Users(path))) as client:
        yield client


def by(name: str, **headers: str) -> dict[str, str]:
    """Return the headers of a user."""
    return {"authorization": "Basic " + base64.b64encode(f"{name}:pw".encode()).decode(), **headers}


def test_topics_that_one_may_see(guarded: Client) -> None:
    """Hidden topics are not listed, and requests for them get 403 with the proxy's code."""
    assert guarded.get("/topics", headers=by("ann")).json() == ["a"]
    assert guarded.get("/topics", headers=by("eve")).json() == []
    for path in ("/topics/b", "/topics/b/partitions", "/topics/b/partitions/0/offsets"):
        answer = guarded.get(path, headers=by("ann"))
        assert (answer.status_code, answer.json()["error_code"]) == (403, 40301)
    assert guarded.get("/topics").status_code == 401


def test_reading_and_writing(guarded: Client) -> None:
    """Reading, appending and streaming require the right on the topic."""
    body = {"records": [{"value": 1}]}
    for who, topic, write, read in (
        ("ann", "a", 200, 200),
        ("bob", "a", 403, 200),
        ("eve", "a", 403, 403),
        ("ann", "b", 403, 403),
    ):
        headers = by(who, **JSON)
        assert guarded.post(f"/topics/{topic}", json=body, headers=headers).status_code == write
        lines = guarded.post(
            f"/topics/{topic}/records", content=b"x", headers=by(who, **{"content-type": "text/plain"})
        )
        assert lines.status_code == write
        assert guarded.get(f"/topics/{topic}/partitions/0/records", headers=by(who)).status_code == read
        if read == 403:
            assert guarded.get(f"/topics/{topic}/stream", headers=by(who)).status_code == 403


def test_consumers_are_their_owners(guarded: Client) -> None:
    """Users cannot reach instances of other users, even in the same group, and names of instances do not clash."""
    body, instance = {"content-type": "application/vnd.kafka.v2+json"}, "/consumers/g/instances/n"

    def post(who: str, path: str, document: Any) -> int:
        return guarded.post(path, json=document, headers=by(who, **body)).status_code

    def subscription(who: str) -> Any:
        return guarded.get(f"{instance}/subscription", headers=by(who)).json()

    made = {"name": "n", "format": "json"}
    assert [post(who, "/consumers/g", made) for who in ("ann", "bob", "eve")] == [200, 200, 403]
    assert post("ann", f"{instance}/subscription", {"topics": ["a"]}) == 204
    assert post("ann", f"{instance}/subscription", {"topics": ["b"]}) == 403
    assert subscription("ann") == {"topics": ["a"]}
    assert subscription("bob") == {"topics": []}
    assert guarded.delete(instance, headers=by("bob")).status_code == 204
    assert subscription("bob")["error_code"] == 40403
    assert post("ann", f"{instance}/subscription", {"topic_pattern": ".*"}) == 204
    assert subscription("ann") == {"topics": ["a"]}
    assert guarded.delete(instance, headers=by("ann")).status_code == 204


@pytest.mark.parametrize("how", ["subscription", "topic_pattern", "assignments"])
def test_reading_ends_with_the_right_to_it(guarded: Client, how: str) -> None:
    """An instance stops returning records once its owner may no longer read the topic, and skips none."""
    body, instance = {"content-type": "application/vnd.kafka.v2+json"}, "/consumers/g/instances/n"
    authorizer, store = guarded.context.authorizer, guarded.context.store
    assert isinstance(authorizer, Authorizer)
    rule = Rule("User:bob", Permission.ALLOW, Operation.READ, ResourceType.TOPIC, "a")
    wanted: dict[str, Any] = {
        "subscription": {"topics": ["a"]},
        "topic_pattern": {"topic_pattern": ".*"},
        "assignments": {"partitions": [{"topic": "a", "partition": 0}]},
    }[how]
    path = "assignments" if how == "assignments" else "subscription"
    made = {"name": "n", "format": "json", "auto.offset.reset": "earliest"}
    assert guarded.post("/consumers/g", json=made, headers=by("bob", **body)).status_code == 200
    assert guarded.post(f"{instance}/{path}", json=wanted, headers=by("bob", **body)).status_code == 204

    def read() -> Any:
        answer = guarded.get(f"{instance}/records?timeout=50", headers=by("bob", accept=JSON["content-type"]))
        return [one["value"] for one in answer.json()] if answer.status_code == 200 else answer.json()["error_code"]

    assert read() == [1]
    store.topic("a").partition(0).append([b"2"])
    wanted_rule = RuleFilter(rule.resource_type, "a", rule.pattern, rule.principal, None, rule.operation, 1)
    assert authorizer.remove([wanted_rule]) == [rule]
    assert read() == ([] if how == "topic_pattern" else 40301)
    authorizer.add([rule])
    if how != "topic_pattern":  # a pattern is matched once a second only
        assert read() == [2]
    assert guarded.delete(instance, headers=by("bob")).status_code == 204


@pytest.mark.parametrize("path", ["/topics/a/records", "/v3/clusters/{}/topics/a/records"])
def test_writing_ends_with_the_right_to_it(guarded: Client, path: str) -> None:
    """A long request appends no further record once the right is revoked."""
    authorizer, store = guarded.context.authorizer, guarded.context.store
    assert isinstance(authorizer, Authorizer)
    rule = Rule("User:eve", Permission.ALLOW, Operation.WRITE, ResourceType.TOPIC, "a")
    authorizer.add([rule, Rule("User:eve", Permission.ALLOW, Operation.DESCRIBE, ResourceType.TOPIC, "a")])
    wanted = RuleFilter(rule.resource_type, "a", rule.pattern, rule.principal, None, rule.operation, 1)
    end = store.topic("a").partition(0).log_end_offset

    async def pieces() -> AsyncIterator[bytes]:
        assert authorizer.remove([wanted]) == [rule]
        yield b'{"value":{"type":"JSON","data":1}}'

    cluster = guarded.get("/v3/clusters", headers=by("ann")).json()["data"][0]["cluster_id"]
    kind = "application/json" if path.startswith("/v3") else "text/plain"
    answer = guarded.post(path.format(cluster), content=pieces(), headers=by("eve", **{"content-type": kind}))
    assert answer.json()["error_code"] in (403, 40301), answer.text
    assert store.topic("a").partition(0).log_end_offset == end


def test_assignments_of_hidden_topics(guarded: Client) -> None:
    """Assignments of a visible group list only topics that the user may see."""
    store, authorizer = guarded.context.store, guarded.context.authorizer
    assert isinstance(authorizer, Authorizer)
    authorizer.add([Rule("User:eve", Permission.ALLOW, Operation.DESCRIBE, ResourceType.GROUP, "g")])
    with store.consumer("a", "b", group="g") as consumer:
        consumer.poll_group(1.0)
        (member,) = store.groups.describe("g").members
        cluster = "/v3/clusters/" + guarded.get("/v3/clusters", headers=by("ann")).json()["data"][0]["cluster_id"]
        below = f"{cluster}/consumer-groups/g/consumers/{member.id}/assignments"
        for who, topics in (("ann", ["a"]), ("eve", [])):
            data = guarded.get(below, headers=by(who)).json()["data"]
            assert [one["topic_name"] for one in data] == topics
            assert guarded.get(f"{below}/b/partitions/0", headers=by(who)).status_code == 404
        assert guarded.get(f"{below}/a/partitions/0", headers=by("ann")).status_code == 200


def test_a_store_that_cannot_be_written(store: LogStore) -> None:
    """Every append to a read-only store gets 403 for the whole request, not an error for each record."""
    store.create_topic("t")
    cluster = "/v3/clusters/{}/topics/t"
    with (
        LogStore(store.path, read_only=True) as reading,
        Client(HttpContext(reading, HttpSettings(allow_writes=True))) as one,
    ):
        topic = cluster.format(one.get("/v3/clusters").json()["data"][0]["cluster_id"])
        record = {"value": {"type": "JSON", "data": 1}}
        for path, document, content_type in (
            ("/topics/t", {"records": [{"value": 1}]}, JSON["content-type"]),
            ("/topics/t/partitions/0", {"records": [{"value": 1}]}, JSON["content-type"]),
            (f"{topic}/records", record, "application/json"),
            (f"{topic}/records:batch", {"entries": [{"id": "1", **record}]}, "application/json"),
            ("/topics/t/records", 1, "application/x-ndjson"),
        ):
            answer = one.post(path, json=document, headers={"content-type": content_type})
            assert answer.status_code == 403, path
            assert answer.json()["error_code"] in (403, 40301), path


def test_nobody_takes_all_consumers(guarded: Client) -> None:
    """One user may have a quarter of all consumer instances."""

    def make(who: str) -> int:
        headers = by(who, **{"content-type": "application/vnd.kafka.v2+json"})
        answer = guarded.post("/consumers/g", json={}, headers=headers)
        made.append((who, answer.json().get("instance_id")))
        return answer.status_code

    made: list[tuple[str, str | None]] = []
    with mock.patch.object(consumer_instances, "INSTANCES_MAX", 8):
        assert [make("ann") for _ in range(3)] == [200, 200, 503]
        assert [make("bob") for _ in range(3)] == [200, 200, 503]
    for who, name in made:
        if name is not None:
            assert guarded.delete(f"/consumers/g/instances/{name}", headers=by(who)).status_code == 204


def test_administration(guarded: Client) -> None:
    """Topics can be created, changed and deleted, and groups listed, as the rules allow."""
    cluster = "/v3/clusters/" + guarded.get("/v3/clusters", headers=by("ann")).json()["data"][0]["cluster_id"]
    for who, status in (("bob", 403), ("ann", 204)):
        changes = {"data": [{"name": "retention.ms", "value": "5"}]}
        answer = guarded.post(f"{cluster}/topics/a/configs:alter", json=changes, headers=by(who))
        assert answer.status_code == status
    assert guarded.post(f"{cluster}/topics", json={"topic_name": "c"}, headers=by("ann")).status_code == 403
    assert guarded.delete(f"{cluster}/topics/b", headers=by("ann")).status_code == 403
    assert guarded.get(f"{cluster}/acls", headers=by("ann")).status_code == 403
    assert guarded.get(f"{cluster}/consumer-groups/other", headers=by("ann")).status_code == 403
    topic = guarded.get(f"{cluster}/topics/a?include_authorized_operations=true", headers=by("bob")).json()
    assert topic["authorized_operations"] == ["READ", "DESCRIBE"]


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/topics/a/records?ack=shipped", {"content": b"line\n", "headers": by("ann")}),
        ("/topics/a?ack=shipped", {"content": b'{"records":[{"value":1}]}', "headers": by("ann", **JSON)}),
    ],
)
def test_ack_shipped_is_refused_if_the_store_is_not_shipped(guarded: Client, path: str, sent: dict[str, Any]) -> None:
    """The request is refused before anything is appended, and the error says what to do."""
    before = guarded.context.store.topic("a").partition(0).log_end_offset
    answer = guarded.post(path, **sent)
    assert answer.status_code == 422, answer.text
    assert "this store is not shipped; nothing was appended" in answer.text
    assert guarded.context.store.topic("a").partition(0).log_end_offset == before
